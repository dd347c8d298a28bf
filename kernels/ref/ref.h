/* Inside kernels/ref: the entries of the table, and the dot product they share. */
#pragma once

#include "kernels/kernels.h"
#include "kernels/numeric.h"

/* dot(w, x) over k elements, in 16 lanes. */
float dmk_ref_dot(const uint16_t *w, const uint16_t *x, uint32_t k);

/* The same with one MXFP4 row: blocks [k/32][16], scales [k/32]. */
float dmk_ref_dot_mxfp4(const uint8_t *blocks, const uint8_t *scales, const uint16_t *x,
                        uint32_t k);

void dmk_ref_embed(const struct dmk_embed_args *args, struct dmk_stream *stream);
void dmk_ref_rmsnorm(const struct dmk_rmsnorm_args *args, struct dmk_stream *stream);
void dmk_ref_linear(const struct dmk_linear_args *args, struct dmk_stream *stream);
void dmk_ref_linear_fp8(const struct dmk_linear_fp8_args *args, struct dmk_stream *stream);
void dmk_ref_rope(const struct dmk_rope_args *args, struct dmk_stream *stream);
void dmk_ref_kv_write(const struct dmk_kv_write_args *args, struct dmk_stream *stream);
void dmk_ref_attn(const struct dmk_attn_args *args, struct dmk_stream *stream);
void dmk_ref_topk(const struct dmk_topk_args *args, struct dmk_stream *stream);
void dmk_ref_moe_group(const struct dmk_moe_group_args *args, struct dmk_stream *stream);
void dmk_ref_moe_gate_up(const struct dmk_moe_gate_up_args *args, struct dmk_stream *stream);
void dmk_ref_moe_down(const struct dmk_moe_down_args *args, struct dmk_stream *stream);
void dmk_ref_moe_combine(const struct dmk_moe_combine_args *args, struct dmk_stream *stream);
void dmk_ref_residual(const struct dmk_residual_args *args, struct dmk_stream *stream);
void dmk_ref_page_gather(const struct dmk_page_move_args *args, struct dmk_stream *stream);
void dmk_ref_page_scatter(const struct dmk_page_move_args *args, struct dmk_stream *stream);
