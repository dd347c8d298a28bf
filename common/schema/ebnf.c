/* From a grammar that was read to rules of the build; see ebnf.h.
 *
 * Rules of the build need a character at least. A rule of the grammar that may be empty is built without the empty
 * text, from two layers of its nodes: nothing was written yet, and something was; it ends in the second. Whoever
 * calls it may also go past it. */
#include <stdlib.h>
#include "common/schema/ebnf_impl.h"

#define MAX_NODES (2 * DMK_EBNF_MAX_EDGES)
#define NONE      UINT32_MAX

/* Scratch of one look at a rule: its nodes' edges as lists, the nodes that were reached, those to look at. */
struct scratch {
    uint32_t first[MAX_NODES], next[DMK_EBNF_MAX_EDGES], todo[MAX_NODES];
    bool reached[MAX_NODES];
    struct dmk_chars chars;
};

/* Is the end of the rule reached without a character, by what is known of the others? */
static bool may_be_empty(const struct dmk_ebnf *g, const struct dmk_ebnf_rule *rule,
                         struct scratch *s)
{
    const struct dmk_ebnf_edge *edges = &g->edges[rule->first_edge];
    uint32_t n = 1;

    memset(s->first, 0xff, rule->n_nodes * sizeof(s->first[0]));
    memset(s->reached, 0, rule->n_nodes);
    for (uint32_t i = 0; i < rule->n_edges; i++) {
        if (edges[i].kind == DMK_EBNF_SKIP ||
            (edges[i].kind == DMK_EBNF_RULE && g->rules[edges[i].a].nullable)) {
            s->next[i] = s->first[edges[i].from];
            s->first[edges[i].from] = i;
        }
    }
    s->todo[0] = rule->in;
    s->reached[rule->in] = true;
    while (n > 0) {
        for (uint32_t i = s->first[s->todo[--n]]; i != NONE; i = s->next[i]) {
            const uint32_t to = edges[i].to;

            if (!s->reached[to]) {
                s->reached[to] = true;
                s->todo[n++] = to;
            }
        }
    }
    return s->reached[rule->out];
}

/* More rules may be empty while some are found. */
static void find_nullable(struct dmk_ebnf *g, struct scratch *s)
{
    bool more = true;

    while (more) {
        more = false;
        for (uint32_t r = 0; r < g->n_rules; r++) {
            if (!g->rules[r].nullable && may_be_empty(g, &g->rules[r], s)) {
                g->rules[r].nullable = more = true;
            }
        }
    }
}

static void find_used(struct dmk_ebnf *g, uint32_t root)
{
    uint32_t todo[DMK_EBNF_MAX_RULES], n = 1;

    todo[0] = root;
    g->rules[root].used = true;
    while (n > 0) {
        const struct dmk_ebnf_rule *rule = &g->rules[todo[--n]];

        for (uint32_t i = 0; i < rule->n_edges; i++) {
            const struct dmk_ebnf_edge *e = &g->edges[rule->first_edge + i];

            if (e->kind == DMK_EBNF_RULE && !g->rules[e->a].used) {
                g->rules[e->a].used = true;
                todo[n++] = e->a;
            }
        }
    }
}

struct layers {
    uint32_t first, n_nodes, last; /* node i of layer k is first + k * n_nodes + i */
};

static uint32_t node_at(const struct layers *l, uint32_t layer, uint32_t node)
{
    return l->first + layer * l->n_nodes + node;
}

static void build_edge(struct dmk_build *b, const struct dmk_ebnf *g, const struct dmk_ebnf_edge *e,
                       const struct layers *l, uint32_t layer, struct dmk_chars *scratch)
{
    const uint32_t from = node_at(l, layer, e->from);
    const uint32_t written = node_at(l, l->last, e->to), unwritten = node_at(l, layer, e->to);

    switch (e->kind) {
    case DMK_EBNF_SKIP:
        dmk_build_skip(b, from, unwritten);
        break;
    case DMK_EBNF_BYTE:
        dmk_build_bytes(b, from, (uint8_t)e->a, (uint8_t)e->a, written);
        break;
    case DMK_EBNF_CHARS:
        dmk_chars_clear(scratch);
        for (uint32_t i = 0; i < e->b; i++) {
            (void)dmk_chars_add(scratch, g->ranges[e->a + i].first, g->ranges[e->a + i].last);
        }
        dmk_chars_join(b, scratch, DMK_SPELL_PLAIN, false, from, written);
        break;
    case DMK_EBNF_RULE:
        dmk_build_call(b, from, g->rules[e->a].id, written);
        if (g->rules[e->a].nullable) {
            dmk_build_skip(b, from, unwritten);
        }
        break;
    }
}

static void build_rule(struct dmk_build *b, const struct dmk_ebnf *g,
                       const struct dmk_ebnf_rule *rule, struct dmk_chars *scratch)
{
    struct layers l = {.n_nodes = rule->n_nodes, .last = rule->nullable};

    dmk_build_begin(b, rule->id);
    l.first = dmk_build_node(b);
    for (uint32_t i = 1; i < rule->n_nodes * (l.last + 1); i++) {
        (void)dmk_build_node(b);
    }
    for (uint32_t i = 0; i < rule->n_edges && !dmk_build_failed(b); i++) {
        for (uint32_t layer = 0; layer <= l.last; layer++) {
            build_edge(b, g, &g->edges[rule->first_edge + i], &l, layer, scratch);
        }
    }
    dmk_build_end(
        b, dmk_piece_nodes(b, node_at(&l, 0, rule->in), node_at(&l, l.last, rule->out), l.first), 0,
        DMK_BUILD_NO_MAX);
}

static int find_root(const struct dmk_ebnf *g, uint32_t *ret, struct dmk_error *reterr)
{
    uint32_t root = g->n_rules;

    for (uint32_t r = 0; r < g->n_rules; r++) {
        const struct dmk_ebnf_rule *rule = &g->rules[r];

        if (!rule->defined) {
            return dmk_error_set(reterr, -DMK_EINVAL, "line %u: there is no rule \"%.*s\"",
                                 rule->line, rule->name.len > 64 ? 64 : (int)rule->name.len,
                                 rule->name.data);
        }
        root = dmk_str_is(rule->name, "root") ? r : root;
    }
    if (root == g->n_rules) {
        return dmk_error_set(reterr, -DMK_EINVAL, "there is no rule \"root\"");
    }
    *ret = root;
    return 0;
}

int dmk_ebnf_add(struct dmk_build *build, struct dmk_str grammar, uint32_t *ret_root,
                 struct dmk_error *reterr)
{
    struct dmk_ebnf *g = calloc(1, sizeof(*g));
    struct scratch *scratch = calloc(1, sizeof(*scratch));
    uint32_t root = 0;
    int r;

    if (!g || !scratch) {
        free(scratch);
        free(g);
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory to read the grammar");
    }
    r = dmk_ebnf__read(grammar, g, reterr);
    r = r < 0 ? r : find_root(g, &root, reterr);
    if (r == 0) {
        find_nullable(g, scratch);
        find_used(g, root);
        for (uint32_t i = 0; i < g->n_rules; i++) {
            g->rules[i].id = g->rules[i].used ? dmk_build_declare(build) : 0;
        }
        for (uint32_t i = 0; i < g->n_rules; i++) {
            if (g->rules[i].used) {
                build_rule(build, g, &g->rules[i], &scratch->chars);
            }
        }
        *ret_root = g->rules[root].id;
    }
    free(scratch);
    free(g);
    return r;
}
