/* The work list of subschemas, and which kind of rule each becomes; see schema.h. */
#include "common/schema/schema_impl.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/hash.h"

/* ---------------------------------------------------------------- the list */

struct dmk_schemas *dmk_schemas_new(struct dmk_build *build)
{
    struct dmk_schemas *s = calloc(1, sizeof(*s));

    if (s) {
        s->build = build;
        dmk_values_init(&s->values, build);
    }
    return s;
}

void dmk_schemas_free(struct dmk_schemas **schemas)
{
    struct dmk_schemas *s = *schemas;

    if (!s) {
        return;
    }
    for (uint32_t i = 0; i < s->n_jobs; i++) {
        free(s->jobs[i].key);
    }
    for (uint32_t i = 0; i < s->n_owned; i++) {
        json_decref(s->owned[i]);
    }
    free(s->jobs);
    free(s->owned);
    free(s->memo);
    free(s);
    *schemas = NULL;
}

/* The places from the root down, in front of the sentence. */
static void write_path(const struct dmk_schemas *s, const struct dmk_job *job, char ret[PATH_BYTES])
{
    uint32_t chain[32];
    unsigned n = 0;
    size_t at = 0;

    ret[0] = 0;
    for (; n < 32; job = &s->jobs[job->parent]) {
        chain[n++] = (uint32_t)(job - s->jobs);
        if (job->parent == (uint32_t)(job - s->jobs)) {
            break;
        }
    }
    while (n-- > 0 && at + 1 < PATH_BYTES) {
        const int len = snprintf(ret + at, PATH_BYTES - at, "%s%s", at ? "." : "",
                                 s->jobs[chain[n]].key ? s->jobs[chain[n]].key : "?");

        at += len > 0 ? (size_t)len : 0;
    }
}

int dmk_schema__bad(struct dmk_schemas *s, const struct dmk_job *job, const char *fmt, ...)
{
    char path[PATH_BYTES], text[DMK_ERROR_TEXT_BYTES / 2];
    va_list args;

    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    write_path(s, job, path);
    return dmk_error_set(s->err, -DMK_EINVAL, "%s: %s", path, text);
}

bool dmk_schema__own(struct dmk_schemas *s, json_t *schema)
{
    json_t **more;

    if (!schema || s->n_owned == MAX_OWNED) {
        json_decref(schema);
        return false;
    }
    if (s->n_owned == s->cap_owned) {
        more = realloc(s->owned, (s->cap_owned ? 2 * s->cap_owned : 32) * sizeof(json_t *));
        if (!more) {
            json_decref(schema);
            return false;
        }
        s->owned = more;
        s->cap_owned = s->cap_owned ? 2 * s->cap_owned : 32;
    }
    s->owned[s->n_owned++] = schema;
    return true;
}

/* The place of a schema in the table; its rule is DMK_BUILD_NO_MAX when it is new. */
static struct dmk_memo *find_memo(struct dmk_schemas *s, const json_t *schema)
{
    uint32_t at = (uint32_t)dmk_hash64(&schema, sizeof(void *), 0) & (s->cap_memo - 1);

    while (s->memo[at].schema && s->memo[at].schema != schema) {
        at = (at + 1) & (s->cap_memo - 1);
    }
    return &s->memo[at];
}

static int add_job(struct dmk_schemas *s, uint32_t parent, json_t *schema, json_t *root,
                   const char *key, uint32_t *ret)
{
    struct dmk_job *job;

    if (!s->memo) {
        s->cap_memo = 4 * MAX_JOBS;
        s->memo = calloc(s->cap_memo, sizeof(*s->memo));
        s->jobs = calloc(MAX_JOBS, sizeof(*s->jobs)); /* so that jobs do not move */
        if (!s->memo || !s->jobs) {
            return dmk_error_set(s->err, -DMK_ENOMEM, "there is no memory for the schema");
        }
    }
    if (s->n_jobs == MAX_JOBS) {
        return dmk_error_set(s->err, -DMK_EINVAL, "%s: the schema has more than %u parts", key,
                             MAX_JOBS);
    }
    job = &s->jobs[s->n_jobs];
    *job = (struct dmk_job){.schema = schema,
                            .root = root ? root : s->jobs[parent].root,
                            .rule = dmk_build_declare(s->build),
                            .parent = root ? s->n_jobs : parent,
                            .key = strdup(key)};
    s->n_jobs++;
    *find_memo(s, schema) = (struct dmk_memo){schema, job->rule};
    *ret = job->rule;
    return 0;
}

