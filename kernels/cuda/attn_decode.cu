/* Decode attention on Hopper: one query token per sequence, its keys cut into splits.
 *
 * An item is one split of one sequence (of a sliding layer: the whole window); a block takes it for one KV head. The 8 query heads stand on the N
 * side of the products (scores as [64 keys][8 heads], output as [64 d][8 heads]), so that no row is padding;
 * pages come by TMA into a ring of stages, fed by a warp of its own that runs ahead over the items. Three
 * blocks fit a multiprocessor and keep some 190 KiB of reads in flight.
 *
 * A split's result goes to memory and a second, small kernel folds a sequence's splits in order: atomics that
 * let the last block do it need fences, and those cost more than the launch. What is computed stands in
 * attn_math.cuh, bit for bit as in the prefill kernel. */
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/attn_math.cuh"

#define STAGES         4
#define Q_BYTES        1024u
#define STAGE_BYTES    (ATTN_PAGE_BYTES + Q_BYTES)
#define PARTIAL_FLOATS 528u /* o[64 d][8 heads], m[8], l[8] */
#define BLOCKS_PER_SM  3

/* What the feeding warp says about a stage. */
struct stage_note {
    uint32_t page; /* of the sequence, counted from its first; DMK_NONE: the end */
    uint32_t pos, head;
    uint32_t row; /* of the query */
    uint32_t slot, n_splits;
    uint32_t flags;
};
#define FIRST_OF_ITEM 1u
#define LAST_OF_ITEM  2u

struct decode_shared {
    uint8_t stage[STAGES][STAGE_BYTES];
    /* Of a block and of the one before, which slower warps may still be reading. The memory is what lets the blocks of
     * attn_fold_splits start beside. */
    uint8_t weights[2][1024]; /* [][8 heads][64 keys] bf16, of a block's first page */
    struct stage_note note[STAGES];
    float sum[2][2][4][4][8]; /* [][page of the block][warp][key class][head] */
    float top[4][8];          /* of a warp's keys, per head */
    float split_m[8], split_l[8];
    uint64_t full[STAGES], empty[STAGES];
};

struct decode_params {
    const struct dmk_attn_seq *seqs;
    const struct dmk_attn_split *splits; /* NULL: sliding layers, an item is a sequence */
    const uint32_t *n_splits;
    const uint32_t *page_ids;
    const uint16_t *sinks;
    const uint16_t *k, *v;
    uint16_t *out;
    float *partials;
    uint64_t kv_stride;
    uint32_t max_splits; /* that partials has room for */
    uint32_t n_seqs, n_kv_heads, group, n_pages, window;
    bool fresh;
};

/* An item as the feeding warp walks it. */
struct item_view {
    const struct dmk_attn_seq *seq;
    uint32_t begin, end;     /* pages */
    uint32_t slot, n_splits; /* n_splits 1: the item is all of the sequence */
};

__device__ __forceinline__ item_view view_item(const decode_params &p, uint32_t item)
{
    item_view v;
    if (p.splits == NULL) {
        v.seq = &p.seqs[item];
        uint32_t pos = v.seq->pos;
        v.begin = (pos + 1 > p.window ? pos + 1 - p.window : 0) / 64;
        v.end = v.seq->n_tokens == 1 ? pos / 64 + 1 : v.begin; /* others are tiles, or padding */
        v.slot = 0;
        v.n_splits = 1;
    } else {
        struct dmk_attn_split split = p.splits[item];
        v.seq = &p.seqs[split.seq];
        uint32_t n_blocks = v.seq->pos / 64 + 1;
        uint32_t per_split = dmk_attn_split_keys(v.seq->pos) / 64;
        v.begin = split.index * per_split;
        v.end = v.seq->n_tokens == 1 ? min(v.begin + per_split, n_blocks) : v.begin;
        v.slot = item;
        v.n_splits = (n_blocks + per_split - 1) / per_split;
    }
    return v;
}

