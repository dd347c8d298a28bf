/* Regular expressions as ECMA-262 has them, a regular subset.
 *
 * Understood: characters and escapes (\t \n \r \f \v \0 \xHH \uHHHH \u{H...} \cX and punctuation), `.`, classes
 * with ranges and negation, \d \D \w \W \s \S, groups (capturing or not, named), `|`, the quantifiers
 * * + ? {n} {n,} {n,m} with or without a trailing ?, and ^ and $ at the ends of the whole or of its
 * alternatives. Refused: look-around, back references, \b \B \p \P, anchors elsewhere. */
#pragma once

#include "common/schema/chars.h"

#define DMK_REGEX_MAX_BYTES  4096u
#define DMK_REGEX_MAX_REPEAT 1000u
#define DMK_REGEX_MAX_GROUPS 32u /* nested */

enum dmk_regex_match {
    DMK_REGEX_WHOLE,  /* the whole text matches; ^ and $ change nothing */
    DMK_REGEX_SEARCH, /* some part of the text matches: what stands around is free */
};

/* A piece of the rule under construction. tick: each character counts. 0, or -DMK_EINVAL and what is wrong with
 * the expression, with the place in it. */
int dmk_regex_piece(struct dmk_build *build, struct dmk_str pattern, enum dmk_regex_match match,
                    enum dmk_spelling spelling, bool tick, struct dmk_piece *ret,
                    struct dmk_error *reterr);
