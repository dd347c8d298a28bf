/* The harness: buffers with guards, the shuffling stream, reports, timing, and main. */
#include "tests/check/check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/rng.h"
#include "kernels/dtype.h"

#define GUARD     4096
#define MAX_BUFS  64
#define MAX_K     8192
#define MAX_TIMES 2000

static struct buf {
    unsigned char *base;
    size_t bytes, offset;
} bufs[MAX_BUFS];
static uint32_t n_bufs;

static struct shuffle_stream {
    struct dmk_stream base;
    struct check *check;
    void *scratch;
} shuffle;

/* offset is the alignment: what malloc gives is a multiple of 16, so it is not more. */
static void *take_buf(size_t bytes, size_t offset)
{
    dmk_assert(n_bufs < MAX_BUFS);
    struct buf *b = &bufs[n_bufs++];
    b->bytes = bytes;
    b->offset = GUARD + offset;
    b->base = malloc(bytes + b->offset + GUARD);
    dmk_assert(b->base);
    memset(b->base, 0xa5, bytes + b->offset + GUARD);
    memset(b->base + b->offset, 0xff, bytes);
    return b->base + b->offset;
}

void *check_buf(struct check *c, size_t bytes)
{
    (void)c;
    return take_buf(bytes, 8);
}

static bool is_guard(const unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (p[i] != 0xa5) {
            return false;
        }
    }
    return true;
}

static void report(struct check *c, const char *what, const char *how)
{
    c->n_failed++;
    printf("FAIL %s %s: %s: %s\n", c->fast.name, c->test, what, how);
}

void check_end(struct check *c, const char *what)
{
    for (uint32_t i = 0; i < n_bufs; i++) {
        struct buf *b = &bufs[i];
        if (!is_guard(b->base, b->offset) || !is_guard(b->base + b->offset + b->bytes, GUARD)) {
            report(c, what, "wrote outside of a buffer");
        }
        free(b->base);
    }
    n_bufs = 0;
    c->n_checks++;
}

void check_equal(struct check *c, const void *want, const void *got, size_t bytes, size_t element,
                 const char *what)
{
    const unsigned char *a = want, *b = got;
    for (size_t i = 0; i < bytes; i++) {
        if (a[i] != b[i]) {
            char how[128];
            uint32_t x = 0, y = 0;
            size_t at = i / element;
            memcpy(&x, a + at * element, element);
            memcpy(&y, b + at * element, element);
            snprintf(how, sizeof(how), "element %zu is %#x instead of %#x", at, y, x);
            report(c, what, how);
            return;
        }
    }
}

uint16_t *check_bf16(struct check *c, size_t n, float scale)
{
    uint16_t *x = take_buf(n * sizeof(uint16_t), 2);
    c->stream_id++;
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = dmk_rng_u64(c->seed, c->stream_id, i);
        float unit = (float)((double)(bits >> 11) * 0x1.0p-52 - 1.0);
        x[i] = bits % 61 == 0 ? 0 : dmk_f32_to_bf16(unit * scale);
    }
    return x;
}

uint8_t *check_bytes(struct check *c, size_t n)
{
    uint8_t *x = take_buf(n, 1);
    c->stream_id++;
    for (size_t i = 0; i < n; i++) {
        x[i] = (uint8_t)dmk_rng_u64(c->seed, c->stream_id, i);
    }
    return x;
}

uint32_t check_u32(struct check *c, uint32_t below)
{
    return (uint32_t)(dmk_rng_u64(c->seed, ++c->stream_id, 0) % below);
}

