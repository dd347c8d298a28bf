/* Prefill attention on Hopper: many query tokens of a sequence against its paged keys.
 *
 * A block of threads takes a tile: DMK_ATTN_TILE_WIDE tokens times the 8 query heads of one KV head, 64 rows for each
 * warpgroup. One warpgroup more only feeds them: pages come by TMA into a ring of stages (a page is a tile
 * of 64 keys and values in the layout that wgmma reads), the next tile's queries too, so that the
 * warpgroups never wait at the border of two tiles. Blocks stay resident and walk through the list of
 * tiles from its end, where the longest are.
 *
 * In a warpgroup the scores of the next page are computed while the exponentials of this one run: the
 * product P V of page b - 1 and Q K of page b are in flight together, the softmax of b follows under P V.
 * What is computed stands in attn_math.cuh. */
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/attn_math.cuh"

#define STAGES 4 /* a power of two */

/* A tile as both sides see it; the feeding warp looks it up ahead of time. */
struct tile_view {
    const struct dmk_attn_seq *seq;
    uint32_t row, pos;         /* of the tile's first token */
    uint32_t seq_pos, seq_end; /* positions: of the step's first token, behind its last */
    uint32_t head, n_tokens;
    uint32_t block_begin, block_end; /* of 64 keys: begin <= b < end */
};

template <int WARPGROUPS> struct prefill_shared {
    static const uint32_t Q_BYTES = WARPGROUPS * 8192;

    uint8_t q[2][Q_BYTES];
    uint8_t out[Q_BYTES];
    uint8_t stage[STAGES][ATTN_PAGE_BYTES];
    /* Sums of the splits before, every thread's own: touched once in eight blocks, and as registers they
     * would leave too few for the products in flight. */
    float total[WARPGROUPS][32][128];
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

/* ---- the feeding warp ---- */

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
    t.block_begin = first_visible(t.pos, p.window) / 64;
    t.block_end = (t.pos + t.n_tokens - 1) / 64 + 1;
    return t;
}

__device__ __forceinline__ uint32_t page_of(const prefill_params &p, const tile_view &t, uint32_t b)
{
    return p.window ? t.seq->ring[b % t.seq->n_ring] : p.page_ids[t.seq->first_page + b];
}

/* By hand, for the two blocks of a sequence that TMA can not bring: the one whose older keys lie in the
 * ring and whose newer ones are the step's own, and the last one, whose rows behind the sequence's end may hold
 * anything and must not reach a product. */
__device__ void copy_block(const prefill_params &p, const tile_view &t, uint32_t b, uint8_t *stage,
                           uint32_t lane)
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
        *(uint4 *)(stage + is_v * 8192 + swizzle_128(row, chunk * 16)) = x;
    }
    fence_async_shared();
    __syncwarp();
}

template <int WARPGROUPS>
__device__ void feed(const CUtensorMap *q_map, const CUtensorMap *page_map,
                     const CUtensorMap *k_map, const CUtensorMap *v_map, const prefill_params &p,
                     prefill_shared<WARPGROUPS> *sh, uint32_t lane)
{
    uint32_t n_work = p.n_tiles * p.n_kv_heads, it = 0, tile_it = 0;
    for (uint32_t work = blockIdx.x; work < n_work; work += gridDim.x, tile_it++) {
        tile_view t = view_tile(p, work);
        uint32_t qb = tile_it & 1;
        uint64_t *q_full = &sh->q_full[qb];
        dmk_mbar_wait(&sh->q_empty[qb], ((tile_it >> 1) & 1) ^ 1);
        if (lane == 0) {
            sh->tile[qb] = t;
            dmk_mbar_expect(q_full, sh->Q_BYTES);
            tma_load_4d(sh->q[qb], q_map, q_full, 0, 0, t.head, t.row);
        }
        for (uint32_t b = t.block_begin; b < t.block_end; b++, it++) {
            uint32_t s = it % STAGES;
            uint64_t *full = &sh->full[s];
            uint8_t *dst = sh->stage[s];
            dmk_mbar_wait(&sh->empty[s], ((it / STAGES) & 1) ^ 1);
            bool fresh = p.fresh && b * 64 + 63 >= t.seq_pos;
            bool whole = b * 64 + 63 < t.seq_end && (!fresh || b * 64 >= t.seq_pos);
            if (!whole) {
                copy_block(p, t, b, sh->stage[s], lane);
                if (lane == 0) {
                    dmk_mbar_arrive(full);
                }
            } else if (lane == 0) {
                dmk_mbar_expect(full, ATTN_PAGE_BYTES);
                if (fresh) {
                    int32_t row = (int32_t)(t.row + b * 64 - t.pos);
                    tma_load_3d(dst, k_map, full, 0, t.head, row);
                    tma_load_3d(dst + 8192, v_map, full, 0, t.head, row);
                } else {
                    dmk_tma_load_2d(dst, page_map, full, 0,
                                    (int32_t)((t.head * p.n_pages + page_of(p, t, b)) * 128));
                }
            }
        }
    }
}

