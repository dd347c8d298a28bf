/* Drives P's table (send_state.h): replies and answers, broken endpoints and timers are its events, found with
 * their guards; messages and the owner's callbacks are its actions, carried out. On the loop. */
#include "common/xfer/sender_impl.h"

#include "common/base/assert.h"
#include "common/base/clock.h"

#define IDLE_NS (60 * DMK_NS_PER_S) /* an endpoint that no job needs; D waits longer */

struct job *dmk_sender_find_cookie(struct dmk_sender *tx, struct dmk_id128 cookie)
{
    for (uint32_t i = 0; i < tx->conf.max_jobs; i++) {
        if (tx->jobs[i].state != DMK_SEND_NONE &&
            dmk_id128_equal(tx->jobs[i].ticket->cookie, cookie)) {
            return &tx->jobs[i];
        }
    }
    return NULL;
}

/* ---- the table's actions ---- */

static int send_message(struct dmk_sender *tx, struct job *job, struct dmk_message *m)
{
    uint8_t raw[DMK_MESSAGE_MAX_BYTES];
    struct dmk_bytes bytes;
    int r;

    dmk_assert(job->endpoint);
    m->from_incarnation = tx->conf.incarnation;
    m->to_incarnation = job->ticket->d_incarnation;
    m->worker = tx->worker;
    m->cookie = job->ticket->cookie;
    m->generation = job->ticket->generation;
    bytes = (struct dmk_bytes){raw, dmk_message_encode(m, raw)};
    r = tx->conf.ops->send(job->endpoint->ep, bytes);
    job->endpoint->needed_ns = tx->now_ns;
    return r;
}

int dmk_sender_send_claim(struct dmk_sender *tx, struct job *job)
{
    struct dmk_message m = {.type = DMK_MESSAGE_CLAIM};
    int r = tx->conf.ops->watch_self(tx->conf.xfer, m.watch, &m.watch_len);

    return r < 0 ? r : send_message(tx, job, &m);
}

/* Not sent now is sent at the next RESEND. */
static void send_terminal(struct dmk_sender *tx, struct job *job, bool ok)
{
    struct dmk_message m = {.type = DMK_MESSAGE_TERMINAL, .ok = ok, .bytes = job->bytes};

    job->due_ns = tx->now_ns + tx->conf.resend_every_ns;
    if (tx->stopping) {
        return;
    }
    if (!dmk_sender_endpoint_works(job->endpoint)) {
        job->endpoint = NULL;
        if (dmk_sender_endpoint_take(tx, job->ticket, &job->endpoint, NULL) < 0) {
            return;
        }
    }
    if (send_message(tx, job, &m) == -DMK_EPEER) {
        dmk_sender_endpoint_lose(tx, job->endpoint);
    }
}

static void tell_failed(struct dmk_sender *tx, const struct job *job, enum dmk_send_event event)
{
    const struct dmk_sender_events *ev = &tx->conf.events;
    int status = -DMK_EPEER;
    const char *why = "the connection to the decode worker broke during the transfer";

    if (event == DMK_SEND_EV_NO) {
        status = -DMK_EAGAIN;
        why = dmk_message_reply_text(job->refusal);
    } else if (event == DMK_SEND_EV_DEADLINE) {
        status = -DMK_ETIMEOUT;
        why = "the transfer to the decode worker did not end within its budget";
    }
    ev->on_failed(ev->ud, job->id, status, why);
}

static void tell(struct dmk_sender *tx, struct job *job, enum dmk_send_event event,
                 uint32_t actions)
{
    const struct dmk_sender_events *ev = &tx->conf.events;
    const uint64_t id = job->id, bytes = job->bytes, ns = job->moved_ns;
    const bool ok = job->accepted;

    if (tx->stopping) {
        return;
    }
    if (actions & DMK_SEND_DO_CLOSED_WORD) {
        ev->on_closed_word(ev->ud, job->ticket->cookie, job->ticket->d_incarnation);
    }
    if (actions & DMK_SEND_DO_TELL_CLAIMED && ev->on_claimed) {
        ev->on_claimed(ev->ud, id);
    }
    if (actions & DMK_SEND_DO_TELL_FAILED) {
        tell_failed(tx, job, event);
    }
    if (actions & DMK_SEND_DO_TELL_DONE) { /* the slot is free, and may be another's after this */
        tx->stats.n_done_ok += ok;
        tx->stats.n_done_failed += !ok;
        ev->on_done(ev->ud, id, ok, bytes, ns);
    }
}

static bool is_terminal(enum dmk_send_state state)
{
    return state == DMK_SEND_TERM_OK || state == DMK_SEND_TERM_FAIL;
}

