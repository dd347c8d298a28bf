/* Requests, jobs and their end: everything of the prefill core but its steps (step.c). */
#include "prefill/internal.h"
#include "common/base/assert.h"
#include "common/base/clock.h"
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- the end of a job */

void dmk_prefill__fail(struct dmk_prefill_core *core, struct dmk_prefill_job *job,
                       enum dmk_failure code, const char *text)
{
    const struct dmk_prefill_event event = {
        .kind = DMK_PREFILL_FAILED,
        .router = job->router,
        .id = job->id,
        .failed = {.code = code, .text = text},
    };

    if (job->mute) {
        return;
    }
    job->mute = true;
    core->load.n_failed++;
    core->conf.on_event(core->conf.ud, &event);
}

void dmk_prefill__free_job(struct dmk_prefill_core *core, struct dmk_prefill_job *job)
{
    if (core->in_flight && core->step.job == job) {
        job->released = true; /* dmk_prefill_done comes back here */
        return;
    }
    dmk_kv_table_release(&job->table, core->pools);
    dmk_prefill__unstage(core, job);
    job->state = DMK_PREFILL_FREE;
}

struct dmk_prefill_job *dmk_prefill__find(struct dmk_prefill_core *core, uint64_t order)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (core->jobs[i].state != DMK_PREFILL_FREE && core->jobs[i].order == order) {
            return &core->jobs[i];
        }
    }
    return NULL;
}

void dmk_prefill__abandon(struct dmk_prefill_core *core, struct dmk_prefill_job *job)
{
    const enum dmk_prefill_state was = job->state;

    if (was == DMK_PREFILL_FAILING) {
        return;
    }
    job->state = DMK_PREFILL_FAILING;
    if (core->in_flight && core->step.job == job) {
        atomic_store_explicit(&core->step.cancel, true, memory_order_relaxed);
    }
    if (job->with_tx) {
        dmk_sender_cancel(core->tx, job->order); /* on_done frees the pages */
    } else {
        dmk_prefill__free_job(core, job);
    }
}

/* ---------------------------------------------------------------- what the sender says */

static void on_claimed(void *ud, uint64_t order)
{
    struct dmk_prefill_core *core = ud;
    struct dmk_prefill_job *job = dmk_prefill__find(core, order);

    if (job && job->state == DMK_PREFILL_CLAIMING) {
        job->state = DMK_PREFILL_RUNNING;
        dmk_prefill__begin(core, job);
    }
}

enum dmk_failure dmk_prefill__failure_of(int status)
{
    switch (-status) {
    case DMK_EAGAIN:
        return DMK_FAILURE_REFUSED;
    case DMK_EMISMATCH:
        return DMK_FAILURE_MISMATCH;
    case DMK_ETIMEOUT:
        return DMK_FAILURE_TIMEOUT;
    case DMK_EFULL:
        return DMK_FAILURE_FULL;
    default:
        return DMK_FAILURE_PEER;
    }
}

static void on_failed(void *ud, uint64_t order, int status, const char *why)
{
    struct dmk_prefill_core *core = ud;
    struct dmk_prefill_job *job = dmk_prefill__find(core, order);

    if (!job) {
        return;
    }
    dmk_prefill__fail(core, job, dmk_prefill__failure_of(status), why);
    job->state = DMK_PREFILL_FAILING;
    if (core->in_flight && core->step.job == job) {
        atomic_store_explicit(&core->step.cancel, true, memory_order_relaxed);
    }
}

static uint64_t us_between(uint64_t from_ns, uint64_t to_ns)
{
    return from_ns && to_ns > from_ns ? (to_ns - from_ns) / 1000 : 0;
}

static void on_done(void *ud, uint64_t order, bool ok, uint64_t bytes, uint64_t ns_moving)
{
    struct dmk_prefill_core *core = ud;
    struct dmk_prefill_job *job = dmk_prefill__find(core, order);

    if (!job) {
        return;
    }
    job->with_tx = false;
    core->load.bytes_sent += bytes;
    if (!ok) {
        dmk_prefill__fail(core, job, DMK_FAILURE_PEER,
                          "the decode worker did not accept the pages");
    } else if (!job->mute) {
        const struct dmk_prefill_event event = {
            .kind = DMK_PREFILL_DONE,
            .router = job->router,
            .id = job->id,
            .done = {.n_computed = job->n - job->n_cached,
                     .n_cached = job->n_cached,
                     .queue_us = us_between(job->queued_ns, job->claim_ns),
                     .compute_us = us_between(job->started_ns, job->computed_ns),
                     .transfer_us = ns_moving / 1000,
                     .transfer_bytes = bytes},
        };

        job->mute = true;
        core->load.n_done++;
        core->conf.on_event(core->conf.ud, &event);
    }
    job->state = DMK_PREFILL_FAILING; /* over; free_job may have to wait for a step */
    dmk_prefill__free_job(core, job);
}

