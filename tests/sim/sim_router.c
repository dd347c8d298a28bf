/* The routers of the simulator: a model of router/request_attempt.c around router/route.c; see sim.h. */
#include <stdio.h>
#include <string.h>
#include "router/route.h"
#include "tests/sim/sim.h"

enum {
    RESERVE_TURNS = 400,
    PREFILL_TURNS = 2500,
    TOKEN_TURNS = 800,
    QUEUE_TURNS = 3000,
    PAUSE_TURNS = 20
};

static bool is_active(const struct sim_request *r)
{
    return r->state >= SIM_RESERVING && r->state <= SIM_DECODING;
}

static bool is_up(const struct sim *sim, uint32_t router, uint32_t worker)
{
    return !sim->streams[router][worker].broken;
}

static uint32_t number(const struct sim *sim, const struct sim_request *r)
{
    return (uint32_t)(r - sim->requests);
}

/* A worker of the kind, by the real rule; -1: none. One that failed this request only when alone. */
static int pick(struct sim *sim, const struct sim_request *r, bool d)
{
    struct dmk_route_worker view[SIM_N_WORKERS] = {0};
    const struct dmk_route_ask ask = {.prompt_tokens = sim->prompts[r->prompt].n,
                                      .turn = (uint32_t)sim_chance(sim, SIM_N_WORKERS)};
    bool others = false;

    for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
        view[i].usable = sim_is_d(i) == d && is_up(sim, r->router, i);
        view[i].free_tokens = UINT64_MAX;
        for (uint32_t q = 0; q < SIM_N_REQUESTS; q++) {
            const struct sim_request *o = &sim->requests[q];

            view[i].load_tokens +=
                o->router == r->router && is_active(o) && (o->d == (int)i || o->p == (int)i)
                    ? sim->prompts[o->prompt].n
                    : 0;
        }
        others |= view[i].usable && sim->workers[i].incarnation != r->avoid[d];
    }
    for (uint32_t i = 0; i < SIM_N_WORKERS && others; i++) {
        view[i].usable &= sim->workers[i].incarnation != r->avoid[d];
    }
    return dmk_route_pick(view, SIM_N_WORKERS, &ask);
}

static void cancel(struct sim *sim, struct sim_request *r)
{
    const struct sim_message m = {
        .kind = SIM_CANCEL, .request = number(sim, r), .attempt = r->attempt};

    if (r->d >= 0) {
        sim_send(sim, r->router, (uint32_t)r->d, &m);
    }
    if (r->p >= 0) {
        sim_send(sim, r->router, (uint32_t)r->p, &m);
    }
    r->d = r->p = -1;
}

static void end(struct sim *sim, struct sim_request *r, enum sim_state state, const char *text)
{
    cancel(sim, r);
    r->state = state;
    snprintf(r->text, sizeof(r->text), "%s", text);
    sim_say(sim, "request %u ends: %s", number(sim, r), text);
    sim_check_answer(sim, r);
}

static void fail_attempt(struct sim *sim, struct sim_request *r, enum dmk_failure code,
                         const char *text)
{
    if (r->p >= 0) {
        r->avoid[0] = sim->workers[r->p].incarnation;
    } else if (r->d >= 0 && code != DMK_FAILURE_FULL) {
        r->avoid[1] = sim->workers[r->d].incarnation;
    }
    sim_say(sim, "request %u attempt %u fails: %s", number(sim, r), r->attempt, text);
    if (r->n == 0 && r->p < 0 && code == DMK_FAILURE_FULL) {
        cancel(sim, r);
        r->state = SIM_WAITING; /* never admitted: that is no failure */
        r->not_before = sim->turn + PAUSE_TURNS;
    } else if (r->n == 0 && r->n_retries == 0) {
        cancel(sim, r);
        r->n_retries++;
        r->state = SIM_WAITING;
        r->queue_deadline = sim->turn + QUEUE_TURNS;
    } else {
        end(sim, r, SIM_ERROR, text);
    }
}

static void dispatch(struct sim *sim, struct sim_request *r)
{
    const int d = pick(sim, r, true);
    struct sim_message m = {.kind = SIM_GENERATE, .request = number(sim, r)};

    if (d < 0) {
        return;
    }
    m.attempt = ++r->attempt;
    r->d = d;
    r->p = -1;
    r->state = SIM_RESERVING;
    r->deadline = sim->turn + RESERVE_TURNS;
    sim_say(sim, "request %u attempt %u (prompt of %u) goes to worker %d", number(sim, r),
            r->attempt, sim->prompts[r->prompt].n, d);
    sim_send(sim, r->router, (uint32_t)d, &m);
}

