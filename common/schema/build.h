/* Building automata: rules are put together from pieces, made deterministic, and written.
 *
 * A rule is built between begin and end. Meanwhile it is a nondeterministic automaton whose nodes are joined by
 * bytes, by calls of other rules, by token ids, or by nothing. A piece is a part of it with one way in and one
 * way out; pieces are joined by the functions below, or node by node. Rules may be called before they are
 * built. Rule 0 is the first one that was declared.
 *
 * Failures stick: the first one is kept, and everything afterwards does nothing. Whoever builds looks once, at
 * dmk_build_finish. Sizes and work are bounded (DMK_BUILD_...), so that hostile input costs little.
 *
 * One thread. Memory goes with the build. */
#pragma once

#include "common/base/buf.h"
#include "common/base/error.h"
#include "common/base/span.h"

#define DMK_BUILD_MAX_NODES 60000u   /* of a rule under construction */
#define DMK_BUILD_MAX_WORK  8000000u /* steps of making rules deterministic, about 0.04 s */
#define DMK_BUILD_NO_MAX    UINT32_MAX

struct dmk_build;

struct dmk_piece {
    uint32_t in, out;
    uint32_t first, end; /* its nodes */
};

struct dmk_build *dmk_build_new(void); /* NULL: no memory */
void dmk_build_free(struct dmk_build **build);

/* Writes all rules to out, which is empty, and checks them as a worker would. Fails with what went wrong first:
 * -DMK_EINVAL and a sentence without the place. */
int dmk_build_finish(struct dmk_build *build, struct dmk_buf *out, struct dmk_error *reterr);
bool dmk_build_failed(const struct dmk_build *build);
void dmk_build_fail(struct dmk_build *build, const char *why); /* why: static text */
const char *dmk_build_why(const struct dmk_build *build);

uint32_t dmk_build_declare(struct dmk_build *build);
uint32_t dmk_build_n_rules(const struct dmk_build *build);
void dmk_build_begin(struct dmk_build *build, uint32_t rule);
/* The rule is this piece; min and max bound what it counts (dmk_build_tick). */
void dmk_build_end(struct dmk_build *build, struct dmk_piece piece, uint32_t min, uint32_t max);

/* Counting becomes part of the states of the rule under construction, a state for each count: for rules where a count
 * could shut every way out, which a walker would not see beforehand. */
void dmk_build_expand(struct dmk_build *build);

/* ---- nodes */
uint32_t dmk_build_node(struct dmk_build *build);
void dmk_build_bytes(struct dmk_build *build, uint32_t from, uint8_t first, uint8_t last,
                     uint32_t to);
void dmk_build_call(struct dmk_build *build, uint32_t from, uint32_t rule, uint32_t to);
void dmk_build_id(struct dmk_build *build, uint32_t from, uint32_t id, uint32_t to);
void dmk_build_skip(struct dmk_build *build, uint32_t from, uint32_t to);
/* Entering the node by a byte or id counts one; entering it wants the rule's min. */
void dmk_build_tick(struct dmk_build *build, uint32_t node);
void dmk_build_gate(struct dmk_build *build, uint32_t node);

/* ---- pieces */
struct dmk_piece dmk_piece_empty(struct dmk_build *build);
struct dmk_piece dmk_piece_never(struct dmk_build *build); /* no way through */
struct dmk_piece dmk_piece_text(struct dmk_build *build, struct dmk_str bytes);
struct dmk_piece dmk_piece_bytes(struct dmk_build *build, uint8_t first, uint8_t last);
struct dmk_piece dmk_piece_call(struct dmk_build *build, uint32_t rule);
struct dmk_piece dmk_piece_id(struct dmk_build *build, uint32_t id);
/* Made of the nodes from first on, which were made by hand. */
struct dmk_piece dmk_piece_nodes(struct dmk_build *build, uint32_t in, uint32_t out,
                                 uint32_t first);
/* The pieces that go in are used up. b was made after a. */
struct dmk_piece dmk_piece_then(struct dmk_build *build, struct dmk_piece a, struct dmk_piece b);
struct dmk_piece dmk_piece_or(struct dmk_build *build, struct dmk_piece a, struct dmk_piece b);
struct dmk_piece dmk_piece_maybe(struct dmk_build *build, struct dmk_piece a);
struct dmk_piece dmk_piece_many(struct dmk_build *build, struct dmk_piece a); /* none or more */
/* Between min and max times, by copies; max may be DMK_BUILD_NO_MAX. */
struct dmk_piece dmk_piece_repeat(struct dmk_build *build, struct dmk_piece a, uint32_t min,
                                  uint32_t max);
