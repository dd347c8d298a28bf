/* MXFP4 experts, the multiplying side: codes of a stage to bf16 in registers, by its tokens, and the meeting of the groups'
 * partial sums. Part of moe_mxfp4.cu. */
#pragma once

#include "kernels/cuda/moe_mxfp4_work.cuh"

namespace
{

/* What a lane holds of the stage that it multiplies by, or already of the next. */
struct held {
    uint4 codes[3];
    uint32_t scales[3];
};

/* The ring as a lane sees it: the stage that comes next, and where its own bytes of slot 0 lie. */
struct feed {
    struct ring ring;
    uint32_t bars, codes, scales;

    /* A third of the lane's part into registers, one after the other: the first waits for the stage, the last gives it
     * back and goes on to the next. */
    __device__ __forceinline__ void take(int q, struct held &held)
    {
        const uint32_t full = bars + ring.slot * 16, at = ring.slot * STAGE;
        if (q == 0) {
            dmk_mbar_wait(full, ring.phase);
        }
        held.codes[q] = dmk_lds128(codes + at + q * 2048);
        held.scales[q] = dmk_lds32(scales + at + q * 4);
        if (q == 2) {
            dmk_mbar_arrive_warp(full + 8);
            ring.next();
        }
    }
};

/* 192 columns of a warp's 16 rows: acc += W x. Meanwhile the next stage, if there is one, takes their place in `held`
 * third by third. */
template <int N>
__device__ __forceinline__ void multiply_stage(float (&acc)[N / 2], struct held &held, uint32_t tokens,
                                               struct feed &feed, bool more)
{
    uint32_t b[2][N / 8][4];
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        dmk_ldmatrix_x4(b[0][n], tokens + n * 1024);
    }
#pragma unroll
    for (int q = 0; q < 3; q++) {
        const uint32_t word[4] = {held.codes[q].x, held.codes[q].y, held.codes[q].z, held.codes[q].w};
        const uint32_t scales[2] = {scale_pair<0>(held.scales[q]), scale_pair<1>(held.scales[q])};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = 2 * q + half + 1;
            if (at < 6) {
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
                    /* Pieces 4 to 7 of a swizzled row are 64 bytes from pieces 0 to 3. */
                    dmk_ldmatrix_x4(b[at % 2][n], (at % 2 ? tokens ^ 64 : tokens) + at / 2 * N * 128 + n * 1024);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t a[4];
                decode(word[2 * half + i], a);
                a[0] = scaled<false>(a[0], scales[half]);
                a[1] = scaled<true>(a[1], scales[half]);
                a[2] = scaled<false>(a[2], scales[half]);
                a[3] = scaled<true>(a[3], scales[half]);
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
                    dmk_mma_bf16(acc + 4 * n, a, b[half][n][2 * i], b[half][n][2 * i + 1]);
                }
            }
        }
        if (more) {
            feed.take(q, held);
        }
    }
}

/* All stages of an item. */
template <int N>
__device__ __forceinline__ void multiply(float (&acc)[N / 2], struct held &held, uint32_t tokens, struct feed &feed,
                                         uint32_t n_stages, bool last_item)
{
    const uint32_t last = tokens + (n_stages - 1) * 3 * N_GROUPS * N * 128;
    for (; tokens != last; tokens += 3 * N_GROUPS * N * 128) {
        multiply_stage<N>(acc, held, tokens, feed, true);
    }
    multiply_stage<N>(acc, held, tokens, feed, !last_item);
}

/* Where the groups' sums of an item meet. `bars`: for each buffer a barrier of those who wrote and one of those who
 * read. */
template <int N> struct meeting {
    uint32_t reader, phase, at, full, empty;
    __device__ __forceinline__ meeting(uint32_t sums, uint32_t bars, uint32_t n_done)
    {
        const uint32_t buf = n_done % layout<N>::N_SUMS;
        reader = n_done % N_GROUPS;
        phase = n_done / layout<N>::N_SUMS;
        at = sums + buf * layout<N>::SUMS + threadIdx.x % 128 * 16;
        full = bars + buf * 16;
        empty = full + 8;
    }
    __device__ __forceinline__ uint32_t slot(uint32_t group) const
    {
        return at + (layout<N>::LATE ? group : group - (group > reader)) * (N / 8) * 2048;
    }
    /* The reader waits too: a group may be ahead of the others by more items than there are buffers, and would
     * then take an older phase of `full` for its own, since a wait tells phases by their parity. */
    __device__ __forceinline__ void give(const float (&acc)[N / 2], uint32_t group) const
    {
        if (phase > 0) {
            dmk_mbar_wait(empty, (phase - 1) % 2);
        }
        if (layout<N>::LATE || group != reader) {
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                dmk_sts128(slot(group) + i * 2048,
                           make_uint4(__float_as_uint(acc[4 * i]), __float_as_uint(acc[4 * i + 1]),
                                      __float_as_uint(acc[4 * i + 2]), __float_as_uint(acc[4 * i + 3])));
            }
        }
        if (group != reader) {
            dmk_mbar_arrive_warp(full);
        }
    }
    /* acc becomes the sum, in the order of the groups. It holds the reader's own unless that lies with the others. */
    __device__ __forceinline__ void collect(float (&acc)[N / 2]) const
    {
        dmk_mbar_wait(full, phase % 2);
        float sum[N / 2];
#pragma unroll
        for (uint32_t g = 0; g < N_GROUPS; g++) {
            const bool own = !layout<N>::LATE && g == reader;
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                const uint4 v = dmk_lds128((own ? at : slot(g)) + i * 2048);
                const float other[4] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                                        __uint_as_float(v.w)};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float term = own ? acc[4 * i + j] : other[j];
                    sum[4 * i + j] = g == 0 ? term : sum[4 * i + j] + term;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            acc[i] = sum[i];
        }
        dmk_mbar_arrive_warp(empty);
    }
};

} // namespace
