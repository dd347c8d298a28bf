/* Pages of other origins: what a browser is told in answers, in preflights and in errors that the server makes
 * by itself. The server's loop runs in a thread of its own, the test is a blocking client. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "client.h"
#include "common/http/http.h"

static struct dmk_loop *loop;
static struct dmk_http_server *server;
static pthread_t thread;
static uint16_t port;

static void on_request(void *ud, struct dmk_http_req *req)
{
    (void)ud;
    if (dmk_str_is(dmk_http_path(req), "/stream")) {
        dmk_http_begin(req, 200, "text/event-stream", NULL);
        (void)dmk_http_write(req, dmk_str_from("data: x\n\n"));
        dmk_http_end(req);
    } else {
        dmk_http_respond(req, 200, "text/plain", NULL, dmk_str_from("the handler"));
    }
}

static void *run_loop(void *arg)
{
    (void)arg;
    dmk_loop_run(loop);
    return NULL;
}

static void start(const char *const *origins, size_t n_origins)
{
    struct dmk_error err;
    const struct dmk_http_conf conf = {
        .host = "127.0.0.1",
        .max_connections = 8,
        .max_header_bytes = 4096,
        .max_body_bytes = 1024,
        .max_write_bytes = 65536,
        .idle_timeout_ms = 5000,
        .request_timeout_ms = 5000,
        .allow = "GET, POST",
        .origins = origins,
        .n_origins = n_origins,
        .on_request = on_request,
    };

    assert_int_equal(dmk_loop_new(&loop, &err), 0);
    assert_int_equal(dmk_http_server_new(loop, &conf, &server, &err), 0);
    port = dmk_http_server_port(server);
    assert_int_equal(pthread_create(&thread, NULL, run_loop, NULL), 0);
}

static void stop(void)
{
    dmk_loop_stop(loop);
    pthread_join(thread, NULL);
    dmk_http_server_free(&server);
    dmk_loop_free(&loop);
}

/* Sends first line, Origin and further lines; the answer is read to the end. */
static void ask(const char *line, const char *origin, const char *lines)
{
    char request[1024];

    (void)snprintf(request, sizeof(request),
                   "%s HTTP/1.1\r\nHost: h\r\nConnection: close\r\nOrigin: %s\r\n%s\r\n", line,
                   origin, lines);
    talk(port, request);
}

static void assert_has_not(const char *part)
{
    if (strstr(answer, part)) {
        fail_msg("\"%s\" in:\n%s", part, answer);
    }
}

/* Everything that a page can run into: an answer, a stream, and refusals of the server itself. */
static const struct {
    const char *line, *lines, *status;
} cases[] = {
    {"GET /", "", "200"},
    {"GET /stream", "", "200"},
    {"POST /", "Content-Length: 99999\r\n", "413"},
    {"POST /", "Content-Encoding: gzip\r\nContent-Length: 1\r\n", "415"},
    {"POST /", "Transfer-Encoding: chunked\r\n\r\nfffff\r\n", "413"},
};
#define N_CASES (sizeof(cases) / sizeof(cases[0]))

#define PREFLIGHT                                                                                  \
    "Access-Control-Request-Method: POST\r\n"                                                      \
    "Access-Control-Request-Headers: authorization,content-type\r\n"

static void nothing_is_allowed_by_default(void **state)
{
    (void)state;
    start(NULL, 0);
    for (size_t i = 0; i < N_CASES; i++) {
        ask(cases[i].line, "https://app.example", cases[i].lines);
        assert_memory_equal(answer + 9, cases[i].status, 3);
        assert_has_not("Access-Control");
        assert_has_not("Vary");
    }
    ask("OPTIONS /", "https://app.example", PREFLIGHT);
    assert_has("the handler");
    assert_has_not("Access-Control");
    stop();
}

