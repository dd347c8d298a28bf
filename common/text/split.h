/* The splitter: cuts text into the pieces inside which byte pairs merge.
 *
 * Equal to o200k's regular expression applied again and again, written out as a deterministic scan: no
 * back-tracking, linear time, no memory. The pieces tile the text. Pure functions, any thread. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* The end of the piece that starts at pos < len. text is valid UTF-8 and pos a character border. */
size_t dmk_split_next(const uint8_t *text, size_t len, size_t pos);
