/* From nodes to a deterministic rule, by sets of nodes: a state is the set of nodes that the same text can lead
 * to. Calls and ids are letters like bytes. States are made in the order in which they are found. */
#include "common/schema/build_impl.h"

#include <stdlib.h>
#include <string.h>
#include "common/base/hash.h"

struct set {
    uint32_t at, n; /* in pool */
    bool tick, gate;
    uint32_t count; /* so far, where counts are expanded */
};

struct work {
    struct dmk_build *b;
    struct dmk_built *rule;
    uint32_t out;
    struct set *sets; /* [n_states] */
    uint32_t n_sets, cap_sets;
    uint32_t *pool;
    uint32_t n_pool, cap_pool;
    uint32_t *table; /* hash table of sets, plus 1 */
    uint32_t n_table;
    uint32_t *mark; /* [n_nodes] round in which a node was met */
    uint32_t round;
    uint32_t *list; /* [n_nodes] scratch */
    uint32_t n_list;
    bool tick, gate, mixed; /* of the list's nodes that were reached directly */
    uint32_t count;         /* of the list's state */
    uint32_t cap_edges, cap_calls, cap_ids;
};

/* What entering the list does to the count of the set that it was followed from; false when it may not be
 * entered. Only where counts are expanded: then no marks are left. */
static bool expand_count(struct work *w, uint32_t before)
{
    w->count = before;
    if (!w->b->expand) {
        return true;
    }
    if (w->tick) {
        if (before >= w->rule->max) {
            return false;
        }
        /* Without a bound above nothing changes behind the one below. */
        w->count += w->rule->max != DMK_BUILD_NO_MAX || before < w->rule->min;
    }
    if (w->gate && w->count < w->rule->min) {
        return false;
    }
    w->tick = w->gate = false;
    return true;
}

static bool spend(struct work *w, uint64_t steps)
{
    w->b->work += steps;
    if (w->b->work > DMK_BUILD_MAX_WORK) {
        dmk_build_fail(w->b, "it takes too long to compile");
    }
    return !w->b->why;
}

static void begin_list(struct work *w)
{
    w->round++;
    w->n_list = 0;
    w->tick = w->gate = w->mixed = false;
}

/* A node that a letter leads to. */
static void add_node(struct work *w, uint32_t node)
{
    const struct dmk_build_node *n = &w->b->nodes[node];

    if (w->mark[node] == w->round) {
        return;
    }
    w->mixed = w->mixed || (w->n_list > 0 && (n->tick != w->tick || n->gate != w->gate));
    w->tick = n->tick;
    w->gate = n->gate;
    w->mark[node] = w->round;
    w->list[w->n_list++] = node;
}

static int compare(const void *x, const void *y)
{
    const uint32_t a = *(const uint32_t *)x, b = *(const uint32_t *)y;

    return (a > b) - (a < b);
}

/* Everything that the list reaches by nothing; sorted. Nodes that only pass on are left out. */
static void close_list(struct work *w)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < w->n_list; i++) {
        for (uint32_t e = w->b->nodes[w->list[i]].links; e != DMK_NO_EDGE;
             e = w->b->links[e].next) {
            const struct dmk_link *link = &w->b->links[e];

            if (link->kind == DMK_LINK_SKIP && w->mark[link->to] != w->round) {
                w->mark[link->to] = w->round;
                w->list[w->n_list++] = link->to;
            }
        }
    }
    (void)spend(w, w->n_list);
    for (uint32_t i = 0; i < w->n_list; i++) {
        bool does = w->list[i] == w->out;

        for (uint32_t e = w->b->nodes[w->list[i]].links; e != DMK_NO_EDGE && !does;
             e = w->b->links[e].next) {
            does = w->b->links[e].kind != DMK_LINK_SKIP;
        }
        if (does) {
            w->list[n++] = w->list[i];
        }
    }
    w->n_list = n;
    qsort(w->list, n, sizeof(*w->list), compare);
}

static bool grow_table(struct work *w)
{
    const uint32_t n = w->n_table ? 2 * w->n_table : 256;
    uint32_t *table;

    if (2 * (w->n_sets + 1) <= w->n_table) {
        return true;
    }
    table = calloc(n, sizeof(*table));
    if (!table) {
        dmk_build_fail(w->b, "there is no memory for it");
        return false;
    }
    for (uint32_t i = 0; i < w->n_sets; i++) {
        const struct set *s = &w->sets[i];
        uint32_t slot = (uint32_t)dmk_hash64(w->pool + s->at, s->n * sizeof(uint32_t),
                                             (uint64_t)s->count << 2 | s->tick | s->gate << 1) &
                        (n - 1);

        while (table[slot]) {
            slot = (slot + 1) & (n - 1);
        }
        table[slot] = i + 1;
    }
    free(w->table);
    w->table = table;
    w->n_table = n;
    return true;
}

