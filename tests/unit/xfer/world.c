/* See world.h. Time is virtual: a tick is a millisecond and one progress of every living node.
 *
 * Checked at each write: the page is leased to a request whose transfer has not ended, and the
 * writer is the P that was given its ticket. Checked at each READY: every byte of every page.
 * Checked at the end: every request has ended, every page is back, every job is over. */
#include "world.h"
#include "common/base/clock.h"
#include "common/base/rng.h"
#include <stdio.h>
#include <stdlib.h>

enum {
    FULL_LAYERS = 2,
    WINDOW_LAYERS = 2,
    HEADS = 4,
    PAGE_BYTES = 64,
    FULL_PAGES = 24,
    WINDOW_PAGES = 24,
    BUSY_TICKS = 1500, /* disasters may happen */
    ALL_TICKS = 9000,
};

enum request_state { WAITS, RESERVED, CLAIMED, READY, DRAINING, OVER };

struct request {
    enum request_state state;
    uint64_t start_tick, cancel_tick; /* cancel_tick 0 = never */
    uint32_t n_tokens, have;
    uint32_t pages[8], n_pages, ring[DMK_WINDOW_RING_MAX];
    uint32_t p;            /* which P got the ticket */
    uint64_t p_generation; /* of the P node it was given to */
    bool offered, failed, cancelled;
    struct dmk_buf blob;
    uint64_t offer_tick;
    /* P's side */
    bool running, done;
    uint32_t src_pages[8], src_ring[DMK_WINDOW_RING_MAX];
    uint32_t pushed, n_blocks; /* blocks pushed of all layers */
    bool finished;
};

struct rank {
    struct dmk_kv_mem mem;
    struct dmk_xfer_mem *full_reg, *window_reg;
};

struct node {
    struct world *w;
    bool alive;
    uint32_t index;      /* of P */
    uint64_t generation; /* how often it was started */
    uint64_t incarnation;
    uint64_t paused_until;
    struct dmk_xfer *xfer;
    uint32_t n_ranks;
    struct rank ranks[HEADS];
    struct dmk_sender *tx;
    uint32_t full_owner[FULL_PAGES], window_owner[WINDOW_PAGES]; /* request + 1, or 0 */
};

struct word { /* on its way through a router */
    uint64_t due;
    bool quiet; /* else closed */
    struct dmk_id128 cookie;
    uint64_t p_incarnation, d_incarnation;
};

struct world {
    struct world_conf conf;
    struct world_result result;
    const struct dmk_xfer_ops *ops;
    struct dmk_loopback *fabric;
    uint64_t chances, tick, partition_until;
    struct node d, p[WORLD_P];
    struct dmk_receiver *rx;
    struct request requests[WORLD_REQUESTS];
    struct word words[64];
    uint32_t n_words;
    struct dmk_ticket ticket; /* scratch */
    char wrong[600];
};

static uint64_t chance(struct world *w, uint64_t n) /* [0, n) */
{
    return dmk_rng_u64(w->conf.seed, 0x776f726c64, w->chances++) % n;
}

static uint64_t now(const struct world *w)
{
    return (w->tick + 1) * DMK_NS_PER_MS;
}

#define wrong(w, ...)                                                                              \
    do {                                                                                           \
        if (!(w)->wrong[0]) {                                                                      \
            (void)snprintf((w)->wrong, sizeof((w)->wrong), __VA_ARGS__);                           \
        }                                                                                          \
    } while (0)

/* ---- pages ------------------------------------------------------------------------------------
 */

/* What byte i of a page of a request holds. */
static uint8_t byte_of(const struct world *w, uint32_t request, bool window, uint32_t layer,
                       uint32_t head, uint32_t block, uint32_t i)
{
    const uint64_t what = (uint64_t)request << 40 | (uint64_t)window << 32 | layer << 24 |
                          head << 16 | block << 8 | i;

    return (uint8_t)(dmk_rng_u64(w->conf.seed, 1, what) | 1);
}

