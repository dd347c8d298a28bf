/* What a lane of the MXFP4 experts does in one step: unpack codes, read and write memory, multiply. */
#pragma once

#include <stdint.h>

namespace dmk
{

constexpr uint32_t CODE_MASK = 0x01c001c0u, SIGN_MASK = 0x80008000u;

/* Four numbers of a row and its neighbour 8 rows on, twice; see kernels/pack.c. The results count for
 * 2^126 times less than the codes. */
__device__ __forceinline__ void decode(uint32_t word, uint32_t (&a)[4])
{
    a[0] = word & (CODE_MASK | SIGN_MASK);
    a[1] = word << 3 & (CODE_MASK | SIGN_MASK);
    a[2] = (word << 6 & CODE_MASK) | (word << 2 & SIGN_MASK);
    a[3] = (word >> 3 & CODE_MASK) | (word << 1 & SIGN_MASK);
}

__device__ __forceinline__ uint32_t scaled(uint32_t pair, uint32_t scale)
{
    uint32_t out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(scale));
    return out;
}

/* Byte i of `bytes` as the exponent of two bf16. */
template <int I> __device__ __forceinline__ uint32_t scale_pair(uint32_t bytes)
{
    return __byte_perm(bytes, 0, 0x4040 | I << 8 | I) << 7;
}

__device__ __forceinline__ uint4 ldg128(const uint16_t *p)
{
    /* Past the first-level cache: z was written by other blocks of this launch. */
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

__device__ __forceinline__ float sigmoid(float x)
{
    return __fdividef(1.0f, 1.0f + __expf(-x));
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void add_release(uint32_t *p)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}

} // namespace dmk
