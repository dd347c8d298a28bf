/* From bytes to a request, by llhttp in strict mode. Its callbacks check every bound; a callback that
 * refuses leaves the status to answer in conn->error. */
#include "common/http/internal.h"
#include <stdlib.h>
#include <strings.h>
#include "common/base/assert.h"

static int refuse(struct dmk_http__conn *conn, unsigned status, const char *sentence)
{
    conn->error = status;
    conn->sentence = sentence;
    return HPE_USER;
}

static int on_message_begin(llhttp_t *parser)
{
    struct dmk_http__conn *conn = parser->data;
    struct dmk_http_req *req = calloc(1, sizeof(*req));

    dmk_assert(req);
    dmk_assert(!conn->req);
    req->conn = conn;
    req->server = conn->server;
    dmk_list_push_back(&conn->server->reqs, &req->node);
    dmk_list_init(&req->gone_node);
    dmk_buf_init(&req->head, conn->server->conf.max_header_bytes);
    dmk_buf_init(&req->body, conn->server->conf.max_body_bytes + 1);
    memcpy(req->peer, conn->peer, sizeof(req->peer));
    conn->req = req;
    conn->trailers = false;
    conn->overhead = 0;
    return 0;
}

/* Appends to head, of which span is the last piece. */
static int add_head(struct dmk_http__conn *conn, struct dmk_http__span *span, const char *at,
                    size_t len)
{
    struct dmk_buf *head = &conn->req->head;

    if (span->len == 0) {
        span->off = head->len;
    }
    dmk_buf_append(head, at, len);
    if (head->failed) {
        return span == &conn->req->url ? refuse(conn, 414, "the request's URL is too long")
                                       : refuse(conn, 431, "the request's headers are too large");
    }
    span->len += len;
    return 0;
}

/* Bytes that are bounded but not kept. */
static int add_overhead(struct dmk_http__conn *conn, size_t len)
{
    conn->overhead += len;
    return conn->overhead > conn->server->conf.max_header_bytes
               ? refuse(conn, 431, "the request's trailers or chunk extensions are too large")
               : 0;
}

static int on_url(llhttp_t *parser, const char *at, size_t len)
{
    struct dmk_http__conn *conn = parser->data;

    return add_head(conn, &conn->req->url, at, len);
}

static int on_header_field(llhttp_t *parser, const char *at, size_t len)
{
    struct dmk_http__conn *conn = parser->data;
    struct dmk_http_req *req = conn->req;

    if (conn->trailers) {
        return add_overhead(conn, len);
    }
    if (req->n_headers == DMK_HTTP__MAX_HEADERS) {
        return refuse(conn, 431, "the request has too many headers");
    }
    return add_head(conn, &req->headers[req->n_headers].name, at, len);
}

static int on_header_value(llhttp_t *parser, const char *at, size_t len)
{
    struct dmk_http__conn *conn = parser->data;

    if (conn->trailers) {
        return add_overhead(conn, len);
    }
    return add_head(conn, &conn->req->headers[conn->req->n_headers].value, at, len);
}

static int on_header_value_complete(llhttp_t *parser)
{
    struct dmk_http__conn *conn = parser->data;

    if (conn->trailers) {
        return add_overhead(conn, 4);
    }
    conn->req->n_headers++;
    return 0;
}

static int on_chunk_extension(llhttp_t *parser, const char *at, size_t len)
{
    (void)at;
    return add_overhead(parser->data, len + 1);
}

static size_t count_headers(const struct dmk_http_req *req, const char *name)
{
    const size_t len = strlen(name);
    size_t n = 0;

    for (size_t i = 0; i < req->n_headers; i++) {
        const struct dmk_http__span *s = &req->headers[i].name;

        n += s->len == len && strncasecmp(req->head.data + s->off, name, len) == 0;
    }
    return n;
}

/* True when the header is absent, or stands once and is the one word that is understood. */
static bool is_only(const struct dmk_http_req *req, const char *name, const char *word)
{
    const struct dmk_str value = dmk_http_header(req, name);
    const size_t len = strlen(word);

    return !value.data || (count_headers(req, name) == 1 && value.len == len &&
                           strncasecmp(value.data, word, len) == 0);
}

/* Nothing is unpacked here, neither bodies nor what carries them: who packs is told so before the body comes. */
static int check_codings(struct dmk_http__conn *conn)
{
    /* Where chunked is not the last, the parser refuses by itself. */
    if ((conn->parser.flags & F_CHUNKED) && !is_only(conn->req, "transfer-encoding", "chunked")) {
        return refuse(conn, 501, "the only Transfer-Encoding that is understood here is chunked");
    }
    if (!is_only(conn->req, "content-encoding", "identity")) {
        return refuse(
            conn, 415,
            "the request has a Content-Encoding; bodies are taken as they are (identity) only");
    }
    return 0;
}

static int check_expect(struct dmk_http__conn *conn, struct dmk_str expect)
{
    if (!expect.data || conn->req->is_http10) {
        return 0;
    }
    if (expect.len != 12 || strncasecmp(expect.data, "100-continue", 12) != 0) {
        return refuse(conn, 417, "the request expects what this server does not know");
    }
    dmk_buf_puts(&conn->out, "HTTP/1.1 100 Continue\r\n\r\n");
    dmk_http__conn_dirty(conn);
    return 0;
}