/* ---- the computing warpgroups ---- */

/* State of a thread: its two rows are one query head at two neighbouring tokens. */
struct rows {
    float o[32], m[2], l[2];      /* of the split */
    float offset[2];              /* attn_offset(m) */
    float total_m[2], total_l[2]; /* of the splits before */
    bool first;                   /* there are none */
};

/* Tiles are told by the low word of their descriptor, counted in 16 bytes: stage i begins at base + i * 1024. */
__device__ __forceinline__ uint64_t tile_at(uint32_t low)
{
    return (uint64_t)WGMMA_TILE_HIGH << 32 | low;
}

__device__ __forceinline__ void mul_qk(float (&s)[32], const uint32_t (&q)[4][4], uint32_t k)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wgmma_64x64_rs<0>(s, q[i][0], q[i][1], q[i][2], q[i][3], tile_at(k + 2 * i), i > 0);
    }
    dmk_wgmma_commit();
}

__device__ __forceinline__ void mul_pv(float (&o)[32], const uint32_t (&w)[16], uint32_t v)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wgmma_64x64_rs<1>(o, w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3],
                          tile_at(v + 128 * i), 1);
    }
    dmk_wgmma_commit();
}

/* Hides what rows at positions pos and pos + 1 must not see of a block. */
__device__ __forceinline__ void mask(float (&s)[32], uint32_t block, uint32_t pos, uint32_t window,
                                     uint32_t lane)
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        uint32_t j = block * 64 + 8 * (i >> 2) + 2 * (lane & 3) + (i & 1), p = pos + ((i >> 1) & 1);
        if (j > p || (window && j + window <= p)) {
            s[i] = ATTN_NONE;
        }
    }
}

/* s: scores in, weights out; c: how much the split shrinks. True when it shrinks in any row of the warp. */
template <bool NEW_SPLIT>
__device__ __forceinline__ bool softmax(float (&s)[32], rows &st, float (&c)[2])
{
    float top[2];
#pragma unroll
    for (int r = 0; r < 2; r++) { /* a tree: a chain would wait for itself */
        float part[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            part[i] = fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]);
        }
        top[r] = fmaxf(fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3])),
                       fmaxf(fmaxf(part[4], part[5]), fmaxf(part[6], part[7])));
    }
#pragma unroll
    for (int x = 1; x <= 2; x++) {
        top[0] = fmaxf(top[0], __shfl_xor_sync(0xffffffffu, top[0], x));
        top[1] = fmaxf(top[1], __shfl_xor_sync(0xffffffffu, top[1], x));
    }
    c[0] = c[1] = 1.0f;
    bool shrinks = false;
    if (NEW_SPLIT) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            st.m[r] = top[r];
            st.l[r] = 0.0f;
            st.offset[r] = attn_offset(top[r]);
        }
    } else {
        shrinks = __any_sync(0xffffffffu, attn_raise(st.m[0], top[0]) != st.m[0] ||
                                              attn_raise(st.m[1], top[1]) != st.m[1]);
        if (shrinks) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float m = attn_raise(st.m[r], top[r]);
                c[r] = attn_shrink(st.m[r], m);
                st.m[r] = m;
                st.offset[r] = attn_offset(m);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float pair[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            s[4 * i + 2 * r] = attn_weight(s[4 * i + 2 * r], st.offset[r]);
            s[4 * i + 2 * r + 1] = attn_weight(s[4 * i + 2 * r + 1], st.offset[r]);
            pair[i] = __fadd_rn(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]);
        }
        float sum = __fadd_rn(__fadd_rn(__fadd_rn(pair[0], pair[1]), __fadd_rn(pair[2], pair[3])),
                              __fadd_rn(__fadd_rn(pair[4], pair[5]), __fadd_rn(pair[6], pair[7])));
        st.l[r] = __fmaf_rn(st.l[r], c[r], sum);
    }
    return shrinks;
}

