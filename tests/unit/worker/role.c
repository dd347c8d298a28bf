/* See role.h. */
#include "role.h"
#include <math.h>
#include "common/base/status.h"
#include "common/base/assert.h"

/* Steps of the worker's canary; the role's own are run_step. */
static int engine_step(void *engine, const struct dmk_step *step)
{
    struct test_role *r = engine;

    dmk_assert(step->n_seqs == 1 && step->seqs[0].n_tokens >= 1 && step->seqs[0].n_tokens <= 8);
    atomic_fetch_add(&r->n_engine_steps, 1);
    if (step->seqs[0].logits == DMK_LOGITS_LAST) {
        for (uint32_t i = 0; i < r->shape.vocab; i++) {
            step->logits[i] = r->bad_logits && i == 77 ? NAN : 1.0f;
        }
    }
    return r->fail_step ? -DMK_EIO : 0;
}

static void engine_conf(void *ud, struct dmk_engine_conf *conf)
{
    (void)ud;
    conf->max_step_tokens = 8;
}

static int open_engine(void *ud, struct dmk_engine_port *ret_port, struct dmk_error *reterr)
{
    /* Other numbers than the options have: what counts is what the engine made of them. */
    static const struct dmk_kv_mem pages = {.layout = {.n_full_pages = 120, .n_window_pages = 12}};
    struct test_role *r = ud;

    if (atomic_load(&r->hold_open)) {
        sem_wait(&r->open_gate);
    }
    if (r->fail_open_engine) {
        return dmk_error_set(reterr, -DMK_ENOENT, "no checkpoint there");
    }
    r->shape = (struct dmk_shape){.vocab = 1000, .eos_ids = {7, 8}, .n_eos = 2};
    *ret_port = (struct dmk_engine_port){.shape = &r->shape,
                                         .layout = {.tp = 1, .dp = 1},
                                         .numerics = "test-numerics",
                                         .prompt_numerics = r->prompt_numerics ? r->prompt_numerics
                                                                               : "test-numerics",
                                         .model_id = {.lo = 3, .hi = 4},
                                         .n_ranks = 1,
                                         .kv = {&pages},
                                         .step = engine_step,
                                         .engine = r};
    return 0;
}

static void close_engine(void *ud)
{
    struct test_role *r = ud;

    atomic_fetch_add(&r->n_engine_closed, 1);
}

static int open_role(void *ud, struct dmk_worker *worker, struct dmk_error *reterr)
{
    struct test_role *r = ud;
    const struct dmk_msg_limits limits = {.vocab_size = 1000, .max_context = 50, .max_choices = 2};

    (void)reterr;
    r->worker = worker;
    dmk_worker_set_limits(worker, &limits);
    atomic_fetch_add(&r->n_open, 1);
    return 0;
}

static void close_role(void *ud)
{
    struct test_role *r = ud;

    dmk_assert(!dmk_worker_stepping(r->worker));
    atomic_fetch_add(&r->n_close, 1);
}

static void emit(struct test_role *r, Damask__V1__WorkerEvent *event, int body)
{
    event->body_case = (Damask__V1__WorkerEvent__BodyCase)body;
    dmk_worker_emit(r->worker, r->router, event);
}

static void on_generate(void *ud, uint32_t router, const Damask__V1__Generate *g)
{
    struct test_role *r = ud;
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;
    Damask__V1__Reserved reserved = DAMASK__V1__RESERVED__INIT;

    const struct dmk_failed *why = atomic_load(&r->fail_with);

    atomic_fetch_add(&r->n_generate, 1);
    if (why) {
        dmk_worker_fail(r->worker, router, dmk_request_id_of(g->id), why);
        return;
    }
    dmk_assert(!r->busy);
    r->busy = true;
    r->router = router;
    r->id = dmk_request_id_of(g->id);
    r->n_ids = (uint32_t)g->n_prompt;
    memcpy(r->ids, g->prompt, g->n_prompt * sizeof(*g->prompt));
    r->at = 0;
    reserved.id = g->id;
    event.reserved = &reserved;
    emit(r, &event, DAMASK__V1__WORKER_EVENT__BODY_RESERVED);
}

static void run_step(void *ud)
{
    struct test_role *r = ud;

    dmk_worker_poke(r->worker);
    dmk_worker_poke(r->worker);
    if (atomic_load(&r->hold_step)) {
        sem_wait(&r->step_gate);
    }
}

static void step_done(void *ud)
{
    struct test_role *r = ud;
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;
    Damask__V1__RequestId id = dmk_request_id_message(r->id);
    Damask__V1__Tokens tokens = DAMASK__V1__TOKENS__INIT;
    Damask__V1__Finished finished = DAMASK__V1__FINISHED__INIT;

    if (!r->busy) {
        return; /* cancelled meanwhile */
    }
    tokens.id = &id;
    tokens.first_index = r->at;
    tokens.ids = &r->ids[r->at++];
    tokens.n_ids = 1;
    event.tokens = &tokens;
    emit(r, &event, DAMASK__V1__WORKER_EVENT__BODY_TOKENS);
    if (r->at == r->n_ids) {
        finished.id = &id;
        finished.reason = DAMASK__V1__FINISH_REASON__FINISH_LENGTH;
        finished.n_tokens = r->n_ids;
        event.finished = &finished;
        emit(r, &event, DAMASK__V1__WORKER_EVENT__BODY_FINISHED);
        r->busy = false;
    }
}

