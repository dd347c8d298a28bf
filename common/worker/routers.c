/* The streams of the routers: hello, messages in, events out in one batch a turn. */
#include <inttypes.h>
#include <stdio.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/worker/internal.h"

#define HELLO_LIMIT_NS   (5 * DMK_NS_PER_S)
#define MAX_HEALTH       64   /* calls of the health service at a time, besides the routers */
#define LOAD_AT_LEAST_MS 1000 /* though nothing is new */

static uint32_t index_of(const struct dmk_worker__router *r)
{
    return (uint32_t)(r - r->worker->routers);
}

/* ---- events out ---- */

static void add_event(struct dmk_worker__router *r, const Damask__V1__WorkerEvent *event)
{
    if (r->batch.len == 0) {
        dmk_msg_batch_begin(&r->batch, r->worker->incarnation);
    }
    dmk_msg_batch_add(&r->batch, event);
}

void dmk_worker_emit(struct dmk_worker *w, uint32_t router, const Damask__V1__WorkerEvent *event)
{
    dmk_assert(router == DMK_ROUTER_ALL || router < DMK_MAX_ROUTERS);
    dmk_worker__metrics_event(w, event);
    for (uint32_t i = 0; i < DMK_MAX_ROUTERS; i++) {
        struct dmk_worker__router *r = &w->routers[i];

        if (r->greeted && (router == i || router == DMK_ROUTER_ALL)) {
            add_event(r, event);
        }
    }
    dmk_worker__kick(w);
}

static void emit_failed(struct dmk_worker *w, uint32_t router, struct dmk_request_id id,
                        const struct dmk_failed *why)
{
    Damask__V1__RequestId request = dmk_request_id_message(id);
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;
    Damask__V1__Failed failed = DAMASK__V1__FAILED__INIT;

    failed.id = &request;
    failed.code = (Damask__V1__FailureCode)why->code;
    failed.text = (char *)(uintptr_t)why->text; /* packing only reads it */
    failed.retry_after_ms = why->retry_after_ms;
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_FAILED;
    event.failed = &failed;
    dmk_worker_emit(w, router, &event);
}

void dmk_worker_fail(struct dmk_worker *w, uint32_t router, struct dmk_request_id id,
                     const struct dmk_failed *why)
{
    char req[33];

    dmk_request_id_format(id, req);
    dmk_log_info("req=%s attempt=%u failed: %s", req, id.attempt, why->text);
    emit_failed(w, router, id, why);
}

void dmk_worker__routers_flush(struct dmk_worker *w)
{
    for (uint32_t i = 0; i < DMK_MAX_ROUTERS; i++) {
        struct dmk_worker__router *r = &w->routers[i];

        if (r->batch.len == 0 || !r->stream) {
            continue;
        }
        if (r->batch.failed) {
            dmk_log_warn("router=%s takes no events, its stream is cancelled", r->id);
            dmk_rpc_cancel(r->stream);
        } else if (dmk_rpc_send(r->stream, dmk_buf_bytes(&r->batch)) == -DMK_EFULL) {
            dmk_log_warn("router=%s reads too slowly, its stream is cancelled", r->id);
        }
        dmk_buf_reset(&r->batch);
    }
}

/* ---- hello ---- */

static void router_gone(struct dmk_worker__router *r)
{
    struct dmk_worker *w = r->worker;

    if (r->greeted) {
        r->greeted = false;
        if (w->role_open) {
            w->role->on_router_gone(w->role->ud, index_of(r));
        }
        dmk_worker__kick(w);
    }
}

/* A router that comes again takes the place of its older stream; an older one of the same name is refused. */
static bool take_place(struct dmk_worker__router *r, const Damask__V1__RouterHello *hello)
{
    struct dmk_worker *w = r->worker;

    for (uint32_t i = 0; i < DMK_MAX_ROUTERS; i++) {
        struct dmk_worker__router *other = &w->routers[i];

        if (other == r || !other->greeted || strcmp(other->id, hello->router_id) != 0) {
            continue;
        }
        if (other->incarnation > hello->incarnation) {
            return false;
        }
        dmk_log_info("router=%s connects again, its older stream ends", other->id);
        router_gone(other);
        dmk_rpc_cancel(other->stream);
    }
    return true;
}

