/* The HTTP server against real sockets on loopback: the server's loop runs in a thread of its own, the
 * tests are blocking clients. Paths of the test server: /echo answers with the body, /hold waits for the
 * client to leave, /stream sends numbered chunks, /flood writes without end, /abort breaks off inside a
 * stream, /empty ends without an answer, anything else answers with what was parsed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include "client.h"
#include "common/base/clock.h"
#include "common/base/rng.h"
#include "common/http/http.h"

#define MAX_BODY   65536
#define MAX_HEADER 4096
#define MAX_WRITE  (1 << 20)

static struct dmk_loop *loop;
static struct dmk_http_server *server;
static struct dmk_timer *flood_timer;
static struct dmk_http_req *flood_req;
static pthread_t thread;
static uint16_t port;
static atomic_int n_gone, n_requests, flood_error, n_connections;
/* Short only where they are tested: nothing else fails when the machine stands still for a second. */
static uint32_t idle_timeout_ms = 30000, request_timeout_ms = 30000;
static bool (*takes_id)(struct dmk_str id);
static sem_t done;

static void on_gone(void *ud)
{
    atomic_fetch_add(&n_gone, 1);
    dmk_http_respond(ud, 200, "text/plain", NULL, dmk_str_from("nobody reads this"));
}

static void on_flood_gone(void *ud)
{
    atomic_fetch_add(&n_gone, 1);
    dmk_timer_stop(flood_timer);
    dmk_http_end(ud);
    flood_req = NULL;
}

static void flood(void *ud)
{
    static char block[32768];

    (void)ud;
    for (int i = 0; i < 8; i++) {
        const int64_t ret = dmk_http_write(flood_req, (struct dmk_str){block, sizeof(block)});

        if (ret < 0) {
            atomic_store(&flood_error, (int)ret);
            return; /* on_gone follows */
        }
    }
}

static void answer_info(struct dmk_http_req *req)
{
    const struct dmk_str m = dmk_http_method(req);
    const struct dmk_str p = dmk_http_path(req);
    const struct dmk_str q = dmk_http_query(req);
    const struct dmk_str h = dmk_http_header(req, "x-test");
    char text[1024];

    (void)snprintf(text, sizeof(text), "method=%.*s path=%.*s query=%.*s x-test=%.*s body=%zu",
                   (int)m.len, m.data, (int)p.len, p.data, (int)q.len, q.data,
                   h.data ? (int)h.len : 4, h.data ? h.data : "none", dmk_http_body(req).len);
    dmk_http_respond(req, 200, "text/plain", "X-Extra: yes\r\n", dmk_str_from(text));
}

static void answer_stream(struct dmk_http_req *req)
{
    dmk_http_begin(req, 200, "text/event-stream", NULL);
    for (int i = 0; i < 5; i++) {
        char text[16];

        (void)snprintf(text, sizeof(text), "data: %d\n\n", i);
        (void)dmk_http_write(req, dmk_str_from(text));
    }
    (void)dmk_http_write(req, dmk_str_from("")); /* must not end the stream */
    (void)dmk_http_write(req, dmk_str_from("last"));
    dmk_http_end(req);
}

static void on_request(void *ud, struct dmk_http_req *req)
{
    const struct dmk_str path = dmk_http_path(req);
    const struct dmk_bytes body = dmk_http_body(req);

    (void)ud;
    atomic_fetch_add(&n_requests, 1);
    if (dmk_str_is(path, "/echo")) {
        dmk_http_respond(req, 200, "application/octet-stream", NULL,
                         (struct dmk_str){(const char *)body.data, body.len});
    } else if (dmk_str_is(path, "/hold")) {
        dmk_http_on_gone(req, on_gone, req);
    } else if (dmk_str_is(path, "/stream")) {
        answer_stream(req);
    } else if (dmk_str_is(path, "/flood")) {
        dmk_http_begin(req, 200, "text/plain", NULL);
        dmk_http_on_gone(req, on_flood_gone, req);
        flood_req = req;
        dmk_timer_start(flood_timer, 1, 1);
    } else if (dmk_str_is(path, "/abort")) {
        dmk_http_begin(req, 200, "text/plain", NULL);
        (void)dmk_http_write(req, dmk_str_from("half"));
        dmk_http_abort(req);
    } else if (dmk_str_is(path, "/empty")) {
        dmk_http_end(req);
    } else if (dmk_str_is(path, "/named")) {
        dmk_http_set_id(req, "by-the-handler");
        dmk_http_respond(req, 200, "text/plain", NULL, dmk_str_from("named"));
    } else if (dmk_str_is(path, "/204")) {
        dmk_http_respond(req, 204, NULL, NULL, dmk_str_from("not sent"));
    } else {
        answer_info(req);
    }
}

