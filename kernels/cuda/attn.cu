/* Attention with sinks over paged keys and values, on tensor cores of one warp (m16n8k16).
 *
 * Rows of the matrices are (token, query head of the group) pairs, so the heads that share keys share their
 * loads. A page of 64 keys is one step: scores, running maximum, sum and output of the rows are rescaled, all in
 * fp32, probabilities enter the second product as bf16.
 *
 *   tile_kernel    sequences of several tokens: a block has 16 tokens of one KV head, a warp 16 rows, and walks
 *                  the pages that any of its rows sees. Hidden keys weigh exactly 0, so a row's bits do not depend
 *                  on the rows beside it.
 *   row_kernel     sequences of one token: a block takes a piece of 512 keys, a warp every fourth page of it; the
 *                  last block of a row to arrive joins the pieces in order. */
#include "kernels/cuda/cuda.h"

#define D        64
#define PAGE     64
#define PITCH    72 /* elements of a row in shared memory: no bank is hit twice */
#define ROW_WARPS 4
#define SPLIT_PAGES (DMK_ATTN_SPLIT / PAGE)
#define PART     (D + 2) /* floats of a row's partial result: output, maximum, sum */
#define SCALE_LOG2 (0.125f * 1.44269504088896341f)

struct kv_tile {
    uint16_t k[PAGE][PITCH], v[PAGE][PITCH];
};

/* Where key j of a sequence lies; its value is *ret_v. */
__device__ __forceinline__ const uint16_t *find_key(const struct dmk_attn_args &a, const struct dmk_attn_seq &seq,
                                                    uint32_t head, uint32_t j, const uint16_t **ret_v)
{
    if (a.fresh && j >= seq.pos) {
        const size_t at = (size_t)(seq.row + j - seq.pos) * a.kv_stride + head * D;
        *ret_v = a.v + at;
        return a.k + at;
    }
    const uint32_t block = j / PAGE;
    const uint32_t page = a.window ? seq.ring[block % seq.n_ring] : a.page_ids[seq.first_page + block];
    const uint16_t *k = (const uint16_t *)(a.pages + ((size_t)head * a.n_pages + page) * a.page_bytes) + j % PAGE * D;
    *ret_v = k + PAGE * D;
    return k;
}

/* Keys [lo, hi) of a block of 64 positions to shared memory, zeros for the others, by n_threads threads. */
__device__ __forceinline__ void load_tile(struct kv_tile *to, const struct dmk_attn_args &a,
                                          const struct dmk_attn_seq &seq, uint32_t head, uint32_t block, uint32_t lo,
                                          uint32_t hi, uint32_t thread, uint32_t n_threads)
{
    for (uint32_t i = thread; i < PAGE * 8; i += n_threads) {
        const uint32_t row = i / 8, vec = i % 8, j = block * PAGE + row;
        const bool valid = j >= lo && j < hi;
        const uint16_t *v, *k = find_key(a, seq, head, valid ? j : lo, &v);
        dmk_cp_async16(&to->k[row][vec * 8], k + vec * 8, valid);
        dmk_cp_async16(&to->v[row][vec * 8], v + vec * 8, valid);
    }
}

/* A warp's 16 rows: m and l of rows lane / 4 and lane / 4 + 8; l is this thread's share. */
struct state {
    float m[2], l[2], acc[8][4];
};

/* One page: rows see keys [first[i], last[i]]. */
__device__ __forceinline__ void attend_tile(struct state *st, const uint32_t (&q)[4][4], const struct kv_tile *kv,
                                            uint32_t block, const uint32_t (&first)[2], const uint32_t (&last)[2])
{
    const uint32_t lane = threadIdx.x % 32, t = lane % 4;
    float s[8][4];
#pragma unroll
    for (int n = 0; n < 8; n++) {
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t b[4];
            dmk_ldmatrix_x4(b, &kv->k[n * 8 + lane % 8][half * 32 + lane / 8 * 8]);
            dmk_mma_bf16(s[n], q[half * 2], b[0], b[1]);
            dmk_mma_bf16(s[n], q[half * 2 + 1], b[2], b[3]);
        }
    }
    float c[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float max = st->m[i];
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const uint32_t j = block * PAGE + n * 8 + 2 * t + e;
                if (j < first[i] || j > last[i]) {
                    s[n][2 * i + e] = -INFINITY;
                }
                max = fmaxf(max, s[n][2 * i + e]);
            }
        }
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
        /* Without any key yet everything stays 0: the exponent is taken from 0, not from infinity. */
        const float base = max == -INFINITY ? 0.0f : max;
        c[i] = exp2f((st->m[i] - base) * SCALE_LOG2);
        st->m[i] = max;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float p = exp2f((s[n][2 * i + e] - base) * SCALE_LOG2);
                s[n][2 * i + e] = p;
                sum += p;
            }
        }
        st->l[i] = st->l[i] * c[i] + sum;
    }