/* The state of the closed list; made when it is new. */
static uint32_t state_of_list(struct work *w)
{
    struct dmk_build *b = w->b;
    const size_t bytes = w->n_list * sizeof(uint32_t);
    uint32_t slot;

    if (w->mixed) {
        dmk_build_fail(b, "it counts and does not count the same text");
    }
    if (b->why || !grow_table(w)) {
        return 0;
    }
    slot = (uint32_t)dmk_hash64(w->list, bytes, (uint64_t)w->count << 2 | w->tick | w->gate << 1) &
           (w->n_table - 1);
    while (w->table[slot]) {
        const struct set *s = &w->sets[w->table[slot] - 1];

        if (s->n == w->n_list && s->tick == w->tick && s->gate == w->gate && s->count == w->count &&
            memcmp(w->pool + s->at, w->list, bytes) == 0) {
            return w->table[slot] - 1;
        }
        slot = (slot + 1) & (w->n_table - 1);
    }
    if (b->n_states + w->n_sets >= DMK_GRAMMAR_MAX_STATES - 1 || w->n_pool > (1u << 24)) {
        dmk_build_fail(b, "it is too large");
        return 0;
    }
    if (!dmk_build__grow(b, &w->sets, w->n_sets, &w->cap_sets, sizeof(*w->sets))) {
        return 0;
    }
    for (uint32_t i = 0; i < w->n_list; i++) {
        if (!dmk_build__grow(b, &w->pool, w->n_pool, &w->cap_pool, sizeof(*w->pool))) {
            return 0;
        }
        w->pool[w->n_pool++] = w->list[i];
    }
    w->table[slot] = w->n_sets + 1;
    w->sets[w->n_sets] = (struct set){w->n_pool - w->n_list, w->n_list, w->tick, w->gate, w->count};
    return w->n_sets++;
}

/* ---------------------------------------------------------------- letters */

/* Borders between bytes that some link of the set tells apart. */
static void find_borders(const struct work *w, struct set s, bool borders[257])
{
    memset(borders, 0, 257 * sizeof(borders[0]));
    for (uint32_t i = 0; i < s.n; i++) {
        for (uint32_t e = w->b->nodes[w->pool[s.at + i]].links; e != DMK_NO_EDGE;
             e = w->b->links[e].next) {
            const struct dmk_link *link = &w->b->links[e];

            if (link->kind == DMK_LINK_BYTES) {
                borders[link->value >> 8] = true;
                borders[(link->value & 255) + 1] = true;
            }
        }
    }
}

/* The nodes that one letter leads to from the set. */
static void follow(struct work *w, struct set s, enum dmk_link_kind kind, uint32_t value)
{
    begin_list(w);
    for (uint32_t i = 0; i < s.n; i++) {
        for (uint32_t e = w->b->nodes[w->pool[s.at + i]].links; e != DMK_NO_EDGE;
             e = w->b->links[e].next) {
            const struct dmk_link *link = &w->b->links[e];

            if (link->kind == kind &&
                (kind == DMK_LINK_BYTES ? value >= link->value >> 8 && value <= (link->value & 255)
                                        : value == link->value)) {
                add_node(w, link->to);
            }
        }
    }
    (void)spend(w, s.n);
}

static void add_bytes(struct work *w, struct set s)
{
    struct dmk_built *rule = w->rule;
    const uint32_t from = rule->n_edges;
    bool borders[257];
    unsigned first = 0;

    find_borders(w, s, borders);
    while (first < 256 && !w->b->why) {
        unsigned last = first;
        uint32_t target;

        while (last < 255 && !borders[last + 1]) {
            last++;
        }
        follow(w, s, DMK_LINK_BYTES, first);
        if (w->n_list > 0) {
            struct dmk_grammar_edge *before;

            close_list(w);
            if (!expand_count(w, s.count)) {
                first = last + 1;
                continue;
            }
            target = state_of_list(w);
            before = rule->n_edges > from ? &rule->edges[rule->n_edges - 1] : NULL;
            if (before && before->last + 1u == first && before->target == target) {
                before->last = (uint8_t)last;
            } else if (dmk_build__grow(w->b, &rule->edges, rule->n_edges, &w->cap_edges,
                                       sizeof(*rule->edges))) {
                rule->edges[rule->n_edges++] =
                    (struct dmk_grammar_edge){(uint8_t)first, (uint8_t)last, (uint16_t)target};
            }
        }
        first = last + 1;
    }
}

