/* The conversation as gRPC messages (proto/damask_frontend.proto): one more dialect, no HTTP in it.
 *
 * A request is turned into the body of Chat Completions that says the same and is read by that dialect, so that
 * the two can not differ in what they take, refuse and mean; fields are named in failures as there. parse is pure and
 * runs on a pool thread; a reply lives on the loop. A frame is one ChatEvent. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/json/json.h"
#include "common/rpc/nul.h"
#include "proto/damask_frontend.pb-c.h"
#include "router/api_chat.h"

#define MAX_SCHEMA_DEPTH 64

typedef Damask__V1__ChatRequest chat_request;

struct parse {
    struct dmk_api_error *err;
    int rc; /* of the first thing that could not be said in JSON */
};

/* What proto3 lets through and JSON does not is told once, by the first of these. */
static void fail(struct parse *p, const char *param, const char *what)
{
    if (p->rc == 0) {
        p->rc = dmk_api_bad(p->err, param, "%s %s", param, what);
    }
}

static void put_text(struct parse *p, json_t *to, const char *key, const char *text,
                     const char *param)
{
    if (json_object_set_new(to, key, json_string(text)) < 0) {
        fail(p, param, "is not UTF-8");
    }
}

static void put_real(struct parse *p, json_t *to, const char *key, double x)
{
    if (json_object_set_new(to, key, json_real(x)) < 0) {
        fail(p, key, "must be a finite number");
    }
}

static void put_int(json_t *to, const char *key, json_int_t x)
{
    (void)json_object_set_new(to, key, json_integer(x));
}

static void put_bool(json_t *to, const char *key, bool x)
{
    (void)json_object_set_new(to, key, json_boolean(x));
}

/* A schema that comes as text. */
static void put_schema(struct parse *p, json_t *to, const char *key, const char *text,
                       const char *param)
{
    struct dmk_error error;
    json_t *schema;

    if (dmk_json_parse(dmk_str_from(text), param, MAX_SCHEMA_DEPTH, &schema, &error) < 0) {
        fail(p, param, "is not valid JSON, or is nested too deeply");
        return;
    }
    (void)json_object_set_new(to, key, schema);
}

static json_t *new_function(struct parse *p, const char *name, const char *param)
{
    json_t *fn = json_object();

    put_text(p, fn, "name", name, param);
    return fn;
}

static json_t *typed(const char *key, json_t *value)
{
    return json_pack("{s:s,s:o}", "type", "function", key, value);
}

static json_t *make_calls(struct parse *p, const Damask__V1__ChatMessage *in, const char *at)
{
    json_t *list = json_array();
    char param[96];

    for (size_t i = 0; i < in->n_tool_calls; i++) {
        json_t *fn, *call;

        (void)snprintf(param, sizeof(param), "%s.tool_calls[%zu]", at, i);
        fn = new_function(p, in->tool_calls[i]->name, param);
        put_text(p, fn, "arguments", in->tool_calls[i]->arguments, param);
        call = typed("function", fn);
        put_text(p, call, "id", in->tool_calls[i]->id, param);
        (void)json_array_append_new(list, call);
    }
    return list;
}

static json_t *make_message(struct parse *p, const Damask__V1__ChatMessage *in, size_t i)
{
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};
    const bool assistant = in->role == DAMASK__V1__CHAT_ROLE__CHAT_ROLE_ASSISTANT;
    json_t *m = json_object();
    char at[48], param[64];

    (void)snprintf(at, sizeof(at), "messages[%zu]", i);
    (void)snprintf(param, sizeof(param), "%s.role", at);
    if (in->role < DAMASK__V1__CHAT_ROLE__CHAT_ROLE_SYSTEM ||
        in->role > DAMASK__V1__CHAT_ROLE__CHAT_ROLE_TOOL) {
        fail(p, param, "must be given");
        return m;
    }
    put_text(p, m, "role", roles[in->role - 1], param);
    if (in->content[0] || in->has_content || !assistant) {
        (void)snprintf(param, sizeof(param), "%s.content", at);
        put_text(p, m, "content", in->content, param);
    }
    if (in->name[0]) {
        (void)snprintf(param, sizeof(param), "%s.name", at);
        put_text(p, m, "name", in->name, param);
    }
    if (in->reasoning[0]) {
        (void)snprintf(param, sizeof(param), "%s.reasoning", at);
        put_text(p, m, "reasoning", in->reasoning, param);
    }
    if (in->tool_call_id[0]) {
        (void)snprintf(param, sizeof(param), "%s.tool_call_id", at);
        put_text(p, m, "tool_call_id", in->tool_call_id, param);
    }
    if (in->n_tool_calls > 0) {
        (void)json_object_set_new(m, "tool_calls", make_calls(p, in, at));
    }
    return m;
}

