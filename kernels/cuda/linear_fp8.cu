/* The dense product in FP8: activations to codes, and the way for few rows.
 *
 * A step is a group of 128 columns: four instructions of 32 columns add its products, beginning at zero, and the
 * sum goes on, times both scales, into fp32 by one fused multiply-add a step, ascending. Pieces of K, their order and
 * the tree over slices are those of linear.cu, with steps of 128.
 *
 *   few   up to 32 rows: a block has 64 outputs of one piece, weights are the 64-row operand. Up to 16 rows of short
 *         pieces are made codes by the blocks themselves, which costs less than a launch; else a kernel of its own does it.
 *   many  linear_fp8_many.cu.
 *
 * Tiles of outputs begin where scales do, so the first one may begin with rows that the rank has not: the copy engine
 * reads zeros there. Every k is a multiple of 32, of several slices of 128; x, w and their strides of 16 bytes. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/fp8.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/linear_pieces.cuh"
#include "kernels/fp8.h"

#define STEP      128 /* of k, one stage, one group of scales */
#define FEW_ROWS  32
#define OWN_ROWS  16
#define OWN_STEPS 5  /* of a piece whose activations a block makes codes of */
#define MAX_STEPS 32 /* of a piece */

namespace {

struct job {
    CUtensorMap w, x;
    const uint16_t *x_bf16; /* [n_rows][x_stride] */
    const float *w_scales;  /* [tile of 64 outputs][n_steps] */
    const float *x_scales;  /* [n_steps][n_rows] */
    const uint16_t *bias;
    uint16_t *y_bf16;
    float *y_f32;
    uint64_t x_stride, y_stride;
    uint32_t n_rows, n_out, k, first;
    uint32_t n_steps;     /* of the whole k */
    uint32_t piece_steps; /* the last piece may have fewer */
    uint32_t n_pieces;
    uint32_t tree; /* pieces are slices */
};

/* Four or three blocks fit into a multiprocessor. OWN: the block makes the codes of x. */
template <int TN, bool OWN> struct few_smem {
    static constexpr int STAGES = OWN ? OWN_STEPS : TN > 16 ? 4 : 6, STEPS = OWN ? OWN_STEPS : MAX_STEPS;
    union {
        struct {
            alignas(1024) uint8_t w[STAGES][64 * 128];
            alignas(1024) uint8_t x[STAGES][TN * 128];
        };
        float parts[TN / 2][128]; /* when the stages are done: this block's piece, [register][thread] */
    };
    alignas(8) float x_scales[STEPS][TN];
    float w_scales[STEPS];
    uint64_t full[STAGES], empty[STAGES];
};

/* One thread. */
template <int TN, bool OWN> __device__ void few_load(const struct job &job, struct few_smem<TN, OWN> *s, uint32_t n)
{
    constexpr uint32_t STAGES = few_smem<TN, OWN>::STAGES, BYTES = (OWN ? 64 : 64 + TN) * 128;
    const int32_t k0 = (int32_t)(blockIdx.y * job.piece_steps * STEP), row = (int32_t)blockIdx.z * TN;
    const int32_t out = (int32_t)(blockIdx.x * 64) - (int32_t)job.first;
    const uint32_t ahead = n < STAGES ? n : STAGES;
    for (uint32_t i = 0; i < ahead; i++) {
        dmk_mbar_expect(&s->full[i], BYTES);
        dmk_tma_load_2d(s->w[i], &job.w, &s->full[i], k0 + (int32_t)i * STEP, out);
    }
    if (OWN) {
        return; /* a piece has no more steps than there are stages */
    }
    dmk_pdl_wait();
    for (uint32_t i = 0; i < ahead; i++) {
        dmk_tma_load_2d(s->x[i], &job.x, &s->full[i], k0 + (int32_t)i * STEP, row);
    }
    for (uint32_t i = STAGES; i < n; i++) {
        const uint32_t at = i % STAGES;
        dmk_mbar_wait(&s->empty[at], (i / STAGES - 1) & 1);
        dmk_mbar_expect(&s->full[at], BYTES);
        dmk_tma_load_2d(s->w[at], &job.w, &s->full[at], k0 + (int32_t)i * STEP, out);
        dmk_tma_load_2d(s->x[at], &job.x, &s->full[at], k0 + (int32_t)i * STEP, row);
    }
}

/* Codes and scales of the piece's part of x, as the copy engine would have left them; 16 threads a row. */
template <int TN> __device__ __forceinline__ void make_codes(const struct job &job, struct few_smem<TN, true> *s, uint32_t n)
{
    const uint32_t lane = threadIdx.x % 16, k0 = blockIdx.y * job.piece_steps * STEP + lane * 8;
#pragma unroll
    for (uint32_t r = 0; r < TN / 8; r++) {
        const uint32_t in = r * 8 + threadIdx.x / 16, row = blockIdx.z * TN + in;
        const uint16_t *x = job.x_bf16 + row * job.x_stride;
        uint4 v[OWN_STEPS];
#pragma unroll
        for (uint32_t i = 0; i < OWN_STEPS; i++) {
            const uint32_t k = k0 + i * STEP;
            v[i] = i < n && row < job.n_rows && k < job.k ? *(const uint4 *)(x + k) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint32_t i = 0; i < OWN_STEPS; i++) {
            float scale;
            const uint2 codes = dmk_e4m3_group(v[i], &scale);
            *(uint2 *)(s->x[i] + in * 128 + ((lane * 8) ^ (in % 8 * 16))) = codes;
            if (lane == 0) {
                s->x_scales[i][in] = scale;
            }
        }
    }
}

/* What is ready before the first product, but for what the copy engine brings. The warps that multiply. */
template <int TN, bool OWN>
__device__ __forceinline__ void prepare(const struct job &job, struct few_smem<TN, OWN> *s, uint32_t n)
{
    const uint32_t first = blockIdx.y * job.piece_steps;
    if (threadIdx.x < n) {
        s->w_scales[threadIdx.x] = job.w_scales[blockIdx.x * job.n_steps + first + threadIdx.x];
    }
    dmk_pdl_wait();
    if constexpr (OWN) {
        make_codes<TN>(job, s, n);
        dmk_fence_async_shared(); /* products read what was written here */
    } else {
        for (uint32_t i = threadIdx.x; i < n * TN; i += 128) {
            const uint32_t row = blockIdx.z * TN + i % TN;
            s->x_scales[i / TN][i % TN] =
                row < job.n_rows ? job.x_scales[(uint64_t)(first + i / TN) * job.n_rows + row] : 0.0f;
        }
    }
    dmk_named_barrier(1, 128);
}

template <int TN, bool OWN> __global__ void __launch_bounds__(160) few_kernel(const __grid_constant__ struct job job)
{
    constexpr uint32_t STAGES = few_smem<TN, OWN>::STAGES;
    extern __shared__ __align__(1024) uint8_t raw[];
    struct few_smem<TN, OWN> *s = (struct few_smem<TN, OWN> *)raw;
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
    float sum[TN / 2];
    if (warp == 4) {
        if (lane == 0) {
            few_load<TN, OWN>(job, s, n);
        }
        __syncwarp();
    } else {
        prepare<TN, OWN>(job, s, n);
#pragma unroll
        for (int r = 0; r < TN / 2; r++) {
            sum[r] = 0.0f;
        }
        for (uint32_t i = 0; i < n; i++) {
            float d[TN / 2];
            const uint32_t at = i % STAGES;
            dmk_mbar_wait(&s->full[at], (i / STAGES) & 1);
            const uint64_t a = dmk_wgmma_desc(s->w[at]), b = dmk_wgmma_desc(s->x[at]);
            dmk_wgmma_fence();
#pragma unroll
            for (int k = 0; k < STEP / 32; k++) {
                dmk_wgmma_e4m3_ss<TN>::run(d, a + 2 * k, b + 2 * k, k > 0);
            }
            dmk_wgmma_commit();
            dmk_wgmma_wait<0>();
            dmk_wgmma_hold(d);
            if (lane == 0) {
                dmk_mbar_arrive(&s->empty[at]);
            }
            const float w = s->w_scales[i];
#pragma unroll
            for (int j = 0; j < TN / 8; j++) {
                const float2 x = *(const float2 *)&s->x_scales[i][j * 8 + lane % 4 * 2];
                const float s0 = __fmul_rn(w, x.x), s1 = __fmul_rn(w, x.y);
                sum[4 * j] = __fmaf_rn(d[4 * j], s0, sum[4 * j]);
                sum[4 * j + 1] = __fmaf_rn(d[4 * j + 1], s1, sum[4 * j + 1]);
                sum[4 * j + 2] = __fmaf_rn(d[4 * j + 2], s0, sum[4 * j + 2]);
                sum[4 * j + 3] = __fmaf_rn(d[4 * j + 3], s1, sum[4 * j + 3]);
            }
        }
    }
    /* Outputs before the rank's first wrap around and are outside. */
    const uint32_t out = blockIdx.x * 64 - job.first + warp * 16 + lane / 4, row = blockIdx.z * TN + lane % 4 * 2;
    finish_few<TN>(job, s->parts, sum, out, row);
}

template <int TN, bool OWN> void launch_few(struct dmk_stream *stream, const struct job &job)
{
    dmk_cuda_launch_cluster(stream, few_kernel<TN, OWN>,
                            dim3((job.first + job.n_out + 63) / 64, job.n_pieces, dmk_ceil_div(job.n_rows, TN)),
                            dim3(160), sizeof(struct few_smem<TN, OWN>), dim3(1, job.n_pieces), job);
}

struct codes_job {
    const uint16_t *x;
    uint8_t *codes; /* [n_rows][k] */
    float *scales;  /* [n_groups][n_rows] */
    uint64_t x_stride;
    uint32_t n_rows, k, n_groups;
};

/* 16 threads a group of a row. */
__global__ void __launch_bounds__(256) codes_kernel(const __grid_constant__ struct codes_job job)
{
    const uint64_t at = ((uint64_t)blockIdx.x * 256 + threadIdx.x) / 16;
    const uint32_t row = (uint32_t)(at / job.n_groups), group = (uint32_t)(at % job.n_groups);
    const uint32_t col = group * STEP + threadIdx.x % 16 * 8;
    const bool inside = row < job.n_rows && col < job.k;
    float scale;
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint4 v = inside ? *(const uint4 *)(job.x + row * job.x_stride + col) : make_uint4(0, 0, 0, 0);
    const uint2 codes = dmk_e4m3_group(v, &scale);
    if (inside) {
        *(uint2 *)(job.codes + (uint64_t)row * job.k + col) = codes;
    }
    if (row < job.n_rows && threadIdx.x % 16 == 0) {
        job.scales[(uint64_t)group * job.n_rows + row] = scale;
    }
}

void make_codes(const struct dmk_linear_fp8_args *args, uint32_t n_groups, struct dmk_stream *stream)
{
    struct codes_job job = {};
    job.x = args->x;
    job.codes = args->x_codes;
    job.scales = args->x_scales;
    job.x_stride = args->x_stride;
    job.n_rows = args->n_rows;
    job.k = args->k * args->n_slices;
    job.n_groups = n_groups;
    const uint64_t n = (uint64_t)args->n_rows * n_groups;
    dmk_cuda_launch(stream, codes_kernel, dim3((uint32_t)((n + 15) / 16)), dim3(256), 0, job);
}

} // namespace

