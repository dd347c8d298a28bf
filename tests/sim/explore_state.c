/* States of the explorer's world as values: begun, brought into a normal form, checked, renamed, packed. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "tests/sim/explore_impl.h"

void ex_init(const struct ex_conf *conf, struct ex_state *ret)
{
    memset(ret, 0, sizeof(*ret));
    for (int p = 0; p < conf->n_p; p++) {
        ret->p[p].incarnation = 1;
    }
    for (int d = 0; d < conf->n_d; d++) {
        ret->d[d].incarnation = 1;
    }
    memcpy(ret->budget, conf->budget, sizeof(ret->budget));
}

/* ---- the normal form -------------------------------------------------------------------------- */

/* What was under way on a broken stream is lost; a stream comes back when both ends know. */
static void normalize_streams(const struct ex_conf *conf, struct ex_state *s)
{
    for (int t = 0; t < ex_n_tickets(conf); t++) {
        struct ex_ticket *k = &s->tickets[t];
        const int r = ex_router_of(conf, t);

        if (*ex_stream_d(s, r, k->d)) {
            k->to_workers &= (uint8_t)~TO_D;
            k->from_workers &= (uint8_t)~FROM_D;
        }
        if (*ex_stream_p(s, r, k->p)) {
            k->to_workers &= (uint8_t)~TO_P;
            k->from_workers &= (uint8_t)~FROM_P_FAILED;
        }
    }
    for (int r = 0; r < conf->n_routers; r++) {
        for (int i = 0; i < 2 * EX_MAX_WORKERS; i++) {
            uint8_t *stream = &s->streams[r][i];
            const bool is_d = i >= EX_MAX_WORKERS;
            const int x = is_d ? i - EX_MAX_WORKERS : i;
            bool used = false;

            if (!*stream) {
                continue;
            }
            for (int q = r; q < conf->n_requests; q += conf->n_routers) {
                const struct ex_request *request = &s->requests[q];
                const struct ex_ticket *k = &s->tickets[q * EX_ATTEMPTS + request->attempt];

                used |= ex_is_active(request) &&
                        (is_d ? k->d == x : request->state == R_PREFILLING && k->p == x);
            }
            if (conf->others && r > 0) {
                used = true; /* by others, until they are done with it */
            }
            *stream |= used ? 0 : STREAM_ROUTER_KNOWS;
            if (*stream == (STREAM_BROKEN | STREAM_ROUTER_KNOWS | STREAM_WORKER_KNOWS) &&
                !(is_d ? s->d[x].down : s->p[x].down)) {
                *stream = 0;
            }
        }
    }
}

static void swap_slots(const struct ex_conf *conf, struct ex_state *s, int p, int d)
{
    static const uint8_t other[] = {0, 2, 1};
    struct ex_pair *pair = &s->pairs[p][d];
    const struct ex_conn conn = pair->conn[0];

    pair->conn[0] = pair->conn[1];
    pair->conn[1] = conn;
    for (int t = 0; t < ex_n_tickets(conf); t++) {
        struct ex_ticket *k = &s->tickets[t];

        if (k->p == p && k->d == d) {
            const uint8_t wire = k->wire[0];

            k->wire[0] = k->wire[1];
            k->wire[1] = wire;
            k->d_slot = other[k->d_slot];
            k->p_slot = other[k->p_slot];
            k->put_slot = other[k->put_slot];
        }
    }
}

/* Copies outlive a connection only when their process has ended; which one it was matters to nobody then. */
static void forget_put_slot(const struct ex_conf *conf, struct ex_state *s, int p, int d, int slot)
{
    for (int t = 0; conf->direct && t < ex_n_tickets(conf); t++) {
        struct ex_ticket *k = &s->tickets[t];

        if (k->p == p && k->d == d && k->put_slot == slot + 1) {
            k->put_slot = 0;
        }
    }
}

