/* The dense product: near the plain one, and the same bits for a row alone and in company. */
#include <stdio.h>
#include "tests/check/cuda/device.h"

#define F32_L2     2e-5 /* sums of tensor cores against 16 lanes in fp32 */
#define F32_WORST  3e-4
#define BF16_L2    4e-3 /* half a unit of bf16 and little more */
#define BF16_WORST 0.05

struct product {
    uint32_t n_out, k, n_slices;
    bool f32, bias;
};

static struct dmk_linear_args make_args(const struct product *p, struct twin w, struct twin b,
                                        struct twin x, struct twin y, uint32_t n_rows, bool host)
{
    const uint32_t k = p->k * p->n_slices;
    return (struct dmk_linear_args){.w = host ? w.host : w.dev,
                                    .bias = !p->bias ? NULL
                                            : host   ? b.host
                                                     : b.dev,
                                    .x = host ? x.host : x.dev,
                                    .y_bf16 = p->f32 ? NULL
                                              : host ? y.host
                                                     : y.dev,
                                    .y_f32 = !p->f32 ? NULL
                                             : host  ? y.host
                                                     : y.dev,
                                    .w_stride = k,
                                    .x_stride = k,
                                    .y_stride = p->n_out,
                                    .n_rows = n_rows,
                                    .n_out = p->n_out,
                                    .k = p->k,
                                    .n_slices = p->n_slices};
}

static void compare(struct device *d, const struct product *p, uint32_t n_rows)
{
    char what[96];
    const size_t k = (size_t)p->k * p->n_slices, n = (size_t)n_rows * p->n_out;
    struct twin w = twin_bf16(d, p->n_out * k, 0.1f), b = twin_bf16(d, p->n_out, 0.5f),
                x = twin_bf16(d, n_rows * k, 2.0f), y = twin_new(d, n * (p->f32 ? 4 : 2));
    struct dmk_linear_args ref = make_args(p, w, b, x, y, n_rows, true),
                           dev = make_args(p, w, b, x, y, n_rows, false);
    snprintf(what, sizeof(what), "linear %u x %u, k %u x %u", n_rows, p->n_out, p->n_slices, p->k);
    d->ref.linear(&ref, NULL);
    d->cuda.linear(&dev, d->stream);
    if (p->f32) {
        expect_f32(d, y, F32_L2, F32_WORST, what);
    } else {
        expect_bf16(d, y, BF16_L2, BF16_WORST, what);
    }
    device_end(d, what);
}

/* Rows of one large call, again in calls of every kind of size. */
static void company(struct device *d, const struct product *p, uint32_t n_rows)
{
    char what[96];
    const uint32_t sizes[] = {1, 8, 9, 31, 64, 100, 128, 129, 300};
    const size_t k = (size_t)p->k * p->n_slices, row = (size_t)p->n_out * (p->f32 ? 4 : 2);
    struct twin w = twin_bf16(d, p->n_out * k, 0.1f), b = twin_bf16(d, p->n_out, 0.5f),
                x = twin_bf16(d, n_rows * k, 2.0f), y = twin_new(d, n_rows * row);
    struct dmk_linear_args all = make_args(p, w, b, x, y, n_rows, false);
    d->cuda.linear(&all, d->stream);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        const uint32_t first = draw_u32(d, n_rows - sizes[i] + 1);
        struct twin part = twin_new(d, sizes[i] * row);
        struct dmk_linear_args args = make_args(p, w, b, x, part, sizes[i], false);
        args.x += first * k;
        d->cuda.linear(&args, d->stream);
        snprintf(what, sizeof(what), "company: %u rows of %u, n_out %u, k %u x %u", sizes[i],
                 n_rows, p->n_out, p->n_slices, p->k);
        expect_same(d, part.dev, (char *)y.dev + first * row, sizes[i] * row, what);
    }
    device_end(d, "company");
}

struct bench {
    struct dmk_linear_args args;
    size_t step, n; /* elements from one weight to the next, and their number */
    uint32_t at;
};

/* Another weight each time, so that none waits in the L2. */
static void run_linear(struct device *d, void *ud)
{
    struct bench *b = ud;
    struct dmk_linear_args args = b->args;
    args.w += b->at++ % b->n * b->step;
    d->cuda.linear(&args, d->stream);
}

static void bench(struct device *d, const char *name, const struct product *p, uint32_t n_rows)
{
    char what[64];
    const size_t k = (size_t)p->k * p->n_slices, step = (size_t)p->n_out * k;
    const size_t n = step * 2 > ((size_t)400 << 20) ? 1 : ((size_t)400 << 20) / (step * 2);
    struct twin w = twin_device(d, n * step * 2), b = twin_bf16(d, p->n_out, 0.5f),
                x = twin_device(d, n_rows * k * 2),
                y = twin_device(d, (size_t)n_rows * p->n_out * (p->f32 ? 4 : 2));
    d->be->ops->fill(d->be, d->stream, w.dev, w.bytes, DMK_FILL_BF16, 0.02f, d->seed);
    d->be->ops->fill(d->be, d->stream, x.dev, x.bytes, DMK_FILL_BF16, 1.0f, d->seed + 1);
    struct bench bench = {make_args(p, w, b, x, y, n_rows, false), step, n, 0};
    snprintf(what, sizeof(what), "%s %u rows", name, n_rows);
    device_bench(d, what, run_linear, &bench,
                 (double)step * 2 + (double)n_rows * (k * 2.0 + p->n_out * (p->f32 ? 4.0 : 2.0)),
                 2.0 * n_rows * p->n_out * (double)k);
    device_end(d, what);
}

void check_linear(struct device *d)
{
    static const struct product qkv = {5120, 2880, 1, false, true}, o = {2880, 512, 8, true, false},
                                router = {128, 2880, 1, false, true},
                                head = {201088, 2880, 1, true, false};
    if (d->bench) {
        const uint32_t rows[] = {1, 8, 32, 128, 1024, 8192};
        for (size_t i = 0; i < 6; i++) {
            bench(d, "qkv", &qkv, rows[i]);
            bench(d, "o", &o, rows[i]);
            bench(d, "router", &router, rows[i]);
            if (rows[i] <= 128) {
                bench(d, "head", &head, rows[i]);
            }
        }
        check_linear_fp8(d);
        return;
    }
    const struct product small[] = {
        {64, 64, 1, true, false},    {8, 32, 1, false, true},     {200, 96, 1, true, true},
        {160, 192, 1, false, false}, {96, 64, 2, true, false},    {130, 128, 4, true, true},
        {2880, 64, 8, true, false},  {320, 2880, 1, false, true}, {640, 1024, 1, true, true},
    };
    const uint32_t rows[] = {1, 5, 8, 17, 64, 100, 128, 129, 257};
    for (size_t i = 0; i < sizeof(small) / sizeof(small[0]); i++) {
        for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++) {
            if ((size_t)small[i].n_out * small[i].k < 100000 || r % 3 == 1) {
                compare(d, &small[i], rows[r]);
            }
        }
        company(d, &small[i], 300);
    }
    compare(d, &router, 3);
    company(d, &qkv, 300);
    company(d, &o, 300);
    company(d, &router, 300);
    /* Numbers of rows that get other tiles. */
    const struct product wide = {5120, 64, 1, false, true}, tree = {2880, 64, 8, true, false},
                         rounded = {2880, 64, 8, false, true};
    const uint32_t many[] = {1024, 8192};
    for (size_t i = 0; i < 2; i++) {
        company(d, &wide, many[i]);
        company(d, &tree, many[i]);
        company(d, &rounded, many[i]);
    }
    check_linear_fp8(d);
}
