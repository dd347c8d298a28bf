/* Plain operations that work row by row: embedding, RMS norm, RoPE, residual, writing KV pages.
 *
 * Called on the thread of the caller, which does all the work; the stream is not looked at. */
#include "kernels/ref/ref.h"

void dmk_ref_embed(const struct dmk_embed_args *a, struct dmk_stream *stream)
{
    (void)stream;
    for (uint32_t t = 0; t < a->n_rows; t++) {
        memcpy(a->x + (size_t)t * a->hidden, a->table + (size_t)a->ids[t] * a->hidden,
               a->hidden * sizeof(uint16_t));
    }
}

void dmk_ref_rmsnorm(const struct dmk_rmsnorm_args *a, struct dmk_stream *stream)
{
    (void)stream;
    for (uint32_t t = 0; t < a->n_rows; t++) {
        const uint16_t *x = a->x + (size_t)(a->rows ? a->rows[t] : t) * a->hidden;
        uint16_t *y = a->y + (size_t)t * a->hidden;
        float r = 1.0f / sqrtf(dmk_ref_dot(x, x, a->hidden) / (float)a->hidden + a->eps);
        for (uint32_t i = 0; i < a->hidden; i++) {
            float scaled = (dmk_bf16_to_f32(x[i]) * r) * dmk_bf16_to_f32(a->scale[i]);
            y[i] = dmk_f32_to_bf16(scaled);
        }
    }
}

void dmk_ref_rope(const struct dmk_rope_args *a, struct dmk_stream *stream)
{
    (void)stream;
    const uint32_t half = DMK_KERNEL_HEAD_DIM / 2;
    for (uint32_t t = 0; t < a->n_rows; t++) {
        const float *cos_sin = a->table + (size_t)a->positions[t] * half * 2;
        for (uint32_t h = 0; h < a->n_heads; h++) {
            uint16_t *x = a->x + ((size_t)t * a->n_heads + h) * DMK_KERNEL_HEAD_DIM;
            for (uint32_t i = 0; i < half; i++) {
                float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
                float lo = dmk_bf16_to_f32(x[i]), hi = dmk_bf16_to_f32(x[i + half]);
                x[i] = dmk_f32_to_bf16(lo * c - hi * s);
                x[i + half] = dmk_f32_to_bf16(hi * c + lo * s);
            }
        }
    }
}

void dmk_ref_kv_write(const struct dmk_kv_write_args *a, struct dmk_stream *stream)
{
    (void)stream;
    const size_t row_bytes = DMK_KERNEL_HEAD_DIM * sizeof(uint16_t);
    for (uint32_t t = 0; t < a->n_rows; t++) {
        if (a->row_page[t] == DMK_NONE) {
            continue;
        }
        for (uint32_t h = 0; h < a->n_heads; h++) {
            size_t from = ((size_t)t * a->n_heads + h) * DMK_KERNEL_HEAD_DIM;
            uint8_t *page = a->pages + ((size_t)h * a->n_pages + a->row_page[t]) * a->page_bytes;
            uint8_t *k = page + a->row_slot[t] * row_bytes;
            memcpy(k, a->k + from, row_bytes);
            memcpy(k + DMK_KERNEL_PAGE * row_bytes, a->v + from, row_bytes);
        }
    }
}

void dmk_ref_residual(const struct dmk_residual_args *a, struct dmk_stream *stream)
{
    (void)stream;
    for (uint32_t t = 0; t < a->n_rows; t++) {
        for (uint32_t i = 0; i < a->hidden; i++) {
            size_t at = (size_t)t * a->hidden + i;
            float sum = a->bias ? a->sum[at] + dmk_bf16_to_f32(a->bias[i]) : a->sum[at];
            float rounded = dmk_bf16_to_f32(dmk_f32_to_bf16(sum));
            a->x[at] = dmk_f32_to_bf16(dmk_bf16_to_f32(a->x[at]) + rounded);
        }
    }
}
