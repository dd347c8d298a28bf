/* Hopper instructions that attention uses beyond those of copy.h and wgmma.h: boxes of three and four dimensions for the copy
 * engine, products with one side in registers or read across rows, barriers among some warps, registers that change
 * hands.
 *
 * Thin inline functions, one instruction each, named after the instruction. Nothing here knows what is computed
 * with it. */
#pragma once

#include "kernels/cuda/copy.h"
#include "kernels/cuda/wgmma.h"

/* ---- copies ---- */

__device__ __forceinline__ void tma_load_3d(void *dst, const CUtensorMap *map, uint64_t *bar,
                                            int32_t x, int32_t y, int32_t z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dmk_smem_u32(dst)),
                 "l"(map), "r"(dmk_smem_u32(bar)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void tma_load_4d(void *dst, const CUtensorMap *map, uint64_t *bar,
                                            int32_t x, int32_t y, int32_t z, int32_t w)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dmk_smem_u32(dst)),
                 "l"(map), "r"(dmk_smem_u32(bar)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

/* Orders a thread's own writes to shared memory before reads by wgmma and the copy engine. */
__device__ __forceinline__ void fence_async_shared()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- barriers among some warps ---- */

__device__ __forceinline__ void named_barrier(uint32_t id, uint32_t n_threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

/* Counts this warp in without waiting. */
__device__ __forceinline__ void named_arrive(uint32_t id, uint32_t n_threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

/* A barrier that says whether x was true in any of its threads. */
__device__ __forceinline__ bool named_barrier_any(uint32_t id, uint32_t n_threads, bool x)
{
    uint32_t any;
    asm volatile("{\n"
                 ".reg .pred p, q;\n"
                 "setp.ne.u32 p, %1, 0;\n"
                 "barrier.cta.red.or.pred q, %2, %3, p;\n"
                 "selp.u32 %0, 1, 0, q;\n"
                 "}\n"
                 : "=r"(any)
                 : "r"((uint32_t)x), "r"(id), "r"(n_threads)
                 : "memory");
    return any != 0;
}

template <int N> __device__ __forceinline__ void give_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> __device__ __forceinline__ void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- wgmma ---- */

/* Keeps the compiler from moving what it does with these registers across: products run in the background, and
 * neither a use may slip in front of the wait for them nor work meant to run under them behind it. */
template <int N> __device__ __forceinline__ void wgmma_hold(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

template <int N> __device__ __forceinline__ void wgmma_hold(uint32_t (&a)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+r"(a[i])::"memory");
    }
}

/* The high word of every tile's dmk_wgmma_desc. Tiles are rows of 128 bytes with the copy engine's swizzle, K-major (a row is
 * one index of M or N, K runs along it) or MN-major (a row is one index of K). Add (bytes >> 4) to step along K: 2
 * for 16 bf16 K-major, 128 MN-major. */
#define WGMMA_TILE_HIGH (1u << 30 | 1024u >> 4)

/* D[64][64] (+)= A[64][16] (registers) B[16][64]; trans_b: B is MN-major in shared memory. */
template <int TRANS_B>
__device__ __forceinline__ void wgmma_64x64_rs(float (&d)[32], uint32_t a0, uint32_t a1,
                                               uint32_t a2, uint32_t a3, uint64_t b, int accumulate)
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
__device__ __forceinline__ void wgmma_64x8_ss(float (&d)[4], uint64_t a, uint64_t b, int accumulate)
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

/* ---- small things ---- */

/* 2^x, the hardware's approximation; exp2_fast(0) is 1 and of -infinity +0. */
__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Where byte `byte` (0..127) of row `row` lies in a tile with 128-byte swizzle. */
__device__ __forceinline__ uint32_t swizzle_128(uint32_t row, uint32_t byte)
{
    return row * 128 + (byte ^ ((row & 7) << 4));
}
