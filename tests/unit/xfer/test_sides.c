/* Receiver and sender one at a time, against a peer that the test plays by hand over the loopback: what a
 * well-behaved other side never does. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include "common/base/clock.h"
#include "common/xfer/loopback.h"
#include "common/xfer/message.h"
#include "common/xfer/receiver.h"
#include "common/xfer/sender.h"

#define MS DMK_NS_PER_MS

enum { PAGE_BYTES = 64, PAGES = 8 };

/* A node played by hand: what came to it last. */
struct hand {
    struct dmk_xfer *x;
    struct dmk_xfer_ep *ep;
    struct dmk_message last;
    uint32_t n_messages, n_closed;
};

struct stage {
    struct dmk_loopback *fabric;
    const struct dmk_xfer_ops *ops;
    struct dmk_xfer *x; /* the side under test */
    struct dmk_receiver *rx;
    struct dmk_sender *tx;
    struct hand p, p2, d;
    uint64_t now;
    uint8_t memory[4096], theirs[4096];
    struct dmk_kv_mem mem;
    struct dmk_xfer_mem *reg, *their_reg;
    /* what the owner heard */
    uint32_t n_claimed, n_ready, n_failed, n_freed, n_asks, n_done, n_done_ok, n_closed_words;
    int why;
    char text[200];
};

static struct dmk_ticket ticket;

/* ---- hands ------------------------------------------------------------------------------------ */

static void on_hand_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct hand *h = ud;

    h->ep = ep;
    h->n_messages++;
    assert_int_equal(dmk_message_decode(message, &h->last), 0);
}

static void on_hand_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    struct hand *h = ud;

    (void)ep;
    (void)status;
    h->n_closed++;
}

static void open_hand(struct stage *g, struct hand *h, const char *name)
{
    const struct dmk_xfer_conf conf = {
        .bind = name, .fabric = g->fabric, .events = {on_hand_message, on_hand_closed, h}};

    assert_int_equal(g->ops->open(&conf, &h->x, NULL), 0);
}

static void hand_connect(struct stage *g, struct hand *h)
{
    uint8_t address[DMK_XFER_ADDRESS_MAX];
    size_t len;

    assert_int_equal(g->ops->address(g->x, address, &len), 0);
    assert_int_equal(g->ops->ep_connect(h->x, (struct dmk_bytes){address, len}, &h->ep, NULL), 0);
}

static void hand_send(struct stage *g, struct hand *h, const struct dmk_message *m)
{
    uint8_t raw[DMK_MESSAGE_MAX_BYTES];
    const struct dmk_bytes bytes = {raw, dmk_message_encode(m, raw)};

    assert_int_equal(g->ops->send(h->ep, bytes), 0);
}

static void turn(struct stage *g)
{
    for (int i = 0; i < 8; i++) {
        struct dmk_xfer *all[] = {g->x, g->p.x, g->p2.x, g->d.x};

        for (int k = 0; k < 4; k++) {
            if (all[k]) {
                (void)g->ops->progress(all[k]);
            }
        }
    }
}

static void pass(struct stage *g, uint64_t ns)
{
    g->now += ns;
    if (g->rx) {
        dmk_receiver_tick(g->rx, g->now);
    }
    if (g->tx) {
        dmk_sender_tick(g->tx, g->now);
    }
    turn(g);
}

/* ---- a receiver under test -------------------------------------------------------------------- */

static void on_claimed(void *ud, uint64_t key)
{
    (void)key;
    ((struct stage *)ud)->n_claimed++;
}

static void on_ready(void *ud, uint64_t key, uint64_t bytes, uint64_t ns)
{
    (void)key;
    (void)bytes;
    (void)ns;
    ((struct stage *)ud)->n_ready++;
}

static void on_rx_failed(void *ud, uint64_t key, enum dmk_receive_failure why)
{
    (void)key;
    ((struct stage *)ud)->n_failed++;
    ((struct stage *)ud)->why = (int)why;
}

static void on_freed(void *ud, uint64_t key)
{
    (void)key;
    ((struct stage *)ud)->n_freed++;
}

static void on_quiet_ask(void *ud, struct dmk_id128 cookie, uint64_t p_incarnation)
{
    struct stage *g = ud;

    g->n_asks++;
    assert_true(dmk_id128_equal(cookie, ticket.cookie));
    assert_int_equal(p_incarnation, 50);
}

