/* The dense product in FP8: near the plain one, the same bits for a row alone and in company, and a row that is not
 * finite spoils no other. */
#include <math.h>
#include <stdio.h>
#include "kernels/dtype.h"
#include "kernels/fp8.h"
#include "tests/check/cuda/device.h"

/* Tensor cores add the products of a step with fewer bits than fp32 has; a few large weights make sums of products
 * that are far above the root mean square of y, and so is the unit of bf16 there. */
#define F32_L2     1e-3
#define F32_WORST  3e-2
#define BF16_L2    4e-3 /* half a unit of bf16 and little more */
#define BF16_WORST 0.15
#define PAD        8 /* elements between rows of y that nobody may write */

struct product {
    uint32_t n_out, k, n_slices, first;
    bool f32, bias;
};

static size_t row_bytes(const struct product *p)
{
    return ((size_t)p->n_out + PAD) * (p->f32 ? 4 : 2);
}

/* Weights, scales, bias, x, and working memory for it. */
struct set {
    struct twin w, scales, bias, x, codes, x_scales;
};

static size_t width(const struct product *p)
{
    return (size_t)p->k * p->n_slices;
}

static size_t n_groups(const struct product *p)
{
    return (size_t)dmk_fp8_groups(p->k) * p->n_slices;
}

static size_t n_scales(const struct product *p)
{
    return (p->first + p->n_out + 63) / 64 * n_groups(p);
}

static struct set make_set(struct device *d, const struct product *p, uint32_t n_rows)
{
    struct set s = {.w = twin_bytes(d, p->n_out * width(p), 0, 256),
                    .scales = twin_new(d, n_scales(p) * sizeof(float)),
                    .bias = twin_bf16(d, p->n_out, 0.5f),
                    .x = twin_bf16(d, n_rows * width(p), 2.0f),
                    .codes = twin_new(d, n_rows * width(p)),
                    .x_scales = twin_new(d, n_rows * n_groups(p) * sizeof(float))};
    uint8_t *codes = s.w.host;
    float *scales = s.scales.host;
    for (size_t i = 0; i < s.w.bytes; i++) {
        /* Mostly +-1/8 to +-1.875, now and then any number. */
        codes[i] = codes[i] % 31 == 0 ? codes[i] & 0xfe : (uint8_t)((codes[i] & 0x9f) | 0x20);
        codes[i] = (codes[i] & 0x7f) == 0x7e ? 0x80 : codes[i];
    }
    for (size_t i = 0; i < n_scales(p); i++) {
        scales[i] = ldexpf(1.0f, -(int)draw_u32(d, 4) - 4);
    }
    twin_send(d, s.w);
    twin_send(d, s.scales);
    return s;
}

static struct dmk_linear_fp8_args make_args(const struct product *p, const struct set *s,
                                            struct twin y, uint32_t n_rows, bool host)
{
    return (struct dmk_linear_fp8_args){.w = host ? s->w.host : s->w.dev,
                                        .w_scales = host ? s->scales.host : s->scales.dev,
                                        .bias = !p->bias ? NULL
                                                : host   ? s->bias.host
                                                         : s->bias.dev,
                                        .x = host ? s->x.host : s->x.dev,
                                        .y_bf16 = p->f32 ? NULL
                                                  : host ? y.host
                                                         : y.dev,
                                        .y_f32 = !p->f32 ? NULL
                                                 : host  ? y.host
                                                         : y.dev,
                                        .w_stride = width(p),
                                        .x_stride = width(p),
                                        .y_stride = p->n_out + PAD,
                                        .n_rows = n_rows,
                                        .n_out = p->n_out,
                                        .k = p->k,
                                        .n_slices = p->n_slices,
                                        .first = p->first,
                                        .x_codes = host ? s->codes.host : s->codes.dev,
                                        .x_scales = host ? s->x_scales.host : s->x_scales.dev};
}

static void compare(struct device *d, const struct product *p, uint32_t n_rows)
{
    char what[96];
    const struct set s = make_set(d, p, n_rows);
    struct twin y = twin_new(d, n_rows * row_bytes(p));
    struct dmk_linear_fp8_args ref = make_args(p, &s, y, n_rows, true),
                               dev = make_args(p, &s, y, n_rows, false);
    snprintf(what, sizeof(what), "fp8 %u x %u from %u on, k %u x %u", n_rows, p->n_out, p->first,
             p->n_slices, p->k);
    d->ref.linear_fp8(&ref, NULL);
    d->cuda.linear_fp8(&dev, d->stream);
    if (p->f32) {
        expect_f32(d, y, F32_L2, F32_WORST, what);
    } else {
        expect_bf16(d, y, BF16_L2, BF16_WORST, what);
    }
    device_end(d, what);
}

