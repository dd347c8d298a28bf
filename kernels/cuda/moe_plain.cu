/* Expert products that are right for every size: weights become bf16 in shared memory, tensor cores of one warp
 * (m16n8k16) multiply, 64 outputs x 64 slots a block. The order of sums is k ascending, 16 at a time. */
#include "kernels/cuda/cuda.h"
#include "kernels/dtype.h"

#define TILE  64
#define STEP  32
#define PITCH (STEP + 8)

struct plain_smem {
    uint16_t w[TILE][PITCH], x[TILE][PITCH];
};

/* Eight elements of a weight row from k on. */
__device__ __forceinline__ uint4 load_weights(const struct dmk_expert_weights &w, size_t row, uint32_t k)
{
    if (w.format == DMK_WEIGHT_BF16) {
        return *(const uint4 *)((const uint16_t *)w.blocks + row * w.cols + k);
    }
    const size_t block = row * (w.cols / DMK_MXFP4_BLOCK) + k / DMK_MXFP4_BLOCK;
    const uint32_t codes = *(const uint32_t *)(w.blocks + block * 16 + k % DMK_MXFP4_BLOCK / 2);
    const uint8_t e = w.scales[block];
    const float scale = __uint_as_float(e ? (uint32_t)e << 23 : 0x00400000u);
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t code = codes >> (8 * i + 4 * h) & 15, mag = code & 7;
            const float m = mag < 2 ? 0.5f * mag : __uint_as_float((mag / 2 + 126) << 23 | (mag & 1) << 22);
            v[h] = (code & 8 ? -m : m) * scale;
        }
        out[i] = dmk_pack_bf16(v[0], v[1]);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

/* d[n][..]: rows 16 warp + lane / 4 (+ 8) of the tile, slots 8n + lane % 4 * 2 (+ 1) of the chunk. */
__device__ void multiply(float (&d)[TILE / 8][4], struct plain_smem *s, const struct dmk_expert_weights &w,
                         size_t first_row, uint32_t n_rows, const uint16_t *x, const uint32_t *slot_row,
                         uint32_t slot, uint32_t n_slots)
{
    const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < TILE / 8; n++) {
        d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.0f;
    }
    for (uint32_t k = 0; k < w.cols; k += STEP) {
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < TILE * STEP / 8; i += blockDim.x) {
            const uint32_t row = i / (STEP / 8), at = i % (STEP / 8) * 8;
            const uint4 zero = make_uint4(0, 0, 0, 0);
            *(uint4 *)&s->w[row][at] = row < n_rows ? load_weights(w, first_row + row, k + at) : zero;
            const uint32_t from = row < n_slots ? (slot_row ? slot_row[slot + row] : slot + row) : 0;
            *(uint4 *)&s->x[row][at] = row < n_slots ? *(const uint4 *)(x + (size_t)from * w.cols + k + at) : zero;
        }
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < STEP; kk += 16) {
            const uint16_t *a0 = &s->w[warp * 16 + g][kk + 2 * t], *a1 = a0 + 8 * PITCH;
            const uint32_t a[4] = {*(const uint32_t *)a0, *(const uint32_t *)a1, *(const uint32_t *)(a0 + 8),
                                   *(const uint32_t *)(a1 + 8)};
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) {
                const uint16_t *b = &s->x[n * 8 + g][kk + 2 * t];
                dmk_mma_bf16(d[n], a, *(const uint32_t *)b, *(const uint32_t *)(b + 8));
            }
        }
    }
}

__global__ void __launch_bounds__(128) gate_up_kernel(struct dmk_moe_gate_up_args a)
{
    __shared__ __align__(16) struct plain_smem s;
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint32_t e = blockIdx.y, first = blockIdx.x * TILE, warp = threadIdx.x / 32;
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, n_z = a.w.rows / 2;
    const uint32_t end = a.plan.expert_begin[e + 1];
    for (uint32_t slot = a.plan.expert_begin[e]; slot < end; slot += TILE) {
        float d[TILE / 8][4];
        multiply(d, &s, a.w, (size_t)e * a.w.rows + first, a.w.rows - first, a.x, a.plan.slot_row, slot, end - slot);
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t row = first + warp * 16 + g + i / 2 * 8, at = n * 8 + 2 * t + i % 2;
                const float h =
                    d[n][i] + (row < a.w.rows ? dmk_bf16_f32(a.w.bias[(size_t)e * a.w.rows + row]) : 0.0f);
                float up = __shfl_down_sync(0xffffffffu, h, 4);
                if (g % 2 == 0 && row < a.w.rows && slot + at < end) {
                    const float gate = fminf(h, a.limit);
                    up = fmaxf(fminf(up, a.limit), -a.limit);
                    const float z = gate / (1.0f + dmk_cuda_expf(-a.alpha * gate)) * (up + 1.0f);
                    a.z[(size_t)(slot + at) * n_z + row / 2] = dmk_f32_bf16(z);
                }
            }
        }
    }
}

void dmk_cuda_moe_gate_up_plain(const struct dmk_moe_gate_up_args *args, struct dmk_stream *stream)
{
    dmk_cuda_launch(stream, gate_up_kernel, dim3(dmk_ceil_div(args->w.rows, TILE), args->n_experts), dim3(128), 0,
                    *args);
}

__global__ void __launch_bounds__(128) down_kernel(struct dmk_moe_down_args a)
{
    __shared__ __align__(16) struct plain_smem s;
    dmk_pdl_wait();
    dmk_pdl_next();
    const uint32_t e = blockIdx.y, first = blockIdx.x * TILE, warp = threadIdx.x / 32;
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint32_t end = a.plan.expert_begin[e + 1];
    for (uint32_t slot = a.plan.expert_begin[e]; slot < end; slot += TILE) {
        float d[TILE / 8][4];
        multiply(d, &s, a.w, (size_t)e * a.w.rows + first, a.w.rows - first, a.z, NULL, slot, end - slot);
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t row = first + warp * 16 + g + i / 2 * 8, at = n * 8 + 2 * t + i % 2;
                if (row < a.w.rows && slot + at < end) {
                    a.y[(size_t)(slot + at) * a.w.rows + row] =
                        d[n][i] + dmk_bf16_f32(a.w.bias[(size_t)e * a.w.rows + row]);
                }
            }
        }
    }
}

void dmk_cuda_moe_down_plain(const struct dmk_moe_down_args *args, struct dmk_stream *stream)
{
    dmk_cuda_launch(stream, down_kernel, dim3(dmk_ceil_div(args->w.rows, TILE), args->n_experts), dim3(128), 0,
                    *args);
}
