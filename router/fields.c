/* Reading of request bodies; see fields.h. */
#include "router/fields.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"

#define MAX_DEPTH 64

struct path {
    char text[96];
};

static struct path path_of(const char *prefix, const char *key)
{
    struct path p;

    (void)snprintf(p.text, sizeof(p.text), "%s%s", prefix, key);
    return p;
}

struct number {
    char text[32];
};

/* As the client may have written it: six digits would show 2.0000001 as the 2 that is allowed. */
static struct number number_of(double v)
{
    struct number n;

    for (int digits = 6; digits <= 17; digits++) {
        (void)snprintf(n.text, sizeof(n.text), "%.*g", digits, v);
        if (strtod(n.text, NULL) == v) {
            break;
        }
    }
    return n;
}

json_t *dmk_field_get(const json_t *obj, const char *key)
{
    json_t *v = json_object_get(obj, key);

    return json_is_null(v) ? NULL : v;
}

struct dmk_str dmk_field_text(const json_t *string)
{
    return (struct dmk_str){json_string_value(string), json_string_length(string)};
}

bool dmk_field_token(const json_t *v, int64_t *ret_id)
{
    double d;

    if (!json_is_number(v)) {
        return false;
    }
    d = json_number_value(v); /* exact: ids are far below 2^53 */
    if (!(d >= 0 && d < DMK_VOCAB_SIZE && d == floor(d))) {
        return false;
    }
    *ret_id = (int64_t)d;
    return true;
}

int dmk_field_real(const json_t *obj, const char *prefix, const char *key, double min, double max,
                   float *ret, struct dmk_api_error *reterr)
{
    const json_t *v = dmk_field_get(obj, key);
    const struct path p = path_of(prefix, key);
    double x;

    if (!v) {
        return 0;
    }
    if (!json_is_number(v)) {
        return dmk_api_bad(reterr, p.text, "%s must be a number", p.text);
    }
    x = json_number_value(v);
    if (!(x >= min && x <= max)) {
        return dmk_api_bad(reterr, p.text, "%s must be between %g and %g, not %s", p.text, min, max,
                           number_of(x).text);
    }
    *ret = (float)x;
    return 0;
}

int dmk_field_int(const json_t *obj, const char *prefix, const char *key, int64_t min, int64_t max,
                  int64_t *ret, struct dmk_api_error *reterr)
{
    const json_t *v = dmk_field_get(obj, key);
    const struct path p = path_of(prefix, key);
    int64_t x;

    if (!v) {
        return 0;
    }
    if (json_is_real(v)) {
        const double d = json_real_value(v);

        if (d == floor(d) && fabs(d) > 9e15) { /* also what no integer type holds */
            return dmk_api_bad(reterr, p.text, "%s must be between %lld and %lld, not %s", p.text,
                               (long long)min, (long long)max, number_of(d).text);
        }
        if (d != floor(d)) {
            return dmk_api_bad(reterr, p.text, "%s must be a whole number, not %s", p.text,
                               number_of(d).text);
        }
        x = (int64_t)d;
    } else if (json_is_integer(v)) {
        x = json_integer_value(v);
    } else {
        return dmk_api_bad(reterr, p.text, "%s must be a whole number", p.text);
    }
    if (x < min || x > max) {
        return dmk_api_bad(reterr, p.text, "%s must be between %lld and %lld, not %lld", p.text,
                           (long long)min, (long long)max, (long long)x);
    }
    *ret = x;
    return 0;
}

int dmk_field_bool(const json_t *obj, const char *prefix, const char *key, bool *ret,
                   struct dmk_api_error *reterr)
{
    const json_t *v = dmk_field_get(obj, key);
    const struct path p = path_of(prefix, key);

    if (!v) {
        return 0;
    }
    if (!json_is_boolean(v)) {
        return dmk_api_bad(reterr, p.text, "%s must be true or false", p.text);
    }
    *ret = json_is_true(v);
    return 0;
}

int dmk_field_str(const json_t *obj, const char *prefix, const char *key, size_t max_bytes,
                  struct dmk_str *ret, struct dmk_api_error *reterr)
{
    const json_t *v = dmk_field_get(obj, key);
    const struct path p = path_of(prefix, key);

    if (!v) {
        return 0;
    }
    if (!json_is_string(v)) {
        return dmk_api_bad(reterr, p.text, "%s must be a string", p.text);
    }
    if (json_string_length(v) > max_bytes) {
        return dmk_api_bad(reterr, p.text, "%s must have at most %zu bytes, not %zu", p.text,
                           max_bytes, json_string_length(v));
    }
    *ret = dmk_field_text(v);
    return 0;
}

int dmk_fields_open(struct dmk_bytes body, json_t **ret_root, struct dmk_api_error *reterr)
{
    const struct dmk_str text = {(const char *)body.data, body.len};
    struct dmk_error error;
    json_t *root;
    char *near;

    if (text.len == 0) {
        return dmk_api_bad(reterr, "", "the request has no body; it must be a JSON object");
    }
    if (dmk_json_parse(text, "the request body", MAX_DEPTH, &root, &error) < 0) {
        /* The parser's sentence quotes the text where it failed: that must not go back. */
        near = strstr(error.text, " near ");
        if (near) {
            *near = '\0';
        }
        return dmk_api_bad(reterr, "", "%s", error.text);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return dmk_api_bad(reterr, "", "the request body must be a JSON object");
    }
    *ret_root = root;
    return 0;
}