static void send_hello(struct dmk_worker__router *r)
{
    struct dmk_worker *w = r->worker;
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;
    Damask__V1__WorkerHello hello = DAMASK__V1__WORKER_HELLO__INIT;

    hello.version = DMK_PROTOCOL_VERSION;
    hello.role = w->role->decode ? DAMASK__V1__ROLE__ROLE_DECODE : DAMASK__V1__ROLE__ROLE_PREFILL;
    hello.worker_id = w->id;
    hello.model_name = w->model_name;
    hello.model_id_hi = w->port.model_id.hi;
    hello.model_id_lo = w->port.model_id.lo;
    hello.numerics = (char *)(uintptr_t)w->port.numerics; /* only read */
    if (w->role->decode) {
        hello.prompt_numerics = (char *)(uintptr_t)w->port.prompt_numerics; /* only read */
    }
    hello.tp = w->port.layout.tp;
    hello.dp = w->port.layout.dp;
    hello.page_tokens = DMK_PAGE_TOKENS;
    hello.n_full_pages = w->port.kv[0]->layout.n_full_pages;
    hello.n_window_pages = w->port.kv[0]->layout.n_window_pages;
    hello.max_context = w->limits.max_context;
    hello.revision = w->conf->revision;
    hello.n_eos_ids = w->port.shape->n_eos;
    hello.eos_ids = (uint32_t *)(uintptr_t)w->port.shape->eos_ids; /* only read */
    hello.draining = w->phase == DMK_WORKER__DRAINING;
    hello.load_at_least_ms = w->conf->load_every_ms > LOAD_AT_LEAST_MS
                                 ? (uint32_t)w->conf->load_every_ms
                                 : LOAD_AT_LEAST_MS;
    w->role->hello(w->role->ud, &hello);
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_HELLO;
    event.hello = &hello;
    add_event(r, &event);
}

static void take_hello(struct dmk_worker__router *r, const Damask__V1__RouterHello *hello)
{
    struct dmk_worker *w = r->worker;
    char text[160];

    if (r->greeted) {
        dmk_rpc_finish(r->stream, DMK_RPC_INVALID_ARGUMENT, "a second hello on one stream");
        return;
    }
    if (hello->version != DMK_PROTOCOL_VERSION) {
        (void)snprintf(text, sizeof(text),
                       "this worker speaks version %d of the protocol, the router %" PRIu32,
                       DMK_PROTOCOL_VERSION, hello->version);
        dmk_rpc_finish(r->stream, DMK_RPC_FAILED_PRECONDITION, text);
        return;
    }
    if (!take_place(r, hello)) {
        dmk_rpc_finish(r->stream, DMK_RPC_FAILED_PRECONDITION,
                       "a newer router of this name is connected");
        return;
    }
    (void)snprintf(r->id, sizeof(r->id), "%s", hello->router_id);
    r->incarnation = hello->incarnation;
    send_hello(r);
    r->greeted = true;
    dmk_worker__blocks_begin(r);
    w->load_sent_ns = 0; /* the next tick tells the load */
    dmk_worker__kick(w);
    dmk_log_info("router=%s connected from %s", r->id, dmk_rpc_peer(r->stream));
}

/* ---- messages in ---- */

/* A request that the role never sees: its router is told, the log is not. */
static void refuse(struct dmk_worker__router *r, const Damask__V1__RequestId *id,
                   enum dmk_failure code, const char *text)
{
    const struct dmk_failed why = {.code = code, .text = text};

    emit_failed(r->worker, index_of(r), dmk_request_id_of(id), &why);
}

static void take_generate(struct dmk_worker__router *r, const Damask__V1__Generate *g)
{
    struct dmk_worker *w = r->worker;
    struct dmk_error err;

    if (!w->role->on_generate) {
        refuse(r, g->id, DMK_FAILURE_INVALID, "this is a prefill worker");
    } else if (w->phase != DMK_WORKER__READY) {
        refuse(r, g->id, DMK_FAILURE_DRAINING, "this worker is draining");
    } else if (dmk_msg_generate_check(g, &w->limits, &err) < 0) {
        refuse(r, g->id, DMK_FAILURE_INVALID, err.text);
    } else {
        w->role->on_generate(w->role->ud, index_of(r), g);
    }
}

static void take_prefill(struct dmk_worker__router *r, const Damask__V1__Prefill *p)
{
    struct dmk_worker *w = r->worker;
    struct dmk_error err;

    if (!w->role->on_prefill) {
        refuse(r, p->id, DMK_FAILURE_INVALID, "this is a decode worker");
    } else if (w->phase != DMK_WORKER__READY) {
        refuse(r, p->id, DMK_FAILURE_DRAINING, "this worker is draining");
    } else if (dmk_msg_prefill_check(p, &w->limits, &err) < 0) {
        refuse(r, p->id, DMK_FAILURE_INVALID, err.text);
    } else {
        w->role->on_prefill(w->role->ud, index_of(r), p);
    }
}

