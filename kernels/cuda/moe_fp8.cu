/* FP8 experts for many tokens (sm_90a): grouped products with block scales, promoted to fp32 every 128 of K.
 *
 * Weights are the 64-row operand, an expert's tokens the N side in tiles of 16 to 128, so a tile wastes less
 * than 16 columns. Weights lie in memory as the four bits of MXFP4 and become E4M3 in the registers from which wgmma
 * takes them; tokens lie as shared memory wants them (kernels/pack.h, kernels/cuda/moe.h): a stage is four bulk copies
 * and needs no tensor map. One thread copies. Four wgmma of K = 32 make a partial sum, which is multiplied by the
 * token's scale and added to the fp32 accumulator, which began with the bias.
 *
 * An item is 256 rows: of gate_up these are the 128 z's of a token that share a scale, which are quantised in
 * shared memory and leave as one bulk store. Two warpgroups multiply 128 of the rows each by up to 128 tokens, or, where
 * experts have few tokens, four warpgroups 64 of the rows by up to 64: making E4M3 takes the instructions of many warps.
 * All tiles of an expert's tokens run at about the same time, so its weights leave memory once. Clusters that share
 * the weights by multicast were slower (docs/PERF.md). */
#include "kernels/cuda/moe.h"

#include "kernels/cuda/moe_fp8_multiply.cuh"
#include "kernels/cuda/moe_fp8_work.cuh"

namespace
{

constexpr uint32_t FEW_TOKENS = 48; /* an expert's on the average, for which four warpgroups multiply */
constexpr uint32_t BAR_MATH = 1;     /* of the warps that multiply */

/* 1 / (1 + e^-x) by the hardware's approximations. What they flush to zero does not change the sum or the quotient. */
__device__ __forceinline__ float sigmoid(float x)
{
    float e, y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-x * 1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + e));
    return y;
}

__device__ __forceinline__ float bias_of(const struct params &p, uint32_t expert, uint32_t row)
{
    return row < p.rows ? __uint_as_float((uint32_t)p.bias[(uint64_t)expert * p.rows + row] << 16) : 0.0f;
}

template <int N> __device__ __forceinline__ void start(float (&acc)[N / 2], float low, float high)
{
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        acc[i] = i % 4 < 2 ? low : high;
    }
}

/* z of a tile in pairs of tokens: word i holds tokens 8i + 2t and 8i + 2t + 1 of channel (row pair) g. */
template <int N>
__device__ __forceinline__ void activate(const struct params &p, const float (&acc)[N / 2],
                                         uint32_t (&z)[N / 8])
{
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        float v[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float gate = fminf(acc[4 * i + j], p.limit);
            float up = fminf(fmaxf(acc[4 * i + 2 + j], -p.limit), p.limit);
            v[j] = gate * sigmoid(p.alpha * gate) * (up + 1.0f);
        }
        __nv_bfloat162 pair = __floats2bfloat162_rn(v[0], v[1]);
        z[i] = *(uint32_t *)&pair;
    }
}

/* Largest |z| of the warp's channels, 8 of each row tile, to row `entry` of the table. */
template <int N, int SUBS>
__device__ __forceinline__ void note_amax(const uint32_t (&z)[SUBS][N / 8], uint32_t *amax, uint32_t entry)
{
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        uint32_t word = z[0][i] & 0x7fff7fffu;
        __nv_bfloat162 m = *(__nv_bfloat162 *)&word;
        if (SUBS == 2) {
            word = z[SUBS - 1][i] & 0x7fff7fffu;
            m = __hmax2(m, *(__nv_bfloat162 *)&word);
            word = *(uint32_t *)&m;
        }
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
            uint32_t other = __shfl_xor_sync(0xffffffffu, word, d);
            m = __hmax2(m, *(__nv_bfloat162 *)&other);
            word = *(uint32_t *)&m;
        }
        if (threadIdx.x % 32 < 4) {
            amax[entry * (N_MAX / 2) + i * 4 + threadIdx.x % 4] = word;
        }
    }
}

/* Bytes of one channel into the image. */
template <int N>
__device__ __forceinline__ void quantise(const uint32_t (&z)[N / 8], const float *inv, uint8_t *image,
                                         uint32_t channel)
{
    const uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        uint32_t token = 8 * i + 2 * t;
        uint32_t pair = dmk_e4m3_pair(__uint_as_float(z[i] << 16) * inv[token],
                                  __uint_as_float(z[i] & 0xffff0000u) * inv[token + 1]);
        uint32_t piece = channel / 16, in = channel % 16;
        image[token * 128 + (piece ^ (2 * t)) * 16 + in] = (uint8_t)pair;
        image[(token + 1) * 128 + (piece ^ (2 * t + 1)) * 16 + in] = (uint8_t)(pair >> 8);
    }
}

