/* The conversation as gRPC messages (proto/damask_frontend.proto): one more dialect, no HTTP in it.
 *
 * parse is pure and runs on a pool thread; a reply lives on the loop. A frame is one ChatEvent.
 * Bounds and defaults are those of the Chat Completions dialect. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/json/json.h"
#include "common/text/utf8.h"
#include "proto/damask_frontend.pb-c.h"
#include "router/api.h"

#define MAX_SCHEMA_DEPTH 64

struct parse {
    const struct dmk_api_limits *limits;
    struct dmk_ask *ask;
    struct dmk_conv *conv;
    struct dmk_api_error *err;
};

/* Strings of this wire may hold anything; text inside the router is UTF-8. */
static int check_text(struct parse *p, const char *text, const char *param)
{
    const size_t len = strlen(text);

    if (dmk_utf8_valid_prefix((const uint8_t *)text, len) != len) {
        return dmk_api_bad(p->err, param, "%s is not UTF-8", param);
    }
    return 0;
}

static int copy_text(struct parse *p, const char *text, const char *param, struct dmk_str *ret)
{
    const int rc = check_text(p, text, param);

    if (rc < 0) {
        return rc;
    }
    *ret = dmk_conv_copy(p->conv, dmk_str_from(text));
    return dmk_conv_failed(p->conv)
               ? dmk_api_bad(p->err, "messages", "the conversation is larger than %zu bytes",
                             p->limits->max_conv_bytes)
               : 0;
}

/* Names stand in message headers: no white space, no part of a marker. */
static int copy_name(struct parse *p, const char *text, const char *param, struct dmk_str *ret)
{
    const size_t len = strlen(text);

    for (size_t i = 0; i < len; i++) {
        if ((unsigned char)text[i] <= 0x20 || strchr("<>|\\/\x7f", text[i])) {
            return dmk_api_bad(p->err, param, "%s must not hold white space or any of <>|\\/",
                               param);
        }
    }
    if (len == 0 || len > 64) {
        return dmk_api_bad(p->err, param, "%s must have 1 to 64 bytes, not %zu", param, len);
    }
    return copy_text(p, text, param, ret);
}

static struct dmk_str find_call_name(const struct dmk_conv *conv, struct dmk_str id)
{
    const struct dmk_conv_view *view = dmk_conv_view(conv);

    for (size_t i = view->n_messages; i-- > 0;) {
        for (size_t k = view->messages[i].n_calls; k-- > 0;) {
            if (dmk_str_equal(view->messages[i].calls[k].id, id)) {
                return view->messages[i].calls[k].name;
            }
        }
    }
    return (struct dmk_str){0};
}

static int read_message(struct parse *p, const Damask__V1__ChatMessage *in, size_t i)
{
    static const enum dmk_role roles[] = {DMK_ROLE_SYSTEM, DMK_ROLE_DEVELOPER, DMK_ROLE_USER,
                                          DMK_ROLE_ASSISTANT, DMK_ROLE_TOOL};
    struct dmk_message *m;
    char param[64];
    int rc;

    if (in->role < DAMASK__V1__CHAT_ROLE__CHAT_ROLE_SYSTEM ||
        in->role > DAMASK__V1__CHAT_ROLE__CHAT_ROLE_TOOL) {
        (void)snprintf(param, sizeof(param), "messages[%zu].role", i);
        return dmk_api_bad(p->err, param, "%s must be given", param);
    }
    m = dmk_conv_add_message(p->conv, roles[in->role - 1]);
    if (!m) {
        return dmk_api_bad(p->err, "messages", "the conversation is larger than %zu bytes",
                           p->limits->max_conv_bytes);
    }
    (void)snprintf(param, sizeof(param), "messages[%zu]", i);
    if ((in->name[0] && (rc = copy_name(p, in->name, param, &m->name)) < 0) ||
        (rc = copy_text(p, in->content, param, &m->content)) < 0 ||
        (rc = copy_text(p, in->reasoning, param, &m->reasoning)) < 0 ||
        (rc = copy_text(p, in->tool_call_id, param, &m->call_id)) < 0) {
        return rc;
    }
    m->has_content = in->content[0] || in->role != DAMASK__V1__CHAT_ROLE__CHAT_ROLE_ASSISTANT;
    for (size_t k = 0; k < in->n_tool_calls; k++) {
        struct dmk_tool_call *call = dmk_conv_add_call(p->conv, m);

        if (!call) {
            return dmk_api_bad(p->err, "messages", "the conversation is larger than %zu bytes",
                               p->limits->max_conv_bytes);
        }
        (void)snprintf(param, sizeof(param), "messages[%zu].tool_calls[%zu]", i, k);
        if ((rc = copy_text(p, in->tool_calls[k]->id, param, &call->id)) < 0 ||
            (rc = copy_name(p, in->tool_calls[k]->name, param, &call->name)) < 0 ||
            (rc = copy_text(p, in->tool_calls[k]->arguments, param, &call->arguments)) < 0) {
            return rc;
        }
    }
    if (in->role == DAMASK__V1__CHAT_ROLE__CHAT_ROLE_TOOL) {
        const struct dmk_str name = find_call_name(p->conv, m->call_id);

        m->name = name.len > 0 ? name : m->name;
        if (m->name.len == 0) {
            (void)snprintf(param, sizeof(param), "messages[%zu].tool_call_id", i);
            return dmk_api_bad(p->err, param, "%s is one that no earlier tool call has", param);
        }
    }
    return 0;
}

