/* The worker's shell as a router and a probe see it: the whole worker runs in a thread with a role of paper,
 * the test is a gRPC client on its own loop and a blocking HTTP client. SIGTERM is sent to the process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
#include "common/base/clock.h"
#include "role.h"
#include "tests/unit/http/client.h"

static struct test_role role;
static struct dmk_worker_role ops;
static struct dmk_worker_conf conf;
static pthread_t thread;
static int exit_status;
static uint16_t admin_port;
static char listen_on[64];

/* ---- the worker ---- */

static void *run_worker(void *arg)
{
    (void)arg;
    exit_status = dmk_worker_run(&ops, &conf);
    return NULL;
}

/* Below the range of outgoing connections, one of which could take it before the worker listens. */
static uint16_t free_port(void)
{
    static unsigned next;

    for (int i = 0; i < 1000; i++) {
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        const uint16_t port = (uint16_t)(10000 + ((unsigned)getpid() * 101 + next++) % 20000);
        struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons(port)};

        addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const int ret = bind(fd, (struct sockaddr *)&addr, sizeof(addr));
        close(fd);
        if (ret == 0) {
            return port;
        }
    }
    fail_msg("no free port");
    return 0;
}

static void prepare(void)
{

    memset(&role, 0, sizeof(role));
    role.prompt_numerics = "test-prompts";
    ops = test_role_make(&role);
    admin_port = free_port();
    (void)snprintf(listen_on, sizeof(listen_on), "127.0.0.1:%u", free_port());
    conf = (struct dmk_worker_conf){
        .worker_id = strdup("w \"1\""),
        .model = strdup("/models/tiny/"),
        .model_name = strdup(""),
        .revision = strdup("rev"),
        .backend = strdup("cpu"),
        .listen = strdup(listen_on),
        .admin_host = strdup("127.0.0.1"),
        .admin_port = admin_port,
        .tp = 1,
        .full_pages = 100,
        .window_pages = 10,
        .xfer_transport = DMK_WORKER_NONE,
        .xfer_bind = strdup(""),
        .drain_limit_ms = 60000,
        .stuck_after_ms = 60000,
        .load_every_ms = 50,
        .keepalive_ms = 10000,
        .keepalive_timeout_ms = 5000,
        .log_level = 0,
    };
}

static char get_text[256];
static const char *get(const char *path)
{
    (void)snprintf(get_text, sizeof(get_text),
                   "GET %s HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", path);
    return get_text;
}

static void wait_status(const char *path, const char *status)
{
    for (int i = 0; i < 3000; i++) {
        talk(admin_port, get(path));
        if (strncmp(answer + 9, status, 3) == 0) {
            return;
        }
        usleep(10000);
    }
    fail_msg("%s never answered %s but:\n%s", path, status, answer);
}

static void start_worker(void)
{
    assert_int_equal(pthread_create(&thread, NULL, run_worker, NULL), 0);
}

/* Waits until the admin port answers at all. */
static void wait_admin(void)
{
    for (int i = 0; i < 3000; i++) {
        struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons(admin_port)};
        const int fd = socket(AF_INET, SOCK_STREAM, 0);

        addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0) {
            close(fd);
            return;
        }
        close(fd);
        usleep(10000);
    }
    fail_msg("no admin port");
}

static int join_worker(void)
{
    pthread_join(thread, NULL);
    free(conf.worker_id);
    free(conf.model);
    free(conf.model_name);
    free(conf.revision);
    free(conf.backend);
    free(conf.listen);
    free(conf.admin_host);
    free(conf.xfer_bind);
    return exit_status;
}

/* ---- a router ---- */

#define MAX_EVENTS 64

struct router {
    struct dmk_rpc_stream *stream;
    bool closed;
    enum dmk_rpc_code code;
    char text[256];
    int n_messages;
    Damask__V1__WorkerMessage *messages[4 * MAX_EVENTS]; /* freed at the end */
    const Damask__V1__WorkerEvent *events[MAX_EVENTS];   /* without loads */
    int event_message[MAX_EVENTS];                       /* index of its message */
    int n_events, n_loads;
    uint64_t incarnation;
};

