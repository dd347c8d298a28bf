/* A call of either side as a stream of messages: receiving one after another, a bounded queue of sends,
 * the end. Owner: the loop.
 *
 * gRPC takes one SEND_MESSAGE at a time; its completion means that the transport has it. A message behind
 * which another one waits is sent with GRPC_WRITE_BUFFER_HINT, so that they leave in one write; the last
 * of the queue never is, and the initial metadata travels in a batch of its own, since with the hint it
 * would never leave. The last message and the end go in one batch. */
#include "common/rpc/internal.h"
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <stdio.h>
#include <stdlib.h>

static void pump(void *ud);

struct dmk_rpc_stream *dmk_rpc__stream_new(struct dmk_rpc *rpc, grpc_call *call,
                                           size_t max_queue_bytes)
{
    struct dmk_rpc_stream *s = calloc(1, sizeof(*s));

    dmk_assert(s);
    s->rpc = rpc;
    s->call = call;
    s->refs = 1;
    s->max_queue_bytes = max_queue_bytes;
    s->out_last = &s->out_first;
    s->details = grpc_empty_slice();
    dmk_list_init(&s->node);
    dmk_defer_init(&s->pump, pump, s);
    grpc_metadata_array_init(&s->request_md);
    grpc_metadata_array_init(&s->initial_md);
    grpc_metadata_array_init(&s->trailing_md);
    rpc->n_objects++;
    return s;
}

static void drop_queue(struct dmk_rpc_stream *s)
{
    while (s->out_first) {
        struct dmk_rpc__out *out = s->out_first;

        s->out_first = out->next;
        grpc_byte_buffer_destroy(out->bytes);
        free(out);
    }
    s->out_last = &s->out_first;
    s->queued_bytes = 0;
}

static void unref(struct dmk_rpc_stream *s)
{
    struct dmk_rpc *rpc = s->rpc;
    struct dmk_rpc_server *server = s->server;

    dmk_assert(s->refs > 0);
    if (--s->refs > 0) {
        return;
    }
    dmk_assert(s->closed);
    dmk_defer_cancel(&s->pump);
    drop_queue(s);
    grpc_call_unref(s->call);
    grpc_metadata_array_destroy(&s->request_md);
    grpc_metadata_array_destroy(&s->initial_md);
    grpc_metadata_array_destroy(&s->trailing_md);
    grpc_slice_unref(s->details);
    for (unsigned i = 0; i < s->n_md_texts; i++) {
        gpr_free(s->md_texts[i]);
    }
    for (unsigned i = 0; i < s->n_trailers; i++) {
        grpc_slice_unref(s->trailers[i].key);
        grpc_slice_unref(s->trailers[i].value);
    }
    gpr_free(s->peer);
    free(s);
    rpc->n_objects--;
    if (server) {
        dmk_rpc__server_call_done(server);
    }
}

void dmk_rpc__stream_put(struct dmk_rpc_stream *s)
{
    unref(s);
}

static void start(struct dmk_rpc_stream *s, const grpc_op *ops, size_t n, struct dmk_rpc__op *op,
                  void (*fn)(void *obj, bool ok))
{
    op->fn = fn;
    op->obj = s;
    s->refs++;
    dmk_rpc__start(s->rpc, s->call, ops, n, op);
}

/* Runs on_closed, once; the stream is out of its owner's hands after. */
static void close_stream(struct dmk_rpc_stream *s, enum dmk_rpc_code code, const char *text)
{
    if (s->closed) {
        return;
    }
    s->closed = true;
    dmk_list_remove(&s->node);
    dmk_defer_cancel(&s->pump);
    drop_queue(s);
    if (s->server) {
        dmk_rpc__server_stream_closed(s->server);
    }
    s->events.on_closed(s->events.ud, s, code, text);
    unref(s);
}

void dmk_rpc__stream_drop(struct dmk_rpc_stream *s, enum dmk_rpc_code code, const char *text)
{
    s->refs++;
    (void)grpc_call_cancel(s->call, NULL);
    close_stream(s, code, text);
    unref(s);
}

/* ---- the end ---- */

static void close_client(struct dmk_rpc_stream *s)
{
    char *details;

    /* Messages that came before the status are still to be delivered. */
    if (!s->status_done || s->recv_busy) {
        return;
    }
    details = grpc_slice_to_c_string(s->details);
    close_stream(s, (enum dmk_rpc_code)s->status, details);
    gpr_free(details);
}

static void on_status(void *obj, bool ok)
{
    struct dmk_rpc_stream *s = obj;

    (void)ok; /* always true for this op */
    s->status_done = true;
    close_client(s);
    unref(s);
}

/* The server's call is over: the status has left, or the client is gone. */
static void on_server_end(void *obj, bool ok)
{
    struct dmk_rpc_stream *s = obj;

    if (!ok || s->cancelled || !s->finish_started) {
        close_stream(s, DMK_RPC_CANCELLED, "the peer cancelled or is gone");
    } else {
        close_stream(s, s->code, s->text);
    }
    unref(s);
}

