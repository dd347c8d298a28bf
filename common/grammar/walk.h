/* Walking an automaton: where an answer stands, which token may come next.
 *
 * A walk is the state of one answer, a plain value without pointers of its own: a pure function of the
 * automaton and the ids that were taken. It can be made again from the ids at any time, on any worker.
 *
 * A walker is what one thread needs to step walks and to compute masks. Masks of wide states (those inside of
 * strings) are kept in a bounded number of slots, the least recently used one goes first; what such a state
 * allows is computed once without its surroundings, and only tokens that leave the rule are looked at again
 * for each use. Other states are walked anew every time: few tokens fit there.
 *
 * Nothing allocates after new. */
#pragma once

#include "common/grammar/automaton.h"
#include "common/grammar/trie.h"

#define DMK_WALK_WORDS 1020u

struct dmk_walk {
    const struct dmk_automaton *automaton; /* the owner keeps it */
    uint32_t n_words;
    uint32_t n; /* ways that are open; 0: none, the answer does not fit */
    uint32_t words[DMK_WALK_WORDS];
};

struct dmk_walker;

/* n_slots masks are kept: each takes a bit for each id and 25 KiB. */
int dmk_walker_new(const struct dmk_trie *trie, uint32_t n_slots, struct dmk_walker **ret);
void dmk_walker_free(struct dmk_walker **walker);

void dmk_walk_begin(struct dmk_walk *walk, const struct dmk_automaton *automaton);

/* Takes a token. -DMK_EINVAL when it does not fit; then the walk is unchanged. */
int dmk_walk_advance(struct dmk_walker *walker, struct dmk_walk *walk, uint32_t id);

enum dmk_walk_end {
    DMK_WALK_OPEN,    /* more must come */
    DMK_WALK_MAY_END, /* the answer is complete, more may come */
    DMK_WALK_ENDED,   /* the answer is complete, nothing may come: the mask is empty */
};

/* mask: [(ids + 63) / 64], bit id % 64 of word id / 64. */
enum dmk_walk_end dmk_walk_mask(struct dmk_walker *walker, const struct dmk_walk *walk,
                                uint64_t *mask);

struct dmk_walker_stats {
    uint64_t n_masks;
    uint64_t n_computed; /* masks of wide states that were computed for the first time */
    uint64_t n_uncached; /* wide states walked in full because no slot could hold them */
};
struct dmk_walker_stats dmk_walker_stats(const struct dmk_walker *walker);
