/* Plain dot products of bf16 and MXFP4 rows, and the dense matrix products. */
#include "kernels/ref/ref.h"

#include "kernels/fp8.h"

float dmk_ref_dot(const uint16_t *w, const uint16_t *x, uint32_t k)
{
    float lane[DMK_LANES] = {0};
    for (uint32_t block = 0; block < k; block += DMK_K_BLOCK) {
        for (uint32_t l = 0; l < DMK_LANES; l++) {
            for (uint32_t i = block + 2 * l; i <= block + 2 * l + 1; i++) {
                lane[l] = fmaf(dmk_bf16_to_f32(w[i]), dmk_bf16_to_f32(x[i]), lane[l]);
            }
        }
    }
    return dmk_lanes_sum(lane);
}

float dmk_ref_dot_mxfp4(const uint8_t *blocks, const uint8_t *scales, const uint16_t *x, uint32_t k)
{
    float lane[DMK_LANES] = {0};
    for (uint32_t block = 0; block < k / DMK_MXFP4_BLOCK; block++) {
        float scale = dmk_ue8m0_to_f32(scales[block]);
        const uint8_t *pair = blocks + block * DMK_MXFP4_BLOCK_BYTES;
        const uint16_t *xb = x + block * DMK_MXFP4_BLOCK;
        for (uint32_t l = 0; l < DMK_LANES; l++) {
            float even = dmk_e2m1_to_f32(pair[l] & 15) * scale;
            float odd = dmk_e2m1_to_f32(pair[l] >> 4) * scale;
            lane[l] = fmaf(even, dmk_bf16_to_f32(xb[2 * l]), lane[l]);
            lane[l] = fmaf(odd, dmk_bf16_to_f32(xb[2 * l + 1]), lane[l]);
        }
    }
    return dmk_lanes_sum(lane);
}

/* The tree over the slices' sums. */
static float add_slices(float leaf[8], uint32_t n_slices)
{
    for (uint32_t width = n_slices; width > 1; width /= 2) {
        for (uint32_t s = 0; s < width / 2; s++) {
            leaf[s] = leaf[2 * s] + leaf[2 * s + 1];
        }
    }
    return leaf[0];
}

void dmk_ref_linear(const struct dmk_linear_args *a, struct dmk_stream *stream)
{
    (void)stream;
    for (uint32_t t = 0; t < a->n_rows; t++) {
        for (uint32_t n = 0; n < a->n_out; n++) {
            const uint16_t *w = a->w + n * a->w_stride;
            const uint16_t *x = a->x + t * a->x_stride;
            float leaf[8] = {0};
            for (uint32_t s = 0; s < a->n_slices; s++) {
                leaf[s] = dmk_ref_dot(w + (size_t)s * a->k, x + (size_t)s * a->k, a->k);
            }
            float y = add_slices(leaf, a->n_slices);
            y = a->bias ? y + dmk_bf16_to_f32(a->bias[n]) : y;
            if (a->y_bf16) {
                a->y_bf16[t * a->y_stride + n] = dmk_f32_to_bf16(y);
            } else {
                a->y_f32[t * a->y_stride + n] = y;
            }
        }
    }
}

/* Codes of w and x over k elements, and the scales of their groups. */
static float dot_fp8(const uint8_t *w, const float *w_scales, const uint8_t *x,
                     const float *x_scales, uint32_t k)
{
    float total[DMK_LANES] = {0};
    for (uint32_t group = 0; group < dmk_fp8_groups(k); group++) {
        const uint32_t first = group * DMK_FP8_BLOCK;
        const uint32_t end = k - first < DMK_FP8_BLOCK ? k : first + DMK_FP8_BLOCK;
        float lane[DMK_LANES] = {0};
        for (uint32_t i = first; i < end; i++) {
            const uint32_t l = i % DMK_K_BLOCK / 2;
            lane[l] = fmaf(dmk_e4m3_to_f32(w[i]), dmk_e4m3_to_f32(x[i]), lane[l]);
        }
        const float scale = w_scales[group] * x_scales[group];
        for (uint32_t l = 0; l < DMK_LANES; l++) {
            total[l] = fmaf(lane[l], scale, total[l]);
        }
    }
    return dmk_lanes_sum(total);
}

static void quantise_row(const struct dmk_linear_fp8_args *a, uint32_t row)
{
    const uint32_t n_groups = dmk_fp8_groups(a->k);
    const uint64_t k = (uint64_t)a->k * a->n_slices, groups = (uint64_t)n_groups * a->n_slices;
    for (uint32_t s = 0; s < a->n_slices; s++) {
        for (uint32_t g = 0; g < n_groups; g++) {
            const uint32_t at = g * DMK_FP8_BLOCK, left = a->k - at;
            const uint64_t col = (uint64_t)s * a->k + at;
            a->x_scales[row * groups + s * n_groups + g] = dmk_fp8_quantise(
                a->x + row * a->x_stride + col, left < DMK_FP8_BLOCK ? left : DMK_FP8_BLOCK,
                a->x_codes + row * k + col);
        }
    }
}

void dmk_ref_linear_fp8(const struct dmk_linear_fp8_args *a, struct dmk_stream *stream)
{
    const uint32_t n_groups = dmk_fp8_groups(a->k);
    const uint64_t k = (uint64_t)a->k * a->n_slices, groups = (uint64_t)n_groups * a->n_slices;
    (void)stream;
    for (uint32_t t = 0; t < a->n_rows; t++) {
        quantise_row(a, t);
        for (uint32_t n = 0; n < a->n_out; n++) {
            const float *w_scales = a->w_scales + (a->first + n) / DMK_FP8_SCALE_ROWS * groups;
            float leaf[8] = {0};
            for (uint32_t s = 0; s < a->n_slices; s++) {
                leaf[s] =
                    dot_fp8(a->w + n * a->w_stride + (size_t)s * a->k,
                            w_scales + (size_t)s * n_groups, a->x_codes + t * k + (size_t)s * a->k,
                            a->x_scales + t * groups + (size_t)s * n_groups, a->k);
            }
            float y = add_slices(leaf, a->n_slices);
            y = a->bias ? y + dmk_bf16_to_f32(a->bias[n]) : y;
            if (a->y_bf16) {
                a->y_bf16[t * a->y_stride + n] = dmk_f32_to_bf16(y);
            } else {
                a->y_f32[t * a->y_stride + n] = y;
            }
        }
    }
}
