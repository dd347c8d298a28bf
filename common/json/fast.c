/* The short way of dmk_json_parse: one pass over plain JSON, eight bytes at a time in strings, into jansson's values.
 * It knows no sentences: whatever it does not take as plain is read again by jansson, which decides. Where it
 * takes a text its value is jansson's. No recursion; any thread. */
#include "common/json/fast.h"

#include <stdlib.h>
#include <string.h>
#include "common/base/spell.h"

#define DEPTH_MAX  64
#define KEY_BYTES  128 /* with NUL */
#define INT_DIGITS 18  /* more may be beyond json_int_t */

struct reader {
    const char *p, *end;
    json_t *open[DEPTH_MAX]; /* arrays and objects around p, borrowed; the first holds all others */
    uint32_t depth;
    char *text; /* a string without its escapes, or NULL: none had any */
};

/* What stands between two quotes. */
struct string {
    const char *data;
    size_t len;
    bool ascii;
};

static void skip_blanks(struct reader *r)
{
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\n' || *r->p == '\r' || *r->p == '\t')) {
        r->p++;
    }
}

static bool take(struct reader *r, char c)
{
    if (r->p == r->end || *r->p != c) {
        return false;
    }
    r->p++;
    return true;
}

/* The bytes of the word, by their high bits, that may not just be copied: quotes, backslashes and controls. A byte in
 * front of a marked one is never marked wrongly; one behind may be. */
static uint64_t marks(uint64_t word)
{
    const uint64_t ones = 0x0101010101010101ull, high = 0x8080808080808080ull;
    const uint64_t quote = word ^ (ones * '"'), slash = word ^ (ones * '\\');

    return (((quote - ones) & ~quote) | ((slash - ones) & ~slash) |
            ((word - ones * 0x20) & ~word)) &
           high;
}

/* The end of what can be copied from p on; high bits are gathered in *seen. */
static const char *plain_end(const char *p, const char *end, uint64_t *seen)
{
    while (end - p >= 8) {
        uint64_t word;

        memcpy(&word, p, 8);
        if (marks(word)) {
            break;
        }
        *seen |= word & 0x8080808080808080ull;
        p += 8;
    }
    while (p < end && (unsigned char)*p >= 0x20 && *p != '"' && *p != '\\') {
        *seen |= (unsigned char)*p & 0x80u;
        p++;
    }
    return p;
}

/* The escape \uXXXX whose digits start at r->p, with its second half; 0 for what is no whole character. */
static uint32_t read_unicode(struct reader *r)
{
    int code = r->end - r->p >= 4 ? (int)dmk_hex_value(r->p, 4) : -1, low;

    if (code <= 0 || (code >= 0xdc00 && code < 0xe000)) {
        return 0;
    }
    r->p += 4;
    if (code < 0xd800 || code >= 0xe000) {
        return (uint32_t)code;
    }
    if (r->end - r->p < 6 || r->p[0] != '\\' || r->p[1] != 'u') {
        return 0;
    }
    low = (int)dmk_hex_value(r->p + 2, 4);
    if (low < 0xdc00 || low >= 0xe000) {
        return 0;
    }
    r->p += 6;
    return 0x10000u + ((uint32_t)(code - 0xd800) << 10 | (uint32_t)(low - 0xdc00));
}

/* One escape behind its backslash, to out; returns its bytes there, 0 for a fault. */
static size_t read_escape(struct reader *r, char *out, bool *ascii)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *found;
    uint32_t code;

    if (r->p == r->end || *r->p == '\0') {
        return 0;
    }
    found = strchr(from, *r->p);
    if (found) {
        r->p++;
        out[0] = to[found - from];
        return 1;
    }
    if (!take(r, 'u')) {
        return 0;
    }
    code = read_unicode(r);
    *ascii = *ascii && code < 0x80;
    return code ? dmk_utf8_put(code, (uint8_t *)out) : 0;
}

/* A string with escapes; r->p stands on the first of them, start is behind the quote. */
static bool read_escaped(struct reader *r, const char *start, uint64_t seen, struct string *ret)
{
    bool ascii = true;
    size_t n = (size_t)(r->p - start);

    if (!r->text) {
        r->text =
            malloc((size_t)(r->end - start)); /* later strings have less text before the end */
        if (!r->text) {
            return false;
        }
    }
    memcpy(r->text, start, n);
    while (!take(r, '"')) {
        const char *from;
        size_t len;

        if (!take(r, '\\')) {
            return false;
        }
        len = read_escape(r, r->text + n, &ascii); /* never longer than it is in the text */
        if (len == 0) {
            return false;
        }
        n += len;
        from = r->p;
        r->p = plain_end(from, r->end, &seen);
        memcpy(r->text + n, from, (size_t)(r->p - from));
        n += (size_t)(r->p - from);
    }
    *ret = (struct string){r->text, n, ascii && !seen};
    return true;
}

