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

#include "kernels/cuda/moe_mxfp4.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/pack.h"

namespace
{

using namespace dmk;

constexpr uint32_t N_GROUPS = DMK_MXPACK_SPLITS;
constexpr uint32_t N_WORKERS = N_GROUPS * 128;
constexpr uint32_t N_THREADS = N_WORKERS + 32;
constexpr uint32_t STAGE = DMK_MXPACK_STAGE_BYTES;
constexpr uint32_t MAX_EXPERTS = 128;
constexpr uint32_t SMEM_MAX = 232448;

/* Of the ring: with a fifth, steps of 16 to 128 tokens took 2% longer (docs/PERF.md). */
constexpr uint32_t MAX_STAGES = 4;

/* Named barriers, one a group; 0 is __syncthreads. */
constexpr uint32_t BAR_GROUP = 1;

struct product {
    const uint8_t *packed;
    const uint16_t *bias;
    const uint16_t *in; /* [*][cols] bf16 */
    void *out;
    uint32_t rows, cols;
    uint32_t n_tiles;  /* of 64 rows */
    uint32_t n_stages; /* of 960 columns */
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
    static constexpr uint32_t N_SUMS = N < 24 ? 2 : 1; /* buffers of partial sums */
    /* Where there is room for the sums of the group that adds them as well, it does so only after its next item. */
    static constexpr bool LATE = N == 8;
    static constexpr uint32_t SUMS = (LATE ? N_GROUPS : N_GROUPS - 1) * 128 * (N / 2) * 4;
    uint32_t tokens, sums, bars, sum_bars, table, begin, stages;
    uint32_t n_stages;
    __host__ __device__ layout(uint32_t k_stages)
    {
        tokens = 0;
        sums = tokens + k_stages * 3 * N_GROUPS * N * 128;
        bars = sums + N_SUMS * SUMS;
        sum_bars = bars + 2 * 16 * 8; /* room for 16 stages */
        table = sum_bars + 2 * 2 * 8;
        begin = table + (MAX_EXPERTS + 1) * 4;
        stages = (begin + (MAX_EXPERTS + 1) * 4 + 127) / 128 * 128;
        uint32_t left = SMEM_MAX - 1024 - stages;
        n_stages = left / STAGE > MAX_STAGES ? MAX_STAGES : left / STAGE;
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

/* The items of a block, in order: tiles of tokens outside, rows inside. */
struct run {
    uint32_t left;                  /* items from this one on */
    uint32_t expert, tile, row_tile; /* the tile of tokens counts over all experts */
    __device__ run(const uint32_t *table, uint32_t n_experts, uint32_t n_row_tiles)
    {
        const uint64_t n = (uint64_t)table[n_experts] * n_row_tiles;
        const uint32_t at = (uint32_t)(n * blockIdx.x / gridDim.x);
        left = (uint32_t)(n * (blockIdx.x + 1) / gridDim.x) - at;
        tile = at / n_row_tiles;
        row_tile = at % n_row_tiles;
        /* The last expert that begins at or before the tile. */
        uint32_t low = 0, high = n_experts;
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
    __device__ __forceinline__ void next(const uint32_t *table, uint32_t n_row_tiles)
    {
        left--;
        if (++row_tile == n_row_tiles) {
            row_tile = 0;
            tile++;
            while (left > 0 && tile >= table[expert + 1]) {
                expert++;
            }
        }
    }
};

/* One thread: all weights of the block's items, in order. */
__device__ void produce(const struct params &p, const struct product &m, const uint32_t *table,
                        uint32_t stages, uint32_t bars, struct ring &ring)
{
    uint64_t policy = dmk_policy_evict_first();
    for (struct run run(table, p.n_experts, m.n_tiles); run.left > 0; run.next(table, m.n_tiles)) {
        const uint8_t *src =
            m.packed + ((uint64_t)run.expert * m.n_tiles + run.row_tile) * m.n_stages * STAGE;
        for (uint32_t s = 0; s < m.n_stages; s++) {
            uint32_t full = bars + ring.slot * 16, empty = full + 8;
            dmk_mbar_wait(empty, ring.phase ^ 1);
            dmk_mbar_expect(full, STAGE);
            dmk_bulk_load(stages + ring.slot * STAGE, src + (uint64_t)s * STAGE, STAGE, full, policy);
            ring.next();
        }
    }
}

/* A group brings its columns of N tokens: of each stage, 24 pieces of 16 bytes. */
template <int N, bool GATE_UP>
__device__ void load_tokens(const struct params &p, const struct product &m, uint32_t slot0,
                            uint32_t n_valid, uint32_t tokens)
{
    uint32_t group = threadIdx.x / 128, thread = threadIdx.x % 128;
    for (uint32_t col = thread; col < 24 * m.n_stages; col += 128) {
        uint32_t s = col / 24, c = col % 24;
        uint32_t k = s * DMK_MXPACK_STAGE_COLS + group * 192 + c * 8;
        uint32_t dst = tokens + ((s * N_GROUPS + group) * 3 + c / 8) * N * 128;
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
                dmk_sts128(dst + (r0 + r) * 128 + ((c % 8) ^ r) * 16, v[r]);
            }
        }
    }
}

/* What a lane holds of the stage that it multiplies by, or already of the next. */
struct held {
    uint4 codes[3];
    uint32_t scales[3];
};

/* The ring as a lane sees it: the stage that comes next, and where its own bytes of slot 0 lie. */
struct feed {
    struct ring ring;
    uint32_t bars, codes, scales;

