/* Number formats of weights and activations: bf16, MXFP4 (E2M1 codes under a UE8M0 block scale), and E4M3 under scales of
 * blocks.
 *
 * Pure functions; every implementation of an operation, on any processor, must convert like this. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define DMK_MXFP4_BLOCK       32 /* consecutive elements along K that share a scale */
#define DMK_MXFP4_BLOCK_BYTES 16 /* element 2i in the low nibble of byte i, 2i+1 in the high one */
#define DMK_FP8_BLOCK         128 /* rows and columns of a weight that share a scale of its E4M3 codes */

static inline uint32_t dmk_f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static inline float dmk_f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static inline float dmk_bf16_to_f32(uint16_t x)
{
    return dmk_f32_from_bits((uint32_t)x << 16);
}

/* To nearest, ties to even; a NaN stays a NaN (made quiet). */
static inline uint16_t dmk_f32_to_bf16(float x)
{
    uint32_t bits = dmk_f32_bits(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

/* 2^(scale - 127), exact down to scale 0 (a subnormal). 255 is not a number in the format and never
 * occurs in a checked file; it reads as infinity. */
static inline float dmk_ue8m0_to_f32(uint8_t scale)
{
    return dmk_f32_from_bits(scale ? (uint32_t)scale << 23 : 0x00400000u);
}

/* code 0..15: sign, two exponent bits with bias 1, one mantissa bit. */
static inline float dmk_e2m1_to_f32(uint32_t code)
{
    static const float value[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return value[code & 15];
}

/* code: sign, four exponent bits with bias 7, three mantissa bits; 0x7f and 0xff are NaN. */
static inline float dmk_e4m3_to_f32(uint8_t code)
{
    const float x = dmk_f32_from_bits((uint32_t)(code & 0x7f) << 20) * 0x1p120f;
    const float magnitude = (code & 0x7f) == 0x7f ? NAN : x;
    return code & 0x80 ? -magnitude : magnitude;
}

/* Nearest code, ties to even; above 448 the largest, a NaN stays one. */
static inline uint8_t dmk_f32_to_e4m3(float x)
{
    const uint32_t bits = dmk_f32_bits(x), mag = bits & 0x7fffffffu;
    const uint32_t normal = ((mag + 0x7ffffu + (mag >> 20 & 1)) >> 20) - (120u << 3);
    /* Below 2^-6 a unit is 2^-9: adding 2^23 rounds to it. */
    const uint32_t small = dmk_f32_bits(dmk_f32_from_bits(mag) * 512.0f + 0x1p23f) & 15;
    uint32_t code = mag < 0x3c800000u ? small : normal;
    code = mag >= 0x43e00000u ? 0x7e : code;
    code = mag > 0x7f800000u ? 0x7f : code;
    return (uint8_t)(bits >> 24 & 0x80) | (uint8_t)code;
}
