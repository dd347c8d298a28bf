/* Drives P's table (send_state.h) with messages, timers and endpoint events; see sender.h.
 *
 * Jobs lie in a bounded table; endpoints and puts are in sender_io.c. Everything runs on the loop's
 * thread; nothing allocates after new. */
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/xfer/sender_impl.h"
#include <stdlib.h>

#define DEFAULT_ENDPOINTS 256
#define DEFAULT_RETIRE_NS (2 * DMK_NS_PER_S)
#define IDLE_NS           (60 * DMK_NS_PER_S) /* an endpoint that no job needs; D waits longer */
#define STOP_NS           DMK_NS_PER_S

static void free_memory(struct dmk_sender *tx)
{
    for (uint32_t i = 0; tx->jobs && i < tx->conf.max_jobs; i++) {
        free(tx->jobs[i].ticket);
    }
    free(tx->jobs);
    free(tx->endpoints);
    free(tx->puts);
    free(tx);
}

int dmk_sender_new(const struct dmk_sender_conf *conf, struct dmk_sender **ret)
{
    struct dmk_sender *tx;
    bool ok;

    dmk_assert(conf->max_jobs > 0 && conf->max_puts_in_flight > 0 && conf->incarnation > 0);
    dmk_assert(conf->n_ranks > 0 && conf->n_ranks <= DMK_TICKET_MAX_RANKS);
    dmk_assert(conf->numerics && strlen(conf->numerics) < DMK_NUMERICS_MAX);
    tx = calloc(1, sizeof(*tx));
    if (!tx) {
        return -DMK_ENOMEM;
    }
    tx->conf = *conf;
    tx->conf.max_endpoints = conf->max_endpoints ? conf->max_endpoints : DEFAULT_ENDPOINTS;
    tx->conf.retire_ns = conf->retire_ns ? conf->retire_ns : DEFAULT_RETIRE_NS;
    tx->conf.worker_id = NULL;
    tx->conf.numerics = NULL;
    memcpy(tx->numerics, conf->numerics, strlen(conf->numerics) + 1);
    tx->worker = conf->worker_id ? dmk_hash64(conf->worker_id, strlen(conf->worker_id), 1) : 0;
    for (uint32_t r = 0; r < conf->n_ranks; r++) {
        tx->layouts[r] = conf->mem[r]->layout;
    }
    tx->jobs = calloc(conf->max_jobs, sizeof(*tx->jobs));
    tx->endpoints = calloc(tx->conf.max_endpoints, sizeof(*tx->endpoints));
    tx->puts = calloc(conf->max_puts_in_flight, sizeof(*tx->puts));
    ok = tx->jobs && tx->endpoints && tx->puts;
    for (uint32_t i = 0; ok && i < conf->max_jobs; i++) {
        tx->jobs[i].ticket = malloc(sizeof(*tx->jobs[i].ticket));
        ok = tx->jobs[i].ticket != NULL;
    }
    if (!ok) {
        free_memory(tx);
        return -DMK_ENOMEM;
    }
    for (uint32_t i = 0; i < conf->max_puts_in_flight; i++) {
        tx->puts[i].next_free = tx->free_puts;
        tx->free_puts = &tx->puts[i];
    }
    *ret = tx;
    return 0;
}

static bool is_busy(const struct dmk_sender *tx)
{
    bool busy = tx->n_in_flight > 0;

    for (uint32_t i = 0; i < tx->conf.max_endpoints; i++) {
        busy |= tx->endpoints[i].ep != NULL;
    }
    return busy;
}

void dmk_sender_free(struct dmk_sender **tx_ref)
{
    struct dmk_sender *tx = *tx_ref;
    const uint64_t give_up_ns = dmk_clock_ns() + STOP_NS;

    if (!tx) {
        return;
    }
    tx->stopping = true;
    for (uint32_t i = 0; i < tx->conf.max_endpoints; i++) {
        if (tx->endpoints[i].ep) {
            dmk_sender_endpoint_lose(tx, &tx->endpoints[i]);
        }
    }
    while (is_busy(tx) && dmk_clock_ns() < give_up_ns) {
        (void)tx->conf.ops->progress(tx->conf.xfer);
    }
    if (is_busy(tx)) {
        dmk_log_warn("transfer endpoints did not close in time; their memory is left behind");
    } else {
        free_memory(tx);
    }
    *tx_ref = NULL;
}

