/* The dense product for many rows: tiles of 128 rows and up to 256 outputs, a warpgroup 64 rows. The order of sums
 * is that of linear.cu.
 *
 * Blocks stay and walk tiles; the copies of the next tile begin under the end of this one. Rows of tiles in bands, so
 * that what the chip reads at a time stays in the second-level cache. The last rows' tile begins where it is full,
 * since boxes that are mostly outside are slow: rows that two tiles have get the same bits from both. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/linear_tiles.cuh"
#include "kernels/cuda/wgmma.h"

#define STEP 64 /* of k, one stage */

namespace {

struct job {
    CUtensorMap w, x;
    const uint16_t *bias;
    uint16_t *y_bf16;
    float *y_f32;
    float *scratch; /* a tile a block */
    uint64_t y_stride;
    uint32_t n_rows, n_out;
    uint32_t n_pieces, piece_steps, n_steps; /* the last piece may have fewer */
    uint32_t n_stages;
    uint32_t n_row_tiles, n_out_tiles;
    bool pairs, wide; /* two elements, or 16 bytes of y, are aligned and inside or outside together */
};

/* The products of a step: a and b are the low words of its tiles' descriptors. add 0: d is overwritten. */
template <int BN> __device__ __forceinline__ void multiply(float (&d)[BN / 2], uint32_t a, uint32_t b, int add)
{
    const uint64_t high = (uint64_t)DMK_WGMMA_HIGH << 32;
    dmk_wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) {
        dmk_wgmma<BN>::run(d, high | (a + 2 * k), high | (b + 2 * k), add || k > 0);
    }
    dmk_wgmma_commit();
}

/* Begins the products of the next stage, and returns which it is. */
template <int BN, bool FIRST>
__device__ __forceinline__ uint32_t begin_stage(float (&d)[BN / 2], struct ring *r, uint32_t a_at, uint32_t b_at)
{
    const uint32_t at = r->at, stage = uniform(dmk_wgmma_low(r->base + at * r->bytes));
    dmk_mbar_wait(&r->control->full[at], r->phase);
    multiply<BN>(d, stage + a_at, stage + b_at, !FIRST);
    advance(r);
    return at;
}

/* The chain of n steps. A stage is given back when only the products of the one behind it are under way. */
template <int BN>
__device__ __forceinline__ void run_chain(float (&d)[BN / 2], struct ring *r, uint32_t n, uint32_t a_at, uint32_t b_at)
{
    uint32_t last = begin_stage<BN, true>(d, r, a_at, b_at);
#pragma unroll 1
    for (uint32_t i = 1; i < n; i++) {
        const uint32_t at = begin_stage<BN, false>(d, r, a_at, b_at);
        dmk_wgmma_wait<1>();
        release(r, last);
        last = at;
    }
    dmk_wgmma_wait<0>();
    dmk_wgmma_hold(d);
    release(r, last);
}

template <int BN, enum sum SUM>
__global__ void __launch_bounds__(384, 1) many_kernel(const __grid_constant__ struct job job)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = uniform(warp / 4);
    uint8_t *side = raw + job.n_stages * (ROWS + BN) * 128;
    struct ring ring = {raw, (struct control *)(side + 8 * side_bytes<BN, SUM>()), job.n_stages,
                        (ROWS + BN) * 128};
    begin_ring(&ring, 1);
    dmk_pdl_next();
    if (group == 2) {
        dmk_regs_drop<40>();
        if (warp == 8 && lane == 0) {
            load_tiles<STEP>(job, ring, ring.bytes, [&](uint32_t i) { return find_tile<BN>(job, i); });
        }
        return;
    }
    dmk_regs_raise<232>();
    dmk_pdl_wait(); /* before this kernel's first write */
    const uint32_t a_at = group * 64 * 8, b_at = ROWS * 8, n_tiles = job.n_row_tiles * job.n_out_tiles;
    uint8_t *mine = side + warp * side_bytes<BN, SUM>();
    const auto chain = [&](float (&d)[BN / 2], uint32_t n) { run_chain<BN>(d, &ring, n, a_at, b_at); };
    for (uint32_t i = blockIdx.x; i < n_tiles; i += gridDim.x) {
        float d[BN / 2];
        if constexpr (SUM == TREE) {
            float4 *four = (float4 *)job.scratch + (blockIdx.x * 8 + warp) * (BN / 8 * 32) + lane;
            run_tree(d, job, (float4 *)mine + lane, four, chain);
        } else if constexpr (SUM == PIECES) {
            run_pieces(d, job, chain);
        } else {
            chain(d, job.n_steps);
        }
        const struct tile t = find_tile<BN>(job, i);
        store_tile<BN>(job, d, mine, {t.row + warp * 16, t.out});
    }
}

template <int BN, enum sum SUM>
void launch(struct dmk_cuda_stream *s, const struct dmk_linear_args *args, struct job job)
{
    const uint32_t k = args->k * args->n_slices, stage = (ROWS + BN) * 128;
    const uint32_t more = 8 * side_bytes<BN, SUM>() + sizeof(struct control);
    job.n_row_tiles = dmk_ceil_div(args->n_rows, ROWS);
    job.n_out_tiles = dmk_ceil_div(args->n_out, BN);
    const uint32_t fit = (SMEM - more) / stage;
    job.n_stages = fit < MAX_STAGES ? fit : MAX_STAGES;
    if (!dmk_tensor_map_bf16(s, &job.w, args->w, args->n_out, k, args->w_stride, BN) ||
        !dmk_tensor_map_bf16(s, &job.x, args->x, args->n_rows, k, args->x_stride, ROWS)) {
        return;
    }
    const uint32_t n_tiles = job.n_row_tiles * job.n_out_tiles;
    dmk_cuda_launch(&s->base, many_kernel<BN, SUM>, dim3(n_tiles < s->n_sms ? n_tiles : s->n_sms), dim3(384),
                    job.n_stages * stage + more, job);
}

} // namespace

void dmk_cuda_linear_many(const struct dmk_linear_args *args, struct dmk_cuda_pieces pieces,
                          struct dmk_stream *stream)
{
    /* Registers hold one set of sums, or two. */
    static const uint32_t whole[3] = {256, 128, 64}, two_sets[3] = {160, 128, 64}, tree[3] = {192, 160, 96};
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    struct job job = {};
    begin_job(&job, args, s, pieces, STEP, 0);
    const uint32_t n_row_tiles = dmk_ceil_div(args->n_rows, ROWS);
    if (pieces.tree) {
        switch (choose(s, n_row_tiles, args->n_out, tree, 16)) {
        case 96:
            launch<96, TREE>(s, args, job);
            break;
        case 160:
            launch<160, TREE>(s, args, job);
            break;
        default:
            launch<192, TREE>(s, args, job);
            break;
        }
    } else if (pieces.n > 1) {
        switch (choose(s, n_row_tiles, args->n_out, two_sets, 16)) {
        case 64:
            launch<64, PIECES>(s, args, job);
            break;
        case 128:
            launch<128, PIECES>(s, args, job);
            break;
        default:
            launch<160, PIECES>(s, args, job);
            break;
        }
    } else {
        switch (choose(s, n_row_tiles, args->n_out, whole, 16)) {
        case 64:
            launch<64, WHOLE>(s, args, job);
            break;
        case 128:
            launch<128, WHOLE>(s, args, job);
            break;
        default:
            launch<256, WHOLE>(s, args, job);
            break;
        }
    }
}