/* Calls and ids: each value once. */
static void add_letters(struct work *w, struct set s, enum dmk_link_kind kind)
{
    struct dmk_built *rule = w->rule;
    const uint32_t from = kind == DMK_LINK_CALL ? rule->n_calls : rule->n_ids;

    for (uint32_t i = 0; i < s.n; i++) {
        for (uint32_t e = w->b->nodes[w->pool[s.at + i]].links; e != DMK_NO_EDGE && !w->b->why;
             e = w->b->links[e].next) {
            const struct dmk_link link = w->b->links[e];
            bool seen = link.kind != kind;

            for (uint32_t k = from;
                 !seen && k < (kind == DMK_LINK_CALL ? rule->n_calls : rule->n_ids); k++) {
                seen =
                    link.value == (kind == DMK_LINK_CALL ? rule->calls[k].rule : rule->ids[k].id);
            }
            if (seen) {
                continue;
            }
            follow(w, s, kind, link.value);
            close_list(w);
            if (!expand_count(w, s.count)) {
                continue;
            }
            const uint32_t target = state_of_list(w);

            if (kind == DMK_LINK_CALL && dmk_build__grow(w->b, &rule->calls, rule->n_calls,
                                                         &w->cap_calls, sizeof(*rule->calls))) {
                rule->calls[rule->n_calls++] =
                    (struct dmk_grammar_call){(uint16_t)link.value, (uint16_t)target};
            } else if (kind == DMK_LINK_ID && dmk_build__grow(w->b, &rule->ids, rule->n_ids,
                                                              &w->cap_ids, sizeof(*rule->ids))) {
                rule->ids[rule->n_ids++] = (struct dmk_grammar_id){link.value, (uint16_t)target};
            }
        }
    }
}

/* ---------------------------------------------------------------- the rule */

static void make_state(struct work *w, uint32_t i, struct dmk_grammar_state *ret)
{
    const struct set s = w->sets[i];
    const uint32_t edges = w->rule->n_edges, calls = w->rule->n_calls, ids = w->rule->n_ids;

    for (uint32_t k = 0; k < s.n; k++) {
        ret->flags |= w->pool[s.at + k] == w->out ? DMK_GRAMMAR_ACCEPT : 0;
    }
    ret->flags |= (s.tick ? DMK_GRAMMAR_TICK : 0) | (s.gate ? DMK_GRAMMAR_GATE : 0);
    add_bytes(w, s);
    add_letters(w, s, DMK_LINK_CALL);
    add_letters(w, s, DMK_LINK_ID);
    if (w->rule->n_ids - ids > 255 || w->rule->n_calls - calls > 65535) {
        dmk_build_fail(w->b, "it has too many alternatives in one place");
    }
    ret->n_edges = (uint16_t)(w->rule->n_edges - edges);
    ret->n_calls = (uint16_t)(w->rule->n_calls - calls);
    ret->n_ids = (uint8_t)(w->rule->n_ids - ids);
}

/* The states' views into the tables, once these do not move any more. */
static void point(struct dmk_built *rule)
{
    const struct dmk_grammar_edge *edges = rule->edges;
    const struct dmk_grammar_call *calls = rule->calls;
    const struct dmk_grammar_id *ids = rule->ids;

    for (uint32_t i = 0; i < rule->n_states; i++) {
        struct dmk_grammar_state *s = &rule->states[i];

        s->edges = edges;
        s->calls = calls;
        s->ids = ids;
        edges = s->n_edges ? edges + s->n_edges : edges;
        calls = s->n_calls ? calls + s->n_calls : calls;
        ids = s->n_ids ? ids + s->n_ids : ids;
    }
}

void dmk_build__determine(struct dmk_build *b, struct dmk_piece piece, struct dmk_built *rule)
{
    struct work w = {.b = b, .rule = rule, .out = piece.out};
    uint32_t cap_states = 0;

    w.mark = calloc(b->n_nodes + 1, sizeof(*w.mark));
    w.list = calloc(b->n_nodes + 1, sizeof(*w.list));
    if (!w.mark || !w.list) {
        dmk_build_fail(b, "there is no memory for it");
    } else if (dmk_build__grow(b, &w.pool, 0, &w.cap_pool, sizeof(*w.pool))) {
        /* The pool is there from the start: even an empty set lies in it. */
        begin_list(&w);
        add_node(&w, piece.in);
        w.tick = w.gate = false; /* nothing was entered yet */
        close_list(&w);
        (void)state_of_list(&w);
    }
    for (uint32_t i = 0; !b->why && i < w.n_sets; i++) {
        struct dmk_grammar_state state = {0};

        make_state(&w, i, &state);
        if (dmk_build__grow(b, &rule->states, rule->n_states, &cap_states, sizeof(*rule->states))) {
            rule->states[rule->n_states++] = state;
        }
    }
    point(rule);
    b->n_states += rule->n_states;
    free(w.sets);
    free(w.pool);
    free(w.table);
    free(w.mark);
    free(w.list);
}
