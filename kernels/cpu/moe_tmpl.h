/* The experts: rows of one expert at a time, with all tokens that chose it.
 *
 * A few tokens: MXFP4 is unpacked in registers on its way into the sums. More: the rows of the item are
 * unpacked once to bf16 (exact) and then go through the same tiles as dense weights. */
#pragma once

#include "kernels/cpu/dot_tmpl.h"

#define MAX_EXPERTS 1024
#define SWIGLU_COLS (BLOCK_ROWS / 2 + VL - BLOCK_ROWS / 2 % VL) /* whole vectors */

struct moe_task {
    const struct dmk_expert_weights *w;
    const struct dmk_moe_plan *plan;
    const uint16_t *x;    /* rows of tokens */
    const uint32_t *rows; /* [slots] row of x for each slot, NULL: the slot itself */
    const struct dmk_moe_gate_up_args *gate_up; /* one of these two */
    const struct dmk_moe_down_args *down;
    uint32_t n_row_blocks;
    uint16_t experts[MAX_EXPERTS]; /* those that have tokens */
};

INLINE void mx_rows_few_t(const uint8_t *blocks, const uint8_t *scales, uint32_t n_w,
                          uint32_t n_blocks, const float *packed, const uint32_t n_t, float *out)
{
    const size_t row_bytes = (size_t)n_blocks * DMK_MXFP4_BLOCK_BYTES;
    for (uint32_t row = 0; row < n_w; row += 4) {
        _Alignas(64) float lanes[4 * FEW * DMK_LANES];
        const uint8_t *rows[4], *row_scales[4];
        for (uint32_t r = 0; r < 4; r++) {
            uint32_t at = row + r < n_w ? row + r : n_w - 1;
            rows[r] = blocks + at * row_bytes;
            row_scales[r] = scales + (size_t)at * n_blocks;
        }
        mx_dot4(rows, row_scales, packed, n_blocks, n_t, 4 * row_bytes, lanes);
        for (uint32_t t = 0; t < n_t; t++) {
            sum_lanes4(lanes + t * 4 * DMK_LANES, out + row * n_t + t * 4);
        }
    }
}

/* out[row][token] for n_w rows of MXFP4 and n_t <= FEW packed rows. */
static void mx_rows_few(const uint8_t *blocks, const uint8_t *scales, uint32_t n_w,
                        uint32_t n_blocks, const float *packed, uint32_t n_t, float *out)
{
    switch (n_t) {
    case 1:
        mx_rows_few_t(blocks, scales, n_w, n_blocks, packed, 1, out);
        break;
    case 2:
        mx_rows_few_t(blocks, scales, n_w, n_blocks, packed, 2, out);
        break;
#if FEW > 2
    case 3:
        mx_rows_few_t(blocks, scales, n_w, n_blocks, packed, 3, out);
        break;
#endif
    default:
        mx_rows_few_t(blocks, scales, n_w, n_blocks, packed, FEW, out);
    }
}

/* values [n_w][step] of one slot: rows 2j and 2j+1 become z[j]. */
static void swiglu_store(const struct dmk_moe_gate_up_args *a, const float *values, uint32_t step,
                         const uint16_t *bias, uint32_t n_w, uint16_t *z)
{
    float gate[SWIGLU_COLS] = {0}, up[SWIGLU_COLS] = {0};
    const vf limit = vf_set1(a->limit), low = vf_set1(-a->limit), one = vf_set1(1.0f);
    for (uint32_t j = 0; j < n_w / 2; j++) {
        gate[j] = values[2 * j * step] + dmk_bf16_to_f32(bias[2 * j]);
        up[j] = values[(2 * j + 1) * step] + dmk_bf16_to_f32(bias[2 * j + 1]);
    }
    for (uint32_t j = 0; j < n_w / 2; j += VL) {
        vf g = vf_min(limit, vf_load(gate + j));
        vf u = vf_max(low, vf_min(limit, vf_load(up + j)));
        vf turned = vf_mul(vf_set1(-1.0f), vf_mul(vf_set1(a->alpha), g));
        vf sigmoid = vf_div(one, vf_add(one, vf_exp(turned)));
        vf_store(gate + j, vf_mul(vf_mul(g, sigmoid), vf_add(u, one)));
    }
    for (uint32_t j = 0; j < n_w / 2; j++) {
        z[j] = dmk_f32_to_bf16(gate[j]);
    }
}

