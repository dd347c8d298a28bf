/* The arithmetic that the prefill and the decode kernel of attention share, operation by operation.
 *
 * For a query head of a token at position p:
 *   total: m = 8 sink, l = 1, o = 0 (scores are kept unscaled, so the sink times 8)
 *   for each split of the keys that the window touches, ascending: its own m = -inf, l = 0, o = 0, and
 *     for each block of 64 keys, ascending:
 *       s_j = q . k_j (tensor cores, d in four steps of 16; -inf where not visible)
 *       m' = max(s) if it is above m by more than 8 / K, else m;  c = 2^(K (m - m'));  p_j = 2^(K s_j - K m')   with K = log2(e) / 8
 *       l_i = l_i c + p summed over the block's keys j with (j mod 8) / 2 == i, in a tree; i = 0..3
 *       o = o c, then + bf16(p_j) v_j (tensor cores, keys in four steps of 16)
 *     total = fold(total, (m, (l_0 + l_1) + (l_2 + l_3), o))
 *   out = bf16(o * (1 / l)), the reciprocal rounded
 * m trails the maximum by up to a factor 2^8 in p, which costs no accuracy and spares nearly all rescaling of o.
 * A block or split without a visible key changes nothing, bit for bit: c is 1 and every p is +0. So a
 * row's result does not depend on how many blocks its tile walks through. Every operation is written out
 * (no contraction), since the two kernels must round alike. */
#pragma once

#include "kernels/cuda/hopper.cuh"

#define ATTN_SCALE_LOG2 0.18033688011112042f /* log2(e) / sqrt(64) */
#define ATTN_NONE       __int_as_float(0xff800000)

/* The split's new m. Nothing visible yet: both may be -inf. */
__device__ __forceinline__ float attn_raise(float m, float top)
{
    return top - m > 8.0f / ATTN_SCALE_LOG2 ? top : m;
}

/* 2^(K (a - b)); b is not above any a, and 0 for a = b = -inf */
__device__ __forceinline__ float attn_shrink(float a, float b)
{
    return a == b ? 1.0f : exp2_fast(__fmul_rn(__fsub_rn(a, b), ATTN_SCALE_LOG2));
}

/* K m, or 0 where nothing is visible yet, so that p comes out as +0 and not as a NaN. */
__device__ __forceinline__ float attn_offset(float m)
{
    return m == ATTN_NONE ? 0.0f : __fmul_rn(m, ATTN_SCALE_LOG2);
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
    b = split_m == ATTN_NONE ? 0.0f : attn_shrink(split_m, top);
    m = top;
}

__device__ __forceinline__ float attn_fold(float total, float a, float split, float b)
{
    return __fmaf_rn(total, a, __fmul_rn(split, b));
}
