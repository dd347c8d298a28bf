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

#include "kernels/cuda/moe_fp8.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/pack.h"

namespace
{

using namespace dmk;

constexpr uint32_t N_STAGES = 5;
constexpr uint32_t N_SHIFTS = DMK_FP8PACK_SHIFT_HIGH - DMK_FP8PACK_SHIFT_LOW + 1;
constexpr uint32_t FEW_TOKENS = 48; /* an expert's on the average, for which four warpgroups multiply */
constexpr uint32_t W_BYTES = DMK_FP8PACK_PIECE_BYTES; /* a tile of 128 rows, 128 columns */
constexpr uint32_t STAGE_TOKENS = 2 * W_BYTES;
constexpr uint32_t STAGE_SCALES = STAGE_TOKENS + N_MAX * 128;
constexpr uint32_t STAGE = STAGE_SCALES + 1024;
constexpr uint32_t SMEM_STAGES = 0;
constexpr uint32_t SMEM_IMAGE = N_STAGES * STAGE;          /* [N_MAX][128] quantised z */
constexpr uint32_t SMEM_AMAX = SMEM_IMAGE + N_MAX * 128;   /* [16][N_MAX/2] words */
constexpr uint32_t SMEM_INV = SMEM_AMAX + 16 * N_MAX * 2;  /* [N_MAX] */
constexpr uint32_t SMEM_BARS = SMEM_INV + N_MAX * 4;
constexpr uint32_t SMEM_TABLE = SMEM_BARS + N_STAGES * 16;
constexpr uint32_t SMEM_CODES = SMEM_TABLE + 2 * (MAX_EXPERTS + 1) * 4; /* [N_SHIFTS][8] bytes */
constexpr uint32_t SMEM_BYTES = SMEM_CODES + N_SHIFTS * 8 + 1024;
static_assert(SMEM_BYTES <= 232448, "shared memory");

constexpr uint32_t BAR_MATH = 1;

struct params {
    const uint8_t *w;       /* packed */
    const float *w_scales;  /* [n_experts][n_tiles][n_kb] */
    const uint16_t *bias;   /* [n_experts][rows] */
    const uint8_t *in;      /* [n_kb][n_positions][128] */
    const float *in_scales; /* [n_kb][n_positions] */
    uint8_t *z;             /* gate_up: quantised */
    float *z_scales;
    float *y; /* down */
    const uint32_t *expert_begin;
    uint32_t n_experts, n_positions;
    uint32_t rows, n_tiles, n_kb;
    float alpha, limit;
    uint32_t width_max; /* of a tile of tokens */
};

/* 1 / (1 + e^-x) by the hardware's approximations. What they flush to zero does not change the sum or the quotient. */
__device__ __forceinline__ float sigmoid(float x)
{
    float e, y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-x * 1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + e));
    return y;
}

/* --- the work of the device --- */

struct item {
    uint32_t expert, part; /* part: pair of row tiles */
    uint32_t position;     /* of the tile's first token */
    uint32_t slot;
    uint32_t width;
    int32_t n_valid; /* may be 0 or less */
};

/* The items of a block: every n-th, ordered by expert, rows, tokens. */
struct run {
    uint32_t at, end, expert;
    __device__ run(const uint32_t *table, uint32_t n_experts, uint32_t n_parts)
        : at(blockIdx.x), end(table[n_experts] * n_parts), expert(0)
    {
    }
    __device__ __forceinline__ void next()
    {
        at += gridDim.x;
    }
    __device__ __forceinline__ struct item get(const struct params &p, const uint32_t *table,
                                               const uint32_t *pos, uint32_t n_parts)
    {
        while (at >= table[expert + 1] * n_parts) {
            expert++;
        }
        uint32_t n = p.expert_begin[expert + 1] - p.expert_begin[expert];
        uint32_t n_tiles = table[expert + 1] - table[expert];
        uint32_t in = at - table[expert] * n_parts, tile = in % n_tiles;
        struct item item;
        item.expert = expert;
        item.part = in / n_tiles;
        item.width = tile_width(n, n_tiles);
        item.position = pos[expert] + tile * item.width;
        item.slot = p.expert_begin[expert] + tile * item.width;
        item.n_valid = (int32_t)n - (int32_t)(tile * item.width);
        item.n_valid = item.n_valid > (int32_t)item.width ? (int32_t)item.width : item.n_valid;
        return item;
    }
};

struct ring {
    uint32_t slot, phase;
    __device__ __forceinline__ void next()
    {
        if (++slot == N_STAGES) {
            slot = 0;
            phase ^= 1;
        }
    }
};

/* --- copying --- */

