/* One attempt of a request beside any number of others that are not followed; see explore.h.
 *
 * Requests meet in few things: a connection between P and D and its closing, the newest incarnation of P that
 * D has heard of, the bound on draining pages, the end of a process whose copies still run, a router's
 * streams. Here these take every value that others could give them, at every moment:
 *
 *   - A connection that the attempt followed does not use is forgotten. When P needs one, it is a new one, one
 *     of others in any state, or none is to be had. While it is used, others may be heard on it, and either
 *     side may close it, for a transfer of others.
 *   - A claim may be of an incarnation that is not the newest heard, when there is a newer one, and may find the
 *     bound reached.
 *   - A process that dies may have copies of others under way.
 *   - Another router learns of a broken stream when it likes.
 *   - Pages: whether others hold them decides only when a reservation comes through, and it may come at any
 *     time anyway.
 *
 * When a request is tried again, either the new attempt is followed and the old one is another's, or the old one
 * is followed on and the request counts as failed: nothing of it but its cancels reaches the old attempt.
 *
 * Every state of a world of several requests, each with a router of its own, is thereby a state here once all
 * tickets but one are taken out of it (ex_project): what can not happen to one here (S1, S2, S3, S5) can happen
 * to none there. `cover=N` checks that over all states of worlds that can be visited whole. S4 compares two
 * attempts, and rests on the worlds in which both are followed. L1, L2 and L3 are weaker than there: from
 * whatever others have made of things, the attempt followed and what it holds can come to their end once the
 * others leave it alone. */
#include "tests/sim/explore_impl.h"

#include <string.h>

unsigned ex_ask(struct ex_world *w, unsigned n)
{
    if (!w->conf->others) {
        return 0;
    }
    w->asked = true;
    w->n_choices = w->n_choices > n ? w->n_choices : n;
    return w->choice < n ? w->choice : 0;
}

static int free_slot(const struct ex_pair *pair)
{
    for (int i = 0; i < EX_SLOTS; i++) {
        if (pair->conn[i].p_end == END_NONE) {
            return i;
        }
    }
    return -1;
}

int ex_others_connect(struct ex_world *w, int p, int d)
{
    /* of others, as P sees it: open, and at D's end */
    static const struct ex_conn left[EX_N_CHOICES] = {
        [2] = {END_OPEN, END_OPEN, 0}, [3] = {END_OPEN, END_NONE, 1},
        [4] = {END_OPEN, END_OPEN, 1}, [5] = {END_OPEN, END_CLOSING, 1},
        [6] = {END_OPEN, END_GONE, 1},
    };
    struct ex_pair *pair = &w->s.pairs[p][d];
    const bool down = w->s.d[d].down;
    const int slot = free_slot(pair);
    unsigned choice;

    if (slot < 0) {
        return -1;
    }
    choice = ex_ask(w, EX_N_CHOICES);
    if (choice == 1 || (choice == 0 && (down || pair->partitioned)) ||
        (choice > 1 && down && left[choice].d_end != END_GONE)) {
        return -1;
    }
    pair->conn[slot] = choice == 0 ? (struct ex_conn){.p_end = END_OPEN} : left[choice];
    return slot;
}

void ex_others_forget_conns(const struct ex_conf *conf, struct ex_state *s, int p, int d)
{
    struct ex_pair *pair = &s->pairs[p][d];

    pair->known = 0;
    for (int i = 0; i < EX_SLOTS; i++) {
        bool used = false;

        for (int t = 0; t < ex_n_tickets(conf); t++) {
            const struct ex_ticket *k = &s->tickets[t];

            used |=
                k->p == p && k->d == d &&
                (k->wire[i] || k->p_slot == i + 1 || k->d_slot == i + 1 || k->put_slot == i + 1);
        }
        if (!used) {
            pair->conn[i] = (struct ex_conn){0};
        }
    }
}

void ex_move_others_conn(const struct ex_moves *m, int p, int d, int slot)
{
    struct ex_world *w = m->w;
    struct ex_state *s = ex_begin(m);
    struct ex_conn *c = ex_conn(s, p, d, slot);

    if (!w->conf->others || c->p_end == END_NONE) {
        return;
    }
    if (c->d_end == END_NONE && ex_works(&s->d[d]) && !s->pairs[p][d].partitioned) {
        c->d_end = END_OPEN;
        ex_emit(w, EX_MAYBE, "D%d hears of others on a connection of P%d", d, p);
        s = ex_begin(m);
    }
    if (c->d_end == END_NONE && c->broken) {
        c->d_end = END_GONE;
        ex_emit(w, EX_PROGRESS, "D%d will never hear of a connection of P%d", d, p);
        s = ex_begin(m);
    }
    if (c->d_end == END_OPEN && ex_works(&s->d[d])) {
        ex_d_close(w, p, d, slot);
        ex_emit(w, EX_MAYBE, "D%d closes its end of a connection to P%d for others", d, p);
        s = ex_begin(m);
    }
    if (c->p_end == END_OPEN && ex_works(&s->p[p])) {
        ex_p_lose(w, p, d, slot);
        ex_emit(w, EX_MAYBE, "P%d closes its end of a connection to D%d for others", p, d);
    }
}

void ex_move_others_stream(const struct ex_moves *m, int r, int i)
{
    struct ex_state *s = ex_begin(m);

    if (m->w->conf->others && r > 0 && s->streams[r][i] & STREAM_BROKEN &&
        !(s->streams[r][i] & STREAM_ROUTER_KNOWS)) {
        s->streams[r][i] |= STREAM_ROUTER_KNOWS;
        ex_emit(m->w, EX_PROGRESS, "router %d knows of a broken stream", r);
    }
}

void ex_others_take(struct ex_state *s, int t)
{
    for (int d = 0; d < EX_MAX_WORKERS; d++) {
        for (int i = 0; i < EX_MAX_PAGES; i++) {
            s->owner[d][i] = s->owner[d][i] == t + 1 ? 0 : s->owner[d][i];
        }
    }
    s->tickets[t] = (struct ex_ticket){0};
}

void ex_project(const struct ex_conf *conf, const struct ex_state *state, int t,
                struct ex_state *ret)
{
    const int q = t / EX_ATTEMPTS, a = t % EX_ATTEMPTS, r = q % conf->n_routers;
    struct ex_request *request = &ret->requests[0];

    *ret = *state;
    for (int u = 0; u < EX_MAX_TICKETS; u++) {
        if (u != t) {
            ex_others_take(ret, u);
        }
    }
    for (int d = 0; d < EX_MAX_WORKERS; d++) {
        for (int i = 0; i < EX_MAX_PAGES; i++) {
            ret->owner[d][i] = ret->owner[d][i] ? (uint8_t)(a + 1) : 0;
        }
    }
    ret->tickets[t] = (struct ex_ticket){0};
    ret->tickets[a] = state->tickets[t];
    memset(ret->requests, 0, sizeof(ret->requests));
    *request = state->requests[q];
    if (ex_is_active(request) && request->attempt != a) {
        request->state = R_FAILED; /* as far as this attempt is concerned */
    }
    memcpy(ret->streams[0], state->streams[r], sizeof(ret->streams[0]));
    memcpy(ret->streams[r], state->streams[0], sizeof(ret->streams[0]));
    ex_normalize(conf, ret);
}
