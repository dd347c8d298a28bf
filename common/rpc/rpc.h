/* RPC: long-lived bidirectional streams and server-streaming or unary calls over gRPC, as plain structs
 * and callbacks on the loop. The only home of <grpc/...>: no gRPC type is visible here, messages are
 * bytes. One thread drains gRPC's completion queue into the loop's mailbox.
 *
 * A stream's life: (server) on_open, on_message*, on_end?, on_closed; (client) on_message*, on_closed. After
 * on_closed nothing more is called and the stream is gone. Sends queue up to a bound. Callbacks may call
 * anything here but dmk_rpc_free. A peer that is dead or hung is noticed by keep-alive pings, see
 * dmk_rpc_set_keepalive. */
#pragma once

#include "common/base/error.h"
#include "common/base/span.h"
#include "common/loop/loop.h"

struct dmk_rpc; /* gRPC for this process and loop */
struct dmk_rpc_server;
struct dmk_rpc_channel; /* to one target; reconnects by itself */
struct dmk_rpc_stream;

/* Values as in gRPC. */
enum dmk_rpc_code {
    DMK_RPC_OK = 0,
    DMK_RPC_CANCELLED = 1,
    DMK_RPC_UNKNOWN = 2,
    DMK_RPC_INVALID_ARGUMENT = 3,
    DMK_RPC_DEADLINE_EXCEEDED = 4,
    DMK_RPC_NOT_FOUND = 5,
    DMK_RPC_PERMISSION_DENIED = 7,
    DMK_RPC_RESOURCE_EXHAUSTED = 8,
    DMK_RPC_FAILED_PRECONDITION = 9,
    DMK_RPC_ABORTED = 10,
    DMK_RPC_UNIMPLEMENTED = 12,
    DMK_RPC_INTERNAL = 13,
    DMK_RPC_UNAVAILABLE = 14,
    DMK_RPC_UNAUTHENTICATED = 16,
};

/* Bounds where none is given. */
#define DMK_RPC_MAX_MESSAGE_BYTES (16u << 20)
#define DMK_RPC_MAX_QUEUE_BYTES   (64u << 20)

int dmk_rpc_new(struct dmk_loop *loop, struct dmk_rpc **ret, struct dmk_error *reterr);
/* Frees what servers and channels are left, cancels their streams (on_closed runs inside) and waits for
 * gRPC, at most some seconds. */
void dmk_rpc_free(struct dmk_rpc **rpc);
/* How often a silent connection is pinged, and how long the answer may take; for servers and channels made
 * later. 10 s and 5 s unless set. */
void dmk_rpc_set_keepalive(struct dmk_rpc *rpc, uint32_t every_ms, uint32_t timeout_ms);

struct dmk_rpc_stream_events {
    void (*on_message)(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes message);
    /* The peer sends no more (half-close); not told once this side has finished. NULL = ignore. */
    void (*on_end)(void *ud, struct dmk_rpc_stream *stream);
    void (*on_closed)(void *ud, struct dmk_rpc_stream *stream, enum dmk_rpc_code code,
                      const char *text);
    void *ud;
};

/* A method of a server. on_open returns the callbacks for this stream. */
struct dmk_rpc_method {
    const char *path; /* "/damask.v1.Worker/Connect" */
    void (*on_open)(void *ud, struct dmk_rpc_stream *stream,
                    struct dmk_rpc_stream_events *ret_events);
    void *ud;
};

/* TLS by PEM files; "" or NULL: not used. A server reads them again when they have changed. */
struct dmk_rpc_tls {
    const char *cert, *key; /* of this side; a channel may have none */
    const char *ca; /* who signs the other side's certificates. Server: then clients must show one.
                             * Channel, not used: the system's list */
    const char
        *name; /* a name (DNS, URI, IP) in the other side's certificate. Server, not used: any that
                       * ca has signed. Channel, not used: the target's host */
};

struct dmk_rpc_server_conf {
    const char *listen; /* "0.0.0.0:9000", "unix:/path" */
    const struct dmk_rpc_method *methods;
    size_t n_methods;
    size_t max_message_bytes; /* received; 0 = DMK_RPC_MAX_MESSAGE_BYTES */
    size_t max_queue_bytes;   /* of one stream; 0 = DMK_RPC_MAX_QUEUE_BYTES */
    uint32_t max_streams;     /* calls open at a time; beyond it RESOURCE_EXHAUSTED */
    uint32_t
        request_timeout_ms; /* handshake of a connection; a call's start to its first message; 0 = gRPC's own, none */
    const struct dmk_rpc_tls *tls; /* NULL: none; read inside dmk_rpc_server_new only */
    bool reflect;                  /* serve grpc.reflection.v1 and v1alpha */
    /* Who may call, by the metadata "authorization" (NULL: not sent); false: UNAUTHENTICATED. Asked for every
     * method but those of grpc.health.v1. NULL: everybody. */
    bool (*allow)(void *ud, const char *authorization);
    /* A call was refused before its method saw a request: no such method, no key, no room, nothing sent in time.
     * NULL: nobody is told. */
    void (*on_refused)(void *ud, enum dmk_rpc_code code);
    void *ud;
};

