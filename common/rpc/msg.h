/* Messages of the worker protocol, read with every bound checked in this one place.
 *
 * A message that breaks the protocol itself (not protobuf, an id missing, an array beyond its bound) is refused as a whole: its sender is broken and the stream should end with INVALID_ARGUMENT and the
 * sentence. Bodies that a later version has added are let through, to be ignored. What a single request asks for (token ids, ranges of sampling) is checked apart, so that
 * the one request can be failed by its id: dmk_msg_generate_check, dmk_msg_prefill_check.
 *
 * What is read is freed by the _free of protobuf-c's generated code. Pure functions; any thread. */
#pragma once

#include "common/base/buf.h"
#include "common/base/error.h"
#include "common/base/span.h"
#include "common/rpc/rpc.h"
#include "proto/damask_worker.pb-c.h"

#define DMK_PROTOCOL_VERSION 1

#define DMK_MSG_MAX_PROMPT       (1u << 20) /* ids; the real bound is the worker's, dmk_msg_limits */
#define DMK_MSG_MAX_TEXT         1024       /* bytes of any text */
#define DMK_MSG_MAX_ID_TEXT      256        /* of names and ids */
#define DMK_MSG_MAX_SALT         256
#define DMK_MSG_MAX_TICKET       32768
#define DMK_MSG_MAX_STOP_IDS     64
#define DMK_MSG_MAX_CONSTRAINT   (1u << 20)
#define DMK_MSG_MAX_VOCABULARY   (8u << 20)
#define DMK_MSG_MAX_BIAS         1024
#define DMK_MSG_MAX_TOP_LOGPROBS 20
#define DMK_MSG_MAX_CHOICES      128
#define DMK_MSG_MAX_EVENTS       65536
#define DMK_MSG_MAX_BLOCKS       (1u << 20)
#define DMK_MSG_MAX_STEP_TOKENS  64 /* of one choice in one event */

/* What a worker can serve. */
struct dmk_msg_limits {
    uint32_t vocab_size;  /* token ids are below it */
    uint32_t max_context; /* prompt and output together, in tokens */
    uint32_t max_choices;
};

/* Reads and checks; on success the caller frees *ret with damask__v1__router_message__free_unpacked. */
int dmk_msg_router_unpack(struct dmk_bytes bytes, Damask__V1__RouterMessage **ret,
                          struct dmk_error *reterr);
/* Can this worker serve the request? -DMK_EINVAL with a sentence for the client. */
int dmk_msg_generate_check(const Damask__V1__Generate *generate,
                           const struct dmk_msg_limits *limits, struct dmk_error *reterr);
int dmk_msg_prefill_check(const Damask__V1__Prefill *prefill, const struct dmk_msg_limits *limits,
                          struct dmk_error *reterr);

/* Reads and checks; on success the caller frees *ret with damask__v1__worker_message__free_unpacked and the same
 * allocator (NULL: the heap). vocab_size 0: not known yet, ids are not compared. */
int dmk_msg_worker_unpack(struct dmk_bytes bytes, uint32_t vocab_size,
                          ProtobufCAllocator *allocator, Damask__V1__WorkerMessage **ret,
                          struct dmk_error *reterr);

/* What a request's priority is worth: its turn comes as if it had arrived so much later (below 0: earlier). Lower is
 * sooner; a level is a second, and 10 either way are the end, so that nobody is overtaken for ever. */
int64_t dmk_msg_priority_ns(int32_t priority);

/* Packs straight into gRPC's memory; otherwise as dmk_rpc_send. */
int dmk_rpc_send_message(struct dmk_rpc_stream *stream, const ProtobufCMessage *message);

/* A WorkerMessage under construction, written event by event in wire form: the events need not outlive
 * the call. The buffer is the caller's and is sent as it is. */
void dmk_msg_batch_begin(struct dmk_buf *batch, uint64_t incarnation);
void dmk_msg_batch_add(struct dmk_buf *batch, const Damask__V1__WorkerEvent *event);