__device__ void feed(const CUtensorMap *q_map, const CUtensorMap *page_map, const decode_params &p,
                     decode_shared *sh, uint32_t lane)
{
    uint32_t n_items = p.splits == NULL ? p.n_seqs : *p.n_splits;
    if (p.splits != NULL && n_items > p.max_splits) {
        __trap(); /* 16 million keys in one step: an error of the step rather than a write behind the memory */
    }
    uint32_t n_work = n_items * p.n_kv_heads, it = 0;
    for (uint32_t work = blockIdx.x; work < n_work; work += gridDim.x) {
        item_view v = view_item(p, work / p.n_kv_heads);
        uint32_t head = work % p.n_kv_heads, pos = v.seq->pos, row = v.seq->row, page = 0;
        if (v.begin + lane < v.end) { /* at most 32 pages */
            uint32_t b = v.begin + lane;
            page = p.window ? v.seq->ring[b % v.seq->n_ring] : p.page_ids[v.seq->first_page + b];
        }
        for (uint32_t b = v.begin; b < v.end; b++, it++) {
            uint32_t s = it % STAGES, id = __shfl_sync(0xffffffffu, page, b - v.begin);
            uint64_t *full = &sh->full[s];
            dmk_mbar_wait(&sh->empty[s], ((it / STAGES) & 1) ^ 1);
            if (lane == 0) {
                uint32_t flags =
                    (b == v.begin ? FIRST_OF_ITEM : 0) | (b + 1 == v.end ? LAST_OF_ITEM : 0);
                sh->note[s] = {b, pos, head, row, v.slot, v.n_splits, flags};
                dmk_mbar_expect(full, STAGE_BYTES);
                dmk_tma_load_2d(sh->stage[s], page_map, full, 0,
                                (int32_t)((head * p.n_pages + id) * 128));
                dmk_tma_load_4d(sh->stage[s] + ATTN_PAGE_BYTES, q_map, full, 0, 0, head, row);
            }
            __syncwarp();
        }
    }
    uint32_t s = it % STAGES;
    dmk_mbar_wait(&sh->empty[s], ((it / STAGES) & 1) ^ 1);
    if (lane == 0) {
        sh->note[s].page = DMK_NONE;
        dmk_mbar_arrive(&sh->full[s]);
    }
}

/* The last page of a sequence: the step's own key and value where the pages do not hold them yet, and zeros
 * behind the end, since what lies there must not reach a product. */
__device__ void mend_page(const decode_params &p, const stage_note &note, uint8_t *stage,
                          uint32_t thread)
{
    uint32_t last = note.pos % 64;
    if (p.fresh && thread < 16) {
        uint32_t is_v = thread / 8, chunk = thread % 8;
        const uint16_t *src =
            (is_v ? p.v : p.k) + note.row * p.kv_stride + note.head * 64 + chunk * 8;
        *(uint4 *)(stage + is_v * 8192 + dmk_swizzle_128(last, chunk * 16)) = *(const uint4 *)src;
    }
    for (uint32_t i = thread; i < 512; i += 128) {
        if (i / 8 > last) {
            *(uint4 *)(stage + 8192 + i * 16) = make_uint4(0, 0, 0, 0);
        }
    }
    dmk_fence_async_shared();
    dmk_named_barrier(1, 128);
}

/* A thread's part: output rows d = 16 warp + lane / 4 and + 8, heads 2 (lane % 4) and + 1. */
struct part {
    float o[4];
    float m[2];         /* of its two heads */
    float sum_m, sum_l; /* warp 0: of head lane / 4, key class lane % 4 */
};

/* Where a page's weights go: of the second page where its queries lie, since the first has the same. */
__device__ __forceinline__ uint8_t *weights_of(decode_shared *sh, uint8_t *const (&stage)[2],
                                               uint32_t buffer, int page)
{
    return page == 0 ? sh->weights[buffer] : stage[1] + ATTN_PAGE_BYTES;
}