static uint8_t *page_at(const struct node *n, bool window, uint32_t layer, uint32_t head,
                        uint32_t page)
{
    const uint32_t per = HEADS / n->n_ranks;
    const struct dmk_kv_mem *m = &n->ranks[head / per].mem;

    return window ? (uint8_t *)m->window + dmk_kv_window_offset(&m->layout, layer, head % per, page)
                  : (uint8_t *)m->full + dmk_kv_full_offset(&m->layout, layer, head % per, page);
}

static bool take_pages(struct world *w, uint32_t *owner, uint32_t n_all, uint32_t n, uint32_t who,
                       uint32_t *ret)
{
    const uint32_t start = (uint32_t)chance(w, n_all);
    uint32_t got = 0;

    for (uint32_t i = 0; i < n_all && got < n; i++) {
        const uint32_t page = (start + i) % n_all;

        if (owner[page] == 0) {
            ret[got++] = page;
        }
    }
    if (got < n) {
        return false;
    }
    for (uint32_t i = 0; i < n; i++) {
        owner[ret[i]] = who;
    }
    return true;
}

static void give_pages(struct node *n, uint32_t who)
{
    for (uint32_t i = 0; i < FULL_PAGES; i++) {
        for (uint32_t l = 0; n->full_owner[i] == who && l < FULL_LAYERS; l++) {
            for (uint32_t h = 0; h < HEADS; h++) {
                memset(page_at(n, false, l, h, i), 0xdd, PAGE_BYTES);
            }
        }
        n->full_owner[i] = n->full_owner[i] == who ? 0 : n->full_owner[i];
    }
    for (uint32_t i = 0; i < WINDOW_PAGES; i++) {
        for (uint32_t l = 0; n->window_owner[i] == who && l < WINDOW_LAYERS; l++) {
            for (uint32_t h = 0; h < HEADS; h++) {
                memset(page_at(n, true, l, h, i), 0xdd, PAGE_BYTES);
            }
        }
        n->window_owner[i] = n->window_owner[i] == who ? 0 : n->window_owner[i];
    }
}

/* ---- checks -----------------------------------------------------------------------------------
 */

static void on_write(void *ud, const struct dmk_xfer *writer, void *addr, size_t bytes)
{
    struct world *w = ud;
    const uint8_t *at = addr;

    w->result.n_writes++;
    for (uint32_t r = 0; r < w->d.n_ranks; r++) {
        const struct dmk_kv_mem *m = &w->d.ranks[r].mem;

        for (int window = 0; window < 2; window++) {
            const uint8_t *base = window ? m->window : m->full;
            const uint64_t size =
                window ? dmk_kv_window_bytes(&m->layout) : dmk_kv_full_bytes(&m->layout);
            const uint32_t n_pages = window ? WINDOW_PAGES : FULL_PAGES;
            const uint32_t *owners = window ? w->d.window_owner : w->d.full_owner;

            if (at < base || at + bytes > base + size) {
                continue;
            }
            for (size_t o = 0; o < bytes; o += PAGE_BYTES) {
                const uint32_t page = (uint32_t)((size_t)(at - base) + o) / PAGE_BYTES % n_pages;
                const uint32_t owner = owners[page];
                const struct request *q = owner ? &w->requests[owner - 1] : NULL;

                if (!q) {
                    wrong(w, "a write landed in a free page");
                } else if (q->state != CLAIMED && q->state != DRAINING) {
                    wrong(w, "a write landed in a page of request %u in state %d", owner - 1,
                          q->state);
                } else if (w->p[q->p].generation == q->p_generation && w->p[q->p].alive &&
                           w->p[q->p].xfer != writer) {
                    wrong(w, "a write landed in a page of another P's request");
                } else {
                    w->result.n_late_writes += q->state == DRAINING;
                }
            }
            return;
        }
    }
    wrong(w, "a write landed outside of all pages");
}

static void check_page(struct world *w, uint32_t r, bool window, uint32_t layer, uint32_t block,
                       uint32_t page)
{
    for (uint32_t h = 0; h < HEADS; h++) {
        const uint8_t *at = page_at(&w->d, window, layer, h, page);

        for (uint32_t i = 0; i < PAGE_BYTES; i++) {
            if (at[i] != byte_of(w, r, window, layer, h, block, i)) {
                wrong(w, "request %u is ready but %s layer %u head %u block %u is wrong at byte %u",
                      r, window ? "window" : "full", layer, h, block, i);
                return;
            }
        }
    }
}

