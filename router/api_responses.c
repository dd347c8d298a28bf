/* Responses: the body of POST /v1/responses to a conversation.
 *
 * Pure, on a pool thread. Nothing is stored between requests: what a client wants the model to know it sends
 * in `input`. The fields that a response repeats are written here once, into the ask's note. */
#include "router/api_responses.h"

#include <stdlib.h>
#include "router/fields.h"
#include "router/json_out.h"
#include "router/structured.h"

static const struct dmk_field fields[] = {
    {"max_output_tokens", DMK_KIND_INT, 1, INT32_MAX, DMK_ASK_AT(max_tokens),
     .has_at = offsetof(struct dmk_ask, has_max_tokens),
     .about =
         "Bound of the answer, reasoning included. Absent: the room that the context has left."},
    {"top_logprobs", DMK_KIND_INT, 0, DMK_ASK_MAX_TOP, DMK_ASK_AT(top_logprobs),
     .about = "Wants message.output_text.logprobs in include."},
    {"parallel_tool_calls", DMK_KIND_BOOL, 0, 0, DMK_ASK_AT(parallel_calls),
     .about = "false: the first call ends the turn."},
    {"max_tool_calls", DMK_KIND_INT, 1, INT32_MAX, 0, 0,
     .about = "Accepted; it bounds calls of tools that a server runs, and this one runs none."},
    {"store", DMK_KIND_BOOL, 0, 0, 0, 0, .about = "Accepted; nothing is stored."},
    {"metadata", DMK_KIND_STRINGS, 0, 0, 0, 0, .about = "Comes back in the response."},
    {"service_tier", DMK_KIND_TEXT, 0, 64, 0, 0, .about = "Accepted; there is one tier."},
    {"safety_identifier", DMK_KIND_TEXT, 0, 4096, 0, 0, .about = "Accepted; not used."},
    {"prompt_cache_key", DMK_KIND_TEXT, 0, 4096, 0, 0,
     .about = "Accepted; prefixes are found by what they hold."},
    {"prompt_cache_retention", DMK_KIND_TEXT, 0, 64, 0, 0, .about = "Accepted; not used."},
};

static const struct dmk_field_refused refused[] = {
    {"previous_response_id", NULL},
    {"conversation", NULL},
    {"background", "false"},
    {"prompt", NULL},
    {"truncation", "disabled"},
    {"context_management", "[]"},
    {"moderation", NULL},
    {"n", "1"},
    {"best_of", "1"},
    {"stop", "[]"},
    {"structured_outputs", NULL},
};

const struct dmk_field_tables dmk_api_responses_tables = {
    .schema = "ResponsesRequest",
    .fields = fields,
    .n_fields = sizeof(fields) / sizeof(fields[0]),
    .refused = refused,
    .n_refused = sizeof(refused) / sizeof(refused[0]),
    .samples = true,
};

struct parse {
    struct dmk_ask *ask;
    struct dmk_conv *conv;
    struct dmk_api_error *err;
    struct dmk_conv_in in;
};

