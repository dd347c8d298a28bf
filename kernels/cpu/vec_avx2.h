/* Vectors of 8 floats for the templates: AVX2 and FMA. 16 virtual lanes are two vectors. */
#pragma once

#include <immintrin.h>
#include "kernels/numeric.h"

#define VL     8
#define HALVES 2 /* vectors that make 16 lanes */
#define TILE_T                                                                                     \
    5 /* most tokens of a register tile, and its rows: 8 to 10 sums, weights, 1 activation */
#define TILE_ROWS(n_t) ((n_t) == 3 ? 3 : 2)
#define FEW            2 /* tokens up to which weights go straight from memory into the sums */
#define FEW_ROWS(n_t)  ((n_t) == 1 ? 4 : 2) /* weight rows side by side with n_t such tokens */
#define HEADS_R        2 /* query heads side by side in attention, each with 4 vectors */

typedef __m256 vf;

static inline vf vf_zero(void)
{
    return _mm256_setzero_ps();
}

static inline vf vf_set1(float x)
{
    return _mm256_set1_ps(x);
}

static inline vf vf_load(const float *p)
{
    return _mm256_loadu_ps(p);
}

/* Keeps the compiler from folding the load into each instruction that uses the value. */
static inline vf vf_hold(vf x)
{
    __asm__("" : "+x"(x));
    return x;
}

static inline void vf_store(float *p, vf x)
{
    _mm256_storeu_ps(p, x);
}

static inline vf vf_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}

static inline vf vf_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}

static inline vf vf_sub(vf a, vf b)
{
    return _mm256_sub_ps(a, b);
}

static inline vf vf_div(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}

/* a > b ? a : b, and a < b ? a : b: the second one where either is no number. */
static inline vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}

static inline vf vf_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}

/* a * b + c, rounded once */
static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

/* VL pairs of bf16: the first, or the second, of each. */
static inline vf vf_even(const uint16_t *p)
{
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p), 16));
}

static inline vf vf_odd(const uint16_t *p)
{
    return _mm256_and_ps(_mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000)),
                         _mm256_loadu_ps((const float *)(const void *)p));
}

/* VL consecutive bf16. */
static inline vf vf_bf16(const uint16_t *p)
{
    __m128i x = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

/* VL pairs of E4M3 codes, none NaN: the first, or the second, of each, times 2^-8. Shifted into the fields of a 16-bit
 * float a code is that, since only the exponent's bias differs. */
static inline vf vf_e4m3_odd(const uint8_t *p)
{
    const __m128i pairs = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(pairs, 1), _mm_set1_epi16((short)0xbf80)));
}

static inline vf vf_e4m3_even(const uint8_t *p)
{
    const __m128i pairs = _mm_slli_epi16(_mm_loadu_si128((const __m128i *)(const void *)p), 8);
    return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(pairs, 1), _mm_set1_epi16((short)0xbf80)));
}

/* p * 2^n, n in the low bits of t; 0 where x < low. */
static inline vf vf_exp_end(vf t, vf p, vf x, vf low)
{
    const __m256i bias = _mm256_set1_epi32(127);
    __m256i n = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(0x4b400000));
    __m256i half = _mm256_srai_epi32(n, 1);
    vf s0 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    vf s1 = _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias), 23));
    vf zero = _mm256_cmp_ps(x, low, _CMP_LT_OQ);
    return _mm256_andnot_ps(zero, vf_mul(vf_mul(p, s0), s1));
}

/* dmk_expf in every lane: the same operations in the same order. */
static inline vf vf_exp(vf x)
{
    const vf magic = vf_set1(0x1.8p23f), low = vf_set1(-87.3f);
    vf y = vf_min(vf_set1(89.0f), vf_max(low, x));
    vf t = vf_fma(y, vf_set1(0x1.715476p+0f), magic);
    vf nf = vf_sub(t, magic);
    vf r = vf_fma(nf, vf_set1(-0x1.63p-1f), y);
    r = vf_fma(nf, vf_set1(0x1.bd0106p-13f), r);
    vf p = vf_set1(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_add(vf_fma(p, vf_mul(r, r), r), vf_set1(1.0f));
    return vf_exp_end(t, p, x, low);
}