static void check_ready(struct world *w, uint32_t r)
{
    const struct request *q = &w->requests[r];
    uint32_t first;
    const uint32_t n = dmk_kv_window_blocks(q->n_tokens, &first);

    for (uint32_t l = 0; l < FULL_LAYERS; l++) {
        for (uint32_t i = 0; i < q->n_pages; i++) {
            check_page(w, r, false, l, q->have / DMK_PAGE_TOKENS + i, q->pages[i]);
        }
    }
    for (uint32_t l = 0; l < WINDOW_LAYERS; l++) {
        for (uint32_t b = first; b < first + n; b++) {
            check_page(w, r, true, l, b, q->ring[b % DMK_WINDOW_RING]);
        }
    }
}

/* ---- D ----------------------------------------------------------------------------------------
 */

static void on_rx_claimed(void *ud, uint64_t key)
{
    struct world *w = ud;

    if (w->requests[key].state != RESERVED) {
        wrong(w, "request %u claimed twice", (unsigned)key);
    }
    w->requests[key].state = CLAIMED;
}

static void on_rx_ready(void *ud, uint64_t key, uint64_t bytes, uint64_t ns)
{
    struct world *w = ud;
    struct request *q = &w->requests[key];

    (void)bytes;
    (void)ns;
    if (q->state != CLAIMED) {
        wrong(w, "request %u ready in state %d", (unsigned)key, q->state);
    }
    q->state = READY;
    w->result.n_ready++;
    check_ready(w, (uint32_t)key);
}

static void on_rx_failed(void *ud, uint64_t key, enum dmk_receive_failure why)
{
    struct world *w = ud;
    struct request *q = &w->requests[key];

    (void)why;
    if (q->failed || q->cancelled || q->state == READY || q->state == OVER) {
        wrong(w, "request %u failed in state %d", (unsigned)key, q->state);
    }
    q->failed = true;
    q->state = DRAINING;
    w->result.n_failed++;
}

static void on_rx_freed(void *ud, uint64_t key)
{
    struct world *w = ud;
    struct request *q = &w->requests[key];

    if (q->state == READY || q->state == OVER || (!q->failed && !q->cancelled)) {
        wrong(w, "request %u freed in state %d", (unsigned)key, q->state);
    }
    q->state = OVER;
    w->result.n_freed++;
    give_pages(&w->d, (uint32_t)key + 1);
}

static void add_word(struct world *w, struct word word)
{
    word.due = w->tick + chance(w, 30);
    if (w->n_words < 64 && (!w->conf.faults || chance(w, 8) > 0)) {
        w->words[w->n_words++] = word;
    }
}

static void on_rx_quiet_ask(void *ud, struct dmk_id128 cookie, uint64_t p_incarnation)
{
    struct world *w = ud;

    add_word(w, (struct word){.quiet = true,
                              .cookie = cookie,
                              .p_incarnation = p_incarnation,
                              .d_incarnation = w->d.incarnation});
}

static void on_d_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct node *n = ud;

    if (!dmk_receiver_message(n->w->rx, ep, message, now(n->w))) {
        wrong(n->w, "D did not understand a message");
    }
}

static void on_d_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    struct node *n = ud;

    (void)status;
    dmk_receiver_ep_closed(n->w->rx, ep, now(n->w));
}

/* ---- P ----------------------------------------------------------------------------------------
 */

static void on_tx_failed(void *ud, uint64_t job, int status, const char *why)
{
    struct node *n = ud;

    (void)status;
    (void)why;
    /* The router cancels the ticket, usually. */
    if (chance(n->w, 4) > 0 && !n->w->requests[job].cancelled) {
        n->w->requests[job].cancel_tick = n->w->tick + 1 + chance(n->w, 40);
    }
}

static void on_tx_done(void *ud, uint64_t job, bool ok, uint64_t bytes, uint64_t ns)
{
    struct node *n = ud;
    struct request *q = &n->w->requests[job];

    (void)bytes;
    (void)ns;
    if (q->done || !q->running) {
        wrong(n->w, "job %u done twice", (unsigned)job);
    }
    q->done = true;
    q->running = false;
    n->w->result.n_done_ok += ok;
    give_pages(n, (uint32_t)job + 1);
}

