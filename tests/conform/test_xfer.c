/* One set of tests for every page transport: loopback, UCX over tcp, UCX over shared memory.
 *
 * The two sides of a UCX test are two processes: the child is the target (D) and does what single bytes on
 * a pipe tell it; the parent writes (P). The loopback has both nodes in one process. Every wait is
 * bounded. */
#include <errno.h>
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
#include "common/xfer/loopback.h"
#include "common/xfer/xfer.h"

enum { PAGE = 16384, N_PAGES = 256, POOL = PAGE * N_PAGES, WAIT_S = 30 };

struct side {
    const struct dmk_xfer_ops *ops;
    struct dmk_xfer *x;
    struct dmk_xfer_mem *reg;
    uint8_t *pool;
    struct dmk_xfer_ep *ep; /* the last one that a message came on, or ours */
    uint8_t last[64];
    size_t last_len;
    uint32_t n_messages, n_closed;
    bool echo; /* answer every message with the same bytes */
};

/* What the parent must know of the target. */
struct introduction {
    uint8_t address[DMK_XFER_ADDRESS_MAX], key[DMK_XFER_KEY_MAX], watch[DMK_XFER_WATCH_MAX];
    size_t address_len, key_len, watch_len;
    uint64_t base;
};

struct stage {
    const char *impl, *transport;
    enum dmk_xfer_lane lane; /* loopback's */
    struct dmk_loopback *fabric;
    struct side p, d; /* d: loopback only */
    pid_t child;
    int to_child, from_child;
    struct introduction intro;
};

struct outcome {
    bool called;
    int status;
};

static void on_done(void *ud, int status)
{
    struct outcome *o = ud;

    assert_false(o->called);
    *o = (struct outcome){true, status};
}

static void on_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct side *s = ud;

    s->ep = ep;
    s->n_messages++;
    s->last_len = message.len < sizeof(s->last) ? message.len : sizeof(s->last);
    memcpy(s->last, message.data, s->last_len);
    if (s->echo) {
        (void)s->ops->send(ep, message);
    }
}

static void on_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    struct side *s = ud;

    s->n_closed++;
    if (status >= 0 || ep != s->ep) {
        s->n_closed += 1000; /* shows in the test */
    }
}

static int open_side(struct side *s, const struct stage *g, struct dmk_error *err)
{
    const struct dmk_xfer_conf conf = {
        .transport = g->transport,
        .fabric = g->fabric,
        .events = {on_message, on_closed, s},
    };

    s->ops = dmk_xfer_find(g->impl);
    s->pool = mmap(NULL, POOL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s->pool == MAP_FAILED) {
        return -DMK_ENOMEM;
    }
    if (s->ops->open(&conf, &s->x, err) < 0) {
        return err->status;
    }
    return s->ops->mem_register(s->x, s->pool, POOL, DMK_MEM_KIND_HOST, &s->reg, err);
}

static void close_side(struct side *s)
{
    if (s->x) {
        s->ops->mem_unregister(s->x, &s->reg);
        s->ops->close(s->x);
        s->x = NULL;
    }
    (void)munmap(s->pool, POOL);
}

static int introduce(struct side *s, struct introduction *ret)
{
    memset(ret, 0, sizeof(*ret));
    ret->base = (uintptr_t)s->pool;
    if (s->ops->address(s->x, ret->address, &ret->address_len) < 0 ||
        s->ops->mem_pack(s->x, s->reg, ret->key, &ret->key_len) < 0 ||
        s->ops->watch_self(s->x, ret->watch, &ret->watch_len) < 0) {
        return -1;
    }
    return 0;
}

/* ---- the child: a target that obeys ----------------------------------------------------------- */

enum {
    CMD_GO = 'g',    /* progress again */
    CMD_HALT = 'h',  /* no progress until the next command */
    CMD_CLOSE = 'c', /* close the endpoint of the last message; answers when closed */
    CMD_LOOK = 'l', /* answers with the pool's first 8 and last 8 bytes and the count of messages */
    CMD_WIPE = 'w', /* zeroes the pool */
    CMD_QUIT = 'q',
};

struct look {
    uint64_t first, last, n_zero_pages;
    uint32_t n_messages, n_closed;
};

