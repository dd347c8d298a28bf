/* exp over n values, a multiple of 16, in the vectors of one instruction set. */
#pragma once

#include <stddef.h>

void check_exp_avx2(const float *x, float *y, size_t n);
void check_exp_avx512(const float *x, float *y, size_t n);
