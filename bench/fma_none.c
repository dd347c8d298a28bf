/* Stands in where no vector set is built for the processor family. */
#include "bench/fma_isa.h"

double bench_fma_avx2(uint64_t n, float *ret_sum)
{
    (void)n;
    *ret_sum = 0;
    return 0;
}

double bench_fma_avx512(uint64_t n, float *ret_sum)
{
    (void)n;
    *ret_sum = 0;
    return 0;
}
