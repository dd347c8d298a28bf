/* Workers, streams and time of the simulator; see sim.h. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/rng.h"
#include "tests/sim/sim.h"

uint64_t sim_chance(struct sim *sim, uint64_t n)
{
    return dmk_rng_u64(sim->seed, 0x73696d, sim->n_chances++) % n;
}

void sim_say(struct sim *sim, const char *format, ...)
{
    va_list args;

    if (!sim->verbose) {
        return;
    }
    printf("%6llu  ", (unsigned long long)sim->turn);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
}

void sim_break(struct sim *sim, const char *format, ...)
{
    va_list args;

    if (sim->broken[0]) {
        return;
    }
    va_start(args, format);
    vsnprintf(sim->broken, sizeof(sim->broken), format, args);
    va_end(args);
    sim_say(sim, "BROKEN: %s", sim->broken);
}

bool sim_is_d(uint32_t worker)
{
    return worker >= SIM_N_P;
}

/* ---- streams ---------------------------------------------------------------------------------- */

static void clear_queue(struct sim_queue *q)
{
    while (q->n > 0) {
        free(q->items[q->head].ticket);
        q->head = (q->head + 1) % SIM_QUEUE;
        q->n--;
    }
}

static void push(struct sim *sim, struct sim_stream *s, struct sim_queue *q,
                 const struct sim_message *m)
{
    const struct sim_message *last = &q->items[(q->head + q->n + SIM_QUEUE - 1) % SIM_QUEUE];
    struct sim_message *at = &q->items[(q->head + q->n) % SIM_QUEUE];
    const uint64_t due = sim->turn + 1 + sim_chance(sim, sim->stream_delay + 1);

    if (s->broken) {
        free(m->ticket);
        return;
    }
    dmk_assert(q->n < SIM_QUEUE);
    *at = *m;
    at->due = q->n > 0 && last->due > due ? last->due : due; /* a stream keeps the order */
    q->n++;
}

void sim_send(struct sim *sim, uint32_t router, uint32_t worker, const struct sim_message *m)
{
    struct sim_stream *s = &sim->streams[router][worker];

    push(sim, s, &s->to_worker, m);
}

static void post(struct sim_worker *w, uint32_t router, const struct sim_message *m)
{
    struct sim_stream *s = &w->sim->streams[router][w->index];

    push(w->sim, s, &s->to_router, m);
}

/* Through any router whose stream is there. */
static void post_any(struct sim_worker *w, const struct sim_message *m)
{
    for (uint32_t i = 0; i < SIM_N_ROUTERS; i++) {
        const uint32_t r = (uint32_t)((w->sim->turn + i) % SIM_N_ROUTERS);

        if (!w->sim->streams[r][w->index].broken) {
            post(w, r, m);
            return;
        }
    }
}

void sim_cut_stream(struct sim *sim, uint32_t router, uint32_t worker)
{
    struct sim_stream *s = &sim->streams[router][worker];

    if (s->broken) {
        return;
    }
    s->broken = true;
    s->router_learns = sim->turn + 1 + sim_chance(sim, 20);
    s->worker_learns = sim->turn + 1 + sim_chance(sim, 20);
    clear_queue(&s->to_worker);
    clear_queue(&s->to_router);
}

/* ---- what the cores say ----------------------------------------------------------------------- */

static void on_decode(void *ud, const struct dmk_decode_event *e)
{
    struct sim_worker *w = ud;
    struct sim_message m = {.request = (uint32_t)e->id.lo, .attempt = e->id.attempt};

    switch (e->kind) {
    case DMK_DECODE_RESERVED:
        m.kind = SIM_RESERVED;
        m.needs_prefill = e->reserved.needs_prefill;
        if (m.needs_prefill) {
            m.ticket_len = e->reserved.ticket.len;
            m.ticket = malloc(m.ticket_len);
            dmk_assert(m.ticket);
            memcpy(m.ticket, e->reserved.ticket.data, m.ticket_len);
        }
        break;
    case DMK_DECODE_TOKEN:
        m.kind = SIM_TOKEN;
        m.index = e->token.index;
        m.id = e->token.result->id;
        m.logprob = e->token.result->logprob;
        break;
    case DMK_DECODE_FINISHED:
        m.kind = SIM_FINISHED;
        m.index = e->finished.n_tokens;
        break;
    case DMK_DECODE_FAILED:
        m.kind = SIM_FAILED;
        m.code = e->failed.code;
        snprintf(m.text, sizeof(m.text), "%s", e->failed.text);
        break;
    case DMK_DECODE_QUIET_ASK:
        m = (struct sim_message){.kind = SIM_ASK,
                                 .cookie = e->quiet_ask.cookie,
                                 .incarnation = e->quiet_ask.p_incarnation,
                                 .from = w->incarnation};
        post_any(w, &m);
        return;
    default:
        return;
    }
    post(w, e->router, &m);
}

