/* The dense matrix product on tensor cores, for few and for many rows, with one order of sums.
 *
 * K is cut into pieces, which depend on the shape of the weight only. Inside a piece the tensor core adds 16
 * products at a time, ascending; a piece is never added to another before it is whole. Pieces of one slice
 * are then added from left to right, slices in the tree of dmk_linear_args.
 *
 *   few   up to 128 rows, or more of few outputs: a block has 64 outputs of one piece, weights are the 64-row
 *         operand, so the chip is full of reads even for one row; the blocks of a tile are a cluster and add the
 *         pieces out of each other's shared memory.
 *   many  linear_many.cu: a block has 128 rows and walks all pieces itself.
 *
 * One warp drives the copy engine through a ring of stages; the loads of weights do not wait for the kernel
 * before. Every k is a multiple of 32, x, w and their strides of 16 bytes; several slices need k % 64 = 0. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/linear_pieces.cuh"
#include "kernels/cuda/wgmma.h"

#define STEP       64 /* of k, one stage */
#define FEW_ROWS   128
#define SMALL_ROWS 1024 /* of weights with few outputs, which fill no chip in large tiles */
#define SMALL_OUT  256

struct job {
    CUtensorMap w, x;
    const uint16_t *bias;
    uint16_t *y_bf16;
    float *y_f32;
    uint64_t y_stride;
    uint32_t n_rows, n_out;
    uint32_t n_steps;     /* of the whole k */
    uint32_t piece_steps; /* the last piece may have fewer */
    uint32_t n_pieces;
    uint32_t tree; /* pieces are slices */
};

/* Two or three blocks fit into a multiprocessor. */
template <int TN> struct few_smem {
    static constexpr int STAGES = TN > 32 ? 4 : 6;
    union {
        struct {
            alignas(1024) uint8_t w[STAGES][64 * 128];
            alignas(1024) uint8_t x[STAGES][TN * 128];
        };
        float parts[TN / 2][128]; /* when the stages are done: this block's piece, [register][thread] */
    };
    uint64_t full[STAGES], empty[STAGES];
};

template <int TN> __device__ void few_load(const struct job &job, struct few_smem<TN> *s, uint32_t n)
{
    constexpr uint32_t STAGES = few_smem<TN>::STAGES;
    const int32_t k0 = (int32_t)(blockIdx.y * job.piece_steps * STEP), out = (int32_t)blockIdx.x * 64;
    const int32_t row = (int32_t)blockIdx.z * TN;
    const uint32_t ahead = n < STAGES ? n : STAGES;
    for (uint32_t i = 0; i < ahead; i++) {
        dmk_mbar_expect(&s->full[i], (64 + TN) * 128);
        dmk_tma_load_2d(s->w[i], &job.w, &s->full[i], k0 + (int32_t)i * STEP, out);
    }
    dmk_pdl_wait();
    for (uint32_t i = 0; i < ahead; i++) {
        dmk_tma_load_2d(s->x[i], &job.x, &s->full[i], k0 + (int32_t)i * STEP, row);
    }
    for (uint32_t i = STAGES; i < n; i++) {
        const uint32_t at = i % STAGES;
        dmk_mbar_wait(&s->empty[at], (i / STAGES - 1) & 1);
        dmk_mbar_expect(&s->full[at], (64 + TN) * 128);
        dmk_tma_load_2d(s->w[at], &job.w, &s->full[at], k0 + (int32_t)i * STEP, out);
        dmk_tma_load_2d(s->x[at], &job.x, &s->full[at], k0 + (int32_t)i * STEP, row);
    }
}