static void on_tx_closed_word(void *ud, struct dmk_id128 cookie, uint64_t d_incarnation)
{
    struct node *n = ud;

    add_word(n->w, (struct word){.cookie = cookie, .d_incarnation = d_incarnation});
}

static void on_p_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct node *n = ud;

    if (!dmk_sender_message(n->tx, ep, message, now(n->w))) {
        wrong(n->w, "P did not understand a message");
    }
}

static void on_p_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    struct node *n = ud;

    (void)status;
    dmk_sender_ep_closed(n->tx, ep, now(n->w));
}

static void offer(struct world *w, uint32_t r)
{
    struct request *q = &w->requests[r];
    struct node *n = &w->p[q->p];
    struct dmk_error err;

    q->offered = true;
    if (!n->alive || q->cancelled) {
        return;
    }
    if (dmk_ticket_decode(dmk_buf_bytes(&q->blob), &w->ticket, &err) < 0) {
        wrong(w, "%s", err.text);
        return;
    }
    q->n_blocks = dmk_kv_pages_for(q->n_tokens);
    if (!take_pages(w, n->full_owner, FULL_PAGES, q->n_blocks, r + 1, q->src_pages) ||
        !take_pages(w, n->window_owner, WINDOW_PAGES, DMK_WINDOW_RING, r + 1, q->src_ring)) {
        give_pages(n, r + 1);
        q->offered = false; /* waits for its turn */
        q->offer_tick = w->tick + 5;
        return;
    }
    q->p_generation = n->generation;
    if (dmk_sender_claim(n->tx, r, &w->ticket, now(w), &err) < 0) {
        give_pages(n, r + 1);
        return;
    }
    q->running = true;
}

static void fill(struct world *w, struct node *n, uint32_t r, bool window, uint32_t layer,
                 uint32_t block, uint32_t page)
{
    for (uint32_t h = 0; h < HEADS; h++) {
        uint8_t *at = page_at(n, window, layer, h, page);

        for (uint32_t i = 0; i < PAGE_BYTES; i++) {
            at[i] = byte_of(w, r, window, layer, h, block, i);
        }
    }
}

/* A chunk is computed: its blocks of each layer become final. */
static void compute(struct world *w, uint32_t r)
{
    struct request *q = &w->requests[r];
    struct node *p = &w->p[q->p];
    uint32_t first;
    const uint32_t n = dmk_kv_window_blocks(q->n_tokens, &first);
    uint32_t end = q->pushed + 1 + (uint32_t)chance(w, 3);

    end = end < q->n_blocks ? end : q->n_blocks;
    for (uint32_t l = 0; l < FULL_LAYERS; l++) {
        for (uint32_t b = q->pushed; b < end; b++) {
            fill(w, p, r, false, l, b, q->src_pages[b]);
        }
        dmk_sender_push_full(p->tx, r, l, q->src_pages, q->pushed, end);
    }
    q->pushed = end;
    if (end < q->n_blocks) {
        return;
    }
    for (uint32_t l = 0; l < WINDOW_LAYERS; l++) {
        for (uint32_t b = first; b < first + n; b++) {
            fill(w, p, r, true, l, b, q->src_ring[b % DMK_WINDOW_RING]);
        }
        dmk_sender_push_window(p->tx, r, l, q->src_ring, DMK_WINDOW_RING);
    }
    q->finished = true;
    dmk_sender_finish(p->tx, r);
}

/* ---- nodes ------------------------------------------------------------------------------------
 */

