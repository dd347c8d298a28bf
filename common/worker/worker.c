/* A worker from start to end; see worker.h. Everything runs on the loop but the engine's jobs.
 *
 * Whatever a callback changes calls kick; the end of the turn then lets the role plan, tells changes of
 * prefixes, writes what was emitted, and looks whether a drain is over. */
#include "common/worker/worker.h"
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/worker/internal.h"

#define TICK_MS      50
#define END_LOOK_MS  5
#define END_LIMIT_MS 2000 /* for a step in flight, and for the routers to close their connections */

static void end(struct dmk_worker *w, int status);

const char *dmk_worker__role_name(const struct dmk_worker *w)
{
    return w->role->decode ? "decode" : "prefill";
}

bool dmk_worker__stuck(const struct dmk_worker *w)
{
    /* Loading may take long; a step may not. */
    return w->role_open &&
           dmk_engine_thread_age_ns(w->thread) > w->conf->stuck_after_ms * DMK_NS_PER_MS;
}

/* ---- the turn ---- */

static bool is_serving(const struct dmk_worker *w)
{
    return w->phase == DMK_WORKER__READY || w->phase == DMK_WORKER__DRAINING;
}

void dmk_worker__kick(struct dmk_worker *w)
{
    dmk_loop_defer(w->loop, &w->turn);
}

static void on_turn(void *ud)
{
    struct dmk_worker *w = ud;

    if (is_serving(w)) {
        w->role->on_turn(w->role->ud);
        dmk_worker__blocks_turn(w);
    }
    dmk_worker__routers_flush(w);
    if (w->phase == DMK_WORKER__DRAINING && !dmk_engine_thread_busy(w->thread) &&
        w->role->idle(w->role->ud)) {
        dmk_log_info("worker=%s drained", w->id);
        end(w, 0);
    }
}

static void on_tick(void *ud)
{
    struct dmk_worker *w = ud;

    if (is_serving(w)) {
        w->role->on_tick(w->role->ud);
        dmk_worker__routers_tick(w, dmk_clock_ns());
        dmk_worker__kick(w);
    }
}

static void on_poke(void *ud)
{
    struct dmk_worker *w = ud;

    atomic_store(&w->poked, false); /* before on_poke: what comes after it pokes again */
    if (w->role_open && w->role->on_poke) {
        w->role->on_poke(w->role->ud);
        dmk_worker__kick(w);
    }
}

void dmk_worker_poke(struct dmk_worker *w)
{
    if (!atomic_exchange(&w->poked, true)) {
        dmk_loop_post(w->loop, &w->poke);
    }
}

/* ---- steps ---- */

static void run_step(void *ud)
{
    struct dmk_worker *w = ud;

    w->step_run(w->step_ud);
}

static void on_step_done(void *ud)
{
    struct dmk_worker *w = ud;

    w->step_done(w->step_ud);
    dmk_worker__kick(w);
}

void dmk_worker_step(struct dmk_worker *w, dmk_loop_fn run, dmk_loop_fn done, void *ud)
{
    w->step_run = run;
    w->step_done = done;
    w->step_ud = ud;
    dmk_engine_thread_run(w->thread, run_step, on_step_done, w);
}

bool dmk_worker_stepping(const struct dmk_worker *w)
{
    return dmk_engine_thread_busy(w->thread);
}

static void on_engine_closed(void *ud)
{
    struct dmk_worker *w = ud;

    dmk_loop_stop(w->loop);
}

/* ---- the transport ---- */

static void on_xfer_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct dmk_worker *w = ud;

    if (!w->role_open || !w->role->xfer_message(w->role->ud, ep, message)) {
        dmk_log_debug("worker=%s a message of %zu bytes from another worker is none of ours", w->id,
                      message.len);
    }
}

static void on_xfer_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    struct dmk_worker *w = ud;

    if (w->role_open) {
        w->role->xfer_closed(w->role->ud, ep, status);
    }
}

static void on_xfer_progress(void *ud)
{
    dmk_worker__kick(ud);
}

static int wait_devices(void *ud)
{
    struct dmk_worker *w = ud;

    return w->port.wait_devices(w->port.engine);
}

