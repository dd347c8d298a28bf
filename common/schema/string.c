/* Strings with bounds, a pattern or a format. */
#include <math.h>
#include "common/schema/regex.h"
#include "common/schema/schema_impl.h"

#define MAX_LENGTH 1000000u
#define UNREACHED  0x1p25 /* no answer has as many characters or values */

int dmk_schema__count(struct dmk_schemas *s, const struct dmk_job *job, const json_t *schema,
                      const char *key, uint32_t absent, uint32_t *ret)
{
    const json_t *v = json_object_get(schema, key);
    const double x = json_number_value(v);

    *ret = absent;
    if (!v) {
        return 0;
    }
    if (!json_is_number(v) || x < 0 || x != floor(x)) {
        return dmk_schema__bad(s, job, "\"%s\" must be a whole number that is not negative", key);
    }
    if (x >= UNREACHED && absent > 0) {
        return 0; /* a largest number, as generators of schemas like to write it */
    }
    if (x > MAX_LENGTH) {
        return dmk_schema__bad(s, job, "\"%s\" must be at most %u", key, MAX_LENGTH);
    }
    *ret = (uint32_t)x;
    return 0;
}

/* The pattern or the format's expression; *ret is NULL when there is neither. */
static int find_pattern(struct dmk_schemas *s, const struct dmk_job *job, const json_t *schema,
                        struct dmk_str *ret)
{
    const json_t *pattern = json_object_get(schema, "pattern");
    const json_t *format = json_object_get(schema, "format");
    const char *known =
        json_is_string(format) ? dmk_schema__format(json_string_value(format)) : NULL;

    if (pattern && !json_is_string(pattern)) {
        return dmk_schema__bad(s, job, "\"pattern\" must be a string");
    }
    if (pattern && known) {
        return dmk_schema__bad(s, job, "\"pattern\" and \"format\" are not supported together");
    }
    *ret = (struct dmk_str){0};
    if (pattern) {
        *ret = (struct dmk_str){json_string_value(pattern), json_string_length(pattern)};
    } else if (known) {
        *ret = dmk_str_from(known);
    }
    return 0;
}

int dmk_schema__string(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                       uint32_t *ret_rule)
{
    struct dmk_build *b = s->build;
    struct dmk_str pattern = {0};
    struct dmk_error error = {0};
    struct dmk_piece body;
    uint32_t min = 0, max = 0, in, start, out;
    bool counts;
    int r;

    if ((r = dmk_schema__count(s, job, schema, "minLength", 0, &min)) < 0 ||
        (r = dmk_schema__count(s, job, schema, "maxLength", DMK_BUILD_NO_MAX, &max)) < 0 ||
        (r = find_pattern(s, job, schema, &pattern)) < 0) {
        return r;
    }
    if (min > max) {
        return dmk_schema__bad(s, job, "\"minLength\" is above \"maxLength\"");
    }
    counts = min > 0 || max != DMK_BUILD_NO_MAX;
    if (!counts && !pattern.data) {
        *ret_rule = dmk_values_string(&s->values);
        return 0;
    }
    *ret_rule = dmk_build_declare(b);
    dmk_build_begin(b, *ret_rule);
    in = dmk_build_node(b);
    start = dmk_build_node(b);
    out = dmk_build_node(b);
    dmk_build_bytes(b, in, '"', '"', start);
    if (pattern.data) {
        r = dmk_regex_piece(b, pattern, DMK_REGEX_SEARCH, DMK_SPELL_JSON, counts, &body, &error);
        if (r < 0) {
            return dmk_schema__bad(s, job, "\"pattern\": %s", error.text);
        }
        if (counts) {
            dmk_build_expand(b);
        }
    } else {
        body = dmk_piece_empty(b);
        dmk_chars_join_any(b, true, body.in, body.in);
    }
    dmk_build_skip(b, start, body.in);
    dmk_build_bytes(b, body.out, '"', '"', out);
    if (min > 0) {
        dmk_build_gate(b, out);
    }
    dmk_build_end(b, dmk_piece_nodes(b, in, out, in), min, max);
    return 0;
}
