/* gRPC streams with real sockets: a client and a server of one process on one loop, and a server process
 * (argv[1]) that is killed and stopped. Each test runs the loop until what it waits for has happened. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include "common/base/buf.h"
#include "common/base/clock.h"
#include "proto/grpc_health.pb-c.h"
#include "server.h"

static const char *server_path;

/* ---- a client that remembers ---- */

struct client {
    struct dmk_rpc_stream *stream;
    struct dmk_buf got; /* messages, each followed by '|' */
    int n_messages;
    size_t n_bytes;
    bool closed;
    enum dmk_rpc_code code;
    char text[512];
    uint64_t closed_ns;
    bool numbered_wrong;
};

static struct dmk_loop *loop;
static struct dmk_rpc *rpc;
static struct dmk_rpc_server *server;
static struct dmk_rpc_channel *channel;
static struct client c;
static char target[64];

static void on_message(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes message)
{
    struct client *cl = ud;
    char number[16];

    assert_ptr_equal(stream, cl->stream);
    assert_false(cl->closed);
    (void)snprintf(number, sizeof(number), "%d", cl->n_messages);
    if (message.len != strlen(number) || memcmp(message.data, number, message.len) != 0) {
        cl->numbered_wrong = true;
    }
    cl->n_messages++;
    cl->n_bytes += message.len;
    if (cl->got.len < 4096 && message.len < 1024) {
        dmk_buf_append(&cl->got, message.data, message.len);
        dmk_buf_putc(&cl->got, '|');
    }
}

static void on_closed(void *ud, struct dmk_rpc_stream *stream, enum dmk_rpc_code code,
                      const char *text)
{
    struct client *cl = ud;

    assert_ptr_equal(stream, cl->stream);
    assert_false(cl->closed);
    cl->closed = true;
    cl->code = code;
    cl->closed_ns = dmk_clock_ns();
    (void)snprintf(cl->text, sizeof(cl->text), "%s", text);
    cl->stream = NULL;
}

static void call_with(struct client *cl, const char *path, uint32_t deadline_ms)
{
    const struct dmk_rpc_stream_events events = {
        .on_message = on_message, .on_closed = on_closed, .ud = cl};

    dmk_buf_fini(&cl->got);
    *cl = (struct client){0};
    cl->stream = dmk_rpc_call(channel, path, deadline_ms, &events);
    assert_non_null(cl->stream);
}

static int say(struct client *cl, const char *text)
{
    return dmk_rpc_send(cl->stream, (struct dmk_bytes){(const uint8_t *)text, strlen(text)});
}

/* ---- running the loop until ---- */

static bool (*wanted)(void);
static uint64_t give_up_ns;
static struct dmk_timer *look;

static void on_look(void *ud)
{
    (void)ud;
    if (wanted() || dmk_clock_ns() > give_up_ns) {
        dmk_timer_stop(look);
        dmk_loop_stop(loop);
    }
}

static void run_until_within(bool (*fn)(void), unsigned ms)
{
    wanted = fn;
    give_up_ns = dmk_clock_ns() + ms * DMK_NS_PER_MS;
    dmk_timer_start(look, 1, 1);
    dmk_loop_run(loop);
}

#define run_until(fn)                                                                              \
    do {                                                                                           \
        run_until_within(fn, 30000);                                                               \
        assert_true(fn());                                                                         \
    } while (0)

static bool never(void)
{
    return false;
}
static bool is_closed(void)
{
    return c.closed;
}
static bool got_one(void)
{
    return c.n_messages >= 1 || c.closed;
}
static bool got_two(void)
{
    return c.n_messages >= 2 || c.closed;
}
static bool got_five(void)
{
    return c.n_messages >= 5 || c.closed;
}
static bool server_opened(void)
{
    return test_stats.n_open >= 1;
}
static bool server_closed_all(void)
{
    return test_stats.n_open > 0 && test_stats.n_open == test_stats.n_closed;
}

static void start(uint32_t max_streams)
{
    struct dmk_error err;

    test_stats = (struct test_server_stats){0};
    assert_int_equal(dmk_loop_new(&loop, &err), 0);
    look = dmk_timer_new(loop, on_look, NULL);
    assert_int_equal(dmk_rpc_new(loop, &rpc, &err), 0);
    if (max_streams > 0) {
        assert_int_equal(test_server_new(loop, rpc, "127.0.0.1:0", max_streams, &server, &err), 0);
        assert_int_not_equal(dmk_rpc_server_port(server), 0);
        (void)snprintf(target, sizeof(target), "127.0.0.1:%u", dmk_rpc_server_port(server));
        channel = dmk_rpc_channel_new(rpc, target);
    }
}

