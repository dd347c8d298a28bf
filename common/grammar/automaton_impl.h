/* The inside of a loaded automaton: read by the walker. Private to common/grammar. */
#pragma once

#include "common/grammar/automaton.h"

#define DMK_NEED_NEVER  0xffffu /* the rule's end can not be reached from here */
#define DMK_NO_STATE    UINT32_MAX
#define DMK_DENSE_EDGES 6 /* states with more edges than this have a row of 256 targets */
#define DMK_WIDE_BYTES  8 /* states that go on with more bytes than this have their masks kept */

/* Flags that loading adds to those of the serialised form. */
enum {
    DMK_STATE_TAIL = 8,  /* accepts, and nothing else: a call that returns here need not be kept */
    DMK_STATE_WIDE = 16, /* see DMK_WIDE_BYTES */
    DMK_STATE_ALL = 32,  /* every byte leads back here */
    DMK_STATE_TEXT = 64, /* any text (trie_impl.h) leads back here, or to a twin that counts */
    DMK_STATE_TEXT_INNER = 128, /* inside of a character on the way back to such a state */
};

struct dmk_edge {
    uint8_t first, last;
    uint32_t target; /* among all states */
};

struct dmk_call {
    uint32_t rule, ret;
};

struct dmk_id_edge {
    uint32_t id, target;
};

struct dmk_state {
    uint32_t edges, calls, ids; /* where its own begin */
    uint32_t dense;             /* row of automaton->dense, or DMK_NO_STATE */
    uint16_t n_edges, n_calls, n_ids;
    uint16_t rule;
    uint16_t need; /* calls that must be open at a time at least until its rule accepts */
    uint8_t flags;
};

struct dmk_rule {
    uint32_t start, n_states; /* first state; the others follow */
    uint32_t min, max;
    uint64_t first[4]; /* bytes that it can begin with */
    struct dmk_id128
        key; /* of its content when it calls nobody, else of this automaton and the rule */
};

struct dmk_automaton {
    struct dmk_id128 hash, vocab;
    size_t bytes;
    uint32_t n_rules, n_states, n_edges, n_calls, n_ids, n_dense;
    struct dmk_rule *rules;
    struct dmk_state *states;
    struct dmk_edge *edges;
    struct dmk_call *calls;
    struct dmk_id_edge *ids;
    uint32_t (*dense)[256];
};

/* The state that a byte leads to, or DMK_NO_STATE. */
static inline uint32_t dmk_state_next(const struct dmk_automaton *a, const struct dmk_state *s,
                                      uint8_t byte)
{
    if (s->dense != DMK_NO_STATE) {
        return a->dense[s->dense][byte];
    }
    for (uint32_t i = 0; i < s->n_edges; i++) {
        const struct dmk_edge *e = &a->edges[s->edges + i];

        if (byte <= e->last) {
            return byte >= e->first ? e->target : DMK_NO_STATE;
        }
    }
    return DMK_NO_STATE;
}

/* prepare.c: checks what the walker relies on and fills in what it uses. */
int dmk_automaton__prepare(struct dmk_automaton *a, struct dmk_error *reterr);
