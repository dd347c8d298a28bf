/* Answers: status line and headers, whole bodies, chunked streams; and the request's own life. */
#include "common/http/internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <time.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/hash.h"

static struct dmk_str span_str(const struct dmk_http_req *req, struct dmk_http__span span)
{
    return (struct dmk_str){req->head.data + span.off, span.len};
}

struct dmk_str dmk_http_method(const struct dmk_http_req *req)
{
    return dmk_str_from(req->method);
}

/* The url without scheme and authority (absolute form) and without fragment. */
static struct dmk_str target(const struct dmk_http_req *req)
{
    struct dmk_str url = span_str(req, req->url);
    const char *hash = memchr(url.data, '#', url.len);

    if (hash) {
        url.len = (size_t)(hash - url.data);
    }
    if (url.len > 0 && url.data[0] != '/' && url.data[0] != '*') {
        const char *scheme = memmem(url.data, url.len, "://", 3);
        const char *end = url.data + url.len;
        const char *p = scheme ? scheme + 3 : url.data;

        while (p < end && *p != '/' && *p != '?') {
            p++;
        }
        url = (struct dmk_str){p, (size_t)(end - p)};
    }
    return url;
}

struct dmk_str dmk_http_path(const struct dmk_http_req *req)
{
    struct dmk_str url = target(req);
    const char *mark = memchr(url.data, '?', url.len);

    if (mark) {
        url.len = (size_t)(mark - url.data);
    }
    return url.len > 0 ? url : dmk_str_from("/");
}

struct dmk_str dmk_http_query(const struct dmk_http_req *req)
{
    const struct dmk_str url = target(req);
    const char *mark = memchr(url.data, '?', url.len);

    if (!mark) {
        return dmk_str_from("");
    }
    return (struct dmk_str){mark + 1, (size_t)(url.data + url.len - mark - 1)};
}

struct dmk_str dmk_http_header(const struct dmk_http_req *req, const char *name)
{
    const size_t len = strlen(name);

    for (size_t i = 0; i < req->n_headers; i++) {
        const struct dmk_str have = span_str(req, req->headers[i].name);

        if (have.len == len && strncasecmp(have.data, name, len) == 0) {
            struct dmk_str value = span_str(req, req->headers[i].value);

            while (value.len > 0 && strchr(" \t", value.data[value.len - 1])) {
                value.len--;
            }
            return value;
        }
    }
    return (struct dmk_str){NULL, 0};
}

struct dmk_bytes dmk_http_body(const struct dmk_http_req *req)
{
    return (struct dmk_bytes){(const uint8_t *)dmk_buf_str(&req->body).data, req->body.len};
}

const char *dmk_http_peer(const struct dmk_http_req *req)
{
    return req->peer;
}

void dmk_http__req_free(struct dmk_http_req *req)
{
    dmk_list_remove(&req->node);
    dmk_list_remove(&req->gone_node);
    dmk_buf_fini(&req->head);
    dmk_buf_fini(&req->body);
    free(req);
}

static void tell_gone(struct dmk_http_req *req)
{
    if (req->server && req->on_gone && dmk_list_empty(&req->gone_node)) {
        dmk_list_push_back(&req->server->gone, &req->gone_node);
        dmk_loop_defer(req->server->loop, &req->server->flush);
    }
}

void dmk_http__req_lost(struct dmk_http_req *req)
{
    req->conn = NULL;
    tell_gone(req);
}

void dmk_http_on_gone(struct dmk_http_req *req, void (*on_gone)(void *ud), void *ud)
{
    req->on_gone = on_gone;
    req->ud = ud;
    if (!req->conn && on_gone) {
        tell_gone(req);
    }
}