static void open_node(struct world *w, struct node *n, const char *name, uint32_t n_ranks,
                      const struct dmk_xfer_events *events)
{
    const struct dmk_xfer_conf conf = {.bind = name, .fabric = w->fabric, .events = *events};

    n->w = w;
    n->alive = true;
    n->n_ranks = n_ranks;
    n->generation++;
    n->incarnation = 1000 * (n->index + 1) + n->generation;
    if (w->ops->open(&conf, &n->xfer, NULL) < 0) {
        abort();
    }
    memset(n->full_owner, 0, sizeof(n->full_owner));
    memset(n->window_owner, 0, sizeof(n->window_owner));
    for (uint32_t r = 0; r < n_ranks; r++) {
        struct rank *k = &n->ranks[r];

        k->mem.layout = (struct dmk_kv_layout){.n_full_layers = FULL_LAYERS,
                                               .n_window_layers = WINDOW_LAYERS,
                                               .n_kv_heads = HEADS,
                                               .kv_head_first = r * (HEADS / n_ranks),
                                               .n_local_heads = HEADS / n_ranks,
                                               .page_bytes = PAGE_BYTES,
                                               .n_full_pages = FULL_PAGES,
                                               .n_window_pages = WINDOW_PAGES};
        k->mem.full = calloc(1, dmk_kv_full_bytes(&k->mem.layout));
        k->mem.window = calloc(1, dmk_kv_window_bytes(&k->mem.layout));
        if (w->ops->mem_register(n->xfer, k->mem.full, dmk_kv_full_bytes(&k->mem.layout),
                                 DMK_MEM_KIND_HOST, &k->full_reg, NULL) < 0 ||
            w->ops->mem_register(n->xfer, k->mem.window, dmk_kv_window_bytes(&k->mem.layout),
                                 DMK_MEM_KIND_HOST, &k->window_reg, NULL) < 0) {
            abort();
        }
    }
}

static void close_node(struct world *w, struct node *n)
{
    for (uint32_t r = 0; r < n->n_ranks; r++) {
        struct rank *k = &n->ranks[r];

        w->ops->mem_unregister(n->xfer, &k->full_reg);
        w->ops->mem_unregister(n->xfer, &k->window_reg);
    }
    w->ops->close(n->xfer);
    for (uint32_t r = 0; r < n->n_ranks; r++) {
        free(n->ranks[r].mem.full);
        free(n->ranks[r].mem.window);
    }
    n->xfer = NULL;
    n->alive = false;
}

static void start_p(struct world *w, uint32_t i)
{
    struct node *n = &w->p[i];
    char name[8];
    struct dmk_sender_conf conf;

    n->index = i + 1;
    (void)snprintf(name, sizeof(name), "p%u", i);
    open_node(w, n, name, 1u << chance(w, 3),
              &(struct dmk_xfer_events){on_p_message, on_p_closed, n});
    conf =
        (struct dmk_sender_conf){.ops = w->ops,
                                 .xfer = n->xfer,
                                 .incarnation = n->incarnation,
                                 .worker_id = name,
                                 .model_id = {1, 2},
                                 .numerics = "test",
                                 .transfer_budget_ns = 800 * DMK_NS_PER_MS,
                                 .resend_every_ns = 50 * DMK_NS_PER_MS,
                                 .give_up_ns = 400 * DMK_NS_PER_MS,
                                 .retire_ns = 100 * DMK_NS_PER_MS,
                                 .max_put_bytes = PAGE_BYTES * (1 + chance(w, 4)),
                                 .max_jobs = WORLD_REQUESTS,
                                 .max_endpoints = 4,
                                 .max_puts_in_flight = 1 + (uint32_t)chance(w, 12),
                                 .n_ranks = n->n_ranks,
                                 .events = {NULL, on_tx_failed, on_tx_done, on_tx_closed_word, n}};
    for (uint32_t r = 0; r < n->n_ranks; r++) {
        conf.mem[r] = &n->ranks[r].mem;
        conf.full_mem[r] = n->ranks[r].full_reg;
        conf.window_mem[r] = n->ranks[r].window_reg;
    }
    if (dmk_sender_new(&conf, &n->tx) < 0) {
        abort();
    }
}

static void stop_p(struct world *w, uint32_t i)
{
    struct node *n = &w->p[i];

    for (uint32_t r = 0; r < WORLD_REQUESTS; r++) {
        struct request *q = &w->requests[r];

        if (q->p == i && q->running) {
            q->running = false;
            q->done = true;
        }
    }
    w->result.n_puts += dmk_sender_stats(n->tx).n_puts;
    dmk_sender_free(&n->tx);
    close_node(w, n);
}

