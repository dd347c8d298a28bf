/* Stands in where no fast set is built for the processor family: the plain operations serve. */
#include "kernels/cpu/cpu.h"

void dmk_kernels_avx2(struct dmk_kernels *kernels)
{
    (void)kernels;
}

void dmk_kernels_avx512(struct dmk_kernels *kernels)
{
    (void)kernels;
}

bool dmk_cpu_has_avx2(void)
{
    return false;
}

bool dmk_cpu_has_avx512(void)
{
    return false;
}