template <int WGS, int N>
__device__ __forceinline__ void gate_up_item(const struct params &p, const struct item &item,
                                             uint8_t *base, uint32_t smem, struct ring &ring)
{
    const uint32_t tid = threadIdx.x - 128, warp = tid / 32, g = tid % 32 / 4;
    uint32_t *amax = (uint32_t *)(base + SMEM_AMAX);
    float *inv = (float *)(base + SMEM_INV);
    uint8_t *image = base + SMEM_IMAGE;
    /* Of the item's two row tiles a warpgroup has both or one, of each 64 rows. */
    constexpr uint32_t SUBS = 4 / WGS, THREADS = WGS * 128;
    const uint32_t first = WGS == 4 ? warp / 8 : 0;
    const uint32_t left = p.n_tiles - 2 * item.part, n_subs = left <= first ? 0 : left - first < SUBS ? left - first : SUBS;
    float acc[SUBS][N / 2];
    uint32_t z[SUBS][N / 8];
#pragma unroll
    for (uint32_t sub = 0; sub < SUBS; sub++) {
        uint32_t row = 2 * item.part * 128 + sub * 128 + warp * 16 + 2 * g;
        start<N>(acc[sub], bias_of(p, item.expert, row), bias_of(p, item.expert, row + 1));
    }
    multiply<WGS, N>(p, item, n_subs, smem, ring, acc);
    /* Rows past the matrix have neither weights nor bias, so their z is zero. */
#pragma unroll
    for (uint32_t sub = 0; sub < SUBS; sub++) {
        activate<N>(p, acc[sub], z[sub]);
    }
    note_amax<N, SUBS>(z, amax, warp);
    if (tid == 0) {
        dmk_bulk_store_wait_read();
    }
    dmk_named_barrier(BAR_MATH, THREADS);
    if (tid < N / 2) {
        uint32_t word = amax[tid];
        __nv_bfloat162 m = *(__nv_bfloat162 *)&word;
        for (uint32_t i = 1; i < WGS * 4; i++) {
            word = amax[i * (N_MAX / 2) + tid];
            m = __hmax2(m, *(__nv_bfloat162 *)&word);
        }
        float scale[2];
        quant_scales(__low2float(m), &scale[0], &inv[2 * tid]);
        quant_scales(__high2float(m), &scale[1], &inv[2 * tid + 1]);
        float *out = p.z_scales + (uint64_t)item.part * p.n_positions + item.position;
        for (int32_t j = 0; j < 2; j++) {
            if ((int32_t)(2 * tid) + j < item.n_valid) {
                out[scale_at(2 * tid) + j] = scale[j];
            }
        }
    }
    dmk_named_barrier(BAR_MATH, THREADS);
#pragma unroll
    for (uint32_t sub = 0; sub < SUBS; sub++) {
        quantise<N>(z[sub], inv, image, sub * 64 + warp * 8 + g);
    }
    dmk_fence_async_shared();
    dmk_named_barrier(BAR_MATH, THREADS);
    if (tid == 0 && item.n_valid > 0) {
        dmk_bulk_store(p.z + ((uint64_t)item.part * p.n_positions + item.position) * 128,
                   smem + SMEM_IMAGE, (uint32_t)item.n_valid * 128);
    }
}