static int set_up(void **state)
{
    (void)state;
    start(16);
    return 0;
}

static int set_up_alone(void **state)
{
    (void)state;
    start(0);
    return 0;
}

/* gRPC must give everything back quickly: a call that never ends would show here. */
static int tear_down(void **state)
{
    const uint64_t begin = dmk_clock_ns();

    (void)state;
    dmk_rpc_channel_free(&channel);
    dmk_rpc_server_free(&server);
    assert_int_equal(test_stats.n_open, test_stats.n_closed);
    dmk_rpc_free(&rpc);
    dmk_timer_free(&look);
    dmk_loop_free(&loop);
    dmk_buf_fini(&c.got);
    c = (struct client){0};
    assert_true(dmk_clock_ns() - begin < 3 * DMK_NS_PER_S);
    return 0;
}

/* ---- tests in one process ---- */

static void echoes_in_order_and_half_closes(void **state)
{
    static uint8_t big[1u << 20];

    (void)state;
    call_with(&c, "/test.Test/Echo", 0);
    assert_int_equal(say(&c, "a"), 0);
    assert_int_equal(say(&c, ""), 0);
    assert_int_equal(say(&c, "bc"), 0);
    run_until(got_two);
    assert_int_equal(dmk_rpc_send(c.stream, (struct dmk_bytes){big, sizeof(big)}), 0);
    assert_int_equal(say(&c, "d"), 0);
    dmk_rpc_finish(c.stream, DMK_RPC_OK, NULL);
    assert_int_equal(say(&c, "late"), -DMK_EPEER);
    run_until(is_closed);
    assert_int_equal(c.code, DMK_RPC_OK);
    assert_int_equal(c.n_messages, 5);
    assert_int_equal(c.n_bytes, 4 + sizeof(big));
    assert_string_equal(c.got.data, "a||bc|d|");
    run_until(server_closed_all);
    assert_int_equal(test_stats.last_code, DMK_RPC_OK);
    assert_int_equal(test_stats.n_ended, 1);
}

static void bursts_arrive_whole_and_in_order(void **state)
{
    (void)state;
    call_with(&c, "/test.Test/Burst", 0);
    assert_int_equal(say(&c, "20000"), 0);
    run_until(is_closed);
    assert_int_equal(c.code, DMK_RPC_OK);
    assert_int_equal(c.n_messages, 20000);
    assert_false(c.numbered_wrong);
}

static void status_and_text_arrive(void **state)
{
    (void)state;
    call_with(&c, "/test.Test/Fail", 0);
    assert_int_equal(say(&c, "x"), 0);
    run_until(is_closed);
    assert_int_equal(c.code, DMK_RPC_NOT_FOUND);
    assert_string_equal(c.text, "no such thing: x");
    run_until(server_closed_all);
    assert_int_equal(test_stats.last_code, DMK_RPC_NOT_FOUND);
}

static void unknown_methods_are_refused(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        call_with(&c, "/test.Test/Nothing", 5000);
        assert_int_equal(say(&c, "x"), 0);
        run_until(is_closed);
        assert_int_equal(c.code, DMK_RPC_UNIMPLEMENTED);
    }
}

static void deadline_ends_both_sides(void **state)
{
    const uint64_t begin = dmk_clock_ns();

    (void)state;
    call_with(&c, "/test.Test/Hold", 200);
    run_until(is_closed);
    assert_int_equal(c.code, DMK_RPC_DEADLINE_EXCEEDED);
    assert_true(c.closed_ns - begin >= 195 * DMK_NS_PER_MS);
    run_until(server_closed_all);
    assert_int_equal(test_stats.last_code, DMK_RPC_CANCELLED);
}

static void cancel_ends_both_sides(void **state)
{
    uint64_t begin;

    (void)state;
    call_with(&c, "/test.Test/Hold", 0);
    run_until(server_opened);
    begin = dmk_clock_ns();
    dmk_rpc_cancel(c.stream);
    run_until(is_closed);
    assert_int_equal(c.code, DMK_RPC_CANCELLED);
    run_until(server_closed_all);
    assert_int_equal(test_stats.last_code, DMK_RPC_CANCELLED);
    assert_true(dmk_clock_ns() - begin < DMK_NS_PER_S);
    /* From the server. */
    test_stats = (struct test_server_stats){0};
    call_with(&c, "/test.Test/Drop", 0);
    assert_int_equal(say(&c, "x"), 0);
    run_until(is_closed);
    assert_int_not_equal(c.code, DMK_RPC_OK);
    run_until(server_closed_all);
}

