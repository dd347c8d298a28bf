/* Routing: the k best experts of each row, and the slots that their products work on.
 *
 * Both give the bits of kernels/ref. Grouping takes one pass of a block an expert over all choices: the block
 * counts what stands before its own slots and hands them out in the order of rows, so no block waits for
 * another and nothing depends on timing. */
#include "kernels/cuda/cuda.h"

#define MAX_EXPERTS   256
#define GROUP_THREADS 256

/* A warp a row; lane l holds experts l, l + 32, ... */
__global__ void topk_kernel(struct dmk_topk_args a)
{
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint32_t row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= a.n_rows) {
        return;
    }
    const uint16_t *score = a.scores + (size_t)row * a.n_experts;
    float mine[MAX_EXPERTS / 32], best[DMK_MAX_TOPK], sum = 0.0f;
    uint32_t ids[DMK_MAX_TOPK];
#pragma unroll
    for (uint32_t i = 0; i < MAX_EXPERTS / 32; i++) {
        const uint32_t e = i * 32 + lane;
        mine[i] = e < a.n_experts ? dmk_bf16_f32(score[e]) : -INFINITY;
    }
#pragma unroll
    for (uint32_t i = 0; i < DMK_MAX_TOPK; i++) {
        if (i >= a.k) {
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
        best[i] = x;
        ids[i] = at;
    }
    const float top = best[0];
#pragma unroll
    for (uint32_t i = 0; i < DMK_MAX_TOPK; i++) {
        if (i < a.k) {
            best[i] = dmk_cuda_expf(best[i] - top);
            sum += best[i];
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < DMK_MAX_TOPK; i++) {
        if (i < a.k && lane == i) {
            a.ids[(size_t)row * a.k + i] = ids[i];
            a.weights[(size_t)row * a.k + i] = dmk_round_bf16(best[i] / sum);
        }
    }
}

void dmk_cuda_topk(const struct dmk_topk_args *args, struct dmk_stream *stream)
{
    if (args->n_rows > 0) {
        dmk_cuda_launch(stream, topk_kernel, dmk_ceil_div(args->n_rows, 4), 128, 0, *args);
    }
}

/* The row's choices as local experts; those of other ranks, and of rows that do not live, wrap to large numbers. */
__device__ __forceinline__ void load_choices(const struct dmk_moe_group_args &a, uint32_t row, uint32_t n_live,
                                             uint32_t (&e)[DMK_MAX_TOPK])
{
#pragma unroll
    for (uint32_t i = 0; i < DMK_MAX_TOPK; i++) {
        e[i] = row < n_live && i < a.k ? a.ids[(size_t)row * a.k + i] - a.expert_first : DMK_NONE;
    }
}

__global__ void __launch_bounds__(GROUP_THREADS) group_kernel(struct dmk_moe_group_args a)
{
    __shared__ uint32_t warp_count[GROUP_THREADS / 32], total[2];
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint32_t expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t n_live = a.n_live ? *a.n_live : a.n_rows;
    uint32_t e[DMK_MAX_TOPK], before = 0, own = 0;
    if (threadIdx.x < 2) {
        total[threadIdx.x] = 0;
    }
    __syncthreads();
    for (uint32_t row = threadIdx.x; row < n_live; row += GROUP_THREADS) {
        load_choices(a, row, n_live, e);
#pragma unroll
        for (uint32_t i = 0; i < DMK_MAX_TOPK; i++) {
            before += e[i] < expert;
            own += e[i] == expert;
        }
    }
    atomicAdd(&total[0], before); /* sums of whole numbers: any order gives the same */
    atomicAdd(&total[1], own);
    __syncthreads();
    uint32_t next = total[0];
    if (threadIdx.x == 0) {
        a.plan.expert_begin[expert] = next;
        if (expert == a.n_experts - 1) {
            a.plan.expert_begin[a.n_experts] = next + total[1];
        }
    }
    for (uint32_t first = 0; first < a.n_rows; first += GROUP_THREADS) {
        const uint32_t row = first + threadIdx.x;
        load_choices(a, row, n_live, e);
        uint32_t which = DMK_NONE, rank = 0, n_local = 0;
#pragma unroll
        for (uint32_t i = 0; i < DMK_MAX_TOPK; i++) {
            which = e[i] == expert ? i : which;
            rank += e[i] < expert;
            n_local += e[i] < a.n_experts;
        }
        const uint32_t ballot = __ballot_sync(0xffffffffu, which != DMK_NONE);
        if (lane == 0) {
            warp_count[warp] = __popc(ballot);
        }
        __syncthreads();
        uint32_t slot = next + __popc(ballot & ((1u << lane) - 1));
#pragma unroll
        for (uint32_t w = 0; w < GROUP_THREADS / 32; w++) {
            slot += w < warp ? warp_count[w] : 0;
            next += warp_count[w];
        }
        __syncthreads();
        if (which != DMK_NONE) {
            a.plan.slot_row[slot] = row;
            a.plan.slot_weight[slot] = a.weights[(size_t)row * a.k + which];
            a.plan.slot_group[slot] = expert / a.experts_per_group;
            a.plan.row_slots[(size_t)row * a.k + rank] = slot;
        }
        if (expert == 0 && row < a.n_rows) {
            for (uint32_t i = n_local; i < a.k; i++) {
                a.plan.row_slots[(size_t)row * a.k + i] = DMK_NONE;
            }
        }
    }
}

void dmk_cuda_moe_group(const struct dmk_moe_group_args *args, struct dmk_stream *stream)
{
    dmk_cuda_launch(stream, group_kernel, args->n_experts, GROUP_THREADS, 0, *args);
}