static int read_tool(struct parse *p, const Damask__V1__ChatTool *in, size_t i)
{
    struct dmk_tool *tool = dmk_conv_add_tool(p->conv);
    struct dmk_error error;
    char param[64];
    int rc;

    (void)snprintf(param, sizeof(param), "tools[%zu]", i);
    if (!tool) {
        return dmk_api_bad(p->err, "tools", "the conversation is larger than %zu bytes",
                           p->limits->max_conv_bytes);
    }
    if ((rc = copy_name(p, in->name, param, &tool->name)) < 0 ||
        (rc = copy_text(p, in->description, param, &tool->description)) < 0) {
        return rc;
    }
    if (in->parameters_json[0]) {
        json_t *schema;

        if (dmk_json_parse(dmk_str_from(in->parameters_json), "parameters_json", MAX_SCHEMA_DEPTH,
                           &schema, &error) < 0) {
            return dmk_api_bad(p->err, param, "%s: parameters_json is not valid JSON", param);
        }
        tool->parameters = schema; /* goes with the conversation */
        if (!json_is_object(schema)) {
            return dmk_api_bad(p->err, param, "%s: parameters_json must be an object", param);
        }
    }
    return 0;
}

static int check_real(struct parse *p, const char *param, double x, double min, double max)
{
    if (!(x >= min && x <= max)) {
        return dmk_api_bad(p->err, param, "%s must be between %g and %g, not %g", param, min, max,
                           x);
    }
    return 0;
}

static int read_sampling(struct parse *p, const Damask__V1__ChatRequest *in)
{
    struct dmk_ask *ask = p->ask;
    int rc;

    if (in->opt_temperature_case == DAMASK__V1__CHAT_REQUEST__OPT_TEMPERATURE_TEMPERATURE) {
        ask->temperature = in->temperature;
    }
    if (in->opt_top_p_case == DAMASK__V1__CHAT_REQUEST__OPT_TOP_P_TOP_P) {
        ask->top_p = in->top_p;
    }
    if (in->opt_repetition_penalty_case ==
        DAMASK__V1__CHAT_REQUEST__OPT_REPETITION_PENALTY_REPETITION_PENALTY) {
        ask->repetition_penalty = in->repetition_penalty;
    }
    ask->has_seed = in->opt_seed_case == DAMASK__V1__CHAT_REQUEST__OPT_SEED_SEED;
    ask->seed = ask->has_seed ? in->seed : 0;
    ask->top_k = in->top_k;
    ask->min_p = in->min_p;
    ask->frequency_penalty = in->frequency_penalty;
    ask->presence_penalty = in->presence_penalty;
    if ((rc = check_real(p, "temperature", (double)ask->temperature, 0, 2)) < 0 ||
        (rc = check_real(p, "top_p", (double)ask->top_p, 1e-6, 1)) < 0 ||
        (rc = check_real(p, "min_p", (double)ask->min_p, 0, 1)) < 0 ||
        (rc = check_real(p, "top_k", ask->top_k, 0, DMK_VOCAB_SIZE)) < 0 ||
        (rc = check_real(p, "frequency_penalty", (double)ask->frequency_penalty, -2, 2)) < 0 ||
        (rc = check_real(p, "presence_penalty", (double)ask->presence_penalty, -2, 2)) < 0 ||
        (rc = check_real(p, "repetition_penalty", (double)ask->repetition_penalty, 0.01, 10)) < 0) {
        return rc;
    }
    for (size_t i = 0; i < in->n_logit_bias; i++) {
        const Damask__V1__ChatBias *b = in->logit_bias[i];

        if (b->token >= DMK_VOCAB_SIZE) {
            return dmk_api_bad(p->err, "logit_bias", "logit_bias has no token id %u", b->token);
        }
        if ((rc = check_real(p, "logit_bias", (double)b->value, -100, 100)) < 0) {
            return rc;
        }
        if (dmk_ask_add_bias(ask, b->token, b->value) < 0) {
            return dmk_api_bad(p->err, "logit_bias", "logit_bias must have at most %d entries",
                               DMK_ASK_MAX_BIAS);
        }
    }
    return 0;
}

