/* Endpoints and puts of P's side; see sender.h and sender_impl.h.
 *
 * Puts are posted from the jobs' layer cursors, so that nothing is queued but positions; at most
 * max_puts_in_flight are posted over all jobs, which take turns. */
#include "common/base/assert.h"
#include "common/base/log.h"
#include "common/base/clock.h"
#include "common/xfer/sender_impl.h"

#define PUTS_PER_TURN 16

/* ---- endpoints ---- */

static void free_keys(struct dmk_sender *tx, struct endpoint *e)
{
    for (uint32_t r = 0; r < DMK_TICKET_MAX_RANKS; r++) {
        if (e->full_key[r]) {
            tx->conf.ops->key_free(&e->full_key[r]);
        }
        if (e->window_key[r]) {
            tx->conf.ops->key_free(&e->window_key[r]);
        }
    }
    e->keyed = false;
}

static bool is_same_memory(const struct endpoint *e, const struct dmk_ticket *t)
{
    if (e->n_ranks != t->n_ranks) {
        return false;
    }
    for (uint32_t i = 0; i < t->n_ranks; i++) {
        const struct dmk_ticket_rank *a = &e->ranks[i], *b = &t->ranks[i];

        if (a->full_base != b->full_base || a->window_base != b->window_base ||
            a->full_key_len != b->full_key_len || a->window_key_len != b->window_key_len ||
            memcmp(a->full_key, b->full_key, a->full_key_len) != 0 ||
            memcmp(a->window_key, b->window_key, a->window_key_len) != 0) {
            return false;
        }
    }
    return true;
}

static int unpack_keys(struct dmk_sender *tx, struct endpoint *e, const struct dmk_ticket *t)
{
    const struct dmk_xfer_ops *ops = tx->conf.ops;
    int r = 0;

    for (uint32_t i = 0; i < t->n_ranks && r == 0; i++) {
        const struct dmk_ticket_rank *rank = &t->ranks[i];

        if (t->n_full_layers > 0) {
            r = ops->key_unpack(e->ep, (struct dmk_bytes){rank->full_key, rank->full_key_len},
                                &e->full_key[i]);
        }
        if (r == 0 && t->n_window_layers > 0) {
            r = ops->key_unpack(e->ep, (struct dmk_bytes){rank->window_key, rank->window_key_len},
                                &e->window_key[i]);
        }
        e->ranks[i] = *rank;
    }
    e->n_ranks = t->n_ranks;
    e->keyed = true; /* so that a half-done set is freed with the endpoint */
    return r;
}

/* One for each group of ranks of a D: the tickets of another group name other memory. */
static struct endpoint *find_endpoint(struct dmk_sender *tx, const struct dmk_ticket *t)
{
    for (uint32_t i = 0; i < tx->conf.max_endpoints; i++) {
        struct endpoint *e = &tx->endpoints[i];

        if (e->ep && !e->closing && e->d_incarnation == t->d_incarnation &&
            e->address_len == t->address_len &&
            memcmp(e->address, t->address, t->address_len) == 0 &&
            (!e->keyed || is_same_memory(e, t))) {
            return e;
        }
    }
    return NULL;
}

static int open_endpoint(struct dmk_sender *tx, const struct dmk_ticket *t, struct endpoint **ret,
                         struct dmk_error *reterr)
{
    struct endpoint *e = NULL;
    int r;

    for (uint32_t i = 0; i < tx->conf.max_endpoints && !e; i++) {
        e = tx->endpoints[i].ep ? NULL : &tx->endpoints[i];
    }
    if (!e) {
        return dmk_error_set(reterr, -DMK_EFULL, "all %u transfer endpoints are in use",
                             tx->conf.max_endpoints);
    }
    *e = (struct endpoint){.tx = tx, .d_incarnation = t->d_incarnation};
    e->address_len = t->address_len;
    memcpy(e->address, t->address, t->address_len);
    r = tx->conf.ops->ep_connect(tx->conf.xfer, (struct dmk_bytes){t->address, t->address_len},
                                 &e->ep, reterr);
    if (r < 0) {
        e->ep = NULL;
        return r;
    }
    tx->conf.ops->ep_set_user(e->ep, e);
    *ret = e;
    return 0;
}

int dmk_sender_endpoint_take(struct dmk_sender *tx, const struct dmk_ticket *t,
                             struct endpoint **ret, struct dmk_error *reterr)
{
    struct endpoint *e = find_endpoint(tx, t);
    int r;

