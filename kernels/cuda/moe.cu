/* The experts in the table of operations: packing of weights at load, and the choice of the product.
 *
 * Packed MXFP4 is read at 4 bits whatever the number of tokens; FP8 has a tensor-core product of its own. What
 * the packed kernels do not serve (bf16 experts, weights as in the checkpoint) goes to the plain products. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/moe.h"
#include "kernels/dtype.h"
#include "kernels/pack.h"

#define PACK_THREADS 256

/* As in kernels/pack.c: where the bits of code j stand in a word. */
__device__ const uint8_t low_at[8] = {6, 22, 2, 18, 12, 28, 0, 16};
__device__ const uint8_t top_at[8] = {8, 24, 4, 20, 14, 30, 10, 26};
__device__ const uint8_t sign_at[8] = {15, 31, 11, 27, 21, 5, 9, 25};

__device__ __forceinline__ uint32_t placed(uint32_t code, uint32_t j)
{
    return (code & 3) << low_at[j] | (code >> 2 & 1) << top_at[j] | (code >> 3 & 1) << sign_at[j];
}

__device__ __forceinline__ uint32_t source_row(uint32_t at, bool paired)
{
    const uint32_t in = at % 16;
    return paired ? at / 16 * 16 + 2 * (in % 8) + in / 8 : at;
}

/* One block a stage of a tile of 64 rows; blockIdx.y is the expert. */
__global__ void __launch_bounds__(PACK_THREADS)
    pack_mxfp4(const uint8_t *blocks, const uint8_t *scales, uint32_t rows, uint32_t cols, bool paired, uint8_t *dst)
{
    const uint32_t n_stages = (cols + DMK_MXPACK_STAGE_COLS - 1) / DMK_MXPACK_STAGE_COLS;
    const uint32_t row0 = blockIdx.x / n_stages * DMK_MXPACK_ROWS, col0 = blockIdx.x % n_stages * DMK_MXPACK_STAGE_COLS;
    dmk_pdl_wait();
    blocks += (size_t)blockIdx.y * rows * cols / 2;
    scales += (size_t)blockIdx.y * rows * (cols / DMK_MXFP4_BLOCK);
    dst += ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * DMK_MXPACK_STAGE_BYTES;
    for (uint32_t i = threadIdx.x; i < 3 * DMK_MXPACK_SPLITS * 128; i += PACK_THREADS) {
        const uint32_t thread = i % 128, lane = thread % 32;
        uint32_t word[4] = {0, 0, 0, 0};
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t row = source_row(row0 + thread / 32 * 16 + lane / 4 + 8 * half, paired);
            for (uint32_t step = 0; step < 4 && row < rows; step++) {
                for (uint32_t high = 0; high < 2; high++) {
                    const uint32_t col = col0 + i / 128 * 64 + 16 * step + 8 * high + 2 * (lane % 4);
                    const uint32_t byte = col < cols ? blocks[((size_t)row * cols + col) / 2] : 0;
                    const uint32_t j = 4 * high + 2 * half;
                    word[step] |= placed(byte, j) | placed(byte >> 4, j + 1);
                }
            }
        }
        *(uint4 *)(dst + (size_t)16 * i) = make_uint4(word[0], word[1], word[2], word[3]);
    }
    for (uint32_t i = threadIdx.x; i < DMK_MXPACK_SPLITS * 384; i += PACK_THREADS) {
        const uint32_t row = source_row(row0 + i / 96 % 4 * 16 + i / 12 % 8 + 8 * (i % 2), paired);
        const uint32_t col = col0 + i / 384 * 192 + 32 * (i / 2 % 6);
        uint8_t scale = 1;
        if (row < rows && col < cols) {
            scale = scales[(size_t)row * (cols / DMK_MXFP4_BLOCK) + col / DMK_MXFP4_BLOCK];
        }
        dst[DMK_MXPACK_CODE_BYTES + i] = (uint8_t)(scale + 126);
    }
}

/* As in kernels/pack.c, of a word of FP8 codes. */
__device__ const uint8_t fp8_mag_at[8] = {0, 4, 8, 12, 16, 20, 24, 28};
__device__ const uint8_t fp8_sign_at[8] = {7, 15, 23, 31, 3, 11, 19, 27};

