/* Worker to router: reading with all checks, and writing batches event by event. */
#include <grpc/byte_buffer.h>
#include <grpc/slice.h>
#include <inttypes.h>
#include <math.h>
#include "common/rpc/internal.h"
#include "common/rpc/msg_internal.h"

/* Tags of WorkerMessage's fields: number and wire type. */
#define TAG_INCARNATION 0x08 /* 1, varint */
#define TAG_EVENT       0x12 /* 2, length-delimited */

static int check_hello(const Damask__V1__WorkerHello *h, struct dmk_error *reterr)
{
    int ret = dmk_msg__text(h->worker_id, DMK_MSG_MAX_ID_TEXT, "worker id", reterr);

    if (ret == 0) {
        ret = dmk_msg__text(h->model_name, DMK_MSG_MAX_ID_TEXT, "model name", reterr);
    }
    if (ret == 0) {
        ret = dmk_msg__text(h->numerics, DMK_MSG_MAX_ID_TEXT, "numerics", reterr);
    }
    if (ret == 0) {
        ret = dmk_msg__text(h->prompt_numerics, DMK_MSG_MAX_ID_TEXT, "prompt numerics", reterr);
    }
    if (ret == 0) {
        ret = dmk_msg__text(h->revision, DMK_MSG_MAX_ID_TEXT, "revision", reterr);
    }
    if (ret == 0) {
        ret = dmk_msg__count(h->n_eos_ids, DMK_MSG_MAX_STOP_IDS, "eos ids", reterr);
    }
    if (ret == 0 && h->role != DAMASK__V1__ROLE__ROLE_PREFILL &&
        h->role != DAMASK__V1__ROLE__ROLE_DECODE) {
        ret = dmk_error_set(reterr, -DMK_EFORMAT, "role %d is neither prefill nor decode",
                            (int)h->role);
    }
    if (ret == 0 && (h->page_tokens == 0 || h->max_context == 0)) {
        ret = dmk_error_set(reterr, -DMK_EFORMAT,
                            "hello has %" PRIu32 " tokens a page and a context of %" PRIu32,
                            h->page_tokens, h->max_context);
    }
    return ret;
}

static int check_top(Damask__V1__TopLogprobs *const *top, size_t n, uint32_t vocab_size,
                     struct dmk_error *reterr)
{
    for (size_t i = 0; i < n; i++) {
        if (top[i]->n_entries > DMK_MSG_MAX_TOP_LOGPROBS) {
            return dmk_msg__count(top[i]->n_entries, DMK_MSG_MAX_TOP_LOGPROBS, "top logprobs",
                                  reterr);
        }
        for (size_t k = 0; k < top[i]->n_entries; k++) {
            const int ret = dmk_msg__ids(&top[i]->entries[k]->token, 1, vocab_size,
                                         "top logprob token", reterr);

            if (ret < 0) {
                return ret;
            }
            if (isnan(top[i]->entries[k]->logprob)) {
                return dmk_error_set(reterr, -DMK_EFORMAT, "a top logprob is not a number");
            }
        }
    }
    return 0;
}

/* Log-probabilities may be -inf (a token that was masked) but no NaN. */
static int check_logprobs(const float *v, size_t n, struct dmk_error *reterr)
{
    for (size_t i = 0; i < n; i++) {
        if (isnan(v[i])) {
            return dmk_error_set(reterr, -DMK_EFORMAT, "logprob %zu is not a number", i);
        }
    }
    return 0;
}

static int check_tokens(const Damask__V1__Tokens *t, uint32_t vocab_size, struct dmk_error *reterr)
{
    int ret = dmk_msg__id(t->id, "tokens", reterr);

    if (ret == 0 && (t->n_ids == 0 || t->n_ids > DMK_MSG_MAX_STEP_TOKENS)) {
        ret = dmk_error_set(reterr, -DMK_EFORMAT, "tokens: %zu ids, allowed are 1 to %d", t->n_ids,
                            DMK_MSG_MAX_STEP_TOKENS);
    }
    if (ret == 0 && t->choice >= DMK_MSG_MAX_CHOICES) {
        ret = dmk_error_set(reterr, -DMK_EFORMAT,
                            "tokens: choice %" PRIu32 ", at most %d are allowed", t->choice,
                            DMK_MSG_MAX_CHOICES);
    }
    if (ret == 0 && ((t->n_logprobs != 0 && t->n_logprobs != t->n_ids) ||
                     (t->n_top != 0 && t->n_top != t->n_ids))) {
        ret = dmk_error_set(reterr, -DMK_EFORMAT, "tokens: %zu ids, %zu logprobs and %zu top lists",
                            t->n_ids, t->n_logprobs, t->n_top);
    }
    if (ret == 0 && t->first_index > UINT32_MAX - DMK_MSG_MAX_STEP_TOKENS) {
        ret = dmk_error_set(reterr, -DMK_EFORMAT, "tokens: index %" PRIu32 " is out of range",
                            t->first_index);
    }
    if (ret == 0) {
        ret = dmk_msg__ids(t->ids, t->n_ids, vocab_size, "token", reterr);
    }
    if (ret == 0) {
        ret = check_logprobs(t->logprobs, t->n_logprobs, reterr);
    }
    return ret == 0 ? check_top(t->top, t->n_top, vocab_size, reterr) : ret;
}

