/* Writing the serialised form of an automaton, table by table. Whoever compiles keeps the bounds of
 * automaton.h; what is written is checked by dmk_automaton_load. Pure. */
#pragma once

#include "common/grammar/automaton.h"

struct dmk_grammar_edge {
    uint8_t first, last;
    uint16_t target;
};

struct dmk_grammar_call {
    uint16_t rule, ret;
};

struct dmk_grammar_id {
    uint32_t id;
    uint16_t target;
};

struct dmk_grammar_state {
    uint8_t flags;
    const struct dmk_grammar_edge *edges; /* in ascending order */
    uint16_t n_edges;
    const struct dmk_grammar_call *calls;
    uint16_t n_calls;
    const struct dmk_grammar_id *ids;
    uint8_t n_ids;
};

struct dmk_grammar_rule {
    const struct dmk_grammar_state *states;
    uint32_t n_states;
    uint32_t min, max;
};

/* Appends nothing else to out, which is empty. -DMK_EFULL beyond the bounds of size. */
int dmk_grammar_write(const struct dmk_grammar_rule *rules, uint32_t n_rules, struct dmk_buf *out);
