/* Routing: the k best experts of each row, and the slots that their products work on.
 *
 * Both give the bits of kernels/ref. Grouping takes one pass of a block an expert over all choices: the block
 * counts what stands before its own slots and hands them out in the order of rows, so no block waits for
 * another and nothing depends on timing. */
#include "kernels/cuda/cuda.h"

#define MAX_EXPERTS   256
#define GROUP_THREADS 512

/* A warp's row; lane l holds experts l, l + 32, ... All lanes get all results. */
__device__ __forceinline__ void choose(const uint16_t *score, uint32_t n_experts, uint32_t k,
                                       uint32_t (&ids)[DMK_MAX_TOPK], float (&weights)[DMK_MAX_TOPK])
{
    const uint32_t lane = threadIdx.x % 32;
    float mine[MAX_EXPERTS / 32], sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < MAX_EXPERTS / 32; i++) {
        const uint32_t e = i * 32 + lane;
        mine[i] = e < n_experts ? dmk_bf16_f32(score[e]) : -INFINITY;
    }
#pragma unroll
    for (uint32_t i = 0; i < DMK_MAX_TOPK; i++) {
        if (i >= k) {
            break;
        }
        float x = -INFINITY;
        uint32_t at = DMK_NONE;
#pragma unroll
        for (uint32_t e = 0; e < MAX_EXPERTS / 32; e++) {
            if (mine[e] > x) { /* ascending, so the lowest of equals stays */
                x = mine[e];
                at = e * 32 + lane;
            }
        }
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) {
            const float other = __shfl_xor_sync(0xffffffffu, x, d);
            const uint32_t other_at = __shfl_xor_sync(0xffffffffu, at, d);
            if (other > x || (other == x && other_at < at)) {
                x = other;
                at = other_at;
            }
        }
#pragma unroll
        for (uint32_t e = 0; e < MAX_EXPERTS / 32; e++) {
            if (e * 32 + lane == at) {
                mine[e] = -INFINITY;
            }
        }
        weights[i] = x;
        ids[i] = at;
    }
    const float top = weights[0];
#pragma unroll
    for (uint32_t i = 0; i < DMK_MAX_TOPK; i++) {
        if (i < k) {
            weights[i] = dmk_cuda_expf(weights[i] - top);
            sum += weights[i];
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < DMK_MAX_TOPK; i++) {
        if (i < k) {
            weights[i] = dmk_round_bf16(weights[i] / sum);
        }
    }
}

__global__ void topk_kernel(struct dmk_topk_args a)
{
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint32_t row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= a.n_rows) {
        return;
    }
    uint32_t ids[DMK_MAX_TOPK];
    float weights[DMK_MAX_TOPK];
    choose(a.scores + (size_t)row * a.n_experts, a.n_experts, a.k, ids, weights);
#pragma unroll
    for (uint32_t i = 0; i < DMK_MAX_TOPK; i++) {
        if (i < a.k && lane == i) {
            a.ids[(size_t)row * a.k + i] = ids[i];
            a.weights[(size_t)row * a.k + i] = weights[i];
        }
    }
}

void dmk_cuda_topk(const struct dmk_topk_args *args, struct dmk_stream *stream)
{
    if (args->n_rows > 0) {
        dmk_cuda_launch(stream, topk_kernel, dmk_ceil_div(args->n_rows, 4), 128, 0, *args);
    }
}

#define SPAN 16 /* rows of a thread that a block of grouping knows by heart at a time */

/* The row's choices as local experts; those of other ranks, and of rows that do not live, wrap to large numbers.
 * FOUR: k is 4, and a row's choices one vector. */