/* Scores of a block to weights in shared memory and their sums. True when a sum is too large for m to be right. */
template <int PAGES>
__device__ __forceinline__ bool weigh_block(decode_shared *sh, uint8_t *const (&stage)[2],
                                            const float (&s)[PAGES][4], const part &st,
                                            uint32_t buffer, uint32_t warp, uint32_t lane)
{
    uint32_t quad = lane & 3;
    float offset[2] = {attn_offset(st.m[0]), attn_offset(st.m[1])}, most = 0.0f;
#pragma unroll
    for (int page = 0; page < PAGES; page++) {
        uint8_t *to = weights_of(sh, stage, buffer, page);
        float both[2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float weight = attn_weight(s[page][i], offset[i & 1]);
            float pair = __fadd_rn(weight, __shfl_xor_sync(0xffffffffu, weight, 4));
            both[i & 1] = i < 2 ? pair : __fadd_rn(both[i & 1], pair);
            uint32_t j = 16 * warp + lane / 4 + (i >> 1) * 8;
            *(__nv_bfloat16 *)(to + dmk_swizzle_128(2 * quad + (i & 1), 2 * j)) =
                __float2bfloat16_rn(weight);
        }
        most = fmaxf(most, fmaxf(both[0], both[1]));
        if ((lane / 4) % 2 == 0) {
            sh->sum[buffer][page][warp][lane / 8][2 * quad] = both[0];
            sh->sum[buffer][page][warp][lane / 8][2 * quad + 1] = both[1];
        }
    }
    dmk_fence_async_shared();
    return most > ATTN_FAR;
}

/* The block's maxima of all heads; m and the sums so far follow where they are too far above. */
template <int PAGES>
__device__ void raise_block(decode_shared *sh, const float (&s)[PAGES][4], part &st, uint32_t warp,
                            uint32_t lane)
{
    uint32_t quad = lane & 3;
    float top[2] = {ATTN_NONE, ATTN_NONE};
#pragma unroll
    for (int i = 0; i < 4 * PAGES; i++) {
        top[i & 1] = fmaxf(top[i & 1], s[i / 4][i % 4]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 4));
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 8));
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 16));
    }
    if (lane < 4) {
        sh->top[warp][2 * quad] = top[0];
        sh->top[warp][2 * quad + 1] = top[1];
    }
    dmk_named_barrier(1, 128);
#pragma unroll
    for (int h = 0; h < 3; h++) { /* 2: the head whose sum this thread keeps */
        uint32_t head = h < 2 ? 2 * quad + h : lane / 4;
        float &of = h < 2 ? st.m[h] : st.sum_m;
        float m = attn_raise(of, fmaxf(fmaxf(sh->top[0][head], sh->top[1][head]),
                                       fmaxf(sh->top[2][head], sh->top[3][head])));
        float c = attn_shrink(of, m);
        of = m;
        if (h == 2) {
            st.sum_l = __fmul_rn(st.sum_l, c);
        } else {
            st.o[h] = __fmul_rn(st.o[h], c);
            st.o[h + 2] = __fmul_rn(st.o[h + 2], c);
        }
    }
}

/* A block of keys: a page of a sliding layer, two of a full one, of which the second may not be there. */
template <int PAGES, bool SLIDING>
__device__ __forceinline__ void step_block(const decode_params &p, decode_shared *sh,
                                           const stage_note &note, uint8_t *const (&stage)[2],
                                           part &st, uint32_t buffer, uint32_t warp, uint32_t lane)
{
    uint32_t quad = lane & 3, key = note.page * 64 + 16 * warp + lane / 4;
    float s[PAGES][4];
    uint64_t q_tile = dmk_wgmma_desc(stage[0] + ATTN_PAGE_BYTES);
    dmk_wgmma_fence();
#pragma unroll
    for (int page = 0; page < PAGES; page++) {
        uint64_t k_tile = dmk_wgmma_desc(stage[page]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            dmk_wgmma_64x8_ss<0>(s[page], k_tile + 2 * i, q_tile + 2 * i, i > 0);
        }
    }
    dmk_wgmma_commit();
    dmk_wgmma_wait<0>();
#pragma unroll
    for (int page = 0; page < PAGES; page++) {
        dmk_wgmma_hold(s[page]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t j = key + page * 64 + (i >> 1) * 8;
            if (j > note.pos || (SLIDING && j + p.window <= note.pos)) {
                s[page][i] = ATTN_NONE;
            }
        }
    }
    bool far = weigh_block(sh, stage, s, st, buffer, warp, lane);
    if (dmk_named_barrier_any(1, 128, far)) {
        raise_block(sh, s, st, warp, lane);
        weigh_block(sh, stage, s, st, buffer, warp, lane);
        dmk_named_barrier(1, 128);
    }
    dmk_wgmma_fence();
#pragma unroll
    for (int page = 0; page < PAGES; page++) {
        uint64_t v_tile = dmk_wgmma_desc(stage[page] + 8192);
        uint64_t w_tile = dmk_wgmma_desc(weights_of(sh, stage, buffer, page));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            dmk_wgmma_64x8_ss<1>(st.o, v_tile + 128 * i, w_tile + 2 * i, 1);
        }
    }
    dmk_wgmma_commit();
    if (warp == 0) {
        float sum[PAGES];
#pragma unroll
        for (int page = 0; page < PAGES; page++) {
            const float(*of)[4][8] = sh->sum[buffer][page];
            sum[page] = __fadd_rn(__fadd_rn(of[0][quad][lane / 4], of[1][quad][lane / 4]),
                                  __fadd_rn(of[2][quad][lane / 4], of[3][quad][lane / 4]));
        }
        st.sum_l = __fadd_rn(st.sum_l, PAGES == 1 ? sum[0] : __fadd_rn(sum[0], sum[PAGES - 1]));
    }
    dmk_wgmma_wait<0>();
    dmk_wgmma_hold(st.o);
}

