/* Pieces of conversations as JSON has them; see conv_in.h. */
#include "router/conv_in.h"

#include <stdio.h>
#include "router/fields.h"

#define MAX_NAME_BYTES 64
#define MAX_CALLS      8192
#define MAX_LEVELS     64

struct path {
    char text[96];
};

/* Sentences name the whole path; error.param is cut at the same length. */
static struct path path_of(const char *prefix, const char *key)
{
    struct path p;

    (void)snprintf(p.text, sizeof(p.text), "%s%s", prefix, key);
    return p;
}

bool dmk_conv_in_is_name(struct dmk_str s)
{
    for (size_t i = 0; i < s.len; i++) {
        const unsigned char c = (unsigned char)s.data[i];

        if (c <= 0x20 || c == 0x7f || c == '<' || c == '>' || c == '|' || c == '\\' || c == '/') {
            return false;
        }
    }
    return s.len > 0 && s.len <= MAX_NAME_BYTES;
}

static bool is_function_name(struct dmk_str s)
{
    for (size_t i = 0; i < s.len; i++) {
        const char c = s.data[i];

        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              c == '_' || c == '-' || c == '.')) {
            return false;
        }
    }
    return s.len > 0 && s.len <= MAX_NAME_BYTES;
}

static int check_function_name(struct dmk_conv_in *in, const json_t *name, const char *param)
{
    if (!json_is_string(name) || !is_function_name(dmk_field_text(name))) {
        return dmk_api_bad(in->err, param, "%s must have 1 to %d letters, digits, _, - or .", param,
                           MAX_NAME_BYTES);
    }
    return 0;
}

int dmk_conv_in_too_big(struct dmk_conv_in *in)
{
    return dmk_api_bad(in->err, "messages", "the conversation is larger than %zu bytes",
                       in->limits->max_conv_bytes);
}

int dmk_conv_in_copy(struct dmk_conv_in *in, const json_t *string, struct dmk_str *ret)
{
    *ret = dmk_conv_copy(in->conv, dmk_field_text(string));
    return dmk_conv_failed(in->conv) ? dmk_conv_in_too_big(in) : 0;
}

/* Types of parts that are text, and the member that holds it. */
static const char *const kinds[][2] = {
    {"text", "text"}, {"input_text", "text"}, {"output_text", "text"}, {"refusal", "refusal"}};

/* The text of a part, or NULL when it is none. */
static const json_t *text_of_part(const json_t *part)
{
    const json_t *type = json_object_get(part, "type");

    for (size_t i = 0; json_is_string(type) && i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (strcmp(json_string_value(type), kinds[i][0]) == 0) {
            const json_t *text = json_object_get(part, kinds[i][1]);

            return json_is_string(text) ? text : NULL;
        }
    }
    return NULL;
}

static int refuse_part(struct dmk_conv_in *in, const json_t *part, const char *at, size_t i)
{
    const json_t *type = json_object_get(part, "type");
    char param[96];
    char quoted[68];

    for (size_t k = 0; json_is_string(type) && k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        if (strcmp(json_string_value(type), kinds[k][0]) == 0) {
            (void)snprintf(param, sizeof(param), "%s[%zu].%s", at, i, kinds[k][1]);
            return dmk_api_bad(in->err, param, "%s must be a string", param);
        }
    }
    if (json_is_string(type)) {
        (void)snprintf(param, sizeof(param), "%s[%zu].type", at, i);
        return dmk_api_bad(in->err, param,
                           "%s is \"%s\"; only parts {\"type\": \"text\", \"text\": \"...\"} are "
                           "supported",
                           param, dmk_api_quote(dmk_field_text(type), quoted));
    }
    (void)snprintf(param, sizeof(param), "%s[%zu]", at, i);
    return dmk_api_bad(in->err, param, "%s must be a part {\"type\": \"text\", \"text\": \"...\"}",
                       param);
}