/* True when v is one of the NULL-ended words. */
static bool is_one_of(const json_t *v, const char *const *words)
{
    for (size_t i = 0; json_is_string(v) && words[i]; i++) {
        if (strcmp(json_string_value(v), words[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* What a client wants to see besides; most of it belongs to tools that are not here. */
static int read_include(struct parse *p, const json_t *root)
{
    static const char *const known[] = {"message.output_text.logprobs",
                                        "reasoning.encrypted_content",
                                        "file_search_call.results",
                                        "web_search_call.results",
                                        "web_search_call.action.sources",
                                        "message.input_image.image_url",
                                        "computer_call_output.output.image_url",
                                        "code_interpreter_call.outputs",
                                        NULL};
    const json_t *list = dmk_field_get(root, "include");

    if (list && !json_is_array(list)) {
        return dmk_api_bad(p->err, "include", "include must be a list");
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);

        if (!is_one_of(v, known)) {
            return dmk_api_bad(p->err, "include", "include[%zu] is nothing that can be included",
                               i);
        }
        p->ask->logprobs = p->ask->logprobs || strcmp(json_string_value(v), known[0]) == 0;
    }
    if (p->ask->top_logprobs > 0 && !p->ask->logprobs) {
        return dmk_api_bad(p->err, "top_logprobs",
                           "top_logprobs may only stand together with "
                           "\"message.output_text.logprobs\" in include");
    }
    return 0;
}

/* The model writes its reasoning in the clear; summaries of it are not made, whoever asks for them. */
static int read_reasoning(struct parse *p, const json_t *root)
{
    static const char *const kinds[] = {"auto", "concise", "detailed", NULL};
    const json_t *v = dmk_field_get(root, "reasoning");
    const json_t *summary = dmk_field_get(v, "summary");

    if (v && !json_is_object(v)) {
        return dmk_api_bad(p->err, "reasoning", "reasoning must be an object");
    }
    if (summary && !is_one_of(summary, kinds)) {
        return dmk_api_bad(p->err, "reasoning.summary",
                           "reasoning.summary must be \"auto\", \"concise\" or \"detailed\"");
    }
    return dmk_conv_in_effort(&p->in, dmk_field_get(v, "effort"), "reasoning.effort");
}

static int read_text(struct parse *p, const json_t *root)
{
    static const char *const verbosity[] = {"medium", NULL};
    const json_t *v = dmk_field_get(root, "text");

    if (v && !json_is_object(v)) {
        return dmk_api_bad(p->err, "text", "text must be an object");
    }
    if (dmk_field_get(v, "verbosity") && !is_one_of(dmk_field_get(v, "verbosity"), verbosity)) {
        return dmk_api_bad_code(p->err, "unsupported_value", "text.verbosity",
                                "text.verbosity can only be \"medium\"");
    }
    return dmk_structured_format(dmk_field_get(v, "format"), "text.format", p->conv, p->err);
}

static int read_tools(struct parse *p, const json_t *root)
{
    static const char *const function[] = {"function", NULL};
    const json_t *list = dmk_field_get(root, "tools");
    char at[48];
    int rc = 0;

    if (list && (!json_is_array(list) || json_array_size(list) > p->in.limits->max_tools)) {
        return dmk_api_bad(p->err, "tools", "tools must be a list of at most %u tools",
                           p->in.limits->max_tools);
    }
    for (size_t i = 0; i < json_array_size(list) && rc == 0; i++) {
        const json_t *v = json_array_get(list, i);
        const json_t *type = json_object_get(v, "type");

        if (!is_one_of(type, function)) {
            char quoted[68];

            (void)snprintf(at, sizeof(at), "tools[%zu].type", i);
            return dmk_api_bad_code(
                p->err, "unsupported_value", at,
                "%s is \"%s\"; only tools of type \"function\" are available", at,
                json_is_string(type) ? dmk_api_quote(dmk_field_text(type), quoted) : "");
        }
        (void)snprintf(at, sizeof(at), "tools[%zu].", i);
        rc = dmk_conv_in_tool(&p->in, v, at);
    }
    return rc;
}

static int read_instructions(struct parse *p, const json_t *root)
{
    struct dmk_str text = {0};
    struct dmk_message *m;
    const int rc =
        dmk_field_str(root, "", "instructions", p->in.limits->max_conv_bytes, &text, p->err);

    if (rc < 0 || text.len == 0) {
        return rc;
    }
    m = dmk_conv_add_message(p->conv, DMK_ROLE_DEVELOPER);
    if (!m) {
        return dmk_conv_in_too_big(&p->in);
    }
    m->has_content = true;
    m->content = dmk_conv_copy(p->conv, text);
    return 0;
}

/* ---------------------------------------------------------------- what a response repeats */

static void put_value(struct dmk_buf *out, const char *key, const json_t *v, const char *absent)
{
    char *text = v ? json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;

    dmk_buf_printf(out, ",\"%s\":", key);
    dmk_buf_puts(out, text ? text : absent);
    out->failed = out->failed || (v && !text);
    free(text);
}

static void put_tools(struct dmk_buf *out, const struct dmk_conv_view *view)
{
    dmk_buf_puts(out, ",\"tools\":[");
    for (size_t i = 0; i < view->n_tools; i++) {
        const struct dmk_tool *tool = &view->tools[i];

        dmk_buf_puts(out, i > 0 ? ",{\"type\":\"function\",\"name\":"
                                : "{\"type\":\"function\",\"name\":");
        dmk_out_str(out, tool->name);
        dmk_buf_puts(out, ",\"description\":");
        dmk_out_str(out, tool->description);
        put_value(out, "parameters", tool->parameters, "null");
        dmk_buf_printf(out, ",\"strict\":%s}", tool->strict ? "true" : "false");
    }
    dmk_buf_putc(out, ']');
}

static void write_note(struct parse *p, const json_t *root)
{
    static const char *const efforts[] = {
        [DMK_EFFORT_LOW] = "low", [DMK_EFFORT_MEDIUM] = "medium", [DMK_EFFORT_HIGH] = "high"};
    static const char *const plain[] = {
        "user",           "safety_identifier", "prompt_cache_key", "max_output_tokens",
        "max_tool_calls", "instructions"};
    const struct dmk_conv_view *view = dmk_conv_view(p->conv);
    struct dmk_buf *out = &p->ask->note;

    for (size_t i = 0; i < sizeof(plain) / sizeof(plain[0]); i++) {
        put_value(out, plain[i], dmk_field_get(root, plain[i]), "null");
    }
    put_value(out, "metadata", dmk_field_get(root, "metadata"), "{}");
    put_value(out, "tool_choice", dmk_field_get(root, "tool_choice"), "\"auto\"");
    put_tools(out, view);
    dmk_buf_puts(out, ",\"text\":{\"verbosity\":\"medium\"");
    put_value(out, "format", dmk_field_get(dmk_field_get(root, "text"), "format"),
              "{\"type\":\"text\"}");
    dmk_buf_printf(out, "},\"reasoning\":{\"effort\":\"%s\",\"summary\":null}",
                   efforts[view->effort]);
    dmk_buf_printf(out, ",\"temperature\":%.7g,\"top_p\":%.7g,\"top_logprobs\":%u",
                   (double)p->ask->temperature, (double)p->ask->top_p, p->ask->top_logprobs);
    dmk_buf_printf(out, ",\"parallel_tool_calls\":%s", p->ask->parallel_calls ? "true" : "false");
    dmk_buf_puts(out, ",\"background\":false,\"store\":false,\"previous_response_id\":null,"
                      "\"truncation\":\"disabled\",\"service_tier\":\"default\"");
}

/* ---------------------------------------------------------------- all of it */

static int parse_root(struct parse *p, const json_t *root)
{
    int rc;

    if ((rc = dmk_fields_read(root, &dmk_api_responses_tables, p->ask, p->err)) < 0 ||
        (rc = dmk_fields_common(root, p->in.limits, p->ask, p->err)) < 0 ||
        (rc = read_include(p, root)) < 0 || (rc = read_reasoning(p, root)) < 0 ||
        (rc = read_text(p, root)) < 0 || (rc = read_tools(p, root)) < 0 ||
        (rc = dmk_structured_tool_choice(dmk_field_get(root, "tool_choice"), "tool_choice", p->conv,
                                         p->err)) < 0 ||
        (rc = read_instructions(p, root)) < 0 ||
        (rc = dmk_api_responses_read_input(&p->in, dmk_field_get(root, "input"))) < 0) {
        return rc;
    }
    write_note(p, root);
    if (p->ask->note.failed) {
        return dmk_api_fail(p->err, 413, NULL, "the request is too large");
    }
    return dmk_conv_failed(p->conv) ? dmk_conv_in_too_big(&p->in) : 0;
}

int dmk_api_responses_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                            struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    struct parse p = {.ask = ask, .err = reterr};
    json_t *root;
    int rc = dmk_fields_open(body, &root, reterr);

    if (rc < 0) {
        return rc;
    }
    p.conv = ask->conv =
        dmk_conv_new(limits->max_conv_bytes); /* goes with the ask, whatever comes */
    p.in = (struct dmk_conv_in){.limits = limits, .conv = p.conv, .err = reterr};
    if (!p.conv) {
        rc = dmk_api_fail(reterr, 500, "out_of_memory", "no memory for the conversation");
    } else {
        dmk_conv_edit(p.conv)->date_unix_s = limits->date_unix_s;
        rc = parse_root(&p, root);
    }
    json_decref(root);
    return rc;
}