/* The first m of a head; of one that the group does not have: 0. */
__device__ __forceinline__ float begin_of(const decode_params &p, uint32_t head, uint32_t g)
{
    return g < p.group ? attn_begin(dmk_bf16_f32(p.sinks[head * p.group + g])) : 0.0f;
}

/* o over l: of a split that is all of its row, folded into the sink first; of a sliding row, which began with it. */
template <bool SLIDING>
__device__ __forceinline__ void store(const decode_params &p, const decode_shared *sh,
                                      const stage_note &note, const part &st, uint32_t warp,
                                      uint32_t lane)
{
    float o[4], l[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t g = 2 * (lane & 3) + h;
        l[h] = sh->split_l[g];
        o[h] = st.o[h], o[h + 2] = st.o[h + 2];
        if (!SLIDING) {
            float m = begin_of(p, note.head, g), a, b;
            attn_fold_factors(m, st.m[h], a, b);
            l[h] = attn_fold(1.0f, a, l[h], b);
            o[h] = attn_fold(0.0f, a, o[h], b);
            o[h + 2] = attn_fold(0.0f, a, o[h + 2], b);
        }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        uint32_t g = 2 * (lane & 3) + (e & 1), d = 16 * warp + lane / 4 + (e >> 1) * 8;
        if (g < p.group) {
            size_t at = ((size_t)note.row * p.n_kv_heads + note.head) * p.group + g;
            p.out[at * 64 + d] = dmk_f32_bf16(__fmul_rn(o[e], __frcp_rn(l[e & 1])));
        }
    }
}

/* The split's maxima and sums of all heads into shared memory. */
__device__ __forceinline__ void close_split(decode_shared *sh, const part &st, uint32_t warp,
                                            uint32_t lane)
{
    if (warp == 0) {
        float sum = st.sum_l;
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        if ((lane & 3) == 0) {
            sh->split_l[lane / 4] = sum;
            sh->split_m[lane / 4] = st.sum_m;
        }
    }
    dmk_named_barrier(1, 128);
}

__device__ __forceinline__ float *partial_of(const decode_params &p, uint32_t slot, uint32_t head)
{
    return p.partials + ((size_t)slot * p.n_kv_heads + head) * PARTIAL_FLOATS;
}

/* Leaves the split's result in memory for attn_fold_splits. */
__device__ __forceinline__ void leave_partial(const decode_params &p, decode_shared *sh,
                                              const stage_note &note, const part &st, uint32_t warp,
                                              uint32_t lane)
{
    uint32_t h0 = 2 * (lane & 3), d0 = 16 * warp + lane / 4;
    float *at = partial_of(p, note.slot, note.head);
    *(float2 *)(at + d0 * 8 + h0) = make_float2(st.o[0], st.o[1]);
    *(float2 *)(at + (d0 + 8) * 8 + h0) = make_float2(st.o[2], st.o[3]);
    if (warp == 0 && lane < 16) {
        at[512 + lane] = lane < 8 ? sh->split_m[lane] : sh->split_l[lane - 8];
    }
}

