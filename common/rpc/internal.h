/* What the files of this folder share: cq.c (the process's gRPC, its thread, the way back to the loop),
 * stream.c (a call of either side), server.c, client.c, health.c.
 *
 * Every batch given to gRPC has an op as its tag; the completion thread hands ops back through a mailbox
 * and an eventfd, or gRPC completes them at once, and their fn runs on the loop. An object lives until its last op has come back. */
#pragma once

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <pthread.h>
#include "common/base/assert.h"
#include "common/rpc/rpc.h"

struct dmk_rpc__op {
    struct dmk_mail mail;
    void (*fn)(void *obj, bool ok);
    void *obj;
    bool ok;
};

struct dmk_rpc {
    struct dmk_loop *loop;
    grpc_completion_queue *cq;
    pthread_t thread;
    struct dmk_mailbox box; /* ops that have come back */
    struct dmk_mail *ready_first,
        **ready_last; /* those that came back on the loop itself, oldest first */
    struct dmk_defer run_ready;
    int event_fd; /* readable when box is not empty */
    struct dmk_poll *poll;
    struct dmk_list servers, channels;
    uint32_t n_objects; /* calls and servers that gRPC still knows */
    uint32_t keepalive_ms, keepalive_timeout_ms;
};

/* One message waiting to be sent. */
struct dmk_rpc__out {
    struct dmk_rpc__out *next;
    grpc_byte_buffer *bytes;
    size_t len;
};

struct dmk_rpc_stream {
    struct dmk_list node; /* in its server's or channel's streams, until on_closed */
    struct dmk_rpc *rpc;
    struct dmk_rpc_server *server; /* NULL on the client */
    grpc_call *call;
    struct dmk_rpc_stream_events events;
    unsigned refs; /* ops in flight, callbacks that run, and one until on_closed */
    bool closed;   /* on_closed has run */

    struct dmk_rpc__op op_open, op_recv, op_send, op_end;
    grpc_byte_buffer *recv; /* filled by op_recv */
    bool recv_busy;
    struct dmk_rpc__out *out_first, **out_last;
    size_t queued_bytes, max_queue_bytes; /* queued: with what op_send holds */
    size_t sending_bytes;
    bool send_busy, send_failed;
    struct dmk_defer pump;          /* end of turn: sends what was queued in it */
    bool finishing, finish_started; /* status or half-close: asked for, given to gRPC */
    enum dmk_rpc_code code;
    char text[256];

    /* Server. */
    int cancelled;
    grpc_metadata_array request_md;
    bool heard;       /* the first message or the end has come */
    bool until_drain; /* nothing of its own ends it */
    uint64_t opened_ns;
    grpc_metadata trailers[DMK_RPC_MAX_TRAILERS];
    unsigned n_trailers;
    char *md_texts[8]; /* copies handed out by dmk_rpc_metadata */
    unsigned n_md_texts;
    /* Client. */
    bool status_done;
    grpc_metadata_array initial_md, trailing_md;
    grpc_status_code status;
    grpc_slice details;
    char *peer; /* lazily */
};

/* cq.c */
/* Gives ops to gRPC with op as the tag. Asserts that gRPC takes them. op's fn runs later, never from within. */
void dmk_rpc__start(struct dmk_rpc *rpc, grpc_call *call, const grpc_op *ops, size_t n,
                    struct dmk_rpc__op *op);
/* Before op is handed to gRPC by any other function: what was written is seen by its thread. */
void dmk_rpc__release(struct dmk_rpc__op *op);

/* stream.c */
struct dmk_rpc_stream *dmk_rpc__stream_new(struct dmk_rpc *rpc, grpc_call *call,
                                           size_t max_queue_bytes);
void dmk_rpc__stream_open_server(struct dmk_rpc_stream *stream);
void dmk_rpc__stream_open_client(struct dmk_rpc_stream *stream);
void dmk_rpc__stream_recv(struct dmk_rpc_stream *stream);
/* Of a server: a drain ends this stream, which would else go on. */
void dmk_rpc__stream_until_drain(struct dmk_rpc_stream *stream);
/* Gives back a reference; the last one frees. */
void dmk_rpc__stream_put(struct dmk_rpc_stream *stream);
/* Cancels, runs on_closed now, and leaves the rest to the last op. */
void dmk_rpc__stream_drop(struct dmk_rpc_stream *stream, enum dmk_rpc_code code, const char *text);
/* Takes ownership of bytes; as dmk_rpc_send. */
int dmk_rpc__stream_push(struct dmk_rpc_stream *stream, grpc_byte_buffer *bytes, size_t len);

/* server.c */
/* The stream is closed: another one may take its place. */
void dmk_rpc__server_stream_closed(struct dmk_rpc_server *server);
/* All ops of a stream's call have come back, the last bytes with them: the server may go once all have. */
void dmk_rpc__server_call_done(struct dmk_rpc_server *server);
bool dmk_rpc__server_is_draining(const struct dmk_rpc_server *server);
/* The argument list that servers and channels share; returns how many were written. */
#define DMK_RPC__MAX_ARGS 20
size_t dmk_rpc__args(const struct dmk_rpc *rpc, size_t max_message_bytes, grpc_arg *args);

struct dmk_rpc_server *dmk_rpc__server_of(struct dmk_list *node); /* in rpc.servers */

/* client.c */
struct dmk_rpc_channel *dmk_rpc__channel_of(struct dmk_list *node); /* in rpc.channels */

/* tls.c */
struct dmk_rpc__tls;
void dmk_rpc__tls_free(struct dmk_rpc__tls **tls);
int dmk_rpc__tls_server(const struct dmk_rpc_tls *conf, struct dmk_rpc__tls **ret,
                        grpc_server_credentials **ret_creds, struct dmk_error *reterr);
/* Whether the call's client is the one that may call; tls may be NULL. */
bool dmk_rpc__tls_is_client(const struct dmk_rpc__tls *tls, grpc_call *call);
int dmk_rpc__tls_channel(const struct dmk_rpc_tls *conf, grpc_channel_credentials **ret_creds,
                         struct dmk_error *reterr);

/* reflect.c */
struct dmk_rpc__reflect;
/* For the services of the methods (which stay the caller's). */
struct dmk_rpc__reflect *dmk_rpc__reflect_new(const struct dmk_rpc_method *methods,
                                              size_t n_methods);
void dmk_rpc__reflect_free(struct dmk_rpc__reflect **reflect);
#define DMK_RPC__REFLECT_METHODS 2
void dmk_rpc__reflect_methods(struct dmk_rpc__reflect *reflect, struct dmk_rpc_method *ret_methods);

/* health.c */
struct dmk_rpc__health;
struct dmk_rpc__health *dmk_rpc__health_new(const struct dmk_rpc_method *methods, size_t n_methods);
void dmk_rpc__health_free(struct dmk_rpc__health **health);
void dmk_rpc__health_set(struct dmk_rpc__health *health, bool serving);
#define DMK_RPC__HEALTH_METHODS 2
void dmk_rpc__health_methods(struct dmk_rpc__health *health, struct dmk_rpc_method *ret_methods);