int dmk_conv_in_text(struct dmk_conv_in *in, const json_t *v, const char *at, struct dmk_str *ret)
{
    struct dmk_buf joined;
    int rc = 0;

    if (json_is_string(v)) {
        return dmk_conv_in_copy(in, v, ret);
    }
    if (!json_is_array(v)) {
        return dmk_api_bad(in->err, at, "%s must be a string or a list of text parts", at);
    }
    dmk_buf_init(&joined, in->limits->max_conv_bytes);
    for (size_t i = 0; i < json_array_size(v) && rc == 0; i++) {
        const json_t *part = json_array_get(v, i);
        const json_t *text = text_of_part(part);

        if (text) {
            dmk_buf_append_str(&joined, dmk_field_text(text));
        } else {
            rc = refuse_part(in, part, at, i);
        }
    }
    if (rc == 0) {
        *ret = dmk_conv_copy(in->conv, dmk_buf_str(&joined));
        rc = joined.failed || dmk_conv_failed(in->conv) ? dmk_conv_in_too_big(in) : 0;
    }
    dmk_buf_fini(&joined);
    return rc;
}

int dmk_conv_in_call(struct dmk_conv_in *in, struct dmk_message *m, const json_t *v, const char *at,
                     const char *id_key, const json_t *fn, const char *prefix)
{
    const json_t *id = json_object_get(v, id_key);
    const json_t *name = json_object_get(fn, "name");
    const json_t *arguments = json_object_get(fn, "arguments");
    const struct path id_path = path_of(at, id_key);
    const struct path arguments_path = path_of(prefix, "arguments");
    struct dmk_tool_call *call;
    int rc;

    if (!json_is_string(id)) {
        return dmk_api_bad(in->err, id_path.text, "%s must be a string", id_path.text);
    }
    rc = check_function_name(in, name, path_of(prefix, "name").text);
    if (rc < 0) {
        return rc;
    }
    /* Verbatim, be it JSON or not: a call that the model broke must not end the conversation. */
    if (!json_is_string(arguments)) {
        return dmk_api_bad(in->err, arguments_path.text, "%s must be a string of JSON%s",
                           arguments_path.text, json_is_object(arguments) ? ", not an object" : "");
    }
    if (++in->n_calls > MAX_CALLS) {
        return dmk_api_bad(in->err, "messages", "the conversation has more than %d tool calls",
                           MAX_CALLS);
    }
    call = dmk_conv_add_call(in->conv, m);
    if (!call) {
        return dmk_conv_in_too_big(in);
    }
    call->id = dmk_conv_copy(in->conv, dmk_field_text(id));
    call->name = dmk_conv_copy(in->conv, dmk_field_text(name));
    return dmk_conv_in_copy(in, arguments, &call->arguments);
}

/* The function's name stands in the call that this result answers. */
static struct dmk_str find_call_name(const struct dmk_conv *conv, struct dmk_str id)
{
    const struct dmk_conv_view *view = dmk_conv_view(conv);

    for (size_t i = view->n_messages; i-- > 0;) {
        const struct dmk_message *m = &view->messages[i];

        for (size_t k = m->n_calls; k-- > 0;) {
            if (dmk_str_equal(m->calls[k].id, id)) {
                return m->calls[k].name;
            }
        }
    }
    return (struct dmk_str){0};
}

int dmk_conv_in_answer(struct dmk_conv_in *in, struct dmk_message *m, const json_t *id,
                       const char *param)
{
    struct dmk_str name;
    char quoted[68];

    if (!json_is_string(id)) {
        return dmk_api_bad(in->err, param, "%s must name the tool call that is answered", param);
    }
    m->call_id = dmk_conv_copy(in->conv, dmk_field_text(id));
    name = find_call_name(in->conv, dmk_field_text(id));
    if (name.len > 0) {
        m->name = name;
    }
    if (m->name.len == 0) {
        return dmk_api_bad(in->err, param, "%s is \"%s\", which no earlier tool call has", param,
                           dmk_api_quote(dmk_field_text(id), quoted));
    }
    return dmk_conv_failed(in->conv) ? dmk_conv_in_too_big(in) : 0;
}

