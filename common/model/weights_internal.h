/* What the parts of the weight loader share; for weights*.c only. */
#pragma once

#include "common/model/weights.h"

/* Zeroed memory that lives as long as the weights do. NULL when there is none. */
void *dmk_weights_own(struct dmk_weights *w, uint64_t n_bytes);
void dmk_weights_disown(struct dmk_weights *w);

/* Replaces the experts' (in, out) BF16 matrices by owned (out, in) ones. */
int dmk_weights_turn_experts(struct dmk_weights *w, struct dmk_error *reterr);

/* What conf.prefault asks for. */
int dmk_weights_prefault(struct dmk_weights *w, const struct dmk_weights_conf *conf,
                         struct dmk_error *reterr);

/* Calls fn for each of the jobs, from some threads and the caller's. */
void dmk_weights_parallel(void (*fn)(const void *jobs, uint32_t i), const void *jobs,
                          uint32_t n_jobs);
