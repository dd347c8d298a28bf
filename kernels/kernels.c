/* Chooses the operations once, at start; callers see the table only. */
#include "kernels/kernels.h"

#include <string.h>
#include "kernels/cpu/cpu.h"

bool dmk_kernels_cpu_variant(const char *name, struct dmk_kernels *kernels)
{
    if (strcmp(name, "avx2") == 0 && dmk_cpu_has_avx2()) {
        dmk_kernels_avx2(kernels);
        return true;
    }
    if (strcmp(name, "avx512") == 0 && dmk_cpu_has_avx512()) {
        dmk_kernels_avx512(kernels);
        return true;
    }
    return false;
}

void dmk_kernels_cpu(struct dmk_kernels *ret_kernels)
{
    dmk_kernels_ref(ret_kernels);
    dmk_kernels_cpu_variant("avx2", ret_kernels);
    dmk_kernels_cpu_variant("avx512", ret_kernels);
}

size_t dmk_kernels_scratch_bytes(uint32_t max_k)
{
    return (size_t)DMK_CPU_SCRATCH_ROWS * max_k * sizeof(uint16_t) + DMK_CPU_SCRATCH_BYTES;
}
