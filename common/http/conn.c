/* One connection: bytes in, bytes out, its one timer, and its end. */
#include "common/http/internal.h"
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/log.h"

#define OUT_MAX_BYTES                                                                              \
    (256u << 20) /* backstop for one whole answer; streams are bounded by the conf */
#define KEEPALIVE_S 30
#define KEEP_BYTES  (256u << 10) /* a larger output buffer is not kept between requests */

static void start_reading(struct dmk_http__conn *conn);
static void take_plain(struct dmk_http__conn *conn);

static void on_handle_closed(uv_handle_t *handle)
{
    struct dmk_http__conn *conn = handle->data;
    struct dmk_http_server *server = conn->server;

    if (--conn->open_handles == 0) {
        dmk_http__tls_close(conn);
        dmk_buf_fini(&conn->out);
        dmk_buf_fini(&conn->writing);
        free(conn->in);
        free(conn);
    }
    dmk_http__handle_closed(server);
}

void dmk_http__conn_close(struct dmk_http__conn *conn)
{
    struct dmk_http_server *server = conn->server;

    if (conn->state == DMK_HTTP__CLOSED) {
        return;
    }
    if (conn->req) {
        struct dmk_http_req *req = conn->req;

        conn->req = NULL;
        if (conn->state == DMK_HTTP__PENDING) {
            dmk_http__req_lost(req);
        } else {
            dmk_http__req_free(req);
        }
    }
    conn->state = DMK_HTTP__CLOSED;
    if (conn->counted) {
        server->n_conns--;
    } else {
        server->n_spares--;
    }
    dmk_list_remove(&conn->node);
    dmk_list_remove(&conn->dirty_node);
    uv_close((uv_handle_t *)&conn->tcp, on_handle_closed);
    uv_close((uv_handle_t *)&conn->timer, on_handle_closed);
}

static void on_timer(uv_timer_t *timer)
{
    struct dmk_http__conn *conn = timer->data;
    const struct dmk_http_conf *conf = &conn->server->conf;

    switch (conn->state) {
    case DMK_HTTP__READING:
        dmk_http__conn_fail(conn, 408, "the request took too long to arrive");
        break;
    case DMK_HTTP__PENDING:
    case DMK_HTTP__FLUSHING:
        /* Only a reader that takes nothing of what waits is too slow; an answer may take long to make. */
        if (dmk_http__conn_waiting(conn) > 0 &&
            dmk_clock_ns() - conn->progress_ns >= conf->idle_timeout_ms * DMK_NS_PER_MS) {
            dmk_http__conn_close(conn);
        }
        break;
    default:
        dmk_http__conn_close(conn);
        break;
    }
}

/* Each state has its own time: idle, whole request, stalled reader, linger. */
void dmk_http__conn_state(struct dmk_http__conn *conn, enum dmk_http__state state)
{
    const struct dmk_http_conf *conf = &conn->server->conf;
    uint64_t ms = conf->idle_timeout_ms;

    conn->state = state;
    uv_update_time(conn->timer.loop);
    switch (state) {
    case DMK_HTTP__READING:
        ms = conf->request_timeout_ms;
        break;
    case DMK_HTTP__LINGER:
        ms = DMK_HTTP__LINGER_MS;
        break;
    default:
        break;
    }
    uv_timer_start(&conn->timer, on_timer, ms,
                   state == DMK_HTTP__PENDING || state == DMK_HTTP__FLUSHING ? ms : 0);
}

size_t dmk_http__conn_waiting(const struct dmk_http__conn *conn)
{
    return conn->out.len + conn->writing.len - conn->written;
}

void dmk_http__conn_dirty(struct dmk_http__conn *conn)
{
    if (dmk_list_empty(&conn->dirty_node) && !conn->write_busy) {
        dmk_list_push_back(&conn->server->dirty, &conn->dirty_node);
        dmk_loop_defer(conn->server->loop, &conn->server->flush);
    }
}

static void on_shutdown(uv_shutdown_t *shutdown, int status)
{
    (void)shutdown; /* the peer's end or the timer closes; a failed one ends by reading */
    (void)status;
}