static void on_rx_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct stage *g = ud;

    (void)dmk_receiver_message(g->rx, ep, message, g->now);
}

static void on_rx_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    struct stage *g = ud;

    (void)status;
    dmk_receiver_ep_closed(g->rx, ep, g->now);
}

static void reserve(struct stage *g, uint64_t key)
{
    struct dmk_error err;

    memset(&ticket, 0, sizeof(ticket));
    ticket.model_id = (struct dmk_id128){1, 2};
    (void)snprintf(ticket.numerics, sizeof(ticket.numerics), "test");
    ticket.n_full_layers = 1;
    ticket.n_kv_heads = 1;
    ticket.page_bytes = PAGE_BYTES;
    ticket.n_tokens = 100;
    ticket.n_pages = 2;
    ticket.pages[0] = 3;
    ticket.pages[1] = 4;
    ticket.n_ranks = 1;
    ticket.ranks[0] =
        (struct dmk_ticket_rank){.n_kv_heads = 1, .n_full_pages = PAGES, .full_key_len = 24};
    assert_int_equal(dmk_receiver_reserve(g->rx, key, 2, g->now, &ticket, &err), 0);
}

static struct dmk_message message_of(enum dmk_message_type type, uint64_t p_incarnation)
{
    return (struct dmk_message){.type = type,
                                .from_incarnation = p_incarnation,
                                .to_incarnation = ticket.d_incarnation,
                                .worker = p_incarnation > 50 ? 78 : 77,
                                .cookie = ticket.cookie,
                                .generation = ticket.generation};
}

static void send_claim(struct stage *g, struct hand *h, uint64_t p_incarnation)
{
    struct dmk_message m = message_of(DMK_MESSAGE_CLAIM, p_incarnation);

    assert_int_equal(g->ops->watch_self(h->x, m.watch, &m.watch_len), 0);
    hand_send(g, h, &m);
    turn(g);
}

static void send_terminal(struct stage *g, struct hand *h, uint64_t p_incarnation, bool ok,
                          uint64_t bytes)
{
    struct dmk_message m = message_of(DMK_MESSAGE_TERMINAL, p_incarnation);

    m.ok = ok;
    m.bytes = bytes;
    hand_send(g, h, &m);
    turn(g);
}

static struct stage *open_stage(enum dmk_xfer_lane lane)
{
    struct stage *g = calloc(1, sizeof(*g));
    const struct dmk_loopback_conf conf = {.seed = 1, .lane = lane};

    assert_non_null(g);
    g->ops = dmk_xfer_find("loopback");
    g->now = DMK_NS_PER_S;
    assert_int_equal(dmk_loopback_new(&conf, &g->fabric), 0);
    return g;
}

static struct stage *open_receiver(enum dmk_xfer_lane lane)
{
    struct stage *g = open_stage(lane);
    const struct dmk_xfer_conf conf = {
        .bind = "d", .fabric = g->fabric, .events = {on_rx_message, on_rx_closed, g}};
    struct dmk_receiver_conf rx = {
        .ops = g->ops,
        .incarnation = 900,
        .expiry_ns = 100 * MS,
        .transfer_budget_ns = 500 * MS,
        .quiet_ask_every_ns = 50 * MS,
        .max_tickets = 4,
        .max_draining_pages = 3,
        .events = {on_claimed, on_ready, on_rx_failed, on_freed, on_quiet_ask, g}};

    assert_int_equal(g->ops->open(&conf, &g->x, NULL), 0);
    rx.xfer = g->x;
    assert_int_equal(dmk_receiver_new(&rx, &g->rx), 0);
    open_hand(g, &g->p, "p");
    open_hand(g, &g->p2, "p2");
    hand_connect(g, &g->p);
    hand_connect(g, &g->p2);
    return g;
}

static void close_stage(struct stage *g)
{
    dmk_receiver_free(&g->rx);
    dmk_sender_free(&g->tx);
    g->ops->close(g->x);
    if (g->p.x) {
        g->ops->close(g->p.x);
        g->ops->close(g->p2.x);
    }
    if (g->d.x) {
        g->ops->close(g->d.x);
    }
    dmk_loopback_free(&g->fabric);
    free(g);
}

