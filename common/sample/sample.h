/* Picks a token from a row of logits, and says how likely tokens were.
 *
 * A result is a pure function of the row, the parameters, the sequence's ids and (seed, choice,
 * position): no state is kept, so a retry, a preemption or another batch gives the same token. Order of
 * the steps:
 *
 *   log-probabilities, when asked for: log-softmax of the raw row, before everything below
 *   bans and the mask: never; logit bias is added
 *   repetition penalty r, for each id of prompt or answer: x > 0 ? x / r : x * r
 *   frequency and presence penalty, for each id n > 0 times in the answer: x - n * frequency - presence
 *   temperature 0: the largest, the lowest id among equals; otherwise with w = exp((x - max) / T)
 *   min-p: tokens with w < min_p leave (the best one's w is 1)
 *   top-k: the k largest stay, exactly k, the lowest ids among equals
 *   top-p: of what is left, the fewest largest whose share reaches p stay, lowest ids among equals
 *   one uniform number picks from the rest in proportion to w
 *
 * Sums over the vocabulary run in fixed blocks of DMK_SAMPLE_BLOCK rows: 16 fixed fp32 lanes inside a
 * block, then block after block in fp64 (reduce.h). Whoever holds whole blocks can compute its part
 * anywhere, and the result does not depend on how the vocabulary is cut.
 *
 * A sampler is scratch memory for one thread; nothing allocates after new. */
#pragma once

#include "common/base/error.h"
#include <stdbool.h>
#include <stdint.h>

#define DMK_SAMPLE_BLOCK    1571u /* 201088 = 128 * 1571 */
#define DMK_SAMPLE_MAX_TOP  20
#define DMK_SAMPLE_MAX_BIAS 1024
#define DMK_SAMPLE_GREEDY   1e-5f /* temperatures up to this are greedy */

/* Bounds that keep every sum finite; what an API allows is usually less. */
#define DMK_SAMPLE_MAX_TEMPERATURE 100.0f
#define DMK_SAMPLE_MAX_SHIFT       1e4f /* of a bias and of the additive penalties */
#define DMK_SAMPLE_MAX_REPETITION  100.0f

/* What a draw is for: draws for different purposes at one position are independent. */
enum dmk_draw { DMK_DRAW_TOKEN, DMK_DRAW_ACCEPT, DMK_DRAW_RESIDUAL };

struct dmk_sample_params {
    float temperature;                         /* 0 = greedy */
    float top_p;                               /* (0, 1]; 1 = off */
    uint32_t top_k;                            /* 0 = off */
    float min_p;                               /* [0, 1]; 0 = off */
    float frequency_penalty, presence_penalty; /* over the answer; finite, 0 = off */
    float repetition_penalty;                  /* over prompt and answer; > 0, 1 = off */
    uint64_t seed;
    uint32_t n_bias;
    const uint32_t
        *bias_ids; /* [n_bias], below the vocabulary's size; an id named twice has the sum */
    const float *bias_values; /* [n_bias]; finite, or -INFINITY for never */
    bool logprobs;
    uint32_t top_logprobs; /* up to DMK_SAMPLE_MAX_TOP; only with logprobs */
};

/* Whether params keep the bounds above, for a vocabulary of vocab ids. Once per request: what comes from
 * outside must pass here before it reaches dmk_sample. */
int dmk_sample_params_check(const struct dmk_sample_params *params, uint32_t vocab,
                            struct dmk_error *reterr);

struct dmk_sample_context {
    const uint32_t *ids; /* prompt and answer so far, each below the vocabulary's size */
    uint32_t n_prompt, n_ids;
    uint32_t choice;
    const uint32_t *banned; /* can not be picked (stop ids before min_tokens) */
    uint32_t n_banned;
    const uint64_t *allowed; /* bit id % 64 of word id / 64: may be picked; NULL: every id may */
};

struct dmk_sample_result {
    uint32_t id;
    float logprob;  /* of id; 0 when not asked for; -INFINITY when its raw logit is */
    uint32_t n_top; /* as asked for, or as many as are above -INFINITY */
    struct dmk_sample_top {
        uint32_t id;
        float logprob;
    } top[DMK_SAMPLE_MAX_TOP]; /* most likely first, the lowest id among equals */
};

struct dmk_sampler;

/* 25 bytes a vocabulary entry. 0 or -DMK_ENOMEM. */
int dmk_sampler_new(uint32_t vocab, struct dmk_sampler **ret);
void dmk_sampler_free(struct dmk_sampler **sampler);

/* logits: [vocab], unchanged; -INFINITY is a logit that can not be picked. The position of the draw is
 * n_ids. params may be used without penalties' ids: they are read only when a penalty is on. Returns 0, or
 *   -DMK_EFORMAT  a logit is NaN or +INFINITY: the numbers are broken and the request must fail
 *   -DMK_ENOENT   no token is left to pick: bans, bias, mask and -INFINITY logits take all */
int dmk_sample(struct dmk_sampler *sampler, const struct dmk_sample_params *params,
               const struct dmk_sample_context *context, const float *logits,
               struct dmk_sample_result *ret);

/* Rows of which nothing is asked but a temperature, min-p and the log-probability of the token can be picked
 * where the logits lie, by somebody who computes the same bits. Whether this is one, and its draw. */
struct dmk_sample_draw {
    float scale; /* 1 / temperature, 0: greedy */
    float min_p;
    double unit;
};
bool dmk_sample_plain(const struct dmk_sample_params *params,
                      const struct dmk_sample_context *context, uint32_t vocab,
                      struct dmk_sample_draw *ret);

/* The result of such a row, from what was picked: its logit, the largest one, and the sum of exp(x - max). */
void dmk_sample_plain_result(const struct dmk_sample_params *params, uint32_t id, float logit,
                             float max, double sum, struct dmk_sample_result *ret);

/* Log-probability of a given id under plain softmax, and the n_top most likely ones (prompt tokens).
 * Status as of dmk_sample. */
int dmk_sample_score(struct dmk_sampler *sampler, const float *logits, uint32_t id, uint32_t n_top,
                     struct dmk_sample_result *ret);