/* The scores' registers hold what the next product wants as its left side, in the same order. */
__device__ __forceinline__ void pack_weights(uint32_t (&w)[16], const float (&s)[32])
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        w[i] = dmk_pack_bf16(s[2 * i], s[2 * i + 1]);
    }
}

/* total: the thread's column of the sums before. */
__device__ __forceinline__ void fold_split(rows &st, const float (&m)[2], const float (&l)[2],
                                           float *total)
{
    float a[2], b[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = l[r];
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        attn_fold_factors(st.total_m[r], m[r], a[r], b[r]);
        st.total_l[r] = attn_fold(st.total_l[r], a[r], sum, b[r]);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int r = (i >> 1) & 1;
        total[i * 128] = attn_fold(st.first ? 0.0f : total[i * 128], a[r], st.o[i], b[r]);
    }
    st.first = false;
}

/* Rows of the tile to memory: through shared memory, so that a token's heads go out in lines. */
__device__ __forceinline__ void store_rows(const prefill_params &p, const tile_view &t,
                                           const rows &st, const float *total, uint8_t *stage,
                                           uint32_t wg, uint32_t thread)
{
    uint32_t warp = thread / 32, lane = thread % 32;
    named_barrier(1 + wg, 128); /* the last tile's rows have been read */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t row = 16 * warp + 8 * r + lane / 4;
        float inverse = __frcp_rn(st.total_l[r]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            *(uint32_t *)(stage + swizzle_128(row, 16 * i + 4 * (lane & 3))) =
                dmk_pack_bf16(__fmul_rn(total[(4 * i + 2 * r) * 128], inverse),
                              __fmul_rn(total[(4 * i + 2 * r + 1) * 128], inverse));
        }
    }
    named_barrier(1 + wg, 128);
#pragma unroll
    for (uint32_t i = thread; i < 512; i += 128) {
        uint32_t row = i / 8, chunk = i % 8, token = 8 * wg + row / 8, g = row % 8;
        if (token < t.n_tokens && g < p.group) {
            size_t at = ((size_t)(t.row + token) * p.n_kv_heads + t.head) * p.group + g;
            *(uint4 *)(p.out + at * 64 + chunk * 8) =
                *(const uint4 *)(stage + swizzle_128(row, chunk * 16));
        }
    }
}

/* From block b - 1, whose weights are in w and whose stage is number it, to block b.
 *
 * The wait for the product P V stands behind a branch on purpose: nothing else keeps the compiler from placing it in
 * front of the softmax, which would then no longer run under the product. The branch hangs on l, and so on every
 * weight; l is never negative. */
template <bool MASKED, bool NEW_SPLIT, int WARPGROUPS>
__device__ __forceinline__ void step(prefill_shared<WARPGROUPS> *sh, rows &st, float (&s)[32],
                                     uint32_t (&w)[16], const uint32_t (&q)[4][4], uint32_t tiles,
                                     uint32_t it, uint32_t b, uint32_t pos, uint32_t window,
                                     uint32_t lane, float *total)
{
    uint32_t here = it % STAGES, next = (it + 1) % STAGES;
    float c[2], old_m[2], old_l[2];
    dmk_mbar_wait(&sh->full[next], ((it + 1) / STAGES) & 1);
    dmk_wgmma_fence();
    mul_qk(s, q, tiles + next * 1024);
    mul_pv(st.o, w, tiles + here * 1024 + 512);
    dmk_wgmma_wait<1>();
    wgmma_hold(s);
    if (MASKED) {
        mask(s, b, pos, window, lane);
    }
    if (NEW_SPLIT) {
        old_m[0] = st.m[0], old_m[1] = st.m[1], old_l[0] = st.l[0], old_l[1] = st.l[1];
    }
    bool shrinks = softmax<NEW_SPLIT>(s, st, c);
    if (__any_sync(0xffffffffu, NEW_SPLIT || shrinks || st.l[0] < 0.0f || st.l[1] < 0.0f)) {
        dmk_wgmma_wait<0>();
        wgmma_hold(st.o);
        if (NEW_SPLIT) {
            fold_split(st, old_m, old_l, total);
        }
#pragma unroll
        for (int i = 0; i < 32; i++) {
            st.o[i] = NEW_SPLIT ? 0.0f : __fmul_rn(st.o[i], c[(i >> 1) & 1]);
        }
    } else {
        dmk_wgmma_wait<0>();
        wgmma_hold(st.o);
    }
    if (lane == 0) {
        dmk_mbar_arrive(&sh->empty[here]);
    }
    pack_weights(w, s);
}