static void on_closed_word(void *ud, struct dmk_id128 cookie, uint64_t d_incarnation)
{
    struct dmk_prefill_core *core = ud;
    const struct dmk_prefill_event event = {
        .kind = DMK_PREFILL_CLOSED_WORD,
        .closed_word = {.cookie = cookie, .d_incarnation = d_incarnation},
    };

    core->conf.on_event(core->conf.ud, &event);
}

/* ---------------------------------------------------------------- requests */

static void refuse(struct dmk_prefill_core *core, const struct dmk_prefill_request *request,
                   enum dmk_failure code, const char *text, uint32_t retry_after_ms)
{
    const struct dmk_prefill_event event = {
        .kind = DMK_PREFILL_FAILED,
        .router = request->router,
        .id = request->id,
        .failed = {.code = code, .text = text, .retry_after_ms = retry_after_ms},
    };

    core->load.n_failed++;
    core->conf.on_event(core->conf.ud, &event);
}

static struct dmk_prefill_job *free_slot(struct dmk_prefill_core *core)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (core->jobs[i].state == DMK_PREFILL_FREE) {
            return &core->jobs[i];
        }
    }
    return NULL;
}

/* What the ticket says must be what the request says; the sender checks the rest at the claim. */
static int check_ticket(const struct dmk_prefill_core *core, uint32_t n,
                        const struct dmk_ticket *ticket, struct dmk_error *reterr)
{
    if (ticket->n_tokens != n) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "the ticket is for %u tokens, the prompt has %u to compute",
                             ticket->n_tokens, n);
    }
    if (ticket->have > n || ticket->have % DMK_PAGE_TOKENS != 0) {
        return dmk_error_set(reterr, -DMK_EINVAL, "the ticket says that %u of %u tokens are there",
                             ticket->have, n);
    }
    if (!dmk_id128_equal(ticket->model_id, core->conf.engine.model_id)) {
        return dmk_error_set(
            reterr, -DMK_EMISMATCH,
            "the decode worker serves another model: load the same checkpoint in both pools");
    }
    return 0;
}

static bool is_of(const struct dmk_prefill_job *job, uint32_t router, struct dmk_request_id id)
{
    return job->state != DMK_PREFILL_FREE && job->router == router &&
           dmk_request_id_equal(job->id, id);
}

static bool is_known(const struct dmk_prefill_core *core, const struct dmk_prefill_request *request)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (is_of(&core->jobs[i], request->router, request->id)) {
            return true;
        }
    }
    return false;
}

/* Two jobs with one ticket would take each other's replies, and the one that is refused would tell D that
 * nothing writes any more while the other one does. */
static bool is_ticket_used(const struct dmk_prefill_core *core, struct dmk_id128 cookie)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (core->jobs[i].state != DMK_PREFILL_FREE &&
            dmk_id128_equal(core->jobs[i].ticket.cookie, cookie)) {
            return true;
        }
    }
    return false;
}

void dmk_prefill_submit(struct dmk_prefill_core *core, const struct dmk_prefill_request *request,
                        uint64_t now_ns)
{
    struct dmk_prefill_job *job = free_slot(core);
    struct dmk_error err;
    int rc;

    core->now_ns = now_ns;
    if (is_known(core, request)) {
        return; /* sent twice: the first one's events answer it */
    }
    if (core->draining) {
        refuse(core, request, DMK_FAILURE_DRAINING, "this worker is draining", 0);
        return;
    }
    if (request->n_prompt < 2 || request->n_prompt - 1 > core->conf.max_context) {
        (void)dmk_error_set(&err, -DMK_EINVAL,
                            "prompts of 2 to %u tokens are taken here, this one has %u",
                            core->conf.max_context + 1, request->n_prompt);
        refuse(core, request, DMK_FAILURE_INVALID, err.text, 0);
        return;
    }
    if (!job) {
        refuse(core, request, DMK_FAILURE_FULL, "the queue is full", 1000);
        return;
    }
    rc = dmk_ticket_decode(request->ticket, &job->ticket, &err);
    if (rc == 0) {
        rc = check_ticket(core, request->n_prompt - 1, &job->ticket, &err);
    }
    if (rc == 0 && is_ticket_used(core, job->ticket.cookie)) {
        rc = dmk_error_set(&err, -DMK_EINVAL, "another prompt has come with the same ticket");
    }
    if (rc < 0) {
        refuse(core, request, rc == -DMK_EMISMATCH ? DMK_FAILURE_MISMATCH : DMK_FAILURE_INVALID,
               err.text, 0);
        return;
    }
    job->order = ++core->next_order;
    job->due_ns = (int64_t)now_ns + request->shift_ns;
    job->router = request->router;
    job->id = request->id;
    job->mute = job->with_tx = job->released = job->staged = false;
    job->n = request->n_prompt - 1;
    memcpy(job->prompt, request->prompt, job->n * sizeof(*job->prompt));
    job->pos = job->n_cached = 0;
    job->pushed_blocks = job->ticket.have / DMK_PAGE_TOKENS;
    job->root = dmk_block_root(core->conf.engine.numerics, request->salt);
    job->queued_ns = now_ns;
    job->claim_ns = job->started_ns = job->computed_ns = 0;
    job->state = DMK_PREFILL_QUEUED;
}