/* ---- receiving ---- */

static void deliver(struct dmk_rpc_stream *s, grpc_byte_buffer *bytes)
{
    grpc_byte_buffer_reader reader;
    grpc_slice slice;

    if (!grpc_byte_buffer_reader_init(&reader, bytes)) {
        dmk_rpc__stream_drop(s, DMK_RPC_INTERNAL, "a message could not be decompressed");
        return;
    }
    slice = grpc_byte_buffer_reader_readall(&reader);
    s->events.on_message(s->events.ud, s,
                         (struct dmk_bytes){GRPC_SLICE_START_PTR(slice), GRPC_SLICE_LENGTH(slice)});
    grpc_slice_unref(slice);
    grpc_byte_buffer_reader_destroy(&reader);
}

static void on_recv(void *obj, bool ok)
{
    struct dmk_rpc_stream *s = obj;
    grpc_byte_buffer *bytes = s->recv;

    s->recv = NULL;
    s->recv_busy = false;
    s->heard = true;
    if (bytes) {
        if (!s->closed && ok) {
            deliver(s, bytes);
        }
        grpc_byte_buffer_destroy(bytes);
        if (!s->closed) {
            dmk_rpc__stream_recv(s);
        }
    } else if (!s->closed) {
        if (!s->server) {
            close_client(s);
        } else if (s->events.on_end && !s->finishing) {
            s->events.on_end(s->events.ud, s);
        }
    }
    unref(s);
}

void dmk_rpc__stream_recv(struct dmk_rpc_stream *s)
{
    const grpc_op op = {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &s->recv};

    s->recv_busy = true;
    start(s, &op, 1, &s->op_recv, on_recv);
}

/* ---- opening ---- */

static void on_opened(void *obj, bool ok)
{
    (void)ok; /* a failure comes by the end of the call */
    unref(obj);
}

void dmk_rpc__stream_open_server(struct dmk_rpc_stream *s)
{
    const grpc_op end = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER,
                         .data.recv_close_on_server.cancelled = &s->cancelled};
    const grpc_op open = {.op = GRPC_OP_SEND_INITIAL_METADATA};

    start(s, &end, 1, &s->op_end, on_server_end);
    start(s, &open, 1, &s->op_open, on_opened);
}

void dmk_rpc__stream_open_client(struct dmk_rpc_stream *s)
{
    const grpc_op end = {
        .op = GRPC_OP_RECV_STATUS_ON_CLIENT,
        .data.recv_status_on_client = {.trailing_metadata = &s->trailing_md,
                                       .status = &s->status,
                                       .status_details = &s->details},
    };
    const grpc_op open[] = {
        {.op = GRPC_OP_SEND_INITIAL_METADATA},
        {.op = GRPC_OP_RECV_INITIAL_METADATA,
         .data.recv_initial_metadata.recv_initial_metadata = &s->initial_md},
    };

    start(s, &end, 1, &s->op_end, on_status);
    start(s, open, 2, &s->op_open, on_opened);
    dmk_rpc__stream_recv(s);
}

/* ---- sending ---- */

static void on_sent(void *obj, bool ok)
{
    struct dmk_rpc_stream *s = obj;

    s->send_busy = false;
    s->queued_bytes -= s->queued_bytes < s->sending_bytes ? s->queued_bytes : s->sending_bytes;
    s->sending_bytes = 0;
    if (!ok) {
        s->send_failed = true; /* the call is dead; its end is on the way */
        drop_queue(s);
    } else if (!s->closed) {
        pump(s);
    }
    unref(s);
}

/* Adds the end of our side to a batch. details must live until the batch is started. */
static size_t add_end(struct dmk_rpc_stream *s, grpc_op *op, grpc_slice *details)
{
    s->finish_started = true;
    if (!s->server) {
        op->op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
        return 1;
    }
    *details = grpc_slice_from_copied_string(s->text);
    op->op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    op->data.send_status_from_server.status = (grpc_status_code)s->code;
    op->data.send_status_from_server.status_details = details;
    op->data.send_status_from_server.trailing_metadata = s->trailers;
    op->data.send_status_from_server.trailing_metadata_count = s->n_trailers;
    return 1;
}

/* Gives gRPC the next message, or the end, when it can take one. */
static void pump(void *ud)
{
    struct dmk_rpc_stream *s = ud;
    struct dmk_rpc__out *out = s->out_first;
    grpc_slice details = grpc_empty_slice();
    grpc_op ops[2] = {0};
    size_t n = 0;

    if (s->closed || s->send_busy || s->send_failed || s->finish_started) {
        return;
    }
    if (out) {
        s->out_first = out->next;
        if (!s->out_first) {
            s->out_last = &s->out_first;
        }
        ops[n].op = GRPC_OP_SEND_MESSAGE;
        ops[n].flags = s->out_first ? GRPC_WRITE_BUFFER_HINT : 0;
        ops[n++].data.send_message.send_message = out->bytes;
        s->sending_bytes = out->len;
    }
    if (s->finishing && !s->out_first) {
        n += add_end(s, &ops[n], &details);
    }
    if (n == 0) {
        return;
    }
    s->send_busy = true;
    start(s, ops, n, &s->op_send, on_sent);
    grpc_slice_unref(details);
    if (out) {
        grpc_byte_buffer_destroy(out->bytes);
        free(out);
    }
}