static int check_finished(const Damask__V1__Finished *f, struct dmk_error *reterr)
{
    const int ret = dmk_msg__id(f->id, "finished", reterr);

    if (ret == 0 && f->choice >= DMK_MSG_MAX_CHOICES) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "finished: choice %" PRIu32 ", at most %d are allowed", f->choice,
                             DMK_MSG_MAX_CHOICES);
    }
    if (ret == 0 && f->reason != DAMASK__V1__FINISH_REASON__FINISH_STOP &&
        f->reason != DAMASK__V1__FINISH_REASON__FINISH_LENGTH) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "finished: reason %d is none of the protocol's",
                             (int)f->reason);
    }
    return ret;
}

static int check_failed(const Damask__V1__Failed *f, struct dmk_error *reterr)
{
    int ret = dmk_msg__id(f->id, "failed", reterr);

    if (ret == 0 && (f->code <= DAMASK__V1__FAILURE_CODE__FAILURE_UNSPECIFIED ||
                     f->code > DAMASK__V1__FAILURE_CODE__FAILURE_CANCELLED)) {
        ret = dmk_error_set(reterr, -DMK_EFORMAT, "failed: code %d is none of the protocol's",
                            (int)f->code);
    }
    return ret == 0 ? dmk_msg__text(f->text, DMK_MSG_MAX_TEXT, "failure text", reterr) : ret;
}

static int check_prompt_logprobs(const Damask__V1__PromptLogprobs *p, uint32_t vocab_size,
                                 struct dmk_error *reterr)
{
    int ret = dmk_msg__id(p->id, "prompt logprobs", reterr);

    if (ret == 0) {
        ret = dmk_msg__count(p->n_logprobs, DMK_MSG_MAX_PROMPT, "prompt logprobs", reterr);
    }
    if (ret == 0 && p->n_top != 0 && p->n_top != p->n_logprobs) {
        ret = dmk_error_set(reterr, -DMK_EFORMAT, "prompt logprobs: %zu values but %zu top lists",
                            p->n_logprobs, p->n_top);
    }
    if (ret == 0) {
        ret = check_logprobs(p->logprobs, p->n_logprobs, reterr);
    }
    return ret == 0 ? check_top(p->top, p->n_top, vocab_size, reterr) : ret;
}

static int check_reserved(const Damask__V1__Reserved *r, struct dmk_error *reterr)
{
    const int ret = dmk_msg__id(r->id, "reserved", reterr);

    if (ret == 0 && r->needs_prefill != (r->ticket.len > 0)) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "reserved: %s, but the ticket has %zu bytes",
                             r->needs_prefill ? "prefill is needed" : "no prefill is needed",
                             r->ticket.len);
    }
    return ret == 0 ? dmk_msg__count(r->ticket.len, DMK_MSG_MAX_TICKET, "ticket bytes", reterr)
                    : ret;
}

static int check_load(const Damask__V1__Load *l, struct dmk_error *reterr)
{
    if (l->full_pages_free > l->full_pages_total || l->window_pages_free > l->window_pages_total) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "load: more pages are free than there are");
    }
    if (l->full_pages_most_free > l->full_pages_free) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "load: a group has more free pages than all groups together");
    }
    return dmk_msg__range(l->step_ms, 0, 1e9, "load: step_ms", reterr);
}

static int check_event(const Damask__V1__WorkerEvent *e, uint32_t vocab_size,
                       struct dmk_error *reterr)
{
    int ret;

