/* Between the worker's shell and the prefill core. Everything is on the loop but run_step and on_layer. */
#include "prefill/serve.h"

#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "prefill/core.h"

#define STAGED_WINDOWS 32 /* prompts whose windows can wait in the staging memory */

struct serve {
    const struct dmk_prefill_options *options;
    struct dmk_worker *worker;
    struct dmk_prefill_core *core;
    struct dmk_prefill_step *step;
    struct {
        struct dmk_counter *done, *failed, *puts, *staged;
    } metrics;
};

static uint64_t now_of(const struct serve *s)
{
    return dmk_loop_now_ns(dmk_worker_loop(s->worker));
}

/* ---------------------------------------------------------------- events */

static void emit_done(struct serve *s, const struct dmk_prefill_event *e)
{
    Damask__V1__RequestId id = dmk_request_id_message(e->id);
    Damask__V1__PrefillDone m = DAMASK__V1__PREFILL_DONE__INIT;
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;

    m.id = &id;
    m.n_computed = e->done.n_computed;
    m.n_cached = e->done.n_cached;
    m.queue_us = e->done.queue_us;
    m.compute_us = e->done.compute_us;
    m.transfer_us = e->done.transfer_us;
    m.transfer_bytes = e->done.transfer_bytes;
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_PREFILL_DONE;
    event.prefill_done = &m;
    dmk_worker_emit(s->worker, e->router, &event);
}

static void emit_closed_word(struct serve *s, const struct dmk_prefill_event *e)
{
    Damask__V1__ClosedWord m = DAMASK__V1__CLOSED_WORD__INIT;
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;

    m.cookie_hi = e->closed_word.cookie.hi;
    m.cookie_lo = e->closed_word.cookie.lo;
    m.d_incarnation = e->closed_word.d_incarnation;
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_CLOSED;
    event.closed = &m;
    dmk_worker_emit(s->worker, DMK_ROUTER_ALL, &event);
}

static void on_event(void *ud, const struct dmk_prefill_event *e)
{
    struct serve *s = ud;

    switch (e->kind) {
    case DMK_PREFILL_DONE:
        emit_done(s, e);
        break;
    case DMK_PREFILL_FAILED:
        dmk_worker_fail(s->worker, e->router, e->id, &e->failed);
        break;
    case DMK_PREFILL_CLOSED_WORD:
        emit_closed_word(s, e);
        break;
    default:
        dmk_unreachable("unknown event");
    }
}

/* ---------------------------------------------------------------- steps */

static void on_layer(void *ud)
{
    const struct serve *s = ud;

    dmk_worker_poke(s->worker);
}

static void on_poke(void *ud)
{
    struct serve *s = ud;

    dmk_prefill_layers(s->core);
}

static void run_step(void *ud)
{
    struct serve *s = ud;

    dmk_prefill_run(s->step);
}

static void step_done(void *ud)
{
    struct serve *s = ud;

    dmk_prefill_done(s->core, s->step, now_of(s));
}

/* Planning also lets the next jobs claim, so it is called while a step runs too. */
static void on_turn(void *ud)
{
    struct serve *s = ud;
    struct dmk_prefill_step *step = dmk_prefill_plan(s->core, now_of(s));

    if (step) {
        s->step = step;
        dmk_worker_step(s->worker, run_step, step_done, s);
    }
}

/* ---------------------------------------------------------------- messages */

/* One line for each request, so that its x-request-id is found here too. */
static void log_request(const struct dmk_prefill_request *r, const char *request_id)
{
    char req[33];

    dmk_request_id_format(r->id, req);
    dmk_log_info("req=%s attempt=%u id=%s prompt=%u router=%u", req, r->id.attempt, request_id,
                 r->n_prompt, r->router);
}

static void on_prefill(void *ud, uint32_t router, const Damask__V1__Prefill *m)
{
    struct serve *s = ud;
    const struct dmk_prefill_request request = {
        .router = router,
        .id = dmk_request_id_of(m->id),
        .prompt = m->prompt,
        .n_prompt = (uint32_t)m->n_prompt,
        .ticket = {m->ticket.data, m->ticket.len},
        .salt = {m->cache_salt.data, m->cache_salt.len},
        .shift_ns = dmk_msg_priority_ns(m->priority),
    };

    log_request(&request, m->request_id);
    dmk_prefill_submit(s->core, &request, now_of(s));
}