static bool is_neutral(const json_t *v, const char *neutral)
{
    if (!neutral) {
        return false;
    }
    switch (json_typeof(v)) {
    case JSON_FALSE:
        return strcmp(neutral, "false") == 0;
    case JSON_TRUE:
        return strcmp(neutral, "true") == 0;
    case JSON_INTEGER:
    case JSON_REAL:
        return neutral[0] >= '0' && neutral[0] <= '9' &&
               json_number_value(v) == strtod(neutral, NULL);
    case JSON_STRING:
        return strcmp(neutral, json_string_value(v)) == 0;
    case JSON_ARRAY:
        return strcmp(neutral, "[]") == 0 && json_array_size(v) == 0;
    case JSON_OBJECT:
        return strcmp(neutral, "{}") == 0 && json_object_size(v) == 0;
    default:
        return false;
    }
}

static int refuse(const json_t *root, const struct dmk_field_refused *refused, size_t n,
                  struct dmk_api_error *reterr)
{
    for (size_t i = 0; i < n; i++) {
        const json_t *v = dmk_field_get(root, refused[i].key);

        if (v && !is_neutral(v, refused[i].neutral)) {
            return dmk_api_bad_code(reterr, "unsupported_parameter", refused[i].key,
                                    "%s is not supported by this server", refused[i].key);
        }
    }
    return 0;
}

static size_t text_bound(const struct dmk_field *f)
{
    return f->size > 0 ? f->size - 1 : (size_t)f->max;
}

static int read_text(const json_t *root, const struct dmk_field *f, struct dmk_ask *ask,
                     struct dmk_api_error *reterr)
{
    struct dmk_str text = {0};
    const int rc = dmk_field_str(root, "", f->key, text_bound(f), &text, reterr);

    if (rc == 0 && f->size > 0 && text.data) {
        memcpy((char *)ask + f->at, text.data, text.len);
        ((char *)ask + f->at)[text.len] = '\0';
    }
    return rc;
}

static int read_int(const json_t *root, const struct dmk_field *f, struct dmk_ask *ask,
                    struct dmk_api_error *reterr)
{
    int64_t value = 0;
    const int rc = dmk_field_int(root, "", f->key, (int64_t)f->min,
                                 f->max >= 0x1p63 ? INT64_MAX : (int64_t)f->max, &value, reterr);

    if (rc == 0 && f->size == sizeof(uint32_t)) {
        const uint32_t narrow = (uint32_t)value;

        memcpy((char *)ask + f->at, &narrow, sizeof(narrow));
    } else if (rc == 0 && f->size == sizeof(value)) {
        memcpy((char *)ask + f->at, &value, sizeof(value));
    }
    return rc;
}

static int read_real(const json_t *root, const struct dmk_field *f, struct dmk_ask *ask,
                     struct dmk_api_error *reterr)
{
    const struct path p = path_of("", f->key);
    float value = 0;
    const int rc = dmk_field_real(root, "", f->key, f->min, f->max, &value, reterr);

    if (rc == 0 && f->above && !((double)value > f->min)) {
        return dmk_api_bad(reterr, p.text, "%s must be above %g and at most %g, not %s", p.text,
                           f->min, f->max, number_of((double)value).text);
    }
    if (rc == 0 && f->size > 0) {
        memcpy((char *)ask + f->at, &value, sizeof(value));
    }
    return rc;
}

static int read_strings(const json_t *root, const struct dmk_field *f, struct dmk_api_error *reterr)
{
    json_t *v = dmk_field_get(root, f->key);
    const struct path p = path_of("", f->key);
    const char *key;
    json_t *value;

    if (!json_is_object(v)) {
        return dmk_api_bad(reterr, p.text, "%s must be an object", p.text);
    }
    json_object_foreach(v, key, value)
    {
        if (!json_is_string(value)) {
            return dmk_api_bad(reterr, p.text, "the values of %s must be strings", p.text);
        }
    }
    return 0;
}

static int read_field(const json_t *root, const struct dmk_field *f, struct dmk_ask *ask,
                      struct dmk_api_error *reterr)
{
    bool value = false;
    int rc;

    switch (f->kind) {
    case DMK_KIND_REAL:
        return read_real(root, f, ask, reterr);
    case DMK_KIND_INT:
        return read_int(root, f, ask, reterr);
    case DMK_KIND_TEXT:
        return read_text(root, f, ask, reterr);
    case DMK_KIND_STRINGS:
        return read_strings(root, f, reterr);
    case DMK_KIND_BOOL:
        rc = dmk_field_bool(root, "", f->key, &value, reterr);
        if (rc == 0 && f->size > 0) {
            *(bool *)(void *)((char *)ask + f->at) = value;
        }
        return rc;
    }
    dmk_unreachable("kind of field");
}

static int read_all(const json_t *root, const struct dmk_field *fields, size_t n,
                    struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    for (size_t i = 0; i < n; i++) {
        int rc;

        if (!dmk_field_get(root, fields[i].key)) {
            continue;
        }
        rc = read_field(root, &fields[i], ask, reterr);
        if (rc < 0) {
            return rc;
        }
        if (fields[i].has_at > 0) {
            *(bool *)(void *)((char *)ask + fields[i].has_at) = true;
        }
    }
    return 0;
}

int dmk_fields_read(const json_t *root, const struct dmk_field_tables *tables, struct dmk_ask *ask,
                    struct dmk_api_error *reterr)
{
    size_t n;
    const struct dmk_field_refused *everywhere = dmk_fields_refused(&n);
    int rc = refuse(root, tables->refused, tables->n_refused, reterr);

    if (rc == 0 && tables->samples) {
        rc = refuse(root, everywhere, n, reterr);
    }
    return rc < 0 ? rc : read_all(root, tables->fields, tables->n_fields, ask, reterr);
}
