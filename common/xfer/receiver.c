/* Drives D's table (receive_state.h) with messages, timers and endpoint events; see receiver.h.
 *
 * Three bounded tables: tickets, endpoints that P's opened, and claimants (a P's incarnation with
 * the watch on its process). Everything runs on the loop's thread; nothing allocates after new but
 * watches. */
#include "common/xfer/receiver.h"
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/xfer/message.h"
#include "common/xfer/receive_state.h"
#include <stdlib.h>

#define DEFAULT_ENDPOINTS 64
#define MAX_WORKERS       64                 /* P workers whose newest incarnation is remembered */
#define ASKS_BEFORE_CLOSE 2                  /* quiet? unanswered before the endpoint is closed */
#define UNPROVEN_NS       (5 * DMK_NS_PER_S) /* an endpoint without any valid cookie */
#define IDLE_NS           (120 * DMK_NS_PER_S) /* one that no ticket needs */
#define STOP_NS           DMK_NS_PER_S

struct endpoint {
    struct dmk_xfer_ep *ep; /* NULL: slot is free */
    struct dmk_receiver *rx;
    bool closing;
    bool proven; /* a valid cookie has come on it */
    uint64_t heard_ns;
};

struct claimant {
    uint64_t incarnation;         /* 0: slot is free */
    struct dmk_xfer_watch *watch; /* DIRECT only */
    uint32_t n_tickets;
    uint32_t draining_pages;
};

struct worker {
    uint64_t id, incarnation, heard_ns;
};

struct ticket {
    enum dmk_receive_state state; /* FORGOTTEN: slot is free */
    uint64_t key;
    struct dmk_id128 cookie;
    uint64_t generation, bytes_expected;
    uint32_t n_pages;
    uint64_t due_ns; /* expiry, then transfer deadline, then the next quiet? */
    uint64_t claimed_ns;
    uint32_t n_asks;
    uint64_t p_incarnation;
    struct endpoint *endpoint; /* of the claim, until it is closed */
    struct claimant *claimant;
};

struct dmk_receiver {
    struct dmk_receiver_conf conf;
    bool direct, stopping;
    uint64_t now_ns, next_generation;
    struct dmk_receiver_stats stats; /* counters only */
    struct ticket *tickets;          /* [conf.max_tickets] */
    struct endpoint *endpoints;      /* [conf.max_endpoints] */
    struct claimant *claimants;      /* [conf.max_tickets] */
    struct worker workers[MAX_WORKERS];
};

/* What an event has with it besides the guards. */
struct cause {
    enum dmk_receive_failure why;
    struct endpoint *endpoint; /* of the message */
    const struct dmk_message *message;
    struct claimant *claimant;
    enum dmk_message_reply refusal;
};

int dmk_receiver_new(const struct dmk_receiver_conf *conf, struct dmk_receiver **ret)
{
    struct dmk_receiver *rx;

    dmk_assert(conf->max_tickets > 0 && conf->incarnation > 0);
    rx = calloc(1, sizeof(*rx));
    if (!rx) {
        return -DMK_ENOMEM;
    }
    rx->conf = *conf;
    if (rx->conf.max_endpoints == 0) {
        rx->conf.max_endpoints = DEFAULT_ENDPOINTS;
    }
    rx->direct = conf->ops->lane(conf->xfer) == DMK_LANE_DIRECT;
    rx->next_generation = 1;
    rx->tickets = calloc(conf->max_tickets, sizeof(*rx->tickets));
    rx->claimants = calloc(conf->max_tickets, sizeof(*rx->claimants));
    rx->endpoints = calloc(rx->conf.max_endpoints, sizeof(*rx->endpoints));
    if (!rx->tickets || !rx->claimants || !rx->endpoints) {
        free(rx->tickets);
        free(rx->claimants);
        free(rx->endpoints);
        free(rx);
        return -DMK_ENOMEM;
    }
    *ret = rx;
    return 0;
}

