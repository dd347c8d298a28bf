/* The feeding side of prefill attention: what a block of threads works on, and the warp that brings it to shared memory.
 *
 * Tiles of queries and blocks of keys and values come by TMA, each to a place whose barriers say full and empty; the few pages
 * that TMA can not bring are copied by hand. The warp runs ahead over blocks and tiles as far as places are free. */
#pragma once

#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/hopper.cuh"

/* Computing warpgroups of a block: 8 tokens times the 8 heads of a group each. */
constexpr int WARPGROUPS = DMK_ATTN_TILE_WIDE / 8;

/* A tile as both sides see it; the feeding warp looks it up ahead of time. */
struct tile_view {
    const struct dmk_attn_seq *seq;
    uint32_t row, pos;         /* of the tile's first token */
    uint32_t seq_pos, seq_end; /* positions: of the step's first token, behind its last */
    uint32_t head, n_tokens;
    uint32_t block_begin, block_end; /* of KEYS keys: begin <= b < end */
    uint32_t per_split;              /* blocks, a power of two */
};

template <int KEYS> struct prefill_shared {
    static const uint32_t Q_BYTES = WARPGROUPS * 8192;
    static const uint32_t STAGES = 4;
    static const uint32_t K_BYTES =
        KEYS * 128; /* of a stage's keys; its values stand behind them */

    uint8_t q[2][Q_BYTES];
    uint8_t stage[STAGES][2 * K_BYTES];
    /* Sums of the splits before, every thread's own: touched once a split, and as registers they
     * would leave too few for the products in flight. */
    float4 total[WARPGROUPS][8][128];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t q_full[2], q_empty[2];
    tile_view tile[2];
};

struct prefill_params {
    const struct dmk_attn_seq *seqs;
    const struct dmk_attn_tile *tiles;
    const uint32_t *page_ids;
    const uint16_t *sinks;
    const uint16_t *k, *v;
    const uint8_t *pages;
    uint16_t *out;
    uint64_t kv_stride;
    uint32_t n_tiles, n_kv_heads, group, n_pages, window;
    bool fresh;
};

__device__ __forceinline__ uint32_t first_visible(uint32_t p, uint32_t window)
{
    return window && p + 1 > window ? p + 1 - window : 0;
}

/* Round n of a block of threads takes every gridDim.x-th tile, odd rounds from the other end: tiles come longest first,
 * and so the blocks' sums come out alike. */