/* Codes and scales of activations are those of the host, to the bit: 33 rows get them by a kernel of their own, whose
 * scales lie by groups. That blocks make the same for themselves is what company shows. */
static void codes(struct device *d, const struct product *p)
{
    const uint32_t n_rows = 33;
    const struct set s = make_set(d, p, n_rows);
    struct twin y = twin_new(d, n_rows * row_bytes(p));
    struct dmk_linear_fp8_args dev = make_args(p, &s, y, n_rows, false);
    const uint16_t *x = s.x.host;
    uint8_t *want = s.codes.host;
    float *scales = s.x_scales.host;
    for (uint32_t r = 0; r < n_rows; r++) {
        for (uint32_t g = 0; g < n_groups(p); g++) {
            const size_t at = (size_t)g * 128, left = width(p) - at;
            scales[(size_t)g * n_rows + r] = dmk_fp8_quantise(
                x + r * width(p) + at, left < 128 ? (uint32_t)left : 128, want + r * width(p) + at);
        }
    }
    d->cuda.linear_fp8(&dev, d->stream);
    expect_bits(d, s.codes, "codes of activations");
    expect_bits(d, s.x_scales, "scales of activations");
    device_end(d, "codes");
}

/* Every number was written, and nothing between rows: what was there before is all ones. */
static void written(struct device *d, const struct product *p, struct twin y, uint32_t n_rows,
                    const char *what)
{
    const size_t size = p->f32 ? 4 : 2, row = row_bytes(p);
    const uint8_t *got = y.host;
    device_fetch(d, y.host, y.dev, n_rows * row);
    for (size_t i = 0; i < n_rows * row / size; i++) {
        bool ones = true;
        for (size_t b = 0; b < size; b++) {
            ones = ones && got[i * size + b] == 0xff;
        }
        if (ones != (i % (row / size) >= p->n_out)) {
            fail(d, what, ones ? "left out a number" : "wrote between rows");
            return;
        }
    }
}

/* Rows of one large call, again in calls of every kind of size. */
static void company(struct device *d, const struct product *p, uint32_t n_rows)
{
    char what[96];
    const uint32_t sizes[] = {1, 8, 9, 16, 17, 31, 32, 33, 64, 100, 128, 129, 300};
    const size_t row = row_bytes(p);
    const struct set s = make_set(d, p, n_rows);
    struct twin y = twin_new(d, n_rows * row);
    struct dmk_linear_fp8_args all = make_args(p, &s, y, n_rows, false);
    d->cuda.linear_fp8(&all, d->stream);
    snprintf(what, sizeof(what), "fp8: %u rows, n_out %u from %u on, k %u x %u", n_rows, p->n_out,
             p->first, p->n_slices, p->k);
    written(d, p, y, n_rows, what);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        const uint32_t first = draw_u32(d, n_rows - sizes[i] + 1);
        struct twin part = twin_new(d, sizes[i] * row);
        struct dmk_linear_fp8_args args = make_args(p, &s, part, sizes[i], false);
        args.x += first * width(p);
        d->cuda.linear_fp8(&args, d->stream);
        snprintf(what, sizeof(what), "fp8 company: %u rows of %u, n_out %u from %u on, k %u x %u",
                 sizes[i], n_rows, p->n_out, p->first, p->n_slices, p->k);
        expect_same(d, part.dev, (char *)y.dev + first * row, sizes[i] * row, what);
    }
    device_end(d, "fp8 company");
}

/* One of n_rows has an infinity. */
static void not_finite(struct device *d, const struct product *p, uint32_t n_rows)
{
    const size_t row = row_bytes(p);
    struct set s = make_set(d, p, n_rows);
    struct twin before = twin_new(d, n_rows * row), after = twin_new(d, n_rows * row);
    struct dmk_linear_fp8_args args = make_args(p, &s, before, n_rows, false);
    float *y = after.host;
    d->cuda.linear_fp8(&args, d->stream);
    ((uint16_t *)s.x.host)[2 * width(p) + width(p) / 2] = 0x7f80;
    twin_send(d, s.x);
    args.y_f32 = after.dev;
    d->cuda.linear_fp8(&args, d->stream);
    expect_same(d, before.dev, after.dev, 2 * row, "fp8: rows before an infinity");
    expect_same(d, (char *)before.dev + 3 * row, (char *)after.dev + 3 * row, (n_rows - 3) * row,
                "fp8: rows behind an infinity");
    device_fetch(d, y, (char *)after.dev + 2 * row, row);
    for (uint32_t i = 0; i < p->n_out; i++) {
        if (!isnan(y[i])) {
            fail(d, "fp8", "a row with an infinity is not NaN");
            break;
        }
    }
    device_end(d, "fp8 not finite");
}

