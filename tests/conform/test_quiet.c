/* The quiet rule over UCX, between two processes: the parent is D with a receiver, the child P with a
 * sender that obeys single bytes on a pipe. P is killed and stopped in the middle of transfers; when a
 * ticket's pages are freed D wipes them, and nothing may land in them after that.
 *
 * Arguments: the transport, tcp or shm. */
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "common/base/clock.h"
#include "common/xfer/receiver.h"
#include "common/xfer/sender.h"

#define MS DMK_NS_PER_MS

enum { PAGE = 16384, LAYERS = 4, HEADS = 2, PAGES = 64, WAIT_S = 30 };

static const struct dmk_kv_layout layout = {.n_full_layers = LAYERS,
                                            .n_kv_heads = HEADS,
                                            .n_local_heads = HEADS,
                                            .page_bytes = PAGE,
                                            .n_full_pages = PAGES};
static const char *transport;

struct node {
    const struct dmk_xfer_ops *ops;
    struct dmk_xfer *x;
    struct dmk_kv_mem mem;
    struct dmk_xfer_mem *reg;
    struct dmk_receiver *rx;
    struct dmk_sender *tx;
    uint32_t n_claimed, n_ready, n_failed, n_freed, n_done, n_done_ok, n_asks;
    struct dmk_id128 asked;
    uint64_t asked_incarnation;
    int words; /* P: where `closed` words go */
};

static struct dmk_ticket ticket;

static void open_node(struct node *n, const struct dmk_xfer_events *events)
{
    const struct dmk_xfer_conf conf = {.transport = transport, .events = *events};
    const size_t bytes = (size_t)dmk_kv_full_bytes(&layout);
    struct dmk_error err;

    n->ops = dmk_xfer_find("ucx");
    n->mem.layout = layout;
    n->mem.full = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (n->mem.full == MAP_FAILED || n->ops->open(&conf, &n->x, &err) < 0 ||
        n->ops->mem_register(n->x, n->mem.full, bytes, DMK_MEM_KIND_HOST, &n->reg, &err) < 0) {
        fprintf(stderr, "can not open the transport: %s\n", err.text);
        exit(1);
    }
}

/* ---- P ---------------------------------------------------------------------------------------- */

static void on_done(void *ud, uint64_t job, bool ok, uint64_t bytes, uint64_t ns)
{
    struct node *n = ud;

    (void)job;
    (void)bytes;
    (void)ns;
    n->n_done++;
    n->n_done_ok += ok;
}

static void on_tx_failed(void *ud, uint64_t job, int status, const char *why)
{
    (void)ud;
    (void)job;
    (void)status;
    (void)why;
}

static void on_closed_word(void *ud, struct dmk_id128 cookie, uint64_t d_incarnation)
{
    const struct node *n = ud;

    (void)d_incarnation;
    (void)!write(n->words, &cookie, sizeof(cookie));
}

static void on_p_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    (void)dmk_sender_message(((struct node *)ud)->tx, ep, message, dmk_clock_ns());
}

static void on_p_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    (void)status;
    dmk_sender_ep_closed(((struct node *)ud)->tx, ep, dmk_clock_ns());
}

enum {
    CMD_CLAIM = 'c', /* a ticket follows: claim it and push everything but the last layer */
    CMD_FINISH = 'f',
    CMD_CANCEL = 'x',
    CMD_QUIET = 'q', /* a cookie follows */
};

static void read_all(int fd, void *data, size_t len)
{
    uint8_t *at = data;

    while (len > 0) {
        const ssize_t n = read(fd, at, len);

        if (n <= 0) {
            _exit(4); /* the other side is gone */
        }
        at += n;
        len -= (size_t)n;
    }
}