static int read_limits(struct parse *p, const Damask__V1__ChatRequest *in)
{
    struct dmk_ask *ask = p->ask;
    int rc;

    ask->n = in->n ? in->n : 1;
    if (ask->n > p->limits->max_choices) {
        const uint32_t n = ask->n;

        ask->n = 1;
        return dmk_api_bad(p->err, "n", "n must be at most %u, not %u", p->limits->max_choices, n);
    }
    ask->has_max_tokens = in->max_tokens > 0;
    ask->max_tokens = in->max_tokens;
    ask->logprobs = in->logprobs;
    ask->top_logprobs = in->top_logprobs;
    ask->parallel_calls = !in->single_tool_call;
    ask->priority = in->priority;
    if (ask->top_logprobs > DMK_ASK_MAX_TOP) {
        return dmk_api_bad(p->err, "top_logprobs", "top_logprobs must be at most %d, not %u",
                           DMK_ASK_MAX_TOP, in->top_logprobs);
    }
    if (strlen(in->cache_salt) > DMK_ASK_MAX_SALT_BYTES) {
        return dmk_api_bad(p->err, "cache_salt", "cache_salt must have at most %d bytes",
                           DMK_ASK_MAX_SALT_BYTES);
    }
    (void)snprintf(ask->cache_salt, sizeof(ask->cache_salt), "%s", in->cache_salt);
    for (size_t i = 0; i < in->n_stop; i++) {
        if ((rc = check_text(p, in->stop[i], "stop")) < 0) {
            return rc;
        }
        if (dmk_ask_add_stop(ask, dmk_str_from(in->stop[i])) < 0) {
            return dmk_api_bad(p->err, "stop", "stop must have at most %d strings of 1 to %d bytes",
                               DMK_ASK_MAX_STOPS, DMK_ASK_MAX_STOP_BYTES);
        }
    }
    return 0;
}

static int read_model(struct parse *p, const Damask__V1__ChatRequest *in)
{
    const size_t len = strlen(in->model);

    if (len == 0 || len > DMK_ASK_MAX_MODEL_BYTES) {
        return dmk_api_bad(p->err, "model", "model must have 1 to %d bytes, not %zu",
                           DMK_ASK_MAX_MODEL_BYTES, len);
    }
    (void)snprintf(p->ask->model, sizeof(p->ask->model), "%s", in->model);
    return check_text(p, in->model, "model");
}

static int read_request(struct parse *p, const Damask__V1__ChatRequest *in)
{
    struct dmk_conv_view *view = dmk_conv_edit(p->conv);
    int rc;

    if ((rc = read_model(p, in)) < 0 || (rc = read_limits(p, in)) < 0 ||
        (rc = read_sampling(p, in)) < 0) {
        return rc;
    }
    p->ask->stream = true;
    p->ask->include_usage = true;
    view->effort = in->effort == DAMASK__V1__CHAT_EFFORT__CHAT_EFFORT_LOW    ? DMK_EFFORT_LOW
                   : in->effort == DAMASK__V1__CHAT_EFFORT__CHAT_EFFORT_HIGH ? DMK_EFFORT_HIGH
                                                                             : DMK_EFFORT_MEDIUM;
    view->tool_choice = in->tool_choice == DAMASK__V1__CHAT_TOOL_CHOICE__CHAT_TOOL_CHOICE_NONE
                            ? DMK_TOOLS_NONE
                            : DMK_TOOLS_AUTO;
    view->date_unix_s = p->limits->date_unix_s;
    if (in->n_messages == 0 || in->n_messages > p->limits->max_messages) {
        return dmk_api_bad(p->err, "messages", "messages must have 1 to %u entries, not %zu",
                           p->limits->max_messages, in->n_messages);
    }
    if (in->n_tools > p->limits->max_tools) {
        return dmk_api_bad(p->err, "tools", "tools must have at most %u entries, not %zu",
                           p->limits->max_tools, in->n_tools);
    }
    for (size_t i = 0; i < in->n_tools; i++) {
        if ((rc = read_tool(p, in->tools[i], i)) < 0) {
            return rc;
        }
    }
    for (size_t i = 0; i < in->n_messages; i++) {
        if ((rc = read_message(p, in->messages[i], i)) < 0) {
            return rc;
        }
    }
    return 0;
}

static int grpc_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                      struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    struct parse p = {.limits = limits, .ask = ask, .err = reterr};
    Damask__V1__ChatRequest *in = damask__v1__chat_request__unpack(NULL, body.len, body.data);
    int rc;

    if (!in) {
        return dmk_api_bad(reterr, "", "the request is not a damask.v1.ChatRequest");
    }
    p.conv = dmk_conv_new(limits->max_conv_bytes);
    ask->conv = p.conv;
    rc = p.conv ? read_request(&p, in)
                : dmk_api_fail(reterr, 503, "out_of_memory", "no memory for the conversation");
    damask__v1__chat_request__free_unpacked(in, NULL);
    return rc;
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
