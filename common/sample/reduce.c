/* Reductions over a block; see reduce.h.
 *
 * Written with the compiler's vectors of 16 floats, which every instruction set gets in pieces of its own
 * width with the same result. */
#include "common/sample/reduce.h"
#include <float.h>
#include <math.h>
#include <string.h>

#define LANES 16

typedef float lanes_f __attribute__((vector_size(4 * LANES)));
typedef int32_t lanes_i __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline))

/* Rows past the end read as -INFINITY, which weighs nothing. */
INLINE void load(const float *x, uint32_t n, lanes_f *ret)
{
    if (n >= LANES) {
        memcpy(ret, x, sizeof(*ret));
    } else {
        float padded[LANES];

        for (uint32_t i = 0; i < LANES; i++) {
            padded[i] = i < n ? x[i] : -INFINITY;
        }
        memcpy(ret, padded, sizeof(*ret));
    }
}

struct dmk_block_max dmk_reduce_max(const float *x, uint32_t n)
{
    lanes_f max = {0}, v;
    lanes_i broken = {0};
    float lane[LANES];
    int32_t bad[LANES];
    struct dmk_block_max r = {-INFINITY, false};

    max = max - INFINITY;
    for (uint32_t i = 0; i < n; i += LANES) {
        lanes_i larger;

        load(x + i, n - i, &v);
        larger = v > max;
        max = (lanes_f)((larger & (lanes_i)v) | (~larger & (lanes_i)max));
        broken |= ~(v <= FLT_MAX); /* a comparison with NaN is false */
    }
    memcpy(lane, &max, sizeof(lane));
    memcpy(bad, &broken, sizeof(bad));
    for (int i = 0; i < LANES; i++) {
        r.max = lane[i] > r.max ? lane[i] : r.max;
        r.broken |= bad[i] != 0;
    }
    return r;
}

/* exp(z) for z <= 0 in fp32; 0 below -86. The argument is cut into n ln 2 + r, |r| <= ln 2 / 2, with ln 2
 * in two parts so that r is exact enough; exp(r) is Cephes' polynomial. */
INLINE void exp_lanes(lanes_f *z)
{
    const lanes_i alive = *z >= -86.0f;
    const lanes_f x = (lanes_f)(alive & (lanes_i)*z);
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const lanes_f shifted = x * 1.44269504088896341f + round;
    const lanes_f n = shifted - round;
    const lanes_f r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    lanes_f y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    const lanes_i exponent = ((lanes_i)shifted - 0x4b400000) << 23;

    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    *z = (lanes_f)(((lanes_i)y + exponent) & alive);
}

INLINE void weigh(const float *x, uint32_t n, float max, float scale, float min_weight,
                  lanes_f *ret)
{
    lanes_f z;

    load(x, n, &z);
    z = (z - max) * scale;
    exp_lanes(&z);
    *ret = (lanes_f)((lanes_i)z & (z >= min_weight));
}

double dmk_reduce_sum(const float *x, uint32_t n, float max, float scale, float min_weight)
{
    lanes_f sum = {0}, w;
    float lane[LANES];
    double tree[LANES];

    for (uint32_t i = 0; i < n; i += LANES) {
        weigh(x + i, n - i, max, scale, min_weight, &w);
        sum += w;
    }
    memcpy(lane, &sum, sizeof(lane));
    for (int i = 0; i < LANES; i++) {
        tree[i] = lane[i];
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
    lanes_f w;

    for (uint32_t i = 0; i < n; i += LANES) {
        weigh(x + i, n - i, max, scale, min_weight, &w);
        memcpy(ret_w + i, &w, (n - i < LANES ? n - i : LANES) * sizeof(*ret_w));
    }
}
