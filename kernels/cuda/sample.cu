/* Picking tokens where the logits lie, to the bit as common/sample does it without top-k, top-p and edits.
 *
 * Three kernels: blocks of 1571 logits give their maximum; then the sum of their weights, in 16 lanes; then one block
 * a row adds the sums in order, picks one, and walks in it. Additions and multiplications are written as
 * such, since the host's are not contracted. */
#include "kernels/cuda/cuda.h"

#define BLOCK     1571 /* DMK_SAMPLE_BLOCK */
#define MAX_BLOCKS 256
#define THREADS   256

__device__ __forceinline__ float exp_host(float z)
{
    if (!(z >= -86.0f)) {
        return 0.0f;
    }
    const float round = 12582912.0f;
    const float shifted = __fadd_rn(__fmul_rn(z, 1.44269504088896341f), round);
    const float n = __fsub_rn(shifted, round);
    const float r = __fsub_rn(__fsub_rn(z, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, -2.12194440e-4f));
    const int32_t exponent = (__float_as_int(shifted) - 0x4b400000) << 23;
    float y = __fadd_rn(__fmul_rn(r, 1.9875691500e-4f), 1.3981999507e-3f);
    y = __fadd_rn(__fmul_rn(y, r), 8.3334519073e-3f);
    y = __fadd_rn(__fmul_rn(y, r), 4.1665795894e-2f);
    y = __fadd_rn(__fmul_rn(y, r), 1.6666665459e-1f);
    y = __fadd_rn(__fmul_rn(y, r), 5.0000001201e-1f);
    y = __fadd_rn(__fadd_rn(__fmul_rn(y, __fmul_rn(r, r)), r), 1.0f);
    return __int_as_float(__float_as_int(y) + exponent);
}

__device__ __forceinline__ float weigh(float x, float max, float scale, float min_weight)
{
    const float w = exp_host(__fmul_rn(__fsub_rn(x, max), scale));
    return w >= min_weight ? w : 0.0f;
}

struct row_max {
    float max;
    uint32_t id;
    uint32_t broken, unused;
};

/* Larger value, then lower id. */
__device__ __forceinline__ void take_max(struct row_max *a, float max, uint32_t id)
{
    if (max > a->max || (max == a->max && id < a->id)) {
        a->max = max;
        a->id = id;
    }
}

/* One block of the vocabulary of one row: its largest logit and where it stands first. */
__global__ void max_kernel(struct dmk_sample_args a, struct row_max *maxima)
{
    dmk_pdl_wait();
    dmk_pdl_next();
    const float *x = a.logits + (size_t)blockIdx.y * a.vocab;
    const uint32_t first = blockIdx.x * BLOCK, end = min(first + BLOCK, a.vocab);
    struct row_max m = {-INFINITY, DMK_NONE, 0, 0};
    for (uint32_t i = first + threadIdx.x; i < end; i += blockDim.x) {
        m.broken |= !(x[i] < INFINITY);
        take_max(&m, x[i], i);
    }
    for (int d = 16; d > 0; d >>= 1) {
        const float max = __shfl_xor_sync(0xffffffffu, m.max, d);
        const uint32_t id = __shfl_xor_sync(0xffffffffu, m.id, d);
        m.broken |= __shfl_xor_sync(0xffffffffu, m.broken, d);
        take_max(&m, max, id);
    }
    __shared__ struct row_max part[8];
    if (threadIdx.x % 32 == 0) {
        part[threadIdx.x / 32] = m;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (uint32_t w = 1; w < blockDim.x / 32; w++) {
            m.broken |= part[w].broken;
            take_max(&m, part[w].max, part[w].id);
        }
        maxima[blockIdx.y * MAX_BLOCKS + blockIdx.x] = m;
    }
}

/* The sum of a block's weights; 16 threads (of one half warp) call it, lane is 0..15, all get the sum. */
__device__ __forceinline__ double block_sum(const float *x, uint32_t n, uint32_t lane, float max, float scale,
                                            float min_weight)
{
    float sum = 0.0f;
    for (uint32_t i = lane; i < n; i += 16) {
        sum = __fadd_rn(sum, weigh(x[i], max, scale, min_weight));
    }
    double tree = sum;
    for (int half = 8; half > 0; half /= 2) {
        tree += __shfl_xor_sync(0xffffffffu, tree, half); /* commutes, so every lane has lane 0's sum */
    }
    return tree;
}

/* The row's largest logit, from those of its blocks; one warp. */
__device__ __forceinline__ struct row_max join_maxima(const struct row_max *maxima, uint32_t n_blocks)
{
    struct row_max m = {-INFINITY, DMK_NONE, 0, 0};
    for (uint32_t b = threadIdx.x % 32; b < n_blocks; b += 32) {
        m.broken |= maxima[b].broken;
        take_max(&m, maxima[b].max, maxima[b].id);
    }
    for (int d = 16; d > 0; d >>= 1) {
        const float max = __shfl_xor_sync(0xffffffffu, m.max, d);
        const uint32_t id = __shfl_xor_sync(0xffffffffu, m.id, d);
        m.broken |= __shfl_xor_sync(0xffffffffu, m.broken, d);
        take_max(&m, max, id);
    }
    return m;
}

/* Sums of two blocks of the vocabulary of one row, by one warp: plain ones for log-probabilities, and, when a
 * token is drawn, ones at its temperature. */