__device__ __forceinline__ uint32_t n_splits_of(const struct dmk_attn_seq &seq)
{
    return seq.n_tokens == 1 ? seq.pos / dmk_attn_split_keys(seq.pos) + 1 : 0;
}

/* One block for each sequence and KV head; thread t holds d = t / 2 of four heads. */
__global__ void __launch_bounds__(128) attn_fold_splits(const decode_params p)
{
    /* Where the sequence's splits begin in the list; seqs is older than the decode kernel, which lets this one start
     * after its own wait only. */
    uint32_t seq = blockIdx.x / p.n_kv_heads, head = blockIdx.x % p.n_kv_heads, before = 0;
    for (uint32_t i = threadIdx.x; i < seq; i += 128) {
        before += n_splits_of(p.seqs[i]);
    }
    before = __reduce_add_sync(0xffffffffu, before);
    __shared__ uint32_t warp_sum[4];
    if (threadIdx.x % 32 == 0) {
        warp_sum[threadIdx.x / 32] = before;
    }
    __syncthreads();
    before = warp_sum[0] + warp_sum[1] + warp_sum[2] + warp_sum[3];
    uint32_t d = threadIdx.x / 2, h0 = threadIdx.x % 2 * 4, row = p.seqs[seq].row;
    uint32_t n_splits = n_splits_of(p.seqs[seq]);
    dmk_pdl_wait();
    dmk_pdl_next();
    if (n_splits < 2) { /* the decode kernel has stored it */
        return;
    }
    const float *from = partial_of(p, before, head);
    const size_t step = (size_t)p.n_kv_heads * PARTIAL_FLOATS;
    float m[4], l[4], o[4];
#pragma unroll
    for (int h = 0; h < 4; h++) {
        m[h] = begin_of(p, head, h0 + h);
        l[h] = 1.0f;
        o[h] = 0.0f;
    }
    for (uint32_t first = 0; first < n_splits; first += 8) {
        float4 po[8], pm[8], pl[8]; /* the loads of eight splits are in flight together */
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            if (first + i < n_splits) {
                const float *at = from + (first + i) * step;
                po[i] = *(const float4 *)(at + d * 8 + h0);
                pm[i] = *(const float4 *)(at + 512 + h0);
                pl[i] = *(const float4 *)(at + 520 + h0);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            if (first + i < n_splits) {
                const float split_o[4] = {po[i].x, po[i].y, po[i].z, po[i].w};
                const float split_m[4] = {pm[i].x, pm[i].y, pm[i].z, pm[i].w};
                const float split_l[4] = {pl[i].x, pl[i].y, pl[i].z, pl[i].w};
#pragma unroll
                for (int h = 0; h < 4; h++) {
                    float a, b;
                    attn_fold_factors(m[h], split_m[h], a, b);
                    l[h] = attn_fold(l[h], a, split_l[h], b);
                    o[h] = attn_fold(o[h], a, split_o[h], b);
                }
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 4; h++) {
        if (h0 + h < p.group) {
            size_t at = ((size_t)row * p.n_kv_heads + head) * p.group + h0 + h;
            p.out[at * 64 + d] = dmk_f32_bf16(__fmul_rn(o[h], __frcp_rn(l[h])));
        }
    }
}

template <bool SLIDING>
__device__ void compute(const decode_params &p, decode_shared *sh, uint32_t thread)
{
    uint32_t warp = thread / 32, lane = thread % 32, h0 = 2 * (lane & 3);
    part st;
    for (uint32_t it = 0, buffer = 0;; it++, buffer ^= 1) {
        uint32_t s = it % STAGES;
        uint8_t *stage[2] = {sh->stage[s], sh->stage[(it + 1) % STAGES]};
        dmk_mbar_wait(&sh->full[s], (it / STAGES) & 1);
        stage_note note = sh->note[s];
        if (note.page == DMK_NONE) {
            break;
        }
        if (note.flags & FIRST_OF_ITEM) {
            st = {{0, 0, 0, 0},
                  {begin_of(p, note.head, h0), begin_of(p, note.head, h0 + 1)},
                  begin_of(p, note.head, lane / 4),
                  SLIDING && (lane & 3) == 0 ? 1.0f : 0.0f};
        }
        uint32_t last = note.pos / 64;
        if (SLIDING || note.page == last) {
            if (note.page == last) {
                mend_page(p, note, stage[0], thread);
            }
            step_block<1, SLIDING>(p, sh, note, stage, st, buffer, warp, lane);
        } else {
            it++;
            s = it % STAGES;
            dmk_mbar_wait(&sh->full[s], (it / STAGES) & 1);
            note.flags = sh->note[s].flags;
            if (note.page + 1 == last) {
                mend_page(p, note, stage[1], thread);
            }
            step_block<2, SLIDING>(p, sh, note, stage, st, buffer, warp, lane);
            if (lane == 0) {
                dmk_mbar_arrive(&sh->empty[(it - 1) % STAGES]);
            }
        }
        if (lane == 0) {
            dmk_mbar_arrive(&sh->empty[s]);
        }
        if (note.flags & LAST_OF_ITEM) {
            close_split(sh, st, warp, lane);
            if (note.n_splits == 1) {
                store<SLIDING>(p, sh, note, st, warp, lane);
            } else {
                leave_partial(p, sh, note, st, warp, lane);
            }
            dmk_named_barrier(1, 128); /* split_l and split_m have been read */
        }
    }
}

template <bool SLIDING>
/* Registers as for six blocks: room for attn_fold_splits, which starts beside. */
__global__ void __launch_bounds__(160, 2 * BLOCKS_PER_SM)
    attn_decode(const __grid_constant__ attn_maps maps, const decode_params p)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    decode_shared *sh = (decode_shared *)memory;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            dmk_mbar_init(&sh->full[s], 1);
            dmk_mbar_init(&sh->empty[s], 4);
        }
        dmk_mbar_init_fence();
        dmk_fence_async_shared();
    }
    __syncthreads();
    dmk_pdl_wait();
    dmk_pdl_next();
    if (threadIdx.x >= 128) {
        feed(&maps.q, &maps.pages, p, sh, threadIdx.x - 128);
    } else {
        compute<SLIDING>(p, sh, threadIdx.x);
    }
}

