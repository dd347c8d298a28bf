/* The rules that every schema shares, and literal values; see values.h. */
#include "common/schema/values.h"

#include <stdlib.h>

#define MAX_LITERAL_BYTES 8192

void dmk_values_init(struct dmk_values *v, struct dmk_build *build)
{
    *v = (struct dmk_values){.build = build,
                             .string = DMK_BUILD_NO_MAX,
                             .string_tail = DMK_BUILD_NO_MAX,
                             .number = DMK_BUILD_NO_MAX,
                             .any = DMK_BUILD_NO_MAX,
                             .any_object = DMK_BUILD_NO_MAX,
                             .any_array = DMK_BUILD_NO_MAX};
}

uint32_t dmk_values_string_tail(struct dmk_values *v)
{
    struct dmk_build *b = v->build;
    uint32_t loop, out;

    if (v->string_tail == DMK_BUILD_NO_MAX) {
        v->string_tail = dmk_build_declare(b);
        dmk_build_begin(b, v->string_tail);
        loop = dmk_build_node(b);
        out = dmk_build_node(b);
        dmk_chars_join_any(b, false, loop, loop);
        dmk_build_bytes(b, loop, '"', '"', out);
        dmk_build_end(b, dmk_piece_nodes(b, loop, out, loop), 0, DMK_BUILD_NO_MAX);
    }
    return v->string_tail;
}

uint32_t dmk_values_string(struct dmk_values *v)
{
    struct dmk_build *b = v->build;
    const uint32_t tail = dmk_values_string_tail(v);

    if (v->string == DMK_BUILD_NO_MAX) {
        v->string = dmk_build_declare(b);
        dmk_build_begin(b, v->string);
        const struct dmk_piece quote = dmk_piece_bytes(b, '"', '"');

        dmk_build_end(b, dmk_piece_then(b, quote, dmk_piece_call(b, tail)), 0, DMK_BUILD_NO_MAX);
    }
    return v->string;
}

uint32_t dmk_values_number(struct dmk_values *v)
{
    static const struct dmk_number_bounds none;

    if (v->number == DMK_BUILD_NO_MAX) {
        v->number = dmk_build_declare(v->build);
        dmk_build_begin(v->build, v->number);
        dmk_build_end(v->build, dmk_piece_number(v->build, &none), 0, DMK_BUILD_NO_MAX);
    }
    return v->number;
}

/* Declares the three that call each other, then builds them. */
static void make_any(struct dmk_values *v)
{
    static const char *const words[] = {"true", "false", "null"};
    struct dmk_build *b = v->build;
    const uint32_t string = dmk_values_string(v), number = dmk_values_number(v);
    uint32_t in, out, key, value, more;

    v->any = dmk_build_declare(b);
    v->any_object = dmk_build_declare(b);
    v->any_array = dmk_build_declare(b);
    dmk_build_begin(b, v->any);
    in = dmk_build_node(b);
    out = dmk_build_node(b);
    dmk_build_call(b, in, string, out);
    dmk_build_call(b, in, number, out);
    dmk_build_call(b, in, v->any_object, out);
    dmk_build_call(b, in, v->any_array, out);
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        const struct dmk_piece word = dmk_piece_text(b, dmk_str_from(words[i]));

        dmk_build_skip(b, in, word.in);
        dmk_build_skip(b, word.out, out);
    }
    dmk_build_end(b, dmk_piece_nodes(b, in, out, in), 0, DMK_BUILD_NO_MAX);

    dmk_build_begin(b, v->any_object);
    in = dmk_build_node(b);
    out = dmk_build_node(b);
    key = dmk_build_node(b);
    value = dmk_build_node(b);
    more = dmk_build_node(b);
    dmk_build_bytes(b, in, '{', '{', key);
    dmk_build_bytes(b, key, '}', '}', out);
    {
        const struct dmk_piece colon = dmk_piece_mark(b, ':'), comma = dmk_piece_mark(b, ',');

        dmk_build_call(b, key, string, colon.in);
        dmk_build_call(b, colon.out, v->any, value);
        dmk_build_bytes(b, value, '}', '}', out);
        dmk_build_skip(b, value, comma.in);
        dmk_build_skip(b, comma.out, more);
        dmk_build_call(b, more, string, colon.in);
    }
    dmk_build_end(b, dmk_piece_nodes(b, in, out, in), 0, DMK_BUILD_NO_MAX);

    dmk_build_begin(b, v->any_array);
    in = dmk_build_node(b);
    out = dmk_build_node(b);
    key = dmk_build_node(b);
    value = dmk_build_node(b);
    dmk_build_bytes(b, in, '[', '[', key);
    dmk_build_bytes(b, key, ']', ']', out);
    {
        const struct dmk_piece comma = dmk_piece_mark(b, ',');

        dmk_build_call(b, key, v->any, value);
        dmk_build_bytes(b, value, ']', ']', out);
        dmk_build_skip(b, value, comma.in);
        dmk_build_call(b, comma.out, v->any, value);
    }
    dmk_build_end(b, dmk_piece_nodes(b, in, out, in), 0, DMK_BUILD_NO_MAX);
}

uint32_t dmk_values_any(struct dmk_values *v)
{
    if (v->any == DMK_BUILD_NO_MAX) {
        make_any(v);
    }
    return v->any;
}

uint32_t dmk_values_any_object(struct dmk_values *v)
{
    (void)dmk_values_any(v);
    return v->any_object;
}

uint32_t dmk_values_any_array(struct dmk_values *v)
{
    (void)dmk_values_any(v);
    return v->any_array;
}

struct dmk_piece dmk_piece_mark(struct dmk_build *b, char mark)
{
    const uint32_t in = dmk_build_node(b), behind = dmk_build_node(b), out = dmk_build_node(b);

    dmk_build_bytes(b, in, (uint8_t)mark, (uint8_t)mark, behind);
    dmk_build_bytes(b, behind, ' ', ' ', out);
    dmk_build_skip(b, behind, out);
    return dmk_piece_nodes(b, in, out, in);
}

/* The shortest text that reads back as the same value. */
static char *print(const json_t *value)
{
    char *text = NULL;

    for (int digits = 15; digits <= 17 && !text; digits++) {
        json_t *back;

        text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(digits));
        if (!text || digits == 17) {
            break;
        }
        back = json_loads(text, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        if (!back || !json_equal(back, value)) {
            free(text);
            text = NULL;
        }
        json_decref(back);
    }
    return text;
}

int dmk_piece_literal(struct dmk_build *build, const json_t *value, struct dmk_piece *ret)
{
    char *text = print(value);
    const struct dmk_str str = dmk_str_from(text);

    if (!text || str.len > MAX_LITERAL_BYTES) {
        free(text);
        return -DMK_EINVAL;
    }
    *ret = dmk_piece_text(build, str);
    free(text);
    return 0;
}
