/* Sets of characters, and the pieces that write one of them.
 *
 * Text is written in one of two ways: as it is (UTF-8), or inside of a JSON string, where quotation marks,
 * backslashes and control characters are escaped. In the string each character has one way to be written:
 * the short escape where there is one, \u00XX for other control characters, UTF-8 for the rest. */
#pragma once

#include "common/schema/build.h"

#define DMK_CHARS_MAX    0x10ffffu
#define DMK_CHARS_RANGES 1024u

enum dmk_spelling { DMK_SPELL_PLAIN, DMK_SPELL_JSON };

/* Ranges in ascending order that do not touch; never surrogates. */
struct dmk_chars {
    uint32_t n;
    struct dmk_chars_range {
        uint32_t first, last;
    } ranges[DMK_CHARS_RANGES];
};

void dmk_chars_clear(struct dmk_chars *chars);
/* Adds a range, in any order. False when there are too many. */
bool dmk_chars_add(struct dmk_chars *chars, uint32_t first, uint32_t last);
bool dmk_chars_add_all(struct dmk_chars *chars, const struct dmk_chars *more);
/* Everything that is not in it. */
bool dmk_chars_invert(struct dmk_chars *chars);
bool dmk_chars_has(const struct dmk_chars *chars, uint32_t code);

/* Joins two nodes of the build by one character of the set. tick: the node behind its first byte counts. */
void dmk_chars_join(struct dmk_build *build, const struct dmk_chars *chars,
                    enum dmk_spelling spelling, bool tick, uint32_t from, uint32_t to);
/* The same for any character of a JSON string, in every way to write it. */
void dmk_chars_join_any(struct dmk_build *build, bool tick, uint32_t from, uint32_t to);

struct dmk_piece dmk_piece_chars(struct dmk_build *build, const struct dmk_chars *chars,
                                 enum dmk_spelling spelling, bool tick);

/* The next code point of UTF-8 that is known to be valid. */
uint32_t dmk_chars_next(struct dmk_str text, size_t *inout_at);
