/* Limits of the machine; see limits.h. */
#include "bench/limits.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "bench/fma_isa.h"
#include "common/backend/team.h"
#include "common/base/clock.h"
#include "kernels/kernels.h"

#define MAX_RUNS   100
#define FMA_ROUNDS (4u << 20)

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct bench_stats bench_summarise(double *values, uint32_t n)
{
    qsort(values, n, sizeof(*values), compare_doubles);
    return (struct bench_stats){values[n / 2], values[0], values[n - 1]};
}

static struct dmk_team *new_team(uint32_t n_threads)
{
    struct dmk_team *team;
    if (dmk_team_new("limits", n_threads, true, 0, &team, NULL) != 0) {
        fprintf(stderr, "bench: no threads\n");
        exit(1);
    }
    return team;
}

/* Reads the whole buffer, a share in each thread, as fast as one core can: wide loads and prefetches. */
struct reader {
    const uint64_t *data;
    size_t n_words;
    uint32_t n_threads;
    atomic_ullong sink;
};

#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static void
read_share(void *ud, uint32_t thread)
{
    struct reader *r = ud;
    size_t share = r->n_words / r->n_threads / 64 * 64;
    const uint64_t *p = r->data + share * thread;
    uint64_t sum[16] = {0};
    for (size_t i = 0; i < share; i += 16) {
        __builtin_prefetch(p + i + 256);
        __builtin_prefetch(p + i + 264);
        for (size_t j = 0; j < 16; j++) {
            sum[j] ^= p[i + j];
        }
    }
    for (size_t j = 1; j < 16; j++) {
        sum[0] ^= sum[j];
    }
    atomic_fetch_xor(&r->sink, sum[0]);
}

struct bench_stats bench_read_gbs(uint32_t n_threads, uint32_t runs)
{
    const size_t bytes = (size_t)1 << 30;
    double gbs[MAX_RUNS];
    struct dmk_team *team = new_team(n_threads);
    uint64_t *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        fprintf(stderr, "bench: no memory for the bandwidth test\n");
        exit(1);
    }
    madvise(data, bytes, MADV_HUGEPAGE);
    for (size_t i = 0; i < bytes / 8; i += 8) {
        data[i] = i;
    }
    struct reader reader = {.data = data, .n_words = bytes / 8, .n_threads = n_threads};
    for (uint32_t i = 0; i < runs; i++) {
        uint64_t start = dmk_clock_ns();
        dmk_team_each(team, read_share, &reader);
        gbs[i] = (double)bytes / (double)(dmk_clock_ns() - start);
    }
    dmk_team_free(&team);
    munmap(data, bytes);
    return bench_summarise(gbs, runs);
}

struct multiplier {
    double (*fn)(uint64_t n, float *ret_sum);
    _Atomic double flops;
};

static void multiply(void *ud, uint32_t thread)
{
    struct multiplier *m = ud;
    float sum;
    double flops = m->fn(FMA_ROUNDS, &sum);
    (void)thread;
    if (sum < 0) { /* never: the sum has to be known */
        return;
    }
    double seen = atomic_load(&m->flops);
    while (!atomic_compare_exchange_weak(&m->flops, &seen, seen + flops)) {
    }
}

struct bench_stats bench_fma_gflops(uint32_t n_threads, uint32_t runs)
{
    double gflops[MAX_RUNS];
    struct dmk_kernels kernels;
    struct multiplier m = {0};
    dmk_kernels_cpu(&kernels);
    m.fn = strcmp(kernels.name, "avx512") == 0 ? bench_fma_avx512
           : strcmp(kernels.name, "avx2") == 0 ? bench_fma_avx2
                                               : NULL;
    if (!m.fn) {
        return (struct bench_stats){0};
    }
    struct dmk_team *team = new_team(n_threads);
    for (uint32_t i = 0; i < runs; i++) {
        atomic_store(&m.flops, 0);
        uint64_t start = dmk_clock_ns();
        dmk_team_each(team, multiply, &m);
        gflops[i] = atomic_load(&m.flops) / (double)(dmk_clock_ns() - start);
    }
    dmk_team_free(&team);
    return bench_summarise(gflops, runs);
}
