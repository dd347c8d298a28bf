/* Sets of characters; see chars.h. */
#include "common/schema/chars.h"

#include <string.h>
#include "common/base/assert.h"
#include "common/base/spell.h"

#define SURROGATE_FIRST 0xd800u
#define SURROGATE_LAST  0xdfffu

void dmk_chars_clear(struct dmk_chars *chars)
{
    chars->n = 0;
}

/* Adds a range without surrogates. */
static bool add_range(struct dmk_chars *c, uint32_t first, uint32_t last)
{
    uint32_t at = 0, end;

    while (at < c->n && c->ranges[at].last + 1 < first) {
        at++;
    }
    end = at;
    while (end < c->n && c->ranges[end].first <= last + 1) {
        first = c->ranges[end].first < first ? c->ranges[end].first : first;
        last = c->ranges[end].last > last ? c->ranges[end].last : last;
        end++;
    }
    if (end == at && c->n == DMK_CHARS_RANGES) {
        return false;
    }
    memmove(&c->ranges[at + 1], &c->ranges[end], (c->n - end) * sizeof(c->ranges[0]));
    c->n = c->n - (end - at) + 1;
    c->ranges[at] = (struct dmk_chars_range){first, last};
    return true;
}

bool dmk_chars_add(struct dmk_chars *chars, uint32_t first, uint32_t last)
{
    bool ok = true;

    if (first > last) {
        return true;
    }
    if (first < SURROGATE_FIRST) {
        ok = add_range(chars, first, last < SURROGATE_FIRST ? last : SURROGATE_FIRST - 1);
    }
    if (last > SURROGATE_LAST) {
        ok = ok && add_range(chars, first > SURROGATE_LAST ? first : SURROGATE_LAST + 1, last);
    }
    return ok;
}

bool dmk_chars_add_all(struct dmk_chars *chars, const struct dmk_chars *more)
{
    bool ok = true;

    for (uint32_t i = 0; i < more->n && ok; i++) {
        ok = dmk_chars_add(chars, more->ranges[i].first, more->ranges[i].last);
    }
    return ok;
}

bool dmk_chars_invert(struct dmk_chars *chars)
{
    const struct dmk_chars old = *chars;
    uint32_t next = 0;
    bool ok = true;

    chars->n = 0;
    for (uint32_t i = 0; i < old.n && ok; i++) {
        if (old.ranges[i].first > next) {
            ok = dmk_chars_add(chars, next, old.ranges[i].first - 1);
        }
        next = old.ranges[i].last + 1;
    }
    return ok && (next > DMK_CHARS_MAX || dmk_chars_add(chars, next, DMK_CHARS_MAX));
}

bool dmk_chars_has(const struct dmk_chars *chars, uint32_t code)
{
    for (uint32_t i = 0; i < chars->n; i++) {
        if (code <= chars->ranges[i].last) {
            return code >= chars->ranges[i].first;
        }
    }
    return false;
}

/* ---------------------------------------------------------------- bytes */

/* A node behind the first byte of a character. */
static uint32_t begin_char(struct dmk_build *b, bool tick)
{
    const uint32_t node = dmk_build_node(b);

    if (tick) {
        dmk_build_tick(b, node);
    }
    return node;
}

/* Joins by a single byte. With ticks, the byte that counts may not lead to a node that others enter too. */
static void join_byte(struct dmk_build *b, uint8_t first, uint8_t last, bool tick, uint32_t from,
                      uint32_t to)
{
    if (tick) {
        const uint32_t node = begin_char(b, true);

        dmk_build_bytes(b, from, first, last, node);
        dmk_build_skip(b, node, to);
    } else {
        dmk_build_bytes(b, from, first, last, to);
    }
}

/* A range whose ends differ only where every byte behind is free: one chain of byte ranges. */
static void join_sequence(struct dmk_build *b, uint32_t first, uint32_t last, bool tick,
                          uint32_t from, uint32_t to)
{
    uint8_t x[4], y[4];
    const size_t n = dmk_utf8_put(first, x), n_last = dmk_utf8_put(last, y);
    uint32_t at = from;

    dmk_assert(n == n_last);
    if (n == 1) {
        join_byte(b, x[0], y[0], tick, from, to);
        return;
    }
    for (unsigned i = 0; i < n; i++) {
        const uint32_t next = i == n - 1 ? to : i == 0 ? begin_char(b, tick) : dmk_build_node(b);

        dmk_build_bytes(b, at, x[i], y[i], next);
        at = next;
    }
}