/* ---- lookups ----------------------------------------------------------------------------------
 */

static struct ticket *find_ticket(struct dmk_receiver *rx, struct dmk_id128 cookie)
{
    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        struct ticket *t = &rx->tickets[i];

        if (t->state != DMK_RECEIVE_FORGOTTEN && dmk_id128_equal(t->cookie, cookie)) {
            return t;
        }
    }
    return NULL;
}

static struct ticket *find_key(struct dmk_receiver *rx, uint64_t key)
{
    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        struct ticket *t = &rx->tickets[i];

        if (t->state != DMK_RECEIVE_FORGOTTEN && t->key == key) {
            return t;
        }
    }
    return NULL;
}

/* The record of an endpoint, made at its first message; NULL when the table is full. */
static struct endpoint *take_endpoint(struct dmk_receiver *rx, struct dmk_xfer_ep *ep)
{
    struct endpoint *known = rx->conf.ops->ep_user(ep);

    if (known) {
        return known;
    }
    for (uint32_t i = 0; i < rx->conf.max_endpoints; i++) {
        struct endpoint *e = &rx->endpoints[i];

        if (!e->ep) {
            *e = (struct endpoint){.ep = ep, .rx = rx, .heard_ns = rx->now_ns};
            rx->conf.ops->ep_set_user(ep, e);
            return e;
        }
    }
    return NULL;
}

/* The newest incarnation of the worker is remembered; false when the one given is older. */
static bool is_current(struct dmk_receiver *rx, uint64_t id, uint64_t incarnation)
{
    struct worker *slot = &rx->workers[0];

    if (id == 0) {
        return true; /* unnamed: nothing to compare with */
    }
    for (uint32_t i = 0; i < MAX_WORKERS; i++) {
        struct worker *w = &rx->workers[i];

        if (w->id == id) {
            slot = w;
            break;
        }
        if (w->id == 0 || (slot->id != 0 && w->heard_ns < slot->heard_ns)) {
            slot = w; /* a free slot, or the one not heard of for longest */
        }
    }
    if (slot->id == id && incarnation < slot->incarnation) {
        return false;
    }
    *slot = (struct worker){id, incarnation, rx->now_ns};
    return true;
}

/* ---- claimants --------------------------------------------------------------------------------
 */

static void drop_claimant(struct dmk_receiver *rx, struct claimant *c)
{
    if (c && c->n_tickets == 0) {
        if (c->watch) {
            rx->conf.ops->watch_close(&c->watch);
        }
        *c = (struct claimant){0};
    }
}

/* The claimant of that incarnation, with its watch open where the lane needs one; NULL when the
 * process cannot be watched or has ended. Drop it again when no ticket was bound to it. */
static struct claimant *take_claimant(struct dmk_receiver *rx, const struct dmk_message *m)
{
    struct claimant *slot = NULL;

    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        struct claimant *c = &rx->claimants[i];

        if (c->incarnation == m->from_incarnation) {
            return c->watch && rx->conf.ops->watch_gone(c->watch) ? NULL : c;
        }
        if (c->incarnation == 0 && !slot) {
            slot = c;
        }
    }
    dmk_assert(slot); /* one for each ticket */
    if (rx->direct) {
        const struct dmk_bytes blob = {m->watch, m->watch_len};

        if (rx->conf.ops->watch_open(rx->conf.xfer, blob, &slot->watch) < 0) {
            return NULL;
        }
        if (rx->conf.ops->watch_gone(slot->watch)) {
            rx->conf.ops->watch_close(&slot->watch);
            return NULL;
        }
    }
    slot->incarnation = m->from_incarnation;
    return slot;
}

/* ---- endpoints --------------------------------------------------------------------------------
 */

static void feed(struct dmk_receiver *rx, struct ticket *t, enum dmk_receive_event event,
                 uint32_t guards, const struct cause *cause);

