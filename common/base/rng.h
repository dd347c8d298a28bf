/* Counter-based random numbers: the value is a pure function of (seed, stream, counter).
 *
 * No state is kept, so a retry, a preemption or another batch gives the same numbers. The mixer is
 * three rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014) over the three words. */
#pragma once

#include <stdint.h>

static inline uint64_t dmk_rng_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static inline uint64_t dmk_rng_u64(uint64_t seed, uint64_t stream, uint64_t counter)
{
    return dmk_rng_mix(dmk_rng_mix(dmk_rng_mix(seed) ^ stream) ^ counter);
}

/* Uniform in [0, 1) with 53 bits. */
static inline double dmk_rng_unit(uint64_t seed, uint64_t stream, uint64_t counter)
{
    return (double)(dmk_rng_u64(seed, stream, counter) >> 11) * 0x1.0p-53;
}