static void on_turn(void *ud)
{
    struct test_role *r = ud;

    if (r->busy && !dmk_worker_stepping(r->worker)) {
        dmk_worker_step(r->worker, run_step, step_done, r);
    }
}

static void on_cancel(void *ud, uint32_t router, struct dmk_request_id id)
{
    struct test_role *r = ud;

    (void)router;
    atomic_fetch_add(&r->n_cancel, 1);
    if (r->busy && dmk_request_id_equal(id, r->id)) {
        r->busy = false;
    }
}

static void on_router_gone(void *ud, uint32_t router)
{
    struct test_role *r = ud;

    atomic_fetch_add(&r->n_gone, 1);
    if (r->busy && r->router == router) {
        r->busy = false;
    }
}

static void on_quiet_ask(void *ud, const Damask__V1__QuietAsk *ask)
{
    struct test_role *r = ud;

    (void)ask;
    atomic_fetch_add(&r->n_quiet, 1);
}

static void on_closed_word(void *ud, const Damask__V1__ClosedWord *word)
{
    struct test_role *r = ud;

    dmk_assert(word->cookie_hi == 5);
    atomic_fetch_add(&r->n_closed_word, 1);
}

static void on_peer_report(void *ud, uint64_t incarnation)
{
    struct test_role *r = ud;

    dmk_assert(incarnation == 99);
    atomic_fetch_add(&r->n_peer_report, 1);
}

static bool xfer_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    (void)ud;
    (void)ep;
    (void)message;
    return false;
}

static void xfer_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    (void)ud;
    (void)ep;
    (void)status;
}

static void on_poke(void *ud)
{
    atomic_fetch_add(&((struct test_role *)ud)->n_poke, 1);
}

static void on_tick(void *ud)
{
    atomic_fetch_add(&((struct test_role *)ud)->n_tick, 1);
}

static void on_drain(void *ud)
{
    atomic_fetch_add(&((struct test_role *)ud)->n_drain, 1);
}

static bool idle(void *ud)
{
    struct test_role *r = ud;

    return !r->busy && !r->never_idle;
}

static void stats(void *ud, struct dmk_worker_stats *ret)
{
    struct test_role *r = ud;

    ret->n_running = r->busy;
    ret->full = (struct dmk_kv_pool_counts){
        .total = 100, .free = 60, .cached = 15, .leased = 20, .draining = 5};
    ret->window = (struct dmk_kv_pool_counts){.total = 10, .free = 10};
    ret->n_steps = 42;
    ret->n_generation_tokens = 17;
}

static uint32_t block_events(void *ud, struct dmk_kv_prefix_event *ret, uint32_t cap,
                             bool *ret_lost)
{
    struct test_role *r = ud;
    uint32_t n = 0;

    *ret_lost = atomic_exchange(&r->lose_blocks, 0) != 0 ||
                (atomic_load(&r->n_changes) > 0 && atomic_exchange(&r->lose_others, 0) != 0);
    while (n < cap && atomic_load(&r->n_changes) > 0) {
        const int k = atomic_fetch_sub(&r->n_changes, 1);

        ret[n++] = (struct dmk_kv_prefix_event){
            .added = k % 2 == 1, .n_tokens = 64, .hash = {.lo = (uint64_t)k, .hi = 77}};
    }
    return n;
}

static uint32_t block_list(void *ud, uint32_t at[2], struct dmk_kv_prefix_event *ret, uint32_t cap)
{
    struct test_role *r = ud;
    uint32_t n = 0;

    while (n < cap && at[0] < r->n_blocks) {
        at[0]++;
        ret[n++] = (struct dmk_kv_prefix_event){.n_tokens = 64, .hash = {.lo = at[0], .hi = 1}};
    }
    return n;
}

static void hello(void *ud, Damask__V1__WorkerHello *h)
{
    (void)ud;
    h->max_sequences = 33;
}

static void state(void *ud, struct dmk_buf *out)
{
    (void)ud;
    dmk_buf_puts(out, ",\"requests\":[]");
}

struct dmk_worker_role test_role_make(struct test_role *r)
{
    sem_init(&r->open_gate, 0, 0);
    sem_init(&r->step_gate, 0, 0);
    r->source = (struct dmk_engine_source){open_engine, close_engine, r};
    return (struct dmk_worker_role){
        .decode = true,
        .program = "test-worker",
        .ud = r,
        .source = &r->source,
        .engine_conf = engine_conf,
        .open = open_role,
        .close = close_role,
        .on_generate = on_generate,
        .on_cancel = on_cancel,
        .on_quiet_ask = on_quiet_ask,
        .on_closed_word = on_closed_word,
        .on_peer_report = on_peer_report,
        .on_router_gone = on_router_gone,
        .xfer_message = xfer_message,
        .xfer_closed = xfer_closed,
        .on_turn = on_turn,
        .on_poke = on_poke,
        .on_tick = on_tick,
        .on_drain = on_drain,
        .idle = idle,
        .stats = stats,
        .block_events = block_events,
        .block_list = block_list,
        .hello = hello,
        .state = state,
    };
}
