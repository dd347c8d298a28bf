/* Vectors of 8 floats for the templates: AVX2 and FMA. 16 virtual lanes are two vectors. */
#pragma once

#include <immintrin.h>
#include "kernels/numeric.h"

#define VL        8
#define HALVES    2 /* vectors that make 16 lanes */
#define TILE_R    3 /* rows and tokens of a register tile: 12 sums, 3 weights, 1 activation */
#define TILE_T    4
#define GEMV_R    4 /* rows that a matrix-vector product reads side by side */
#define MX_STEP   2 /* MXFP4 blocks unpacked together */
#define MX_GEMV_R 2 /* rows of MXFP4 side by side */
#define HEADS_R   2 /* query heads side by side in attention, each with 4 vectors */

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

static inline vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
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

/* The inverse of vf_even and vf_odd for values that bf16 holds exactly. */
static inline void vf_store_pairs(uint16_t *p, vf even, vf odd)
{
    __m256i low = _mm256_srli_epi32(_mm256_castps_si256(even), 16);
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_or_si256(low, _mm256_castps_si256(odd)));
}

/* Two MXFP4 blocks (n = 2), or one, without their scales: w[block][even, odd][half]. The bytes of bf16
 * come from two tables of 16 and are woven together; one shuffle up front puts every value into the
 * lane that it belongs to. */
static inline void mx_unpack(const uint8_t *p, uint32_t n, vf w[MX_STEP][2][HALVES])
{
    const __m256i high = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xbf,
                      (char)0xbf, (char)0xbf, (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0));
    const __m256i low = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0, 0, 0,
                      (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0));
    const __m256i nibble = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    const __m128i *from = (const __m128i *)(const void *)p;
    __m256i x = n == 2 ? _mm256_loadu_si256((const __m256i *)(const void *)p)
                       : _mm256_inserti128_si256(zero, _mm_loadu_si128(from), 0);
    x = _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    for (int odd = 0; odd < 2; odd++) {
        __m256i code = _mm256_and_si256(odd ? _mm256_srli_epi16(x, 4) : x, nibble);
        __m256i hi = _mm256_shuffle_epi8(high, code), lo = _mm256_shuffle_epi8(low, code);
        __m256i block0 = _mm256_unpacklo_epi8(lo, hi), block1 = _mm256_unpackhi_epi8(lo, hi);
        w[0][odd][0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, block0));
        w[0][odd][1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, block0));
        w[1][odd][0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, block1));
        w[1][odd][1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, block1));
    }
}