static void *run_loop(void *arg)
{
    (void)arg;
    dmk_loop_run(loop);
    return NULL;
}

/* ---- calling into the loop ---- */

static void run_fn(void *ud)
{
    ((void (*)(void))(uintptr_t)ud)();
    sem_post(&done);
}

static void on_loop(void (*fn)(void))
{
    static struct dmk_post post;

    post.fn = run_fn;
    post.ud = (void *)(uintptr_t)fn;
    dmk_loop_post(loop, &post);
    sem_wait(&done);
}

static void count_connections(void)
{
    atomic_store(&n_connections, (int)dmk_http_server_n_connections(server));
}

static void wait_for(atomic_int *value, int want)
{
    for (int i = 0; i < 3000 && atomic_load(value) != want; i++) {
        usleep(10000);
    }
    assert_int_equal(atomic_load(value), want);
}

static void wait_for_connections(int want)
{
    for (int i = 0; i < 3000; i++) {
        on_loop(count_connections);
        if (atomic_load(&n_connections) == want) {
            return;
        }
        usleep(10000);
    }
    fail_msg("%d connections, not %d", atomic_load(&n_connections), want);
}

static void start(uint32_t max_connections)
{
    struct dmk_error err;
    const struct dmk_http_conf conf = {
        .host = "127.0.0.1",
        .max_connections = max_connections,
        .max_header_bytes = MAX_HEADER,
        .max_body_bytes = MAX_BODY,
        .max_write_bytes = MAX_WRITE,
        .idle_timeout_ms = idle_timeout_ms,
        .request_timeout_ms = request_timeout_ms,
        .allow = takes_id ? "GET, POST" : NULL,
        .takes_id = takes_id,
        .on_request = on_request,
    };

    sem_init(&done, 0, 0);
    atomic_store(&n_gone, 0);
    atomic_store(&flood_error, 0);
    assert_int_equal(dmk_loop_new(&loop, &err), 0);
    flood_timer = dmk_timer_new(loop, flood, NULL);
    assert_int_equal(dmk_http_server_new(loop, &conf, &server, &err), 0);
    port = dmk_http_server_port(server);
    assert_int_not_equal(port, 0);
    assert_int_equal(pthread_create(&thread, NULL, run_loop, NULL), 0);
}

static void stop(void)
{
    dmk_loop_stop(loop);
    pthread_join(thread, NULL);
    dmk_http_server_free(&server);
    dmk_timer_free(&flood_timer);
    dmk_loop_free(&loop);
    sem_destroy(&done);
}

static int set_up(void **state)
{
    (void)state;
    start(32);
    return 0;
}

static int set_up_impatient(void **state)
{
    (void)state;
    idle_timeout_ms = 700;
    request_timeout_ms = 300;
    start(32);
    idle_timeout_ms = request_timeout_ms = 30000;
    return 0;
}

static bool is_mine(struct dmk_str id)
{
    return id.len == 6 && memcmp(id.data, "mine-", 5) == 0;
}

static int set_up_named(void **state)
{
    int rc;

    takes_id = is_mine;
    rc = set_up(state);
    takes_id = NULL;
    return rc;
}

static int set_up_named_impatient(void **state)
{
    int rc;

    takes_id = is_mine;
    rc = set_up_impatient(state);
    takes_id = NULL;
    return rc;
}

static int tear_down(void **state)
{
    (void)state;
    stop();
    return 0;
}

/* ---- tests ---- */

