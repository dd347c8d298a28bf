/* Dot products of weight rows and token rows, as one vector and as register tiles; included once by
 * each instruction set's file after its vec_*.h.
 *
 * Token rows are first packed: bf16 pairs are split into vectors of first and of second elements, fp32,
 * in the order in which the inner loop eats them. Weights are read where they lie. Every sum is kept in
 * its 16 lanes until all of K is done, so tiling changes no bit. */
#pragma once

#include "kernels/kernels.h"

#define INLINE static inline __attribute__((always_inline))

#define BLOCK_ROWS 48 /* weight rows of one item of work; a multiple of every TILE_ROWS */
#define CHUNK      30
#define FETCH      512 /* elements between what is read and what is fetched from memory */
#define TILE_MIN   3   /* tokens of the narrowest tile; FEW + 1 or more of them part into tiles */

/* The scratch memory of a thread. */
struct dot_scratch {
    _Alignas(64) float x[CHUNK * DMK_K_BLOCK * TILE_T];
    _Alignas(64) float sums[BLOCK_ROWS * TILE_T * DMK_LANES];
    _Alignas(64) float out[8][BLOCK_ROWS * TILE_T]; /* [slice][row][token] */
    uint16_t rows[]; /* [BLOCK_ROWS][k] MXFP4 weights as bf16, or FEW packed rows of k floats */
};

/* lanes [4][16] to four sums, in the order of dmk_lanes_sum. */
INLINE void sum_lanes4(const float *lanes, float *out)
{
    __m128 b[4];
    for (int i = 0; i < 4; i++) {
        __m256 a =
            _mm256_add_ps(_mm256_loadu_ps(lanes + 16 * i), _mm256_loadu_ps(lanes + 16 * i + 8));
        b[i] = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    }
    _MM_TRANSPOSE4_PS(b[0], b[1], b[2], b[3]);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(b[0], b[2]), _mm_add_ps(b[1], b[3])));
}

/* How many of n > FEW token rows the next tile takes: tiles as even as can be, none below TILE_MIN. */
INLINE uint32_t tile_tokens(uint32_t n)
{
    uint32_t n_tiles = (n + TILE_T - 1) / TILE_T;
    return (n + n_tiles - 1) / n_tiles;
}

/* x: n_t token rows from block first on; packed [half][block][even, odd][token][VL]. */
INLINE void pack_tile(const uint16_t *const x[TILE_T], uint32_t first, uint32_t n_blocks,
                      const uint32_t n_t, float *packed)
{
    for (uint32_t h = 0; h < HALVES; h++) {
        for (uint32_t b = 0; b < n_blocks; b++) {
            size_t at = (size_t)(first + b) * DMK_K_BLOCK + h * 2 * VL;
#pragma GCC unroll 8
            for (uint32_t t = 0; t < n_t; t++) {
                vf_store(packed + t * VL, vf_even(x[t] + at));
                vf_store(packed + (n_t + t) * VL, vf_odd(x[t] + at));
            }
            packed += 2 * n_t * VL;
        }
    }
}

/* The compiler may not keep what it read at p before: a load is cheaper than the register. */
INLINE const uint16_t *load_again(const uint16_t *p)
{
    __asm__("" : "+r"(p));
    return p;
}

/* n_r rows by n_t tokens over a chunk of K; sums [row][token][16] go on from what they hold. The rows of
 * the next tile, `ahead` elements on, are fetched meanwhile. */