static struct dmk_loop *loop;
static struct dmk_rpc *rpc;
static struct dmk_rpc_channel *channel;
static struct dmk_timer *look;
static struct router a, b;
static bool (*wanted)(void);
static uint64_t give_up_ns;

static void on_message(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes bytes)
{
    struct router *r = ud;
    Damask__V1__WorkerMessage *m;
    struct dmk_error err;

    (void)stream;
    if (dmk_msg_worker_unpack(bytes, 1000, NULL, &m, &err) < 0) {
        fail_msg("%s", err.text);
    }
    assert_true(r->n_messages < 4 * MAX_EVENTS);
    r->messages[r->n_messages] = m;
    r->incarnation = m->incarnation;
    for (size_t i = 0; i < m->n_events; i++) {
        if (m->events[i]->body_case == DAMASK__V1__WORKER_EVENT__BODY_LOAD) {
            r->n_loads++;
        } else {
            assert_true(r->n_events < MAX_EVENTS);
            r->event_message[r->n_events] = r->n_messages;
            r->events[r->n_events++] = m->events[i];
        }
    }
    r->n_messages++;
}

static void on_closed(void *ud, struct dmk_rpc_stream *stream, enum dmk_rpc_code code,
                      const char *text)
{
    struct router *r = ud;

    (void)stream;
    r->closed = true;
    r->code = code;
    (void)snprintf(r->text, sizeof(r->text), "%s", text);
    r->stream = NULL;
}

static void forget(struct router *r)
{
    for (int i = 0; i < r->n_messages; i++) {
        damask__v1__worker_message__free_unpacked(r->messages[i], NULL);
    }
    *r = (struct router){0};
}

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
static bool a_closed(void)
{
    return a.closed;
}
static bool b_closed(void)
{
    return b.closed;
}
static bool a_greeted(void)
{
    return a.n_events >= 2 || a.closed; /* hello and blocks */
}
static bool b_greeted(void)
{
    return b.n_events >= 2 || b.closed;
}
static int want_events;
static bool a_has(void)
{
    return a.n_events >= want_events || a.closed;
}
static bool a_load(void)
{
    return a.n_loads > 0 || a.closed;
}
static bool gone_once(void)
{
    return atomic_load(&role.n_gone) == 1;
}

static bool gone_thrice(void)
{
    return atomic_load(&role.n_gone) == 3;
}

static void dial_worker(struct router *r)
{
    const struct dmk_rpc_stream_events events = {
        .on_message = on_message, .on_closed = on_closed, .ud = r};

    forget(r);
    r->stream = dmk_rpc_call(channel, "/damask.v1.Worker/Connect", 0, &events);
}

static void say(struct router *r, Damask__V1__RouterMessage *m, int body)
{
    m->body_case = (Damask__V1__RouterMessage__BodyCase)body;
    if (m->worker_incarnation == 0) {
        m->worker_incarnation = r->incarnation;
    }
    assert_int_equal(dmk_rpc_send_message(r->stream, &m->base), 0);
}

static void say_hello(struct router *r, const char *id, uint64_t incarnation, uint32_t version)
{
    Damask__V1__RouterMessage m = DAMASK__V1__ROUTER_MESSAGE__INIT;
    Damask__V1__RouterHello hello = DAMASK__V1__ROUTER_HELLO__INIT;

    hello.version = version;
    hello.router_id = (char *)(uintptr_t)id;
    hello.incarnation = incarnation;
    m.hello = &hello;
    say(r, &m, DAMASK__V1__ROUTER_MESSAGE__BODY_HELLO);
}