/* Levels of objects and lists; counts no further than max + 1 <= MAX_LEVELS. */
static uint32_t count_levels(const json_t *root, uint32_t max)
{
    struct {
        const json_t *value;
        void *member; /* of an object: the next one */
        size_t index; /* of a list */
    } stack[MAX_LEVELS];
    uint32_t depth = 0, deepest = 0;
    const json_t *v = root;

    for (;;) {
        if (json_is_object(v) || json_is_array(v)) {
            stack[depth].value = v;
            stack[depth].member = json_object_iter((json_t *)(uintptr_t)v);
            stack[depth].index = 0;
            depth++;
            deepest = depth > deepest ? depth : deepest;
            if (deepest > max) {
                return deepest;
            }
        }
        v = NULL;
        while (depth > 0 && !v) {
            const json_t *top = stack[depth - 1].value;

            if (json_is_object(top) && stack[depth - 1].member) {
                v = json_object_iter_value(stack[depth - 1].member);
                stack[depth - 1].member =
                    json_object_iter_next((json_t *)(uintptr_t)top, stack[depth - 1].member);
            } else if (json_is_array(top)) {
                v = json_array_get(top, stack[depth - 1].index++);
            }
            depth -= v == NULL;
        }
        if (!v) {
            return deepest;
        }
    }
}

int dmk_conv_in_schema(const json_t *schema, const struct dmk_api_limits *limits, const char *param,
                       struct dmk_api_error *reterr)
{
    if (!json_is_object(schema)) {
        return dmk_api_bad(reterr, param, "%s must be a JSON schema, that is an object", param);
    }
    if (limits->max_schema_depth > 0 &&
        count_levels(schema, limits->max_schema_depth) > limits->max_schema_depth) {
        return dmk_api_bad(reterr, param, "%s is nested deeper than %u levels", param,
                           limits->max_schema_depth);
    }
    if (limits->max_schema_bytes > 0 &&
        json_dumpb(schema, NULL, 0, JSON_COMPACT) > limits->max_schema_bytes) {
        return dmk_api_bad(reterr, param, "%s has more than %zu bytes", param,
                           limits->max_schema_bytes);
    }
    return 0;
}

int dmk_conv_in_tool(struct dmk_conv_in *in, const json_t *fn, const char *prefix)
{
    const json_t *name = json_object_get(fn, "name");
    json_t *parameters = dmk_field_get(fn, "parameters");
    struct dmk_str description = {0};
    bool strict = false;
    struct dmk_tool *tool;
    int rc;

    if ((rc = check_function_name(in, name, path_of(prefix, "name").text)) < 0 ||
        (rc = dmk_field_str(fn, prefix, "description", in->limits->max_conv_bytes, &description,
                            in->err)) < 0 ||
        (rc = dmk_field_bool(fn, prefix, "strict", &strict, in->err)) < 0) {
        return rc;
    }
    if (parameters && (rc = dmk_conv_in_schema(parameters, in->limits,
                                               path_of(prefix, "parameters").text, in->err)) < 0) {
        return rc;
    }
    tool = dmk_conv_add_tool(in->conv);
    if (!tool) {
        return dmk_conv_in_too_big(in);
    }
    tool->name = dmk_conv_copy(in->conv, dmk_field_text(name));
    tool->description = dmk_conv_copy(in->conv, description);
    tool->parameters = json_incref(parameters);
    tool->strict = strict;
    return 0;
}

int dmk_conv_in_effort(struct dmk_conv_in *in, const json_t *v, const char *param)
{
    static const char *const words[] = {"low", "medium", "high"};
    static const enum dmk_effort efforts[] = {DMK_EFFORT_LOW, DMK_EFFORT_MEDIUM, DMK_EFFORT_HIGH};

    dmk_conv_edit(in->conv)->effort = DMK_EFFORT_MEDIUM;
    if (!v) {
        return 0;
    }
    for (size_t i = 0; json_is_string(v) && i < sizeof(words) / sizeof(words[0]); i++) {
        if (strcmp(json_string_value(v), words[i]) == 0) {
            dmk_conv_edit(in->conv)->effort = efforts[i];
            return 0;
        }
    }
    return dmk_api_bad_code(in->err, "unsupported_value", param,
                            "%s must be \"low\", \"medium\" or \"high\"", param);
}