static void calls_are_bounded(void **state)
{
    struct client held[2] = {0};

    (void)state;
    start(2);
    call_with(&held[0], "/test.Test/Hold", 0);
    call_with(&held[1], "/test.Test/Hold", 0);
    run_until_within(never, 300);
    assert_int_equal(test_stats.n_open, 2);
    call_with(&c, "/test.Test/Echo", 0);
    run_until(is_closed);
    assert_int_equal(c.code, DMK_RPC_RESOURCE_EXHAUSTED);
    dmk_rpc_cancel(held[0].stream);
    run_until_within(never, 200);
    call_with(&c, "/test.Test/Echo", 0);
    assert_int_equal(say(&c, "in"), 0);
    run_until(got_one);
    assert_string_equal(c.got.data, "in|");
    assert_int_equal(tear_down(state), 0);
    assert_true(held[1].closed);
}

static void large_messages_are_refused(void **state)
{
    static uint8_t big[(4u << 20) + 1];

    (void)state;
    call_with(&c, "/test.Test/Echo", 0);
    assert_int_equal(dmk_rpc_send(c.stream, (struct dmk_bytes){big, sizeof(big)}), 0);
    run_until(is_closed);
    assert_int_not_equal(c.code, DMK_RPC_OK);
    assert_int_equal(c.n_messages, 0);
    run_until(server_closed_all);
}

static void a_freed_server_closes_its_streams(void **state)
{
    (void)state;
    call_with(&c, "/test.Test/Hold", 0);
    run_until(server_opened);
    dmk_rpc_server_free(&server);
    assert_int_equal(test_stats.n_closed, 1); /* inside the call */
    run_until(is_closed);
    assert_int_not_equal(c.code, DMK_RPC_OK);
    /* And a freed channel. */
    call_with(&c, "/test.Test/Hold", 0);
    dmk_rpc_channel_free(&channel);
    assert_true(c.closed);
    assert_int_equal(c.code, DMK_RPC_CANCELLED);
}

static void rpc_free_takes_the_rest(void **state)
{
    (void)state;
    start(4);
    call_with(&c, "/test.Test/Echo", 0);
    assert_int_equal(say(&c, "x"), 0);
    run_until(got_one);
    assert_int_equal(say(&c, "y"), 0); /* still queued */
    dmk_rpc_free(&rpc);
    assert_true(c.closed);
    assert_int_equal(test_stats.n_closed, 1);
    server = NULL;
    channel = NULL;
    assert_int_equal(tear_down(state), 0);
}

static void port_in_use_is_told(void **state)
{
    struct dmk_rpc_server *other = NULL;
    struct dmk_error err;

    (void)state;
    assert_int_equal(test_server_new(loop, rpc, target, 1, &other, &err), -DMK_EIO);
    assert_non_null(strstr(err.text, target));
    assert_null(other);
}

/* ---- health ---- */

static void ask_health(const char *path, const char *service)
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    uint8_t bytes[128];

    request.service = (char *)(uintptr_t)service;
    call_with(&c, path, 5000);
    assert_int_equal(
        dmk_rpc_send(c.stream,
                     (struct dmk_bytes){
                         bytes, grpc__health__v1__health_check_request__pack(&request, bytes)}),
        0);
}

static void expect_health(const char *service, int code, const char *bytes)
{
    ask_health("/grpc.health.v1.Health/Check", service);
    run_until(is_closed);
    assert_int_equal(c.code, code);
    assert_string_equal(c.got.data ? c.got.data : "", bytes);
}

static void health_checks_and_watches(void **state)
{
    (void)state;
    expect_health("", DMK_RPC_OK, "\x08\x02|");
    expect_health("damask.v1.Worker", DMK_RPC_OK, "\x08\x02|");
    expect_health("liveness", DMK_RPC_OK, "\x08\x01|");
    expect_health("nobody", DMK_RPC_NOT_FOUND, "");
    dmk_rpc_server_set_serving(server, true);
    expect_health("", DMK_RPC_OK, "\x08\x01|");
    expect_health("test.Test", DMK_RPC_OK, "\x08\x01|");
    expect_health("readiness", DMK_RPC_OK, "\x08\x01|");

    ask_health("/grpc.health.v1.Health/Watch", "damask.v1.Worker");
    run_until(got_one);
    dmk_rpc_server_set_serving(server, true); /* no change, no word */
    dmk_rpc_server_set_serving(server, false);
    run_until(got_two);
    assert_string_equal(c.got.data, "\x08\x01|\x08\x02|");
    dmk_rpc_cancel(c.stream);
    run_until(is_closed);
    dmk_rpc_server_set_serving(server, true); /* nobody watches any more */
    ask_health("/grpc.health.v1.Health/Watch", "nobody");
    run_until(got_one);
    assert_string_equal(c.got.data, "\x08\x03|");
}