static void on_cancel(void *ud, uint32_t router, struct dmk_request_id id)
{
    struct serve *s = ud;

    dmk_prefill_cancel(s->core, router, id);
}

static void on_quiet_ask(void *ud, const Damask__V1__QuietAsk *ask)
{
    struct serve *s = ud;

    dmk_prefill_quiet_ask(s->core, (struct dmk_id128){.hi = ask->cookie_hi, .lo = ask->cookie_lo},
                          ask->p_incarnation, ask->d_incarnation);
}

static void on_router_gone(void *ud, uint32_t router)
{
    struct serve *s = ud;

    dmk_prefill_router_gone(s->core, router);
}

static bool xfer_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct serve *s = ud;

    return dmk_prefill_xfer_message(s->core, ep, message, now_of(s));
}

static void xfer_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    struct serve *s = ud;

    (void)status;
    dmk_prefill_xfer_closed(s->core, ep, now_of(s));
}

static void on_tick(void *ud)
{
    struct serve *s = ud;

    dmk_prefill_tick(s->core, now_of(s));
}

static void on_drain(void *ud)
{
    struct serve *s = ud;

    dmk_prefill_drain(s->core);
}

static bool is_idle(void *ud)
{
    const struct serve *s = ud;

    return dmk_prefill_idle(s->core);
}

/* ---------------------------------------------------------------- what it tells */

static void tell_stats(void *ud, struct dmk_worker_stats *ret)
{
    const struct serve *s = ud;
    const struct dmk_prefill_load l = dmk_prefill_load(s->core);

    *ret = (struct dmk_worker_stats){
        .n_running = l.n_running,
        .n_waiting = l.n_waiting,
        .tokens_waiting = l.tokens_waiting,
        .full = l.full,
        .window = l.window,
        .step_ms = l.step_ms,
        .n_steps = l.n_steps,
        .n_prompt_tokens = l.n_tokens_computed,
        .n_prefix_queries = l.n_tokens_computed + l.n_hit_tokens,
        .n_prefix_hits = l.n_hit_tokens,
    };
}

static uint32_t block_events(void *ud, struct dmk_kv_prefix_event *ret_events, uint32_t cap,
                             bool *ret_lost)
{
    struct serve *s = ud;

    return dmk_prefill_block_events(s->core, ret_events, cap, ret_lost);
}

static uint32_t block_list(void *ud, uint32_t inout_at[2], struct dmk_kv_prefix_event *ret_events,
                           uint32_t cap)
{
    const struct serve *s = ud;

    return dmk_prefill_block_list(s->core, &inout_at[0], ret_events, cap);
}

static void fill_hello(void *ud, Damask__V1__WorkerHello *hello)
{
    const struct serve *s = ud;

    hello->max_sequences = s->options->max_jobs;
    hello->max_context = s->options->worker.max_context;
}

static void tell_state(void *ud, struct dmk_buf *out)
{
    const struct serve *s = ud;
    const struct dmk_prefill_load l = dmk_prefill_load(s->core);

    dmk_buf_printf(out, ",\"jobs\":{\"running\":%u,\"waiting\":%u},\"consistent\":%s", l.n_running,
                   l.n_waiting, dmk_prefill_check(s->core) ? "true" : "false");
}

static void collect(void *ud)
{
    struct serve *s = ud;
    const struct dmk_prefill_load l = dmk_prefill_load(s->core);

    dmk_counter_raise(s->metrics.done, (double)l.n_done);
    dmk_counter_raise(s->metrics.failed, (double)l.n_failed);
    dmk_counter_raise(s->metrics.puts, (double)l.n_puts);
    dmk_counter_raise(s->metrics.staged, (double)l.n_staged);
}

static void make_metrics(struct serve *s)
{
    struct dmk_metrics *m = dmk_worker_metrics(s->worker);
    const char *labels = dmk_worker_labels(s->worker);

    s->metrics.done = dmk_counter_new(m, "damask_prefills_done_total", labels,
                                      "Prompts that a decode worker has accepted.");
    s->metrics.failed = dmk_counter_new(m, "damask_prefills_failed_total", labels,
                                        "Prompts that were refused or failed.");
    s->metrics.puts = dmk_counter_new(
        m, "damask_transfer_puts_total", labels,
        "Page writes into decode workers; damask_transfer_bytes_total over it is a write's size.");
    s->metrics.staged = dmk_counter_new(m, "damask_prefills_staged_total", labels,
                                        "Prompts whose pages left through the staging memory; the "
                                        "others found it full or needed none.");
}

