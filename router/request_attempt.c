/* Requests and workers: admission, reservation, prefill, events, failures. On the loop.
 *
 * An attempt is one Generate and what follows from it. Its number stands in every message; what
 * comes back with another number, or from another worker than the attempt's, is dropped and
 * counted. */
#include <stdio.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "router/request_internal.h"

/* What a reservation covers of the answer; D grows beyond it by itself. */
#define RESERVE_TOKENS 1024
#define FULL_PAUSE_MS  100
#define FULL_PAUSE_MAX 5000

void dmk_request__leave_workers(struct dmk_request *r, bool tell)
{
    struct dmk_requests *all = r->all;

    if (tell) {
        dmk_request__send_cancel(r, r->d);
        dmk_request__send_cancel(r, r->p);
    }
    if (r->d) {
        dmk_assert(r->d->n_requests > 0 && r->d->n_tokens >= r->d_tokens);
        r->d->n_requests--;
        r->d->n_tokens -= r->d_tokens;
        r->d->full_until_ns = 0; /* whatever it held is free, or soon will be */
        all->n_running--;
    }
    if (r->p) {
        dmk_assert(r->p->n_requests > 0 && r->p->n_tokens >= r->p_tokens);
        r->p->n_requests--;
        r->p->n_tokens -= r->p_tokens;
    }
    all->tokens_in_flight -= r->admitted_tokens;
    r->d = r->p = NULL;
    r->d_tokens = r->p_tokens = r->admitted_tokens = 0;
}

static void fail_with(struct dmk_request *r, unsigned status, const char *code, const char *text)
{
    struct dmk_api_error error;

    (void)dmk_api_fail(&error, status, code, "%s", text);
    if (status == 429 || status == 503) {
        error.retry_after_s = dmk_requests__retry_after_s(r->all);
    }
    dmk_request__fail(r, &error);
}

void dmk_request__fail_attempt(struct dmk_request *r, enum dmk_fail_cause cause, const char *text,
                               uint32_t retry_after_ms)
{
    struct dmk_requests *all = r->all;
    struct dmk_stats *stats = all->conf.stats;
    struct dmk_worker *d = r->d;
    const bool sent = r->n_output > 0;
    char line[400];

    (void)snprintf(line, sizeof(line), "%s", text ? text : "");
    /* Once a P has the request either may be to blame: one of them hangs, and the other can but say that its
     * deadline has passed. Before that D alone can be. */
    if (r->p) {
        r->avoid[DMK_WORKER_PREFILL] = r->p->incarnation;
    }
    if (d && cause != DMK_CAUSE_FULL) {
        r->avoid[DMK_WORKER_DECODE] = d->incarnation;
    }
    dmk_request__leave_workers(r, true);
    r->last_cause = cause;
    if (!sent && (cause == DMK_CAUSE_FULL || cause == DMK_CAUSE_DRAINING)) {
        /* Not a failure: it was never admitted there. The queue's deadline goes on. */
        if (d && cause == DMK_CAUSE_FULL) {
            const uint64_t pause = retry_after_ms == 0               ? FULL_PAUSE_MS
                                   : retry_after_ms > FULL_PAUSE_MAX ? FULL_PAUSE_MAX
                                                                     : retry_after_ms;

            d->full_until_ns = dmk_requests__now_ns(all) + pause * DMK_NS_PER_MS;
        }
        dmk_request__queue(r);
        return;
    }
    if (!sent && r->n_retries == 0) {
        r->n_retries++;
        dmk_counter_add(stats->retries[cause], 1);
        dmk_log_warn("req=%s attempt %u failed (%s: %s), trying again", r->request_id, r->attempt,
                     dmk_fail_cause_name(cause), line);
        r->queue_deadline_ns =
            dmk_requests__now_ns(all) + all->conf.conf->queue_timeout_ms * DMK_NS_PER_MS;
        dmk_request__queue(r);
        return;
    }
    dmk_counter_add(stats->failures[cause], 1);
    dmk_log_error("req=%s failed in attempt %u (%s: %s)%s", r->request_id, r->attempt,
                  dmk_fail_cause_name(cause), line, sent ? " after tokens had been sent" : "");
    switch (cause) {
    case DMK_CAUSE_INTERNAL:
    case DMK_CAUSE_PROTOCOL:
        fail_with(r, 502, "worker_failed", "a worker failed while it handled the request");
        break;
    case DMK_CAUSE_MISMATCH:
        fail_with(r, 503, "worker_mismatch", "the workers at hand do not fit each other");
        break;
    case DMK_CAUSE_TIMEOUT:
        fail_with(r, 503, "worker_timeout", "a worker did not answer in time");
        break;
    default:
        fail_with(r, 503, "worker_unavailable", "a worker was lost while it handled the request");
        break;
    }
}