static void on_endpoint_closed(void *ud, int status)
{
    struct endpoint *e = ud;
    struct dmk_receiver *rx = e->rx;
    const struct cause cause = {.why = DMK_RECEIVE_PEER_LOST};

    (void)status; /* about our own puts: we have none */
    e->ep = NULL;
    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        struct ticket *t = &rx->tickets[i];

        if (t->state != DMK_RECEIVE_FORGOTTEN && t->endpoint == e) {
            t->endpoint = NULL;
            feed(rx, t, DMK_RECEIVE_EV_EP_GONE, 0, &cause);
        }
    }
}

static void close_endpoint(struct dmk_receiver *rx, struct endpoint *e)
{
    if (e && !e->closing) {
        e->closing = true;
        rx->conf.ops->ep_close(rx->conf.xfer, e->ep, on_endpoint_closed, e);
    }
}

static void send_message(struct dmk_receiver *rx, struct endpoint *e, struct dmk_message *m)
{
    uint8_t raw[DMK_MESSAGE_MAX_BYTES];

    m->from_incarnation = rx->conf.incarnation;
    if (e->ep && !e->closing) {
        const struct dmk_bytes bytes = {raw, dmk_message_encode(m, raw)};

        /* A lost answer is asked for again; a lost yes ends at P's deadline. */
        (void)rx->conf.ops->send(e->ep, bytes);
    }
}

/* ---- the table's actions ----------------------------------------------------------------------
 */

static void reply(struct dmk_receiver *rx, const struct cause *cause, uint32_t actions)
{
    const struct dmk_message *m = cause->message;
    struct dmk_message out;

    if (!m ||
        !(actions & (DMK_RECEIVE_DO_YES | DMK_RECEIVE_DO_NO | DMK_RECEIVE_DO_ACCEPTED |
                     DMK_RECEIVE_DO_ALREADY | DMK_RECEIVE_DO_STALE | DMK_RECEIVE_DO_FAILED))) {
        return;
    }
    out = (struct dmk_message){
        .to_incarnation = m->from_incarnation, .cookie = m->cookie, .generation = m->generation};
    if (actions & (DMK_RECEIVE_DO_YES | DMK_RECEIVE_DO_NO)) {
        out.type = DMK_MESSAGE_REPLY;
        out.reply = actions & DMK_RECEIVE_DO_YES ? DMK_REPLY_YES : cause->refusal;
        rx->stats.n_refused_claims += out.reply != DMK_REPLY_YES;
    } else {
        out.type = DMK_MESSAGE_ANSWER;
        out.answer = actions & DMK_RECEIVE_DO_ACCEPTED  ? DMK_ANSWER_ACCEPTED
                     : actions & DMK_RECEIVE_DO_ALREADY ? DMK_ANSWER_ALREADY
                     : actions & DMK_RECEIVE_DO_STALE   ? DMK_ANSWER_STALE
                                                        : DMK_ANSWER_FAILED;
        rx->stats.n_stale += out.answer == DMK_ANSWER_STALE;
    }
    send_message(rx, cause->endpoint, &out);
}

/* Keeps what depends on the state: deadlines, the claimant's counts, the slot. */
static void change_state(struct dmk_receiver *rx, struct ticket *t, enum dmk_receive_state next)
{
    const enum dmk_receive_state last = t->state;

    if (next == last) {
        return;
    }
    t->state = next;
    if (last == DMK_RECEIVE_DRAINING && t->claimant) {
        t->claimant->draining_pages -= t->n_pages;
    }
    switch (next) {
    case DMK_RECEIVE_CLAIMED:
        t->claimed_ns = rx->now_ns;
        t->due_ns = rx->now_ns + rx->conf.transfer_budget_ns;
        break;
    case DMK_RECEIVE_DRAINING:
        t->claimant->draining_pages += t->n_pages;
        t->due_ns = rx->now_ns + rx->conf.quiet_ask_every_ns;
        break;
    default: /* READY, FORGOTTEN: nobody may write */
        if (t->claimant) {
            t->claimant->n_tickets--;
            drop_claimant(rx, t->claimant);
        }
        t->claimant = NULL;
        t->endpoint = NULL;
        break;
    }
}

