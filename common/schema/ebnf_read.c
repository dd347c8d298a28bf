/* The reader of EBNF; see ebnf.h. Groups that are open are a list, not calls. */
#include "common/schema/ebnf_read.h"

#include <string.h>
#include "common/base/spell.h"

/* ---------------------------------------------------------------- nodes */

static uint32_t new_node(struct dmk_ebnf_reader *r)
{
    return r->n_nodes++;
}

static void add_edge(struct dmk_ebnf_reader *r, struct dmk_ebnf_edge edge)
{
    struct dmk_ebnf *g = r->g;

    /* Every node has an edge or two of its own, so this bounds the nodes too. */
    if (g->n_edges == DMK_EBNF_MAX_EDGES || r->n_nodes >= 2 * DMK_EBNF_MAX_EDGES - 4) {
        r->full = true;
        return;
    }
    g->edges[g->n_edges++] = edge;
}

static void skip_edge(struct dmk_ebnf_reader *r, uint32_t from, uint32_t to)
{
    add_edge(r, (struct dmk_ebnf_edge){.kind = DMK_EBNF_SKIP, .from = from, .to = to});
}

static struct dmk_ebnf_part begin_part(struct dmk_ebnf_reader *r)
{
    struct dmk_ebnf_part p = {.first_node = r->n_nodes, .first_edge = r->g->n_edges};

    p.in = new_node(r);
    p.out = new_node(r);
    return p;
}

/* The part once more, as it was when it had n_nodes and n_edges. */
static struct dmk_ebnf_part copy_part(struct dmk_ebnf_reader *r, const struct dmk_ebnf_part *p,
                                      uint32_t n_nodes, uint32_t n_edges)
{
    const uint32_t shift = r->n_nodes - p->first_node;
    const struct dmk_ebnf_part copy = {p->in + shift, p->out + shift, r->n_nodes, r->g->n_edges};

    r->n_nodes += n_nodes;
    for (uint32_t i = 0; i < n_edges && !r->full; i++) {
        struct dmk_ebnf_edge e = r->g->edges[p->first_edge + i];

        e.from += shift;
        e.to += shift;
        add_edge(r, e);
    }
    return copy;
}

/* The part between min and max times; max DMK_BUILD_NO_MAX: any number. */
static struct dmk_ebnf_part repeat(struct dmk_ebnf_reader *r, struct dmk_ebnf_part p, uint32_t min,
                                   uint32_t max)
{
    const uint32_t n_nodes = r->n_nodes - p.first_node, n_edges = r->g->n_edges - p.first_edge;
    const bool endless = max == DMK_BUILD_NO_MAX;
    const uint32_t n = endless ? min + (min == 0) : max;
    struct dmk_ebnf_part whole = {new_node(r), new_node(r), p.first_node, p.first_edge}, last = p;
    uint32_t at = whole.in;

    for (uint32_t k = 0; k < n && !r->full; k++) {
        last = k == 0 ? p : copy_part(r, &p, n_nodes, n_edges);
        if (k >= min) {
            skip_edge(r, at, whole.out);
        }
        skip_edge(r, at, last.in);
        at = last.out;
    }
    if (endless) {
        skip_edge(r, last.out, last.in);
    }
    skip_edge(r, at, whole.out);
    return whole;
}

/* ---------------------------------------------------------------- elements */

static void add_byte(struct dmk_ebnf_reader *r, uint32_t *inout_at, uint32_t byte)
{
    const uint32_t to = new_node(r);

    add_edge(r, (struct dmk_ebnf_edge){DMK_EBNF_BYTE, *inout_at, to, byte, 0});
    *inout_at = to;
}

static void add_utf8(struct dmk_ebnf_reader *r, uint32_t *inout_at, uint32_t code)
{
    uint8_t bytes[4];
    const size_t n = dmk_utf8_put(code, bytes);

    for (size_t i = 0; i < n; i++) {
        add_byte(r, inout_at, bytes[i]);
    }
}

static int read_text(struct dmk_ebnf_reader *r, struct dmk_ebnf_part *ret)
{
    struct dmk_ebnf_part p = begin_part(r);
    uint32_t at = p.in;

    r->at++;
    while (dmk_ebnf__peek(r) != '"') {
        uint32_t code;

        if (dmk_ebnf__char(r, &code) < 0) {
            return -DMK_EINVAL;
        }
        add_utf8(r, &at, code);
    }
    r->at++;
    skip_edge(r, at, p.out);
    *ret = p;
    return 0;
}

static int add_chars(struct dmk_ebnf_reader *r, struct dmk_ebnf_part *ret)
{
    struct dmk_ebnf *g = r->g;
    struct dmk_ebnf_part p = begin_part(r);

    if (r->chars.n == 0) {
        return dmk_ebnf__bad(r, "a class has no character");
    }
    if (g->n_ranges + r->chars.n > DMK_EBNF_MAX_RANGES) {
        return dmk_ebnf__bad(r, "the classes have too many ranges");
    }
    memcpy(g->ranges + g->n_ranges, r->chars.ranges, r->chars.n * sizeof(r->chars.ranges[0]));
    add_edge(r, (struct dmk_ebnf_edge){DMK_EBNF_CHARS, p.in, p.out, g->n_ranges, r->chars.n});
    g->n_ranges += r->chars.n;
    *ret = p;
    return 0;
}

