/* Options of damask-prefill: those of every worker, then its own. */
#pragma once

#include "common/worker/options.h"

/* Sequences that pools have room for at least: one prompt is computed at a time, and a few more may hold their pages
 * while it is. */
#define DMK_PREFILL_POOL_SEQUENCES 4

struct dmk_prefill_options {
    struct dmk_worker_conf worker; /* first: the shared rows of the table write here */
    uint32_t max_jobs;
    uint32_t chunk_tokens;
    uint32_t max_puts;
    uint32_t staging_pages;
    uint64_t queue_budget_ms;
    uint64_t resend_every_ms;
    uint64_t give_up_ms;
};

/* As dmk_conf_load. */
int dmk_prefill_options_load(int argc, char **argv, struct dmk_prefill_options *conf,
                             struct dmk_error *reterr);
void dmk_prefill_options_free(struct dmk_prefill_options *conf);
/* The rows of this role alone; they write into struct dmk_prefill_options. */
extern const struct dmk_conf_part dmk_prefill_part;
