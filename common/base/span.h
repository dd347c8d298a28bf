/* Views of bytes and text that somebody else owns. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct dmk_bytes {
    const uint8_t *data;
    size_t len;
};

/* UTF-8 text unless the user says otherwise; not NUL-terminated. */
struct dmk_str {
    const char *data;
    size_t len;
};

static inline struct dmk_str dmk_str_from(const char *text)
{
    return (struct dmk_str){text, text ? strlen(text) : 0};
}

static inline bool dmk_str_equal(struct dmk_str a, struct dmk_str b)
{
    return a.len == b.len && (a.len == 0 || memcmp(a.data, b.data, a.len) == 0);
}

static inline bool dmk_str_is(struct dmk_str a, const char *text)
{
    return dmk_str_equal(a, dmk_str_from(text));
}
