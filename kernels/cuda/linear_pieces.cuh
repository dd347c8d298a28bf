/* What the dense products share, whatever the format of their weights: how K is cut into pieces, and how blocks of a
 * cluster add theirs. J is a kernel's own struct of arguments. */
#pragma once

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/hopper.cuh"

#define MAX_PIECES 8 /* blocks of a cluster */

namespace {

template <typename J>
__device__ __forceinline__ void store_y(const J &job, uint32_t row, uint32_t out, float y)
{
    if (row < job.n_rows && out < job.n_out) {
        if (job.bias) {
            y += dmk_bf16_f32(job.bias[out]);
        }
        if (job.y_bf16) {
            job.y_bf16[row * job.y_stride + out] = dmk_f32_bf16(y);
        } else {
            job.y_f32[row * job.y_stride + out] = y;
        }
    }
}

__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* A float of another block of the cluster, at the place of p in its shared memory. */
__device__ __forceinline__ float load_peer(const float *p, uint32_t block)
{
    uint32_t at;
    float x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(dmk_smem_u32(p)), "r"(block));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}

/* Adds the pieces of one register's place. */
__device__ __forceinline__ float add_pieces(const float *place, uint32_t n, uint32_t tree)
{
    float p[MAX_PIECES];
#pragma unroll
    for (uint32_t i = 0; i < MAX_PIECES; i++) {
        p[i] = i < n ? load_peer(place, i) : 0.0f;
    }
    if (tree) {
        const float two = p[0] + p[1], four = two + (p[2] + p[3]);
        return n == 2 ? two : n == 4 ? four : four + ((p[4] + p[5]) + (p[6] + p[7]));
    }
    float sum = p[0];
#pragma unroll
    for (uint32_t i = 1; i < MAX_PIECES; i++) {
        sum = i < n ? sum + p[i] : sum;
    }
    return sum;
}

/* The end of a block of few rows: the sums of its warps that multiply (0 to 3) become results, at once or with those of
 * the cluster's other pieces. parts: shared memory that all of them are done with at a barrier. */
template <int TN, typename J>
__device__ __forceinline__ void finish_few(const J &job, float (&parts)[TN / 2][128], const float (&sum)[TN / 2],
                                           uint32_t out, uint32_t row)
{
    const uint32_t warp = threadIdx.x / 32;
    if (job.n_pieces == 1) {
        if (warp < 4) {
#pragma unroll
            for (int r = 0; r < TN / 2; r++) {
                store_y(job, r / 4 * 8 + row + r % 2, out + r % 4 / 2 * 8, sum[r]);
            }
        }
        return;
    }
    if (warp < 4) {
        dmk_named_barrier(1, 128); /* all have read their last stage */
#pragma unroll
        for (int r = 0; r < TN / 2; r++) {
            parts[r][threadIdx.x] = sum[r];
        }
    }
    cluster_sync();
    /* The registers are shared out among the blocks. */
    for (uint32_t r = blockIdx.y; r < TN / 2 && warp < 4; r += job.n_pieces) {
        store_y(job, r / 4 * 8 + row + r % 2, out + r % 4 / 2 * 8,
                add_pieces(&parts[r][threadIdx.x], job.n_pieces, job.tree));
    }
    cluster_sync(); /* nobody leaves while its memory is read */
}

/* How many pieces a weight's k falls into: enough blocks of 64 outputs for the chip, pieces of equal length. */
inline uint32_t count_pieces(uint32_t n_out, uint32_t n_steps)
{
    const uint32_t tiles = dmk_ceil_div(n_out, 64);
    uint32_t want = dmk_ceil_div(380, tiles);
    want = want > MAX_PIECES ? MAX_PIECES : want;
    want = want > n_steps ? n_steps : want;
    return dmk_ceil_div(n_steps, dmk_ceil_div(n_steps, want));
}

/* Pieces or slices of a weight, in steps of `step` columns; k is that of a slice. */
inline struct dmk_cuda_pieces cut_k(uint32_t k, uint32_t n_slices, uint32_t n_out, bool leaf, uint32_t step)
{
    const uint32_t n_steps = dmk_ceil_div(k * n_slices, step);
    struct dmk_cuda_pieces p = {};
    p.tree = n_slices > 1;
    p.n = p.tree || leaf ? n_slices : count_pieces(n_out, n_steps);
    p.steps = p.tree ? k / step : dmk_ceil_div(n_steps, p.n);
    return p;
}

} // namespace
