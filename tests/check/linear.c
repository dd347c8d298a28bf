/* Dense matrix products: shapes around the tiles, slices, strides, both kinds of output, both formats of weights. */
#include <math.h>
#include <stdio.h>
#include "kernels/fp8.h"
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

/* Codes of which none is NaN. */
static uint8_t *random_codes(struct check *c, size_t n)
{
    uint8_t *codes = check_bytes(c, n);
    for (size_t i = 0; i < n; i++) {
        codes[i] = (codes[i] & 0x7f) == 0x7f ? 0 : codes[i];
    }
    return codes;
}

static void check_fp8(struct check *c, const struct shape *s, uint32_t first)
{
    char what[96];
    const size_t y_pad = 5, w_pad = 32, x_pad = 3, K = (size_t)s->k * s->n_slices;
    const size_t y_bytes = s->n_rows * (s->n_out + y_pad) * (s->f32 ? 4 : 2);
    const size_t groups = (size_t)dmk_fp8_groups(s->k) * s->n_slices;
    const size_t n_scales = (first + s->n_out + 63) / 64 * groups;
    float *scales = check_buf(c, n_scales * sizeof(float));
    for (size_t i = 0; i < n_scales; i++) {
        scales[i] = ldexpf(1.0f, (int)check_u32(c, 12) - 12);
    }
    struct dmk_linear_fp8_args a = {.w = random_codes(c, s->n_out * (K + w_pad)),
                                    .w_scales = scales,
                                    .bias = s->bias ? check_bf16(c, s->n_out, 3.0f) : NULL,
                                    .x = check_bf16(c, s->n_rows * (K + x_pad), 2.0f),
                                    .w_stride = K + w_pad,
                                    .x_stride = K + x_pad,
                                    .y_stride = s->n_out + y_pad,
                                    .n_rows = s->n_rows,
                                    .n_out = s->n_out,
                                    .k = s->k,
                                    .n_slices = s->n_slices,
                                    .first = first,
                                    .x_codes = check_buf(c, s->n_rows * K),
                                    .x_scales = check_buf(c, s->n_rows * groups * 4)};
    struct dmk_linear_fp8_args b = a;
    void *want = check_buf(c, y_bytes), *got = check_buf(c, y_bytes);
    b.x_codes = check_buf(c, s->n_rows * K);
    b.x_scales = check_buf(c, s->n_rows * groups * 4);
    a.y_f32 = s->f32 ? want : NULL;
    a.y_bf16 = s->f32 ? NULL : want;
    b.y_f32 = s->f32 ? got : NULL;
    b.y_bf16 = s->f32 ? NULL : got;
    snprintf(what, sizeof(what), "fp8: %u rows, %u out from %u on, k %u x %u", s->n_rows, s->n_out,
             first, s->k, s->n_slices);
    c->ref.linear_fp8(&a, c->stream);
    c->fast.linear_fp8(&b, c->stream);
    check_equal(c, want, got, y_bytes, s->f32 ? 4 : 2, what);
    check_end(c, what);
}

/* The number of a code that is not NaN, by its definition. */
static double e4m3(uint32_t code)
{
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double x = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return code & 0x80 ? -x : x;
}

/* The nearest magnitude's code by looking at all of them, the even one of two that are as near. */
static uint8_t nearest_e4m3(float x)
{
    const uint8_t sign = signbit(x) ? 0x80 : 0;
    uint32_t best = 0;
    if (isnan(x)) {
        return sign | 0x7f;
    }
    for (uint32_t code = 1; code < 0x7f; code++) {
        const double now = fabs(fabs((double)x) - e4m3(code)),
                     least = fabs(fabs((double)x) - e4m3(best));
        best = now < least || (now == least && code % 2 == 0) ? code : best;
    }
    return sign | (uint8_t)(isinf(x) ? 0x7e : best);
}

/* E4M3 by its definition: all codes, and the nearest code of every bf16 number. */
static void check_codes(struct check *c)
{
    uint8_t *want = check_buf(c, 65536), *got = check_buf(c, 65536);
    float *value = check_buf(c, 254 * sizeof(float)), *same = check_buf(c, 254 * sizeof(float));
    for (uint32_t i = 0; i < 254; i++) {
        const uint8_t code = (uint8_t)(i + i / 127);
        value[i] = (float)e4m3(code);
        same[i] = dmk_e4m3_to_f32(code);
    }
    check_equal(c, value, same, 254 * sizeof(float), sizeof(float), "values of all codes");
    for (uint32_t i = 0; i < 65536; i++) {
        want[i] = nearest_e4m3(dmk_bf16_to_f32((uint16_t)i));
        got[i] = dmk_f32_to_e4m3(dmk_bf16_to_f32((uint16_t)i));
    }
    check_equal(c, want, got, 65536, 1, "codes of all bf16 numbers");
    check_end(c, "codes");
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

struct bench_fp8 {
    struct check *c;
    struct dmk_linear_fp8_args args;
};

static void run_bench_fp8(void *ud)
{
    struct bench_fp8 *b = ud;
    b->c->fast.linear_fp8(&b->args, b->c->stream);
}

static void bench_fp8(struct check *c, uint32_t n_rows, uint32_t n_out, uint32_t k,
                      uint32_t n_slices)
{
    char what[96];
    const size_t K = (size_t)k * n_slices, groups = (size_t)dmk_fp8_groups(k) * n_slices;
    float *scales = check_buf(c, (n_out + 63) / 64 * groups * sizeof(float));
    for (size_t i = 0; i < (n_out + 63) / 64 * groups; i++) {
        scales[i] = 0x1p-8f;
    }
    struct bench_fp8 b = {c,
                          {.w = random_codes(c, n_out * K),
                           .w_scales = scales,
                           .x = check_bf16(c, n_rows * K, 2.0f),
                           .y_f32 = check_buf(c, (size_t)n_rows * n_out * 4),
                           .w_stride = K,
                           .x_stride = K,
                           .y_stride = n_out,
                           .n_rows = n_rows,
                           .n_out = n_out,
                           .k = k,
                           .n_slices = n_slices,
                           .x_codes = check_buf(c, n_rows * K),
                           .x_scales = check_buf(c, n_rows * groups * 4)}};
    snprintf(what, sizeof(what), "linear fp8 %u x %u x %u/%u", n_rows, n_out, k, n_slices);
    check_bench(c, what, run_bench_fp8, &b, (double)(n_out * K), 2.0 * n_rows * n_out * (double)K);
    check_end(c, what);
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
        bench_fp8(c, 1, 40000, 2880, 1);
        bench_fp8(c, 1, 2880, 512, 8);
        bench_fp8(c, 4, 5120, 2880, 1);
        bench_fp8(c, 64, 5120, 2880, 1);
        bench_fp8(c, 64, 2880, 512, 8);
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
        check_fp8(c, &fixed[i], i % 3 == 0 ? check_u32(c, 64) : 0);
    }
    check_codes(c);
    for (uint32_t i = 0; i < 20; i++) {
        struct shape s = {1 + check_u32(c, 20),  1 + check_u32(c, 130), 32 * (1 + check_u32(c, 40)),
                          1u << check_u32(c, 4), check_u32(c, 2),       check_u32(c, 2)};
        check_shape(c, &s);
        check_fp8(c, &s, check_u32(c, 2) ? check_u32(c, 64) : 0);
    }
}