static json_t *make_tool(struct parse *p, const Damask__V1__ChatTool *in, size_t i)
{
    char param[64];
    json_t *fn;

    (void)snprintf(param, sizeof(param), "tools[%zu].name", i);
    fn = new_function(p, in->name, param);
    if (in->description[0]) {
        (void)snprintf(param, sizeof(param), "tools[%zu].description", i);
        put_text(p, fn, "description", in->description, param);
    }
    if (in->parameters_json[0]) {
        (void)snprintf(param, sizeof(param), "tools[%zu].parameters_json", i);
        put_schema(p, fn, "parameters", in->parameters_json, param);
    }
    put_bool(fn, "strict", in->strict);
    return typed("function", fn);
}

static void put_conversation(struct parse *p, json_t *root, const chat_request *in)
{
    json_t *messages = json_array(), *tools = json_array();

    for (size_t i = 0; i < in->n_messages; i++) {
        (void)json_array_append_new(messages, make_message(p, in->messages[i], i));
    }
    (void)json_object_set_new(root, "messages", messages);
    for (size_t i = 0; i < in->n_tools; i++) {
        (void)json_array_append_new(tools, make_tool(p, in->tools[i], i));
    }
    if (in->n_tools > 0) {
        (void)json_object_set(root, "tools", tools);
    }
    json_decref(tools);
}

static void put_allowed_tools(struct parse *p, json_t *root, const chat_request *in)
{
    json_t *list = json_array();

    for (size_t i = 0; i < in->n_allowed_tools; i++) {
        (void)json_array_append_new(
            list, typed("function", new_function(p, in->allowed_tools[i], "allowed_tools")));
    }
    (void)json_object_set_new(
        root, "tool_choice",
        json_pack("{s:s,s:{s:s,s:o}}", "type", "allowed_tools", "allowed_tools", "mode",
                  in->tool_choice == DAMASK__V1__CHAT_TOOL_CHOICE__CHAT_TOOL_CHOICE_REQUIRED
                      ? "required"
                      : "auto",
                  "tools", list));
}

static void put_tool_choice(struct parse *p, json_t *root, const chat_request *in)
{
    static const char *const words[] = {NULL, "auto", "none", "required"};
    const int choice = (int)in->tool_choice;

    if (choice < 0 || choice > DAMASK__V1__CHAT_TOOL_CHOICE__CHAT_TOOL_CHOICE_NAMED) {
        fail(p, "tool_choice", "is a number that means nothing");
    } else if (choice == DAMASK__V1__CHAT_TOOL_CHOICE__CHAT_TOOL_CHOICE_NAMED) {
        (void)json_object_set_new(
            root, "tool_choice",
            typed("function", new_function(p, in->forced_tool, "forced_tool")));
    } else if (in->n_allowed_tools > 0 &&
               choice != DAMASK__V1__CHAT_TOOL_CHOICE__CHAT_TOOL_CHOICE_NONE) {
        put_allowed_tools(p, root, in);
    } else if (words[choice]) {
        put_text(p, root, "tool_choice", words[choice], "tool_choice");
    }
}

static void put_format(struct parse *p, json_t *root, const Damask__V1__ChatResponseFormat *in)
{
    static const char *const words[] = {"text", "text", "json_object", "json_schema"};
    json_t *format = json_object();

    if ((int)in->type < 0 || in->type > DAMASK__V1__CHAT_FORMAT__CHAT_FORMAT_JSON_SCHEMA) {
        fail(p, "response_format.type", "is a number that means nothing");
    } else {
        put_text(p, format, "type", words[in->type], "response_format.type");
    }
    if (in->type == DAMASK__V1__CHAT_FORMAT__CHAT_FORMAT_JSON_SCHEMA) {
        json_t *schema = json_object();

        put_text(p, schema, "name", in->name, "response_format.name");
        if (in->description[0]) {
            put_text(p, schema, "description", in->description, "response_format.description");
        }
        put_schema(p, schema, "schema", in->schema_json, "response_format.schema_json");
        put_bool(schema, "strict", in->strict);
        (void)json_object_set_new(format, "json_schema", schema);
    }
    (void)json_object_set_new(root, "response_format", format);
}

