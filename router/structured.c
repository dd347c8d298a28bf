/* Response formats and tool choices; see structured.h. */
#include "router/structured.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "router/fields.h"

#define MAX_NAME_BYTES    64
#define MAX_TEXT_BYTES    4096
#define MAX_ALLOWED_TOOLS 512

static bool is_word(const json_t *v, const char *word)
{
    return json_is_string(v) && strcmp(json_string_value(v), word) == 0;
}

/* ---------------------------------------------------------------- response formats */

/* Letters, digits, '_' and '-'. */
static bool is_format_name(struct dmk_str s)
{
    for (size_t i = 0; i < s.len; i++) {
        const char c = s.data[i];

        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              c == '_' || c == '-')) {
            return false;
        }
    }
    return s.len > 0 && s.len <= MAX_NAME_BYTES;
}

static int read_schema(const json_t *body, const char *prefix, struct dmk_conv *conv,
                       struct dmk_api_error *reterr)
{
    struct dmk_conv_view *view = dmk_conv_edit(conv);
    json_t *schema = dmk_field_get(body, "schema");
    struct dmk_str name = {0}, description = {0};
    char param[160];
    bool strict = false;
    int rc;

    if ((rc = dmk_field_str(body, prefix, "name", MAX_NAME_BYTES, &name, reterr)) < 0 ||
        (rc = dmk_field_str(body, prefix, "description", MAX_TEXT_BYTES, &description, reterr)) <
            0 ||
        (rc = dmk_field_bool(body, prefix, "strict", &strict, reterr)) < 0) {
        return rc;
    }
    (void)snprintf(param, sizeof(param), "%sname", prefix);
    if (!is_format_name(name)) {
        return dmk_api_bad(reterr, param, "%s must have 1 to %d letters, digits, _ or -", param,
                           MAX_NAME_BYTES);
    }
    (void)snprintf(param, sizeof(param), "%sschema", prefix);
    if (!json_is_object(schema)) {
        return dmk_api_bad(reterr, param, "%s must be a JSON schema", param);
    }
    view->response_format_name = dmk_conv_copy(conv, name);
    view->response_format_description = dmk_conv_copy(conv, description);
    view->response_schema = json_incref(schema);
    view->output = DMK_OUTPUT_JSON_SCHEMA;
    return 0;
}

int dmk_structured_format(const json_t *v, const char *param, struct dmk_conv *conv,
                          struct dmk_api_error *reterr)
{
    const json_t *type = json_object_get(v, "type");
    const json_t *nested = dmk_field_get(v, "json_schema");
    char prefix[128];

    if (!v || is_word(type, "text")) {
        return 0;
    }
    dmk_conv_edit(conv)->output_param = dmk_conv_copy(conv, dmk_str_from(param));
    if (is_word(type, "json_object")) {
        dmk_conv_edit(conv)->output = DMK_OUTPUT_JSON_OBJECT;
        return 0;
    }
    if (!is_word(type, "json_schema")) {
        (void)snprintf(prefix, sizeof(prefix), "%s.type", param);
        return dmk_api_bad(reterr, prefix,
                           "%s must be \"text\", \"json_object\" or \"json_schema\"", prefix);
    }
    if (nested && !json_is_object(nested)) {
        (void)snprintf(prefix, sizeof(prefix), "%s.json_schema", param);
        return dmk_api_bad(reterr, prefix, "%s must be an object with name and schema", prefix);
    }
    (void)snprintf(prefix, sizeof(prefix), nested ? "%s.json_schema." : "%s.", param);
    return read_schema(nested ? nested : v, prefix, conv, reterr);
}

/* ---------------------------------------------------------------- tool choices */

/* The name in {"type": "function", "function": {"name"}} or {"type": "function", "name"}. */
static int read_name(const json_t *v, const char *param, struct dmk_str *ret,
                     struct dmk_api_error *reterr)
{
    const json_t *fn = dmk_field_get(v, "function");
    const json_t *name = dmk_field_get(fn ? fn : v, "name");

    if (!is_word(json_object_get(v, "type"), "function") || !json_is_string(name)) {
        return dmk_api_bad(reterr, param, "%s must name a function", param);
    }
    *ret = dmk_field_text(name);
    return 0;
}

