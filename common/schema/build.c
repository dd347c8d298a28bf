/* Nodes and pieces; see build.h. */
#include "common/schema/build_impl.h"

#include <stdlib.h>
#include "common/base/assert.h"

bool dmk_build__grow(struct dmk_build *b, void *array, uint32_t n, uint32_t *cap, size_t size)
{
    void *more;

    if (n < *cap) {
        return true;
    }
    memcpy(&more, array, sizeof(more));
    more = realloc(more, (size_t)(*cap ? 2 * *cap : 64) * size);
    if (!more) {
        dmk_build_fail(b, "there is no memory for it");
        return false;
    }
    memcpy(array, &more, sizeof(more));
    *cap = *cap ? 2 * *cap : 64;
    return true;
}

struct dmk_build *dmk_build_new(void)
{
    return calloc(1, sizeof(struct dmk_build));
}

void dmk_build_free(struct dmk_build **build)
{
    struct dmk_build *b = *build;

    if (!b) {
        return;
    }
    for (uint32_t i = 0; i < b->n_rules; i++) {
        free(b->rules[i].states);
        free(b->rules[i].edges);
        free(b->rules[i].calls);
        free(b->rules[i].ids);
    }
    free(b->rules);
    free(b->nodes);
    free(b->links);
    free(b);
    *build = NULL;
}

void dmk_build_fail(struct dmk_build *b, const char *why)
{
    if (!b->why) {
        b->why = why;
    }
}

bool dmk_build_failed(const struct dmk_build *b)
{
    return b->why != NULL;
}

const char *dmk_build_why(const struct dmk_build *b)
{
    return b->why;
}

int dmk_build_finish(struct dmk_build *b, struct dmk_buf *out, struct dmk_error *reterr)
{
    struct dmk_grammar_rule *rules = calloc(b->n_rules + 1, sizeof(*rules));
    struct dmk_automaton *checked = NULL;
    int r = 0;

    if (!rules) {
        dmk_build_fail(b, "there is no memory for it");
    }
    for (uint32_t i = 0; !b->why && i < b->n_rules; i++) {
        dmk_assert(b->rules[i].done);
        rules[i] = (struct dmk_grammar_rule){b->rules[i].states, b->rules[i].n_states,
                                             b->rules[i].min, b->rules[i].max};
    }
    if (!b->why && dmk_grammar_write(rules, b->n_rules, out) < 0) {
        dmk_build_fail(b, "it is too large");
    }
    free(rules);
    if (b->why) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s", b->why);
    }
    r = dmk_automaton_load(dmk_buf_bytes(out), &checked, reterr);
    dmk_automaton_free(&checked);
    return r;
}

uint32_t dmk_build_declare(struct dmk_build *b)
{
    if (b->n_rules >= DMK_GRAMMAR_MAX_RULES) {
        dmk_build_fail(b, "it has too many parts");
        return 0;
    }
    if (!dmk_build__grow(b, &b->rules, b->n_rules, &b->cap_rules, sizeof(*b->rules))) {
        return 0;
    }
    b->rules[b->n_rules] = (struct dmk_built){.max = DMK_BUILD_NO_MAX};
    return b->n_rules++;
}

uint32_t dmk_build_n_rules(const struct dmk_build *b)
{
    return b->n_rules;
}

void dmk_build_begin(struct dmk_build *b, uint32_t rule)
{
    b->rule = rule;
    b->n_nodes = b->n_links = 0;
    b->expand = false;
}

void dmk_build_expand(struct dmk_build *b)
{
    b->expand = true;
}

void dmk_build_end(struct dmk_build *b, struct dmk_piece piece, uint32_t min, uint32_t max)
{
    struct dmk_built *rule;

    if (b->why) {
        return;
    }
    rule = &b->rules[b->rule];
    dmk_assert(!rule->done);
    rule->done = true;
    rule->min = min;
    rule->max = max;
    dmk_build__determine(b, piece, rule);
    if (b->expand) {
        rule->min = 0;
        rule->max = DMK_BUILD_NO_MAX;
    }
}

/* ---------------------------------------------------------------- nodes */