/* ---------------------------------------------------------------- admission */

/* Tokens that the answer may have where there is room for so many. */
static uint32_t answer_bound(const struct dmk_ask *ask, uint32_t room)
{
    const bool is_free = ask->max_tokens == 0 && !dmk_ask_is_prompt_only(ask);

    return is_free || ask->max_tokens > room ? room : ask->max_tokens;
}

/* Fails the request when its tokens can not fit into the context; else sets max_tokens. */
static bool fit_context(struct dmk_request *r, uint32_t context)
{
    const uint64_t n_prompt = r->ask.prompt.len;
    struct dmk_api_error error;

    if (n_prompt >= context) {
        (void)dmk_api_bad_code(
            &error, "context_length_exceeded", "messages",
            "this model's maximum context length is %u tokens; the prompt alone has %llu", context,
            (unsigned long long)n_prompt);
    } else if (r->ask.has_max_tokens && n_prompt + r->ask.max_tokens > context) {
        (void)dmk_api_bad_code(
            &error, "context_length_exceeded", "max_tokens",
            "this model's maximum context length is %u tokens; the prompt has %llu and "
            "max_tokens asks for %u more",
            context, (unsigned long long)n_prompt, r->ask.max_tokens);
    } else {
        const uint32_t bound = answer_bound(&r->ask, context - (uint32_t)n_prompt);

        r->max_tokens = bound > 0 ? bound : 1; /* the one that is sampled for a prompt alone */
        if (r->ask.min_tokens <= bound) {
            return true;
        }
        (void)dmk_api_bad(&error, "min_tokens", "min_tokens is %u, but the answer has %u at most",
                          r->ask.min_tokens, bound);
        dmk_request__fail(r, &error);
        return false;
    }
    if (!r->ask.conv) {
        (void)snprintf(error.param, sizeof(error.param), "%s",
                       n_prompt >= context ? "prompt" : "max_tokens");
    }
    dmk_request__fail(r, &error);
    return false;
}

/* Fails the request when no decode worker could ever hold its choices side by side. */
static bool fit_choices(struct dmk_request *r)
{
    const uint32_t max = dmk_fleet_max_sequences(r->all->fleet);
    struct dmk_api_error error;

    if (r->ask.n <= max) {
        return true;
    }
    (void)dmk_api_bad(&error, r->ask.n_shown > 0 ? "best_of" : "n",
                      "%u choices are asked for, and the decode workers hold at most %u sequences",
                      r->ask.n, max);
    dmk_request__fail(r, &error);
    return false;
}

static void start_attempt(struct dmk_request *r, struct dmk_worker *d, bool forced_local)
{
    struct dmk_requests *all = r->all;
    const uint64_t room = r->max_tokens < RESERVE_TOKENS ? r->max_tokens : RESERVE_TOKENS;

    dmk_list_remove(&r->queued);
    all->n_waiting--;
    all->n_running++;
    r->state = DMK_RESERVING;
    r->attempt++;
    r->forced_local = forced_local;
    r->d = d;
    (void)snprintf(r->d_name, sizeof(r->d_name), "%s", d->id);
    r->p_name[0] = '\0';
    r->d_tokens = r->ask.prompt.len + r->ask.n * room;
    r->admitted_tokens = r->d_tokens;
    d->n_requests++;
    d->n_tokens += r->d_tokens;
    all->tokens_in_flight += r->admitted_tokens;
    r->timeline.dispatched_ns = dmk_requests__now_ns(all);
    r->timeline.reserved_ns = r->timeline.prefilled_ns = 0;
    r->timeline.transfer_bytes = r->timeline.transfer_us = r->timeline.p_compute_us = 0;
    r->timeline.attempts = r->attempt;
    r->n_cached = 0;
    dmk_request__output_reset(r);
    r->step_deadline_ns =
        r->timeline.dispatched_ns + all->conf.conf->reserve_timeout_ms * DMK_NS_PER_MS;
    dmk_log_debug("req=%s attempt %u goes to worker=%s", r->request_id, r->attempt, d->id);
    if (dmk_request__send_generate(r) < 0) {
        dmk_request__fail_attempt(r, DMK_CAUSE_PEER, "its decode worker is gone", 0);
    }
}