/* A router with another vocabulary would be misunderstood in every token: its stream ends. */
static void take_vocabulary(struct dmk_worker__router *r, const Damask__V1__Vocabulary *v)
{
    const struct dmk_worker_role *role = r->worker->role;
    struct dmk_error err;

    if (role->on_vocabulary &&
        role->on_vocabulary(role->ud, (struct dmk_bytes){v->data.data, v->data.len}, &err) < 0) {
        dmk_log_warn("router=%s its vocabulary is refused: %s", r->id, err.text);
        dmk_rpc_finish(r->stream, DMK_RPC_FAILED_PRECONDITION, err.text);
    }
}

static void take_message(struct dmk_worker__router *r, const Damask__V1__RouterMessage *m)
{
    const struct dmk_worker_role *role = r->worker->role;

    switch (m->body_case) {
    case DAMASK__V1__ROUTER_MESSAGE__BODY_GENERATE:
        take_generate(r, m->generate);
        break;
    case DAMASK__V1__ROUTER_MESSAGE__BODY_PREFILL:
        take_prefill(r, m->prefill);
        break;
    case DAMASK__V1__ROUTER_MESSAGE__BODY_CANCEL:
        role->on_cancel(role->ud, index_of(r), dmk_request_id_of(m->cancel->id));
        break;
    case DAMASK__V1__ROUTER_MESSAGE__BODY_VOCABULARY:
        take_vocabulary(r, m->vocabulary);
        break;
    case DAMASK__V1__ROUTER_MESSAGE__BODY_QUIET_ASK:
        if (role->on_quiet_ask) {
            role->on_quiet_ask(role->ud, m->quiet_ask);
        }
        break;
    case DAMASK__V1__ROUTER_MESSAGE__BODY_CLOSED:
        if (role->on_closed_word) {
            role->on_closed_word(role->ud, m->closed);
        }
        break;
    case DAMASK__V1__ROUTER_MESSAGE__BODY_PEER_REPORT:
        if (role->on_peer_report) {
            role->on_peer_report(role->ud, m->peer_report->peer_incarnation);
        }
        break;
    default: /* of a later version */
        break;
    }
    dmk_worker__kick(r->worker);
}

static void on_message(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes message)
{
    struct dmk_worker__router *r = ud;
    Damask__V1__RouterMessage *m;
    struct dmk_error err;

    if (dmk_msg_router_unpack(message, &m, &err) < 0) {
        dmk_log_warn("router=%s %s broke the protocol: %s", r->id, dmk_rpc_peer(stream), err.text);
        dmk_rpc_finish(stream, DMK_RPC_INVALID_ARGUMENT, err.text);
        return;
    }
    if (m->body_case == DAMASK__V1__ROUTER_MESSAGE__BODY_HELLO) {
        take_hello(r, m->hello);
    } else if (!r->greeted) {
        dmk_rpc_finish(stream, DMK_RPC_INVALID_ARGUMENT, "the first message must be hello");
    } else if (m->worker_incarnation != r->worker->incarnation) {
        dmk_rpc_finish(stream, DMK_RPC_FAILED_PRECONDITION,
                       "the message is for another incarnation of this worker");
    } else {
        take_message(r, m);
    }
    damask__v1__router_message__free_unpacked(m, NULL);
}

static void on_end(void *ud, struct dmk_rpc_stream *stream)
{
    (void)ud;
    dmk_rpc_finish(stream, DMK_RPC_OK, "the router has ended");
}

static void on_closed(void *ud, struct dmk_rpc_stream *stream, enum dmk_rpc_code code,
                      const char *text)
{
    struct dmk_worker__router *r = ud;

    (void)stream;
    if (r->id[0]) {
        dmk_log_info("router=%s stream ended: %s (%d)", r->id, text, (int)code);
    }
    r->stream = NULL;
    router_gone(r);
    dmk_buf_fini(&r->batch);
    r->id[0] = 0;
}

static void ignore_message(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes message)
{
    (void)ud;
    (void)stream;
    (void)message;
}

static void ignore_closed(void *ud, struct dmk_rpc_stream *stream, enum dmk_rpc_code code,
                          const char *text)
{
    (void)ud;
    (void)stream;
    (void)code;
    (void)text;
}

static void on_open(void *ud, struct dmk_rpc_stream *stream,
                    struct dmk_rpc_stream_events *ret_events)
{
    struct dmk_worker *w = ud;