static void bind_claim(struct ticket *t, const struct cause *cause)
{
    t->endpoint = cause->endpoint;
    t->claimant = cause->claimant;
    t->claimant->n_tickets++;
    t->p_incarnation = cause->message->from_incarnation;
    cause->endpoint->proven = true;
}

static void tell(struct dmk_receiver *rx, const struct ticket *was, uint32_t actions,
                 const struct cause *cause)
{
    const struct dmk_receiver_events *ev = &rx->conf.events;

    if (rx->stopping) {
        return;
    }
    if (actions & DMK_RECEIVE_DO_ASK) {
        rx->stats.n_quiet_asks++;
        ev->on_quiet_ask(ev->ud, was->cookie, was->p_incarnation);
    }
    if (actions & DMK_RECEIVE_DO_TELL_CLAIMED && ev->on_claimed) {
        ev->on_claimed(ev->ud, was->key);
    }
    if (actions & DMK_RECEIVE_DO_TELL_READY) {
        rx->stats.n_accepted++;
        ev->on_ready(ev->ud, was->key, was->bytes_expected, rx->now_ns - was->claimed_ns);
    }
    if (actions & DMK_RECEIVE_DO_TELL_FAILED) {
        rx->stats.n_failed++;
        rx->stats.n_expired += cause->why == DMK_RECEIVE_EXPIRED;
        ev->on_failed(ev->ud, was->key, cause->why);
    }
    if (actions & DMK_RECEIVE_DO_FREE) {
        ev->on_freed(ev->ud, was->key);
    }
}

/* t may be NULL for a cookie that we do not know. The slot may be another's when this returns. */
static void feed(struct dmk_receiver *rx, struct ticket *t, enum dmk_receive_event event,
                 uint32_t guards, const struct cause *cause)
{
    const enum dmk_receive_state state = t ? t->state : DMK_RECEIVE_FORGOTTEN;
    const struct dmk_receive_result r =
        dmk_receive_step(state, event, guards | (rx->direct ? DMK_RECEIVE_IF_DIRECT : 0));
    struct ticket was = {0};

    if (!t) {
        reply(rx, cause, r.actions);
        return;
    }
    if (r.actions & DMK_RECEIVE_DO_BIND) {
        bind_claim(t, cause);
    }
    if (r.actions & DMK_RECEIVE_DO_CLOSE_EP) {
        close_endpoint(rx, t->endpoint);
    }
    was = *t;
    change_state(rx, t, r.next);
    was.claimed_ns = t->claimed_ns;
    reply(rx, cause, r.actions);
    tell(rx, &was, r.actions, cause);
}

/* ---- what the owner calls ---------------------------------------------------------------------
 */

