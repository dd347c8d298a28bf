/* The two sides of the hand-over in the explorer's world: what receiver*.c, sender*.c and the cores do with the
 * answers of their tables. See explore.h. */
#include "tests/sim/explore_impl.h"

void ex_bad(struct ex_world *w, const char *what)
{
    w->violation = w->violation ? w->violation : what;
}

/* ---- the tables, or what a mutation makes of them --------------------------------------------- */

static struct dmk_receive_result step_d(const struct ex_world *w, enum dmk_receive_state state,
                                        enum dmk_receive_event event, uint32_t guards)
{
    struct dmk_receive_result r = dmk_receive_step(state, event, guards);
    const bool direct = w->conf->direct;

    switch (w->conf->mutation) {
    case EX_MUTATE_DEADLINE_FREES:
        if (event == DMK_RECEIVE_EV_DEADLINE && state == DMK_RECEIVE_CLAIMED) {
            r.next = DMK_RECEIVE_FORGOTTEN;
            r.actions |= DMK_RECEIVE_DO_FREE;
        }
        break;
    case EX_MUTATE_BREAK_FREES:
        if (event == DMK_RECEIVE_EV_EP_GONE && direct) {
            r = dmk_receive_step(state, event, guards & ~(uint32_t)DMK_RECEIVE_IF_DIRECT);
        }
        break;
    case EX_MUTATE_WORD_FREES:
        if (event == DMK_RECEIVE_EV_CLOSED_WORD) {
            r = dmk_receive_step(state, event, guards | DMK_RECEIVE_IF_DIRECT);
        }
        break;
    case EX_MUTATE_NO_EXPIRY:
        if (event == DMK_RECEIVE_EV_EXPIRY) {
            r = (struct dmk_receive_result){state, 0, false};
        }
        break;
    case EX_MUTATE_ANY_ENDPOINT:
        if (event == DMK_RECEIVE_EV_TERMINAL_FAIL) {
            r = dmk_receive_step(state, event, guards | DMK_RECEIVE_IF_ON_EP);
        }
        break;
    case EX_MUTATE_DEADLINE_READY:
        if (event == DMK_RECEIVE_EV_DEADLINE && state == DMK_RECEIVE_CLAIMED) {
            r = (struct dmk_receive_result){DMK_RECEIVE_READY, DMK_RECEIVE_DO_TELL_READY, true};
        }
        break;
    default:
        break;
    }
    return r;
}

static struct dmk_send_result step_p(const struct ex_world *w, enum dmk_send_state state,
                                     enum dmk_send_event event, uint32_t guards)
{
    if (w->conf->mutation == EX_MUTATE_DEAF_TO_QUIET && event == DMK_SEND_EV_QUIET_ASK) {
        guards = 0;
    }
    return dmk_send_step(state, event, guards);
}

/* ---- D ---------------------------------------------------------------------------------------- */

static void tell_router(struct ex_world *w, int t, uint8_t message)
{
    struct ex_ticket *k = &w->s.tickets[t];
    const int r = ex_router_of(w->conf, t);
    const uint8_t broken =
        message & FROM_D ? *ex_stream_d(&w->s, r, k->d) : *ex_stream_p(&w->s, r, k->p);

    if (!broken) {
        k->from_workers |= message;
    }
}

static void free_page(struct ex_world *w, int t)
{
    const struct ex_ticket *k = &w->s.tickets[t];
    uint8_t *owner = &w->s.owner[k->d][k->page];

    if (*owner != t + 1) {
        ex_bad(w, "S3: a page is freed that is not leased to its ticket");
    }
    *owner = 0;
}

static void send_to_p(struct ex_world *w, int t, int slot, uint8_t message)
{
    struct ex_ticket *k = &w->s.tickets[t];
    const struct ex_conn *c = ex_conn(&w->s, k->p, k->d, slot);

    if (c->d_end == END_OPEN && c->p_end == END_OPEN && !c->broken) {
        k->wire[slot] |= message;
    }
}

static void answer(struct ex_world *w, int t, int slot, uint32_t actions)
{
    if (slot < 0) {
        return;
    }
    if (actions & DMK_RECEIVE_DO_YES) {
        send_to_p(w, t, slot, W_YES);
    } else if (actions & DMK_RECEIVE_DO_NO) {
        send_to_p(w, t, slot, W_NO);
    } else if (actions & (DMK_RECEIVE_DO_ACCEPTED | DMK_RECEIVE_DO_ALREADY)) {
        send_to_p(w, t, slot, W_ACCEPTED);
    } else if (actions & (DMK_RECEIVE_DO_STALE | DMK_RECEIVE_DO_FAILED)) {
        send_to_p(w, t, slot, W_REJECTED);
    }
}

