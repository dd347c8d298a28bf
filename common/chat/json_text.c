/* Compact JSON with numbers and escapes as serde_json prints them, since the model was trained on prompts
 * written by it. jansson's own writer differs in both. Any thread. */
#include "common/chat/schema_text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/json/json.h"

#define MAX_DIGITS 17

static void write_escaped(struct dmk_buf *out, const char *text, size_t len)
{
    size_t from = 0;

    dmk_buf_putc(out, '"');
    for (size_t i = 0; i < len; i++) {
        const unsigned char c = (unsigned char)text[i];

        if (c >= 0x20 && c != '"' && c != '\\') {
            continue;
        }
        dmk_buf_append(out, text + from, i - from);
        from = i + 1;
        switch (c) {
        case '"':
            dmk_buf_puts(out, "\\\"");
            break;
        case '\\':
            dmk_buf_puts(out, "\\\\");
            break;
        case '\b':
            dmk_buf_puts(out, "\\b");
            break;
        case '\f':
            dmk_buf_puts(out, "\\f");
            break;
        case '\n':
            dmk_buf_puts(out, "\\n");
            break;
        case '\r':
            dmk_buf_puts(out, "\\r");
            break;
        case '\t':
            dmk_buf_puts(out, "\\t");
            break;
        default:
            dmk_buf_printf(out, "\\u%04x", c);
        }
    }
    dmk_buf_append(out, text + from, len - from);
    dmk_buf_putc(out, '"');
}

static void write_zeros(struct dmk_buf *out, int n)
{
    for (int i = 0; i < n; i++) {
        dmk_buf_putc(out, '0');
    }
}

/* The shortest digits that read back as value; the point moves as in the Ryu printer: plain notation for
 * exponents in -5 < e <= 16, else d.ddde. */
static void write_real(struct dmk_buf *out, double value)
{
    char text[40], digits[MAX_DIGITS] = {0};
    int n = 0, exponent;

    if (!isfinite(value)) {
        dmk_buf_puts(out, "null");
        return;
    }
    for (int precision = 0; precision < MAX_DIGITS; precision++) {
        snprintf(text, sizeof(text), "%.*e", precision, fabs(value));
        if (strtod(text, NULL) == fabs(value)) {
            break;
        }
    }
    const char *e = strchr(text, 'e');

    for (const char *p = text; p < e; p++) {
        if (*p != '.' && n < MAX_DIGITS) {
            digits[n++] = *p;
        }
    }
    while (n > 1 && digits[n - 1] == '0') {
        n--;
    }
    exponent = (int)strtol(e + 1, NULL, 10) + 1; /* value = 0.DIGITS x 10^exponent */
    if (signbit(value)) {
        dmk_buf_putc(out, '-');
    }
    if (value == 0) {
        dmk_buf_puts(out, "0.0");
    } else if (exponent >= n && exponent <= 16) {
        dmk_buf_append(out, digits, (size_t)n);
        write_zeros(out, exponent - n);
        dmk_buf_puts(out, ".0");
    } else if (exponent > 0 && exponent <= 16) {
        dmk_buf_append(out, digits, (size_t)exponent);
        dmk_buf_putc(out, '.');
        dmk_buf_append(out, digits + exponent, (size_t)(n - exponent));
    } else if (exponent > -5 && exponent <= 0) {
        dmk_buf_puts(out, "0.");
        write_zeros(out, -exponent);
        dmk_buf_append(out, digits, (size_t)n);
    } else {
        dmk_buf_putc(out, digits[0]);
        if (n > 1) {
            dmk_buf_putc(out, '.');
            dmk_buf_append(out, digits + 1, (size_t)n - 1);
        }
        dmk_buf_printf(out, "e%d", exponent - 1);
    }
}

static int write_json(struct dmk_buf *out, const json_t *value, unsigned depth,
                      struct dmk_error *reterr);

static int write_members(struct dmk_buf *out, const json_t *object, unsigned depth,
                         struct dmk_error *reterr)
{
    /* jansson's iterators want a value that is not const, and do not change it. */
    json_t *mutable = (json_t *)(uintptr_t)object;
    bool first = true;

    dmk_buf_putc(out, '{');
    for (void *at = json_object_iter(mutable); at; at = json_object_iter_next(mutable, at)) {
        const char *key = json_object_iter_key(at);

        if (!first) {
            dmk_buf_putc(out, ',');
        }
        first = false;
        write_escaped(out, key, strlen(key));
        dmk_buf_putc(out, ':');
        const int r = write_json(out, json_object_iter_value(at), depth + 1, reterr);

        if (r < 0) {
            return r;
        }
    }
    dmk_buf_putc(out, '}');
    return 0;
}

static int write_items(struct dmk_buf *out, const json_t *array, unsigned depth,
                       struct dmk_error *reterr)
{
    dmk_buf_putc(out, '[');
    for (size_t i = 0; i < json_array_size(array); i++) {
        if (i) {
            dmk_buf_putc(out, ',');
        }
        const int r = write_json(out, json_array_get(array, i), depth + 1, reterr);

        if (r < 0) {
            return r;
        }
    }
    dmk_buf_putc(out, ']');
    return 0;
}

/* Recursion is bounded by DMK_SCHEMA_MAX_DEPTH. */
static int write_json(struct dmk_buf *out, const json_t *value, unsigned depth,
                      struct dmk_error *reterr)
{
    if (depth > DMK_SCHEMA_MAX_DEPTH) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "a JSON value is nested deeper than %d levels; flatten it",
                             DMK_SCHEMA_MAX_DEPTH);
    }
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return write_members(out, value, depth, reterr);
    case JSON_ARRAY:
        return write_items(out, value, depth, reterr);
    case JSON_STRING:
        write_escaped(out, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER:
        dmk_buf_printf(out, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
        break;
    case JSON_REAL:
        write_real(out, json_real_value(value));
        break;
    case JSON_TRUE:
        dmk_buf_puts(out, "true");
        break;
    case JSON_FALSE:
        dmk_buf_puts(out, "false");
        break;
    case JSON_NULL:
        dmk_buf_puts(out, "null");
        break;
    }
    return 0;
}

int dmk_json_text(const struct json_t *value, struct dmk_buf *out, struct dmk_error *reterr)
{
    return write_json(out, value, 0, reterr);
}