#pragma unroll
    for (int n = 0; n < 8; n++) {
        st->acc[n][0] *= c[0];
        st->acc[n][1] *= c[0];
        st->acc[n][2] *= c[1];
        st->acc[n][3] *= c[1];
    }
#pragma unroll
    for (int kk = 0; kk < 4; kk++) {
        const uint32_t p[4] = {dmk_pack_bf16(s[2 * kk][0], s[2 * kk][1]), dmk_pack_bf16(s[2 * kk][2], s[2 * kk][3]),
                               dmk_pack_bf16(s[2 * kk + 1][0], s[2 * kk + 1][1]),
                               dmk_pack_bf16(s[2 * kk + 1][2], s[2 * kk + 1][3])};
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t b[4];
            dmk_ldmatrix_x4_trans(b, &kv->v[kk * 16 + lane % 16][n * 8 + lane / 16 * 8]);
            dmk_mma_bf16(st->acc[n], p, b[0], b[1]);
            dmk_mma_bf16(st->acc[n + 1], p, b[2], b[3]);
        }
    }
}

__device__ __forceinline__ void clear_state(struct state *st)
{
#pragma unroll
    for (int n = 0; n < 8; n++) {
        st->acc[n][0] = st->acc[n][1] = st->acc[n][2] = st->acc[n][3] = 0.0f;
    }
}

/* The row of q for (token row, head of the group), as the first operand. Rows that do not exist are 0. */
__device__ __forceinline__ void load_q(uint32_t (&q)[4][4], const uint16_t *r0, const uint16_t *r1)
{
    const uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (int kk = 0; kk < 4; kk++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t d = kk * 16 + half * 8 + 2 * t;
            q[kk][half * 2] = r0 ? *(const uint32_t *)(r0 + d) : 0;
            q[kk][half * 2 + 1] = r1 ? *(const uint32_t *)(r1 + d) : 0;
        }
    }
}

__global__ void __launch_bounds__(256) tile_kernel(const struct dmk_attn_args a)
{
    __shared__ __align__(16) struct kv_tile kv[2];
    dmk_pdl_wait();
    dmk_pdl_next();
    const struct dmk_attn_tile tile = a.tiles[a.n_tiles - 1 - blockIdx.y]; /* the longest first */
    const struct dmk_attn_seq seq = a.seqs[tile.seq];
    const uint32_t head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t p0 = seq.pos + tile.first, p_last = p0 + tile.n_tokens - 1;
    const uint32_t lo = a.window && p0 + 1 > a.window ? p0 + 1 - a.window : 0;
    uint32_t first[2], last[2], q[4][4];
    const uint16_t *rows[2];
    uint16_t *out[2];
    struct state st;
    clear_state(&st);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t r = warp * 16 + lane / 4 + i * 8, token = r / a.group, g = head * a.group + r % a.group;
        const bool live = token < tile.n_tokens;
        const uint32_t p = p0 + (live ? token : 0);
        const size_t row = seq.row + tile.first + token;
        last[i] = p;
        first[i] = a.window && p + 1 > a.window ? p + 1 - a.window : 0;
        rows[i] = live ? a.q + row * a.q_stride + (size_t)g * D : NULL;
        out[i] = live ? a.out + (row * a.n_kv_heads * a.group + g) * D : NULL;
        st.m[i] = dmk_bf16_f32(a.sinks[live ? g : 0]) * 8.0f; /* in units of the scores before the factor */
        st.l[i] = lane % 4 == 0 ? 1.0f : 0.0f;
    }
    load_q(q, rows[0], rows[1]);
    const uint32_t b0 = lo / PAGE, b1 = p_last / PAGE;
    load_tile(&kv[0], a, seq, head, b0, lo, p_last + 1, threadIdx.x, blockDim.x);
    dmk_cp_async_commit();
    for (uint32_t b = b0; b <= b1; b++) {
        if (b < b1) {
            load_tile(&kv[(b - b0 + 1) % 2], a, seq, head, b + 1, lo, p_last + 1, threadIdx.x, blockDim.x);
        }
        dmk_cp_async_commit();
        dmk_cp_async_wait<1>();
        __syncthreads();
        attend_tile(&st, q, &kv[(b - b0) % 2], b, first, last);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        st.l[i] += __shfl_xor_sync(0xffffffffu, st.l[i], 1);
        st.l[i] += __shfl_xor_sync(0xffffffffu, st.l[i], 2);
        if (out[i]) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
                *(uint32_t *)(out[i] + n * 8 + lane % 4 * 2) =
                    dmk_pack_bf16(st.acc[n][2 * i] / st.l[i], st.acc[n][2 * i + 1] / st.l[i]);
            }
        }
    }
}

