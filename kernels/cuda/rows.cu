/* Operations row by row: embedding, RMS norm, residual, RoPE, writing and copying KV pages, and rows from
 * other ranks.
 *
 * A block a row (or a page), 16 bytes a thread and step. Sums are fp32: a thread's own elements in order, then
 * a butterfly over the warp, then the warps in order. */
#include "kernels/cuda/cuda.h"

#define ROW_THREADS 384
#define ROPE_THREADS 320
#define MAX_VEC     2 /* vectors of 8 elements a thread holds: hidden up to 6144 */

__global__ void embed_kernel(struct dmk_embed_args a)
{
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint4 *from = (const uint4 *)(a.table + (size_t)a.ids[blockIdx.x] * a.hidden);
    uint4 *to = (uint4 *)(a.x + (size_t)blockIdx.x * a.hidden);
    for (uint32_t i = threadIdx.x; i < a.hidden / 8; i += ROW_THREADS) {
        to[i] = from[i];
    }
}

void dmk_cuda_embed(const struct dmk_embed_args *args, struct dmk_stream *stream)
{
    if (args->n_rows > 0) {
        dmk_cuda_launch(stream, embed_kernel, args->n_rows, ROW_THREADS, 0, *args);
    }
}

/* bf16(x + bf16(sum)) of two elements. */
__device__ __forceinline__ uint32_t add_pair(uint32_t x, float lo, float hi)
{
    return dmk_pack_bf16(dmk_lo(x) + dmk_round_bf16(lo), dmk_hi(x) + dmk_round_bf16(hi));
}

__device__ __forceinline__ uint4 add_vec(uint4 x, const float (&sum)[8])
{
    x.x = add_pair(x.x, sum[0], sum[1]);
    x.y = add_pair(x.y, sum[2], sum[3]);
    x.z = add_pair(x.z, sum[4], sum[5]);
    x.w = add_pair(x.w, sum[6], sum[7]);
    return x;
}

__device__ __forceinline__ void load_sum(float (&sum)[8], const float *from)
{
    float4 lo = ((const float4 *)from)[0], hi = ((const float4 *)from)[1];
    sum[0] = lo.x, sum[1] = lo.y, sum[2] = lo.z, sum[3] = lo.w;
    sum[4] = hi.x, sum[5] = hi.y, sum[6] = hi.z, sum[7] = hi.w;
}

__device__ __forceinline__ void add_bias(float (&sum)[8], const uint16_t *bias)
{
    uint4 b = *(const uint4 *)bias;
    sum[0] += dmk_lo(b.x), sum[1] += dmk_hi(b.x), sum[2] += dmk_lo(b.y), sum[3] += dmk_hi(b.y);
    sum[4] += dmk_lo(b.z), sum[5] += dmk_hi(b.z), sum[6] += dmk_lo(b.w), sum[7] += dmk_hi(b.w);
}

__device__ __forceinline__ float square_sum(uint4 x, float sum)
{
    const uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum = fmaf(dmk_lo(w[i]), dmk_lo(w[i]), sum);
        sum = fmaf(dmk_hi(w[i]), dmk_hi(w[i]), sum);
    }
    return sum;
}

__device__ __forceinline__ uint32_t norm_pair(uint32_t x, uint32_t scale, float r)
{
    return dmk_pack_bf16((dmk_lo(x) * r) * dmk_lo(scale), (dmk_hi(x) * r) * dmk_hi(scale));
}

/* The row that a block holds in registers becomes its norm in y. */
__device__ __forceinline__ void norm_row(const uint4 (&x)[MAX_VEC], const uint16_t *scale, uint16_t *y,
                                         uint32_t hidden, float eps)
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < MAX_VEC; i++) {
        if (threadIdx.x + i * ROW_THREADS < hidden / 8) {
            sum = square_sum(x[i], sum);
        }
    }
    sum = dmk_block_sum<ROW_THREADS>(sum);
    const float r = 1.0f / sqrtf(sum / (float)hidden + eps);
#pragma unroll
    for (int i = 0; i < MAX_VEC; i++) {
        const uint32_t at = threadIdx.x + i * ROW_THREADS;
        if (at < hidden / 8) {
            const uint4 s = ((const uint4 *)scale)[at];
            uint4 out;
            out.x = norm_pair(x[i].x, s.x, r);
            out.y = norm_pair(x[i].y, s.y, r);
            out.z = norm_pair(x[i].z, s.z, r);
            out.w = norm_pair(x[i].w, s.w, r);
            ((uint4 *)y)[at] = out;
        }
    }
}