/* Cuts a range of code points until each part is such a chain: first by the number of bytes, then by the bytes
 * that differ. Parts that wait are a list. */
static void join_range(struct dmk_build *b, uint32_t first, uint32_t last, bool tick, uint32_t from,
                       uint32_t to)
{
    static const uint32_t ends[] = {0x7f, 0x7ff, 0xffff};
    struct dmk_chars_range list[32] = {{first, last}};
    unsigned n = 1;

    while (n > 0) {
        struct dmk_chars_range r = list[--n];
        bool cut = false;

        for (unsigned i = 0; i < 3 && !cut; i++) {
            if (r.first <= ends[i] && r.last > ends[i]) {
                list[n++] = (struct dmk_chars_range){ends[i] + 1, r.last};
                list[n++] = (struct dmk_chars_range){r.first, ends[i]};
                cut = true;
            }
        }
        for (unsigned i = 1; i < 4 && !cut && r.first >= 0x80; i++) {
            const uint32_t low = (1u << (6 * i)) - 1;

            if ((r.first & ~low) == (r.last & ~low)) {
                continue;
            }
            if ((r.first & low) != 0) {
                list[n++] = (struct dmk_chars_range){(r.first | low) + 1, r.last};
                list[n++] = (struct dmk_chars_range){r.first, r.first | low};
                cut = true;
            } else if ((r.last & low) != low) {
                list[n++] = (struct dmk_chars_range){r.last & ~low, r.last};
                list[n++] = (struct dmk_chars_range){r.first, (r.last & ~low) - 1};
                cut = true;
            }
        }
        if (!cut) {
            join_sequence(b, r.first, r.last, tick, from, to);
        }
    }
}

/* ---------------------------------------------------------------- JSON strings */

static char short_escape(uint32_t code)
{
    switch (code) {
    case '"':
        return '"';
    case '\\':
        return '\\';
    case '\b':
        return 'b';
    case '\f':
        return 'f';
    case '\n':
        return 'n';
    case '\r':
        return 'r';
    case '\t':
        return 't';
    default:
        return 0;
    }
}

/* The characters that stand behind a backslash. */
static void join_escaped(struct dmk_build *b, const struct dmk_chars *chars, bool tick,
                         uint32_t from, uint32_t to)
{
    uint32_t slash = DMK_BUILD_NO_MAX, u00 = DMK_BUILD_NO_MAX;

    for (uint32_t code = 0; code <= '\\'; code++) {
        const char letter = short_escape(code);

        if ((code >= 0x20 && letter == 0) || !dmk_chars_has(chars, code)) {
            continue;
        }
        if (slash == DMK_BUILD_NO_MAX) {
            slash = begin_char(b, tick);
            dmk_build_bytes(b, from, '\\', '\\', slash);
        }
        if (letter != 0) {
            dmk_build_bytes(b, slash, (uint8_t)letter, (uint8_t)letter, to);
            continue;
        }
        if (u00 == DMK_BUILD_NO_MAX) {
            const struct dmk_piece p = dmk_piece_text(b, dmk_str_from("u00"));

            dmk_build_skip(b, slash, p.in);
            u00 = p.out;
        }
        {
            const uint8_t high = (uint8_t)('0' + (code >> 4)),
                          low = (uint8_t) "0123456789abcdef"[code & 15];
            const uint32_t node = dmk_build_node(b);

            dmk_build_bytes(b, u00, high, high, node);
            dmk_build_bytes(b, node, low, low, to);
        }
    }
}

void dmk_chars_join(struct dmk_build *b, const struct dmk_chars *chars, enum dmk_spelling spelling,
                    bool tick, uint32_t from, uint32_t to)
{
    for (uint32_t i = 0; i < chars->n; i++) {
        uint32_t first = chars->ranges[i].first;
        const uint32_t last = chars->ranges[i].last;

        if (spelling == DMK_SPELL_PLAIN) {
            join_range(b, first, last, tick, from, to);
            continue;
        }
        first = first < 0x20 ? 0x20 : first;
        for (const char *stop = "\"\\"; *stop && first <= last; stop++) {
            const uint32_t code = (uint32_t)*stop;

            if (first <= code && last >= code) {
                if (first < code) {
                    join_range(b, first, code - 1, tick, from, to);
                }
                first = code + 1;
            }
        }
        if (first <= last) {
            join_range(b, first, last, tick, from, to);
        }
    }
    if (spelling == DMK_SPELL_JSON) {
        join_escaped(b, chars, tick, from, to);
    }
}