int dmk_receiver_reserve(struct dmk_receiver *rx, uint64_t key, uint32_t n_pages_counted,
                         uint64_t now_ns, struct dmk_ticket *inout_ticket, struct dmk_error *reterr)
{
    struct dmk_ticket *ticket = inout_ticket;
    struct ticket *t = NULL;
    int r;

    rx->now_ns = now_ns;
    for (uint32_t i = 0; i < rx->conf.max_tickets && !t; i++) {
        if (rx->tickets[i].state == DMK_RECEIVE_FORGOTTEN) {
            t = &rx->tickets[i];
        }
    }
    if (!t) {
        return dmk_error_set(reterr, -DMK_EFULL, "all %u transfer tickets are in use",
                             rx->conf.max_tickets);
    }
    dmk_assert(!find_key(rx, key));
    ticket->d_incarnation = rx->conf.incarnation;
    ticket->cookie = dmk_id128_random();
    ticket->generation = rx->next_generation;
    ticket->expires_unix_ms =
        (uint64_t)dmk_clock_unix_s() * 1000 + rx->conf.expiry_ns / DMK_NS_PER_MS;
    ticket->page_tokens = DMK_PAGE_TOKENS;
    ticket->bytes_expected = dmk_ticket_bytes(ticket);
    r = rx->conf.ops->address(rx->conf.xfer, ticket->address, &ticket->address_len);
    if (r < 0) {
        return dmk_error_set(reterr, r, "the page transport has no address");
    }
    r = dmk_ticket_check(ticket, reterr);
    if (r < 0) {
        return -DMK_EINVAL;
    }
    rx->next_generation++;
    *t = (struct ticket){
        .state =
            dmk_receive_step(DMK_RECEIVE_FORGOTTEN, DMK_RECEIVE_EV_RESERVE, DMK_RECEIVE_IF_ROOM)
                .next,
        .key = key,
        .cookie = ticket->cookie,
        .generation = ticket->generation,
        .bytes_expected = ticket->bytes_expected,
        .n_pages = n_pages_counted,
        .due_ns = now_ns + rx->conf.expiry_ns,
    };
    return 0;
}

void dmk_receiver_cancel(struct dmk_receiver *rx, uint64_t key, uint64_t now_ns)
{
    struct ticket *t = find_key(rx, key);
    const struct cause cause = {0};

    rx->now_ns = now_ns;
    if (t) {
        feed(rx, t, DMK_RECEIVE_EV_CANCEL, 0, &cause);
    }
}

void dmk_receiver_finish(struct dmk_receiver *rx, uint64_t key)
{
    struct ticket *t = find_key(rx, key);
    const struct cause cause = {0};

    if (t) {
        feed(rx, t, DMK_RECEIVE_EV_FINISH, 0, &cause);
    }
}

void dmk_receiver_closed_word(struct dmk_receiver *rx, struct dmk_id128 cookie, uint64_t now_ns)
{
    struct ticket *t = find_ticket(rx, cookie);
    const struct cause cause = {.why = DMK_RECEIVE_PEER_FAIL};

    rx->now_ns = now_ns;
    if (t) {
        feed(rx, t, DMK_RECEIVE_EV_CLOSED_WORD, 0, &cause);
    }
}

/* ---- what the transport calls -----------------------------------------------------------------
 */

static void handle_claim(struct dmk_receiver *rx, struct endpoint *e, const struct dmk_message *m)
{
    struct ticket *t = find_ticket(rx, m->cookie);
    struct cause cause = {.endpoint = e, .message = m};
    uint32_t guards = 0;

    if (t && t->generation != m->generation) {
        t = NULL;
    }
    if (t && t->state == DMK_RECEIVE_UNCLAIMED) {
        cause.claimant = take_claimant(rx, m);
    }
    guards |= m->to_incarnation == rx->conf.incarnation ? DMK_RECEIVE_IF_D_EQUAL : 0;
    guards |= is_current(rx, m->worker, m->from_incarnation) ? DMK_RECEIVE_IF_P_CURRENT : 0;
    guards |= cause.claimant ? DMK_RECEIVE_IF_WATCHED : 0;
    guards |= cause.claimant && cause.claimant->draining_pages < rx->conf.max_draining_pages
                  ? DMK_RECEIVE_IF_UNDER_BOUND
                  : 0;
    if (~guards & (DMK_RECEIVE_IF_D_EQUAL | DMK_RECEIVE_IF_P_CURRENT)) {
        cause.refusal = DMK_REPLY_INCARNATION;
    } else if (!t) {
        cause.refusal = DMK_REPLY_UNKNOWN;
    } else if (t->state != DMK_RECEIVE_UNCLAIMED) {
        cause.refusal = DMK_REPLY_CLAIMED;
    } else {
        cause.refusal = cause.claimant ? DMK_REPLY_DRAINING : DMK_REPLY_WATCH;
    }
    feed(rx, t, DMK_RECEIVE_EV_CLAIM, guards, &cause);
    drop_claimant(rx, cause.claimant);
}

