/* Reductions over a block; see reduce.h.
 *
 * Sixteen lanes are four of the compiler's vectors of four floats, which every instruction set has, with the
 * same result. */
#include "common/sample/reduce.h"
#include <float.h>
#include <math.h>
#include <string.h>

#define LANES 16
#define PARTS 4

typedef float vec_f __attribute__((vector_size(16)));
typedef int32_t vec_i __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))

/* Four rows of a block; rows past the end read as -INFINITY, which weighs nothing. n may be negative. */
INLINE vec_f load(const float *x, int32_t n)
{
    vec_f v;

    if (n >= 4) {
        memcpy(&v, x, sizeof(v));
        return v;
    }
    return (vec_f){n > 0 ? x[0] : -INFINITY, n > 1 ? x[1] : -INFINITY, n > 2 ? x[2] : -INFINITY,
                   -INFINITY};
}

struct dmk_block_max dmk_reduce_max(const float *x, uint32_t n)
{
    const vec_f least = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    vec_f max[PARTS] = {least, least, least, least};
    vec_i broken = {0, 0, 0, 0};
    struct dmk_block_max r = {-INFINITY, false};

    for (uint32_t i = 0; i < n; i += LANES) {
        for (uint32_t k = 0; k < PARTS; k++) {
            const vec_f v = load(x + i + 4 * k, (int32_t)(n - i) - 4 * (int32_t)k);
            const vec_i larger = v > max[k];

            max[k] = (vec_f)((larger & (vec_i)v) | (~larger & (vec_i)max[k]));
            broken |= ~(v <= FLT_MAX); /* a comparison with NaN is false */
        }
    }
    for (int i = 0; i < LANES; i++) {
        r.max = max[i / 4][i % 4] > r.max ? max[i / 4][i % 4] : r.max;
        r.broken |= broken[i % 4] != 0;
    }
    return r;
}

/* exp(z) for z <= 0 in fp32; 0 below -86. The argument is cut into n ln 2 + r, |r| <= ln 2 / 2, with ln 2
 * in two parts so that r is exact enough; exp(r) is Cephes' polynomial. */
INLINE vec_f exp_vec(vec_f z)
{
    const vec_i alive = z >= -86.0f;
    const vec_f x = (vec_f)(alive & (vec_i)z);
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const vec_f shifted = x * 1.44269504088896341f + round;
    const vec_f n = shifted - round;
    const vec_f r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    const vec_i exponent = ((vec_i)shifted - 0x4b400000) << 23;
    vec_f y = r * 1.9875691500e-4f + 1.3981999507e-3f;

    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    return (vec_f)(((vec_i)y + exponent) & alive);
}

INLINE vec_f weigh(vec_f x, float max, float scale, float min_weight)
{
    const vec_f w = exp_vec((x - max) * scale);

    return (vec_f)((vec_i)w & (w >= min_weight));
}

double dmk_reduce_sum(const float *x, uint32_t n, float max, float scale, float min_weight)
{
    vec_f sum[PARTS] = {{0}};
    double tree[LANES];

    for (uint32_t i = 0; i < n; i += LANES) {
        for (uint32_t k = 0; k < PARTS; k++) {
            const vec_f v = load(x + i + 4 * k, (int32_t)(n - i) - 4 * (int32_t)k);

            sum[k] += weigh(v, max, scale, min_weight);
        }
    }
    for (int i = 0; i < LANES; i++) {
        tree[i] = sum[i / 4][i % 4];
    }
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            tree[i] += tree[i + half];
        }
    }
    return tree[0];
}

void dmk_reduce_weights(const float *x, uint32_t n, float max, float scale, float min_weight,
                        float *ret_w)
{
    for (uint32_t i = 0; i < n; i += 4) {
        const vec_f w = weigh(load(x + i, (int32_t)(n - i)), max, scale, min_weight);

        memcpy(ret_w + i, &w, (n - i < 4 ? n - i : 4) * sizeof(*ret_w));
    }
}