static struct job *find_job(struct dmk_sender *tx, uint64_t id)
{
    for (uint32_t i = 0; i < tx->conf.max_jobs; i++) {
        if (tx->jobs[i].state != DMK_SEND_NONE && tx->jobs[i].id == id) {
            return &tx->jobs[i];
        }
    }
    return NULL;
}

static struct job *find_cookie(struct dmk_sender *tx, struct dmk_id128 cookie)
{
    for (uint32_t i = 0; i < tx->conf.max_jobs; i++) {
        if (tx->jobs[i].state != DMK_SEND_NONE &&
            dmk_id128_equal(tx->jobs[i].ticket->cookie, cookie)) {
            return &tx->jobs[i];
        }
    }
    return NULL;
}

/* ---- the table's actions ----------------------------------------------------------------------
 */

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

static int send_claim(struct dmk_sender *tx, struct job *job)
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

/* ---- what the owner calls ---------------------------------------------------------------------
 */

static int check_ticket(const struct dmk_sender *tx, const struct dmk_ticket *t,
                        struct dmk_error *reterr)
{
    char theirs[33], ours[33];

    if (!dmk_id128_equal(t->model_id, tx->conf.model_id)) {
        dmk_id128_format(t->model_id, theirs);
        dmk_id128_format(tx->conf.model_id, ours);
        return dmk_error_set(reterr, -DMK_EMISMATCH,
                             "decode worker serves model %s, this one %s: give both pools the same "
                             "checkpoint",
                             theirs, ours);
    }
    if (strcmp(t->numerics, tx->numerics) != 0) {
        return dmk_error_set(
            reterr, -DMK_EMISMATCH,
            "decode worker computes pages as \"%s\", this one as \"%s\": start both "
            "pools with the same backend and formats",
            t->numerics, tx->numerics);
    }
    return 0;
}

/* Everything but the ticket's memory starts anew. */
static void init_job(struct dmk_sender *tx, struct job *job, uint64_t id,
                     const struct dmk_ticket *t)
{
    const uint32_t first = t->have / DMK_PAGE_TOKENS;
    struct dmk_ticket *copy = job->ticket;
    uint32_t window_first;
    const uint32_t n_window = dmk_kv_window_blocks(t->n_tokens, &window_first);

    memset(job, 0, sizeof(*job));
    *copy = *t;
    job->ticket = copy;
    job->tx = tx;
    job->id = id;
    job->claimed_ns = tx->now_ns;
    job->due_ns = tx->now_ns + tx->conf.transfer_budget_ns;
    memcpy(&job->dst_pages[first], t->pages, t->n_pages * sizeof(t->pages[0]));
    for (uint32_t l = 0; l < t->n_full_layers; l++) {
        job->full[l] = (struct layer){.ready = first, .piece_first = first, .piece_end = first};
    }
    for (uint32_t b = 0; t->n_ring > 0 && b < n_window; b++) {
        job->dst_window[b] = t->ring[(window_first + b) % t->n_ring];
    }
}

int dmk_sender_claim(struct dmk_sender *tx, uint64_t id, const struct dmk_ticket *ticket,
                     uint64_t now_ns, struct dmk_error *reterr)
{
    struct job *job = NULL;
    int r;

    tx->now_ns = now_ns;
    dmk_assert(!find_job(tx, id));
    for (uint32_t i = 0; i < tx->conf.max_jobs && !job; i++) {
        job = tx->jobs[i].state == DMK_SEND_NONE ? &tx->jobs[i] : NULL;
    }
    if (!job) {
        return dmk_error_set(reterr, -DMK_EFULL, "all %u transfers of this worker are in use",
                             tx->conf.max_jobs);
    }
    if (find_cookie(tx, ticket->cookie)) {
        return dmk_error_set(reterr, -DMK_EINVAL, "another transfer uses the same ticket");
    }
    r = check_ticket(tx, ticket, reterr);
    if (r < 0) {
        return r;
    }
    init_job(tx, job, id, ticket);
    r = dmk_plan_init(&job->plan, tx->layouts, tx->conf.n_ranks, ticket, tx->conf.max_put_bytes,
                      reterr);
    for (uint32_t i = 0; i < tx->conf.n_ranks && tx->conf.stage[i]; i++) {
        job->plan.staged[i] = tx->conf.stage[i]->layout;
    }
    if (r == 0) {
        r = dmk_sender_endpoint_take(tx, ticket, &job->endpoint, reterr);
    }
    if (r < 0) {
        return r;
    }
    r = send_claim(tx,
                   job); /* the action of the two steps below, early: its failure leaves no job */
    if (r < 0) {
        if (r == -DMK_EPEER) {
            dmk_sender_endpoint_lose(tx, job->endpoint);
        }
        return dmk_error_set(reterr, r, "the claim could not be sent to the decode worker (%s)",
                             dmk_status_message(r));
    }
    dmk_sender_feed(tx, job, DMK_SEND_EV_PREFILL, 0);
    dmk_sender_feed(tx, job, DMK_SEND_EV_SCHEDULED, DMK_SEND_IF_D_EQUAL);
    return 0;
}

