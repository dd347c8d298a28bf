/* Chat Completions: the body of POST /v1/chat/completions to a conversation.
 *
 * Pure, on a pool thread. The answer's form is in api_chat_out.c. What a client sends but this
 * server can not honour is refused by name; fields that nobody knows are ignored, so that newer
 * clients work. */
#include "router/api_chat.h"

#include <stdio.h>
#include "router/conv_in.h"
#include "router/fields.h"
#include "router/structured.h"

struct parse {
    const struct dmk_api_limits *limits;
    struct dmk_ask *ask;
    struct dmk_conv *conv;
    struct dmk_api_error *err;
    struct dmk_conv_in in;
};

static const struct dmk_field fields[] = {
    {"max_tokens", DMK_KIND_INT, 1, INT32_MAX, DMK_ASK_AT(max_tokens),
     .has_at = offsetof(struct dmk_ask, has_max_tokens),
     .about = "The older name of max_completion_tokens."},
    {"max_completion_tokens", DMK_KIND_INT, 1, INT32_MAX, DMK_ASK_AT(max_tokens),
     .has_at = offsetof(struct dmk_ask, has_max_tokens),
     .about =
         "Bound of the answer, reasoning included. Absent: the room that the context has left."},
    {"logprobs", DMK_KIND_BOOL, 0, 0, DMK_ASK_AT(logprobs)},
    {"top_logprobs", DMK_KIND_INT, 0, DMK_ASK_MAX_TOP, DMK_ASK_AT(top_logprobs),
     .about = "Wants logprobs."},
    {"best_of", DMK_KIND_INT, 1, DMK_ASK_MAX_CHOICES, DMK_ASK_AT(best_of),
     .about = "Samples this many choices and tells the n of the highest mean log-probability; at "
              "least n, and not with stream."},
    {"parallel_tool_calls", DMK_KIND_BOOL, 0, 0, DMK_ASK_AT(parallel_calls),
     .about = "false: the first call ends the turn."},
    {"store", DMK_KIND_BOOL, 0, 0, 0, 0, .about = "Accepted; nothing is stored."},
    {"metadata", DMK_KIND_STRINGS, 0, 0, 0, 0, .about = "Accepted; not used."},
    {"service_tier", DMK_KIND_TEXT, 0, 64, 0, 0, .about = "Accepted; there is one tier."},
    {"safety_identifier", DMK_KIND_TEXT, 0, 4096, 0, 0, .about = "Accepted; not used."},
    {"prompt_cache_key", DMK_KIND_TEXT, 0, 4096, 0, 0,
     .about = "Accepted; prefixes are found by what they hold."},
    {"prompt_cache_retention", DMK_KIND_TEXT, 0, 64, 0, 0, .about = "Accepted; not used."},
};

static const struct dmk_field_refused refused[] = {
    {"functions", "[]"},
    {"function_call", "none"},
    {"audio", NULL},
    {"prediction", NULL},
    {"web_search_options", NULL},
    {"moderation", NULL},
    {"verbosity", "medium"},
    {"echo", "false"},
    {"add_generation_prompt", "true"},
    {"continue_final_message", "false"},
    {"add_special_tokens", "false"},
    {"documents", "[]"},
    {"chat_template", NULL},
    {"chat_template_kwargs", "{}"},
    {"include_reasoning", "true"},
    {"separate_reasoning", "true"},
    {"stream_reasoning", "true"},
};

const struct dmk_field_tables dmk_api_chat_tables = {
    .schema = "ChatRequest",
    .fields = fields,
    .n_fields = sizeof(fields) / sizeof(fields[0]),
    .refused = refused,
    .n_refused = sizeof(refused) / sizeof(refused[0]),
    .samples = true,
};

static int read_call(struct parse *p, struct dmk_message *m, const json_t *v, const char *at)
{
    const json_t *fn = json_object_get(v, "function");
    const json_t *type = dmk_field_get(v, "type");
    char path[96], function[112];

    if (!json_is_object(fn) ||
        (type && !(json_is_string(type) && strcmp(json_string_value(type), "function") == 0))) {
        return dmk_api_bad(p->err, at,
                           "%s must be {\"id\", \"type\": \"function\", \"function\": {\"name\", "
                           "\"arguments\"}}",
                           at);
    }
    (void)snprintf(path, sizeof(path), "%s.", at);
    (void)snprintf(function, sizeof(function), "%s.function.", at);
    return dmk_conv_in_call(&p->in, m, v, path, "id", fn, function);
}

