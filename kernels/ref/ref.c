/* The table of plain operations. */
#include "kernels/ref/ref.h"

void dmk_kernels_ref(struct dmk_kernels *ret_kernels)
{
    *ret_kernels = (struct dmk_kernels){
        .name = "ref",
        .embed = dmk_ref_embed,
        .rmsnorm = dmk_ref_rmsnorm,
        .linear = dmk_ref_linear,
        .linear_fp8 = dmk_ref_linear_fp8,
        .rope = dmk_ref_rope,
        .kv_write = dmk_ref_kv_write,
        .attn = dmk_ref_attn,
        .topk = dmk_ref_topk,
        .moe_group = dmk_ref_moe_group,
        .moe_gate_up = dmk_ref_moe_gate_up,
        .moe_down = dmk_ref_moe_down,
        .moe_combine = dmk_ref_moe_combine,
        .residual = dmk_ref_residual,
        .page_gather = dmk_ref_page_gather,
        .page_scatter = dmk_ref_page_scatter,
    };
}