    if (!e) {
        r = open_endpoint(tx, t, &e, reterr);
        if (r < 0) {
            return r;
        }
    }
    if (!e->keyed) {
        r = unpack_keys(tx, e, t);
        if (r < 0) {
            dmk_sender_endpoint_lose(tx, e);
            return dmk_error_set(reterr, r,
                                 "a memory key of the ticket does not fit the page "
                                 "transport: both pools must use the same one");
        }
    }
    e->needed_ns = tx->now_ns;
    *ret = e;
    return 0;
}

static void on_endpoint_closed(void *ud, int status)
{
    struct endpoint *e = ud;
    struct dmk_sender *tx = e->tx;

    e->ep = NULL;
    for (uint32_t i = 0; i < tx->conf.max_jobs; i++) {
        struct job *job = &tx->jobs[i];

        if (job->state == DMK_SEND_NONE || job->endpoint != e) {
            continue;
        }
        job->endpoint = NULL;
        if (status < 0 && job->state == DMK_SEND_FAILING) {
            /* Copies may still run, so no terminal may say otherwise: D has to see our process end.
             */
            dmk_log_warn("transfer endpoint closed with copies of unknown end; source pages of one "
                         "transfer stay leased");
            continue;
        }
        job->retired = true;
        dmk_sender_retire(tx, job);
    }
}

void dmk_sender_endpoint_lose(struct dmk_sender *tx, struct endpoint *e)
{
    if (e->closing) {
        return;
    }
    e->closing = true;
    free_keys(tx, e);
    tx->conf.ops->ep_close(tx->conf.xfer, e->ep, on_endpoint_closed, e);
    for (uint32_t i = 0; i < tx->conf.max_jobs; i++) {
        struct job *job = &tx->jobs[i];

        if (job->state != DMK_SEND_NONE && job->endpoint == e) {
            dmk_sender_feed(tx, job, DMK_SEND_EV_EP_GONE, 0);
        }
    }
}

/* ---- puts ---- */

/* A measurement only, so it reads the clock itself: what is under way has begun, or the last of it has
 * ended. */
static void mark_moving(struct job *job)
{
    const bool moving = job->n_in_flight > 0 || job->flushing;

    if (moving && job->moving_ns == 0) {
        job->moving_ns = dmk_clock_ns();
    } else if (!moving && job->moving_ns > 0) {
        job->moved_ns += dmk_clock_ns() - job->moving_ns;
        job->moving_ns = 0;
    }
}

static void on_put_done(void *ud, int status)
{
    struct put *put = ud;
    struct job *job = put->job;
    struct dmk_sender *tx = job->tx;

    job->n_in_flight--;
    tx->n_in_flight--;
    mark_moving(job);
    if (status == 0) {
        job->bytes += put->bytes;
        tx->stats.n_bytes += put->bytes;
    }
    put->next_free = tx->free_puts;
    tx->free_puts = put;
    if (status < 0 && dmk_sender_endpoint_works(job->endpoint)) {
        dmk_sender_endpoint_lose(tx, job->endpoint);
    }
    if (job->state == DMK_SEND_FAILING) {
        dmk_sender_retire(tx, job);
    }
    dmk_sender_pump(tx);
}

static void on_flush_done(void *ud, int status)
{
    struct job *job = ud;
    struct dmk_sender *tx = job->tx;

    job->flushing = false;
    mark_moving(job);
    if (status < 0) {
        if (dmk_sender_endpoint_works(job->endpoint)) {
            dmk_sender_endpoint_lose(tx, job->endpoint);
        }
        dmk_sender_retire(tx, job); /* where the endpoint is closed already */
    } else if (job->state == DMK_SEND_RUNNING) {
        dmk_sender_feed(tx, job, DMK_SEND_EV_FLUSHED, 0);
    } else {
        job->retired = job->n_in_flight == 0;
        dmk_sender_retire(tx, job);
    }
    dmk_sender_pump(tx);
}

static void start_flush(struct dmk_sender *tx, struct job *job)
{
    if (job->flushing || !dmk_sender_endpoint_works(job->endpoint)) {
        return;
    }
    job->flushing = true;
    mark_moving(job);
    if (tx->conf.ops->flush(job->endpoint->ep, on_flush_done, job) < 0) {
        job->flushing = false;
        dmk_sender_endpoint_lose(tx, job->endpoint);
    }
}

void dmk_sender_retire(struct dmk_sender *tx, struct job *job)
{
    if (job->state != DMK_SEND_FAILING || job->n_in_flight > 0 || job->flushing) {
        return;
    }
    if (job->retired) {
        dmk_sender_feed(tx, job, DMK_SEND_EV_RETIRED,
                        dmk_sender_endpoint_works(job->endpoint) ? DMK_SEND_IF_EP : 0);
    } else {
        start_flush(tx, job);
    }
}

