/* MXFP4 with AVX-512: a scale's 16 values are one register, and a nibble picks its value by a shuffle. */
#pragma once

#include "kernels/cpu/dot_tmpl.h"

/* [scale][code] */
static _Alignas(64) float mx_values[256][16];

static void mx_init(void)
{
    for (uint32_t scale = 0; scale < 256; scale++) {
        for (uint32_t code = 0; code < 16; code++) {
            mx_values[scale][code] = dmk_e2m1_to_f32(code) * dmk_ue8m0_to_f32((uint8_t)scale);
        }
    }
}

/* One block: w[even, odd element]. */
INLINE void mx_block(const uint8_t *p, uint8_t scale, vf w[2])
{
    vf table = _mm512_load_ps(mx_values[scale]);
    __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    w[0] = _mm512_permutexvar_ps(x, table);
    w[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(x, 4), table);
}

/* One block as 32 bf16: exact, since codes have two significant bits. */
INLINE void mx_block_bf16(const uint8_t *p, uint8_t scale, uint16_t *out)
{
    vf w[2];
    mx_block(p, scale, w);
    __m512i even = _mm512_srli_epi32(_mm512_castps_si512(w[0]), 16);
    _mm512_storeu_si512(out, _mm512_or_si512(even, _mm512_castps_si512(w[1])));
}

/* lanes [4][n_t][16] = four rows times n_t packed rows; the next four lie `ahead` bytes on. */
INLINE void mx_dot4(const uint8_t *const rows[4], const uint8_t *const scales[4],
                    const float *packed, uint32_t n_blocks, const uint32_t n_t, size_t ahead,
                    float *lanes)
{
    vf acc[4][FEW];
#pragma GCC unroll 16
    for (uint32_t i = 0; i < 4 * n_t; i++) {
        acc[i / n_t][i % n_t] = vf_zero();
    }
    for (uint32_t b = 0; b < n_blocks; b++) {
#pragma GCC unroll 4
        for (uint32_t r = 0; r < 4; r++) {
            const uint8_t *block = rows[r] + (size_t)b * DMK_MXFP4_BLOCK_BYTES;
            vf w[2];
            mx_block(block, scales[r][b], w);
            _mm_prefetch((const char *)block + ahead, _MM_HINT_T0);
#pragma GCC unroll 4
            for (uint32_t t = 0; t < n_t; t++) {
                const float *x = packed + ((size_t)t * n_blocks + b) * DMK_K_BLOCK;
                acc[r][t] = vf_fma(w[0], vf_load(x), acc[r][t]);
                acc[r][t] = vf_fma(w[1], vf_load(x + DMK_LANES), acc[r][t]);
            }
        }
    }
#pragma GCC unroll 16
    for (uint32_t i = 0; i < 4 * n_t; i++) {
        vf_store(lanes + i * DMK_LANES, acc[i / n_t][i % n_t]);
    }
}