static void look(const struct side *s, struct look *ret)
{
    *ret = (struct look){.n_messages = s->n_messages, .n_closed = s->n_closed};
    memcpy(&ret->first, s->pool, 8);
    memcpy(&ret->last, s->pool + POOL - 8, 8);
    for (uint32_t i = 0; i < N_PAGES; i++) {
        ret->n_zero_pages += s->pool[(size_t)i * PAGE] == 0;
    }
}

_Noreturn static void run_child(const struct stage *g, int in, int out)
{
    struct side s = {.echo = true};
    struct dmk_error err = {0};
    struct introduction intro;
    bool halted = false;
    uint64_t end_ns = dmk_clock_ns() + 60 * DMK_NS_PER_S;

    if (open_side(&s, g, &err) < 0 || introduce(&s, &intro) < 0) {
        fprintf(stderr, "child: %s\n", err.text);
        _exit(3);
    }
    if (write(out, &intro, sizeof(intro)) != (ssize_t)sizeof(intro)) {
        _exit(3);
    }
    while (dmk_clock_ns() < end_ns) {
        struct pollfd p = {.fd = in, .events = POLLIN};
        char cmd = 0;

        if (!halted) {
            (void)s.ops->progress(s.x);
        }
        if (poll(&p, 1, halted ? 100 : 0) <= 0) {
            continue;
        }
        if (read(in, &cmd, 1) != 1) {
            _exit(4); /* the parent is gone */
        }
        if (cmd == CMD_GO || cmd == CMD_HALT) {
            halted = cmd == CMD_HALT;
        } else if (cmd == CMD_CLOSE) {
            struct outcome o = {0};

            s.ops->ep_close(s.x, s.ep, on_done, &o);
            while (!o.called) {
                (void)s.ops->progress(s.x);
            }
        } else if (cmd == CMD_WIPE) {
            memset(s.pool, 0, POOL);
        } else if (cmd == CMD_LOOK) {
            struct look l;

            look(&s, &l);
            (void)!write(out, &l, sizeof(l));
            continue;
        } else if (cmd == CMD_QUIT) {
            close_side(&s);
            _exit(0);
        }
        (void)!write(out, &cmd, 1);
    }
    _exit(5);
}

static void read_all(int fd, void *data, size_t len)
{
    uint8_t *at = data;

    while (len > 0) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        ssize_t n;

        assert_true(poll(&p, 1, WAIT_S * 1000) > 0);
        n = read(fd, at, len);
        assert_true(n > 0);
        at += n;
        len -= (size_t)n;
    }
}

static void command(struct stage *g, char cmd, bool moving)
{
    char back;

    const uint64_t end_ns = dmk_clock_ns() + WAIT_S * DMK_NS_PER_S;
    struct pollfd p = {.fd = g->from_child, .events = POLLIN};

    assert_int_equal(write(g->to_child, &cmd, 1), 1);
    while (poll(&p, 1, 0) == 0 && dmk_clock_ns() < end_ns) {
        if (moving) { /* closing without force takes both sides */
            (void)g->p.ops->progress(g->p.x);
        }
    }
    read_all(g->from_child, &back, 1);
    assert_int_equal(back, cmd);
}

static struct look ask_look(struct stage *g)
{
    const char cmd = CMD_LOOK;
    struct look l;

    if (g->fabric) {
        look(&g->d, &l);
        return l;
    }
    assert_int_equal(write(g->to_child, &cmd, 1), 1);
    read_all(g->from_child, &l, sizeof(l));
    return l;
}

/* ---- stages ----------------------------------------------------------------------------------- */

static int set_up(struct stage *g)
{
    struct dmk_error err = {0};
    int down[2], up[2];

    memset(&g->p, 0, sizeof(g->p));
    memset(&g->d, 0, sizeof(g->d));
    g->child = 0;
    if (strcmp(g->impl, "loopback") == 0) {
        const struct dmk_loopback_conf conf = {
            .seed = 1, .lane = g->lane, .faults = {.max_delay = 3}};

        g->d.echo = true;
        if (dmk_loopback_new(&conf, &g->fabric) < 0 || open_side(&g->p, g, &err) < 0 ||
            open_side(&g->d, g, &err) < 0) {
            return -1;
        }
        return introduce(&g->d, &g->intro);
    }
    /* The child first: UCX and its threads do not survive a fork. */
    if (pipe(down) < 0 || pipe(up) < 0) {
        return -1;
    }
    g->child = fork();
    if (g->child == 0) {
        (void)close(down[1]);
        (void)close(up[0]);
        run_child(g, down[0], up[1]);
    }
    (void)close(down[0]);
    (void)close(up[1]);
    g->to_child = down[1];
    g->from_child = up[0];
    read_all(g->from_child, &g->intro, sizeof(g->intro));
    if (open_side(&g->p, g, &err) < 0) {
        fprintf(stderr, "parent: %s\n", err.text);
        return -1;
    }
    return 0;
}

