/* Reading an automaton: bounds first, then structure, then what the walker wants to know beforehand. */
#include "common/grammar/automaton_impl.h"

#include <stdlib.h>
#include "common/base/assert.h"
#include "common/grammar/trie.h"

#define HEAD_BYTES  44u
#define RULE_BYTES  12u
#define STATE_BYTES 6u
#define EDGE_BYTES  4u
#define CALL_BYTES  4u
#define ID_BYTES    8u
#define SUM_BYTES   8u
#define MAX_DENSE   1024u

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

/* ---------------------------------------------------------------- structure */

/* Each rule needs something, and none calls itself before a byte. Rules are taken away whose first state
 * calls no rule that is left; what can not be taken away is a circle. Fills the first bytes meanwhile. */
static int check_starts(struct dmk_automaton *a, struct dmk_error *reterr)
{
    uint32_t *waits = calloc(a->n_rules, sizeof(*waits));
    uint32_t *queue = calloc(a->n_rules, sizeof(*queue));
    uint32_t *heads = calloc(a->n_rules + 1, sizeof(*heads));
    uint32_t *callers = calloc(a->n_calls + 1, sizeof(*callers));
    uint32_t n = 0, done = 0, n_starts = 0;
    int r = waits && queue && heads && callers ? 0 : -DMK_ENOMEM;

    for (uint32_t i = 0; r == 0 && i < a->n_calls; i++) {
        if (a->states[a->rules[a->calls[i].rule].start].flags & DMK_GRAMMAR_ACCEPT) {
            r = bad(reterr, "a rule that is called accepts the empty text");
        }
    }
    for (uint32_t i = 0; r == 0 && i < a->n_rules; i++) {
        const struct dmk_state *s = &a->states[a->rules[i].start];

        waits[i] = s->n_calls;
        for (uint32_t k = 0; k < s->n_calls; k++) {
            heads[a->calls[s->calls + k].rule + 1]++;
        }
        if (waits[i] == 0) {
            queue[n++] = i;
        }
    }
    for (uint32_t i = 0; r == 0 && i < a->n_rules; i++) {
        heads[i + 1] += heads[i];
    }
    n_starts = r == 0 ? heads[a->n_rules] : 0;
    for (uint32_t i = a->n_rules; r == 0 && i-- > 0;) {
        const struct dmk_state *s = &a->states[a->rules[i].start];

        /* heads[x + 1] counts down to where the callers of x begin. */
        for (uint32_t k = 0; k < s->n_calls; k++) {
            callers[--heads[a->calls[s->calls + k].rule + 1]] = i;
        }
    }
    while (r == 0 && done < n) {
        struct dmk_rule *rule = &a->rules[queue[done]];
        const struct dmk_state *s = &a->states[rule->start];
        const uint32_t at = queue[done++];
        const uint32_t end = at + 2 <= a->n_rules ? heads[at + 2] : n_starts;

        for (uint32_t k = 0; k < s->n_edges; k++) {
            for (unsigned b = a->edges[s->edges + k].first; b <= a->edges[s->edges + k].last; b++) {
                rule->first[b / 64] |= 1ull << (b % 64);
            }
        }
        for (uint32_t k = 0; k < s->n_calls; k++) {
            for (unsigned w = 0; w < 4; w++) {
                rule->first[w] |= a->rules[a->calls[s->calls + k].rule].first[w];
            }
        }
        for (uint32_t k = heads[at + 1]; k < end; k++) {
            if (--waits[callers[k]] == 0) {
                queue[n++] = callers[k];
            }
        }
    }
    if (r == 0 && n < a->n_rules) {
        r = dmk_error_set(reterr, -DMK_EINVAL,
                          "a part of the constraint refers to itself before anything is written");
    }
    free(waits);
    free(queue);
    free(heads);
    free(callers);
    return r;
}

/* ---------------------------------------------------------------- how deep the way out is */

/* The way back: for each state those that lead to it, and for each rule those that call it. */
struct back {
    uint32_t *heads;   /* [n_states + 1] */
    uint32_t *sources; /* what a byte, an id or a return leads from */
    uint32_t *rule_heads, *rule_sources;
    uint32_t *stack; /* [n_states] of the depth that is being settled */
    uint16_t *offer; /* [n_states] best depth that was found so far */
};

static void back_free(struct back *b)
{
    free(b->heads);
    free(b->sources);
    free(b->rule_heads);
    free(b->rule_sources);
    free(b->stack);
    free(b->offer);
}

static int back_new(const struct dmk_automaton *a, struct back *b)
{
    const size_t n_sources = (size_t)a->n_edges + a->n_ids + a->n_calls;

    *b = (struct back){
        .heads = calloc(a->n_states + 2, sizeof(uint32_t)),
        .sources = calloc(n_sources + 1, sizeof(uint32_t)),
        .rule_heads = calloc(a->n_rules + 2, sizeof(uint32_t)),
        .rule_sources = calloc(a->n_calls + 1, sizeof(uint32_t)),
        .stack = calloc(a->n_states, sizeof(uint32_t)),
        .offer = calloc(a->n_states, sizeof(uint16_t)),
    };
    return b->heads && b->sources && b->rule_heads && b->rule_sources && b->stack && b->offer
               ? 0
               : -DMK_ENOMEM;
}