/* A closed end reads nothing; a connection with two closed ends is no more. */
static void normalize_pair(const struct ex_conf *conf, struct ex_state *s, int p, int d)
{
    for (int i = 0; i < EX_SLOTS; i++) {
        struct ex_conn *c = ex_conn(s, p, d, i);
        uint8_t all = 0;
        bool used = false;

        for (int t = 0; t < ex_n_tickets(conf); t++) {
            struct ex_ticket *k = &s->tickets[t];

            if (k->p != p || k->d != d) {
                continue;
            }
            if (c->p_end != END_OPEN) {
                k->wire[i] &= (uint8_t)~W_TO_P;
            }
            if (c->d_end >= END_CLOSING || c->p_end == END_NONE) {
                k->wire[i] &= (uint8_t)~W_TO_D;
            }
            all |= k->wire[i];
            used |= k->p_slot == i + 1 || k->d_slot == i + 1 || k->put_slot == i + 1;
        }
        if (c->d_end == END_NONE && c->broken && !(all & W_TO_D) && !conf->others) {
            c->d_end = END_GONE; /* D never heard of it */
        }
        if ((c->p_end == END_GONE && c->d_end == END_GONE) || (!used && !all && !c->broken)) {
            *c = (struct ex_conn){0};
            forget_put_slot(conf, s, p, d, i);
        }
    }
    if (ex_conn(s, p, d, 0)->p_end == END_NONE && ex_conn(s, p, d, 1)->p_end != END_NONE) {
        swap_slots(conf, s, p, d);
    }
}

/* Messages that change nothing now and can change nothing later are taken away: the fewer states, the
 * larger the worlds that can be visited. What is left decides the same. */
static void drop_idle_messages(struct ex_ticket *k, bool wanted)
{
    const bool failing =
        k->tx == DMK_SEND_FAILING || k->tx == DMK_SEND_TERM_OK || k->tx == DMK_SEND_TERM_FAIL;

    if (!wanted) {
        k->from_workers = 0; /* the router knows the attempt as ended */
        k->flags |= k->tx != DMK_SEND_NONE ? F_MUTE : 0;
    }
    if (!(k->flags & F_LIVE) && !(k->to_workers & TO_D_RESERVE)) {
        k->to_workers &= (uint8_t)~TO_D_CANCEL;
    }
    if ((k->tx == DMK_SEND_NONE || failing) && !(k->to_workers & TO_P_PREFILL)) {
        k->to_workers &= (uint8_t)~TO_P_CANCEL;
    }
    for (int i = 0; i < EX_SLOTS; i++) {
        if (k->tx != DMK_SEND_QUEUED && k->tx != DMK_SEND_CLAIM_SENT) {
            k->wire[i] &= (uint8_t) ~(W_YES | W_NO);
            if (k->rx != DMK_RECEIVE_UNCLAIMED) {
                k->wire[i] &= (uint8_t)~W_CLAIM;
            }
        }
        if (k->tx == DMK_SEND_NONE) {
            k->wire[i] &= (uint8_t) ~(W_ACCEPTED | W_REJECTED);
            if (k->rx == DMK_RECEIVE_FORGOTTEN) {
                k->wire[i] &= (uint8_t)~W_TO_D;
            }
        }
    }
    if (k->rx != DMK_RECEIVE_DRAINING) {
        k->flags &= (uint8_t)~F_ASK;
    }
    if (k->rx == DMK_RECEIVE_FORGOTTEN) {
        k->flags &= (uint8_t)~F_WORD;
    }
}

