/* What the warps of a block share out among each other on sm_90: barriers among some of them, registers that change
 * hands, places in a swizzled tile. Thin: a function is one instruction. */
#pragma once

#include "kernels/cuda/copy.h"
#include "kernels/cuda/wgmma.h"

/* ---- barriers among some warps ---- */

__device__ __forceinline__ void dmk_named_barrier(uint32_t id, uint32_t n_threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

/* Counts this warp in without waiting. */
__device__ __forceinline__ void dmk_named_arrive(uint32_t id, uint32_t n_threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

/* A barrier that says whether x was true in any of its threads. */
__device__ __forceinline__ bool dmk_named_barrier_any(uint32_t id, uint32_t n_threads, bool x)
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

/* ---- registers of a warpgroup ---- */

template <int N> __device__ __forceinline__ void dmk_regs_raise()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> __device__ __forceinline__ void dmk_regs_drop()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- places ---- */

/* The caller's warpgroup, in a form that the compiler knows to be one number for the whole warp: addresses
 * that follow from it stay in uniform registers. */
__device__ __forceinline__ uint32_t dmk_warpgroup()
{
    return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
}

/* Where byte `byte` (0..127) of row `row` lies in a tile with 128-byte swizzle. */
__device__ __forceinline__ uint32_t dmk_swizzle_128(uint32_t row, uint32_t byte)
{
    return row * 128 + (byte ^ ((row & 7) << 4));
}