uint32_t dmk_requests__context(const struct dmk_requests *all)
{
    const uint32_t fleet = all->fleet ? dmk_fleet_max_context(all->fleet) : 0;
    const uint32_t conf = all->conf.conf->max_context;

    return conf > 0 && conf < fleet ? conf : fleet;
}

/* False: the request must wait, and so must those behind it. */
static bool admit(struct dmk_request *r)
{
    struct dmk_requests *all = r->all;
    const struct dmk_router_conf *conf = all->conf.conf;
    const uint32_t context = dmk_requests__context(all);
    struct dmk_worker *d, *p;
    bool local;

    if (context == 0) {
        return false;
    }
    if (!fit_context(r, context) || !fit_choices(r)) {
        return true;
    }
    if (all->tokens_in_flight > 0 &&
        all->tokens_in_flight + r->ask.prompt.len > conf->max_tokens_in_flight) {
        return false;
    }
    d = dmk_request__pick(r, DMK_WORKER_DECODE, NULL);
    if (!d) {
        return false;
    }
    p = dmk_request__pick(r, DMK_WORKER_PREFILL, d);
    local = dmk_request__may_force(r, d) && (!p || p->hangs);
    start_attempt(r, d, local);
    return true;
}

void dmk_requests__pump(struct dmk_requests *all)
{
    /* Each turn takes the head away or stops; a retry puts it back at most once a turn. */
    for (uint32_t turns = all->n_waiting + 1; turns > 0 && !dmk_list_empty(&all->queue); turns--) {
        struct dmk_request *r = dmk_container_of(all->queue.next, struct dmk_request, queued);

        if (!admit(r)) {
            break;
        }
    }
    dmk_gauge_set(all->conf.stats->n_waiting, all->n_waiting);
    dmk_gauge_set(all->conf.stats->n_running, all->n_running);
    dmk_gauge_set(all->conf.stats->tokens_in_flight, (double)all->tokens_in_flight);
}

/* ---------------------------------------------------------------- events */

static void take_reserved(struct dmk_request *r, const Damask__V1__Reserved *e)
{
    struct dmk_requests *all = r->all;
    struct dmk_stats *stats = all->conf.stats;
    const uint64_t n_prompt = r->ask.prompt.len;
    uint64_t left;

    if (r->state != DMK_RESERVING) {
        return;
    }
    r->state = DMK_PREFILLING;
    r->timeline.reserved_ns = dmk_requests__now_ns(all);
    r->step_deadline_ns =
        r->timeline.reserved_ns + all->conf.conf->prefill_timeout_ms * DMK_NS_PER_MS;
    r->n_cached = e->have < n_prompt ? e->have : (uint32_t)n_prompt;
    if (!e->needs_prefill) {
        dmk_counter_add(r->forced_local ? stats->prefill_forced : stats->prefill_local, 1);
        return;
    }
    r->p = dmk_request__pick(r, DMK_WORKER_PREFILL, r->d);
    if (!r->p) {
        dmk_request__fail_attempt(r, DMK_CAUSE_PEER, "no prefill worker is to be had", 0);
        return;
    }
    dmk_counter_add(stats->prefill_remote, 1);
    left = n_prompt - r->n_cached;
    r->p_tokens = left;
    (void)snprintf(r->p_name, sizeof(r->p_name), "%s", r->p->id);
    r->p->n_requests++;
    r->p->n_tokens += left;
    if (dmk_request__send_prefill(r, e) < 0) {
        dmk_request__fail_attempt(r, DMK_CAUSE_PEER, "its prefill worker is gone", 0);
    }
}

static void leave_p(struct dmk_request *r)
{
    if (r->p) {
        r->p->n_requests--;
        r->p->n_tokens -= r->p_tokens;
        r->p_tokens = 0;
        r->p = NULL;
    }
}

