/* Vectors of 16 floats for the templates: AVX-512 (F, BW, DQ, VL). */
#pragma once

#include <immintrin.h>
#include "kernels/numeric.h"

#define VL        16
#define HALVES    1 /* vectors that make 16 lanes */
#define TILE_R    4 /* rows and tokens of a register tile: 24 sums, 4 weights, 1 activation */
#define TILE_T    6
#define GEMV_R    4 /* rows that a matrix-vector product reads side by side */
#define MX_STEP   1 /* MXFP4 blocks unpacked together */
#define MX_GEMV_R 4 /* rows of MXFP4 side by side */
#define HEADS_R   4 /* query heads side by side in attention, each with 4 vectors */

typedef __m512 vf;

static inline vf vf_zero(void)
{
    return _mm512_setzero_ps();
}

static inline vf vf_set1(float x)
{
    return _mm512_set1_ps(x);
}

static inline vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

static inline void vf_store(float *p, vf x)
{
    _mm512_storeu_ps(p, x);
}

static inline vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}

static inline vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}

static inline vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

/* a * b + c, rounded once */
static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

/* VL pairs of bf16: the first, or the second, of each. */
static inline vf vf_even(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}

static inline vf vf_odd(const uint16_t *p)
{
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_set1_epi32((int)0xffff0000), _mm512_loadu_si512(p)));
}

/* VL consecutive bf16. */
static inline vf vf_bf16(const uint16_t *p)
{
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

/* The inverse of vf_even and vf_odd for values that bf16 holds exactly. */
static inline void vf_store_pairs(uint16_t *p, vf even, vf odd)
{
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_castps_si512(odd)));
}

/* One MXFP4 block without its scale: w[0][even, odd][0], by a table of 16 values in a register. */
static inline void mx_unpack(const uint8_t *p, uint32_t n, vf w[MX_STEP][2][HALVES])
{
    (void)n;
    const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f,
                                        -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    w[0][0][0] = _mm512_permutexvar_ps(x, table);
    w[0][1][0] = _mm512_permutexvar_ps(_mm512_srli_epi32(x, 4), table);
}