/* Makes blocks that became final since the last piece the piece to put; false when there are none.
 */
static bool open_piece(struct layer *layer)
{
    if (layer->piece_first < layer->piece_end) {
        return true;
    }
    if (layer->piece_end >= layer->ready) {
        return false;
    }
    layer->piece_first = layer->piece_end;
    layer->piece_end = layer->ready;
    layer->cursor = (struct dmk_plan_cursor){0, layer->piece_first};
    return true;
}

/* The next put of the job; false when nothing is to be put now. */
static bool next_put(struct job *job, struct dmk_plan_put *ret_put, bool *ret_window)
{
    for (;;) {
        const bool window = job->full_at >= job->ticket->n_full_layers;
        uint32_t *at = window ? &job->window_at : &job->full_at;
        const uint32_t n = window ? job->ticket->n_window_layers : job->ticket->n_full_layers;
        struct layer *layer;
        struct dmk_plan_piece piece;

        if (*at >= n) {
            return false;
        }
        layer = window ? &job->window[*at] : &job->full[*at];
        if (open_piece(layer)) {
            piece = (struct dmk_plan_piece){
                .window = window,
                .layer = *at,
                .src_pages = window ? job->src_window : job->src_pages,
                .dst_pages = window ? job->dst_window : job->dst_pages,
                .first = layer->piece_first,
                .end = layer->piece_end,
            };
            if (dmk_plan_next(&job->plan, &piece, &layer->cursor, ret_put)) {
                *ret_window = window;
                return true;
            }
            layer->piece_first = layer->piece_end;
            continue; /* more may have become final meanwhile */
        }
        (*at)++;
    }
}

/* Posts the put; false when the endpoint is lost by it. */
static bool post_put(struct dmk_sender *tx, struct job *job, const struct dmk_plan_put *p,
                     bool window)
{
    struct endpoint *e = job->endpoint;
    const struct dmk_kv_mem *mem =
        p->staged ? tx->conf.stage[p->src_rank] : tx->conf.mem[p->src_rank];
    struct dmk_xfer_mem *full = p->staged ? tx->conf.stage_full_mem[p->src_rank]
                                          : tx->conf.full_mem[p->src_rank],
                        *ring = p->staged ? tx->conf.stage_window_mem[p->src_rank]
                                          : tx->conf.window_mem[p->src_rank];
    const struct dmk_ticket_rank *rank = &job->ticket->ranks[p->dst_rank];
    struct put *put = tx->free_puts;
    const uint8_t *src = (const uint8_t *)(window ? mem->window : mem->full) + p->src_offset;
    const uint64_t dst = (window ? rank->window_base : rank->full_base) + p->dst_offset;
    int r;

    tx->free_puts = put->next_free;
    *put = (struct put){.job = job, .bytes = p->bytes};
    job->n_in_flight++;
    tx->n_in_flight++;
    mark_moving(job);
    tx->stats.n_puts++;
    r = tx->conf.ops->put(e->ep, window ? ring : full, src, p->bytes,
                          window ? e->window_key[p->dst_rank] : e->full_key[p->dst_rank], dst,
                          on_put_done, put);
    if (r < 0) {
        job->n_in_flight--;
        tx->n_in_flight--;
        mark_moving(job);
        put->next_free = tx->free_puts;
        tx->free_puts = put;
        dmk_sender_endpoint_lose(tx, e);
    }
    return r == 0;
}

/* One job's turn; true when it could put more now. */
static bool pump_job(struct dmk_sender *tx, struct job *job)
{
    struct dmk_plan_put put;
    bool window;

    for (uint32_t i = 0; i < PUTS_PER_TURN; i++) {
        if (job->state != DMK_SEND_RUNNING || !dmk_sender_endpoint_works(job->endpoint)) {
            return false;
        }
        if (!tx->free_puts) {
            return true;
        }
        if (!next_put(job, &put, &window)) {
            if (job->finished && job->n_in_flight == 0) {
                start_flush(tx, job);
            }
            return false;
        }
        if (!post_put(tx, job, &put, window)) {
            return false;
        }
    }
    return true;
}

void dmk_sender_pump(struct dmk_sender *tx)
{
    uint32_t idle = 0; /* jobs in a row that had nothing to put */

    if (tx->pumping || tx->stopping) {
        return;
    }
    tx->pumping = true;
    while (idle < tx->conf.max_jobs && tx->free_puts) {
        struct job *job = &tx->jobs[tx->next_job];

        tx->next_job = (tx->next_job + 1) % tx->conf.max_jobs;
        idle = pump_job(tx, job) ? 0 : idle + 1;
    }
    tx->pumping = false;
}