static void test_claimed_once(void **state)
{
    struct stage *g = open_receiver(DMK_LANE_EMULATED);

    (void)state;
    reserve(g, 1);
    send_claim(g, &g->p, 50);
    assert_int_equal(g->p.last.type, DMK_MESSAGE_REPLY);
    assert_int_equal(g->p.last.reply, DMK_REPLY_YES);
    assert_int_equal(g->p.last.from_incarnation, 900);
    send_claim(g, &g->p2, 51);
    assert_int_equal(g->p2.last.reply, DMK_REPLY_CLAIMED);
    send_claim(g, &g->p, 50);
    assert_int_equal(g->p.last.reply, DMK_REPLY_CLAIMED);
    assert_int_equal(g->n_claimed, 1);
    /* Who has not claimed it says nothing about it. */
    send_terminal(g, &g->p2, 51, true, ticket.bytes_expected);
    assert_int_equal(g->p2.n_messages, 1);
    assert_int_equal(g->n_ready, 0);
    send_terminal(g, &g->p, 50, true, ticket.bytes_expected);
    assert_int_equal(g->p.last.answer, DMK_ANSWER_ACCEPTED);
    send_terminal(g, &g->p, 50, true, ticket.bytes_expected);
    assert_int_equal(g->p.last.answer, DMK_ANSWER_ALREADY);
    dmk_receiver_finish(g->rx, 1);
    send_terminal(g, &g->p, 50, true, ticket.bytes_expected);
    assert_int_equal(g->p.last.answer, DMK_ANSWER_STALE);
    assert_true(g->n_ready == 1 && g->n_freed == 0 && g->n_failed == 0);
    close_stage(g);
}

static void test_short_is_a_failure(void **state)
{
    struct stage *g = open_receiver(DMK_LANE_EMULATED);

    (void)state;
    for (int more = -1; more <= 1; more += 2) {
        reserve(g, 1);
        send_claim(g, &g->p, 50);
        send_terminal(g, &g->p, 50, true, ticket.bytes_expected + (uint64_t)(int64_t)more);
        assert_int_equal(g->p.last.answer, DMK_ANSWER_FAILED);
    }
    assert_true(g->n_ready == 0 && g->n_failed == 2 && g->n_freed == 2);
    assert_int_equal(g->why, DMK_RECEIVE_SHORT);
    close_stage(g);
}

static void test_incarnations(void **state)
{
    struct stage *g = open_receiver(DMK_LANE_EMULATED);

    (void)state;
    reserve(g, 1);
    ticket.d_incarnation = 899; /* a ticket of an older start */
    send_claim(g, &g->p, 50);
    assert_int_equal(g->p.last.reply, DMK_REPLY_INCARNATION);
    send_terminal(g, &g->p, 50, true, 1);
    assert_int_equal(g->p.last.answer, DMK_ANSWER_STALE);
    ticket.d_incarnation = 900;
    ticket.generation++; /* of another use of the pages */
    send_claim(g, &g->p, 50);
    assert_int_equal(g->p.last.reply, DMK_REPLY_UNKNOWN);
    ticket.generation--;
    send_claim(g, &g->p, 49); /* that worker was seen with 50 */
    assert_int_equal(g->p.last.reply, DMK_REPLY_INCARNATION);
    send_claim(g, &g->p, 50);
    assert_int_equal(g->p.last.reply, DMK_REPLY_YES);
    g->p.n_messages = 0;
    send_terminal(g, &g->p, 49, false, 0); /* of an older start: not heard */
    assert_int_equal(g->p.n_messages, 0);
    ticket.generation++;
    send_terminal(g, &g->p, 50, true, ticket.bytes_expected);
    assert_int_equal(g->p.last.answer, DMK_ANSWER_STALE);
    ticket.generation--;
    ticket.cookie.lo ^= 1;
    send_terminal(g, &g->p, 50, true, ticket.bytes_expected);
    assert_int_equal(g->p.last.answer, DMK_ANSWER_STALE);
    assert_true(g->n_ready == 0 && g->n_freed == 0);
    close_stage(g);
}

