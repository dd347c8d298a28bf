/* The sender's doors: making and ending it, claims and pushes of its owner, the word about a cookie, what it
 * says about itself; see sender.h. What follows from an event is in sender_drive.c. On the loop; nothing
 * allocates after new. */
#include "common/xfer/sender_impl.h"

#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/log.h"

#define DEFAULT_ENDPOINTS 256
#define DEFAULT_RETIRE_NS (2 * DMK_NS_PER_S)
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
            "pools with the same backend and formats, or tell the decode worker the formats of "
            "its prefill pool (prompt-experts, prompt-dense)",
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
    if (dmk_sender_find_cookie(tx, ticket->cookie)) {
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
    /* The action of the two steps below, early: its failure leaves no job. */
    r = dmk_sender_send_claim(tx, job);
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
    const struct job *job = dmk_sender_find_cookie(tx, cookie);
    const struct dmk_send_result r =
        dmk_send_step(job ? job->state : DMK_SEND_NONE, DMK_SEND_EV_QUIET_ASK,
                      p_incarnation == tx->conf.incarnation ? DMK_SEND_IF_OWN : 0);

    if (r.actions & DMK_SEND_DO_CLOSED_WORD) {
        tx->conf.events.on_closed_word(tx->conf.events.ud, cookie, d_incarnation);
    }
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
