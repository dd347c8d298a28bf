/* The matrix instruction of a warpgroup (sm_90a): d[64][N] (+)= a[64][16] * b[N][16], bf16 in, fp32 out.
 *
 * a and b lie in shared memory as the copy engine leaves boxes of 64 columns with 128-byte swizzle: rows of 128
 * bytes, groups of 8 rows, 1024-byte aligned. Lane 4g + t of warp w holds d at rows 16w + g and 16w + g + 8, columns
 * 8j + 2t and 8j + 2t + 1: d[4j], d[4j + 1] of the first row, d[4j + 2], d[4j + 3] of the second. */
#pragma once

#include "kernels/cuda/copy.h"
#include "kernels/cuda/wgmma_bf16.cuh"

/* A tile's descriptor: the high word is the same for all tiles; add 2 to the low one for each 16 of k. */
#define DMK_WGMMA_HIGH (1u << 30 | 1024u >> 4)

__device__ __forceinline__ uint32_t dmk_wgmma_low(const void *smem)
{
    return (dmk_smem_u32(smem) & 0x3ffff) >> 4 | 1u << 16;
}

__device__ __forceinline__ uint64_t dmk_wgmma_desc(const void *smem)
{
    return (uint64_t)DMK_WGMMA_HIGH << 32 | dmk_wgmma_low(smem);
}

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

/* Keeps the compiler from moving what it does with these registers across: a product runs in the background. */
template <int N> __device__ __forceinline__ void dmk_wgmma_hold(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}
