/* Chat Completions: events to chunks of a stream or to one whole body.
 *
 * One reply for each request, on the loop. In a stream every event is one chunk; whole answers are
 * gathered for each choice and written at the end. Both say the same: the deltas of a field joined
 * are the field. */
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "router/api_chat.h"
#include "router/json_out.h"

struct call {
    struct dmk_buf head; /* "id":...,"type":"function","function":{"name":... */
    struct dmk_buf arguments;
};

struct choice {
    bool begun; /* its role was sent */
    bool has_content;
    enum dmk_finish finish;
    struct dmk_buf content, reasoning;
    struct dmk_buf lps; /* entries of logprobs.content, with commas */
    struct call *calls; /* [n_calls] */
    uint32_t n_calls, cap_calls;
};

struct reply {
    struct dmk_reply_conf conf; /* strings in it are not kept */
    struct dmk_buf head;        /* of each chunk or body, up to and with "choices":[ */
    struct dmk_buf out;         /* the frame being written */
    bool failed;                /* no memory: the frames say so */
    uint32_t n;
    struct choice choices[];
};

static void *chat_reply_new(const struct dmk_reply_conf *conf)
{
    struct reply *r = calloc(1, sizeof(*r) + conf->n * sizeof(r->choices[0]));

    if (!r) {
        return NULL;
    }
    r->conf = *conf;
    r->n = conf->n;
    dmk_buf_init(&r->head, 0);
    dmk_buf_init(&r->out, 0);
    for (uint32_t i = 0; i < conf->n; i++) {
        dmk_buf_init(&r->choices[i].content, 0);
        dmk_buf_init(&r->choices[i].reasoning, 0);
        dmk_buf_init(&r->choices[i].lps, 0);
    }
    dmk_buf_printf(&r->head,
                   "{\"id\":\"chatcmpl-%s\",\"object\":\"%s\",\"created\":%lld,\"model\":",
                   conf->id_hex, conf->stream ? "chat.completion.chunk" : "chat.completion",
                   (long long)conf->created_unix_s);
    dmk_out_str(&r->head, dmk_str_from(conf->model));
    dmk_buf_puts(&r->head, ",\"choices\":[");
    r->conf.id_hex = r->conf.model = NULL;
    return r;
}

static void chat_reply_free(void *reply)
{
    struct reply *r = reply;

    if (!r) {
        return;
    }
    for (uint32_t i = 0; i < r->n; i++) {
        struct choice *c = &r->choices[i];

        for (uint32_t k = 0; k < c->n_calls; k++) {
            dmk_buf_fini(&c->calls[k].head);
            dmk_buf_fini(&c->calls[k].arguments);
        }
        free(c->calls);
        dmk_buf_fini(&c->content);
        dmk_buf_fini(&c->reasoning);
        dmk_buf_fini(&c->lps);
    }
    dmk_buf_fini(&r->head);
    dmk_buf_fini(&r->out);
    free(r);
}

static void chat_error(const struct dmk_api_error *error, struct dmk_buf *out)
{
    dmk_api_error_json(error, out);
}

static void send_frame(struct reply *r)
{
    if (r->out.failed) {
        const struct dmk_api_error error = {.status = 500,
                                            .type = "server_error",
                                            .code = "out_of_memory",
                                            .text = "out of memory"};

        dmk_buf_reset(&r->out);
        chat_error(&error, &r->out);
    }
    r->conf.sink.frame(r->conf.sink.ud, NULL, dmk_buf_bytes(&r->out));
    dmk_buf_reset(&r->out);
}

static void write_bytes(struct dmk_buf *out, struct dmk_bytes bytes)
{
    dmk_buf_putc(out, '[');
    for (size_t i = 0; i < bytes.len; i++) {
        dmk_buf_printf(out, i ? ",%u" : "%u", bytes.data[i]);
    }
    dmk_buf_putc(out, ']');
}

static void write_token(struct dmk_buf *out, struct dmk_bytes bytes, float logprob)
{
    dmk_buf_puts(out, "{\"token\":");
    dmk_out_lossy(out, bytes);
    dmk_buf_puts(out, ",\"logprob\":");
    dmk_out_logprob(out, logprob);
    dmk_buf_puts(out, ",\"bytes\":");
    write_bytes(out, bytes);
}

