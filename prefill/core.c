/* The prefill core's doors: making it, draining, the transport's messages, ticks, what it says about
 * itself. Owner: the worker's loop. */
#include "prefill/internal.h"

#include <stdlib.h>
#include "common/base/assert.h"

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
        .events = dmk_prefill__sender_events(core),
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
