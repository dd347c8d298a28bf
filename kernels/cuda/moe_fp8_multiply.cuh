/* FP8 experts, the multiplying side: four-bit weights of a stage to E4M3 in registers, by its tokens, with both
 * scales into the accumulators. Part of moe_fp8.cu. */
#pragma once

#include "kernels/cuda/moe_fp8_work.cuh"

namespace
{

/* Scales of the lane's tokens in groups of 16: 2t, 2t + 1, 8 + 2t, 8 + 2t + 1. */
template <int N, int FIRST, int LAST>
__device__ __forceinline__ void load_scales(float (&scale)[N / 4], uint32_t at)
{
#pragma unroll
    for (int i = FIRST; i < LAST; i++) {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(scale[4 * i]), "=f"(scale[4 * i + 1]), "=f"(scale[4 * i + 2]),
                       "=f"(scale[4 * i + 3])
                     : "r"(at + i * 64));
    }
}

template <int N> __device__ __forceinline__ void multiply_by(float (&acc)[N], float factor)
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        acc[i] *= factor;
    }
}

/* a / b of powers of two. */
__device__ __forceinline__ float ratio_of_powers(float a, float b)
{
    return __uint_as_float(__float_as_uint(a) - __float_as_uint(b) + 0x3f800000u);
}

/* Four wgmma: raw = W x of 64 rows and one block of K. `b` is the low half of a descriptor. */
template <int N>
__device__ __forceinline__ void issue(float (&raw)[N / 2], const uint32_t (&a)[16], uint32_t b)
{
    dmk_wgmma_hold(raw);
    dmk_wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        dmk_wgmma_e4m3<N>(raw, a + 4 * k, dmk_wgmma_desc(b + k * 2), k != 0);
    }
    dmk_wgmma_commit();
}

/* The E4M3 bytes of magnitudes 0 to 3 and 4 to 7 of a group: number j is 0, 1/2, 1, 3/2, 2, 3, 4, 6 times 2^shift. */
__device__ __forceinline__ uint2 codes_of(int shift)
{
    const float one = __uint_as_float((uint32_t)(127 + shift) << 23);
    return make_uint2(dmk_e4m3_pair(0.0f, 0.5f * one) | dmk_e4m3_pair(one, 1.5f * one) << 16,
                      dmk_e4m3_pair(2.0f * one, 3.0f * one) | dmk_e4m3_pair(4.0f * one, 6.0f * one) << 16);
}

/* Bytes of b:a by the nibbles of `which`; unlike __byte_perm's these are not masked, so their fourth bits are zero. */
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t which)
{
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(which));
    return d;
}

/* What becomes A of 64 rows and one block of K: words of eight codes, and the bytes that say the shifts of their groups. */
struct coded {
    uint32_t word[8];
    uint2 shift;
};

__device__ __forceinline__ void load_codes(struct coded &c, uint32_t codes, uint32_t shifts)
{
    c.shift = dmk_lds64(shifts);
    const uint4 first = dmk_lds128(codes), second = dmk_lds128(codes + 2048);
    c.word[0] = first.x, c.word[1] = first.y, c.word[2] = first.z, c.word[3] = first.w;
    c.word[4] = second.x, c.word[5] = second.y, c.word[6] = second.z, c.word[7] = second.w;
}

/* 8 * (shift of word i's group - the lowest shift). */
__device__ __forceinline__ uint32_t shift_of(const struct coded &c, int i)
{
    return permute(i % 2 ? c.shift.y : c.shift.x, 0, 0x4440 + i / 2);
}

/* Whether a half times 2^shift is less than 2^-6, E4M3's least normal number, in one of the lane's groups: a byte below 72. */
__device__ __forceinline__ bool has_subnormal(const struct coded &c)
{
    return ((c.shift.x + 0x38383838u) & (c.shift.y + 0x38383838u) & 0x80808080u) != 0x80808080u;
}

/* The eight bytes of every word's group, from a table of those of all shifts. */
__device__ __forceinline__ void bytes_by_table(uint2 (&bytes)[8], const struct coded &c, uint32_t table)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        bytes[i] = dmk_lds64(table + shift_of(c, i));
    }
}

/* The same of normal numbers: a power of two is 8 in a byte, so the shift's byte is added to what the lowest shift would
 * have if its numbers were normal. Zero stays zero. */
__device__ __forceinline__ void bytes_of_normal(uint2 (&bytes)[8], const struct coded &c)
{
    static_assert(DMK_FP8PACK_SHIFT_LOW == -14, "8 * 14 less than the bytes 0, 48, 56, 60, 64, 68, 72, 76 of shift 0");
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t shift = shift_of(c, i);
        bytes[i].x = shift * 0x01010100u - (64u << 8) - (56u << 16) - (52u << 24);
        bytes[i].y = shift * 0x01010101u - 48u - (44u << 8) - (40u << 16) - (36u << 24);
    }
}