static void handle_terminal(struct dmk_receiver *rx, struct endpoint *e,
                            const struct dmk_message *m)
{
    struct ticket *t = find_ticket(rx, m->cookie);
    const struct cause cause = {
        .endpoint = e,
        .message = m,
        .why = m->ok ? DMK_RECEIVE_SHORT : DMK_RECEIVE_PEER_FAIL,
    };
    uint32_t guards = 0;
    bool current = is_current(rx, m->worker, m->from_incarnation);

    if (t && (t->generation != m->generation || m->to_incarnation != rx->conf.incarnation)) {
        t = NULL; /* it means another D, or another use of the pages: STALE */
    }
    if (t) {
        e->proven = true;
        if (t->state != DMK_RECEIVE_UNCLAIMED) {
            current = m->from_incarnation == t->p_incarnation;
        }
        guards |= t->endpoint == e ? DMK_RECEIVE_IF_ON_EP : 0;
        guards |= m->bytes == t->bytes_expected ? DMK_RECEIVE_IF_BYTES_EQUAL : 0;
    }
    guards |= current ? DMK_RECEIVE_IF_P_CURRENT : 0;
    feed(rx, t, m->ok ? DMK_RECEIVE_EV_TERMINAL_OK : DMK_RECEIVE_EV_TERMINAL_FAIL, guards, &cause);
}

bool dmk_receiver_message(struct dmk_receiver *rx, struct dmk_xfer_ep *ep, struct dmk_bytes message,
                          uint64_t now_ns)
{
    struct dmk_message m;
    struct endpoint *e;

    if (rx->stopping) {
        return true;
    }
    rx->now_ns = now_ns;
    if (dmk_message_decode(message, &m) < 0 ||
        (m.type != DMK_MESSAGE_CLAIM && m.type != DMK_MESSAGE_TERMINAL) ||
        m.from_incarnation == 0) {
        return false;
    }
    e = take_endpoint(rx, ep);
    if (!e) {
        dmk_log_debug("transfer endpoint refused, all %u are in use", rx->conf.max_endpoints);
        rx->conf.ops->ep_close(rx->conf.xfer, ep, NULL, NULL);
        return true;
    }
    e->heard_ns = now_ns;
    if (m.type == DMK_MESSAGE_CLAIM) {
        handle_claim(rx, e, &m);
    } else {
        handle_terminal(rx, e, &m);
    }
    return true;
}

void dmk_receiver_ep_closed(struct dmk_receiver *rx, struct dmk_xfer_ep *ep, uint64_t now_ns)
{
    struct endpoint *e = rx->conf.ops->ep_user(ep);

    rx->now_ns = now_ns;
    if (e) {
        close_endpoint(rx, e); /* EP_GONE when that is complete */
    } else {
        rx->conf.ops->ep_close(rx->conf.xfer, ep, NULL, NULL);
    }
}

/* ---- time -------------------------------------------------------------------------------------
 */

static void tick_ticket(struct dmk_receiver *rx, struct ticket *t)
{
    const bool due = rx->now_ns >= t->due_ns;
    struct cause cause = {0};

    if (t->claimant && t->claimant->watch && rx->conf.ops->watch_gone(t->claimant->watch)) {
        cause.why = DMK_RECEIVE_PEER_LOST;
        feed(rx, t, DMK_RECEIVE_EV_PROCESS_GONE, 0, &cause);
    } else if (due && t->state == DMK_RECEIVE_UNCLAIMED) {
        cause.why = DMK_RECEIVE_EXPIRED;
        feed(rx, t, DMK_RECEIVE_EV_EXPIRY, 0, &cause);
    } else if (due && t->state == DMK_RECEIVE_CLAIMED) {
        cause.why = DMK_RECEIVE_DEADLINE;
        feed(rx, t, DMK_RECEIVE_EV_DEADLINE, 0, &cause);
    } else if (due && t->state == DMK_RECEIVE_DRAINING) {
        const bool late = t->n_asks >= ASKS_BEFORE_CLOSE;

        t->n_asks++;
        t->due_ns = rx->now_ns + rx->conf.quiet_ask_every_ns;
        feed(rx, t, DMK_RECEIVE_EV_TIMER, late ? DMK_RECEIVE_IF_LATE : 0, &cause);
    }
}

