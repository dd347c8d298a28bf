/* Constraints on this worker: the vocabulary's bytes, the automata of running requests, and each sequence's walk.
 *
 * The loop owns vocabulary and automata: it takes them in and lets them go. The engine's thread steps walks and
 * computes masks; what it reads stays until the step is done, since a sequence holds its automaton until its
 * slot is released. Equal constraints share an automaton, which is kept for a while after its last use.
 * Automata are allocated at admission, within a bound; nothing allocates in a step. */
#pragma once

#include "common/base/error.h"
#include "common/base/span.h"
#include "common/grammar/walk.h"

struct dmk_constraints;
struct dmk_constraint;

struct dmk_constraints_conf {
    uint32_t vocab;   /* ids of the model */
    uint32_t n_walks; /* sequences */
    uint32_t n_masks; /* kept masks of wide states */
    size_t max_bytes; /* of all automata */
};

int dmk_constraints_new(const struct dmk_constraints_conf *conf, struct dmk_constraints **ret);
void dmk_constraints_free(struct dmk_constraints **constraints);

/* ---- the loop's */

/* Takes the bytes of the vocabulary (common/grammar/trie.h). The first ones stay; equal ones are no failure,
 * others are -DMK_EMISMATCH. */
int dmk_constraints_vocabulary(struct dmk_constraints *constraints, struct dmk_bytes bytes,
                               struct dmk_error *reterr);
/* Zero while there is none. */
struct dmk_id128 dmk_constraints_vocabulary_hash(const struct dmk_constraints *constraints);

/* The automaton of a serialised constraint, held once more. -DMK_EMISMATCH: no vocabulary, or another one;
 * -DMK_EFULL: no room now; else what dmk_automaton_load says. */
int dmk_constraints_take(struct dmk_constraints *constraints, struct dmk_bytes blob,
                         struct dmk_constraint **ret, struct dmk_error *reterr);
void dmk_constraint_hold(struct dmk_constraint *constraint);
void dmk_constraint_drop(struct dmk_constraint *constraint);

/* ---- the engine's thread */

/* Steps walk `index` over the answer so far and gives the mask of what may come next, which stays until the next
 * call. n_taken is how much of the answer the walk has seen, 0 at first; it is kept up to date. stop_ids may
 * come where the answer may end. Returns 0, 1 when the answer has ended and nothing may come (no mask), or
 * -DMK_EMISMATCH when the answer does not fit. */
int dmk_constraint_mask(struct dmk_constraints *constraints,
                        const struct dmk_constraint *constraint, uint32_t index,
                        const uint32_t *answer, uint32_t n_answer, uint32_t *inout_n_taken,
                        const uint32_t *stop_ids, uint32_t n_stop_ids, const uint64_t **ret_mask);

struct dmk_constraints_stats {
    struct dmk_walker_stats walker;
    uint64_t mask_ns, max_mask_ns; /* spent on masks: in all, and the longest */
    uint32_t n_automata;
    size_t bytes;
};
/* Read on the loop while no step is in flight, or a little stale. */
struct dmk_constraints_stats dmk_constraints_stats(const struct dmk_constraints *constraints);