static int group_tear_down(void **state)
{
    struct stage *g = *state;

    if (g->p.x) {
        close_side(&g->p);
    }
    if (g->fabric) {
        close_side(&g->d);
        dmk_loopback_free(&g->fabric);
    }
    if (g->child > 0) {
        (void)kill(g->child, SIGKILL);
        (void)waitpid(g->child, NULL, 0);
        (void)close(g->to_child);
        (void)close(g->from_child);
        g->child = 0;
    }
    return 0;
}

/* Moves things on until the flag is set. */
static bool wait_for(struct stage *g, const bool *flag)
{
    const uint64_t end_ns = dmk_clock_ns() + WAIT_S * DMK_NS_PER_S;

    while (!*flag && dmk_clock_ns() < end_ns) {
        (void)g->p.ops->progress(g->p.x);
        if (g->fabric && g->d.x) {
            (void)g->p.ops->progress(g->d.x);
        }
    }
    return *flag;
}

static void wait_count(struct stage *g, const uint32_t *count, uint32_t at_least)
{
    const uint64_t end_ns = dmk_clock_ns() + WAIT_S * DMK_NS_PER_S;

    while (*count < at_least && dmk_clock_ns() < end_ns) {
        const uint64_t slice_ns = dmk_clock_ns() + DMK_NS_PER_MS;

        while (*count < at_least && dmk_clock_ns() < slice_ns) {
            (void)g->p.ops->progress(g->p.x);
            if (g->fabric && g->d.x) {
                (void)g->p.ops->progress(g->d.x);
            }
        }
    }
    assert_true(*count >= at_least);
}

static struct dmk_bytes address_of(const struct stage *g)
{
    return (struct dmk_bytes){g->intro.address, g->intro.address_len};
}

/* Connects and has a message answered: the endpoint works both ways. */
static struct dmk_xfer_key *connect_and_greet(struct stage *g)
{
    const struct dmk_xfer_ops *ops = g->p.ops;
    const struct dmk_bytes hello = {(const uint8_t *)"hello", 5};
    struct dmk_xfer_key *key;
    struct dmk_error err;
    const uint32_t before = g->p.n_messages;

    assert_int_equal(ops->ep_connect(g->p.x, address_of(g), &g->p.ep, &err), 0);
    assert_int_equal(
        ops->key_unpack(g->p.ep, (struct dmk_bytes){g->intro.key, g->intro.key_len}, &key), 0);
    assert_int_equal(ops->send(g->p.ep, hello), 0);
    wait_count(g, &g->p.n_messages, before + 1);
    assert_int_equal(g->p.last_len, 5);
    assert_memory_equal(g->p.last, "hello", 5);
    return key;
}

static int put_page(struct stage *g, struct dmk_xfer_key *key, uint32_t page, struct outcome *o)
{
    return g->p.ops->put(g->p.ep, g->p.reg, g->p.pool + (size_t)page * PAGE, PAGE, key,
                         g->intro.base + (uint64_t)page * PAGE, on_done, o);
}

static void close_ours(struct stage *g, struct dmk_xfer_key *key)
{
    struct outcome closed = {0};

    g->p.ops->key_free(&key);
    g->p.ops->ep_close(g->p.x, g->p.ep, on_done, &closed);
    assert_true(wait_for(g, &closed.called));
    assert_int_equal(closed.status, 0);
}

/* ---- tests ------------------------------------------------------------------------------------ */

static void test_message(void **state)
{
    struct stage *g = *state;
    struct dmk_xfer_key *key = connect_and_greet(g);
    uint8_t big[DMK_XFER_MESSAGE_MAX];

    memset(big, 7, sizeof(big));
    assert_int_equal(g->p.ops->send(g->p.ep, (struct dmk_bytes){big, sizeof(big)}), 0);
    wait_count(g, &g->p.n_messages, 2);
    assert_int_equal(g->p.last[0], 7);
    g->p.ops->ep_set_user(g->p.ep, g);
    assert_ptr_equal(g->p.ops->ep_user(g->p.ep), g);
    close_ours(g, key);
}

