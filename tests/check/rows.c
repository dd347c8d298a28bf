/* Operations on rows: RMS norm, RoPE, residual, and combining experts. */
#include <stdio.h>
#include <string.h>
#include "kernels/numeric.h"
#include "tests/check/check.h"

static void check_rmsnorm(struct check *c, uint32_t n_rows, uint32_t hidden, bool pick)
{
    char what[64];
    uint32_t *rows = check_buf(c, n_rows * sizeof(*rows));
    for (uint32_t i = 0; i < n_rows; i++) {
        rows[i] = check_u32(c, n_rows);
    }
    struct dmk_rmsnorm_args a = {.x = check_bf16(c, (size_t)n_rows * hidden, 4.0f),
                                 .rows = pick ? rows : NULL,
                                 .scale = check_bf16(c, hidden, 2.0f),
                                 .y = check_buf(c, (size_t)n_rows * hidden * 2),
                                 .n_rows = n_rows,
                                 .hidden = hidden,
                                 .eps = 1e-5f};
    struct dmk_rmsnorm_args b = a;
    b.y = check_buf(c, (size_t)n_rows * hidden * 2);
    snprintf(what, sizeof(what), "rmsnorm %u x %u", n_rows, hidden);
    c->ref.rmsnorm(&a, c->stream);
    c->fast.rmsnorm(&b, c->stream);
    check_equal(c, a.y, b.y, (size_t)n_rows * hidden * 2, 2, what);
    check_end(c, what);
}

static void check_rope(struct check *c, uint32_t n_rows, uint32_t n_heads)
{
    char what[64];
    const uint32_t n_positions = 50;
    size_t bytes = (size_t)n_rows * n_heads * 64 * 2;
    uint32_t *positions = check_buf(c, n_rows * sizeof(*positions));
    float *table = check_buf(c, n_positions * 64 * sizeof(float));
    for (uint32_t i = 0; i < n_rows; i++) {
        positions[i] = check_u32(c, n_positions);
    }
    for (uint32_t i = 0; i < n_positions * 64; i++) {
        table[i] = (float)check_u32(c, 1u << 24) * 0x1.58p-24f - 0.67f;
    }
    struct dmk_rope_args a = {.x = check_bf16(c, (size_t)n_rows * n_heads * 64, 8.0f),
                              .positions = positions,
                              .table = table,
                              .n_rows = n_rows,
                              .n_heads = n_heads};
    struct dmk_rope_args b = a;
    b.x = check_buf(c, bytes);
    memcpy(b.x, a.x, bytes);
    snprintf(what, sizeof(what), "rope %u rows, %u heads", n_rows, n_heads);
    c->ref.rope(&a, c->stream);
    c->fast.rope(&b, c->stream);
    check_equal(c, a.x, b.x, bytes, 2, what);
    check_end(c, what);
}

static float *random_floats(struct check *c, size_t n, float scale)
{
    uint16_t *half = check_bf16(c, 2 * n, 1.0f);
    float *x = check_buf(c, n * sizeof(*x));
    for (size_t i = 0; i < n; i++) {
        x[i] =
            scale * (dmk_bf16_to_f32(half[2 * i]) + 0x1.0p-9f * dmk_bf16_to_f32(half[2 * i + 1]));
    }
    return x;
}

static void check_residual(struct check *c, uint32_t n_rows, uint32_t hidden, bool bias)
{
    char what[64];
    size_t n = (size_t)n_rows * hidden;
    struct dmk_residual_args a = {.x = check_bf16(c, n, 4.0f),
                                  .sum = random_floats(c, n, 3.0f),
                                  .bias = bias ? check_bf16(c, hidden, 1.0f) : NULL,
                                  .n_rows = n_rows,
                                  .hidden = hidden};
    struct dmk_residual_args b = a;
    b.x = check_buf(c, n * 2);
    memcpy(b.x, a.x, n * 2);
    snprintf(what, sizeof(what), "residual %u x %u", n_rows, hidden);
    c->ref.residual(&a, c->stream);
    c->fast.residual(&b, c->stream);
    check_equal(c, a.x, b.x, n * 2, 2, what);
    check_end(c, what);
}

