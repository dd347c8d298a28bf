/* Options of damask-decode: those of every worker, then its own. */
#pragma once

#include "common/model/engine.h"
#include "common/worker/options.h"

struct dmk_decode_options {
    struct dmk_worker_conf worker; /* first: the shared rows of the table write here */
    uint32_t max_sequences;
    uint32_t chunk_tokens;
    uint32_t score_rows;
    char *local_prefill_below; /* a number, or "max" */
    uint32_t prompt_experts;   /* enum dmk_prompt_experts */
    uint32_t prompt_dense;     /* enum dmk_prompt_dense */
    uint64_t ticket_expiry_ms;
    uint64_t quiet_ask_every_ms;
    uint32_t max_draining_pages;
};

/* As dmk_conf_load; on 0, *ret_below is the threshold in tokens (UINT32_MAX: everything is local). */
int dmk_decode_options_load(int argc, char **argv, struct dmk_decode_options *conf,
                            uint32_t *ret_below, struct dmk_error *reterr);
void dmk_decode_options_free(struct dmk_decode_options *conf);
/* Window rings that the pools must have: in mixed pools a sequence's prompt keeps its own. */
uint32_t dmk_decode_options_pool_sequences(const struct dmk_decode_options *conf);
/* The rows of this role alone; they write into struct dmk_decode_options. */
extern const struct dmk_conf_part dmk_decode_part;
/* The threshold that a text means: a number of tokens, or max. */
int dmk_decode_options_below(const char *text, uint32_t *ret, struct dmk_error *reterr);
