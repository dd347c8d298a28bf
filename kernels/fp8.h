/* Numbers of the dense products in FP8: scales of weights and of activations, whose codes are those of kernels/dtype.h.
 *
 * Weights have one scale, a power of two, for each block of 128 x 128, which is kept once for each 64 of its rows, so
 * that a rank may own half of a block. Activations have one for each row and 128 channels. Where K falls into
 * slices, blocks begin anew with each of them. Every implementation, on any processor, makes the same codes and
 * scales. Pure functions, any thread. */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kernels/dtype.h"

#define DMK_FP8_SCALE_ROWS 64 /* rows of a weight for which a scale is kept */

static inline uint32_t dmk_fp8_groups(uint32_t k)
{
    return (k + DMK_FP8_BLOCK - 1) / DMK_FP8_BLOCK;
}

/* The scale of activations whose largest magnitude has these bits (as an integer, so that a NaN is the largest), and
 * what they are multiplied by before they become codes. A group with a number that is not finite gets the scale NaN. */
static inline void dmk_fp8_scale(uint32_t top_bits, float *ret_scale, float *ret_inverse)
{
    const bool finite = top_bits < 0x7f800000u;
    const float top = dmk_f32_from_bits(finite ? top_bits : 0x3f800000u);
    const float floor = 0x1p-100f, most = top > floor ? top : floor;
    *ret_scale = finite ? most / 448.0f : NAN;
    *ret_inverse = finite ? 448.0f / most : 0.0f;
}

/* Codes and scale of n <= 128 activations. */
static inline float dmk_fp8_quantise(const uint16_t *x, uint32_t n, uint8_t *ret_codes)
{
    uint32_t top = 0;
    float scale, inverse;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t mag = (uint32_t)(x[i] & 0x7fff) << 16;
        top = mag > top ? mag : top;
    }
    dmk_fp8_scale(top, &scale, &inverse);
    for (uint32_t i = 0; i < n; i++) {
        ret_codes[i] = dmk_f32_to_e4m3(dmk_bf16_to_f32(x[i]) * inverse);
    }
    return scale;
}

/* The scale of weights whose largest magnitude is top: the smallest power of two under which it is at most 448. Of 0
 * it is 1; top is finite. */
static inline float dmk_fp8_weight_scale(float top)
{
    int exponent;
    const float f = frexpf(top, &exponent); /* in [0.5, 1); 448 is 0.875 * 2^9 */
    return top == 0.0f ? 1.0f : ldexpf(1.0f, f <= 0.875f ? exponent - 9 : exponent - 8);
}