static int open_xfer(struct dmk_worker *w, struct dmk_error *reterr)
{
    static const char *const names[] = {"tcp", "shm", "cuda"};
    struct dmk_xfer_conf conf = {
        .bind = w->conf->xfer_bind[0] ? w->conf->xfer_bind : NULL,
        .mem_kind = w->port.mem_kind,
        .device_sync = w->port.wait_devices ? wait_devices : NULL,
        .events = {.on_message = on_xfer_message, .on_closed = on_xfer_closed, .ud = w},
    };
    int ret;

    if (w->conf->xfer_transport == DMK_WORKER_NONE) {
        return 0;
    }
    conf.transport = names[w->conf->xfer_transport];
    if (w->port.bind) {
        w->port.bind(w->port.engine); /* the transport copies on the device from this thread */
    }
    w->ops = dmk_xfer_find("ucx");
    ret = w->ops->open(&conf, &w->xfer, reterr);
    if (ret == 0 && conf.mem_kind == DMK_MEM_KIND_CUDA &&
        w->conf->xfer_transport != DMK_WORKER_CUDA) {
        dmk_log_warn(
            "worker=%s pages in device memory go through the host's by \"%s\", at a GB/s or "
            "two; between GPUs of one host use xfer-transport cuda",
            w->id, conf.transport);
    }
    if (ret == 0) {
        w->ops->info(w->xfer, &w->xfer_info);
        w->xferloop = dmk_xferloop_new(w->loop, w->ops, w->xfer, on_xfer_progress, w);
        dmk_worker__metrics_add_transfer(w);
    }
    return ret;
}

/* ---- boot ---- */

static int start_serving(struct dmk_worker *w, struct dmk_error *reterr)
{
    int ret = open_xfer(w, reterr);

    if (ret == 0) {
        ret = w->role->open(w->role->ud, w, reterr);
        w->role_open = ret == 0;
    }
    if (ret == 0) {
        ret = dmk_rpc_new(w->loop, &w->rpc, reterr);
    }
    if (ret == 0) {
        dmk_rpc_set_keepalive(w->rpc, (uint32_t)w->conf->keepalive_ms,
                              (uint32_t)w->conf->keepalive_timeout_ms);
        ret = dmk_worker__routers_listen(w, reterr);
    }
    return ret;
}

static void on_engine_open(void *ud)
{
    struct dmk_worker *w = ud;
    int ret = w->open_status;

    w->engine_open = ret == 0;
    if (w->phase == DMK_WORKER__ENDING) {
        dmk_loop_stop(w->loop);
        return;
    }
    if (ret == 0) {
        ret = start_serving(w, &w->open_error);
    }
    if (ret < 0) {
        dmk_log_error("worker=%s can not start: %s", w->id, w->open_error.text);
        end(w, 1);
        return;
    }
    w->phase = DMK_WORKER__READY;
    dmk_rpc_server_set_serving(w->server, true);
    dmk_timer_start(w->tick, TICK_MS, TICK_MS);
    dmk_log_info("worker=%s ready: %s of \"%s\" on %s, admin port %u, incarnation %" PRIu64
                 ", numerics %s, pages by %s on \"%s\" %s",
                 w->id, dmk_worker__role_name(w), w->model_name, w->conf->listen,
                 dmk_http_server_port(w->admin), w->incarnation, w->port.numerics,
                 w->xfer ? w->xfer_info.transport : "none", w->xfer_info.device,
                 w->xfer_info.address);
    if (w->role->decode && dmk_engine_port_is_mixed(&w->port)) {
        dmk_log_info("worker=%s prompts come from prefill workers of numerics %s and are not "
                     "computed here",
                     w->id, w->port.prompt_numerics);
    }
}

/* ---- drain and end ---- */

/* Every END_LOOK_MS: stops the loop when all is said and heard. A router that does not read what it was sent has until
 * the drain limit for it. */
static void look_whether_ended(struct dmk_worker *w)
{
    const uint64_t now = dmk_clock_ns();
    const bool busy = dmk_engine_thread_busy(w->thread);
    const uint32_t n_unread = w->server ? dmk_rpc_server_n_calls(w->server) : 0;

    if (n_unread > 0 && now < w->drain_deadline_ns) {
        w->end_deadline_ns = now + END_LIMIT_MS * DMK_NS_PER_MS;
    } else if (now >= w->end_deadline_ns) {
        if (n_unread > 0) {
            dmk_log_warn("worker=%s streams cut off that their routers have not read: %u", w->id,
                         n_unread);
        }
        dmk_loop_stop(w->loop);
    } else if (!busy && (!w->server || dmk_rpc_server_is_drained(w->server))) {
        dmk_loop_stop(w->loop);
    }
}

