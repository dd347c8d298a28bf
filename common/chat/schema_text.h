/* JSON values as text for the prompt: a JSON schema as a type, and compact JSON as serde_json prints it.
 *
 * Both equal what openai-harmony 0.0.8 writes, byte for byte, but for descriptions of several lines when
 * library_text is off: there each line gets its comment mark. Depth is bounded by DMK_SCHEMA_MAX_DEPTH
 * (the library's JSON reader stops at the same depth). Any thread. */
#pragma once

#include "common/base/buf.h"
#include "common/base/error.h"

#define DMK_SCHEMA_MAX_DEPTH 128

struct json_t;

int dmk_schema_text(const struct json_t *schema, bool library_text, struct dmk_buf *out,
                    struct dmk_error *reterr);

/* One line, no spaces, members in their order, characters outside ASCII kept. */
int dmk_json_text(const struct json_t *value, struct dmk_buf *out, struct dmk_error *reterr);

/* Takes the next line off *text (text->len > 0); LF and CRLF end a line. */
struct dmk_str dmk_take_line(struct dmk_str *text);

/* Appends "// LINE\n" for each line of text (a line ends with LF or CRLF; none for an empty text). */
void dmk_comment_lines(struct dmk_buf *out, struct dmk_str text);