/* ---------------------------------------------------------------- life */

static void engine_conf(void *ud, struct dmk_engine_conf *conf)
{
    const struct serve *s = ud;

    conf->max_step_tokens = s->options->chunk_tokens;
    conf->max_step_seqs = 1;
    conf->max_logit_rows = 0;
    conf->n_pool_seqs = DMK_PREFILL_POOL_SEQUENCES;
    if (s->options->worker.xfer_transport != DMK_WORKER_CUDA) {
        conf->n_stage_full_pages = s->options->staging_pages;
        conf->n_stage_window_pages = STAGED_WINDOWS * DMK_WINDOW_RING;
    }
}

static int open_core(void *ud, struct dmk_worker *worker, struct dmk_error *reterr)
{
    struct serve *s = ud;
    const struct dmk_prefill_options *o = s->options;
    const struct dmk_engine_port *engine = dmk_worker_engine(worker);
    uint32_t max_context = o->worker.max_context;
    struct dmk_prefill_conf conf = {
        .engine = *engine,
        .incarnation = dmk_worker_incarnation(worker),
        .n_full_pages = engine->kv[0]->layout.n_full_pages,
        .n_window_pages = engine->kv[0]->layout.n_window_pages,
        .max_jobs = o->max_jobs,
        .chunk_tokens = o->chunk_tokens,
        .reuse = o->worker.reuse,
        .ops = dmk_worker_xfer_ops(worker),
        .xfer = dmk_worker_xfer(worker),
        .queue_budget_ns = o->queue_budget_ms * DMK_NS_PER_MS,
        .transfer_budget_ns = o->worker.transfer_budget_ms * DMK_NS_PER_MS,
        .resend_every_ns = o->resend_every_ms * DMK_NS_PER_MS,
        .give_up_ns = o->give_up_ms * DMK_NS_PER_MS,
        .max_puts_in_flight = o->max_puts,
        .on_layer = on_layer,
        .on_event = on_event,
        .ud = s,
    };
    int r;

    if (!conf.ops) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "xfer-transport is none: a prefill worker has nobody to compute for");
    }
    /* Prompts longer than the model or the pool are refused one by one, not at start. */
    if (max_context > engine->shape->max_positions) {
        max_context = engine->shape->max_positions;
    }
    if (max_context > (uint64_t)conf.n_full_pages * DMK_PAGE_TOKENS) {
        max_context = conf.n_full_pages * DMK_PAGE_TOKENS;
    }
    conf.max_context = max_context;
    s->worker = worker;
    r = dmk_prefill_core_new(&conf, &s->core, reterr);
    if (r == 0) {
        const struct dmk_msg_limits limits = {
            .vocab_size = engine->shape->vocab, .max_context = max_context, .max_choices = 1};

        dmk_worker_set_limits(worker, &limits);
        make_metrics(s);
    }
    return r;
}

static void close_core(void *ud)
{
    struct serve *s = ud;

    dmk_prefill_core_free(&s->core);
}

int dmk_prefill_serve(const struct dmk_prefill_options *options,
                      const struct dmk_engine_source *source)
{
    struct serve s = {.options = options};
    const struct dmk_worker_role role = {
        .program = "damask-prefill",
        .ud = &s,
        .source = source,
        .engine_conf = engine_conf,
        .open = open_core,
        .close = close_core,
        .on_prefill = on_prefill,
        .on_cancel = on_cancel,
        .on_quiet_ask = on_quiet_ask,
        .on_router_gone = on_router_gone,
        .xfer_message = xfer_message,
        .xfer_closed = xfer_closed,
        .on_turn = on_turn,
        .on_poke = on_poke,
        .on_tick = on_tick,
        .on_drain = on_drain,
        .idle = is_idle,
        .stats = tell_stats,
        .block_events = block_events,
        .block_list = block_list,
        .hello = fill_hello,
        .state = tell_state,
        .collect = collect,
    };

    return dmk_worker_run(&role, &options->worker);
}
