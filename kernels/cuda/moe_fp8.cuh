/* What the steps of the FP8 experts share: how tokens are cut into tiles, numbers, launching. */
#pragma once

#include "kernels/cuda/fp8.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/moe.h"

/* Step 0 of dmk_moe_fp8_step (moe_quant.cu). */
cudaError_t dmk_moe_fp8_quantise(const struct dmk_moe_layer_args *args, const struct dmk_moe_fp8_layout *layout,
                                 uint32_t n_sms, cudaStream_t stream);

namespace dmk
{

constexpr uint32_t N_MAX = 128;     /* tokens of a tile */
constexpr uint32_t WIDTH_STEP = 16; /* of token tiles */
constexpr uint32_t MAX_EXPERTS = 256;

__device__ __forceinline__ void quant_scales(float amax, float *scale, float *inv)
{
    amax = fmaxf(amax, 0x1p-100f);
    *scale = __fdiv_rn(amax, 448.0f);
    *inv = __fdiv_rn(448.0f, amax);
}

/* Where a block's scale of a position stands: the four that a thread needs of 16 tokens lie together. */
__device__ __forceinline__ uint32_t scale_at(uint32_t position)
{
    return (position & ~15u) | (position >> 1 & 3) << 2 | (position >> 3 & 1) << 1 | (position & 1);
}

/* How an expert's n tokens are cut: into the fewest tiles, each of a multiple of 16, the first ones 16 wider than the
 * last ones where it does not come out even. */
__device__ __forceinline__ uint32_t tile_count(uint32_t n, uint32_t width_max)
{
    return (n + width_max - 1) / width_max;
}

/* First token of a tile; that of tile n_tiles is n rounded up. */
__device__ __forceinline__ uint32_t tile_begin(uint32_t n, uint32_t n_tiles, uint32_t tile)
{
    const uint32_t steps = (n + WIDTH_STEP - 1) / WIDTH_STEP, wider = steps % n_tiles;
    return (tile * (steps / n_tiles) + (tile < wider ? tile : wider)) * WIDTH_STEP;
}

/* table[e]: tiles before expert e; pos[e]: its first position. One warp. */
__device__ __forceinline__ void count_tiles(const uint32_t *begin, uint32_t n_experts, uint32_t *table, uint32_t *pos,
                                            uint32_t width_max)
{
    uint32_t lane = threadIdx.x % 32, sum_tiles = 0, sum_pos = 0;
    for (uint32_t first = 0; first < n_experts; first += 32) {
        uint32_t e = first + lane, n = e < n_experts ? begin[e + 1] - begin[e] : 0;
        uint32_t tiles = tile_count(n, width_max), padded = (n + 15) / 16 * 16;
        uint32_t upto = tiles, upto_pos = padded;
        for (uint32_t i = 1; i < 32; i *= 2) {
            uint32_t a = __shfl_up_sync(0xffffffffu, upto, i);
            uint32_t b = __shfl_up_sync(0xffffffffu, upto_pos, i);
            upto += lane >= i ? a : 0;
            upto_pos += lane >= i ? b : 0;
        }
        if (e < n_experts) {
            table[e] = sum_tiles + upto - tiles;
            pos[e] = sum_pos + upto_pos - padded;
        }
        sum_tiles += __shfl_sync(0xffffffffu, upto, 31);
        sum_pos += __shfl_sync(0xffffffffu, upto_pos, 31);
    }
    if (lane == 0) {
        table[n_experts] = sum_tiles;
        pos[n_experts] = sum_pos;
    }
}

static inline uint32_t div_up(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

template <typename P>
static inline cudaError_t launch(void (*kernel)(P), uint32_t grid, uint32_t block, uint32_t smem, cudaStream_t stream,
                   const P &p)
{
    cudaError_t err =
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (err != cudaSuccess) {
        return err;
    }
    cudaLaunchAttribute attr = {};
    attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(block);
    config.dynamicSmemBytes = smem;
    config.stream = stream;
    config.attrs = &attr;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, p);
}

} // namespace dmk