static void say_generate(struct router *r, uint64_t lo, const uint32_t *prompt, size_t n,
                         uint64_t worker_incarnation)
{
    Damask__V1__RouterMessage m = DAMASK__V1__ROUTER_MESSAGE__INIT;
    Damask__V1__Generate g = DAMASK__V1__GENERATE__INIT;
    Damask__V1__Sampling s = DAMASK__V1__SAMPLING__INIT;
    Damask__V1__RequestId id = DAMASK__V1__REQUEST_ID__INIT;

    id.lo = lo;
    id.attempt = 2;
    s.top_p = 1;
    g.id = &id;
    g.sampling = &s;
    g.prompt = (uint32_t *)(uintptr_t)prompt;
    g.n_prompt = n;
    g.max_tokens = 10;
    m.generate = &g;
    m.worker_incarnation = worker_incarnation;
    say(r, &m, DAMASK__V1__ROUTER_MESSAGE__BODY_GENERATE);
}

static void greet(struct router *r, const char *id, uint64_t incarnation)
{
    dial_worker(r);
    say_hello(r, id, incarnation, DMK_PROTOCOL_VERSION);
}

static void open_client(void)
{
    assert_int_equal(dmk_loop_new(&loop, NULL), 0);
    assert_int_equal(dmk_rpc_new(loop, &rpc, NULL), 0);
    look = dmk_timer_new(loop, on_look, NULL);
    channel = dmk_rpc_channel_new(rpc, listen_on);
}

static void close_client(void)
{
    dmk_rpc_channel_free(&channel);
    dmk_rpc_free(&rpc);
    dmk_timer_free(&look);
    dmk_loop_free(&loop);
    forget(&a);
    forget(&b);
}

static void serve(void)
{
    start_worker();
    wait_admin();
    wait_status("/readyz", "200");
    open_client();
}

static int set_up(void **state)
{
    (void)state;
    prepare();
    serve();
    return 0;
}

static int set_up_impatient(void **state)
{
    (void)state;
    prepare();
    conf.stuck_after_ms = 1500;
    serve();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    close_client();
    kill(getpid(), SIGTERM);
    assert_int_equal(join_worker(), 0);
    assert_int_equal(atomic_load(&role.n_close), 1);
    assert_int_equal(atomic_load(&role.n_engine_closed), 1);
    return 0;
}

static Damask__V1__WorkerEvent__BodyCase kind(int i)
{
    return a.events[i]->body_case;
}

#define IS(i, name) assert_int_equal(kind(i), DAMASK__V1__WORKER_EVENT__BODY_##name)

/* ---- tests ---- */

static void hello_blocks_and_load(void **state)
{
    const Damask__V1__WorkerHello *h;

    (void)state;
    greet(&a, "r1", 1);
    run_until(a_greeted);
    IS(0, HELLO);
    h = a.events[0]->hello;
    assert_int_equal(h->version, 1);
    assert_int_equal(h->role, DAMASK__V1__ROLE__ROLE_DECODE);
    assert_string_equal(h->worker_id, "w \"1\"");
    assert_string_equal(h->model_name, "tiny");
    assert_string_equal(h->numerics, "test-numerics");
    assert_string_equal(h->prompt_numerics, "test-prompts");
    assert_string_equal(h->revision, "rev");
    assert_int_equal(h->model_id_hi, 4);
    assert_int_equal(h->page_tokens, 64);
    assert_int_equal(h->n_full_pages, 120);
    assert_int_equal(h->n_window_pages, 12);
    assert_int_equal(h->max_context, 50);
    assert_int_equal(h->max_sequences, 33);
    assert_int_equal(h->n_eos_ids, 2);
    assert_int_equal(h->eos_ids[1], 8);
    assert_false(h->draining);
    assert_int_not_equal(a.incarnation, 0);
    IS(1, BLOCKS); /* an empty listing says so too */
    assert_true(a.events[1]->blocks->snapshot);
    assert_int_equal(a.events[1]->blocks->n_added, 0);
    run_until(a_load);
    run_until_within(never, 1300);
    assert_true(a.n_loads >= 2 && a.n_loads <= 4); /* unchanged: once a second */
    assert_true(atomic_load(&role.n_tick) > 10);
}

