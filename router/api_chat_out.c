/* Chat Completions: events to chunks of a stream or to one whole body.
 *
 * One reply for each request, on the loop. In a stream every event is one chunk; whole answers are
 * gathered for each choice and written at the end. Both say the same: the deltas of a field joined
 * are the field. */
#include <stdlib.h>
#include "common/base/assert.h"
#include "router/answer.h"
#include "router/api_chat.h"
#include "router/json_out.h"

struct reply {
    struct dmk_answer a;
    struct dmk_buf *lps; /* [n]: entries of logprobs.content of whole answers, with commas */
};

static void chat_reply_free(void *reply)
{
    struct reply *r = reply;

    if (!r) {
        return;
    }
    for (uint32_t i = 0; i < r->a.conf.n; i++) {
        dmk_buf_fini(&r->lps[i]);
    }
    free(r->lps);
    dmk_answer_fini(&r->a);
    free(r);
}

static void *chat_reply_new(const struct dmk_reply_conf *conf)
{
    struct reply *r = calloc(1, sizeof(*r));

    if (r) {
        r->lps = calloc(conf->n, sizeof(r->lps[0]));
    }
    if (!r || !r->lps ||
        dmk_answer_init(&r->a, conf, "chatcmpl-",
                        conf->stream ? "chat.completion.chunk" : "chat.completion") < 0) {
        free(r ? r->lps : NULL);
        free(r);
        return NULL;
    }
    return r;
}

/* ---------------------------------------------------------------- streams */

static void open_chunk(struct reply *r, uint32_t choice)
{
    dmk_answer_open(&r->a, choice);
    dmk_buf_puts(&r->a.out, ",\"delta\":{");
}

static void close_chunk(struct reply *r, const struct dmk_lp *lps, size_t n_lps, const char *finish)
{
    struct dmk_buf *out = &r->a.out;

    if (n_lps > 0) {
        dmk_buf_puts(out, "},\"logprobs\":{\"content\":[");
        dmk_out_tokens(out, lps, n_lps, false);
        dmk_buf_puts(out, "],\"refusal\":null}");
    } else {
        dmk_buf_puts(out, "},\"logprobs\":null");
    }
    dmk_answer_close(&r->a, finish);
}

static void send_role(struct reply *r, uint32_t choice)
{
    if (!r->a.choices[choice].begun) {
        r->a.choices[choice].begun = true;
        open_chunk(r, choice);
        dmk_buf_puts(&r->a.out, "\"role\":\"assistant\",\"content\":\"\"");
        close_chunk(r, NULL, 0, NULL);
    }
}

/* "id":...,"type":"function","function":{"name":..., */
static void write_call_head(struct dmk_buf *out, struct dmk_str id, struct dmk_str name)
{
    dmk_buf_puts(out, "\"id\":");
    dmk_out_str(out, id);
    dmk_buf_puts(out, ",\"type\":\"function\",\"function\":{\"name\":");
    dmk_out_str(out, name);
    dmk_buf_puts(out, ",\"arguments\":");
}

static void write_reasoning(struct dmk_buf *out, struct dmk_str text)
{
    dmk_buf_puts(out, "\"reasoning_content\":");
    dmk_out_str(out, text);
    dmk_buf_puts(out, ",\"reasoning\":");
    dmk_out_str(out, text);
}

static void stream_event(struct reply *r, uint32_t choice, const struct dmk_event *event,
                         const struct dmk_lp *lps, size_t n_lps)
{
    struct dmk_buf *out = &r->a.out;

    if (event->kind == DMK_EVENT_CALL_END) {
        return;
    }
    send_role(r, choice);
    open_chunk(r, choice);
    switch (event->kind) {
    case DMK_EVENT_REASONING:
        write_reasoning(out, event->text);
        break;
    case DMK_EVENT_CONTENT:
        dmk_buf_puts(out, "\"content\":");
        dmk_out_str(out, event->text);
        break;
    case DMK_EVENT_CALL_BEGIN:
        dmk_buf_printf(out, "\"tool_calls\":[{\"index\":%u,", event->call_index);
        write_call_head(out, event->call_id, event->name);
        dmk_buf_puts(out, "\"\"}}]");
        break;
    case DMK_EVENT_CALL_DELTA:
        dmk_buf_printf(
            out, "\"tool_calls\":[{\"index\":%u,\"function\":{\"arguments\":", event->call_index);
        dmk_out_str(out, event->text);
        dmk_buf_puts(out, "}}]");
        break;
    case DMK_EVENT_CALL_END:
        break;
    }
    close_chunk(r, lps, n_lps, NULL);
}