static void put_sampling(struct parse *p, json_t *root, const chat_request *in)
{
    if (in->opt_temperature_case == DAMASK__V1__CHAT_REQUEST__OPT_TEMPERATURE_TEMPERATURE) {
        put_real(p, root, "temperature", (double)in->temperature);
    }
    if (in->opt_top_p_case == DAMASK__V1__CHAT_REQUEST__OPT_TOP_P_TOP_P) {
        put_real(p, root, "top_p", (double)in->top_p);
    }
    if (in->opt_repetition_penalty_case ==
        DAMASK__V1__CHAT_REQUEST__OPT_REPETITION_PENALTY_REPETITION_PENALTY) {
        put_real(p, root, "repetition_penalty", (double)in->repetition_penalty);
    }
    if (in->opt_seed_case == DAMASK__V1__CHAT_REQUEST__OPT_SEED_SEED) {
        put_int(root, "seed", (json_int_t)in->seed); /* the same bits; JSON has no larger numbers */
    }
    put_int(root, "top_k", in->top_k);
    put_real(p, root, "min_p", (double)in->min_p);
    put_real(p, root, "frequency_penalty", (double)in->frequency_penalty);
    put_real(p, root, "presence_penalty", (double)in->presence_penalty);
    if (in->n_logit_bias > 0) {
        json_t *bias = json_object();

        for (size_t i = 0; i < in->n_logit_bias; i++) {
            char id[16];

            (void)snprintf(id, sizeof(id), "%u", in->logit_bias[i]->token);
            if (json_object_set_new(bias, id, json_real((double)in->logit_bias[i]->value)) < 0) {
                fail(p, "logit_bias", "must have finite values");
            }
        }
        (void)json_object_set_new(root, "logit_bias", bias);
    }
}

static void put_limits(struct parse *p, json_t *root, const chat_request *in)
{
    if (in->max_tokens > 0) {
        put_int(root, "max_tokens", in->max_tokens);
    }
    put_int(root, "n", in->n ? in->n : 1);
    put_int(root, "min_tokens", in->min_tokens);
    put_bool(root, "ignore_eos", in->ignore_eos);
    put_bool(root, "logprobs", in->logprobs);
    put_int(root, "top_logprobs", in->top_logprobs);
    put_bool(root, "parallel_tool_calls", !in->single_tool_call);
    put_int(root, "priority", in->priority);
    if (in->cache_salt[0]) {
        put_text(p, root, "cache_salt", in->cache_salt, "cache_salt");
    }
    if (in->n_stop > 0) {
        json_t *stop = json_array();

        for (size_t i = 0; i < in->n_stop; i++) {
            if (json_array_append_new(stop, json_string(in->stop[i])) < 0) {
                fail(p, "stop", "is not UTF-8");
            }
        }
        (void)json_object_set_new(root, "stop", stop);
    }
    if (in->n_stop_token_ids > 0) {
        json_t *ids = json_array();

        for (size_t i = 0; i < in->n_stop_token_ids; i++) {
            (void)json_array_append_new(ids, json_integer(in->stop_token_ids[i]));
        }
        (void)json_object_set_new(root, "stop_token_ids", ids);
    }
}

static void put_effort(struct parse *p, json_t *root, const chat_request *in)
{
    static const char *const words[] = {NULL, "low", "medium", "high"};

    if ((int)in->effort < 0 || in->effort > DAMASK__V1__CHAT_EFFORT__CHAT_EFFORT_HIGH) {
        fail(p, "effort", "must be low, medium or high");
    } else if (words[in->effort]) {
        put_text(p, root, "reasoning_effort", words[in->effort], "effort");
    }
}

static int grpc_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                      struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    struct parse p = {.err = reterr};
    const char *nul = dmk_rpc_nul_field(&damask__v1__chat_request__descriptor, body);
    chat_request *in = nul ? NULL : damask__v1__chat_request__unpack(NULL, body.len, body.data);
    json_t *root;

    if (nul) {
        return dmk_api_bad(reterr, nul, "%s holds a NUL character, which is not taken here", nul);
    }
    if (!in) {
        return dmk_api_bad(reterr, "", "the request is not a damask.v1.ChatRequest");
    }
    root = json_object();
    put_text(&p, root, "model", in->model, "model");
    put_effort(&p, root, in);
    put_sampling(&p, root, in);
    put_limits(&p, root, in);
    if (in->response_format) {
        put_format(&p, root, in->response_format);
    }
    put_tool_choice(&p, root, in);
    put_conversation(&p, root, in);
    damask__v1__chat_request__free_unpacked(in, NULL);
    if (p.rc == 0) {
        p.rc = dmk_api_chat_parse_root(root, limits, ask, reterr);
    }
    json_decref(root);
    return p.rc;
}