template <int WGS, int N>
__device__ __forceinline__ void down_item(const struct params &p, const struct item &item, uint32_t smem,
                                          struct ring &ring)
{
    const uint32_t tid = threadIdx.x - 128, t = tid % 4;
    const uint32_t row0 = item.part * 256 + tid / 32 * 16 + tid % 32 / 4;
    /* What a warpgroup has of the last rows: two, one or no times 64. */
    constexpr uint32_t SUBS = 4 / WGS;
    const uint32_t first = item.part * 256 + (dmk_warpgroup() - 1) * 64;
    const uint32_t n_subs = first >= p.rows ? 0 : first + 128 < p.rows ? SUBS : 1;
    float acc[SUBS][N / 2];
#pragma unroll
    for (uint32_t sub = 0; sub < SUBS; sub++) {
        const uint32_t row = row0 + sub * 128;
        start<N>(acc[sub], bias_of(p, item.expert, row), bias_of(p, item.expert, row + 8));
    }
    multiply<WGS, N>(p, item, n_subs, smem, ring, acc);
    /* A lane's rows of a token are 8 and 128 apart: one address serves all of them. */
    const bool all_rows = row0 + (SUBS - 1) * 128 + 8 < p.rows;
    float *y = p.y + ((uint64_t)item.slot + 2 * t) * p.rows + row0;
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if ((int32_t)(i * 8 + 2 * t) + j < item.n_valid) {
#pragma unroll
                for (uint32_t sub = 0; sub < SUBS; sub++) {
                    if (all_rows || row0 + sub * 128 < p.rows) {
                        y[sub * 128] = acc[sub][i * 4 + j];
                    }
                    if (all_rows || row0 + sub * 128 + 8 < p.rows) {
                        y[sub * 128 + 8] = acc[sub][i * 4 + 2 + j];
                    }
                }
            }
            y += j == 0 ? p.rows : 7 * (uint64_t)p.rows;
        }
    }
}

template <bool GATE_UP, int WGS, int N>
__device__ __forceinline__ void do_item(const struct params &p, const struct item &item, uint8_t *base,
                                        uint32_t smem, struct ring &ring)
{
    if constexpr (GATE_UP) {
        gate_up_item<WGS, N>(p, item, base, smem, ring);
    } else {
        down_item<WGS, N>(p, item, smem, ring);
    }
}

template <bool GATE_UP, int WGS>
__device__ __forceinline__ void consume(const struct params &p, const uint32_t *table, const uint32_t *pos,
                                        uint8_t *base, uint32_t smem)
{
    const uint32_t n_parts = (p.n_tiles + 1) / 2;
    struct ring ring = {0, 0};
    for (struct run run(table, p.n_experts, n_parts); run.at < run.end; run.next()) {
        struct item item = run.get(p, table, pos, n_parts);
        if constexpr (WGS == 4) {
            switch (item.width / WIDTH_STEP) {
            case 1:
                do_item<GATE_UP, WGS, 16>(p, item, base, smem, ring);
                break;
            case 2:
                do_item<GATE_UP, WGS, 32>(p, item, base, smem, ring);
                break;
            case 3:
                do_item<GATE_UP, WGS, 48>(p, item, base, smem, ring);
                break;
            default:
                do_item<GATE_UP, WGS, 64>(p, item, base, smem, ring);
                break;
            }
        } else {
            switch (item.width / WIDTH_STEP) {
            case 1:
                do_item<GATE_UP, WGS, 16>(p, item, base, smem, ring);
                break;
            case 2:
                do_item<GATE_UP, WGS, 32>(p, item, base, smem, ring);
                break;
            case 3:
                do_item<GATE_UP, WGS, 48>(p, item, base, smem, ring);
                break;
            case 4:
                do_item<GATE_UP, WGS, 64>(p, item, base, smem, ring);
                break;
            case 5:
                do_item<GATE_UP, WGS, 80>(p, item, base, smem, ring);
                break;
            case 6:
                do_item<GATE_UP, WGS, 96>(p, item, base, smem, ring);
                break;
            case 7:
                do_item<GATE_UP, WGS, 112>(p, item, base, smem, ring);
                break;
            default:
                do_item<GATE_UP, WGS, 128>(p, item, base, smem, ring);
                break;
            }
        }
    }
    if (GATE_UP && threadIdx.x == 128) {
        dmk_bulk_store_wait();
    }
}

template <bool GATE_UP, int WGS>
__global__ void __launch_bounds__(128 + WGS * 128, 1) moe_fp8(const __grid_constant__ struct params p)
{
    extern __shared__ uint8_t raw[];
    const uint32_t smem = (dmk_smem_u32(raw) + 1023) / 1024 * 1024;
    uint8_t *base = raw + (smem - dmk_smem_u32(raw));
    uint32_t *table = (uint32_t *)(base + SMEM_TABLE), *pos = table + MAX_EXPERTS + 1;
    if (threadIdx.x - 32 < N_SHIFTS) {
        ((uint2 *)(base + SMEM_CODES))[threadIdx.x - 32] = codes_of((int)threadIdx.x - 32 + DMK_FP8PACK_SHIFT_LOW);
    }
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < N_STAGES; i++) {
            dmk_mbar_init(smem + SMEM_BARS + i * 16, 1);
            dmk_mbar_init(smem + SMEM_BARS + i * 16 + 8, WGS * 4);
        }
        dmk_mbar_init_fence();
    }
    dmk_pdl_wait();
    if (threadIdx.x < 32) {
        count_tiles(p.expert_begin, p.n_experts, table, pos, p.width_max);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        dmk_regs_drop<24>();
        if (threadIdx.x == 0) {
            produce(p, table, pos, smem);
        }
    } else {
        dmk_regs_raise<WGS == 4 ? 112 : 240>();
        consume<GATE_UP, WGS>(p, table, pos, base, smem);
    }
    __syncwarp();
    dmk_pdl_next();
}

} // namespace

