/* Responses: events to output items, as a stream of typed events or as one whole response.
 *
 * One reply for each request, on the loop. The answer is a list of items (reasoning, message, function call);
 * an item is open from its first event to the first of another kind or the end. In a stream each step of an
 * item is an event of its own with a number that counts up; whole or streamed, the last response holds all
 * items in full. */
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "router/answer.h"
#include "router/api_responses.h"
#include "router/json_out.h"

enum kind { REASONING, MESSAGE, CALL, N_KINDS };

struct item {
    enum kind kind;
    const char *status; /* static: "in_progress", "completed", "incomplete" */
    struct dmk_buf text;
    struct dmk_buf lps;           /* MESSAGE: entries with commas */
    struct dmk_buf name, call_id; /* CALL */
};

struct reply {
    struct dmk_answer a; /* its frame and sink; its one choice is not used */
    struct dmk_buf note; /* what a response repeats of its request, each behind a comma */
    struct dmk_buf model;
    char id[33];
    int64_t created_unix_s;
    struct item *items; /* [n_items] */
    size_t n_items, cap_items;
    bool open;         /* the last item is */
    bool begun;        /* response.created has gone out */
    bool had[N_KINDS]; /* an item of this kind was there: its next text begins with a joint */
    enum dmk_finish finish;
    uint64_t sequence;
};

static void responses_reply_free(void *reply)
{
    struct reply *r = reply;

    if (!r) {
        return;
    }
    for (size_t i = 0; i < r->n_items; i++) {
        dmk_buf_fini(&r->items[i].text);
        dmk_buf_fini(&r->items[i].lps);
        dmk_buf_fini(&r->items[i].name);
        dmk_buf_fini(&r->items[i].call_id);
    }
    free(r->items);
    dmk_buf_fini(&r->note);
    dmk_buf_fini(&r->model);
    dmk_answer_fini(&r->a);
    free(r);
}

static void *responses_reply_new(const struct dmk_reply_conf *conf)
{
    struct reply *r = calloc(1, sizeof(*r));

    dmk_assert(conf->n == 1);
    if (!r || dmk_answer_init(&r->a, conf, NULL, NULL) < 0) {
        free(r);
        return NULL;
    }
    (void)snprintf(r->id, sizeof(r->id), "%s", conf->id_hex);
    r->created_unix_s = conf->created_unix_s;
    dmk_buf_append_str(&r->note, conf->note);
    dmk_buf_puts(&r->model, conf->model);
    r->a.failed = r->note.failed || r->model.failed;
    return r;
}

/* ---------------------------------------------------------------- pieces of JSON */

static void put_item_id(struct reply *r, size_t i)
{
    static const char *const prefixes[] = {"rs", "msg", "fc"};

    dmk_buf_printf(&r->a.out, "\"%s_%s_%zu\"", prefixes[r->items[i].kind], r->id, i);
}

/* {"type":"output_text",...}; empty: as it is when the part begins. */
static void put_part(struct reply *r, const struct item *item, bool empty)
{
    struct dmk_buf *out = &r->a.out;

    dmk_buf_puts(out, item->kind == MESSAGE ? "{\"type\":\"output_text\",\"text\":"
                                            : "{\"type\":\"reasoning_text\",\"text\":");
    dmk_out_str(out, empty ? dmk_str_from("") : dmk_buf_str(&item->text));
    if (item->kind == MESSAGE) {
        dmk_buf_puts(out, ",\"annotations\":[],\"logprobs\":[");
        dmk_buf_append_str(out, empty ? dmk_str_from("") : dmk_buf_str(&item->lps));
        dmk_buf_putc(out, ']');
    }
    dmk_buf_putc(out, '}');
}