/* A worker whose clock was set back before its restart is not refused for as long as it was set back. */
static void test_a_clock_set_back(void **state)
{
    struct stage *g = open_receiver(DMK_LANE_EMULATED);

    (void)state;
    reserve(g, 1);
    send_claim(g, &g->p, 50);
    assert_int_equal(g->p.last.reply, DMK_REPLY_YES);
    send_terminal(g, &g->p, 50, false, 0);
    for (int i = 0; i < 4; i++) {
        pass(g, 15 * DMK_NS_PER_S - 10 * MS);
        reserve(g, 2 + (uint64_t)i);
        send_claim(g, &g->p, 40); /* to ask again does not make it wait longer */
        assert_int_equal(g->p.last.reply, DMK_REPLY_INCARNATION);
    }
    pass(g, 50 * MS);
    send_claim(g, &g->p, 40);
    assert_int_equal(g->p.last.reply, DMK_REPLY_YES);
    close_stage(g);
}

static void test_expiry_and_deadline(void **state)
{
    struct stage *g = open_receiver(DMK_LANE_EMULATED);

    (void)state;
    reserve(g, 1);
    pass(g, 99 * MS);
    assert_int_equal(g->n_failed, 0);
    pass(g, 1 * MS);
    assert_true(g->n_failed == 1 && g->n_freed == 1 && g->why == DMK_RECEIVE_EXPIRED);
    send_claim(g, &g->p, 50);
    assert_int_equal(g->p.last.reply, DMK_REPLY_UNKNOWN);

    reserve(g, 2);
    send_claim(g, &g->p, 50);
    pass(g, 499 * MS);
    assert_int_equal(g->n_failed, 1); /* expiry ended at the claim */
    pass(g, 1 * MS);
    assert_true(g->n_failed == 2 && g->n_freed == 1 && g->why == DMK_RECEIVE_DEADLINE);
    pass(g, 50 * MS);
    assert_true(g->n_asks == 1 && g->p.n_closed == 0);
    pass(g, 50 * MS);
    pass(g, 50 * MS); /* asked in vain: the endpoint is closed, which is the proof on this lane */
    assert_true(g->n_freed == 2 && g->p.n_closed == 1);
    close_stage(g);
}

static void test_direct_waits_for_the_process(void **state)
{
    struct stage *g = open_receiver(DMK_LANE_DIRECT);

    (void)state;
    reserve(g, 1);
    send_claim(g, &g->p, 50);
    assert_int_equal(g->p.last.reply, DMK_REPLY_YES);
    dmk_loopback_cut(g->fabric, g->x, g->p.x);
    turn(g);
    assert_true(g->n_failed == 1 && g->why == DMK_RECEIVE_PEER_LOST && g->n_freed == 0);
    for (int i = 0; i < 20; i++) {
        pass(g, 50 * MS);
    }
    assert_true(g->n_freed == 0 && g->n_asks > 10);
    dmk_loopback_kill(g->fabric, g->p.x, 3);
    for (int i = 0; i < 3; i++) {
        pass(g, 1 * MS);
    }
    assert_int_equal(g->n_freed, 1);
    close_stage(g);
}

static void test_direct_needs_a_watch(void **state)
{
    struct stage *g = open_receiver(DMK_LANE_DIRECT);
    struct dmk_message m;

    (void)state;
    reserve(g, 1);
    m = message_of(DMK_MESSAGE_CLAIM, 50);
    hand_send(g, &g->p, &m); /* says nothing of how to watch it */
    turn(g);
    assert_int_equal(g->p.last.reply, DMK_REPLY_WATCH);
    close_stage(g);
}

static void test_draining_bound(void **state)
{
    struct stage *g = open_receiver(DMK_LANE_DIRECT);
    struct dmk_id128 first, second;

    (void)state;
    reserve(g, 1);
    first = ticket.cookie;
    send_claim(g, &g->p, 50);
    dmk_receiver_cancel(g->rx, 1, g->now);
    reserve(g, 2);
    second = ticket.cookie;
    send_claim(g, &g->p, 50);
    assert_int_equal(g->p.last.reply, DMK_REPLY_YES); /* 2 of 3 pages drain */
    dmk_receiver_cancel(g->rx, 2, g->now);
    assert_true(dmk_receiver_stats(g->rx).refusing);
    assert_int_equal(dmk_receiver_stats(g->rx).draining_pages, 4);
    reserve(g, 3);
    send_claim(g, &g->p, 50);
    assert_int_equal(g->p.last.reply, DMK_REPLY_DRAINING);
    send_claim(g, &g->p2, 60); /* another P is not meant */
    assert_int_equal(g->p2.last.reply, DMK_REPLY_YES);
    dmk_receiver_closed_word(g->rx, first, g->now);
    dmk_receiver_closed_word(g->rx, second, g->now);
    assert_true(g->n_freed == 2 && !dmk_receiver_stats(g->rx).refusing);
    close_stage(g);
}