void ex_feed_d(struct ex_world *w, int t, enum dmk_receive_event event, uint32_t guards, int slot)
{
    struct ex_ticket *k = &w->s.tickets[t];
    const struct dmk_receive_result r =
        step_d(w, (enum dmk_receive_state)k->rx, event,
               guards | (w->conf->direct ? DMK_RECEIVE_IF_DIRECT : 0));

    if (!r.listed) {
        return;
    }
    if (r.actions & DMK_RECEIVE_DO_BIND) {
        k->d_slot = (uint8_t)(slot + 1);
        k->claimant = k->p_inc;
    }
    if (r.actions & DMK_RECEIVE_DO_CLOSE_EP && k->d_slot) {
        ex_d_close(w, k->p, k->d, k->d_slot - 1);
    }
    k->rx = (uint8_t)r.next;
    if (r.next == DMK_RECEIVE_READY) {
        k->d_slot = 0;
    }
    answer(w, t, slot, r.actions);
    if (r.actions & DMK_RECEIVE_DO_ASK && ex_has_path(w, t, false, true)) {
        k->flags |= F_ASK;
    }
    if (r.actions & DMK_RECEIVE_DO_TELL_FAILED && k->flags & F_LIVE) {
        k->flags &= (uint8_t)~F_LIVE;
        tell_router(w, t, FROM_FAILED);
    }
    if (r.actions & DMK_RECEIVE_DO_FREE) {
        free_page(w, t);
    }
}

void ex_d_close(struct ex_world *w, int p, int d, int slot)
{
    struct ex_conn *c = ex_conn(&w->s, p, d, slot);

    if (c->d_end == END_OPEN) {
        c->d_end = END_CLOSING; /* messages are not read any more, puts may still be written */
        c->broken = 1;
    }
}

void ex_d_closed(struct ex_world *w, int p, int d, int slot)
{
    ex_conn(&w->s, p, d, slot)->d_end = END_GONE;
    for (int t = 0; t < ex_n_tickets(w->conf); t++) {
        struct ex_ticket *k = &w->s.tickets[t];

        if (k->p != p || k->d != d) {
            continue;
        }
        if (!w->conf->direct && k->put_slot == slot + 1 && k->in_flight) {
            k->in_flight = 0;
            k->flags |= F_DROPPED;
        }
        if (k->rx != DMK_RECEIVE_FORGOTTEN && k->d_slot == slot + 1) {
            k->d_slot = 0;
            ex_feed_d(w, t, DMK_RECEIVE_EV_EP_GONE, 0, -1);
        }
    }
}

bool ex_process_gone(const struct ex_state *s, int p, int incarnation)
{
    const struct ex_worker *worker = &s->p[p];

    return (incarnation < worker->incarnation || worker->down) &&
           !(worker->dying & 1u << incarnation);
}

static uint32_t claim_guards(struct ex_world *w, int t, bool current)
{
    const struct ex_state *s = &w->s;
    const struct ex_ticket *k = &s->tickets[t];
    uint32_t guards = current ? DMK_RECEIVE_IF_P_CURRENT : 0;
    int n_draining = 0;

    for (int u = 0; u < ex_n_tickets(w->conf); u++) {
        const struct ex_ticket *o = &s->tickets[u];

        n_draining += o->rx == DMK_RECEIVE_DRAINING && o->d == k->d && o->p == k->p &&
                      o->claimant == k->p_inc;
    }
    guards |= k->d_inc == s->d[k->d].incarnation ? DMK_RECEIVE_IF_D_EQUAL : 0;
    guards |= !w->conf->direct || !ex_process_gone(s, k->p, k->p_inc) ? DMK_RECEIVE_IF_WATCHED : 0;
    guards |= !w->conf->bound || n_draining == 0 ? DMK_RECEIVE_IF_UNDER_BOUND : 0;
    if (w->conf->bound && ex_ask(w, 4) & 2) {
        guards &= ~(uint32_t)DMK_RECEIVE_IF_UNDER_BOUND;
    }
    return guards;
}