static void parses_request_line_and_headers(void **state)
{
    (void)state;
    talk(port, "GET /a/b?x=1&y=%20#frag HTTP/1.1\r\nHost: h\r\nX-TEST:  v w\t \r\nEmpty:\r\n"
               "Connection: close\r\n\r\n");
    assert_has("HTTP/1.1 200 OK\r\n");
    assert_has("method=GET path=/a/b query=x=1&y=%20 x-test=v w body=0");
    assert_has("X-Extra: yes\r\n");
    assert_has("Connection: close\r\n");
    assert_has("Date: ");
    talk(port, "GET http://host:80/abs?q HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    assert_has("path=/abs query=q x-test=none");
    talk(port, "\r\n\r\nDELETE /x HTTP/1.1\r\nHost: h\r\nX-Test:\r\nUpgrade: h2c\r\n"
               "Connection: Upgrade, close\r\n\r\n");
    assert_has("method=DELETE path=/x query= x-test= body=0");
    /* A folded line belongs to the value before it and is no header of its own. */
    talk(port, "GET /x HTTP/1.1\r\nHost: h\r\nOther: a\r\n X-Test: b\r\nConnection: close\r\n\r\n");
    assert_has("x-test=none");
    talk(port, "HEAD /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    assert_has("Content-Length: ");
    assert_null(strstr(answer, "method="));
    talk(port, "HEAD /stream HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    assert_null(strstr(answer, "data:"));
    talk(port, "GET /204 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    assert_has("204 No Content");
    assert_null(strstr(answer, "not sent"));
    assert_null(strstr(answer, "Content-Length"));
    expect_status(port, "GET /empty HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", "500");
}

static void streams_in_chunks(void **state)
{
    (void)state;
    talk(port, "GET /stream HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    assert_has("Transfer-Encoding: chunked\r\n");
    assert_has("\r\n\r\n9\r\ndata: 0\n\n\r\n9\r\ndata: 1\n\n\r\n");
    assert_has("\r\n4\r\nlast\r\n0\r\n\r\n");
    assert_int_equal(count("\r\n0\r\n"), 1);
    /* HTTP/1.0: no chunks, the end is the close. */
    talk(port, "GET /stream HTTP/1.0\r\n\r\n");
    assert_null(strstr(answer, "chunked"));
    assert_has("\r\n\r\ndata: 0\n\ndata: 1\n\n");
    assert_has("Connection: close");
    talk(port, "GET /abort HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_has("4\r\nhalf\r\n");
    assert_null(strstr(answer, "\r\n0\r\n"));
}

static void keeps_alive_and_pipelines_in_order(void **state)
{
    int fd = dial(port);
    const char *at = answer;
    struct dmk_buf all;

    (void)state;
    dmk_buf_init(&all, 0);
    for (int i = 0; i < 400; i++) {
        dmk_buf_printf(&all, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\n\r\n<%04d>",
                       i);
    }
    dmk_buf_puts(
        &all, "GET /stream HTTP/1.1\r\nHost: h\r\n\r\n"
              "POST /echo HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 3\r\n\r\nend"
              "GET /never HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_true(all.len > 20000); /* more than the server's read buffer */
    put(fd, all.data, all.len);
    dmk_buf_fini(&all);
    assert_int_equal(read_until(fd, NULL), 0);
    close(fd);
    assert_int_equal(count("HTTP/1.1 200 OK"), 402);
    for (int i = 0; i < 400; i++) {
        char text[16];

        (void)snprintf(text, sizeof(text), "\r\n\r\n<%04d>", i);
        at = strstr(at, text);
        assert_non_null(at);
    }
    assert_true(strstr(answer, "last") < strstr(answer, "\r\n\r\nend"));

    /* HTTP/1.0 keep-alive on request; two requests one after the other. */
    fd = dial(port);
    for (int i = 0; i < 2; i++) {
        put_text(fd,
                 "POST /echo HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nab");
        assert_true(read_until(fd, "\r\n\r\nab") > 0);
        assert_has("Connection: keep-alive");
    }
    close(fd);
}

/* The same chunked request, sent in pieces of one size or in two pieces, must always be read the same. */
static void takes_any_cut(void **state)
{
    static const char request[] =
        "POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n"
        "X-Test: abc\r\nConnection: close\r\n\r\n"
        "5\r\nhello\r\n1;ext=\"q\"\r\n \r\n00006\r\nworld!\r\n0\r\nTrailer: t\r\n\r\n";
    const size_t len = sizeof(request) - 1;

    (void)state;
    for (size_t step = 1; step < 8; step++) {
        const int fd = dial(port);

        for (size_t at = 0; at < len; at += step) {
            put(fd, request + at, at + step < len ? step : len - at);
            if (step > 3) {
                usleep(300); /* else the pieces would mostly arrive as one */
            }
        }
        assert_int_equal(read_until(fd, NULL), 0);
        assert_has("\r\n\r\nhello world!");
        close(fd);
    }
    for (size_t cut = 1; cut < len; cut++) {
        const int fd = dial(port);

        put(fd, request, cut);
        usleep(500);
        put(fd, request + cut, len - cut);
        assert_int_equal(read_until(fd, NULL), 0);
        assert_has("\r\n\r\nhello world!");
        close(fd);
    }
}

static void refuses_malformed(void **state)
{
#define POST "POST / HTTP/1.1\r\nHost: a\r\n"
    static const char *const bad[] = {
        "GET / HTTP/1.1\r\n\r\n",                         /* no Host */
        "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",   /* two */
        "GET / HTTP/1.1\r\nHost : a\r\n\r\n",             /* space before the colon */
        "GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n",        /* lone CR */
        "GET / HTTP/1.1\r\nHost: a\r\nX: a\x01z\r\n\r\n", /* control character */
        "G@T / HTTP/1.1\r\nHost: a\r\n\r\n",              /* method */
        "GET  HTTP/1.1\r\nHost: a\r\n\r\n",               /* no target */
        "GET / HTTP/x.1\r\nHost: a\r\n\r\n",              /* version */
        "GET / FTP/1.1\r\nHost: a\r\n\r\n",               /* protocol */
        POST "Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        POST "Content-Length: +1\r\n\r\na",
        POST "Content-Length: 1x\r\n\r\na",
        POST "Content-Length: 18446744073709551616\r\n\r\na",
        POST "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST "Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n",
        POST "Transfer-Encoding: gzip\r\n\r\nx",
        POST "Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        POST "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST "Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST "Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
        POST "Transfer-Encoding: chunked\r\n\r\n-1\r\na\r\n0\r\n\r\n",
        POST "Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\na",
        "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    };
#undef POST
    const int before = atomic_load(&n_requests);

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        expect_status(port, bad[i], "400");
        assert_has("Connection: close");
    }
    expect_status(port, "GET / HTTP/2.0\r\nHost: a\r\n\r\n", "505");
    /* Other protocols are cut off without an answer that they would not understand. */
    talk(port, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    assert_string_equal(answer, "");
    talk(port, "\x16\x03\x01\x02\x01\x01\x01\x01\xfc\x03\x03");
    assert_string_equal(answer, "");
    expect_status(port, "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
                  "501");
    expect_status(port,
                  "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n"
                  "Transfer-Encoding: chunked\r\n\r\n",
                  "501");
    expect_status(port, "CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", "405");
    expect_status(port, "GET / HTTP/1.1\r\nHost: a\r\nExpect: the-unexpected\r\n\r\n", "417");
    assert_int_equal(atomic_load(&n_requests), before);
    /* Behind a request it is only a bad one: the first answer is not lost by a reset. */
    talk(port, "GET /info HTTP/1.1\r\nHost: h\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    assert_has("HTTP/1.1 200 OK");
    assert_has("HTTP/1.1 400 Bad Request");
}

static char big[MAX_BODY + 8192];

/* big = head (formatted), then n times c, then tail. */
__attribute__((format(printf, 4, 5))) static void fill_big(char c, size_t n, const char *tail,
                                                           const char *fmt, ...)
{
    va_list ap;
    size_t len;

    va_start(ap, fmt);
    len = (size_t)vsnprintf(big, sizeof(big), fmt, ap);
    va_end(ap);
    memset(big + len, c, n);
    memcpy(big + len + n, tail, strlen(tail) + 1);
}

static void bounds_header_and_body(void **state)
{
    struct dmk_buf many;

    (void)state;
    fill_big('x', MAX_HEADER, "\r\n\r\n", "GET / HTTP/1.1\r\nHost: h\r\nX: ");
    expect_status(port, big, "431");
    fill_big('x', MAX_HEADER, " HTTP/1.1\r\nHost: h\r\n\r\n", "GET /");
    expect_status(port, big, "414");
    dmk_buf_init(&many, 0);
    dmk_buf_puts(&many, "GET / HTTP/1.1\r\nHost: h\r\n");
    for (int i = 0; i < 101; i++) {
        dmk_buf_puts(&many, "a: b\r\n");
    }
    dmk_buf_puts(&many, "\r\n");
    expect_status(port, many.data, "431");
    dmk_buf_fini(&many);

    /* Refused before the body comes. */
    fill_big(0, 0, "",
             "POST /echo HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n",
             MAX_BODY + 1);
    expect_status(port, big, "413");
    assert_null(strstr(answer, "100 Continue"));
    /* Exactly the bound passes. */
    fill_big('y', MAX_BODY, "",
             "POST /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: %d\r\n\r\n",
             MAX_BODY);
    talk(port, big);
    assert_has("body=65536");
    /* Chunked, no length in advance; the client sends on for a while after the answer. */
    fill_big('y', MAX_BODY + 1024, "",
             "POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n",
             MAX_BODY + 1024);
    expect_status(port, big, "413");
    /* A chunk says how large it is: refused before it comes, also where it is the sum that is too large. */
    fill_big(0, 0, "", "POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n",
             MAX_BODY + 1);
    expect_status(port, big, "413");
    fill_big(0, 0, "",
             "POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n%x\r\n",
             MAX_BODY - 2);
    expect_status(port, big, "413");
    fill_big(
        'y', MAX_BODY - 3, "\r\n0\r\n\r\n",
        "POST /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        "3\r\nabc\r\n%x\r\n",
        MAX_BODY - 3);
    talk(port, big);
    assert_has("body=65536");
    /* Trailers and chunk extensions are not kept but bounded. */
    fill_big('y', MAX_HEADER, "\r\n\r\n",
             "POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nT: ");
    expect_status(port, big, "431");
    fill_big('y', MAX_HEADER, "\r\na\r\n0\r\n\r\n",
             "POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1;");
    expect_status(port, big, "431");
}

static void continues_on_request(void **state)
{
    const int fd = dial(port);

    (void)state;
    put_text(fd, "POST /echo HTTP/1.1\r\nHost: h\r\nExpect: 100-Continue\r\n"
                 "Connection: close\r\nContent-Length: 5\r\n\r\n");
    assert_true(read_until(fd, "\r\n\r\n") > 0);
    assert_string_equal(answer, "HTTP/1.1 100 Continue\r\n\r\n");
    put_text(fd, "hello");
    assert_int_equal(read_until(fd, NULL), 0);
    assert_has("\r\n\r\nhello");
    close(fd);
}

/* A packed body would be read as if it were none; the answer does not wait for it. */
static void refuses_packed_bodies(void **state)
{
    static const char *const packed[] = {"gzip",
                                         "GZIP",
                                         "br",
                                         "deflate",
                                         "identity, gzip",
                                         "zstd",
                                         "identity\r\nContent-Encoding: gzip"};
    static const char *const plain[] = {"identity", "Identity"};
    char request[256];
    const int before = atomic_load(&n_requests);

    (void)state;
    for (size_t i = 0; i < sizeof(packed) / sizeof(packed[0]); i++) {
        (void)snprintf(request, sizeof(request),
                       "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Encoding: %s\r\n"
                       "Expect: 100-continue\r\nContent-Length: 10\r\n\r\n",
                       packed[i]);
        expect_status(port, request, "415");
        assert_has("Accept-Encoding: identity\r\n");
        assert_has("Content-Encoding");
        assert_null(strstr(answer, "100 Continue"));
    }
    assert_int_equal(atomic_load(&n_requests), before);
    for (size_t i = 0; i < sizeof(plain) / sizeof(plain[0]); i++) {
        (void)snprintf(request, sizeof(request),
                       "POST /echo HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
                       "Content-Encoding: %s\r\nContent-Length: 2\r\n\r\nok",
                       plain[i]);
        talk(port, request);
        assert_has("\r\n\r\nok");
    }
}

/* The answer has one id: this one, or 32 digits when want is NULL. */
static void assert_id(const char *want)
{
    static const char name[] = "\r\nx-request-id: ";
    const char *id = strstr(answer, name);

    assert_int_equal(count(name), 1);
    id += sizeof(name) - 1;
    if (want) {
        assert_memory_equal(id, want, strlen(want));
    }
    assert_int_equal(strcspn(id, "\r"), want ? strlen(want) : 32);
}

/* Whoever makes the answer, and however little of the request was read: what the client sent comes back where its
 * header was read. */
static void every_answer_has_an_id(void **state)
{
    static const struct {
        const char *request, *status, *id;
    } cases[] = {
        {"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", "200", NULL},
        {"GET / HTTP/1.0\r\nX-Request-ID: mine-1\r\n\r\n", "200", "mine-1"},
        {"GET / HTTP/1.0\r\nx-request-id: theirs\r\n\r\n", "200", NULL},
        {"GET /named HTTP/1.0\r\nx-request-id: mine-1\r\n\r\n", "200", "by-the-handler"},
        {"GET /stream HTTP/1.0\r\nx-request-id: mine-1\r\n\r\n", "200", "mine-1"},
        {"GET /empty HTTP/1.0\r\nx-request-id: mine-1\r\n\r\n", "500", "mine-1"},
        {"no HTTP\r\n\r\n", "400", NULL},
        {"BREW / HTTP/1.1\r\nHost: h\r\nx-request-id: mine-1\r\n\r\n", "405", NULL},
        {"GET / HTTP/1.1\r\nx-request-id: mine-1\r\n\r\n", "400", "mine-1"},
        {"GET / HTTP/1.1\r\nx-request-id: mine-1\r\nbad header\r\n\r\n", "400", "mine-1"},
        {"POST / HTTP/1.0\r\nx-request-id: mine-1\r\nContent-Length: 9999999\r\n\r\n", "413",
         "mine-1"},
        {"POST / HTTP/1.0\r\nx-request-id: mine-1\r\nContent-Encoding: br\r\n\r\n", "415",
         "mine-1"},
        {"GET / HTTP/1.1\r\nHost: h\r\nx-request-id: mine-1\r\nExpect: it\r\n\r\n", "417",
         "mine-1"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        expect_status(port, cases[i].request, cases[i].status);
        assert_id(cases[i].id);
    }
    fill_big('x', MAX_HEADER, "\r\n\r\n", "GET / HTTP/1.1\r\nx-request-id: mine-1\r\nX: ");
    expect_status(port, big, "431");
    assert_id("mine-1");
    fill_big('x', MAX_HEADER, "\r\nx-request-id: mine-1\r\n\r\n", "GET / HTTP/1.1\r\nX: ");
    expect_status(port, big, "431");
    assert_id(NULL);
    fill_big('x', MAX_HEADER, " HTTP/1.1\r\nx-request-id: mine-1\r\n\r\n", "GET /");
    expect_status(port, big, "414");
    assert_id(NULL);
}

static void what_is_late_or_one_too_many_has_an_id(void **state)
{
    int fds[33];

    (void)state;
    for (int i = 0; i < 33; i++) {
        fds[i] = dial(port);
    }
    assert_true(read_until(fds[32], "\r\n\r\n") > 0);
    assert_has("HTTP/1.1 503 ");
    assert_id(NULL);
    put_text(fds[0], "GET / HTTP/1.1\r\nx-request-id: mine-1\r\nHo");
    assert_true(read_until(fds[0], "\r\n\r\n") > 0);
    assert_has("HTTP/1.1 408 ");
    assert_id("mine-1");
    for (int i = 0; i < 33; i++) {
        close(fds[i]);
    }
}

static void slow_and_idle_clients_end(void **state)
{
    int fd = dial(port);
    uint64_t begin = dmk_clock_ns();
    ssize_t n = -1;

    (void)state;
    put_text(fd, "GET / HTTP/1.1\r\nHo");
    assert_int_equal(read_until(fd, NULL), 0);
    assert_has("HTTP/1.1 408 ");
    assert_true(dmk_clock_ns() - begin >= 290 * DMK_NS_PER_MS);
    close(fd);

    /* A byte now and then does not help. */
    fd = dial(port);
    begin = dmk_clock_ns();
    put_text(fd, "GET /");
    for (int i = 0; i < 1000 && n <= 0; i++) {
        put_text(fd, "x");
        usleep(20000);
        n = recv(fd, answer, sizeof(answer) - 1, MSG_DONTWAIT);
    }
    assert_true(n > 0);
    assert_true(dmk_clock_ns() - begin < 15 * DMK_NS_PER_S);
    assert_int_equal(strncmp(answer, "HTTP/1.1 408", 12), 0);
    close(fd);

    /* Idle: closed without a word, also after an answer. */
    fd = dial(port);
    put_text(fd, "GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    begin = dmk_clock_ns();
    assert_int_equal(read_until(fd, NULL), 0);
    assert_int_equal(count("HTTP/1.1"), 1);
    assert_true(dmk_clock_ns() - begin >= 650 * DMK_NS_PER_MS);
    close(fd);
    wait_for_connections(0);
}

static const char hold[] = "GET /hold HTTP/1.1\r\nHost: h\r\n\r\n";

static void client_gone_is_told(void **state)
{
    struct linger reset = {.l_onoff = 1, .l_linger = 0};
    int fd;

    (void)state;
    /* A waiting answer outlives the idle timeout; then: closed, half-closed, reset. */
    fd = dial(port);
    put_text(fd, hold);
    usleep(900000);
    assert_int_equal(atomic_load(&n_gone), 0);
    close(fd);
    wait_for(&n_gone, 1);
    fd = dial(port);
    put_text(fd, hold);
    shutdown(fd, SHUT_WR);
    wait_for(&n_gone, 2);
    close(fd);
    fd = dial(port);
    put_text(fd, hold);
    usleep(20000);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)), 0);
    close(fd);
    wait_for(&n_gone, 3);
    wait_for_connections(0);
}

static void slow_reader_is_bounded(void **state)
{
    int fd = dial(port);
    size_t total = 0;

    (void)state;
    put_text(fd, "GET /flood HTTP/1.1\r\nHost: h\r\n\r\n");
    wait_for(&n_gone, 1); /* reads nothing at all */
    assert_int_equal(atomic_load(&flood_error), -DMK_EPEER);
    close(fd);
    /* A reader that keeps up gets many times the bound. */
    fd = dial(port);
    atomic_store(&flood_error, 0);
    put_text(fd, "GET /flood HTTP/1.1\r\nHost: h\r\n\r\n");
    while (total < 20u * MAX_WRITE) {
        const ssize_t n = recv(fd, answer, sizeof(answer), 0);

        assert_true(n > 0);
        total += (size_t)n;
    }
    assert_int_equal(atomic_load(&flood_error), 0);
    close(fd);
    wait_for(&n_gone, 2);
    wait_for_connections(0);
}

static void connections_are_bounded(void **state)
{
    int fds[3];
    int extra;

    (void)state;
    start(3);
    for (int i = 0; i < 3; i++) {
        fds[i] = dial(port);
    }
    wait_for_connections(3);
    extra = dial(port);
    assert_int_equal(read_until(extra, NULL), 0);
    assert_has("HTTP/1.1 503 ");
    assert_has("Retry-After: 1");
    close(extra);
    close(fds[0]);
    wait_for_connections(2);
    talk(port,
         "POST /echo HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok");
    assert_has("\r\n\r\nok");
    close(fds[1]);
    close(fds[2]);
    stop();
}

static void drain_now(void)
{
    dmk_http_server_drain(server);
}

static void drain_lets_requests_finish(void **state)
{
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons(port)};
    const int idle = dial(port), held = dial(port);
    int late;

    (void)state;
    put_text(held, hold);
    wait_for_connections(2);
    usleep(50000);
    on_loop(drain_now);
    assert_int_equal(read_until(idle, NULL), 0);
    usleep(20000);
    late = socket(AF_INET, SOCK_STREAM, 0);
    addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_not_equal(connect(late, (struct sockaddr *)&addr, sizeof(addr)), 0);
    wait_for_connections(1);
    close(late);
    close(idle);
    close(held);
    wait_for(&n_gone, 1);
    wait_for_connections(0);
}

static void open_requests_are_told_when_the_server_goes(void **state)
{
    const int held = dial(port);

    (void)state;
    atomic_store(&n_requests, 0);
    put_text(held, hold);
    wait_for(&n_requests, 1);
    stop();
    assert_int_equal(atomic_load(&n_gone), 1);
    close(held);
    start(32); /* for tear_down */
}

static void two_servers_can_not_share_a_port(void **state)
{
    struct dmk_http_conf conf = {.host = "127.0.0.1",
                                 .port = port,
                                 .max_connections = 1,
                                 .max_header_bytes = 100,
                                 .idle_timeout_ms = 1,
                                 .request_timeout_ms = 1,
                                 .on_request = on_request};
    struct dmk_http_server *other = NULL;
    struct dmk_loop *second;
    struct dmk_error err;

    (void)state;
    assert_int_equal(dmk_loop_new(&second, NULL), 0);
    assert_int_equal(dmk_http_server_new(second, &conf, &other, &err), -DMK_EIO);
    assert_non_null(strstr(err.text, "127.0.0.1:"));
    assert_non_null(strstr(err.text, "address already in use"));
    conf.host = "no such host.invalid";
    assert_int_equal(dmk_http_server_new(second, &conf, &other, &err), -DMK_EINVAL);
    assert_non_null(strstr(err.text, "no such host.invalid"));
    assert_null(other);
    dmk_loop_free(&second);
}

/* Valid requests with random damage: the server must answer or close, and stay up. */
static void survives_noise(void **state)
{
    static const char valid[] = "POST /echo HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
                                "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    const uint64_t seed = (uint64_t)time(NULL);
    uint64_t counter = 0;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int round = 0; round < 150; round++) {
        char bytes[sizeof(valid)];
        const int fd = dial(port);
        const unsigned n_damage = (unsigned)(dmk_rng_u64(seed, 0, counter++) % 4 + 1);

        memcpy(bytes, valid, sizeof(valid));
        for (unsigned i = 0; i < n_damage; i++) {
            const uint64_t r = dmk_rng_u64(seed, 0, counter++);

            bytes[r % (sizeof(valid) - 1)] = (char)(r >> 32);
        }
        put(fd, bytes, sizeof(valid) - 1);
        shutdown(fd, SHUT_WR);
        assert_true(read_until(fd, NULL) <= 0);
        close(fd);
    }
    talk(port,
         "POST /echo HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok");
    assert_has("\r\n\r\nok");
    wait_for_connections(0);
}

#define ON_SERVER(fn)           cmocka_unit_test_setup_teardown(fn, set_up, tear_down)
#define ON_IMPATIENT_SERVER(fn) cmocka_unit_test_setup_teardown(fn, set_up_impatient, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON_SERVER(parses_request_line_and_headers),
        ON_SERVER(streams_in_chunks),
        ON_SERVER(keeps_alive_and_pipelines_in_order),
        ON_SERVER(takes_any_cut),
        ON_SERVER(refuses_malformed),
        ON_SERVER(bounds_header_and_body),
        ON_SERVER(continues_on_request),
        ON_SERVER(refuses_packed_bodies),
        cmocka_unit_test_setup_teardown(every_answer_has_an_id, set_up_named, tear_down),
        cmocka_unit_test_setup_teardown(what_is_late_or_one_too_many_has_an_id,
                                        set_up_named_impatient, tear_down),
        ON_IMPATIENT_SERVER(slow_and_idle_clients_end),
        ON_IMPATIENT_SERVER(client_gone_is_told),
        ON_SERVER(slow_reader_is_bounded),
        cmocka_unit_test(connections_are_bounded),
        ON_SERVER(drain_lets_requests_finish),
        ON_SERVER(open_requests_are_told_when_the_server_goes),
        ON_SERVER(two_servers_can_not_share_a_port),
        ON_SERVER(survives_noise),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
