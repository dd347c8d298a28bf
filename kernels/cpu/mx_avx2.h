/* MXFP4 with AVX2: blocks to bf16, and rows times a few tokens without leaving the registers.
 *
 * A value's two bf16 bytes come from two tables of 16, one pair of tables for each scale, so scaling costs
 * nothing; a shuffle up front puts every value into the lane that it belongs to. Shuffles and shifts share
 * a port with half of the multiplications, so what counts is how many there are of both. */
#pragma once

#include "kernels/cpu/dot_tmpl.h"

/* [scale][upper, lower byte][code], twice for the two halves of a vector */
static _Alignas(64) uint8_t mx_bytes[256][2][32];

static void mx_init(void)
{
    for (uint32_t scale = 0; scale < 256; scale++) {
        for (uint32_t i = 0; i < 32; i++) {
            float value = dmk_e2m1_to_f32(i & 15) * dmk_ue8m0_to_f32((uint8_t)scale);
            mx_bytes[scale][0][i] = (uint8_t)(dmk_f32_bits(value) >> 24);
            mx_bytes[scale][1][i] = (uint8_t)(dmk_f32_bits(value) >> 16);
        }
    }
}

/* One block as two vectors of 16 bf16, the even elements and the odd ones. `order` names, for each half,
 * the eight lanes that go there, twice. */
INLINE void mx_words(const uint8_t *p, uint8_t scale, __m256i order, __m256i *even, __m256i *odd)
{
    const uint8_t(*table)[32] = mx_bytes[scale];
    const __m256i upper = _mm256_load_si256((const __m256i *)(const void *)table[0]);
    const __m256i lower = _mm256_load_si256((const __m256i *)(const void *)table[1]);
    __m256i x = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)p));
    x = _mm256_shuffle_epi8(x, order);
    /* Now the low nibbles of the eight lanes, then their high nibbles. */
    x = _mm256_srlv_epi32(x, _mm256_setr_epi32(0, 0, 4, 4, 0, 0, 4, 4));
    x = _mm256_and_si256(x, _mm256_set1_epi8(15));
    __m256i hi = _mm256_shuffle_epi8(upper, x), lo = _mm256_shuffle_epi8(lower, x);
    *even = _mm256_unpacklo_epi8(lo, hi);
    *odd = _mm256_unpackhi_epi8(lo, hi);
}

/* One block as 32 bf16 in memory: exact, since codes have two significant bits. */
INLINE void mx_block_bf16(const uint8_t *p, uint8_t scale, uint16_t *out)
{
    const __m256i order = _mm256_setr_epi8(0, 1, 2, 3, 8, 9, 10, 11, 0, 1, 2, 3, 8, 9, 10, 11, 4, 5,
                                           6, 7, 12, 13, 14, 15, 4, 5, 6, 7, 12, 13, 14, 15);
    __m256i even, odd;
    mx_words(p, scale, order, &even, &odd);
    _mm256_storeu_si256((__m256i *)(void *)out, _mm256_unpacklo_epi16(even, odd));
    _mm256_storeu_si256((__m256i *)(void *)(out + 16), _mm256_unpackhi_epi16(even, odd));
}

/* lanes [n_r][n_t][16] = n_r rows times n_t packed rows; the next rows lie `ahead` bytes on. */
INLINE void mx_dot_rows(const uint8_t *const *rows, const uint8_t *const *scales,
                        const float *packed, uint32_t n_blocks, const uint32_t n_r,
                        const uint32_t n_t, size_t ahead, float *lanes)
{
    /* Lanes l and l + 8 share a dword: the lower half of it moves up, the upper one stays. */
    const __m256i order = _mm256_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 0, 8, 1, 9, 2, 10, 3, 11, 4,
                                           12, 5, 13, 6, 14, 7, 15, 4, 12, 5, 13, 6, 14, 7, 15);
    const vf stays = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000));
    vf acc[2][FEW][HALVES];
#pragma GCC unroll 16
    for (uint32_t i = 0; i < n_r * n_t * HALVES; i++) {
        acc[i / HALVES / n_t][i / HALVES % n_t][i % HALVES] = vf_zero();
    }
    for (uint32_t b = 0; b < n_blocks; b++) {
#pragma GCC unroll 2
        for (uint32_t r = 0; r < n_r; r++) {
            const uint8_t *block = rows[r] + (size_t)b * DMK_MXFP4_BLOCK_BYTES;
            __m256i even, odd;
            mx_words(block, scales[r][b], order, &even, &odd);
            const vf w[4] = {_mm256_castsi256_ps(_mm256_slli_epi32(even, 16)),
                             _mm256_and_ps(stays, _mm256_castsi256_ps(even)),
                             _mm256_castsi256_ps(_mm256_slli_epi32(odd, 16)),
                             _mm256_and_ps(stays, _mm256_castsi256_ps(odd))};
            _mm_prefetch((const char *)block + ahead, _MM_HINT_T0);
#pragma GCC unroll 4
            for (uint32_t t = 0; t < n_t; t++) {
                const float *x = packed + ((size_t)t * n_blocks + b) * DMK_K_BLOCK;
#pragma GCC unroll 4
                for (uint32_t i = 0; i < 4; i++) {
                    acc[r][t][i % 2] = vf_fma(w[i], vf_load(x + i * VL), acc[r][t][i % 2]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (uint32_t i = 0; i < n_r * n_t * HALVES; i++) {
        vf_store(lanes + i * VL, acc[i / HALVES / n_t][i / HALVES % n_t][i % HALVES]);
    }
}

/* lanes [4][n_t][16] = four rows times n_t <= FEW packed rows; the next four lie `ahead` bytes on. */
INLINE void mx_dot4(const uint8_t *const rows[4], const uint8_t *const scales[4],
                    const float *packed, uint32_t n_blocks, const uint32_t n_t, size_t ahead,
                    float *lanes)
{
#pragma GCC unroll 2
    for (uint32_t r = 0; r < 4; r += 2) {
        mx_dot_rows(rows + r, scales + r, packed, n_blocks, 2, n_t, ahead,
                    lanes + r * n_t * DMK_LANES);
    }
}
