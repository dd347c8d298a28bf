/* The AVX2 set: the templates over the vectors of vec_avx2.h. Built with its own compiler flags; nothing
 * here runs before detect.c has found the instructions. */
#include "kernels/cpu/vec_avx2.h"

#include "kernels/cpu/attn_tmpl.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/linear_tmpl.h"
#include "kernels/cpu/linear_fp8_tmpl.h"
#include "kernels/cpu/mx_avx2.h"
#include "kernels/cpu/moe_tmpl.h"
#include "kernels/cpu/rows_tmpl.h"

_Static_assert(BLOCK_ROWS % TILE_ROWS(3) == 0 && BLOCK_ROWS % TILE_ROWS(TILE_T) == 0 &&
                   BLOCK_ROWS * TILE_T % 4 == 0 && FEW + 1 >= TILE_MIN && FEW <= TILE_T,
               "tile sizes");
_Static_assert(BLOCK_ROWS <= DMK_CPU_SCRATCH_ROWS, "scratch");
_Static_assert(TILE_T * sizeof(float) <= DMK_CPU_SCRATCH_ROWS * sizeof(uint16_t), "scratch");
_Static_assert(VL *HALVES == DMK_LANES, "vector sizes");
_Static_assert(sizeof(struct dot_scratch) <= DMK_CPU_SCRATCH_BYTES, "scratch");
_Static_assert(sizeof(struct attn_scratch) <= DMK_CPU_SCRATCH_BYTES, "scratch");

void dmk_kernels_avx2(struct dmk_kernels *kernels)
{
    mx_init();
    kernels->name = "avx2";
    kernels->rmsnorm = run_rmsnorm;
    kernels->linear = run_linear;
    kernels->linear_fp8 = run_linear_fp8;
    kernels->rope = run_rope;
    kernels->attn = run_attn;
    kernels->moe_gate_up = run_moe_gate_up;
    kernels->moe_down = run_moe_down;
    kernels->moe_combine = run_combine;
    kernels->residual = run_residual;
}