static void a_request_runs_and_its_events_come_back(void **state)
{
    static const uint32_t prompt[] = {5, 6, 7};

    (void)state;
    greet(&a, "r1", 1);
    run_until(a_greeted);
    say_generate(&a, 11, prompt, 3, 0);
    want_events = 7;
    run_until(a_has);
    IS(2, RESERVED);
    for (int i = 0; i < 3; i++) {
        IS(3 + i, TOKENS);
        assert_int_equal(a.events[3 + i]->tokens->id->lo, 11);
        assert_int_equal(a.events[3 + i]->tokens->id->attempt, 2);
        assert_int_equal(a.events[3 + i]->tokens->first_index, i);
        assert_int_equal(a.events[3 + i]->tokens->ids[0], prompt[i]);
    }
    IS(6, FINISHED);
    /* What one turn brought came in one message. */
    assert_int_equal(a.event_message[5], a.event_message[6]);
    assert_int_not_equal(a.event_message[4], a.event_message[5]);
    assert_true(atomic_load(&role.n_poke) >= 3 && atomic_load(&role.n_poke) <= 6);
    talk(admin_port, get("/metrics"));
    assert_has("vllm:request_success_total{model_name=\"tiny\",finished_reason=\"length\"} 1\n");
    assert_has("vllm:request_generation_tokens_sum{model_name=\"tiny\"} 3\n");
}

static void bad_requests_are_failed_by_id(void **state)
{
    static const uint32_t bad[] = {5, 1000};
    Damask__V1__RouterMessage m = DAMASK__V1__ROUTER_MESSAGE__INIT;
    Damask__V1__Prefill p = DAMASK__V1__PREFILL__INIT;
    Damask__V1__RequestId id = DAMASK__V1__REQUEST_ID__INIT;

    (void)state;
    greet(&a, "r1", 1);
    run_until(a_greeted);
    say_generate(&a, 12, bad, 2, 0);
    want_events = 3;
    run_until(a_has);
    IS(2, FAILED);
    assert_int_equal(a.events[2]->failed->id->lo, 12);
    assert_int_equal(a.events[2]->failed->code, DAMASK__V1__FAILURE_CODE__FAILURE_INVALID);
    assert_non_null(strstr(a.events[2]->failed->text, "prompt token 1 is 1000"));
    id.lo = 13;
    p.id = &id;
    m.prefill = &p;
    say(&a, &m, DAMASK__V1__ROUTER_MESSAGE__BODY_PREFILL);
    want_events = 4;
    run_until(a_has);
    IS(3, FAILED);
    assert_non_null(strstr(a.events[3]->failed->text, "decode worker"));
    assert_int_equal(atomic_load(&role.n_generate), 0);
    talk(admin_port, get("/metrics"));
    assert_has("damask_requests_failed_total{model_name=\"tiny\",code=\"invalid\"} 2\n");
}

static void a_failure_of_the_role_is_told(void **state)
{
    static const uint32_t prompt[] = {5};
    const struct dmk_failed why = {
        .code = DMK_FAILURE_FULL, .text = "no room", .retry_after_ms = 250};

    (void)state;
    atomic_store(&role.fail_with, &why);
    greet(&a, "r1", 1);
    run_until(a_greeted);
    say_generate(&a, 14, prompt, 1, 0);
    want_events = 3;
    run_until(a_has);
    atomic_store(&role.fail_with, NULL);
    IS(2, FAILED);
    assert_int_equal(a.events[2]->failed->id->lo, 14);
    assert_int_equal(a.events[2]->failed->id->attempt, 2);
    assert_int_equal(a.events[2]->failed->code, DAMASK__V1__FAILURE_CODE__FAILURE_FULL);
    assert_string_equal(a.events[2]->failed->text, "no room");
    assert_int_equal(a.events[2]->failed->retry_after_ms, 250);
    talk(admin_port, get("/metrics"));
    assert_has("damask_requests_failed_total{model_name=\"tiny\",code=\"full\"} 1\n");
}

