/* Prefill attention on Hopper: many query tokens of a sequence against its paged keys.
 *
 * A block of threads takes a tile: DMK_ATTN_TILE_WIDE tokens times the 8 query heads of one KV head, 64 rows for each
 * warpgroup. One warpgroup more only feeds them (attn_feed.cuh): keys and values come by TMA into a ring of stages in the
 * layout that wgmma reads, the next tile's queries too, so that the warpgroups never wait at the border of two tiles.
 * Blocks stay resident and walk through the list of tiles from its end, where the longest are.
 *
 * A warpgroup's step is a block of keys: the product P V of the block before and the scores Q K of this one, then its
 * exponentials. While one has the tensor cores, the others have the exponentials; on full layers they take turns, so
 * that it stays like this. What is computed stands in attn_math.cuh. */
#include "kernels/cuda/attn_feed.cuh"
#include "kernels/cuda/attn_math.cuh"

/* State of a thread: its two rows are one query head at two neighbouring tokens. */
struct rows {
    float begin;                  /* the first m of both */
    float o[32], m[2], l[2];      /* of the split */
    float total_m[2], total_l[2]; /* of the splits before */
    bool first;                   /* there are none */
    int o_add;                    /* 0: the next product begins o */
};

/* Tiles are told by the low word of their descriptor, counted in 16 bytes. */
__device__ __forceinline__ uint64_t tile_at(uint32_t low)
{
    return (uint64_t)DMK_WGMMA_HIGH << 32 | low;
}

/* The same in every lane, and the compiler shall know it. */
__device__ __forceinline__ uint32_t uniform(uint32_t x)
{
    return __shfl_sync(0xffffffffu, x, 0);
}

template <int N> __device__ __forceinline__ void mul_qk(float (&s)[N], uint32_t q, uint32_t k)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        dmk_wgmma<2 * N>::run(s, tile_at(q + 2 * i), tile_at(k + 2 * i), i > 0);
    }
    dmk_wgmma_commit();
}

template <int N>
__device__ __forceinline__ void mul_pv(float (&o)[32], const uint32_t (&w)[N], uint32_t v, int add)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        dmk_wgmma_64x64_rs<1>(o, w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3],
                              tile_at(v + 128 * i), i > 0 ? 1 : add);
    }
    dmk_wgmma_commit();
}

/* Hides what rows at positions pos and pos + 1 must not see of a block that begins at key. */
template <int N>
__device__ __forceinline__ void mask(float (&s)[N], uint32_t key, uint32_t pos, uint32_t window,
                                     uint32_t lane)
{
    int32_t back =
        (int32_t)(pos - key - 2 * (lane & 3)); /* the oldest of the thread's keys is that far */
#pragma unroll
    for (int i = 0; i < N; i++) {
        int32_t far = back + ((i >> 1) & 1) - (8 * (i >> 2) + (i & 1));
        if (N == 32 ? (uint32_t)far >= window : far < 0) {
            s[i] = ATTN_NONE;
        }
    }
}

/* N groups of two scores of row r, from group I on: to weights; their sum as a tree, for a chain would wait for itself. */
template <int N, int R, int I, int M>
__device__ __forceinline__ float weigh_row(float (&s)[M], float offset)
{
    if constexpr (N == 1) {
        s[4 * I + 2 * R] = attn_weight(s[4 * I + 2 * R], offset);
        s[4 * I + 2 * R + 1] = attn_weight(s[4 * I + 2 * R + 1], offset);
        return __fadd_rn(s[4 * I + 2 * R], s[4 * I + 2 * R + 1]);
    } else {
        float left = weigh_row<N / 2, R, I>(s, offset);
        return __fadd_rn(left, weigh_row<N / 2, R, I + N / 2>(s, offset));
    }
}

template <int N, int R, int I, int M> __device__ __forceinline__ float top_of(const float (&s)[M])
{
    if constexpr (N == 1) {
        return fmaxf(s[4 * I + 2 * R], s[4 * I + 2 * R + 1]);
    } else {
        return fmaxf(top_of<N / 2, R, I>(s), top_of<N / 2, R, I + N / 2>(s));
    }
}

