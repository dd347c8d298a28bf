/* The served description of the HTTP API; see openapi.h. */
#include "router/openapi.h"

#include <stdio.h>
#include <stdlib.h>

/* "type": [name, "null"]: absent and null are the same everywhere. */
static json_t *nullable(const char *name)
{
    return json_pack("{s:[s, s]}", "type", name, "null");
}

static void set_about(json_t *schema, const char *about)
{
    if (about) {
        (void)json_object_set_new(schema, "description", json_string(about));
    }
}

static json_t *number(double value, bool whole)
{
    return whole ? json_integer(value >= 0x1p63 ? INT64_MAX : (json_int_t)value) : json_real(value);
}

static json_t *schema_of_field(const struct dmk_field *f)
{
    static const char *const types[] = {[DMK_KIND_REAL] = "number",
                                        [DMK_KIND_INT] = "integer",
                                        [DMK_KIND_BOOL] = "boolean",
                                        [DMK_KIND_TEXT] = "string",
                                        [DMK_KIND_STRINGS] = "object"};
    json_t *schema = nullable(types[f->kind]);
    const bool whole = f->kind == DMK_KIND_INT;

    if (f->kind == DMK_KIND_REAL || whole) {
        (void)json_object_set_new(schema, f->above ? "exclusiveMinimum" : "minimum",
                                  number(f->min, whole));
        (void)json_object_set_new(schema, "maximum", number(f->max, whole));
    } else if (f->kind == DMK_KIND_TEXT) {
        const size_t bound = f->size > 0 ? f->size - 1 : (size_t)f->max;

        (void)json_object_set_new(schema, "maxLength", json_integer((json_int_t)bound));
    } else if (f->kind == DMK_KIND_STRINGS) {
        (void)json_object_set_new(schema, "additionalProperties",
                                  json_pack("{s:s}", "type", "string"));
    }
    set_about(schema, f->about);
    return schema;
}

static json_t *schema_of_refused(const struct dmk_field_refused *refused)
{
    json_t *values = json_array();
    json_t *schema;

    if (refused->neutral) {
        json_t *v = json_loads(refused->neutral, JSON_DECODE_ANY, NULL);

        (void)json_array_append_new(values, v ? v : json_string(refused->neutral));
    }
    (void)json_array_append_new(values, json_null());
    schema = json_pack("{s:o}", "enum", values);
    set_about(schema, "Not available: only what means the same as without it is taken.");
    return schema;
}

static void add_fields(json_t *properties, const struct dmk_field *fields, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (!json_object_get(properties, fields[i].key)) {
            (void)json_object_set_new(properties, fields[i].key, schema_of_field(&fields[i]));
        }
    }
}

static void add_refused(json_t *properties, const struct dmk_field_refused *refused, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        (void)json_object_set_new(properties, refused[i].key, schema_of_refused(&refused[i]));
    }
}

static void add_tables(json_t *properties, const struct dmk_field_tables *tables)
{
    size_t n, n_refused;
    const struct dmk_field *sampling = dmk_fields_sampling(&n);
    const struct dmk_field_refused *refused = dmk_fields_refused(&n_refused);

    add_refused(properties, tables->refused, tables->n_refused);
    add_fields(properties, tables->fields, tables->n_fields);
    if (tables->samples) {
        add_fields(properties, sampling, n);
        add_refused(properties, refused, n_refused);
    }
}

/* optional: where no answer is sampled, the model may be left out. */
static json_t *schema_of_model(const struct dmk_router_conf *conf, bool optional)
{
    json_t *names = json_array();

    (void)json_array_append_new(names, json_string(conf->model_name));
    for (size_t i = 0; i < conf->model_aliases.n; i++) {
        (void)json_array_append_new(names, json_string(conf->model_aliases.items[i]));
    }
    if (optional) {
        (void)json_array_append_new(names, json_null());
    }
    return json_pack("{s:o, s:s}", "enum", names, "description",
                     "A name of /v1/models; any other is a 404.");
}

/* Failures that every path shares, with one form. */
static void add_failures(const char *method, json_t *operation)
{
    static const struct {
        const char *status, *about;
        bool body; /* only where a request has one, and work to do */
    } rows[] = {
        {"400", "The request is wrong, or asks for what is not available", false},
        {"401", "A key is missing or wrong", false},
        {"404", "No such model or path", false},
        {"408", "The request came too slowly", false},
        {"413", "The body is too large", true},
        {"415", "The body has a Content-Encoding, or comes from a web page and is no JSON", true},
        {"429", "The router's bounds are reached; Retry-After says when to come again", true},
        {"431", "The headers are too large", false},
        {"500", "A fault of this server", true},
        {"502", "A worker failed", true},
        {"503", "No worker can take the request; Retry-After says when to come again", true},
    };
    json_t *responses = json_object_get(operation, "responses");
    const bool post = strcmp(method, "post") == 0;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if ((post || !rows[i].body) && !json_object_get(responses, rows[i].status)) {
            (void)json_object_set_new(responses, rows[i].status,
                                      json_pack("{s:s, s:{s:{s:{s:s}}}}", "description",
                                                rows[i].about, "content", "application/json",
                                                "schema", "$ref", "#/components/schemas/Error"));
        }
    }
}

static void add_all_failures(json_t *root)
{
    json_t *path, *operation;
    const char *name, *method;

    json_object_foreach(json_object_get(root, "paths"), name, path)
    {
        json_object_foreach(path, method, operation)
        {
            add_failures(method, operation);
        }
    }
}

static void add_bodies(json_t *root, const struct dmk_router_conf *conf)
{
    json_t *schemas = json_object_get(json_object_get(root, "components"), "schemas");

    for (size_t i = 0; dmk_dialects[i]; i++) {
        const struct dmk_field_tables *tables = dmk_dialects[i]->tables;
        json_t *properties =
            tables ? json_object_get(json_object_get(schemas, tables->schema), "properties") : NULL;

        if (properties) {
            add_tables(properties, tables);
            (void)json_object_set_new(properties, "model", schema_of_model(conf, !tables->samples));
        }
    }
}

int dmk_openapi_build(const struct dmk_router_conf *conf, struct dmk_buf *out,
                      struct dmk_error *reterr)
{
    json_error_t error;
    json_t *root = json_loadb((const char *)dmk_openapi_json, dmk_openapi_json_size,
                              JSON_REJECT_DUPLICATES, &error);
    char *text;

    if (!root) {
        return dmk_error_set(reterr, -DMK_EINVAL, "the compiled-in description is no JSON: %s",
                             error.text);
    }
    add_bodies(root, conf);
    add_all_failures(root);
    if (conf->api_keys.n > 0 || conf->api_keys_file[0] || conf->admin_keys.n > 0 ||
        conf->admin_keys_file[0]) {
        (void)json_object_set_new(root, "security", json_pack("[{s:[]}]", "key"));
    }
    text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    if (text) {
        dmk_buf_puts(out, text);
    }
    if (!text || out->failed) {
        free(text);
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the description of the API");
    }
    free(text);
    return 0;
}