static void test_put_and_flush(void **state)
{
    struct stage *g = *state;
    struct dmk_xfer_key *key = connect_and_greet(g);
    static struct outcome puts[N_PAGES];
    struct outcome flushed = {0};
    struct look l;

    for (size_t i = 0; i < POOL; i++) {
        g->p.pool[i] = (uint8_t)(i / PAGE + i % 251 + 1) | 1;
    }
    memset(puts, 0, sizeof(puts));
    for (uint32_t i = 0; i < N_PAGES; i++) {
        assert_int_equal(put_page(g, key, i, &puts[i]), 0);
    }
    assert_int_equal(g->p.ops->flush(g->p.ep, on_done, &flushed), 0);
    assert_false(flushed.called); /* callbacks come in progress only */
    assert_true(wait_for(g, &flushed.called));
    assert_int_equal(flushed.status, 0);
    for (uint32_t i = 0; i < N_PAGES; i++) {
        assert_true(wait_for(g, &puts[i].called));
        assert_int_equal(puts[i].status, 0);
    }
    l = ask_look(g); /* visible now, without another word to the target */
    assert_int_equal(l.n_zero_pages, 0);
    assert_memory_equal(&l.first, g->p.pool, 8);
    assert_memory_equal(&l.last, g->p.pool + POOL - 8, 8);
    close_ours(g, key);
}

/* As a loop waits: nothing but the descriptor wakes us, armed before each wait. */
static void test_wait_by_descriptor(void **state)
{
    struct stage *g = *state;
    const struct dmk_xfer_ops *ops = g->p.ops;
    const struct dmk_bytes hello = {(const uint8_t *)"again", 5};
    const uint64_t end_ns = dmk_clock_ns() + WAIT_S * DMK_NS_PER_S;
    const int fd = ops->fd(g->p.x);
    struct outcome flushed = {0}, closed = {0}, put = {0};
    struct dmk_xfer_key *key;
    bool closing = false;

    if (fd < 0) {
        skip();
    }
    key = connect_and_greet(g);
    g->p.n_messages = 0;
    assert_int_equal(ops->send(g->p.ep, hello), 0);
    assert_int_equal(put_page(g, key, 1, &put), 0);
    assert_int_equal(ops->flush(g->p.ep, on_done, &flushed), 0);
    while (!closed.called) {
        struct pollfd p = {.fd = fd, .events = POLLIN};

        while (ops->progress(g->p.x) > 0) {
        }
        if (!closing && g->p.n_messages == 1 && flushed.called && put.called) {
            closing = true;
            ops->key_free(&key);
            ops->ep_close(g->p.x, g->p.ep, on_done, &closed);
        }
        assert_true(dmk_clock_ns() < end_ns);
        if (!closed.called && ops->arm(g->p.x)) {
            assert_int_equal(poll(&p, 1, WAIT_S * 1000), 1);
        }
    }
    assert_int_equal(flushed.status, 0);
}

/* Memory the key does not cover, and addresses and keys that are none. */
static void test_refusals(void **state)
{
    struct stage *g = *state;
    const uint8_t junk[3] = {9, 9, 9};
    struct dmk_xfer_ep *ep;
    struct dmk_xfer_key *key;
    struct dmk_error err;

    assert_true(g->p.ops->ep_connect(g->p.x, (struct dmk_bytes){junk, 3}, &ep, &err) < 0);
    assert_true(strlen(err.text) > 20);
    key = connect_and_greet(g);
    close_ours(g, key);
    assert_int_equal(g->p.ops->key_unpack(g->p.ep, (struct dmk_bytes){junk, 0}, &key),
                     -DMK_EFORMAT);
}

static void test_watch(void **state)
{
    struct stage *g = *state;
    struct dmk_xfer_watch *watch;
    uint8_t blob[DMK_XFER_WATCH_MAX];

    assert_int_equal(g->p.ops->watch_open(
                         g->p.x, (struct dmk_bytes){g->intro.watch, g->intro.watch_len}, &watch),
                     0);
    assert_false(g->p.ops->watch_gone(watch));
    g->p.ops->watch_close(&watch);
    assert_null(watch);
    memcpy(blob, g->intro.watch, sizeof(blob));
    if (!g->fabric) { /* the same number, started at another time */
        blob[24] ^= 1;
        assert_int_equal(
            g->p.ops->watch_open(g->p.x, (struct dmk_bytes){blob, g->intro.watch_len}, &watch),
            -DMK_EPEER);
        blob[0] ^= 1;
        assert_int_equal(
            g->p.ops->watch_open(g->p.x, (struct dmk_bytes){blob, g->intro.watch_len}, &watch),
            -DMK_ENOTSUP);
    }
    assert_true(g->p.ops->watch_open(g->p.x, (struct dmk_bytes){blob, 3}, &watch) < 0);
}