/* Schemas that every build shares. */
static bool find_shared(struct dmk_schemas *s, const json_t *schema, uint32_t *ret)
{
    const json_t *type = json_object_get(schema, "type");
    const char *key;
    json_t *value;

    if (dmk_schema__is_free(schema)) {
        *ret = dmk_values_any(&s->values);
        return true;
    }
    if (!json_is_string(type)) {
        return false;
    }
    json_object_foreach((json_t *)(uintptr_t)schema, key, value)
    {
        if (strcmp(key, "type") != 0 && strcmp(key, "title") != 0 &&
            strcmp(key, "description") != 0) {
            return false;
        }
    }
    if (strcmp(json_string_value(type), "string") == 0) {
        *ret = dmk_values_string(&s->values);
        return true;
    }
    if (strcmp(json_string_value(type), "number") == 0) {
        *ret = dmk_values_number(&s->values);
        return true;
    }
    return false;
}

int dmk_schema__rule(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                     const char *key, uint32_t *ret)
{
    const struct dmk_memo *known = find_memo(s, schema);

    if (known->schema) {
        *ret = known->rule;
        return 0;
    }
    if (!json_is_object(schema) && !json_is_boolean(schema)) {
        return dmk_schema__bad(s, job, "\"%s\" is not a schema", key);
    }
    if (json_is_false(schema)) {
        return dmk_schema__bad(s, job, "\"%s\" is false: nothing may stand there", key);
    }
    if (find_shared(s, schema, ret)) {
        return 0;
    }
    return add_job(s, (uint32_t)(job - s->jobs), schema, NULL, key, ret);
}

/* ---------------------------------------------------------------- kinds of rules */

static int check_keys(struct dmk_schemas *s, const struct dmk_job *job, const json_t *schema)
{
    const char *key = dmk_schema__refused(schema);
    const json_t *v;

    if (key) {
        return dmk_schema__bad(s, job, "the keyword \"%s\" is not supported", key);
    }
    v = json_object_get(schema, "uniqueItems");
    if (v && !json_is_false(v)) {
        return dmk_schema__bad(s, job, "the keyword \"uniqueItems\" is not supported");
    }
    v = json_object_get(schema, "minProperties");
    if (v && json_number_value(v) != 0) {
        return dmk_schema__bad(s, job, "the keyword \"minProperties\" is not supported");
    }
    v = json_object_get(schema, "multipleOf");
    if (v && json_number_value(v) != 1) {
        return dmk_schema__bad(s, job, "the keyword \"multipleOf\" is not supported");
    }
    return 0;
}

static int build_enum(struct dmk_schemas *s, const struct dmk_job *job, const json_t *schema)
{
    static const char *const beside[] = {
        "properties", "items",    "prefixItems", "pattern", "minLength",        "maxLength",
        "minItems",   "maxItems", "minimum",     "maximum", "exclusiveMinimum", "exclusiveMaximum"};
    const json_t *list = json_object_get(schema, "enum");
    struct dmk_build *b = s->build;
    unsigned types = DMK_TYPE_ALL;
    uint32_t in, out;
    size_t i;
    json_t *value;
    bool any = false;

    if (!json_is_array(list) || json_array_size(list) == 0 || json_array_size(list) > MAX_ENUM) {
        return dmk_schema__bad(
            s, job, "\"enum\" must be a list of 1 to %u values, all allowed here", MAX_ENUM);
    }
    for (i = 0; i < sizeof(beside) / sizeof(beside[0]); i++) {
        if (json_object_get(schema, beside[i])) {
            return dmk_schema__bad(s, job, "\"enum\" and \"%s\" are not supported together",
                                   beside[i]);
        }
    }
    if (json_object_get(schema, "type") && dmk_schema__types(schema, &types) < 0) {
        return dmk_schema__bad(s, job, "\"type\" is none that JSON Schema knows");
    }
    dmk_build_begin(b, job->rule);
    in = dmk_build_node(b);
    out = dmk_build_node(b);
    json_array_foreach(list, i, value)
    {
        struct dmk_piece piece;

        if (!(dmk_schema__type_of(value) & types)) {
            continue;
        }
        if (dmk_piece_literal(b, value, &piece) < 0) {
            return dmk_schema__bad(s, job, "a value of \"enum\" is too long");
        }
        dmk_build_skip(b, in, piece.in);
        dmk_build_skip(b, piece.out, out);
        any = true;
    }
    if (!any) {
        return dmk_schema__bad(s, job, "\"enum\" has no value of the type");
    }
    dmk_build_end(b, dmk_piece_nodes(b, in, out, in), 0, DMK_BUILD_NO_MAX);
    return 0;
}

