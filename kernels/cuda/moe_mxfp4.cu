/* MXFP4 experts for few tokens (sm_90a): the weights stream past the tokens.
 *
 * A block of 21 warps is persistent. Warp 20 brings packed weights, 32640 bytes (64 rows x 960 columns) a
 * stage, through a ring of shared memory. The others are 5 groups of 4: a group takes 192 columns of
 * every stage, a warp 16 rows of them. While a lane multiplies by its codes of one stage it takes those of the
 * next into registers, a third at a time. Codes become bf16 in registers (shifts, masks, one exact multiplication by
 * the block's scale) and are the A operand of m16n8k16 products; B is the expert's tokens, which lie in shared memory
 * whole (N x K bf16) and are brought anew only when the expert or the tile of tokens changes. At the end of a 64-row
 * item the five partial sums meet in one group, each time another, always added in the order of the groups; it adds the
 * bias and finishes, with tiles of 8 tokens after its next item, when nobody is waited for. Products of a single warp
 * leave warps free to run apart; with those of a warpgroup the units waited for each other and for R2UR (docs/PERF.md).
 *
 * Work items are (expert, tile of N tokens, 64 rows), counted on the device; a block takes one contiguous
 * run of them. The fused kernel does gate_up's items, then down's: weights keep streaming while a block
 * waits for the experts whose z it needs. */
#include "kernels/cuda/moe.h"

#include "kernels/cuda/moe_mxfp4_multiply.cuh"
#include "kernels/cuda/moe_mxfp4_work.cuh"

namespace
{

/* Named barriers, one a group; 0 is __syncthreads. */
constexpr uint32_t BAR_GROUP = 1;

/* Bias of the lane's two packed rows as it is stored, loaded long before it is added: not to be touched before. */
template <bool GATE_UP>
__device__ __forceinline__ ushort2 load_bias(const struct product &m, const struct run &item)
{
    const uint32_t warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    const uint16_t *bias = m.bias + (uint64_t)item.expert * m.rows;
    const uint32_t low = GATE_UP ? item.row_tile * 64 + warp * 16 + 2 * g : item.row_tile * 64 + warp * 16 + g;
    const uint32_t high = GATE_UP ? low + 1 : low + 8;
    ushort2 v = make_ushort2(0, 0);
    if (low < m.rows) {
        v.x = __ldg(bias + low);
    }
    if (high < m.rows) {
        v.y = __ldg(bias + high);
    }
    return v;
}

/* One group: bias and SwiGLU, or bias alone. acc[4i + j] is token 8i + 2t + j of packed row 16w + g,
 * acc[4i + 2 + j] that of row 16w + g + 8. */
template <int N, bool GATE_UP>
__device__ __forceinline__ void finish(const struct params &p, const struct product &m,
                                       const float (&acc)[N / 2], uint32_t row_tile, ushort2 bias,
                                       uint32_t slot0, uint32_t n_valid)
{
    const uint32_t warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint32_t n_out = GATE_UP ? m.rows / 2 : m.rows;
    const float bias_low = __uint_as_float((uint32_t)bias.x << 16), bias_high = __uint_as_float((uint32_t)bias.y << 16);
    const uint32_t at = GATE_UP ? row_tile * 32 + warp * 8 + g : row_tile * 64 + warp * 16 + g;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const uint32_t token = i / 2 * 8 + 2 * t + i % 2;
        const float low = acc[i / 2 * 4 + i % 2] + bias_low, high = acc[i / 2 * 4 + 2 + i % 2] + bias_high;
        const uint64_t row = (uint64_t)(slot0 + token) * n_out;
        if (token >= n_valid) {
            continue;
        }
        if constexpr (GATE_UP) {
            float gate = fminf(low, p.limit), up = fminf(fmaxf(high, -p.limit), p.limit);
            if (at < n_out) {
                ((__nv_bfloat16 *)m.out)[row + at] =
                    __float2bfloat16_rn(gate * sigmoid(p.alpha * gate) * (up + 1.0f));
            }
        } else {
            if (at < n_out) {
                ((float *)m.out)[row + at] = low;
            }
            if (at + 8 < n_out) {
                ((float *)m.out)[row + at + 8] = high;
            }
        }
    }
}

/* The groups: all items of one product. FUSED: gate_up reports an expert's finished items, down
 * waits for all of them before it reads z. */