static void test_closed_word_closes_first(void **state)
{
    struct stage *g = open_receiver(DMK_LANE_EMULATED);

    (void)state;
    reserve(g, 1);
    send_claim(g, &g->p, 50);
    dmk_receiver_closed_word(g->rx, ticket.cookie, g->now);
    assert_true(g->n_failed == 1 && g->n_freed == 0); /* a put may wait in our buffers */
    turn(g);
    assert_true(g->n_freed == 1 && g->p.n_closed == 1);
    close_stage(g);
}

static void test_foreign_messages(void **state)
{
    struct stage *g = open_receiver(DMK_LANE_EMULATED);
    const uint8_t junk[40] = {1, 2, 3};

    (void)state;
    assert_int_equal(g->ops->send(g->p.ep, (struct dmk_bytes){junk, sizeof(junk)}), 0);
    turn(g);
    assert_int_equal(g->p.n_closed, 1);
    /* An endpoint that never shows a cookie of ours does not stay. */
    reserve(g, 1);
    ticket.cookie.hi ^= 1;
    send_claim(g, &g->p2, 60);
    assert_int_equal(g->p2.last.reply, DMK_REPLY_UNKNOWN);
    pass(g, 6 * DMK_NS_PER_S);
    assert_int_equal(g->p2.n_closed, 1);
    close_stage(g);
}

static void test_bad_reservation(void **state)
{
    struct stage *g = open_receiver(DMK_LANE_EMULATED);
    struct dmk_error err;

    (void)state;
    for (uint64_t key = 1; key <= 4; key++) {
        reserve(g, key);
    }
    assert_int_equal(dmk_receiver_reserve(g->rx, 5, 2, g->now, &ticket, &err), -DMK_EFULL);
    dmk_receiver_cancel(g->rx, 4, g->now);
    ticket.pages[0] = PAGES;
    assert_int_equal(dmk_receiver_reserve(g->rx, 5, 2, g->now, &ticket, &err), -DMK_EINVAL);
    assert_non_null(strstr(err.text, "page"));
    close_stage(g);
}

/* ---- a sender under test ---------------------------------------------------------------------- */

static void on_tx_failed(void *ud, uint64_t job, int status, const char *why)
{
    struct stage *g = ud;

    (void)job;
    g->n_failed++;
    g->why = status;
    (void)snprintf(g->text, sizeof(g->text), "%s", why);
}

static void on_done(void *ud, uint64_t job, bool ok, uint64_t bytes, uint64_t ns)
{
    struct stage *g = ud;

    (void)job;
    (void)bytes;
    (void)ns;
    g->n_done++;
    g->n_done_ok += ok;
}

static void on_closed_word(void *ud, struct dmk_id128 cookie, uint64_t d_incarnation)
{
    (void)cookie;
    assert_int_equal(d_incarnation, 900);
    ((struct stage *)ud)->n_closed_words++;
}

static void on_tx_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct stage *g = ud;

    assert_true(dmk_sender_message(g->tx, ep, message, g->now));
}

static void on_tx_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    struct stage *g = ud;

    (void)status;
    dmk_sender_ep_closed(g->tx, ep, g->now);
}

static struct stage *open_sender(void)
{
    struct stage *g = open_stage(DMK_LANE_EMULATED);
    const struct dmk_xfer_conf conf = {
        .bind = "p", .fabric = g->fabric, .events = {on_tx_message, on_tx_closed, g}};
    struct dmk_sender_conf tx = {.ops = g->ops,
                                 .incarnation = 50,
                                 .worker_id = "p",
                                 .model_id = {1, 2},
                                 .numerics = "test",
                                 .transfer_budget_ns = 500 * MS,
                                 .resend_every_ns = 50 * MS,
                                 .give_up_ns = 300 * MS,
                                 .retire_ns = 100 * MS,
                                 .max_jobs = 2,
                                 .max_puts_in_flight = 1,
                                 .n_ranks = 1,
                                 .events = {on_claimed, on_tx_failed, on_done, on_closed_word, g}};
    struct dmk_ticket_rank *rank = &ticket.ranks[0];

