/* The table of rotary angles, stretched by YaRN. */
#pragma once

#include "common/shape/shape.h"

#define DMK_ROPE_PAIRS (DMK_HEAD_DIM / 2)

/* Angle per position of pair i, in fp32 (computed in double and rounded once). */
void dmk_rope_inv_freq(const struct dmk_shape *shape, float ret_freq[DMK_ROPE_PAIRS]);

/* Both cosine and sine are multiplied by this. */
double dmk_rope_concentration(const struct dmk_shape *shape);

/* ret_table [n_positions][32][2] = cos, sin of the fp32 product position * inv_freq. */
void dmk_rope_table(const struct dmk_shape *shape, uint32_t n_positions, float *ret_table);