int dmk_rpc__stream_push(struct dmk_rpc_stream *s, grpc_byte_buffer *bytes, size_t len)
{
    struct dmk_rpc__out *out;

    if (s->closed || s->finishing || s->send_failed) {
        grpc_byte_buffer_destroy(bytes);
        return -DMK_EPEER;
    }
    if (s->queued_bytes + len > s->max_queue_bytes) {
        grpc_byte_buffer_destroy(bytes);
        drop_queue(s);
        s->send_failed = true;
        dmk_rpc_cancel(s);
        return -DMK_EFULL;
    }
    out = malloc(sizeof(*out));
    dmk_assert(out);
    *out = (struct dmk_rpc__out){.bytes = bytes, .len = len};
    *s->out_last = out;
    s->out_last = &out->next;
    s->queued_bytes += len;
    if (!s->send_busy) {
        dmk_loop_defer(s->rpc->loop, &s->pump);
    }
    return 0;
}

int dmk_rpc_send(struct dmk_rpc_stream *s, struct dmk_bytes message)
{
    grpc_slice slice = grpc_slice_from_copied_buffer((const char *)message.data, message.len);
    grpc_byte_buffer *bytes = grpc_raw_byte_buffer_create(&slice, 1);

    grpc_slice_unref(slice);
    return dmk_rpc__stream_push(s, bytes, message.len);
}

size_t dmk_rpc_queued_bytes(const struct dmk_rpc_stream *s)
{
    return s->queued_bytes;
}

void dmk_rpc_finish(struct dmk_rpc_stream *s, enum dmk_rpc_code code, const char *text)
{
    if (s->closed || s->finishing) {
        return;
    }
    s->finishing = true;
    s->code = code;
    (void)snprintf(s->text, sizeof(s->text), "%s", text ? text : "");
    if (!s->send_busy) {
        dmk_loop_defer(s->rpc->loop, &s->pump);
    }
}

void dmk_rpc__stream_until_drain(struct dmk_rpc_stream *s)
{
    s->until_drain = true;
    if (dmk_rpc__server_is_draining(s->server)) {
        dmk_rpc_finish(s, DMK_RPC_UNAVAILABLE, "this server is going away");
    }
}

void dmk_rpc_set_trailer(struct dmk_rpc_stream *s, const char *key, struct dmk_bytes value)
{
    const size_t n = strlen(key);
    const bool binary = n > 4 && strcmp(key + n - 4, "-bin") == 0;
    grpc_metadata *md = &s->trailers[s->n_trailers];

    dmk_assert(s->server);
    dmk_assert(s->n_trailers < DMK_RPC_MAX_TRAILERS);
    if (s->closed || s->finishing) {
        return;
    }
    *md = (grpc_metadata){.key = grpc_slice_from_copied_string(key),
                          .value =
                              grpc_slice_from_copied_buffer((const char *)value.data, value.len)};
    for (size_t i = 0; i < value.len && !binary; i++) {
        uint8_t *byte = &GRPC_SLICE_START_PTR(md->value)[i];

        if (*byte < 0x20 || *byte > 0x7e) {
            *byte = '?';
        }
    }
    s->n_trailers++;
}

void dmk_rpc_cancel(struct dmk_rpc_stream *s)
{
    if (!s->closed) {
        (void)grpc_call_cancel(s->call, NULL);
    }
}

const char *dmk_rpc_metadata(const struct dmk_rpc_stream *stream, const char *key)
{
    struct dmk_rpc_stream *s =
        (struct dmk_rpc_stream *)(uintptr_t)stream; /* only fills its copies */

    for (size_t i = 0; i < s->request_md.count; i++) {
        const grpc_metadata *md = &s->request_md.metadata[i];

        if (grpc_slice_str_cmp(md->key, key) == 0) {
            if (s->n_md_texts == sizeof(s->md_texts) / sizeof(s->md_texts[0])) {
                return NULL;
            }
            s->md_texts[s->n_md_texts] = grpc_slice_to_c_string(md->value);
            return s->md_texts[s->n_md_texts++];
        }
    }
    return NULL;
}

const char *dmk_rpc_peer(const struct dmk_rpc_stream *stream)
{
    struct dmk_rpc_stream *s = (struct dmk_rpc_stream *)(uintptr_t)stream; /* only fills its copy */

    if (!s->peer) {
        s->peer = grpc_call_get_peer(s->call);
    }
    return s->peer;
}
