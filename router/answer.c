/* What the answers of all dialects share; see answer.h. */
#include "router/answer.h"

#include <stdlib.h>
#include "common/base/assert.h"
#include "router/json_out.h"

int dmk_answer_init(struct dmk_answer *a, const struct dmk_reply_conf *conf, const char *prefix,
                    const char *object)
{
    *a = (struct dmk_answer){.conf = *conf, .n_shown = conf->n};
    a->choices = calloc(conf->n, sizeof(a->choices[0]));
    a->shown = calloc(conf->n, sizeof(a->shown[0]));
    if (!a->choices || !a->shown) {
        dmk_answer_fini(a);
        return -DMK_ENOMEM;
    }
    for (uint32_t i = 0; i < conf->n; i++) {
        a->shown[i] = i;
    }
    if (prefix) {
        dmk_buf_printf(&a->head,
                       "{\"id\":\"%s%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", prefix,
                       conf->id_hex, object, (long long)conf->created_unix_s);
        dmk_out_str(&a->head, dmk_str_from(conf->model));
        dmk_buf_puts(&a->head, ",\"choices\":[");
    }
    a->failed = a->head.failed;
    a->conf.id_hex = a->conf.model = NULL;
    a->conf.note = (struct dmk_str){0};
    return 0;
}

void dmk_answer_fini(struct dmk_answer *a)
{
    for (uint32_t i = 0; a->choices && i < a->conf.n; i++) {
        struct dmk_said *c = &a->choices[i];

        for (uint32_t k = 0; k < c->n_calls; k++) {
            dmk_buf_fini(&c->calls[k].id);
            dmk_buf_fini(&c->calls[k].name);
            dmk_buf_fini(&c->calls[k].arguments);
        }
        free(c->calls);
        dmk_buf_fini(&c->content);
        dmk_buf_fini(&c->reasoning);
    }
    free(a->choices);
    free(a->shown);
    dmk_buf_fini(&a->head);
    dmk_buf_fini(&a->out);
    *a = (struct dmk_answer){0};
}

void dmk_answer_rank(void *reply, const uint32_t *order, uint32_t n)
{
    struct dmk_answer *a = reply;

    dmk_assert(n <= a->conf.n);
    memcpy(a->shown, order, n * sizeof(order[0]));
    a->n_shown = n;
}

static struct dmk_said_call *add_call(struct dmk_answer *a, struct dmk_said *c)
{
    if (c->n_calls == c->cap_calls) {
        const uint32_t cap = c->cap_calls ? 2 * c->cap_calls : 4;
        struct dmk_said_call *calls = realloc(c->calls, cap * sizeof(*calls));

        if (!calls) {
            a->failed = true;
            return NULL;
        }
        c->calls = calls;
        c->cap_calls = cap;
    }
    c->calls[c->n_calls] = (struct dmk_said_call){0};
    return &c->calls[c->n_calls++];
}

static void append(struct dmk_answer *a, struct dmk_buf *to, struct dmk_str text)
{
    dmk_buf_append_str(to, text);
    a->failed = a->failed || to->failed;
}

void dmk_answer_keep(struct dmk_answer *a, uint32_t choice, const struct dmk_event *event)
{
    struct dmk_said *c = &a->choices[choice];
    struct dmk_said_call *call;

    switch (event->kind) {
    case DMK_EVENT_REASONING:
        append(a, &c->reasoning, event->text);
        break;
    case DMK_EVENT_CONTENT:
        c->has_content = true;
        append(a, &c->content, event->text);
        break;
    case DMK_EVENT_CALL_BEGIN:
        call = add_call(a, c);
        if (call) {
            append(a, &call->id, event->call_id);
            append(a, &call->name, event->name);
        }
        break;
    case DMK_EVENT_CALL_DELTA:
        if (event->call_index < c->n_calls) {
            append(a, &c->calls[event->call_index].arguments, event->text);
        }
        break;
    case DMK_EVENT_CALL_END:
        break;
    }
}

void dmk_answer_send(struct dmk_answer *a, const char *event)
{
    if (a->out.failed || a->failed) {
        const struct dmk_api_error error = {.status = 500,
                                            .type = "server_error",
                                            .code = "out_of_memory",
                                            .text = "out of memory"};

        dmk_buf_reset(&a->out);
        dmk_api_error_json(&error, &a->out);
    }
    a->conf.sink.frame(a->conf.sink.ud, event, dmk_buf_bytes(&a->out));
    dmk_buf_reset(&a->out);
}

void dmk_answer_open(struct dmk_answer *a, uint32_t choice)
{
    dmk_buf_append_str(&a->out, dmk_buf_str(&a->head));
    dmk_buf_puts(&a->out, "{\"index\":");
    dmk_buf_put_u64(&a->out, choice);
}

static void put_finish(struct dmk_answer *a, const char *finish)
{
    if (finish) {
        dmk_buf_printf(&a->out, ",\"finish_reason\":\"%s\"}", finish);
    } else {
        dmk_buf_puts(&a->out, ",\"finish_reason\":null}");
    }
}

void dmk_answer_close(struct dmk_answer *a, const char *finish)
{
    put_finish(a, finish);
    dmk_buf_puts(&a->out, a->conf.include_usage ? "],\"usage\":null}" : "]}");
    dmk_answer_send(a, NULL);
}

void dmk_answer_end(struct dmk_answer *a, const struct dmk_usage *usage,
                    void (*write)(struct dmk_answer *answer, uint32_t choice))
{
    if (a->conf.stream && !a->conf.include_usage) {
        return;
    }
    dmk_buf_append_str(&a->out, dmk_buf_str(&a->head));
    for (uint32_t i = 0; i < a->n_shown && !a->conf.stream; i++) {
        dmk_buf_printf(&a->out, "%s{\"index\":%u", i ? "," : "", i);
        write(a, a->shown[i]);
        put_finish(a, dmk_finish_name(a->choices[a->shown[i]].finish));
    }
    dmk_buf_puts(&a->out, "],\"usage\":");
    dmk_out_usage(&a->out, usage);
    dmk_buf_putc(&a->out, '}');
    dmk_answer_send(a, NULL);
}
