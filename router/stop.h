/* Stop strings over text that comes in pieces.
 *
 * The match that ends first wins (of those that end together, the longest), whatever the pieces:
 * any cut of a text gives the same result. Text that may be the beginning of a stop string is held
 * back, at most one byte less than the longest. Each byte costs one step of a Knuth-Morris-Pratt
 * automaton per string. */
#pragma once

#include "common/base/buf.h"

#define DMK_STOP_MAX 4

struct dmk_stop {
    size_t n;
    struct {
        struct dmk_str text; /* the caller's; valid while the matcher lives */
        uint16_t *fail;      /* [len] */
        size_t at;           /* bytes of text matched by what came last */
    } words[DMK_STOP_MAX];
    size_t matched; /* which word, after dmk_stop_push has said true */
    struct dmk_buf held;
};

/* n <= DMK_STOP_MAX, each of 1 to 65535 bytes. -DMK_ENOMEM. */
int dmk_stop_init(struct dmk_stop *stop, const struct dmk_str *words, size_t n);
void dmk_stop_fini(struct dmk_stop *stop);

/* Appends to out what surely stands before any match. True when a stop string ended in this piece:
 * out then has all text before it, and nothing may be pushed any more. */
bool dmk_stop_push(struct dmk_stop *stop, struct dmk_str piece, struct dmk_buf *out);
/* Gives up what is held back: the text ends here, or goes on elsewhere. */
void dmk_stop_flush(struct dmk_stop *stop, struct dmk_buf *out);
