/* Constraints; see constrain.h. */
#include "decode/constrain.h"

#include <stdatomic.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/clock.h"

#define MAX_AUTOMATA 256u

struct dmk_constraint {
    struct dmk_automaton *automaton;
    uint32_t n_holders;
    uint64_t stamp; /* of its last use */
};

struct dmk_constraints {
    struct dmk_constraints_conf conf;
    struct dmk_trie *trie;
    struct dmk_walker *walker;
    struct dmk_walk *walks; /* [n_walks] */
    uint64_t *mask;
    struct dmk_constraint *automata[MAX_AUTOMATA];
    size_t bytes;
    uint64_t stamp;
    /* Written by the engine's thread. */
    _Atomic uint64_t mask_ns, max_mask_ns, n_masks, n_computed, n_uncached;
};

int dmk_constraints_new(const struct dmk_constraints_conf *conf, struct dmk_constraints **ret)
{
    struct dmk_constraints *c = calloc(1, sizeof(*c));

    if (!c) {
        return -DMK_ENOMEM;
    }
    c->conf = *conf;
    c->walks = calloc(conf->n_walks, sizeof(*c->walks));
    c->mask = calloc((conf->vocab + 63) / 64, sizeof(*c->mask));
    if (!c->walks || !c->mask) {
        dmk_constraints_free(&c);
        return -DMK_ENOMEM;
    }
    *ret = c;
    return 0;
}

static void forget(struct dmk_constraints *c, uint32_t i)
{
    c->bytes -= dmk_automaton_bytes(c->automata[i]->automaton);
    dmk_automaton_free(&c->automata[i]->automaton);
    free(c->automata[i]);
    c->automata[i] = NULL;
}

void dmk_constraints_free(struct dmk_constraints **constraints)
{
    struct dmk_constraints *c = *constraints;

    if (!c) {
        return;
    }
    for (uint32_t i = 0; i < MAX_AUTOMATA; i++) {
        if (c->automata[i]) {
            forget(c, i);
        }
    }
    dmk_walker_free(&c->walker);
    dmk_trie_free(&c->trie);
    free(c->walks);
    free(c->mask);
    free(c);
    *constraints = NULL;
}

struct dmk_id128 dmk_constraints_vocabulary_hash(const struct dmk_constraints *c)
{
    return c->trie ? dmk_trie_hash(c->trie) : (struct dmk_id128){0};
}

int dmk_constraints_vocabulary(struct dmk_constraints *c, struct dmk_bytes bytes,
                               struct dmk_error *reterr)
{
    struct dmk_trie *trie = NULL;
    int r;

    if (c->trie) {
        return dmk_id128_equal(dmk_hash128((struct dmk_id128){0}, bytes.data, bytes.len),
                               dmk_trie_hash(c->trie))
                   ? 0
                   : dmk_error_set(reterr, -DMK_EMISMATCH,
                                   "routers with different vocabularies are connected");
    }
    r = dmk_trie_read(bytes, &trie, reterr);
    if (r < 0) {
        return r;
    }
    if (dmk_trie_n_ids(trie) != c->conf.vocab) {
        r = dmk_error_set(reterr, -DMK_EMISMATCH,
                          "the router's vocabulary has %u ids, the model of this worker %u",
                          dmk_trie_n_ids(trie), c->conf.vocab);
    } else if (dmk_walker_new(trie, c->conf.n_masks, &c->walker) < 0) {
        r = dmk_error_set(reterr, -DMK_ENOMEM, "no memory for masks");
    }
    if (r < 0) {
        dmk_trie_free(&trie);
        return r;
    }
    c->trie = trie;
    return 0;
}

/* A free place, and room for the bytes: automata that nobody holds go, the least recently used first. */
static int make_room(struct dmk_constraints *c, size_t bytes, uint32_t *ret)
{
    for (;;) {
        uint32_t place = MAX_AUTOMATA, oldest = MAX_AUTOMATA;

        for (uint32_t i = 0; i < MAX_AUTOMATA; i++) {
            if (!c->automata[i]) {
                place = i;
            } else if (c->automata[i]->n_holders == 0 &&
                       (oldest == MAX_AUTOMATA ||
                        c->automata[i]->stamp < c->automata[oldest]->stamp)) {
                oldest = i;
            }
        }
        if (place < MAX_AUTOMATA && c->bytes + bytes <= c->conf.max_bytes) {
            *ret = place;
            return 0;
        }
        if (oldest == MAX_AUTOMATA) {
            return -DMK_EFULL;
        }
        forget(c, oldest);
    }
}

static int add(struct dmk_constraints *c, struct dmk_automaton *automaton,
               struct dmk_constraint **ret, struct dmk_error *reterr)
{
    struct dmk_constraint *constraint = calloc(1, sizeof(*constraint));
    uint32_t place = 0;

    if (!constraint || make_room(c, dmk_automaton_bytes(automaton), &place) < 0) {
        free(constraint);
        return dmk_error_set(reterr, -DMK_EFULL, "no room for a further constraint at this moment");
    }
    *constraint = (struct dmk_constraint){automaton, 1, ++c->stamp};
    c->automata[place] = constraint;
    c->bytes += dmk_automaton_bytes(automaton);
    *ret = constraint;
    return 0;
}