static void other_messages_reach_the_role(void **state)
{
    Damask__V1__RouterMessage m = DAMASK__V1__ROUTER_MESSAGE__INIT;
    Damask__V1__RequestId id = DAMASK__V1__REQUEST_ID__INIT;
    Damask__V1__Cancel cancel = DAMASK__V1__CANCEL__INIT;
    Damask__V1__QuietAsk ask = DAMASK__V1__QUIET_ASK__INIT;
    Damask__V1__ClosedWord word = DAMASK__V1__CLOSED_WORD__INIT;
    Damask__V1__PeerReport report = DAMASK__V1__PEER_REPORT__INIT;

    (void)state;
    greet(&a, "r1", 1);
    run_until(a_greeted);
    id.lo = 1;
    cancel.id = &id;
    m.cancel = &cancel;
    say(&a, &m, DAMASK__V1__ROUTER_MESSAGE__BODY_CANCEL);
    m.quiet_ask = &ask;
    say(&a, &m, DAMASK__V1__ROUTER_MESSAGE__BODY_QUIET_ASK);
    word.cookie_hi = 5;
    m.closed = &word;
    say(&a, &m, DAMASK__V1__ROUTER_MESSAGE__BODY_CLOSED);
    report.peer_incarnation = 99;
    m.peer_report = &report;
    say(&a, &m, DAMASK__V1__ROUTER_MESSAGE__BODY_PEER_REPORT);
    run_until_within(never, 200);
    assert_int_equal(atomic_load(&role.n_cancel), 1);
    assert_int_equal(atomic_load(&role.n_quiet), 1);
    assert_int_equal(atomic_load(&role.n_closed_word), 1);
    assert_int_equal(atomic_load(&role.n_peer_report), 1);
}

static void breaking_the_protocol_ends_the_stream(void **state)
{
    static const uint32_t prompt[] = {5};

    (void)state;
    dial_worker(&a);
    say_generate(&a, 1, prompt, 1, 5);
    run_until(a_closed);
    assert_int_equal(a.code, DMK_RPC_INVALID_ARGUMENT);
    assert_string_equal(a.text, "the first message must be hello");

    dial_worker(&a);
    say_hello(&a, "r1", 1, 2);
    run_until(a_closed);
    assert_int_equal(a.code, DMK_RPC_FAILED_PRECONDITION);
    assert_non_null(strstr(a.text, "version 1 of the protocol, the router 2"));

    greet(&a, "r1", 1);
    run_until(a_greeted);
    assert_int_equal(dmk_rpc_send(a.stream, (struct dmk_bytes){(const uint8_t *)"\xff\xff\xff", 3}),
                     0);
    run_until(a_closed);
    assert_int_equal(a.code, DMK_RPC_INVALID_ARGUMENT);
    assert_non_null(strstr(a.text, "not a RouterMessage"));

    greet(&a, "r1", 1);
    run_until(a_greeted);
    say_generate(&a, 1, prompt, 1, a.incarnation - 1);
    run_until(a_closed);
    assert_int_equal(a.code, DMK_RPC_FAILED_PRECONDITION);
    assert_non_null(strstr(a.text, "another incarnation"));

    greet(&a, "r1", 1);
    run_until(a_greeted);
    say_hello(&a, "r1", 1, 1);
    run_until(a_closed);
    assert_non_null(strstr(a.text, "second hello"));
    assert_int_equal(atomic_load(&role.n_generate), 0);
    run_until(gone_thrice); /* those that were greeted */
}

