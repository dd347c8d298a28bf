/* What the machine allows: the read bandwidth of memory and the fused multiply-adds of some threads, to stand
 * beside what was measured in the same run. Each takes under a second and returns the median of its runs. */
#pragma once

#include <stdint.h>

struct bench_stats {
    double median, min, max;
};

/* Sorts the values. */
struct bench_stats bench_summarise(double *values, uint32_t n);

/* GB/s of a plain loop over 1 GiB, a share in each thread. */
struct bench_stats bench_read_gbs(uint32_t n_threads, uint32_t runs);

/* GFLOP/s of fused multiply-adds on registers with the widest vectors that the kernels use; all 0 where
 * they use none. */
struct bench_stats bench_fma_gflops(uint32_t n_threads, uint32_t runs);
