/* UTF-8: validity, and text that arrives in pieces.
 *
 * Valid means as in Unicode: no overlong forms, no surrogates, nothing above U+10FFFF. Where text is
 * repaired, each maximal invalid part becomes one U+FFFD, as WHATWG, Rust and Python do. */
#pragma once

#include "common/base/buf.h"

/* Length of the longest valid prefix that ends on a character border. */
size_t dmk_utf8_valid_prefix(const uint8_t *data, size_t len);

/* Appends text with each maximal invalid part replaced by U+FFFD. */
void dmk_utf8_append_lossy(struct dmk_buf *out, struct dmk_bytes bytes);

/* One code point at data (valid UTF-8, len > 0); returns its length in bytes. */
unsigned dmk_utf8_decode(const uint8_t *data, size_t len, uint32_t *ret_code);

/* Holds back an incomplete character between pushes: at most 3 bytes. Zeroed is the initial state. */
struct dmk_utf8_stream {
    uint8_t tail[4];
    uint8_t n_tail;
};

/* Appends to out what is complete; invalid parts become U+FFFD at once. */
void dmk_utf8_stream_push(struct dmk_utf8_stream *s, struct dmk_bytes bytes, struct dmk_buf *out);
/* Ends the stream: what was held back becomes U+FFFD. */
void dmk_utf8_stream_end(struct dmk_utf8_stream *s, struct dmk_buf *out);