static void a_router_that_comes_again_takes_its_place(void **state)
{
    static const uint32_t prompt[] = {5, 6, 7};

    (void)state;
    atomic_store(&role.hold_step, true);
    greet(&a, "r1", 5);
    run_until(a_greeted);
    say_generate(&a, 1, prompt, 3, 0);
    want_events = 3;
    run_until(a_has);
    greet(&b, "r1", 6);
    run_until(b_greeted);
    run_until(a_closed);
    assert_false(b.closed);
    assert_int_equal(atomic_load(&role.n_gone), 1); /* its request is gone with it */
    atomic_store(&role.hold_step, false);
    sem_post(&role.step_gate);
    run_until_within(never, 100);
    assert_int_equal(b.n_events, 2);
    greet(&a, "r1", 4); /* an older one */
    run_until(a_closed);
    assert_int_equal(a.code, DMK_RPC_FAILED_PRECONDITION);
    greet(&a, "r2", 1); /* another name */
    run_until(a_greeted);
    assert_false(a.closed);
    assert_false(b.closed);
    talk(admin_port, get("/state"));
    assert_has("\"router_ids\":[");
    assert_has("\"r1\"");
    assert_has("\"r2\"");
}

static void a_broken_stream_is_told(void **state)
{
    (void)state;
    greet(&a, "r1", 1);
    run_until(a_greeted);
    dmk_rpc_cancel(a.stream);
    run_until(gone_once);
    greet(&a, "r1", 1);
    run_until(a_greeted);
    dmk_rpc_finish(a.stream, DMK_RPC_OK, NULL); /* half-close: it ends well */
    run_until(a_closed);
    assert_int_equal(a.code, DMK_RPC_OK);
}

static void prefixes_are_listed_in_parts_and_changes_follow(void **state)
{
    size_t n = 0;

    (void)state;
    role.n_blocks = 1200; /* nobody is connected yet */
    greet(&a, "r1", 1);
    want_events = 4;
    run_until(a_has);
    for (int i = 1; i < 4; i++) {
        IS(i, BLOCKS);
        assert_int_equal(a.events[i]->blocks->snapshot, i == 1);
        for (size_t k = 0; k < a.events[i]->blocks->n_added; k++) {
            assert_int_equal(a.events[i]->blocks->added[k]->lo, ++n);
        }
    }
    assert_int_equal(n, 1200);
    atomic_store(&role.n_changes, 5);
    want_events = 5;
    run_until(a_has);
    IS(4, BLOCKS);
    assert_false(a.events[4]->blocks->snapshot);
    assert_int_equal(a.events[4]->blocks->n_added, 3);
    assert_int_equal(a.events[4]->blocks->n_removed, 2);
    atomic_store(&role.lose_blocks, 1); /* the whole listing again */
    want_events = 8;
    run_until(a_has);
    assert_true(a.events[5]->blocks->snapshot);
    assert_int_equal(a.events[5]->blocks->n_added, 512);
    /* One of several caches has lost its changes, another has one to tell: both must be heard of. */
    atomic_store(&role.lose_others, 1);
    atomic_store(&role.n_changes, 1);
    want_events = 12;
    run_until(a_has);
    assert_int_equal(a.events[8]->blocks->n_added, 1);
    assert_true(a.events[9]->blocks->snapshot);
}

/* promtool objects to the ':' of vLLM's names, which can not be helped, and to nothing else. */
static void check_with_promtool(void)
{
    const char *tool = getenv("DMK_PROMTOOL");
    char cmd[256];
    FILE *pipe;
    const char *body = strstr(answer, "\r\n\r\n");

    if (!tool || !*tool) {
        print_message("promtool is not installed\n");
        return;
    }
    (void)snprintf(
        cmd, sizeof(cmd),
        "%s check metrics 2>&1 | grep -v \"should not contain ':'\" | grep . && exit 1 || exit 0",
        tool);
    pipe = popen(cmd, "w");
    assert_non_null(pipe);
    assert_true(fputs(body + 4, pipe) >= 0);
    assert_int_equal(pclose(pipe), 0);
}

