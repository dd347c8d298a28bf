/* Lists of tokens with their log-probabilities; see api_engine.h. No state. */
#include <stdlib.h>
#include "router/api_engine.h"

typedef Vllm__Grpc__Engine__TopLogProbs top_msg;
typedef Vllm__Grpc__Engine__InputTokenLogProb value_msg;

static bool grow(struct dmk_engine_tokens *t, size_t n, bool logprobs)
{
    size_t cap = t->cap ? t->cap : 16;
    uint32_t *ids;

    if (t->n + n <= t->cap) {
        return true;
    }
    while (cap < t->n + n) {
        cap *= 2;
    }
    ids = realloc(t->ids, cap * sizeof(*ids));
    if (!ids) {
        return false;
    }
    t->ids = ids;
    if (logprobs) {
        struct dmk_engine_lp *lps = realloc(t->lps, cap * sizeof(*lps));

        if (!lps) {
            return false;
        }
        t->lps = lps;
    }
    t->cap = cap;
    return true;
}

void dmk_engine_tokens_add(struct dmk_engine_tokens *to, const struct dmk_lp *lps, size_t n,
                           bool logprobs)
{
    if (!grow(to, n, logprobs)) {
        return;
    }
    for (size_t i = 0; i < n; i++) {
        to->ids[to->n + i] = lps[i].id;
        if (logprobs) {
            struct dmk_engine_lp *lp = &to->lps[to->n + i];

            lp->logprob = lps[i].logprob;
            lp->has_logprob = lps[i].has_logprob;
            lp->n_top = lps[i].n_top;
            for (uint32_t k = 0; k < lp->n_top; k++) {
                lp->top[k] = (struct dmk_engine_top){lps[i].top[k].id, lps[i].top[k].logprob};
            }
        }
    }
    to->n += n;
}

void dmk_engine_tokens_fini(struct dmk_engine_tokens *tokens)
{
    free(tokens->ids);
    free(tokens->lps);
    *tokens = (struct dmk_engine_tokens){0};
}

/* The alternatives of all tokens. */
static size_t tops_bytes(const struct dmk_engine_tokens *t)
{
    size_t n = 0;

    for (size_t i = 0; i < t->n; i++) {
        n += t->lps[i].n_top;
    }
    return t->n * (sizeof(top_msg *) + sizeof(top_msg)) + n * (sizeof(float) + sizeof(uint32_t));
}

/* at: aligned for pointers. */
static top_msg **fill_tops(const struct dmk_engine_tokens *t, char *at)
{
    top_msg *msgs = (top_msg *)(void *)at;
    top_msg **ptrs = (top_msg **)(void *)(msgs + t->n);
    float *values = (float *)(void *)(ptrs + t->n);

    for (size_t i = 0; i < t->n; i++) {
        const struct dmk_engine_lp *lp = &t->lps[i];
        uint32_t *ids = (uint32_t *)(void *)(values + lp->n_top);

        msgs[i] = (top_msg)VLLM__GRPC__ENGINE__TOP_LOG_PROBS__INIT;
        msgs[i].values = values;
        msgs[i].n_values = lp->n_top;
        msgs[i].token_ids = ids;
        msgs[i].n_token_ids = lp->n_top;
        for (uint32_t k = 0; k < lp->n_top; k++) {
            values[k] = lp->top[k].logprob;
            ids[k] = lp->top[k].id;
        }
        values = (float *)(void *)(ids + lp->n_top);
        ptrs[i] = &msgs[i];
    }
    return ptrs;
}

Vllm__Grpc__Engine__OutputLogProbs *dmk_engine_output_logprobs(const struct dmk_engine_tokens *t)
{
    Vllm__Grpc__Engine__OutputLogProbs *m;
    float *values;

    if (!t->lps || t->n == 0) {
        return NULL;
    }
    m = malloc(sizeof(*m) + tops_bytes(t) + t->n * sizeof(float));
    if (!m) {
        return NULL;
    }
    *m = (Vllm__Grpc__Engine__OutputLogProbs)VLLM__GRPC__ENGINE__OUTPUT_LOG_PROBS__INIT;
    m->top_logprobs = fill_tops(t, (char *)(m + 1));
    m->n_top_logprobs = t->n;
    values = (float *)(void *)((char *)(m + 1) + tops_bytes(t));
    for (size_t i = 0; i < t->n; i++) {
        values[i] = t->lps[i].logprob;
    }
    m->token_logprobs = values;
    m->n_token_logprobs = t->n;
    m->token_ids = t->ids;
    m->n_token_ids = t->n;
    return m;
}

Vllm__Grpc__Engine__InputLogProbs *dmk_engine_input_logprobs(const struct dmk_engine_tokens *t)
{
    Vllm__Grpc__Engine__InputLogProbs *m;
    value_msg *msgs, **ptrs;
    char *at;

    if (!t->lps || t->n == 0) {
        return NULL;
    }
    m = malloc(sizeof(*m) + t->n * (sizeof(value_msg) + sizeof(value_msg *)) + tops_bytes(t));
    if (!m) {
        return NULL;
    }
    *m = (Vllm__Grpc__Engine__InputLogProbs)VLLM__GRPC__ENGINE__INPUT_LOG_PROBS__INIT;
    msgs = (value_msg *)(void *)(m + 1);
    ptrs = (value_msg **)(void *)(msgs + t->n);
    at = (char *)(ptrs + t->n);
    for (size_t i = 0; i < t->n; i++) {
        msgs[i] = (value_msg)VLLM__GRPC__ENGINE__INPUT_TOKEN_LOG_PROB__INIT;
        if (t->lps[i].has_logprob) {
            msgs[i].opt_value_case = VLLM__GRPC__ENGINE__INPUT_TOKEN_LOG_PROB__OPT_VALUE_VALUE;
            msgs[i].value = t->lps[i].logprob;
        }
        ptrs[i] = &msgs[i];
    }
    m->token_logprobs = ptrs;
    m->n_token_logprobs = t->n;
    m->token_ids = t->ids;
    m->n_token_ids = t->n;
    m->top_logprobs = fill_tops(t, at);
    m->n_top_logprobs = t->n;
    return m;
}