static void write_lps(struct dmk_buf *out, const struct dmk_lp *lps, size_t n, bool comma)
{
    for (size_t i = 0; i < n; i++) {
        if (comma || i > 0) {
            dmk_buf_putc(out, ',');
        }
        write_token(out, lps[i].bytes, lps[i].logprob);
        dmk_buf_puts(out, ",\"top_logprobs\":[");
        for (uint32_t k = 0; k < lps[i].n_top; k++) {
            if (k > 0) {
                dmk_buf_putc(out, ',');
            }
            write_token(out, lps[i].top[k].bytes, lps[i].top[k].logprob);
            dmk_buf_putc(out, '}');
        }
        dmk_buf_puts(out, "]}");
    }
}

static void begin_chunk(struct reply *r, uint32_t choice)
{
    dmk_buf_append_str(&r->out, dmk_buf_str(&r->head));
    dmk_buf_puts(&r->out, "{\"index\":");
    dmk_buf_put_u64(&r->out, choice);
    dmk_buf_puts(&r->out, ",\"delta\":{");
}

static void end_chunk(struct reply *r, const struct dmk_lp *lps, size_t n_lps, const char *finish)
{
    struct dmk_buf *out = &r->out;

    dmk_buf_puts(out, "},\"logprobs\":");
    if (n_lps > 0) {
        dmk_buf_puts(out, "{\"content\":[");
        write_lps(out, lps, n_lps, false);
        dmk_buf_puts(out, "],\"refusal\":null}");
    } else {
        dmk_buf_puts(out, "null");
    }
    if (finish) {
        dmk_buf_printf(out, ",\"finish_reason\":\"%s\"}]", finish);
    } else {
        dmk_buf_puts(out, ",\"finish_reason\":null}]");
    }
    dmk_buf_puts(out, r->conf.include_usage ? ",\"usage\":null}" : "}");
    send_frame(r);
}

static void send_role(struct reply *r, uint32_t choice)
{
    if (!r->choices[choice].begun) {
        r->choices[choice].begun = true;
        begin_chunk(r, choice);
        dmk_buf_puts(&r->out, "\"role\":\"assistant\",\"content\":\"\"");
        end_chunk(r, NULL, 0, NULL);
    }
}

static void write_call_head(struct dmk_buf *out, const struct dmk_event *event)
{
    dmk_buf_puts(out, "\"id\":");
    dmk_out_str(out, event->call_id);
    dmk_buf_puts(out, ",\"type\":\"function\",\"function\":{\"name\":");
    dmk_out_str(out, event->name);
}

static void stream_event(struct reply *r, uint32_t choice, const struct dmk_event *event,
                         const struct dmk_lp *lps, size_t n_lps)
{
    if (event->kind == DMK_EVENT_CALL_END) {
        return;
    }
    send_role(r, choice);
    begin_chunk(r, choice);
    switch (event->kind) {
    case DMK_EVENT_REASONING:
        dmk_buf_puts(&r->out, "\"reasoning_content\":");
        dmk_out_str(&r->out, event->text);
        dmk_buf_puts(&r->out, ",\"reasoning\":");
        dmk_out_str(&r->out, event->text);
        break;
    case DMK_EVENT_CONTENT:
        dmk_buf_puts(&r->out, "\"content\":");
        dmk_out_str(&r->out, event->text);
        break;
    case DMK_EVENT_CALL_BEGIN:
        dmk_buf_printf(&r->out, "\"tool_calls\":[{\"index\":%u,", event->call_index);
        write_call_head(&r->out, event);
        dmk_buf_puts(&r->out, ",\"arguments\":\"\"}}]");
        break;
    case DMK_EVENT_CALL_DELTA:
        dmk_buf_printf(&r->out, "\"tool_calls\":[{\"index\":%u,\"function\":{\"arguments\":",
                       event->call_index);
        dmk_out_str(&r->out, event->text);
        dmk_buf_puts(&r->out, "}}]");
        break;
    case DMK_EVENT_CALL_END:
        break;
    }
    end_chunk(r, lps, n_lps, NULL);
}

static struct call *add_call(struct reply *r, struct choice *c)
{
    if (c->n_calls == c->cap_calls) {
        const uint32_t cap = c->cap_calls ? 2 * c->cap_calls : 4;
        struct call *calls = realloc(c->calls, cap * sizeof(*calls));

        if (!calls) {
            r->failed = true;
            return NULL;
        }
        c->calls = calls;
        c->cap_calls = cap;
    }
    dmk_buf_init(&c->calls[c->n_calls].head, 0);
    dmk_buf_init(&c->calls[c->n_calls].arguments, 0);
    return &c->calls[c->n_calls++];
}

