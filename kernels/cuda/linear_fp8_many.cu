/* The dense product in FP8 for many rows: tiles of 128 rows and up to 128 outputs, a warpgroup 64 rows. The order of
 * sums is that of linear_fp8.cu, the walk over tiles that of linear_many.cu.
 *
 * The sum of a step's products and the fp32 sum that it goes into are registers of their own, and so is, with pieces
 * or slices, the one before: three sets, which bounds the tile. While a warpgroup moves its sums the other one multiplies.
 * Scales come through the ring of stages as the tiles do, so that no product waits for one. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/linear_tiles.cuh"
#include "kernels/fp8.h"

#define STEP     128 /* of k, one stage, one group of scales */
#define ALL_SMEM ((uint32_t)227 << 10)

namespace {

struct job {
    CUtensorMap w, x;
    const float *w_scales; /* [64 outputs][n_steps] */
    const float *x_scales; /* [n_steps][n_rows] */
    const uint16_t *bias;
    uint16_t *y_bf16;
    float *y_f32;
    float *scratch; /* a tile a block */
    uint64_t y_stride;
    uint32_t n_rows, n_out, first;
    uint32_t n_pieces, piece_steps, n_steps; /* the last piece may have fewer */
    uint32_t n_stages;
    uint32_t x_rows; /* of a stage that are read: fewer than a tile has where there are no more */
    uint32_t n_row_tiles, n_out_tiles;
    bool pairs, wide; /* two elements, or 16 bytes of y, are aligned and inside or outside together */
};

/* Scales of a stage in shared memory: of the tile's rows, and of each 64 of its outputs. */
template <int BN> struct stage_scales {
    float x[ROWS], w[BN / 64];
};

/* What a thread has of them: for its rows g and g + 8. */
template <int BN> struct step_scales {
    float x0, x1, w[BN / 64];
};

template <int BN>
__device__ __forceinline__ struct step_scales<BN> read_scales(const struct stage_scales<BN> *stage)
{
    const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    struct step_scales<BN> v;
    v.x0 = stage->x[row];
    v.x1 = stage->x[row + 8];
#pragma unroll
    for (int i = 0; i < BN / 64; i++) {
        v.w[i] = stage->w[i];
    }
    return v;
}

/* The products of a step: a and b are the low words of its tiles' descriptors. */
template <int BN> __device__ __forceinline__ void multiply(float (&d)[BN / 2], uint32_t a, uint32_t b)
{
    const uint64_t high = (uint64_t)DMK_WGMMA_HIGH << 32;
    dmk_wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEP / 32; k++) {
        dmk_wgmma_e4m3_ss<BN>::run(d, high | (a + 2 * k), high | (b + 2 * k), k > 0);
    }
    dmk_wgmma_commit();
}

template <int BN>
__device__ __forceinline__ void add_scaled(float (&sum)[BN / 2], const float (&d)[BN / 2], const struct step_scales<BN> &v)
{
#pragma unroll
    for (int i = 0; i < BN / 64; i++) {
        const float s0 = __fmul_rn(v.w[i], v.x0), s1 = __fmul_rn(v.w[i], v.x1);
#pragma unroll
        for (int j = 8 * i; j < 8 * i + 8; j++) {
            sum[4 * j] = __fmaf_rn(d[4 * j], s0, sum[4 * j]);
            sum[4 * j + 1] = __fmaf_rn(d[4 * j + 1], s0, sum[4 * j + 1]);
            sum[4 * j + 2] = __fmaf_rn(d[4 * j + 2], s1, sum[4 * j + 2]);
            sum[4 * j + 3] = __fmaf_rn(d[4 * j + 3], s1, sum[4 * j + 3]);
        }
    }
}

/* Where a tile begins; outputs before the rank's first wrap around and are outside. */
template <int BN> __device__ __forceinline__ struct tile tile_at(const struct job &job, uint32_t i)
{
    struct tile t = find_tile<BN>(job, i);
    t.out -= job.first;
    return t;
}

