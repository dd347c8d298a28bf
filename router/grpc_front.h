/* What the files of the gRPC side share: grpc_front.c (the server, and calls that become requests),
 * grpc_engine.c (the engine's other methods), grpc_status.c (failures as statuses). Loop only. */
#pragma once

#include "common/base/list.h"
#include "router/router.h"

struct dmk_grpc_front {
    struct dmk_router *router;
    struct dmk_rpc_server *server;
    struct dmk_list calls;  /* that are or become requests */
    double received_unix_s; /* when the engine was last asked to generate */
    /* The tokenizer's archive, made at the first demand. */
    struct dmk_buf zip;
    char zip_sha256[65];
    enum { DMK_ZIP_NONE, DMK_ZIP_RUNS, DMK_ZIP_READY, DMK_ZIP_FAILED } zip_state;
    struct dmk_list zip_waiters;
    void *zip_job; /* while it is made, else NULL */
};

/* Ends the call with the failure's status; code, param and the time to wait go as google.rpc details. */
void dmk_grpc_fail(struct dmk_rpc_stream *stream, const struct dmk_api_error *error);

/* The same for a call that never became a request, which is counted; then by status and sentence alone. */
void dmk_grpc_refuse(struct dmk_grpc_front *front, struct dmk_rpc_stream *stream,
                     const struct dmk_api_error *error);
void dmk_grpc_refuse_as(struct dmk_grpc_front *front, struct dmk_rpc_stream *stream,
                        unsigned status, const char *text);
/* The HTTP status of a refusal of which only the code is known. */
unsigned dmk_grpc_status_of(enum dmk_rpc_code code);

/* Sends one message and ends the call well. */
struct ProtobufCMessage;
void dmk_grpc_answer(struct dmk_rpc_stream *stream, const struct ProtobufCMessage *message);

/* Methods with one request and no state: called with the first message of a call. */
typedef void (*dmk_grpc_unary)(struct dmk_grpc_front *front, struct dmk_rpc_stream *stream,
                               struct dmk_bytes message);

/* Ends the calls of Generate whose request_id this is, as if their client had left. */
void dmk_grpc_front_abort(struct dmk_grpc_front *front, const char *request_id);

/* grpc_engine.c: the methods besides Generate. */
struct dmk_grpc_engine_method {
    const char *path;
    dmk_grpc_unary fn;
};
extern const struct dmk_grpc_engine_method dmk_grpc_engine_methods[];
extern const size_t dmk_n_grpc_engine_methods;
void dmk_grpc_engine_open_tokenizer(void *ud, struct dmk_rpc_stream *stream,
                                    struct dmk_rpc_stream_events *ret_events);
void dmk_grpc_engine_fini(struct dmk_grpc_front *front);