/* Slots of each row ascend, as do their groups. */
static void check_combine(struct check *c, uint32_t n_rows, uint32_t hidden, uint32_t n_groups)
{
    char what[64];
    const uint32_t k = 4, n_slots = n_rows * k;
    struct dmk_moe_plan plan = {.slot_weight = random_floats(c, n_slots, 1.0f),
                                .row_slots = check_buf(c, n_slots * 4),
                                .slot_group = check_buf(c, n_slots * 4)};
    for (uint32_t t = 0; t < n_rows; t++) {
        uint32_t used = check_u32(c, k + 1), group = 0;
        for (uint32_t i = 0; i < k; i++) {
            uint32_t slot = t * k + i;
            plan.row_slots[slot] = i < used ? slot : DMK_NONE;
            group += check_u32(c, n_groups - group);
            plan.slot_group[slot] = group;
        }
    }
    struct dmk_moe_combine_args a = {.y = random_floats(c, (size_t)n_slots * hidden, 5.0f),
                                     .plan = plan,
                                     .out = check_buf(c, (size_t)n_rows * hidden * 4),
                                     .n_rows = n_rows,
                                     .k = k,
                                     .hidden = hidden,
                                     .n_groups = n_groups};
    struct dmk_moe_combine_args b = a;
    b.out = check_buf(c, (size_t)n_rows * hidden * 4);
    snprintf(what, sizeof(what), "combine %u x %u, %u groups", n_rows, hidden, n_groups);
    c->ref.moe_combine(&a, c->stream);
    c->fast.moe_combine(&b, c->stream);
    check_equal(c, a.out, b.out, (size_t)n_rows * hidden * 4, 4, what);
    check_end(c, what);
}

struct bench {
    struct check *c;
    struct dmk_rmsnorm_args norm;
    struct dmk_rope_args rope;
};

static void run_norm(void *ud)
{
    struct bench *b = ud;
    b->c->fast.rmsnorm(&b->norm, b->c->stream);
}

static void run_rope(void *ud)
{
    struct bench *b = ud;
    b->c->fast.rope(&b->rope, b->c->stream);
}

static void bench_rows(struct check *c)
{
    const uint32_t n = 64, H = 2880;
    struct bench b = {.c = c};
    uint32_t *positions = check_buf(c, n * 4);
    float *table = check_buf(c, 64 * sizeof(float));
    memset(positions, 0, n * 4);
    for (uint32_t i = 0; i < 64; i++) {
        table[i] = i % 2 ? 0.6f : 0.8f; /* keeps the size of what is turned again and again */
    }
    b.norm = (struct dmk_rmsnorm_args){check_bf16(c, (size_t)n * H, 1.0f),
                                       NULL,
                                       check_bf16(c, H, 1.0f),
                                       check_buf(c, (size_t)n * H * 2),
                                       n,
                                       H,
                                       1e-5f};
    b.rope = (struct dmk_rope_args){check_bf16(c, (size_t)n * 4096, 1.0f), positions, table, n, 64};
    check_bench(c, "rmsnorm 64 x 2880", run_norm, &b, n * H * 4.0, n * H * 5.0);
    check_bench(c, "rope 64 x 64 heads", run_rope, &b, n * 4096 * 4.0, n * 4096 * 3.0);
    check_end(c, "rows");
}

void check_rows(struct check *c)
{
    if (c->bench) {
        bench_rows(c);
        return;
    }
    const uint32_t rows[] = {1, 7, 8, 9, 17}, hiddens[] = {32, 96, 2880};
    for (size_t i = 0; i < 5; i++) {
        for (size_t h = 0; h < 3; h++) {
            check_rmsnorm(c, rows[i], hiddens[h], h % 2);
            check_residual(c, rows[i], hiddens[h], i % 2);
            check_combine(c, rows[i], hiddens[h], 1u << check_u32(c, 4));
        }
        check_rope(c, rows[i], 1 + check_u32(c, 9));
    }
}
