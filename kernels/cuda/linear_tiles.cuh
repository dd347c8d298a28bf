/* What the dense products of many rows share, whatever the format of their weights: the ring of stages, tiles in
 * bands, sums put aside, and results on their way out. J is a kernel's own struct of arguments. */
#pragma once

#include "kernels/cuda/copy.h"

#define MAX_STAGES 16
#define ROWS       128u
#define BAND       16u /* row tiles side by side */
#define SMEM       ((uint32_t)226 << 10)

namespace {

struct control {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
};

/* Where a thread is in the ring. */
struct ring {
    uint8_t *base;
    struct control *control;
    uint32_t n, bytes, at, phase;
};

__device__ __forceinline__ void advance(struct ring *r)
{
    if (++r->at == r->n) {
        r->at = 0;
        r->phase ^= 1;
    }
}

/* A warp has read a stage. */
__device__ __forceinline__ void release(const struct ring *r, uint32_t at)
{
    if (threadIdx.x % 32 == 0) {
        dmk_mbar_arrive(&r->control->empty[at]);
    }
}

/* Barriers of the ring: fillers threads fill a stage, the warps of both groups empty it. The whole block. */
__device__ __forceinline__ void begin_ring(const struct ring *r, uint32_t fillers)
{
    if (threadIdx.x < r->n) {
        dmk_mbar_init(&r->control->full[threadIdx.x], fillers);
        dmk_mbar_init(&r->control->empty[threadIdx.x], 8);
        dmk_mbar_init_fence();
        dmk_fence_async_shared();
    }
    __syncthreads();
}

/* Tells the compiler that all lanes have the same, so that descriptors are made of uniform registers; made of vector
 * registers, each product waits until the one before has given its descriptor's registers back. */
__device__ __forceinline__ uint32_t uniform(uint32_t x)
{
    return __shfl_sync(0xffffffffu, x, 0);
}

template <int N> __device__ __forceinline__ void add_all(float (&to)[N], const float (&from)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        to[i] += from[i];
    }
}

struct tile {
    uint32_t row, out;
};

/* Rows of whole 16 bytes, through 1 KB of shared memory a warp: 32 columns of its 16 rows at a time. */
template <int BN, typename J>
__device__ __forceinline__ void store_wide(const J &job, const float (&d)[BN / 2], uint8_t *buf,
                                           struct tile t)
{
    const uint32_t lane = threadIdx.x % 32, to = lane % 16, from = lane / 4;
    __syncwarp();
#pragma unroll
    for (int part = 0; part < BN / 32; part++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int j = part * 16 + half * 8;
            const uint32_t piece = (half * 2 + lane / 16) ^ (to / 2 % 4);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             dmk_smem_u32(buf + to * 64 + piece * 16)),
                         "r"(dmk_pack_bf16(d[j], d[j + 1])), "r"(dmk_pack_bf16(d[j + 2], d[j + 3])),
                         "r"(dmk_pack_bf16(d[j + 4], d[j + 5])), "r"(dmk_pack_bf16(d[j + 6], d[j + 7]))
                         : "memory");
        }
        __syncwarp();
        const uint32_t out = t.out + part * 32 + lane % 4 * 8;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t r = half * 8 + from;
            const uint4 v = *(const uint4 *)(buf + r * 64 + ((lane % 4) ^ (r / 2 % 4)) * 16);
            if (t.row + r < job.n_rows && out < job.n_out) {
                *(uint4 *)(job.y_bf16 + (t.row + r) * job.y_stride + out) = v;
            }
        }
        __syncwarp();
    }
}

template <typename J>
__device__ __forceinline__ void store_one(const J &job, uint64_t at, float y)
{
    if (job.y_bf16) {
        job.y_bf16[at] = dmk_f32_bf16(y);
    } else {
        job.y_f32[at] = y;
    }
}

/* Any shape. */
template <int BN, typename J>
__device__ __forceinline__ void store_plain(const J &job, const float (&d)[BN / 2], struct tile t)
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < BN / 4; i++) {
        const uint32_t row = t.row + lane / 4 + i % 2 * 8, out = t.out + i / 2 * 8 + lane % 4 * 2;
        const uint64_t at = row * job.y_stride + out;
        if (row >= job.n_rows || out >= job.n_out) {
            continue;
        }
        if (!job.pairs) {
            store_one(job, at, d[2 * i]);
            if (out + 1 < job.n_out) {
                store_one(job, at + 1, d[2 * i + 1]);
            }
        } else if (job.y_bf16) {
            *(uint32_t *)(job.y_bf16 + at) = dmk_pack_bf16(d[2 * i], d[2 * i + 1]);
        } else {
            *(float2 *)(job.y_f32 + at) = make_float2(d[2 * i], d[2 * i + 1]);
        }
    }
}

/* A warp's 16 rows with their bias; t is where they begin. buf: 1 KB of the warp's. */
template <int BN, typename J>
__device__ __forceinline__ void store_tile(const J &job, float (&d)[BN / 2], uint8_t *buf,
                                           struct tile t)
{
    if (job.bias) {
#pragma unroll
        for (int j = 0; j < BN / 8; j++) {
            const uint32_t out = t.out + j * 8 + threadIdx.x % 4 * 2;
            const float b0 = out < job.n_out ? dmk_bf16_f32(job.bias[out]) : 0.0f;
            const float b1 = out + 1 < job.n_out ? dmk_bf16_f32(job.bias[out + 1]) : 0.0f;
            d[4 * j] += b0, d[4 * j + 1] += b1, d[4 * j + 2] += b0, d[4 * j + 3] += b1;
        }
    }
    if (job.wide) {
        store_wide<BN>(job, d, buf, t);
    } else {
        store_plain<BN>(job, d, t);
    }
}