static void obey(struct node *n, int in, uint64_t incarnation)
{
    static uint64_t job;
    uint32_t src[PAGES];
    struct dmk_id128 cookie;
    char cmd;

    read_all(in, &cmd, 1);
    for (uint32_t i = 0; i < PAGES; i++) {
        src[i] = PAGES - 1 - i; /* no runs: many puts */
    }
    if (cmd == CMD_CLAIM) {
        read_all(in, &ticket, sizeof(ticket));
        if (dmk_sender_claim(n->tx, ++job, &ticket, dmk_clock_ns(), NULL) < 0) {
            _exit(5);
        }
        for (uint32_t l = 0; l < LAYERS - 1; l++) {
            dmk_sender_push_full(n->tx, job, l, src, 0, ticket.n_pages);
        }
    } else if (cmd == CMD_FINISH) {
        dmk_sender_push_full(n->tx, job, LAYERS - 1, src, 0, ticket.n_pages);
        dmk_sender_finish(n->tx, job);
    } else if (cmd == CMD_CANCEL) {
        dmk_sender_cancel(n->tx, job);
    } else {
        read_all(in, &cookie, sizeof(cookie));
        dmk_sender_quiet_ask(n->tx, cookie, incarnation, 1);
    }
}

_Noreturn static void run_p(int in, int words, uint64_t incarnation)
{
    struct node n = {.words = words};
    struct dmk_sender_conf conf = {.incarnation = incarnation,
                                   .worker_id = "p",
                                   .model_id = {1, 2},
                                   .numerics = "test",
                                   .transfer_budget_ns = 20000 * MS,
                                   .resend_every_ns = 100 * MS,
                                   .give_up_ns = 1000 * MS,
                                   .retire_ns = 300 * MS,
                                   .max_jobs = 4,
                                   .max_puts_in_flight = 16,
                                   .n_ranks = 1,
                                   .events = {NULL, on_tx_failed, on_done, on_closed_word, &n}};

    (void)alarm(90);
    open_node(&n, &(struct dmk_xfer_events){on_p_message, on_p_closed, &n});
    memset(n.mem.full, 0x7b, (size_t)dmk_kv_full_bytes(&layout));
    conf.ops = n.ops;
    conf.xfer = n.x;
    conf.mem[0] = &n.mem;
    conf.full_mem[0] = n.reg;
    if (dmk_sender_new(&conf, &n.tx) < 0) {
        _exit(3);
    }
    for (uint64_t i = 0;; i++) {
        struct pollfd p = {.fd = in, .events = POLLIN};

        (void)n.ops->progress(n.x);
        if (i % 64 == 0) {
            dmk_sender_tick(n.tx, dmk_clock_ns());
        }
        if (poll(&p, 1, 0) > 0) {
            obey(&n, in, incarnation);
        }
    }
}

struct p {
    pid_t pid;
    int in, words;
    uint64_t incarnation;
};

static struct p start_p(void)
{
    static uint64_t incarnation = 10;
    int down[2], up[2];
    struct p p = {.incarnation = incarnation++};

    assert_int_equal(pipe(down), 0);
    assert_int_equal(pipe(up), 0);
    p.pid = fork();
    if (p.pid == 0) {
        char in[16], words[16], number[24];

        /* A program of its own: UCX, which we have open, does not survive a fork. */
        (void)close(down[1]);
        (void)close(up[0]);
        (void)snprintf(in, sizeof(in), "%d", down[0]);
        (void)snprintf(words, sizeof(words), "%d", up[1]);
        (void)snprintf(number, sizeof(number), "%llu", (unsigned long long)p.incarnation);
        (void)execl("/proc/self/exe", "test_quiet", transport, in, words, number, (char *)NULL);
        _exit(9);
    }
    (void)close(down[0]);
    (void)close(up[1]);
    p.in = down[1];
    p.words = up[0];
    return p;
}

static void stop_p(struct p *p)
{
    (void)kill(p->pid, SIGKILL);
    (void)waitpid(p->pid, NULL, 0);
    (void)close(p->in);
    (void)close(p->words);
}

/* ---- D ---------------------------------------------------------------------------------------- */

static void on_claimed(void *ud, uint64_t key)
{
    (void)key;
    ((struct node *)ud)->n_claimed++;
}

static void on_ready(void *ud, uint64_t key, uint64_t bytes, uint64_t ns)
{
    (void)key;
    (void)bytes;
    (void)ns;
    ((struct node *)ud)->n_ready++;
}

static void on_failed(void *ud, uint64_t key, enum dmk_receive_failure why)
{
    (void)key;
    (void)why;
    ((struct node *)ud)->n_failed++;
}

/* The pages are D's again: whatever lands from now on shows. */
static void on_freed(void *ud, uint64_t key)
{
    struct node *n = ud;

    (void)key;
    n->n_freed++;
    memset(n->mem.full, 0, (size_t)dmk_kv_full_bytes(&layout));
}