struct bench {
    struct dmk_linear_fp8_args args;
    size_t step, n; /* bytes from one weight to the next, and their number */
    uint32_t at;
};

/* Another weight each time, so that none waits in the L2. */
static void run_linear(struct device *d, void *ud)
{
    struct bench *b = ud;
    struct dmk_linear_fp8_args args = b->args;
    args.w += b->at++ % b->n * b->step;
    d->cuda.linear_fp8(&args, d->stream);
}

static void bench(struct device *d, const char *name, const struct product *p, uint32_t n_rows)
{
    char what[64];
    const size_t step = (size_t)p->n_out * width(p);
    const size_t n = step > ((size_t)400 << 20) ? 1 : ((size_t)400 << 20) / step;
    const size_t y_bytes = n_rows * row_bytes(p);
    struct set s = {.w = twin_device(d, n * step),
                    .scales = twin_device(d, (n_scales(p) + 3) / 4 * 16),
                    .bias = twin_bf16(d, p->n_out, 0.5f),
                    .x = twin_device(d, n_rows * width(p) * 2),
                    .codes = twin_device(d, n_rows * width(p)),
                    .x_scales = twin_device(d, n_rows * n_groups(p) * sizeof(float))};
    struct twin y = twin_device(d, y_bytes);
    d->be->ops->fill(d->be, d->stream, s.w.dev, s.w.bytes, DMK_FILL_E4M3, 0, d->seed);
    d->be->ops->fill(d->be, d->stream, s.scales.dev, s.scales.bytes, DMK_FILL_F32, 0x1p-5f, 0);
    d->be->ops->fill(d->be, d->stream, s.x.dev, s.x.bytes, DMK_FILL_BF16, 1.0f, d->seed + 1);
    struct bench bench = {make_args(p, &s, y, n_rows, false), step, n, 0};
    snprintf(what, sizeof(what), "%s fp8 %u rows", name, n_rows);
    device_bench(d, what, run_linear, &bench,
                 (double)step + (double)n_rows * (double)width(p) * 2.0 + (double)y_bytes,
                 2.0 * n_rows * p->n_out * (double)width(p));
    device_end(d, what);
}

void check_linear_fp8(struct device *d)
{
    static const struct product qkv = {5120, 2880, 1, 0, false, true},
                                o = {2880, 512, 8, 0, true, false},
                                head = {201088, 2880, 1, 0, true, false};
    if (d->bench) {
        const uint32_t rows[] = {1, 8, 16, 32, 64, 128, 1024, 8192};
        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
            bench(d, "qkv", &qkv, rows[i]);
            bench(d, "o", &o, rows[i]);
            if (rows[i] <= 128) {
                bench(d, "head", &head, rows[i]);
            }
        }
        return;
    }
    const struct product small[] = {
        {64, 128, 1, 0, true, false},   {8, 32, 1, 0, false, true},
        {200, 96, 1, 0, true, true},    {160, 192, 1, 0, false, false},
        {96, 128, 2, 0, true, false},   {130, 128, 4, 0, true, true},
        {2880, 128, 8, 0, true, false}, {320, 2880, 1, 0, false, true},
        {640, 1024, 1, 0, true, true},  {301, 160, 1, 48, true, false},
        {302, 160, 1, 35, true, false}, {64, 288, 1, 32, true, true},
    };
    const uint32_t rows[] = {1, 8, 9, 17, 33, 100, 129, 257};
    for (size_t i = 0; i < sizeof(small) / sizeof(small[0]); i++) {
        for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++) {
            /* The plain product takes its time: of the large ones only two, by few rows and by many. */
            if (small[i].n_out * width(&small[i]) < 60000 || rows[r] == 8 || rows[r] == 33) {
                compare(d, &small[i], rows[r]);
            }
        }
        company(d, &small[i], 300);
    }
    codes(d, &small[7]);
    codes(d, &small[5]);
    not_finite(d, &small[9], 5);
    not_finite(d, &small[9], 40);
    company(d, &qkv, 300);
    company(d, &o, 300);
    /* As on a rank of two and of eight: rows of the head from within a block on, fewer heads, one slice. */
    const struct product tail = {25136, 2880, 1, 48, true, false},
                         heads = {640, 2880, 1, 0, false, true},
                         slice = {2880, 512, 1, 0, true, false};
    company(d, &tail, 300);
    company(d, &heads, 300);
    company(d, &slice, 300);
    /* Numbers of rows that get other tiles. */
    const struct product wide = {5120, 128, 1, 0, false, true},
                         tree = {2880, 128, 8, 0, true, false},
                         rounded = {2880, 128, 8, 0, false, true};
    company(d, &wide, 8192);
    company(d, &tree, 8192);
    company(d, &rounded, 1024);
}