static void take_prefill_done(struct dmk_request *r, const Damask__V1__PrefillDone *e)
{
    struct dmk_timeline *t = &r->timeline;

    if (t->prefilled_ns == 0) {
        t->prefilled_ns = dmk_requests__now_ns(r->all);
    }
    t->p_queue_us = e->queue_us;
    t->p_compute_us = e->compute_us;
    t->transfer_bytes = e->transfer_bytes;
    t->transfer_us = e->transfer_us;
    if (e->transfer_us > 0) {
        dmk_histogram_observe(r->all->conf.stats->transfer_gb_s,
                              (double)e->transfer_bytes / (double)e->transfer_us / 1e3);
    }
    if (e->n_cached > r->n_cached && e->n_cached < r->ask.prompt.len) {
        r->n_cached = e->n_cached;
    }
    leave_p(r);
}

static void take_transferred(struct dmk_request *r, const Damask__V1__Transferred *e)
{
    r->timeline.prefilled_ns = dmk_requests__now_ns(r->all);
    r->timeline.transfer_bytes = e->bytes;
    dmk_counter_add(r->all->conf.stats->transfer_bytes, (double)e->bytes);
}

static void take_first_token(struct dmk_request *r)
{
    struct dmk_stats *stats = r->all->conf.stats;
    struct dmk_timeline *t = &r->timeline;

    r->state = DMK_DECODING;
    t->first_ns = dmk_requests__now_ns(r->all);
    r->all->rate_tokens += r->ask.prompt.len;
    dmk_histogram_observe(stats->ttft, (double)(t->first_ns - t->received_ns) / 1e9);
    dmk_histogram_observe(stats->queue_time, (double)(t->dispatched_ns - t->rendered_ns) / 1e9);
    dmk_histogram_observe(stats->prefill_time, (double)(t->first_ns - t->reserved_ns) / 1e9);
}

static void take_tokens(struct dmk_request *r, const Damask__V1__Tokens *e)
{
    if (r->state == DMK_RESERVING || e->n_ids == 0) {
        return;
    }
    if (r->state == DMK_PREFILLING && !dmk_request__has_prompt_logprobs(r)) {
        dmk_request__fail_attempt(r, DMK_CAUSE_PROTOCOL,
                                  "log-probabilities of the prompt are missing", 0);
        return;
    }
    if (r->state == DMK_PREFILLING) {
        take_first_token(r);
    }
    r->step_deadline_ns =
        dmk_requests__now_ns(r->all) + r->all->conf.conf->token_timeout_ms * DMK_NS_PER_MS;
    dmk_request__touch(r);
    if (!dmk_request__tokens(r, e)) {
        dmk_request__fail_attempt(r, DMK_CAUSE_PROTOCOL, "tokens are missing", 0);
    } else if (r->n_ended == r->ask.n) {
        dmk_request__complete(r);
    }
}

static void take_finished(struct dmk_request *r, const Damask__V1__Finished *e)
{
    struct dmk_timeline *t = &r->timeline;

    if (r->state == DMK_RESERVING) {
        return;
    }
    t->d_prefill_us = e->prefill_us;
    t->d_queue_us = e->queue_us;
    if (e->transfer_bytes > 0) {
        t->transfer_bytes = e->transfer_bytes;
    }
    r->n_cached = e->n_cached < r->ask.prompt.len ? e->n_cached : (uint32_t)r->ask.prompt.len;
    dmk_request__touch(r);
    if (!dmk_request__finished(r, e)) {
        dmk_request__fail_attempt(r, DMK_CAUSE_PROTOCOL, "tokens are missing at the end", 0);
    } else if (r->n_ended == r->ask.n) {
        dmk_request__complete(r);
    }
}

static enum dmk_fail_cause cause_of(Damask__V1__FailureCode code)
{
    switch (code) {
    case DAMASK__V1__FAILURE_CODE__FAILURE_FULL:
        return DMK_CAUSE_FULL;
    case DAMASK__V1__FAILURE_CODE__FAILURE_PEER:
        return DMK_CAUSE_PEER;
    case DAMASK__V1__FAILURE_CODE__FAILURE_TIMEOUT:
        return DMK_CAUSE_TIMEOUT;
    case DAMASK__V1__FAILURE_CODE__FAILURE_MISMATCH:
        return DMK_CAUSE_MISMATCH;
    case DAMASK__V1__FAILURE_CODE__FAILURE_DRAINING:
        return DMK_CAUSE_DRAINING;
    case DAMASK__V1__FAILURE_CODE__FAILURE_REFUSED:
        return DMK_CAUSE_REFUSED;
    default:
        return DMK_CAUSE_INTERNAL;
    }
}