/* The string whose first quote has been taken. Its view ends with the next string. */
static bool read_string(struct reader *r, struct string *ret)
{
    const char *start = r->p;
    uint64_t seen = 0;

    r->p = plain_end(start, r->end, &seen);
    if (take(r, '"')) {
        *ret = (struct string){start, (size_t)(r->p - 1 - start), !seen};
        return true;
    }
    return read_escaped(r, start, seen, ret);
}

/* A short whole number by itself; any other is left to jansson. */
static json_t *read_number(struct reader *r)
{
    const char *start = r->p, *digits;
    json_int_t value = 0;

    (void)take(r, '-');
    digits = r->p;
    while (r->p < r->end && *r->p >= '0' && *r->p <= '9') {
        value = r->p - digits < INT_DIGITS ? value * 10 + (*r->p - '0') : value;
        r->p++;
    }
    if (r->p > digits && r->p - digits <= INT_DIGITS && (*digits != '0' || r->p == digits + 1) &&
        (r->p == r->end || (*r->p != '.' && *r->p != 'e' && *r->p != 'E'))) {
        return json_integer(*start == '-' ? -value : value);
    }
    while (r->p < r->end && *r->p != '\0' && strchr("0123456789+-.eE", *r->p)) {
        r->p++;
    }
    return json_loadb(start, (size_t)(r->p - start), JSON_DECODE_ANY, NULL);
}

static json_t *read_literal(struct reader *r, const char *name, json_t *value)
{
    const size_t n = strlen(name);

    if ((size_t)(r->end - r->p) < n || memcmp(r->p, name, n) != 0) {
        return NULL;
    }
    r->p += n;
    return value;
}

/* A value, of arrays and objects only that there is one. */
static json_t *read_value(struct reader *r)
{
    struct string s;

    skip_blanks(r);
    if (r->p == r->end) {
        return NULL;
    }
    switch (*r->p) {
    case '"':
        r->p++;
        if (!read_string(r, &s)) {
            return NULL;
        }
        return s.ascii ? json_stringn_nocheck(s.data, s.len) : json_stringn(s.data, s.len);
    case '{':
        r->p++;
        return json_object();
    case '[':
        r->p++;
        return json_array();
    case 't':
        return read_literal(r, "true", json_true());
    case 'f':
        return read_literal(r, "false", json_false());
    case 'n':
        return read_literal(r, "null", json_null());
    default:
        return read_number(r);
    }
}

/* Reads a key and its colon; NUL-terminated. */
static bool read_key(struct reader *r, char ret_key[KEY_BYTES])
{
    struct string s;

    skip_blanks(r);
    if (!take(r, '"') || !read_string(r, &s) || !s.ascii || s.len >= KEY_BYTES) {
        return false;
    }
    memcpy(ret_key, s.data, s.len);
    ret_key[s.len] = '\0';
    skip_blanks(r);
    return take(r, ':');
}

/* The next member of the innermost array or object, or its end; first: nothing stands in it yet. Returns the
 * member, NULL at the end; faults set *fault. */
static json_t *read_member(struct reader *r, bool first, bool *fault)
{
    json_t *around = r->open[r->depth - 1], *value = NULL;
    const bool is_object = json_is_object(around);
    char key[KEY_BYTES];

    skip_blanks(r);
    if (take(r, is_object ? '}' : ']')) {
        return NULL;
    }
    *fault = (!first && !take(r, ',')) || (is_object && !read_key(r, key)) ||
             (is_object && json_object_get(around, key)) || !(value = read_value(r));
    if (!*fault && (is_object ? json_object_set_new_nocheck(around, key, value)
                              : json_array_append_new(around, value)) != 0) {
        *fault = true; /* the value is gone */
    }
    return *fault ? NULL : value;
}

static bool push(struct reader *r, json_t *value, uint32_t max_depth)
{
    if (r->depth == DEPTH_MAX || r->depth == max_depth) {
        return false;
    }
    r->open[r->depth++] = value;
    return true;
}

/* Fills the value that was pushed first, and whatever is in it. */
static bool read_members(struct reader *r, uint32_t max_depth)
{
    bool first = true, fault = false;

    while (r->depth > 0) {
        json_t *value = read_member(r, first, &fault);

        first = false;
        if (fault) {
            return false;
        }
        if (!value) {
            r->depth--;
        } else if (json_is_object(value) || json_is_array(value)) {
            if (!push(r, value, max_depth)) {
                return false;
            }
            first = true;
        }
    }
    return true;
}

json_t *dmk_json__parse_fast(struct dmk_str text, uint32_t max_depth)
{
    struct reader r = {.p = text.data, .end = text.data + text.len};
    json_t *root = text.len > 0 ? read_value(&r) : NULL;
    bool ok = root != NULL;

    if (ok && (json_is_object(root) || json_is_array(root))) {
        ok = push(&r, root, max_depth) && read_members(&r, max_depth);
    }
    skip_blanks(&r);
    free(r.text);
    if (!ok || r.p != r.end) {
        json_decref(root);
        return NULL;
    }
    return root;
}