static void put_item(struct reply *r, size_t i, bool empty)
{
    struct item *item = &r->items[i];
    struct dmk_buf *out = &r->a.out;

    dmk_buf_puts(out, "{\"id\":");
    put_item_id(r, i);
    dmk_buf_printf(out, ",\"status\":\"%s\"", item->status);
    switch (item->kind) {
    case REASONING:
        dmk_buf_puts(out, ",\"type\":\"reasoning\",\"summary\":[],\"encrypted_content\":null,"
                          "\"content\":[");
        break;
    case MESSAGE:
        dmk_buf_puts(out, ",\"type\":\"message\",\"role\":\"assistant\",\"content\":[");
        break;
    case CALL:
        dmk_buf_puts(out, ",\"type\":\"function_call\",\"call_id\":");
        dmk_out_str(out, dmk_buf_str(&item->call_id));
        dmk_buf_puts(out, ",\"name\":");
        dmk_out_str(out, dmk_buf_str(&item->name));
        dmk_buf_puts(out, ",\"arguments\":");
        dmk_out_str(out, empty ? dmk_str_from("") : dmk_buf_str(&item->text));
        dmk_buf_putc(out, '}');
        return;
    case N_KINDS:
        break;
    }
    if (!empty) {
        put_part(r, item, false);
    }
    dmk_buf_puts(out, "]}");
}

static void put_usage(struct reply *r, const struct dmk_usage *usage)
{
    dmk_buf_printf(&r->a.out,
                   "{\"input_tokens\":%u,\"input_tokens_details\":{\"cached_tokens\":%u,"
                   "\"cache_write_tokens\":0},\"output_tokens\":%u,"
                   "\"output_tokens_details\":{\"reasoning_tokens\":%u},\"total_tokens\":%u}",
                   usage->n_prompt, usage->n_cached, usage->n_output, usage->n_reasoning,
                   usage->n_prompt + usage->n_output);
}

static void put_error(struct reply *r, const struct dmk_api_error *error)
{
    const char *code = error->status == 429  ? "rate_limit_exceeded"
                       : error->status < 500 ? "invalid_prompt"
                                             : "server_error";

    dmk_buf_printf(&r->a.out, "{\"code\":\"%s\",\"message\":", code);
    dmk_out_str(&r->a.out, dmk_str_from(error->text));
    dmk_buf_putc(&r->a.out, '}');
}

static void put_response(struct reply *r, const char *status, const struct dmk_usage *usage,
                         const struct dmk_api_error *error)
{
    struct dmk_buf *out = &r->a.out;

    dmk_buf_printf(
        out, "{\"id\":\"resp_%s\",\"object\":\"response\",\"created_at\":%lld,\"status\":\"%s\"",
        r->id, (long long)r->created_unix_s, status);
    if (usage) {
        dmk_buf_printf(out, ",\"completed_at\":%lld", (long long)dmk_clock_unix_s());
    }
    dmk_buf_puts(out, ",\"error\":");
    if (error) {
        put_error(r, error);
    } else {
        dmk_buf_puts(out, "null");
    }
    dmk_buf_puts(out, strcmp(status, "incomplete") == 0
                          ? ",\"incomplete_details\":{\"reason\":\"max_output_tokens\"},\"model\":"
                          : ",\"incomplete_details\":null,\"model\":");
    dmk_out_str(out, dmk_buf_str(&r->model));
    dmk_buf_puts(out, ",\"output\":[");
    for (size_t i = 0; i < r->n_items; i++) {
        dmk_buf_puts(out, i > 0 ? "," : "");
        put_item(r, i, false);
    }
    dmk_buf_putc(out, ']');
    dmk_buf_append_str(out, dmk_buf_str(&r->note));
    dmk_buf_puts(out, ",\"usage\":");
    if (usage) {
        put_usage(r, usage);
    } else {
        dmk_buf_puts(out, "null");
    }
    dmk_buf_putc(out, '}');
}

/* ---------------------------------------------------------------- the stream's events */

static void open_event(struct reply *r, const char *type)
{
    dmk_buf_printf(&r->a.out, "{\"type\":\"%s\",\"sequence_number\":", type);
    dmk_buf_put_u64(&r->a.out, r->sequence++);
}

static void close_event(struct reply *r, const char *type)
{
    dmk_buf_putc(&r->a.out, '}');
    dmk_answer_send(&r->a, type);
}

static void send_response(struct reply *r, const char *type, const char *status,
                          const struct dmk_usage *usage, const struct dmk_api_error *error)
{
    open_event(r, type);
    dmk_buf_puts(&r->a.out, ",\"response\":");
    put_response(r, status, usage, error);
    close_event(r, type);
}