/* Scores to weights; sum: of the thread's. */
template <int N>
__device__ __forceinline__ void weigh(float (&s)[N], const float (&m)[2], float (&sum)[2])
{
    sum[0] = weigh_row<N / 4, 0, 0>(s, attn_offset(m[0]));
    sum[1] = weigh_row<N / 4, 1, 0>(s, attn_offset(m[1]));
}

template <int N> __device__ __forceinline__ void find_top(const float (&s)[N], float (&top)[2])
{
    top[0] = top_of<N / 4, 0, 0>(s);
    top[1] = top_of<N / 4, 1, 0>(s);
#pragma unroll
    for (int x = 1; x <= 2; x++) {
        top[0] = fmaxf(top[0], __shfl_xor_sync(0xffffffffu, top[0], x));
        top[1] = fmaxf(top[1], __shfl_xor_sync(0xffffffffu, top[1], x));
    }
}

/* s: scores in, weights out, by their maximum; what the split has so far shrinks where that is too far above m. */
template <int N> __device__ void softmax(float (&s)[N], rows &st)
{
    float top[2], sum[2], c[2];
    find_top(s, top);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float m = attn_raise(st.m[r], top[r]);
        c[r] = attn_shrink(st.m[r], m);
        st.l[r] = __fmul_rn(st.l[r], c[r]);
        st.m[r] = m;
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        st.o[i] = __fmul_rn(st.o[i], c[(i >> 1) & 1]);
    }
    weigh(s, st.m, sum);
    st.l[0] = __fadd_rn(st.l[0], sum[0]);
    st.l[1] = __fadd_rn(st.l[1], sum[1]);
}

/* The scores' registers hold what the next product wants as its left side, in the same order. */
template <int N, int M>
__device__ __forceinline__ void pack_weights(uint32_t (&w)[N], const float (&s)[M])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        w[i] = dmk_pack_bf16(s[2 * i], s[2 * i + 1]);
    }
}

