/* What the tests of common/sample share: seeded random numbers and rows. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include "common/base/rng.h"
#include "common/sample/sample.h"

struct random {
    uint64_t seed, n;
};

static inline double random_unit(struct random *r)
{
    return dmk_rng_unit(r->seed, 1, r->n++);
}

static inline uint32_t random_below(struct random *r, uint32_t n)
{
    return (uint32_t)(random_unit(r) * n);
}

/* A normal variate, by the sum of twelve. */
static inline float random_normal(struct random *r)
{
    double sum = -6.0;

    for (int i = 0; i < 12; i++) {
        sum += random_unit(r);
    }
    return (float)sum;
}
