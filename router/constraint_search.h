/* Texts as letters - bytes, and the control tokens that they spell - and free text that is followed until one of
 * several texts has come (an automaton of all of them, by Aho and Corasick). Free text may hold the control tokens of
 * messages, but none that ends the turn.
 *
 * Private to router/constraint*.c; pure but for the build. */
#pragma once

#include "common/schema/build.h"

#define DMK_SEARCH_MAX_LETTERS 4096u

/* Zeroed, with n = 1: the root. */
struct dmk_search {
    struct {
        uint32_t letter, child, sibling, fail;
        uint32_t hit; /* which text ends here, plus 1 */
        uint32_t node;
    } at[DMK_SEARCH_MAX_LETTERS];
    uint32_t n;
};

/* The node behind a text. */
uint32_t dmk_letters_behind(struct dmk_build *b, uint32_t from, const char *text);

/* Text number hit is one of those that are looked for. False: it is empty, or there are too many letters. */
bool dmk_search_add(struct dmk_search *s, const char *text, uint32_t hit);
/* Free text from `from` on; text i, once it has come, leads to hits[i]. end: where the text may end, or
 * DMK_BUILD_NO_MAX. */
void dmk_search_join(struct dmk_build *b, struct dmk_search *s, uint32_t from, const uint32_t *hits,
                     uint32_t end);