/* Items in an order that changes from call to call, each with scratch memory full of NaN. */
static void run_shuffled(struct dmk_stream *stream, dmk_task_fn *fn, const void *args,
                         uint32_t n_items)
{
    struct shuffle_stream *s = (struct shuffle_stream *)stream;
    if (s->check->bench) {
        for (uint32_t i = 0; i < n_items; i++) {
            fn(args, i, s->scratch);
        }
        return;
    }
    uint32_t step = 1 + check_u32(s->check, n_items);
    while (n_items > 1) { /* a step without a common divisor visits every item once */
        uint32_t a = step, b = n_items;
        while (b) {
            uint32_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1) {
            break;
        }
        step++;
    }
    for (uint32_t i = 0; i < n_items; i++) {
        memset(s->scratch, 0xff, stream->scratch_bytes);
        fn(args, (uint32_t)((uint64_t)i * step % n_items), s->scratch);
    }
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of this thread: what others do on the machine then counts only where it takes caches and memory. */
static double cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

void check_bench(struct check *c, const char *what, void (*fn)(void *ud), void *ud, double bytes,
                 double flops)
{
    static double times[MAX_TIMES];
    uint64_t begin = dmk_clock_ns();
    uint32_t n = 0;
    if (!c->bench) {
        return;
    }
    fn(ud);
    while (n < 5 || (n < MAX_TIMES && dmk_clock_ns() - begin < 500 * DMK_NS_PER_MS)) {
        double start = cpu_ns();
        fn(ud);
        times[n++] = cpu_ns() - start;
    }
    qsort(times, n, sizeof(times[0]), compare_doubles);
    double ns = times[n / 2];
    printf("%-7s %-34s %10.1f us (best %.1f, worst %.1f, n %u) %7.2f GB/s %7.1f GFLOP/s, best %.2f "
           "GB/s %.1f GFLOP/s\n",
           c->fast.name, what, ns * 1e-3, times[0] * 1e-3, times[n - 1] * 1e-3, n, bytes / ns,
           flops / ns, bytes / times[0], flops / times[0]);
    fflush(stdout);
}

static const struct {
    const char *name;
    void (*fn)(struct check *c);
} tests[] = {{"exp", check_exp},     {"linear", check_linear}, {"rows", check_rows},
             {"pages", check_pages}, {"attn", check_attn},     {"moe", check_moe}};

static bool is_test(const char *name)
{
    bool found = false;
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        found = found || strcmp(tests[i].name, name) == 0;
    }
    return found;
}

/* Also where a name is unknown: what runs nothing must not pass. */
static int tell_usage(void)
{
    fprintf(stderr, "usage: check [--bench] [--test NAME] [--variant avx2|avx512|ref] [--seed N] "
                    "[--repeat N]\ntests:");
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        fprintf(stderr, " %s", tests[i].name);
    }
    fprintf(stderr, "\n");
    return 2;
}

static void run_tests(struct check *c, const char *only, uint64_t seed)
{
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        uint32_t failed = c->n_failed, done = c->n_checks;
        if (only && strcmp(only, tests[i].name) != 0) {
            continue;
        }
        c->seed = seed;
        c->stream_id = 0;
        c->test = tests[i].name;
        tests[i].fn(c);
        printf("%-7s %-8s %4u cases, %u failures\n", c->fast.name, c->test, c->n_checks - done,
               c->n_failed - failed);
    }
}

int main(int argc, char **argv)
{
    struct check c = {.stream = &shuffle.base, .seed = dmk_random_u64()};
    const char *test = NULL, *variant = NULL, *variants[] = {"avx2", "avx512", "ref"};
    uint32_t repeat = 1, n_run = 0;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--bench") == 0) {
            c.bench = true;
        } else if (strcmp(argv[i], "--test") == 0) {
            test = value;
            i++;
        } else if (strcmp(argv[i], "--variant") == 0) {
            variant = value;
            i++;
        } else if (strcmp(argv[i], "--seed") == 0) {
            c.seed = strtoull(value, NULL, 0);
            i++;
        } else if (strcmp(argv[i], "--repeat") == 0) {
            repeat = (uint32_t)strtoul(value, NULL, 0);
            i++;
        } else {
            return tell_usage();
        }
    }
    bool known = !variant;
    for (size_t v = 0; v < sizeof(variants) / sizeof(variants[0]); v++) {
        known = known || strcmp(variant, variants[v]) == 0;
    }
    if (!known || repeat == 0 || (test && !is_test(test))) {
        return tell_usage();
    }
    shuffle.base = (struct dmk_stream){1, dmk_kernels_scratch_bytes(MAX_K), run_shuffled};
    shuffle.check = &c;
    shuffle.scratch = aligned_alloc(64, (shuffle.base.scratch_bytes + 63) / 64 * 64);
    dmk_assert(shuffle.scratch);
    memset(shuffle.scratch, 0, shuffle.base.scratch_bytes);
    printf("check: seed %#llx\n", (unsigned long long)c.seed);
    dmk_kernels_ref(&c.ref);
    for (size_t v = 0; v < sizeof(variants) / sizeof(variants[0]); v++) {
        bool wanted = variant ? strcmp(variant, variants[v]) == 0 : strcmp(variants[v], "ref") != 0;
        dmk_kernels_ref(&c.fast);
        if (!wanted ||
            (strcmp(variants[v], "ref") != 0 && !dmk_kernels_cpu_variant(variants[v], &c.fast))) {
            continue;
        }
        n_run++;
        for (uint32_t i = 0; i < repeat; i++) {
            run_tests(&c, test, c.seed + i);
        }
    }
    free(shuffle.scratch);
    if (n_run == 0) {
        printf("check: no fast set runs on this processor\n");
        return 77; /* meson: skipped */
    }
    return c.n_failed > 0;
}
