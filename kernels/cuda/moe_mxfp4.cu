/* MXFP4 experts for few tokens (sm_90a): the weights are the 64-row operand and stream past the tokens.
 *
 * A block of 13 warps is persistent. Warp 12 brings packed weights, 19584 bytes (64 rows x 576 columns) a
 * stage, through a ring of shared memory. Three warpgroups take 192 columns each of every stage: codes
 * become bf16 in registers (shifts, masks, one exact multiplication by the block's scale) and are the A
 * operand of wgmma; B is the expert's tokens, which lie in shared memory whole (N x K bf16) and are
 * brought anew only when the expert or the tile of tokens changes. At the end of a 64-row item the three
 * partial sums meet in the first warpgroup, always as (0 + 1) + 2, which adds the bias and finishes.
 *
 * Work items are (expert, tile of N tokens, 64 rows), counted on the device; a block takes one contiguous
 * run of them. The fused kernel does gate_up's items, then down's: weights keep streaming while a block
 * waits for the experts whose z it needs. */
#include "kernels/cuda/moe.h"

#include "kernels/cuda/moe_sm90.cuh"
#include "kernels/cuda/moe_wgmma.cuh"
#include "kernels/pack.h"

namespace
{

using namespace dmk;

constexpr uint32_t N_WG = 3;
constexpr uint32_t N_THREADS = N_WG * 128 + 32;
constexpr uint32_t STAGE = DMK_MXPACK_STAGE_BYTES;
constexpr uint32_t MAX_EXPERTS = 256;
constexpr uint32_t SMEM_MAX = 232448;
constexpr uint32_t CODE_MASK = 0x01c001c0u, SIGN_MASK = 0x80008000u;

/* Named barriers; 0 is __syncthreads. */
constexpr uint32_t BAR_PART_FULL = 1, BAR_PART_EMPTY = 3, BAR_WG = 5;

struct product {
    const uint8_t *packed;
    const uint16_t *bias;
    const uint16_t *in; /* [*][cols] bf16 */
    void *out;
    uint32_t rows, cols;
    uint32_t n_tiles;  /* of 64 rows */
    uint32_t n_stages; /* of 576 columns */
};

struct params {
    struct product gate_up, down;
    const uint32_t *expert_begin, *slot_row;
    uint32_t *done; /* [n_experts] finished items of gate_up, then one count of finished blocks */
    uint32_t n_experts;
    float alpha, limit;
};

/* Shared memory, from a 1024-byte boundary. */
template <int N> struct layout {
    uint32_t tokens, part, bars, table, stages;
    uint32_t n_stages;
    __host__ __device__ layout(uint32_t k_stages)
    {
        tokens = 0;
        part = tokens + k_stages * 9 * N * 128;
        bars = part + 2 * 2 * 128 * (N / 2) * 4;
        table = bars + 2 * 16 * 8;
        stages = (table + (MAX_EXPERTS + 2) * 4 + 127) / 128 * 128;
        uint32_t left = SMEM_MAX - 1024 - stages;
        n_stages = left / STAGE > 16 ? 16 : left / STAGE;
    }
};

/* Position in the ring. */
struct ring {
    uint32_t slot, phase, n;
    __device__ __forceinline__ void next()
    {
        if (++slot == n) {
            slot = 0;
            phase ^= 1;
        }
    }
};

/* Four numbers of a row and its neighbour 8 rows on, twice; see kernels/pack.c. The results count for
 * 2^126 times less than the codes. */
__device__ __forceinline__ void decode(uint32_t word, uint32_t (&a)[4])
{
    a[0] = word & (CODE_MASK | SIGN_MASK);
    a[1] = word << 3 & (CODE_MASK | SIGN_MASK);
    a[2] = (word << 6 & CODE_MASK) | (word << 2 & SIGN_MASK);
    a[3] = (word >> 3 & CODE_MASK) | (word << 1 & SIGN_MASK);
}

__device__ __forceinline__ uint32_t scaled(uint32_t pair, uint32_t scale)
{
    uint32_t out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(scale));
    return out;
}