__device__ __forceinline__ void produce(const struct params &p, const uint32_t *table, const uint32_t *pos, uint32_t smem)
{
    const uint32_t n_parts = (p.n_tiles + 1) / 2;
    const uint64_t policy = dmk_policy_evict_normal();
    struct ring ring = {0, 0};
    for (struct run run(table, p.n_experts, n_parts); run.at < run.end; run.next()) {
        struct item item = run.get(p, table, pos, n_parts);
        uint32_t tile = item.expert * p.n_tiles + 2 * item.part;
        uint32_t n_subs = 2 * item.part + 1 < p.n_tiles ? 2 : 1;
        for (uint32_t kb = 0; kb < p.n_kb; kb++) {
            uint32_t full = smem + SMEM_BARS + ring.slot * 16;
            uint32_t stage = smem + SMEM_STAGES + ring.slot * STAGE;
            dmk_mbar_wait(full + 8, ring.phase ^ 1);
            dmk_mbar_expect(full, n_subs * W_BYTES + item.width * 132);
            for (uint32_t sub = 0; sub < n_subs; sub++) {
                dmk_bulk_load(stage + sub * W_BYTES,
                          p.w + ((uint64_t)(tile + sub) * p.n_kb + kb) * W_BYTES, W_BYTES, full, policy);
            }
            uint64_t at = (uint64_t)kb * p.n_positions + item.position;
            dmk_bulk_load(stage + STAGE_TOKENS, p.in + at * 128, item.width * 128, full, policy);
            dmk_bulk_load(stage + STAGE_SCALES, p.in_scales + at, item.width * 4, full, policy);
            ring.next();
        }
    }
}

/* --- multiplying --- */

/* Scales of the lane's tokens in groups of 16: 2t, 2t + 1, 8 + 2t, 8 + 2t + 1. */
template <int N, int FIRST, int LAST>
__device__ __forceinline__ void load_scales(float (&scale)[N / 4], uint32_t at)
{
#pragma unroll
    for (int i = FIRST; i < LAST; i++) {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(scale[4 * i]), "=f"(scale[4 * i + 1]), "=f"(scale[4 * i + 2]),
                       "=f"(scale[4 * i + 3])
                     : "r"(at + i * 64));
    }
}

template <int N> __device__ __forceinline__ void multiply_by(float (&acc)[N], float factor)
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        acc[i] *= factor;
    }
}

/* a / b of powers of two. */
__device__ __forceinline__ float ratio_of_powers(float a, float b)
{
    return __uint_as_float(__float_as_uint(a) - __float_as_uint(b) + 0x3f800000u);
}

/* Four wgmma: raw = W x of 64 rows and one block of K. `b` is the low half of a descriptor. */
template <int N>
__device__ __forceinline__ void issue(float (&raw)[N / 2], const uint32_t (&a)[16], uint32_t b)
{
    dmk_wgmma_hold(raw);
    dmk_wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        dmk_wgmma_e4m3<N>(raw, a + 4 * k, dmk_wgmma_desc(b + k * 2), k != 0);
    }
    dmk_wgmma_commit();
}

/* The E4M3 bytes of magnitudes 0 to 3 and 4 to 7 of a group: number j is 0, 1/2, 1, 3/2, 2, 3, 4, 6 times 2^shift. */
__device__ __forceinline__ uint2 codes_of(int shift)
{
    const float one = __uint_as_float((uint32_t)(127 + shift) << 23);
    return make_uint2(e4m3_pair(0.0f, 0.5f * one) | e4m3_pair(one, 1.5f * one) << 16,
                      e4m3_pair(2.0f * one, 3.0f * one) | e4m3_pair(4.0f * one, 6.0f * one) << 16);
}

/* Bytes of b:a by the nibbles of `which`; unlike __byte_perm's these are not masked, so their fourth bits are zero. */
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t which)
{
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(which));
    return d;
}

/* A of 64 rows and one block of K. A number is looked up among the eight bytes of its group by a byte permutation,
 * which takes four magnitudes at a time; then come the signs. `table` has the eight bytes of every shift. */
