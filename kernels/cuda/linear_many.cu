/* The dense product for many rows: tiles of 128 rows and up to 256 outputs, a warpgroup 64 rows. The order of sums
 * is that of linear.cu.
 *
 * Blocks stay and walk tiles; the copies of the next tile begin under the end of this one. Rows of tiles in bands, so
 * that what the chip reads at a time stays in the second-level cache. The last rows' tile begins where it is full,
 * since boxes that are mostly outside are slow: rows that two tiles have get the same bits from both. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/wgmma.h"

#define STEP       64 /* of k, one stage */
#define MAX_STAGES 16
#define ROWS       128u
#define BAND       16u /* row tiles side by side */
#define SMEM       ((uint32_t)226 << 10)

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

/* Barriers of the ring: one thread fills a stage, the warps of both groups empty it. The whole block. */
__device__ __forceinline__ void begin_ring(const struct ring *r)
{
    if (threadIdx.x < r->n) {
        dmk_mbar_init(&r->control->full[threadIdx.x], 1);
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
template <int BN>
__device__ __forceinline__ void store_wide(const struct job &job, const float (&d)[BN / 2], uint8_t *buf,
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

__device__ __forceinline__ void store_one(const struct job &job, uint64_t at, float y)
{
    if (job.y_bf16) {
        job.y_bf16[at] = dmk_f32_bf16(y);
    } else {
        job.y_f32[at] = y;
    }
}

/* Any shape. */
template <int BN>
__device__ __forceinline__ void store_plain(const struct job &job, const float (&d)[BN / 2], struct tile t)
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
template <int BN>
__device__ __forceinline__ void store_tile(const struct job &job, float (&d)[BN / 2], uint8_t *buf,
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



template <int BN> __device__ __forceinline__ struct tile find_tile(const struct job &job, uint32_t i)
{
    const uint32_t band = i / (BAND * job.n_out_tiles), in_band = i % (BAND * job.n_out_tiles);
    const uint32_t left = job.n_row_tiles - band * BAND, n = left < BAND ? left : BAND;
    return {min((band * BAND + in_band % n) * ROWS, job.n_rows - min(job.n_rows, (uint32_t)ROWS)), in_band / n * BN};
}

/* One thread. */
template <int BN> __device__ __forceinline__ void load_tiles(const struct job &job, struct ring r)
{
    const uint32_t n_tiles = job.n_row_tiles * job.n_out_tiles;
    uint32_t n_begun = 0; /* stages so far, up to a whole ring */
    dmk_pdl_wait();
    for (uint32_t i = blockIdx.x; i < n_tiles; i += gridDim.x) {
        const struct tile t = find_tile<BN>(job, i);
        for (uint32_t step = 0; step < job.n_steps; step++) {
            uint8_t *stage = r.base + r.at * r.bytes;
            uint64_t *full = &r.control->full[r.at];
            if (n_begun >= r.n) {
                dmk_mbar_wait(&r.control->empty[r.at], r.phase ^ 1);
            }
            n_begun += n_begun < r.n;
            dmk_mbar_expect(full, r.bytes);
            dmk_tma_load_2d(stage, &job.x, full, (int32_t)(step * STEP), (int32_t)t.row);
            dmk_tma_load_2d(stage + ROWS * 128, &job.w, full, (int32_t)(step * STEP),
                            (int32_t)t.out);
            advance(&r);
        }
    }
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

/* Pieces from left to right. */
template <int BN>
__device__ __forceinline__ void run_pieces(float (&sum)[BN / 2], struct ring *r, const struct job &job, uint32_t a_at,
                                           uint32_t b_at)
{
    run_chain<BN>(sum, r, job.piece_steps, a_at, b_at);
#pragma unroll 1
    for (uint32_t i = job.piece_steps; i < job.n_steps; i += job.piece_steps) {
        float d[BN / 2];
        run_chain<BN>(d, r, min(job.n_steps - i, job.piece_steps), a_at, b_at);
        add_all(sum, d);
    }
}

/* The tree over 2, 4 or 8 chains. Registers hold the chain under way and its left neighbour; the
 * pair to the left waits in shared memory (two), the four to the left in device memory (four), that is the
 * second-level cache. */
template <int BN>
__device__ __forceinline__ void run_tree(float (&d)[BN / 2], struct ring *r, const struct job &job,
                                         uint32_t a_at, uint32_t b_at, float4 *two, float4 *four)
{
    float left[BN / 2];
#pragma unroll 1
    for (uint32_t pair = 0; pair < job.n_pieces / 2; pair++) {
        run_chain<BN>(left, r, job.piece_steps, a_at, b_at);
        run_chain<BN>(d, r, job.piece_steps, a_at, b_at);
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

template <int BN, enum sum SUM>
__global__ void __launch_bounds__(384, 1) many_kernel(const __grid_constant__ struct job job)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = uniform(warp / 4);
    uint8_t *side = raw + job.n_stages * (ROWS + BN) * 128;
    struct ring ring = {raw, (struct control *)(side + 8 * side_bytes<BN, SUM>()), job.n_stages,
                        (ROWS + BN) * 128};
    begin_ring(&ring);
    dmk_pdl_next();
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane == 0) {
            load_tiles<BN>(job, ring);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    dmk_pdl_wait(); /* before this kernel's first write */
    const uint32_t a_at = group * 64 * 8, b_at = ROWS * 8, n_tiles = job.n_row_tiles * job.n_out_tiles;
    uint8_t *mine = side + warp * side_bytes<BN, SUM>();
    for (uint32_t i = blockIdx.x; i < n_tiles; i += gridDim.x) {
        float d[BN / 2];
        if constexpr (SUM == TREE) {
            float4 *four = (float4 *)job.scratch + (blockIdx.x * 8 + warp) * (BN / 8 * 32) + lane;
            run_tree<BN>(d, &ring, job, a_at, b_at, (float4 *)mine + lane, four);
        } else if constexpr (SUM == PIECES) {
            run_pieces<BN>(d, &ring, job, a_at, b_at);
        } else {
            run_chain<BN>(d, &ring, job.n_steps, a_at, b_at);
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

/* The width that costs least: rounds of tiles over the chip, each as long as it is wide and a little. */
uint32_t choose(const struct dmk_cuda_stream *s, uint32_t n_row_tiles, uint32_t n_out, const uint32_t (&width)[3])
{
    uint32_t best = 0, least = UINT32_MAX;
    for (uint32_t w : width) {
        const uint32_t cost = dmk_ceil_div(n_row_tiles * dmk_ceil_div(n_out, w), s->n_sms) * (w + 16);
        if (cost < least) {
            least = cost;
            best = w;
        }
    }
    return best;
}

} // namespace

void dmk_cuda_linear_many(const struct dmk_linear_args *args, struct dmk_cuda_pieces pieces,
                          struct dmk_stream *stream)
{
    /* Registers hold one set of sums, or two. */
    static const uint32_t whole[3] = {256, 128, 64}, two_sets[3] = {160, 128, 64}, tree[3] = {192, 160, 96};
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    struct job job = {};
    job.bias = args->bias;
    job.y_bf16 = args->y_bf16;
    job.y_f32 = args->y_f32;
    job.scratch = (float *)s->workspace;
    job.y_stride = args->y_stride;
    job.n_rows = args->n_rows;
    job.n_out = args->n_out;
    job.n_pieces = pieces.n;
    job.piece_steps = pieces.steps;
    job.n_steps = dmk_ceil_div(args->k * args->n_slices, STEP);
    const uintptr_t y = args->y_bf16 ? (uintptr_t)args->y_bf16 : (uintptr_t)args->y_f32;
    job.pairs = args->n_out % 2 == 0 && args->y_stride % 2 == 0 && y % (args->y_bf16 ? 4 : 8) == 0;
    job.wide = args->y_bf16 && args->n_out % 8 == 0 && args->y_stride % 8 == 0 && y % 16 == 0;
    const uint32_t n_row_tiles = dmk_ceil_div(args->n_rows, ROWS);
    if (pieces.tree) {
        switch (choose(s, n_row_tiles, args->n_out, tree)) {
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
        switch (choose(s, n_row_tiles, args->n_out, two_sets)) {
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
        switch (choose(s, n_row_tiles, args->n_out, whole)) {
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
