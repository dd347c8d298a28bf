/* Framing of server-sent events. */
#include "router/sse.h"

#include <string.h>

void dmk_sse_event(struct dmk_buf *out, const char *event, struct dmk_str payload)
{
    size_t from = 0;

    if (event) {
        dmk_buf_puts(out, "event: ");
        dmk_buf_puts(out, event);
        dmk_buf_putc(out, '\n');
    }
    if (!memchr(payload.data, '\n', payload.len) && !memchr(payload.data, '\r', payload.len)) {
        dmk_buf_append(out, "data: ", 6);
        dmk_buf_append(out, payload.data, payload.len);
        dmk_buf_append(out, "\n\n", 2);
        return;
    }
    for (size_t i = 0; i <= payload.len; i++) {
        if (i < payload.len && payload.data[i] != '\n' && payload.data[i] != '\r') {
            continue;
        }
        dmk_buf_puts(out, "data: ");
        dmk_buf_append(out, payload.data + from, i - from);
        dmk_buf_putc(out, '\n');
        if (i + 1 < payload.len && payload.data[i] == '\r' && payload.data[i + 1] == '\n') {
            i++;
        }
        from = i + 1;
    }
    dmk_buf_putc(out, '\n');
}

void dmk_sse_comment(struct dmk_buf *out, struct dmk_str text)
{
    dmk_buf_puts(out, ": ");
    for (size_t i = 0; i < text.len; i++) {
        const char c = text.data[i];

        dmk_buf_putc(out, c == '\n' || c == '\r' ? ' ' : c);
    }
    dmk_buf_puts(out, "\n\n");
}

void dmk_sse_done(struct dmk_buf *out)
{
    dmk_buf_puts(out, "data: [DONE]\n\n");
}
