/* Chat Completions: the body of POST /v1/chat/completions to a conversation.
 *
 * Pure, on a pool thread. The answer's form is in api_chat_out.c. What a client sends but this
 * server can not honour is refused by name; fields that nobody knows are ignored, so that newer
 * clients work. */
#include "router/api_chat.h"

#include <stdio.h>
#include <stdlib.h>
#include "router/fields.h"

#define MAX_NAME_BYTES 64
#define MAX_CALLS      8192

struct parse {
    const struct dmk_api_limits *limits;
    struct dmk_ask *ask;
    struct dmk_conv *conv;
    struct dmk_api_error *err;
    uint32_t n_calls;
};

static const struct dmk_field_refused refused[] = {
    {"functions", "[]"},
    {"function_call", "none"},
    {"audio", NULL},
    {"prediction", NULL},
    {"web_search_options", NULL},
    {"moderation", NULL},
    {"verbosity", "medium"},
    {"best_of", "1"},
    {"use_beam_search", "false"},
    {"length_penalty", "1"},
    {"include_stop_str_in_output", "false"},
    {"skip_special_tokens", "true"},
    {"echo", "false"},
    {"add_generation_prompt", "true"},
    {"continue_final_message", "false"},
    {"add_special_tokens", "false"},
    {"prompt_logprobs", NULL},
    {"documents", "[]"},
    {"chat_template", NULL},
    {"chat_template_kwargs", "{}"},
    {"guided_json", NULL},
    {"guided_regex", NULL},
    {"guided_choice", NULL},
    {"guided_grammar", NULL},
    {"structured_outputs", NULL},
    {"structural_tag", NULL},
    {"logits_processors", NULL},
    {"bad_words", "[]"},
    {"truncate_prompt_tokens", NULL},
    {"kv_transfer_params", NULL},
    {"bootstrap_host", NULL},
};

/* A name that goes into a message header: no white space, no part of a marker. */
static bool is_header_name(struct dmk_str s)
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

static int too_big(struct parse *p)
{
    return dmk_api_bad(p->err, "messages", "the conversation is larger than %zu bytes",
                       p->limits->max_conv_bytes);
}

/* Content as a string or a list of text parts, joined. Returns 1 when it is there, 0 when absent.
 * */
static int read_content(struct parse *p, const json_t *msg, const char *at, struct dmk_str *ret)
{
    const json_t *v = dmk_field_get(msg, "content");
    struct dmk_buf joined;
    char param[96];

    if (!v) {
        return 0;
    }
    if (json_is_string(v)) {
        *ret = dmk_conv_copy(p->conv, dmk_field_text(v));
        return dmk_conv_failed(p->conv) ? too_big(p) : 1;
    }
    if (!json_is_array(v)) {
        (void)snprintf(param, sizeof(param), "%s.content", at);
        return dmk_api_bad(p->err, param, "%s must be a string or a list of text parts", param);
    }
    dmk_buf_init(&joined, p->limits->max_conv_bytes);
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *part = json_array_get(v, i);
        const json_t *type = json_object_get(part, "type");
        const json_t *text = json_object_get(part, "text");
        char quoted[68];
        int rc;

        if (json_is_string(type) && json_is_string(text) &&
            (strcmp(json_string_value(type), "text") == 0 ||
             strcmp(json_string_value(type), "input_text") == 0 ||
             strcmp(json_string_value(type), "output_text") == 0)) {
            dmk_buf_append_str(&joined, dmk_field_text(text));
            continue;
        }
        if (json_is_string(type)) {
            (void)snprintf(param, sizeof(param), "%s.content[%zu].type", at, i);
            rc = dmk_api_bad(p->err, param,
                             "%s is \"%s\"; only parts {\"type\": \"text\", \"text\": \"...\"} are "
                             "supported",
                             param, dmk_api_quote(dmk_field_text(type), quoted));
        } else {
            (void)snprintf(param, sizeof(param), "%s.content[%zu]", at, i);
            rc = dmk_api_bad(p->err, param,
                             "%s must be a part {\"type\": \"text\", \"text\": \"...\"}", param);
        }
        dmk_buf_fini(&joined);
        return rc;
    }
    *ret = dmk_conv_copy(p->conv, dmk_buf_str(&joined));
    if (joined.failed || dmk_conv_failed(p->conv)) {
        dmk_buf_fini(&joined);
        return too_big(p);
    }
    dmk_buf_fini(&joined);
    return 1;
}