    assert_int_equal(g->ops->open(&conf, &g->x, NULL), 0);
    open_hand(g, &g->d, "d");
    g->mem = (struct dmk_kv_mem){.layout = {.n_full_layers = 1,
                                            .n_kv_heads = 1,
                                            .n_local_heads = 1,
                                            .page_bytes = PAGE_BYTES,
                                            .n_full_pages = PAGES},
                                 .full = g->memory};
    assert_int_equal(
        g->ops->mem_register(g->x, g->memory, sizeof(g->memory), DMK_MEM_KIND_HOST, &g->reg, NULL),
        0);
    assert_int_equal(g->ops->mem_register(g->d.x, g->theirs, sizeof(g->theirs), DMK_MEM_KIND_HOST,
                                          &g->their_reg, NULL),
                     0);
    tx.xfer = g->x;
    tx.mem[0] = &g->mem;
    tx.full_mem[0] = g->reg;
    assert_int_equal(dmk_sender_new(&tx, &g->tx), 0);
    memset(&ticket, 0, sizeof(ticket));
    ticket = (struct dmk_ticket){.d_incarnation = 900,
                                 .cookie = {3, 4},
                                 .generation = 5,
                                 .model_id = {1, 2},
                                 .numerics = "test",
                                 .n_full_layers = 1,
                                 .n_kv_heads = 1,
                                 .page_tokens = DMK_PAGE_TOKENS,
                                 .page_bytes = PAGE_BYTES,
                                 .n_tokens = 100,
                                 .n_pages = 2,
                                 .pages = {3, 5},
                                 .n_ranks = 1};
    *rank = (struct dmk_ticket_rank){
        .n_kv_heads = 1, .n_full_pages = PAGES, .full_base = (uintptr_t)g->theirs};
    assert_int_equal(g->ops->mem_pack(g->d.x, g->their_reg, rank->full_key, &rank->full_key_len),
                     0);
    assert_int_equal(g->ops->address(g->d.x, ticket.address, &ticket.address_len), 0);
    ticket.bytes_expected = dmk_ticket_bytes(&ticket);
    return g;
}

static void d_says(struct stage *g, enum dmk_message_type type, int what)
{
    struct dmk_message m = {.type = type,
                            .from_incarnation = 900,
                            .to_incarnation = 50,
                            .cookie = ticket.cookie,
                            .generation = ticket.generation};

    if (type == DMK_MESSAGE_REPLY) {
        m.reply = (enum dmk_message_reply)what;
    } else {
        m.answer = (enum dmk_message_answer)what;
    }
    hand_send(g, &g->d, &m);
    turn(g);
}

static void claim(struct stage *g)
{
    struct dmk_error err;

    assert_int_equal(dmk_sender_claim(g->tx, 1, &ticket, g->now, &err), 0);
    assert_int_equal(dmk_sender_claim(g->tx, 2, &ticket, g->now, &err), -DMK_EINVAL);
    assert_int_equal(dmk_sender_n_jobs(g->tx), 1);
    turn(g);
    assert_int_equal(g->d.last.type, DMK_MESSAGE_CLAIM);
}

static void push_all(struct stage *g)
{
    const uint32_t src[2] = {6, 2};

    memset(g->memory, 0x66, PAGE_BYTES * 7);
    memset(g->memory + 2 * PAGE_BYTES, 0x22, PAGE_BYTES);
    dmk_sender_push_full(g->tx, 1, 0, src, 0, 1);
    dmk_sender_push_full(g->tx, 1, 0, src, 1, 2);
    dmk_sender_finish(g->tx, 1);
    turn(g);
}

