/* The option table of damask-decode. */
#include "decode/conf.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(struct dmk_decode_options, field)

static const struct dmk_conf_option own_options[] = {
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

/* The joined table lives as long as the process: the conf is freed with it. */
const struct dmk_conf_option *dmk_decode_options_table(size_t *ret_n)
{
    static struct dmk_conf_option *options;
    static size_t n;

    if (!options) {
        options =
            dmk_worker_options_join(own_options, sizeof(own_options) / sizeof(own_options[0]), &n);
    }
    *ret_n = n;
    return options;
}

static struct dmk_conf_program program_of(void)
{
    size_t n;
    const struct dmk_conf_option *options = dmk_decode_options_table(&n);

    return (struct dmk_conf_program){
        .name = "damask-decode",
        .summary =
            "Decode worker: holds sequences, samples every token, computes short prompts itself.",
        .usage = "",
        .env_prefix = "DAMASK_DECODE_",
        .options = options,
        .n_options = n,
    };
}

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

int dmk_decode_options_load(int argc, char **argv, struct dmk_decode_options *conf,
                            uint32_t *ret_below, struct dmk_error *reterr)
{
    const struct dmk_conf_program program = program_of();
    int r = dmk_conf_load(&program, argc, argv, conf, NULL, reterr);

    if (r == 0) {
        r = dmk_worker_options_check(&conf->worker, false, reterr);
    }
    return r == 0 ? dmk_decode_options_below(conf->local_prefill_below, ret_below, reterr) : r;
}

void dmk_decode_options_free(struct dmk_decode_options *conf)
{
    const struct dmk_conf_program program = program_of();

    dmk_conf_free(&program, conf);
}