static void back_fill(const struct dmk_automaton *a, struct back *b)
{
    for (uint32_t i = 0; i < a->n_edges; i++) {
        b->heads[a->edges[i].target + 1]++;
    }
    for (uint32_t i = 0; i < a->n_ids; i++) {
        b->heads[a->ids[i].target + 1]++;
    }
    for (uint32_t i = 0; i < a->n_calls; i++) {
        b->heads[a->calls[i].ret + 1]++;
        b->rule_heads[a->calls[i].rule + 1]++;
    }
    for (uint32_t i = 0; i < a->n_states; i++) {
        b->heads[i + 1] += b->heads[i];
    }
    for (uint32_t i = 0; i < a->n_rules; i++) {
        b->rule_heads[i + 1] += b->rule_heads[i];
    }
    for (uint32_t i = 0; i < a->n_states; i++) {
        const struct dmk_state *s = &a->states[i];

        for (uint32_t k = 0; k < s->n_edges; k++) {
            b->sources[b->heads[a->edges[s->edges + k].target]++] = i;
        }
        for (uint32_t k = 0; k < s->n_ids; k++) {
            b->sources[b->heads[a->ids[s->ids + k].target]++] = i;
        }
        for (uint32_t k = 0; k < s->n_calls; k++) {
            const struct dmk_call *c = &a->calls[s->calls + k];

            b->sources[b->heads[c->ret]++] = i;
            b->rule_sources[b->rule_heads[c->rule]++] = i;
        }
    }
    /* heads[x] stands behind x's own now: they begin where those of x - 1 end. */
}

/* The least depth at which state i can go on to the end of its rule, by what is known so far. */
static uint32_t need_of(const struct dmk_automaton *a, uint32_t i)
{
    const struct dmk_state *s = &a->states[i];
    uint32_t best = s->flags & DMK_GRAMMAR_ACCEPT ? 0 : DMK_NEED_NEVER;

    for (uint32_t k = 0; k < s->n_edges; k++) {
        const uint32_t need = a->states[a->edges[s->edges + k].target].need;

        best = need < best ? need : best;
    }
    for (uint32_t k = 0; k < s->n_ids; k++) {
        const uint32_t need = a->states[a->ids[s->ids + k].target].need;

        best = need < best ? need : best;
    }
    for (uint32_t k = 0; k < s->n_calls; k++) {
        const struct dmk_call *c = &a->calls[s->calls + k];
        const uint32_t inner = a->states[a->rules[c->rule].start].need + 1u;
        const uint32_t outer = a->states[c->ret].need;
        const uint32_t need = inner > outer ? inner : outer;

        best = need < best ? need : best;
    }
    return best < DMK_GRAMMAR_MAX_DEPTH ? best : DMK_NEED_NEVER;
}

/* Takes note of the depth that state i has by now; whoever has this depth is settled with it. */
static void offer(const struct dmk_automaton *a, struct back *b, uint32_t i, uint32_t depth,
                  uint32_t *inout_n)
{
    const uint32_t need = need_of(a, i);

    if (need < b->offer[i]) {
        b->offer[i] = (uint16_t)need;
        if (need == depth) {
            b->stack[(*inout_n)++] = i;
        }
    }
}

/* Depths are settled from the lowest up, as in Dijkstra's algorithm: a state's depth is final when its turn
 * comes, and each edge is looked at once for it. */
static void settle(struct dmk_automaton *a, struct back *b)
{
    uint32_t n_left = a->n_states;

    for (uint32_t i = 0; i < a->n_states; i++) {
        a->states[i].need = DMK_NEED_NEVER;
        b->offer[i] = a->states[i].flags & DMK_GRAMMAR_ACCEPT ? 0 : DMK_NEED_NEVER;
    }
    for (uint32_t depth = 0; depth < DMK_GRAMMAR_MAX_DEPTH && n_left > 0; depth++) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < a->n_states; i++) {
            if (b->offer[i] == depth) {
                b->stack[n++] = i;
            }
        }
        while (n > 0) {
            const uint32_t i = b->stack[--n];
            struct dmk_state *s = &a->states[i];

            s->need = (uint16_t)depth;
            n_left--;
            for (uint32_t k = i ? b->heads[i - 1] : 0; k < b->heads[i]; k++) {
                offer(a, b, b->sources[k], depth, &n);
            }
            if (a->rules[s->rule].start == i) {
                for (uint32_t k = s->rule ? b->rule_heads[s->rule - 1] : 0;
                     k < b->rule_heads[s->rule]; k++) {
                    offer(a, b, b->rule_sources[k], depth, &n);
                }
            }
        }
    }
}

/* ---------------------------------------------------------------- marks */

static bool loops_on(const struct dmk_automaton *a, uint32_t i, bool (*member)(uint8_t))
{
    for (unsigned b = 0; b < 256; b++) {
        if (member((uint8_t)b) && dmk_state_next(a, &a->states[i], (uint8_t)b) != i) {
            return false;
        }
    }
    return true;
}