uint32_t dmk_build_node(struct dmk_build *b)
{
    if (b->why) {
        return 0;
    }
    if (b->n_nodes == DMK_BUILD_MAX_NODES) {
        dmk_build_fail(b, "it is too large");
        return 0;
    }
    if (!dmk_build__grow(b, &b->nodes, b->n_nodes, &b->cap_nodes, sizeof(*b->nodes))) {
        return 0;
    }
    b->nodes[b->n_nodes] = (struct dmk_build_node){.links = DMK_NO_EDGE};
    return b->n_nodes++;
}

static void add_link(struct dmk_build *b, uint32_t from, enum dmk_link_kind kind, uint32_t value,
                     uint32_t to)
{
    if (b->why || !dmk_build__grow(b, &b->links, b->n_links, &b->cap_links, sizeof(*b->links))) {
        return;
    }
    b->links[b->n_links] = (struct dmk_link){kind, value, to, b->nodes[from].links};
    b->nodes[from].links = b->n_links++;
}

void dmk_build_bytes(struct dmk_build *b, uint32_t from, uint8_t first, uint8_t last, uint32_t to)
{
    add_link(b, from, DMK_LINK_BYTES, (uint32_t)first << 8 | last, to);
}

void dmk_build_call(struct dmk_build *b, uint32_t from, uint32_t rule, uint32_t to)
{
    add_link(b, from, DMK_LINK_CALL, rule, to);
}

void dmk_build_id(struct dmk_build *b, uint32_t from, uint32_t id, uint32_t to)
{
    add_link(b, from, DMK_LINK_ID, id, to);
}

void dmk_build_skip(struct dmk_build *b, uint32_t from, uint32_t to)
{
    add_link(b, from, DMK_LINK_SKIP, 0, to);
}

void dmk_build_tick(struct dmk_build *b, uint32_t node)
{
    if (!b->why) {
        b->nodes[node].tick = true;
    }
}

void dmk_build_gate(struct dmk_build *b, uint32_t node)
{
    if (!b->why) {
        b->nodes[node].gate = true;
    }
}

/* ---------------------------------------------------------------- pieces */

struct dmk_piece dmk_piece_nodes(struct dmk_build *b, uint32_t in, uint32_t out, uint32_t first)
{
    return (struct dmk_piece){in, out, first, b->n_nodes};
}

/* Two nodes that are not joined. */
static struct dmk_piece ends(struct dmk_build *b)
{
    const uint32_t in = dmk_build_node(b), out = dmk_build_node(b);

    return dmk_piece_nodes(b, in, out, in);
}

struct dmk_piece dmk_piece_empty(struct dmk_build *b)
{
    const uint32_t node = dmk_build_node(b);

    return dmk_piece_nodes(b, node, node, node);
}

struct dmk_piece dmk_piece_never(struct dmk_build *b)
{
    return ends(b);
}

struct dmk_piece dmk_piece_text(struct dmk_build *b, struct dmk_str bytes)
{
    const uint32_t in = dmk_build_node(b);
    uint32_t at = in;

    for (size_t i = 0; i < bytes.len; i++) {
        const uint32_t next = dmk_build_node(b);

        dmk_build_bytes(b, at, (uint8_t)bytes.data[i], (uint8_t)bytes.data[i], next);
        at = next;
    }
    return dmk_piece_nodes(b, in, at, in);
}

struct dmk_piece dmk_piece_bytes(struct dmk_build *b, uint8_t first, uint8_t last)
{
    const struct dmk_piece p = ends(b);

    dmk_build_bytes(b, p.in, first, last, p.out);
    return p;
}

struct dmk_piece dmk_piece_call(struct dmk_build *b, uint32_t rule)
{
    const struct dmk_piece p = ends(b);

    dmk_build_call(b, p.in, rule, p.out);
    return p;
}

struct dmk_piece dmk_piece_id(struct dmk_build *b, uint32_t id)
{
    const struct dmk_piece p = ends(b);

    dmk_build_id(b, p.in, id, p.out);
    return p;
}

static struct dmk_piece around(struct dmk_build *b, uint32_t in, uint32_t out, struct dmk_piece x,
                               struct dmk_piece y)
{
    const uint32_t first = x.first < y.first ? x.first : y.first;

