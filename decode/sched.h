/* Continuous batching as pure functions: which sequences take part in the next step with how many tokens,
 * who gives way when pages run out, who comes back. No clock, no pools, no memory of its own.
 *
 * A sequence with one token to compute decodes; with more it is computing a prompt (or again, after a
 * preemption) in chunks. Every decoding sequence takes part in every step. Of what is left of the step's
 * tokens, half is the oldest prompt's; the other half goes to the prompts with the least to compute, shortest
 * first, and what these do not need to the oldest again. So a short prompt waits for no long one, and a long
 * one goes on at half speed at least, however many short ones come. A chunk never swallows a sequence's
 * last token, which runs as a decode step of its own, and never passes a snapshot boundary. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct dmk_sched_seq {
    uint64_t order;       /* age: smaller is older */
    uint32_t todo;        /* tokens whose KV is not computed yet, at least 1 */
    uint32_t to_boundary; /* tokens up to the next snapshot boundary, at least 1 */
    bool all_logits;      /* every token of a chunk needs a row of logits */
};

struct dmk_sched_limits {
    uint32_t step_tokens, step_seqs, logit_rows;
    uint32_t chunk_tokens; /* of prompts in a step */
};

struct dmk_sched_pick {
    uint32_t index; /* into seqs */
    uint32_t n_tokens;
    uint32_t n_rows; /* logits: 1 for a decode step, n_tokens with all_logits, else 0 */
};

/* seqs in the order of age, oldest first. Picks come in the same order. Returns their number; ret_picks has
 * room for n_seqs. */
uint32_t dmk_sched_pick(const struct dmk_sched_seq *seqs, uint32_t n_seqs,
                        struct dmk_sched_limits limits, struct dmk_sched_pick *ret_picks);

/* A preempted sequence comes back when its tokens fit and every running one could still begin a page: else
 * it would be preempted again at once. With nothing running it comes back as soon as it fits. */
bool dmk_sched_may_resume(uint32_t n_running, uint32_t need_pages, uint32_t available_pages);

/* How long a refused request should wait: until the running sequence closest to its end has ended, were it
 * to use all its tokens. */
uint32_t dmk_sched_wait_hint_ms(double step_ms, uint32_t min_tokens_left);
