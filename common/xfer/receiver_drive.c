/* Drives D's table (receive_state.h): claims, terminals, closed endpoints and timers are its events, found with
 * their guards; replies, answers and the owner's callbacks are its actions, carried out. On the loop. */
#include "common/xfer/receiver_impl.h"

#include "common/base/assert.h"
#include "common/base/log.h"

#define ASKS_BEFORE_CLOSE 2 /* quiet? unanswered before the endpoint is closed */

struct dmk_rx_ticket *dmk_rx_find_cookie(struct dmk_receiver *rx, struct dmk_id128 cookie)
{
    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        struct dmk_rx_ticket *t = &rx->tickets[i];

        if (t->state != DMK_RECEIVE_FORGOTTEN && dmk_id128_equal(t->cookie, cookie)) {
            return t;
        }
    }
    return NULL;
}

/* ---- the table's actions ---- */

static void send_message(struct dmk_receiver *rx, struct dmk_rx_endpoint *e, struct dmk_message *m)
{
    uint8_t raw[DMK_MESSAGE_MAX_BYTES];

    m->from_incarnation = rx->conf.incarnation;
    if (e->ep && !e->closing) {
        const struct dmk_bytes bytes = {raw, dmk_message_encode(m, raw)};

        /* A lost answer is asked for again; a lost yes ends at P's deadline. */
        (void)rx->conf.ops->send(e->ep, bytes);
    }
}

static void reply(struct dmk_receiver *rx, const struct dmk_rx_cause *cause, uint32_t actions)
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
static void change_state(struct dmk_receiver *rx, struct dmk_rx_ticket *t,
                         enum dmk_receive_state next)
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
        dmk_assert(t->claimant);
        t->claimant->draining_pages += t->n_pages;
        t->due_ns = rx->now_ns + rx->conf.quiet_ask_every_ns;
        break;
    default: /* READY, FORGOTTEN: nobody may write */
        if (t->claimant) {
            t->claimant->n_tickets--;
            dmk_rx_claimant_drop(rx, t->claimant);
        }
        t->claimant = NULL;
        t->endpoint = NULL;
        break;
    }
}

static void bind_claim(struct dmk_rx_ticket *t, const struct dmk_rx_cause *cause)
{
    dmk_assert(cause->endpoint && cause->claimant && cause->message);
    t->endpoint = cause->endpoint;
    t->claimant = cause->claimant;
    t->claimant->n_tickets++;
    t->p_incarnation = cause->message->from_incarnation;
    cause->endpoint->proven = true;
}

static void tell(struct dmk_receiver *rx, const struct dmk_rx_ticket *was, uint32_t actions,
                 const struct dmk_rx_cause *cause)
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
void dmk_rx_feed(struct dmk_receiver *rx, struct dmk_rx_ticket *t, enum dmk_receive_event event,
                 uint32_t guards, const struct dmk_rx_cause *cause)
{
    const enum dmk_receive_state state = t ? t->state : DMK_RECEIVE_FORGOTTEN;
    const struct dmk_receive_result r =
        dmk_receive_step(state, event, guards | (rx->direct ? DMK_RECEIVE_IF_DIRECT : 0));
    struct dmk_rx_ticket was = {0};

    if (!t) {
        reply(rx, cause, r.actions);
        return;
    }
    if (r.actions & DMK_RECEIVE_DO_BIND) {
        bind_claim(t, cause);
    }
    if (r.actions & DMK_RECEIVE_DO_CLOSE_EP) {
        dmk_rx_endpoint_close(rx, t->endpoint);
    }
    was = *t;
    change_state(rx, t, r.next);
    was.claimed_ns = t->claimed_ns;
    reply(rx, cause, r.actions);
    tell(rx, &was, r.actions, cause);
}

/* ---- what the transport calls ---- */

void dmk_rx_endpoint_gone(struct dmk_receiver *rx, struct dmk_rx_endpoint *e)
{
    const struct dmk_rx_cause cause = {.why = DMK_RECEIVE_PEER_LOST};

    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        struct dmk_rx_ticket *t = &rx->tickets[i];

        if (t->state != DMK_RECEIVE_FORGOTTEN && t->endpoint == e) {
            t->endpoint = NULL;
            dmk_rx_feed(rx, t, DMK_RECEIVE_EV_EP_GONE, 0, &cause);
        }
    }
}

static void handle_claim(struct dmk_receiver *rx, struct dmk_rx_endpoint *e,
                         const struct dmk_message *m)
{
    struct dmk_rx_ticket *t = dmk_rx_find_cookie(rx, m->cookie);
    struct dmk_rx_cause cause = {.endpoint = e, .message = m};
    uint32_t guards = 0;

    if (t && t->generation != m->generation) {
        t = NULL;
    }
    if (t && t->state == DMK_RECEIVE_UNCLAIMED) {
        cause.claimant = dmk_rx_claimant_take(rx, m);
    }
    guards |= m->to_incarnation == rx->conf.incarnation ? DMK_RECEIVE_IF_D_EQUAL : 0;
    guards |= dmk_rx_is_current(rx, m->worker, m->from_incarnation) ? DMK_RECEIVE_IF_P_CURRENT : 0;
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
    dmk_rx_feed(rx, t, DMK_RECEIVE_EV_CLAIM, guards, &cause);
    dmk_rx_claimant_drop(rx, cause.claimant);
}

