/* Fuzz target of the HTTP server: the first byte says in what pieces the rest is sent over a real socket.
 * Checked: bounds of what the handler sees, and that every answer begins as one and the connection ends. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
#include "common/base/assert.h"
#include "common/http/http.h"
#include "tests/fuzz/fuzz.h"

#define MAX_BODY   2048
#define MAX_HEADER 1024

static struct dmk_loop *loop;
static struct dmk_http_server *server;
static int client;
static char answer[65536];
static size_t answer_len;
static const uint8_t *left;
static size_t n_left, step;

static void on_request(void *ud, struct dmk_http_req *req)
{
    const struct dmk_bytes body = dmk_http_body(req);
    const struct dmk_str path = dmk_http_path(req);

    (void)ud;
    dmk_assert(body.len <= MAX_BODY);
    dmk_assert(path.len > 0 && path.len <= MAX_HEADER);
    dmk_assert(dmk_http_query(req).len <= MAX_HEADER);
    dmk_assert(dmk_http_header(req, "no-such-header").len <= MAX_HEADER);
    if (body.len % 2 == 0) {
        dmk_http_respond(req, 200, "text/plain", NULL,
                         (struct dmk_str){(const char *)body.data, body.len});
    } else {
        dmk_http_begin(req, 200, "text/plain", NULL);
        (void)dmk_http_write(req, (struct dmk_str){(const char *)body.data, body.len});
        dmk_http_end(req);
    }
}

static void send_some(void *ud)
{
    const size_t n = n_left < step ? n_left : step;

    (void)ud;
    if (n > 0) {
        if (send(client, left, n, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)n) {
            n_left = 0; /* the server has closed already */
        } else {
            left += n;
            n_left -= n;
        }
    }
    if (n_left == 0) {
        (void)shutdown(client, SHUT_WR);
    }
}

/* One turn sends one piece, so that pieces mostly arrive apart. */
static bool before_wait(void *ud)
{
    if (n_left > 0) {
        send_some(ud);
        return n_left == 0;
    }
    return true;
}

static void on_readable(void *ud)
{
    const ssize_t n = recv(client, answer + answer_len, sizeof(answer) - answer_len, 0);

    (void)ud;
    if (n < 0 && errno == EINTR) {
        return;
    }
    if (n <= 0) {
        dmk_loop_stop(loop);
        return;
    }
    answer_len += (size_t)n;
    dmk_assert(answer_len < sizeof(answer));
}

static void start(void)
{
    const struct dmk_http_conf conf = {
        .host = "127.0.0.1",
        .max_connections = 4,
        .max_header_bytes = MAX_HEADER,
        .max_body_bytes = MAX_BODY,
        .max_write_bytes = 1 << 16,
        .idle_timeout_ms = 2000,
        .request_timeout_ms = 2000,
        .on_request = on_request,
    };

    dmk_assert(dmk_loop_new(&loop, NULL) == 0);
    dmk_assert(dmk_http_server_new(loop, &conf, &server, NULL) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct sockaddr_in addr = {.sin_family = AF_INET};
    struct dmk_prepare *prepare;
    struct dmk_poll *poll;

    if (size < 1 || size > 16384) {
        return 0;
    }
    if (!loop) {
        start();
    }
    addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    addr.sin_port = htons(dmk_http_server_port(server));
    client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    dmk_assert(client >= 0);
    /* The fuzzer's clock interrupts; the attempt goes on behind it. */
    while (connect(client, (struct sockaddr *)&addr, sizeof(addr)) != 0 && errno != EISCONN) {
        dmk_assert(errno == EINTR || errno == EALREADY);
    }
    step = (size_t)data[0] * 8 + 1;
    left = data + 1;
    n_left = size - 1;
    answer_len = 0;
    send_some(NULL);
    poll = dmk_poll_new(loop, client, on_readable, NULL);
    prepare = dmk_prepare_new(loop, before_wait, NULL);
    dmk_loop_run(loop);
    dmk_prepare_free(&prepare);
    dmk_poll_free(&poll);
    dmk_assert(answer_len == 0 || (answer_len > 12 && memcmp(answer, "HTTP/1.1 ", 9) == 0));
    close(client);
    return 0;
}