static void begin_stream(struct reply *r)
{
    if (r->a.conf.stream && !r->begun) {
        r->begun = true;
        send_response(r, "response.created", "in_progress", NULL, NULL);
        send_response(r, "response.in_progress", "in_progress", NULL, NULL);
    }
}

/* An event about the last item: its place, and for parts of it the place within. */
static void open_item_event(struct reply *r, const char *type, bool with_id, bool with_part)
{
    struct dmk_buf *out = &r->a.out;

    open_event(r, type);
    if (with_id) {
        dmk_buf_puts(out, ",\"item_id\":");
        put_item_id(r, r->n_items - 1);
    }
    dmk_buf_puts(out, ",\"output_index\":");
    dmk_buf_put_u64(out, r->n_items - 1);
    if (with_part) {
        dmk_buf_puts(out, ",\"content_index\":0");
    }
}

static void send_item(struct reply *r, const char *type, bool empty)
{
    open_item_event(r, type, false, false);
    dmk_buf_puts(&r->a.out, ",\"item\":");
    put_item(r, r->n_items - 1, empty);
    close_event(r, type);
}

static void send_part(struct reply *r, const char *type, bool empty)
{
    open_item_event(r, type, true, true);
    dmk_buf_puts(&r->a.out, ",\"part\":");
    put_part(r, &r->items[r->n_items - 1], empty);
    close_event(r, type);
}

/* The event of a kind for a piece of its text, and for all of it. */
static const struct {
    const char *delta, *done;
} text_events[] = {
    [REASONING] = {"response.reasoning_text.delta", "response.reasoning_text.done"},
    [MESSAGE] = {"response.output_text.delta", "response.output_text.done"},
    [CALL] = {"response.function_call_arguments.delta", "response.function_call_arguments.done"},
};

static void send_delta(struct reply *r, struct dmk_str text, const struct dmk_lp *lps, size_t n_lps)
{
    const enum kind kind = r->items[r->n_items - 1].kind;
    const char *type = text_events[kind].delta;

    open_item_event(r, type, true, kind != CALL);
    dmk_buf_puts(&r->a.out, ",\"delta\":");
    dmk_out_str(&r->a.out, text);
    if (kind == MESSAGE) {
        dmk_buf_puts(&r->a.out, ",\"logprobs\":[");
        dmk_out_tokens(&r->a.out, lps, n_lps, false);
        dmk_buf_putc(&r->a.out, ']');
    }
    close_event(r, type);
}

static void send_done(struct reply *r)
{
    const struct item *item = &r->items[r->n_items - 1];
    const char *type = text_events[item->kind].done;
    struct dmk_buf *out = &r->a.out;

    open_item_event(r, type, true, item->kind != CALL);
    if (item->kind == CALL) {
        dmk_buf_puts(out, ",\"name\":");
        dmk_out_str(out, dmk_buf_str(&item->name));
    }
    dmk_buf_puts(out, item->kind == CALL ? ",\"arguments\":" : ",\"text\":");
    dmk_out_str(out, dmk_buf_str(&item->text));
    if (item->kind == MESSAGE) {
        dmk_buf_puts(out, ",\"logprobs\":[");
        dmk_buf_append_str(out, dmk_buf_str(&item->lps));
        dmk_buf_putc(out, ']');
    }
    close_event(r, type);
    if (item->kind != CALL) {
        send_part(r, "response.content_part.done", false);
    }
    send_item(r, "response.output_item.done", false);
}

/* ---------------------------------------------------------------- items */

static void close_item(struct reply *r, const char *status)
{
    if (r->open) {
        dmk_assert(r->items && r->n_items > 0);
        r->open = false;
        r->items[r->n_items - 1].status = status;
        if (r->a.conf.stream) {
            send_done(r);
        }
    }
}

/* NULL: no memory. event: of a call. */
static struct item *open_item(struct reply *r, enum kind kind, const struct dmk_event *event)
{
    struct item *item;