static void take_reserved(struct sim *sim, struct sim_request *r, struct sim_message *m)
{
    struct sim_message prefill = {
        .kind = SIM_PREFILL, .request = m->request, .attempt = r->attempt};

    r->state = SIM_PREFILLING;
    r->deadline = sim->turn + PREFILL_TURNS;
    if (!m->needs_prefill) {
        return;
    }
    r->p = pick(sim, r, false);
    if (r->p < 0) {
        fail_attempt(sim, r, DMK_FAILURE_PEER, "no prefill worker is to be had");
        return;
    }
    prefill.ticket = m->ticket;
    prefill.ticket_len = m->ticket_len;
    m->ticket = NULL;
    sim_send(sim, r->router, (uint32_t)r->p, &prefill);
}

static void take_token(struct sim *sim, struct sim_request *r, const struct sim_message *m)
{
    if (m->index != r->n || r->n == SIM_N_NEW) {
        sim_break(sim, "request %u: token %u came where %u was due", m->request, m->index, r->n);
        return;
    }
    r->state = SIM_DECODING;
    r->deadline = sim->turn + TOKEN_TURNS;
    r->ids[r->n] = m->id;
    r->logprobs[r->n++] = m->logprob;
}

/* Without request state: to whoever has the incarnation, if this router has a stream to it. */
static void relay(struct sim *sim, uint32_t router, const struct sim_message *m)
{
    for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
        if (sim->workers[i].incarnation == m->incarnation) {
            sim_send(sim, router, i, m);
        }
    }
}

void sim_route_message(struct sim *sim, uint32_t router, uint32_t worker, struct sim_message *m)
{
    struct sim_request *r = &sim->requests[m->request];

    if (m->kind == SIM_ASK || m->kind == SIM_WORD) {
        relay(sim, router, m);
        return;
    }
    if (!is_active(r) || m->attempt != r->attempt || ((int)worker != r->d && (int)worker != r->p)) {
        return;
    }
    if (m->kind == SIM_FAILED && (int)worker == r->p && r->state == SIM_DECODING) {
        r->p = -1; /* D has all it needs; its state decides */
    } else if (m->kind == SIM_FAILED) {
        fail_attempt(sim, r, m->code, m->text);
    } else if (m->kind == SIM_P_DONE) {
        r->p = -1;
    } else if (m->kind == SIM_RESERVED && r->state == SIM_RESERVING) {
        take_reserved(sim, r, m);
    } else if (m->kind == SIM_TOKEN && r->state != SIM_RESERVING) {
        take_token(sim, r, m);
    } else if (m->kind == SIM_FINISHED && r->state != SIM_RESERVING) {
        if (r->n != SIM_N_NEW) {
            sim_break(sim, "request %u is finished with %u tokens", m->request, r->n);
        }
        end(sim, r, SIM_OK, "answered");
    }
}

void sim_route_lost(struct sim *sim, uint32_t router, uint32_t worker)
{
    for (uint32_t q = 0; q < SIM_N_REQUESTS; q++) {
        struct sim_request *r = &sim->requests[q];

        if (r->router != router || !is_active(r)) {
            continue;
        }
        if (r->p == (int)worker && r->state == SIM_DECODING) {
            r->p = -1;
        } else if (r->d == (int)worker || r->p == (int)worker) {
            fail_attempt(sim, r, DMK_FAILURE_PEER, "a worker was lost");
        }
    }
}

void sim_route_turn(struct sim *sim)
{
    for (uint32_t q = 0; q < SIM_N_REQUESTS; q++) {
        struct sim_request *r = &sim->requests[q];

        if (r->state == SIM_NEW && sim->turn >= r->arrives) {
            r->state = SIM_WAITING;
            r->queue_deadline = sim->turn + QUEUE_TURNS;
        }
        if (r->leaves && sim->turn >= r->leaves && r->state < SIM_OK && r->state != SIM_NEW) {
            end(sim, r, SIM_LEFT, "the client has left");
        } else if (r->state == SIM_WAITING && sim->turn >= r->queue_deadline) {
            end(sim, r, SIM_ERROR, "no worker had room in time");
        } else if (r->state == SIM_WAITING && sim->turn >= r->not_before) {
            dispatch(sim, r);
        } else if (is_active(r) && sim->turn >= r->deadline) {
            fail_attempt(sim, r, DMK_FAILURE_TIMEOUT, "a worker did not answer in time");
        }
    }
}

void sim_check_answer(struct sim *sim, const struct sim_request *r)
{
    const struct sim_prompt *prompt = &sim->prompts[r->prompt];

    for (uint32_t i = 0; i < r->n; i++) {
        if (r->ids[i] != prompt->want[r->kind].ids[i] ||
            memcmp(&r->logprobs[i], &prompt->want[r->kind].logprobs[i], sizeof(float)) != 0) {
            sim_break(sim, "request %u: token %u is not that of a single worker", number(sim, r),
                      i);
            return;
        }
    }
    if (r->state == SIM_ERROR && !r->text[0]) {
        sim_break(sim, "request %u ends in an error without a word", number(sim, r));
    }
}