static void moe_store(const struct moe_task *task, uint32_t expert, uint32_t slot, uint32_t row0,
                      uint32_t n_w, const float *values, uint32_t step)
{
    const uint16_t *bias = task->w->bias + (size_t)expert * task->w->rows + row0;
    if (task->gate_up) {
        uint16_t *z = task->gate_up->z + (size_t)slot * (task->w->rows / 2) + row0 / 2;
        swiglu_store(task->gate_up, values, step, bias, n_w, z);
        return;
    }
    float *y = task->down->y + (size_t)slot * task->w->rows + row0;
    for (uint32_t r = 0; r < n_w; r++) {
        y[r] = values[r * step] + dmk_bf16_to_f32(bias[r]);
    }
}

static const uint16_t *slot_x(const struct moe_task *task, uint32_t slot)
{
    return task->x + (size_t)(task->rows ? task->rows[slot] : slot) * task->w->cols;
}

static void moe_item(const void *args, uint32_t item, void *scratch)
{
    const struct moe_task *task = args;
    const struct dmk_expert_weights *m = task->w;
    struct dot_scratch *s = scratch;
    uint32_t expert = task->experts[item / task->n_row_blocks];
    uint32_t row0 = item % task->n_row_blocks * BLOCK_ROWS;
    uint32_t n_w = m->rows - row0 < BLOCK_ROWS ? m->rows - row0 : BLOCK_ROWS;
    uint32_t first = task->plan->expert_begin[expert], end = task->plan->expert_begin[expert + 1];
    uint32_t n_blocks = m->cols / DMK_MXFP4_BLOCK;
    size_t row = (size_t)expert * m->rows + row0;
    bool mx = m->format == DMK_WEIGHT_MXFP4;
    const uint16_t *w = (const uint16_t *)(const void *)m->blocks + row * m->cols;
    const uint8_t *blocks = m->blocks + row * n_blocks * DMK_MXFP4_BLOCK_BYTES;

    if (end - first <= FEW) {
        uint32_t n_t = end - first;
        float *packed = (float *)(void *)s->rows;
        const uint16_t *x[FEW];
        for (uint32_t t = 0; t < n_t; t++) {
            x[t] = slot_x(task, first + t);
        }
        pack_rows(x, n_t, m->cols, packed);
        if (mx) {
            mx_rows_few(blocks, m->scales + row * n_blocks, n_w, n_blocks, packed, n_t, s->out[0]);
        } else {
            dot_rows_few(w, m->cols, n_w, packed, m->cols, 1, n_t, s->out);
        }
        for (uint32_t t = 0; t < n_t; t++) {
            moe_store(task, expert, first + t, row0, n_w, s->out[0] + t, n_t);
        }
        return;
    }
    for (size_t i = 0; mx && i < (size_t)n_w * n_blocks; i++) {
        mx_block_bf16(blocks + i * DMK_MXFP4_BLOCK_BYTES, m->scales[row * n_blocks + i],
                      s->rows + i * DMK_K_BLOCK);
    }
    for (uint32_t slot = first, n_t; slot < end; slot += n_t) {
        const uint16_t *x[TILE_T];
        n_t = tile_tokens(end - slot);
        for (uint32_t i = 0; i < n_t; i++) {
            x[i] = slot_x(task, slot + i);
        }
        dot_rows_tile(mx ? s->rows : w, m->cols, n_w, x, m->cols, n_t, s, s->out[0]);
        for (uint32_t i = 0; i < n_t; i++) {
            moe_store(task, expert, slot + i, row0, n_w, s->out[0] + i, n_t);
        }
    }
}

static void run_experts(struct moe_task *task, uint32_t n_experts, struct dmk_stream *stream)
{
    uint32_t n_used = 0;
    for (uint32_t e = 0; e < n_experts; e++) {
        if (task->plan->expert_begin[e + 1] > task->plan->expert_begin[e]) {
            task->experts[n_used++] = (uint16_t)e;
        }
    }
    task->n_row_blocks = (task->w->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    if (n_used > 0) {
        stream->run(stream, moe_item, task, n_used * task->n_row_blocks);
    }
}

static void run_moe_gate_up(const struct dmk_moe_gate_up_args *a, struct dmk_stream *stream)
{
    struct moe_task task = {
        .w = &a->w, .plan = &a->plan, .x = a->x, .rows = a->plan.slot_row, .gate_up = a};
    run_experts(&task, a->n_experts, stream);
}

static void run_moe_down(const struct dmk_moe_down_args *a, struct dmk_stream *stream)
{
    struct moe_task task = {.w = &a->w, .plan = &a->plan, .x = a->z, .down = a};
    run_experts(&task, a->n_experts, stream);
}
