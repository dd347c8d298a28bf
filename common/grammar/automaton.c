/* Reading an automaton: bounds first, then structure, then what the walker wants to know beforehand. */
#include "common/grammar/automaton_impl.h"

#include <stdlib.h>

#define HEAD_BYTES  44u
#define RULE_BYTES  12u
#define STATE_BYTES 6u
#define EDGE_BYTES  4u
#define CALL_BYTES  4u
#define ID_BYTES    8u
#define SUM_BYTES   8u

struct reader {
    const uint8_t *at;
};

static uint8_t get_u8(struct reader *r)
{
    return *r->at++;
}

static uint16_t get_u16(struct reader *r)
{
    const uint16_t v = (uint16_t)(r->at[0] | r->at[1] << 8);

    r->at += 2;
    return v;
}

static uint32_t get_u32(struct reader *r)
{
    const uint32_t low = get_u16(r);

    return low | (uint32_t)get_u16(r) << 16;
}

static uint64_t get_u64(struct reader *r)
{
    const uint64_t low = get_u32(r);

    return low | (uint64_t)get_u32(r) << 32;
}

static int bad(struct dmk_error *reterr, const char *what)
{
    return dmk_error_set(reterr, -DMK_EFORMAT, "the constraint is damaged: %s", what);
}

/* ---------------------------------------------------------------- tables */

static int read_head(struct dmk_automaton *a, struct dmk_bytes blob, struct dmk_error *reterr)
{
    struct reader r = {blob.data};
    uint64_t size;

    if (blob.len < HEAD_BYTES + SUM_BYTES || blob.len > DMK_GRAMMAR_MAX_BYTES) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "a constraint of %zu bytes is not between %u and %u bytes", blob.len,
                             HEAD_BYTES + SUM_BYTES, DMK_GRAMMAR_MAX_BYTES);
    }
    if (memcmp(r.at, "DMKG", 4) != 0) {
        return bad(reterr, "it does not begin with DMKG");
    }
    r.at += 4;
    const uint32_t version = get_u16(&r);

    if (version != DMK_GRAMMAR_VERSION) {
        return dmk_error_set(reterr, -DMK_EMISMATCH,
                             "the constraint has version %u, this worker reads %u", version,
                             DMK_GRAMMAR_VERSION);
    }
    (void)get_u16(&r);
    a->vocab.lo = get_u64(&r);
    a->vocab.hi = get_u64(&r);
    a->n_rules = get_u32(&r);
    a->n_states = get_u32(&r);
    a->n_edges = get_u32(&r);
    a->n_calls = get_u32(&r);
    a->n_ids = get_u32(&r);
    size = HEAD_BYTES + SUM_BYTES + (uint64_t)a->n_rules * RULE_BYTES +
           (uint64_t)a->n_states * STATE_BYTES + (uint64_t)a->n_edges * EDGE_BYTES +
           (uint64_t)a->n_calls * CALL_BYTES + (uint64_t)a->n_ids * ID_BYTES;
    if (size != blob.len) {
        return bad(reterr, "its tables do not add up to its length");
    }
    r.at = blob.data + blob.len - SUM_BYTES;
    if (get_u64(&r) != dmk_hash64(blob.data, blob.len - SUM_BYTES, 0)) {
        return bad(reterr, "its checksum is wrong");
    }
    if (a->n_rules == 0 || a->n_rules > DMK_GRAMMAR_MAX_RULES || a->n_states == 0 ||
        a->n_states > DMK_GRAMMAR_MAX_STATES) {
        return bad(reterr, "it has no rules or states, or too many");
    }
    a->hash = dmk_hash128((struct dmk_id128){0}, blob.data, blob.len);
    return 0;
}

static int allocate(struct dmk_automaton *a)
{
    a->rules = calloc(a->n_rules, sizeof(*a->rules));
    a->states = calloc(a->n_states, sizeof(*a->states));
    a->edges = calloc(a->n_edges + 1, sizeof(*a->edges));
    a->calls = calloc(a->n_calls + 1, sizeof(*a->calls));
    a->ids = calloc(a->n_ids + 1, sizeof(*a->ids));
    return a->rules && a->states && a->edges && a->calls && a->ids ? 0 : -DMK_ENOMEM;
}

static int read_rules(struct dmk_automaton *a, struct reader *r, struct dmk_error *reterr)
{
    uint64_t at = 0;

    for (uint32_t i = 0; i < a->n_rules; i++) {
        struct dmk_rule *rule = &a->rules[i];

        rule->start = (uint32_t)at;
        rule->n_states = get_u32(r);
        rule->min = get_u32(r);
        rule->max = get_u32(r);
        at += rule->n_states;
        if (rule->n_states == 0 || at > a->n_states || rule->min > rule->max) {
            return bad(reterr, "a rule has no states, or bounds that exclude each other");
        }
        for (uint32_t s = rule->start; s < at; s++) {
            a->states[s].rule = (uint16_t)i;
        }
    }
    return at == a->n_states ? 0 : bad(reterr, "states belong to no rule");
}

