/* What the tests of common/text share: the vocabulary, opened once, and a seeded random source. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include "common/base/rng.h"
#include "common/text/tokenizer.h"
#include "common/text/bpe.h"

struct fixture {
    struct dmk_vocab *vocab;
    struct dmk_bpe_scratch *scratch;
};

static inline int fixture_open(void **state)
{
    static struct fixture f;
    struct dmk_error error;

    if (dmk_vocab_open(DMK_TEST_VOCAB, &f.vocab, &error) < 0) {
        (void)fprintf(stderr, "%s (./dev deps brings it)\n", error.text);
        return -1;
    }
    f.scratch = dmk_bpe_scratch_new();
    *state = &f;
    return f.scratch ? 0 : -1;
}

static inline int fixture_close(void **state)
{
    struct fixture *f = *state;

    dmk_bpe_scratch_free(&f->scratch);
    dmk_vocab_close(&f->vocab);
    return 0;
}

/* A stream of random numbers. */
struct random {
    uint64_t seed, n;
};

static inline uint64_t random_next(struct random *r)
{
    return dmk_rng_u64(r->seed, 0, r->n++);
}

static inline uint32_t random_below(struct random *r, uint32_t n)
{
    return (uint32_t)(random_next(r) % n);
}
