/* All that can happen next in the explorer's world; see explore.h. Here: between P and D, and each on its own. */
#include "tests/sim/explore_impl.h"

/* ---- between P and D -------------------------------------------------------------------------- */

static const char *wire_name(uint8_t message)
{
    switch (message) {
    case W_CLAIM:
        return "claim";
    case W_OK:
        return "terminal(ok)";
    case W_FAIL:
        return "terminal(fail)";
    case W_YES:
        return "yes";
    case W_NO:
        return "no";
    case W_ACCEPTED:
        return "accepted";
    default:
        return "stale or failed";
    }
}

static void deliver(struct ex_world *w, int t, int slot, uint8_t message)
{
    if (message & W_TO_D) {
        ex_d_message(w, t, slot, message);
    } else {
        ex_p_message(w, t, slot, message);
    }
}

static bool is_deliverable(struct ex_state *s, const struct ex_ticket *k, int slot, uint8_t message)
{
    const struct ex_conn *c = ex_conn(s, k->p, k->d, slot);

    if (s->pairs[k->p][k->d].partitioned) {
        return false;
    }
    if (message & W_TO_D) {
        return c->d_end <= END_OPEN && ex_works(&s->d[k->d]);
    }
    return c->p_end == END_OPEN && ex_works(&s->p[k->p]);
}

static void move_wire(const struct ex_moves *m, int t, int slot)
{
    struct ex_world *w = m->w;

    for (uint8_t message = 1; message <= W_REJECTED; message = (uint8_t)(message << 1)) {
        struct ex_ticket *k = ex_begin_ticket(m, t);
        const char *to = message & W_TO_D ? "D" : "P";
        const int x = message & W_TO_D ? k->d : k->p;

        if (!(k->wire[slot] & message)) {
            continue;
        }
        if (is_deliverable(&w->s, k, slot, message)) {
            k->wire[slot] &= (uint8_t)~message;
            deliver(w, t, slot, message);
            ex_emit(w, EX_PROGRESS, "%s%d gets %s of t%d", to, x, wire_name(message), t);
            k = ex_begin_ticket(m, t);
            if (w->s.budget[EX_DOUBLE]) {
                w->s.budget[EX_DOUBLE]--;
                deliver(w, t, slot, message);
                ex_emit(w, EX_MAYBE, "%s%d gets %s of t%d, which comes twice", to, x,
                        wire_name(message), t);
            }
        }
        k = ex_begin_ticket(m, t);
        if (w->s.budget[EX_LOSE]) {
            w->s.budget[EX_LOSE]--;
            k->wire[slot] &= (uint8_t)~message;
            ex_emit(w, EX_MAYBE, "FAULT %s of t%d is lost", wire_name(message), t);
        }
    }
}

/* Copies run to their end before P's side of an endpoint is closed. */
static bool has_copies(struct ex_state *s, const struct ex_conf *conf, int p, int d, int slot)
{
    for (int t = 0; conf->direct && t < ex_n_tickets(conf); t++) {
        const struct ex_ticket *k = &s->tickets[t];

        if (k->p == p && k->d == d && k->in_flight && k->put_slot == slot + 1 &&
            k->p_inc == s->p[p].incarnation) {
            return true;
        }
    }
    return false;
}