static void chat_event(void *reply, uint32_t choice, const struct dmk_event *event,
                       const struct dmk_lp *lps, size_t n_lps)
{
    struct reply *r = reply;

    dmk_assert(choice < r->a.conf.n);
    if (r->a.conf.stream) {
        stream_event(r, choice, event, lps, n_lps);
        return;
    }
    dmk_answer_keep(&r->a, choice, event);
    dmk_out_tokens(&r->lps[choice], lps, n_lps, r->lps[choice].len > 0);
}

static void chat_choice_end(void *reply, uint32_t choice, enum dmk_finish finish)
{
    struct reply *r = reply;

    dmk_assert(choice < r->a.conf.n);
    r->a.choices[choice].finish = finish;
    if (r->a.conf.stream) {
        send_role(r, choice);
        open_chunk(r, choice);
        close_chunk(r, NULL, 0, dmk_finish_name(finish));
    }
}

/* ---------------------------------------------------------------- whole answers */

static void write_message(struct dmk_buf *out, const struct dmk_said *c)
{
    dmk_buf_puts(out, "{\"role\":\"assistant\",\"content\":");
    if (c->has_content) {
        dmk_out_str(out, dmk_buf_str(&c->content));
    } else {
        dmk_buf_puts(out, "null");
    }
    dmk_buf_puts(out, ",\"refusal\":null");
    if (c->reasoning.len > 0) {
        dmk_buf_putc(out, ',');
        write_reasoning(out, dmk_buf_str(&c->reasoning));
    }
    for (uint32_t i = 0; i < c->n_calls; i++) {
        dmk_buf_puts(out, i == 0 ? ",\"tool_calls\":[{" : ",{");
        write_call_head(out, dmk_buf_str(&c->calls[i].id), dmk_buf_str(&c->calls[i].name));
        dmk_out_str(out, dmk_buf_str(&c->calls[i].arguments));
        dmk_buf_puts(out, i + 1 < c->n_calls ? "}}" : "}}]");
    }
    dmk_buf_putc(out, '}');
}

static void write_choice(struct dmk_answer *a, uint32_t choice)
{
    const struct dmk_buf *lps =
        &((struct reply *)(void *)a)->lps[choice]; /* a is its first member */

    dmk_buf_puts(&a->out, ",\"message\":");
    write_message(&a->out, &a->choices[choice]);
    if (a->conf.logprobs) {
        dmk_buf_puts(&a->out, ",\"logprobs\":{\"content\":[");
        dmk_buf_append_str(&a->out, dmk_buf_str(lps));
        dmk_buf_puts(&a->out, "],\"refusal\":null}");
        a->failed = a->failed || lps->failed;
    } else {
        dmk_buf_puts(&a->out, ",\"logprobs\":null");
    }
}

static void chat_end(void *reply, const struct dmk_usage *usage)
{
    struct reply *r = reply;

    dmk_answer_end(&r->a, usage, write_choice);
}

const struct dmk_dialect dmk_dialect_chat = {
    .name = "chat",
    .path = "/v1/chat/completions",
    .http = true,
    .content_type = "application/json",
    .done_mark = true,
    .parse = dmk_api_chat_parse,
    .tables = &dmk_api_chat_tables,
    .reply_new = chat_reply_new,
    .event = chat_event,
    .choice_end = chat_choice_end,
    .rank = dmk_answer_rank,
    .end = chat_end,
    .reply_free = chat_reply_free,
    .error = dmk_api_error_json,
};