static int unknown_tool(const char *param, struct dmk_str name, struct dmk_api_error *reterr)
{
    char quoted[68];

    return dmk_api_bad(reterr, param, "%s names the function \"%s\", which tools does not have",
                       param, dmk_api_quote(name, quoted));
}

static int choose_named(const json_t *v, const char *param, struct dmk_conv *conv,
                        struct dmk_api_error *reterr)
{
    struct dmk_conv_view *view = dmk_conv_edit(conv);
    struct dmk_str name = {0};
    size_t i;
    const int rc = read_name(v, param, &name, reterr);

    if (rc < 0) {
        return rc;
    }
    view->tool_choice = DMK_TOOLS_NAMED;
    view->forced_tool = dmk_conv_copy(conv, name);
    return dmk_conv_allow_tools(conv, &name, 1, &i) < 0 ? unknown_tool(param, name, reterr) : 0;
}

static int choose_allowed(const json_t *v, const char *param, struct dmk_conv *conv,
                          struct dmk_api_error *reterr)
{
    const json_t *nested = dmk_field_get(v, "allowed_tools");
    const json_t *body = nested ? nested : v;
    const json_t *mode = dmk_field_get(body, "mode");
    const json_t *list = dmk_field_get(body, "tools");
    const size_t n = json_array_size(list);
    struct dmk_str names[MAX_ALLOWED_TOOLS];
    char at[160];
    size_t unknown = 0;
    int rc;

    if (!json_is_array(list) || n == 0 || n > MAX_ALLOWED_TOOLS) {
        return dmk_api_bad(reterr, param, "%s must have a list of 1 to %d tools", param,
                           MAX_ALLOWED_TOOLS);
    }
    if (mode && !is_word(mode, "auto") && !is_word(mode, "required")) {
        return dmk_api_bad(reterr, param, "%s: mode must be \"auto\" or \"required\"", param);
    }
    for (size_t i = 0; i < n; i++) {
        (void)snprintf(at, sizeof(at), "%s.tools[%zu]", param, i);
        rc = read_name(json_array_get(list, i), at, &names[i], reterr);
        if (rc < 0) {
            return rc;
        }
    }
    if (is_word(mode, "required")) {
        dmk_conv_edit(conv)->tool_choice = DMK_TOOLS_REQUIRED;
    }
    rc = dmk_conv_allow_tools(conv, names, n, &unknown);
    return rc < 0 ? unknown_tool(param, names[unknown], reterr) : 0;
}

int dmk_structured_tool_choice(const json_t *v, const char *param, struct dmk_conv *conv,
                               struct dmk_api_error *reterr)
{
    struct dmk_conv_view *view = dmk_conv_edit(conv);

    if (!v || is_word(v, "auto")) {
        return 0;
    }
    if (is_word(v, "none")) {
        view->tool_choice = DMK_TOOLS_NONE;
        return 0;
    }
    if (is_word(v, "required")) {
        view->tool_choice = DMK_TOOLS_REQUIRED;
        return view->n_tools > 0
                   ? 0
                   : dmk_api_bad(reterr, param, "%s is \"required\" without tools", param);
    }
    if (is_word(json_object_get(v, "type"), "function")) {
        return choose_named(v, param, conv, reterr);
    }
    if (is_word(json_object_get(v, "type"), "allowed_tools")) {
        return choose_allowed(v, param, conv, reterr);
    }
    return dmk_api_bad(reterr, param,
                       "%s must be \"auto\", \"none\", \"required\", a function or allowed_tools",
                       param);
}

/* ---------------------------------------------------------------- structured_outputs */

#define MAX_CHOICES 1024

static int read_choices(const json_t *v, const char *param, enum dmk_constraint_scope scope,
                        struct dmk_buf *out, struct dmk_api_error *reterr)
{
    struct dmk_str list[MAX_CHOICES];
    const size_t n = json_array_size(v);