/* Alternatives, each joined with what stands beside them. */
static int build_alternatives(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                              const char *key)
{
    json_t *list = json_object_get(schema, key);
    const size_t n = json_array_size(list);
    uint32_t rules[MAX_ALTERNATIVES] = {0};
    json_t *beside = json_copy(schema);
    char at[64];
    uint32_t in, out;

    if (!json_is_array(list) || n == 0 || n > MAX_ALTERNATIVES) {
        json_decref(beside);
        return dmk_schema__bad(s, job, "\"%s\" must be a list of 1 to %u schemas", key,
                               MAX_ALTERNATIVES);
    }
    (void)json_object_del(beside, key);
    if (!dmk_schema__own(s, beside)) {
        return dmk_schema__bad(s, job, "the schema has too many parts");
    }
    for (size_t i = 0; i < n; i++) {
        json_t *alternative = json_array_get(list, i);
        int r;

        for (size_t k = 0; k < i && strcmp(key, "oneOf") == 0; k++) {
            if (!dmk_schema__disjoint(s, job, json_array_get(list, k), alternative)) {
                return dmk_schema__bad(s, job,
                                       "the alternatives %zu and %zu of \"oneOf\" may hold at the "
                                       "same time; \"anyOf\" says that one is enough",
                                       k, i);
            }
        }
        if (!dmk_schema__is_free(beside)) {
            alternative = json_pack("{s:[O,O]}", "allOf", beside, alternative);
            if (!dmk_schema__own(s, alternative)) {
                return dmk_schema__bad(s, job, "the schema has too many parts");
            }
        }
        (void)snprintf(at, sizeof(at), "%s[%zu]", key, i);
        r = dmk_schema__rule(s, job, alternative, at, &rules[i]);
        if (r < 0) {
            return r;
        }
    }
    dmk_build_begin(s->build, job->rule);
    in = dmk_build_node(s->build);
    out = dmk_build_node(s->build);
    for (size_t i = 0; i < n; i++) {
        dmk_build_call(s->build, in, rules[i], out);
    }
    dmk_build_end(s->build, dmk_piece_nodes(s->build, in, out, in), 0, DMK_BUILD_NO_MAX);
    return 0;
}

/* A rule for the types: calls of objects, arrays and strings, the rest in place. */
static int build_types(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema)
{
    struct dmk_build *b = s->build;
    struct dmk_number_bounds bounds = {0};
    uint32_t rules[3] = {0}, n = 0, in, out;
    unsigned types;
    int r = 0;

    if (dmk_schema__types(schema, &types) < 0 || types == 0) {
        return dmk_schema__bad(s, job, "\"type\" is none that JSON Schema knows, or none is left");
    }
    if (types & DMK_TYPE_OBJECT) {
        r = dmk_schema__object(s, job, schema, &rules[n++]);
    }
    if (r == 0 && types & DMK_TYPE_ARRAY) {
        r = dmk_schema__array(s, job, schema, &rules[n++]);
    }
    if (r == 0 && types & DMK_TYPE_STRING) {
        r = dmk_schema__string(s, job, schema, &rules[n++]);
    }
    if (r == 0 && types & DMK_TYPE_NUMBER) {
        r = dmk_schema__bounds(s, job, schema, !(types & DMK_TYPE_FRACTION), &bounds);
    }
    if (r < 0) {
        return r;
    }
    dmk_build_begin(b, job->rule);
    in = dmk_build_node(b);
    out = dmk_build_node(b);
    for (uint32_t i = 0; i < n; i++) {
        dmk_build_call(b, in, rules[i], out);
    }
    if (types & DMK_TYPE_NUMBER) {
        const struct dmk_piece p = types & DMK_TYPE_FRACTION ? dmk_piece_number(b, &bounds)
                                                             : dmk_piece_integer(b, &bounds);

        dmk_build_skip(b, in, p.in);
        dmk_build_skip(b, p.out, out);
    }
    for (unsigned i = 0; i < 3; i++) {
        static const char *const words[] = {"true", "false", "null"};

        if (types & (i < 2 ? DMK_TYPE_BOOLEAN : DMK_TYPE_NULL)) {
            const struct dmk_piece p = dmk_piece_text(b, dmk_str_from(words[i]));

            dmk_build_skip(b, in, p.in);
            dmk_build_skip(b, p.out, out);
        }
    }
    dmk_build_end(b, dmk_piece_nodes(b, in, out, in), 0, DMK_BUILD_NO_MAX);
    return 0;
}

