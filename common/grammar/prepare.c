/* What the walker wants to know of an automaton beforehand: that rules begin with something, how deep the way out
 * of each state is, and marks of states that masks can take in one step. */
#include "common/grammar/automaton_impl.h"

#include <stdlib.h>
#include <string.h>

#define MAX_DENSE 1024u

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
            r = dmk_error_set(reterr, -DMK_EFORMAT,
                              "the constraint is damaged: a rule that is called accepts nothing");
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

/* Well-formed characters of several bytes, by their first byte. */
static const struct {
    uint8_t first, last, n;
    uint8_t next[3][2];
} sequences[] = {
    {0xc2, 0xdf, 1, {{0x80, 0xbf}}},
    {0xe0, 0xe0, 2, {{0xa0, 0xbf}, {0x80, 0xbf}}},
    {0xe1, 0xec, 2, {{0x80, 0xbf}, {0x80, 0xbf}}},
    {0xed, 0xed, 2, {{0x80, 0x9f}, {0x80, 0xbf}}},
    {0xee, 0xef, 2, {{0x80, 0xbf}, {0x80, 0xbf}}},
    {0xf0, 0xf0, 3, {{0x90, 0xbf}, {0x80, 0xbf}, {0x80, 0xbf}}},
    {0xf1, 0xf3, 3, {{0x80, 0xbf}, {0x80, 0xbf}, {0x80, 0xbf}}},
    {0xf4, 0xf4, 3, {{0x80, 0x8f}, {0x80, 0xbf}, {0x80, 0xbf}}},
};
#define N_SEQUENCES (sizeof(sequences) / sizeof(sequences[0]))

/* Where all bytes of a range lead; DMK_NO_STATE when they do not lead to one state. */
static uint32_t range_next(const struct dmk_automaton *a, uint32_t state, uint8_t first,
                           uint8_t last)
{
    const struct dmk_state *s = &a->states[state];

    for (uint32_t k = 0; k < s->n_edges; k++) {
        const struct dmk_edge *e = &a->edges[s->edges + k];

        if (e->first <= first && e->last >= last) {
            return e->target;
        }
    }
    return DMK_NO_STATE;
}

/* The state does nothing but take bytes, and its way out is as short as that of home. flags: what it may be
 * marked with. */
static bool is_simple(const struct dmk_automaton *a, uint32_t state, uint32_t home, uint8_t flags)
{
    const struct dmk_state *s = &a->states[state];
    const uint8_t mine = s->flags & (DMK_GRAMMAR_ACCEPT | DMK_GRAMMAR_TICK | DMK_GRAMMAR_GATE);

    return mine == flags && s->n_calls == 0 && s->n_ids == 0 && s->need == a->states[home].need;
}

/* Where printable ASCII leads from a state, if to one state. */
static uint32_t ascii_next(const struct dmk_automaton *a, uint32_t state)
{
    const uint32_t to = range_next(a, state, 0x20, 0x21);

    return to != DMK_NO_STATE && range_next(a, state, 0x23, 0x5b) == to &&
                   range_next(a, state, 0x5d, 0x7e) == to
               ? to
               : DMK_NO_STATE;
}

/* Whether any text leads from home back to home. Where characters count, ASCII leads to a twin of home that is
 * marked as counting, and so does the first byte of a longer character to its next state. */
static void mark_text(struct dmk_automaton *a, uint32_t home)
{
    const uint32_t ascii = ascii_next(a, home);
    const uint8_t tick = ascii == home ? 0 : DMK_GRAMMAR_TICK;
    uint32_t inner[3 * N_SEQUENCES], n_inner = 0;

    if (ascii == DMK_NO_STATE || !is_simple(a, home, home, 0) || !is_simple(a, ascii, home, tick) ||
        ascii_next(a, ascii) != ascii) {
        return;
    }
    for (size_t i = 0; i < N_SEQUENCES; i++) {
        uint32_t at = range_next(a, home, sequences[i].first, sequences[i].last);

        if (range_next(a, ascii, sequences[i].first, sequences[i].last) != at) {
            return;
        }
        for (unsigned k = 0; k < sequences[i].n; k++) {
            if (at == DMK_NO_STATE || !is_simple(a, at, home, k == 0 ? tick : 0)) {
                return;
            }
            inner[n_inner++] = at;
            at = range_next(a, at, sequences[i].next[k][0], sequences[i].next[k][1]);
        }
        if (at != home) {
            return;
        }
    }
    a->states[home].flags |= DMK_STATE_TEXT;
    a->states[ascii].flags |= DMK_STATE_TEXT;
    for (uint32_t i = 0; i < n_inner; i++) {
        a->states[inner[i]].flags |= DMK_STATE_TEXT_INNER;
    }
}

static void mark(struct dmk_automaton *a, uint32_t i)
{
    struct dmk_state *s = &a->states[i];
    unsigned n_bytes = 0;

    for (uint32_t k = 0; k < s->n_edges; k++) {
        n_bytes += a->edges[s->edges + k].last - a->edges[s->edges + k].first + 1u;
    }
    if (s->flags & DMK_GRAMMAR_ACCEPT && s->n_edges + s->n_calls + s->n_ids == 0) {
        s->flags |= DMK_STATE_TAIL;
    }
    if (n_bytes > DMK_WIDE_BYTES) {
        s->flags |= DMK_STATE_WIDE;
    }
    if (range_next(a, i, 0, 255) == i && is_simple(a, i, i, 0)) {
        s->flags |= DMK_STATE_ALL;
    } else if (n_bytes > 128) {
        mark_text(a, i);
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

int dmk_automaton__prepare(struct dmk_automaton *a, struct dmk_error *reterr)
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