/* A: a number is looked up among the eight bytes of its group by a byte permutation, which takes four magnitudes at a
 * time; then come the signs. */
__device__ __forceinline__ void expand(uint32_t (&a)[16], const struct coded &c, const uint2 (&bytes)[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t mags = c.word[i] & 0x77777777u;
        a[i / 2 * 4 + i % 2] = permute(bytes[i].x, bytes[i].y, mags) | (c.word[i] & 0x80808080u);
        a[i / 2 * 4 + i % 2 + 2] = permute(bytes[i].x, bytes[i].y, mags >> 16) | (c.word[i] << 4 & 0x80808080u);
    }
}

__device__ __forceinline__ void expand(uint32_t (&a)[16], uint32_t codes, uint32_t shifts, uint32_t table)
{
    struct coded c;
    uint2 bytes[8];
    load_codes(c, codes, shifts);
    bytes_by_table(bytes, c, table);
    expand(a, c, bytes);
}

/* acc += raw by the tokens' scales, group after group of 16 tokens from I in steps of STEP up to END. */
template <int N, int I, int STEP, int END>
__device__ __forceinline__ void promote(float (&acc)[N / 2], const float (&raw)[N / 2], const float (&scale)[N / 4])
{
    if constexpr (I != END) {
#pragma unroll
        for (int i = 8 * I; i < 8 * I + 8; i++) {
            acc[i] = fmaf(raw[i], scale[i / 4 * 2 + i % 2], acc[i]);
        }
        promote<N, I + STEP, STEP, END>(acc, raw, scale);
    }
}

/* Groups of 16 tokens whose scales are loaded before the wait for products, and which the second row tile finds in
 * registers since the first one took them last: as many as there is room for. */
template <int N> struct room {
    static constexpr int GROUPS = N / 16;
    static constexpr int EARLY = GROUPS == 8 ? 2 : GROUPS == 7 ? 3 : GROUPS < 4 ? GROUPS : 4;
    static constexpr int KEPT = GROUPS == 8 ? 2 : GROUPS == 7 ? 3 : GROUPS;
};

/* Waits for the products of a row tile. The first one takes the tokens upwards, the second one downwards. */
template <int N>
__device__ __forceinline__ void wait_and_promote(float (&acc)[N / 2], float (&raw)[N / 2], float (&scale)[N / 4],
                                                 uint32_t scales, int sub)
{
    constexpr int GROUPS = room<N>::GROUPS, EARLY = room<N>::EARLY, KEPT = room<N>::KEPT;
    dmk_wgmma_wait<0>();
    dmk_wgmma_hold(raw);
    if (sub == 0) {
        load_scales<N, EARLY, GROUPS>(scale, scales);
        promote<N, 0, 1, GROUPS>(acc, raw, scale);
    } else {
        load_scales<N, 0, GROUPS - KEPT>(scale, scales);
        promote<N, GROUPS - 1, -1, -1>(acc, raw, scale);
    }
}

/* The blocks of K of an item for a warpgroup with two row tiles. The next tile's codes come while products run; A is
 * made of them after the wait, among the multiply-adds of the promotion, which leave it the other half of the
 * instructions' slots. Nothing of A may be written while products run: the assembler would serialise them. */
template <int N, int SUBS>
__device__ __forceinline__ void multiply_both(const struct params &p, uint32_t smem, struct ring &ring,
                                              float (&acc)[SUBS][N / 2], const float (&w_scales)[SUBS], float (&unit)[SUBS],
                                              uint32_t lane_codes, uint32_t lane_shifts, uint32_t lane_scales)
{
    uint32_t stage = smem + SMEM_STAGES + ring.slot * STAGE, full = smem + SMEM_BARS + ring.slot * 16;
    uint32_t a[16];
    struct coded c;
    dmk_mbar_wait(full, ring.phase);
    expand(a, stage + lane_codes, stage + lane_shifts, smem + SMEM_CODES);
    for (uint32_t kb = 0; kb < p.n_kb; kb++) {
        const uint32_t tokens = __shfl_sync(0xffffffffu, dmk_wgmma_low(stage + STAGE_TOKENS), 0);
        const uint32_t scales = stage + lane_scales, empty = full + 8;
        float scale[N / 4];
#pragma unroll
        for (int sub = 0; sub < SUBS; sub++) {
            float raw[N / 2];
            issue<N>(raw, a, tokens);
            if (sub == 0) {
                load_codes(c, stage + W_BYTES + lane_codes, stage + W_BYTES + lane_shifts);
                load_scales<N, 0, room<N>::EARLY>(scale, scales);
            } else {
                ring.next();
                if (kb + 1 < p.n_kb) { /* else codes that are there are expanded once more, for nothing */
                    stage = smem + SMEM_STAGES + ring.slot * STAGE, full = smem + SMEM_BARS + ring.slot * 16;
                    dmk_mbar_wait(full, ring.phase);
                }
                load_codes(c, stage + lane_codes, stage + lane_shifts);
            }
            const float w_scale = __shfl_sync(0xffffffffu, w_scales[sub], kb);
            if (__builtin_expect(w_scale != unit[sub], 0)) {
                multiply_by(acc[sub], ratio_of_powers(unit[sub], w_scale));
                unit[sub] = w_scale;
            }
            /* The branch comes before the wait: behind it, it would lengthen it. */
            uint2 bytes[8];
            if (__builtin_expect(!__any_sync(0xffffffffu, has_subnormal(c)), 1)) {
                wait_and_promote<N>(acc[sub], raw, scale, scales, sub);
                bytes_of_normal(bytes, c);
                expand(a, c, bytes);
            } else {
                wait_and_promote<N>(acc[sub], raw, scale, scales, sub);
                bytes_by_table(bytes, c, smem + SMEM_CODES);
                expand(a, c, bytes);
            }
        }
        dmk_mbar_arrive_warp(empty);
    }
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++) {
        multiply_by(acc[sub], unit[sub]);
    }
}

