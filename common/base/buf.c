/* Growable bytes; see buf.h. */
#include "common/base/buf.h"
#include "common/base/assert.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define DEFAULT_MAX ((size_t)64 << 20)

void dmk_buf_init(struct dmk_buf *buf, size_t max_len)
{
    *buf = (struct dmk_buf){.max_len = max_len};
}

void dmk_buf_fini(struct dmk_buf *buf)
{
    free(buf->data);
    *buf = (struct dmk_buf){.max_len = buf->max_len};
}

void dmk_buf_reset(struct dmk_buf *buf)
{
    buf->len = 0;
    buf->failed = false;
    if (buf->data) {
        buf->data[0] = 0;
    }
}

static size_t max_of(const struct dmk_buf *buf)
{
    return buf->max_len ? buf->max_len : DEFAULT_MAX;
}

/* Room for extra more bytes and the NUL. */
static bool reserve(struct dmk_buf *buf, size_t extra)
{
    const size_t max = max_of(buf);
    size_t cap = buf->cap ? buf->cap : 256;
    char *data;

    if (buf->failed || extra > max || buf->len > max - extra) {
        buf->failed = true;
        return false;
    }
    if (buf->len + extra + 1 <= buf->cap) {
        return true;
    }
    while (cap < buf->len + extra + 1) {
        cap *= 2;
    }
    data = realloc(buf->data, cap);
    if (!data) {
        buf->failed = true;
        return false;
    }
    buf->data = data;
    buf->cap = cap;
    return true;
}

void dmk_buf_append(struct dmk_buf *buf, const void *data, size_t len)
{
    if (len == 0 || !reserve(buf, len)) {
        return;
    }
    memcpy(buf->data + buf->len, data, len);
    buf->len += len;
    buf->data[buf->len] = 0;
}

void dmk_buf_append_str(struct dmk_buf *buf, struct dmk_str text)
{
    dmk_buf_append(buf, text.data, text.len);
}

void dmk_buf_puts(struct dmk_buf *buf, const char *text)
{
    dmk_buf_append(buf, text, strlen(text));
}

void dmk_buf_putc(struct dmk_buf *buf, char c)
{
    dmk_buf_append(buf, &c, 1);
}

void dmk_buf_put_u64(struct dmk_buf *buf, uint64_t value)
{
    char digits[20];
    size_t at = sizeof(digits);

    do {
        digits[--at] = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    dmk_buf_append(buf, digits + at, sizeof(digits) - at);
}

void dmk_buf_printf(struct dmk_buf *buf, const char *fmt, ...)
{
    const size_t room = buf->failed ? 0 : buf->cap - buf->len;
    va_list ap;
    int n;

    /* Most texts fit in what is there; what did not is written again. */
    va_start(ap, fmt);
    n = vsnprintf(room > 0 ? buf->data + buf->len : NULL, room, fmt, ap);
    va_end(ap);
    if (n >= 0 && (size_t)n < room && (size_t)n <= max_of(buf) - buf->len) {
        buf->len += (size_t)n;
        return;
    }
    if (room > 0) {
        buf->data[buf->len] = 0;
    }
    if (n < 0 || !reserve(buf, (size_t)n)) {
        buf->failed = true;
        return;
    }
    va_start(ap, fmt);
    (void)vsnprintf(buf->data + buf->len, (size_t)n + 1, fmt, ap);
    va_end(ap);
    buf->len += (size_t)n;
}

void dmk_buf_consume(struct dmk_buf *buf, size_t n)
{
    dmk_assert(n <= buf->len);
    if (n == 0) {
        return;
    }
    memmove(buf->data, buf->data + n, buf->len - n);
    buf->len -= n;
    buf->data[buf->len] = 0;
}