/* Adds a partial result to (m, l, acc of one element); empty ones have m = -infinity and l = 0. */
__device__ __forceinline__ void join(float *m, float *l, float *acc, float part_m, float part_l, float part_acc)
{
    const float max = fmaxf(*m, part_m), base = max == -INFINITY ? 0.0f : max;
    const float a = exp2f((*m - base) * SCALE_LOG2), b = exp2f((part_m - base) * SCALE_LOG2);
    *m = max;
    *l = *l * a + part_l * b;
    *acc = *acc * a + part_acc * b;
}

struct row_smem {
    struct kv_tile kv[ROW_WARPS];
    float part[ROW_WARPS][8][PART];
    uint32_t last;
};

/* The row's first piece holds the sink. Partial results of this row and KV head: parts[piece * pitch]. */
__device__ void row_item(const struct dmk_attn_args &a, struct row_smem *s, uint32_t seq_index, uint32_t index,
                         uint32_t head, float *parts, size_t pitch, uint32_t *arrived)
{
    const struct dmk_attn_seq seq = a.seqs[seq_index];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, p = seq.pos;
    const uint32_t lo = a.window && p + 1 > a.window ? p + 1 - a.window : 0;
    const uint32_t n_pieces = a.window ? 1 : p / DMK_ATTN_SPLIT + 1;
    const uint32_t b_first = a.window ? lo / PAGE : index * SPLIT_PAGES;
    const uint32_t b_last = a.window ? p / PAGE : min(p / PAGE, b_first + SPLIT_PAGES - 1);
    const uint32_t first[2] = {lo, lo}, last[2] = {p, p};
    const uint32_t g = lane / 4;
    uint32_t q[4][4];
    struct state st;
    clear_state(&st);
    load_q(q, g < a.group ? a.q + (size_t)seq.row * a.q_stride + (size_t)(head * a.group + g) * D : NULL, NULL);
    const bool sink = index == 0 && warp == 0;
    st.m[0] = sink ? dmk_bf16_f32(a.sinks[head * a.group + min(g, a.group - 1)]) * 8.0f : -INFINITY;
    st.l[0] = sink && lane % 4 == 0 ? 1.0f : 0.0f;
    st.m[1] = -INFINITY;
    st.l[1] = 0.0f;
    for (uint32_t b = b_first + warp; b <= b_last; b += ROW_WARPS) {
        load_tile(&s->kv[warp], a, seq, head, b, lo, p + 1, lane, 32);
        dmk_cp_async_commit();
        dmk_cp_async_wait<0>();
        __syncwarp();
        attend_tile(&st, q, &s->kv[warp], b, first, last);
        __syncwarp();
    }
    st.l[0] += __shfl_xor_sync(0xffffffffu, st.l[0], 1);
    st.l[0] += __shfl_xor_sync(0xffffffffu, st.l[0], 2);
    float *mine = s->part[warp][g];
#pragma unroll
    for (int n = 0; n < 8; n++) {
        mine[n * 8 + lane % 4 * 2] = st.acc[n][0];
        mine[n * 8 + lane % 4 * 2 + 1] = st.acc[n][1];
    }
    if (lane % 4 == 0) {
        mine[D] = st.m[0];
        mine[D + 1] = st.l[0];
    }
    __syncthreads();
    /* A thread has four of the 8 x 64 elements: thread i column i % 64, heads i / 64 + 0, 2, 4, 6. */
    const uint32_t d = threadIdx.x % D;
    float m[4], l[4], acc[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t h = threadIdx.x / D + i * 2;
        m[i] = -INFINITY, l[i] = 0.0f, acc[i] = 0.0f;
#pragma unroll
        for (int w = 0; w < ROW_WARPS; w++) {
            join(&m[i], &l[i], &acc[i], s->part[w][h][D], s->part[w][h][D + 1], s->part[w][h][d]);
        }
    }
    if (n_pieces > 1) {
        float *piece = parts + index * pitch; /* [8 heads of the group][PART] */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t h = threadIdx.x / D + i * 2;
            __stcg(piece + h * PART + d, acc[i]);
            if (d == 0) {
                __stcg(piece + h * PART + D, m[i]);
                __stcg(piece + h * PART + D + 1, l[i]);
            }
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            s->last = atomicAdd(arrived, 1) == n_pieces - 1;
        }
        __syncthreads();
        if (!s->last) {
            return;
        }
        __threadfence();
        if (threadIdx.x == 0) {
            *arrived = 0;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *from = parts + (threadIdx.x / D + i * 2) * PART;
            m[i] = -INFINITY, l[i] = 0.0f, acc[i] = 0.0f;
            for (uint32_t n = 0; n < n_pieces; n++, from += pitch) {
                join(&m[i], &l[i], &acc[i], __ldcg(from + D), __ldcg(from + D + 1), __ldcg(from + d));
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t h = threadIdx.x / D + i * 2;
        if (h < a.group) {
            a.out[(((size_t)seq.row * a.n_kv_heads + head) * a.group + h) * D + d] = dmk_f32_bf16(acc[i] / l[i]);
        }
    }
}

__global__ void __launch_bounds__(ROW_WARPS * 32)
    row_kernel(const struct dmk_attn_args a, float *parts, uint32_t *counters)
{
    extern __shared__ __align__(16) uint8_t raw[];
    struct row_smem *s = (struct row_smem *)raw;
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint32_t n_items = (a.window ? a.n_seqs : *a.n_splits) * a.n_kv_heads;
    for (uint32_t item = blockIdx.x; item < n_items; item += gridDim.x) {
        const uint32_t head = item % a.n_kv_heads, at = item / a.n_kv_heads;
        const uint32_t seq = a.window ? at : a.splits[at].seq, index = a.window ? 0 : a.splits[at].index;
        if (a.seqs[seq].n_tokens == 1) {
            const size_t first = a.window ? 0 : (size_t)(at - index) * a.n_kv_heads + head;
            row_item(a, s, seq, index, head, parts + first * 8 * PART, (size_t)a.n_kv_heads * 8 * PART,
                     counters + seq * a.n_kv_heads + head);
        }
        __syncthreads();
    }
}

void dmk_cuda_attn(const struct dmk_attn_args *args, struct dmk_stream *stream)
{
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    struct dmk_attn_args a = *args;
    a.q_stride = a.q_stride ? a.q_stride : (uint64_t)a.n_kv_heads * a.group * D;
    a.kv_stride = a.kv_stride ? a.kv_stride : (uint64_t)a.n_kv_heads * D;
    if (a.n_tiles > 0) {
        dmk_cuda_launch(stream, tile_kernel, dim3(a.n_kv_heads, a.n_tiles), dim3(a.group * 32), 0, a);
    }
    if (a.splits && (a.window ? a.n_seqs : a.max_splits) > 0) {
        const uint32_t n_items = (a.window ? a.n_seqs : a.max_splits) * a.n_kv_heads;
        const uint32_t n_blocks = n_items < s->n_sms * 2 ? n_items : s->n_sms * 2;
        dmk_cuda_launch(stream, row_kernel, dim3(n_blocks), dim3(ROW_WARPS * 32), sizeof(struct row_smem), a,
                        (float *)s->workspace, s->counters);
    }
}