static void take_failed(struct dmk_request *r, struct dmk_worker *w, const Damask__V1__Failed *e)
{
    enum dmk_fail_cause cause = cause_of(e->code);
    const bool from_p = w == r->p;

    if (from_p && r->state == DMK_DECODING) {
        leave_p(r); /* D has all it needs; its state decides */
        return;
    }
    if (from_p && (cause == DMK_CAUSE_FULL || cause == DMK_CAUSE_DRAINING)) {
        /* D's reservation is lost with it: that is an attempt. */
        if (cause == DMK_CAUSE_DRAINING) {
            w->draining = true;
        }
        cause = DMK_CAUSE_REFUSED;
    }
    if (!from_p && cause == DMK_CAUSE_DRAINING) {
        w->draining = true;
    }
    if (!from_p && e->code == DAMASK__V1__FAILURE_CODE__FAILURE_INVALID && r->n_output == 0) {
        struct dmk_api_error error;

        (void)dmk_api_bad(&error, "", "%s", e->text);
        dmk_request__leave_workers(r, true);
        dmk_request__fail(r, &error);
        return;
    }
    dmk_request__fail_attempt(r, cause, e->text, e->retry_after_ms);
}

static const Damask__V1__RequestId *id_of(const Damask__V1__WorkerEvent *e)
{
    switch (e->body_case) {
    case DAMASK__V1__WORKER_EVENT__BODY_RESERVED:
        return e->reserved->id;
    case DAMASK__V1__WORKER_EVENT__BODY_TOKENS:
        return e->tokens->id;
    case DAMASK__V1__WORKER_EVENT__BODY_FINISHED:
        return e->finished->id;
    case DAMASK__V1__WORKER_EVENT__BODY_FAILED:
        return e->failed->id;
    case DAMASK__V1__WORKER_EVENT__BODY_PREFILL_DONE:
        return e->prefill_done->id;
    case DAMASK__V1__WORKER_EVENT__BODY_TRANSFERRED:
        return e->transferred->id;
    case DAMASK__V1__WORKER_EVENT__BODY_PROMPT_LOGPROBS:
        return e->prompt_logprobs->id;
    default:
        return NULL;
    }
}

static struct dmk_request *find(struct dmk_requests *all, const Damask__V1__RequestId *id)
{
    struct dmk_request *r = all->table[id->lo & (all->n_buckets - 1)];

    while (r && (r->id.lo != id->lo || r->id.hi != id->hi)) {
        r = r->next;
    }
    return r;
}

void dmk_request__on_event(struct dmk_requests *all, struct dmk_worker *w,
                           const Damask__V1__WorkerEvent *e)
{
    const Damask__V1__RequestId *id = id_of(e);
    struct dmk_request *r = id ? find(all, id) : NULL;

    if (!r || r->lead->abandoned || id->attempt != r->attempt || (w != r->d && w != r->p)) {
        dmk_counter_add(all->conf.stats->stale_events, 1);
        return;
    }
    if (e->body_case == DAMASK__V1__WORKER_EVENT__BODY_FAILED) {
        take_failed(r, w, e->failed);
    } else if (w == r->p) {
        if (e->body_case == DAMASK__V1__WORKER_EVENT__BODY_PREFILL_DONE) {
            take_prefill_done(r, e->prefill_done);
        }
    } else if (e->body_case == DAMASK__V1__WORKER_EVENT__BODY_RESERVED) {
        take_reserved(r, e->reserved);
    } else if (e->body_case == DAMASK__V1__WORKER_EVENT__BODY_TOKENS) {
        take_tokens(r, e->tokens);
    } else if (e->body_case == DAMASK__V1__WORKER_EVENT__BODY_FINISHED) {
        take_finished(r, e->finished);
    } else if (e->body_case == DAMASK__V1__WORKER_EVENT__BODY_TRANSFERRED) {
        take_transferred(r, e->transferred);
    } else if (e->body_case == DAMASK__V1__WORKER_EVENT__BODY_PROMPT_LOGPROBS &&
               !dmk_request__prompt_logprobs(r, e->prompt_logprobs)) {
        dmk_request__fail_attempt(r, DMK_CAUSE_PROTOCOL,
                                  "log-probabilities of the prompt do not fit it", 0);
    }
}
