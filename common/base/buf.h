/* A growable byte buffer with a hard cap.
 *
 * Appends past the cap or out of memory set `failed` and change nothing more: a writer appends freely
 * and checks once at the end. data is always NUL-terminated when non-NULL, so text can be printed. */
#pragma once

#include "common/base/span.h"

struct dmk_buf {
    char *data;
    size_t len;
    size_t cap;     /* bytes allocated */
    size_t max_len; /* bound; 0 = 64 MiB */
    bool failed;
};

void dmk_buf_init(struct dmk_buf *buf, size_t max_len);
void dmk_buf_fini(struct dmk_buf *buf);
void dmk_buf_reset(struct dmk_buf *buf); /* keeps the memory, clears failed */

void dmk_buf_append(struct dmk_buf *buf, const void *data, size_t len);
void dmk_buf_append_str(struct dmk_buf *buf, struct dmk_str text);
void dmk_buf_puts(struct dmk_buf *buf, const char *text);
void dmk_buf_putc(struct dmk_buf *buf, char c);
void dmk_buf_put_u64(struct dmk_buf *buf, uint64_t value); /* decimal */
void dmk_buf_printf(struct dmk_buf *buf, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* Drops the first n bytes (n <= len). */
void dmk_buf_consume(struct dmk_buf *buf, size_t n);

static inline struct dmk_str dmk_buf_str(const struct dmk_buf *buf)
{
    return (struct dmk_str){buf->data ? buf->data : "", buf->len};
}

static inline struct dmk_bytes dmk_buf_bytes(const struct dmk_buf *buf)
{
    return (struct dmk_bytes){(const uint8_t *)buf->data, buf->len};
}