static int read_calls(struct parse *p, struct dmk_message *m, const json_t *msg, const char *at)
{
    const json_t *calls = dmk_field_get(msg, "tool_calls");
    char param[80];
    int rc = 0;

    (void)snprintf(param, sizeof(param), "%s.tool_calls", at);
    if (calls && !json_is_array(calls)) {
        return dmk_api_bad(p->err, param, "%s must be a list", param);
    }
    for (size_t i = 0; i < json_array_size(calls) && rc == 0; i++) {
        (void)snprintf(param, sizeof(param), "%s.tool_calls[%zu]", at, i);
        rc = read_call(p, m, json_array_get(calls, i), param);
    }
    return rc;
}

/* Reasoning has several names in the field. A refusal is what the assistant said when it has no content. */
static int read_said(struct parse *p, struct dmk_message *m, const json_t *msg, const char *at)
{
    static const char *const keys[] = {"reasoning_content", "reasoning", "thinking", "refusal"};
    char param[64];

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        const json_t *v = dmk_field_get(msg, keys[i]);
        const bool refusal = i == 3;

        (void)snprintf(param, sizeof(param), "%s.%s", at, keys[i]);
        if (v && !json_is_string(v)) {
            return dmk_api_bad(p->err, param, "%s must be a string", param);
        }
        if (v && refusal && !m->has_content) {
            m->content = dmk_conv_copy(p->conv, dmk_field_text(v));
            m->has_content = true;
        } else if (v && !refusal && m->reasoning.len == 0) {
            m->reasoning = dmk_conv_copy(p->conv, dmk_field_text(v));
        }
    }
    return 0;
}

