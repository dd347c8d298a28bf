/* The matrix instruction of a warpgroup (sm_90a): d[64][N] (+)= a[64][16] * b[N][16], bf16 in, fp32 out, or E4M3 with
 * 32 columns a time.
 *
 * a and b lie in shared memory as the copy engine leaves boxes of 64 (E4M3: 128) columns with 128-byte swizzle: rows of
 * 128 bytes, groups of 8 rows, 1024-byte aligned. Lane 4g + t of warp w holds d at rows 16w + g and 16w + g + 8, columns
 * 8j + 2t and 8j + 2t + 1: d[4j], d[4j + 1] of the first row, d[4j + 2], d[4j + 3] of the second. */
#pragma once

#include "kernels/cuda/copy.h"
#include "kernels/cuda/wgmma_bf16.cuh"
#include "kernels/cuda/wgmma_e4m3.cuh"
#include "kernels/cuda/wgmma_e4m3_ss.cuh"

/* Descriptor of a tile in shared memory: rows of 128 bytes, the 16-byte piece c of row r at piece c ^ (r % 8), groups of
 * 8 rows after each other; K-major (a row is one index of M or N, K runs along it) or MN-major (a row is one index of
 * K). The high word is the same for all tiles. Add bytes / 16 to the low one to step along K: 2 for 16 bf16 or 32 E4M3
 * K-major, 128 for 16 bf16 MN-major. */
#define DMK_WGMMA_HIGH (1u << 30 | 1024u >> 4)

__device__ __forceinline__ uint32_t dmk_wgmma_low(uint32_t addr)
{
    return (addr & 0x3ffff) >> 4 | 1u << 16;
}

__device__ __forceinline__ uint32_t dmk_wgmma_low(const void *smem)
{
    return dmk_wgmma_low(dmk_smem_u32(smem));
}

/* From the low word. */
__device__ __forceinline__ uint64_t dmk_wgmma_desc(uint32_t low)
{
    uint64_t desc;
    asm("mov.b64 %0, {%1, %2};" : "=l"(desc) : "r"(low), "n"(DMK_WGMMA_HIGH));
    return desc;
}

__device__ __forceinline__ uint64_t dmk_wgmma_desc(const void *smem)
{
    return (uint64_t)DMK_WGMMA_HIGH << 32 | dmk_wgmma_low(smem);
}

/* Before the first wgmma, and whenever its registers were written by other instructions. */
__device__ __forceinline__ void dmk_wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void dmk_wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N> __device__ __forceinline__ void dmk_wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Keeps the compiler from moving what it does with these registers across: products run in the background, and
 * neither a use may slip in front of the wait for them nor work meant to run under them behind it. */
template <int N> __device__ __forceinline__ void dmk_wgmma_hold(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

template <int N> __device__ __forceinline__ void dmk_wgmma_hold(uint32_t (&a)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+r"(a[i])::"memory");
    }
}

/* D[64][64] (+)= A[64][16] (registers) B[16][64]; trans_b: B is MN-major in shared memory. */
template <int TRANS_B>
__device__ __forceinline__ void dmk_wgmma_64x64_rs(float (&d)[32], uint32_t a0, uint32_t a1,
                                                   uint32_t a2, uint32_t a3, uint64_t b,
                                                   int accumulate)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n"
                 "}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(TRANS_B));
}

/* D[64][8] (+)= A[64][16] B[16][8], both from shared memory; trans_a: A is MN-major. */
template <int TRANS_A>
__device__ __forceinline__ void dmk_wgmma_64x8_ss(float (&d)[4], uint64_t a, uint64_t b,
                                                  int accumulate)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3}, %4, %5, p, 1, 1, %7, 0;\n"
                 "}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(a), "l"(b), "r"(accumulate), "n"(TRANS_A));
}
