/* The dense product in FP8, over items of BLOCK_ROWS rows of weights and a share of the tokens.
 *
 * A first pass makes codes and scales of all tokens. An item then spreads the codes of a tile of tokens in the
 * order in which the inner loop eats them, and decodes weights as it reads them: two rows side by side. Both
 * come out 2^8 too small, which the groups' scales make good; no sum comes near numbers that would round otherwise. */
#pragma once

#include "kernels/cpu/linear_tmpl.h"
#include "kernels/fp8.h"

#define ROWS8       2
#define GROUP8_MOST (DMK_FP8_BLOCK / DMK_K_BLOCK) /* blocks of a group */

struct linear8_task {
    const struct dmk_linear_fp8_args *a;
    struct dmk_linear_args out; /* where results go */
    uint32_t n_row_blocks, n_token_blocks;
};

static void quantise8_item(const void *args, uint32_t item, void *scratch)
{
    const struct dmk_linear_fp8_args *a = ((const struct linear8_task *)args)->a;
    const uint32_t n_groups = dmk_fp8_groups(a->k);
    const uint16_t *x = a->x + item * a->x_stride;
    uint8_t *codes = a->x_codes + (uint64_t)item * a->k * a->n_slices;
    float *scales = a->x_scales + (uint64_t)item * n_groups * a->n_slices;
    (void)scratch;
    for (uint32_t s = 0; s < a->n_slices; s++) {
        for (uint32_t at = 0; at < a->k; at += DMK_FP8_BLOCK) {
            const uint32_t n = a->k - at < DMK_FP8_BLOCK ? a->k - at : DMK_FP8_BLOCK;
            *scales++ = dmk_fp8_quantise(x, n, codes);
            x += n;
            codes += n;
        }
    }
}

/* Codes of n_t tokens, `stride` bytes apart, to packed [block][half][even, odd][token][VL]. */
static void pack8(const uint8_t *codes, uint64_t stride, uint32_t k, uint32_t n_t, float *packed)
{
    for (uint32_t at = 0; at < k; at += 2 * VL) {
        for (uint32_t t = 0; t < n_t; t++) {
            vf_store(packed + t * VL, vf_e4m3_even(codes + t * stride + at));
            vf_store(packed + (n_t + t) * VL, vf_e4m3_odd(codes + t * stride + at));
        }
        packed += 2 * n_t * VL;
    }
}

/* lanes [row][token][16] go on with a group of n_blocks; scale [row][token]. */
INLINE void dot8_group(const uint8_t *const w[ROWS8], const float *packed, uint32_t n_blocks,
                       const uint32_t n_t, const float scale[ROWS8][TILE_T], float *lanes)
{
    for (uint32_t h = 0; h < HALVES; h++) {
        vf acc[ROWS8][TILE_T];
        const float *x = packed + (size_t)h * 2 * n_t * VL;
#pragma GCC unroll 16
        for (uint32_t i = 0; i < ROWS8 * n_t; i++) {
            acc[i / n_t][i % n_t] = vf_zero();
        }
        for (uint32_t b = 0; b < n_blocks; b++) {
            const size_t at = (size_t)b * DMK_K_BLOCK + h * 2 * VL;
            vf wv[ROWS8];
#pragma GCC unroll 8
            for (uint32_t r = 0; r < ROWS8; r++) {
                wv[r] = vf_e4m3_even(w[r] + at);
            }
#pragma GCC unroll 8
            for (uint32_t t = 0; t < n_t; t++) {
                vf xv = vf_hold(vf_load(x + t * VL));
#pragma GCC unroll 8
                for (uint32_t r = 0; r < ROWS8; r++) {
                    acc[r][t] = vf_fma(wv[r], xv, acc[r][t]);
                }
            }
#pragma GCC unroll 8
            for (uint32_t r = 0; r < ROWS8; r++) {
                wv[r] = vf_e4m3_odd(w[r] + at);
            }
#pragma GCC unroll 8
            for (uint32_t t = 0; t < n_t; t++) {
                vf xv = vf_hold(vf_load(x + (n_t + t) * VL));
#pragma GCC unroll 8
                for (uint32_t r = 0; r < ROWS8; r++) {
                    acc[r][t] = vf_fma(wv[r], xv, acc[r][t]);
                }
            }
            x += (size_t)HALVES * 2 * n_t * VL;
        }
#pragma GCC unroll 16
        for (uint32_t i = 0; i < ROWS8 * n_t; i++) {
            float *to = lanes + i * DMK_LANES + h * VL;
            vf_store(to,
                     vf_fma(acc[i / n_t][i % n_t], vf_set1(scale[i / n_t][i % n_t]), vf_load(to)));
        }
    }
}