/* Arguments as a string, verbatim, or (some clients) as an object, printed compactly. */
static int read_arguments(struct parse *p, const json_t *v, const char *at, struct dmk_str *ret)
{
    char *text;

    if (json_is_string(v)) {
        *ret = dmk_conv_copy(p->conv, dmk_field_text(v));
        return dmk_conv_failed(p->conv) ? too_big(p) : 0;
    }
    if (!json_is_object(v)) {
        return dmk_api_bad(p->err, at, "%s must be a string of JSON", at);
    }
    text = json_dumps(v, JSON_COMPACT);
    if (!text) {
        return dmk_api_fail(p->err, 500, "out_of_memory", "no memory for the conversation");
    }
    *ret = dmk_conv_copy(p->conv, dmk_str_from(text));
    free(text);
    return dmk_conv_failed(p->conv) ? too_big(p) : 0;
}

static int read_call(struct parse *p, struct dmk_message *m, const json_t *v, const char *at)
{
    const json_t *fn = json_object_get(v, "function");
    const json_t *id = json_object_get(v, "id");
    const json_t *name = json_object_get(fn, "name");
    struct dmk_tool_call *call;
    char param[160];

    if (!json_is_object(v) || !json_is_object(fn)) {
        return dmk_api_bad(p->err, at,
                           "%s must be {\"id\", \"type\": \"function\", \"function\": {\"name\", "
                           "\"arguments\"}}",
                           at);
    }
    if (!json_is_string(id)) {
        (void)snprintf(param, sizeof(param), "%s.id", at);
        return dmk_api_bad(p->err, param, "%s must be a string", param);
    }
    if (!json_is_string(name) || !is_function_name(dmk_field_text(name))) {
        (void)snprintf(param, sizeof(param), "%s.function.name", at);
        return dmk_api_bad(p->err, param, "%s must have 1 to %d letters, digits, _, - or .", param,
                           MAX_NAME_BYTES);
    }
    if (++p->n_calls > MAX_CALLS) {
        return dmk_api_bad(p->err, "messages", "the conversation has more than %d tool calls",
                           MAX_CALLS);
    }
    call = dmk_conv_add_call(p->conv, m);
    if (!call) {
        return too_big(p);
    }
    call->id = dmk_conv_copy(p->conv, dmk_field_text(id));
    call->name = dmk_conv_copy(p->conv, dmk_field_text(name));
    (void)snprintf(param, sizeof(param), "%s.function.arguments", at);
    return read_arguments(p, json_object_get(fn, "arguments"), param, &call->arguments);
}

static int read_assistant(struct parse *p, struct dmk_message *m, const json_t *msg, const char *at)
{
    static const char *const keys[] = {"reasoning_content", "reasoning", "thinking"};
    const json_t *calls = dmk_field_get(msg, "tool_calls");
    char param[96];

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]) && m->reasoning.len == 0; i++) {
        const json_t *v = dmk_field_get(msg, keys[i]);

        if (v && !json_is_string(v)) {
            (void)snprintf(param, sizeof(param), "%s.%s", at, keys[i]);
            return dmk_api_bad(p->err, param, "%s must be a string", param);
        }
        if (v) {
            m->reasoning = dmk_conv_copy(p->conv, dmk_field_text(v));
        }
    }
    if (calls && !json_is_array(calls)) {
        (void)snprintf(param, sizeof(param), "%s.tool_calls", at);
        return dmk_api_bad(p->err, param, "%s must be a list", param);
    }
    for (size_t i = 0; i < json_array_size(calls); i++) {
        int rc;

        (void)snprintf(param, sizeof(param), "%s.tool_calls[%zu]", at, i);
        rc = read_call(p, m, json_array_get(calls, i), param);
        if (rc < 0) {
            return rc;
        }
    }
    if (!m->has_content && m->n_calls == 0 && m->reasoning.len == 0) {
        (void)snprintf(param, sizeof(param), "%s.content", at);
        return dmk_api_bad(p->err, param,
                           "%s is missing: an assistant message needs content or tool_calls",
                           param);
    }
    return 0;
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