template <bool MASKED, int WARPGROUPS>
__device__ __forceinline__ void walk(prefill_shared<WARPGROUPS> *sh, rows &st, float (&s)[32],
                                     uint32_t (&w)[16], const uint32_t (&q)[4][4], uint32_t tiles,
                                     uint32_t &it, uint32_t &b, uint32_t end, uint32_t pos,
                                     uint32_t window, uint32_t lane, float *total)
{
    for (; b < end; b++, it++) {
        if (b % ATTN_SPLIT_BLOCKS == 0) {
            step<MASKED, true>(sh, st, s, w, q, tiles, it, b, pos, window, lane, total);
        } else {
            step<MASKED, false>(sh, st, s, w, q, tiles, it, b, pos, window, lane, total);
        }
    }
}

template <int WARPGROUPS>
__device__ void compute(const prefill_params &p, prefill_shared<WARPGROUPS> *sh, uint32_t wg,
                        uint32_t thread)
{
    uint32_t warp = thread / 32, lane = thread % 32, g = lane / 4;
    float *total = &sh->total[wg][0][thread];
    const uint32_t tiles = (uint32_t)dmk_wgmma_desc(sh->stage[0]);
    uint32_t n_work = p.n_tiles * p.n_kv_heads, it = 0, tile_it = 0;
    for (uint32_t work = blockIdx.x; work < n_work; work += gridDim.x, tile_it++) {
        uint32_t q[4][4], qb = tile_it & 1;
        dmk_mbar_wait(&sh->q_full[qb], (tile_it >> 1) & 1);
        tile_view t = sh->tile[qb];
        uint32_t first = t.pos + 8 * wg, pos = first + 2 * warp;
        /* The warpgroup's own blocks, out of those that the tile brings. */
        uint32_t begin = min(first_visible(first, p.window) / 64, t.block_end);
        uint32_t end = min((first + 7) / 64 + 1, t.block_end);
        if (8 * wg >= t.n_tokens) {
            begin = end = t.block_end;
        }
        const uint8_t *q_tile = sh->q[qb] + wg * 8192;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            dmk_ldmatrix_x4(q[i],
                            q_tile + swizzle_128(16 * warp + lane % 16, 32 * i + lane / 16 * 16));
        }
        __syncwarp();
        if (lane == 0) {
            dmk_mbar_arrive(&sh->q_empty[qb]);
        }

        rows st;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            st.o[i] = 0.0f;
        }
        st.first = true;
        float sink =
            g < p.group ? __uint_as_float((uint32_t)p.sinks[t.head * p.group + g] << 16) : 0;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            st.total_m[r] = 8.0f * sink;
            st.total_l[r] = 1.0f;
        }
        uint32_t b = t.block_begin;
        for (; b < begin; b++, it++) {
            dmk_mbar_wait(&sh->full[it % STAGES], (it / STAGES) & 1);
            if (lane == 0) {
                dmk_mbar_arrive(&sh->empty[it % STAGES]);
            }
        }
        if (begin < end) {
            float s[32], c[2];
            uint32_t w[16];
            dmk_mbar_wait(&sh->full[it % STAGES], (it / STAGES) & 1);
            dmk_wgmma_fence();
            mul_qk(s, q, tiles + it % STAGES * 1024);
            dmk_wgmma_wait<0>();
            wgmma_hold(s);
            mask(s, b, pos, p.window, lane);
            softmax<true>(s, st, c);
            pack_weights(w, s);
            b++;
            /* Blocks that every row of the warpgroup sees whole come without masks. */
            uint32_t clear_begin = p.window ? first_visible(first + 7, p.window) / 64 + 1 : b;
            uint32_t clear_end = min(end, (first + 1) / 64);
            walk<true>(sh, st, s, w, q, tiles, it, b, min(clear_begin, end), pos, p.window, lane,
                       total);
            walk<false>(sh, st, s, w, q, tiles, it, b, clear_end, pos, p.window, lane, total);
            walk<true>(sh, st, s, w, q, tiles, it, b, end, pos, p.window, lane, total);
            dmk_wgmma_fence();
            mul_pv(st.o, w, tiles + it % STAGES * 1024 + 512);
            dmk_wgmma_wait<0>();
            wgmma_hold(st.o);
            if (lane == 0) {
                dmk_mbar_arrive(&sh->empty[it % STAGES]);
            }
            it++;
            fold_split(st, st.m, st.l, total);
        }
        for (; b < t.block_end; b++, it++) {
            dmk_mbar_wait(&sh->full[it % STAGES], (it / STAGES) & 1);
            if (lane == 0) {
                dmk_mbar_arrive(&sh->empty[it % STAGES]);
            }
        }
        store_rows(p, t, st, total, sh->out + wg * 8192, wg, thread);
    }
}