static void on_prefill(void *ud, const struct dmk_prefill_event *e)
{
    struct sim_worker *w = ud;
    struct sim_message m = {.request = (uint32_t)e->id.lo, .attempt = e->id.attempt};

    switch (e->kind) {
    case DMK_PREFILL_CLOSED_WORD:
        m = (struct sim_message){.kind = SIM_WORD,
                                 .cookie = e->closed_word.cookie,
                                 .incarnation = e->closed_word.d_incarnation};
        post_any(w, &m);
        return;
    case DMK_PREFILL_DONE:
        m.kind = SIM_P_DONE;
        break;
    default:
        m.kind = SIM_FAILED;
        m.code = e->failed.code;
        snprintf(m.text, sizeof(m.text), "%s", e->failed.text);
    }
    post(w, e->router, &m);
}

static void on_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct sim_worker *w = ud;

    if (w->decode) {
        (void)dmk_decode_xfer_message(w->decode, ep, message, w->sim->now_ns);
    } else {
        (void)dmk_prefill_xfer_message(w->prefill, ep, message, w->sim->now_ns);
    }
}

static void on_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    struct sim_worker *w = ud;

    (void)status;
    if (w->decode) {
        dmk_decode_xfer_closed(w->decode, ep, w->sim->now_ns);
    } else {
        dmk_prefill_xfer_closed(w->prefill, ep, w->sim->now_ns);
    }
}

/* The quiet rule: nothing lands outside of the pages of tickets that are out. */
static void on_write(void *ud, const struct dmk_xfer *writer, void *addr, size_t bytes)
{
    struct sim *sim = ud;

    (void)writer;
    for (uint32_t i = SIM_N_P; i < SIM_N_WORKERS; i++) {
        const struct sim_worker *w = &sim->workers[i];

        if (!w->dead && dmk_decode_expects_write(w->decode, addr) &&
            dmk_decode_expects_write(w->decode, (const uint8_t *)addr + bytes - 1)) {
            return;
        }
    }
    sim_break(sim, "a write landed in pages that no ticket names");
}

/* ---- workers ---------------------------------------------------------------------------------- */

static void stop_with(const struct dmk_error *err)
{
    fprintf(stderr, "%s\n", err->text);
    dmk_unreachable("a worker does not start");
}

static void start_decode(struct sim_worker *w)
{
    struct dmk_error err;
    const struct dmk_decode_conf conf = {
        .engine = w->port,
        .incarnation = w->incarnation,
        .n_full_pages = 20,
        .n_window_pages = 24,
        .max_sequences = 4,
        .max_context = 512,
        .max_step_tokens = 132,
        .max_chunk_tokens = 128,
        .max_logit_rows = 8,
        .local_prefill_below = w->index % 2 ? 40 : 0,
        .reuse = true,
        .ops = &dmk_xfer_loopback_ops,
        .xfer = w->node,
        .ticket_expiry_ns = 500 * DMK_NS_PER_MS,
        .transfer_budget_ns = 800 * DMK_NS_PER_MS,
        .quiet_ask_every_ns = 50 * DMK_NS_PER_MS,
        .max_draining_pages = 12,
        .on_event = on_decode,
        .ud = w,
    };

    if (dmk_decode_core_new(&conf, &w->decode, &err) < 0) {
        stop_with(&err);
    }
}

static void start_prefill(struct sim_worker *w)
{
    struct dmk_error err;
    const struct dmk_prefill_conf conf = {
        .engine = w->port,
        .incarnation = w->incarnation,
        .worker_id = w->index ? "p1" : "p0",
        .n_full_pages = 16,
        .n_window_pages = 16,
        .max_jobs = 4,
        .max_context = 512,
        .chunk_tokens = 128,
        .reuse = true,
        .ops = &dmk_xfer_loopback_ops,
        .xfer = w->node,
        .queue_budget_ns = 900 * DMK_NS_PER_MS,
        .transfer_budget_ns = 800 * DMK_NS_PER_MS,
        .resend_every_ns = 20 * DMK_NS_PER_MS,
        .give_up_ns = 1500 * DMK_NS_PER_MS,
        .max_puts_in_flight = 8,
        .on_event = on_prefill,
        .ud = w,
    };

    if (dmk_prefill_core_new(&conf, &w->prefill, &err) < 0) {
        stop_with(&err);
    }
}

static void start(struct sim_worker *w)
{
    static const char *const names[SIM_N_WORKERS] = {"p0", "p1", "d0", "d1"};
    const struct dmk_xfer_conf conf = {
        .bind = names[w->index], .fabric = w->sim->fabric, .events = {on_message, on_closed, w}};
    struct dmk_error err;

    w->incarnation = 100 * (w->index + 1) + w->sim->n_starts++;
    w->dead = false;
    w->hung_until = w->back_at = w->step_until = 0;
    if (dmk_xfer_loopback_ops.open(&conf, &w->node, &err) < 0) {
        stop_with(&err);
    }
    if (sim_is_d(w->index)) {
        start_decode(w);
    } else {
        start_prefill(w);
    }
}