static int read_tool_result(struct parse *p, struct dmk_message *m, const json_t *msg,
                            const char *at)
{
    const json_t *id = dmk_field_get(msg, "tool_call_id");
    struct dmk_str name;
    char param[96];
    char quoted[68];

    (void)snprintf(param, sizeof(param), "%s.tool_call_id", at);
    if (!json_is_string(id)) {
        return dmk_api_bad(p->err, param, "%s must name the tool call that is answered", param);
    }
    m->call_id = dmk_conv_copy(p->conv, dmk_field_text(id));
    name = find_call_name(p->conv, dmk_field_text(id));
    if (name.len > 0) {
        m->name = name;
    }
    if (m->name.len == 0) {
        return dmk_api_bad(p->err, param, "%s is \"%s\", which no earlier tool call has", param,
                           dmk_api_quote(dmk_field_text(id), quoted));
    }
    return 0;
}

static int read_role(struct parse *p, const json_t *msg, const char *at, enum dmk_role *ret)
{
    static const char *const words[] = {"system", "developer", "user", "assistant", "tool"};
    static const enum dmk_role roles[] = {DMK_ROLE_SYSTEM, DMK_ROLE_DEVELOPER, DMK_ROLE_USER,
                                          DMK_ROLE_ASSISTANT, DMK_ROLE_TOOL};
    const json_t *v = json_object_get(msg, "role");
    char param[96];

    for (size_t i = 0; json_is_string(v) && i < sizeof(roles) / sizeof(roles[0]); i++) {
        if (strcmp(json_string_value(v), words[i]) == 0) {
            *ret = roles[i];
            return 0;
        }
    }
    (void)snprintf(param, sizeof(param), "%s.role", at);
    return dmk_api_bad(p->err, param,
                       "%s must be \"system\", \"developer\", \"user\", \"assistant\" or \"tool\"",
                       param);
}

static int read_message(struct parse *p, const json_t *msg, const char *at)
{
    enum dmk_role role = DMK_ROLE_USER;
    struct dmk_message *m;
    const json_t *name;
    char param[96];
    int rc;

    if (!json_is_object(msg)) {
        return dmk_api_bad(p->err, at, "%s must be an object with role and content", at);
    }
    rc = read_role(p, msg, at, &role);
    if (rc < 0) {
        return rc;
    }
    m = dmk_conv_add_message(p->conv, role);
    if (!m) {
        return too_big(p);
    }
    name = dmk_field_get(msg, "name");
    if (name) {
        (void)snprintf(param, sizeof(param), "%s.name", at);
        if (!json_is_string(name) || !is_header_name(dmk_field_text(name))) {
            return dmk_api_bad(p->err, param,
                               "%s must have 1 to %d bytes without white space or any of <>|\\/",
                               param, MAX_NAME_BYTES);
        }
        m->name = dmk_conv_copy(p->conv, dmk_field_text(name));
    }
    rc = read_content(p, msg, at, &m->content);
    if (rc < 0) {
        return rc;
    }
    m->has_content = rc > 0;
    if (role == DMK_ROLE_ASSISTANT) {
        return read_assistant(p, m, msg, at);
    }
    if (!m->has_content) {
        (void)snprintf(param, sizeof(param), "%s.content", at);
        return dmk_api_bad(p->err, param, "%s is missing", param);
    }
    return role == DMK_ROLE_TOOL ? read_tool_result(p, m, msg, at) : 0;
}