/* One block a tile of 128 x 128; blockIdx.y is the expert. */
__global__ void __launch_bounds__(PACK_THREADS)
    pack_fp8(const uint8_t *blocks, const uint8_t *scales, uint32_t rows, uint32_t cols, bool paired, uint8_t *dst,
             float *dst_scales)
{
    __shared__ int most;
    __shared__ uint8_t is_zero[128 * 4];
    const uint32_t n_col_tiles = (cols + 127) / 128;
    const uint32_t row0 = blockIdx.x / n_col_tiles * 128, col0 = blockIdx.x % n_col_tiles * 128;
    dmk_pdl_wait();
    blocks += (size_t)blockIdx.y * rows * cols / 2;
    scales += (size_t)blockIdx.y * rows * (cols / DMK_MXFP4_BLOCK);
    dst += ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * DMK_FP8PACK_PIECE_BYTES;
    if (threadIdx.x == 0) {
        most = -1;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < 128 * 4; i += PACK_THREADS) {
        const uint32_t row = row0 + i / 4, col = col0 + i % 4 * 32;
        is_zero[i] = 1;
        if (row < rows && col < cols) {
            const size_t group = (size_t)row * (cols / DMK_MXFP4_BLOCK) + col / DMK_MXFP4_BLOCK;
            const uint4 v = *(const uint4 *)(blocks + group * 16);
            if (((v.x | v.y | v.z | v.w) & 0x77777777u) != 0) {
                is_zero[i] = 0;
                atomicMax(&most, (int)scales[group]);
            }
        }
    }
    __syncthreads();
    const int shared = most < 0 ? 127 : most - DMK_FP8PACK_SHIFT_HIGH;
    if (threadIdx.x == 0) {
        dst_scales[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = exp2f((float)(shared - 127));
    }
    for (uint32_t i = threadIdx.x; i < DMK_FP8PACK_CODE_BYTES / 4; i += PACK_THREADS) {
        const uint32_t thread = i / 4 % 128, lane = thread % 32, k = i / 512 % 2 * 2 + i / 2 % 2;
        const uint32_t row = source_row(row0 + i / 1024 * 64 + thread / 32 * 16 + lane / 4 + 8 * (i % 2), paired);
        uint32_t word = 0;
        for (uint32_t j = 0; j < 8; j += 2) {
            const uint32_t col = col0 + 32 * k + 16 * (j / 4) + 4 * (lane % 4) + j % 4;
            const uint32_t byte = row < rows && col < cols ? blocks[((size_t)row * cols + col) / 2] : 0;
            word |= (byte & 7) << fp8_mag_at[j] | (byte >> 3 & 1) << fp8_sign_at[j] |
                    (byte >> 4 & 7) << fp8_mag_at[j + 1] | byte >> 7 << fp8_sign_at[j + 1];
        }
        *(uint32_t *)(dst + (size_t)4 * i) = word;
    }
    for (uint32_t i = threadIdx.x; i < 128 * 4; i += PACK_THREADS) {
        const uint32_t in = source_row(i / 64 * 16 + i / 8 % 8 + 8 * (i / 4 % 2), paired), group = i % 4;
        int shift = DMK_FP8PACK_SHIFT_LOW;
        if (!is_zero[in * 4 + group]) {
            shift = scales[(size_t)(row0 + in) * (cols / DMK_MXFP4_BLOCK) + col0 / DMK_MXFP4_BLOCK + group] - shared;
            shift = shift < DMK_FP8PACK_SHIFT_LOW ? DMK_FP8PACK_SHIFT_LOW : shift;
        }
        dst[DMK_FP8PACK_CODE_BYTES + i] = (uint8_t)(8 * (shift - DMK_FP8PACK_SHIFT_LOW));
    }
}

struct dmk_moe_packed dmk_cuda_moe_packed(const struct dmk_expert_weights *w, uint32_t n_experts, bool gate_up)
{
    struct dmk_moe_packed none = {w->format, 0, 0};
    /* Tiles of an expert's matrix, as kernels/pack.c counts them. */
    const size_t n_stages = (size_t)dmk_ceil_div(w->rows, DMK_MXPACK_ROWS) * dmk_ceil_div(w->cols, DMK_MXPACK_STAGE_COLS);
    const size_t n_tiles = (size_t)dmk_ceil_div(w->rows, 128) * dmk_ceil_div(w->cols, 128);
    (void)gate_up;
    if (w->cols % DMK_MXFP4_BLOCK != 0 || w->cols > 2880) {
        return none;
    }
    if (w->format == DMK_WEIGHT_MXFP4) {
        return (struct dmk_moe_packed){w->format, n_experts * n_stages * DMK_MXPACK_STAGE_BYTES, 0};
    }
    if (w->format == DMK_WEIGHT_FP8) {
        return (struct dmk_moe_packed){w->format, n_experts * n_tiles * DMK_FP8PACK_PIECE_BYTES,
                                       n_experts * n_tiles * sizeof(float)};
    }
    return none;
}

void dmk_cuda_moe_pack(const struct dmk_moe_pack_args *a, struct dmk_stream *stream)
{
    const struct dmk_expert_weights *w = &a->w;
    if (w->format == DMK_WEIGHT_FP8) {
        const uint32_t n_tiles = dmk_ceil_div(w->rows, 128) * dmk_ceil_div(w->cols, 128);
        dmk_cuda_launch(stream, pack_fp8, dim3(n_tiles, a->n_experts), dim3(PACK_THREADS), 0, w->blocks, w->scales,
                        w->rows, w->cols, a->gate_up, a->blocks, (float *)a->scales);
        return;
    }
    const uint32_t n_stages = dmk_ceil_div(w->rows, DMK_MXPACK_ROWS) * dmk_ceil_div(w->cols, DMK_MXPACK_STAGE_COLS);
    dmk_cuda_launch(stream, pack_mxfp4, dim3(n_stages, a->n_experts), dim3(PACK_THREADS), 0, w->blocks, w->scales,
                    w->rows, w->cols, a->gate_up, a->blocks);
}

static void note_error(struct dmk_stream *stream, cudaError_t err)
{
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    if (err != cudaSuccess && s->error == 0) {
        s->error = (int)err;
    }
}

static struct dmk_moe_matrix matrix_of(const struct dmk_expert_weights *w)
{
    return (struct dmk_moe_matrix){w->blocks, (const float *)(const void *)w->scales, w->bias, w->rows, w->cols};
}

void dmk_cuda_moe_gate_up(const struct dmk_moe_gate_up_args *a, struct dmk_stream *stream)
{
    if (!a->w.packed) {
        dmk_cuda_moe_gate_up_plain(a, stream);
        return;
    }
    struct dmk_moe_layer_args l = {};
    l.gate_up = matrix_of(&a->w);
    l.down = {nullptr, nullptr, nullptr, a->w.cols, a->w.rows / 2};
    l.x = a->x;
    l.expert_begin = a->plan.expert_begin;
    l.slot_row = a->plan.slot_row;
    l.z = a->z;
    l.n_rows = a->n_rows;
    l.k = 4;
    l.n_experts = a->n_experts;
    l.alpha = a->alpha;
    l.limit = a->limit;
    const bool mxfp4 = a->w.format == DMK_WEIGHT_MXFP4;
    note_error(stream, mxfp4 ? dmk_moe_mxfp4_gate_up(&l, 0, dmk_cuda_of(stream)->stream) : cudaErrorNotSupported);
}

void dmk_cuda_moe_down(const struct dmk_moe_down_args *a, struct dmk_stream *stream)
{
    if (!a->w.packed) {
        dmk_cuda_moe_down_plain(a, stream);
        return;
    }
    struct dmk_moe_layer_args l = {};
    l.gate_up = {nullptr, nullptr, nullptr, 2 * a->w.cols, a->w.rows};
    l.down = matrix_of(&a->w);
    l.expert_begin = a->plan.expert_begin;
    l.z = const_cast<uint16_t *>(a->z);
    l.y = a->y;
    l.n_rows = a->n_rows;
    l.k = 4;
    l.n_experts = a->n_experts;
    const bool mxfp4 = a->w.format == DMK_WEIGHT_MXFP4;
    note_error(stream, mxfp4 ? dmk_moe_mxfp4_down(&l, 0, dmk_cuda_of(stream)->stream) : cudaErrorNotSupported);
}

void dmk_cuda_moe_experts(const struct dmk_moe_experts_args *a, struct dmk_stream *stream)
{
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    if (!a->gate_up.packed || a->gate_up.format != a->down.format) {
        struct dmk_moe_gate_up_args gate_up = {};
        gate_up.w = a->gate_up;
        gate_up.x = a->x;
        gate_up.plan = a->plan;
        gate_up.z = a->z;
        gate_up.n_experts = a->n_experts;
        gate_up.alpha = a->alpha;
        gate_up.limit = a->limit;
        gate_up.n_rows = a->n_rows;
        dmk_cuda_moe_gate_up(&gate_up, stream);
        struct dmk_moe_down_args down = {};
        down.w = a->down;
        down.z = a->z;
        down.plan = a->plan;
        down.y = a->y;
        down.n_experts = a->n_experts;
        down.n_rows = a->n_rows;
        dmk_cuda_moe_down(&down, stream);
        return;
    }
    struct dmk_moe_layer_args l = {};
    l.gate_up = matrix_of(&a->gate_up);
    l.down = matrix_of(&a->down);
    l.x = a->x;
    l.expert_begin = a->plan.expert_begin;
    l.slot_row = a->plan.slot_row;
    l.row_slots = a->plan.row_slots;
    l.z = a->z;
    l.y = a->y;
    l.n_rows = a->n_rows;
    l.k = a->k;
    l.n_experts = a->n_experts;
    l.alpha = a->alpha;
    l.limit = a->limit;
    if (a->gate_up.format == DMK_WEIGHT_MXFP4) {
        l.scratch = s->counters;
        /* One launch hides the start of the second product. With larger tiles the wait of all blocks for the first
         * product costs more than a launch; and they can not wait for blocks that another rank keeps out. */
        cudaError_t err = cudaSuccess;
        if (dmk_moe_mxfp4_tile(l.n_rows, l.k, l.n_experts) == 8 && !s->shared) {
            err = dmk_moe_mxfp4(&l, 0, s->stream);
        } else {
            err = dmk_moe_mxfp4_gate_up(&l, 0, s->stream);
            err = err == cudaSuccess ? dmk_moe_mxfp4_down(&l, 0, s->stream) : err;
        }
        note_error(stream, err);
        return;
    }
    l.scratch = s->workspace;
    const size_t bytes = dmk_moe_fp8_layout(l.n_rows, l.k, l.n_experts, l.gate_up.cols, l.down.cols).bytes;
    note_error(stream, bytes <= DMK_CUDA_WORKSPACE_BYTES ? dmk_moe_fp8(&l, s->stream) : cudaErrorInvalidValue);
}
