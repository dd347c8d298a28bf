/* Fused multiply-adds in the vectors of one instruction set, n rounds; returns the operations done. The sum
 * is there to be looked at, so that the work can not be left out. */
#pragma once

#include <stdint.h>

double bench_fma_avx2(uint64_t n, float *ret_sum);
double bench_fma_avx512(uint64_t n, float *ret_sum);
