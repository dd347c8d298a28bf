/* An HTTP/1.1 server on the loop (parsing by llhttp): bounded, strict, streaming.
 *
 * on_request runs when a request is complete, body included. The handler answers at once or later, whole
 * or as a stream. When the client leaves first, on_gone runs and the request must still be ended with
 * dmk_http_end or dmk_http_respond (which then send nothing). on_gone never runs inside a call of this
 * header other than dmk_http_server_free.
 *
 * Done here and never seen by the handler: keep-alive, pipelining (one request of a connection at a time,
 * in order), Expect: 100-continue, HEAD (the body of the answer is left out), HTTP/1.0, preflights of origins
 * that are allowed, malformed requests (400), packed bodies (415, 501), too much header (431), body (413), time
 * (408) or connections (503). A client that closes its
 * sending half while its answer is pending counts as gone. What a turn of the loop writes to a connection
 * goes out in one piece. */
#pragma once

#include "common/base/buf.h"
#include "common/base/error.h"
#include "common/loop/loop.h"

#define DMK_HTTP_MAX_ID_BYTES 128

struct dmk_http_server;
struct dmk_http_req;

struct dmk_http_conf {
    const char *host; /* "127.0.0.1", "0.0.0.0", "::", or a name */
    uint16_t port;    /* 0 = any free one */
    uint32_t max_connections;
    size_t max_header_bytes; /* request line and headers */
    size_t max_body_bytes;
    size_t max_write_bytes;   /* a stream's bytes that wait for a slow reader; beyond it on_gone */
    uint32_t idle_timeout_ms; /* keep-alive; also a reader that takes nothing of a pending answer */
    uint32_t request_timeout_ms; /* first byte to complete request; with TLS also the handshake */
    /* PEM files; "" or NULL: plain HTTP, no certificate asked of clients. Read again when they change. */
    const char *tls_cert, *tls_key, *tls_client_ca;
    /* "GET, POST": the methods that some path takes, for the 405 to a method that HTTP does not know. NULL: such
     * a request is malformed (400). */
    const char *allow;
    /* Origins ("https://app.example", "*" = any) whose pages may read answers in a browser; none by default. The
     * words live as long as the server. */
    const char *const *origins;
    size_t n_origins;
    /* Set: every answer has an x-request-id, whoever makes it: the one of dmk_http_set_id, else what the client
     * sent where this says yes and its header was read, else one made here. NULL: answers have none. */
    bool (*takes_id)(struct dmk_str id);
    void (*on_request)(void *ud, struct dmk_http_req *req);
    /* The body of an error that is answered here (status, one sentence) as application/json; NULL = the
     * sentence as text. */
    void (*on_error)(void *ud, unsigned status, const char *sentence, struct dmk_buf *out);
    void *ud;
};

int dmk_http_server_new(struct dmk_loop *loop, const struct dmk_http_conf *conf,
                        struct dmk_http_server **ret, struct dmk_error *reterr);
/* Reads the TLS files now; a failure is told to the log. Nothing without TLS. */
void dmk_http_server_reload(struct dmk_http_server *server);
uint16_t dmk_http_server_port(const struct dmk_http_server *server);
/* Stops accepting; idle connections close, others once their running request has ended. */
void dmk_http_server_drain(struct dmk_http_server *server);
/* Breaks what is left; open requests are told that they are gone inside this call and may be ended in it
 * or after it. */
void dmk_http_server_free(struct dmk_http_server **server);
uint32_t dmk_http_server_n_connections(const struct dmk_http_server *server);
/* Of these, the ones whose answer is not made yet or waits for a client that does not read. Looks at each. */
uint32_t dmk_http_server_n_answering(const struct dmk_http_server *server);

/* All views live as long as the request. */
struct dmk_str dmk_http_method(const struct dmk_http_req *req);
struct dmk_str dmk_http_path(const struct dmk_http_req *req);  /* without query, as sent */
struct dmk_str dmk_http_query(const struct dmk_http_req *req); /* without '?' */
/* Case-insensitive; data NULL when absent; the first of several. */
struct dmk_str dmk_http_header(const struct dmk_http_req *req, const char *name);
struct dmk_bytes dmk_http_body(const struct dmk_http_req *req);
/* "127.0.0.1:4711", for logs. */
const char *dmk_http_peer(const struct dmk_http_req *req);
void dmk_http_on_gone(struct dmk_http_req *req, void (*on_gone)(void *ud), void *ud);

/* The x-request-id of the answer, where answers have one: 1 to DMK_HTTP_MAX_ID_BYTES that may stand in a header. */
void dmk_http_set_id(struct dmk_http_req *req, const char *id);

/* extra: further header lines, each with "\r\n", or NULL. After this req is gone. */
void dmk_http_respond(struct dmk_http_req *req, unsigned status, const char *content_type,
                      const char *extra, struct dmk_str body);

/* A stream (chunked): begin once, write any number of times, end. write returns the bytes that wait, or
 * -DMK_EPEER when the client is gone. Empty writes send nothing. */
void dmk_http_begin(struct dmk_http_req *req, unsigned status, const char *content_type,
                    const char *extra);
int64_t dmk_http_write(struct dmk_http_req *req, struct dmk_str bytes);
/* The connection ends with this answer. */
void dmk_http_last(struct dmk_http_req *req);
/* After this req is gone; without a begin before it, answers 500. */
void dmk_http_end(struct dmk_http_req *req);
/* Breaks the connection so that the client sees an unfinished body. After this req is gone. */
void dmk_http_abort(struct dmk_http_req *req);