int dmk_rpc_server_new(struct dmk_rpc *rpc, const struct dmk_rpc_server_conf *conf,
                       struct dmk_rpc_server **ret, struct dmk_error *reterr);
uint16_t dmk_rpc_server_port(const struct dmk_rpc_server *server);
/* grpc.health.v1 is served by every server: "", each service of its methods, "readiness", and "liveness"
 * (which always serves). Not serving at start. */
void dmk_rpc_server_set_serving(struct dmk_rpc_server *server, bool serving);
/* Stops listening and tells connections to take their next calls elsewhere; open streams go on, but for those that
 * have no end of their own (health's Watch, reflection): they end with UNAVAILABLE, after what they were told. A
 * connection closes when its last stream has ended. Once. */
void dmk_rpc_server_drain(struct dmk_rpc_server *server);
/* Calls that have not ended yet, or whose last message or status waits for a peer that does not read; without those
 * that have said nothing. Looks at each. */
uint32_t dmk_rpc_server_n_calls(const struct dmk_rpc_server *server);
/* A drain is over: no call is left, every connection is closed. Who frees the server earlier takes away what peers
 * have not got yet. A peer that does not read, or that is gone without a word, keeps this from being true: the wait
 * needs a limit. */
bool dmk_rpc_server_is_drained(const struct dmk_rpc_server *server);
/* Every open stream is cancelled; its on_closed runs inside this call. */
void dmk_rpc_server_free(struct dmk_rpc_server **server);

/* A connection of its own even when another channel has the same target. It is made at the first call and
 * made again by itself, with pauses of 0.1 to 2 s; a call during a pause fails at once (UNAVAILABLE). */
struct dmk_rpc_channel *dmk_rpc_channel_new(struct dmk_rpc *rpc, const char *target);
/* The same over TLS; fails when a file can not be used. */
int dmk_rpc_channel_new_tls(struct dmk_rpc *rpc, const char *target, const struct dmk_rpc_tls *tls,
                            struct dmk_rpc_channel **ret, struct dmk_error *reterr);
/* As dmk_rpc_server_free. */
void dmk_rpc_channel_free(struct dmk_rpc_channel **channel);
/* deadline_ms 0 = none. on_closed comes also when the connection can not be made. */
struct dmk_rpc_stream *dmk_rpc_call(struct dmk_rpc_channel *channel, const char *path,
                                    uint32_t deadline_ms,
                                    const struct dmk_rpc_stream_events *events);

/* Copies the bytes. 0; -DMK_EPEER when closed or finished; -DMK_EFULL beyond the bound of the queue (the
 * stream is then cancelled: a peer that does not read is gone). Sends of one loop turn go out together, at
 * its end. No callback runs inside. */
int dmk_rpc_send(struct dmk_rpc_stream *stream, struct dmk_bytes message);
size_t dmk_rpc_queued_bytes(const struct dmk_rpc_stream *stream);
/* Server: end with a status, after what is queued. Client: half-close (code and text are not used). No
 * sends after it. */
void dmk_rpc_finish(struct dmk_rpc_stream *stream, enum dmk_rpc_code code, const char *text);
/* Server: metadata that goes with the status; before dmk_rpc_finish, at most DMK_RPC_MAX_TRAILERS. Keys are in
 * lower case; the value of one that ends in "-bin" may be any bytes, that of another printable text (what is
 * not becomes '?'). */
#define DMK_RPC_MAX_TRAILERS 4
void dmk_rpc_set_trailer(struct dmk_rpc_stream *stream, const char *key, struct dmk_bytes value);
/* Ends it at once; on_closed follows (CANCELLED). */
void dmk_rpc_cancel(struct dmk_rpc_stream *stream);
/* Request metadata of a server stream (key in lower case); NULL when absent. Lives as long as it. */
const char *dmk_rpc_metadata(const struct dmk_rpc_stream *stream, const char *key);
/* "ipv4:127.0.0.1:4711", for logs. */
const char *dmk_rpc_peer(const struct dmk_rpc_stream *stream);