/* acc[s] += W x of this warpgroup's 64 rows of its row tile s and N tokens, for the first n_subs of its tiles; acc
 * comes with the bias. Inside, acc counts in units of the weights' scale: as scales are powers of two this changes
 * no bit, and there is something to multiply only where a block's scale is another than the last one's. */
template <int WGS, int N>
__device__ __forceinline__ void multiply(const struct params &p, const struct item &item, uint32_t n_subs,
                                         uint32_t smem, struct ring &ring, float (&acc)[4 / WGS][N / 2])
{
    constexpr int SUBS = 4 / WGS, FIRST = N > 112 ? 4 : N / 16; /* scales loaded early: registers are short */
    const uint32_t lane_scales = STAGE_SCALES + threadIdx.x % 4 * 16, thread = threadIdx.x - 128;
    const uint32_t wg = thread / 128, first = WGS == 4 ? wg / 2 : 0;
    const uint32_t lane_codes = first * W_BYTES + wg % 2 * 4096 + thread % 128 * 16;
    const uint32_t lane_shifts = first * W_BYTES + DMK_FP8PACK_CODE_BYTES + thread % 256 / 32 * 64 + thread % 32 / 4 * 8;
    const uint32_t tile = 2 * item.part + first;
    const uint32_t lane = threadIdx.x % 32;
    float w_scales[SUBS], unit[SUBS]; /* a lane holds the weights' scale of its block of K */
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++) {
        const uint32_t row_tile = tile + sub < p.n_tiles ? tile + sub : p.n_tiles - 1;
        const float *from = p.w_scales + ((uint64_t)item.expert * p.n_tiles + row_tile) * p.n_kb;
        w_scales[sub] = __ldg(from + (lane < p.n_kb ? lane : 0));
        unit[sub] = __shfl_sync(0xffffffffu, w_scales[sub], 0);
        multiply_by(acc[sub], ratio_of_powers(1.0f, unit[sub]));
    }
    if (SUBS == 2 && n_subs == 2 && N > 48) { /* the few narrower tiles take the plain loop */
        multiply_both<N, SUBS>(p, smem, ring, acc, w_scales, unit, lane_codes, lane_shifts, lane_scales);
        return;
    }
    for (uint32_t kb = 0; kb < p.n_kb; kb++) {
        const uint32_t stage = smem + SMEM_STAGES + ring.slot * STAGE, full = smem + SMEM_BARS + ring.slot * 16;
        const uint32_t tokens = __shfl_sync(0xffffffffu, dmk_wgmma_low(stage + STAGE_TOKENS), 0);
        dmk_mbar_wait(full, ring.phase);
#pragma unroll
        for (uint32_t sub = 0; sub < SUBS; sub++) {
            float raw[N / 2], scale[N / 4];
            uint32_t a[16];
            if (sub >= n_subs) {
                continue;
            }
            expand(a, stage + sub * W_BYTES + lane_codes, stage + sub * W_BYTES + lane_shifts, smem + SMEM_CODES);
            issue<N>(raw, a, tokens);
            load_scales<N, 0, FIRST>(scale, stage + lane_scales);
            const float w_scale = __shfl_sync(0xffffffffu, w_scales[sub], kb);
            if (__builtin_expect(w_scale != unit[sub], 0)) {
                multiply_by(acc[sub], ratio_of_powers(unit[sub], w_scale));
                unit[sub] = w_scale;
            }
            dmk_wgmma_wait<0>();
            dmk_wgmma_hold(raw);
            load_scales<N, FIRST, N / 16>(scale, stage + lane_scales);
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                acc[sub][i] = fmaf(raw[i], scale[i / 4 * 2 + i % 2], acc[sub][i]);
            }
        }
        dmk_mbar_arrive_warp(full + 8);
        ring.next();
    }
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++) {
        multiply_by(acc[sub], unit[sub]);
    }
}

} // namespace
