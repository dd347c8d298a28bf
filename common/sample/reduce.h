/* Reductions over a block of at most DMK_SAMPLE_BLOCK logits, the unit that every sum over the vocabulary
 * is made of. Internal to common/sample; pure functions.
 *
 * Inside a block row i belongs to lane i % 16; lanes add in the order of rows, the 16 lane sums in fp64 as
 * a fixed tree. Nothing depends on the instruction set: fp32 without contraction, exp by one polynomial
 * of about 2 ulp. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct dmk_block_max {
    float max;   /* -INFINITY when all are; undefined when broken */
    bool broken; /* a row is NaN or +INFINITY */
};

struct dmk_block_max dmk_reduce_max(const float *x, uint32_t n);

/* The sum of w = exp((x - max) * scale) over rows with w >= min_weight. max is at least every x and
 * finite, scale > 0. */
double dmk_reduce_sum(const float *x, uint32_t n, float max, float scale, float min_weight);

/* The same w one by one, 0 where it is below min_weight. Any n. x and ret_w may be the same. */
void dmk_reduce_weights(const float *x, uint32_t n, float max, float scale, float min_weight,
                        float *ret_w);