    (void)b;
    return (struct dmk_piece){in, out, first, b->n_nodes};
}

struct dmk_piece dmk_piece_then(struct dmk_build *b, struct dmk_piece x, struct dmk_piece y)
{
    dmk_build_skip(b, x.out, y.in);
    return around(b, x.in, y.out, x, y);
}

struct dmk_piece dmk_piece_or(struct dmk_build *b, struct dmk_piece x, struct dmk_piece y)
{
    const struct dmk_piece p = ends(b);

    dmk_build_skip(b, p.in, x.in);
    dmk_build_skip(b, p.in, y.in);
    dmk_build_skip(b, x.out, p.out);
    dmk_build_skip(b, y.out, p.out);
    return around(b, p.in, p.out, x, y);
}

struct dmk_piece dmk_piece_maybe(struct dmk_build *b, struct dmk_piece x)
{
    const struct dmk_piece p = ends(b);

    dmk_build_skip(b, p.in, x.in);
    dmk_build_skip(b, p.in, p.out);
    dmk_build_skip(b, x.out, p.out);
    return around(b, p.in, p.out, x, x);
}

struct dmk_piece dmk_piece_many(struct dmk_build *b, struct dmk_piece x)
{
    const struct dmk_piece p = ends(b);

    dmk_build_skip(b, p.in, x.in);
    dmk_build_skip(b, p.in, p.out);
    dmk_build_skip(b, x.out, x.in);
    dmk_build_skip(b, x.out, p.out);
    return around(b, p.in, p.out, x, x);
}

/* The same once more: its nodes lie in one range, which nothing else is in. */
static struct dmk_piece copy(struct dmk_build *b, struct dmk_piece x)
{
    const uint32_t by = b->n_nodes - x.first;

    for (uint32_t i = x.first; !b->why && i < x.end; i++) {
        const uint32_t node = dmk_build_node(b);

        if (!b->why) {
            b->nodes[node].tick = b->nodes[i].tick;
            b->nodes[node].gate = b->nodes[i].gate;
        }
    }
    for (uint32_t i = x.first; !b->why && i < x.end; i++) {
        for (uint32_t e = b->nodes[i].links; !b->why && e != DMK_NO_EDGE; e = b->links[e].next) {
            const struct dmk_link link = b->links[e];

            /* Links that lead out were made after the piece. */
            if (link.to >= x.first && link.to < x.end) {
                add_link(b, i + by, link.kind, link.value, link.to + by);
            }
        }
    }
    return (struct dmk_piece){x.in + by, x.out + by, x.first + by, x.end + by};
}

struct dmk_piece dmk_piece_repeat(struct dmk_build *b, struct dmk_piece x, uint32_t min,
                                  uint32_t max)
{
    const uint32_t n = max != DMK_BUILD_NO_MAX ? max : min > 0 ? min : 1;
    const uint32_t in = dmk_build_node(b), out = dmk_build_node(b);
    const struct dmk_piece whole = {in, out, x.first, 0};
    struct dmk_piece *parts;

    if (n == 0 || b->why) {
        dmk_build_skip(b, in, out);
        return around(b, in, out, whole, whole);
    }
    if ((uint64_t)n * (x.end - x.first) > DMK_BUILD_MAX_NODES) {
        dmk_build_fail(b, "it repeats too much");
        return whole;
    }
    parts = calloc(n, sizeof(*parts));
    if (!parts) {
        dmk_build_fail(b, "there is no memory for it");
        return whole;
    }
    parts[0] = x;
    for (uint32_t i = 1; i < n; i++) {
        parts[i] = copy(b, x); /* before anything leads out of x */
    }
    for (uint32_t i = 0; i < n; i++) {
        dmk_build_skip(b, i ? parts[i - 1].out : in, parts[i].in);
        if (i >= min) {
            dmk_build_skip(b, i ? parts[i - 1].out : in, out);
        }
    }
    dmk_build_skip(b, parts[n - 1].out, out);
    if (max == DMK_BUILD_NO_MAX) {
        dmk_build_skip(b, parts[n - 1].out, parts[n - 1].in);
    }
    free(parts);
    return around(b, in, out, whole, whole);
}
