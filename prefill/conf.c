/* The option table of damask-prefill. */
#include "prefill/conf.h"

#define AT(field) offsetof(struct dmk_prefill_options, field)

static const struct dmk_conf_option own_options[] = {
    {"max-jobs", DMK_CONF_U32, "64", 1, 4096, NULL,
     "Prompts that wait, are computed or wait for the decode worker's answer at a time.",
     AT(max_jobs)},
    {"chunk-tokens", DMK_CONF_U32, "2048", 1, 65536, NULL, "Prompt tokens in a step at most.",
     AT(chunk_tokens)},
    {"max-puts", DMK_CONF_U32, "256", 1, 65536, NULL, "Page writes in flight at a time.",
     AT(max_puts)},
    {"queue-budget", DMK_CONF_MS, "60s", 10, 3600000, NULL,
     "Time that a prompt may wait for its turn.", AT(queue_budget_ms)},
    {"resend-every", DMK_CONF_MS, "200ms", 10, 60000, NULL,
     "How often an unanswered word to a decode worker is sent again.", AT(resend_every_ms)},
    {"give-up", DMK_CONF_MS, "10s", 100, 3600000, NULL,
     "Without a connection to its decode worker a finished job is forgotten after this time.",
     AT(give_up_ms)},
};

/* The joined table lives as long as the process: the conf is freed with it. */
const struct dmk_conf_option *dmk_prefill_options_table(size_t *ret_n)
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
    const struct dmk_conf_option *options = dmk_prefill_options_table(&n);

    return (struct dmk_conf_program){
        .name = "damask-prefill",
        .summary = "Prefill worker: computes the keys and values of prompts and writes them into "
                   "decode workers.",
        .usage = "",
        .env_prefix = "DAMASK_PREFILL_",
        .options = options,
        .n_options = n,
    };
}

int dmk_prefill_options_load(int argc, char **argv, struct dmk_prefill_options *conf,
                             struct dmk_error *reterr)
{
    const struct dmk_conf_program program = program_of();
    const int r = dmk_conf_load(&program, argc, argv, conf, NULL, reterr);

    return r == 0 ? dmk_worker_options_check(&conf->worker, true, reterr) : r;
}

void dmk_prefill_options_free(struct dmk_prefill_options *conf)
{
    const struct dmk_conf_program program = program_of();

    dmk_conf_free(&program, conf);
}
