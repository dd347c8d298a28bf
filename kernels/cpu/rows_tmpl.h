/* Operations on rows of activations: plain loops that the compiler turns into vectors. An item is a few
 * rows, so that a single token stays on the caller's thread. */
#pragma once

#include "kernels/cpu/dot_tmpl.h"

#define ITEM_ROWS 8

static uint32_t n_row_items(uint32_t n_rows)
{
    return (n_rows + ITEM_ROWS - 1) / ITEM_ROWS;
}

static uint32_t item_end(uint32_t item, uint32_t n_rows)
{
    return (item + 1) * ITEM_ROWS < n_rows ? (item + 1) * ITEM_ROWS : n_rows;
}

static float sum_of_squares(const uint16_t *x, uint32_t n)
{
    float lanes[DMK_LANES];
    vf acc[HALVES];
    for (uint32_t h = 0; h < HALVES; h++) {
        acc[h] = vf_zero();
    }
    for (uint32_t at = 0; at < n; at += DMK_K_BLOCK) {
        for (uint32_t h = 0; h < HALVES; h++) {
            vf even = vf_even(x + at + h * 2 * VL), odd = vf_odd(x + at + h * 2 * VL);
            acc[h] = vf_fma(even, even, acc[h]);
            acc[h] = vf_fma(odd, odd, acc[h]);
        }
    }
    for (uint32_t h = 0; h < HALVES; h++) {
        vf_store(lanes + h * VL, acc[h]);
    }
    return dmk_lanes_sum(lanes);
}

static void rmsnorm_item(const void *args, uint32_t item, void *scratch)
{
    (void)scratch;
    const struct dmk_rmsnorm_args *a = args;
    for (uint32_t t = item * ITEM_ROWS; t < item_end(item, a->n_rows); t++) {
        const uint16_t *restrict x = a->x + (size_t)(a->rows ? a->rows[t] : t) * a->hidden;
        const uint16_t *restrict scale = a->scale;
        uint16_t *restrict y = a->y + (size_t)t * a->hidden;
        float r = 1.0f / sqrtf(sum_of_squares(x, a->hidden) / (float)a->hidden + a->eps);
        for (uint32_t i = 0; i < a->hidden; i++) {
            y[i] = dmk_f32_to_bf16((dmk_bf16_to_f32(x[i]) * r) * dmk_bf16_to_f32(scale[i]));
        }
    }
}

static void run_rmsnorm(const struct dmk_rmsnorm_args *a, struct dmk_stream *stream)
{
    stream->run(stream, rmsnorm_item, a, n_row_items(a->n_rows));
}

static void rope_item(const void *args, uint32_t item, void *scratch)
{
    (void)scratch;
    enum { HALF = DMK_KERNEL_HEAD_DIM / 2 };
    const struct dmk_rope_args *a = args;
    for (uint32_t t = item * ITEM_ROWS; t < item_end(item, a->n_rows); t++) {
        const float *table = a->table + (size_t)a->positions[t] * HALF * 2;
        float c[HALF], s[HALF];
        for (uint32_t i = 0; i < HALF; i++) {
            c[i] = table[2 * i];
            s[i] = table[2 * i + 1];
        }
        for (uint32_t h = 0; h < a->n_heads; h++) {
            uint16_t *x = a->x + ((size_t)t * a->n_heads + h) * DMK_KERNEL_HEAD_DIM;
            float lo[HALF], hi[HALF];
            for (uint32_t i = 0; i < HALF; i++) {
                lo[i] = dmk_bf16_to_f32(x[i]);
                hi[i] = dmk_bf16_to_f32(x[i + HALF]);
            }
            for (uint32_t i = 0; i < HALF; i++) {
                x[i] = dmk_f32_to_bf16(lo[i] * c[i] - hi[i] * s[i]);
                x[i + HALF] = dmk_f32_to_bf16(hi[i] * c[i] + lo[i] * s[i]);
            }
        }
    }
}

static void run_rope(const struct dmk_rope_args *a, struct dmk_stream *stream)
{
    stream->run(stream, rope_item, a, n_row_items(a->n_rows));
}

static void residual_item(const void *args, uint32_t item, void *scratch)
{
    (void)scratch;
    const struct dmk_residual_args *a = args;
    for (uint32_t t = item * ITEM_ROWS; t < item_end(item, a->n_rows); t++) {
        uint16_t *restrict x = a->x + (size_t)t * a->hidden;
        const float *restrict sum = a->sum + (size_t)t * a->hidden;
        const uint16_t *restrict bias = a->bias;
        for (uint32_t i = 0; bias && i < a->hidden; i++) {
            float o = dmk_bf16_to_f32(dmk_f32_to_bf16(sum[i] + dmk_bf16_to_f32(bias[i])));
            x[i] = dmk_f32_to_bf16(dmk_bf16_to_f32(x[i]) + o);
        }
        for (uint32_t i = 0; !bias && i < a->hidden; i++) {
            float o = dmk_bf16_to_f32(dmk_f32_to_bf16(sum[i]));
            x[i] = dmk_f32_to_bf16(dmk_bf16_to_f32(x[i]) + o);
        }
    }
}

static void run_residual(const struct dmk_residual_args *a, struct dmk_stream *stream)
{
    stream->run(stream, residual_item, a, n_row_items(a->n_rows));
}

/* out [hidden]; hidden is a multiple of 32. */
static void combine_row(const struct dmk_moe_combine_args *a, const uint32_t *slots, float *out)
{
    for (uint32_t i = 0; i < a->hidden; i += VL) {
        vf group[8];
        for (uint32_t g = 0; g < a->n_groups; g++) {
            group[g] = vf_zero();
        }
        for (uint32_t n = 0; n < a->k && slots[n] != DMK_NONE; n++) {
            uint32_t g = a->plan.slot_group[slots[n]];
            group[g] = vf_fma(vf_set1(a->plan.slot_weight[slots[n]]),
                              vf_load(a->y + (size_t)slots[n] * a->hidden + i), group[g]);
        }
        for (uint32_t width = a->n_groups; width > 1; width /= 2) {
            for (uint32_t g = 0; g < width / 2; g++) {
                group[g] = vf_add(group[2 * g], group[2 * g + 1]);
            }
        }
        vf_store(out + i, group[0]);
    }
}

static void combine_item(const void *args, uint32_t item, void *scratch)
{
    (void)scratch;
    const struct dmk_moe_combine_args *a = args;
    for (uint32_t t = item * ITEM_ROWS; t < item_end(item, a->n_rows); t++) {
        combine_row(a, a->plan.row_slots + (size_t)t * a->k, a->out + (size_t)t * a->hidden);
    }
}

static void run_combine(const struct dmk_moe_combine_args *a, struct dmk_stream *stream)
{
    stream->run(stream, combine_item, a, n_row_items(a->n_rows));
}
