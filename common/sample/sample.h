/* Picks a token from a row of logits, and says how likely tokens were.
 *
 * Order: bans, logit bias, penalties; then log-probabilities are taken; then temperature, top-k, top-p,
 * min-p, and a draw. Temperature 0 is the largest logit, the lowest id among equals. Sums run in blocks of
 * 1571 rows, in order, so they do not depend on how the vocabulary is cut. The random number is a pure
 * function of (seed, choice, position, purpose): no state is kept, and a retry or a preemption gives the
 * same token.
 *
 * A sampler is scratch memory for one thread; nothing allocates after new. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define DMK_SAMPLE_MAX_TOP  20
#define DMK_SAMPLE_MAX_BIAS 1024

struct dmk_sample_params {
    float temperature;                         /* 0 = greedy */
    float top_p;                               /* 1 = off */
    uint32_t top_k;                            /* 0 = off */
    float min_p;                               /* 0 = off */
    float frequency_penalty, presence_penalty; /* over the answer */
    float repetition_penalty;                  /* over prompt and answer; 1 = off */
    uint64_t seed;
    uint32_t n_bias;
    const uint32_t *bias_ids; /* [n_bias], below the vocabulary's size */
    const float *bias_values;
    bool logprobs;
    uint32_t top_logprobs; /* up to DMK_SAMPLE_MAX_TOP */
};

struct dmk_sample_context {
    const uint32_t *ids; /* prompt and answer so far */
    uint32_t n_prompt, n_ids;
    uint32_t choice;
    const uint32_t *banned; /* can not be picked (stop ids before min_tokens) */
    uint32_t n_banned;
};

struct dmk_sample_result {
    uint32_t id;
    float logprob; /* of id; 0 when not asked for */
    uint32_t n_top;
    struct dmk_sample_top {
        uint32_t id;
        float logprob;
    } top[DMK_SAMPLE_MAX_TOP]; /* most likely first */
};

struct dmk_sampler;

int dmk_sampler_new(uint32_t vocab, struct dmk_sampler **ret);
void dmk_sampler_free(struct dmk_sampler **sampler);

/* logits: [vocab], changed. The position of the draw is n_ids. */
void dmk_sample(struct dmk_sampler *sampler, const struct dmk_sample_params *params,
                const struct dmk_sample_context *context, float *logits,
                struct dmk_sample_result *ret);

/* Log-probability of a given id under plain softmax, and the n_top most likely ones (prompt tokens). */
void dmk_sample_score(struct dmk_sampler *sampler, const float *logits, uint32_t id, uint32_t n_top,
                      struct dmk_sample_result *ret);
