/* What the files of the engine's dialect share: api_engine.c (requests), api_engine_out.c (answers),
 * api_engine_logprobs.c (lists of tokens with their log-probabilities). */
#pragma once

#include "proto/vllm_engine.pb-c.h"
#include "router/api.h"

int dmk_engine_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                     struct dmk_ask *ask, struct dmk_api_error *reterr);

struct dmk_engine_top {
    uint32_t id;
    float logprob;
};

/* Tokens in order. What there is no memory for is missing at the end. */
struct dmk_engine_tokens {
    uint32_t *ids; /* [n] */
    size_t n, cap;
    struct dmk_engine_lp *lps; /* [n], or NULL: no log-probabilities */
};

struct dmk_engine_lp {
    float logprob;
    bool has_logprob;
    uint32_t n_top;
    struct dmk_engine_top top[DMK_ASK_MAX_TOP];
};

/* logprobs: the same in every call for one list. */
void dmk_engine_tokens_add(struct dmk_engine_tokens *to, const struct dmk_lp *lps, size_t n,
                           bool logprobs);
void dmk_engine_tokens_fini(struct dmk_engine_tokens *tokens);

/* The log-probabilities of a list that has them, in one block of memory that points into itself; freed with
 * free. NULL: no memory, or none are there. */
Vllm__Grpc__Engine__OutputLogProbs *
dmk_engine_output_logprobs(const struct dmk_engine_tokens *tokens);
Vllm__Grpc__Engine__InputLogProbs *
dmk_engine_input_logprobs(const struct dmk_engine_tokens *tokens);