void dmk_sender_feed(struct dmk_sender *tx, struct job *job, enum dmk_send_event event,
                     uint32_t guards)
{
    const struct dmk_send_result r = dmk_send_step(job->state, event, guards);

    if (!r.listed) {
        return;
    }
    if (r.next == DMK_SEND_FAILING && job->state != DMK_SEND_FAILING) {
        job->due_ns = tx->now_ns + tx->conf.retire_ns;
    }
    if (is_terminal(r.next) && !is_terminal(job->state)) {
        job->terminal_ns = tx->now_ns;
    }
    job->state = r.next;
    if (r.actions & DMK_SEND_DO_CLOSE_EP && dmk_sender_endpoint_works(job->endpoint)) {
        dmk_sender_endpoint_lose(tx, job->endpoint);
    }
    if (r.actions & (DMK_SEND_DO_TERMINAL_OK | DMK_SEND_DO_TERMINAL_FAIL)) {
        send_terminal(tx, job, (r.actions & DMK_SEND_DO_TERMINAL_OK) != 0);
    }
    if (r.actions & DMK_SEND_DO_RETIRE) {
        dmk_sender_retire(tx, job);
    }
    tell(tx, job, event, r.actions);
    if (event == DMK_SEND_EV_YES) {
        dmk_sender_pump(tx);
    }
}

/* ---- what the transport calls ---- */

static void handle_reply(struct dmk_sender *tx, struct job *job, const struct endpoint *e,
                         const struct dmk_message *m)
{
    if (m->reply != DMK_REPLY_YES) {
        job->refusal = m->reply;
        dmk_sender_feed(tx, job, DMK_SEND_EV_NO, 0);
    } else if (job->endpoint == e && m->from_incarnation == job->ticket->d_incarnation) {
        dmk_sender_feed(tx, job, DMK_SEND_EV_YES, 0);
    }
}

static void handle_answer(struct dmk_sender *tx, struct job *job, const struct dmk_message *m)
{
    /* Of another start of D only this is true: it does not know the ticket. */
    if (m->from_incarnation != job->ticket->d_incarnation && m->answer != DMK_ANSWER_STALE) {
        return;
    }
    job->accepted = job->state == DMK_SEND_TERM_OK &&
                    (m->answer == DMK_ANSWER_ACCEPTED || m->answer == DMK_ANSWER_ALREADY);
    dmk_sender_feed(tx, job, DMK_SEND_EV_ANSWER, 0);
}

bool dmk_sender_message(struct dmk_sender *tx, struct dmk_xfer_ep *ep, struct dmk_bytes message,
                        uint64_t now_ns)
{
    struct endpoint *e = tx->conf.ops->ep_user(ep);
    struct dmk_message m;
    struct job *job;

    if (tx->stopping) {
        return true;
    }
    tx->now_ns = now_ns;
    if (!e) {
        tx->conf.ops->ep_close(tx->conf.xfer, ep, NULL, NULL); /* nobody has to connect to us */
        return false;
    }
    if (dmk_message_decode(message, &m) < 0 ||
        (m.type != DMK_MESSAGE_REPLY && m.type != DMK_MESSAGE_ANSWER)) {
        dmk_sender_endpoint_lose(tx, e);
        return false;
    }
    job = dmk_sender_find_cookie(tx, m.cookie);
    if (!job || m.to_incarnation != tx->conf.incarnation ||
        m.generation != job->ticket->generation) {
        return true;
    }
    if (m.type == DMK_MESSAGE_REPLY) {
        handle_reply(tx, job, e, &m);
    } else {
        handle_answer(tx, job, &m);
    }
    return true;
}

void dmk_sender_ep_closed(struct dmk_sender *tx, struct dmk_xfer_ep *ep, uint64_t now_ns)
{
    struct endpoint *e = tx->conf.ops->ep_user(ep);

    tx->now_ns = now_ns;
    if (e) {
        dmk_sender_endpoint_lose(tx, e);
    } else {
        tx->conf.ops->ep_close(tx->conf.xfer, ep, NULL, NULL);
    }
}

/* ---- time ---- */

static void tick_job(struct dmk_sender *tx, struct job *job)
{
    const bool due = tx->now_ns >= job->due_ns;

    if (job->endpoint) {
        job->endpoint->needed_ns = tx->now_ns;
    }
    switch (job->state) {
    case DMK_SEND_CLAIM_SENT:
    case DMK_SEND_RUNNING:
        if (due) {
            dmk_sender_feed(tx, job, DMK_SEND_EV_DEADLINE, 0);
        }
        break;
    case DMK_SEND_FAILING:
        if (due) {
            job->due_ns = tx->now_ns + tx->conf.retire_ns;
            dmk_sender_feed(tx, job, DMK_SEND_EV_DEADLINE, 0);
        }
        break;
    case DMK_SEND_TERM_OK:
    case DMK_SEND_TERM_FAIL:
        if (tx->now_ns >= job->terminal_ns + tx->conf.give_up_ns) {
            dmk_sender_feed(tx, job, DMK_SEND_EV_GIVE_UP, 0);
        } else if (due) {
            dmk_sender_feed(tx, job, DMK_SEND_EV_RESEND, 0);
        }
        break;
    default: /* NONE, and QUEUED which does not outlive claim */
        break;
    }
}

void dmk_sender_tick(struct dmk_sender *tx, uint64_t now_ns)
{
    tx->now_ns = now_ns;
    for (uint32_t i = 0; i < tx->conf.max_jobs; i++) {
        tick_job(tx, &tx->jobs[i]);
    }
    for (uint32_t i = 0; i < tx->conf.max_endpoints; i++) {
        struct endpoint *e = &tx->endpoints[i];

        if (dmk_sender_endpoint_works(e) && now_ns > e->needed_ns + IDLE_NS) {
            dmk_sender_endpoint_lose(tx, e);
        }
    }
    dmk_sender_pump(tx);
}