template <int N, bool GATE_UP, bool FUSED>
__device__ void consume(const struct params &p, const struct product &m, const uint32_t *table,
                        const uint32_t *begin, uint32_t smem, const layout<N> &at, struct ring &ring,
                        uint32_t &n_done)
{
    uint32_t group = threadIdx.x / 128, thread = threadIdx.x % 128;
    /* Where the lane's share of a stage and of the tokens begins. */
    const uint32_t warp = thread / 32, lane = thread % 32;
    const uint32_t codes = smem + group * 3 * 2048 + thread * 16;
    const uint32_t scales = smem + DMK_MXPACK_CODE_BYTES + group * 384 + warp * 96 + lane / 4 * 12;
    const uint32_t tokens = smem + at.tokens + group * 3 * N * 128 + lane % 8 * 128 +
                            ((lane / 8) ^ (lane % 8)) * 16;
    uint32_t have_expert = MAX_EXPERTS, have_tile = 0xffffffffu, slot0 = 0, n_valid = 0;
    /* A report waits until all that the thread wrote has arrived, so there is one for all of the group's items of an
     * expert. */
    uint32_t n_unreported = 0;
    auto report = [&](uint32_t expert) {
        if (n_unreported > 0) {
            dmk_named_barrier(BAR_GROUP + group, 128);
            if (thread == 0) {
                add_release(p.done + expert, n_unreported);
            }
            n_unreported = 0;
        }
    };
    /* The item that this group has to finish. */
    bool pending = false;
    uint32_t late_row_tile = 0;
    ushort2 bias = make_ushort2(0, 0);
    auto finish_late = [&]() {
        if (pending) {
            float sum[N / 2];
            meeting<N>(smem + at.sums, smem + at.sum_bars, n_done - 1).collect(sum);
            finish<N, GATE_UP>(p, m, sum, late_row_tile, bias, slot0, n_valid);
            n_unreported++;
            pending = false;
        }
    };
    struct run run(table, p.n_experts, m.n_tiles);
    struct feed feed = {ring, smem + at.bars, codes + at.stages, scales + at.stages};
    struct held held = {};
    if (run.left > 0) {
#pragma unroll
        for (int q = 0; q < 3; q++) {
            feed.take(q, held);
        }
    }
    for (; run.left > 0; run.next(table, m.n_tiles)) {
        if (run.tile != have_tile) {
            finish_late();
            if (FUSED && !GATE_UP && run.expert != have_expert) {
                uint32_t want = (table[run.expert + 1] - table[run.expert]) * p.gate_up.n_tiles;
                if (thread == 0) {
                    while (load_acquire(p.done + run.expert) < want) {
                        __nanosleep(20);
                    }
                }
            }
            if (FUSED && GATE_UP && run.expert != have_expert) {
                report(have_expert);
            }
            have_expert = run.expert;
            have_tile = run.tile;
            slot0 = begin[run.expert] + (run.tile - table[run.expert]) * N;
            n_valid = begin[run.expert + 1] - slot0;
            dmk_named_barrier(BAR_GROUP + group, 128);
            load_tokens<N, GATE_UP>(p, m, slot0, n_valid, smem + at.tokens);
            dmk_named_barrier(BAR_GROUP + group, 128);
        }
        float acc[N / 2] = {};
        const bool mine = n_done % N_GROUPS == group;
        if (mine) {
            bias = load_bias<GATE_UP>(m, run);
        }
        multiply<N>(acc, held, tokens, feed, m.n_stages, run.left == 1);
        finish_late();
        const meeting<N> here(smem + at.sums, smem + at.sum_bars, n_done);
        here.give(acc, group);
        if (layout<N>::LATE) {
            pending = mine;
            late_row_tile = run.row_tile;
        } else if (mine) {
            here.collect(acc);
            finish<N, GATE_UP>(p, m, acc, run.row_tile, bias, slot0, n_valid);
            n_unreported++;
        }
        n_done++;
    }
    finish_late();
    ring = feed.ring;
    if (FUSED && GATE_UP) {
        report(have_expert);
    }
}

/* The block that comes last puts the counters back. */
__device__ void reset_counters(const struct params &p)
{
    __syncthreads();
    int last = 0;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(p.done + p.n_experts, 1) == gridDim.x - 1;
    }
    if (__syncthreads_or(last)) {
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
    uint32_t smem = (dmk_smem_u32(raw) + 1023) / 1024 * 1024;
    uint32_t k_stages = WHICH == GATE_UP_ONLY ? p.gate_up.n_stages : p.down.n_stages;
    if (WHICH == FUSED_BOTH && p.gate_up.n_stages > k_stages) {
        k_stages = p.gate_up.n_stages;
    }
    const layout<N> at(k_stages);
    uint32_t *table = (uint32_t *)(raw + (smem - dmk_smem_u32(raw)) + at.table);
    uint32_t *begin = (uint32_t *)(raw + (smem - dmk_smem_u32(raw)) + at.begin);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < at.n_stages; i++) {
            dmk_mbar_init(smem + at.bars + i * 16, 1);
            dmk_mbar_init(smem + at.bars + i * 16 + 8, N_GROUPS * 4);
        }
        for (uint32_t i = 0; i < layout<N>::N_SUMS; i++) {
            dmk_mbar_init(smem + at.sum_bars + i * 16, (N_GROUPS - 1) * 4);
            dmk_mbar_init(smem + at.sum_bars + i * 16 + 8, 4);
        }
        dmk_mbar_init_fence();
    }
    dmk_pdl_wait();
    if (threadIdx.x < 32) {
        count_tiles<N>(p, table);
    } else if (threadIdx.x - 32 <= p.n_experts) {
        begin[threadIdx.x - 32] = p.expert_begin[threadIdx.x - 32];
    }
    __syncthreads();
    struct ring ring = {0, 0, at.n_stages};
    if (threadIdx.x / 32 == N_GROUPS * 4) {
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
            consume<N, true, WHICH == FUSED_BOTH>(p, p.gate_up, table, begin, smem, at, ring, n_done);
        }
        if (WHICH != GATE_UP_ONLY) {
            consume<N, false, WHICH == FUSED_BOTH>(p, p.down, table, begin, smem, at, ring, n_done);
        }
    }
    dmk_pdl_next();
    if (WHICH == FUSED_BOTH) {
        reset_counters(p);
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
    switch (tile != 0 ? tile : dmk_moe_mxfp4_tile(args->n_rows, args->k, args->n_experts)) {
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

uint32_t dmk_moe_mxfp4_tile(uint32_t n_rows, uint32_t k, uint32_t n_experts)
{
    const uint32_t mean = n_rows * k / n_experts;
    return mean <= 4 ? 8 : mean <= 10 ? 16 : 24;
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