static void end_step(struct sim_worker *w)
{
    if (w->p_step) {
        dmk_prefill_run(w->p_step);
        dmk_prefill_done(w->prefill, w->p_step, w->sim->now_ns);
    }
    if (w->d_step) {
        dmk_decode_run(w->d_step);
        dmk_decode_done(w->decode, w->d_step, w->sim->now_ns);
    }
    w->p_step = NULL;
    w->d_step = NULL;
}

/* The memory of a worker that was killed long ago, or of one that ends now. */
static void bury(struct sim_worker *w)
{
    end_step(w);
    dmk_prefill_core_free(&w->prefill);
    dmk_decode_core_free(&w->decode);
    if (w->node) {
        dmk_xfer_loopback_ops.close(w->node);
    }
    w->node = NULL;
}

void sim_kill(struct sim *sim, uint32_t worker, uint64_t back_after)
{
    struct sim_worker *w = &sim->workers[worker];

    if (w->dead) {
        return;
    }
    for (uint32_t r = 0; r < SIM_N_ROUTERS; r++) {
        sim_cut_stream(sim, r, worker);
        sim->streams[r][worker].worker_learns = 0;
    }
    dmk_loopback_kill(sim->fabric, w->node, (uint32_t)sim_chance(sim, 200));
    w->dead = true;
    sim->n_deaths++;
    w->back_at = back_after ? sim->turn + back_after : 0;
}

void sim_open(struct sim *sim, struct dmk_loopback_conf fabric)
{
    fabric.on_write = on_write;
    fabric.ud = sim;
    if (dmk_loopback_new(&fabric, &sim->fabric) < 0) {
        dmk_unreachable("no memory for a fabric");
    }
    for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
        sim->workers[i].sim = sim;
        sim->workers[i].index = i;
        start(&sim->workers[i]);
    }
}

void sim_close(struct sim *sim)
{
    sim->calm = true;
    for (uint32_t r = 0; r < SIM_N_ROUTERS; r++) {
        for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
            sim->streams[r][i].broken = true; /* last words go nowhere */
            clear_queue(&sim->streams[r][i].to_worker);
            clear_queue(&sim->streams[r][i].to_router);
        }
    }
    for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
        bury(&sim->workers[i]);
    }
    dmk_loopback_free(&sim->fabric);
}

/* ---- turns ------------------------------------------------------------------------------------ */

static void hear(struct sim_worker *w, uint32_t router, const struct sim_message *m)
{
    struct sim *sim = w->sim;
    const struct dmk_request_id id = {router + 1, m->request, m->attempt};
    const struct sim_request *q = &sim->requests[m->request];
    const struct sim_prompt *prompt = &sim->prompts[q->prompt];

    switch (m->kind) {
    case SIM_GENERATE: {
        const struct dmk_decode_request r = {.router = router,
                                             .id = id,
                                             .prompt = prompt->ids,
                                             .n_prompt = prompt->n,
                                             .sampling = &sim_kinds[q->kind],
                                             .max_tokens = SIM_N_NEW,
                                             .ignore_eos = true,
                                             .n = 1};

        dmk_decode_generate(w->decode, &r, sim->now_ns);
        break;
    }
    case SIM_PREFILL: {
        const struct dmk_prefill_request r = {.router = router,
                                              .id = id,
                                              .prompt = prompt->ids,
                                              .n_prompt = prompt->n,
                                              .ticket = {m->ticket, m->ticket_len}};

        dmk_prefill_submit(w->prefill, &r, sim->now_ns);
        break;
    }
    case SIM_CANCEL:
        if (w->decode) {
            dmk_decode_cancel(w->decode, router, id, sim->now_ns);
        } else {
            dmk_prefill_cancel(w->prefill, router, id);
        }
        break;
    case SIM_ASK:
        dmk_prefill_quiet_ask(w->prefill, m->cookie, m->incarnation, m->from);
        break;
    default:
        dmk_decode_closed_word(w->decode, m->cookie, sim->now_ns);
    }
}