/* ---------------------------------------------------------------- the answer */

struct reply {
    struct dmk_sink sink;
    char id[48]; /* "" once it was sent */
};

static void *grpc_reply_new(const struct dmk_reply_conf *conf)
{
    struct reply *r = calloc(1, sizeof(*r));

    if (r) {
        r->sink = conf->sink;
        (void)snprintf(r->id, sizeof(r->id), "chatcmpl-%s", conf->id_hex);
    }
    return r;
}

static void grpc_reply_free(void *reply)
{
    free(reply);
}

static void send_event(struct reply *r, Damask__V1__ChatEvent *event)
{
    uint8_t *bytes;
    size_t n;

    event->id = r->id;
    n = damask__v1__chat_event__get_packed_size(event);
    bytes = malloc(n ? n : 1);
    if (!bytes) {
        return; /* the next frame has the same chance; the stream's end tells of the failure */
    }
    damask__v1__chat_event__pack(event, bytes);
    r->sink.frame(r->sink.ud, NULL, (struct dmk_bytes){bytes, n});
    free(bytes);
    r->id[0] = '\0';
}

static ProtobufCBinaryData binary(struct dmk_bytes b)
{
    return (ProtobufCBinaryData){b.len, (uint8_t *)b.data};
}

/* Log-probabilities as messages: one block of memory, freed by the caller. */
static Damask__V1__ChatLogprob **make_lps(const struct dmk_lp *lps, size_t n)
{
    struct row {
        Damask__V1__ChatLogprob *ptr;
        Damask__V1__ChatLogprob lp;
        Damask__V1__ChatTopLogprob top[DMK_ASK_MAX_TOP];
        Damask__V1__ChatTopLogprob *tops[DMK_ASK_MAX_TOP];
    };
    Damask__V1__ChatLogprob **list = malloc(n * sizeof(*list) + n * sizeof(struct row) + 16);
    struct row *rows;

    if (!list) {
        return NULL;
    }
    rows = (struct row *)(void *)((char *)list + ((n * sizeof(*list) + 15) & ~(size_t)15));
    for (size_t i = 0; i < n; i++) {
        rows[i].lp = (Damask__V1__ChatLogprob)DAMASK__V1__CHAT_LOGPROB__INIT;
        rows[i].lp.token = binary(lps[i].bytes);
        rows[i].lp.logprob = lps[i].logprob;
        rows[i].lp.n_top = lps[i].n_top;
        rows[i].lp.top = rows[i].tops;
        for (uint32_t k = 0; k < lps[i].n_top; k++) {
            rows[i].top[k] = (Damask__V1__ChatTopLogprob)DAMASK__V1__CHAT_TOP_LOGPROB__INIT;
            rows[i].top[k].token = binary(lps[i].top[k].bytes);
            rows[i].top[k].logprob = lps[i].top[k].logprob;
            rows[i].tops[k] = &rows[i].top[k];
        }
        list[i] = &rows[i].lp;
    }
    return list;
}

/* Texts of events are views; this wire wants them ended by NUL. */
static char *text_of(struct dmk_str s, char *small, size_t cap, char **ret_free)
{
    char *to = s.len < cap ? small : malloc(s.len + 1);

    *ret_free = to == small ? NULL : to;
    if (!to) {
        return small;
    }
    memcpy(to, s.data, s.len);
    to[s.len] = '\0';
    return to;
}

