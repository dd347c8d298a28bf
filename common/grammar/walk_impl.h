/* The inside of a walker, shared by walk.c (ways and steps) and mask.c (masks). Private to common/grammar.
 *
 * A way is a state with the count of its rule and the calls that are open. Open calls are a linked list in an
 * arena (frames), so that ways share what they have in common. A list of ways is a slice of one array; both
 * are given back to a mark when the walk over the tree goes up again. */
#pragma once

#include "common/grammar/automaton_impl.h"
#include "common/grammar/trie_impl.h"
#include "common/grammar/walk.h"

#define MAX_WAYS   64u    /* open at a time; further ones are not followed */
#define MAX_CLOSED 256u   /* states that can be reached without a byte */
#define N_FRAMES   16384u /* of the arena */
#define N_WAYS     8192u
#define MAX_EXITS  6144u /* of a kept mask */

#define FRAME_NONE  0u /* no call is open */
#define FRAME_OUTER 1u /* computing without surroundings: the rule's caller is not known */

struct way {
    uint32_t state, count;
    uint32_t frame; /* innermost open call */
    uint32_t depth; /* open calls */
};

struct frame {
    uint32_t state, count; /* of the caller, where the call returns to */
    uint32_t parent;
};

struct slot {
    bool used;
    struct dmk_id128 key;
    uint32_t state, room,
        lack;       /* state in the rule; what the count leaves to max and min, clipped */
    uint64_t stamp; /* of its last use */
    uint32_t reach; /* calls that any token opens here, with the way out from there */
    uint32_t n_exits;
    uint16_t exit_from[257];   /* by byte, into exits */
    uint32_t exits[MAX_EXITS]; /* nodes behind the end of the rule, reached by that byte */
    uint64_t *mask;
};

struct dmk_walker {
    const struct dmk_trie *trie;
    const struct dmk_automaton *a; /* of the walk at hand */
    struct frame frames[N_FRAMES];
    struct way ways[N_WAYS];
    uint32_t n_frames, n_ways;
    uint32_t max_reach; /* since it was reset */
    bool left;          /* a way left through FRAME_OUTER since it was reset */
    bool overflow;      /* a bound was met since it was reset: ways were dropped */
    uint32_t n_exits;
    uint32_t exits[MAX_EXITS];
    uint8_t exit_bytes[MAX_EXITS];
    struct slot *slots;
    uint64_t *masks; /* of the slots */
    uint32_t n_slots;
    uint64_t stamp;
    struct dmk_walker_stats stats;
};

/* Puts the ways of a walk into the arena, at ways[0 ..]; returns how many. */
uint32_t dmk_walk__load(struct dmk_walker *w, const struct dmk_walk *walk);
/* All ways that from reaches without a byte, by calls and returns, itself first; appended to ways. Returns how
 * many. */
uint32_t dmk_walk__close(struct dmk_walker *w, struct way from);
/* The way behind state `to` is entered from `from` by a byte or an id. False when it may not be. */
bool dmk_walk__enter(struct dmk_walker *w, const struct way *from, uint32_t to, struct way *ret);
/* Steps n ways that stand at ways[at] by a byte, calls and returns included; the results are appended to
 * ways. Returns how many. */
uint32_t dmk_walk__step(struct dmk_walker *w, uint32_t at, uint32_t n, uint8_t byte);
/* Steps one way by a byte edge of its own state. Appended as above. */
uint32_t dmk_walk__step_edge(struct dmk_walker *w, const struct way *from, uint8_t byte);
