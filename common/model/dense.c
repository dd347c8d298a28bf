/* A dense product in the format that its weights have. On the step path; launches and nothing else. */
#include "common/model/engine_internal.h"

void dmk_engine_linear(struct dmk_rank *rank, const struct dmk_linear_args *a,
                       const struct dmk_dense_fp8 *w8, uint32_t first_row)
{
    if (!w8->codes) {
        rank->kernels.linear(a, rank->stream);
        return;
    }
    rank->kernels.linear_fp8(&(struct dmk_linear_fp8_args){.w = w8->codes,
                                                           .w_scales = w8->scales,
                                                           .bias = a->bias,
                                                           .x = a->x,
                                                           .y_bf16 = a->y_bf16,
                                                           .y_f32 = a->y_f32,
                                                           .w_stride = (uint64_t)a->k * a->n_slices,
                                                           .x_stride = a->x_stride,
                                                           .y_stride = a->y_stride,
                                                           .n_rows = a->n_rows,
                                                           .n_out = a->n_out,
                                                           .k = a->k,
                                                           .n_slices = a->n_slices,
                                                           .n_whole = a->n_whole,
                                                           .first = first_row % DMK_FP8_SCALE_ROWS,
                                                           .leaf = a->leaf,
                                                           .x_codes = rank->acts.codes,
                                                           .x_scales = rank->acts.code_scales},
                             rank->stream);
}
