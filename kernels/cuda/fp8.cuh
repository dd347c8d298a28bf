/* Activations as E4M3, to the bit as kernels/fp8.h has it. */
#pragma once

#include "kernels/cuda/cuda.h"

/* lo in the low byte */
__device__ __forceinline__ uint32_t dmk_e4m3_pair(float lo, float hi)
{
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(hi), "f"(lo));
    return pair;
}

/* The codes of a thread's 8 numbers (bf16) of a group of 128 that 16 neighbouring threads hold, and the group's scale.
 * All threads of the warp take part. */
__device__ __forceinline__ uint2 dmk_e4m3_group(const uint4 &v, float *ret_scale)
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        top = max(top, max(w[i] << 16 & 0x7fff0000u, w[i] & 0x7fff0000u));
    }
#pragma unroll
    for (int d = 1; d < 16; d *= 2) {
        top = max(top, __shfl_xor_sync(0xffffffffu, top, d));
    }
    const bool finite = top < 0x7f800000u;
    const float most = finite ? fmaxf(__uint_as_float(top), 0x1p-100f) : 1.0f;
    const float inverse = finite ? __fdiv_rn(448.0f, most) : 0.0f;
    *ret_scale = finite ? __fdiv_rn(most, 448.0f) : __uint_as_float(0x7fc00000u);
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        pair[i] = dmk_e4m3_pair(__fmul_rn(dmk_lo(w[i]), inverse), __fmul_rn(dmk_hi(w[i]), inverse));
    }
    return make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
}
