/* A transport node driven by the loop: messages, a put and its flush between two nodes of the in-process
 * fabric (which has no descriptor, so timers drive it), and a paper node with a descriptor whose arming
 * fails while events wait. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "common/base/assert.h"
#include "common/worker/xferloop.h"
#include "common/xfer/loopback.h"

static struct dmk_loop *loop;
static int n_progress;

static void on_progress(void *ud)
{
    (void)ud;
    n_progress++;
}

static void on_late(void *ud)
{
    *(bool *)ud = true;
    dmk_loop_stop(loop);
}

/* Runs the loop until something stops it; false when the time is up. */
static bool run_loop(unsigned ms)
{
    bool late = false;
    struct dmk_timer *timer = dmk_timer_new(loop, on_late, &late);

    dmk_timer_start(timer, ms, 0);
    dmk_loop_run(loop);
    dmk_timer_free(&timer);
    return !late;
}

/* ---- the fabric ---- */

struct node {
    const struct dmk_xfer_ops *ops;
    struct dmk_xfer *x;
    struct dmk_xferloop *xl;
    struct dmk_xfer_ep *peer; /* of the last message */
    char got[16];
    int flush_status;
};

static void on_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct node *n = ud;

    dmk_assert(message.len < sizeof(n->got));
    memcpy(n->got, message.data, message.len);
    n->got[message.len] = 0;
    n->peer = ep;
    if (strcmp(n->got, "ping") == 0) {
        dmk_assert(n->ops->send(ep, (struct dmk_bytes){(const uint8_t *)"pong", 4}) == 0);
    } else {
        dmk_loop_stop(loop);
    }
}

static void on_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    (void)ud;
    (void)ep;
    (void)status;
}

static void open_node(struct node *n, struct dmk_loopback *fabric, const char *name)
{
    const struct dmk_xfer_conf conf = {
        .bind = name,
        .fabric = fabric,
        .events = {.on_message = on_message, .on_closed = on_closed, .ud = n},
    };

    *n = (struct node){.ops = dmk_xfer_find("loopback"), .flush_status = 1};
    assert_int_equal(n->ops->open(&conf, &n->x, NULL), 0);
    n->xl = dmk_xferloop_new(loop, n->ops, n->x, on_progress, NULL);
}

static void on_put(void *ud, int status)
{
    (void)ud;
    dmk_assert(status == 0);
}

static void on_flushed(void *ud, int status)
{
    ((struct node *)ud)->flush_status = status;
    dmk_loop_stop(loop);
}

static void messages_and_puts_move_on_the_loop(void **state)
{
    static char src[4096], dst[4096];
    const struct dmk_loopback_conf conf = {.seed = 1, .lane = DMK_LANE_EMULATED};
    uint8_t address[DMK_XFER_ADDRESS_MAX], blob[DMK_XFER_KEY_MAX];
    size_t address_len, blob_len;
    struct dmk_xfer_mem *src_mem, *dst_mem;
    struct dmk_loopback *fabric;
    struct dmk_xfer_key *key;
    struct dmk_xfer_ep *ep;
    struct node a, b;

    (void)state;
    n_progress = 0;
    assert_int_equal(dmk_loop_new(&loop, NULL), 0);
    assert_int_equal(dmk_loopback_new(&conf, &fabric), 0);
    open_node(&a, fabric, "a");
    open_node(&b, fabric, "b");
    assert_int_equal(b.ops->address(b.x, address, &address_len), 0);
    assert_int_equal(a.ops->ep_connect(a.x, (struct dmk_bytes){address, address_len}, &ep, NULL),
                     0);
    assert_int_equal(a.ops->send(ep, (struct dmk_bytes){(const uint8_t *)"ping", 4}), 0);
    assert_true(run_loop(2000));
    assert_string_equal(b.got, "ping");
    assert_string_equal(a.got, "pong");
    assert_true(n_progress >= 2);

    memset(src, 'x', sizeof(src));
    assert_int_equal(a.ops->mem_register(a.x, src, sizeof(src), DMK_MEM_KIND_HOST, &src_mem, NULL),
                     0);
    assert_int_equal(b.ops->mem_register(b.x, dst, sizeof(dst), DMK_MEM_KIND_HOST, &dst_mem, NULL),
                     0);
    assert_int_equal(b.ops->mem_pack(b.x, dst_mem, blob, &blob_len), 0);
    assert_int_equal(a.ops->key_unpack(ep, (struct dmk_bytes){blob, blob_len}, &key), 0);
    assert_int_equal(
        a.ops->put(ep, src_mem, src, sizeof(src), key, (uint64_t)(uintptr_t)dst, on_put, NULL), 0);
    assert_int_equal(a.ops->flush(ep, on_flushed, &a), 0);
    assert_true(run_loop(2000));
    assert_int_equal(a.flush_status, 0);
    assert_memory_equal(src, dst, sizeof(src));

    a.ops->key_free(&key);
    a.ops->ep_close(a.x, ep, NULL, NULL);
    a.ops->mem_unregister(a.x, &src_mem);
    b.ops->mem_unregister(b.x, &dst_mem);
    dmk_xferloop_free(&a.xl);
    dmk_xferloop_free(&b.xl);
    a.ops->close(a.x);
    b.ops->close(b.x);
    dmk_loopback_free(&fabric);
    dmk_loop_free(&loop);
}

/* ---- a node of paper with a descriptor ---- */

static int paper_fd, waiting, arms, refused_arms;

static unsigned paper_progress(struct dmk_xfer *x)
{
    (void)x;
    if (waiting == 0) {
        return 0;
    }
    if (--waiting == 0) {
        dmk_loop_stop(loop);
    }
    return 1;
}

static int paper_get_fd(struct dmk_xfer *x)
{
    (void)x;
    return paper_fd;
}

/* As UCX: an event that comes just before the arming makes it fail. */
static bool paper_arm(struct dmk_xfer *x)
{
    eventfd_t v;

    (void)x;
    (void)eventfd_read(paper_fd, &v);
    arms++;
    if (arms <= 3) {
        refused_arms++;
        waiting += 1;
        return false;
    }
    return true;
}

static void on_wake(void *ud)
{
    (void)ud;
    waiting = 1000; /* more than one turn takes */
    (void)eventfd_write(paper_fd, 1);
}

static void arming_that_fails_is_done_again(void **state)
{
    static const struct dmk_xfer_ops paper = {
        .progress = paper_progress, .fd = paper_get_fd, .arm = paper_arm};
    struct dmk_xferloop *xl;
    struct dmk_timer *timer;

    (void)state;
    paper_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    waiting = arms = refused_arms = 0;
    assert_int_equal(dmk_loop_new(&loop, NULL), 0);
    xl = dmk_xferloop_new(loop, &paper, NULL, on_progress, NULL);
    assert_true(run_loop(2000)); /* the event behind each refusal was found without a wake */
    while (refused_arms < 3 || waiting > 0) {
        assert_true(run_loop(2000));
    }
    assert_int_equal(waiting, 0);
    timer = dmk_timer_new(loop, on_wake, NULL);
    dmk_timer_start(timer, 20, 0);
    assert_true(run_loop(2000));
    assert_int_equal(waiting, 0);
    dmk_timer_free(&timer);
    dmk_xferloop_free(&xl);
    dmk_loop_free(&loop);
    close(paper_fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_and_puts_move_on_the_loop),
        cmocka_unit_test(arming_that_fails_is_done_again),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