void dmk_prefill_cancel(struct dmk_prefill_core *core, uint32_t router, struct dmk_request_id id)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (is_of(&core->jobs[i], router, id)) {
            core->jobs[i].mute = true;
            dmk_prefill__abandon(core, &core->jobs[i]);
        }
    }
}

void dmk_prefill_router_gone(struct dmk_prefill_core *core, uint32_t router)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (core->jobs[i].state != DMK_PREFILL_FREE && core->jobs[i].router == router) {
            core->jobs[i].mute = true;
            dmk_prefill__abandon(core, &core->jobs[i]);
        }
    }
}

void dmk_prefill_quiet_ask(struct dmk_prefill_core *core, struct dmk_id128 cookie,
                           uint64_t p_incarnation, uint64_t d_incarnation)
{
    dmk_sender_quiet_ask(core->tx, cookie, p_incarnation, d_incarnation);
}

void dmk_prefill_drain(struct dmk_prefill_core *core)
{
    core->draining = true;
}

bool dmk_prefill_xfer_message(struct dmk_prefill_core *core, struct dmk_xfer_ep *ep,
                              struct dmk_bytes message, uint64_t now_ns)
{
    core->now_ns = now_ns;
    return dmk_sender_message(core->tx, ep, message, now_ns);
}

void dmk_prefill_xfer_closed(struct dmk_prefill_core *core, struct dmk_xfer_ep *ep, uint64_t now_ns)
{
    core->now_ns = now_ns;
    dmk_sender_ep_closed(core->tx, ep, now_ns);
}

void dmk_prefill_tick(struct dmk_prefill_core *core, uint64_t now_ns)
{
    core->now_ns = now_ns;
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        struct dmk_prefill_job *job = &core->jobs[i];

        if (job->state == DMK_PREFILL_QUEUED &&
            now_ns - job->queued_ns > core->conf.queue_budget_ns) {
            dmk_prefill__fail(core, job, DMK_FAILURE_TIMEOUT,
                              "the prompt waited too long for its turn");
            dmk_prefill__abandon(core, job);
        }
    }
    dmk_sender_tick(core->tx, now_ns);
}

/* ---------------------------------------------------------------- life of the core */

static int register_memory(struct dmk_prefill_core *core, struct dmk_error *reterr)
{
    const struct dmk_prefill_conf *conf = &core->conf;

    for (uint32_t r = 0; r < conf->engine.n_ranks; r++) {
        const struct dmk_kv_mem *mem = conf->engine.kv[r];
        int rc = conf->ops->mem_register(conf->xfer, mem->full, dmk_kv_full_bytes(&mem->layout),
                                         conf->engine.mem_kind, &core->full_mem[r], reterr);

        if (rc == 0) {
            rc = conf->ops->mem_register(conf->xfer, mem->window, dmk_kv_window_bytes(&mem->layout),
                                         conf->engine.mem_kind, &core->window_mem[r], reterr);
        }
        if (rc == 0 && core->stage.full) {
            const struct dmk_kv_mem *stage = conf->engine.stage[r];

            rc = conf->ops->mem_register(conf->xfer, stage->full, dmk_kv_full_bytes(&stage->layout),
                                         DMK_MEM_KIND_HOST, &core->stage_full_mem[r], reterr);
            rc = rc < 0 ? rc
                        : conf->ops->mem_register(
                              conf->xfer, stage->window, dmk_kv_window_bytes(&stage->layout),
                              DMK_MEM_KIND_HOST, &core->stage_window_mem[r], reterr);
        }
        if (rc < 0) {
            return dmk_error_prefix(reterr, "page memory of rank %u", r);
        }
    }
    return 0;
}