/* Byte i of `bytes` as the exponent of two bf16. */
template <int I> __device__ __forceinline__ uint32_t scale_pair(uint32_t bytes)
{
    return __byte_perm(bytes, 0, 0x4040 | I << 8 | I) << 7;
}

__device__ __forceinline__ uint4 lds128(uint32_t addr)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(addr)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint32_t lds32(uint32_t addr)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
    return v;
}

__device__ __forceinline__ void sts128(uint32_t addr, uint4 v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ uint4 ldg128(const uint16_t *p)
{
    /* Past the first-level cache: z was written by other blocks of this launch. */
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

__device__ __forceinline__ float sigmoid(float x)
{
    return __fdividef(1.0f, 1.0f + __expf(-x));
}

/* Items before each expert. One warp. */
template <int N>
__device__ void count_tiles(const struct params &p, uint32_t *table)
{
    uint32_t lane = threadIdx.x % 32, sum = 0;
    for (uint32_t first = 0; first < p.n_experts; first += 32) {
        uint32_t e = first + lane, n = 0;
        if (e < p.n_experts) {
            n = (p.expert_begin[e + 1] - p.expert_begin[e] + N - 1) / N;
        }
        uint32_t upto = n;
        for (uint32_t i = 1; i < 32; i *= 2) {
            uint32_t left = __shfl_up_sync(0xffffffffu, upto, i);
            upto += lane >= i ? left : 0;
        }
        if (e < p.n_experts) {
            table[e] = sum + upto - n;
        }
        sum += __shfl_sync(0xffffffffu, upto, 31);
    }
    if (lane == 0) {
        table[p.n_experts] = sum;
    }
}

struct item {
    uint32_t expert, token_tile, row_tile;
};

/* The items of a block, in order: tiles of tokens outside, rows inside. */
struct run {
    uint32_t at, end, expert;
    __device__ run(const uint32_t *table, uint32_t n_experts, uint32_t n_row_tiles)
    {
        uint64_t n = (uint64_t)table[n_experts] * n_row_tiles;
        at = (uint32_t)(n * blockIdx.x / gridDim.x);
        end = (uint32_t)(n * (blockIdx.x + 1) / gridDim.x);
        /* The last expert that begins at or before the tile. */
        uint32_t tile = at / n_row_tiles, low = 0, high = n_experts;
        while (high - low > 1) {
            uint32_t mid = (low + high) / 2;
            if (table[mid] <= tile) {
                low = mid;
            } else {
                high = mid;
            }
        }
        expert = low;
    }
    __device__ __forceinline__ struct item get(const uint32_t *table, uint32_t n_row_tiles)
    {
        uint32_t tile = at / n_row_tiles;
        while (tile >= table[expert + 1]) {
            expert++;
        }
        return {expert, tile - table[expert], at % n_row_tiles};
    }
};

/* One thread: all weights of the block's items, in order. */
__device__ void produce(const struct params &p, const struct product &m, const uint32_t *table,
                        uint32_t stages, uint32_t bars, struct ring &ring)
{
    uint64_t policy = policy_evict_first();
    for (struct run run(table, p.n_experts, m.n_tiles); run.at < run.end; run.at++) {
        struct item item = run.get(table, m.n_tiles);
        const uint8_t *src =
            m.packed + ((uint64_t)item.expert * m.n_tiles + item.row_tile) * m.n_stages * STAGE;
        for (uint32_t s = 0; s < m.n_stages; s++) {
            uint32_t full = bars + ring.slot * 16, empty = full + 8;
            mbar_wait(empty, ring.phase ^ 1);
            mbar_expect(full, STAGE);
            bulk_load(stages + ring.slot * STAGE, src + (uint64_t)s * STAGE, STAGE, full, policy);
            ring.next();
        }
    }
}

/* A warpgroup brings its columns of N tokens: columns of each stage, 24 pieces of 16 bytes. */
template <int N, bool GATE_UP>
__device__ void load_tokens(const struct params &p, const struct product &m, uint32_t slot0,
                            uint32_t n_valid, uint32_t tokens)
{
    uint32_t wg = warpgroup(), thread = threadIdx.x % 128;
    for (uint32_t col = thread; col < 24 * m.n_stages; col += 128) {
        uint32_t s = col / 24, c = col % 24;
        uint32_t k = s * DMK_MXPACK_STAGE_COLS + wg * 192 + c * 8;
        uint32_t dst = tokens + (s * 9 + wg * 3 + c / 8) * N * 128;
#pragma unroll
        for (uint32_t r0 = 0; r0 < N; r0 += 8) {
            uint4 v[8];
#pragma unroll
            for (uint32_t r = 0; r < 8; r++) {
                v[r] = make_uint4(0, 0, 0, 0);
                if (r0 + r < n_valid && k < m.cols) {
                    uint32_t row = slot0 + r0 + r;
                    if (GATE_UP) {
                        row = p.slot_row[row];
                    }
                    v[r] = ldg128(m.in + (uint64_t)row * m.cols + k);
                }
            }
#pragma unroll
            for (uint32_t r = 0; r < 8; r++) {
                sts128(dst + (r0 + r) * 128 + ((c % 8) ^ r) * 16, v[r]);
            }
        }
    }
    fence_async_shared();
}

/* 192 columns of 64 rows: acc += W x. Releases the stage as soon as it lies in registers. */
template <int N>
__device__ __forceinline__ void multiply_stage(float (&acc)[N / 2], uint32_t stage, uint32_t empty,
                                               uint32_t desc)
{
    uint32_t wg = warpgroup(), thread = threadIdx.x % 128;
    uint32_t codes = stage + wg * 3 * 2048 + thread * 16;
    uint32_t scales =
        stage + DMK_MXPACK_CODE_BYTES + wg * 384 + thread / 32 * 96 + thread % 32 / 4 * 12;
    uint4 w[3];
    uint32_t sc[3];
#pragma unroll
    for (int q = 0; q < 3; q++) {
        w[q] = lds128(codes + q * 2048);
        sc[q] = lds32(scales + q * 4);
    }
#pragma unroll
    for (int q = 0; q < 3; q++) {
        uint32_t word[4] = {w[q].x, w[q].y, w[q].z, w[q].w};
        uint32_t scale[2][2] = {{scale_pair<0>(sc[q]), scale_pair<1>(sc[q])},
                                {scale_pair<2>(sc[q]), scale_pair<3>(sc[q])}};
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            decode(word[i], a[i]);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                a[i][j] = scaled(a[i][j], scale[i / 2][j % 2]);
            }
        }
        if (q == 2) {
            __syncwarp();
            if (thread % 32 == 0) {
                mbar_arrive(empty);
            }
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            wgmma_bf16_rs<N>(acc, a[i], wgmma_desc(desc + ((q * N * 128 + i * 32) >> 4)), 1);
        }
        wgmma_commit();
        wgmma_wait<1>();
    }
}