template <int TN> __global__ void __launch_bounds__(160) few_kernel(const __grid_constant__ struct job job)
{
    constexpr uint32_t STAGES = few_smem<TN>::STAGES;
    extern __shared__ __align__(1024) uint8_t raw[];
    struct few_smem<TN> *s = (struct few_smem<TN> *)raw;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t first = blockIdx.y * job.piece_steps;
    const uint32_t left = job.n_steps - first, n = left < job.piece_steps ? left : job.piece_steps;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < STAGES; i++) {
            dmk_mbar_init(&s->full[i], 1);
            dmk_mbar_init(&s->empty[i], 4);
        }
        dmk_mbar_init_fence();
        dmk_fence_async_shared();
    }
    __syncthreads();
    dmk_pdl_next();
    float d[TN / 2];
    if (warp == 4) {
        if (lane == 0) {
            few_load<TN>(job, s, n);
        }
        __syncwarp();
    } else {
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t at = i % STAGES;
            dmk_mbar_wait(&s->full[at], (i / STAGES) & 1);
            const uint64_t a = dmk_wgmma_desc(s->w[at]), b = dmk_wgmma_desc(s->x[at]);
            dmk_wgmma_fence();
#pragma unroll
            for (int k = 0; k < STEP / 16; k++) {
                dmk_wgmma<TN>::run(d, a + 2 * k, b + 2 * k, i > 0 || k > 0);
            }
            dmk_wgmma_commit();
            dmk_wgmma_wait<0>();
            if (lane == 0) {
                dmk_mbar_arrive(&s->empty[at]);
            }
        }
        dmk_pdl_wait(); /* before this kernel's first write */
    }
    const uint32_t out = blockIdx.x * 64 + warp * 16 + lane / 4, row = blockIdx.z * TN + lane % 4 * 2;
    finish_few<TN>(job, s->parts, d, out, row);
}

template <int TN> static void launch_few(struct dmk_stream *stream, const struct job &job)
{
    dmk_cuda_launch_cluster(stream, few_kernel<TN>, dim3((job.n_out + 63) / 64, job.n_pieces, dmk_ceil_div(job.n_rows, TN)), dim3(160),
                            sizeof(struct few_smem<TN>), dim3(1, job.n_pieces), job);
}

void dmk_cuda_linear(const struct dmk_linear_args *args, struct dmk_stream *stream)
{
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    struct job job = {};
    const uint32_t k = args->k * args->n_slices, n_rows = args->n_rows;
    const struct dmk_cuda_pieces pieces =
        cut_k(args->k, args->n_slices, args->n_whole ? args->n_whole : args->n_out, args->leaf, STEP);
    if (n_rows == 0) {
        return;
    }
    /* One piece of many outputs has enough blocks in large tiles, which read the rows less often. */
    const bool head = n_rows > 64 && pieces.n == 1 && args->n_out >= 256 * s->n_sms;
    if (n_rows > (args->n_out <= SMALL_OUT ? SMALL_ROWS : FEW_ROWS) || head) {
        dmk_cuda_linear_many(args, pieces, stream);
        return;
    }
    job.bias = args->bias;
    job.y_bf16 = args->y_bf16;
    job.y_f32 = args->y_f32;
    job.y_stride = args->y_stride;
    job.n_rows = n_rows;
    job.n_out = args->n_out;
    job.n_steps = dmk_ceil_div(k, STEP);
    job.tree = pieces.tree;
    job.n_pieces = pieces.n;
    job.piece_steps = pieces.steps;
    const uint32_t tn = n_rows <= 8 ? 8 : n_rows <= 16 ? 16 : n_rows <= 32 ? 32 : n_rows <= 64 ? 64 : 128;
    if (!dmk_tensor_map_bf16(s, &job.w, args->w, args->n_out, k, args->w_stride, 64) ||
        !dmk_tensor_map_bf16(s, &job.x, args->x, n_rows, k, args->x_stride, tn)) {
        return;
    }
    switch (tn) {
    case 8:
        launch_few<8>(stream, job);
        break;
    case 16:
        launch_few<16>(stream, job);
        break;
    case 32:
        launch_few<32>(stream, job);
        break;
    case 64:
        launch_few<64>(stream, job);
        break;
    default:
        launch_few<128>(stream, job);
        break;
    }
}