void ex_d_message(struct ex_world *w, int t, int slot, uint8_t message)
{
    struct ex_ticket *k = &w->s.tickets[t];
    struct ex_pair *pair = &w->s.pairs[k->p][k->d];
    const uint8_t before = k->rx, claimant = k->claimant;
    const bool old_d = k->d_inc != w->s.d[k->d].incarnation;
    bool current = k->p_inc >= pair->known;
    uint32_t guards = DMK_RECEIVE_IF_BYTES_EQUAL;

    if (k->p_inc < w->s.p[k->p].incarnation && ex_ask(w, 4) & 1) {
        current = false; /* D has heard of the newer one by others */
    }
    pair->conn[slot].d_end = END_OPEN;
    pair->known = current ? k->p_inc : pair->known;
    if (message == W_CLAIM) {
        ex_feed_d(w, t, DMK_RECEIVE_EV_CLAIM, claim_guards(w, t, current), slot);
        if ((!current || old_d) && k->rx != before) {
            ex_bad(w, "S5: a claim of another incarnation was taken");
        }
        return;
    }
    if (before != DMK_RECEIVE_FORGOTTEN && before != DMK_RECEIVE_UNCLAIMED) {
        current = k->p_inc == k->claimant;
    }
    guards |= current ? DMK_RECEIVE_IF_P_CURRENT : 0;
    guards |= k->d_slot == slot + 1 ? DMK_RECEIVE_IF_ON_EP : 0;
    ex_feed_d(w, t, message == W_OK ? DMK_RECEIVE_EV_TERMINAL_OK : DMK_RECEIVE_EV_TERMINAL_FAIL,
              guards, slot);
    if (k->rx != before && (old_d || (claimant && claimant != k->p_inc))) {
        ex_bad(w, "S5: a terminal of another incarnation was taken");
    }
}

void ex_d_reserve(struct ex_world *w, int t, int page)
{
    struct ex_ticket *k = &w->s.tickets[t];

    k->page = (uint8_t)page;
    k->d_inc = w->s.d[k->d].incarnation;
    w->s.owner[k->d][page] = (uint8_t)(t + 1);
    k->flags |= F_LIVE;
    ex_feed_d(w, t, DMK_RECEIVE_EV_RESERVE, DMK_RECEIVE_IF_ROOM, -1);
    tell_router(w, t, FROM_RESERVED);
}

void ex_d_cancel(struct ex_world *w, int t)
{
    struct ex_ticket *k = &w->s.tickets[t];

    if (!(k->flags & F_LIVE)) {
        return;
    }
    k->flags &= (uint8_t)~F_LIVE;
    if (k->rx == DMK_RECEIVE_READY) { /* the sequence's own pages by now */
        ex_feed_d(w, t, DMK_RECEIVE_EV_FINISH, 0, -1);
        free_page(w, t);
    } else {
        ex_feed_d(w, t, DMK_RECEIVE_EV_CANCEL, 0, -1);
    }
}

void ex_d_token(struct ex_world *w, int t)
{
    struct ex_ticket *k = &w->s.tickets[t];

    if (k->landed != w->conf->n_puts) {
        ex_bad(w, "S2: a token from an incomplete transfer");
    }
    k->flags |= F_DECODING;
    tell_router(w, t, FROM_TOKEN);
}

void ex_d_end(struct ex_world *w, int t)
{
    tell_router(w, t, FROM_END);
    ex_d_cancel(w, t);
}

void ex_land(struct ex_world *w, int t)
{
    struct ex_ticket *k = &w->s.tickets[t];

    k->in_flight--;
    if (w->s.d[k->d].down || k->d_inc != w->s.d[k->d].incarnation) {
        return; /* memory of a process that has ended */
    }
    if (w->s.owner[k->d][k->page] != t + 1 ||
        (k->rx != DMK_RECEIVE_CLAIMED && k->rx != DMK_RECEIVE_DRAINING)) {
        ex_bad(w, "S1: a write lands in a page that is not leased to its ticket");
    }
    k->landed++;
}

/* ---- P ---------------------------------------------------------------------------------------- */

int ex_p_connect(struct ex_world *w, int p, int d)
{
    struct ex_pair *pair = &w->s.pairs[p][d];

    for (int i = 0; i < EX_SLOTS; i++) {
        if (pair->conn[i].p_end == END_OPEN) {
            return i;
        }
    }
    if (w->conf->others) {
        return ex_others_connect(w, p, d);
    }
    if (w->s.d[d].down || pair->partitioned) {
        return -1;
    }
    for (int i = 0; i < EX_SLOTS; i++) {
        if (pair->conn[i].p_end == END_NONE) {
            pair->conn[i] = (struct ex_conn){.p_end = END_OPEN};
            return i;
        }
    }
    return -1;
}