static const char *reason_of(unsigned status)
{
    static const struct {
        unsigned status;
        const char *reason;
    } rows[] = {
        {200, "OK"},
        {201, "Created"},
        {202, "Accepted"},
        {204, "No Content"},
        {304, "Not Modified"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {403, "Forbidden"},
        {404, "Not Found"},
        {405, "Method Not Allowed"},
        {408, "Request Timeout"},
        {409, "Conflict"},
        {413, "Content Too Large"},
        {414, "URI Too Long"},
        {415, "Unsupported Media Type"},
        {417, "Expectation Failed"},
        {422, "Unprocessable Content"},
        {429, "Too Many Requests"},
        {431, "Request Header Fields Too Large"},
        {499, "Client Closed Request"},
        {500, "Internal Server Error"},
        {501, "Not Implemented"},
        {502, "Bad Gateway"},
        {503, "Service Unavailable"},
        {504, "Gateway Timeout"},
        {505, "HTTP Version Not Supported"},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (rows[i].status == status) {
            return rows[i].reason;
        }
    }
    return "Unknown";
}

void dmk_http_set_id(struct dmk_http_req *req, const char *id)
{
    const size_t len = strlen(id);

    dmk_assert(len > 0 && len <= DMK_HTTP_MAX_ID_BYTES);
    memcpy(req->id, id, len + 1);
}

/* Also an answer to what could not be read has a name by which one may speak of it. */
static void put_id(const struct dmk_http_server *server, const struct dmk_http_req *req,
                   struct dmk_buf *out)
{
    struct dmk_str id = req ? dmk_http_header(req, "x-request-id") : (struct dmk_str){0};
    char made[33];

    if (!server->conf.takes_id) {
        return;
    }
    if (req && req->id[0]) {
        id = dmk_str_from(req->id);
    } else if (!id.data || !server->conf.takes_id(id)) {
        dmk_id128_format(dmk_id128_random(), made);
        id = dmk_str_from(made);
    }
    dmk_buf_puts(out, "x-request-id: ");
    dmk_buf_append_str(out, id);
    dmk_buf_puts(out, "\r\n");
}

void dmk_http__put_head(struct dmk_http_server *server, const struct dmk_http_req *req,
                        struct dmk_buf *out, unsigned status, const char *content_type,
                        const char *extra)
{
    const int64_t now_s = dmk_clock_unix_s();

    if (now_s != server->date_s) {
        const time_t t = (time_t)now_s;
        struct tm tm;

        (void)gmtime_r(&t, &tm);
        (void)strftime(server->date, sizeof(server->date), "%a, %d %b %Y %H:%M:%S GMT", &tm);
        server->date_s = now_s;
    }
    dmk_buf_printf(out, "HTTP/1.1 %u %s\r\nDate: %s\r\n", status, reason_of(status), server->date);
    if (content_type) {
        dmk_buf_printf(out, "Content-Type: %s\r\n", content_type);
    }
    put_id(server, req, out);
    if (req) {
        dmk_http__cors_put(req, &server->conf, out);
    }
    if (extra) {
        dmk_buf_puts(out, extra);
    }
}

static void put_connection(struct dmk_http__conn *conn, const struct dmk_http_req *req)
{
    if (conn->server->draining) {
        conn->close_after = true;
    }
    if (conn->close_after) {
        dmk_buf_puts(&conn->out, "Connection: close\r\n");
    } else if (req->is_http10) {
        dmk_buf_puts(&conn->out, "Connection: keep-alive\r\n");
    }
}

static void end_request(struct dmk_http_req *req)
{
    struct dmk_http__conn *conn = req->conn;

    dmk_http__req_free(req);
    if (conn) {
        dmk_http__conn_answered(conn);
    }
}

static bool has_no_body(unsigned status)
{
    return status < 200 || status == 204 || status == 304;
}

void dmk_http_respond(struct dmk_http_req *req, unsigned status, const char *content_type,
                      const char *extra, struct dmk_str body)
{
    struct dmk_http__conn *conn = req->conn;

    dmk_assert(!req->begun);
    if (conn) {
        dmk_http__put_head(conn->server, req, &conn->out, status, content_type, extra);
        if (!has_no_body(status)) {
            dmk_buf_printf(&conn->out, "Content-Length: %zu\r\n", body.len);
        }
        put_connection(conn, req);
        dmk_buf_puts(&conn->out, "\r\n");
        if (!req->is_head && !has_no_body(status)) {
            dmk_buf_append(&conn->out, body.data, body.len);
        }
    }
    end_request(req);
}

void dmk_http_begin(struct dmk_http_req *req, unsigned status, const char *content_type,
                    const char *extra)
{
    struct dmk_http__conn *conn = req->conn;

    dmk_assert(!req->begun);
    dmk_assert(!has_no_body(status));
    req->begun = true;
    if (!conn) {
        return;
    }
    dmk_http__put_head(conn->server, req, &conn->out, status, content_type, extra);
    req->chunked = !req->is_http10;
    if (req->chunked) {
        dmk_buf_puts(&conn->out, "Transfer-Encoding: chunked\r\n");
    } else {
        conn->close_after = true; /* the end of the body is the end of the connection */
    }
    put_connection(conn, req);
    dmk_buf_puts(&conn->out, "\r\n");
    dmk_http__conn_dirty(conn);
}

int64_t dmk_http_write(struct dmk_http_req *req, struct dmk_str bytes)
{
    struct dmk_http__conn *conn = req->conn;

    dmk_assert(req->begun);
    if (!conn) {
        return -DMK_EPEER;
    }
    if (bytes.len > 0 && !req->is_head) {
        if (req->chunked) {
            dmk_buf_printf(&conn->out, "%zx\r\n", bytes.len);
        }
        dmk_buf_append(&conn->out, bytes.data, bytes.len);
        if (req->chunked) {
            dmk_buf_puts(&conn->out, "\r\n");
        }
        dmk_http__conn_dirty(conn);
    }
    /* What this very turn has gathered may be more than the bound while the reader is fast: only bytes
     * that were left from earlier say that it is slow, so an empty socket is tried first. */
    if (dmk_http__conn_waiting(conn) > conn->server->conf.max_write_bytes && !conn->write_busy) {
        dmk_list_remove(&conn->dirty_node);
        dmk_http__conn_flush(conn);
    }
    if (!req->conn) {
        return -DMK_EPEER;
    }
    if (dmk_http__conn_waiting(conn) > conn->server->conf.max_write_bytes) {
        dmk_http__conn_close(conn);
        return -DMK_EPEER;
    }
    return (int64_t)dmk_http__conn_waiting(conn);
}

void dmk_http_last(struct dmk_http_req *req)
{
    if (req->conn) {
        req->conn->close_after = true;
    }
}

void dmk_http_end(struct dmk_http_req *req)
{
    if (!req->begun && req->conn) {
        dmk_http_respond(req, 500, "text/plain", NULL, dmk_str_from("no answer was made\n"));
        return;
    }
    if (req->conn && req->chunked && !req->is_head) {
        dmk_buf_puts(&req->conn->out, "0\r\n\r\n");
    }
    end_request(req);
}

void dmk_http_abort(struct dmk_http_req *req)
{
    struct dmk_http__conn *conn = req->conn;

    dmk_http__req_free(req);
    if (!conn) {
        return;
    }
    conn->req = NULL;
    dmk_http__conn_flush(conn); /* what was written before still goes */
    dmk_http__conn_close(conn);
}
