/* Twins, verdicts, timing and main; see device.h. */
#include "tests/check/cuda/device.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/rng.h"
#include "kernels/dtype.h"

#define GUARD     1024
#define MAX_TWINS 64
#define MAX_RUNS  60
#define L2_BYTES  ((size_t)64 << 20)

static struct twin twins[MAX_TWINS];
static uint32_t n_twins;

struct twin twin_new(struct device *d, size_t bytes)
{
    struct twin t = {.bytes = bytes};
    void *base;
    dmk_assert(n_twins < MAX_TWINS);
    t.host = malloc(bytes + 1);
    if (!t.host || d->be->ops->alloc(d->be, DMK_MEM_DEVICE, bytes + 2 * GUARD, &base) != 0) {
        fprintf(stderr, "check_cuda: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    unsigned char *image = malloc(bytes + 2 * GUARD);
    dmk_assert(image);
    memset(image, 0xa5, bytes + 2 * GUARD);
    memset(image + GUARD, 0xff, bytes);
    memset(t.host, 0xff, bytes);
    d->be->ops->copy(d->be, d->stream, base, image, bytes + 2 * GUARD);
    d->be->ops->sync(d->be, d->stream);
    free(image);
    t.dev = (unsigned char *)base + GUARD;
    twins[n_twins++] = t;
    return t;
}

struct twin twin_device(struct device *d, size_t bytes)
{
    struct twin t = {.bytes = bytes};
    dmk_assert(n_twins < MAX_TWINS);
    if (d->be->ops->alloc(d->be, DMK_MEM_DEVICE, bytes + 2 * GUARD, &t.dev) != 0) {
        fprintf(stderr, "check_cuda: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    t.dev = (unsigned char *)t.dev + GUARD;
    twins[n_twins++] = t;
    return t;
}

void twin_send(struct device *d, struct twin t)
{
    d->be->ops->copy(d->be, d->stream, t.dev, t.host, t.bytes);
    d->be->ops->sync(d->be, d->stream);
}

uint32_t draw_u32(struct device *d, uint32_t below)
{
    return (uint32_t)(dmk_rng_u64(d->seed, ++d->draw, 0) % below);
}

static float unit(uint64_t bits)
{
    return (float)((double)(bits >> 11) * 0x1.0p-52 - 1.0);
}

struct twin twin_bf16(struct device *d, size_t n, float scale)
{
    struct twin t = twin_new(d, n * 2);
    uint16_t *x = t.host;
    d->draw++;
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = dmk_rng_u64(d->seed, d->draw, i);
        x[i] = bits % 61 == 0 ? 0 : dmk_f32_to_bf16(unit(bits) * scale);
    }
    twin_send(d, t);
    return t;
}

struct twin twin_f32(struct device *d, size_t n, float scale)
{
    struct twin t = twin_new(d, n * 4);
    float *x = t.host;
    d->draw++;
    for (size_t i = 0; i < n; i++) {
        x[i] = unit(dmk_rng_u64(d->seed, d->draw, i)) * scale;
    }
    twin_send(d, t);
    return t;
}

struct twin twin_bytes(struct device *d, size_t n, uint32_t low, uint32_t count)
{
    struct twin t = twin_new(d, n);
    uint8_t *x = t.host;
    d->draw++;
    for (size_t i = 0; i < n; i++) {
        x[i] = (uint8_t)(low + dmk_rng_u64(d->seed, d->draw, i) % count);
    }
    twin_send(d, t);
    return t;
}

struct twin twin_u32(struct device *d, size_t n, uint32_t below)
{
    struct twin t = twin_new(d, n * 4);
    uint32_t *x = t.host;
    d->draw++;
    for (size_t i = 0; i < n; i++) {
        x[i] = (uint32_t)(dmk_rng_u64(d->seed, d->draw, i) % below);
    }
    twin_send(d, t);
    return t;
}

void fail(struct device *d, const char *what, const char *how)
{
    if (d->n_failed++ < 40) {
        printf("FAIL %s: %s: %s\n", d->test, what, how);
    }
}

void device_fetch(struct device *d, void *host, const void *dev, size_t bytes)
{
    d->be->ops->copy(d->be, d->stream, host, dev, bytes);
    if (d->be->ops->sync(d->be, d->stream) != 0) {
        printf("FAIL %s: the device failed: %s\n", d->test, d->be->ops->describe(d->be, d->stream));
        exit(1);
    }
}

void device_end(struct device *d, const char *what)
{
    unsigned char guard[2 * GUARD];
    for (uint32_t i = 0; i < n_twins; i++) {
        unsigned char *base = (unsigned char *)twins[i].dev - GUARD;
        if (twins[i].host) {
            device_fetch(d, guard, base, GUARD);
            device_fetch(d, guard + GUARD, base + GUARD + twins[i].bytes, GUARD);
        }
        for (size_t b = 0; twins[i].host && b < sizeof(guard); b++) {
            if (guard[b] != 0xa5) {
                fail(d, what, "wrote outside of an array");
                break;
            }
        }
        d->be->ops->free(d->be, DMK_MEM_DEVICE, base, twins[i].bytes + 2 * GUARD);
        free(twins[i].host);
    }
    n_twins = 0;
    d->n_checks++;
}

void expect_bits(struct device *d, struct twin t, const char *what)
{
    unsigned char *got = malloc(t.bytes), *want = t.host;
    char how[96];
    dmk_assert(got);
    device_fetch(d, got, t.dev, t.bytes);
    for (size_t i = 0; i < t.bytes; i++) {
        if (got[i] != want[i]) {
            snprintf(how, sizeof(how), "byte %zu of %zu is %#x instead of %#x", i, t.bytes, got[i],
                     want[i]);
            fail(d, what, how);
            break;
        }
    }
    free(got);
}

void expect_same(struct device *d, const void *a_dev, const void *b_dev, size_t bytes,
                 const char *what)
{
    unsigned char *a = malloc(bytes), *b = malloc(bytes);
    char how[96];
    dmk_assert(a && b);
    device_fetch(d, a, a_dev, bytes);
    device_fetch(d, b, b_dev, bytes);
    for (size_t i = 0; i < bytes; i++) {
        if (a[i] != b[i]) {
            snprintf(how, sizeof(how), "byte %zu of %zu differs: %#x and %#x", i, bytes, a[i],
                     b[i]);
            fail(d, what, how);
            break;
        }
    }
    free(a);
    free(b);
}

static void judge(struct device *d, const float *want, const float *got, size_t n, double l2,
                  double worst, const char *what)
{
    double sum = 0, diff = 0, max = 0;
    size_t at = 0, n_bad = 0;
    char how[160];
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - want[i]);
        if (isnan(want[i]) && isnan(got[i])) {
            continue; /* neither side wrote it */
        }
        if (!(e < 1e30)) {
            n_bad++;
            at = i;
            continue;
        }
        sum += (double)want[i] * want[i];
        diff += e * e;
        if (e > max) {
            max = e;
            at = n_bad ? at : i;
        }
    }
    double rms = sqrt(sum / (double)n) + 1e-30, rel = sqrt(diff / (sum + 1e-30));
    if (n_bad > 0 || !(rel <= l2) || !(max / rms <= worst)) {
        snprintf(how, sizeof(how),
                 "l2 %.3g (of %.3g), worst %.3g (of %.3g), %zu not finite; [%zu] %g instead of %g",
                 rel, l2, max / rms, worst, n_bad, at, got[at], want[at]);
        fail(d, what, how);
    }
}

void expect_bf16(struct device *d, struct twin t, double l2, double worst, const char *what)
{
    size_t n = t.bytes / 2;
    uint16_t *raw = malloc(t.bytes), *host = t.host;
    float *want = malloc(n * 4), *got = malloc(n * 4);
    dmk_assert(raw && want && got);
    device_fetch(d, raw, t.dev, t.bytes);
    for (size_t i = 0; i < n; i++) {
        want[i] = dmk_bf16_to_f32(host[i]);
        got[i] = dmk_bf16_to_f32(raw[i]);
    }
    judge(d, want, got, n, l2, worst, what);
    free(raw);
    free(want);
    free(got);
}

void expect_f32(struct device *d, struct twin t, double l2, double worst, const char *what)
{
    float *got = malloc(t.bytes);
    dmk_assert(got);
    device_fetch(d, got, t.dev, t.bytes);
    judge(d, t.host, got, t.bytes / 4, l2, worst, what);
    free(got);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* A graph of `per` launches is replayed; the host's clock around launch and sync, less that of an empty wait,
 * is within a microsecond of the device's over so many. */
void device_bench(struct device *d, const char *what, void (*fn)(struct device *d, void *ud),
                  void *ud, double bytes, double flops)
{
    const uint32_t per = 20;
    double us[MAX_RUNS];
    struct dmk_graph *graph;
    if (!d->bench) {
        return;
    }
    fn(d, ud);
    d->be->ops->sync(d->be, d->stream);
    d->be->ops->graph_begin(d->be, d->stream);
    for (uint32_t i = 0; i < per; i++) {
        fn(d, ud);
    }
    if (d->be->ops->graph_end(d->be, d->stream, &graph) != 0) {
        fail(d, what, "capture failed");
        return;
    }
    for (uint32_t i = 0; i < 3; i++) {
        d->be->ops->graph_run(d->be, d->stream, graph);
    }
    d->be->ops->sync(d->be, d->stream);
    uint32_t n = 0;
    uint64_t begin = dmk_clock_ns();
    while (n < 7 || (n < MAX_RUNS && dmk_clock_ns() - begin < 60 * DMK_NS_PER_MS)) {
        uint64_t start = dmk_clock_ns();
        d->be->ops->graph_run(d->be, d->stream, graph);
        d->be->ops->sync(d->be, d->stream);
        us[n++] = (double)(dmk_clock_ns() - start) * 1e-3 / per;
    }
    d->be->ops->graph_free(d->be, graph);
    qsort(us, n, sizeof(us[0]), compare_doubles);
    double t = us[n / 2];
    printf("%-40s %9.2f us (%.2f to %.2f) %7.0f GB/s %3.0f%% %7.1f TFLOP/s %3.0f%%\n", what, t,
           us[n / 10], us[n * 9 / 10], bytes / t * 1e-3, bytes / t * 1e-3 / 41.0, flops / t * 1e-6,
           flops / t * 1e-6 / 7.9);
    fflush(stdout);
}

static const struct {
    const char *name;
    void (*fn)(struct device *d);
} tests[] = {{"rows", check_rows},     {"pages", check_pages}, {"linear", check_linear},
             {"attn", check_attn},     {"moe", check_moe},     {"sample", check_sample},
             {"engine", check_engine}, {"ranks", check_ranks}};

/* Also where a name is unknown: what runs nothing must not pass. */
static int tell_usage(void)
{
    fprintf(stderr, "usage: check_cuda [--bench] [--test NAME] [--seed N]\ntests:");
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        fprintf(stderr, " %s", tests[i].name);
    }
    fprintf(stderr, "\n");
    return 2;
}

static bool is_test(const char *name)
{
    bool found = false;
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        found = found || strcmp(tests[i].name, name) == 0;
    }
    return found;
}

