/* Inside kernels: the sets of fast host operations. Each overwrites the entries it has. */
#pragma once

#include "kernels/kernels.h"

void dmk_kernels_avx2(struct dmk_kernels *kernels);
void dmk_kernels_avx512(struct dmk_kernels *kernels);

/* Whether the set is built and this processor, under this kernel, runs it. */
bool dmk_cpu_has_avx2(void);
bool dmk_cpu_has_avx512(void);
