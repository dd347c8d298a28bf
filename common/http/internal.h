/* What the files of this folder share: server.c (listening, connection count), conn.c (bytes in and out,
 * timers, the end of a connection), parse.c (llhttp to request), respond.c (answers), cors.c (browsers).
 *
 * A connection reads into a bounded buffer, parses until one request is complete and then pauses the
 * parser; bytes that come meanwhile (pipelining) wait in the buffer. The next request starts when the
 * answer before it has left. Output gathers in `out` and is written once a turn; while libuv writes
 * `writing`, `out` gathers on.
 *
 * With TLS (tls.c) the same buffers hold plain bytes; those of the socket pass through OpenSSL's memory. A
 * connection is READING during its handshake.
 *
 *   IDLE -> READING -> PENDING (request with the handler) -> FLUSHING -> IDLE ...
 *                \-> LINGER (an error was answered, input is thrown away) -> closed */
#pragma once

#include <llhttp.h>
#include "common/http/http.h"
#include "common/loop/internal.h"

#define DMK_HTTP__MAX_HEADERS    100
#define DMK_HTTP__READ_BYTES     16384 /* also the bound of pipelined bytes that wait */
#define DMK_HTTP__LINGER_MS      2000
#define DMK_HTTP__LINGER_BYTES   (1u << 20)
#define DMK_HTTP__REFUSED_SPARES 16 /* connections beyond the bound that still get their 503 */

enum dmk_http__state {
    DMK_HTTP__IDLE,
    DMK_HTTP__READING,
    DMK_HTTP__PENDING,
    DMK_HTTP__FLUSHING,
    DMK_HTTP__LINGER,
    DMK_HTTP__CLOSED,
};

/* A piece of req.head. */
struct dmk_http__span {
    size_t off, len;
};

struct dmk_http__header {
    struct dmk_http__span name, value;
};

struct dmk_http_req {
    struct dmk_list node;           /* in server.reqs */
    struct dmk_list gone_node;      /* in server.gone while on_gone is due */
    struct dmk_http__conn *conn;    /* NULL when the client is gone */
    struct dmk_http_server *server; /* NULL when the server is gone */
    struct dmk_buf head;            /* url and headers, back to back */
    struct dmk_buf body;
    struct dmk_http__span url;
    struct dmk_http__header headers[DMK_HTTP__MAX_HEADERS];
    size_t n_headers;
    const char *method;                 /* static */
    char id[DMK_HTTP_MAX_ID_BYTES + 1]; /* of dmk_http_set_id, or "" */
    bool is_head, is_http10, keep_alive;
    bool begun, chunked;
    void (*on_gone)(void *ud);
    void *ud;
    char peer[64];
};

struct dmk_http__conn {
    uv_tcp_t tcp;
    uv_timer_t timer;
    uv_write_t write;
    uv_shutdown_t shutdown;
    struct dmk_list node;       /* in server.conns */
    struct dmk_list dirty_node; /* in server.dirty while output waits for the end of the turn */
    struct dmk_http_server *server;
    enum dmk_http__state state;
    llhttp_t parser;
    struct dmk_http_req *req; /* being read or pending */
    char *in;                 /* [DMK_HTTP__READ_BYTES] */
    size_t in_start, in_end;  /* bytes not parsed */
    struct dmk_buf out, writing;
    size_t written;     /* of writing */
    bool write_busy;    /* libuv holds writing */
    bool reading;       /* uv_read_start is on */
    bool close_after;   /* end once out has left */
    bool shut;          /* the sending half has been closed */
    bool spoke_http;    /* a whole request has come */
    bool counted;       /* in server.n_conns */
    struct ssl_st *ssl; /* NULL: plain */
    bool tls_ready;     /* the handshake is done */
    bool tls_said_bye;
    bool trailers;        /* header callbacks are of a trailer */
    unsigned error;       /* status that a callback of llhttp wants answered */
    const char *sentence; /* for it */
    size_t overhead;      /* bytes of trailers and chunk extensions */
    size_t linger_bytes;
    uint64_t progress_ns; /* when output last moved */
    unsigned open_handles;
    char peer[64];
};

