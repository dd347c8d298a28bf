/* Rows of x as the FP8 experts read them: E4M3 per token and 128 channels, a copy for each of a row's slots. */
#include "kernels/cuda/moe_fp8.cuh"

namespace
{

using namespace dmk;

struct quant_params {
    const uint16_t *x;
    const uint32_t *expert_begin, *row_slots;
    uint8_t *out;
    float *scales;
    uint32_t n_rows, k, n_experts, cols, n_positions;
};

constexpr uint32_t QUANT_THREADS = 384;

/* A block takes whole rows; 16 threads a group of 128 columns; every slot of the row gets the same bytes. */
__global__ void __launch_bounds__(QUANT_THREADS) moe_fp8_quantise(const __grid_constant__ quant_params p)
{
    __shared__ uint32_t table[MAX_EXPERTS + 1], pos[MAX_EXPERTS + 1], begin[MAX_EXPERTS + 1];
    __shared__ uint32_t position[16];
    dmk_pdl_wait();
    if (threadIdx.x < 32) {
        count_tiles(p.expert_begin, p.n_experts, table, pos, N_MAX);
    }
    for (uint32_t e = threadIdx.x; e <= p.n_experts; e += QUANT_THREADS) {
        begin[e] = p.expert_begin[e];
    }
    __syncthreads();
    const uint32_t lane = threadIdx.x % 16, n_kb = (p.cols + 127) / 128;
    for (uint32_t row = blockIdx.x; row < p.n_rows; row += gridDim.x) {
        if (threadIdx.x < p.k) {
            uint32_t slot = p.row_slots[(uint64_t)row * p.k + threadIdx.x], low = 0, high = p.n_experts;
            while (high - low > 1) {
                uint32_t mid = (low + high) / 2;
                if (begin[mid] <= slot) {
                    low = mid;
                } else {
                    high = mid;
                }
            }
            position[threadIdx.x] = slot == 0xffffffffu ? slot : slot - begin[low] + pos[low];
        }
        __syncthreads();
        for (uint32_t kb = threadIdx.x / 16; kb < (n_kb + 1) / 2 * 2; kb += QUANT_THREADS / 16) {
            uint32_t c = kb * 128 + lane * 8;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (c < p.cols) {
                v = *(const uint4 *)(p.x + (uint64_t)row * p.cols + c);
            }
            const uint32_t w[4] = {v.x, v.y, v.z, v.w};
            float f[8], amax = 0.0f, scale, inv;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                f[i] = __uint_as_float(i % 2 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16);
                amax = fmaxf(amax, fabsf(f[i]));
            }
#pragma unroll
            for (int d = 1; d < 16; d *= 2) {
                amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, d));
            }
            quant_scales(amax, &scale, &inv);
            uint2 q;
            q.x = dmk_e4m3_pair(f[0] * inv, f[1] * inv) | dmk_e4m3_pair(f[2] * inv, f[3] * inv) << 16;
            q.y = dmk_e4m3_pair(f[4] * inv, f[5] * inv) | dmk_e4m3_pair(f[6] * inv, f[7] * inv) << 16;
            for (uint32_t i = 0; i < p.k && kb < n_kb; i++) {
                if (position[i] == 0xffffffffu) {
                    continue;
                }
                uint64_t at = (uint64_t)kb * p.n_positions + position[i];
                *(uint2 *)(p.out + at * 128 + ((lane / 2) ^ (position[i] % 8)) * 16 + lane % 2 * 8) = q;
                if (lane == 0) {
                    p.scales[(uint64_t)kb * p.n_positions + scale_at(position[i])] = scale;
                }
            }
        }
        __syncthreads();
    }
    dmk_pdl_next();
}

} // namespace

cudaError_t dmk_moe_fp8_quantise(const struct dmk_moe_layer_args *a, const struct dmk_moe_fp8_layout *l,
                                 uint32_t n_sms, cudaStream_t stream)
{
    uint8_t *scratch = (uint8_t *)a->scratch;
    quant_params q = {};
    q.x = a->x;
    q.expert_begin = a->expert_begin;
    q.row_slots = a->row_slots;
    q.out = scratch + l->x;
    q.scales = (float *)(scratch + l->x_scales);
    q.n_rows = a->n_rows;
    q.k = a->k;
    q.n_experts = a->n_experts;
    q.cols = a->gate_up.cols;
    q.n_positions = l->n_positions;
    uint32_t grid = a->n_rows < n_sms * 4 ? a->n_rows : n_sms * 4;
    return launch(moe_fp8_quantise, grid, QUANT_THREADS, 0, stream, q);
}