/* One warp. Its copies count for a stage's barrier when they have arrived, as those of the copy engine do. */
template <int BN>
__device__ __forceinline__ void load_scales(const struct job &job, struct ring r, struct stage_scales<BN> *scales)
{
    const uint32_t n_tiles = job.n_row_tiles * job.n_out_tiles, lane = threadIdx.x % 32;
    const uint32_t last = job.n_rows - 1, last_group = (job.first + job.n_out - 1) / 64;
    uint32_t n_begun = 0;
    dmk_pdl_wait();
    for (uint32_t i = blockIdx.x; i < n_tiles; i += gridDim.x) {
        const struct tile t = tile_at<BN>(job, i);
        const float *w = job.w_scales + (uint64_t)min((t.out + job.first) / 64 + lane, last_group) * job.n_steps;
        const float *x = job.x_scales;
        for (uint32_t step = 0; step < job.n_steps; step++) {
            struct stage_scales<BN> *to = scales + r.at;
            if (n_begun >= r.n) {
                dmk_mbar_wait(&r.control->empty[r.at], r.phase ^ 1);
            }
            n_begun += n_begun < r.n;
#pragma unroll
            for (uint32_t row = lane; row < ROWS; row += 32) {
                dmk_copy_4(&to->x[row], x + min(t.row + row, last));
            }
            if (lane < BN / 64) {
                dmk_copy_4(&to->w[lane], w + step);
            }
            dmk_copy_arrive(&r.control->full[r.at]);
            x += job.n_rows;
            advance(&r);
        }
    }
}

/* The chain of n steps. */
template <int BN>
__device__ __forceinline__ void run_chain(float (&sum)[BN / 2], struct ring *r, const struct stage_scales<BN> *scales,
                                          uint32_t n, uint32_t a_at, uint32_t b_at)
{
#pragma unroll
    for (int i = 0; i < BN / 2; i++) {
        sum[i] = 0.0f;
    }
#pragma unroll 1
    for (; n > 0; n--) {
        float d[BN / 2];
        const uint32_t at = r->at, stage = uniform(dmk_wgmma_low(r->base + at * r->bytes));
        dmk_mbar_wait(&r->control->full[at], r->phase);
        multiply<BN>(d, stage + a_at, stage + b_at);
        const struct step_scales<BN> v = read_scales<BN>(scales + at);
        dmk_wgmma_wait<0>();
        dmk_wgmma_hold(d);
        __syncwarp(); /* all lanes have their scales */
        release(r, at);
        advance(r);
        add_scaled<BN>(sum, d, v);
    }
}

/* Outputs that begin at an odd one: pairs may be half outside on either side. */
template <int BN>
__device__ __forceinline__ void store_odd(const struct job &job, const float (&d)[BN / 2], struct tile t)
{
#pragma unroll
    for (int i = 0; i < BN / 2; i++) {
        const uint32_t row = t.row + threadIdx.x % 32 / 4 + i % 4 / 2 * 8,
                       out = t.out + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (row < job.n_rows && out < job.n_out) {
            store_one(job, row * job.y_stride + out, job.bias ? d[i] + dmk_bf16_f32(job.bias[out]) : d[i]);
        }
    }
}