__global__ void sum_kernel(struct dmk_sample_args a, const struct row_max *maxima, double *sums)
{
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint32_t n_blocks = (a.vocab + BLOCK - 1) / BLOCK, lane = threadIdx.x % 16;
    const uint32_t b = blockIdx.x * 2 + threadIdx.x / 16, first = b * BLOCK;
    const struct dmk_sample_row row = a.rows[blockIdx.y];
    const struct row_max m = join_maxima(maxima + blockIdx.y * MAX_BLOCKS, n_blocks);
    if (m.broken || m.max == -INFINITY) {
        return;
    }
    const float *x = a.logits + (size_t)blockIdx.y * a.vocab + first;
    const uint32_t n = b < n_blocks ? min(BLOCK, a.vocab - first) : 0;
    const double plain = block_sum(x, n, lane, m.max, 1.0f, 0.0f);
    const double warm = row.scale > 0.0f ? block_sum(x, n, lane, m.max, row.scale, row.min_p) : 0.0;
    if (lane == 0 && b < n_blocks) {
        sums[(blockIdx.y * 2) * MAX_BLOCKS + b] = plain;
        sums[(blockIdx.y * 2 + 1) * MAX_BLOCKS + b] = warm;
    }
}

__global__ void __launch_bounds__(THREADS)
    pick_kernel(struct dmk_sample_args a, const struct row_max *maxima, const double *row_sums)
{
    __shared__ double sums[2][MAX_BLOCKS];
    __shared__ struct row_max best;
    __shared__ uint32_t chosen;
    __shared__ double rest;
    __shared__ float weight[(BLOCK + 7) / 8 * 8];
    dmk_pdl_wait();
    dmk_pdl_next();
    const float *x = a.logits + (size_t)blockIdx.x * a.vocab;
    const struct dmk_sample_row row = a.rows[blockIdx.x];
    const uint32_t n_blocks = (a.vocab + BLOCK - 1) / BLOCK;
    if (threadIdx.x < 32) {
        const struct row_max m = join_maxima(maxima + blockIdx.x * MAX_BLOCKS, n_blocks);
        if (threadIdx.x == 0) {
            best = m;
        }
    }
    for (uint32_t i = threadIdx.x; i < 2 * n_blocks; i += THREADS) {
        sums[i / n_blocks][i % n_blocks] = row_sums[(blockIdx.x * 2 + i / n_blocks) * MAX_BLOCKS + i % n_blocks];
    }
    __syncthreads();
    const struct row_max m = best;
    struct dmk_sample_out *out = &a.out[blockIdx.x];
    if (m.broken || m.max == -INFINITY) {
        if (threadIdx.x == 0) {
            *out = {0, m.broken ? 1 : 2, 0.0f, 0.0f, 0.0};
        }
        return;
    }
    if (threadIdx.x == 32) {
        double plain = 0.0;
        for (uint32_t b = 0; b < n_blocks; b++) {
            plain += sums[0][b];
        }
        out->status = 0;
        out->max = m.max;
        out->sum = plain;
    }
    if (row.scale == 0.0f) {
        if (threadIdx.x == 0) {
            out->id = m.id;
            out->logit = m.max;
        }
        return;
    }
    if (threadIdx.x == 0) {
        double warm = 0.0, before = 0.0, sum = 0.0;
        uint32_t block = 0;
        for (uint32_t b = 0; b < n_blocks; b++) {
            warm += sums[1][b];
        }
        const double target = __dmul_rn(row.unit, warm);
        for (uint32_t b = 0; b < n_blocks; b++) {
            if (sums[1][b] > 0.0) {
                block = b;
                before = sum;
                sum += sums[1][b];
                if (sum > target) {
                    break;
                }
            }
        }
        chosen = block;
        rest = target - before;
    }
    __syncthreads();
    const uint32_t first = chosen * BLOCK, n = min(BLOCK, a.vocab - first);
    for (uint32_t i = threadIdx.x; i < (BLOCK + 7) / 8 * 8; i += THREADS) {
        weight[i] = i < n ? weigh(x[first + i], m.max, row.scale, row.min_p) : 0.0f;
    }
    __syncthreads();
    /* One weight after the other in fp64; adding +0 changes nothing, so eight can be taken at a time. */
    if (threadIdx.x == 0) {
        double sum = 0.0;
        uint32_t last = 0;
        bool found = false;
        for (uint32_t i = 0; i < n && !found; i += 8) {
            float w[8];
#pragma unroll
            for (int e = 0; e < 8; e++) {
                w[e] = weight[i + e];
            }
#pragma unroll
            for (int e = 0; e < 8; e++) {
                if (!found && w[e] > 0.0f) {
                    sum += w[e];
                    last = i + e;
                    found = sum > rest;
                }
            }
        }
        out->id = first + last;
        out->logit = x[first + last];
    }
}

void dmk_cuda_sample(const struct dmk_sample_args *args, struct dmk_stream *stream)
{
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    if (args->n_rows > 0) {
        struct row_max *maxima = (struct row_max *)s->workspace;
        dmk_cuda_launch(stream, max_kernel, dim3(dmk_ceil_div(args->vocab, BLOCK), args->n_rows), dim3(256), 0, *args,
                        maxima);
        double *sums = (double *)(maxima + (size_t)args->n_rows * MAX_BLOCKS);
        dmk_cuda_launch(stream, sum_kernel, dim3(dmk_ceil_div(args->vocab, 2 * BLOCK), args->n_rows), dim3(32), 0, *args,
                        maxima, sums);
        dmk_cuda_launch(stream, pick_kernel, dim3(args->n_rows), dim3(THREADS), 0, *args, maxima, sums);
    }
}