static void handle_terminal(struct dmk_receiver *rx, struct dmk_rx_endpoint *e,
                            const struct dmk_message *m)
{
    struct dmk_rx_ticket *t = dmk_rx_find_cookie(rx, m->cookie);
    const struct dmk_rx_cause cause = {
        .endpoint = e,
        .message = m,
        .why = m->ok ? DMK_RECEIVE_SHORT : DMK_RECEIVE_PEER_FAIL,
    };
    uint32_t guards = 0;
    bool current = dmk_rx_is_current(rx, m->worker, m->from_incarnation);

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
    dmk_rx_feed(rx, t, m->ok ? DMK_RECEIVE_EV_TERMINAL_OK : DMK_RECEIVE_EV_TERMINAL_FAIL, guards,
                &cause);
}

/* Whoever says what we do not understand is not a P of ours. */
static void refuse_endpoint(struct dmk_receiver *rx, struct dmk_xfer_ep *ep)
{
    struct dmk_rx_endpoint *e = rx->conf.ops->ep_user(ep);

    if (e) {
        dmk_rx_endpoint_close(rx, e);
    } else {
        rx->conf.ops->ep_close(rx->conf.xfer, ep, NULL, NULL);
    }
}

bool dmk_receiver_message(struct dmk_receiver *rx, struct dmk_xfer_ep *ep, struct dmk_bytes message,
                          uint64_t now_ns)
{
    struct dmk_message m;
    struct dmk_rx_endpoint *e;

    if (rx->stopping) {
        return true;
    }
    rx->now_ns = now_ns;
    if (dmk_message_decode(message, &m) < 0 ||
        (m.type != DMK_MESSAGE_CLAIM && m.type != DMK_MESSAGE_TERMINAL) ||
        m.from_incarnation == 0) {
        refuse_endpoint(rx, ep);
        return false;
    }
    e = dmk_rx_endpoint_take(rx, ep);
    if (!e) {
        dmk_log_debug("transfer endpoint refused, all %u are in use", rx->conf.max_endpoints);
        refuse_endpoint(rx, ep);
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
    struct dmk_rx_endpoint *e = rx->conf.ops->ep_user(ep);

    rx->now_ns = now_ns;
    if (e) {
        dmk_rx_endpoint_close(rx, e); /* EP_GONE when that is complete */
    } else {
        rx->conf.ops->ep_close(rx->conf.xfer, ep, NULL, NULL);
    }
}

/* ---- time ---- */

static void tick_ticket(struct dmk_receiver *rx, struct dmk_rx_ticket *t)
{
    const bool due = rx->now_ns >= t->due_ns;
    struct dmk_rx_cause cause = {0};

    if (dmk_rx_claimant_gone(rx, t->claimant)) {
        /* A message of the dead may still lie in our buffers, and so would a put that fell back to being
         * emulated: the endpoint is closed first, then the end of the process counts. */
        cause.why = DMK_RECEIVE_PEER_LOST;
        if (t->endpoint) {
            dmk_rx_endpoint_close(rx, t->endpoint);
        } else {
            dmk_rx_feed(rx, t, DMK_RECEIVE_EV_PROCESS_GONE, 0, &cause);
        }
    } else if (due && t->state == DMK_RECEIVE_UNCLAIMED) {
        cause.why = DMK_RECEIVE_EXPIRED;
        dmk_rx_feed(rx, t, DMK_RECEIVE_EV_EXPIRY, 0, &cause);
    } else if (due && t->state == DMK_RECEIVE_CLAIMED) {
        cause.why = DMK_RECEIVE_DEADLINE;
        dmk_rx_feed(rx, t, DMK_RECEIVE_EV_DEADLINE, 0, &cause);
    } else if (due && t->state == DMK_RECEIVE_DRAINING) {
        const bool late = t->n_asks >= ASKS_BEFORE_CLOSE;

        t->n_asks++;
        t->due_ns = rx->now_ns + rx->conf.quiet_ask_every_ns;
        dmk_rx_feed(rx, t, DMK_RECEIVE_EV_TIMER, late ? DMK_RECEIVE_IF_LATE : 0, &cause);
    }
}

void dmk_receiver_tick(struct dmk_receiver *rx, uint64_t now_ns)
{
    rx->now_ns = now_ns;
    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        if (rx->tickets[i].state != DMK_RECEIVE_FORGOTTEN) {
            tick_ticket(rx, &rx->tickets[i]);
        }
    }
    dmk_rx_endpoints_tidy(rx);
}
