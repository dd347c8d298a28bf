/* FP8 experts, the feeding side: what a launch works on, how shared memory is laid out, which items a block takes, and
 * the thread that copies them there. Part of moe_fp8.cu. */
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/moe_fp8.cuh"
#include "kernels/pack.h"

namespace
{

using namespace dmk;

constexpr uint32_t N_STAGES = 5;
constexpr uint32_t N_SHIFTS = DMK_FP8PACK_SHIFT_HIGH - DMK_FP8PACK_SHIFT_LOW + 1;
constexpr uint32_t W_BYTES = DMK_FP8PACK_PIECE_BYTES; /* a tile of 128 rows, 128 columns */
constexpr uint32_t STAGE_TOKENS = 2 * W_BYTES;
constexpr uint32_t STAGE_SCALES = STAGE_TOKENS + N_MAX * 128;
constexpr uint32_t STAGE = STAGE_SCALES + 1024;
constexpr uint32_t SMEM_STAGES = 0;
constexpr uint32_t SMEM_IMAGE = N_STAGES * STAGE;          /* [N_MAX][128] quantised z */
constexpr uint32_t SMEM_AMAX = SMEM_IMAGE + N_MAX * 128;   /* [16][N_MAX/2] words */
constexpr uint32_t SMEM_INV = SMEM_AMAX + 16 * N_MAX * 2;  /* [N_MAX] */
constexpr uint32_t SMEM_BARS = SMEM_INV + N_MAX * 4;
constexpr uint32_t SMEM_TABLE = SMEM_BARS + N_STAGES * 16;
constexpr uint32_t SMEM_CODES = SMEM_TABLE + 2 * (MAX_EXPERTS + 1) * 4; /* [N_SHIFTS][8] bytes */
constexpr uint32_t SMEM_BYTES = SMEM_CODES + N_SHIFTS * 8 + 1024;
static_assert(SMEM_BYTES <= 232448, "shared memory");

struct params {
    const uint8_t *w;       /* packed */
    const float *w_scales;  /* [n_experts][n_tiles][n_kb] */
    const uint16_t *bias;   /* [n_experts][rows] */
    const uint8_t *in;      /* [n_kb][n_positions][128] */
    const float *in_scales; /* [n_kb][n_positions] */
    uint8_t *z;             /* gate_up: quantised */
    float *z_scales;
    float *y; /* down */
    const uint32_t *expert_begin;
    uint32_t n_experts, n_positions;
    uint32_t rows, n_tiles, n_kb;
    float alpha, limit;
    uint32_t width_max; /* of a tile of tokens */
};

/* --- the work of the device --- */

struct item {
    uint32_t expert, part; /* part: pair of row tiles */
    uint32_t position;     /* of the tile's first token */
    uint32_t slot;
    uint32_t width;
    int32_t n_valid; /* may be 0 or less */
};

/* The items of a block: every n-th, ordered by expert, rows, tokens. */
struct run {
    uint32_t at, end, expert;
    __device__ run(const uint32_t *table, uint32_t n_experts, uint32_t n_parts)
        : at(blockIdx.x), end(table[n_experts] * n_parts), expert(0)
    {
    }
    __device__ __forceinline__ void next()
    {
        at += gridDim.x;
    }
    __device__ __forceinline__ struct item get(const struct params &p, const uint32_t *table,
                                               const uint32_t *pos, uint32_t n_parts)
    {
        while (at >= table[expert + 1] * n_parts) {
            expert++;
        }
        uint32_t n = p.expert_begin[expert + 1] - p.expert_begin[expert];
        uint32_t n_tiles = table[expert + 1] - table[expert];
        uint32_t in = at - table[expert] * n_parts, tile = in % n_tiles;
        struct item item;
        item.expert = expert;
        item.part = in / n_tiles;
        const uint32_t begin = tile_begin(n, n_tiles, tile);
        item.width = tile_begin(n, n_tiles, tile + 1) - begin;
        item.position = pos[expert] + begin;
        item.slot = p.expert_begin[expert] + begin;
        item.n_valid = (int32_t)n - (int32_t)begin;
        item.n_valid = item.n_valid > (int32_t)item.width ? (int32_t)item.width : item.n_valid;
        return item;
    }
};

struct ring {
    uint32_t slot, phase;
    __device__ __forceinline__ void next()
    {
        if (++slot == N_STAGES) {
            slot = 0;
            phase ^= 1;
        }
    }
};

/* --- copying --- */

__device__ __forceinline__ void produce(const struct params &p, const uint32_t *table, const uint32_t *pos, uint32_t smem)
{
    const uint32_t n_parts = (p.n_tiles + 1) / 2;
    const uint64_t policy = dmk_policy_evict_normal();
    struct ring ring = {0, 0};
    for (struct run run(table, p.n_experts, n_parts); run.at < run.end; run.next()) {
        struct item item = run.get(p, table, pos, n_parts);
        uint32_t tile = item.expert * p.n_tiles + 2 * item.part;
        uint32_t n_subs = 2 * item.part + 1 < p.n_tiles ? 2 : 1;
        for (uint32_t kb = 0; kb < p.n_kb; kb++) {
            uint32_t full = smem + SMEM_BARS + ring.slot * 16;
            uint32_t stage = smem + SMEM_STAGES + ring.slot * STAGE;
            dmk_mbar_wait(full + 8, ring.phase ^ 1);
            dmk_mbar_expect(full, n_subs * W_BYTES + item.width * 132);
            for (uint32_t sub = 0; sub < n_subs; sub++) {
                dmk_bulk_load(stage + sub * W_BYTES,
                          p.w + ((uint64_t)(tile + sub) * p.n_kb + kb) * W_BYTES, W_BYTES, full, policy);
            }
            uint64_t at = (uint64_t)kb * p.n_positions + item.position;
            dmk_bulk_load(stage + STAGE_TOKENS, p.in + at * 128, item.width * 128, full, policy);
            dmk_bulk_load(stage + STAGE_SCALES, p.in_scales + at, item.width * 4, full, policy);
            ring.next();
        }
    }
}

} // namespace