__device__ __forceinline__ float sum_of_quad(float x)
{
    x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* total: the thread's column of the sums before; of the last split they stay in o. */
template <bool LAST> __device__ __forceinline__ void fold_split(rows &st, float4 *total)
{
    float a[2], b[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        attn_fold_factors(st.total_m[r], st.m[r], a[r], b[r]);
        st.total_l[r] = attn_fold(st.total_l[r], a[r], sum_of_quad(st.l[r]), b[r]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float4 t = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (!st.first) {
            t = total[i * 128];
        }
        t.x = attn_fold(t.x, a[0], st.o[4 * i], b[0]);
        t.y = attn_fold(t.y, a[0], st.o[4 * i + 1], b[0]);
        t.z = attn_fold(t.z, a[1], st.o[4 * i + 2], b[1]);
        t.w = attn_fold(t.w, a[1], st.o[4 * i + 3], b[1]);
        if (LAST) {
            st.o[4 * i] = t.x, st.o[4 * i + 1] = t.y, st.o[4 * i + 2] = t.z, st.o[4 * i + 3] = t.w;
        } else {
            total[i * 128] = t;
        }
    }
    st.first = false;
    st.m[0] = st.m[1] = st.begin;
    st.l[0] = st.l[1] = 0.0f;
}

/* Rows of the tile to memory: through the shared memory of its queries, so that a token's heads go out in lines. */
__device__ __forceinline__ void store_rows(const prefill_params &p, const tile_view &t,
                                           const rows &st, uint8_t *stage, uint32_t wg,
                                           uint32_t thread)
{
    uint32_t warp = thread / 32, lane = thread % 32;
    dmk_named_barrier(1 + wg, 128); /* the queries have been read */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t row = 16 * warp + 8 * r + lane / 4;
        float inverse = __frcp_rn(st.total_l[r]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            *(uint32_t *)(stage + dmk_swizzle_128(row, 16 * i + 4 * (lane & 3))) =
                dmk_pack_bf16(__fmul_rn(st.o[4 * i + 2 * r], inverse),
                              __fmul_rn(st.o[4 * i + 2 * r + 1], inverse));
        }
    }
    dmk_named_barrier(1 + wg, 128);
#pragma unroll
    for (uint32_t i = thread; i < 512; i += 128) {
        uint32_t row = i / 8, chunk = i % 8, token = 8 * wg + row / 8, g = row % 8;
        if (token < t.n_tokens && g < p.group) {
            size_t at = ((size_t)(t.row + token) * p.n_kv_heads + t.head) * p.group + g;
            *(uint4 *)(p.out + at * 64 + chunk * 8) =
                *(const uint4 *)(stage + dmk_swizzle_128(row, chunk * 16));
        }
    }
}

/* What a warpgroup walks with. */
template <int KEYS> struct walker {
    prefill_shared<KEYS> *sh;
    float4 *total;
    ring_place<prefill_shared<KEYS>::STAGES> at; /* the stage of the block in w */
    uint32_t stages, q;                          /* descriptors */
    uint32_t pos, window, wg, lane, per_split;

    __device__ __forceinline__ uint32_t k_tile(uint32_t stage) const
    {
        return stages + stage * (2 * sh->K_BYTES / 16);
    }

    /* One that is another warpgroup's. */
    __device__ __forceinline__ void skip_block()
    {
        dmk_mbar_wait(&sh->full[at.stage], at.phase);
        if (lane == 0) {
            dmk_mbar_arrive(&sh->empty[at.stage]);
        }
        at.step();
    }
};

/* The barrier at which a warpgroup waits for its turn on the tensor cores, and which the one before it lets it pass. All
 * of them walk as many blocks, or they would not meet. */
__device__ __forceinline__ uint32_t turn_of(uint32_t wg)
{
    return 8 + wg;
}

/* The weights of block b, whose scores are in s, to w and into the sums. */
template <bool MASKED, int KEYS>
__device__ __forceinline__ void weigh_block(const walker<KEYS> &x, rows &st, float (&s)[KEYS / 2],
                                            uint32_t (&w)[KEYS / 4], uint32_t b)
{
    float sum[2];
    if (MASKED) {
        mask(s, b * KEYS, x.pos, x.window, x.lane);
    }
    weigh(s, st.m, sum);
    pack_weights(w, s);
    if (dmk_named_barrier_any(1 + x.wg, 128, sum[0] > ATTN_FAR || sum[1] > ATTN_FAR)) {
        dmk_wgmma_fence();
        mul_qk(s, x.q, x.k_tile(x.at.stage));
        dmk_wgmma_wait<0>();
        dmk_wgmma_hold(s);
        if (MASKED) {
            mask(s, b * KEYS, x.pos, x.window, x.lane);
        }
        softmax(s, st);
        pack_weights(w, s);
    } else {
        st.l[0] = __fadd_rn(st.l[0], sum[0]);
        st.l[1] = __fadd_rn(st.l[1], sum[1]);
    }
}

/* From block b - 1, whose weights are in w, to block b. The products run one behind the other: P V of the block before, so
 * that the stage and w are free, then the scores. Other warpgroups have the exponentials meanwhile. */
template <bool MASKED, bool NEW_SPLIT, int KEYS>
__device__ __forceinline__ void step(walker<KEYS> &x, rows &st, uint32_t (&w)[KEYS / 4], uint32_t b)
{
    prefill_shared<KEYS> *sh = x.sh;
    float s[KEYS / 2];
    uint32_t here = x.at.stage;
    x.at.step();
    dmk_mbar_wait(&sh->full[x.at.stage], x.at.phase);
    if (KEYS == 128) {
        dmk_named_barrier(turn_of(x.wg), 256);
    }
    dmk_wgmma_fence();
    mul_pv(st.o, w, x.k_tile(here) + sh->K_BYTES / 16, st.o_add);
    mul_qk(s, x.q, x.k_tile(x.at.stage));
    if (KEYS == 128) { /* half of this one's turn is over */
        dmk_wgmma_wait<1>();
        dmk_named_arrive(turn_of((x.wg + 1) % WARPGROUPS), 256);
    }
    if (NEW_SPLIT) {
        dmk_wgmma_hold(st.o);
        fold_split<false>(st, x.total);
    }
    dmk_wgmma_wait<0>();
    dmk_wgmma_hold(s);
    dmk_wgmma_hold(st.o);
    if (x.lane == 0) {
        dmk_mbar_arrive(&sh->empty[here]);
    }
    st.o_add = NEW_SPLIT ? 0 : 1;
    weigh_block<MASKED>(x, st, s, w, b);
}

template <bool MASKED, int KEYS>
__device__ __forceinline__ void walk(walker<KEYS> &x, rows &st, uint32_t (&w)[KEYS / 4],
                                     uint32_t &b, uint32_t end)
{
    const uint32_t per_split = x.per_split;
    while (b < end) {
        if (KEYS == 128 && (b & (per_split - 1)) == 0) {
            step<MASKED, true>(x, st, w, b);
            b++;
        }
        uint32_t stop = KEYS == 128 ? min(end, (b + per_split - 1) & ~(per_split - 1)) : end;
        for (; b < stop; b++) {
            step<MASKED, false>(x, st, w, b);
        }
    }
}

/* Blocks b .. end - 1 of a tile, whose rows of this warpgroup begin at position first. */
template <int KEYS>
__device__ __forceinline__ void walk_tile(walker<KEYS> &x, rows &st, uint32_t &b, uint32_t first,
                                          uint32_t end)
{
    prefill_shared<KEYS> *sh = x.sh;
    float s[KEYS / 2];
    uint32_t w[KEYS / 4];
    dmk_mbar_wait(&sh->full[x.at.stage], x.at.phase);
    dmk_wgmma_fence();
    mul_qk(s, x.q, x.k_tile(x.at.stage));
    dmk_wgmma_wait<0>();
    dmk_wgmma_hold(s);
    weigh_block<true>(x, st, s, w, b);
    b++;
    /* Blocks that every row of the warpgroup sees whole come without masks. */
    if (KEYS == 64) {
        walk<true>(x, st, w, b, min(uniform(first_visible(first + 7, x.window) / KEYS + 1), end));
    }
    walk<false>(x, st, w, b, min(end, uniform((first + 1) / KEYS)));
    walk<true>(x, st, w, b, end);
    dmk_wgmma_fence();
    mul_pv(st.o, w, x.k_tile(x.at.stage) + sh->K_BYTES / 16, st.o_add);
    dmk_wgmma_wait<0>();
    dmk_wgmma_hold(st.o);
    if (x.lane == 0) {
        dmk_mbar_arrive(&sh->empty[x.at.stage]);
    }
    x.at.step();
    if (KEYS == 128) {
        fold_split<true>(st, x.total);
    } else {
        st.total_l[0] = sum_of_quad(st.l[0]);
        st.total_l[1] = sum_of_quad(st.l[1]);
    }
}

template <int KEYS>
__device__ void compute(const prefill_params &p, prefill_shared<KEYS> *sh, uint32_t wg,
                        uint32_t thread)
{
    uint32_t warp = thread / 32, lane = thread % 32, g = lane / 4;
    uint32_t n_work = p.n_tiles * p.n_kv_heads;
    walker<KEYS> x;
    x.sh = sh;
    x.total = &sh->total[wg][0][thread];
    x.at = {0, 0};
    x.stages = uniform((uint32_t)dmk_wgmma_desc(sh->stage[0]));
    x.window = p.window;
    x.wg = wg;
    x.lane = lane;
    if (KEYS == 128 && wg == WARPGROUPS - 1) {
        dmk_named_arrive(turn_of(0), 256);
    }
    for (uint32_t round = 0, work; (work = work_of(round)) < n_work; round++) {
        uint32_t qb = round & 1;
        dmk_mbar_wait(&sh->q_full[qb], (round >> 1) & 1);
        tile_view t = sh->tile[qb];
        uint32_t first = t.pos + 8 * wg;
        x.pos = first + 2 * warp;
        x.q = uniform((uint32_t)dmk_wgmma_desc(sh->q[qb] + wg * 8192));
        /* The warpgroup's own blocks, out of those that the tile brings. */
        uint32_t block_end = uniform(t.block_end);
        x.per_split = uniform(t.per_split);
        uint32_t begin = uniform(min(first_visible(first, p.window) / KEYS, block_end));
        uint32_t end = uniform(min((first + 7) / KEYS + 1, block_end));
        if (KEYS == 128) {
            end = block_end; /* turns */
        } else if (8 * wg >= t.n_tokens) {
            begin = end = block_end;
        }

        rows st;
        st.first = true;
        st.o_add = 0;
        st.begin = g < p.group ? attn_begin(dmk_bf16_f32(p.sinks[t.head * p.group + g])) : 0.0f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            st.total_m[r] = st.m[r] = st.begin;
            st.total_l[r] = 1.0f;
            st.l[r] = KEYS == 64 && (lane & 3) == 0 ? 1.0f : 0.0f;
        }
        uint32_t b = uniform(t.block_begin);
        for (; b < begin; b++) {
            x.skip_block();
        }
        if (begin < end) {
            walk_tile(x, st, b, first, end);
        }
        for (; b < block_end; b++) {
            x.skip_block();
        }
        store_rows(p, t, st, sh->q[qb] + wg * 8192, wg, thread);
        dmk_fence_async_shared();
        __syncwarp();
        if (lane == 0) {
            dmk_mbar_arrive(&sh->q_empty[qb]);
        }
    }
}