template <int BN, enum sum SUM>
__global__ void __launch_bounds__(384, 1) many_kernel(const __grid_constant__ struct job job)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = uniform(warp / 4);
    uint8_t *side = raw + job.n_stages * (ROWS + BN) * 128;
    struct control *control = (struct control *)(side + 8 * side_bytes<BN, SUM>());
    struct stage_scales<BN> *scales = (struct stage_scales<BN> *)(control + 1);
    struct ring ring = {raw, control, job.n_stages, (ROWS + BN) * 128};
    begin_ring(&ring, 1 + 32);
    dmk_pdl_next();
    if (group == 2) {
        dmk_regs_drop<40>();
        if (warp == 8 && lane == 0) {
            load_tiles<STEP>(job, ring, (job.x_rows + BN) * 128, [&](uint32_t i) { return tile_at<BN>(job, i); });
        } else if (warp == 9) {
            load_scales<BN>(job, ring, scales);
        }
        return;
    }
    dmk_regs_raise<232>();
    dmk_pdl_wait(); /* before this kernel's first write */
    const uint32_t a_at = group * 64 * 8, b_at = ROWS * 8, n_tiles = job.n_row_tiles * job.n_out_tiles;
    uint8_t *mine = side + warp * side_bytes<BN, SUM>();
    const auto chain = [&](float (&d)[BN / 2], uint32_t n) { run_chain<BN>(d, &ring, scales, n, a_at, b_at); };
    for (uint32_t i = blockIdx.x; i < n_tiles; i += gridDim.x) {
        float d[BN / 2];
        const struct tile t = tile_at<BN>(job, i);
        if constexpr (SUM == TREE) {
            float4 *four = (float4 *)job.scratch + (blockIdx.x * 8 + warp) * (BN / 8 * 32) + lane;
            run_tree(d, job, (float4 *)mine + lane, four, chain);
        } else if constexpr (SUM == PIECES) {
            run_pieces(d, job, chain);
        } else {
            chain(d, job.n_steps);
        }
        if (job.first % 2 == 1) {
            store_odd<BN>(job, d, {t.row + warp * 16, t.out});
        } else {
            store_tile<BN>(job, d, mine, {t.row + warp * 16, t.out});
        }
    }
}

template <int BN, enum sum SUM>
void launch(struct dmk_cuda_stream *s, const struct dmk_linear_fp8_args *args, struct job job)
{
    const uint32_t k = args->k * args->n_slices, stage = (ROWS + BN) * 128;
    const uint32_t more = 8 * side_bytes<BN, SUM>() + sizeof(struct control);
    job.n_row_tiles = dmk_ceil_div(args->n_rows, ROWS);
    job.n_out_tiles = dmk_ceil_div(args->first + args->n_out, BN);
    const uint32_t scales = sizeof(struct stage_scales<BN>), fit = (ALL_SMEM - more) / (stage + scales);
    job.n_stages = fit < MAX_STAGES ? fit : MAX_STAGES;
    if (!dmk_tensor_map_bytes(s, &job.w, args->w, args->n_out, k, args->w_stride, BN) ||
        !dmk_tensor_map_bytes(s, &job.x, args->x_codes, args->n_rows, k, k, job.x_rows)) {
        return;
    }
    const uint32_t n_tiles = job.n_row_tiles * job.n_out_tiles;
    dmk_cuda_launch(&s->base, many_kernel<BN, SUM>, dim3(n_tiles < s->n_sms ? n_tiles : s->n_sms), dim3(384),
                    job.n_stages * (stage + scales) + more, job);
}

template <enum sum SUM>
void launch_width(struct dmk_cuda_stream *s, const struct dmk_linear_fp8_args *args, const struct job &job)
{
    static const uint32_t width[2] = {128, 64};
    const uint32_t n_row_tiles = dmk_ceil_div(args->n_rows, ROWS);
    if (choose(s, n_row_tiles, args->first + args->n_out, width, 64) == 64) {
        launch<64, SUM>(s, args, job);
    } else {
        launch<128, SUM>(s, args, job);
    }
}

} // namespace

void dmk_cuda_linear_fp8_many(const struct dmk_linear_fp8_args *args, struct dmk_cuda_pieces pieces,
                              struct dmk_stream *stream)
{
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    struct job job = {};
    begin_job(&job, args, s, pieces, STEP, args->first);
    job.w_scales = args->w_scales;
    job.x_scales = args->x_scales;
    job.first = args->first;
    job.x_rows = args->n_rows < ROWS ? dmk_ceil_div(args->n_rows, 8) * 8 : ROWS;
    if (pieces.tree) {
        launch_width<TREE>(s, args, job);
    } else if (pieces.n > 1) {
        launch_width<PIECES>(s, args, job);
    } else {
        launch_width<WHOLE>(s, args, job);
    }
}