/* A lone reference is the rule of what it points to. */
static int build_reference(struct dmk_schemas *s, const struct dmk_job *job, const json_t *ref)
{
    json_t *target =
        json_is_string(ref) ? dmk_schema__resolve(job->root, json_string_value(ref)) : NULL;
    uint32_t rule;
    int r;

    if (!target) {
        return dmk_schema__bad(s, job, "\"$ref\" \"%.80s\" leads nowhere in this schema",
                               json_is_string(ref) ? json_string_value(ref) : "?");
    }
    r = dmk_schema__rule(s, job, target, json_string_value(ref), &rule);
    if (r == 0) {
        dmk_build_begin(s->build, job->rule);
        dmk_build_end(s->build, dmk_piece_call(s->build, rule), 0, DMK_BUILD_NO_MAX);
    }
    return r;
}

static int run_job(struct dmk_schemas *s, const struct dmk_job *job)
{
    json_t *ref = json_object_get(job->schema, "$ref");
    json_t *schema = job->schema;
    json_t *rest;
    bool lone = false;
    int r;

    if (dmk_schema__is_free(schema)) {
        dmk_build_begin(s->build, job->rule);
        dmk_build_end(s->build, dmk_piece_call(s->build, s->values.any), 0, DMK_BUILD_NO_MAX);
        return 0;
    }
    if (ref) {
        rest = json_copy(schema);
        (void)json_object_del(rest, "$ref");
        lone = dmk_schema__is_free(rest) && check_keys(s, job, rest) == 0;
        json_decref(rest);
    }
    if (lone) {
        return build_reference(s, job, ref);
    }
    r = dmk_schema__flatten(s, job, schema, &schema);
    r = r < 0 ? r : check_keys(s, job, schema);
    if (r < 0) {
        return r;
    }
    if (json_object_get(schema, "anyOf")) {
        return build_alternatives(s, job, schema, "anyOf");
    }
    if (json_object_get(schema, "oneOf")) {
        return build_alternatives(s, job, schema, "oneOf");
    }
    return json_object_get(schema, "enum") ? build_enum(s, job, schema)
                                           : build_types(s, job, schema);
}

/* ---------------------------------------------------------------- doors */

int dmk_schemas_add(struct dmk_schemas *s, json_t *schema, const char *path, uint32_t *ret_rule,
                    struct dmk_error *reterr)
{
    int r;

    s->err = reterr;
    if (!json_is_object(schema)) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s: a schema must be an object", path);
    }
    /* Rules that all share come first: no rule is under construction now. */
    (void)dmk_values_any(&s->values);
    r = add_job(s, s->n_jobs, schema, schema, path, ret_rule);
    while (r == 0 && s->n_done < s->n_jobs) {
        const struct dmk_job *job = &s->jobs[s->n_done++];

        r = run_job(s, job);
        if (r == 0 && dmk_build_failed(s->build)) {
            r = dmk_schema__bad(s, job, "%s", dmk_build_why(s->build));
        }
    }
    return r;
}

uint32_t dmk_schemas_any_object(struct dmk_schemas *s)
{
    return dmk_values_any_object(&s->values);
}