__global__ void __launch_bounds__(ROW_THREADS) rmsnorm_kernel(struct dmk_rmsnorm_args a)
{
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint32_t row = a.rows ? a.rows[blockIdx.x] : blockIdx.x;
    const uint4 *from = (const uint4 *)(a.x + (size_t)row * a.hidden);
    uint4 x[MAX_VEC];
#pragma unroll
    for (int i = 0; i < MAX_VEC; i++) {
        const uint32_t at = threadIdx.x + i * ROW_THREADS;
        if (at < a.hidden / 8) {
            x[i] = from[at];
        }
    }
    norm_row(x, a.scale, a.y + (size_t)blockIdx.x * a.hidden, a.hidden, a.eps);
}

void dmk_cuda_rmsnorm(const struct dmk_rmsnorm_args *args, struct dmk_stream *stream)
{
    if (args->n_rows > 0) {
        dmk_cuda_launch(stream, rmsnorm_kernel, args->n_rows, ROW_THREADS, 0, *args);
    }
}

#define MEETING_NS 20000000000ull /* a rank that does not come is gone */

__device__ __forceinline__ uint64_t now_ns()
{
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

/* The first block tells, all wait. The release hands on what the kernels before have written, since the first
 * block has waited for them; the acquires and the barrier bring what the others have written. */
__device__ __forceinline__ void meet(const struct dmk_meeting &m)
{
    if (m.n == 0) {
        return;
    }
    if (threadIdx.x < m.n) {
        const uint32_t want = *m.base + m.number;
        if (blockIdx.x == 0) {
            asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(m.tell[threadIdx.x]), "r"(want) : "memory");
        }
        const uint64_t begin = now_ns();
        for (uint32_t i = 1;; i++) {
            uint32_t heard;
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(heard) : "l"(m.hear + threadIdx.x) : "memory");
            if ((int32_t)(heard - want) >= 0) {
                break;
            }
            if (i % 1024 == 0 && now_ns() - begin > MEETING_NS) {
                __trap();
            }
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void load_bf16(float (&y)[8], const uint16_t *from)
{
    const uint4 v = *(const uint4 *)from;
    y[0] = dmk_lo(v.x), y[1] = dmk_hi(v.x), y[2] = dmk_lo(v.y), y[3] = dmk_hi(v.y);
    y[4] = dmk_lo(v.z), y[5] = dmk_hi(v.z), y[6] = dmk_lo(v.w), y[7] = dmk_hi(v.w);
}

/* The tree over the sums of R ranks; all loads are under way before the first addition. */
template <int R>
__device__ __forceinline__ void load_tree(float (&sum)[8], const struct dmk_add_norm_args &a, size_t at)
{
    float part[R][8];
#pragma unroll
    for (int r = 0; r < R; r++) {
        load_sum(part[r], a.sum[r] + at);
    }
#pragma unroll
    for (int e = 0; e < 8; e++) {
#pragma unroll
        for (int width = R; width > 1; width /= 2) {
#pragma unroll
            for (int r = 0; r < width / 2; r++) {
                part[r][e] = part[2 * r][e] + part[2 * r + 1][e];
            }
        }
        sum[e] = part[0][e];
    }
}

/* residual, and with a scale the norm of the new x. R 0: the sum is whole. */
template <int R> __global__ void __launch_bounds__(ROW_THREADS) add_norm_kernel(struct dmk_add_norm_args a)
{
    dmk_pdl_wait();
    dmk_pdl_next();
    meet(a.meeting);
    uint16_t *row = a.x + (size_t)blockIdx.x * a.hidden;
    uint4 x[MAX_VEC];
#pragma unroll
    for (int i = 0; i < MAX_VEC; i++) {
        const uint32_t at = threadIdx.x + i * ROW_THREADS;
        if (at < a.hidden / 8) {
            float sum[8];
            if constexpr (R == 0) {
                load_bf16(sum, a.whole + (size_t)blockIdx.x * a.hidden + at * 8);
            } else {
                load_tree<R>(sum, a, (size_t)blockIdx.x * a.hidden + at * 8);
                if (a.bias) {
                    add_bias(sum, a.bias + at * 8);
                }
            }
            x[i] = add_vec(((const uint4 *)row)[at], sum);
            ((uint4 *)row)[at] = x[i];
        }
    }
    if (a.scale) {
        norm_row(x, a.scale, a.y + (size_t)blockIdx.x * a.hidden, a.hidden, a.eps);
    }
}

void dmk_cuda_add_norm(const struct dmk_add_norm_args *args, struct dmk_stream *stream)
{
    void (*kernel)(struct dmk_add_norm_args) = args->whole          ? add_norm_kernel<0>
                                               : args->n_ranks == 1 ? add_norm_kernel<1>
                                               : args->n_ranks == 2 ? add_norm_kernel<2>
                                               : args->n_ranks == 4 ? add_norm_kernel<4>
                                                                    : add_norm_kernel<8>;
    if (args->n_rows > 0) {
        dmk_cuda_launch(stream, kernel, args->n_rows, ROW_THREADS, 0, *args);
    }
}

void dmk_cuda_residual(const struct dmk_residual_args *args, struct dmk_stream *stream)
{
    struct dmk_add_norm_args a = {};
    a.x = args->x;
    a.sum[0] = args->sum;
    a.n_ranks = 1;
    a.bias = args->bias;
    a.n_rows = args->n_rows;
    a.hidden = args->hidden;
    dmk_cuda_add_norm(&a, stream);
}

/* to += from, from = 0 */
__device__ __forceinline__ void fold(float (&to)[8], float (&from)[8])
{
#pragma unroll
    for (int e = 0; e < 8; e++) {
        to[e] += from[e];
        from[e] = 0.0f;
    }
}

/* combine (all groups of the model), residual, norm. Sums over experts as dmk_moe_combine_args says. K: choices of
 * a row at most. All loads of a row begin before the first is used. */
template <uint32_t K>
__global__ void __launch_bounds__(ROW_THREADS, K > 4 ? 1 : 2) combine_norm_kernel(struct dmk_combine_norm_args a)
{
    dmk_pdl_wait();
    dmk_pdl_next();
    const struct dmk_moe_combine_args &c = a.combine;
    const uint32_t *slots = c.plan.row_slots + (size_t)blockIdx.x * c.k;
    uint32_t slot[K], group[K];
    float weight[K];
#pragma unroll
    for (uint32_t i = 0; i < K; i++) {
        slot[i] = i < c.k ? slots[i] : DMK_NONE;
    }
    uint16_t *row = a.x ? a.x + (size_t)blockIdx.x * c.hidden : NULL;
    uint4 x[MAX_VEC];
#pragma unroll
    for (int v = 0; v < MAX_VEC; v++) {
        const uint32_t at = threadIdx.x + v * ROW_THREADS;
        if (at >= c.hidden / 8) {
            continue;
        }
        float y[K][8];
        if (row) {
            x[v] = ((const uint4 *)row)[at];
        }
#pragma unroll
        for (uint32_t i = 0; i < K; i++) {
            if (slot[i] != DMK_NONE) {
                load_sum(y[i], c.y + (size_t)slot[i] * c.hidden + at * 8);
            }
        }
        if (v == 0) {
#pragma unroll
            for (uint32_t i = 0; i < K; i++) {
                if (slot[i] != DMK_NONE) {
                    group[i] = c.plan.slot_group[slot[i]];
                    weight[i] = c.plan.slot_weight[slot[i]];
                }
            }
        }
        /* Groups ascend, so the tree is walked from left to right: a finished leaf joins its pair, a finished
         * pair its four, a finished four the whole. What is empty is +0, as in the full tree. */
        float leaf[8] = {}, two[8] = {}, four[8] = {}, sum[8] = {};
#pragma unroll
        for (uint32_t i = 0; i < K; i++) {
            if (slot[i] == DMK_NONE) {
                break;
            }
            if (i > 0 && group[i] != group[i - 1]) {
                fold(two, leaf);
                if (group[i] / 2 != group[i - 1] / 2) {
                    fold(four, two);
                    if (group[i] / 4 != group[i - 1] / 4) {
                        fold(sum, four);
                    }
                }
            }
#pragma unroll
            for (int e = 0; e < 8; e++) {
                leaf[e] = fmaf(weight[i], y[i][e], leaf[e]);
            }
        }
        fold(two, leaf);
        fold(four, two);
        fold(sum, four);
        if (row) {
            x[v] = add_vec(x[v], sum);
            ((uint4 *)row)[at] = x[v];
        } else {
            float4 *out = (float4 *)(c.out + (size_t)blockIdx.x * c.hidden + at * 8);
            out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
            out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
        }
    }
    if (a.scale) {
        norm_row(x, a.scale, a.y + (size_t)blockIdx.x * c.hidden, c.hidden, a.eps);
    }
}

void dmk_cuda_combine_norm(const struct dmk_combine_norm_args *args, struct dmk_stream *stream)
{
    if (args->combine.n_rows > 0) {
        dmk_cuda_launch(stream, args->combine.k <= 4 ? combine_norm_kernel<4> : combine_norm_kernel<DMK_MAX_TOPK>,
                        args->combine.n_rows, ROW_THREADS, 0, *args);
    }
}

void dmk_cuda_moe_combine(const struct dmk_moe_combine_args *args, struct dmk_stream *stream)
{
    struct dmk_combine_norm_args a = {};
    a.combine = *args;
    dmk_cuda_combine_norm(&a, stream);
}

/* A block a row. */
__global__ void __launch_bounds__(ROW_THREADS) gather_kernel(struct dmk_gather_args a)
{
    dmk_pdl_wait();
    dmk_pdl_next();
    meet(a.meeting);
    uint32_t g = 0;
#pragma unroll
    for (uint32_t i = 1; i < DMK_MAX_SOURCES; i++) {
        g = i < a.n_from && blockIdx.x >= a.from[i].first ? i : g;
    }
    const size_t row = blockIdx.x - a.from[g].first;
    const bool live = row < *a.from[g].n_live;
    bool ours = false;
    for (uint32_t i = 0; i < a.k; i++) {
        const uint32_t id = live ? a.from[g].ids[row * a.k + i] : DMK_NONE;
        ours = ours || id - a.expert_first < a.n_experts;
        if (threadIdx.x == i) {
            a.ids[(size_t)blockIdx.x * a.k + i] = id;
            a.weights[(size_t)blockIdx.x * a.k + i] = live ? a.from[g].weights[row * a.k + i] : 0.0f;
        }
    }
    if (!ours) {
        return;
    }
    const uint4 *from = (const uint4 *)(a.from[g].x + row * a.hidden);
    uint4 *to = (uint4 *)(a.x + (size_t)blockIdx.x * a.hidden);
    for (uint32_t i = threadIdx.x; i < a.hidden / 8; i += ROW_THREADS) {
        to[i] = from[i];
    }
}

void dmk_cuda_gather(const struct dmk_gather_args *args, struct dmk_stream *stream)
{
    if (args->n_rows > 0) {
        dmk_cuda_launch(stream, gather_kernel, args->n_rows, ROW_THREADS, 0, *args);
    }
}

/* A pair's rotation, each product and each sum rounded on its own. */
__device__ __forceinline__ void turn(float lo, float hi, float c, float s, uint16_t *to_lo, uint16_t *to_hi)
{
    *to_lo = dmk_f32_bf16(__fsub_rn(__fmul_rn(lo, c), __fmul_rn(hi, s)));
    *to_hi = dmk_f32_bf16(__fadd_rn(__fmul_rn(hi, c), __fmul_rn(lo, s)));
}

__global__ void rope_kernel(struct dmk_rope_args a)
{
    dmk_pdl_wait();
    dmk_pdl_next();
    const float2 *table = (const float2 *)a.table + (size_t)a.positions[blockIdx.x] * 32;
    uint16_t *row = a.x + (size_t)blockIdx.x * a.n_heads * 64;
    for (uint32_t i = threadIdx.x; i < a.n_heads * 32; i += blockDim.x) {
        uint16_t *x = row + i / 32 * 64 + i % 32;
        const float2 cs = table[i % 32];
        turn(dmk_bf16_f32(x[0]), dmk_bf16_f32(x[32]), cs.x, cs.y, x, x + 32);
    }
}

void dmk_cuda_rope(const struct dmk_rope_args *args, struct dmk_stream *stream)
{
    if (args->n_rows > 0) {
        dmk_cuda_launch(stream, rope_kernel, args->n_rows, 256, 0, *args);
    }
}

/* turn() of two pairs: the low and the high halves of x and y. */
__device__ __forceinline__ void turn_pairs(uint32_t *x, uint32_t *y, float4 cs)
{
    uint16_t l0, l1, h0, h1;
    turn(dmk_lo(*x), dmk_lo(*y), cs.x, cs.y, &l0, &h0);
    turn(dmk_hi(*x), dmk_hi(*y), cs.z, cs.w, &l1, &h1);
    *x = l0 | (uint32_t)l1 << 16;
    *y = h0 | (uint32_t)h1 << 16;
}

/* Four threads a head; a thread turns the eight pairs (i, i + 32) .. (i + 7, i + 39). */
__global__ void __launch_bounds__(ROPE_THREADS) rope_write_kernel(struct dmk_rope_write_args a)
{
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint32_t t = blockIdx.x, i = threadIdx.x % 4 * 8;
    const uint32_t n_turned = a.n_q_heads + a.n_kv_heads, n_heads = n_turned + a.n_kv_heads;
    const float4 *table = (const float4 *)(a.table + ((size_t)a.positions[t] * 32 + i) * 2);
    const float4 cs[4] = {table[0], table[1], table[2], table[3]};
    const uint32_t page = a.pages ? a.row_page[t] : DMK_NONE;
    const size_t slot = page == DMK_NONE ? 0 : a.row_slot[t];
    for (uint32_t h = threadIdx.x / 4; h < n_heads; h += ROPE_THREADS / 4) {
        uint4 *x = (uint4 *)(a.qkv + ((size_t)t * n_heads + h) * 64 + i);
        uint4 lo = x[0], hi = x[4];
        if (h < n_turned) {
            turn_pairs(&lo.x, &hi.x, cs[0]);
            turn_pairs(&lo.y, &hi.y, cs[1]);
            turn_pairs(&lo.z, &hi.z, cs[2]);
            turn_pairs(&lo.w, &hi.w, cs[3]);
            x[0] = lo;
            x[4] = hi;
        }
        if (h >= a.n_q_heads && page != DMK_NONE) {
            const uint32_t kv = h - a.n_q_heads, head = kv % a.n_kv_heads;
            const size_t part = kv / a.n_kv_heads * 64; /* values stand 64 rows after the keys */
            uint4 *to = (uint4 *)(a.pages + ((size_t)head * a.n_pages + page) * a.page_bytes +
                                  ((part + slot) * 64 + i) * 2);
            to[0] = lo;
            to[4] = hi;
        }
    }
}

void dmk_cuda_rope_write(const struct dmk_rope_write_args *args, struct dmk_stream *stream)
{
    if (args->n_rows > 0) {
        dmk_cuda_launch(stream, rope_write_kernel, args->n_rows, ROPE_THREADS, 0, *args);
    }
}

/* Eight threads copy a head's row of 128 bytes of K or V. */
__global__ void kv_write_kernel(struct dmk_kv_write_args a, uint64_t stride)
{
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint32_t t = blockIdx.x, page = a.row_page[t];
    if (page == DMK_NONE) {
        return;
    }
    const size_t slot = a.row_slot[t];
    for (uint32_t i = threadIdx.x; i < a.n_heads * 16; i += blockDim.x) {
        const uint32_t head = i / 16, part = i % 16 / 8, vec = i % 8;
        const uint16_t *from = (part ? a.v : a.k) + t * stride + head * 64;
        uint4 *to = (uint4 *)(a.pages + ((size_t)head * a.n_pages + page) * a.page_bytes);
        to[(part * 64 + slot) * 8 + vec] = ((const uint4 *)from)[vec];
    }
}

void dmk_cuda_kv_write(const struct dmk_kv_write_args *args, struct dmk_stream *stream)
{
    if (args->n_rows > 0) {
        const uint64_t stride = args->stride ? args->stride : (uint64_t)args->n_heads * 64;
        dmk_cuda_launch(stream, kv_write_kernel, args->n_rows, 128, 0, *args, stride);
    }
}

/* Pairs may build on each other, so a block walks the whole list for its part of one array. */
__global__ void page_copy_kernel(struct dmk_page_copy_args a)
{
    dmk_pdl_wait();
    uint8_t *array = a.pool + (size_t)blockIdx.x * a.n_pages * a.page_bytes;
    for (uint32_t i = 0; i < a.n_pairs; i++) {
        const uint4 *from = (const uint4 *)(array + (size_t)a.pairs[i].src * a.page_bytes);
        uint4 *to = (uint4 *)(array + (size_t)a.pairs[i].dst * a.page_bytes);
        for (uint32_t v = threadIdx.x; v < a.page_bytes / 16; v += blockDim.x) {
            to[v] = from[v];
        }
    }
}

void dmk_cuda_page_copy(const struct dmk_page_copy_args *args, struct dmk_stream *stream)
{
    if (args->n_pairs > 0) {
        dmk_cuda_launch(stream, page_copy_kernel, args->n_arrays, 256, 0, *args);
    }
}