static int make_sender(struct dmk_prefill_core *core)
{
    const struct dmk_prefill_conf *conf = &core->conf;
    struct dmk_sender_conf tx = {
        .ops = conf->ops,
        .xfer = conf->xfer,
        .incarnation = conf->incarnation,
        .worker_id = conf->worker_id,
        .model_id = conf->engine.model_id,
        .numerics = conf->engine.numerics,
        .transfer_budget_ns = conf->transfer_budget_ns,
        .resend_every_ns = conf->resend_every_ns,
        .give_up_ns = conf->give_up_ns,
        .max_jobs = conf->max_jobs,
        .max_puts_in_flight = conf->max_puts_in_flight,
        .n_ranks = conf->engine.n_ranks,
        .events = {on_claimed, on_failed, on_done, on_closed_word, core},
    };

    for (uint32_t r = 0; r < conf->engine.n_ranks; r++) {
        tx.mem[r] = conf->engine.kv[r];
        tx.full_mem[r] = core->full_mem[r];
        tx.window_mem[r] = core->window_mem[r];
        tx.stage[r] = conf->engine.stage[r];
        tx.stage_full_mem[r] = core->stage_full_mem[r];
        tx.stage_window_mem[r] = core->stage_window_mem[r];
    }
    return dmk_sender_new(&tx, &core->tx);
}

static int check_conf(const struct dmk_prefill_conf *conf, struct dmk_error *reterr)
{
    const uint32_t need = dmk_kv_pages_for(conf->max_context);

    if (conf->n_full_pages < need) {
        return dmk_error_set(
            reterr, -DMK_EINVAL,
            "a prompt of %u tokens (max-context) needs %u full pages, there are %u",
            conf->max_context, need, conf->n_full_pages);
    }
    if (conf->n_window_pages < 2 * DMK_WINDOW_RING + 2) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "at least %u window pages are needed, there are %u",
                             2 * DMK_WINDOW_RING + 2, conf->n_window_pages);
    }
    if (conf->max_jobs == 0 || conf->chunk_tokens == 0 || conf->max_context == 0) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "max-jobs, chunk-tokens and max-context must not be 0");
    }
    return 0;
}

int dmk_prefill_core_new(const struct dmk_prefill_conf *conf, struct dmk_prefill_core **ret,
                         struct dmk_error *reterr)
{
    const uint32_t cap = dmk_kv_pages_for(conf->max_context);
    struct dmk_prefill_core *core;
    int rc = check_conf(conf, reterr);

    if (rc < 0) {
        return rc;
    }
    core = calloc(1, sizeof(*core));
    if (!core) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the prefill core");
    }
    core->conf = *conf;
    core->jobs = calloc(conf->max_jobs, sizeof(*core->jobs));
    core->turns = calloc(conf->max_jobs, sizeof(*core->turns));
    core->prompts = calloc((size_t)conf->max_jobs * conf->max_context, sizeof(*core->prompts));
    core->tables = calloc((size_t)conf->max_jobs * cap, sizeof(*core->tables));
    core->stage_ids = calloc(cap, sizeof(*core->stage_ids));
    rc = core->jobs && core->turns && core->prompts && core->tables && core->stage_ids
             ? 0
             : -DMK_ENOMEM;
    rc = rc < 0 ? rc : dmk_kv_pool_new(conf->n_full_pages, &core->pools.full);
    rc = rc < 0 ? rc : dmk_kv_pool_new(conf->n_window_pages, &core->pools.window);
    rc = rc < 0 ? rc : dmk_kv_prefix_new(core->pools, 4096, &core->prefix);
    if (rc == 0 && conf->engine.stage[0]) {
        const struct dmk_kv_layout *l = &conf->engine.stage[0]->layout;

        rc = dmk_kv_pool_new(l->n_full_pages, &core->stage.full);
        rc = rc < 0 ? rc : dmk_kv_pool_new(l->n_window_pages, &core->stage.window);
    }
    if (rc < 0) {
        rc = dmk_error_set(reterr, rc, "no memory for %u jobs of %u tokens", conf->max_jobs,
                           conf->max_context);
        goto fail;
    }
    for (uint32_t i = 0; i < conf->max_jobs; i++) {
        core->jobs[i].prompt = core->prompts + (size_t)i * conf->max_context;
        dmk_kv_table_init(&core->jobs[i].table, core->tables + (size_t)i * cap, cap,
                          DMK_WINDOW_RING);
    }
    rc = register_memory(core, reterr);
    if (rc < 0) {
        goto fail;
    }
    rc = make_sender(core);
    if (rc < 0) {
        rc = dmk_error_set(reterr, rc, "the page sender could not be made: %s",
                           dmk_status_message(rc));
        goto fail;
    }
    *ret = core;
    return 0;