/* The other side closes: we hear of it, and everything fails from then on. */
static void test_closed_by_target(void **state)
{
    struct stage *g = *state;
    struct dmk_xfer_key *key = connect_and_greet(g);
    const uint32_t before = g->p.n_closed;
    struct outcome o = {0};

    if (g->fabric) {
        g->d.ops->ep_close(g->d.x, g->d.ep, NULL, NULL);
    } else {
        command(g, CMD_CLOSE, true);
    }
    wait_count(g, &g->p.n_closed, before + 1);
    assert_int_equal(g->p.n_closed, before + 1);
    assert_int_equal(put_page(g, key, 0, &o), -DMK_EPEER);
    assert_int_equal(g->p.ops->flush(g->p.ep, on_done, &o), -DMK_EPEER);
    assert_int_equal(g->p.ops->send(g->p.ep, (struct dmk_bytes){(const uint8_t *)"x", 1}),
                     -DMK_EPEER);
    assert_false(o.called);
    close_ours(g, key);
}

/* Pending operations of an endpoint that we close end before its done, which comes once. */
static void test_close_with_pending(void **state)
{
    struct stage *g = *state;
    struct dmk_xfer_key *key = connect_and_greet(g);
    static struct outcome puts[N_PAGES];
    struct outcome flushed = {0};

    memset(puts, 0, sizeof(puts));
    for (uint32_t i = 0; i < N_PAGES; i++) {
        assert_int_equal(put_page(g, key, i, &puts[i]), 0);
    }
    assert_int_equal(g->p.ops->flush(g->p.ep, on_done, &flushed), 0);
    close_ours(g, key);
    assert_true(flushed.called);
    for (uint32_t i = 0; i < N_PAGES; i++) {
        assert_true(puts[i].called);
    }
}

/* tcp's own assumption: once the target has closed its endpoint, puts that lie in its receive buffer
 * are not written any more. The target halts, is sent more than it reads, closes, wipes, goes on. */
static void test_close_discards_received(void **state)
{
    struct stage *g = *state;
    struct dmk_xfer_key *key = connect_and_greet(g);
    static struct outcome puts[N_PAGES];
    const uint64_t send_ns = 300 * DMK_NS_PER_MS;
    uint64_t end_ns = dmk_clock_ns() + send_ns;
    struct look l;

    if (g->fabric || strcmp(g->transport, "tcp") != 0) {
        close_ours(g, key);
        skip();
    }
    memset(g->p.pool, 0x5a, POOL);
    command(g, CMD_WIPE, false);
    command(g, CMD_HALT, false);
    memset(puts, 0, sizeof(puts));
    for (uint32_t i = 0; i < N_PAGES; i++) {
        assert_int_equal(put_page(g, key, i, &puts[i]), 0);
    }
    while (dmk_clock_ns() < end_ns) {
        (void)g->p.ops->progress(g->p.x); /* fills the sockets' buffers */
    }
    l = ask_look(g);
    assert_int_equal(l.n_zero_pages, N_PAGES); /* emulated: nothing lands without its progress */
    command(g, CMD_CLOSE, false);
    l = ask_look(g);
    print_message("after the target's close %u of %d pages had been written\n",
                  (unsigned)(N_PAGES - l.n_zero_pages), N_PAGES);
    command(g, CMD_WIPE, false);
    command(g, CMD_GO, false);
    end_ns = dmk_clock_ns() + send_ns;
    while (dmk_clock_ns() < end_ns) {
        (void)g->p.ops->progress(g->p.x);
    }
    l = ask_look(g);
    assert_int_equal(l.n_zero_pages, N_PAGES);
    close_ours(g, key);
}

