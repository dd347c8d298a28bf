/* A request's start: its id, its place in the queue, what is set up for it. On the loop; the diagram is in
 * request.h. */
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/rpc/msg.h"
#include "router/request_internal.h"

bool dmk_request_id_is_valid(struct dmk_str text)
{
    for (size_t i = 0; i < text.len; i++) {
        const char c = text.data[i];

        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              c == '.' || c == '_' || c == ':' || c == '-')) {
            return false;
        }
    }
    return text.len >= 1 && text.len <= 128;
}

int dmk_request_id_check(struct dmk_str text, struct dmk_api_error *reterr)
{
    char quoted[68];

    for (size_t i = 0; i < text.len; i++) {
        if ((unsigned char)text.data[i] < 0x20 || text.data[i] == 0x7f) {
            return dmk_api_bad(reterr, "x-request-id", "x-request-id \"%s\" has control characters",
                               dmk_api_quote(text, quoted));
        }
    }
    if (text.len > 128) {
        return dmk_api_bad(reterr, "x-request-id",
                           "x-request-id has %zu characters, at most 128 are taken", text.len);
    }
    return 0;
}

bool dmk_traceparent_is_valid(struct dmk_str text)
{
    if (text.len != 55) {
        return false;
    }
    for (size_t i = 0; i < text.len; i++) {
        const char c = text.data[i];
        const bool dash = i == 2 || i == 35 || i == 52;

        if (dash ? c != '-' : !((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) {
            return false;
        }
    }
    return true;
}

const char *dmk_request_id(const struct dmk_request *request)
{
    return request->request_id;
}

void dmk_request_abandon(struct dmk_request *r)
{
    struct dmk_requests *all = r->all;

    if (r->abandoned) {
        return;
    }
    r->abandoned = true;
    dmk_counter_add(all->conf.stats->client_gone, 1);
    if (r->state == DMK_RENDERING) {
        return; /* the pool reads the body; rendered() goes on */
    }
    if (all->in_batch) {
        dmk_request__touch(r);
        return;
    }
    dmk_request__end_abandoned(r);
    dmk_requests__pump(all);
}

/* ---------------------------------------------------------------- start */

static void frame(void *ud, const char *event, struct dmk_bytes payload)
{
    struct dmk_request *r = ud;

    r->out_ns = dmk_requests__now_ns(r->all);
    r->front->frame(r->ud, event, payload);
}

void dmk_request__touch(struct dmk_request *r)
{
    if (dmk_list_empty(&r->lead->dirty)) {
        dmk_list_push_back(&r->all->dirty, &r->lead->dirty);
    }
}

/* When its turn is, if everybody had to wait for one: what tries again keeps its place. */
static int64_t due_ns(const struct dmk_request *r)
{
    return (int64_t)r->lead->timeline.rendered_ns + dmk_msg_priority_ns(r->lead->ask.priority);
}

void dmk_request__queue(struct dmk_request *r)
{
    struct dmk_requests *all = r->all;
    struct dmk_list *behind =
        &all->queue; /* the head of the list stands behind its last entry too */

    dmk_assert(dmk_list_empty(&r->queued));
    r->state = DMK_WAITING;
    while (behind->prev != &all->queue &&
           due_ns(dmk_container_of(behind->prev, struct dmk_request, queued)) > due_ns(r)) {
        behind = behind->prev;
    }
    dmk_list_push_back(behind, &r->queued);
    all->n_waiting++;
}

uint32_t dmk_requests__retry_after_s(const struct dmk_requests *all)
{
    uint64_t tokens = 0;
    double s;

    for (const struct dmk_list *at = all->queue.next; at != &all->queue; at = at->next) {
        tokens +=
            dmk_container_of((struct dmk_list *)at, struct dmk_request, queued)->ask.prompt.len;
    }
    s = all->prefill_rate > 0 ? (double)tokens / all->prefill_rate : 1;
    return s < 1 ? 1 : s > 60 ? 60 : (uint32_t)(s + 0.5);
}

static int make_reply(struct dmk_request *r)
{
    const struct dmk_reply_conf conf = {
        .id_hex = r->id_hex,
        .model = r->ask.model,
        .created_unix_s = dmk_clock_unix_s(),
        .stream = r->ask.stream,
        .include_usage = r->ask.include_usage,
        .logprobs = r->ask.logprobs,
        .top_logprobs = r->ask.top_logprobs,
        .n = r->ask.n * (uint32_t)(1 + r->ask.n_more),
        .n_prompt = (uint32_t)r->ask.prompt.len,
        .note = dmk_buf_str(&r->ask.note),
        .sink = {frame, r},
    };

    r->reply = r->dialect->reply_new(&conf);
    return r->reply ? 0 : -DMK_ENOMEM;
}

/* Its parts wait for workers. */
static void enter_queue(struct dmk_request *lead)
{
    struct dmk_requests *all = lead->all;

    lead->begun = true;
    lead->out_ns = lead->timeline.rendered_ns;
    lead->front->begin(lead->ud, lead->ask.stream);
    for (struct dmk_request *r = lead; r; r = dmk_request__next_part(r)) {
        r->queue_deadline_ns =
            lead->timeline.rendered_ns + all->conf.conf->queue_timeout_ms * DMK_NS_PER_MS;
        dmk_request__queue(r);
    }
    dmk_requests__pump(all);
}

static void fail_out_of_memory(struct dmk_request *r)
{
    struct dmk_api_error error;

    (void)dmk_api_fail(&error, 500, "out_of_memory", "no memory for the request");
    dmk_request__fail(r, &error);
}

/* The job on the pool has ended. */
static void rendered(void *ud)
{
    struct dmk_request *r = ud;
    struct dmk_requests *all = r->all;
    struct dmk_timeline *t = &r->timeline;

    r->state = DMK_WAITING;
    t->rendered_ns = dmk_requests__now_ns(all);
    dmk_histogram_observe(all->conf.stats->tokenize_time,
                          (double)(t->rendered_ns - t->received_ns) / 1e9);
    if (r->abandoned) {
        dmk_request__end_abandoned(r);
    } else if (r->render_rc < 0) {
        dmk_request__fail(r, &r->render_error);
    } else if (r->dialect->local) {
        dmk_request__answer_local(r);
    } else if (all->aborting) {
        dmk_request__fail_busy(r, 503, "draining", "this router is shutting down");
    } else if (all->n_waiting + 1 + r->ask.n_more > all->conf.conf->max_waiting ||
               all->n_open + r->ask.n_more > all->conf.conf->max_requests) {
        dmk_counter_add(all->conf.stats->rejected_queue, 1);
        dmk_request__fail_busy(r, 429, "queue_full", "too many requests are waiting");
    } else {
        if (!r->ask.has_seed) {
            r->ask.seed = dmk_random_u64(); /* kept over attempts */
            r->ask.has_seed = true;
        }
        if (make_reply(r) < 0 || !dmk_request__split(r)) {
            fail_out_of_memory(r);
        } else {
            enter_queue(r);
        }
    }
}

static void set_limits(struct dmk_request *r)
{
    const struct dmk_requests *all = r->all;

    r->limits = (struct dmk_api_limits){
        .max_choices = all->conf.conf->max_choices,
        .max_conv_bytes = 2 * all->conf.conf->max_body_bytes + 65536,
        .max_messages = all->conf.conf->max_messages,
        .max_tools = all->conf.conf->max_tools,
        .max_schema_depth = all->conf.conf->max_schema_depth,
        .max_schema_bytes = all->conf.conf->max_schema_bytes,
        .max_context = dmk_requests__context(all),
        .date_unix_s = all->date_unix_s == -2 ? dmk_clock_unix_s() : all->date_unix_s,
    };
}

void dmk_request__link(struct dmk_request *r)
{
    struct dmk_requests *all = r->all;
    struct dmk_request **bucket = &all->table[r->id.lo & (all->n_buckets - 1)];

    r->next = *bucket;
    *bucket = r;
    dmk_list_push_back(&all->live, &r->node);
    all->n_open++;
    dmk_gauge_set(all->conf.stats->open_requests, all->n_open);
}

int dmk_request_start(struct dmk_requests *all, const struct dmk_request_conf *conf,
                      struct dmk_request **ret, struct dmk_api_error *reterr)
{
    struct dmk_request *r;

    if (all->draining) {
        (void)dmk_api_fail(reterr, 503, "draining", "this router is shutting down");
        reterr->retry_after_s = 1;
        return -DMK_ESHUTDOWN;
    }
    r = all->n_open < all->conf.conf->max_requests ? calloc(1, sizeof(*r)) : NULL;
    if (!r) {
        dmk_counter_add(all->conf.stats->rejected_queue, 1);
        (void)dmk_api_fail(reterr, 429, "too_many_requests", "too many requests are open");
        reterr->retry_after_s = dmk_requests__retry_after_s(all);
        return -DMK_EFULL;
    }
    r->all = all;
    r->dialect = conf->dialect;
    r->front = conf->front;
    r->ud = conf->ud;
    r->body = conf->body;
    r->lead = r;
    r->n_parts_left = 1;
    dmk_list_init(&r->parts);
    r->id = dmk_id128_random();
    dmk_id128_format(r->id, r->id_hex);
    (void)snprintf(r->request_id, sizeof(r->request_id), "%s",
                   conf->request_id ? conf->request_id : r->id_hex);
    (void)snprintf(r->traceparent, sizeof(r->traceparent), "%s",
                   conf->traceparent ? conf->traceparent : "");
    r->timeline.received_ns = dmk_requests__now_ns(all);
    r->deadline_ns = r->timeline.received_ns + all->conf.conf->request_timeout_ms * DMK_NS_PER_MS;
    dmk_ask_init(&r->ask, all->conf.conf->max_prompt_tokens);
    set_limits(r);
    dmk_list_init(&r->queued);
    dmk_list_init(&r->dirty);
    if (dmk_loop_work(all->conf.loop, dmk_request__render, rendered, r) < 0) {
        dmk_ask_fini(&r->ask);
        free(r);
        dmk_counter_add(all->conf.stats->rejected_queue, 1);
        (void)dmk_api_fail(reterr, 429, "too_many_requests", "too many requests wait to be read");
        reterr->retry_after_s = 1;
        return -DMK_EFULL;
    }
    dmk_request__link(r);
    *ret = r;
    return 0;
}