INLINE void dot_tile(const uint16_t *const *w, const float *packed, uint32_t n_blocks,
                     const uint32_t n_r, const uint32_t n_t, float *sums, bool begin, size_t ahead)
{
    for (uint32_t h = 0; h < HALVES; h++) {
        vf acc[TILE_ROWS(TILE_MIN)][TILE_T];
#pragma GCC unroll 8
        for (uint32_t r = 0; r < n_r; r++) {
#pragma GCC unroll 8
            for (uint32_t t = 0; t < n_t; t++) {
                acc[r][t] = begin ? vf_zero() : vf_load(sums + (r * n_t + t) * DMK_LANES + h * VL);
            }
        }
        for (uint32_t b = 0; b < n_blocks; b++) {
            size_t at = (size_t)b * DMK_K_BLOCK + h * 2 * VL;
            vf wv[TILE_ROWS(TILE_MIN)];
#pragma GCC unroll 8
            for (uint32_t r = 0; r < n_r; r++) {
                wv[r] = vf_even(w[r] + at);
                if (h == 0) {
                    _mm_prefetch((const char *)(w[r] + at + ahead), _MM_HINT_T0);
                }
            }
#pragma GCC unroll 8
            for (uint32_t t = 0; t < n_t; t++) {
                vf xv = vf_hold(vf_load(packed + t * VL));
#pragma GCC unroll 8
                for (uint32_t r = 0; r < n_r; r++) {
                    acc[r][t] = vf_fma(wv[r], xv, acc[r][t]);
                }
            }
#pragma GCC unroll 8
            for (uint32_t r = 0; r < n_r; r++) {
                wv[r] = vf_odd(load_again(w[r] + at));
            }
#pragma GCC unroll 8
            for (uint32_t t = 0; t < n_t; t++) {
                vf xv = vf_hold(vf_load(packed + (n_t + t) * VL));
#pragma GCC unroll 8
                for (uint32_t r = 0; r < n_r; r++) {
                    acc[r][t] = vf_fma(wv[r], xv, acc[r][t]);
                }
            }
            packed += 2 * n_t * VL;
        }
#pragma GCC unroll 8
        for (uint32_t r = 0; r < n_r; r++) {
#pragma GCC unroll 8
            for (uint32_t t = 0; t < n_t; t++) {
                vf_store(sums + (r * n_t + t) * DMK_LANES + h * VL, acc[r][t]);
            }
        }
    }
}

INLINE void dot_rows_tile_t(const uint16_t *w, size_t w_stride, uint32_t n_w,
                            const uint16_t *const x[TILE_T], uint32_t k, const uint32_t n_t,
                            struct dot_scratch *s, float *out)
{
    const uint32_t n_r = TILE_ROWS(n_t), n_blocks = k / DMK_K_BLOCK;
    for (uint32_t first = 0; first < n_blocks; first += CHUNK) {
        uint32_t n = n_blocks - first < CHUNK ? n_blocks - first : CHUNK;
        pack_tile(x, first, n, n_t, s->x);
        for (uint32_t row = 0; row < n_w; row += n_r) {
            const uint16_t *rows[TILE_ROWS(TILE_MIN)];
            for (uint32_t r = 0; r < n_r; r++) {
                uint32_t at = row + r < n_w ? row + r : n_w - 1;
                rows[r] = w + at * w_stride + (size_t)first * DMK_K_BLOCK;
            }
            dot_tile(rows, s->x, n, n_r, n_t, s->sums + (size_t)row * n_t * DMK_LANES, first == 0,
                     n_r * w_stride);
        }
    }
    for (uint32_t i = 0; i < (n_w + n_r - 1) / n_r * n_r * n_t; i += 4) {
        sum_lanes4(s->sums + (size_t)i * DMK_LANES, out + i);
    }
}

/* out [n_w][n_t] = dot of n_w <= BLOCK_ROWS weight rows and n_t token rows (see tile_tokens) over k
 * elements. Rows beyond n_w are repeats of the last one, which nobody looks at. */
static void dot_rows_tile(const uint16_t *w, size_t w_stride, uint32_t n_w,
                          const uint16_t *const x[TILE_T], uint32_t k, uint32_t n_t,
                          struct dot_scratch *s, float *out)
{
    switch (n_t) {
    case 3:
        dot_rows_tile_t(w, w_stride, n_w, x, k, 3, s, out);
        break;
    case 4:
        dot_rows_tile_t(w, w_stride, n_w, x, k, 4, s, out);
        break;
    case 5:
        dot_rows_tile_t(w, w_stride, n_w, x, k, 5, s, out);
        break;
    default:
        dot_rows_tile_t(w, w_stride, n_w, x, k, TILE_T, s, out);
    }
}

/* Token rows of k elements, each [block][even, odd][16], one after the other. */
static void pack_rows(const uint16_t *const *x, uint32_t n_t, uint32_t k, float *packed)
{
    for (uint32_t t = 0; t < n_t; t++) {
        for (uint32_t at = 0; at < k; at += DMK_K_BLOCK) {
            for (uint32_t h = 0; h < HALVES; h++) {
                vf_store(packed + h * VL, vf_even(x[t] + at + h * 2 * VL));
                vf_store(packed + DMK_LANES + h * VL, vf_odd(x[t] + at + h * 2 * VL));
            }
            packed += DMK_K_BLOCK;
        }
    }
}

/* lanes [n_r][n_t][16] = n_r weight rows times n_t packed rows, which lie x_stride apart. What comes
 * after these rows, `ahead` elements on, is fetched when their own end is near. */