__device__ __forceinline__ void expand(uint32_t (&a)[16], uint32_t codes, uint32_t shifts, uint32_t table)
{
    const uint2 shift = dmk_lds64(shifts);
    const uint4 first = dmk_lds128(codes), second = dmk_lds128(codes + 2048);
    const uint32_t word[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    uint2 code[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        code[i] = dmk_lds64(table + permute(i % 2 ? shift.y : shift.x, 0, 0x4440 + i / 2));
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t mags = word[i] & 0x77777777u;
        a[i / 2 * 4 + i % 2] = permute(code[i].x, code[i].y, mags) | (word[i] & 0x80808080u);
        a[i / 2 * 4 + i % 2 + 2] = permute(code[i].x, code[i].y, mags >> 16) | (word[i] << 4 & 0x80808080u);
    }
}

/* acc[s] += W x of this warpgroup's 64 rows of its row tile s and N tokens, for the first n_subs of its tiles; acc
 * comes with the bias. Inside, acc counts in units of the weights' scale: as scales are powers of two this changes
 * no bit, and there is something to multiply only where a block's scale is another than the last one's.
 */
template <int WGS, int N>
__device__ __forceinline__ void multiply(const struct params &p, const struct item &item, uint32_t n_subs,
                                         uint32_t smem, struct ring &ring, float (&acc)[4 / WGS][N / 2])
{
    constexpr int SUBS = 4 / WGS, FIRST = N > 112 ? 4 : N / 16; /* scales loaded early: registers are short */
    const uint32_t lane_scales = STAGE_SCALES + threadIdx.x % 4 * 16, thread = threadIdx.x - 128;
    const uint32_t wg = thread / 128, first = WGS == 4 ? wg / 2 : 0;
    const uint32_t lane_codes = first * W_BYTES + wg % 2 * 4096 + thread % 128 * 16;
    const uint32_t lane_shifts = first * W_BYTES + DMK_FP8PACK_CODE_BYTES + thread % 256 / 32 * 64 + thread % 32 / 4 * 8;
    const uint32_t tile = 2 * item.part + first;
    const uint32_t lane = threadIdx.x % 32;
    float w_scales[SUBS], unit[SUBS]; /* a lane holds the weights' scale of its block of K */
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++) {
        const uint32_t row_tile = tile + sub < p.n_tiles ? tile + sub : p.n_tiles - 1;
        const float *from = p.w_scales + ((uint64_t)item.expert * p.n_tiles + row_tile) * p.n_kb;
        w_scales[sub] = __ldg(from + (lane < p.n_kb ? lane : 0));
        unit[sub] = __shfl_sync(0xffffffffu, w_scales[sub], 0);
        multiply_by(acc[sub], ratio_of_powers(1.0f, unit[sub]));
    }
    for (uint32_t kb = 0; kb < p.n_kb; kb++) {
        const uint32_t stage = smem + SMEM_STAGES + ring.slot * STAGE, full = smem + SMEM_BARS + ring.slot * 16;
        const uint32_t tokens = __shfl_sync(0xffffffffu, dmk_wgmma_low(stage + STAGE_TOKENS), 0);
        dmk_mbar_wait(full, ring.phase);
#pragma unroll
        for (uint32_t sub = 0; sub < SUBS; sub++) {
            float raw[N / 2], scale[N / 4];
            uint32_t a[16];
            if (sub >= n_subs) {
                continue;
            }
            expand(a, stage + sub * W_BYTES + lane_codes, stage + sub * W_BYTES + lane_shifts, smem + SMEM_CODES);
            issue<N>(raw, a, tokens);
            load_scales<N, 0, FIRST>(scale, stage + lane_scales);
            const float w_scale = __shfl_sync(0xffffffffu, w_scales[sub], kb);
            if (__builtin_expect(w_scale != unit[sub], 0)) {
                multiply_by(acc[sub], ratio_of_powers(unit[sub], w_scale));
                unit[sub] = w_scale;
            }
            dmk_wgmma_wait<0>();
            dmk_wgmma_hold(raw);
            load_scales<N, FIRST, N / 16>(scale, stage + lane_scales);
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                acc[sub][i] = fmaf(raw[i], scale[i / 4 * 2 + i % 2], acc[sub][i]);
            }
        }
        dmk_mbar_arrive_warp(full + 8);
        ring.next();
    }
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++) {
        multiply_by(acc[sub], unit[sub]);
    }
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
        uint32_t pair = e4m3_pair(__uint_as_float(z[i] << 16) * inv[token],
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
    const uint32_t first = item.part * 256 + tid / 128 * 64;
    const uint32_t n_subs = first >= p.rows ? 0 : first + 128 < p.rows ? SUBS : 1;
    float acc[SUBS][N / 2];
#pragma unroll
    for (uint32_t sub = 0; sub < SUBS; sub++) {
        uint32_t row = row0 + sub * 128;
        start<N>(acc[sub], bias_of(p, item.expert, row), bias_of(p, item.expert, row + 8));
    }
    multiply<WGS, N>(p, item, n_subs, smem, ring, acc);
#pragma unroll
    for (uint32_t sub = 0; sub < SUBS; sub++) {
        uint32_t row = row0 + sub * 128;
        float *y = p.y + (uint64_t)item.slot * p.rows + row;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            int32_t token = i / 2 * 8 + 2 * t + i % 2;
            if (token < item.n_valid && row < p.rows) {
                y[(uint64_t)token * p.rows] = acc[sub][i / 2 * 4 + i % 2];
            }
            if (token < item.n_valid && row + 8 < p.rows) {
                y[(uint64_t)token * p.rows + 8] = acc[sub][i / 2 * 4 + 2 + i % 2];
            }
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
