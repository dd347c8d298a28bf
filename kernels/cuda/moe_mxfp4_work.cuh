/* MXFP4 experts, the feeding side: what a launch works on, how shared memory is laid out, which items a block takes, and how
 * weights and tokens come there. Part of moe_mxfp4.cu. */
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/moe_mxfp4.cuh"
#include "kernels/pack.h"

namespace
{

using namespace dmk;

constexpr uint32_t N_GROUPS = DMK_MXPACK_SPLITS;
constexpr uint32_t N_WORKERS = N_GROUPS * 128;
constexpr uint32_t N_THREADS = N_WORKERS + 32;
constexpr uint32_t STAGE = DMK_MXPACK_STAGE_BYTES;
constexpr uint32_t MAX_EXPERTS = 128;
constexpr uint32_t SMEM_MAX = 232448;

/* Of the ring: with a fifth, steps of 16 to 128 tokens took 2% longer (docs/PERF.md). */
constexpr uint32_t MAX_STAGES = 4;

struct product {
    const uint8_t *packed;
    const uint16_t *bias;
    const uint16_t *in; /* [*][cols] bf16 */
    void *out;
    uint32_t rows, cols;
    uint32_t n_tiles;  /* of 64 rows */
    uint32_t n_stages; /* of 960 columns */
};

struct params {
    struct product gate_up, down;
    const uint32_t *expert_begin, *slot_row;
    uint32_t *done; /* [n_experts] finished items of gate_up, then one count of finished blocks */
    uint32_t n_experts;
    float alpha, limit;
};

/* Shared memory, from a 1024-byte boundary. */
template <int N> struct layout {
    static constexpr uint32_t N_SUMS = N < 24 ? 2 : 1; /* buffers of partial sums */
    /* Where there is room for the sums of the group that adds them as well, it does so only after its next item. */
    static constexpr bool LATE = N == 8;
    static constexpr uint32_t SUMS = (LATE ? N_GROUPS : N_GROUPS - 1) * 128 * (N / 2) * 4;
    uint32_t tokens, sums, bars, sum_bars, table, begin, stages;
    uint32_t n_stages;
    __host__ __device__ layout(uint32_t k_stages)
    {
        tokens = 0;
        sums = tokens + k_stages * 3 * N_GROUPS * N * 128;
        bars = sums + N_SUMS * SUMS;
        sum_bars = bars + 2 * 16 * 8; /* room for 16 stages */
        table = sum_bars + 2 * 2 * 8;
        begin = table + (MAX_EXPERTS + 1) * 4;
        stages = (begin + (MAX_EXPERTS + 1) * 4 + 127) / 128 * 128;
        uint32_t left = SMEM_MAX - 1024 - stages;
        n_stages = left / STAGE > MAX_STAGES ? MAX_STAGES : left / STAGE;
    }
};

/* Position in the ring. */
struct ring {
    uint32_t slot, phase, n;
    __device__ __forceinline__ void next()
    {
        if (++slot == n) {
            slot = 0;
            phase ^= 1;
        }
    }
};

/* Items before each expert. One warp. */
template <int N>
__device__ void count_tiles(const struct params &p, uint32_t *table)
{
    uint32_t lane = threadIdx.x % 32, sum = 0;
    for (uint32_t first = 0; first < p.n_experts; first += 32) {
        uint32_t e = first + lane, n = 0;
        if (e < p.n_experts) {
            n = (p.expert_begin[e + 1] - p.expert_begin[e] + N - 1) / N;
        }
        uint32_t upto = n;
        for (uint32_t i = 1; i < 32; i *= 2) {
            uint32_t left = __shfl_up_sync(0xffffffffu, upto, i);
            upto += lane >= i ? left : 0;
        }
        if (e < p.n_experts) {
            table[e] = sum + upto - n;
        }
        sum += __shfl_sync(0xffffffffu, upto, 31);
    }
    if (lane == 0) {
        table[p.n_experts] = sum;
    }
}

/* The items of a block, in order: tiles of tokens outside, rows inside. */
struct run {
    uint32_t left;                  /* items from this one on */
    uint32_t expert, tile, row_tile; /* the tile of tokens counts over all experts */
    __device__ run(const uint32_t *table, uint32_t n_experts, uint32_t n_row_tiles)
    {
        const uint64_t n = (uint64_t)table[n_experts] * n_row_tiles;
        const uint32_t at = (uint32_t)(n * blockIdx.x / gridDim.x);
        left = (uint32_t)(n * (blockIdx.x + 1) / gridDim.x) - at;
        tile = at / n_row_tiles;
        row_tile = at % n_row_tiles;
        /* The last expert that begins at or before the tile. */
        uint32_t low = 0, high = n_experts;
        while (high - low > 1) {
            uint32_t mid = (low + high) / 2;
            if (table[mid] <= tile) {
                low = mid;
            } else {
                high = mid;
            }
        }
        expert = low;
    }
    __device__ __forceinline__ void next(const uint32_t *table, uint32_t n_row_tiles)
    {
        left--;
        if (++row_tile == n_row_tiles) {
            row_tile = 0;
            tile++;
            while (left > 0 && tile >= table[expert + 1]) {
                expert++;
            }
        }
    }
};

/* One thread: all weights of the block's items, in order. */
__device__ void produce(const struct params &p, const struct product &m, const uint32_t *table,
                        uint32_t stages, uint32_t bars, struct ring &ring)
{
    uint64_t policy = dmk_policy_evict_first();
    for (struct run run(table, p.n_experts, m.n_tiles); run.left > 0; run.next(table, m.n_tiles)) {
        const uint8_t *src =
            m.packed + ((uint64_t)run.expert * m.n_tiles + run.row_tile) * m.n_stages * STAGE;
        for (uint32_t s = 0; s < m.n_stages; s++) {
            uint32_t full = bars + ring.slot * 16, empty = full + 8;
            dmk_mbar_wait(empty, ring.phase ^ 1);
            dmk_mbar_expect(full, STAGE);
            dmk_bulk_load(stages + ring.slot * STAGE, src + (uint64_t)s * STAGE, STAGE, full, policy);
            ring.next();
        }
    }
}

/* A group brings its columns of N tokens: of each stage, 24 pieces of 16 bytes. */
template <int N, bool GATE_UP>
__device__ void load_tokens(const struct params &p, const struct product &m, uint32_t slot0,
                            uint32_t n_valid, uint32_t tokens)
{
    uint32_t group = threadIdx.x / 128, thread = threadIdx.x % 128;
    for (uint32_t col = thread; col < 24 * m.n_stages; col += 128) {
        uint32_t s = col / 24, c = col % 24;
        uint32_t k = s * DMK_MXPACK_STAGE_COLS + group * 192 + c * 8;
        uint32_t dst = tokens + ((s * N_GROUPS + group) * 3 + c / 8) * N * 128;
#pragma unroll
        for (uint32_t r0 = 0; r0 < N; r0 += 8) {
            uint4 v[8];
#pragma unroll
            for (uint32_t r = 0; r < 8; r++) {
                v[r] = make_uint4(0, 0, 0, 0);
                if (r0 + r < n_valid && k < m.cols) {
                    uint32_t row = slot0 + r0 + r;
                    if (GATE_UP) {
                        row = p.slot_row[row];
                    }
                    v[r] = ldg128(m.in + (uint64_t)row * m.cols + k);
                }
            }
#pragma unroll
            for (uint32_t r = 0; r < 8; r++) {
                dmk_sts128(dst + (r0 + r) * 128 + ((c % 8) ^ r) * 16, v[r]);
            }
        }
    }
}

} // namespace
