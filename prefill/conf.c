/* The option table of damask-prefill. */
#include "prefill/conf.h"

#define AT(field) offsetof(struct dmk_prefill_options, field)

static const struct dmk_conf_option options[] = {
    {"max-jobs", DMK_CONF_U32, "64", 1, 4096, NULL,
     "Prompts that wait, are computed or wait for the decode worker's answer at a time.",
     AT(max_jobs)},
    {"chunk-tokens", DMK_CONF_U32, "2048", 1, 65536, NULL, "Prompt tokens in a step at most.",
     AT(chunk_tokens)},
    {"max-puts", DMK_CONF_U32, "256", 1, 65536, NULL, "Page writes in flight at a time.",
     AT(max_puts)},
    {"staging-pages", DMK_CONF_U32, "0", 0, 1048576, NULL,
     "Pages of pinned host memory that a GPU's pages leave through where the transport can not "
     "read "
     "device memory (tcp); prompts that do not fit go without. 0: none (cuda).",
     AT(staging_pages)},
    {"queue-budget", DMK_CONF_MS, "60s", 10, 3600000, NULL,
     "Time that a prompt may wait for its turn.", AT(queue_budget_ms)},
    {"resend-every", DMK_CONF_MS, "200ms", 10, 60000, NULL,
     "How often an unanswered word to a decode worker is sent again.", AT(resend_every_ms)},
    {"give-up", DMK_CONF_MS, "10s", 100, 3600000, NULL,
     "A finished job whose decode worker does not answer is forgotten after this time.",
     AT(give_up_ms)},
};

const struct dmk_conf_part dmk_prefill_part = {.options = options,
                                               .n_options = sizeof(options) / sizeof(options[0])};

static const struct dmk_conf_part *const parts[] = {&dmk_worker_part, &dmk_prefill_part, NULL};

static const struct dmk_conf_program program = {
    .name = "damask-prefill",
    .summary = "Prefill worker: computes the keys and values of prompts and writes them into "
               "decode workers.",
    .usage = "",
    .env_prefix = "DAMASK_PREFILL_",
    .parts = parts,
};

int dmk_prefill_options_load(int argc, char **argv, struct dmk_prefill_options *conf,
                             struct dmk_error *reterr)
{
    int r = dmk_conf_load(&program, argc, argv, conf, NULL, reterr);

    if (r == 0) {
        r = dmk_worker_options_check(&conf->worker, true, reterr);
    }
    return r == 0 ? dmk_worker_options_size_pools(&conf->worker, DMK_PREFILL_POOL_SEQUENCES, reterr)
                  : r;
}

void dmk_prefill_options_free(struct dmk_prefill_options *conf)
{
    dmk_conf_free(&program, conf);
}
