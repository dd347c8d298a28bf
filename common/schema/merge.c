/* References and allOf: schemas that say one thing in several places become one.
 *
 * Merging is exact or refused. A property that only one side lists must please the other side's
 * additionalProperties too. */
#include "common/schema/schema_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Words about a schema, not about values. */
static const char *const annotations[] = {"title",
                                          "description",
                                          "default",
                                          "examples",
                                          "example",
                                          "$schema",
                                          "$id",
                                          "id",
                                          "$comment",
                                          "$defs",
                                          "definitions",
                                          "$anchor",
                                          "deprecated",
                                          "readOnly",
                                          "writeOnly",
                                          "xml",
                                          "externalDocs",
                                          "contentEncoding",
                                          "contentMediaType",
                                          "strict",
                                          "discriminator",
                                          "$vocabulary"};

/* What is enforced. */
static const char *const enforced[] = {
    "type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems",
    "maxItems", "prefixItems", "additionalItems", "minLength", "maxLength", "pattern", "format",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "anyOf", "oneOf", "allOf", "$ref",
    "nullable",
    /* only where they say nothing */
    "uniqueItems", "minProperties", "multipleOf"};

/* What would change the meaning and is not enforced. */
static const char *const refused[] = {"not",
                                      "if",
                                      "then",
                                      "else",
                                      "patternProperties",
                                      "propertyNames",
                                      "dependentRequired",
                                      "dependentSchemas",
                                      "dependencies",
                                      "contains",
                                      "minContains",
                                      "maxContains",
                                      "maxProperties",
                                      "unevaluatedProperties",
                                      "unevaluatedItems",
                                      "$dynamicRef",
                                      "$recursiveRef"};

static bool is_in(const char *key, const char *const *words, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(key, words[i]) == 0) {
            return true;
        }
    }
    return false;
}

static bool is_annotation(const char *key)
{
    return is_in(key, annotations, sizeof(annotations) / sizeof(annotations[0]));
}

bool dmk_schema__is_free(const json_t *schema)
{
    const char *key;
    json_t *value;

    if (json_is_true(schema)) {
        return true;
    }
    json_object_foreach((json_t *)(uintptr_t)schema, key, value)
    {
        if (is_in(key, enforced, sizeof(enforced) / sizeof(enforced[0]))) {
            return false;
        }
    }
    return json_is_object(schema) && !dmk_schema__refused(schema);
}

const char *dmk_schema__refused(const json_t *schema)
{
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        if (json_object_get(schema, refused[i])) {
            return refused[i];
        }
    }
    return NULL;
}

/* ---------------------------------------------------------------- references */

json_t *dmk_schema__resolve(json_t *root, const char *ref)
{
    json_t *at = root;

    if (ref[0] != '#') {
        return NULL;
    }
    ref++;
    while (*ref == '/' && at) {
        char key[PATH_BYTES];
        size_t n = 0;

        for (ref++; *ref && *ref != '/'; ref++) {
            char c = *ref;

            if (c == '~' && (ref[1] == '0' || ref[1] == '1')) {
                c = *++ref == '0' ? '~' : '/';
            } else if (c == '%') {
                return NULL;
            }
            if (n + 1 == sizeof(key)) {
                return NULL;
            }
            key[n++] = c;
        }
        key[n] = 0;
        if (json_is_array(at)) {
            char *end = NULL;
            const unsigned long i = strtoul(key, &end, 10);

            at = n > 0 && n < 8 && *end == 0 ? json_array_get(at, i) : NULL;
        } else {
            at = json_object_get(at, key);
        }
    }
    return *ref == 0 ? at : NULL;
}

/* ---------------------------------------------------------------- merging */

/* {"allOf": [x, y]} as a new reference. */
static json_t *both(json_t *x, json_t *y)
{
    return json_pack("{s:[O,O]}", "allOf", x, y);
}

/* What one side says about a property that it does not list: NULL when it says nothing. Borrowed. */
static json_t *unlisted(json_t *schema)
{
    json_t *further = json_object_get(schema, "additionalProperties");

    return json_is_true(further) ? NULL : further;
}