fail:
    dmk_prefill_core_free(&core);
    return rc;
}

void dmk_prefill_core_free(struct dmk_prefill_core **core)
{
    struct dmk_prefill_core *c = *core;

    if (!c) {
        return;
    }
    dmk_assert(!c->in_flight);
    if (c->tx) {
        dmk_sender_free(&c->tx);
    }
    for (uint32_t i = 0; c->jobs && i < c->conf.max_jobs; i++) {
        if (c->jobs[i].state != DMK_PREFILL_FREE) {
            dmk_kv_table_release(&c->jobs[i].table, c->pools);
            dmk_prefill__unstage(c, &c->jobs[i]);
        }
    }
    for (uint32_t r = 0; r < DMK_TICKET_MAX_RANKS; r++) {
        if (c->full_mem[r]) {
            c->conf.ops->mem_unregister(c->conf.xfer, &c->full_mem[r]);
        }
        if (c->window_mem[r]) {
            c->conf.ops->mem_unregister(c->conf.xfer, &c->window_mem[r]);
        }
        if (c->stage_full_mem[r]) {
            c->conf.ops->mem_unregister(c->conf.xfer, &c->stage_full_mem[r]);
        }
        if (c->stage_window_mem[r]) {
            c->conf.ops->mem_unregister(c->conf.xfer, &c->stage_window_mem[r]);
        }
    }
    dmk_kv_pool_free(&c->stage.full);
    dmk_kv_pool_free(&c->stage.window);
    free(c->stage_ids);
    dmk_kv_prefix_free(&c->prefix);
    dmk_kv_pool_free(&c->pools.full);
    dmk_kv_pool_free(&c->pools.window);
    free(c->jobs);
    free(c->turns);
    free(c->prompts);
    free(c->tables);
    free(c);
    *core = NULL;
}

/* ---------------------------------------------------------------- what others may know */

struct dmk_prefill_load dmk_prefill_load(const struct dmk_prefill_core *core)
{
    struct dmk_prefill_load load = core->load;

    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        const struct dmk_prefill_job *job = &core->jobs[i];

        if (job->state == DMK_PREFILL_QUEUED) {
            load.n_waiting++;
        } else if (job->state != DMK_PREFILL_FREE) {
            load.n_running++;
        }
        if (job->state == DMK_PREFILL_QUEUED || job->state == DMK_PREFILL_CLAIMING ||
            job->state == DMK_PREFILL_RUNNING) {
            load.tokens_waiting += job->n - job->pos;
        }
    }
    load.full = dmk_kv_pool_counts(core->pools.full);
    load.window = dmk_kv_pool_counts(core->pools.window);
    load.n_puts = dmk_sender_stats(core->tx).n_puts;
    return load;
}

bool dmk_prefill_idle(const struct dmk_prefill_core *core)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (core->jobs[i].state != DMK_PREFILL_FREE) {
            return false;
        }
    }
    return !core->in_flight && dmk_sender_n_jobs(core->tx) == 0;
}

bool dmk_prefill_check(const struct dmk_prefill_core *core)
{
    const struct dmk_kv_pool_counts full = dmk_kv_pool_counts(core->pools.full);

    return dmk_kv_pool_check(core->pools.full) && dmk_kv_pool_check(core->pools.window) &&
           dmk_kv_prefix_check(core->prefix) && (!dmk_prefill_idle(core) || full.leased == 0);
}

uint32_t dmk_prefill_block_events(struct dmk_prefill_core *core,
                                  struct dmk_kv_prefix_event *ret_events, uint32_t cap,
                                  bool *ret_lost)
{
    return dmk_kv_prefix_events(core->prefix, ret_events, cap, ret_lost);
}

uint32_t dmk_prefill_block_list(const struct dmk_prefill_core *core, uint32_t *inout_at,
                                struct dmk_kv_prefix_event *ret_events, uint32_t cap)
{
    return dmk_kv_prefix_list(core->prefix, inout_at, ret_events, cap);
}

void dmk_prefill_flush_cache(struct dmk_prefill_core *core)
{
    while (dmk_kv_prefix_evict(core->prefix)) {
    }
}