static void grpc_event(void *reply, uint32_t choice, const struct dmk_event *event,
                       const struct dmk_lp *lps, size_t n_lps)
{
    Damask__V1__ChatEvent m = DAMASK__V1__CHAT_EVENT__INIT;
    Damask__V1__ChatDelta d = DAMASK__V1__CHAT_DELTA__INIT;
    Damask__V1__ChatCallBegin begin = DAMASK__V1__CHAT_CALL_BEGIN__INIT;
    Damask__V1__ChatCallDelta delta = DAMASK__V1__CHAT_CALL_DELTA__INIT;
    char small[256] = "", small2[256] = "";
    char *large = NULL, *large2 = NULL;

    d.choice = choice;
    m.kind_case = DAMASK__V1__CHAT_EVENT__KIND_DELTA;
    m.delta = &d;
    switch (event->kind) {
    case DMK_EVENT_REASONING:
        d.kind_case = DAMASK__V1__CHAT_DELTA__KIND_REASONING;
        d.reasoning = text_of(event->text, small, sizeof(small), &large);
        break;
    case DMK_EVENT_CONTENT:
        d.kind_case = DAMASK__V1__CHAT_DELTA__KIND_CONTENT;
        d.content = text_of(event->text, small, sizeof(small), &large);
        break;
    case DMK_EVENT_CALL_BEGIN:
        begin.index = event->call_index;
        begin.id = text_of(event->call_id, small, sizeof(small), &large);
        begin.name = text_of(event->name, small2, sizeof(small2), &large2);
        d.kind_case = DAMASK__V1__CHAT_DELTA__KIND_CALL_BEGIN;
        d.call_begin = &begin;
        break;
    case DMK_EVENT_CALL_DELTA:
        delta.index = event->call_index;
        delta.arguments = text_of(event->text, small, sizeof(small), &large);
        d.kind_case = DAMASK__V1__CHAT_DELTA__KIND_CALL_DELTA;
        d.call_delta = &delta;
        break;
    case DMK_EVENT_CALL_END:
        d.kind_case = DAMASK__V1__CHAT_DELTA__KIND_CALL_END;
        d.call_end = event->call_index;
        break;
    }
    if (n_lps > 0) {
        d.logprobs = make_lps(lps, n_lps);
        d.n_logprobs = d.logprobs ? n_lps : 0;
    }
    send_event(reply, &m);
    free(d.logprobs);
    free(large);
    free(large2);
}

static void grpc_choice_end(void *reply, uint32_t choice, enum dmk_finish finish)
{
    static const Damask__V1__ChatFinish words[] = {
        [DMK_FINISH_STOP] = DAMASK__V1__CHAT_FINISH__CHAT_FINISH_STOP,
        [DMK_FINISH_LENGTH] = DAMASK__V1__CHAT_FINISH__CHAT_FINISH_LENGTH,
        [DMK_FINISH_TOOL_CALLS] = DAMASK__V1__CHAT_FINISH__CHAT_FINISH_TOOL_CALLS,
    };
    Damask__V1__ChatEvent m = DAMASK__V1__CHAT_EVENT__INIT;
    Damask__V1__ChatDelta d = DAMASK__V1__CHAT_DELTA__INIT;

    d.choice = choice;
    d.kind_case = DAMASK__V1__CHAT_DELTA__KIND_FINISH;
    d.finish = words[finish];
    m.kind_case = DAMASK__V1__CHAT_EVENT__KIND_DELTA;
    m.delta = &d;
    send_event(reply, &m);
}

static void grpc_end(void *reply, const struct dmk_usage *usage)
{
    Damask__V1__ChatEvent m = DAMASK__V1__CHAT_EVENT__INIT;
    Damask__V1__ChatEnded ended = DAMASK__V1__CHAT_ENDED__INIT;
    Damask__V1__ChatUsage u = DAMASK__V1__CHAT_USAGE__INIT;

    u.prompt_tokens = usage->n_prompt;
    u.cached_tokens = usage->n_cached;
    u.completion_tokens = usage->n_output;
    u.reasoning_tokens = usage->n_reasoning;
    ended.usage = &u;
    m.kind_case = DAMASK__V1__CHAT_EVENT__KIND_ENDED;
    m.ended = &ended;
    send_event(reply, &m);
}

/* A failure is the call's status; its text is all there is to write. */
static void grpc_error(const struct dmk_api_error *error, struct dmk_buf *out)
{
    dmk_buf_puts(out, error->text);
}

const struct dmk_dialect dmk_dialect_grpc = {
    .name = "grpc",
    .path = "/damask.v1.Frontend/Chat",
    .http = false,
    .content_type = "application/grpc",
    .parse = grpc_parse,
    .reply_new = grpc_reply_new,
    .event = grpc_event,
    .choice_end = grpc_choice_end,
    .end = grpc_end,
    .reply_free = grpc_reply_free,
    .error = grpc_error,
};
