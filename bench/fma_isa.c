/* What one thread can do in fused multiply-adds when nothing has to be loaded: the ceiling of matrix products.
 * Built once for each instruction set with VEC_HEADER and FMA_NAME. */
#include VEC_HEADER

#include "bench/fma_isa.h"

#define N_SUMS 12 /* enough to hide the latency of each */

double FMA_NAME(uint64_t n, float *ret_sum)
{
    vf sum[N_SUMS], total = vf_zero();
    const vf a = vf_set1(0.5f), b = vf_set1(1e-9f);
    for (int i = 0; i < N_SUMS; i++) {
        sum[i] = vf_set1((float)i);
    }
    for (uint64_t k = 0; k < n; k++) {
#pragma GCC unroll 12
        for (int i = 0; i < N_SUMS; i++) {
            sum[i] = vf_hold(vf_fma(a, b, sum[i]));
        }
    }
    for (int i = 0; i < N_SUMS; i++) {
        total = vf_add(total, sum[i]);
    }
    float lanes[VL];
    vf_store(lanes, total);
    *ret_sum = lanes[0];
    return 2.0 * N_SUMS * VL * (double)n;
}
