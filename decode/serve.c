/* Between the worker's shell and the decode core. Everything is on the loop but run_step. */
#include "decode/serve.h"

#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "decode/metrics.h"
#include "decode/wire.h"

struct serve {
    const struct dmk_decode_options *options;
    uint32_t local_prefill_below;
    struct dmk_worker *worker;
    struct dmk_decode_core *core;
    struct dmk_decode_step *step;
    struct dmk_decode_metrics metrics;
};

static uint64_t now_of(const struct serve *s)
{
    return dmk_loop_now_ns(dmk_worker_loop(s->worker));
}

/* Where an event goes. */
struct target {
    struct dmk_worker *worker;
    uint32_t router;
};

static void emit_message(void *ud, const Damask__V1__WorkerEvent *message)
{
    const struct target *to = ud;

    dmk_worker_emit(to->worker, to->router, message);
}

static void on_event(void *ud, const struct dmk_decode_event *event)
{
    struct serve *s = ud;
    struct target to = {s->worker,
                        event->kind == DMK_DECODE_QUIET_ASK ? DMK_ROUTER_ALL : event->router};

    if (event->kind == DMK_DECODE_FAILED) {
        dmk_worker_fail(s->worker, event->router, event->id, &event->failed);
    } else {
        dmk_decode_wire_event(event, dmk_worker_incarnation(s->worker), emit_message, &to);
    }
}

/* ---------------------------------------------------------------- steps */

static void run_step(void *ud)
{
    struct serve *s = ud;

    dmk_decode_run(s->step);
}

static void step_done(void *ud)
{
    struct serve *s = ud;

    dmk_decode_done(s->core, s->step, now_of(s));
}

static void on_turn(void *ud)
{
    struct serve *s = ud;

    if (!dmk_worker_stepping(s->worker)) {
        s->step = dmk_decode_plan(s->core, now_of(s));
        if (s->step) {
            dmk_worker_step(s->worker, run_step, step_done, s);
        }
    }
}

/* ---------------------------------------------------------------- messages */

/* One line for each request, so that its x-request-id is found here too. */
static void log_request(const struct dmk_decode_request *r, const char *request_id)
{
    char req[33];

    dmk_request_id_format(r->id, req);
    dmk_log_info("req=%s attempt=%u id=%s prompt=%u max_tokens=%u n=%u router=%u", req,
                 r->id.attempt, request_id, r->n_prompt, r->max_tokens, r->n, r->router);
}

static void on_generate(void *ud, uint32_t router, const Damask__V1__Generate *message)
{
    struct serve *s = ud;
    struct dmk_decode_wire wire;
    struct dmk_decode_request request;
    const char *fault = dmk_decode_wire_request(message, router, &wire, &request);

    if (fault) {
        const struct dmk_failed why = {.code = DMK_FAILURE_INVALID, .text = fault};

        dmk_worker_fail(s->worker, router, request.id, &why);
    } else {
        log_request(&request, message->request_id);
        dmk_decode_generate(s->core, &request, now_of(s));
    }
}

static int on_vocabulary(void *ud, struct dmk_bytes bytes, struct dmk_error *reterr)
{
    struct serve *s = ud;

    return dmk_decode_vocabulary(s->core, bytes, reterr);
}

static void on_cancel(void *ud, uint32_t router, struct dmk_request_id id)
{
    struct serve *s = ud;

    dmk_decode_cancel(s->core, router, id, now_of(s));
}

static void on_closed_word(void *ud, const Damask__V1__ClosedWord *word)
{
    struct serve *s = ud;

    if (word->d_incarnation == dmk_worker_incarnation(s->worker)) {
        dmk_decode_closed_word(
            s->core, (struct dmk_id128){.hi = word->cookie_hi, .lo = word->cookie_lo}, now_of(s));
    }
}

static void on_router_gone(void *ud, uint32_t router)
{
    struct serve *s = ud;

    dmk_decode_router_gone(s->core, router, now_of(s));
}

static bool xfer_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct serve *s = ud;

    return dmk_decode_xfer_message(s->core, ep, message, now_of(s));
}