int dmk_constraints_take(struct dmk_constraints *c, struct dmk_bytes blob,
                         struct dmk_constraint **ret, struct dmk_error *reterr)
{
    const struct dmk_id128 hash = dmk_hash128((struct dmk_id128){0}, blob.data, blob.len);
    struct dmk_automaton *automaton = NULL;
    int r;

    if (!c->trie) {
        return dmk_error_set(reterr, -DMK_EMISMATCH,
                             "this worker has not got the vocabulary's bytes from the router");
    }
    for (uint32_t i = 0; i < MAX_AUTOMATA; i++) {
        struct dmk_constraint *known = c->automata[i];

        if (known && dmk_id128_equal(dmk_automaton_hash(known->automaton), hash)) {
            known->n_holders++;
            known->stamp = ++c->stamp;
            *ret = known;
            return 0;
        }
    }
    r = dmk_automaton_load(blob, &automaton, reterr);
    if (r == 0 && !dmk_id128_equal(dmk_automaton_vocab(automaton), dmk_trie_hash(c->trie))) {
        r = dmk_error_set(reterr, -DMK_EMISMATCH,
                          "the constraint was made for another vocabulary than this worker has");
    }
    r = r < 0 ? r : add(c, automaton, ret, reterr);
    if (r < 0) {
        dmk_automaton_free(&automaton);
    }
    return r;
}

void dmk_constraint_hold(struct dmk_constraint *constraint)
{
    constraint->n_holders++;
}

void dmk_constraint_drop(struct dmk_constraint *constraint)
{
    dmk_assert(constraint->n_holders > 0);
    constraint->n_holders--;
}

/* ---------------------------------------------------------------- the engine's thread */

static bool is_empty(const uint64_t *mask, uint32_t n_words)
{
    for (uint32_t i = 0; i < n_words; i++) {
        if (mask[i] != 0) {
            return false;
        }
    }
    return true;
}

static void note(struct dmk_constraints *c, uint64_t ns)
{
    const struct dmk_walker_stats s = dmk_walker_stats(c->walker);

    atomic_store_explicit(&c->n_masks, s.n_masks, memory_order_relaxed);
    atomic_store_explicit(&c->n_computed, s.n_computed, memory_order_relaxed);
    atomic_store_explicit(&c->n_uncached, s.n_uncached, memory_order_relaxed);
    atomic_store_explicit(&c->mask_ns, c->mask_ns + ns, memory_order_relaxed);
    if (ns > c->max_mask_ns) {
        atomic_store_explicit(&c->max_mask_ns, ns, memory_order_relaxed);
    }
}

int dmk_constraint_mask(struct dmk_constraints *c, const struct dmk_constraint *constraint,
                        uint32_t index, const uint32_t *answer, uint32_t n_answer,
                        uint32_t *inout_n_taken, const uint32_t *stop_ids, uint32_t n_stop_ids,
                        const uint64_t **ret_mask)
{
    const uint64_t start = dmk_clock_ns();
    const uint32_t n_words = (c->conf.vocab + 63) / 64;
    struct dmk_walk *walk = &c->walks[index];
    enum dmk_walk_end end;

    if (*inout_n_taken == 0) {
        dmk_walk_begin(walk, constraint->automaton);
    }
    for (; *inout_n_taken < n_answer; (*inout_n_taken)++) {
        if (dmk_walk_advance(c->walker, walk, answer[*inout_n_taken]) < 0) {
            return -DMK_EMISMATCH;
        }
    }
    end = dmk_walk_mask(c->walker, walk, c->mask);
    for (uint32_t i = 0; i < n_stop_ids && end != DMK_WALK_OPEN; i++) {
        /* A stop id with bytes is text like any other. */
        if (dmk_trie_token(c->trie, stop_ids[i]).len == 0) {
            c->mask[stop_ids[i] / 64] |= 1ull << (stop_ids[i] % 64);
        }
    }
    note(c, dmk_clock_ns() - start);
    if (is_empty(c->mask, n_words)) {
        return end == DMK_WALK_OPEN ? -DMK_EMISMATCH : 1;
    }
    *ret_mask = c->mask;
    return 0;
}

struct dmk_constraints_stats dmk_constraints_stats(const struct dmk_constraints *c)
{
    struct dmk_constraints_stats s = {
        .walker = {.n_masks = atomic_load_explicit(&c->n_masks, memory_order_relaxed),
                   .n_computed = atomic_load_explicit(&c->n_computed, memory_order_relaxed),
                   .n_uncached = atomic_load_explicit(&c->n_uncached, memory_order_relaxed)},
        .mask_ns = atomic_load_explicit(&c->mask_ns, memory_order_relaxed),
        .max_mask_ns = atomic_load_explicit(&c->max_mask_ns, memory_order_relaxed),
        .bytes = c->bytes,
    };

    for (uint32_t i = 0; i < MAX_AUTOMATA; i++) {
        s.n_automata += c->automata[i] != NULL;
    }
    return s;
}