/* ---- a drain ---- */

static bool is_drained(void)
{
    return dmk_rpc_server_is_drained(server);
}

static bool one_call_counts(void)
{
    return dmk_rpc_server_n_calls(server) == 1;
}

static void a_drain_ends_what_has_no_end_and_waits_for_the_rest(void **state)
{
    struct client held = {0}, silent = {0};

    (void)state;
    call_with(&held, "/test.Test/Hold", 0);
    assert_int_equal(say(&held, "x"), 0);
    call_with(&silent, "/test.Test/Hold", 0);
    dmk_rpc_server_set_serving(server, true);
    ask_health("/grpc.health.v1.Health/Watch", "");
    run_until(got_one);
    dmk_rpc_server_set_serving(server, false);
    dmk_rpc_server_drain(server);
    run_until(is_closed);
    assert_int_equal(c.code, DMK_RPC_UNAVAILABLE);
    assert_string_equal(c.got.data, "\x08\x01|\x08\x02|"); /* its last word came first */
    run_until(one_call_counts);
    assert_false(held.closed);
    assert_false(silent.closed);
    assert_false(is_drained());
    dmk_rpc_cancel(held.stream);
    dmk_rpc_cancel(silent.stream);
    run_until(is_drained);
    assert_int_equal(dmk_rpc_server_n_calls(server), 0);
    run_until_within(never, 20); /* the client hears of its cancels */
    assert_true(held.closed);
    assert_true(silent.closed);
    dmk_buf_fini(&held.got);
    dmk_buf_fini(&silent.got);
}

/* ---- a server process that dies, hangs, comes late ---- */

struct child {
    pid_t pid;
    FILE *out;
};

static struct child spawn_server(const char *listen)
{
    struct child child;
    int fds[2];
    unsigned port = 0;

