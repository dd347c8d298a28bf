/* Which requests are sent and when: from a trace, by chance, evenly, or one after the other.
 *
 * A trace is JSON lines as Mooncake publishes them: {"timestamp": ms, "input_length": n, "output_length": n,
 * "hash_ids": [one for each 512 tokens]}; prompts with the same leading ids have the same leading text. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "common/base/buf.h"
#include "common/base/error.h"

#define PLAN_BLOCK 512u /* tokens of a hash id */

struct plan_request {
    uint64_t at_ns; /* from the start; closed loop: 0 */
    uint32_t n_in, n_out;
    uint64_t seed;  /* of blocks without a hash id */
    uint64_t *hash; /* [n_hash] */
    uint32_t n_hash;
};

struct plan {
    struct plan_request *requests;
    size_t n;
    size_t closed; /* requests open at a time; 0: at their times */
};

struct plan_conf {
    const char *trace;  /* or "" */
    double speedup;     /* of a trace's clock */
    size_t n_requests;  /* of a trace: at most; 0: all */
    double rate;        /* requests a second */
    bool even;          /* else by chance (Poisson) */
    size_t concurrency; /* closed loop; 0: open */
    uint32_t n_in, n_out;
    uint32_t n_shared; /* leading tokens that all prompts share */
    uint64_t seed;
};

int plan_make(const struct plan_conf *conf, struct plan *ret, struct dmk_error *reterr);
void plan_free(struct plan *plan);
/* The prompt's text: n_in words with a blank in front, each a token of o200k. */
void plan_prompt(const struct plan_request *request, struct dmk_buf *out);