struct dmk_http_server {
    struct dmk_loop *loop;
    struct dmk_http_conf conf;
    uv_tcp_t listener;
    llhttp_settings_t settings;
    struct dmk_list conns, reqs, dirty, gone;
    struct dmk_http__tls *tls; /* NULL: plain */
    char *tls_in;              /* [DMK_HTTP__READ_BYTES] from a socket, before it is opened */
    uint64_t told_ns;          /* when a peer's mistake was last told */
    struct dmk_defer flush;    /* end of turn: writes dirty connections, tells gone requests */
    uint32_t n_conns;          /* counted ones */
    uint32_t n_spares;
    uint32_t n_handles; /* libuv handles not closed yet: listener and those of connections */
    bool draining, freed;
    char date[40]; /* of date_s */
    int64_t date_s;
};

/* server.c */
void dmk_http__server_turn_end(struct dmk_http_server *server);
void dmk_http__handle_closed(struct dmk_http_server *server);

/* conn.c */
void dmk_http__conn_open(struct dmk_http_server *server);
void dmk_http__conn_flush(struct dmk_http__conn *conn);
void dmk_http__conn_dirty(struct dmk_http__conn *conn);
void dmk_http__conn_close(struct dmk_http__conn *conn);
/* Answers an error that is not the handler's and ends the connection when it has left. */
void dmk_http__conn_fail(struct dmk_http__conn *conn, unsigned status, const char *sentence);
/* The handler is done with the connection's request. */
void dmk_http__conn_answered(struct dmk_http__conn *conn);
size_t dmk_http__conn_waiting(const struct dmk_http__conn *conn);
void dmk_http__conn_state(struct dmk_http__conn *conn, enum dmk_http__state state);

/* Tells the log about a peer that speaks something else, at most once a second. */
void dmk_http__tell_peer(struct dmk_http__conn *conn, const char *what);

/* tls.c */
struct dmk_http__tls;
int dmk_http__tls_new(const struct dmk_http_conf *conf, struct dmk_http__tls **ret,
                      struct dmk_error *reterr);
void dmk_http__tls_free(struct dmk_http__tls **tls);
void dmk_http__tls_reload(struct dmk_http__tls *tls);
void dmk_http__tls_open(struct dmk_http__conn *conn);
void dmk_http__tls_close(struct dmk_http__conn *conn);
/* Bytes of the socket; then plain bytes are there to read: their number, 0 when more must come, negative at
 * the end (UV_EOF) or on an error. Both may make output. */
void dmk_http__tls_feed(struct dmk_http__conn *conn, const char *data, size_t len);
int64_t dmk_http__tls_read(struct dmk_http__conn *conn, char *to, size_t room);
bool dmk_http__tls_has_output(const struct dmk_http__conn *conn);
/* Takes plain (and whatever else is to be said) to out; false: the connection is broken. */
bool dmk_http__tls_seal(struct dmk_http__conn *conn, struct dmk_buf *plain, struct dmk_buf *out);
void dmk_http__tls_bye(struct dmk_http__conn *conn);

/* parse.c */
void dmk_http__settings_init(llhttp_settings_t *settings);
/* Parses what is in the buffer until a request is complete, an error, or the bytes run out. */
void dmk_http__conn_parse(struct dmk_http__conn *conn);

/* cors.c */
bool dmk_http__origin_is_valid(const char *origin);
/* The lines that an answer to req needs so that a page of its origin may read it. */
void dmk_http__cors_put(const struct dmk_http_req *req, const struct dmk_http_conf *conf,
                        struct dmk_buf *out);
/* Answers a preflight of an allowed origin; false: req is none. */
bool dmk_http__cors_preflight(struct dmk_http_req *req, const struct dmk_http_conf *conf);

/* respond.c */
/* req: what is answered, its headers complete or not; NULL when there is none. */
void dmk_http__put_head(struct dmk_http_server *server, const struct dmk_http_req *req,
                        struct dmk_buf *out, unsigned status, const char *content_type,
                        const char *extra);
void dmk_http__req_free(struct dmk_http_req *req);
/* Parts the request from its connection; on_gone follows at the end of the turn. */
void dmk_http__req_lost(struct dmk_http_req *req);
