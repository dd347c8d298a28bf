/* The sentence that goes with a failure.
 *
 * Cold functions (open, load, parse, configure) take `struct dmk_error *reterr` as their last
 * argument and write one sentence that a person can act on, with the offending value in it. Hot
 * functions return only a code. reterr may be NULL everywhere. */
#pragma once

#include <stdarg.h>
#include "common/base/status.h"

#define DMK_ERROR_TEXT_BYTES 512

struct dmk_error {
    int status; /* 0 or negative code */
    char text[DMK_ERROR_TEXT_BYTES];
};

/* Fills *reterr (if any) and returns status, so that `return dmk_error_set(...)` reads well.
 * The text is cut at the bound; control characters that came from outside become '?'. */
int dmk_error_set(struct dmk_error *reterr, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "prefix: " in front of the text that is there already; returns the error's status. */
int dmk_error_prefix(struct dmk_error *reterr, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