static int merge_properties(json_t *to, json_t *from)
{
    json_t *mine = json_object_get(to, "properties"), *theirs = json_object_get(from, "properties");
    json_t *all = json_object();
    json_t *my_rest = unlisted(to), *their_rest = unlisted(from);
    const char *key;
    json_t *value;
    int r = all ? 0 : -1;

    json_object_foreach(mine, key, value)
    {
        json_t *other = json_object_get(theirs, key);

        other = other ? other : their_rest;
        r |= json_object_set_new(all, key,
                                 other && other != value ? both(value, other) : json_incref(value));
    }
    json_object_foreach(theirs, key, value)
    {
        if (!json_object_get(mine, key)) {
            r |= json_object_set_new(all, key, my_rest ? both(value, my_rest) : json_incref(value));
        }
    }
    if (json_object_size(all) > 0) {
        r |= json_object_set(to, "properties", all);
    }
    json_decref(all);
    if (my_rest && their_rest && my_rest != their_rest) {
        r |= json_object_set_new(to, "additionalProperties",
                                 json_is_false(my_rest) || json_is_false(their_rest)
                                     ? json_false()
                                     : both(my_rest, their_rest));
    } else if (their_rest) {
        r |= json_object_set(to, "additionalProperties", their_rest);
    }
    return r;
}

static int merge_required(json_t *to, json_t *from)
{
    json_t *mine = json_object_get(to, "required"), *theirs = json_object_get(from, "required");
    json_t *all = mine ? json_copy(mine) : json_array();
    int r = all ? 0 : -1;

    if (json_is_array(theirs)) {
        r |= json_array_extend(all, theirs);
    }
    r |= json_object_set_new(to, "required", all);
    return r;
}

/* Values that both lists have. */
json_t *dmk_schema__common_values(const json_t *x, const json_t *y)
{
    json_t *list = json_array();
    size_t i, k;
    json_t *a, *b;

    json_array_foreach(x, i, a)
    {
        json_array_foreach(y, k, b)
        {
            if (json_equal(a, b)) {
                (void)json_array_append(list, a);
                break;
            }
        }
    }
    return list;
}

static json_t *type_list(unsigned types)
{
    static const struct {
        unsigned bit;
        const char *name;
    } names[] = {{DMK_TYPE_OBJECT, "object"},
                 {DMK_TYPE_ARRAY, "array"},
                 {DMK_TYPE_STRING, "string"},
                 {DMK_TYPE_BOOLEAN, "boolean"},
                 {DMK_TYPE_NULL, "null"}};
    json_t *list = json_array();

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (types & names[i].bit) {
            (void)json_array_append_new(list, json_string(names[i].name));
        }
    }
    if (types & DMK_TYPE_FRACTION) {
        (void)json_array_append_new(list, json_string("number"));
    } else if (types & DMK_TYPE_INTEGER) {
        (void)json_array_append_new(list, json_string("integer"));
    }
    return list;
}

/* One keyword that both have. Returns false when it is not known how. */
static bool merge_key(json_t *to, const char *key, json_t *mine, json_t *theirs)
{
    static const char *const lows[] = {"minItems", "minLength", "minimum", "exclusiveMinimum"};
    static const char *const highs[] = {"maxItems", "maxLength", "maximum", "exclusiveMaximum"};

    if (json_equal(mine, theirs)) {
        return true;
    }
    if (is_in(key, lows, 4) && json_is_number(mine) && json_is_number(theirs)) {
        return json_number_value(theirs) <= json_number_value(mine) ||
               json_object_set(to, key, theirs) == 0;
    }
    if (is_in(key, highs, 4) && json_is_number(mine) && json_is_number(theirs)) {
        return json_number_value(theirs) >= json_number_value(mine) ||
               json_object_set(to, key, theirs) == 0;
    }
    if (strcmp(key, "type") == 0) {
        json_t *x = json_pack("{s:O}", "type", mine), *y = json_pack("{s:O}", "type", theirs);
        unsigned a = 0, b = 0;
        const bool ok = dmk_schema__types(x, &a) == 0 && dmk_schema__types(y, &b) == 0 &&
                        json_object_set_new(to, key, type_list(a & b)) == 0;

        json_decref(x);
        json_decref(y);
        return ok;
    }
    if (strcmp(key, "enum") == 0) {
        return json_object_set_new(to, key, dmk_schema__common_values(mine, theirs)) == 0;
    }
    if (strcmp(key, "items") == 0 && !json_is_array(mine) && !json_is_array(theirs)) {
        return json_object_set_new(to, key, both(mine, theirs)) == 0;
    }
    return false;
}