/* ---- what the router does ---------------------------------------------------------------------
 */

static void reserve(struct world *w, uint32_t r)
{
    struct request *q = &w->requests[r];
    struct dmk_ticket *t = &w->ticket;
    struct dmk_error err;

    memset(t, 0, sizeof(*t));
    t->n_pages = dmk_kv_pages_for(q->n_tokens) - q->have / DMK_PAGE_TOKENS;
    q->n_pages = t->n_pages;
    if (!take_pages(w, w->d.full_owner, FULL_PAGES, t->n_pages, r + 1, q->pages) ||
        !take_pages(w, w->d.window_owner, WINDOW_PAGES, DMK_WINDOW_RING, r + 1, q->ring)) {
        give_pages(&w->d, r + 1);
        return; /* again at the next tick */
    }
    t->model_id = (struct dmk_id128){1, 2};
    (void)snprintf(t->numerics, sizeof(t->numerics), "test");
    t->n_full_layers = FULL_LAYERS;
    t->n_window_layers = WINDOW_LAYERS;
    t->n_kv_heads = HEADS;
    t->page_bytes = PAGE_BYTES;
    t->have = q->have;
    t->n_tokens = q->n_tokens;
    memcpy(t->pages, q->pages, t->n_pages * sizeof(q->pages[0]));
    memcpy(t->ring, q->ring, sizeof(q->ring));
    t->n_ring = DMK_WINDOW_RING;
    t->n_ranks = w->d.n_ranks;
    for (uint32_t i = 0; i < t->n_ranks; i++) {
        struct rank *k = &w->d.ranks[i];
        struct dmk_ticket_rank *tr = &t->ranks[i];

        tr->kv_head_first = k->mem.layout.kv_head_first;
        tr->n_kv_heads = k->mem.layout.n_local_heads;
        tr->n_full_pages = FULL_PAGES;
        tr->n_window_pages = WINDOW_PAGES;
        tr->full_base = (uintptr_t)k->mem.full;
        tr->window_base = (uintptr_t)k->mem.window;
        (void)w->ops->mem_pack(w->d.xfer, k->full_reg, tr->full_key, &tr->full_key_len);
        (void)w->ops->mem_pack(w->d.xfer, k->window_reg, tr->window_key, &tr->window_key_len);
    }
    if (dmk_receiver_reserve(w->rx, r, t->n_pages + DMK_WINDOW_RING, now(w), t, &err) < 0) {
        wrong(w, "reserve: %s", err.text);
        return;
    }
    dmk_ticket_encode(t, &q->blob);
    q->state = RESERVED;
    q->offer_tick = w->tick + chance(w, 40);
}

static void cancel(struct world *w, uint32_t r)
{
    struct request *q = &w->requests[r];
    const bool known = q->state != WAITS && q->state != OVER;

    if (!q->cancelled) {
        q->cancelled = true;
        w->result.n_cancelled += known;
        if (q->state == WAITS) {
            q->state = OVER;
        } else if (q->state == READY) {
            q->state = OVER; /* the sequence ends; its pages are the owner's */
            dmk_receiver_cancel(w->rx, r, now(w));
            give_pages(&w->d, r + 1);
        } else if (known) {
            q->state = q->state == CLAIMED ? DRAINING : q->state;
            dmk_receiver_cancel(w->rx, r, now(w));
        }
    }
    if (w->p[q->p].alive && q->running) {
        dmk_sender_cancel(w->p[q->p].tx, r);
    }
}

static void relay(struct world *w)
{
    for (uint32_t i = 0; i < w->n_words; i++) {
        const struct word word = w->words[i];

        if (word.due > w->tick) {
            continue;
        }
        w->words[i--] = w->words[--w->n_words];
        if (!word.quiet) {
            dmk_receiver_closed_word(w->rx, word.cookie, now(w));
            continue;
        }
        for (uint32_t p = 0; p < WORLD_P; p++) {
            if (w->p[p].alive && w->p[p].incarnation == word.p_incarnation) {
                dmk_sender_quiet_ask(w->p[p].tx, word.cookie, word.p_incarnation,
                                     word.d_incarnation);
            }
        }
    }
}