int main(int argc, char **argv)
{
    struct device d = {.seed = dmk_random_u64()};
    struct dmk_backend_conf conf = {.max_k = 8192};
    struct dmk_error error = {0};
    const char *only = NULL;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--bench") == 0) {
            d.bench = true;
        } else if (strcmp(argv[i], "--test") == 0) {
            only = value;
            i++;
        } else if (strcmp(argv[i], "--seed") == 0) {
            d.seed = strtoull(value, NULL, 0);
            i++;
        } else {
            return tell_usage();
        }
    }
    if (only && !is_test(only)) {
        return tell_usage();
    }
    if (dmk_backend_open("cuda", &conf, &d.be, &error) != 0) {
        printf("check_cuda: skipped: %s\n", error.text);
        return 77;
    }
    d.stream = d.be->ops->stream(d.be, DMK_STREAM_COMPUTE);
    dmk_kernels_ref(&d.ref);
    d.be->ops->kernels(d.be, &d.cuda);
    printf("check_cuda: seed %#llx\n", (unsigned long long)d.seed);
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        if (only && strcmp(only, tests[i].name) != 0) {
            continue;
        }
        uint32_t failed = d.n_failed, done = d.n_checks;
        d.test = tests[i].name;
        d.draw = 0;
        tests[i].fn(&d);
        printf("cuda    %-8s %4u cases, %u failures\n", d.test, d.n_checks - done,
               d.n_failed - failed);
        fflush(stdout);
    }
    dmk_backend_close(&d.be);
    return d.n_failed > 0;
}
