/* An engine for tests: it has page memory as a real one, but its keys, values and logits are hashes.
 *
 * Every query reads every key and value that the model's attention would read, from the pages it was given,
 * and mixes them into its result. So a page that was not transferred, was reused too early, belongs to
 * another sequence or holds stale keys changes all further tokens, at a thousandth of a model's cost.
 * Results depend on a sequence's tokens only, as those of the real engine do. */
#pragma once

#include "common/worker/engine_port.h"

struct shadow_engine;

struct shadow_conf {
    uint32_t n_layers, n_kv_heads, vocab;
    uint32_t tp, dp;
    uint32_t n_full_pages, n_window_pages;             /* of each group */
    uint32_t n_stage_full_pages, n_stage_window_pages; /* as a device's; 0: no staging memory */
    uint64_t seed;                                     /* "weights" */
};

struct shadow_engine *shadow_engine_new(const struct shadow_conf *conf);
void shadow_engine_free(struct shadow_engine **engine);
struct dmk_engine_port shadow_engine_port(struct shadow_engine *engine);
/* The next n steps fail with this status. */
void shadow_engine_fail(struct shadow_engine *engine, uint32_t n_steps, int status);
/* Tokens computed so far. */
uint64_t shadow_engine_tokens(const struct shadow_engine *engine);
/* Pages copied to the staging memory, of one layer and head each. */
uint64_t shadow_engine_staged(const struct shadow_engine *engine);