/* The sum of the three warpgroups, in the first; false in the others. */
template <int N> __device__ __forceinline__ bool join(float (&acc)[N / 2], uint32_t part, uint32_t n_done)
{
    uint32_t wg = threadIdx.x / 128, thread = threadIdx.x % 128, buf = n_done % 2;
    uint32_t at = part + buf * 2 * 128 * (N / 2) * 4 + thread * 16;
    if (wg > 0) {
        if (n_done >= 2) {
            bar_sync(BAR_PART_EMPTY + buf, N_WG * 128);
        }
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            sts128(at + ((wg - 1) * (N / 8) + i) * 2048,
                   make_uint4(__float_as_uint(acc[4 * i]), __float_as_uint(acc[4 * i + 1]),
                              __float_as_uint(acc[4 * i + 2]), __float_as_uint(acc[4 * i + 3])));
        }
        bar_arrive(BAR_PART_FULL + buf, N_WG * 128);
        return false;
    }
    bar_sync(BAR_PART_FULL + buf, N_WG * 128);
#pragma unroll
    for (int w = 0; w < 2; w++) {
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            uint4 v = lds128(at + (w * (N / 8) + i) * 2048);
            acc[4 * i] += __uint_as_float(v.x);
            acc[4 * i + 1] += __uint_as_float(v.y);
            acc[4 * i + 2] += __uint_as_float(v.z);
            acc[4 * i + 3] += __uint_as_float(v.w);
        }
    }
    return true;
}

