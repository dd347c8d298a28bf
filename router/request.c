/* The life of requests: start, queue, deadlines, end. On the loop; the diagram is in request.h. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/rpc/msg.h"
#include "router/request_internal.h"

#define TICK_MS        50
#define RATE_WINDOW_NS DMK_NS_PER_S

static uint64_t now_ns(const struct dmk_requests *all)
{
    return dmk_loop_now_ns(all->conf.loop);
}

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

    r->out_ns = now_ns(r->all);
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
    t->rendered_ns = now_ns(all);
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
    r->timeline.received_ns = now_ns(all);
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

/* Visits every request; a visit may free it and its other parts. */
static void visit_all(struct dmk_requests *all,
                      void (*visit)(struct dmk_request *r, const void *ud), const void *ud)
{
    struct dmk_list rest;

    dmk_list_init(&rest);
    dmk_list_take_all(&rest, &all->live);
    while (!dmk_list_empty(&rest)) {
        struct dmk_list *node = dmk_list_pop(&rest);

        dmk_list_push_back(&all->live, node);
        visit(dmk_container_of(node, struct dmk_request, node), ud);
    }
}

/* ---------------------------------------------------------------- time */

static void check_deadlines(struct dmk_request *r, const void *ud)
{
    const uint64_t now = *(const uint64_t *)ud;

    if (r->state == DMK_RENDERING) {
        return; /* bounded by the size of a body */
    }
    if (now >= r->deadline_ns) {
        dmk_request__fail_busy(r, 503, "request_timeout",
                               "the request took longer than this server allows");
    } else if (r->state == DMK_WAITING && now >= r->queue_deadline_ns) {
        dmk_counter_add(r->all->conf.stats->rejected_deadline, 1);
        dmk_request__fail_busy(r, 503, "no_capacity", "no worker had room for the request in time");
    } else if (r->state != DMK_WAITING && r->state != DMK_OVER && now >= r->step_deadline_ns) {
        dmk_request__fail_attempt(r, DMK_CAUSE_TIMEOUT,
                                  r->state == DMK_RESERVING    ? "no answer to the reservation"
                                  : r->state == DMK_PREFILLING ? "no first token"
                                                               : "no further token",
                                  0);
    } else if (r->lead == r && r->ask.stream &&
               now - r->out_ns >= r->all->conf.conf->keepalive_ms * DMK_NS_PER_MS) {
        r->out_ns = now;
        r->front->idle(r->ud);
    }
}

static void tick(void *ud)
{
    struct dmk_requests *all = ud;
    const uint64_t now = now_ns(all);

    visit_all(all, check_deadlines, &now);
    if (now - all->rate_ns >= RATE_WINDOW_NS) {
        const double rate = (double)all->rate_tokens * 1e9 / (double)(now - all->rate_ns);

        if (rate > 0) {
            all->prefill_rate = all->prefill_rate > 0 ? 0.7 * all->prefill_rate + 0.3 * rate : rate;
        }
        all->rate_tokens = 0;
        all->rate_ns = now;
    }
    dmk_requests__pump(all);
}

/* ---------------------------------------------------------------- the fleet's calls */

static void on_event(void *ud, struct dmk_worker *worker, const Damask__V1__WorkerEvent *event)
{
    struct dmk_requests *all = ud;

    all->in_batch = true;
    dmk_request__on_event(all, worker, event);
}

/* Writes what dirty requests hold, one write each. A write costs several times what its tokens do, so a
 * request that was flushed less than the gap ago stays dirty for the rest of the gap. */
static void flush_dirty(struct dmk_requests *all)
{
    const uint64_t now = now_ns(all), gap_ms = all->conf.conf->stream_gap_ms;
    bool some_wait = false;
    struct dmk_list *next;

    for (struct dmk_list *at = all->dirty.next; at != &all->dirty; at = next) {
        struct dmk_request *r = dmk_container_of(at, struct dmk_request, dirty);

        next = at->next; /* fronts end no request from within a call */
        if (!r->abandoned && now - r->flushed_ns < gap_ms * DMK_NS_PER_MS) {
            some_wait = true;
            continue;
        }
        dmk_list_remove(&r->dirty);
        if (r->abandoned) {
            dmk_request__end_abandoned(r);
        } else {
            r->flushed_ns = now;
            r->front->flush(r->ud);
        }
    }
    if (some_wait && !all->late_flush_runs) {
        all->late_flush_runs = true;
        dmk_timer_start(all->late_flush, gap_ms, 0);
    }
}

static void on_late_flush(void *ud)
{
    struct dmk_requests *all = ud;

    all->late_flush_runs = false;
    flush_dirty(all);
}

