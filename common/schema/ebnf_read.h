/* What the reader of EBNF (ebnf_read.c) and its letters (ebnf_text.c) share. */
#pragma once

#include "common/schema/ebnf_impl.h"

/* A part of the rule at hand: the nodes and edges that were made since first_node and first_edge. */
struct dmk_ebnf_part {
    uint32_t in, out, first_node, first_edge;
};

struct dmk_ebnf_group {
    struct dmk_ebnf_part part;
    uint32_t at; /* end of the alternative at hand */
};

struct dmk_ebnf_reader {
    struct dmk_ebnf *g;
    struct dmk_str text;
    size_t at;
    uint32_t line, n_nodes;
    struct dmk_ebnf_group groups[DMK_EBNF_MAX_GROUPS];
    unsigned depth; /* groups that are open, the rule itself among them */
    struct dmk_chars chars;
    struct dmk_error *err;
    bool full;
};

static inline bool dmk_ebnf__at_end(const struct dmk_ebnf_reader *r)
{
    return r->at >= r->text.len;
}

static inline char dmk_ebnf__peek(const struct dmk_ebnf_reader *r)
{
    return dmk_ebnf__at_end(r) ? 0 : r->text.data[r->at];
}

static inline bool dmk_ebnf__is_name(char c, bool first)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
           (!first && ((c >= '0' && c <= '9') || c == '-'));
}

/* A failure at the line at hand. */
int dmk_ebnf__bad(struct dmk_ebnf_reader *r, const char *what);
/* Blanks; and, with lines, ends of lines and comments. */
void dmk_ebnf__skip(struct dmk_ebnf_reader *r, bool lines);
struct dmk_str dmk_ebnf__take_name(struct dmk_ebnf_reader *r);
/* Does a rule begin here: a name and ::= ? */
bool dmk_ebnf__at_rule(const struct dmk_ebnf_reader *r);
/* The next character of a text or a class, an escape resolved. */
int dmk_ebnf__char(struct dmk_ebnf_reader *r, uint32_t *ret);