static void xfer_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    struct serve *s = ud;

    (void)status;
    dmk_decode_xfer_closed(s->core, ep, now_of(s));
}

static void on_tick(void *ud)
{
    struct serve *s = ud;

    dmk_decode_tick(s->core, now_of(s));
}

static void on_drain(void *ud)
{
    struct serve *s = ud;

    dmk_decode_drain(s->core);
}

static bool is_idle(void *ud)
{
    const struct serve *s = ud;

    return dmk_decode_idle(s->core);
}

/* ---------------------------------------------------------------- what it tells */

static void tell_stats(void *ud, struct dmk_worker_stats *ret)
{
    const struct serve *s = ud;
    const struct dmk_decode_load l = dmk_decode_load(s->core);

    *ret = (struct dmk_worker_stats){
        .n_running = l.n_running,
        .n_waiting = l.n_waiting,
        .tokens_waiting = l.tokens_waiting,
        .full = l.full,
        .window = l.window,
        .most_full_free = l.most_full_free,
        .step_ms = l.step_ms,
        .n_steps = l.n_steps,
        .n_prompt_tokens = l.n_prompt_tokens_computed,
        .n_generation_tokens = l.n_tokens,
        .n_preemptions = l.n_preemptions,
        .n_prefix_queries = l.n_query_tokens,
        .n_prefix_hits = l.n_hit_tokens,
    };
}

static uint32_t block_events(void *ud, struct dmk_kv_prefix_event *ret_events, uint32_t cap,
                             bool *ret_lost)
{
    struct serve *s = ud;

    return dmk_decode_block_events(s->core, ret_events, cap, ret_lost);
}

static uint32_t block_list(void *ud, uint32_t inout_at[2], struct dmk_kv_prefix_event *ret_events,
                           uint32_t cap)
{
    const struct serve *s = ud;

    return dmk_decode_block_list(s->core, inout_at, ret_events, cap);
}

static void fill_hello(void *ud, Damask__V1__WorkerHello *hello)
{
    const struct serve *s = ud;

    hello->max_sequences = s->options->max_sequences;
    hello->max_context = dmk_decode_max_context(s->core);
    hello->local_prefill_threshold =
        dmk_engine_port_is_mixed(dmk_worker_engine(s->worker)) ? 0 : s->local_prefill_below;
    hello->grammar_version = DMK_GRAMMAR_VERSION;
    hello->vocabulary_hi = dmk_decode_vocabulary_hash(s->core).hi;
    hello->vocabulary_lo = dmk_decode_vocabulary_hash(s->core).lo;
}

static void tell_health(void *ud, struct dmk_buf *out)
{
    const struct serve *s = ud;

    dmk_buf_printf(out, ",\"refusing_claims\":%s",
                   dmk_decode_load(s->core).receiver.refusing ? "true" : "false");
}

static void tell_state(void *ud, struct dmk_buf *out)
{
    const struct serve *s = ud;
    const struct dmk_decode_load l = dmk_decode_load(s->core);

    dmk_buf_printf(out,
                   ",\"requests\":%u,\"tickets\":{\"unclaimed\":%u,\"claimed\":%u,\"ready\":%u,"
                   "\"draining\":%u,\"draining_pages\":%u},\"consistent\":%s,"
                   "\"groups\":[",
                   l.n_requests, l.receiver.n_unclaimed, l.receiver.n_claimed, l.receiver.n_ready,
                   l.receiver.n_draining, l.receiver.draining_pages,
                   dmk_decode_check(s->core) ? "true" : "false");
    for (uint32_t i = 0; i < dmk_decode_n_groups(s->core); i++) {
        const struct dmk_decode_group g = dmk_decode_group(s->core, i);

        dmk_buf_puts(out, i > 0 ? ",{" : "{");
        dmk_worker_put_pool(out, "full", &g.full);
        dmk_buf_putc(out, ',');
        dmk_worker_put_pool(out, "window", &g.window);
        dmk_buf_printf(out, ",\"sequences\":%u}", g.n_sequences);
    }
    dmk_buf_putc(out, ']');
}

static void collect(void *ud)
{
    struct serve *s = ud;
    const struct dmk_decode_load l = dmk_decode_load(s->core);

    dmk_decode_metrics_set(&s->metrics, &l);
}

