/* The expert products of sm_90a: in bf16 for few tokens, in FP8 for many, both from weights of four bits.
 *
 * Plain C. Weights are packed (kernels/pack.h). Everything that depends on the routing is read on the
 * device, so a captured launch may be replayed with other counts; grids depend on the device and on the
 * bounds given here only. A token's result depends on its own row only: neither its company nor the
 * variant that the bounds choose changes a bit. Launches go into `stream` and depend on the one before
 * by programmatic dependent launch; nothing waits or allocates. Each function returns a cudaError_t. */
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

/* One expert matrix family, all local experts. */
struct dmk_moe_matrix {
    const uint8_t *packed; /* [n_experts][dmk_*_pack_bytes], 16-byte aligned */
    const float *scales;   /* FP8: [n_experts][ceil(rows/128)][ceil(cols/128)] powers of two */
    const uint16_t *bias;  /* [n_experts][rows] bf16 */
    uint32_t rows, cols;
};

/* A layer's experts applied to the rows of a step. Slots are ordered by expert, then by row. */
struct dmk_moe_layer_args {
    struct dmk_moe_matrix gate_up; /* rows 2I, cols H, packed in pairs */
    struct dmk_moe_matrix down;    /* rows H, cols I */
    const uint16_t *x;             /* [n_rows][H] bf16 */
    const uint32_t *expert_begin;  /* [n_experts + 1] first slot of each local expert */
    const uint32_t *slot_row;      /* [n_slots] */
    const uint32_t *row_slots;     /* [n_rows][k], DMK_NONE: no more; FP8 only */
    uint16_t *z;                   /* [max_slots][I] bf16, MXFP4 only */
    float *y;                      /* [max_slots][H] */
    void *scratch;                 /* dmk_moe_*_scratch_bytes, 1024-byte aligned */
    uint32_t n_rows, k;            /* k experts per token: at most n_rows * k slots */
    uint32_t n_experts;
    float alpha, limit;
};

/* Counters of the fused kernel; zero before the first use, zero again after each. */
size_t dmk_moe_mxfp4_scratch_bytes(uint32_t n_experts);

/* How many tokens of an expert share a reading of its weights (8, 16 or 24): the mean of an expert's and two standard
 * deviations where it can be. */
uint32_t dmk_moe_mxfp4_tile(uint32_t n_rows, uint32_t k, uint32_t n_experts);

/* y = down(swiglu(gate_up(x))) with both biases, unweighted, in one launch. `tile` is 8, 16 or 24, or 0 for
 * dmk_moe_mxfp4_tile. */
cudaError_t dmk_moe_mxfp4(const struct dmk_moe_layer_args *args, uint32_t tile,
                          cudaStream_t stream);

/* The same as two launches. */
cudaError_t dmk_moe_mxfp4_gate_up(const struct dmk_moe_layer_args *args, uint32_t tile,
                                  cudaStream_t stream);
cudaError_t dmk_moe_mxfp4_down(const struct dmk_moe_layer_args *args, uint32_t tile,
                               cudaStream_t stream);

/* --- FP8: for many tokens --- */

/* Where the pieces of the scratch memory lie. A quantised row has its 128 columns of block b at
 * [b][position][128], 16-byte piece c at c ^ (position % 8). Positions are slots with every expert's first
 * moved up to a multiple of 16: position = slot - begin[e] + sum over experts before e of their count rounded
 * up to 16. The scale stands at [b][position] with the low four bits of the position, 8 4 2 1, in the order
 * 4 2 8 1. */
struct dmk_moe_fp8_layout {
    size_t x, x_scales, z, z_scales, bytes; /* offsets; bytes of all */
    uint32_t n_positions;
    uint32_t x_blocks, z_blocks; /* ceil(H/128), ceil(I/128) */
};
struct dmk_moe_fp8_layout dmk_moe_fp8_layout(uint32_t n_rows, uint32_t k, uint32_t n_experts,
                                             uint32_t hidden, uint32_t inter);

/* y as dmk_moe_mxfp4, activations quantised to E4M3 per token and 128 channels (scale = largest / 448), in
 * three launches. scratch is as large as the layout of the arguments says. */
cudaError_t dmk_moe_fp8(const struct dmk_moe_layer_args *args, cudaStream_t stream);

/* The three steps: 0 quantises the rows of x to their slots, 1 is gate_up to z, 2 is down to y. */
cudaError_t dmk_moe_fp8_step(const struct dmk_moe_layer_args *args, uint32_t step,
                             cudaStream_t stream);

#if defined(__cplusplus)
}
#endif