static void on_limit(void *ud)
{
    struct dmk_worker *w = ud;

    if (w->phase == DMK_WORKER__ENDING) {
        look_whether_ended(w);
        return;
    }
    dmk_log_warn("worker=%s drain limit reached, what still runs is cut off", w->id);
    end(w, 0);
}

/* The last words may still leave, and a step in flight end. */
static void end(struct dmk_worker *w, int status)
{
    if (w->phase == DMK_WORKER__ENDING) {
        return;
    }
    w->phase = DMK_WORKER__ENDING;
    w->exit_status = status;
    dmk_worker__routers_flush(w);
    dmk_worker__routers_finish(w);
    if (w->server) {
        dmk_rpc_server_drain(w->server);
    }
    w->end_deadline_ns = dmk_clock_ns() + END_LIMIT_MS * DMK_NS_PER_MS;
    dmk_timer_start(w->limit, w->server ? END_LOOK_MS : 0, END_LOOK_MS);
}

static void drain(struct dmk_worker *w)
{
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;
    Damask__V1__Drain drain_event = DAMASK__V1__DRAIN__INIT;

    dmk_log_info("worker=%s draining, limit %" PRIu64 " ms", w->id, w->conf->drain_limit_ms);
    w->phase = DMK_WORKER__DRAINING;
    dmk_rpc_server_set_serving(w->server, false);
    drain_event.limit_ms = (uint32_t)w->conf->drain_limit_ms;
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_DRAIN;
    event.drain = &drain_event;
    dmk_worker_emit(w, DMK_ROUTER_ALL, &event);
    w->role->on_drain(w->role->ud);
    dmk_timer_start(w->limit, w->conf->drain_limit_ms, 0);
    w->drain_deadline_ns = dmk_clock_ns() + w->conf->drain_limit_ms * DMK_NS_PER_MS;
    dmk_worker__kick(w);
}

/* gRPC looks for a new certificate at each handshake; this is for the admin port, and so that the signal does not
 * end the process. */
static void on_hup(void *ud)
{
    struct dmk_worker *w = ud;

    dmk_log_info("worker=%s SIGHUP: certificates are read again", w->id);
    if (w->admin) {
        dmk_http_server_reload(w->admin);
    }
}

static void on_signal(void *ud)
{
    struct dmk_worker *w = ud;

    if (w->phase == DMK_WORKER__READY) {
        drain(w);
    } else {
        w->drain_deadline_ns = 0;
        end(w, w->phase == DMK_WORKER__LOADING ? 1 : 0);
    }
}

/* ---- the whole ---- */