INLINE void dot_few(const uint16_t *const *w, const float *packed, size_t x_stride, uint32_t k,
                    const uint32_t n_r, const uint32_t n_t, size_t ahead, float *lanes)
{
    vf acc[FEW_ROWS(1)][FEW][HALVES];
#pragma GCC unroll 8
    for (uint32_t i = 0; i < n_r * n_t * HALVES; i++) {
        acc[i / HALVES / n_t][i / HALVES % n_t][i % HALVES] = vf_zero();
    }
    for (uint32_t at = 0; at < k; at += DMK_K_BLOCK) {
        size_t fetch = at + FETCH < k ? at + FETCH : at + FETCH - k + ahead;
#pragma GCC unroll 8
        for (uint32_t r = 0; r < n_r; r++) {
            _mm_prefetch((const char *)(w[r] + fetch), _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (uint32_t h = 0; h < HALVES; h++) {
#pragma GCC unroll 8
            for (uint32_t r = 0; r < n_r; r++) {
                const uint16_t *p = w[r] + at + h * 2 * VL;
                vf even = vf_even(p), odd = vf_odd(p);
#pragma GCC unroll 8
                for (uint32_t t = 0; t < n_t; t++) {
                    const float *x = packed + t * x_stride + at + h * VL;
                    acc[r][t][h] = vf_fma(even, vf_load(x), acc[r][t][h]);
                    acc[r][t][h] = vf_fma(odd, vf_load(x + DMK_LANES), acc[r][t][h]);
                }
            }
        }
    }
#pragma GCC unroll 32
    for (uint32_t i = 0; i < n_r * n_t * HALVES; i++) {
        vf_store(lanes + i * VL, acc[i / HALVES / n_t][i / HALVES % n_t][i % HALVES]);
    }
}

INLINE void dot_rows_few_t(const uint16_t *w, size_t w_stride, uint32_t n_w, const float *packed,
                           uint32_t k, uint32_t n_slices, const uint32_t n_t,
                           float (*out)[BLOCK_ROWS * TILE_T])
{
    for (uint32_t row = 0; row < n_w; row += 4) {
        for (uint32_t slice = 0; slice < n_slices; slice++) {
            _Alignas(64) float lanes[4 * FEW * DMK_LANES];
            const uint16_t *rows[4];
            /* The next slice of the same rows, or the next rows. */
            size_t ahead = slice + 1 < n_slices ? k : FEW_ROWS(n_t) * w_stride - (size_t)slice * k;
            for (uint32_t r = 0; r < 4; r++) {
                uint32_t at = row + r < n_w ? row + r : n_w - 1;
                rows[r] = w + at * w_stride + (size_t)slice * k;
            }
#pragma GCC unroll 4
            for (uint32_t r = 0; r < 4; r += FEW_ROWS(n_t)) {
                dot_few(rows + r, packed + (size_t)slice * k, (size_t)k * n_slices, k,
                        FEW_ROWS(n_t), n_t, ahead, lanes + r * n_t * DMK_LANES);
            }
            for (uint32_t t = 0; t < n_t; t++) {
                sum_lanes4(lanes + t * 4 * DMK_LANES, out[slice] + row * n_t + t * 4);
            }
        }
    }
}

/* out[slice][row][token] for n_w <= BLOCK_ROWS rows and n_t <= FEW packed rows of n_slices * k elements. */
static void dot_rows_few(const uint16_t *w, size_t w_stride, uint32_t n_w, const float *packed,
                         uint32_t k, uint32_t n_slices, uint32_t n_t,
                         float (*out)[BLOCK_ROWS * TILE_T])
{
    switch (n_t) {
    case 1:
        dot_rows_few_t(w, w_stride, n_w, packed, k, n_slices, 1, out);
        break;
    case 2:
        dot_rows_few_t(w, w_stride, n_w, packed, k, n_slices, 2, out);
        break;
#if FEW > 2
    case 3:
        dot_rows_few_t(w, w_stride, n_w, packed, k, n_slices, 3, out);
        break;
#endif
    default:
        dot_rows_few_t(w, w_stride, n_w, packed, k, n_slices, FEW, out);
    }
}

/* out[0 .. n) becomes the tree sum of out[slice][0 .. n). */
static void sum_slices(float (*out)[BLOCK_ROWS * TILE_T], uint32_t n_slices, uint32_t n)
{
    for (uint32_t width = n_slices; width > 1; width /= 2) {
        for (uint32_t s = 0; s < width / 2; s++) {
            for (uint32_t i = 0; i < n; i++) {
                out[s][i] = out[2 * s][i] + out[2 * s + 1][i];
            }
        }
    }
}