static void normalize_ticket(struct ex_state *s, int t)
{
    struct ex_ticket *k = &s->tickets[t];
    const struct ex_request *q = &s->requests[t / EX_ATTEMPTS];
    const bool wanted = ex_is_active(q) && q->attempt == t % EX_ATTEMPTS;
    const bool puts = k->tx == DMK_SEND_CLAIM_SENT || k->tx == DMK_SEND_RUNNING;

    drop_idle_messages(k, wanted);
    if (k->in_flight && (s->d[k->d].down || k->d_inc != s->d[k->d].incarnation)) {
        k->in_flight = 0; /* into memory of a process that has ended: no matter when */
    }
    if (k->rx == DMK_RECEIVE_FORGOTTEN) {
        k->claimant = k->d_slot = 0;
        k->flags &= (uint8_t) ~(F_LIVE | F_DECODING);
        if (k->tx == DMK_SEND_NONE && !k->in_flight) {
            k->page = 0;
        }
    }
    if (k->rx == DMK_RECEIVE_FORGOTTEN || k->rx == DMK_RECEIVE_DRAINING || k->flags & F_DECODING) {
        k->landed = 0;
    }
    if (!puts) {
        k->posted = 0;
        k->put_slot = k->in_flight ? k->put_slot : 0;
        if (k->tx != DMK_SEND_FAILING) {
            k->flags &= (uint8_t)~F_DROPPED;
        }
    }
    if (k->tx == DMK_SEND_NONE) {
        k->p_slot = 0;
        k->flags &= (uint8_t)~F_MUTE;
    }
    if (!wanted && k->rx == DMK_RECEIVE_FORGOTTEN && k->tx == DMK_SEND_NONE && !k->in_flight &&
        !k->to_workers && !k->wire[0] && !k->wire[1]) {
        *k = (struct ex_ticket){0};
    }
}

void ex_normalize(const struct ex_conf *conf, struct ex_state *s)
{
    normalize_streams(conf, s);
    for (int t = 0; t < ex_n_tickets(conf); t++) {
        normalize_ticket(s, t);
    }
    for (int p = 0; p < conf->n_p; p++) {
        for (int d = 0; d < conf->n_d; d++) {
            normalize_pair(conf, s, p, d);
        }
    }
    for (int t = 0; t < ex_n_tickets(conf); t++) {
        normalize_ticket(s, t); /* once more: messages may have gone */
    }
    for (int p = 0; conf->others && p < conf->n_p; p++) {
        for (int d = 0; d < conf->n_d; d++) {
            ex_others_forget_conns(conf, s, p, d);
            normalize_pair(conf, s, p, d);
        }
    }
    for (int q = 0; q < conf->n_requests; q++) {
        if (s->requests[q].state >= R_DONE) {
            s->requests[q].attempt = s->requests[q].heard = 0;
            if (conf->others) { /* how it ended matters to nobody */
                s->requests[q].state = R_FAILED;
            }
        }
    }
}

/* ---- checks ----------------------------------------------------------------------------------- */

static void check_pages(struct ex_world *w)
{
    const struct ex_state *s = &w->s;

    for (int d = 0; d < w->conf->n_d; d++) {
        for (int i = 0; i < w->conf->n_pages; i++) {
            const struct ex_ticket *k = s->owner[d][i] ? &s->tickets[s->owner[d][i] - 1] : NULL;

            if (k && (k->rx == DMK_RECEIVE_FORGOTTEN || k->d != d || k->page != i)) {
                ex_bad(w, "S3: a page is leased to a ticket that is no more");
            }
        }
    }
    for (int t = 0; t < ex_n_tickets(w->conf); t++) {
        const struct ex_ticket *k = &s->tickets[t];

        if (k->rx != DMK_RECEIVE_FORGOTTEN && s->owner[k->d][k->page] != t + 1) {
            ex_bad(w, "S3: a ticket's page is not leased to it");
        }
    }
}

void ex_emit(struct ex_world *w, enum ex_edge edge, const char *format, ...)
{
    const struct ex_state before = w->s;
    char text[200] = "";

    if ((w->violation && !w->telling) || (w->choice > 0 && !w->asked)) {
        return;
    }
    edge = w->choice > 0 ? EX_MAYBE : edge; /* others need not do so */
    if (w->telling) {
        va_list args;

        va_start(args, format);
        vsnprintf(text, sizeof(text), format, args);
        va_end(args);
    }
    check_pages(w);
    ex_normalize(w->conf, &w->s);
    w->on_next(w->ud, &w->s, edge, text);
    w->s = before;
}

