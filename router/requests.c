/* All requests: their deadlines, what the fleet says of them, draining. On the loop; see request.h. */
#include <stdlib.h>
#include <time.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "router/request_internal.h"

#define TICK_MS        50
#define RATE_WINDOW_NS DMK_NS_PER_S

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
        if (!r->all->fleet || dmk_fleet_n_usable(r->all->fleet, DMK_WORKER_DECODE) == 0) {
            dmk_request__fail_busy(r, 503, "worker_unavailable", "no decode worker is up");
        } else if (!dmk_ask_scores_prompt(&r->ask) &&
                   !dmk_fleet_gets_prompts(r->all->fleet, r->all->conf.conf->local_prefill)) {
            dmk_request__fail_busy(r, 503, "worker_unavailable",
                                   "no prefill worker that fits the decode workers is up");
        } else {
            dmk_request__fail_busy(r, 503, "no_capacity",
                                   "no worker had room for the request in time");
        }
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
    const uint64_t now = dmk_requests__now_ns(all);

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
    const uint64_t now = dmk_requests__now_ns(all), gap_ms = all->conf.conf->stream_gap_ms;
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
        all->rate_ns = dmk_requests__now_ns(all);
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