template <bool FOUR>
__device__ __forceinline__ void load_choices(const struct dmk_moe_group_args &a, uint32_t row, uint32_t n_live,
                                             uint32_t (&e)[DMK_MAX_TOPK])
{
    if constexpr (FOUR) {
        const uint4 none = make_uint4(DMK_NONE, DMK_NONE, DMK_NONE, DMK_NONE);
        const uint4 v = row < n_live ? ((const uint4 *)a.ids)[row] : none;
        const uint32_t off = row < n_live ? a.expert_first : 0;
        e[0] = v.x - off, e[1] = v.y - off, e[2] = v.z - off, e[3] = v.w - off;
        e[4] = e[5] = e[6] = e[7] = DMK_NONE;
    } else {
#pragma unroll
        for (uint32_t i = 0; i < DMK_MAX_TOPK; i++) {
            e[i] = row < n_live && i < a.k ? a.ids[(size_t)row * a.k + i] - a.expert_first : DMK_NONE;
        }
    }
}

/* What a thread knows of its rows (first + threadIdx.x + i * GROUP_THREADS): bit i of own says that one of row i's choices
 * is the block's expert, four bits each which one, and its place among the row's local ones. */
struct span {
    uint32_t own;
    uint64_t which, rank;
};

/* before += choices of lower experts. */
template <bool FOUR>
__device__ __forceinline__ struct span read_span(const struct dmk_moe_group_args &a, uint32_t first, uint32_t n_live,
                                                 uint32_t expert, uint32_t *before)
{
    struct span s = {};
#pragma unroll
    for (uint32_t i = 0; i < SPAN; i++) {
        const uint32_t row = first + threadIdx.x + i * GROUP_THREADS;
        uint32_t e[DMK_MAX_TOPK], rank = 0, n_local = 0;
        load_choices<FOUR>(a, row, n_live, e);
#pragma unroll
        for (uint32_t c = 0; c < (FOUR ? 4 : DMK_MAX_TOPK); c++) {
            rank += e[c] < expert;
            n_local += e[c] < a.n_experts;
            if (e[c] == expert) {
                s.own |= 1u << i;
                s.which |= (uint64_t)c << (4 * i);
            }
        }
        s.rank |= (uint64_t)rank << (4 * i);
        *before += rank;
        if (expert == 0 && row < a.n_rows) {
            for (uint32_t c = n_local; c < a.k; c++) {
                a.plan.row_slots[(size_t)row * a.k + c] = DMK_NONE;
            }
        }
    }
    return s;
}

/* A block an expert. */
template <bool FOUR> __global__ void __launch_bounds__(GROUP_THREADS) group_kernel(struct dmk_moe_group_args a)
{
    constexpr uint32_t WARPS = GROUP_THREADS / 32, ROWS = SPAN * GROUP_THREADS;
    __shared__ uint32_t count[SPAN * WARPS], total[2];
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint32_t expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t n_live = a.n_live ? *a.n_live : a.n_rows;
    uint32_t before = 0, own = 0;
    struct span s = {};
    if (threadIdx.x < 2) {
        total[threadIdx.x] = 0;
    }
    __syncthreads();
    for (uint32_t first = 0; first < a.n_rows; first += ROWS) {
        s = read_span<FOUR>(a, first, n_live, expert, &before);
        own += __popc(s.own);
    }
    before = __reduce_add_sync(0xffffffffu, before); /* of whole numbers: any order gives the same */
    own = __reduce_add_sync(0xffffffffu, own);
    if (lane == 0) {
        atomicAdd(&total[0], before);
        atomicAdd(&total[1], own);
    }
    __syncthreads();
    uint32_t next = total[0];
    if (threadIdx.x == 0) {
        a.plan.expert_begin[expert] = next;
        if (expert == a.n_experts - 1) {
            a.plan.expert_begin[a.n_experts] = next + total[1];
        }
    }
    for (uint32_t first = 0; first < a.n_rows; first += ROWS) {
        if (a.n_rows > ROWS) {
            s = read_span<FOUR>(a, first, n_live, expert, &before);
        }
        uint32_t ballots[SPAN];
#pragma unroll
        for (uint32_t i = 0; i < SPAN; i++) {
            ballots[i] = __ballot_sync(0xffffffffu, s.own >> i & 1);
            if (lane == 0) {
                count[i * WARPS + warp] = __popc(ballots[i]);
            }
        }
        __syncthreads();
        /* Sums of all counts before each, a warp's work. */
        if (warp == 0) {
            uint32_t sum = 0, mine[SPAN * WARPS / 32];
#pragma unroll
            for (uint32_t i = 0; i < SPAN * WARPS / 32; i++) {
                mine[i] = sum;
                sum += count[lane * (SPAN * WARPS / 32) + i];
            }
            uint32_t up = sum;
#pragma unroll
            for (uint32_t d = 1; d < 32; d <<= 1) {
                const uint32_t below = __shfl_up_sync(0xffffffffu, up, d);
                up += lane >= d ? below : 0;
            }
#pragma unroll
            for (uint32_t i = 0; i < SPAN * WARPS / 32; i++) {
                count[lane * (SPAN * WARPS / 32) + i] = next + up - sum + mine[i];
            }
            if (lane == 31) {
                total[0] = next + up;
            }
        }
        __syncthreads();
#pragma unroll
        for (uint32_t i = 0; i < SPAN; i++) {
            if (s.own >> i & 1) {
                const uint32_t row = first + threadIdx.x + i * GROUP_THREADS;
                const uint32_t slot = count[i * WARPS + warp] + __popc(ballots[i] & ((1u << lane) - 1));
                a.plan.slot_row[slot] = row;
                a.plan.slot_weight[slot] = a.weights[(size_t)row * a.k + (s.which >> (4 * i) & 15)];
                a.plan.slot_group[slot] = expert / a.experts_per_group;
                a.plan.row_slots[(size_t)row * a.k + (s.rank >> (4 * i) & 15)] = slot;
            }
        }
        next = total[0];
        __syncthreads();
    }
}