static int read_messages(struct parse *p, const json_t *root)
{
    const json_t *list = dmk_field_get(root, "messages");
    char at[32];

    if (!json_is_array(list) || json_array_size(list) == 0) {
        return dmk_api_bad(p->err, "messages", "messages must be a list of at least one message");
    }
    if (json_array_size(list) > p->limits->max_messages) {
        return dmk_api_bad(p->err, "messages", "messages must have at most %u entries, not %zu",
                           p->limits->max_messages, json_array_size(list));
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        int rc;

        (void)snprintf(at, sizeof(at), "messages[%zu]", i);
        rc = read_message(p, json_array_get(list, i), at);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

static int read_tool(struct parse *p, const json_t *v, const char *at)
{
    const json_t *type = json_object_get(v, "type");
    const json_t *fn = json_object_get(v, "function");
    const json_t *name = json_object_get(fn, "name");
    json_t *parameters = dmk_field_get(fn, "parameters");
    struct dmk_str description = {0};
    bool strict = false;
    struct dmk_tool *tool;
    char param[96];
    int rc;

    if (!json_is_string(type) || strcmp(json_string_value(type), "function") != 0) {
        (void)snprintf(param, sizeof(param), "%s.type", at);
        return dmk_api_bad(p->err, param, "%s must be \"function\"", param);
    }
    if (!json_is_string(name) || !is_function_name(dmk_field_text(name))) {
        (void)snprintf(param, sizeof(param), "%s.function.name", at);
        return dmk_api_bad(p->err, param, "%s must have 1 to %d letters, digits, _, - or .", param,
                           MAX_NAME_BYTES);
    }
    (void)snprintf(param, sizeof(param), "%s.function.", at);
    if ((rc = dmk_field_str(fn, param, "description", p->limits->max_conv_bytes, &description,
                            p->err)) < 0 ||
        (rc = dmk_field_bool(fn, param, "strict", &strict, p->err)) < 0) {
        return rc;
    }
    if (parameters && !json_is_object(parameters)) {
        (void)snprintf(param, sizeof(param), "%s.function.parameters", at);
        return dmk_api_bad(p->err, param, "%s must be a JSON schema", param);
    }
    tool = dmk_conv_add_tool(p->conv);
    if (!tool) {
        return too_big(p);
    }
    tool->name = dmk_conv_copy(p->conv, dmk_field_text(name));
    tool->description = dmk_conv_copy(p->conv, description);
    tool->parameters = json_incref(parameters);
    tool->strict = strict;
    return 0;
}

static int read_tools(struct parse *p, const json_t *root)
{
    const json_t *list = dmk_field_get(root, "tools");
    char at[32];

    if (!list) {
        return 0;
    }
    if (!json_is_array(list) || json_array_size(list) > p->limits->max_tools) {
        return dmk_api_bad(p->err, "tools", "tools must be a list of at most %u tools",
                           p->limits->max_tools);
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        int rc;

        (void)snprintf(at, sizeof(at), "tools[%zu]", i);
        rc = read_tool(p, json_array_get(list, i), at);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

static int read_tool_choice(struct parse *p, const json_t *root)
{
    const json_t *v = dmk_field_get(root, "tool_choice");
    struct dmk_conv_view *view = dmk_conv_edit(p->conv);

    view->tool_choice = DMK_TOOLS_AUTO;
    if (!v || (json_is_string(v) && strcmp(json_string_value(v), "auto") == 0)) {
        return 0;
    }
    if (json_is_string(v) && strcmp(json_string_value(v), "none") == 0) {
        view->tool_choice = DMK_TOOLS_NONE;
        return 0;
    }
    if (json_is_object(v) || (json_is_string(v) && strcmp(json_string_value(v), "required") == 0)) {
        return dmk_api_bad_code(p->err, "unsupported_value", "tool_choice",
                                "tool_choice can not force a tool call yet: only \"auto\" and "
                                "\"none\" are available");
    }
    return dmk_api_bad(p->err, "tool_choice", "tool_choice must be \"auto\" or \"none\"");
}

static int read_effort(struct parse *p, const json_t *root)
{
    const json_t *v = dmk_field_get(root, "reasoning_effort");
    const json_t *reasoning = dmk_field_get(root, "reasoning");
    const char *param = v ? "reasoning_effort" : "reasoning.effort";
    struct dmk_conv_view *view = dmk_conv_edit(p->conv);

    view->effort = DMK_EFFORT_MEDIUM;
    if (!v && reasoning) {
        v = dmk_field_get(reasoning, "effort");
    }
    if (!v) {
        return 0;
    }
    if (json_is_string(v)) {
        if (strcmp(json_string_value(v), "low") == 0) {
            view->effort = DMK_EFFORT_LOW;
            return 0;
        }
        if (strcmp(json_string_value(v), "medium") == 0) {
            return 0;
        }
        if (strcmp(json_string_value(v), "high") == 0) {
            view->effort = DMK_EFFORT_HIGH;
            return 0;
        }
    }
    return dmk_api_bad_code(p->err, "unsupported_value", param,
                            "%s must be \"low\", \"medium\" or \"high\"", param);
}

static int read_format(struct parse *p, const json_t *root)
{
    const json_t *v = dmk_field_get(root, "response_format");
    const json_t *type = json_object_get(v, "type");
    const json_t *modalities = dmk_field_get(root, "modalities");

    if (modalities &&
        (json_array_size(modalities) != 1 || !json_is_string(json_array_get(modalities, 0)) ||
         strcmp(json_string_value(json_array_get(modalities, 0)), "text") != 0)) {
        return dmk_api_bad_code(p->err, "unsupported_parameter", "modalities",
                                "modalities may only be [\"text\"]");
    }
    if (!v || (json_is_string(type) && strcmp(json_string_value(type), "text") == 0)) {
        return 0;
    }
    if (!json_is_string(type)) {
        return dmk_api_bad(p->err, "response_format",
                           "response_format must be an object with type");
    }
    return dmk_api_bad_code(p->err, "unsupported_value", "response_format",
                            "structured output is not available yet: response_format may only be "
                            "{\"type\": \"text\"}");
}

/* max_completion_tokens is the newer name of max_tokens and wins. */
static int read_limits(struct parse *p, const json_t *root)
{
    int64_t max_tokens = 0;
    int64_t top = 0;
    int rc;

    if ((rc = dmk_field_int(root, "", "max_tokens", 1, INT32_MAX, &max_tokens, p->err)) < 0 ||
        (rc = dmk_field_int(root, "", "max_completion_tokens", 1, INT32_MAX, &max_tokens, p->err)) <
            0 ||
        (rc = dmk_field_bool(root, "", "logprobs", &p->ask->logprobs, p->err)) < 0 ||
        (rc = dmk_field_int(root, "", "top_logprobs", 0, DMK_ASK_MAX_TOP, &top, p->err)) < 0 ||
        (rc = dmk_field_bool(root, "", "parallel_tool_calls", &p->ask->parallel_calls, p->err)) <
            0) {
        return rc;
    }
    if (top > 0 && !p->ask->logprobs) {
        return dmk_api_bad(p->err, "top_logprobs",
                           "top_logprobs may only stand together with \"logprobs\": true");
    }
    p->ask->top_logprobs = (uint32_t)top;
    p->ask->has_max_tokens = max_tokens > 0;
    p->ask->max_tokens = (uint32_t)max_tokens;
    return 0;
}

static int parse_root(struct parse *p, const json_t *root)
{
    int rc;

    if ((rc = dmk_fields_common(root, p->limits, p->ask, p->err)) < 0 ||
        (rc = dmk_fields_refuse(root, refused, sizeof(refused) / sizeof(refused[0]), p->err)) < 0 ||
        (rc = read_limits(p, root)) < 0 || (rc = read_effort(p, root)) < 0 ||
        (rc = read_format(p, root)) < 0 || (rc = read_tools(p, root)) < 0 ||
        (rc = read_tool_choice(p, root)) < 0 || (rc = read_messages(p, root)) < 0) {
        return rc;
    }
    dmk_conv_edit(p->conv)->date_unix_s = p->limits->date_unix_s;
    return dmk_conv_failed(p->conv) ? too_big(p) : 0;
}

int dmk_api_chat_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                       struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    struct parse p = {.limits = limits, .ask = ask, .err = reterr};
    json_t *root;
    int rc = dmk_fields_open(body, &root, reterr);

    if (rc < 0) {
        return rc;
    }
    p.conv = dmk_conv_new(limits->max_conv_bytes);
    if (!p.conv) {
        json_decref(root);
        return dmk_api_fail(reterr, 500, "out_of_memory", "no memory for the conversation");
    }
    ask->conv = p.conv; /* goes with the ask, whatever comes */
    rc = parse_root(&p, root);
    json_decref(root);
    return rc;
}
