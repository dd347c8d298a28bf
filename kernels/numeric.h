/* The arithmetic that every implementation shares bit for bit: sums in 16 virtual lanes, exp, sigmoid.
 *
 * Dot products. K is cut into blocks of 32 elements. Lane l (0..15) takes elements 2l and then 2l+1 of
 * each block, in the order of the blocks, each by one fused multiply-add into the lane's fp32 sum, which
 * starts at +0. The lanes are then halved four times: l + (l+8), l + (l+4), l + (l+2), l + (l+1). This is
 * the order in which a 64-byte load of bf16, or 16 bytes of MXFP4, falls apart on its own; a vector of
 * 16 lanes and two of 8 give the same bits, and so does the loop below.
 *
 * exp and sigmoid are our own, since the vectorised ones of libraries differ from the scalar ones. They
 * have no branches, so a compiler may vectorise them; contraction is off in the build, every fused
 * operation is written as such. */
#pragma once

#include <math.h>
#include <stdint.h>
#include "kernels/dtype.h"

#define DMK_LANES   16
#define DMK_K_BLOCK 32 /* every K is a multiple */

static inline float dmk_lanes_sum(const float lane[DMK_LANES])
{
    float a[8], b[4];
    for (int i = 0; i < 8; i++) {
        a[i] = lane[i] + lane[i + 8];
    }
    for (int i = 0; i < 4; i++) {
        b[i] = a[i] + a[i + 4];
    }
    return (b[0] + b[2]) + (b[1] + b[3]);
}

/* exp, within 1.02 ulp of the exact value. Results below the normal range (x < -87.3) are +0, above the
 * range infinity; a NaN stays a NaN. */
static inline float dmk_expf(float x)
{
    const float magic =
        0x1.8p23f; /* adding it rounds to an integer, which stands in the low bits */
    const float low = -87.3f;
    float y = low > x ? low : x;
    y = 89.0f < y ? 89.0f : y;
    float t = fmaf(y, 0x1.715476p+0f, magic); /* log2(e) */
    int32_t n = (int32_t)(dmk_f32_bits(t) - 0x4b400000u);
    float nf = t - magic;
    float r = fmaf(nf, -0x1.63p-1f, y); /* ln 2 in two parts; the first product is exact */
    r = fmaf(nf, 0x1.bd0106p-13f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, r * r, r) + 1.0f;
    /* 2^n in two factors, since n reaches 128. */
    int32_t half = n >> 1;
    float s0 = dmk_f32_from_bits((uint32_t)(half + 127) << 23);
    float s1 = dmk_f32_from_bits((uint32_t)(n - half + 127) << 23);
    return x < low ? 0.0f : p * s0 * s1;
}

static inline float dmk_sigmoidf(float x)
{
    return 1.0f / (1.0f + dmk_expf(-x));
}
