/* A failure as the status of a call, with what HTTP says in the body as google.rpc details: ErrorInfo (code),
 * BadRequest (param), RetryInfo (when to come again). No state. */
#include <stdio.h>
#include <stdlib.h>
#include "proto/grpc_status.pb-c.h"
#include "router/grpc_front.h"

#define MAX_DETAIL_BYTES 1024 /* of one detail: a param and a sentence at most */
#define DOMAIN           "damask"

/* What both worlds have a word for. Of several rows with one code the first says what the code alone means. */
static const struct {
    unsigned status;
    enum dmk_rpc_code code;
} pairs[] = {
    {400, DMK_RPC_INVALID_ARGUMENT},   {413, DMK_RPC_INVALID_ARGUMENT},
    {401, DMK_RPC_UNAUTHENTICATED},    {403, DMK_RPC_PERMISSION_DENIED},
    {404, DMK_RPC_NOT_FOUND},          {408, DMK_RPC_DEADLINE_EXCEEDED},
    {429, DMK_RPC_RESOURCE_EXHAUSTED}, {501, DMK_RPC_UNIMPLEMENTED},
    {503, DMK_RPC_UNAVAILABLE},        {500, DMK_RPC_INTERNAL},
};
#define N_PAIRS (sizeof(pairs) / sizeof(pairs[0]))

static enum dmk_rpc_code code_of(const struct dmk_api_error *error)
{
    for (size_t i = 0; i < N_PAIRS; i++) {
        if (pairs[i].status == error->status) {
            return pairs[i].code;
        }
    }
    return DMK_RPC_INTERNAL;
}

unsigned dmk_grpc_status_of(enum dmk_rpc_code code)
{
    for (size_t i = 0; i < N_PAIRS; i++) {
        if (pairs[i].code == code) {
            return pairs[i].status;
        }
    }
    return 500;
}

/* The status as it is built up: each detail is packed when it is added. */
struct builder {
    Google__Rpc__Status status;
    Google__Rpc__Detail details[3];
    Google__Rpc__Detail *ptrs[3];
    uint8_t bytes[3][MAX_DETAIL_BYTES];
};

static void add_detail(struct builder *b, const char *type_url, const ProtobufCMessage *m)
{
    const size_t i = b->status.n_details;
    const size_t n = protobuf_c_message_get_packed_size(m);

    if (n > MAX_DETAIL_BYTES) {
        return; /* the sentence is there all the same */
    }
    (void)protobuf_c_message_pack(m, b->bytes[i]);
    b->details[i] = (Google__Rpc__Detail)GOOGLE__RPC__DETAIL__INIT;
    b->details[i].type_url = (char *)(uintptr_t)type_url;
    b->details[i].value = (ProtobufCBinaryData){n, b->bytes[i]};
    b->ptrs[i] = &b->details[i];
    b->status.n_details++;
}

static void add_info(struct builder *b, const struct dmk_api_error *error)
{
    Google__Rpc__ErrorInfo info = GOOGLE__RPC__ERROR_INFO__INIT;

    info.reason = (char *)(uintptr_t)(error->code ? error->code : error->type);
    info.domain = (char *)(uintptr_t)DOMAIN;
    add_detail(b, "type.googleapis.com/google.rpc.ErrorInfo", &info.base);
}

static void add_field(struct builder *b, const struct dmk_api_error *error)
{
    Google__Rpc__BadRequest bad = GOOGLE__RPC__BAD_REQUEST__INIT;
    Google__Rpc__BadRequest__FieldViolation field = GOOGLE__RPC__BAD_REQUEST__FIELD_VIOLATION__INIT;
    Google__Rpc__BadRequest__FieldViolation *list[] = {&field};

    field.field = (char *)(uintptr_t)error->param;
    field.description = (char *)(uintptr_t)error->text;
    bad.field_violations = list;
    bad.n_field_violations = 1;
    add_detail(b, "type.googleapis.com/google.rpc.BadRequest", &bad.base);
}

static void add_retry(struct builder *b, const struct dmk_api_error *error)
{
    Google__Rpc__RetryInfo info = GOOGLE__RPC__RETRY_INFO__INIT;
    Google__Rpc__RetryDelay delay = GOOGLE__RPC__RETRY_DELAY__INIT;

    delay.seconds = error->retry_after_s;
    info.retry_delay = &delay;
    add_detail(b, "type.googleapis.com/google.rpc.RetryInfo", &info.base);
}

void dmk_grpc_fail(struct dmk_rpc_stream *stream, const struct dmk_api_error *error)
{
    struct builder b = {.status = GOOGLE__RPC__STATUS__INIT};
    uint8_t packed[4 * MAX_DETAIL_BYTES];

    b.status.code = (int32_t)code_of(error);
    b.status.message = (char *)(uintptr_t)error->text;
    b.status.details = b.ptrs;
    add_info(&b, error);
    if (error->param[0]) {
        add_field(&b, error);
    }
    if (error->retry_after_s > 0) {
        add_retry(&b, error);
    }
    if (google__rpc__status__get_packed_size(&b.status) <= sizeof(packed)) {
        dmk_rpc_set_trailer(
            stream, "grpc-status-details-bin",
            (struct dmk_bytes){packed, google__rpc__status__pack(&b.status, packed)});
    }
    dmk_rpc_finish(stream, code_of(error), error->text);
}

void dmk_grpc_refuse(struct dmk_grpc_front *front, struct dmk_rpc_stream *stream,
                     const struct dmk_api_error *error)
{
    dmk_stats_refused(front->router->stats, DMK_ENTRY_GRPC, error->status);
    dmk_grpc_fail(stream, error);
}

void dmk_grpc_refuse_as(struct dmk_grpc_front *front, struct dmk_rpc_stream *stream,
                        unsigned status, const char *text)
{
    struct dmk_api_error error;

    (void)dmk_api_fail(&error, status, NULL, "%s", text);
    dmk_grpc_refuse(front, stream, &error);
}

void dmk_grpc_answer(struct dmk_rpc_stream *stream, const ProtobufCMessage *message)
{
    const size_t n = protobuf_c_message_get_packed_size(message);
    uint8_t *bytes = malloc(n + 1);

    if (!bytes) {
        dmk_rpc_finish(stream, DMK_RPC_INTERNAL, "out of memory");
        return;
    }
    (void)protobuf_c_message_pack(message, bytes);
    (void)dmk_rpc_send(stream,
                       (struct dmk_bytes){bytes, n}); /* a dead stream is closed by its end */
    free(bytes);
    dmk_rpc_finish(stream, DMK_RPC_OK, "");
}