static void gather_event(struct reply *r, struct choice *c, const struct dmk_event *event,
                         const struct dmk_lp *lps, size_t n_lps)
{
    struct call *call;

    switch (event->kind) {
    case DMK_EVENT_REASONING:
        dmk_buf_append_str(&c->reasoning, event->text);
        break;
    case DMK_EVENT_CONTENT:
        c->has_content = true;
        dmk_buf_append_str(&c->content, event->text);
        write_lps(&c->lps, lps, n_lps, c->lps.len > 0);
        break;
    case DMK_EVENT_CALL_BEGIN:
        call = add_call(r, c);
        if (call) {
            write_call_head(&call->head, event);
        }
        break;
    case DMK_EVENT_CALL_DELTA:
        if (event->call_index < c->n_calls) {
            dmk_buf_append_str(&c->calls[event->call_index].arguments, event->text);
        }
        break;
    case DMK_EVENT_CALL_END:
        break;
    }
}

static void chat_event(void *reply, uint32_t choice, const struct dmk_event *event,
                       const struct dmk_lp *lps, size_t n_lps)
{
    struct reply *r = reply;

    dmk_assert(choice < r->n);
    if (r->conf.stream) {
        stream_event(r, choice, event, lps, n_lps);
    } else {
        gather_event(r, &r->choices[choice], event, lps, n_lps);
    }
}

static void chat_choice_end(void *reply, uint32_t choice, enum dmk_finish finish)
{
    struct reply *r = reply;

    dmk_assert(choice < r->n);
    r->choices[choice].finish = finish;
    if (r->conf.stream) {
        send_role(r, choice);
        begin_chunk(r, choice);
        end_chunk(r, NULL, 0, dmk_finish_name(finish));
    }
}

static void write_message(struct reply *r, const struct choice *c)
{
    struct dmk_buf *out = &r->out;

    dmk_buf_puts(out, "{\"role\":\"assistant\",\"content\":");
    if (c->has_content) {
        dmk_out_str(out, dmk_buf_str(&c->content));
    } else {
        dmk_buf_puts(out, "null");
    }
    dmk_buf_puts(out, ",\"refusal\":null");
    if (c->reasoning.len > 0) {
        dmk_buf_puts(out, ",\"reasoning_content\":");
        dmk_out_str(out, dmk_buf_str(&c->reasoning));
        dmk_buf_puts(out, ",\"reasoning\":");
        dmk_out_str(out, dmk_buf_str(&c->reasoning));
    }
    for (uint32_t i = 0; i < c->n_calls; i++) {
        dmk_buf_puts(out, i == 0 ? ",\"tool_calls\":[{" : ",{");
        dmk_buf_append_str(out, dmk_buf_str(&c->calls[i].head));
        dmk_buf_puts(out, ",\"arguments\":");
        dmk_out_str(out, dmk_buf_str(&c->calls[i].arguments));
        dmk_buf_puts(out, i + 1 < c->n_calls ? "}}" : "}}]");
        out->failed = out->failed || c->calls[i].head.failed || c->calls[i].arguments.failed;
    }
    dmk_buf_putc(out, '}');
    out->failed = out->failed || c->content.failed || c->reasoning.failed || c->lps.failed;
}

static void chat_end(void *reply, const struct dmk_usage *usage)
{
    struct reply *r = reply;
    struct dmk_buf *out = &r->out;

    if (r->conf.stream && !r->conf.include_usage) {
        return;
    }
    dmk_buf_append_str(out, dmk_buf_str(&r->head));
    for (uint32_t i = 0; i < r->n && !r->conf.stream; i++) {
        dmk_buf_printf(out, "%s{\"index\":%u,\"message\":", i ? "," : "", i);
        write_message(r, &r->choices[i]);
        dmk_buf_puts(out, ",\"logprobs\":");
        if (r->conf.logprobs) {
            dmk_buf_puts(out, "{\"content\":[");
            dmk_buf_append_str(out, dmk_buf_str(&r->choices[i].lps));
            dmk_buf_puts(out, "],\"refusal\":null}");
        } else {
            dmk_buf_puts(out, "null");
        }
        dmk_buf_printf(out, ",\"finish_reason\":\"%s\"}", dmk_finish_name(r->choices[i].finish));
    }
    dmk_buf_puts(out, "],\"usage\":");
    dmk_out_usage(out, usage);
    dmk_buf_putc(out, '}');
    out->failed = out->failed || r->failed || r->head.failed;
    send_frame(r);
}

const struct dmk_dialect dmk_dialect_chat = {
    .name = "chat",
    .path = "/v1/chat/completions",
    .http = true,
    .content_type = "application/json",
    .parse = dmk_api_chat_parse,
    .reply_new = chat_reply_new,
    .event = chat_event,
    .choice_end = chat_choice_end,
    .end = chat_end,
    .reply_free = chat_reply_free,
    .error = chat_error,
};