static int read_states(struct dmk_automaton *a, struct reader *r, struct dmk_error *reterr)
{
    uint64_t edges = 0, calls = 0, ids = 0;

    for (uint32_t i = 0; i < a->n_states; i++) {
        struct dmk_state *s = &a->states[i];

        s->flags = get_u8(r);
        s->n_ids = get_u8(r);
        s->n_calls = get_u16(r);
        s->n_edges = get_u16(r);
        s->dense = DMK_NO_STATE;
        s->edges = (uint32_t)edges;
        s->calls = (uint32_t)calls;
        s->ids = (uint32_t)ids;
        edges += s->n_edges;
        calls += s->n_calls;
        ids += s->n_ids;
        if (s->flags > (DMK_GRAMMAR_ACCEPT | DMK_GRAMMAR_TICK | DMK_GRAMMAR_GATE) ||
            edges > a->n_edges || calls > a->n_calls || ids > a->n_ids) {
            return bad(reterr, "a state has unknown marks, or more edges than there are");
        }
    }
    return edges == a->n_edges && calls == a->n_calls && ids == a->n_ids
               ? 0
               : bad(reterr, "edges belong to no state");
}

static int read_edges(struct dmk_automaton *a, struct reader *r, struct dmk_error *reterr)
{
    for (uint32_t i = 0; i < a->n_states; i++) {
        const struct dmk_state *s = &a->states[i];
        const struct dmk_rule *rule = &a->rules[s->rule];
        int before = -1;

        for (uint32_t k = 0; k < s->n_edges; k++) {
            struct dmk_edge *e = &a->edges[s->edges + k];

            e->first = get_u8(r);
            e->last = get_u8(r);
            e->target = get_u16(r);
            if (e->first <= before || e->last < e->first || e->target >= rule->n_states) {
                return bad(reterr, "an edge is out of order or leads out of its rule");
            }
            before = e->last;
            e->target += rule->start;
        }
    }
    for (uint32_t i = 0; i < a->n_states; i++) {
        const struct dmk_state *s = &a->states[i];
        const struct dmk_rule *rule = &a->rules[s->rule];

        for (uint32_t k = 0; k < s->n_calls; k++) {
            struct dmk_call *c = &a->calls[s->calls + k];

            c->rule = get_u16(r);
            c->ret = get_u16(r);
            if (c->rule >= a->n_rules || c->ret >= rule->n_states) {
                return bad(reterr, "a call leads to no rule, or returns out of its own");
            }
            c->ret += rule->start;
            /* A return enters no state: counts move on bytes and ids only. */
            if (a->states[c->ret].flags & (DMK_GRAMMAR_TICK | DMK_GRAMMAR_GATE)) {
                return bad(reterr, "a call returns to a state that counts");
            }
        }
    }
    for (uint32_t i = 0; i < a->n_states; i++) {
        const struct dmk_state *s = &a->states[i];
        const struct dmk_rule *rule = &a->rules[s->rule];

        for (uint32_t k = 0; k < s->n_ids; k++) {
            struct dmk_id_edge *e = &a->ids[s->ids + k];

            e->id = get_u32(r);
            e->target = get_u16(r);
            if (get_u16(r) != 0 || e->target >= rule->n_states) {
                return bad(reterr, "an id leads out of its rule");
            }
            e->target += rule->start;
        }
    }
    return 0;
}

/* Everything that the blob holds, in the order in which it lies there. */
static int read_tables(struct dmk_automaton *a, struct dmk_bytes blob, struct dmk_error *reterr)
{
    struct reader reader;
    int r = read_head(a, blob, reterr);

    if (r != 0) {
        return r;
    }
    r = allocate(a);
    if (r != 0) {
        return r;
    }
    reader.at = blob.data + HEAD_BYTES;
    r = read_rules(a, &reader, reterr);
    r = r != 0 ? r : read_states(a, &reader, reterr);
    return r != 0 ? r : read_edges(a, &reader, reterr);
}

int dmk_automaton_load(struct dmk_bytes blob, struct dmk_automaton **ret, struct dmk_error *reterr)
{
    struct dmk_automaton *a = calloc(1, sizeof(*a));
    int r;

    if (!a) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for a constraint");
    }
    r = read_tables(a, blob, reterr);
    r = r < 0 ? r : dmk_automaton__prepare(a, reterr);
    if (r < 0) {
        if (r == -DMK_ENOMEM) {
            (void)dmk_error_set(reterr, r, "no memory for a constraint");
        }
        dmk_automaton_free(&a);
        return r;
    }
    a->bytes = sizeof(*a) + a->n_rules * sizeof(*a->rules) + a->n_states * sizeof(*a->states) +
               a->n_edges * sizeof(*a->edges) + a->n_calls * sizeof(*a->calls) +
               a->n_ids * sizeof(*a->ids) + a->n_dense * sizeof(*a->dense);
    *ret = a;
    return 0;
}

void dmk_automaton_free(struct dmk_automaton **automaton)
{
    struct dmk_automaton *a = *automaton;

    if (a) {
        free(a->rules);
        free(a->states);
        free(a->edges);
        free(a->calls);
        free(a->ids);
        free(a->dense);
        free(a);
        *automaton = NULL;
    }
}

struct dmk_id128 dmk_automaton_hash(const struct dmk_automaton *automaton)
{
    return automaton->hash;
}

struct dmk_id128 dmk_automaton_vocab(const struct dmk_automaton *automaton)
{
    return automaton->vocab;
}

size_t dmk_automaton_bytes(const struct dmk_automaton *automaton)
{
    return automaton->bytes;
}