static void admin_port_answers(void **state)
{
    (void)state;
    expect_status(admin_port, get("/livez"), "200");
    expect_status(admin_port, get("/health"), "200");
    assert_has("application/json");
    assert_has(
        "{\"status\":\"ok\",\"worker_id\":\"w \\\"1\\\"\",\"role\":\"decode\",\"incarnation\":\"");
    assert_has("\"model\":\"tiny\",\"lane\":\"none\",\"transport\":\"none\",\"device\":\"\","
               "\"routers\":0}");
    expect_status(admin_port, get("/state"), "200");
    assert_has("\"pools\":{\"full\":{\"total\":100,\"free\":60,\"cached\":15,\"leased\":20,"
               "\"draining\":5},"
               "\"window\":{\"total\":10,\"free\":10,\"cached\":0,\"leased\":0,\"draining\":0}}");
    assert_has(",\"requests\":[]}");
    expect_status(admin_port, get("/nothing"), "404");
    expect_status(
        admin_port,
        "POST /livez HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", "405");
    expect_status(admin_port, get("/metrics"), "200");
    assert_has("vllm:num_requests_running{model_name=\"tiny\"} 0\n");
    assert_has("vllm:num_requests_waiting{model_name=\"tiny\"} 0\n");
    assert_has("vllm:kv_cache_usage_perc{model_name=\"tiny\"} 0.25\n");
    assert_has("vllm:generation_tokens_total{model_name=\"tiny\"} 17\n");
    assert_has("damask_kv_pages{model_name=\"tiny\",pool=\"full\",state=\"draining\"} 5\n");
    assert_has("damask_requests_failed_total{model_name=\"tiny\",code=\"peer\"} 0\n");
    assert_has("damask_ready{model_name=\"tiny\"} 1\n");
    check_with_promtool();
}

static void a_stuck_step_fails_health(void **state)
{
    static const uint32_t prompt[] = {5};

    (void)state;
    atomic_store(&role.hold_step, true);
    greet(&a, "r1", 1);
    run_until(a_greeted);
    say_generate(&a, 1, prompt, 1, 0);
    want_events = 3;
    run_until(a_has);
    expect_status(admin_port, get("/livez"), "200");
    wait_status("/livez", "503");
    expect_status(admin_port, get("/readyz"), "503");
    assert_has("stuck");
    atomic_store(&role.hold_step, false);
    sem_post(&role.step_gate);
    wait_status("/livez", "200");
    expect_status(admin_port, get("/readyz"), "200");
}

static void probes_answer_while_loading(void **state)
{
    (void)state;
    prepare();
    conf.stuck_after_ms = 250;
    atomic_store(&role.hold_open, true);
    start_worker();
    wait_admin();
    expect_status(admin_port, get("/livez"), "200");
    expect_status(admin_port, get("/readyz"), "503");
    expect_status(admin_port, get("/health"), "503");
    assert_has("\"status\":\"loading\"");
    expect_status(admin_port, get("/state"), "200");
    expect_status(admin_port, get("/metrics"), "200");
    usleep(400000); /* longer than a step may take: loading is no step */
    expect_status(admin_port, get("/livez"), "200");
    atomic_store(&role.hold_open, false);
    sem_post(&role.open_gate);
    wait_status("/readyz", "200");
    kill(getpid(), SIGTERM);
    assert_int_equal(join_worker(), 0);
}

static void a_missing_model_ends_the_start(void **state)
{
    (void)state;
    prepare();
    role.fail_open_engine = true;
    start_worker();
    assert_int_equal(join_worker(), 1);
    assert_int_equal(atomic_load(&role.n_open), 0);
    assert_int_equal(atomic_load(&role.n_close), 0);
    assert_int_equal(atomic_load(&role.n_engine_closed), 0);
}

/* Ready means that the engine has computed something. */
static void an_engine_that_can_not_compute_ends_the_start(void **state)
{
    (void)state;
    for (int bad = 0; bad < 2; bad++) {
        prepare();
        role.fail_step = bad == 0;
        role.bad_logits = bad == 1;
        start_worker();
        assert_int_equal(join_worker(), 1);
        assert_int_equal(atomic_load(&role.n_engine_steps), 1 + bad);
        assert_int_equal(atomic_load(&role.n_open), 0);
        assert_int_equal(atomic_load(&role.n_engine_closed), 1);
    }
}