static void move_conn(const struct ex_moves *m, int p, int d, int slot)
{
    struct ex_world *w = m->w;
    struct ex_state *s = ex_begin(m);
    struct ex_conn *c = ex_conn(s, p, d, slot);
    const bool lost = c->broken || s->pairs[p][d].partitioned;

    if (c->p_end == END_NONE) {
        return;
    }
    if (ex_works(&s->d[d]) && c->d_end == END_OPEN && lost) {
        ex_d_close(w, p, d, slot);
        ex_emit(w, EX_PROGRESS, "D%d sees the connection to P%d broken and closes its end", d, p);
        s = ex_begin(m);
    }
    if (ex_works(&s->d[d]) && c->d_end == END_CLOSING) {
        ex_d_closed(w, p, d, slot);
        ex_emit(w, EX_PROGRESS, "D%d has closed its end of a connection to P%d", d, p);
        s = ex_begin(m);
    }
    if (ex_works(&s->p[p]) && c->p_end == END_OPEN && lost) {
        ex_p_lose(w, p, d, slot);
        ex_emit(w, EX_PROGRESS, "P%d sees the connection to D%d broken and closes its end", p, d);
        s = ex_begin(m);
    }
    if (ex_works(&s->p[p]) && c->p_end == END_CLOSING && !has_copies(s, w->conf, p, d, slot)) {
        ex_p_closed(w, p, d, slot);
        ex_emit(w, EX_PROGRESS, "P%d has closed its end of a connection to D%d", p, d);
        s = ex_begin(m);
    }
    if (!c->broken && s->budget[EX_CUT]) {
        s->budget[EX_CUT]--;
        c->broken = 1;
        ex_emit(w, EX_MAYBE, "FAULT a connection between P%d and D%d breaks", p, d);
    }
}

/* ---- D's own time ----------------------------------------------------------------------------- */

static void move_d(const struct ex_moves *m, int t)
{
    struct ex_world *w = m->w;
    struct ex_ticket *k = ex_begin_ticket(m, t);

    if (k->rx == DMK_RECEIVE_FORGOTTEN || !ex_works(&w->s.d[k->d])) {
        return;
    }
    if (k->rx == DMK_RECEIVE_READY) {
        if (!(k->flags & F_DECODING)) {
            ex_d_token(w, t);
            ex_emit(w, EX_PROGRESS, "D%d decodes t%d and sends tokens", k->d, t);
        } else {
            ex_d_end(w, t);
            ex_emit(w, EX_PROGRESS, "D%d finishes t%d", k->d, t);
        }
        return;
    }
    if (k->claimant && w->conf->direct && ex_process_gone(&w->s, k->p, k->claimant)) {
        if (k->d_slot) {
            ex_d_close(w, k->p, k->d, k->d_slot - 1);
            ex_emit(w, EX_PROGRESS, "D%d sees the process of t%d's P gone, closes", k->d, t);
        } else {
            ex_feed_d(w, t, DMK_RECEIVE_EV_PROCESS_GONE, 0, -1);
            ex_emit(w, EX_PROGRESS, "D%d sees the process of t%d's P gone", k->d, t);
        }
        return;
    }
    if (k->rx == DMK_RECEIVE_UNCLAIMED) {
        ex_feed_d(w, t, DMK_RECEIVE_EV_EXPIRY, 0, -1);
        ex_emit(w, EX_PROGRESS, "t%d expires at D%d", t, k->d);
    } else if (k->rx == DMK_RECEIVE_CLAIMED) {
        ex_feed_d(w, t, DMK_RECEIVE_EV_DEADLINE, 0, -1);
        ex_emit(w, EX_PROGRESS, "the transfer deadline of t%d passes at D%d", t, k->d);
    } else {
        ex_feed_d(w, t, DMK_RECEIVE_EV_TIMER, 0, -1);
        ex_emit(w, EX_PROGRESS, "D%d asks quiet? for t%d", k->d, t);
        if (k->d_slot) {
            k = ex_begin_ticket(m, t);
            ex_feed_d(w, t, DMK_RECEIVE_EV_TIMER, DMK_RECEIVE_IF_LATE, -1);
            ex_emit(w, EX_PROGRESS, "D%d has asked for t%d in vain and closes its endpoint", k->d,
                    t);
        }
    }
}

/* ---- P's jobs --------------------------------------------------------------------------------- */

static void schedule(const struct ex_moves *m, int t)
{
    struct ex_world *w = m->w;
    struct ex_ticket *k = ex_begin_ticket(m, t);
    const int slot = ex_p_connect(w, k->p, k->d);

    if (slot < 0) {
        ex_feed_p(w, t, DMK_SEND_EV_SCHEDULED, 0);
        ex_emit(w, EX_PROGRESS, "P%d can not reach the D of t%d", k->p, t);
        return;
    }
    k->p_slot = k->put_slot = (uint8_t)(slot + 1);
    ex_feed_p(w, t, DMK_SEND_EV_SCHEDULED, DMK_SEND_IF_D_EQUAL);
    ex_send_to_d(w, t, slot, W_CLAIM);
    ex_emit(w, EX_PROGRESS, "P%d claims t%d", k->p, t);
}