/* Grows from start to start, also within a millisecond: time above, chance below. */
static uint64_t make_incarnation(void)
{
    struct timespec ts;

    (void)clock_gettime(CLOCK_REALTIME, &ts);
    return ((uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000) << 20 |
           (dmk_random_u64() & 0xfffff);
}

static void make_names(struct dmk_worker *w)
{
    const char *model = w->conf->model;
    size_t len = strlen(model);
    size_t begin;

    while (len > 1 && model[len - 1] == '/') {
        len--;
    }
    begin = len;
    while (begin > 0 && model[begin - 1] != '/') {
        begin--;
    }
    if (w->conf->model_name[0]) {
        (void)snprintf(w->model_name, sizeof(w->model_name), "%s", w->conf->model_name);
    } else {
        (void)snprintf(w->model_name, sizeof(w->model_name), "%.*s", (int)(len - begin),
                       model + begin);
    }
    if (w->conf->worker_id[0]) {
        (void)snprintf(w->id, sizeof(w->id), "%s", w->conf->worker_id);
    } else {
        char host[65] = "worker";

        (void)gethostname(host, sizeof(host) - 1); /* the word stays when it fails */
        (void)snprintf(w->id, sizeof(w->id), "%s/%.150s", host, w->conf->listen);
    }
}

static int boot(struct dmk_worker *w, struct dmk_error *reterr)
{
    int ret = dmk_loop_new(&w->loop, reterr);

    if (ret < 0) {
        return ret;
    }
    dmk_defer_init(&w->turn, on_turn, w);
    w->poke.fn = on_poke;
    w->poke.ud = w;
    w->signals[0] = dmk_signal_new(w->loop, SIGTERM, on_signal, w);
    w->signals[1] = dmk_signal_new(w->loop, SIGINT, on_signal, w);
    w->hup = dmk_signal_new(w->loop, SIGHUP, on_hup, w);
    w->tick = dmk_timer_new(w->loop, on_tick, w);
    w->limit = dmk_timer_new(w->loop, on_limit, w);
    w->thread = dmk_engine_thread_new(w->loop);
    dmk_worker__metrics_new(w);
    ret = dmk_worker__admin_listen(w, reterr);
    if (ret == 0) {
        dmk_engine_thread_run(w->thread, dmk_worker__engine_open, on_engine_open, w);
    }
    return ret;
}

static void tear_down(struct dmk_worker *w)
{
    dmk_rpc_server_free(&w->server);
    dmk_rpc_free(&w->rpc);
    if (w->role_open) {
        w->role_open = false;
        w->role->close(w->role->ud);
    }
    dmk_xferloop_free(&w->xferloop);
    if (w->xfer) {
        w->ops->close(w->xfer);
    }
    if (w->engine_open) {
        dmk_engine_thread_run(w->thread, dmk_worker__engine_close, on_engine_closed, w);
        dmk_loop_run(w->loop);
    }
    dmk_http_server_free(&w->admin);
    dmk_keys_free(&w->admin_keys);
    dmk_defer_cancel(&w->turn);
    dmk_engine_thread_free(&w->thread);
    dmk_timer_free(&w->tick);
    dmk_timer_free(&w->limit);
    dmk_signal_free(&w->signals[0]);
    dmk_signal_free(&w->signals[1]);
    dmk_signal_free(&w->hup);
    dmk_worker__metrics_free(w);
    dmk_loop_free(&w->loop);
    free(w);
}

int dmk_worker_run(const struct dmk_worker_role *role, const struct dmk_worker_conf *conf)
{
    struct dmk_worker *w = calloc(1, sizeof(*w));
    struct dmk_error err;
    int status;

    dmk_assert(w);
    dmk_log_init(role->program, (enum dmk_log_level)conf->log_level, conf->log_json);
    w->role = role;
    w->conf = conf;
    w->incarnation = make_incarnation();
    make_names(w);
    if (boot(w, &err) < 0) {
        dmk_log_error("worker=%s can not start: %s", w->id, err.text);
        if (w->loop) {
            tear_down(w);
        } else {
            free(w);
        }
        return 1;
    }
    dmk_loop_run(w->loop);
    status = w->exit_status;
    if (dmk_engine_thread_busy(w->thread)) {
        /* The engine hangs, or still loads: its thread can not be stopped, so nothing it may touch is
         * freed; the end of the process takes it all. */
        dmk_log_warn("worker=%s ends while the engine is busy", w->id);
        return status;
    }
    tear_down(w);
    return status;
}

/* ---- for the role ---- */

struct dmk_loop *dmk_worker_loop(struct dmk_worker *w)
{
    return w->loop;
}

uint64_t dmk_worker_incarnation(const struct dmk_worker *w)
{
    return w->incarnation;
}

const struct dmk_engine_port *dmk_worker_engine(const struct dmk_worker *w)
{
    return &w->port;
}

const struct dmk_xfer_ops *dmk_worker_xfer_ops(const struct dmk_worker *w)
{
    return w->ops;
}

struct dmk_xfer *dmk_worker_xfer(struct dmk_worker *w)
{
    return w->xfer;
}

struct dmk_metrics *dmk_worker_metrics(struct dmk_worker *w)
{
    return w->metrics;
}

const char *dmk_worker_labels(const struct dmk_worker *w)
{
    return w->labels;
}

void dmk_worker_set_limits(struct dmk_worker *w, const struct dmk_msg_limits *limits)
{
    w->limits = *limits;
}
