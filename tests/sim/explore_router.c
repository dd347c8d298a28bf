/* Routers, their streams, and what workers hear from them, in the explorer's world; see explore.h. */
#include "tests/sim/explore_impl.h"

/* ---- routers ---------------------------------------------------------------------------------- */

static int ticket_of(const struct ex_state *s, int q)
{
    return q * EX_ATTEMPTS + s->requests[q].attempt;
}

static void send_cancels(struct ex_world *w, int q)
{
    struct ex_state *s = &w->s;
    const int t = ticket_of(s, q), r = ex_router_of(w->conf, t);
    struct ex_ticket *k = &s->tickets[t];

    if (!*ex_stream_d(s, r, k->d)) {
        k->to_workers |= TO_D_CANCEL;
    }
    if (s->requests[q].state >= R_PREFILLING && !*ex_stream_p(s, r, k->p)) {
        k->to_workers |= TO_P_CANCEL;
    }
}

/* Reserves at each D that can be reached; false when there is none. */
static bool reserve(struct ex_world *w, int q, int attempt, enum ex_edge edge, const char *why)
{
    const struct ex_state before = w->s;
    const int r = q % w->conf->n_routers;
    bool any = false;

    for (int d = 0; d < w->conf->n_d; d++) {
        struct ex_state *s = &w->s;

        *s = before;
        if (*ex_stream_d(s, r, d)) {
            continue;
        }
        any = true;
        s->requests[q].state = R_RESERVING;
        s->requests[q].attempt = (uint8_t)attempt;
        s->tickets[ticket_of(s, q)] =
            (struct ex_ticket){.d = (uint8_t)d, .to_workers = TO_D_RESERVE};
        ex_emit(w, edge, "%s: router %d sends attempt %d of request %d to D%d", why, r, attempt, q,
                d);
    }
    w->s = before;
    return any;
}

static void fail_attempt(struct ex_world *w, int q, enum ex_edge edge, const char *why)
{
    struct ex_request *request = &w->s.requests[q];

    const struct ex_state before = w->s;
    bool again;

    send_cancels(w, q);
    again = request->state != R_DECODING && request->attempt == 0 && !w->conf->once;
    if (again && w->conf->others) {
        ex_others_take(&w->s, q * EX_ATTEMPTS);
        (void)reserve(w, q, 1, edge, why);
        w->s = before;
        send_cancels(w, q); /* and now the old attempt is followed on */
    } else if (again && reserve(w, q, 1, edge, why)) {
        return;
    }
    request->state = R_FAILED;
    ex_emit(w, edge, "%s: request %d ends with an error", why, q);
}

static bool stream_lost(struct ex_state *s, const struct ex_conf *conf, int q)
{
    const int t = ticket_of(s, q), r = ex_router_of(conf, t);
    const struct ex_ticket *k = &s->tickets[t];

    return *ex_stream_d(s, r, k->d) ||
           (s->requests[q].state == R_PREFILLING && *ex_stream_p(s, r, k->p));
}

void ex_move_request(const struct ex_moves *m, int q)
{
    struct ex_world *w = m->w;
    struct ex_state *s = ex_begin(m);

    if (s->requests[q].state == R_NEW) {
        if (!reserve(w, q, 0, EX_PROGRESS, "a request arrives")) {
            s->requests[q].state = R_FAILED;
            ex_emit(w, EX_PROGRESS, "request %d arrives and no D is there", q);
        }
        return;
    }
    if (!ex_is_active(&s->requests[q])) {
        return;
    }
    if (stream_lost(s, w->conf, q)) {
        fail_attempt(w, q, EX_PROGRESS, "the router lost a worker's stream");
        s = ex_begin(m);
    }
    if (!w->conf->patient || s->requests[q].state == R_RESERVING) {
        fail_attempt(w, q, EX_PROGRESS, "the router's budget is spent");
        s = ex_begin(m);
    }
    if (s->budget[EX_LEAVE]) {
        s->budget[EX_LEAVE]--;
        send_cancels(w, q);
        s->requests[q].state = R_LEFT;
        ex_emit(w, EX_MAYBE, "the client of request %d leaves", q);
    }
}

static void take_token(struct ex_world *w, int q, int t)
{
    struct ex_request *request = &w->s.requests[q];

    if (request->state == R_PREFILLING || request->state == R_DECODING) {
        request->state = R_DECODING;
        request->heard |= (uint8_t)(1u << t % EX_ATTEMPTS);
        if (request->heard == 3) {
            ex_bad(w, "S4: a client gets tokens of two attempts");
        }
    }
}

static void take_reserved(const struct ex_moves *m, int q, int t)
{
    struct ex_world *w = m->w;
    const struct ex_state before = w->s;
    const int r = ex_router_of(w->conf, t);
    bool any = false;

    for (int p = 0; p < w->conf->n_p; p++) {
        struct ex_state *s = &w->s;

        *s = before;
        if (*ex_stream_p(s, r, p)) {
            continue;
        }
        any = true;
        s->requests[q].state = R_PREFILLING;
        s->tickets[t].p = (uint8_t)p;
        s->tickets[t].to_workers |= TO_P_PREFILL;
        ex_emit(w, EX_PROGRESS, "router %d hears reserved t%d and asks P%d", r, t, p);
    }
    w->s = before;
    if (!any) {
        fail_attempt(w, q, EX_PROGRESS, "reserved, but no P is there");
    }
}