void dmk_cuda_linear_fp8(const struct dmk_linear_fp8_args *args, struct dmk_stream *stream)
{
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    struct job job = {};
    const uint32_t k = args->k * args->n_slices, n_rows = args->n_rows;
    const struct dmk_cuda_pieces pieces =
        cut_k(args->k, args->n_slices, args->n_whole ? args->n_whole : args->n_out, args->leaf, STEP);
    const bool few = n_rows <= FEW_ROWS && pieces.steps <= MAX_STEPS;
    const bool own = few && n_rows <= OWN_ROWS && pieces.steps <= OWN_STEPS;
    if (n_rows == 0 || args->n_out == 0) {
        return;
    }
    if (args->n_slices > 1 && args->k % STEP != 0) {
        s->error = s->error ? s->error : (int)cudaErrorInvalidValue;
        return;
    }
    job.n_steps = dmk_ceil_div(k, STEP);
    if (!own) {
        make_codes(args, job.n_steps, stream);
    }
    if (!few) {
        dmk_cuda_linear_fp8_many(args, pieces, stream);
        return;
    }
    job.x_bf16 = args->x;
    job.w_scales = args->w_scales;
    job.x_scales = args->x_scales;
    job.bias = args->bias;
    job.y_bf16 = args->y_bf16;
    job.y_f32 = args->y_f32;
    job.x_stride = args->x_stride;
    job.y_stride = args->y_stride;
    job.n_rows = n_rows;
    job.n_out = args->n_out;
    job.k = k;
    job.first = args->first;
    job.tree = pieces.tree;
    job.n_pieces = pieces.n;
    job.piece_steps = pieces.steps;
    const uint32_t tn = n_rows <= 8 ? 8 : n_rows <= 16 ? 16 : 32;
    if (!dmk_tensor_map_bytes(s, &job.w, args->w, args->n_out, k, args->w_stride, 64) ||
        (!own && !dmk_tensor_map_bytes(s, &job.x, args->x_codes, n_rows, k, k, tn))) {
        return;
    }
    if (own) {
        tn == 8 ? launch_few<8, true>(stream, job) : launch_few<16, true>(stream, job);
    } else if (tn == 8) {
        launch_few<8, false>(stream, job);
    } else if (tn == 16) {
        launch_few<16, false>(stream, job);
    } else {
        launch_few<32, false>(stream, job);
    }
}