static bool takes_pages(const struct job *job)
{
    return job && (job->state == DMK_SEND_CLAIM_SENT || job->state == DMK_SEND_RUNNING);
}

void dmk_sender_push_full(struct dmk_sender *tx, uint64_t id, uint32_t full_layer,
                          const uint32_t *src_pages, uint32_t first_block, uint32_t end_block)
{
    struct job *job = find_job(tx, id);
    struct layer *layer;
    uint32_t first, end;

    if (!takes_pages(job)) {
        return;
    }
    dmk_assert(full_layer < job->ticket->n_full_layers && !job->finished);
    layer = &job->full[full_layer];
    end = dmk_kv_pages_for(job->ticket->n_tokens);
    end = end_block < end ? end_block : end;
    first = first_block > layer->ready ? first_block : layer->ready;
    if (end <= first) {
        return;
    }
    dmk_assert(first == layer->ready); /* no gap */
    memcpy(&job->src_pages[first], &src_pages[first], (end - first) * sizeof(src_pages[0]));
    layer->ready = end;
    job->full_at = full_layer < job->full_at ? full_layer : job->full_at;
    dmk_sender_pump(tx);
}

void dmk_sender_push_window(struct dmk_sender *tx, uint64_t id, uint32_t window_layer,
                            const uint32_t *src_ring, uint32_t n_ring)
{
    struct job *job = find_job(tx, id);
    uint32_t first, n;

    if (!takes_pages(job)) {
        return;
    }
    dmk_assert(window_layer < job->ticket->n_window_layers && !job->finished);
    dmk_assert(n_ring >= DMK_WINDOW_RING && n_ring <= DMK_WINDOW_RING_MAX);
    n = dmk_kv_window_blocks(job->ticket->n_tokens, &first);
    for (uint32_t b = 0; b < n; b++) {
        job->src_window[b] = src_ring[(first + b) % n_ring];
    }
    job->window[window_layer].ready = n;
    job->window_at = window_layer < job->window_at ? window_layer : job->window_at;
    dmk_sender_pump(tx);
}

void dmk_sender_finish(struct dmk_sender *tx, uint64_t id)
{
    struct job *job = find_job(tx, id);

    if (takes_pages(job)) {
        job->finished = true;
        dmk_sender_pump(tx);
    }
}

void dmk_sender_cancel(struct dmk_sender *tx, uint64_t id)
{
    struct job *job = find_job(tx, id);

    if (job) {
        dmk_sender_feed(tx, job, DMK_SEND_EV_CANCEL, 0);
    }
}

void dmk_sender_quiet_ask(struct dmk_sender *tx, struct dmk_id128 cookie, uint64_t p_incarnation,
                          uint64_t d_incarnation)
{
    const struct job *job = find_cookie(tx, cookie);
    const struct dmk_send_result r =
        dmk_send_step(job ? job->state : DMK_SEND_NONE, DMK_SEND_EV_QUIET_ASK,
                      p_incarnation == tx->conf.incarnation ? DMK_SEND_IF_OWN : 0);

    if (r.actions & DMK_SEND_DO_CLOSED_WORD) {
        tx->conf.events.on_closed_word(tx->conf.events.ud, cookie, d_incarnation);
    }
}

/* ---- what the transport calls -----------------------------------------------------------------
 */

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
    job = find_cookie(tx, m.cookie);
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

/* ---- time -------------------------------------------------------------------------------------
 */

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

uint32_t dmk_sender_n_jobs(const struct dmk_sender *tx)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < tx->conf.max_jobs; i++) {
        n += tx->jobs[i].state != DMK_SEND_NONE;
    }
    return n;
}

struct dmk_sender_stats dmk_sender_stats(const struct dmk_sender *tx)
{
    struct dmk_sender_stats s = tx->stats;

    s.n_jobs = dmk_sender_n_jobs(tx);
    s.n_puts_in_flight = tx->n_in_flight;
    for (uint32_t i = 0; i < tx->conf.max_endpoints; i++) {
        s.n_endpoints += tx->endpoints[i].ep != NULL;
    }
    return s;
}
