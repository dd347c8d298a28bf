/* The inside of a build: build.c makes nodes, determine.c makes rules of them. Private to common/schema. */
#pragma once

#include "common/grammar/write.h"
#include "common/schema/build.h"

#define DMK_NO_EDGE UINT32_MAX

enum dmk_link_kind { DMK_LINK_BYTES, DMK_LINK_CALL, DMK_LINK_ID, DMK_LINK_SKIP };

struct dmk_link {
    enum dmk_link_kind kind;
    uint32_t value; /* bytes: first << 8 | last; rule; id */
    uint32_t to;
    uint32_t next; /* of the same node */
};

struct dmk_build_node {
    uint32_t links;
    bool tick, gate;
};

/* Memory of a rule that was made deterministic. */
struct dmk_built {
    bool done;
    struct dmk_grammar_state *states;
    uint32_t n_states;
    struct dmk_grammar_edge *edges;
    struct dmk_grammar_call *calls;
    struct dmk_grammar_id *ids;
    uint32_t n_edges, n_calls, n_ids;
    uint32_t min, max;
};

struct dmk_build {
    const char *why; /* NULL: nothing failed */
    struct dmk_built *rules;
    uint32_t n_rules, cap_rules;
    uint32_t rule; /* under construction */
    bool expand;   /* its counts */
    struct dmk_build_node *nodes;
    uint32_t n_nodes, cap_nodes;
    struct dmk_link *links;
    uint32_t n_links, cap_links;
    uint32_t n_states; /* of all rules */
    uint64_t work;
};

/* Makes the piece under construction the rule. */
void dmk_build__determine(struct dmk_build *b, struct dmk_piece piece, struct dmk_built *ret);

/* Makes room for element n; array is the address of a pointer. False (and the build failed) without memory. */
bool dmk_build__grow(struct dmk_build *b, void *array, uint32_t n, uint32_t *cap, size_t size);