static void test_sender_goes_through(void **state)
{
    struct stage *g = open_sender();

    (void)state;
    claim(g);
    push_all(g);
    assert_int_equal(g->theirs[3 * PAGE_BYTES], 0); /* nothing before the yes */
    d_says(g, DMK_MESSAGE_REPLY, DMK_REPLY_YES);
    turn(g);
    assert_int_equal(g->d.last.type, DMK_MESSAGE_TERMINAL);
    assert_true(g->d.last.ok && g->d.last.bytes == 2 * PAGE_BYTES);
    assert_int_equal(g->theirs[3 * PAGE_BYTES], 0x66);
    assert_int_equal(g->theirs[5 * PAGE_BYTES], 0x22);
    assert_int_equal(g->n_done, 0);
    dmk_sender_cancel(g->tx, 1); /* changes nothing now */
    d_says(g, DMK_MESSAGE_ANSWER, DMK_ANSWER_ACCEPTED);
    assert_true(g->n_done == 1 && g->n_done_ok == 1 && g->n_failed == 0);
    close_stage(g);
}

static void test_sender_refused(void **state)
{
    struct stage *g = open_sender();

    (void)state;
    claim(g);
    d_says(g, DMK_MESSAGE_REPLY, DMK_REPLY_DRAINING);
    assert_true(g->n_failed == 1 && g->n_done == 1 && g->why == -DMK_EAGAIN);
    assert_non_null(strstr(g->text, "pages"));
    close_stage(g);
}

static void test_sender_mismatch(void **state)
{
    struct stage *g = open_sender();
    struct dmk_error err;

    (void)state;
    ticket.model_id.lo = 9;
    assert_int_equal(dmk_sender_claim(g->tx, 1, &ticket, g->now, &err), -DMK_EMISMATCH);
    assert_non_null(strstr(err.text, "model"));
    ticket.model_id.lo = 1;
    (void)snprintf(ticket.numerics, sizeof(ticket.numerics), "other");
    assert_int_equal(dmk_sender_claim(g->tx, 1, &ticket, g->now, &err), -DMK_EMISMATCH);
    assert_non_null(strstr(err.text, "other"));
    (void)snprintf(ticket.numerics, sizeof(ticket.numerics), "test");
    ticket.n_full_layers = 2;
    assert_int_equal(dmk_sender_claim(g->tx, 1, &ticket, g->now, &err), -DMK_EMISMATCH);
    assert_int_equal(dmk_sender_n_jobs(g->tx), 0);
    assert_true(g->n_failed == 0 && g->n_done == 0);
    close_stage(g);
}

/* A prefill worker has an endpoint to each group of each decode worker, and D one from each prefill worker for each
 * of its groups: 25 workers of 8 groups. */
static void test_many_peers(void **state)
{
    enum { N_ENDPOINTS = 200 };
    struct stage *g = open_sender();

    (void)state;
    for (uint32_t i = 0; i < N_ENDPOINTS; i++) {
        ticket.d_incarnation = 900 + i;
        ticket.cookie.lo = i;
        claim(g);
        d_says(g, DMK_MESSAGE_REPLY, DMK_REPLY_UNKNOWN);
        assert_int_equal(dmk_sender_n_jobs(g->tx), 0);
    }
    assert_int_equal(dmk_sender_stats(g->tx).n_endpoints, N_ENDPOINTS);
    close_stage(g);
    g = open_receiver(DMK_LANE_EMULATED);
    reserve(g, 1);
    for (uint32_t i = 0; i < N_ENDPOINTS; i++) {
        hand_connect(g, &g->p);
        send_claim(g, &g->p, 50);
    }
    assert_int_equal(dmk_receiver_stats(g->rx).n_endpoints, N_ENDPOINTS);
    close_stage(g);
}

/* The terminal is repeated until answered; a wrong incarnation's answer does not count, STALE does. */
static void test_sender_repeats(void **state)
{
    struct stage *g = open_sender();
    struct dmk_message m;

    (void)state;
    claim(g);
    d_says(g, DMK_MESSAGE_REPLY, DMK_REPLY_YES);
    push_all(g);
    turn(g);
    g->d.n_messages = 0;
    for (int i = 0; i < 4; i++) {
        pass(g, 50 * MS);
    }
    assert_int_equal(g->d.n_messages, 4);
    m = (struct dmk_message){.type = DMK_MESSAGE_ANSWER,
                             .from_incarnation = 901,
                             .to_incarnation = 50,
                             .cookie = ticket.cookie,
                             .generation = ticket.generation,
                             .answer = DMK_ANSWER_ACCEPTED};
    hand_send(g, &g->d, &m);
    turn(g);
    assert_int_equal(g->n_done, 0);
    m.answer = DMK_ANSWER_STALE;
    hand_send(g, &g->d, &m);
    turn(g);
    assert_true(g->n_done == 1 && g->n_done_ok == 0);
    close_stage(g);
}