struct dmk_moe_fp8_layout dmk_moe_fp8_layout(uint32_t n_rows, uint32_t k, uint32_t n_experts,
                                             uint32_t hidden, uint32_t inter)
{
    struct dmk_moe_fp8_layout l;
    /* Tiles may read, and ignore, up to two of them past the last position. */
    l.n_positions = (n_rows * k + 16 * n_experts + 2 * N_MAX + 63) / 64 * 64;
    l.x_blocks = dmk::div_up(hidden, 128);
    l.z_blocks = dmk::div_up(inter, 128);
    l.x = 0;
    l.z = l.x + (size_t)l.x_blocks * l.n_positions * 128;
    l.x_scales = l.z + (size_t)l.z_blocks * l.n_positions * 128;
    l.z_scales = l.x_scales + (size_t)l.x_blocks * l.n_positions * 4;
    l.bytes = l.z_scales + (size_t)l.z_blocks * l.n_positions * 4;
    return l;
}

cudaError_t dmk_moe_fp8_step(const struct dmk_moe_layer_args *a, uint32_t step, cudaStream_t stream)
{
    if (a->n_experts > MAX_EXPERTS || a->k > 16 || a->gate_up.cols % 8 != 0 || a->gate_up.cols > 32 * 128 ||
        a->down.cols > 32 * 128) {
        return cudaErrorInvalidValue;
    }
    if (a->n_rows == 0) {
        return cudaSuccess;
    }
    int device, n_sms;
    cudaError_t err = cudaGetDevice(&device);
    if (err == cudaSuccess) {
        err = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
    }
    if (err != cudaSuccess) {
        return err;
    }
    const struct dmk_moe_fp8_layout l =
        dmk_moe_fp8_layout(a->n_rows, a->k, a->n_experts, a->gate_up.cols, a->down.cols);
    uint8_t *scratch = (uint8_t *)a->scratch;
    if (step == 0) {
        return dmk_moe_fp8_quantise(a, &l, (uint32_t)n_sms, stream);
    }
    const struct dmk_moe_matrix *m = step == 1 ? &a->gate_up : &a->down;
    struct params p = {};
    p.w = m->packed;
    p.w_scales = m->scales;
    p.bias = m->bias;
    p.in = scratch + (step == 1 ? l.x : l.z);
    p.in_scales = (const float *)(scratch + (step == 1 ? l.x_scales : l.z_scales));
    p.z = scratch + l.z;
    p.z_scales = (float *)(scratch + l.z_scales);
    p.y = a->y;
    p.expert_begin = a->expert_begin;
    p.n_experts = a->n_experts;
    p.n_positions = l.n_positions;
    p.rows = m->rows;
    p.n_tiles = dmk::div_up(m->rows, 128);
    p.n_kb = dmk::div_up(m->cols, 128);
    p.alpha = a->alpha;
    p.limit = a->limit;
    /* With few tokens an expert there are registers for twice the warps, which hide more; with many a weight should meet
     * as many tokens as can be. */
    const bool few = a->n_rows * a->k <= FEW_TOKENS * a->n_experts;
    p.width_max = few ? 64 : N_MAX;
    if (few) {
        return launch(step == 1 ? moe_fp8<true, 4> : moe_fp8<false, 4>, (uint32_t)n_sms, 640, SMEM_BYTES, stream, p);
    }
    return launch(step == 1 ? moe_fp8<true, 2> : moe_fp8<false, 2>, (uint32_t)n_sms, 384, SMEM_BYTES, stream, p);
}

cudaError_t dmk_moe_fp8(const struct dmk_moe_layer_args *args, cudaStream_t stream)
{
    cudaError_t err = cudaSuccess;
    for (uint32_t step = 0; step < 3 && err == cudaSuccess; step++) {
        err = dmk_moe_fp8_step(args, step, stream);
    }
    return err;
}