/* \u and four digits: anything but surrogates, or a pair of them. */
static void join_u(struct dmk_build *b, uint32_t slash, uint32_t to)
{
    static const char *const digits[] = {"09", "AF", "af"};
    const uint32_t u = dmk_build_node(b), x3 = dmk_build_node(b), x2 = dmk_build_node(b),
                   x1 = dmk_build_node(b);
    const uint32_t d = dmk_build_node(b), high = dmk_build_node(b), last_digit = dmk_build_node(b);
    const struct dmk_piece pair = dmk_piece_text(b, dmk_str_from("\\u"));
    const uint32_t l3 = dmk_build_node(b), l2 = dmk_build_node(b), l1 = dmk_build_node(b);

    dmk_build_bytes(b, slash, 'u', 'u', u);
    dmk_build_bytes(b, u, '0', '9', x3);
    for (unsigned i = 0; i < 2; i++) {
        const uint8_t a = i ? 'a' : 'A';

        dmk_build_bytes(b, u, a, (uint8_t)(a + 2), x3);
        dmk_build_bytes(b, u, (uint8_t)(a + 4), (uint8_t)(a + 5), x3);
        dmk_build_bytes(b, u, (uint8_t)(a + 3), (uint8_t)(a + 3), d);
        dmk_build_bytes(b, d, (uint8_t)(a), (uint8_t)(a + 1), high);
        dmk_build_bytes(b, pair.out, (uint8_t)(a + 3), (uint8_t)(a + 3), l3);
        dmk_build_bytes(b, l3, (uint8_t)(a + 2), (uint8_t)(a + 5), l2);
    }
    dmk_build_bytes(b, d, '0', '7', x2);
    dmk_build_bytes(b, d, '8', '9', high);
    for (unsigned i = 0; i < 3; i++) {
        const uint8_t first = (uint8_t)digits[i][0], last = (uint8_t)digits[i][1];

        dmk_build_bytes(b, x3, first, last, x2);
        dmk_build_bytes(b, x2, first, last, x1);
        dmk_build_bytes(b, x1, first, last, to);
        dmk_build_bytes(b, high, first, last, last_digit);
        dmk_build_bytes(b, last_digit, first, last, pair.in);
        dmk_build_bytes(b, l2, first, last, l1);
        dmk_build_bytes(b, l1, first, last, to);
    }
}

void dmk_chars_join_any(struct dmk_build *b, bool tick, uint32_t from, uint32_t to)
{
    const uint32_t slash = begin_char(b, tick);

    join_range(b, 0x20, '"' - 1, tick, from, to);
    join_range(b, '"' + 1, '\\' - 1, tick, from, to);
    join_range(b, '\\' + 1, SURROGATE_FIRST - 1, tick, from, to);
    join_range(b, SURROGATE_LAST + 1, DMK_CHARS_MAX, tick, from, to);
    dmk_build_bytes(b, from, '\\', '\\', slash);
    for (const char *c = "\"\\/bfnrt"; *c; c++) {
        dmk_build_bytes(b, slash, (uint8_t)*c, (uint8_t)*c, to);
    }
    join_u(b, slash, to);
}

struct dmk_piece dmk_piece_chars(struct dmk_build *b, const struct dmk_chars *chars,
                                 enum dmk_spelling spelling, bool tick)
{
    const uint32_t in = dmk_build_node(b), out = dmk_build_node(b);

    dmk_chars_join(b, chars, spelling, tick, in, out);
    return dmk_piece_nodes(b, in, out, in);
}

uint32_t dmk_chars_next(struct dmk_str text, size_t *inout_at)
{
    const uint8_t *p = (const uint8_t *)text.data + *inout_at;
    const unsigned n = p[0] < 0x80 ? 1 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    uint32_t code = n == 1 ? p[0] : p[0] & (0xffu >> (n + 1));

    for (unsigned i = 1; i < n && *inout_at + i < text.len; i++) {
        code = code << 6 | (p[i] & 63);
    }
    *inout_at += n;
    return code;
}