static void drain_finishes_what_runs(void **state)
{
    static const uint32_t prompt[] = {5, 6};

    (void)state;
    prepare();
    atomic_store(&role.hold_step, true);
    start_worker();
    wait_admin();
    wait_status("/readyz", "200");
    open_client();
    greet(&a, "r1", 1);
    run_until(a_greeted);
    say_generate(&a, 1, prompt, 2, 0);
    want_events = 3;
    run_until(a_has);
    kill(getpid(), SIGTERM);
    want_events = 4;
    run_until(a_has);
    IS(3, DRAIN);
    assert_int_equal(a.events[3]->drain->limit_ms, 60000);
    expect_status(admin_port, get("/readyz"), "503");
    assert_has("draining");
    expect_status(admin_port, get("/livez"), "200");
    assert_int_equal(atomic_load(&role.n_drain), 1);
    say_generate(&a, 2, prompt, 2, 0); /* refused */
    want_events = 5;
    run_until(a_has);
    IS(4, FAILED);
    assert_int_equal(a.events[4]->failed->code, DAMASK__V1__FAILURE_CODE__FAILURE_DRAINING);
    greet(&b, "r2", 1); /* a router that comes now is told */
    run_until(b_greeted);
    assert_true(b.events[0]->hello->draining);
    atomic_store(&role.hold_step, false);
    sem_post(&role.step_gate);
    run_until(a_closed);
    run_until(b_closed);
    assert_int_equal(a.n_events, 8); /* two tokens and finished came before the end */
    IS(7, FINISHED);
    assert_int_equal(a.code, DMK_RPC_OK);
    assert_int_equal(join_worker(), 0);
    assert_int_equal(atomic_load(&role.n_close), 1);
    close_client();
}

static void drain_has_a_limit_and_a_second_signal_ends(void **state)
{
    uint64_t begin;

    (void)state;
    prepare();
    role.never_idle = true;
    conf.drain_limit_ms = 300;
    start_worker();
    wait_admin();
    wait_status("/readyz", "200");
    begin = dmk_clock_ns();
    kill(getpid(), SIGTERM);
    assert_int_equal(join_worker(), 0);
    assert_true(dmk_clock_ns() - begin >= 300 * DMK_NS_PER_MS);
    assert_true(dmk_clock_ns() - begin < 30 * DMK_NS_PER_S);

    prepare();
    role.never_idle = true;
    start_worker();
    wait_admin();
    wait_status("/readyz", "200");
    begin = dmk_clock_ns();
    kill(getpid(), SIGTERM);
    usleep(100000);
    kill(getpid(), SIGTERM);
    assert_int_equal(join_worker(), 0);
    assert_true(dmk_clock_ns() - begin < 30 * DMK_NS_PER_S); /* the limit is 60 s */
}

#define ON_WORKER(fn) cmocka_unit_test_setup_teardown(fn, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON_WORKER(hello_blocks_and_load),
        ON_WORKER(a_request_runs_and_its_events_come_back),
        ON_WORKER(bad_requests_are_failed_by_id),
        ON_WORKER(a_failure_of_the_role_is_told),
        ON_WORKER(other_messages_reach_the_role),
        ON_WORKER(breaking_the_protocol_ends_the_stream),
        ON_WORKER(a_router_that_comes_again_takes_its_place),
        ON_WORKER(a_broken_stream_is_told),
        ON_WORKER(prefixes_are_listed_in_parts_and_changes_follow),
        ON_WORKER(admin_port_answers),
        cmocka_unit_test_setup_teardown(a_stuck_step_fails_health, set_up_impatient, tear_down),
        cmocka_unit_test(probes_answer_while_loading),
        cmocka_unit_test(a_missing_model_ends_the_start),
        cmocka_unit_test(an_engine_that_can_not_compute_ends_the_start),
        cmocka_unit_test(drain_finishes_what_runs),
        cmocka_unit_test(drain_has_a_limit_and_a_second_signal_ends),
    };

    signal(SIGTERM, SIG_IGN); /* between workers */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