    for (uint32_t i = 0; i < DMK_MAX_ROUTERS; i++) {
        struct dmk_worker__router *r = &w->routers[i];

        if (r->stream) {
            continue;
        }
        *r = (struct dmk_worker__router){
            .worker = w, .stream = stream, .hello_limit_ns = dmk_clock_ns() + HELLO_LIMIT_NS};
        dmk_buf_init(&r->batch, DMK_RPC_MAX_QUEUE_BYTES);
        *ret_events = (struct dmk_rpc_stream_events){
            .on_message = on_message, .on_end = on_end, .on_closed = on_closed, .ud = r};
        return;
    }
    *ret_events =
        (struct dmk_rpc_stream_events){.on_message = ignore_message, .on_closed = ignore_closed};
    dmk_rpc_finish(stream, DMK_RPC_RESOURCE_EXHAUSTED, "too many routers are connected");
}

static bool is_set(const char *text)
{
    return text && text[0];
}

int dmk_worker__routers_listen(struct dmk_worker *w, struct dmk_error *reterr)
{
    const struct dmk_rpc_method method = {"/damask.v1.Worker/Connect", on_open, w};
    const struct dmk_rpc_tls tls = {.cert = w->conf->tls_cert,
                                    .key = w->conf->tls_key,
                                    .ca = w->conf->tls_router_ca,
                                    .name = w->conf->tls_router_name};
    const struct dmk_rpc_server_conf conf = {
        .listen = w->conf->listen,
        .methods = &method,
        .n_methods = 1,
        .max_streams = DMK_MAX_ROUTERS + MAX_HEALTH,
        .tls = is_set(tls.cert) ? &tls : NULL,
    };

    if (is_set(tls.cert) && !is_set(tls.ca)) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "tls-cert is given without tls-router-ca: whoever reaches the port "
                             "could give this worker orders");
    }

    return dmk_rpc_server_new(w->rpc, &conf, &w->server, reterr);
}

/* ---- by time ---- */

static bool is_same_load(const Damask__V1__Load *a, const Damask__V1__Load *b)
{
    return a->n_running == b->n_running && a->n_waiting == b->n_waiting &&
           a->tokens_waiting == b->tokens_waiting && a->full_pages_free == b->full_pages_free &&
           a->full_pages_most_free == b->full_pages_most_free &&
           a->window_pages_free == b->window_pages_free && a->pages_draining == b->pages_draining &&
           a->stuck == b->stuck;
}

static void report_load(struct dmk_worker *w, uint64_t now_ns)
{
    const uint64_t since = now_ns - w->load_sent_ns;
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;
    Damask__V1__Load load = DAMASK__V1__LOAD__INIT;
    struct dmk_worker_stats stats = {0};

    if (since < w->conf->load_every_ms * DMK_NS_PER_MS) {
        return;
    }
    w->role->stats(w->role->ud, &stats);
    load.n_running = stats.n_running;
    load.n_waiting = stats.n_waiting;
    load.tokens_waiting = stats.tokens_waiting;
    load.full_pages_free = stats.full.free + stats.full.cached;
    load.full_pages_total = stats.full.total;
    load.window_pages_free = stats.window.free + stats.window.cached;
    load.window_pages_total = stats.window.total;
    load.full_pages_most_free = stats.most_full_free;
    load.pages_draining = stats.full.draining + stats.window.draining;
    load.step_ms = stats.step_ms;
    load.stuck = dmk_worker__stuck(w);
    if (since < LOAD_AT_LEAST_MS * DMK_NS_PER_MS && is_same_load(&load, &w->load_sent)) {
        return; /* nothing is new */
    }
    w->load_sent = load;
    w->load_sent_ns = now_ns;
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_LOAD;
    event.load = &load;
    dmk_worker_emit(w, DMK_ROUTER_ALL, &event);
}

void dmk_worker__routers_tick(struct dmk_worker *w, uint64_t now_ns)
{
    for (uint32_t i = 0; i < DMK_MAX_ROUTERS; i++) {
        struct dmk_worker__router *r = &w->routers[i];

        if (r->stream && !r->greeted && now_ns > r->hello_limit_ns) {
            dmk_rpc_cancel(r->stream);
        }
    }
    report_load(w, now_ns);
}

uint32_t dmk_worker__routers_count(const struct dmk_worker *w)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < DMK_MAX_ROUTERS; i++) {
        n += w->routers[i].greeted;
    }
    return n;
}

void dmk_worker__routers_finish(struct dmk_worker *w)
{
    for (uint32_t i = 0; i < DMK_MAX_ROUTERS; i++) {
        if (w->routers[i].stream) {
            dmk_rpc_finish(w->routers[i].stream, DMK_RPC_OK, "this worker has ended");
        }
    }
}