static void dot8_group_n(const uint8_t *const w[ROWS8], const float *packed, uint32_t n_blocks,
                         uint32_t n_t, const float scale[ROWS8][TILE_T], float *lanes)
{
    switch (n_t) {
    case 1:
        dot8_group(w, packed, n_blocks, 1, scale, lanes);
        break;
    case 2:
        dot8_group(w, packed, n_blocks, 2, scale, lanes);
        break;
    case 3:
        dot8_group(w, packed, n_blocks, 3, scale, lanes);
        break;
    case 4:
        dot8_group(w, packed, n_blocks, 4, scale, lanes);
        break;
    case 5:
        dot8_group(w, packed, n_blocks, 5, scale, lanes);
        break;
    default:
        dot8_group(w, packed, n_blocks, TILE_T, scale, lanes);
    }
}

/* out[slice][row][token] of the rows `row` and the one behind it (or again the last of n_w) and tokens t0 on. */
static void dot8_rows(const struct dmk_linear_fp8_args *a, const float *packed, uint32_t row0,
                      uint32_t row, uint32_t n_w, uint32_t t0, uint32_t n_t,
                      float (*out)[BLOCK_ROWS * TILE_T])
{
    const uint32_t n_groups = dmk_fp8_groups(a->k);
    const uint64_t groups = (uint64_t)n_groups * a->n_slices;
    const uint8_t *w[ROWS8];
    const float *w_scales[ROWS8];
    for (uint32_t r = 0; r < ROWS8; r++) {
        const uint32_t at = row0 + (row + r < n_w ? row + r : n_w - 1);
        w[r] = a->w + at * a->w_stride;
        w_scales[r] = a->w_scales + (a->first + at) / DMK_FP8_SCALE_ROWS * groups;
    }
    for (uint32_t s = 0; s < a->n_slices; s++) {
        _Alignas(64) float lanes[ROWS8 * TILE_T * DMK_LANES] = {0};
        for (uint32_t g = 0; g < n_groups; g++) {
            const uint32_t left = a->k / DMK_K_BLOCK - g * GROUP8_MOST;
            const uint32_t n_blocks = left < GROUP8_MOST ? left : GROUP8_MOST;
            const uint64_t at = (uint64_t)s * n_groups + g;
            float scale[ROWS8][TILE_T] = {0};
            for (uint32_t r = 0; r < ROWS8; r++) {
                for (uint32_t t = 0; t < n_t; t++) {
                    scale[r][t] = w_scales[r][at] * a->x_scales[(t0 + t) * groups + at] * 0x1p16f;
                }
            }
            dot8_group_n(w, packed, n_blocks, n_t, scale, lanes);
            packed += (size_t)n_blocks * DMK_K_BLOCK * n_t;
            for (uint32_t r = 0; r < ROWS8; r++) {
                w[r] += n_blocks * DMK_K_BLOCK;
            }
        }
        for (uint32_t i = 0; i < ROWS8 * n_t; i++) {
            out[s][row * n_t + i] = dmk_lanes_sum(lanes + (size_t)i * DMK_LANES);
        }
    }
}

static void linear8_item(const void *args, uint32_t item, void *scratch)
{
    const struct linear8_task *task = args;
    const struct dmk_linear_fp8_args *a = task->a;
    struct dot_scratch *s = scratch;
    const uint32_t row0 = item % task->n_row_blocks * BLOCK_ROWS;
    const uint32_t n_w = a->n_out - row0 < BLOCK_ROWS ? a->n_out - row0 : BLOCK_ROWS;
    const uint64_t part = item / task->n_row_blocks, k = (uint64_t)a->k * a->n_slices;
    const uint32_t t0 = (uint32_t)(a->n_rows * part / task->n_token_blocks);
    const uint32_t t1 = (uint32_t)(a->n_rows * (part + 1) / task->n_token_blocks);
    float *packed = (float *)(void *)s->rows;
    for (uint32_t t = t0, n_t; t < t1; t += n_t) {
        n_t = tile_tokens(t1 - t);
        pack8(a->x_codes + t * k, k, (uint32_t)k, n_t, packed);
        for (uint32_t row = 0; row < n_w; row += ROWS8) {
            dot8_rows(a, packed, row0, row, n_w, t, n_t, s->out);
        }
        sum_slices(s->out, a->n_slices, n_w * n_t);
        linear_store(&task->out, s->out[0], n_t, row0, n_w, t, n_t);
    }
}

static void run_linear_fp8(const struct dmk_linear_fp8_args *a, struct dmk_stream *stream)
{
    struct linear8_task task = {
        .a = a,
        .out = {.bias = a->bias, .y_bf16 = a->y_bf16, .y_f32 = a->y_f32, .y_stride = a->y_stride},
        .n_row_blocks = (a->n_out + BLOCK_ROWS - 1) / BLOCK_ROWS,
        .n_token_blocks = 1,
    };
    if (a->n_rows == 0 || a->n_out == 0) {
        return;
    }
    /* Few rows of weights: share out the tokens too. */
    if (task.n_row_blocks < 8 * stream->n_threads && a->n_rows > 16 * TILE_T) {
        task.n_token_blocks = (a->n_rows + 16 * TILE_T - 1) / (16 * TILE_T);
    }
    stream->run(stream, quantise8_item, &task, a->n_rows);
    stream->run(stream, linear8_item, &task, task.n_row_blocks * task.n_token_blocks);
}