static int read_class(struct dmk_ebnf_reader *r, struct dmk_ebnf_part *ret)
{
    bool others, ok = true;

    r->at++;
    others = dmk_ebnf__peek(r) == '^';
    r->at += others;
    dmk_chars_clear(&r->chars);
    while (dmk_ebnf__peek(r) != ']') {
        uint32_t first, last;

        if (dmk_ebnf__char(r, &first) < 0) {
            return -DMK_EINVAL;
        }
        last = first;
        if (dmk_ebnf__peek(r) == '-' && r->at + 1 < r->text.len && r->text.data[r->at + 1] != ']') {
            r->at++;
            if (dmk_ebnf__char(r, &last) < 0) {
                return -DMK_EINVAL;
            }
        }
        if (last < first) {
            return dmk_ebnf__bad(r, "a range in a class is out of order");
        }
        ok = ok && dmk_chars_add(&r->chars, first, last);
    }
    r->at++;
    ok = ok && (!others || dmk_chars_invert(&r->chars));
    return ok ? add_chars(r, ret) : dmk_ebnf__bad(r, "a class has too many ranges");
}

static int read_any(struct dmk_ebnf_reader *r, struct dmk_ebnf_part *ret)
{
    r->at++;
    dmk_chars_clear(&r->chars);
    (void)dmk_chars_invert(&r->chars);
    return add_chars(r, ret);
}

/* The rule of that name, made when it is the first time that it is heard of. */
static int find_rule(struct dmk_ebnf_reader *r, struct dmk_str name, uint32_t *ret)
{
    struct dmk_ebnf *g = r->g;

    for (uint32_t i = 0; i < g->n_rules; i++) {
        if (g->rules[i].name.len == name.len &&
            memcmp(g->rules[i].name.data, name.data, name.len) == 0) {
            *ret = i;
            return 0;
        }
    }
    if (g->n_rules == DMK_EBNF_MAX_RULES) {
        return dmk_ebnf__bad(r, "the grammar has too many rules");
    }
    g->rules[g->n_rules] = (struct dmk_ebnf_rule){.name = name, .line = r->line};
    *ret = g->n_rules++;
    return 0;
}

static int read_call(struct dmk_ebnf_reader *r, struct dmk_ebnf_part *ret)
{
    struct dmk_ebnf_part p = begin_part(r);
    uint32_t rule;

    if (find_rule(r, dmk_ebnf__take_name(r), &rule) < 0) {
        return -DMK_EINVAL;
    }
    add_edge(r, (struct dmk_ebnf_edge){DMK_EBNF_RULE, p.in, p.out, rule, 0});
    *ret = p;
    return 0;
}

static int read_count(struct dmk_ebnf_reader *r, uint32_t *ret)
{
    uint32_t v = 0;
    const size_t from = r->at;

    while (dmk_ebnf__peek(r) >= '0' && dmk_ebnf__peek(r) <= '9' && v <= DMK_EBNF_MAX_REPEAT) {
        v = v * 10 + (uint32_t)(dmk_ebnf__peek(r) - '0');
        r->at++;
    }
    if (r->at == from || v > DMK_EBNF_MAX_REPEAT) {
        return dmk_ebnf__bad(r, "{ is not followed by a count up to 1000");
    }
    *ret = v;
    return 0;
}

/* {n} {n,} {n,m}, behind the brace. */
static int read_counts(struct dmk_ebnf_reader *r, uint32_t *ret_min, uint32_t *ret_max)
{
    if (read_count(r, ret_min) < 0) {
        return -DMK_EINVAL;
    }
    *ret_max = *ret_min;
    dmk_ebnf__skip(r, false);
    if (dmk_ebnf__peek(r) == ',') {
        r->at++;
        dmk_ebnf__skip(r, false);
        *ret_max = DMK_BUILD_NO_MAX;
        if (dmk_ebnf__peek(r) != '}' && read_count(r, ret_max) < 0) {
            return -DMK_EINVAL;
        }
        dmk_ebnf__skip(r, false);
    }
    if (dmk_ebnf__peek(r) != '}' || *ret_max < *ret_min) {
        return dmk_ebnf__bad(r, "a count is not closed, or ends before it begins");
    }
    r->at++;
    return 0;
}