static void listed_origins_may_read(void **state)
{
    static const char *const origins[] = {"https://app.example", "http://localhost:3000"};

    (void)state;
    start(origins, 2);
    for (size_t i = 0; i < N_CASES; i++) {
        ask(cases[i].line, "http://localhost:3000", cases[i].lines);
        assert_memory_equal(answer + 9, cases[i].status, 3);
        assert_has("\r\nAccess-Control-Allow-Origin: http://localhost:3000\r\n");
        assert_has("\r\nAccess-Control-Expose-Headers: *\r\n");
        assert_has("\r\nVary: Origin\r\n");
        assert_has_not("Allow-Credentials");
        for (const char *const *other = (const char *const[]){"http://localhost:300", "null", "*",
                                                              "http://localhost:30000", "", NULL};
             *other; other++) {
            ask(cases[i].line, *other, cases[i].lines);
            assert_memory_equal(answer + 9, cases[i].status, 3);
            assert_has_not("Access-Control");
            assert_has("\r\nVary: Origin\r\n");
        }
    }
    stop();
}

static void preflights_are_answered_without_the_handler(void **state)
{
    static const char *const origins[] = {"https://app.example"};

    (void)state;
    start(origins, 1);
    ask("OPTIONS /v1/x", "https://app.example", PREFLIGHT);
    assert_memory_equal(answer + 9, "204", 3);
    assert_has("\r\nAccess-Control-Allow-Origin: https://app.example\r\n");
    assert_has("\r\nAccess-Control-Allow-Methods: GET, POST\r\n");
    assert_has("\r\nAccess-Control-Allow-Headers: authorization,content-type\r\n");
    assert_has("\r\nAccess-Control-Max-Age: 600\r\n");
    assert_int_equal(count("Access-Control-Allow-Origin"), 1);
    /* These are none: another origin, no method, another method. */
    ask("OPTIONS /", "https://other.example", PREFLIGHT);
    assert_has("the handler");
    assert_has_not("Access-Control");
    ask("OPTIONS /", "https://app.example", "");
    assert_has("the handler");
    ask("GET /", "https://app.example", PREFLIGHT);
    assert_has("the handler");
    stop();
}

static void any_origin_may_be_allowed(void **state)
{
    static const char *const origins[] = {"https://app.example", "*"};

    (void)state;
    start(origins, 2);
    for (size_t i = 0; i < N_CASES; i++) {
        ask(cases[i].line, "https://elsewhere.example", cases[i].lines);
        assert_has("\r\nAccess-Control-Allow-Origin: *\r\n");
        assert_has_not("Vary");
    }
    ask("OPTIONS /", "null", PREFLIGHT);
    assert_memory_equal(answer + 9, "204", 3);
    assert_has("\r\nAccess-Control-Allow-Origin: *\r\n");
    stop();
}

static void origins_are_checked_at_the_start(void **state)
{
    static const char *const bad[] = {
        "app.example", "https://", "://app.example",       "",           "https://app.example/",
        "https://a b", "null",     "http://u@app.example", "http://a?x", "https://a\r\nX: y"};
    struct dmk_http_conf conf = {.host = "127.0.0.1",
                                 .max_connections = 1,
                                 .max_header_bytes = 100,
                                 .n_origins = 1,
                                 .on_request = on_request};
    struct dmk_http_server *other = NULL;
    struct dmk_error err;

    (void)state;
    assert_int_equal(dmk_loop_new(&loop, &err), 0);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        conf.origins = &bad[i];
        assert_int_equal(dmk_http_server_new(loop, &conf, &other, &err), -DMK_EINVAL);
        assert_non_null(strstr(err.text, "is no origin"));
    }
    assert_null(other);
    dmk_loop_free(&loop);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_allowed_by_default),
        cmocka_unit_test(listed_origins_may_read),
        cmocka_unit_test(preflights_are_answered_without_the_handler),
        cmocka_unit_test(any_origin_may_be_allowed),
        cmocka_unit_test(origins_are_checked_at_the_start),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
