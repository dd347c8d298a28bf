/* The experts: both formats, few and many tokens, experts without any, scales from one end to the other. */
#include <stdio.h>
#include "kernels/dtype.h"
#include "tests/check/check.h"

struct moe_case {
    enum dmk_weight_format format;
    uint32_t n_rows, n_experts, rows, cols;
    bool wide_scales; /* the whole range of UE8M0 that stays finite */
};

/* Rows choose experts at random, most of them none of ours. */
static struct dmk_moe_plan make_plan(struct check *c, const struct moe_case *s)
{
    const uint32_t k = 4, n = s->n_rows * k;
    uint32_t *ids = check_buf(c, n * 4);
    float *weights = check_buf(c, n * 4);
    for (uint32_t t = 0; t < s->n_rows; t++) {
        uint32_t first = check_u32(c, 2 * s->n_experts);
        for (uint32_t i = 0; i < k; i++) {
            ids[t * k + i] = (first + i * 3) % (2 * s->n_experts + 6);
            weights[t * k + i] = 0.25f;
        }
    }
    struct dmk_moe_plan plan = {check_buf(c, (s->n_experts + 1) * 4),
                                check_buf(c, n * 4),
                                check_buf(c, n * 4),
                                check_buf(c, n * 4),
                                check_buf(c, n * 4),
                                check_buf(c, s->n_experts * 4)};
    struct dmk_moe_group_args group = {ids, weights, plan, s->n_rows, k, 2, s->n_experts, 1};
    c->ref.moe_group(&group, c->stream);
    return plan;
}

static struct dmk_expert_weights make_weights(struct check *c, const struct moe_case *s)
{
    size_t n = (size_t)s->n_experts * s->rows * s->cols;
    struct dmk_expert_weights w = {.format = s->format,
                                   .bias = check_bf16(c, (size_t)s->n_experts * s->rows, 2.0f),
                                   .rows = s->rows,
                                   .cols = s->cols};
    if (s->format == DMK_WEIGHT_BF16) {
        w.blocks = (const uint8_t *)check_bf16(c, n, 0.4f);
        return w;
    }
    w.blocks = check_bytes(c, n / 2);
    uint8_t *scales = check_bytes(c, n / 32);
    for (size_t i = 0; i < n / 32; i++) {
        scales[i] = s->wide_scales ? scales[i] % 128 : 118 + scales[i] % 8;
    }
    w.scales = scales;
    return w;
}

static void check_gate_up(struct check *c, const struct moe_case *s)
{
    char what[96];
    size_t bytes = (size_t)s->n_rows * 4 * (s->rows / 2) * 2;
    struct dmk_moe_gate_up_args a = {.w = make_weights(c, s),
                                     .x = check_bf16(c, (size_t)s->n_rows * s->cols, 2.0f),
                                     .plan = make_plan(c, s),
                                     .z = check_buf(c, bytes),
                                     .n_experts = s->n_experts,
                                     .alpha = 1.702f,
                                     .limit = 7.0f};
    struct dmk_moe_gate_up_args b = a;
    b.z = check_buf(c, bytes);
    snprintf(what, sizeof(what), "gate_up format %d, %u tokens, %u x %u", s->format, s->n_rows,
             s->rows, s->cols);
    c->ref.moe_gate_up(&a, c->stream);
    c->fast.moe_gate_up(&b, c->stream);
    check_equal(c, a.z, b.z, bytes, 2, what);
    check_end(c, what);
}

static void check_down(struct check *c, const struct moe_case *s)
{
    char what[96];
    size_t bytes = (size_t)s->n_rows * 4 * s->rows * 4;
    struct dmk_moe_down_args a = {.w = make_weights(c, s),
                                  .z = check_bf16(c, (size_t)s->n_rows * 4 * s->cols, 2.0f),
                                  .plan = make_plan(c, s),
                                  .y = check_buf(c, bytes),
                                  .n_experts = s->n_experts};
    struct dmk_moe_down_args b = a;
    b.y = check_buf(c, bytes);
    snprintf(what, sizeof(what), "down format %d, %u tokens, %u x %u", s->format, s->n_rows,
             s->rows, s->cols);
    c->ref.moe_down(&a, c->stream);
    c->fast.moe_down(&b, c->stream);
    check_equal(c, a.y, b.y, bytes, 4, what);
    check_end(c, what);
}

struct bench {
    struct check *c;
    struct dmk_moe_gate_up_args args;
};

static void run_bench(void *ud)
{
    struct bench *b = ud;
    b->c->fast.moe_gate_up(&b->args, b->c->stream);
}

/* All tokens with one expert of four. */
static void bench_tokens(struct check *c, enum dmk_weight_format format, uint32_t n_tokens)
{
    char what[96];
    const uint32_t n_experts = n_tokens == 1 ? 8 : 1;
    struct moe_case s = {format, n_tokens * n_experts, n_experts, 5760, 2880, false};
    struct bench b = {.c = c};
    struct dmk_moe_plan plan = {.expert_begin = check_buf(c, (n_experts + 1) * 4),
                                .slot_row = check_buf(c, s.n_rows * 4)};
    for (uint32_t e = 0; e <= n_experts; e++) {
        plan.expert_begin[e] = e * n_tokens;
    }
    for (uint32_t i = 0; i < s.n_rows; i++) {
        plan.slot_row[i] = i;
    }
    b.args = (struct dmk_moe_gate_up_args){.w = make_weights(c, &s),
                                           .x = check_bf16(c, (size_t)s.n_rows * s.cols, 1.0f),
                                           .plan = plan,
                                           .z = check_buf(c, (size_t)s.n_rows * s.rows),
                                           .n_experts = n_experts,
                                           .alpha = 1.702f,
                                           .limit = 7.0f};
    snprintf(what, sizeof(what), "gate_up %s, %u tokens", format ? "mxfp4" : "bf16", n_tokens);
    double weights = (double)n_experts * s.rows * s.cols;
    check_bench(c, what, run_bench, &b, weights * (format ? 0.53125 : 2.0),
                2.0 * weights * n_tokens);
    check_end(c, what);
}

void check_moe(struct check *c)
{
    if (c->bench) {
        const uint32_t tokens[] = {1, 2, 3, 4, 5, 64};
        for (size_t i = 0; i < 6; i++) {
            bench_tokens(c, DMK_WEIGHT_MXFP4, tokens[i]);
        }
        bench_tokens(c, DMK_WEIGHT_BF16, 1);
        return;
    }
    const uint32_t rows[] = {2, 50, 96, 130}, cols[] = {32, 64, 96, 992};
    for (int format = 0; format < 2; format++) {
        for (size_t i = 0; i < 4; i++) {
            for (int wide = 0; wide <= format; wide++) {
                struct moe_case s = {format, 1 + 9 * (uint32_t)i, 5, rows[i], cols[i], wide};
                check_gate_up(c, &s);
                check_down(c, &s);
                s.n_rows = 1 + check_u32(c, 6);
                check_gate_up(c, &s);
                check_down(c, &s);
            }
        }
    }
    check_gate_up(c, &(struct moe_case){DMK_WEIGHT_MXFP4, 3, 2, 96, 2880, false});
    check_down(c, &(struct moe_case){DMK_WEIGHT_MXFP4, 11, 2, 49, 2880, false});
}
