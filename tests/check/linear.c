/* Dense matrix product: shapes around the tiles, slices, strides, both kinds of output. */
#include <stdio.h>
#include "tests/check/check.h"

struct shape {
    uint32_t n_rows, n_out, k, n_slices;
    bool f32, bias;
};

static void check_shape(struct check *c, const struct shape *s)
{
    char what[96];
    const size_t y_pad = 5, w_pad = 32, x_pad = 3, K = (size_t)s->k * s->n_slices;
    size_t y_bytes = s->n_rows * (s->n_out + y_pad) * (s->f32 ? 4 : 2);
    struct dmk_linear_args a = {.w = check_bf16(c, s->n_out * (K + w_pad), 0.2f),
                                .bias = s->bias ? check_bf16(c, s->n_out, 3.0f) : NULL,
                                .x = check_bf16(c, s->n_rows * (K + x_pad), 2.0f),
                                .w_stride = K + w_pad,
                                .x_stride = K + x_pad,
                                .y_stride = s->n_out + y_pad,
                                .n_rows = s->n_rows,
                                .n_out = s->n_out,
                                .k = s->k,
                                .n_slices = s->n_slices};
    struct dmk_linear_args b = a;
    void *want = check_buf(c, y_bytes), *got = check_buf(c, y_bytes);
    a.y_f32 = s->f32 ? want : NULL;
    a.y_bf16 = s->f32 ? NULL : want;
    b.y_f32 = s->f32 ? got : NULL;
    b.y_bf16 = s->f32 ? NULL : got;
    snprintf(what, sizeof(what), "%u rows, %u out, k %u x %u", s->n_rows, s->n_out, s->k,
             s->n_slices);
    c->ref.linear(&a, c->stream);
    c->fast.linear(&b, c->stream);
    check_equal(c, want, got, y_bytes, s->f32 ? 4 : 2, what);
    check_end(c, what);
}

struct bench {
    struct check *c;
    struct dmk_linear_args args;
};

static void run_bench(void *ud)
{
    struct bench *b = ud;
    b->c->fast.linear(&b->args, b->c->stream);
}

static void bench_shape(struct check *c, uint32_t n_rows, uint32_t n_out, uint32_t k,
                        uint32_t n_slices)
{
    char what[96];
    double K = (double)k * n_slices;
    struct bench b = {c,
                      {.w = check_bf16(c, n_out * (size_t)K, 0.2f),
                       .x = check_bf16(c, n_rows * (size_t)K, 2.0f),
                       .y_f32 = check_buf(c, (size_t)n_rows * n_out * 4),
                       .w_stride = (uint64_t)K,
                       .x_stride = (uint64_t)K,
                       .y_stride = n_out,
                       .n_rows = n_rows,
                       .n_out = n_out,
                       .k = k,
                       .n_slices = n_slices}};
    snprintf(what, sizeof(what), "linear %u x %u x %u/%u", n_rows, n_out, k, n_slices);
    check_bench(c, what, run_bench, &b, n_out * K * 2, 2.0 * n_rows * n_out * K);
    check_end(c, what);
}

void check_linear(struct check *c)
{
    if (c->bench) {
        bench_shape(c, 1, 40000, 2880, 1);
        bench_shape(c, 1, 2880, 512, 8);
        bench_shape(c, 2, 5120, 2880, 1);
        bench_shape(c, 3, 5120, 2880, 1);
        bench_shape(c, 4, 5120, 2880, 1);
        bench_shape(c, 64, 5120, 2880, 1);
        bench_shape(c, 64, 2880, 512, 8);
        return;
    }
    const struct shape fixed[] = {
        {1, 1, 32, 1, true, false},    {1, 47, 64, 1, false, true},   {1, 49, 96, 8, true, false},
        {1, 200, 2880, 1, true, true}, {2, 48, 2880, 1, true, false}, {3, 5, 992, 1, false, true},
        {4, 97, 960, 1, true, false},  {5, 96, 1024, 2, true, false}, {7, 33, 512, 4, false, true},
        {9, 64, 64, 8, true, false},   {130, 50, 96, 1, false, true}, {97, 3, 320, 1, true, true},
        {6, 50, 96, 1, true, true},    {11, 7, 1056, 1, true, false}, {81, 97, 64, 2, true, true},
        {161, 1, 64, 1, false, true}};
    for (size_t i = 0; i < sizeof(fixed) / sizeof(fixed[0]); i++) {
        check_shape(c, &fixed[i]);
    }
    for (uint32_t i = 0; i < 20; i++) {
        struct shape s = {1 + check_u32(c, 20),  1 + check_u32(c, 130), 32 * (1 + check_u32(c, 40)),
                          1u << check_u32(c, 4), check_u32(c, 2),       check_u32(c, 2)};
        check_shape(c, &s);
    }
}