static void on_batch_end(void *ud)
{
    struct dmk_requests *all = ud;

    all->in_batch = false;
    flush_dirty(all);
    dmk_requests__pump(all);
}

struct down {
    struct dmk_worker *worker;
    const char *why;
};

static void leave_lost(struct dmk_request *r, const void *ud)
{
    const struct down *down = ud;

    if (r->d == down->worker || (r->p == down->worker && r->state != DMK_DECODING)) {
        dmk_request__fail_attempt(r, DMK_CAUSE_PEER, down->why, 0);
    } else if (r->p == down->worker) {
        r->p->n_requests--;
        r->p->n_tokens -= r->p_tokens;
        r->p_tokens = 0;
        r->p = NULL;
    }
}

static void on_down(void *ud, struct dmk_worker *worker, const char *why)
{
    struct dmk_requests *all = ud;
    const struct down down = {worker, why};

    all->in_batch = true;
    visit_all(all, leave_lost, &down);
}

static void on_change(void *ud)
{
    struct dmk_requests *all = ud;

    if (!all->in_batch && all->fleet) {
        dmk_requests__pump(all);
    }
}

struct dmk_fleet_events dmk_requests_fleet_events(struct dmk_requests *requests)
{
    return (struct dmk_fleet_events){
        .on_event = on_event,
        .on_batch_end = on_batch_end,
        .on_down = on_down,
        .on_change = on_change,
        .ud = requests,
    };
}

void dmk_requests_set_fleet(struct dmk_requests *requests, struct dmk_fleet *fleet)
{
    requests->fleet = fleet;
    dmk_timer_start(requests->tick, TICK_MS, TICK_MS);
}

/* ---------------------------------------------------------------- all of them */

static int parse_date(const char *text, int64_t *ret_unix_s, struct dmk_error *reterr)
{
    struct tm tm = {0};
    const char *end;

    if (strcmp(text, "today") == 0) {
        *ret_unix_s = -2;
        return 0;
    }
    if (strcmp(text, "none") == 0) {
        *ret_unix_s = -1;
        return 0;
    }
    end = strptime(text, "%Y-%m-%d", &tm);
    if (!end || *end) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "date must be today, none or YYYY-MM-DD, not \"%s\"", text);
    }
    *ret_unix_s = timegm(&tm);
    return 0;
}

int dmk_requests_new(const struct dmk_requests_conf *conf, struct dmk_requests **ret,
                     struct dmk_error *reterr)
{
    struct dmk_requests *all = calloc(1, sizeof(*all));
    int rc;

    if (!all) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for requests");
    }
    all->conf = *conf;
    dmk_list_init(&all->live);
    dmk_list_init(&all->queue);
    dmk_list_init(&all->dirty);
    dmk_buf_init(&all->text, 0);
    dmk_scratches_init(&all->scratches);
    all->n_buckets = 64;
    while (all->n_buckets < conf->conf->max_requests) {
        all->n_buckets *= 2;
    }
    rc = parse_date(conf->conf->date, &all->date_unix_s, reterr);
    if (rc == 0) {
        all->table = calloc(all->n_buckets, sizeof(all->table[0]));
        all->tick = dmk_timer_new(conf->loop, tick, all);
        all->late_flush = dmk_timer_new(conf->loop, on_late_flush, all);
        all->rate_ns = now_ns(all);
        if (!all->table || !all->tick || !all->late_flush) {
            rc = dmk_error_set(reterr, -DMK_ENOMEM, "no memory for %u requests",
                               conf->conf->max_requests);
        }
    }
    if (rc < 0) {
        dmk_requests_free(&all);
        return rc;
    }
    *ret = all;
    return 0;
}

void dmk_requests_free(struct dmk_requests **requests)
{
    struct dmk_requests *all = *requests;

    if (!all) {
        return;
    }
    dmk_assert(all->n_open == 0);
    dmk_timer_free(&all->tick);
    dmk_timer_free(&all->late_flush);
    free(all->table);
    free(all->lps);
    dmk_buf_fini(&all->text);
    dmk_scratches_fini(&all->scratches);
    free(all);
    *requests = NULL;
}

uint32_t dmk_requests_n_open(const struct dmk_requests *requests)
{
    return requests->n_open;
}

void dmk_requests_drain(struct dmk_requests *requests)
{
    requests->draining = true;
}

static void abort_one(struct dmk_request *r, const void *ud)
{
    (void)ud;
    if (r->state != DMK_RENDERING) {
        dmk_request__fail_busy(r, 503, "draining", "this router is shutting down");
    }
}

void dmk_requests_abort_all(struct dmk_requests *requests)
{
    requests->aborting = true;
    visit_all(requests, abort_one, NULL);
}