/* One warpgroup: bias and SwiGLU, or bias alone. acc[4i + j] is token 8i + 2t + j of packed row 16w + g,
 * acc[4i + 2 + j] that of row 16w + g + 8. */
template <int N, bool GATE_UP>
__device__ __forceinline__ void finish(const struct params &p, const struct product &m,
                                       const float (&acc)[N / 2], const struct item &item,
                                       uint32_t slot0, uint32_t n_valid)
{
    uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    uint64_t bias0 = (uint64_t)item.expert * m.rows;
    if constexpr (GATE_UP) {
        uint32_t n_z = m.rows / 2, at = item.row_tile * 32 + warp * 8 + g;
        if (at >= n_z) {
            return;
        }
        uint32_t pair = *(const uint32_t *)(m.bias + bias0 + 2 * at);
        float gate_bias = __uint_as_float(pair << 16);
        float up_bias = __uint_as_float(pair & 0xffff0000u);
        __nv_bfloat16 *z = (__nv_bfloat16 *)m.out + (uint64_t)slot0 * n_z + at;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            uint32_t token = i / 2 * 8 + 2 * t + i % 2;
            float gate = fminf(acc[i / 2 * 4 + i % 2] + gate_bias, p.limit);
            float up = fminf(fmaxf(acc[i / 2 * 4 + 2 + i % 2] + up_bias, -p.limit), p.limit);
            float value = gate * sigmoid(p.alpha * gate) * (up + 1.0f);
            if (token < n_valid) {
                z[(uint64_t)token * n_z] = __float2bfloat16_rn(value);
            }
        }
        return;
    } else {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t at = item.row_tile * 64 + warp * 16 + g + 8 * h;
        if (at >= m.rows) {
            continue;
        }
        float bias = __uint_as_float((uint32_t)m.bias[bias0 + at] << 16);
        float *y = (float *)m.out + (uint64_t)slot0 * m.rows + at;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            uint32_t token = i / 2 * 8 + 2 * t + i % 2;
            if (token < n_valid) {
                y[(uint64_t)token * m.rows] = acc[i / 2 * 4 + 2 * h + i % 2] + bias;
            }
        }
    }
    }
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void add_release(uint32_t *p)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}

/* The three warpgroups: all items of one product. FUSED: gate_up reports an expert's finished items, down
 * waits for all of them before it reads z. */
