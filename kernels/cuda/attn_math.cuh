/* The arithmetic that the prefill and the decode kernel of attention share, operation by operation.
 *
 * Keys come in blocks: 128 on full layers, 64 on sliding ones (from position 0 on). A block's step, for a query head of a token:
 *   s_j = q . k_j (tensor cores, d in four steps of 16; -inf where not visible)
 *   m' = max(s) if it is above m by more than 60 / K, else m;  c = 2^(K (m - m'));  p_j = 2^(K s_j - K m')   with K = log2(e) / 8
 *   l_i = l_i c + (p summed over the block's keys j with (j mod 8) / 2 == i, in a tree); i = 0..3
 *   o = o c, then + bf16(p_j) v_j (tensor cores, keys in steps of 16)
 * Full layers: total: m = 8 sink, l = 1, o = 0 (scores are kept unscaled, so the sink times 8)
 *   for each split of the keys, ascending: its own m = 8 sink, l = 0, o = 0, and its blocks' steps, ascending;
 *     total = fold(total, (m, (l_0 + l_1) + (l_2 + l_3), o))
 * Sliding layers: m = 8 sink, l_0 = 1, the other l_i = 0, o = 0, and the steps of the blocks that the window touches; l = (l_0 + l_1) + (l_2 + l_3)
 *   out = bf16(o * (1 / l)), the reciprocal rounded
 * m stands for the order of magnitude only: weights and sums are floating-point numbers and lose nothing as long as they stay
 * far from its ends. So it begins at the sink, below which no row's maximum is, and hardly ever moves. A step takes it as it is, and
 * only where a sum of weights comes out above ATTN_FAR does it look for the maximum and begin again.
 * A block or split without a visible key changes nothing, bit for bit: c is 1 and every p is +0. So a
 * row's result does not depend on how many blocks its tile walks through. Every operation is written out
 * (no contraction), since the two kernels must round alike. */
#pragma once

#include "kernels/cuda/hopper.cuh"

#define ATTN_SCALE_LOG2 0.18033688011112042f /* log2(e) / sqrt(64) */
#define ATTN_NONE       __int_as_float(0xff800000)

#define ATTN_FAR 0x1p59f /* a factor 2 below what moves m, for sums are rounded */

/* 2^x, the hardware's approximation; exp2_fast(0) is 1 and of -infinity +0. */
__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The first m; a sink of -inf is as good as one far below every score. */
__device__ __forceinline__ float attn_begin(float sink)
{
    return fmaxf(8.0f * sink, -1e30f);
}

/* The m of a block whose maximum is top. */
__device__ __forceinline__ float attn_raise(float m, float top)
{
    return top - m > 60.0f / ATTN_SCALE_LOG2 ? top : m;
}

/* 2^(K (a - b)); b is not below a. */
__device__ __forceinline__ float attn_shrink(float a, float b)
{
    return a == b ? 1.0f : exp2_fast(__fmul_rn(__fsub_rn(a, b), ATTN_SCALE_LOG2));
}

__device__ __forceinline__ float attn_offset(float m)
{
    return __fmul_rn(m, ATTN_SCALE_LOG2);
}

__device__ __forceinline__ float attn_weight(float s, float offset)
{
    return exp2_fast(__fmaf_rn(s, ATTN_SCALE_LOG2, -offset));
}

/* Factors of a fold: new maximum in m, the total's a and the split's b. */
__device__ __forceinline__ void attn_fold_factors(float &m, float split_m, float &a, float &b)
{
    float top = fmaxf(m, split_m);
    a = attn_shrink(m, top);
    b = attn_shrink(split_m, top);
    m = top;
}

__device__ __forceinline__ float attn_fold(float total, float a, float split, float b)
{
    return __fmaf_rn(total, a, __fmul_rn(split, b));
}