bool ex_requests_ended(const struct ex_conf *conf, const struct ex_state *s)
{
    for (int q = 0; q < conf->n_requests; q++) {
        if (s->requests[q].state < R_DONE) {
            return false;
        }
    }
    return true;
}

/* Of each P that is not itself hung. */
bool ex_jobs_ended(const struct ex_conf *conf, const struct ex_state *s)
{
    for (int t = 0; t < ex_n_tickets(conf); t++) {
        if (s->tickets[t].tx != DMK_SEND_NONE && !s->p[s->tickets[t].p].hung) {
            return false;
        }
    }
    return true;
}

bool ex_all_quiet(const struct ex_conf *conf, const struct ex_state *s)
{
    if (!ex_requests_ended(conf, s)) {
        return false;
    }
    for (int t = 0; t < ex_n_tickets(conf); t++) {
        if (s->tickets[t].rx != DMK_RECEIVE_FORGOTTEN || s->tickets[t].tx != DMK_SEND_NONE) {
            return false;
        }
    }
    for (int d = 0; d < conf->n_d; d++) {
        for (int i = 0; i < conf->n_pages; i++) {
            if (s->owner[d][i]) {
                return false;
            }
        }
    }
    return true;
}

/* ---- renaming and packing --------------------------------------------------------------------- */

size_t ex_pack(const struct ex_conf *conf, const struct ex_state *s, uint8_t *ret)
{
    uint8_t *at = ret;

    for (int q = 0; q < conf->n_requests; q++) {
        memcpy(at, &s->requests[q], sizeof(s->requests[q]));
        at += sizeof(s->requests[q]);
    }
    for (int t = 0; t < ex_n_tickets(conf); t++) {
        memcpy(at, &s->tickets[t], sizeof(s->tickets[t]));
        at += sizeof(s->tickets[t]);
    }
    for (int p = 0; p < conf->n_p; p++) {
        memcpy(at, &s->p[p], sizeof(s->p[p]));
        at += sizeof(s->p[p]);
        for (int d = 0; d < conf->n_d; d++) {
            memcpy(at, &s->pairs[p][d], sizeof(s->pairs[p][d]));
            at += sizeof(s->pairs[p][d]);
        }
    }
    for (int d = 0; d < conf->n_d; d++) {
        memcpy(at, &s->d[d], sizeof(s->d[d]));
        at += sizeof(s->d[d]);
        memcpy(at, s->owner[d], conf->n_pages);
        at += conf->n_pages;
    }
    for (int r = 0; r < conf->n_routers; r++) {
        memcpy(at, s->streams[r], sizeof(s->streams[r]));
        at += sizeof(s->streams[r]);
    }
    memcpy(at, s->budget, sizeof(s->budget));
    return (size_t)(at - ret) + sizeof(s->budget);
}

void ex_unpack(const struct ex_conf *conf, const uint8_t *bytes, struct ex_state *s)
{
    const uint8_t *at = bytes;

    memset(s, 0, sizeof(*s));
    for (int q = 0; q < conf->n_requests; q++) {
        memcpy(&s->requests[q], at, sizeof(s->requests[q]));
        at += sizeof(s->requests[q]);
    }
    for (int t = 0; t < ex_n_tickets(conf); t++) {
        memcpy(&s->tickets[t], at, sizeof(s->tickets[t]));
        at += sizeof(s->tickets[t]);
    }
    for (int p = 0; p < conf->n_p; p++) {
        memcpy(&s->p[p], at, sizeof(s->p[p]));
        at += sizeof(s->p[p]);
        for (int d = 0; d < conf->n_d; d++) {
            memcpy(&s->pairs[p][d], at, sizeof(s->pairs[p][d]));
            at += sizeof(s->pairs[p][d]);
        }
    }
    for (int d = 0; d < conf->n_d; d++) {
        memcpy(&s->d[d], at, sizeof(s->d[d]));
        at += sizeof(s->d[d]);
        memcpy(s->owner[d], at, conf->n_pages);
        at += conf->n_pages;
    }
    for (int r = 0; r < conf->n_routers; r++) {
        memcpy(s->streams[r], at, sizeof(s->streams[r]));
        at += sizeof(s->streams[r]);
    }
    memcpy(s->budget, at, sizeof(s->budget));
}