static int read_assistant(struct parse *p, struct dmk_message *m, const json_t *msg, const char *at)
{
    static const struct dmk_field_refused not_here[] = {{"function_call", NULL}, {"audio", NULL}};
    char param[64];
    int rc;

    for (size_t i = 0; i < sizeof(not_here) / sizeof(not_here[0]); i++) {
        if (dmk_field_get(msg, not_here[i].key)) {
            (void)snprintf(param, sizeof(param), "%s.%s", at, not_here[i].key);
            return dmk_api_bad_code(p->err, "unsupported_parameter", param,
                                    "%s is not supported by this server", param);
        }
    }
    if ((rc = read_said(p, m, msg, at)) < 0 || (rc = read_calls(p, m, msg, at)) < 0) {
        return rc;
    }
    if (!m->has_content && m->n_calls == 0 && m->reasoning.len == 0) {
        (void)snprintf(param, sizeof(param), "%s.content", at);
        return dmk_api_bad(p->err, param,
                           "%s is missing: an assistant message needs content or tool_calls",
                           param);
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
    const json_t *name, *content;
    char param[64];
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
        return dmk_conv_in_too_big(&p->in);
    }
    name = dmk_field_get(msg, "name");
    if (name) {
        (void)snprintf(param, sizeof(param), "%s.name", at);
        if (!json_is_string(name) || !dmk_conv_in_is_name(dmk_field_text(name))) {
            return dmk_api_bad(p->err, param,
                               "%s must have 1 to 64 bytes without white space or any of <>|\\/",
                               param);
        }
        m->name = dmk_conv_copy(p->conv, dmk_field_text(name));
    }
    content = dmk_field_get(msg, "content");
    m->has_content = content != NULL;
    (void)snprintf(param, sizeof(param), "%s.content", at);
    rc = content ? dmk_conv_in_text(&p->in, content, param, &m->content) : 0;
    if (rc < 0) {
        return rc;
    }
    if (role == DMK_ROLE_ASSISTANT) {
        return read_assistant(p, m, msg, at);
    }
    if (!m->has_content) {
        return dmk_api_bad(p->err, param, "%s is missing", param);
    }
    if (role != DMK_ROLE_TOOL) {
        return 0;
    }
    (void)snprintf(param, sizeof(param), "%s.tool_call_id", at);
    return dmk_conv_in_answer(&p->in, m, dmk_field_get(msg, "tool_call_id"), param);
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
    char param[64];

    if (!json_is_string(type) || strcmp(json_string_value(type), "function") != 0) {
        (void)snprintf(param, sizeof(param), "%s.type", at);
        return dmk_api_bad(p->err, param, "%s must be \"function\"", param);
    }
    (void)snprintf(param, sizeof(param), "%s.function.", at);
    return dmk_conv_in_tool(&p->in, json_object_get(v, "function"), param);
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

static int read_effort(struct parse *p, const json_t *root)
{
    const json_t *v = dmk_field_get(root, "reasoning_effort");
    const json_t *reasoning = dmk_field_get(root, "reasoning");

    if (v || !reasoning) {
        return dmk_conv_in_effort(&p->in, v, "reasoning_effort");
    }
    if (!json_is_object(reasoning)) {
        return dmk_api_bad(p->err, "reasoning", "reasoning must be an object");
    }
    return dmk_conv_in_effort(&p->in, dmk_field_get(reasoning, "effort"), "reasoning.effort");
}

static int read_modalities(struct parse *p, const json_t *root)
{
    const json_t *modalities = dmk_field_get(root, "modalities");

    if (modalities &&
        (json_array_size(modalities) != 1 || !json_is_string(json_array_get(modalities, 0)) ||
         strcmp(json_string_value(json_array_get(modalities, 0)), "text") != 0)) {
        return dmk_api_bad_code(p->err, "unsupported_parameter", "modalities",
                                "modalities may only be [\"text\"]");
    }
    return 0;
}

/* max_completion_tokens is the newer name of max_tokens and wins. */
static int read_limits(struct parse *p, const json_t *root)
{
    int rc = dmk_fields_read(root, &dmk_api_chat_tables, p->ask, p->err);

    if (rc == 0 && p->ask->top_logprobs > 0 && !p->ask->logprobs) {
        return dmk_api_bad(p->err, "top_logprobs",
                           "top_logprobs may only stand together with \"logprobs\": true");
    }
    if (rc == 0) {
        rc = dmk_fields_best_of(p->limits, p->ask, p->err);
    }
    return rc;
}

static int begin(struct parse *p)
{
    p->conv = dmk_conv_new(p->limits->max_conv_bytes);
    if (!p->conv) {
        return dmk_api_fail(p->err, 500, "out_of_memory", "no memory for the conversation");
    }
    p->ask->conv = p->conv; /* goes with the ask, whatever comes */
    p->in = (struct dmk_conv_in){.limits = p->limits, .conv = p->conv, .err = p->err};
    dmk_conv_edit(p->conv)->date_unix_s = p->limits->date_unix_s;
    return 0;
}

/* The final message alone is ruled; a call, or a schema beside it, would be ruled by two. */
static int read_structured(struct parse *p, const json_t *root)
{
    const struct dmk_conv_view *view = dmk_conv_view(p->conv);
    const json_t *v = dmk_field_get(root, "structured_outputs");

    if (v && (view->output != DMK_OUTPUT_TEXT ||
              (view->n_tools > 0 && view->tool_choice != DMK_TOOLS_NONE))) {
        return dmk_api_bad(p->err, "structured_outputs",
                           "structured_outputs can not stand beside response_format, nor beside "
                           "tools that may be called");
    }
    return dmk_structured_outputs(v, DMK_CONSTRAIN_FINAL, &p->ask->constraint, p->err);
}

/* What stands in the prompt. */
static int read_conversation(struct parse *p, const json_t *root)
{
    int rc;

    if ((rc = read_effort(p, root)) < 0 || (rc = read_modalities(p, root)) < 0 ||
        (rc = dmk_structured_format(dmk_field_get(root, "response_format"), "response_format",
                                    p->conv, p->err)) < 0 ||
        (rc = read_tools(p, root)) < 0 ||
        (rc = dmk_structured_tool_choice(dmk_field_get(root, "tool_choice"), "tool_choice", p->conv,
                                         p->err)) < 0 ||
        (rc = read_messages(p, root)) < 0) {
        return rc;
    }
    return dmk_conv_failed(p->conv) ? dmk_conv_in_too_big(&p->in) : 0;
}

int dmk_api_chat_parse_prompt(const json_t *root, const struct dmk_api_limits *limits,
                              struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    struct parse p = {.limits = limits, .ask = ask, .err = reterr};
    const int rc = begin(&p);

    return rc < 0 ? rc : read_conversation(&p, root);
}

static int parse_root(struct parse *p, const json_t *root)
{
    int rc;

    if ((rc = begin(p)) < 0 || (rc = dmk_fields_common(root, p->limits, p->ask, p->err)) < 0 ||
        (rc = read_limits(p, root)) < 0 || (rc = read_conversation(p, root)) < 0) {
        return rc;
    }
    return read_structured(p, root);
}

int dmk_api_chat_parse_root(const json_t *root, const struct dmk_api_limits *limits,
                            struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    struct parse p = {.limits = limits, .ask = ask, .err = reterr};

    return parse_root(&p, root);
}

int dmk_api_chat_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                       struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    json_t *root;
    int rc = dmk_fields_open(body, &root, reterr);

    if (rc == 0) {
        rc = dmk_api_chat_parse_root(root, limits, ask, reterr);
        json_decref(root);
    }
    return rc;
}