static bool is_endpoint_needed(const struct dmk_receiver *rx, const struct endpoint *e)
{
    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        if (rx->tickets[i].state != DMK_RECEIVE_FORGOTTEN && rx->tickets[i].endpoint == e) {
            return true;
        }
    }
    return false;
}

void dmk_receiver_tick(struct dmk_receiver *rx, uint64_t now_ns)
{
    rx->now_ns = now_ns;
    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        if (rx->tickets[i].state != DMK_RECEIVE_FORGOTTEN) {
            tick_ticket(rx, &rx->tickets[i]);
        }
    }
    for (uint32_t i = 0; i < rx->conf.max_endpoints; i++) {
        struct endpoint *e = &rx->endpoints[i];
        const uint64_t bound = e->proven ? IDLE_NS : UNPROVEN_NS;

        if (e->ep && !e->closing && now_ns > e->heard_ns && now_ns - e->heard_ns > bound &&
            !is_endpoint_needed(rx, e)) {
            close_endpoint(rx, e);
        }
    }
}

struct dmk_receiver_stats dmk_receiver_stats(const struct dmk_receiver *rx)
{
    struct dmk_receiver_stats s = rx->stats;

    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        const struct ticket *t = &rx->tickets[i];

        s.n_unclaimed += t->state == DMK_RECEIVE_UNCLAIMED;
        s.n_claimed += t->state == DMK_RECEIVE_CLAIMED;
        s.n_draining += t->state == DMK_RECEIVE_DRAINING;
        s.n_ready += t->state == DMK_RECEIVE_READY;
        s.draining_pages += t->state == DMK_RECEIVE_DRAINING ? t->n_pages : 0;
        s.refusing |= rx->claimants[i].draining_pages >= rx->conf.max_draining_pages;
    }
    for (uint32_t i = 0; i < rx->conf.max_endpoints; i++) {
        s.n_endpoints += rx->endpoints[i].ep != NULL;
    }
    return s;
}

void dmk_receiver_free(struct dmk_receiver **rx_ref)
{
    struct dmk_receiver *rx = *rx_ref;
    const uint64_t give_up_ns = dmk_clock_ns() + STOP_NS;
    bool open = true;

    if (!rx) {
        return;
    }
    rx->stopping = true;
    for (uint32_t i = 0; i < rx->conf.max_endpoints; i++) {
        close_endpoint(rx, rx->endpoints[i].ep ? &rx->endpoints[i] : NULL);
    }
    while (open) {
        open = false;
        for (uint32_t i = 0; i < rx->conf.max_endpoints; i++) {
            open |= rx->endpoints[i].ep != NULL;
        }
        if (open && dmk_clock_ns() > give_up_ns) {
            dmk_log_warn("transfer endpoints did not close in time; their memory is left behind");
            *rx_ref = NULL;
            return;
        }
        if (open) {
            (void)rx->conf.ops->progress(rx->conf.xfer);
        }
    }
    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        if (rx->claimants[i].watch) {
            rx->conf.ops->watch_close(&rx->claimants[i].watch);
        }
    }
    free(rx->tickets);
    free(rx->claimants);
    free(rx->endpoints);
    free(rx);
    *rx_ref = NULL;
}
