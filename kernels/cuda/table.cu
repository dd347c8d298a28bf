/* The table of device operations: which function serves each entry. */
#include "kernels/cuda/cuda.h"

extern "C" void dmk_kernels_cuda(struct dmk_kernels *ret_kernels)
{
    struct dmk_kernels k = {};
    k.name = "cuda";
    k.embed = dmk_cuda_embed;
    k.rmsnorm = dmk_cuda_rmsnorm;
    k.linear = dmk_cuda_linear;
    k.linear_fp8 = dmk_cuda_linear_fp8;
    k.rope = dmk_cuda_rope;
    k.kv_write = dmk_cuda_kv_write;
    k.attn = dmk_cuda_attn;
    k.topk = dmk_cuda_topk;
    k.moe_group = dmk_cuda_moe_group;
    k.moe_gate_up = dmk_cuda_moe_gate_up;
    k.moe_down = dmk_cuda_moe_down;
    k.moe_combine = dmk_cuda_moe_combine;
    k.residual = dmk_cuda_residual;
    k.page_gather = dmk_cuda_page_gather;
    k.page_scatter = dmk_cuda_page_scatter;
    k.add_norm = dmk_cuda_add_norm;
    k.combine_norm = dmk_cuda_combine_norm;
    k.route = dmk_cuda_route;
    k.gather = dmk_cuda_gather;
    k.rope_write = dmk_cuda_rope_write;
    k.page_copy = dmk_cuda_page_copy;
    k.moe_experts = dmk_cuda_moe_experts;
    k.moe_packed = dmk_cuda_moe_packed;
    k.moe_pack = dmk_cuda_moe_pack;
    k.sample = dmk_cuda_sample;
    *ret_kernels = k;
}