static void turn_stream(struct sim *sim, uint32_t r, uint32_t i)
{
    struct sim_stream *s = &sim->streams[r][i];
    struct sim_worker *w = &sim->workers[i];
    const bool works = !w->dead && sim->turn >= w->hung_until;

    if (s->broken) {
        if (s->router_learns && sim->turn >= s->router_learns) {
            s->router_learns = 0;
            sim_route_lost(sim, r, i);
        }
        if (works && s->worker_learns && sim->turn >= s->worker_learns) {
            s->worker_learns = 0;
            if (w->decode) {
                dmk_decode_router_gone(w->decode, r, sim->now_ns);
            } else {
                dmk_prefill_router_gone(w->prefill, r);
            }
        }
        s->broken = w->dead || s->router_learns || s->worker_learns;
        return;
    }
    while (works && s->to_worker.n > 0 && s->to_worker.items[s->to_worker.head].due <= sim->turn) {
        const struct sim_message m = s->to_worker.items[s->to_worker.head];

        s->to_worker.head = (s->to_worker.head + 1) % SIM_QUEUE;
        s->to_worker.n--;
        hear(w, r, &m);
        free(m.ticket);
    }
    while (s->to_router.n > 0 && s->to_router.items[s->to_router.head].due <= sim->turn) {
        struct sim_message m = s->to_router.items[s->to_router.head];

        s->to_router.head = (s->to_router.head + 1) % SIM_QUEUE;
        s->to_router.n--;
        sim_route_message(sim, r, i, &m);
        free(m.ticket);
    }
}

static void turn_worker(struct sim_worker *w)
{
    struct sim *sim = w->sim;

    if (w->dead) {
        if (w->back_at && sim->turn >= w->back_at) {
            bury(w);
            start(w);
            sim_say(sim, "worker %u starts again", w->index);
        } else {
            (void)dmk_xfer_loopback_ops.progress(w->node); /* of a killed node: only time */
        }
        return;
    }
    if (sim->turn < w->hung_until) {
        return;
    }
    (void)dmk_xfer_loopback_ops.progress(w->node);
    if (sim->turn % 10 == w->index) {
        if (w->decode) {
            dmk_decode_tick(w->decode, sim->now_ns);
        } else {
            dmk_prefill_tick(w->prefill, sim->now_ns);
        }
    }
    if (sim->turn < w->step_until) {
        return;
    }
    end_step(w);
    if (w->decode) {
        w->d_step = dmk_decode_plan(w->decode, sim->now_ns);
    } else {
        w->p_step = dmk_prefill_plan(w->prefill, sim->now_ns);
    }
    w->step_until = sim->turn + sim_chance(sim, 4);
}

void sim_turn(struct sim *sim)
{
    sim->turn++;
    sim->now_ns += DMK_NS_PER_MS;
    sim_route_turn(sim);
    for (uint32_t r = 0; r < SIM_N_ROUTERS; r++) {
        for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
            turn_stream(sim, r, i);
        }
    }
    for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
        turn_worker(&sim->workers[i]);
    }
}

/* ---- at the end ------------------------------------------------------------------------------- */

static bool is_worker_settled(const struct sim_worker *w)
{
    if (w->decode) {
        const struct dmk_decode_load l = dmk_decode_load(w->decode);

        return dmk_decode_idle(w->decode) && !l.n_requests && !l.full.leased && !l.full.draining &&
               !l.window.leased && !l.window.draining;
    }
    if (w->prefill) {
        const struct dmk_prefill_load l = dmk_prefill_load(w->prefill);

        return dmk_prefill_idle(w->prefill) && !l.full.leased && !l.window.leased;
    }
    return false;
}

bool sim_is_settled(struct sim *sim)
{
    for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
        if (!sim->workers[i].dead && !is_worker_settled(&sim->workers[i])) {
            return false;
        }
    }
    /* What was on its way to or from a dead worker may stay there. */
    return sim->n_deaths > 0 || dmk_loopback_n_pending_writes(sim->fabric) == 0;
}

void sim_tell_rest(struct sim *sim)
{
    for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
        const struct sim_worker *w = &sim->workers[i];

        if (!w->dead && !is_worker_settled(w) && w->decode) {
            const struct dmk_decode_load l = dmk_decode_load(w->decode);

            sim_say(sim,
                    "worker %u holds %u requests, %u leased and %u draining pages; tickets: %u "
                    "unclaimed, %u claimed, %u draining, %u ready",
                    i, l.n_requests, l.full.leased, l.full.draining, l.receiver.n_unclaimed,
                    l.receiver.n_claimed, l.receiver.n_draining, l.receiver.n_ready);
        } else if (!w->dead && !is_worker_settled(w)) {
            const struct dmk_prefill_load l = dmk_prefill_load(w->prefill);

            sim_say(sim, "worker %u holds %u running and %u waiting jobs, %u leased pages", i,
                    l.n_running, l.n_waiting, l.full.leased);
        }
    }
}

void sim_check_workers(struct sim *sim)
{
    for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
        const struct sim_worker *w = &sim->workers[i];

        if (!w->dead &&
            !(w->decode ? dmk_decode_check(w->decode) : dmk_prefill_check(w->prefill))) {
            sim_break(sim, "the pools of worker %u do not add up", i);
        }
    }
}