template <int N, bool GATE_UP, bool FUSED>
__device__ void consume(const struct params &p, const struct product &m, const uint32_t *table,
                        uint32_t smem, const layout<N> &at, struct ring &ring, uint32_t &n_done)
{
    uint32_t wg = warpgroup(), thread = threadIdx.x % 128;
    uint32_t have_expert = MAX_EXPERTS, have_tile = 0;
    for (struct run run(table, p.n_experts, m.n_tiles); run.at < run.end; run.at++) {
        struct item item = run.get(table, m.n_tiles);
        uint32_t slot0 = p.expert_begin[item.expert] + item.token_tile * N;
        uint32_t n_valid = p.expert_begin[item.expert + 1] - slot0;
        if (item.expert != have_expert || item.token_tile != have_tile) {
            if (FUSED && !GATE_UP && item.expert != have_expert) {
                uint32_t want = (table[item.expert + 1] - table[item.expert]) * p.gate_up.n_tiles;
                if (thread == 0) {
                    while (load_acquire(p.done + item.expert) < want) {
                        __nanosleep(20);
                    }
                }
            }
            have_expert = item.expert;
            have_tile = item.token_tile;
            bar_sync(BAR_WG + wg, 128);
            load_tokens<N, GATE_UP>(p, m, slot0, n_valid, smem + at.tokens);
            bar_sync(BAR_WG + wg, 128);
        }
        float acc[N / 2] = {};
        uint32_t desc = wgmma_desc_low(smem + at.tokens + wg * 3 * N * 128);
        for (uint32_t s = 0; s < m.n_stages; s++) {
            uint32_t full = smem + at.bars + ring.slot * 16;
            mbar_wait(full, ring.phase);
            multiply_stage<N>(acc, smem + at.stages + ring.slot * STAGE, full + 8,
                              desc + ((s * 9 * N * 128) >> 4));
            ring.next();
        }
        wgmma_wait<0>();
        wgmma_hold(acc);
        if (join<N>(acc, smem + at.part, n_done)) {
            bar_arrive(BAR_PART_EMPTY + n_done % 2, N_WG * 128);
            finish<N, GATE_UP>(p, m, acc, item, slot0, n_valid);
            if (FUSED && GATE_UP) {
                bar_sync(BAR_WG, 128);
                if (thread == 0) {
                    add_release(p.done + item.expert);
                }
            }
        }
        n_done++;
    }
}

/* The block that comes last puts the counters back. */
__device__ void reset_counters(const struct params &p, uint32_t *last)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        *last = atomicAdd(p.done + p.n_experts, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (*last) {
        for (uint32_t e = threadIdx.x; e <= p.n_experts; e += N_THREADS) {
            p.done[e] = 0;
        }
    }
}

enum which { GATE_UP_ONLY, DOWN_ONLY, FUSED_BOTH };

template <int N, int WHICH>
__global__ void __launch_bounds__(N_THREADS, 1) moe_mxfp4(const __grid_constant__ struct params p)
{
    extern __shared__ uint8_t raw[];
    uint32_t smem = (smem_addr(raw) + 1023) / 1024 * 1024;
    uint32_t k_stages = WHICH == GATE_UP_ONLY ? p.gate_up.n_stages : p.down.n_stages;
    if (WHICH == FUSED_BOTH && p.gate_up.n_stages > k_stages) {
        k_stages = p.gate_up.n_stages;
    }
    const layout<N> at(k_stages);
    uint32_t *table = (uint32_t *)(raw + (smem - smem_addr(raw)) + at.table);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < at.n_stages; i++) {
            mbar_init(smem + at.bars + i * 16, 1);
            mbar_init(smem + at.bars + i * 16 + 8, N_WG * 4);
        }
        mbar_init_fence();
    }
    grid_wait();
    if (threadIdx.x < 32) {
        count_tiles<N>(p, table);
    }
    __syncthreads();
    struct ring ring = {0, 0, at.n_stages};
    if (threadIdx.x / 32 == N_WG * 4) {
        if (threadIdx.x % 32 == 0) {
            if (WHICH != DOWN_ONLY) {
                produce(p, p.gate_up, table, smem + at.stages, smem + at.bars, ring);
            }
            if (WHICH != GATE_UP_ONLY) {
                produce(p, p.down, table, smem + at.stages, smem + at.bars, ring);
            }
        }
        __syncwarp();
    } else {
        uint32_t n_done = 0;
        if (WHICH != DOWN_ONLY) {
            consume<N, true, WHICH == FUSED_BOTH>(p, p.gate_up, table, smem, at, ring, n_done);
        }
        if (WHICH != GATE_UP_ONLY) {
            consume<N, false, WHICH == FUSED_BOTH>(p, p.down, table, smem, at, ring, n_done);
        }
    }
    grid_launch_dependents();
    if (WHICH == FUSED_BOTH) {
        reset_counters(p, table + MAX_EXPERTS + 1);
    }
}