static bool may_flush(struct ex_state *s, const struct ex_ticket *k)
{
    return !k->in_flight && !(k->flags & F_DROPPED) && k->p_slot &&
           ex_conn(s, k->p, k->d, k->p_slot - 1)->p_end == END_OPEN;
}

static void run_job(const struct ex_moves *m, int t)
{
    struct ex_world *w = m->w;
    struct ex_ticket *k = ex_begin_ticket(m, t);

    if (k->posted < w->conf->n_puts && k->p_slot &&
        ex_conn(&w->s, k->p, k->d, k->p_slot - 1)->p_end == END_OPEN) {
        k->posted++;
        if (ex_conn(&w->s, k->p, k->d, k->p_slot - 1)->broken && !w->conf->direct) {
            k->flags |= F_DROPPED;
        } else {
            k->in_flight++;
        }
        ex_emit(w, EX_PROGRESS, "P%d posts a put of t%d", k->p, t);
    } else if (k->posted == w->conf->n_puts && may_flush(&w->s, k)) {
        ex_feed_p(w, t, DMK_SEND_EV_FLUSHED, 0);
        ex_emit(w, EX_PROGRESS, "P%d has flushed t%d, sends terminal(ok)", k->p, t);
    }
}

static void end_job(const struct ex_moves *m, int t)
{
    struct ex_world *w = m->w;
    struct ex_ticket *k = ex_begin_ticket(m, t);
    const bool works = k->p_slot && ex_conn(&w->s, k->p, k->d, k->p_slot - 1)->p_end == END_OPEN;

    if (!works || !k->wire[k->p_slot - 1]) {
        ex_feed_p(w, t, DMK_SEND_EV_RESEND, 0);
        ex_emit(w, EX_PROGRESS, "P%d sends the terminal of t%d again", k->p, t);
        k = ex_begin_ticket(m, t);
    }
    if (!works || w->conf->mutation != EX_MUTATE_NEEDS_BREAK) {
        if (k->tx == DMK_SEND_TERM_OK && !(k->flags & F_MUTE)) {
            k->flags |= F_MUTE;
            k->from_workers |=
                *ex_stream_p(&w->s, ex_router_of(w->conf, t), k->p) ? 0 : FROM_P_FAILED;
        }
        ex_feed_p(w, t, DMK_SEND_EV_GIVE_UP, 0);
        ex_emit(w, EX_PROGRESS, "P%d gives the terminal of t%d up", k->p, t);
    }
}

static void move_p(const struct ex_moves *m, int t)
{
    struct ex_world *w = m->w;
    struct ex_ticket *k = ex_begin_ticket(m, t);

    if (k->tx == DMK_SEND_NONE || !ex_works(&w->s.p[k->p])) {
        return;
    }
    switch (k->tx) {
    case DMK_SEND_QUEUED:
        schedule(m, t);
        break;
    case DMK_SEND_RUNNING:
        run_job(m, t);
        break;
    case DMK_SEND_FAILING:
        if (may_flush(&w->s, k)) {
            ex_feed_p(w, t, DMK_SEND_EV_RETIRED, DMK_SEND_IF_EP);
            ex_emit(w, EX_PROGRESS, "P%d's puts of t%d are flushed", k->p, t);
        }
        break;
    case DMK_SEND_TERM_OK:
    case DMK_SEND_TERM_FAIL:
        end_job(m, t);
        return;
    default:
        break;
    }
    k = ex_begin_ticket(m, t);
    ex_feed_p(w, t, DMK_SEND_EV_DEADLINE, 0);
    ex_emit(w, EX_PROGRESS, "P%d's time for t%d (%s) is spent", k->p, t,
            dmk_send_state_name((enum dmk_send_state)m->from->tickets[t].tx));
}