static bool any_byte(uint8_t byte)
{
    (void)byte;
    return true;
}

static void mark(struct dmk_automaton *a, uint32_t i)
{
    struct dmk_state *s = &a->states[i];
    /* Whoever loops in it does nothing else: no counting, no call, no return. */
    const bool simple = s->flags == 0 && s->n_calls == 0;
    unsigned n_bytes = 0;

    for (uint32_t k = 0; k < s->n_edges; k++) {
        n_bytes += a->edges[s->edges + k].last - a->edges[s->edges + k].first + 1u;
    }
    if (s->flags & DMK_GRAMMAR_ACCEPT && s->n_edges + s->n_calls + s->n_ids == 0) {
        s->flags |= DMK_STATE_TAIL;
    }
    if (simple && n_bytes == 256 && loops_on(a, i, any_byte)) {
        s->flags |= DMK_STATE_ALL;
    }
    if (simple && n_bytes >= DMK_N_PLAIN && loops_on(a, i, dmk_byte_is_plain)) {
        s->flags |= DMK_STATE_PLAIN_LOOP;
    }
    if (n_bytes > DMK_WIDE_BYTES) {
        s->flags |= DMK_STATE_WIDE;
    }
}

static int make_dense(struct dmk_automaton *a)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < a->n_states; i++) {
        n += a->states[i].n_edges > DMK_DENSE_EDGES;
    }
    n = n < MAX_DENSE ? n : MAX_DENSE;
    a->dense = calloc(n + 1, sizeof(*a->dense));
    if (!a->dense) {
        return -DMK_ENOMEM;
    }
    for (uint32_t i = 0; i < a->n_states && a->n_dense < n; i++) {
        struct dmk_state *s = &a->states[i];
        uint32_t *row = a->dense[a->n_dense];

        if (s->n_edges <= DMK_DENSE_EDGES) {
            continue;
        }
        memset(row, 0xff, sizeof(*a->dense));
        for (uint32_t k = 0; k < s->n_edges; k++) {
            const struct dmk_edge *e = &a->edges[s->edges + k];

            for (unsigned b = e->first; b <= e->last; b++) {
                row[b] = e->target;
            }
        }
        s->dense = a->n_dense++;
    }
    return 0;
}

/* A rule that calls nobody and has no ids is the same wherever it stands: its key covers what it is. */
static void make_keys(struct dmk_automaton *a)
{
    for (uint32_t i = 0; i < a->n_rules; i++) {
        struct dmk_rule *rule = &a->rules[i];
        const struct dmk_state *first = &a->states[rule->start];
        const struct dmk_state *last = &a->states[rule->start + rule->n_states - 1];
        struct dmk_id128 key = {.lo = rule->n_states};
        bool leaf =
            last->calls + last->n_calls == first->calls && last->ids + last->n_ids == first->ids;

        for (uint32_t s = rule->start; leaf && s < rule->start + rule->n_states; s++) {
            const struct dmk_state *state = &a->states[s];
            const uint32_t head[2] = {state->flags, state->n_edges};

            key = dmk_hash128(key, head, sizeof(head));
            for (uint32_t k = 0; k < state->n_edges; k++) {
                const struct dmk_edge *e = &a->edges[state->edges + k];
                const uint32_t edge[2] = {(uint32_t)e->first << 8 | e->last,
                                          e->target - rule->start};

                key = dmk_hash128(key, edge, sizeof(edge));
            }
        }
        rule->key = leaf ? key : dmk_hash128(a->hash, &i, sizeof(i));
    }
}

static int prepare(struct dmk_automaton *a, struct dmk_error *reterr)
{
    struct back back;
    int r = check_starts(a, reterr);

    if (r < 0) {
        return r;
    }
    r = back_new(a, &back);
    if (r == 0) {
        back_fill(a, &back);
        settle(a, &back);
        r = make_dense(a);
    }
    back_free(&back);
    if (r < 0) {
        return r;
    }
    make_keys(a);
    for (uint32_t i = 0; i < a->n_states; i++) {
        mark(a, i);
    }
    if (a->states[0].need == DMK_NEED_NEVER) {
        return dmk_error_set(
            reterr, -DMK_EINVAL,
            "the constraint can not be met: nothing within %u nested values ends it",
            DMK_GRAMMAR_MAX_DEPTH);
    }
    return 0;
}

int dmk_automaton_load(struct dmk_bytes blob, struct dmk_automaton **ret, struct dmk_error *reterr)
{
    struct dmk_automaton *a = calloc(1, sizeof(*a));
    struct reader reader = {blob.data + HEAD_BYTES};
    int r;

    if (!a) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for a constraint");
    }
    r = read_head(a, blob, reterr);
    r = r < 0 ? r : allocate(a);
    r = r < 0 ? r : read_rules(a, &reader, reterr);
    r = r < 0 ? r : read_states(a, &reader, reterr);
    r = r < 0 ? r : read_edges(a, &reader, reterr);
    r = r < 0 ? r : prepare(a, reterr);
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