template <int BN, typename J> __device__ __forceinline__ struct tile find_tile(const J &job, uint32_t i)
{
    const uint32_t band = i / (BAND * job.n_out_tiles), in_band = i % (BAND * job.n_out_tiles);
    const uint32_t left = job.n_row_tiles - band * BAND, n = left < BAND ? left : BAND;
    return {min((band * BAND + in_band % n) * ROWS, job.n_rows - min(job.n_rows, (uint32_t)ROWS)), in_band / n * BN};
}

/* Sums put aside, 16 bytes a lane; each lane takes its own back. */
template <int N> __device__ __forceinline__ void put_all(float4 *to, const float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        to[i * 32] = make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
    }
}

template <int N> __device__ __forceinline__ void add_put(float (&d)[N], const float4 *from)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float4 v = from[i * 32];
        d[4 * i] += v.x, d[4 * i + 1] += v.y, d[4 * i + 2] += v.z, d[4 * i + 3] += v.w;
    }
}

/* Copies the stages of a block's tiles, STEP columns and `bytes` each; place(i) is where tile i begins. One thread. */
template <int STEP, typename J, typename P>
__device__ __forceinline__ void load_tiles(const J &job, struct ring r, uint32_t bytes, const P &place)
{
    const uint32_t n_tiles = job.n_row_tiles * job.n_out_tiles;
    uint32_t n_begun = 0; /* stages so far, up to a whole ring */
    dmk_pdl_wait();
    for (uint32_t i = blockIdx.x; i < n_tiles; i += gridDim.x) {
        const struct tile t = place(i);
        for (uint32_t step = 0; step < job.n_steps; step++) {
            uint8_t *stage = r.base + r.at * r.bytes;
            uint64_t *full = &r.control->full[r.at];
            if (n_begun >= r.n) {
                dmk_mbar_wait(&r.control->empty[r.at], r.phase ^ 1);
            }
            n_begun += n_begun < r.n;
            dmk_mbar_expect(full, bytes);
            dmk_tma_load_2d(stage, &job.x, full, (int32_t)(step * STEP), (int32_t)t.row);
            dmk_tma_load_2d(stage + ROWS * 128, &job.w, full, (int32_t)(step * STEP), (int32_t)t.out);
            advance(&r);
        }
    }
}

/* Pieces from left to right; chain(d, n) makes d the sum of the next n steps. */
template <int N, typename J, typename C>
__device__ __forceinline__ void run_pieces(float (&sum)[N], const J &job, const C &chain)
{
    chain(sum, job.piece_steps);
#pragma unroll 1
    for (uint32_t i = job.piece_steps; i < job.n_steps; i += job.piece_steps) {
        float d[N];
        chain(d, min(job.n_steps - i, job.piece_steps));
        add_all(sum, d);
    }
}

/* The tree over 2, 4 or 8 chains. Registers hold the chain under way and its left neighbour; the
 * pair to the left waits in shared memory (two), the four to the left in device memory (four), that is the
 * second-level cache. */
template <int N, typename J, typename C>
__device__ __forceinline__ void run_tree(float (&d)[N], const J &job, float4 *two, float4 *four, const C &chain)
{
    float left[N];
#pragma unroll 1
    for (uint32_t pair = 0; pair < job.n_pieces / 2; pair++) {
        chain(left, job.piece_steps);
        chain(d, job.piece_steps);
        add_all(d, left);
        if (job.n_pieces == 2) {
            return;
        }
        if (pair % 2 == 0) {
            put_all(two, d);
            continue;
        }
        add_put(d, two);
        if (job.n_pieces == 8) {
            pair == 1 ? put_all(four, d) : add_put(d, four);
        }
    }
}

enum sum { WHOLE, PIECES, TREE };

/* A warp's own shared memory: sums put aside, and bf16 results on their way out. */
template <int BN, enum sum SUM> __host__ __device__ constexpr uint32_t side_bytes()
{
    return SUM == TREE ? BN / 8 * 512 : 1024;
}

/* What jobs take from their arguments whatever the format; `first`: outputs in front of the rank's own in its first tile. */
template <typename J, typename A>
void begin_job(J *job, const A *args, const struct dmk_cuda_stream *s, struct dmk_cuda_pieces pieces, uint32_t step,
               uint32_t first)
{
    const uintptr_t y = args->y_bf16 ? (uintptr_t)args->y_bf16 : (uintptr_t)args->y_f32;
    job->bias = args->bias;
    job->y_bf16 = args->y_bf16;
    job->y_f32 = args->y_f32;
    job->scratch = (float *)s->workspace;
    job->y_stride = args->y_stride;
    job->n_rows = args->n_rows;
    job->n_out = args->n_out;
    job->n_pieces = pieces.n;
    job->piece_steps = pieces.steps;
    job->n_steps = dmk_ceil_div(args->k * args->n_slices, step);
    job->pairs = args->n_out % 2 == 0 && args->y_stride % 2 == 0 && y % (args->y_bf16 ? 4 : 8) == 0;
    job->wide = args->y_bf16 && args->n_out % 8 == 0 && first % 8 == 0 && args->y_stride % 8 == 0 && y % 16 == 0;
}

/* The width that costs least: rounds of tiles over the chip, each as long as it is wide and `more`. */
template <int N>
uint32_t choose(const struct dmk_cuda_stream *s, uint32_t n_row_tiles, uint32_t n_out, const uint32_t (&width)[N],
                uint32_t more)
{
    uint32_t best = 0, least = UINT32_MAX;
    for (uint32_t w : width) {
        const uint32_t cost = dmk_ceil_div(n_row_tiles * dmk_ceil_div(n_out, w), s->n_sms) * (w + more);
        if (cost < least) {
            least = cost;
            best = w;
        }
    }
    return best;
}

} // namespace
