/* A grammar between its reader (ebnf_read.c) and its rules in the build (ebnf.c): each rule is a nondeterministic
 * automaton of its own, whose edges stand in one list. */
#pragma once

#include "common/schema/chars.h"
#include "common/schema/ebnf.h"

enum dmk_ebnf_edge_kind {
    DMK_EBNF_SKIP,
    DMK_EBNF_BYTE,  /* a: the byte */
    DMK_EBNF_CHARS, /* a, b: first of the ranges, their number */
    DMK_EBNF_RULE,  /* a: index of the rule */
};

struct dmk_ebnf_edge {
    enum dmk_ebnf_edge_kind kind;
    uint32_t from, to; /* nodes of the rule */
    uint32_t a, b;
};

struct dmk_ebnf_rule {
    struct dmk_str name; /* in the text */
    bool defined;
    bool nullable;
    bool used;   /* root calls it, through others or not */
    uint32_t id; /* in the build; of those that are used */
    uint32_t first_edge, n_edges;
    uint32_t n_nodes, in, out;
    uint32_t line; /* where it was first named */
};

#define DMK_EBNF_MAX_RANGES 8192u

struct dmk_ebnf {
    struct dmk_ebnf_rule rules[DMK_EBNF_MAX_RULES];
    uint32_t n_rules, n_edges, n_ranges;
    struct dmk_ebnf_edge edges[DMK_EBNF_MAX_EDGES];
    struct dmk_chars_range ranges[DMK_EBNF_MAX_RANGES];
};

/* grammar is zeroed. */
int dmk_ebnf__read(struct dmk_str text, struct dmk_ebnf *grammar, struct dmk_error *reterr);
