/* The byte automaton that says what an answer may be, in its serialised and its loaded form.
 *
 * A pushdown automaton made of rules. A rule is a deterministic automaton over bytes; a state may also call
 * another rule and go on in its own when that one has accepted, and may step on token ids that have no bytes
 * (trigger ids: the control tokens of a chat format). Rule 0 rules the answer, its state 0 is the start.
 *
 * A rule may count: entering a state marked TICK adds one and is refused at the rule's max, entering one
 * marked GATE is refused below its min. Each call of a rule counts from 0.
 *
 * Where several ways are open (a byte and a call, two calls) all are followed. At most
 * DMK_GRAMMAR_MAX_DEPTH calls are open at a time; a way that could not end within them is not taken, so no
 * prefix that was let through is a dead end.
 *
 * Serialised, little-endian:
 *   "DMKG"  u16 version  u16 0
 *   u64 low, u64 high: hash of the vocabulary that it was made for (trie.h); 0, 0 = none yet
 *   u32 rules  u32 states  u32 edges  u32 calls  u32 ids
 *   rules   x { u32 states  u32 min  u32 max }          their states follow one another
 *   states  x { u8 flags  u8 ids  u16 calls  u16 edges } in the order of the rules
 *   edges   x { u8 first  u8 last  u16 target }          of each state in ascending order; targets in the rule
 *   calls   x { u16 rule  u16 return }
 *   ids     x { u32 id  u16 target  u16 0 }
 *   u64 XXH3-64 of everything before
 *
 * A loaded automaton is immutable; any thread. */
#pragma once

#include "common/base/buf.h"
#include "common/base/error.h"
#include "common/base/hash.h"
#include "common/base/span.h"

#define DMK_GRAMMAR_VERSION    1
#define DMK_GRAMMAR_MAX_BYTES  (1u << 20)
#define DMK_GRAMMAR_MAX_RULES  4096u
#define DMK_GRAMMAR_MAX_STATES 65535u /* of all rules */
#define DMK_GRAMMAR_MAX_DEPTH  64u
#define DMK_GRAMMAR_NO_MAX     UINT32_MAX

enum dmk_grammar_flag {
    DMK_GRAMMAR_ACCEPT = 1,
    DMK_GRAMMAR_TICK = 2,
    DMK_GRAMMAR_GATE = 4,
};

/* Where the vocabulary's hash lies in the serialised form, for whoever fills it in (dmk_grammar_stamp). */
#define DMK_GRAMMAR_VOCAB_AT 8

struct dmk_automaton;

/* Checks everything above, that each rule needs at least a byte or id (rule 0 may accept at once if nobody
 * calls it), that no rule calls itself before a byte, and that rule 0 can end. The sentence says what is
 * wrong. */
int dmk_automaton_load(struct dmk_bytes blob, struct dmk_automaton **ret, struct dmk_error *reterr);
void dmk_automaton_free(struct dmk_automaton **automaton);

/* Of the serialised form. */
struct dmk_id128 dmk_automaton_hash(const struct dmk_automaton *automaton);
/* Of the vocabulary that it names. */
struct dmk_id128 dmk_automaton_vocab(const struct dmk_automaton *automaton);
size_t dmk_automaton_bytes(const struct dmk_automaton *automaton); /* memory */

/* Names the vocabulary in a serialised automaton, and mends the checksum. blob holds one. */
void dmk_grammar_stamp(struct dmk_buf *blob, struct dmk_id128 vocab);