    switch (e->body_case) {
    case DAMASK__V1__WORKER_EVENT__BODY_HELLO:
        return check_hello(e->hello, reterr);
    case DAMASK__V1__WORKER_EVENT__BODY_RESERVED:
        return check_reserved(e->reserved, reterr);
    case DAMASK__V1__WORKER_EVENT__BODY_TOKENS:
        return check_tokens(e->tokens, vocab_size, reterr);
    case DAMASK__V1__WORKER_EVENT__BODY_FINISHED:
        return check_finished(e->finished, reterr);
    case DAMASK__V1__WORKER_EVENT__BODY_FAILED:
        return check_failed(e->failed, reterr);
    case DAMASK__V1__WORKER_EVENT__BODY_PREFILL_DONE:
        return dmk_msg__id(e->prefill_done->id, "prefill done", reterr);
    case DAMASK__V1__WORKER_EVENT__BODY_LOAD:
        return check_load(e->load, reterr);
    case DAMASK__V1__WORKER_EVENT__BODY_BLOCKS:
        ret = dmk_msg__count(e->blocks->n_added, DMK_MSG_MAX_BLOCKS, "blocks added", reterr);
        return ret == 0 ? dmk_msg__count(e->blocks->n_removed, DMK_MSG_MAX_BLOCKS, "blocks removed",
                                         reterr)
                        : ret;
    case DAMASK__V1__WORKER_EVENT__BODY_TRANSFERRED:
        return dmk_msg__id(e->transferred->id, "transferred", reterr);
    case DAMASK__V1__WORKER_EVENT__BODY_PROMPT_LOGPROBS:
        return check_prompt_logprobs(e->prompt_logprobs, vocab_size, reterr);
    default: /* quiet_ask, closed and drain have nothing to check; later ones are to be ignored */
        return 0;
    }
}

int dmk_msg_worker_unpack(struct dmk_bytes bytes, uint32_t vocab_size,
                          ProtobufCAllocator *allocator, Damask__V1__WorkerMessage **ret,
                          struct dmk_error *reterr)
{
    Damask__V1__WorkerMessage *m =
        damask__v1__worker_message__unpack(allocator, bytes.len, bytes.data);
    int status;

    if (!m) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "a message of %zu bytes is not a WorkerMessage",
                             bytes.len);
    }
    status = dmk_msg__count(m->n_events, DMK_MSG_MAX_EVENTS, "events", reterr);
    if (status == 0 && m->incarnation == 0) {
        status = dmk_error_set(reterr, -DMK_EFORMAT, "the worker's incarnation is missing");
    }
    for (size_t i = 0; i < m->n_events && status == 0; i++) {
        status = check_event(m->events[i], vocab_size, reterr);
    }
    if (status < 0) {
        damask__v1__worker_message__free_unpacked(m, allocator);
        return status;
    }
    *ret = m;
    return 0;
}

int dmk_rpc_send_message(struct dmk_rpc_stream *stream, const ProtobufCMessage *message)
{
    const size_t len = protobuf_c_message_get_packed_size(message);
    grpc_slice slice = grpc_slice_malloc(len);
    grpc_byte_buffer *bytes;

    (void)protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));
    bytes = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return dmk_rpc__stream_push(stream, bytes, len);
}

static void put_varint(struct dmk_buf *out, uint64_t v)
{
    while (v >= 0x80) {
        dmk_buf_putc(out, (char)(v | 0x80));
        v >>= 7;
    }
    dmk_buf_putc(out, (char)v);
}

void dmk_msg_batch_begin(struct dmk_buf *batch, uint64_t incarnation)
{
    dmk_buf_reset(batch);
    dmk_buf_putc(batch, TAG_INCARNATION);
    put_varint(batch, incarnation);
}

/* protobuf-c packs into a buffer of this kind through a callback. */
struct sink {
    ProtobufCBuffer base;
    struct dmk_buf *out;
};

static void on_append(ProtobufCBuffer *base, size_t len, const uint8_t *data)
{
    dmk_buf_append(((struct sink *)base)->out, data, len);
}

void dmk_msg_batch_add(struct dmk_buf *batch, const Damask__V1__WorkerEvent *event)
{
    struct sink sink = {.base = {.append = on_append}, .out = batch};

    dmk_buf_putc(batch, TAG_EVENT);
    put_varint(batch, damask__v1__worker_event__get_packed_size(event));
    (void)damask__v1__worker_event__pack_to_buffer(event, &sink.base);
}