static void disaster(struct world *w)
{
    const uint32_t p = (uint32_t)chance(w, WORLD_P);
    struct node *n = &w->p[p];

    switch (chance(w, 6)) {
    case 0:
        dmk_loopback_cut(w->fabric, w->d.xfer, n->xfer);
        break;
    case 1:
        dmk_loopback_partition(w->fabric, w->d.xfer, n->xfer, true);
        w->partition_until = w->tick + 1 + chance(w, 900);
        break;
    case 2:
        n->paused_until = w->tick + chance(w, 900);
        break;
    case 3:
        w->d.paused_until = w->tick + chance(w, 600);
        break;
    case 4:
        w->requests[chance(w, WORLD_REQUESTS)].cancel_tick = w->tick;
        break;
    case 5:
        w->result.n_kills++;
        dmk_loopback_kill(w->fabric, n->xfer, (uint32_t)chance(w, 300));
        stop_p(w, p);
        start_p(w, p);
        break;
    }
}

static void heal(struct world *w)
{
    for (uint32_t p = 0; p < WORLD_P; p++) {
        dmk_loopback_partition(w->fabric, w->d.xfer, w->p[p].xfer, false);
    }
    w->partition_until = 0;
}

static bool is_over(const struct world *w)
{
    for (uint32_t r = 0; r < WORLD_REQUESTS; r++) {
        if (w->requests[r].state != OVER || w->requests[r].running) {
            return false;
        }
    }
    return true;
}

static void step(struct world *w)
{
    const bool busy = w->tick < BUSY_TICKS;

    if (w->conf.disasters && busy && chance(w, 250) == 0) {
        disaster(w);
    }
    if (w->partition_until && (!busy || w->tick >= w->partition_until)) {
        heal(w);
    }
    for (uint32_t r = 0; r < WORLD_REQUESTS; r++) {
        struct request *q = &w->requests[r];

        if (q->state == WAITS && w->tick >= q->start_tick && w->tick >= w->d.paused_until) {
            reserve(w, r);
        }
        if (q->cancel_tick && w->tick >= q->cancel_tick && w->tick >= w->d.paused_until) {
            q->cancel_tick = 0;
            cancel(w, r);
        }
        if (q->state == RESERVED && !q->offered && w->tick >= q->offer_tick &&
            w->tick >= w->p[q->p].paused_until) {
            offer(w, r);
        }
        if (q->running && !q->finished && w->tick >= w->p[q->p].paused_until &&
            chance(w, 12) == 0) {
            compute(w, r);
        }
        if (q->state == READY && chance(w, 60) == 0) {
            q->state = OVER;
            dmk_receiver_finish(w->rx, r);
            give_pages(&w->d, r + 1);
        }
    }
    relay(w);
    if (w->tick >= w->d.paused_until) {
        (void)w->ops->progress(w->d.xfer);
        if (w->tick % 10 == 0) {
            dmk_receiver_tick(w->rx, now(w));
        }
    }
    for (uint32_t p = 0; p < WORLD_P; p++) {
        if (w->tick >= w->p[p].paused_until) {
            (void)w->ops->progress(w->p[p].xfer);
            if (w->tick % 10 == 5) {
                dmk_sender_tick(w->p[p].tx, now(w));
            }
        }
    }
}

static void start_d(struct world *w)
{
    const struct dmk_xfer_events events = {on_d_message, on_d_closed, &w->d};
    struct dmk_receiver_conf conf;

    open_node(w, &w->d, "d", 1u << chance(w, 3), &events);
    conf = (struct dmk_receiver_conf){
        .ops = w->ops,
        .xfer = w->d.xfer,
        .incarnation = w->d.incarnation,
        .expiry_ns = 300 * DMK_NS_PER_MS,
        .transfer_budget_ns = 900 * DMK_NS_PER_MS,
        .quiet_ask_every_ns = 100 * DMK_NS_PER_MS,
        .max_tickets = WORLD_REQUESTS,
        .max_draining_pages = w->conf.disasters ? 12 : 100,
        .max_endpoints = 16,
        .events = {on_rx_claimed, on_rx_ready, on_rx_failed, on_rx_freed, on_rx_quiet_ask, w}};
    if (dmk_receiver_new(&conf, &w->rx) < 0) {
        abort();
    }
}