static void on_quiet_ask(void *ud, struct dmk_id128 cookie, uint64_t p_incarnation)
{
    struct node *n = ud;

    n->n_asks++;
    n->asked = cookie;
    n->asked_incarnation = p_incarnation;
}

static void on_d_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    assert_true(dmk_receiver_message(((struct node *)ud)->rx, ep, message, dmk_clock_ns()));
}

static void on_d_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    (void)status;
    dmk_receiver_ep_closed(((struct node *)ud)->rx, ep, dmk_clock_ns());
}

static struct node d;

static int open_d(void **state)
{
    struct dmk_receiver_conf conf = {
        .incarnation = 1,
        .expiry_ns = 10000 * MS,
        .transfer_budget_ns = 30000 * MS,
        .quiet_ask_every_ns = 200 * MS,
        .max_tickets = 4,
        .max_draining_pages = 1000,
        .events = {on_claimed, on_ready, on_failed, on_freed, on_quiet_ask, &d}};

    (void)state;
    open_node(&d, &(struct dmk_xfer_events){on_d_message, on_d_closed, &d});
    conf.ops = d.ops;
    conf.xfer = d.x;
    return dmk_receiver_new(&conf, &d.rx);
}

static int close_d(void **state)
{
    (void)state;
    dmk_receiver_free(&d.rx);
    d.ops->mem_unregister(d.x, &d.reg);
    d.ops->close(d.x);
    return 0;
}

/* Moves D on for so long, or until the count is reached; relays nothing. */
static void move_on(uint64_t ns, const uint32_t *count, uint32_t until)
{
    const uint64_t end_ns = dmk_clock_ns() + ns;

    while (dmk_clock_ns() < end_ns && (!count || *count < until)) {
        (void)d.ops->progress(d.x);
        dmk_receiver_tick(d.rx, dmk_clock_ns());
    }
}

static void wait_for(const uint32_t *count, uint32_t until)
{
    move_on(WAIT_S * DMK_NS_PER_S, count, until);
    assert_true(*count >= until);
}

static bool has_byte(int byte, size_t from, size_t to)
{
    const uint8_t *m = d.mem.full;

    for (size_t i = from; i < to; i += PAGE / 4) {
        if (m[i] == byte) {
            return true;
        }
    }
    return false;
}

static const size_t ALL = (size_t)LAYERS * HEADS * PAGES * PAGE;

static void assert_all_zero(void)
{
    assert_false(has_byte(0x7b, 0, ALL));
}

static void reserve(uint64_t key)
{
    struct dmk_error err;

    memset(&d.n_claimed, 0, offsetof(struct node, asked) - offsetof(struct node, n_claimed));
    memset(d.mem.full, 0, ALL);
    memset(&ticket, 0, sizeof(ticket));
    ticket.model_id = (struct dmk_id128){1, 2};
    (void)snprintf(ticket.numerics, sizeof(ticket.numerics), "test");
    ticket.n_full_layers = LAYERS;
    ticket.n_kv_heads = HEADS;
    ticket.page_bytes = PAGE;
    ticket.n_tokens = PAGES * DMK_PAGE_TOKENS;
    ticket.n_pages = PAGES;
    for (uint32_t i = 0; i < PAGES; i++) {
        ticket.pages[i] = (i * 7) % PAGES;
    }
    ticket.n_ranks = 1;
    ticket.ranks[0] = (struct dmk_ticket_rank){
        .n_kv_heads = HEADS, .n_full_pages = PAGES, .full_base = (uintptr_t)d.mem.full};
    assert_int_equal(
        d.ops->mem_pack(d.x, d.reg, ticket.ranks[0].full_key, &ticket.ranks[0].full_key_len), 0);
    assert_int_equal(dmk_receiver_reserve(d.rx, key, PAGES, dmk_clock_ns(), &ticket, &err), 0);
}

static void tell_p(const struct p *p, char cmd, const void *data, size_t len)
{
    assert_int_equal(write(p->in, &cmd, 1), 1);
    if (len > 0) {
        assert_int_equal(write(p->in, data, len), len);
    }
}

static void begin(const struct p *p, uint64_t key)
{
    reserve(key);
    tell_p(p, CMD_CLAIM, &ticket, sizeof(ticket));
    wait_for(&d.n_claimed, 1);
}

