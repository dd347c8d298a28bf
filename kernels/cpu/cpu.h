/* Inside kernels: the sets of fast host operations. Each overwrites the entries it has. */
#pragma once

#include "kernels/kernels.h"

/* What tiles of tokens, keys, values and sums take of a thread's scratch memory, and how many rows of
 * weights come on top. */
#define DMK_CPU_SCRATCH_BYTES (256 * 1024)
#define DMK_CPU_SCRATCH_ROWS  48

void dmk_kernels_avx2(struct dmk_kernels *kernels);
void dmk_kernels_avx512(struct dmk_kernels *kernels);

/* Whether the set is built and this processor, under this kernel, runs it. */
bool dmk_cpu_has_avx2(void);
bool dmk_cpu_has_avx512(void);