/* ---------------------------------------------------------------- life */

static void engine_conf(void *ud, struct dmk_engine_conf *conf)
{
    const struct serve *s = ud;

    conf->max_step_tokens = s->options->max_sequences + s->options->chunk_tokens;
    conf->max_step_seqs = s->options->max_sequences;
    conf->max_logit_rows = s->options->max_sequences + s->options->score_rows;
    conf->n_pool_seqs = dmk_decode_options_pool_sequences(s->options);
    conf->prompt_experts = (enum dmk_prompt_experts)s->options->prompt_experts;
    conf->prompt_dense = (enum dmk_prompt_dense)s->options->prompt_dense;
}

static int open_core(void *ud, struct dmk_worker *worker, struct dmk_error *reterr)
{
    struct serve *s = ud;
    const struct dmk_decode_options *o = s->options;
    const struct dmk_engine_port *engine = dmk_worker_engine(worker);
    const struct dmk_kv_layout *pages = &engine->kv[0]->layout;
    const struct dmk_decode_conf conf = {
        .engine = *engine,
        .incarnation = dmk_worker_incarnation(worker),
        .n_full_pages = pages->n_full_pages,
        .n_window_pages = pages->n_window_pages,
        .max_sequences = o->max_sequences,
        .max_context = o->worker.max_context,
        .max_step_tokens = o->max_sequences + o->chunk_tokens,
        .max_chunk_tokens = o->chunk_tokens,
        .max_logit_rows = o->max_sequences + o->score_rows,
        .local_prefill_below = s->local_prefill_below,
        .reuse = o->worker.reuse,
        .ops = dmk_worker_xfer_ops(worker),
        .xfer = dmk_worker_xfer(worker),
        .ticket_expiry_ns = o->ticket_expiry_ms * DMK_NS_PER_MS,
        .transfer_budget_ns = o->worker.transfer_budget_ms * DMK_NS_PER_MS,
        .quiet_ask_every_ns = o->quiet_ask_every_ms * DMK_NS_PER_MS,
        .max_draining_pages =
            o->max_draining_pages > 0 ? o->max_draining_pages : pages->n_full_pages / 4,
        .on_event = on_event,
        .ud = s,
    };
    int r;

    s->worker = worker;
    r = dmk_decode_core_new(&conf, &s->core, reterr);
    if (r == 0) {
        const struct dmk_msg_limits limits = {.vocab_size = engine->shape->vocab,
                                              .max_context = dmk_decode_max_context(s->core),
                                              .max_choices =
                                                  s->options->max_sequences < DMK_DECODE_MAX_CHOICES
                                                      ? s->options->max_sequences
                                                      : DMK_DECODE_MAX_CHOICES};

        dmk_worker_set_limits(worker, &limits);
        dmk_decode_metrics_make(worker, &s->metrics);
    }
    return r;
}

static void close_core(void *ud)
{
    struct serve *s = ud;

    dmk_decode_core_free(&s->core);
}

int dmk_decode_serve(const struct dmk_decode_options *options, uint32_t local_prefill_below,
                     const struct dmk_engine_source *source)
{
    struct serve s = {.options = options, .local_prefill_below = local_prefill_below};
    const struct dmk_worker_role role = {
        .decode = true,
        .program = "damask-decode",
        .ud = &s,
        .source = source,
        .engine_conf = engine_conf,
        .open = open_core,
        .close = close_core,
        .on_generate = on_generate,
        .on_cancel = on_cancel,
        .on_vocabulary = on_vocabulary,
        .on_closed_word = on_closed_word,
        .on_router_gone = on_router_gone,
        .xfer_message = xfer_message,
        .xfer_closed = xfer_closed,
        .on_turn = on_turn,
        .on_tick = on_tick,
        .on_drain = on_drain,
        .idle = is_idle,
        .stats = tell_stats,
        .block_events = block_events,
        .block_list = block_list,
        .hello = fill_hello,
        .health = tell_health,
        .state = tell_state,
        .collect = collect,
    };

    return dmk_worker_run(&role, &options->worker);
}