    close_item(r, "completed");
    begin_stream(r);
    if (r->n_items == r->cap_items) {
        const size_t cap = r->cap_items ? 2 * r->cap_items : 4;
        struct item *items = realloc(r->items, cap * sizeof(*items));

        if (!items) {
            r->a.failed = true;
            return NULL;
        }
        r->items = items;
        r->cap_items = cap;
    }
    item = &r->items[r->n_items++];
    *item = (struct item){.kind = kind, .status = "in_progress"};
    r->open = r->had[kind] = true;
    if (kind == CALL) {
        dmk_buf_append_str(&item->name, event->name);
        dmk_buf_append_str(&item->call_id, event->call_id);
    }
    if (r->a.conf.stream) {
        send_item(r, "response.output_item.added", true);
        if (kind != CALL) {
            send_part(r, "response.content_part.added", true);
        }
    }
    return item;
}

static void add_text(struct reply *r, enum kind kind, const struct dmk_event *event,
                     const struct dmk_lp *lps, size_t n_lps)
{
    struct item *item = r->open ? &r->items[r->n_items - 1] : NULL;
    struct dmk_str text = event->text;

    if (!item || item->kind != kind) {
        /* Messages of one kind come joined by a newline; here each is an item of its own. */
        if (kind != CALL && r->had[kind] && text.len > 0 && text.data[0] == '\n') {
            text = (struct dmk_str){text.data + 1, text.len - 1};
        }
        item = text.len > 0 ? open_item(r, kind, event) : NULL;
    }
    if (!item) {
        return;
    }
    dmk_buf_append_str(&item->text, text);
    dmk_out_tokens(&item->lps, lps, n_lps, item->lps.len > 0);
    r->a.failed = r->a.failed || item->text.failed || item->lps.failed;
    if (r->a.conf.stream) {
        send_delta(r, text, lps, n_lps);
    }
}

static void responses_event(void *reply, uint32_t choice, const struct dmk_event *event,
                            const struct dmk_lp *lps, size_t n_lps)
{
    struct reply *r = reply;

    dmk_assert(choice == 0);
    switch (event->kind) {
    case DMK_EVENT_REASONING:
        add_text(r, REASONING, event, NULL, 0);
        break;
    case DMK_EVENT_CONTENT:
        add_text(r, MESSAGE, event, lps, n_lps);
        break;
    case DMK_EVENT_CALL_BEGIN:
        (void)open_item(r, CALL, event);
        break;
    case DMK_EVENT_CALL_DELTA:
        if (r->open && event->text.len > 0) {
            add_text(r, CALL, event, NULL, 0);
        }
        break;
    case DMK_EVENT_CALL_END:
        close_item(r, "completed");
        break;
    }
}

static void responses_choice_end(void *reply, uint32_t choice, enum dmk_finish finish)
{
    struct reply *r = reply;

    dmk_assert(choice == 0);
    r->finish = finish;
    begin_stream(r);
    close_item(r, finish == DMK_FINISH_LENGTH ? "incomplete" : "completed");
}

static void responses_end(void *reply, const struct dmk_usage *usage)
{
    struct reply *r = reply;
    const bool cut = r->finish == DMK_FINISH_LENGTH;
    const char *status = cut ? "incomplete" : "completed";

    if (r->a.conf.stream) {
        send_response(r, cut ? "response.incomplete" : "response.completed", status, usage, NULL);
    } else {
        put_response(r, status, usage, NULL);
        dmk_answer_send(&r->a, NULL);
    }
}

static void responses_fail(void *reply, const struct dmk_api_error *error)
{
    struct reply *r = reply;

    begin_stream(r);
    close_item(r, "incomplete");
    send_response(r, "response.failed", "failed", NULL, error);
}

const struct dmk_dialect dmk_dialect_responses = {
    .name = "responses",
    .path = "/v1/responses",
    .http = true,
    .content_type = "application/json",
    .parse = dmk_api_responses_parse,
    .tables = &dmk_api_responses_tables,
    .reply_new = responses_reply_new,
    .event = responses_event,
    .choice_end = responses_choice_end,
    .end = responses_end,
    .fail = responses_fail,
    .reply_free = responses_reply_free,
    .error = dmk_api_error_json,
};