uint32_t div_up(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

struct params make_params(const struct dmk_moe_layer_args *a)
{
    struct params p = {};
    p.gate_up = {a->gate_up.packed, a->gate_up.bias, a->x, a->z, a->gate_up.rows, a->gate_up.cols,
                 div_up(a->gate_up.rows, DMK_MXPACK_ROWS),
                 div_up(a->gate_up.cols, DMK_MXPACK_STAGE_COLS)};
    p.down = {a->down.packed, a->down.bias, a->z, a->y, a->down.rows, a->down.cols,
              div_up(a->down.rows, DMK_MXPACK_ROWS), div_up(a->down.cols, DMK_MXPACK_STAGE_COLS)};
    p.expert_begin = a->expert_begin;
    p.slot_row = a->slot_row;
    p.done = (uint32_t *)a->scratch;
    p.n_experts = a->n_experts;
    p.alpha = a->alpha;
    p.limit = a->limit;
    return p;
}

template <int N, int WHICH>
cudaError_t launch_tile(const struct dmk_moe_layer_args *args, cudaStream_t stream)
{
    struct params p = make_params(args);
    int device, n_sms;
    cudaError_t err = cudaGetDevice(&device);
    if (err == cudaSuccess) {
        err = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
    }
    if (err == cudaSuccess) {
        err = cudaFuncSetAttribute((const void *)moe_mxfp4<N, WHICH>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_MAX);
    }
    if (err != cudaSuccess) {
        return err;
    }
    cudaLaunchAttribute attr = {};
    attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(n_sms);
    config.blockDim = dim3(N_THREADS);
    config.dynamicSmemBytes = SMEM_MAX;
    config.stream = stream;
    config.attrs = &attr;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, moe_mxfp4<N, WHICH>, p);
}

template <int WHICH>
cudaError_t launch(const struct dmk_moe_layer_args *args, uint32_t tile, cudaStream_t stream)
{
    uint32_t cols = args->gate_up.cols > args->down.cols ? args->gate_up.cols : args->down.cols;
    if (args->n_experts > MAX_EXPERTS || cols > 2880 || args->gate_up.cols % 32 != 0 ||
        args->down.cols % 32 != 0) {
        return cudaErrorInvalidValue;
    }
    if (args->n_rows == 0) {
        return cudaSuccess;
    }
    if (tile == 0) {
        /* A tile holds the mean of an expert's tokens and two standard deviations where it can. */
        uint32_t mean = args->n_rows * args->k / args->n_experts;
        tile = mean <= 4 ? 8 : mean <= 10 ? 16 : 24;
    }
    switch (tile) {
    case 8:
        return launch_tile<8, WHICH>(args, stream);
    case 16:
        return launch_tile<16, WHICH>(args, stream);
    case 24:
        return launch_tile<24, WHICH>(args, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace

size_t dmk_moe_mxfp4_scratch_bytes(uint32_t n_experts)
{
    return (n_experts + 1) * sizeof(uint32_t);
}

cudaError_t dmk_moe_mxfp4(const struct dmk_moe_layer_args *args, uint32_t tile, cudaStream_t stream)
{
    return launch<FUSED_BOTH>(args, tile, stream);
}

cudaError_t dmk_moe_mxfp4_gate_up(const struct dmk_moe_layer_args *args, uint32_t tile,
                                  cudaStream_t stream)
{
    return launch<GATE_UP_ONLY>(args, tile, stream);
}

cudaError_t dmk_moe_mxfp4_down(const struct dmk_moe_layer_args *args, uint32_t tile,
                               cudaStream_t stream)
{
    return launch<DOWN_ONLY>(args, tile, stream);
}