template <int WARPGROUPS>
__global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1)
    attn_prefill(const __grid_constant__ attn_maps maps, const prefill_params p)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    prefill_shared<WARPGROUPS> *sh = (prefill_shared<WARPGROUPS> *)memory;
    uint32_t wg = threadIdx.x / 128, thread = threadIdx.x % 128;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            dmk_mbar_init(&sh->full[s], 1);
            dmk_mbar_init(&sh->empty[s], 4 * WARPGROUPS);
        }
        for (int b = 0; b < 2; b++) {
            dmk_mbar_init(&sh->q_full[b], 1);
            dmk_mbar_init(&sh->q_empty[b], 4 * WARPGROUPS);
        }
        dmk_mbar_fence();
    }
    __syncthreads();
    dmk_pdl_next();
    dmk_pdl_wait();
    if (wg == WARPGROUPS) {
        give_registers<WARPGROUPS == 3 ? 32 : 40>();
        if (thread < 32) {
            feed(&maps.q, &maps.pages, &maps.k, &maps.v, p, sh, thread);
        }
    } else {
        take_registers<WARPGROUPS == 3 ? 160 : 232>(); /* all that the launch has */
        compute(p, sh, wg, thread);
    }
}

void attn_prefill_sm90(const struct dmk_attn_args *args, struct dmk_stream *stream)
{
    constexpr int WARPGROUPS = DMK_ATTN_TILE_WIDE / 8;
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    attn_maps maps;
    if (args->n_tiles == 0 || !attn_make_maps(args, DMK_ATTN_TILE_WIDE, s, &maps)) {
        return;
    }
    prefill_params p = {};
    p.seqs = args->seqs;
    p.tiles = args->tiles;
    p.page_ids = args->page_ids;
    p.sinks = args->sinks;
    p.k = args->k;
    p.v = args->v;
    p.pages = args->pages;
    p.out = args->out;
    p.kv_stride = args->kv_stride ? args->kv_stride : (uint64_t)args->n_kv_heads * 64;
    p.n_tiles = args->n_tiles;
    p.n_kv_heads = args->n_kv_heads;
    p.group = args->group;
    p.n_pages = args->n_pages;
    p.window = args->window;
    p.fresh = args->fresh;
    uint32_t n_work = args->n_tiles * args->n_kv_heads;
    dmk_cuda_launch(stream, attn_prefill<WARPGROUPS>, dim3(n_work < s->n_sms ? n_work : s->n_sms),
                    dim3(128 * (WARPGROUPS + 1)), sizeof(prefill_shared<WARPGROUPS>), maps, p);
}
