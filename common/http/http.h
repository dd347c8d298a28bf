/* An HTTP/1.1 server on the loop (parsing by llhttp): bounded, strict, streaming.
 *
 * on_request runs when a request is complete, body included. The handler answers at once or later, whole
 * or as a stream. When the client leaves first, on_gone runs and the request must still be ended with
 * dmk_http_end or dmk_http_respond (which then send nothing). Keep-alive and pipelining are handled here.
 * Malformed requests, bodies above the bound, slow clients and too many connections are answered or closed
 * here. */
#pragma once

#include "common/base/buf.h"
#include "common/base/error.h"
#include "common/loop/loop.h"

struct dmk_http_server;
struct dmk_http_req;

struct dmk_http_conf {
    const char *host; /* "127.0.0.1", "0.0.0.0", "::" */
    uint16_t port;    /* 0 = any free one */
    uint32_t max_connections;
    size_t max_header_bytes;
    size_t max_body_bytes;
    size_t max_write_bytes; /* a response's bytes that wait for a slow reader; beyond it on_gone */
    uint32_t idle_timeout_ms;    /* keep-alive */
    uint32_t request_timeout_ms; /* first byte to complete request */
    void (*on_request)(void *ud, struct dmk_http_req *req);
    void *ud;
};

int dmk_http_server_new(struct dmk_loop *loop, const struct dmk_http_conf *conf,
                        struct dmk_http_server **ret, struct dmk_error *reterr);
uint16_t dmk_http_server_port(const struct dmk_http_server *server);
/* Stops accepting; connections close once their running request has ended. */
void dmk_http_server_drain(struct dmk_http_server *server);
void dmk_http_server_free(struct dmk_http_server **server);
uint32_t dmk_http_server_n_connections(const struct dmk_http_server *server);

struct dmk_str dmk_http_method(const struct dmk_http_req *req);
struct dmk_str dmk_http_path(const struct dmk_http_req *req);  /* without query */
struct dmk_str dmk_http_query(const struct dmk_http_req *req); /* without '?' */
/* Case-insensitive; data NULL when absent. */
struct dmk_str dmk_http_header(const struct dmk_http_req *req, const char *name);
struct dmk_bytes dmk_http_body(const struct dmk_http_req *req);
void dmk_http_on_gone(struct dmk_http_req *req, void (*on_gone)(void *ud), void *ud);

/* extra: further header lines, each with "\r\n", or NULL. After this req is gone. */
void dmk_http_respond(struct dmk_http_req *req, unsigned status, const char *content_type,
                      const char *extra, struct dmk_str body);

/* A stream (chunked): begin once, write any number of times, end. write returns the bytes that wait, or
 * -DMK_EPEER when the client is gone. */
void dmk_http_begin(struct dmk_http_req *req, unsigned status, const char *content_type,
                    const char *extra);
int64_t dmk_http_write(struct dmk_http_req *req, struct dmk_str bytes);
void dmk_http_end(struct dmk_http_req *req);
/* Breaks the connection so that the client sees an unfinished body. */
void dmk_http_abort(struct dmk_http_req *req);
