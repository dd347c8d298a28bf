/* Grammars in the EBNF that llama.cpp (GBNF), xgrammar and vLLM's structured outputs read.
 *
 *   root ::= "yes" | "no" ", " reason{1,3}     # the rule "root" is the whole text
 *   reason ::= [a-z]+ ("-" [^\n"])? | .
 *
 * Texts in quotation marks, characters in brackets (ranges, ^ for all others), `.` for any character, names of
 * rules, groups, `|`, and behind any of them * + ? {n} {n,} {n,m}. Escapes: \n \r \t \\ \" \' \[ \] \- \^ \/ \xHH
 * \uHHHH \UHHHHHHHH. A rule ends where the next one's `name ::=` begins. Rules may call themselves, but not
 * before a character of theirs. Refused: look-ahead, and whatever is not understood. */
#pragma once

#include "common/schema/build.h"

#define DMK_EBNF_MAX_BYTES 65536u
#define DMK_EBNF_MAX_RULES 256u
#define DMK_EBNF_MAX_EDGES                                                                         \
    20000u /* about the characters of texts and classes, repetitions counted out */
#define DMK_EBNF_MAX_REPEAT 1000u
#define DMK_EBNF_MAX_GROUPS 32u /* nested */

/* Adds the rules; *ret_root is root. Where root may be empty, the rule is not: an answer has a character at least.
 * grammar: UTF-8. 0, or -DMK_EINVAL and what is wrong, with the line. */
int dmk_ebnf_add(struct dmk_build *build, struct dmk_str grammar, uint32_t *ret_root,
                 struct dmk_error *reterr);