/* ---- what lands late, and relays -------------------------------------------------------------- */

static void move_puts(const struct ex_moves *m, int t)
{
    struct ex_world *w = m->w;
    struct ex_ticket *k = ex_begin_ticket(m, t);

    if (!k->in_flight) {
        return;
    }
    if (!w->conf->direct) {
        const uint8_t end = ex_conn(&w->s, k->p, k->d, k->put_slot - 1)->d_end;

        if ((end != END_OPEN && end != END_CLOSING) || !ex_works(&w->s.d[k->d])) {
            return; /* its own progress writes them */
        }
    }
    ex_land(w, t);
    ex_emit(w, EX_PROGRESS, "a put of t%d lands", t);
}

static void move_relays(const struct ex_moves *m, int t)
{
    struct ex_world *w = m->w;
    struct ex_ticket *k = ex_begin_ticket(m, t);

    if (k->flags & F_ASK && ex_works(&w->s.p[k->p])) {
        k->flags &= (uint8_t)~F_ASK;
        if (ex_has_path(w, t, true, true)) {
            ex_feed_p(w, t, DMK_SEND_EV_QUIET_ASK,
                      k->claimant == w->s.p[k->p].incarnation ? DMK_SEND_IF_OWN : 0);
        }
        ex_emit(w, EX_PROGRESS, "a router relays quiet? for t%d to P%d", t, k->p);
        k = ex_begin_ticket(m, t);
    }
    if (k->flags & F_WORD && ex_works(&w->s.d[k->d])) {
        const uint8_t before = k->rx;

        k->flags &= (uint8_t)~F_WORD;
        if (ex_has_path(w, t, true, true)) {
            ex_feed_d(w, t, DMK_RECEIVE_EV_CLOSED_WORD, 0, -1);
        }
        if (k->rx != before && k->d_inc != w->s.d[k->d].incarnation) {
            ex_bad(w, "S5: a word for another incarnation of D was taken");
        }
        ex_emit(w, EX_PROGRESS, "a router relays closed for t%d to D%d", t, k->d);
    }
}

static void list_moves(struct ex_world *w, const struct ex_state *state)
{
    const struct ex_moves m = {w, state};
    const struct ex_conf *conf = w->conf;

    for (int q = 0; q < conf->n_requests; q++) {
        ex_move_request(&m, q);
    }
    for (int t = 0; t < ex_n_tickets(conf); t++) {
        ex_move_from_worker(&m, t, FROM_D);
        ex_move_from_worker(&m, t, FROM_P_FAILED);
        ex_move_to_d(&m, t);
        ex_move_to_p(&m, t);
        for (int slot = 0; slot < EX_SLOTS; slot++) {
            move_wire(&m, t, slot);
        }
        move_d(&m, t);
        move_p(&m, t);
        move_puts(&m, t);
        move_relays(&m, t);
    }
    for (int p = 0; p < conf->n_p; p++) {
        ex_move_worker(&m, false, p);
        for (int d = 0; d < conf->n_d; d++) {
            ex_move_pair(&m, p, d);
            for (int slot = 0; slot < EX_SLOTS; slot++) {
                move_conn(&m, p, d, slot);
                ex_move_others_conn(&m, p, d, slot);
            }
        }
    }
    for (int d = 0; d < conf->n_d; d++) {
        ex_move_worker(&m, true, d);
    }
    for (int r = 0; r < conf->n_routers; r++) {
        ex_move_router(&m, r);
        for (int i = 0; i < 2 * EX_MAX_WORKERS; i++) {
            ex_move_streams(&m, r, i);
            ex_move_others_stream(&m, r, i);
        }
    }
}

void ex_successors(struct ex_world *w, const struct ex_state *state)
{
    w->n_choices = 1;
    for (w->choice = 0; w->choice < w->n_choices; w->choice++) {
        list_moves(w, state);
    }
    w->choice = 0;
}
