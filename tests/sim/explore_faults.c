/* What breaks in the explorer's world, and what comes back; see explore.h. */
#include "tests/sim/explore_impl.h"

/* ---- faults ----------------------------------------------------------------------------------- */

static void break_streams(struct ex_state *s, const struct ex_conf *conf, int i)
{
    for (int r = 0; r < conf->n_routers; r++) {
        s->streams[r][i] |= STREAM_BROKEN | STREAM_WORKER_KNOWS;
    }
}

static void crash_p(struct ex_world *w, int p)
{
    struct ex_state *s = &w->s;
    struct ex_worker *worker = &s->p[p];

    for (int t = 0; t < ex_n_tickets(w->conf); t++) {
        struct ex_ticket *k = &s->tickets[t];

        if (k->p == p && k->tx != DMK_SEND_NONE) {
            k->tx = DMK_SEND_NONE;
            k->p_slot = 0;
        }
        if (k->p == p && k->in_flight && w->conf->direct) {
            worker->dying |= (uint8_t)(1u << k->p_inc);
        }
    }
    for (int d = 0; d < w->conf->n_d; d++) {
        for (int i = 0; i < EX_SLOTS; i++) {
            struct ex_conn *c = ex_conn(s, p, d, i);

            if (c->p_end != END_NONE) {
                c->p_end = END_GONE;
                c->broken = 1;
            }
        }
    }
    if (w->conf->direct && ex_ask(w, 2)) {
        worker->dying |= (uint8_t)(1u << worker->incarnation); /* by copies of others */
    }
    break_streams(s, w->conf, p);
    worker->down = 1;
    worker->hung = 0;
}

static void crash_d(struct ex_world *w, int d)
{
    struct ex_state *s = &w->s;

    for (int t = 0; t < ex_n_tickets(w->conf); t++) {
        struct ex_ticket *k = &s->tickets[t];

        if (k->d != d || !k->d_inc || k->d_inc != s->d[d].incarnation) {
            continue;
        }
        k->rx = DMK_RECEIVE_FORGOTTEN;
        if (k->in_flight && !w->conf->direct) {
            k->in_flight = 0;
            k->flags |= F_DROPPED;
        }
        k->flags &= (uint8_t) ~(F_ASK | F_WORD);
    }
    for (int i = 0; i < EX_MAX_PAGES; i++) {
        s->owner[d][i] = 0;
    }
    for (int p = 0; p < w->conf->n_p; p++) {
        s->pairs[p][d].known = 0;
        for (int i = 0; i < EX_SLOTS; i++) {
            struct ex_conn *c = ex_conn(s, p, d, i);

            if (c->p_end != END_NONE) {
                c->d_end = END_GONE;
                c->broken = 1;
            }
        }
    }
    break_streams(s, w->conf, EX_MAX_WORKERS + d);
    s->d[d].down = 1;
    s->d[d].hung = 0;
}

void ex_move_worker(const struct ex_moves *m, bool is_d, int x)
{
    struct ex_world *w = m->w;
    struct ex_state *s = ex_begin(m);
    struct ex_worker *worker = is_d ? &s->d[x] : &s->p[x];
    const char name = is_d ? 'D' : 'P';
    const enum ex_fault crash = is_d ? EX_CRASH_D : EX_CRASH_P, hang = is_d ? EX_HANG_D : EX_HANG_P;

    if (worker->down) {
        worker->down = 0;
        worker->incarnation++;
        ex_emit(w, EX_MAYBE, "%c%d starts again", name, x);
        s = ex_begin(m);
    } else if (s->budget[crash]) {
        s->budget[crash]--;
        if (is_d) {
            crash_d(w, x);
        } else {
            crash_p(w, x);
        }
        ex_emit(w, EX_MAYBE, "FAULT %c%d dies", name, x);
        s = ex_begin(m);
    }
    if (worker->hung) {
        worker->hung = 0;
        ex_emit(w, EX_RESUME, "%c%d moves again", name, x);
        s = ex_begin(m);
    } else if (!worker->down && s->budget[hang]) {
        s->budget[hang]--;
        worker->hung = 1;
        ex_emit(w, EX_MAYBE, "FAULT %c%d hangs", name, x);
        s = ex_begin(m);
    }
    for (int i = 1; worker->dying >> i; i++) {
        if (!(worker->dying & 1u << i)) {
            continue;
        }
        worker->dying &= (uint8_t) ~(1u << i);
        for (int t = 0; t < ex_n_tickets(w->conf); t++) {
            if (s->tickets[t].p == x && s->tickets[t].p_inc == i) {
                s->tickets[t].in_flight = 0;
            }
        }
        ex_emit(w, EX_PROGRESS, "the process of P%d's start %d is gone", x, i);
        s = ex_begin(m);
    }
}

void ex_move_pair(const struct ex_moves *m, int p, int d)
{
    struct ex_state *s = ex_begin(m);

    if (s->budget[EX_PARTITION]) {
        s->budget[EX_PARTITION]--;
        s->pairs[p][d].partitioned = 1;
        ex_emit(m->w, EX_MAYBE, "FAULT P%d and D%d hear nothing of each other any more", p, d);
    }
}

void ex_move_router(const struct ex_moves *m, int r)
{
    struct ex_state *s = ex_begin(m);

    if (!s->budget[EX_CRASH_ROUTER]) {
        return;
    }
    s->budget[EX_CRASH_ROUTER]--;
    for (int q = r; q < m->w->conf->n_requests; q += m->w->conf->n_routers) {
        if (ex_is_active(&s->requests[q])) {
            s->requests[q].state = R_LOST;
        }
    }
    for (int i = 0; i < 2 * EX_MAX_WORKERS; i++) {
        const int x = i % EX_MAX_WORKERS;

        if (x < (i < EX_MAX_WORKERS ? m->w->conf->n_p : m->w->conf->n_d)) {
            s->streams[r][i] |= STREAM_BROKEN | STREAM_ROUTER_KNOWS;
        }
    }
    ex_emit(m->w, EX_MAYBE, "FAULT router %d dies; another starts", r);
}