static bool is_object_key(const char *key)
{
    return strcmp(key, "properties") == 0 || strcmp(key, "required") == 0 ||
           strcmp(key, "additionalProperties") == 0;
}

/* const is an enum of one; nullable is a type more. */
static json_t *normalise(json_t *schema)
{
    json_t *copy = json_copy(schema);
    json_t *value = json_object_get(copy, "const");
    unsigned types = 0;

    if (value) {
        (void)json_object_set_new(copy, "enum", json_pack("[O]", value));
        (void)json_object_del(copy, "const");
    }
    if (json_is_true(json_object_get(copy, "nullable")) && json_object_get(copy, "type") &&
        dmk_schema__types(copy, &types) == 0) {
        (void)json_object_set_new(copy, "type", type_list(types | DMK_TYPE_NULL));
    }
    (void)json_object_del(copy, "nullable");
    (void)json_object_del(copy, "$ref");
    (void)json_object_del(copy, "allOf");
    return copy;
}

static int merge(struct dmk_schemas *s, const struct dmk_job *job, json_t *to, json_t *from)
{
    const char *key;
    json_t *theirs;
    bool objects = false;

    json_object_foreach(from, key, theirs)
    {
        json_t *mine = json_object_get(to, key);

        if (is_annotation(key)) {
            continue;
        }
        if (is_object_key(key)) {
            objects = true;
        } else if (!mine) {
            (void)json_object_set(to, key, theirs);
        } else if (!merge_key(to, key, mine, theirs)) {
            return dmk_schema__bad(s, job,
                                   "two values of \"%s\" can not be joined by allOf or $ref", key);
        }
    }
    /* The side that lists nothing may still say what else there may be. */
    if (objects && (merge_properties(to, from) != 0 || merge_required(to, from) != 0)) {
        return dmk_schema__bad(s, job, "there is no memory for it");
    }
    return 0;
}

int dmk_schema__flatten(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                        json_t **ret)
{
    json_t *parts[MAX_FLATTEN];
    json_t *whole;
    unsigned n = 1, n_seen = 0;
    int r = 0;

    if (!json_object_get(schema, "$ref") && !json_object_get(schema, "allOf") &&
        !json_object_get(schema, "const") && !json_object_get(schema, "nullable")) {
        *ret = schema;
        return 0;
    }
    whole = json_object();
    if (!dmk_schema__own(s, whole)) {
        return dmk_schema__bad(s, job, "the schema has too many parts");
    }
    parts[0] = schema;
    while (n > 0 && r == 0) {
        json_t *part = parts[--n];
        const json_t *ref = json_object_get(part, "$ref");
        json_t *all = json_object_get(part, "allOf");
        json_t *own;

        if (++n_seen > MAX_FLATTEN) {
            return dmk_schema__bad(s, job, "$ref and allOf lead on without end");
        }
        if (json_is_true(part)) {
            continue;
        }
        if (!json_is_object(part) || (ref && !json_is_string(ref)) ||
            (all && !json_is_array(all))) {
            return dmk_schema__bad(s, job, "a part of allOf or $ref is not a schema");
        }
        if (n + json_array_size(all) + 1 > MAX_FLATTEN) {
            return dmk_schema__bad(s, job, "\"allOf\" has too many parts");
        }
        for (size_t i = json_array_size(all); i-- > 0;) {
            parts[n++] = json_array_get(all, i);
        }
        if (ref) {
            json_t *target = dmk_schema__resolve(job->root, json_string_value(ref));

            if (!target) {
                return dmk_schema__bad(s, job, "\"$ref\" \"%.80s\" leads nowhere in this schema",
                                       json_string_value(ref));
            }
            parts[n++] = target;
        }
        own = normalise(part);
        r = own ? merge(s, job, whole, own) : -DMK_ENOMEM;
        json_decref(own);
    }
    *ret = whole;
    return r;
}