__device__ __forceinline__ uint32_t work_of(uint32_t round)
{
    return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

/* A place in the ring of stages. */
template <uint32_t STAGES> struct ring_place {
    uint32_t stage, phase;

    __device__ __forceinline__ void step()
    {
        stage++;
        if (stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

template <int KEYS>
__device__ __forceinline__ tile_view view_tile(const prefill_params &p, uint32_t work)
{
    tile_view t;
    struct dmk_attn_tile tile = p.tiles[p.n_tiles - 1 - work / p.n_kv_heads];
    t.head = work % p.n_kv_heads;
    t.seq = &p.seqs[tile.seq];
    t.seq_pos = t.seq->pos;
    t.seq_end = t.seq_pos + t.seq->n_tokens;
    t.row = t.seq->row + tile.first;
    t.pos = t.seq_pos + tile.first;
    t.n_tokens = tile.n_tokens;
    t.block_begin = first_visible(t.pos, p.window) / KEYS;
    t.block_end = (t.pos + t.n_tokens - 1) / KEYS + 1;
    t.per_split = dmk_attn_split_keys(t.pos) / KEYS; /* of all of its rows */
    return t;
}

__device__ __forceinline__ uint32_t page_of(const prefill_params &p, const tile_view &t, uint32_t b)
{
    return p.window ? t.seq->ring[b % t.seq->n_ring] : p.page_ids[t.seq->first_page + b];
}

/* By hand, for the two pages of a sequence that TMA can not bring: the one whose older keys lie in the
 * ring and whose newer ones are the step's own, and the last one, whose rows behind the sequence's end may hold
 * anything and must not reach a product. */
__device__ void copy_page(const prefill_params &p, const tile_view &t, uint32_t b, uint8_t *k,
                          uint8_t *v, uint32_t lane)
{
    const uint8_t *page =
        p.pages + ((size_t)t.head * p.n_pages + page_of(p, t, b)) * ATTN_PAGE_BYTES;
    for (uint32_t i = lane; i < 1024; i += 32) {
        uint32_t is_v = i >> 9, row = (i >> 3) & 63, chunk = i & 7, j = b * 64 + row;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (j < t.seq_end) {
            const void *src = page + is_v * 8192 + row * 128 + chunk * 16;
            if (p.fresh && j >= t.seq_pos) {
                src = (is_v ? p.v : p.k) + (t.row + j - t.pos) * p.kv_stride + t.head * 64 +
                      chunk * 8;
            }
            x = *(const uint4 *)src;
        }
        *(uint4 *)((is_v ? v : k) + dmk_swizzle_128(row, chunk * 16)) = x;
    }
    dmk_fence_async_shared();
    __syncwarp();
}

/* One stage: its pages' keys, then their values. Pages behind the sequence's last come as zeros, from outside the map. */
template <int KEYS>
__device__ __forceinline__ void feed_block(const attn_maps &maps, const prefill_params &p,
                                           prefill_shared<KEYS> *sh, const tile_view &t,
                                           uint32_t block, uint32_t stage, uint32_t lane)
{
    uint8_t *k = sh->stage[stage], *v = k + sh->K_BYTES;
    uint64_t *full = &sh->full[stage];
    uint32_t n_copied = 0;
    bool by_hand[KEYS / 64], fresh[KEYS / 64];
#pragma unroll
    for (uint32_t i = 0; i < KEYS / 64; i++) {
        uint32_t b = block * (KEYS / 64) + i;
        fresh[i] = p.fresh && b * 64 + 63 >= t.seq_pos;
        bool whole = b * 64 + 63 < t.seq_end && (!fresh[i] || b * 64 >= t.seq_pos);
        by_hand[i] = !whole && b * 64 < t.seq_end;
        if (by_hand[i]) {
            copy_page(p, t, b, k + i * 8192, v + i * 8192, lane);
            n_copied++;
        }
    }
    if (lane != 0) {
        return;
    }
    if (n_copied == KEYS / 64) {
        dmk_mbar_arrive(full);
        return;
    }
    dmk_mbar_expect(full, (KEYS / 64 - n_copied) * ATTN_PAGE_BYTES);
#pragma unroll
    for (uint32_t i = 0; i < KEYS / 64; i++) {
        uint32_t b = block * (KEYS / 64) + i;
        if (by_hand[i]) {
            continue;
        }
        if (fresh[i]) {
            int32_t row = (int32_t)(t.row + b * 64 - t.pos);
            dmk_tma_load_3d(k + i * 8192, &maps.k, full, 0, t.head, row);
            dmk_tma_load_3d(v + i * 8192, &maps.v, full, 0, t.head, row);
        } else {
            uint32_t page = b * 64 < t.seq_end ? t.head * p.n_pages + page_of(p, t, b)
                                               : p.n_kv_heads * p.n_pages;
            dmk_tma_load_2d(k + i * 8192, &maps.pages, full, 0, (int32_t)(page * 128));
            dmk_tma_load_2d(v + i * 8192, &maps.pages, full, 0, (int32_t)(page * 128 + 64));
        }
    }
}

template <int KEYS>
__device__ void feed(const attn_maps &maps, const prefill_params &p, prefill_shared<KEYS> *sh,
                     uint32_t lane)
{
    uint32_t n_work = p.n_tiles * p.n_kv_heads;
    ring_place<prefill_shared<KEYS>::STAGES> at = {0, 1};
    for (uint32_t round = 0, work; (work = work_of(round)) < n_work; round++) {
        tile_view t = view_tile<KEYS>(p, work);
        uint32_t qb = round & 1;
        uint64_t *q_full = &sh->q_full[qb];
        dmk_mbar_wait(&sh->q_empty[qb], ((round >> 1) & 1) ^ 1);
        if (lane == 0) {
            sh->tile[qb] = t;
            dmk_mbar_expect(q_full, sh->Q_BYTES);
            dmk_tma_load_4d(sh->q[qb], &maps.q, q_full, 0, 0, t.head, t.row);
        }
        for (uint32_t b = t.block_begin; b < t.block_end; b++, at.step()) {
            dmk_mbar_wait(&sh->empty[at.stage], at.phase);
            feed_block(maps, p, sh, t, b, at.stage, lane);
        }
    }
}