void ex_send_to_d(struct ex_world *w, int t, int slot, uint8_t message)
{
    struct ex_ticket *k = &w->s.tickets[t];

    if (!ex_conn(&w->s, k->p, k->d, slot)->broken) {
        k->wire[slot] |= message;
    }
}

static void send_terminal(struct ex_world *w, int t)
{
    struct ex_ticket *k = &w->s.tickets[t];
    int slot = k->p_slot - 1;

    if (slot < 0 || ex_conn(&w->s, k->p, k->d, slot)->p_end != END_OPEN) {
        slot = ex_p_connect(w, k->p, k->d);
        k->p_slot = (uint8_t)(slot + 1);
    }
    if (slot >= 0) {
        ex_send_to_d(w, t, slot, k->tx == DMK_SEND_TERM_OK ? W_OK : W_FAIL);
    }
}

static void p_failed(struct ex_world *w, int t)
{
    struct ex_ticket *k = &w->s.tickets[t];

    if (!(k->flags & F_MUTE)) {
        k->flags |= F_MUTE;
        tell_router(w, t, FROM_P_FAILED);
    }
}

void ex_feed_p(struct ex_world *w, int t, enum dmk_send_event event, uint32_t guards)
{
    struct ex_ticket *k = &w->s.tickets[t];
    const struct dmk_send_result r = step_p(w, (enum dmk_send_state)k->tx, event, guards);

    if (!r.listed) {
        return;
    }
    k->tx = (uint8_t)r.next;
    if (r.actions & DMK_SEND_DO_CLOSE_EP && k->p_slot) {
        ex_p_lose(w, k->p, k->d, k->p_slot - 1);
    }
    if (r.actions & (DMK_SEND_DO_TERMINAL_OK | DMK_SEND_DO_TERMINAL_FAIL)) {
        send_terminal(w, t);
    }
    if (r.actions & DMK_SEND_DO_CLOSED_WORD && ex_has_path(w, t, true, false)) {
        k->flags |= F_WORD;
    }
    if (r.actions & DMK_SEND_DO_TELL_FAILED) {
        p_failed(w, t);
    }
    if (r.next == DMK_SEND_NONE) {
        k->p_slot = 0;
    }
}

void ex_p_lose(struct ex_world *w, int p, int d, int slot)
{
    struct ex_conn *c = ex_conn(&w->s, p, d, slot);

    if (c->p_end != END_OPEN) {
        return;
    }
    c->p_end = END_CLOSING;
    c->broken = 1;
    for (int t = 0; t < ex_n_tickets(w->conf); t++) {
        const struct ex_ticket *k = &w->s.tickets[t];

        if (k->tx != DMK_SEND_NONE && k->p == p && k->d == d && k->p_slot == slot + 1) {
            ex_feed_p(w, t, DMK_SEND_EV_EP_GONE, 0);
        }
    }
}

void ex_p_closed(struct ex_world *w, int p, int d, int slot)
{
    ex_conn(&w->s, p, d, slot)->p_end = END_GONE;
    for (int t = 0; t < ex_n_tickets(w->conf); t++) {
        struct ex_ticket *k = &w->s.tickets[t];

        if (k->tx != DMK_SEND_NONE && k->p == p && k->d == d && k->p_slot == slot + 1) {
            k->p_slot = 0;
            if (k->tx == DMK_SEND_FAILING) {
                ex_feed_p(w, t, DMK_SEND_EV_RETIRED, 0);
            }
        }
    }
}

void ex_p_message(struct ex_world *w, int t, int slot, uint8_t message)
{
    struct ex_ticket *k = &w->s.tickets[t];
    const bool was_ok = k->tx == DMK_SEND_TERM_OK;

    switch (message) {
    case W_YES:
        if (k->p_slot == slot + 1) {
            ex_feed_p(w, t, DMK_SEND_EV_YES, 0);
        }
        break;
    case W_NO:
        ex_feed_p(w, t, DMK_SEND_EV_NO, 0);
        break;
    default:
        if (was_ok && message == W_REJECTED) {
            p_failed(w, t);
        }
        ex_feed_p(w, t, DMK_SEND_EV_ANSWER, 0);
    }
}

/* ---- relays ----------------------------------------------------------------------------------- */

bool ex_has_path(const struct ex_world *w, int t, bool to_p, bool to_d)
{
    const struct ex_ticket *k = &w->s.tickets[t];

    for (int r = 0; r < w->conf->n_routers; r++) {
        if ((!to_p || !w->s.streams[r][k->p]) &&
            (!to_d || !w->s.streams[r][EX_MAX_WORKERS + k->d])) {
            return true;
        }
    }
    return false;
}