static bool is_blank(const struct ex_ticket *k)
{
    static const struct ex_ticket blank;

    return memcmp(k, &blank, sizeof(blank)) == 0;
}

/* Swaps the two of a kind where a bit says so: 1 requests (and routers with them), 2 P's, 4 D's. */
static void rename_all(const struct ex_conf *conf, const struct ex_state *s, unsigned swap,
                       struct ex_state *ret)
{
    const int sq = swap & 1, sp = swap >> 1 & 1, sd = swap >> 2 & 1;
    const int sr = sq && conf->n_routers == 2;

    *ret = *s;
    for (int q = 0; q < conf->n_requests; q++) {
        ret->requests[q ^ sq] = s->requests[q];
    }
    for (int t = 0; t < ex_n_tickets(conf); t++) {
        struct ex_ticket *k = &ret->tickets[t ^ (sq ? EX_ATTEMPTS : 0)];

        *k = s->tickets[t];
        if (!is_blank(k)) {
            k->p ^= (uint8_t)sp;
            k->d ^= (uint8_t)sd;
        }
    }
    for (int p = 0; p < conf->n_p; p++) {
        ret->p[p ^ sp] = s->p[p];
        for (int d = 0; d < conf->n_d; d++) {
            ret->pairs[p ^ sp][d ^ sd] = s->pairs[p][d];
        }
    }
    for (int d = 0; d < conf->n_d; d++) {
        ret->d[d ^ sd] = s->d[d];
        for (int i = 0; i < conf->n_pages; i++) {
            const uint8_t owner = s->owner[d][i];

            ret->owner[d ^ sd][i] =
                owner && sq ? (uint8_t)(((owner - 1) ^ EX_ATTEMPTS) + 1) : owner;
        }
    }
    for (int r = 0; r < conf->n_routers; r++) {
        for (int x = 0; x < EX_MAX_WORKERS; x++) {
            ret->streams[r ^ sr][x ^ sp] = s->streams[r][x];
            ret->streams[r ^ sr][EX_MAX_WORKERS + (x ^ sd)] = s->streams[r][EX_MAX_WORKERS + x];
        }
    }
}

void ex_canonical(const struct ex_conf *conf, const struct ex_state *state, struct ex_state *ret)
{
    const unsigned may =
        (conf->n_requests == 2 ? 1u : 0) | (conf->n_p == 2 ? 2u : 0) | (conf->n_d == 2 ? 4u : 0);

    *ret = *state;
    for (unsigned swap = 1; swap <= may; swap++) {
        struct ex_state other;

        if (swap & ~may) {
            continue;
        }
        rename_all(conf, state, swap, &other);
        if (memcmp(&other, ret, sizeof(other)) < 0) {
            *ret = other;
        }
    }
}

void ex_print(const struct ex_conf *conf, const struct ex_state *s)
{
    static const char *const names[] = {"new",  "reserving", "prefilling", "decoding",
                                        "done", "failed",    "left",       "lost"};

    for (int q = 0; q < conf->n_requests; q++) {
        printf("    request %d: %s, attempt %d\n", q, names[s->requests[q].state],
               s->requests[q].attempt);
    }
    for (int t = 0; t < ex_n_tickets(conf); t++) {
        const struct ex_ticket *k = &s->tickets[t];

        if (!is_blank(k)) {
            printf("    t%d: D%d %s, P%d %s, page %d, %d put, %d in flight, %d landed\n", t, k->d,
                   dmk_receive_state_name((enum dmk_receive_state)k->rx), k->p,
                   dmk_send_state_name((enum dmk_send_state)k->tx), k->page, k->posted,
                   k->in_flight, k->landed);
        }
    }
}