    /* A third of the lane's part into registers, one after the other: the first waits for the stage, the last gives it
     * back and goes on to the next. */
    __device__ __forceinline__ void take(int q, struct held &held)
    {
        const uint32_t full = bars + ring.slot * 16, at = ring.slot * STAGE;
        if (q == 0) {
            dmk_mbar_wait(full, ring.phase);
        }
        held.codes[q] = dmk_lds128(codes + at + q * 2048);
        held.scales[q] = dmk_lds32(scales + at + q * 4);
        if (q == 2) {
            dmk_mbar_arrive_warp(full + 8);
            ring.next();
        }
    }
};

/* 192 columns of a warp's 16 rows: acc += W x. Meanwhile the next stage, if there is one, takes their place in `held`
 * third by third. */
template <int N>
__device__ __forceinline__ void multiply_stage(float (&acc)[N / 2], struct held &held, uint32_t tokens,
                                               struct feed &feed, bool more)
{
    uint32_t b[2][N / 8][4];
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        dmk_ldmatrix_x4(b[0][n], tokens + n * 1024);
    }
#pragma unroll
    for (int q = 0; q < 3; q++) {
        const uint32_t word[4] = {held.codes[q].x, held.codes[q].y, held.codes[q].z, held.codes[q].w};
        const uint32_t scales[2] = {scale_pair<0>(held.scales[q]), scale_pair<1>(held.scales[q])};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = 2 * q + half + 1;
            if (at < 6) {
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
                    /* Pieces 4 to 7 of a swizzled row are 64 bytes from pieces 0 to 3. */
                    dmk_ldmatrix_x4(b[at % 2][n], (at % 2 ? tokens ^ 64 : tokens) + at / 2 * N * 128 + n * 1024);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t a[4];
                decode(word[2 * half + i], a);
                a[0] = scaled<false>(a[0], scales[half]);
                a[1] = scaled<true>(a[1], scales[half]);
                a[2] = scaled<false>(a[2], scales[half]);
                a[3] = scaled<true>(a[3], scales[half]);
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
                    dmk_mma_bf16(acc + 4 * n, a, b[half][n][2 * i], b[half][n][2 * i + 1]);
                }
            }
        }
        if (more) {
            feed.take(q, held);
        }
    }
}

/* All stages of an item. */
template <int N>
__device__ __forceinline__ void multiply(float (&acc)[N / 2], struct held &held, uint32_t tokens, struct feed &feed,
                                         uint32_t n_stages, bool last_item)
{
    const uint32_t last = tokens + (n_stages - 1) * 3 * N_GROUPS * N * 128;
    for (; tokens != last; tokens += 3 * N_GROUPS * N * 128) {
        multiply_stage<N>(acc, held, tokens, feed, true);
    }
    multiply_stage<N>(acc, held, tokens, feed, !last_item);
}

/* Where the groups' sums of an item meet. `bars`: for each buffer a barrier of those who wrote and one of those who
 * read. */
template <int N> struct meeting {
    uint32_t reader, phase, at, full, empty;
    __device__ __forceinline__ meeting(uint32_t sums, uint32_t bars, uint32_t n_done)
    {
        const uint32_t buf = n_done % layout<N>::N_SUMS;
        reader = n_done % N_GROUPS;
        phase = n_done / layout<N>::N_SUMS;
        at = sums + buf * layout<N>::SUMS + threadIdx.x % 128 * 16;
        full = bars + buf * 16;
        empty = full + 8;
    }
    __device__ __forceinline__ uint32_t slot(uint32_t group) const
    {
        return at + (layout<N>::LATE ? group : group - (group > reader)) * (N / 8) * 2048;
    }
    /* The reader waits too: a group may be ahead of the others by more items than there are buffers, and would
     * then take an older phase of `full` for its own, since a wait tells phases by their parity. */
    __device__ __forceinline__ void give(const float (&acc)[N / 2], uint32_t group) const
    {
        if (phase > 0) {
            dmk_mbar_wait(empty, (phase - 1) % 2);
        }
        if (layout<N>::LATE || group != reader) {
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                dmk_sts128(slot(group) + i * 2048,
                           make_uint4(__float_as_uint(acc[4 * i]), __float_as_uint(acc[4 * i + 1]),
                                      __float_as_uint(acc[4 * i + 2]), __float_as_uint(acc[4 * i + 3])));
            }
        }
        if (group != reader) {
            dmk_mbar_arrive_warp(full);
        }
    }
    /* acc becomes the sum, in the order of the groups. It holds the reader's own unless that lies with the others. */
    __device__ __forceinline__ void collect(float (&acc)[N / 2]) const
    {
        dmk_mbar_wait(full, phase % 2);
        float sum[N / 2];
#pragma unroll
        for (uint32_t g = 0; g < N_GROUPS; g++) {
            const bool own = !layout<N>::LATE && g == reader;
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                const uint4 v = dmk_lds128((own ? at : slot(g)) + i * 2048);
                const float other[4] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                                        __uint_as_float(v.w)};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float term = own ? acc[4 * i + j] : other[j];
                    sum[4 * i + j] = g == 0 ? term : sum[4 * i + j] + term;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            acc[i] = sum[i];
        }
        dmk_mbar_arrive_warp(empty);
    }
};

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
