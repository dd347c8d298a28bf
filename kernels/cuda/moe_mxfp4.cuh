/* What a lane of the MXFP4 experts does in one step: unpack codes, read and write memory, multiply. */
#pragma once

#include <stdint.h>

namespace dmk
{

/* In each half of a pair the bits of a number: sign, and the three of its magnitude. */
constexpr uint32_t SIGNS = 0x80008000u, TOPS = 0x01000100u, LOWS = 0x00c000c0u;

/* Four numbers of a row and its neighbour 8 rows on, twice; see kernels/pack.c. The results count for
 * 2^126 times less than the codes. */
__device__ __forceinline__ void decode(uint32_t word, uint32_t (&a)[4])
{
    const uint32_t turned = __funnelshift_r(word, word, 6);
    a[0] = word & (SIGNS | TOPS | LOWS);
    a[1] = word << 4 & (SIGNS | TOPS | LOWS);
    a[2] = turned & (SIGNS | TOPS | LOWS);
    a[3] = (word << 6 & (SIGNS | LOWS)) | (turned << 4 & TOPS);
}

/* Both numbers times the bf16 of one half of `scales`. */
template <bool HIGH> __device__ __forceinline__ uint32_t scaled(uint32_t pair, uint32_t scales)
{
    uint32_t out;
    if (HIGH) {
        asm("{\n.reg .b16 low, high;\n.reg .b32 both;\n"
            "mov.b32 {low, high}, %2;\nmov.b32 both, {high, high};\n"
            "mul.rn.bf16x2 %0, %1, both;\n}"
            : "=r"(out)
            : "r"(pair), "r"(scales));
    } else {
        asm("{\n.reg .b16 low, high;\n.reg .b32 both;\n"
            "mov.b32 {low, high}, %2;\nmov.b32 both, {low, low};\n"
            "mul.rn.bf16x2 %0, %1, both;\n}"
            : "=r"(out)
            : "r"(pair), "r"(scales));
    }
    return out;
}

/* Bytes 2 * I and 2 * I + 1 of `bytes` as the exponents of two bf16. */
template <int I> __device__ __forceinline__ uint32_t scale_pair(uint32_t bytes)
{
    return __byte_perm(bytes, 0, 0x4040 | (2 * I + 1) << 8 | 2 * I) << 7;
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

__device__ __forceinline__ void add_release(uint32_t *p, uint32_t n)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory");
}

} // namespace dmk