void ex_move_from_worker(const struct ex_moves *m, int t, uint8_t mask)
{
    struct ex_world *w = m->w;
    struct ex_ticket *k = ex_begin_ticket(m, t);
    const uint8_t bits = k->from_workers & mask, message = bits & (uint8_t)-bits;
    const int q = t / EX_ATTEMPTS;
    struct ex_request *request = &w->s.requests[q];
    bool current;

    if (!message) {
        return;
    }
    current = ex_is_active(request) && request->attempt == t % EX_ATTEMPTS;
    k->from_workers &= (uint8_t)~message;
    if (!current) {
        ex_emit(w, EX_PROGRESS, "the router drops an old event of t%d", t);
    } else if (message == FROM_RESERVED && request->state == R_RESERVING) {
        take_reserved(m, q, t);
    } else if (message == FROM_TOKEN) {
        take_token(w, q, t);
        ex_emit(w, EX_PROGRESS, "the router gets tokens of t%d", t);
    } else if (message == FROM_END) {
        request->state = R_DONE;
        ex_emit(w, EX_PROGRESS, "the router gets the end of t%d", t);
    } else if (message == FROM_FAILED) {
        fail_attempt(w, q, EX_PROGRESS, "D says failed");
    } else if (message == FROM_P_FAILED && request->state == R_PREFILLING) {
        fail_attempt(w, q, EX_PROGRESS, "P says failed");
    } else {
        ex_emit(w, EX_PROGRESS, "the router hears of t%d what changes nothing", t);
    }
}

/* ---- workers hear routers --------------------------------------------------------------------- */

void ex_move_to_d(const struct ex_moves *m, int t)
{
    struct ex_world *w = m->w;
    struct ex_ticket *k = ex_begin_ticket(m, t);
    const uint8_t bits = k->to_workers & TO_D, message = bits & (uint8_t)-bits;
    int page = 0;

    if (!message || !ex_works(&w->s.d[k->d])) {
        return;
    }
    if (message == TO_D_CANCEL) {
        k->to_workers &= (uint8_t)~message;
        ex_d_cancel(w, t);
        ex_emit(w, EX_PROGRESS, "D%d is told to cancel t%d", k->d, t);
        return;
    }
    while (page < w->conf->n_pages && w->s.owner[k->d][page]) {
        page++;
    }
    if (page == w->conf->n_pages) {
        return; /* full: it waits, as it would in the router's queue */
    }
    k->to_workers &= (uint8_t)~message;
    ex_d_reserve(w, t, page);
    ex_emit(w, EX_PROGRESS, "D%d reserves page %d for t%d", k->d, page, t);
}

static void cancel_at_p(struct ex_world *w, int t)
{
    struct ex_ticket *k = &w->s.tickets[t];

    if (k->tx != DMK_SEND_NONE) {
        k->flags |= F_MUTE;
        ex_feed_p(w, t, DMK_SEND_EV_CANCEL, 0);
    }
}

void ex_move_to_p(const struct ex_moves *m, int t)
{
    struct ex_world *w = m->w;
    struct ex_ticket *k = ex_begin_ticket(m, t);
    const uint8_t bits = k->to_workers & TO_P, message = bits & (uint8_t)-bits;

    if (!message || !ex_works(&w->s.p[k->p])) {
        return;
    }
    k->to_workers &= (uint8_t)~message;
    if (message == TO_P_PREFILL) {
        k->p_inc = w->s.p[k->p].incarnation;
        ex_feed_p(w, t, DMK_SEND_EV_PREFILL, 0);
        ex_emit(w, EX_PROGRESS, "P%d queues t%d", k->p, t);
    } else {
        cancel_at_p(w, t);
        ex_emit(w, EX_PROGRESS, "P%d is told to cancel t%d", k->p, t);
    }
}

void ex_move_streams(const struct ex_moves *m, int r, int i)
{
    struct ex_world *w = m->w;
    struct ex_state *s = ex_begin(m);
    const bool is_d = i >= EX_MAX_WORKERS;
    const int x = is_d ? i - EX_MAX_WORKERS : i;

    if (x >= (is_d ? w->conf->n_d : w->conf->n_p)) {
        return;
    }
    if (s->streams[r][i] & STREAM_BROKEN && !(s->streams[r][i] & STREAM_WORKER_KNOWS) &&
        ex_works(is_d ? &s->d[x] : &s->p[x])) {
        for (int t = 0; t < ex_n_tickets(w->conf); t++) {
            if (ex_router_of(w->conf, t) != r) {
                continue;
            }
            if (is_d && s->tickets[t].d == x) {
                ex_d_cancel(w, t);
            } else if (!is_d && s->tickets[t].p == x) {
                cancel_at_p(w, t);
            }
        }
        s->streams[r][i] |= STREAM_WORKER_KNOWS;
        ex_emit(w, EX_PROGRESS, "%c%d sees the end of router %d's stream", is_d ? 'D' : 'P', x, r);
        s = ex_begin(m);
    }
    if (!s->streams[r][i] && s->budget[EX_CUT_STREAM]) {
        s->budget[EX_CUT_STREAM]--;
        s->streams[r][i] = STREAM_BROKEN;
        ex_emit(w, EX_MAYBE, "FAULT the stream between router %d and %c%d breaks", r,
                is_d ? 'D' : 'P', x);
    }
}