static void test_sender_gives_up(void **state)
{
    struct stage *g = open_sender();

    (void)state;
    claim(g);
    d_says(g, DMK_MESSAGE_REPLY, DMK_REPLY_YES);
    push_all(g);
    turn(g);
    dmk_loopback_kill(g->fabric, g->d.x, 0);
    turn(g);
    for (int i = 0; i < 5; i++) {
        pass(g, 50 * MS);
    }
    assert_int_equal(g->n_done, 0);
    for (int i = 0; i < 4; i++) {
        pass(g, 50 * MS);
    }
    assert_true(g->n_done == 1 && g->n_done_ok == 0 && g->n_failed == 0);
    dmk_sender_quiet_ask(g->tx, ticket.cookie, 50, 900); /* it knows nothing of it any more */
    assert_int_equal(g->n_closed_words, 1);
    close_stage(g);
}

/* A D that hangs, or a network that swallows all, breaks no endpoint; what the job held comes back all the
 * same, and the next transfer gets an endpoint of its own. */
static void test_sender_gives_up_in_silence(void **state)
{
    struct stage *g = open_sender();
    struct dmk_sender_stats stats;

    (void)state;
    claim(g);
    d_says(g, DMK_MESSAGE_REPLY, DMK_REPLY_YES);
    push_all(g);
    turn(g);
    for (int i = 0; i < 5; i++) {
        pass(g, 50 * MS);
    }
    assert_int_equal(g->n_done, 0);
    pass(g, 50 * MS);
    assert_true(g->n_done == 1 && g->n_done_ok == 0 && g->n_failed == 0);
    turn(g);
    stats = dmk_sender_stats(g->tx);
    assert_true(stats.n_jobs == 0 && stats.n_endpoints == 0);
    g->d.n_messages = 0;
    claim(g);
    assert_int_equal(g->d.n_messages, 1);
    close_stage(g);
}

static void test_sender_deadline_and_quiet(void **state)
{
    struct stage *g = open_sender();

    (void)state;
    claim(g);
    dmk_sender_quiet_ask(g->tx, ticket.cookie, 50, 900);
    dmk_sender_quiet_ask(g->tx, (struct dmk_id128){8, 8}, 49, 900); /* of another start */
    assert_int_equal(g->n_closed_words, 0);
    pass(g, 500 * MS);
    assert_true(g->n_failed == 1 && g->why == -DMK_ETIMEOUT && g->n_done == 0);
    turn(g);
    assert_int_equal(g->d.last.type, DMK_MESSAGE_TERMINAL);
    assert_false(g->d.last.ok);
    d_says(g, DMK_MESSAGE_ANSWER, DMK_ANSWER_FAILED);
    assert_int_equal(g->n_done, 1);
    dmk_sender_quiet_ask(g->tx, (struct dmk_id128){8, 8}, 50, 900);
    assert_int_equal(g->n_closed_words, 1);
    close_stage(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_claimed_once),
        cmocka_unit_test(test_short_is_a_failure),
        cmocka_unit_test(test_incarnations),
        cmocka_unit_test(test_a_clock_set_back),
        cmocka_unit_test(test_expiry_and_deadline),
        cmocka_unit_test(test_direct_waits_for_the_process),
        cmocka_unit_test(test_direct_needs_a_watch),
        cmocka_unit_test(test_draining_bound),
        cmocka_unit_test(test_closed_word_closes_first),
        cmocka_unit_test(test_foreign_messages),
        cmocka_unit_test(test_bad_reservation),
        cmocka_unit_test(test_sender_goes_through),
        cmocka_unit_test(test_sender_refused),
        cmocka_unit_test(test_sender_mismatch),
        cmocka_unit_test(test_many_peers),
        cmocka_unit_test(test_sender_repeats),
        cmocka_unit_test(test_sender_gives_up),
        cmocka_unit_test(test_sender_gives_up_in_silence),
        cmocka_unit_test(test_sender_deadline_and_quiet),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
