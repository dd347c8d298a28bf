/* The dense matrix product, over items of BLOCK_ROWS rows and a share of the tokens. */
#pragma once

#include "kernels/cpu/dot_tmpl.h"

struct linear_task {
    const struct dmk_linear_args *a;
    uint32_t n_row_blocks, n_token_blocks;
};

/* values [n_w][step] of tokens t0 .. t0 + n_t - 1 go to their rows of y. */
static void linear_store(const struct dmk_linear_args *a, const float *values, uint32_t step,
                         uint32_t row0, uint32_t n_w, uint32_t t0, uint32_t n_t)
{
    for (uint32_t t = 0; t < n_t; t++) {
        size_t at = (t0 + t) * a->y_stride + row0;
        float y[BLOCK_ROWS];
        for (uint32_t r = 0; r < n_w; r++) {
            y[r] = values[r * step + t];
        }
        if (a->bias) {
            for (uint32_t r = 0; r < n_w; r++) {
                y[r] += dmk_bf16_to_f32(a->bias[row0 + r]);
            }
        }
        if (a->y_f32) {
            memcpy(a->y_f32 + at, y, n_w * sizeof(float));
        } else {
            for (uint32_t r = 0; r < n_w; r++) {
                a->y_bf16[at + r] = dmk_f32_to_bf16(y[r]);
            }
        }
    }
}

static void linear_item(const void *args, uint32_t item, void *scratch)
{
    const struct linear_task *task = args;
    const struct dmk_linear_args *a = task->a;
    struct dot_scratch *s = scratch;
    uint32_t row0 = item % task->n_row_blocks * BLOCK_ROWS;
    uint32_t n_w = a->n_out - row0 < BLOCK_ROWS ? a->n_out - row0 : BLOCK_ROWS;
    uint64_t part = item / task->n_row_blocks; /* parts differ by one token at most */
    uint32_t t0 = (uint32_t)(a->n_rows * part / task->n_token_blocks);
    uint32_t t1 = (uint32_t)(a->n_rows * (part + 1) / task->n_token_blocks);
    const uint16_t *w = a->w + row0 * a->w_stride;
    if (a->n_rows <= FEW) {
        float *packed = (float *)(void *)s->rows;
        const uint16_t *x[FEW];
        for (uint32_t t = 0; t < a->n_rows; t++) {
            x[t] = a->x + t * a->x_stride;
        }
        pack_rows(x, a->n_rows, a->k * a->n_slices, packed);
        dot_rows_few(w, a->w_stride, n_w, packed, a->k, a->n_slices, a->n_rows, s->out);
        sum_slices(s->out, a->n_slices, n_w * a->n_rows);
        linear_store(a, s->out[0], a->n_rows, row0, n_w, 0, a->n_rows);
        return;
    }
    for (uint32_t t = t0, n_t; t < t1; t += n_t) {
        n_t = tile_tokens(t1 - t);
        for (uint32_t slice = 0; slice < a->n_slices; slice++) {
            const uint16_t *x[TILE_T];
            for (uint32_t i = 0; i < n_t; i++) {
                x[i] = a->x + (t + i) * a->x_stride + (size_t)slice * a->k;
            }
            dot_rows_tile(w + (size_t)slice * a->k, a->w_stride, n_w, x, a->k, n_t, s,
                          s->out[slice]);
        }
        sum_slices(s->out, a->n_slices, n_w * n_t);
        linear_store(a, s->out[0], n_t, row0, n_w, t, n_t);
    }
}

static void run_linear(const struct dmk_linear_args *a, struct dmk_stream *stream)
{
    struct linear_task task = {a, (a->n_out + BLOCK_ROWS - 1) / BLOCK_ROWS, 1};
    if (a->n_rows == 0 || a->n_out == 0) {
        return;
    }
    /* Few rows: share out the tokens too. */
    if (task.n_row_blocks < 8 * stream->n_threads && a->n_rows > 16 * TILE_T) {
        task.n_token_blocks = (a->n_rows + 16 * TILE_T - 1) / (16 * TILE_T);
    }
    stream->run(stream, linear_item, &task, task.n_row_blocks * task.n_token_blocks);
}