/* kill -9: the endpoint breaks, its watch says gone. Last: the target is no more. */
static void test_killed_target(void **state)
{
    struct stage *g = *state;
    struct dmk_xfer_key *key = connect_and_greet(g);
    struct dmk_xfer_watch *watch;
    const uint32_t before = g->p.n_closed;
    const uint64_t start_ns = dmk_clock_ns();
    uint64_t end_ns;

    assert_int_equal(g->p.ops->watch_open(
                         g->p.x, (struct dmk_bytes){g->intro.watch, g->intro.watch_len}, &watch),
                     0);
    if (g->fabric) {
        dmk_loopback_kill(g->fabric, g->d.x, 5);
    } else {
        assert_int_equal(kill(g->child, SIGKILL), 0);
    }
    wait_count(g, &g->p.n_closed, before + 1);
    print_message("%s %s: told of the death after %.1f ms\n", g->impl,
                  g->transport ? g->transport : "", (double)(dmk_clock_ns() - start_ns) / 1e6);
    end_ns = dmk_clock_ns() + WAIT_S * DMK_NS_PER_S;
    while (!g->p.ops->watch_gone(watch) && dmk_clock_ns() < end_ns) {
        (void)g->p.ops->progress(g->p.x);
    }
    assert_true(g->p.ops->watch_gone(watch));
    g->p.ops->watch_close(&watch);
    close_ours(g, key);
}

/* Where another process's device memory can only be written by that process, the lane would not be what it says. */
static void test_device_pages(void **state)
{
    struct stage *g = *state;
    const struct dmk_xfer_conf conf = {.transport = "shm",
                                       .mem_kind = DMK_MEM_KIND_CUDA,
                                       .events = {on_message, on_closed, &g->p}};
    struct dmk_xfer *x = NULL;
    struct dmk_error err;

    if (strcmp(g->impl, "ucx") == 0) {
        assert_int_equal(g->p.ops->open(&conf, &x, &err), -DMK_ENOTSUP);
        assert_null(x);
        assert_string_equal(
            err.text, "page transport \"shm\" is for pages in host memory, and these are in a "
                      "device's: use \"cuda\" between GPUs of one host, else \"tcp\"");
    }
}

/* Nobody listens there any more: the endpoint opens and then says so. */
static void test_connect_to_nobody(void **state)
{
    struct stage *g = *state;
    const uint32_t before = g->p.n_closed;
    struct outcome closed = {0};
    struct dmk_error err;

    assert_int_equal(g->p.ops->ep_connect(g->p.x, address_of(g), &g->p.ep, &err), 0);
    wait_count(g, &g->p.n_closed, before + 1);
    g->p.ops->ep_close(g->p.x, g->p.ep, on_done, &closed);
    assert_true(wait_for(g, &closed.called));
}

static int run_stage(const char *name, struct stage *stage)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(test_message, stage),
        cmocka_unit_test_prestate(test_put_and_flush, stage),
        cmocka_unit_test_prestate(test_wait_by_descriptor, stage),
        cmocka_unit_test_prestate(test_refusals, stage),
        cmocka_unit_test_prestate(test_device_pages, stage),
        cmocka_unit_test_prestate(test_watch, stage),
        cmocka_unit_test_prestate(test_closed_by_target, stage),
        cmocka_unit_test_prestate(test_close_with_pending, stage),
        cmocka_unit_test_prestate(test_close_discards_received, stage),
        cmocka_unit_test_prestate(test_killed_target, stage),
        cmocka_unit_test_prestate(test_connect_to_nobody, stage),
    };
    int n;

    if (set_up(stage) < 0) {
        (void)group_tear_down((void **)&stage);
        return 1;
    }
    n = cmocka_run_group_tests_name(name, tests, NULL, NULL);
    (void)group_tear_down((void **)&stage);
    return n;
}

/* Arguments: an implementation and a transport or lane; one of them per run, so that each starts fresh. */
int main(int argc, char **argv)
{
    struct stage stage = {0};

    if (argc != 3) {
        fprintf(stderr, "usage: test_xfer loopback emulated|direct, or ucx tcp|shm\n");
        return 2;
    }
    stage.impl = argv[1];
    stage.transport = argv[2];
    stage.lane = strcmp(argv[2], "direct") == 0 ? DMK_LANE_DIRECT : DMK_LANE_EMULATED;
#if defined(__SANITIZE_ADDRESS__)
    /* The sanitizer's process_vm_readv takes the other process's addresses for ours and aborts. */
    if (strcmp(argv[2], "shm") == 0) {
        print_message("skipped: cross-memory attach does not run under the address sanitizer\n");
        return 77;
    }
#endif
    (void)signal(SIGPIPE, SIG_IGN);
    return run_stage(argv[2], &stage);
}
