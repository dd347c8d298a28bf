/* Types of values and schemas, and which schemas exclude each other: no value can satisfy both. */
#include "common/schema/schema_impl.h"

#include <math.h>
#include <string.h>

unsigned dmk_schema__type_of(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return DMK_TYPE_OBJECT;
    case JSON_ARRAY:
        return DMK_TYPE_ARRAY;
    case JSON_STRING:
        return DMK_TYPE_STRING;
    case JSON_INTEGER:
        return DMK_TYPE_INTEGER;
    case JSON_REAL:
        return json_real_value(value) == floor(json_real_value(value)) ? DMK_TYPE_INTEGER
                                                                       : DMK_TYPE_FRACTION;
    case JSON_TRUE:
    case JSON_FALSE:
        return DMK_TYPE_BOOLEAN;
    default:
        return DMK_TYPE_NULL;
    }
}

static unsigned type_of_word(const char *word)
{
    static const struct {
        const char *name;
        unsigned bits;
    } names[] = {{"object", DMK_TYPE_OBJECT}, {"array", DMK_TYPE_ARRAY},
                 {"string", DMK_TYPE_STRING}, {"integer", DMK_TYPE_INTEGER},
                 {"number", DMK_TYPE_NUMBER}, {"boolean", DMK_TYPE_BOOLEAN},
                 {"null", DMK_TYPE_NULL}};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (strcmp(word, names[i].name) == 0) {
            return names[i].bits;
        }
    }
    return 0;
}

/* A schema that names no type but has keywords of some types means these. */
static unsigned implied_types(const json_t *schema)
{
    static const struct {
        const char *key;
        unsigned bits;
    } keys[] = {{"properties", DMK_TYPE_OBJECT},
                {"required", DMK_TYPE_OBJECT},
                {"additionalProperties", DMK_TYPE_OBJECT},
                {"items", DMK_TYPE_ARRAY},
                {"prefixItems", DMK_TYPE_ARRAY},
                {"minItems", DMK_TYPE_ARRAY},
                {"maxItems", DMK_TYPE_ARRAY},
                {"minLength", DMK_TYPE_STRING},
                {"maxLength", DMK_TYPE_STRING},
                {"pattern", DMK_TYPE_STRING},
                {"format", DMK_TYPE_STRING},
                {"minimum", DMK_TYPE_NUMBER},
                {"maximum", DMK_TYPE_NUMBER},
                {"exclusiveMinimum", DMK_TYPE_NUMBER},
                {"exclusiveMaximum", DMK_TYPE_NUMBER}};
    unsigned bits = 0;

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        bits |= json_object_get(schema, keys[i].key) ? keys[i].bits : 0;
    }
    return bits ? bits : DMK_TYPE_ALL;
}

int dmk_schema__types(const json_t *schema, unsigned *ret)
{
    const json_t *type = json_object_get(schema, "type");
    size_t i;
    json_t *word;

    *ret = 0;
    if (!type) {
        *ret = implied_types(schema);
        return 0;
    }
    if (json_is_string(type)) {
        *ret = type_of_word(json_string_value(type));
        return *ret ? 0 : -DMK_EINVAL;
    }
    if (!json_is_array(type)) {
        return -DMK_EINVAL;
    }
    json_array_foreach(type, i, word)
    {
        const unsigned bits = json_is_string(word) ? type_of_word(json_string_value(word)) : 0;

        if (!bits) {
            return -DMK_EINVAL;
        }
        *ret |= bits;
    }
    return 0;
}

/* The types that the values of a flat schema can have. */
static unsigned types_of(const json_t *flat)
{
    const json_t *list = json_object_get(flat, "enum");
    unsigned types = DMK_TYPE_ALL, listed = 0;
    size_t i;
    json_t *value;

    if (json_object_get(flat, "type") || !list) {
        types = dmk_schema__types(flat, &types) == 0 ? types : DMK_TYPE_ALL;
    }
    if (!json_is_array(list)) {
        return types;
    }
    json_array_foreach(list, i, value)
    {
        listed |= dmk_schema__type_of(value);
    }
    return types & listed;
}

static bool is_required(const json_t *flat, const char *name)
{
    const json_t *list = json_object_get(flat, "required");
    size_t i;
    json_t *value;

    json_array_foreach(list, i, value)
    {
        if (json_is_string(value) && strcmp(json_string_value(value), name) == 0) {
            return true;
        }
    }
    return false;
}

/* Both list their values and have none in common, or have no type in common. */
static bool values_differ(const json_t *x, const json_t *y)
{
    const json_t *a = json_object_get(x, "enum"), *b = json_object_get(y, "enum");
    json_t *common;
    bool differ;

    if ((types_of(x) & types_of(y)) == 0) {
        return true;
    }
    if (!a || !b) {
        return false;
    }
    common = dmk_schema__common_values(a, b);
    differ = json_array_size(common) == 0;
    json_decref(common);
    return differ;
}

bool dmk_schema__disjoint(struct dmk_schemas *s, const struct dmk_job *job, json_t *x, json_t *y)
{
    json_t *a = NULL, *b = NULL, *value;
    const char *name;

    if (!json_is_object(x) || !json_is_object(y) || dmk_schema__flatten(s, job, x, &a) < 0 ||
        dmk_schema__flatten(s, job, y, &b) < 0) {
        return false;
    }
    if (values_differ(a, b)) {
        return true;
    }
    if ((types_of(a) & types_of(b)) != DMK_TYPE_OBJECT) {
        return false;
    }
    /* Objects with a property that both must have, with other values in each. */
    json_object_foreach(json_object_get(a, "properties"), name, value)
    {
        json_t *other = json_object_get(json_object_get(b, "properties"), name);
        json_t *p = NULL, *q = NULL;

        if (other && is_required(a, name) && is_required(b, name) && json_is_object(value) &&
            json_is_object(other) && dmk_schema__flatten(s, job, value, &p) == 0 &&
            dmk_schema__flatten(s, job, other, &q) == 0 && values_differ(p, q)) {
            return true;
        }
    }
    return false;
}