static void check_end(struct world *w)
{
    const struct dmk_receiver_stats s = dmk_receiver_stats(w->rx);

    for (uint32_t r = 0; r < WORLD_REQUESTS; r++) {
        if (w->requests[r].state != OVER) {
            wrong(w, "request %u has not ended, state %d", r, w->requests[r].state);
        } else if (w->requests[r].running) {
            wrong(w, "job %u has not ended", r);
        }
    }
    for (uint32_t i = 0; i < FULL_PAGES; i++) {
        if (w->d.full_owner[i]) {
            wrong(w, "full page %u is not back", i);
        }
    }
    if (s.n_unclaimed + s.n_claimed + s.n_draining + s.n_ready + s.draining_pages > 0) {
        wrong(w, "tickets are left: %u unclaimed, %u claimed, %u draining, %u ready", s.n_unclaimed,
              s.n_claimed, s.n_draining, s.n_ready);
    }
    for (uint32_t p = 0; p < WORLD_P; p++) {
        if (dmk_sender_n_jobs(w->p[p].tx) > 0 ||
            dmk_sender_stats(w->p[p].tx).n_puts_in_flight > 0) {
            wrong(w, "P %u has jobs or puts left", p);
        }
    }
}

static void plan_requests(struct world *w)
{
    for (uint32_t r = 0; r < WORLD_REQUESTS; r++) {
        struct request *q = &w->requests[r];

        q->n_tokens = 1 + (uint32_t)chance(w, 7 * DMK_PAGE_TOKENS);
        q->have = (uint32_t)chance(w, (q->n_tokens - 1) / DMK_PAGE_TOKENS + 1) * DMK_PAGE_TOKENS;
        q->start_tick = chance(w, 400);
        q->p = (uint32_t)chance(w, WORLD_P);
        if (w->conf.disasters && chance(w, 4) == 0) {
            q->cancel_tick = q->start_tick + 1 + chance(w, 500);
        }
        dmk_buf_init(&q->blob, 0);
    }
}

const char *world_run(const struct world_conf *conf, struct world_result *ret)
{
    static char wrong_text[600];
    struct world *w = calloc(1, sizeof(*w));
    struct dmk_loopback_conf fabric = {
        .seed = conf->seed, .lane = conf->lane, .on_write = on_write, .ud = w};

    w->conf = *conf;
    w->ops = dmk_xfer_find("loopback");
    if (conf->faults) {
        fabric.faults = (struct dmk_loopback_faults){
            .max_delay = (uint32_t)chance(w, 40),
            .drop = (uint32_t)chance(w, 2) * 20,
            .duplicate = (uint32_t)chance(w, 2) * 50,
            .reorder = (uint32_t)chance(w, 2) * 50,
            .late = (uint32_t)chance(w, 300),
            .late_steps = 1500,
            .silent_death = conf->lane == DMK_LANE_DIRECT && chance(w, 2) == 0};
    }
    if (dmk_loopback_new(&fabric, &w->fabric) < 0) {
        abort();
    }
    start_d(w);
    for (uint32_t p = 0; p < WORLD_P; p++) {
        start_p(w, p);
    }
    plan_requests(w);
    for (w->tick = 0; w->tick < ALL_TICKS && !w->wrong[0]; w->tick++) {
        step(w);
        if (w->tick > BUSY_TICKS / 2 && is_over(w)) {
            break;
        }
    }
    check_end(w);
    for (uint32_t p = 0; p < WORLD_P; p++) {
        stop_p(w, p);
    }
    dmk_receiver_free(&w->rx);
    close_node(w, &w->d);
    dmk_loopback_free(&w->fabric);
    for (uint32_t r = 0; r < WORLD_REQUESTS; r++) {
        dmk_buf_fini(&w->requests[r].blob);
    }
    *ret = w->result;
    memcpy(wrong_text, w->wrong, sizeof(wrong_text));
    free(w);
    return wrong_text[0] ? wrong_text : NULL;
}