/* All output has left. */
static void output_done(struct dmk_http__conn *conn)
{
    if (conn->state == DMK_HTTP__LINGER) {
        if (conn->ssl && !conn->tls_said_bye) {
            conn->tls_said_bye = true;
            dmk_http__tls_bye(conn);
            dmk_http__conn_flush(conn); /* comes back here */
            return;
        }
        /* Closing with unread input would reset the connection and could eat the answer. */
        if (conn->shut) {
            return;
        }
        conn->shut = true;
        if (uv_shutdown(&conn->shutdown, (uv_stream_t *)&conn->tcp, on_shutdown) < 0) {
            dmk_http__conn_close(conn);
        }
        return;
    }
    if (conn->state != DMK_HTTP__FLUSHING) {
        return;
    }
    if (conn->close_after || conn->server->draining) {
        dmk_http__conn_state(conn, DMK_HTTP__LINGER);
        output_done(conn);
        return;
    }
    if (conn->out.cap > KEEP_BYTES || conn->writing.cap > KEEP_BYTES) {
        dmk_buf_fini(&conn->out);
        dmk_buf_fini(&conn->writing);
        dmk_buf_init(&conn->out, OUT_MAX_BYTES);
        dmk_buf_init(&conn->writing, OUT_MAX_BYTES);
    }
    dmk_http__conn_state(conn, DMK_HTTP__IDLE);
    llhttp_resume(&conn->parser);
    start_reading(conn);
    dmk_http__conn_parse(conn); /* pipelined bytes */
    if (conn->ssl) {
        take_plain(conn);
    }
}

static void on_written(uv_write_t *write, int status)
{
    struct dmk_http__conn *conn = write->data;

    conn->write_busy = false;
    if (conn->state == DMK_HTTP__CLOSED) {
        return;
    }
    if (status < 0) {
        dmk_http__conn_close(conn);
        return;
    }
    conn->progress_ns = dmk_clock_ns();
    dmk_buf_reset(&conn->writing);
    conn->written = 0;
    dmk_http__conn_flush(conn);
}

/* Writes what has gathered: first directly, then the rest by libuv. One write is in flight at a time. */
void dmk_http__conn_flush(struct dmk_http__conn *conn)
{
    struct dmk_buf full;
    uv_buf_t buf;
    int n;

    if (conn->state == DMK_HTTP__CLOSED || conn->write_busy) {
        return;
    }
    if (conn->out.failed) { /* beyond the backstop */
        dmk_http__conn_close(conn);
        return;
    }
    if (conn->out.len == 0 && !(conn->ssl && dmk_http__tls_has_output(conn))) {
        output_done(conn);
        return;
    }
    if (conn->ssl) {
        if (!dmk_http__tls_seal(conn, &conn->out, &conn->writing)) {
            dmk_http__conn_close(conn);
            return;
        }
    } else {
        full = conn->out;
        conn->out = conn->writing;
        conn->writing = full;
    }
    conn->written = 0;
    buf = uv_buf_init(conn->writing.data, (unsigned)conn->writing.len);
    n = uv_try_write((uv_stream_t *)&conn->tcp, &buf, 1);
    if (n > 0) {
        conn->progress_ns = dmk_clock_ns();
        conn->written = (size_t)n;
    } else if (n != UV_EAGAIN) {
        dmk_http__conn_close(conn);
        return;
    }
    if (conn->written == conn->writing.len) {
        dmk_buf_reset(&conn->writing);
        conn->written = 0;
        output_done(conn);
        return;
    }
    buf = uv_buf_init(conn->writing.data + conn->written,
                      (unsigned)(conn->writing.len - conn->written));
    conn->write.data = conn;
    if (uv_write(&conn->write, (uv_stream_t *)&conn->tcp, &buf, 1, on_written) < 0) {
        dmk_http__conn_close(conn);
        return;
    }
    conn->write_busy = true;
}

void dmk_http__conn_answered(struct dmk_http__conn *conn)
{
    dmk_assert(conn->state == DMK_HTTP__PENDING);
    conn->req = NULL;
    dmk_http__conn_state(conn, DMK_HTTP__FLUSHING);
    dmk_http__conn_dirty(conn);
}