void attn_decode_sm90(const struct dmk_attn_args *args, struct dmk_stream *stream)
{
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    attn_maps maps;
    const bool sliding = args->window != 0;
    const uint64_t max_items = sliding ? args->n_seqs : args->max_splits;
    const uint64_t n_partials = max_items * args->n_kv_heads;
    if (n_partials == 0 || !attn_make_maps(args, 1, 128, s, &maps)) {
        return;
    }
    decode_params p = {};
    p.seqs = args->seqs;
    p.splits = sliding ? NULL : args->splits;
    p.n_splits = args->n_splits;
    p.page_ids = args->page_ids;
    p.sinks = args->sinks;
    p.k = args->k;
    p.v = args->v;
    p.out = args->out;
    p.partials = (float *)s->workspace;
    p.kv_stride = args->kv_stride ? args->kv_stride : (uint64_t)args->n_kv_heads * 64;
    p.max_splits = DMK_CUDA_WORKSPACE_BYTES / (args->n_kv_heads * PARTIAL_FLOATS * sizeof(float));
    p.n_seqs = args->n_seqs;
    p.n_kv_heads = args->n_kv_heads;
    p.group = args->group;
    p.n_pages = args->n_pages;
    p.window = args->window;
    p.fresh = args->fresh;
    uint64_t grid = (uint64_t)s->n_sms * BLOCKS_PER_SM;
    const dim3 blocks((uint32_t)(n_partials < grid ? n_partials : grid));
    if (sliding) {
        dmk_cuda_launch(stream, attn_decode<true>, blocks, dim3(160), sizeof(decode_shared), maps,
                        p);
    } else {
        dmk_cuda_launch(stream, attn_decode<false>, blocks, dim3(160), sizeof(decode_shared), maps,
                        p);
        dmk_cuda_launch(stream, attn_fold_splits, dim3(args->n_seqs * args->n_kv_heads), dim3(128),
                        0, p);
    }
}
