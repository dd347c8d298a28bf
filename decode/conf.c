/* The option table of damask-decode. */
#include "decode/conf.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(struct dmk_decode_options, field)

static const char *const prompt_experts[] = {"same", "mxfp4", "fp8", "bf16", NULL};
static const char *const prompt_dense[] = {"same", "bf16", "fp8", NULL};

static const struct dmk_conf_option options[] = {
    {"max-sequences", DMK_CONF_U32, "64", 1, 4096, NULL,
     "Sequences that run or wait for their pages at a time; each choice of a request is one.",
     AT(max_sequences)},
    {"chunk-tokens", DMK_CONF_U32, "512", 1, 65536, NULL,
     "Prompt tokens that are mixed into a step at most, when prompts are computed here.",
     AT(chunk_tokens)},
    {"score-rows", DMK_CONF_U32, "32", 1, 4096, NULL,
     "Prompt tokens whose log-probabilities are computed in a step at most.", AT(score_rows)},
    {"local-prefill-below", DMK_CONF_STR, "256", 0, 0, NULL,
     "A prompt with fewer tokens to compute than this is computed here, without a prefill worker; "
     "max: "
     "every prompt is.",
     AT(local_prefill_below)},
    {"prompt-experts", DMK_CONF_ENUM, "same", 0, 0, prompt_experts,
     "Format of the experts in the prefill pool, where it differs from this worker's: fp8 there "
     "reads prompts faster, mxfp4 here makes steps faster. This worker then computes no prompts "
     "but those whose log-probabilities are asked for.",
     AT(prompt_experts)},
    {"prompt-dense", DMK_CONF_ENUM, "same", 0, 0, prompt_dense,
     "Format of the dense weights in the prefill pool, where it differs from this worker's; bf16 "
     "is the checkpoint's.",
     AT(prompt_dense)},
    {"ticket-expiry", DMK_CONF_MS, "60s", 10, 3600000, NULL,
     "Time in which a prefill worker must claim a ticket; its queue is part of it.",
     AT(ticket_expiry_ms)},
    {"quiet-ask-every", DMK_CONF_MS, "500ms", 10, 60000, NULL,
     "How often a prefill worker that owes an answer about its writes is asked for it.",
     AT(quiet_ask_every_ms)},
    {"max-draining-pages", DMK_CONF_U32, "0", 0, 16777216, NULL,
     "Pages that a prefill worker may leave waiting for its last word before its claims are "
     "refused; "
     "0: a quarter of the full pages.",
     AT(max_draining_pages)},
};

const struct dmk_conf_part dmk_decode_part = {.options = options,
                                              .n_options = sizeof(options) / sizeof(options[0])};

static const struct dmk_conf_part *const parts[] = {&dmk_worker_part, &dmk_decode_part, NULL};

static const struct dmk_conf_program program = {
    .name = "damask-decode",
    .summary =
        "Decode worker: holds sequences, samples every token, computes short prompts itself.",
    .usage = "",
    .env_prefix = "DAMASK_DECODE_",
    .parts = parts,
};

int dmk_decode_options_below(const char *text, uint32_t *ret, struct dmk_error *reterr)
{
    char *end = NULL;
    unsigned long v;

    if (strcmp(text, "max") == 0) {
        *ret = UINT32_MAX;
        return 0;
    }
    errno = 0;
    v = strtoul(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != 0 || errno != 0 || v >= UINT32_MAX) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "local-prefill-below is \"%s\": a number of tokens or max is wanted",
                             text);
    }
    *ret = (uint32_t)v;
    return 0;
}

uint32_t dmk_decode_options_pool_sequences(const struct dmk_decode_options *conf)
{
    const bool mixed = conf->prompt_experts != DMK_PROMPT_EXPERTS_SAME ||
                       conf->prompt_dense != DMK_PROMPT_DENSE_SAME;

    return conf->max_sequences * (mixed ? 2 : 1);
}

int dmk_decode_options_load(int argc, char **argv, struct dmk_decode_options *conf,
                            uint32_t *ret_below, struct dmk_error *reterr)
{
    int r = dmk_conf_load(&program, argc, argv, conf, NULL, reterr);

    if (r == 0) {
        r = dmk_worker_options_check(&conf->worker, false, reterr);
    }
    if (r == 0) {
        r = dmk_worker_options_size_pools(&conf->worker, dmk_decode_options_pool_sequences(conf),
                                          reterr);
    }
    return r == 0 ? dmk_decode_options_below(conf->local_prefill_below, ret_below, reterr) : r;
}

void dmk_decode_options_free(struct dmk_decode_options *conf)
{
    dmk_conf_free(&program, conf);
}