template <int KEYS>
__global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1)
    attn_prefill(const __grid_constant__ attn_maps maps, const prefill_params p)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    typedef prefill_shared<KEYS> shared;
    shared *sh = (shared *)memory;
    uint32_t wg = uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
    if (threadIdx.x == 0) {
        for (int s = 0; s < shared::STAGES; s++) {
            dmk_mbar_init(&sh->full[s], 1);
            dmk_mbar_init(&sh->empty[s], 4 * WARPGROUPS);
        }
        for (int b = 0; b < 2; b++) {
            dmk_mbar_init(&sh->q_full[b], 1);
            dmk_mbar_init(&sh->q_empty[b], 4 * WARPGROUPS);
        }
        dmk_mbar_init_fence();
        dmk_fence_async_shared();
    }
    __syncthreads();
    dmk_pdl_next();
    dmk_pdl_wait();
    if (wg == WARPGROUPS) {
        dmk_regs_drop<32>();
        if (thread < 32) {
            feed(maps, p, sh, thread);
        }
    } else {
        dmk_regs_raise<160>(); /* all that the launch has */
        compute(p, sh, wg, thread);
    }
}

template <int KEYS>
static void launch(const attn_maps &maps, const prefill_params &p, struct dmk_stream *stream)
{
    const uint32_t n_work = p.n_tiles * p.n_kv_heads, n_sms = dmk_cuda_of(stream)->n_sms;
    dmk_cuda_launch(stream, attn_prefill<KEYS>, dim3(n_work < n_sms ? n_work : n_sms),
                    dim3(128 * (WARPGROUPS + 1)), sizeof(prefill_shared<KEYS>), maps, p);
}

void attn_prefill_sm90(const struct dmk_attn_args *args, struct dmk_stream *stream)
{
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    attn_maps maps;
    if (args->n_tiles == 0 ||
        !attn_make_maps(args, DMK_ATTN_TILE_WIDE, DMK_KERNEL_PAGE, s, &maps)) {
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
    if (p.window) {
        launch<64>(maps, p, stream);
    } else {
        launch<128>(maps, p, stream);
    }
}