/* ---- tests ------------------------------------------------------------------------------------ */

static void test_goes_through(void **state)
{
    struct p p = start_p();

    (void)state;
    for (uint64_t key = 1; key <= 3; key++) {
        begin(&p, key);
        tell_p(&p, CMD_FINISH, NULL, 0);
        wait_for(&d.n_ready, 1);
        assert_false(has_byte(0, 0, ALL));
        dmk_receiver_finish(d.rx, key);
    }
    stop_p(&p);
    move_on(100 * MS, NULL, 0);
    assert_true(d.n_failed == 0 && d.n_freed == 0);
}

/* Killed while its puts run: the pages come back, and nothing lands in them any more. */
static void test_killed_writer(void **state)
{
    (void)state;
    for (int trial = 0; trial < 4; trial++) {
        struct p p = start_p();

        begin(&p, 10);
        move_on((uint64_t)trial * 3 * MS, NULL, 0);
        (void)kill(p.pid, SIGKILL);
        wait_for(&d.n_freed, 1);
        assert_int_equal(d.n_failed, 1);
        move_on(150 * MS, NULL, 0);
        assert_all_zero();
        stop_p(&p);
    }
}

/* Stopped, not dead, while its puts run, and cancelled at D. tcp: D's own closing is the proof. Shared
 * memory: the pages drain for as long as the writer might go on. */
static void test_stopped_writer(void **state)
{
    struct p p = start_p();
    const bool direct = strcmp(transport, "shm") == 0;

    (void)state;
    begin(&p, 20);
    (void)kill(p.pid, SIGSTOP);
    dmk_receiver_cancel(d.rx, 20, dmk_clock_ns());
    assert_int_equal(d.n_freed, 0);
    if (direct) {
        move_on(1500 * MS, &d.n_freed, 1);
        assert_true(d.n_freed == 0 && d.n_asks > 3);
        assert_int_equal(dmk_receiver_stats(d.rx).draining_pages, PAGES);
    } else {
        wait_for(&d.n_freed, 1);
        assert_int_equal(d.n_asks, 3);
    }
    (void)kill(p.pid, SIGCONT);
    if (direct) {
        wait_for(&d.n_freed, 1); /* its failed terminal: it has seen the endpoint close */
    }
    move_on(400 * MS, NULL, 0);
    assert_all_zero();
    stop_p(&p);
    move_on(50 * MS, NULL, 0);
}

/* Cancelled on both sides: P's failed terminal, on the claim's endpoint, frees at once. */
static void test_cancelled(void **state)
{
    struct p p = start_p();

    (void)state;
    begin(&p, 30);
    dmk_receiver_cancel(d.rx, 30, dmk_clock_ns());
    assert_int_equal(d.n_freed, 0);
    tell_p(&p, CMD_CANCEL, NULL, 0);
    wait_for(&d.n_freed, 1);
    assert_int_equal(d.n_asks, 0);
    move_on(150 * MS, NULL, 0);
    assert_all_zero();
    /* The endpoint serves the next transfer. */
    begin(&p, 31);
    tell_p(&p, CMD_FINISH, NULL, 0);
    wait_for(&d.n_ready, 1);
    dmk_receiver_finish(d.rx, 31);
    stop_p(&p);
    move_on(50 * MS, NULL, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_goes_through),
        cmocka_unit_test(test_killed_writer),
        cmocka_unit_test(test_stopped_writer),
        cmocka_unit_test(test_cancelled),
    };

    if (argc == 5) {
        transport = argv[1];
        run_p((int)strtol(argv[2], NULL, 10), (int)strtol(argv[3], NULL, 10),
              strtoull(argv[4], NULL, 10));
    }
    if (argc != 2) {
        fprintf(stderr, "usage: test_quiet tcp|shm\n");
        return 2;
    }
    transport = argv[1];
#if defined(__SANITIZE_ADDRESS__)
    /* The sanitizer's process_vm_readv takes the other process's addresses for ours and aborts. */
    if (strcmp(transport, "shm") == 0) {
        print_message("skipped: cross-memory attach does not run under the address sanitizer\n");
        return 77;
    }
#endif
    (void)signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests(tests, open_d, close_d);
}