    if (n == 0 || n > MAX_CHOICES) {
        return dmk_api_bad(reterr, param, "%s must be a list of 1 to %d texts", param, MAX_CHOICES);
    }
    for (size_t i = 0; i < n; i++) {
        if (!json_is_string(json_array_get(v, i))) {
            return dmk_api_bad(reterr, param, "%s[%zu] must be a string", param, i);
        }
        list[i] = dmk_field_text(json_array_get(v, i));
    }
    return dmk_constraint_from_choice(list, n, param, scope, out, reterr);
}

/* What may come as text or as the object itself: its text, on the heap. */
static int take_object(const json_t *v, const char *param, char **ret, struct dmk_api_error *reterr)
{
    if (!json_is_string(v) && !json_is_object(v)) {
        return dmk_api_bad(reterr, param, "%s must be an object, or the text of one", param);
    }
    *ret = json_is_string(v) ? strdup(json_string_value(v)) : json_dumps(v, JSON_COMPACT);
    return *ret ? 0 : dmk_api_fail(reterr, 500, "out_of_memory", "no memory for the constraint");
}

static int read_schema_text(const json_t *v, const char *param, enum dmk_constraint_scope scope,
                            struct dmk_buf *out, struct dmk_api_error *reterr)
{
    char *text = NULL;
    int rc = take_object(v, param, &text, reterr);

    rc = rc < 0 ? rc
                : dmk_constraint_from_json_schema(dmk_str_from(text), param, scope, out, reterr);
    free(text);
    return rc;
}

static int read_tag(const json_t *v, const char *param, enum dmk_constraint_scope scope,
                    struct dmk_buf *out, struct dmk_api_error *reterr)
{
    char *text = NULL;
    int rc = take_object(v, param, &text, reterr);

    (void)scope; /* a tag says itself what it is about */
    rc = rc < 0 ? rc : dmk_constraint_from_structural_tag(dmk_str_from(text), param, out, reterr);
    free(text);
    return rc;
}

static int read_regex(const json_t *v, const char *param, enum dmk_constraint_scope scope,
                      struct dmk_buf *out, struct dmk_api_error *reterr)
{
    return json_is_string(v)
               ? dmk_constraint_from_regex(dmk_field_text(v), param, scope, out, reterr)
               : dmk_api_bad(reterr, param, "%s must be a string", param);
}

static int read_grammar(const json_t *v, const char *param, enum dmk_constraint_scope scope,
                        struct dmk_buf *out, struct dmk_api_error *reterr)
{
    return json_is_string(v)
               ? dmk_constraint_from_grammar(dmk_field_text(v), param, scope, out, reterr)
               : dmk_api_bad(reterr, param, "%s must be a string", param);
}

static int read_any_object(const json_t *v, const char *param, enum dmk_constraint_scope scope,
                           struct dmk_buf *out, struct dmk_api_error *reterr)
{
    return json_is_true(v) ? dmk_constraint_from_json_object(scope, out, reterr)
                           : dmk_api_bad(reterr, param, "%s must be true or false", param);
}

int dmk_structured_outputs(const json_t *v, enum dmk_constraint_scope scope, struct dmk_buf *out,
                           struct dmk_api_error *reterr)
{
    static const struct kind {
        const char *name;
        int (*read)(const json_t *v, const char *param, enum dmk_constraint_scope scope,
                    struct dmk_buf *out, struct dmk_api_error *reterr);
    } kinds[] = {
        {"json", read_schema_text},       {"regex", read_regex},
        {"choice", read_choices},         {"grammar", read_grammar},
        {"json_object", read_any_object}, {"structural_tag", read_tag},
    };
    const struct kind *kind = NULL;
    size_t n = 0;
    char param[64];

    if (!v) {
        return 0;
    }
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        const json_t *member = dmk_field_get(v, kinds[i].name);

        if (member && !json_is_false(member)) {
            kind = &kinds[i];
            n++;
        }
    }
    if (n != 1) {
        return dmk_api_bad(reterr, "structured_outputs",
                           "structured_outputs must be an object with one of json, regex, choice, "
                           "grammar, json_object and structural_tag");
    }
    (void)snprintf(param, sizeof(param), "structured_outputs.%s", kind->name);
    return kind->read(dmk_field_get(v, kind->name), param, scope, out, reterr);
}
