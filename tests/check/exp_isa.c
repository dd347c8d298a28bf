/* exp of one instruction set's vectors, for comparison with the scalar one; built once for each set with
 * EXP_HEADER and EXP_NAME. */
#include EXP_HEADER

#include "tests/check/exp_isa.h"

void EXP_NAME(const float *x, float *y, size_t n)
{
    for (size_t i = 0; i < n; i += VL) {
        vf_store(y + i, vf_exp(vf_load(x + i)));
    }
}