/* What stands behind an element says how often it comes; then it is part of its alternative. */
static int end_element(struct dmk_ebnf_reader *r, struct dmk_ebnf_part p)
{
    struct dmk_ebnf_group *group;

    for (;;) {
        uint32_t min = 0, max = DMK_BUILD_NO_MAX;
        char c;

        dmk_ebnf__skip(r, false);
        c = dmk_ebnf__peek(r);
        if (c != '*' && c != '+' && c != '?' && c != '{') {
            break;
        }
        r->at++;
        if (c == '{') {
            if (read_counts(r, &min, &max) < 0) {
                return -DMK_EINVAL;
            }
        } else {
            min = c == '+';
            max = c == '?' ? 1 : max;
        }
        p = repeat(r, p, min, max);
        if (r->full) {
            return dmk_ebnf__bad(r, "the grammar is too large");
        }
    }
    group = &r->groups[r->depth - 1];
    skip_edge(r, group->at, p.in);
    group->at = p.out;
    return r->full ? dmk_ebnf__bad(r, "the grammar is too large") : 0;
}

static int open_group(struct dmk_ebnf_reader *r)
{
    struct dmk_ebnf_group *group;

    if (r->depth == DMK_EBNF_MAX_GROUPS) {
        return dmk_ebnf__bad(r, "groups are nested too deep");
    }
    group = &r->groups[r->depth++];
    group->part = begin_part(r);
    group->at = group->part.in;
    return 0;
}

static struct dmk_ebnf_part close_group(struct dmk_ebnf_reader *r)
{
    const struct dmk_ebnf_group *group = &r->groups[--r->depth];

    skip_edge(r, group->at, group->part.out);
    return group->part;
}

static int read_element(struct dmk_ebnf_reader *r)
{
    struct dmk_ebnf_group *group = &r->groups[r->depth - 1];
    struct dmk_ebnf_part p;
    int rc;

    switch (dmk_ebnf__peek(r)) {
    case '|':
        r->at++;
        skip_edge(r, group->at, group->part.out);
        group->at = group->part.in;
        return 0;
    case '(':
        r->at++;
        if (dmk_ebnf__peek(r) == '=' || dmk_ebnf__peek(r) == '!' || dmk_ebnf__peek(r) == '?') {
            return dmk_ebnf__bad(r, "look-ahead is not supported");
        }
        return open_group(r);
    case ')':
        if (r->depth == 1) {
            return dmk_ebnf__bad(r, "a ) closes no group");
        }
        r->at++;
        p = close_group(r);
        rc = 0;
        break;
    case '"':
        rc = read_text(r, &p);
        break;
    case '[':
        rc = read_class(r, &p);
        break;
    case '.':
        rc = read_any(r, &p);
        break;
    default:
        if (!dmk_ebnf__is_name(dmk_ebnf__peek(r), true)) {
            return dmk_ebnf__bad(r, "a text, a class, a name or a group must stand here");
        }
        rc = read_call(r, &p);
        break;
    }
    return rc < 0 ? rc : end_element(r, p);
}

static int read_rule(struct dmk_ebnf_reader *r)
{
    struct dmk_ebnf_rule *rule;
    uint32_t index;
    int rc;

    if (!dmk_ebnf__at_rule(r)) {
        return dmk_ebnf__bad(r, "a rule must stand here: name ::= ...");
    }
    rc = find_rule(r, dmk_ebnf__take_name(r), &index);
    if (rc < 0) {
        return rc;
    }
    rule = &r->g->rules[index];
    if (rule->defined) {
        return dmk_ebnf__bad(r, "a rule of that name stands above");
    }
    dmk_ebnf__skip(r, false);
    r->at += 3;
    rule->defined = true;
    rule->first_edge = r->g->n_edges;
    r->n_nodes = 0;
    rc = open_group(r);
    for (dmk_ebnf__skip(r, true); rc == 0 && !dmk_ebnf__at_end(r) && !dmk_ebnf__at_rule(r);
         dmk_ebnf__skip(r, true)) {
        rc = read_element(r);
    }
    if (rc == 0 && r->depth > 1) {
        rc = dmk_ebnf__bad(r, "a group is not closed");
    }
    if (rc == 0) {
        const struct dmk_ebnf_part whole = close_group(r);

        rule->in = whole.in;
        rule->out = whole.out;
        rule->n_nodes = r->n_nodes;
        rule->n_edges = r->g->n_edges - rule->first_edge;
        rc = r->full ? dmk_ebnf__bad(r, "the grammar is too large") : 0;
    }
    return rc;
}

int dmk_ebnf__read(struct dmk_str text, struct dmk_ebnf *grammar, struct dmk_error *reterr)
{
    struct dmk_ebnf_reader r = {.g = grammar, .text = text, .line = 1, .err = reterr};
    int rc = 0;

    if (text.len > DMK_EBNF_MAX_BYTES) {
        return dmk_error_set(reterr, -DMK_EINVAL, "the grammar has %zu bytes, at most %u may be",
                             text.len, DMK_EBNF_MAX_BYTES);
    }
    for (dmk_ebnf__skip(&r, true); rc == 0 && !dmk_ebnf__at_end(&r); dmk_ebnf__skip(&r, true)) {
        rc = read_rule(&r);
    }
    return rc;
}