    assert_int_equal(pipe(fds), 0);
    child.pid = fork();
    assert_true(child.pid >= 0);
    if (child.pid == 0) {
        (void)dup2(fds[1], STDOUT_FILENO);
        (void)close(fds[0]);
        (void)execl(server_path, server_path, listen, "300", "300", (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    child.out = fdopen(fds[0], "r");
    assert_non_null(child.out);
    assert_int_equal(fscanf(child.out, "%u", &port), 1);
    (void)snprintf(target, sizeof(target), "127.0.0.1:%u", port);
    return child;
}

static int reap(struct child *child, int signo)
{
    int status = -1;

    kill(child->pid, SIGCONT);
    kill(child->pid, signo);
    assert_int_equal(waitpid(child->pid, &status, 0), child->pid);
    fclose(child->out);
    return status;
}

static void killed_peer_is_noticed_at_once(void **state)
{
    struct child child = spawn_server("127.0.0.1:0");
    uint64_t begin;

    (void)state;
    channel = dmk_rpc_channel_new(rpc, target);
    call_with(&c, "/test.Test/Echo", 0);
    assert_int_equal(say(&c, "x"), 0);
    run_until(got_one);
    begin = dmk_clock_ns();
    (void)reap(&child, SIGKILL);
    run_until(is_closed);
    assert_int_equal(c.code, DMK_RPC_UNAVAILABLE);
    assert_true(dmk_clock_ns() - begin < DMK_NS_PER_S);
    call_with(&c, "/test.Test/Echo", 0);
    run_until(is_closed);
    assert_int_equal(c.code, DMK_RPC_UNAVAILABLE);
    assert_true(c.text[0] != 0);
}

static void hung_peer_is_noticed_by_keepalive(void **state)
{
    struct child child = spawn_server("127.0.0.1:0");
    uint64_t begin;

    (void)state;
    dmk_rpc_set_keepalive(rpc, 300, 300);
    channel = dmk_rpc_channel_new(rpc, target);
    call_with(&c, "/test.Test/Echo", 0);
    assert_int_equal(say(&c, "x"), 0);
    run_until(got_one);
    run_until_within(is_closed, 1500); /* pings alone must not upset the peer */
    assert_false(c.closed);
    begin = dmk_clock_ns();
    kill(child.pid, SIGSTOP);
    run_until(is_closed);
    assert_int_equal(c.code, DMK_RPC_UNAVAILABLE);
    assert_true(dmk_clock_ns() - begin < 3 * DMK_NS_PER_S);
    assert_int_equal(reap(&child, SIGTERM), 0);
}

static void channel_connects_when_the_server_comes(void **state)
{
    struct child child = spawn_server("127.0.0.1:0");
    uint64_t begin;

    (void)state;
    assert_int_equal(reap(&child, SIGTERM), 0); /* leaves a free port */
    channel = dmk_rpc_channel_new(rpc, target);
    call_with(&c, "/test.Test/Echo", 0);
    run_until(is_closed);
    assert_int_equal(c.code, DMK_RPC_UNAVAILABLE);
    child = spawn_server(target);
    begin = dmk_clock_ns();
    do { /* as a caller does it: again when it failed */
        call_with(&c, "/test.Test/Echo", 0);
        (void)say(&c, "x");
        run_until(got_one);
        run_until_within(never, c.closed ? 50 : 1);
    } while (c.closed && dmk_clock_ns() - begin < 8 * DMK_NS_PER_S);
    assert_false(c.closed);
    assert_string_equal(c.got.data, "x|");
    assert_true(dmk_clock_ns() - begin < 4 * DMK_NS_PER_S); /* the pauses are bounded by 2 s */
    dmk_rpc_channel_free(&channel);
    assert_int_equal(reap(&child, SIGTERM), 0);
}

static bool send_failed(void)
{
    static uint8_t block[1u << 20];
    int ret = 0;

    for (int i = 0; i < 4 && ret == 0 && c.stream; i++) {
        ret = dmk_rpc_send(c.stream, (struct dmk_bytes){block, sizeof(block)});
        if (c.stream) {
            assert_true(dmk_rpc_queued_bytes(c.stream) <= DMK_RPC_MAX_QUEUE_BYTES);
        }
    }
    return ret == -DMK_EFULL;
}

static void queue_to_a_hung_peer_is_bounded(void **state)
{
    struct child child = spawn_server("127.0.0.1:0");

    (void)state;
    channel = dmk_rpc_channel_new(rpc, target); /* default keep-alive: will not end it first */
    call_with(&c, "/test.Test/Hold", 0);
    assert_int_equal(say(&c, "x"), 0);
    run_until_within(never, 200);
    kill(child.pid, SIGSTOP);
    run_until_within(send_failed, 4000);
    run_until(is_closed); /* cancelled by the overflow */
    assert_int_equal(c.code, DMK_RPC_CANCELLED);
    dmk_rpc_channel_free(&channel);
    assert_int_equal(reap(&child, SIGTERM), 0);
}

static void flood_from_a_server_flows_and_ends(void **state)
{
    (void)state;
    call_with(&c, "/test.Test/Flood", 0);
    assert_int_equal(say(&c, "x"), 0);
    run_until(got_five);
    /* The server makes more than the connection takes: its queue hits its bound and the call ends. */
    run_until(is_closed);
    assert_int_equal(test_stats.last_send_error, -DMK_EFULL);
    assert_int_not_equal(c.code, DMK_RPC_OK);
    run_until(server_closed_all);
}

#define ON_SERVER(fn) cmocka_unit_test_setup_teardown(fn, set_up, tear_down)
#define ALONE(fn)     cmocka_unit_test_setup_teardown(fn, set_up_alone, tear_down)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        ON_SERVER(echoes_in_order_and_half_closes),
        ON_SERVER(bursts_arrive_whole_and_in_order),
        ON_SERVER(status_and_text_arrive),
        ON_SERVER(unknown_methods_are_refused),
        ON_SERVER(deadline_ends_both_sides),
        ON_SERVER(cancel_ends_both_sides),
        cmocka_unit_test(calls_are_bounded),
        ON_SERVER(large_messages_are_refused),
        ON_SERVER(a_freed_server_closes_its_streams),
        cmocka_unit_test(rpc_free_takes_the_rest),
        ON_SERVER(port_in_use_is_told),
        ON_SERVER(health_checks_and_watches),
        ON_SERVER(a_drain_ends_what_has_no_end_and_waits_for_the_rest),
        ON_SERVER(flood_from_a_server_flows_and_ends),
        ALONE(killed_peer_is_noticed_at_once),
        ALONE(hung_peer_is_noticed_by_keepalive),
        ALONE(channel_connects_when_the_server_comes),
        ALONE(queue_to_a_hung_peer_is_bounded),
    };

    if (argc < 2) {
        fprintf(stderr, "usage: %s PATH_OF_RPC_TEST_SERVER\n", argv[0]);
        return 2;
    }
    server_path = argv[1];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
