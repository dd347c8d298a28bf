/* Framing of server-sent events. Pure. */
#pragma once

#include "common/base/buf.h"

/* event may be NULL. A payload of several lines becomes several data lines, as the format wants it.
 * */
void dmk_sse_event(struct dmk_buf *out, const char *event, struct dmk_str payload);
/* A line that clients ignore: keeps proxies awake. Line breaks in text become spaces. */
void dmk_sse_comment(struct dmk_buf *out, struct dmk_str text);
/* data: [DONE] */
void dmk_sse_done(struct dmk_buf *out);