void dmk_cuda_moe_group(const struct dmk_moe_group_args *args, struct dmk_stream *stream)
{
    const bool four = args->k == 4 && (uintptr_t)args->ids % 16 == 0;
    dmk_cuda_launch(stream, four ? group_kernel<true> : group_kernel<false>, args->n_experts, GROUP_THREADS, 0, *args);
}

#define FEW_ROWS    128
#define FEW_THREADS 1024
#define FUSE_ROWS   32 /* more are chosen by many blocks first: one multiprocessor would take too long */

/* Both for few rows, in one block; with CHOSEN the choices are there already. Each expert has a bit for each row; a slot is the expert's first, which is a sum
 * over the experts before, plus the bits below the row's. */
template <bool CHOSEN> __global__ void __launch_bounds__(FEW_THREADS) route_kernel(struct dmk_route_args args)
{
    __shared__ uint32_t bits[MAX_EXPERTS][FEW_ROWS / 32];
    __shared__ uint32_t begin[MAX_EXPERTS + 1], warp_sum[MAX_EXPERTS / 32];
    __shared__ uint32_t chosen[FEW_ROWS][DMK_MAX_TOPK];
    __shared__ float weight[FEW_ROWS][DMK_MAX_TOPK];
    const struct dmk_topk_args &t = args.topk;
    const struct dmk_moe_group_args &a = args.group;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (uint32_t i = threadIdx.x; i < MAX_EXPERTS * (FEW_ROWS / 32); i += FEW_THREADS) {
        bits[i / (FEW_ROWS / 32)][i % (FEW_ROWS / 32)] = 0;
    }
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint32_t n_live = a.n_live ? *a.n_live : a.n_rows;
    __syncthreads();
    for (uint32_t i = threadIdx.x; CHOSEN && i < a.n_rows * a.k; i += FEW_THREADS) {
        const uint32_t row = i / a.k, e = a.ids[i] - a.expert_first;
        const bool ours = row < n_live && e < a.n_experts;
        chosen[row][i % a.k] = ours ? e : DMK_NONE;
        weight[row][i % a.k] = a.weights[i];
        if (ours) {
            atomicOr(&bits[e][row / 32], 1u << row % 32);
        }
    }
    for (uint32_t row = warp; !CHOSEN && row < t.n_rows; row += FEW_THREADS / 32) {
        uint32_t ids[DMK_MAX_TOPK];
        float weights[DMK_MAX_TOPK];
        choose(t.scores + (size_t)row * t.n_experts, t.n_experts, t.k, ids, weights);
#pragma unroll
        for (uint32_t i = 0; i < DMK_MAX_TOPK; i++) {
            if (i < t.k && lane == i) {
                const uint32_t e = ids[i] - a.expert_first;
                t.ids[(size_t)row * t.k + i] = ids[i];
                t.weights[(size_t)row * t.k + i] = weights[i];
                chosen[row][i] = row < n_live && e < a.n_experts ? e : DMK_NONE;
                weight[row][i] = weights[i];
                if (row < n_live && e < a.n_experts) {
                    atomicOr(&bits[e][row / 32], 1u << row % 32);
                }
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < MAX_EXPERTS) {
        uint32_t count = 0, sum;
#pragma unroll
        for (uint32_t w = 0; w < FEW_ROWS / 32; w++) {
            count += __popc(bits[threadIdx.x][w]);
        }
        sum = count;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const uint32_t below = __shfl_up_sync(0xffffffffu, sum, d);
            sum += lane >= (uint32_t)d ? below : 0;
        }
        if (lane == 31) {
            warp_sum[warp] = sum;
        }
        begin[threadIdx.x] = sum - count;
    }
    __syncthreads();
    if (threadIdx.x < MAX_EXPERTS) {
        uint32_t before = begin[threadIdx.x];
#pragma unroll
        for (uint32_t w = 0; w < MAX_EXPERTS / 32; w++) {
            before += w < warp ? warp_sum[w] : 0;
        }
        begin[threadIdx.x] = before;
        if (threadIdx.x <= a.n_experts) {
            a.plan.expert_begin[threadIdx.x] = before; /* experts past the last have no rows */
        }
        if (threadIdx.x == MAX_EXPERTS - 1 && a.n_experts == MAX_EXPERTS) {
            a.plan.expert_begin[MAX_EXPERTS] = before + __popc(bits[threadIdx.x][0]) + __popc(bits[threadIdx.x][1]) +
                                               __popc(bits[threadIdx.x][2]) + __popc(bits[threadIdx.x][3]);
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.n_rows * a.k; i += FEW_THREADS) {
        const uint32_t row = i / a.k, which = i % a.k, e = chosen[row][which];
        uint32_t rank = 0, n_local = 0;
        for (uint32_t j = 0; j < a.k; j++) {
            rank += chosen[row][j] < e;
            n_local += chosen[row][j] != DMK_NONE;
        }
        if (e != DMK_NONE) {
            uint32_t slot = begin[e];
#pragma unroll
            for (uint32_t w = 0; w < FEW_ROWS / 32; w++) {
                const uint32_t mask = w < row / 32 ? ~0u : w == row / 32 ? (1u << row % 32) - 1 : 0;
                slot += __popc(bits[e][w] & mask);
            }
            a.plan.slot_row[slot] = row;
            a.plan.slot_weight[slot] = weight[row][which];
            a.plan.slot_group[slot] = e / a.experts_per_group;
            a.plan.row_slots[(size_t)row * a.k + rank] = slot;
        }
        if (which >= n_local) {
            a.plan.row_slots[(size_t)row * a.k + which] = DMK_NONE;
        }
    }
}

void dmk_cuda_route(const struct dmk_route_args *args, struct dmk_stream *stream)
{
    if (args->topk.n_rows <= FUSE_ROWS) {
        dmk_cuda_launch(stream, route_kernel<false>, dim3(1), dim3(FEW_THREADS), 0, *args);
    } else if (args->topk.n_rows <= FEW_ROWS) {
        dmk_cuda_topk(&args->topk, stream);
        dmk_cuda_launch(stream, route_kernel<true>, dim3(1), dim3(FEW_THREADS), 0, *args);
    } else {
        dmk_cuda_topk(&args->topk, stream);
        dmk_cuda_moe_group(&args->group, stream);
    }
}