void dmk_http__conn_fail(struct dmk_http__conn *conn, unsigned status, const char *sentence)
{
    struct dmk_http_server *server = conn->server;
    struct dmk_buf body;
    bool json = server->conf.on_error != NULL;
    char extra[128] = "";

    if (conn->ssl && !conn->tls_ready) { /* there is no way to say it */
        dmk_http__conn_close(conn);
        return;
    }
    if (status == 503) {
        (void)snprintf(extra, sizeof(extra), "Retry-After: 1\r\n");
    } else if (status == 405) {
        (void)snprintf(extra, sizeof(extra), "Allow: %s\r\n", server->conf.allow);
    } else if (status == 415) {
        (void)snprintf(extra, sizeof(extra), "Accept-Encoding: identity\r\n");
    }
    dmk_buf_init(&body, 1u << 16);
    if (json) {
        server->conf.on_error(server->conf.ud, status, sentence, &body);
    } else {
        dmk_buf_printf(&body, "%s\n", sentence);
    }
    dmk_http__put_head(server, conn->req, &conn->out, status,
                       json ? "application/json" : "text/plain", extra);
    if (conn->req) {
        dmk_http__req_free(conn->req);
        conn->req = NULL;
    }
    dmk_buf_printf(&conn->out, "Content-Length: %zu\r\nConnection: close\r\n\r\n", body.len);
    dmk_buf_append(&conn->out, body.data, body.len);
    dmk_buf_fini(&body);
    conn->in_start = conn->in_end = 0;
    dmk_http__conn_state(conn, DMK_HTTP__LINGER);
    start_reading(conn);
    dmk_http__conn_dirty(conn);
}

/* Room behind what waits to be parsed. */
static size_t make_room(struct dmk_http__conn *conn)
{
    if (conn->in_start > 0) {
        memmove(conn->in, conn->in + conn->in_start, conn->in_end - conn->in_start);
        conn->in_end -= conn->in_start;
        conn->in_start = 0;
    }
    return DMK_HTTP__READ_BYTES - conn->in_end;
}

static void on_alloc(uv_handle_t *handle, size_t size, uv_buf_t *buf)
{
    struct dmk_http__conn *conn = handle->data;

    (void)size;
    if (conn->ssl) { /* what is read is taken over before anybody else reads */
        *buf = uv_buf_init(conn->server->tls_in, DMK_HTTP__READ_BYTES);
        return;
    }
    (void)make_room(conn);
    *buf = uv_buf_init(conn->in + conn->in_end, (unsigned)(DMK_HTTP__READ_BYTES - conn->in_end));
}

static void stop_reading(struct dmk_http__conn *conn)
{
    uv_read_stop((uv_stream_t *)&conn->tcp);
    conn->reading = false;
}

/* n bytes stand behind in_end, or the input has ended (n < 0). */
static void on_input(struct dmk_http__conn *conn, int64_t n)
{
    if (n == UV_EOF && conn->state == DMK_HTTP__FLUSHING) {
        conn->close_after = true; /* the answer is made: it may still be read */
        stop_reading(conn);
        return;
    }
    if (n < 0) { /* also the end of the peer's sending half */
        dmk_http__conn_close(conn);
        return;
    }
    if (conn->state == DMK_HTTP__LINGER) {
        conn->linger_bytes += (size_t)n;
        if (conn->linger_bytes > DMK_HTTP__LINGER_BYTES) {
            dmk_http__conn_close(conn);
        }
        return;
    }
    conn->in_end += (size_t)n;
    if (conn->state == DMK_HTTP__PENDING || conn->state == DMK_HTTP__FLUSHING) {
        if (conn->in_end - conn->in_start == DMK_HTTP__READ_BYTES) {
            /* A pipeline this deep waits in the socket; its client leaving is seen when it is read on. */
            stop_reading(conn);
        }
        return;
    }
    dmk_http__conn_parse(conn);
}