static int on_headers_complete(llhttp_t *parser)
{
    struct dmk_http__conn *conn = parser->data;
    struct dmk_http_req *req = conn->req;
    const size_t n_hosts = count_headers(req, "host");

    if (parser->http_major != 1 || parser->http_minor > 1) {
        return refuse(conn, 505, "only HTTP/1.0 and HTTP/1.1 are spoken here");
    }
    if (parser->method == HTTP_CONNECT) {
        return refuse(conn, 405, "this is no proxy");
    }
    parser->upgrade = 0; /* an offer to speak something else is ignored, as it may be */
    req->is_http10 = parser->http_minor == 0;
    req->is_head = parser->method == HTTP_HEAD;
    req->method = llhttp_method_name(parser->method);
    req->keep_alive =
        llhttp_should_keep_alive(parser); /* its flags are gone at the end of the message */
    if (n_hosts > 1 || (n_hosts == 0 && !req->is_http10)) {
        return refuse(conn, 400, "the request must have one Host header");
    }
    if (req->is_http10 && (parser->flags & F_TRANSFER_ENCODING)) {
        return refuse(conn, 400, "HTTP/1.0 has no Transfer-Encoding");
    }
    if ((parser->flags & F_CONTENT_LENGTH) &&
        parser->content_length > conn->server->conf.max_body_bytes) {
        return refuse(conn, 413, "the request's body is too large");
    }
    if (check_codings(conn) != 0) {
        return HPE_USER;
    }
    conn->trailers = true; /* header callbacks from here on */
    return check_expect(conn, dmk_http_header(req, "expect"));
}

/* The next chunk's size is known: a body that will be too large is refused before it comes. */
static int on_chunk_header(llhttp_t *parser)
{
    struct dmk_http__conn *conn = parser->data;

    if (parser->content_length > conn->server->conf.max_body_bytes - conn->req->body.len) {
        return refuse(conn, 413, "the request's body is too large");
    }
    return 0;
}

static int on_body(llhttp_t *parser, const char *at, size_t len)
{
    struct dmk_http__conn *conn = parser->data;
    struct dmk_buf *body = &conn->req->body;

    if (len > conn->server->conf.max_body_bytes - body->len) {
        return refuse(conn, 413, "the request's body is too large");
    }
    dmk_buf_append(body, at, len);
    return body->failed ? refuse(conn, 413, "the request's body is too large") : 0;
}

static int on_message_complete(llhttp_t *parser)
{
    (void)parser;
    return HPE_PAUSED; /* one request at a time */
}

void dmk_http__settings_init(llhttp_settings_t *settings)
{
    llhttp_settings_init(settings);
    settings->on_message_begin = on_message_begin;
    settings->on_url = on_url;
    settings->on_header_field = on_header_field;
    settings->on_header_value = on_header_value;
    settings->on_header_value_complete = on_header_value_complete;
    settings->on_headers_complete = on_headers_complete;
    settings->on_chunk_header = on_chunk_header;
    settings->on_body = on_body;
    settings->on_chunk_extension_name = on_chunk_extension;
    settings->on_chunk_extension_value = on_chunk_extension;
    settings->on_message_complete = on_message_complete;
}

static void request_complete(struct dmk_http__conn *conn)
{
    struct dmk_http_server *server = conn->server;
    struct dmk_http_req *req = conn->req;

    conn->spoke_http = true;
    conn->close_after = !req->keep_alive;
    conn->progress_ns = dmk_loop_now_ns(server->loop);
    dmk_http__conn_state(conn, DMK_HTTP__PENDING);
    if (!dmk_http__cors_preflight(req, &server->conf)) {
        server->conf.on_request(server->conf.ud, req);
    }
}

/* The two protocols that come to the wrong port: both know nothing of a 400, and both open a connection. */
static bool speaks_other(struct dmk_http__conn *conn, const char *data, size_t len)
{
    static const char http2[] = "PRI * HTTP/2.0";

    if (len >= sizeof(http2) - 1 && memcmp(data, http2, sizeof(http2) - 1) == 0) {
        dmk_http__tell_peer(conn, "it speaks HTTP/2 (gRPC?), this port speaks HTTP/1.1");
        return true;
    }
    if (len >= 3 && data[0] == 0x16 && data[1] == 0x03) {
        dmk_http__tell_peer(conn, "it speaks TLS, this port speaks plain HTTP");
        return true;
    }
    return false;
}

/* A request line that is well formed but for a method that the parser has never heard of. */
static bool has_unknown_method(const struct dmk_http__conn *conn, enum llhttp_errno err,
                               const char *data, size_t len)
{
    size_t n = 0;

    if (!conn->server->conf.allow || err != HPE_INVALID_METHOD) {
        return false;
    }
    while (n < len && n < 32 && data[n] >= 'A' && data[n] <= 'Z') {
        n++;
    }
    return n > 0 && n + 1 < len && data[n] == ' ' && data[n + 1] == '/';
}

void dmk_http__conn_parse(struct dmk_http__conn *conn)
{
    const char *data = conn->in + conn->in_start;
    const size_t len = conn->in_end - conn->in_start;
    enum llhttp_errno err;

    if (len == 0) {
        return;
    }
    if (conn->state == DMK_HTTP__IDLE) {
        dmk_http__conn_state(conn, DMK_HTTP__READING);
    }
    if (!conn->req && !conn->spoke_http && speaks_other(conn, data, len)) {
        dmk_http__conn_close(conn);
        return;
    }
    conn->error = 0;
    err = llhttp_execute(&conn->parser, data, len);
    if (err == HPE_OK) {
        conn->in_start = conn->in_end = 0;
    } else if (err == HPE_PAUSED && conn->req) {
        conn->in_start = (size_t)(llhttp_get_error_pos(&conn->parser) - conn->in);
        request_complete(conn);
    } else if (conn->error) {
        dmk_http__conn_fail(conn, conn->error, conn->sentence);
    } else if (has_unknown_method(conn, err, data, len)) {
        dmk_http__conn_fail(conn, 405, "no path takes this method");
    } else {
        dmk_http__conn_fail(conn, 400, "the request is malformed");
    }
}