/* Plain bytes out of TLS, until there are no more or no room for them. */
static void take_plain(struct dmk_http__conn *conn)
{
    int64_t n = 1;

    while (n > 0 && conn->state != DMK_HTTP__CLOSED && conn->reading) {
        const size_t room = make_room(conn);

        n = dmk_http__tls_read(conn, conn->in + conn->in_end, room);
        if (n != 0) {
            on_input(conn, n);
        }
    }
    if (conn->state != DMK_HTTP__CLOSED && dmk_http__tls_has_output(conn)) {
        dmk_http__conn_dirty(conn);
    }
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
    struct dmk_http__conn *conn = stream->data;

    if (n > 0 && conn->ssl) {
        dmk_http__tls_feed(conn, buf->base, (size_t)n);
        take_plain(conn);
    } else if (n != 0) {
        on_input(conn, n);
    }
}

void dmk_http__tell_peer(struct dmk_http__conn *conn, const char *what)
{
    const uint64_t now = dmk_clock_ns();

    if (now - conn->server->told_ns >= DMK_NS_PER_S) {
        conn->server->told_ns = now;
        dmk_log_warn("HTTP: client %s is cut off: %s", conn->peer, what);
    }
}

static void start_reading(struct dmk_http__conn *conn)
{
    if (!conn->reading) {
        conn->reading = uv_read_start((uv_stream_t *)&conn->tcp, on_alloc, on_read) == 0;
    }
}

static void name_peer(struct dmk_http__conn *conn)
{
    struct sockaddr_storage addr = {0};
    int len = sizeof(addr);
    char ip[48] = "?";
    unsigned port = 0;

    if (uv_tcp_getpeername(&conn->tcp, (struct sockaddr *)&addr, &len) == 0) {
        if (addr.ss_family == AF_INET6) {
            (void)uv_ip6_name((struct sockaddr_in6 *)&addr, ip, sizeof(ip));
            port = ntohs(((struct sockaddr_in6 *)&addr)->sin6_port);
        } else {
            (void)uv_ip4_name((struct sockaddr_in *)&addr, ip, sizeof(ip));
            port = ntohs(((struct sockaddr_in *)&addr)->sin_port);
        }
    }
    (void)snprintf(conn->peer, sizeof(conn->peer), addr.ss_family == AF_INET6 ? "[%s]:%u" : "%s:%u",
                   ip, port);
}

/* Takes a waiting connection; beyond the bound it is only told so. */
void dmk_http__conn_open(struct dmk_http_server *server)
{
    struct dmk_http__conn *conn = calloc(1, sizeof(*conn));
    bool spare = server->n_conns >= server->conf.max_connections;

    dmk_assert(conn);
    conn->server = server;
    conn->in = malloc(DMK_HTTP__READ_BYTES);
    dmk_assert(conn->in);
    dmk_buf_init(&conn->out, OUT_MAX_BYTES);
    dmk_buf_init(&conn->writing, OUT_MAX_BYTES);
    dmk_list_init(&conn->dirty_node);
    dmk_list_push_back(&server->conns, &conn->node);
    uv_tcp_init(dmk_loop__uv(server->loop), &conn->tcp);
    uv_timer_init(dmk_loop__uv(server->loop), &conn->timer);
    conn->tcp.data = conn->timer.data = conn;
    conn->open_handles = 2;
    server->n_handles += 2;
    conn->counted = !spare;
    if (spare) {
        server->n_spares++;
    } else {
        server->n_conns++;
    }
    if (uv_accept((uv_stream_t *)&server->listener, (uv_stream_t *)&conn->tcp) < 0 ||
        server->n_spares > DMK_HTTP__REFUSED_SPARES) {
        dmk_http__conn_close(conn);
        return;
    }
    (void)uv_tcp_nodelay(&conn->tcp, 1); /* best effort, both */
    (void)uv_tcp_keepalive(&conn->tcp, 1, KEEPALIVE_S);
    name_peer(conn);
    llhttp_init(&conn->parser, HTTP_REQUEST, &server->settings);
    conn->parser.data = conn;
    conn->progress_ns = dmk_clock_ns();
    if (server->tls) {
        dmk_http__tls_open(conn);
    }
    if (spare) {
        dmk_http__conn_fail(conn, 503, "too many connections");
        return;
    }
    dmk_http__conn_state(conn, server->tls ? DMK_HTTP__READING : DMK_HTTP__IDLE);
    start_reading(conn);
}
