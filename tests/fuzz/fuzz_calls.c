/* Fuzz target of the gRPC services that every program has: any messages for health and reflection.
 *
 * Input: one byte that chooses the method, then messages, each behind a byte with its length. Checked: a message is
 * answered once or ends the call; one that can not be shown whole (nul.h) is refused; an answer can be packed, and a
 * found file is one that has the name. What a stream would do is done here by three functions. */
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/rpc/internal.h"
#include "common/rpc/msg.h"
#include "common/rpc/nul.h"
#include "proto/descriptor.pb-c.h"
#include "proto/grpc_health.pb-c.h"
#include "proto/grpc_reflection.pb-c.h"
#include "tests/fuzz/fuzz.h"

typedef Grpc__Reflection__V1__ServerReflectionResponse reflection_msg;

/* The call under way. */
static struct {
    bool is_health, finished;
    uint32_t n_sent;
    enum dmk_rpc_code code;
} call;

static const struct dmk_rpc_method methods[] = {{.path = "/damask.v1.Worker/Connect"},
                                                {.path = "/damask.v1.Frontend/Chat"},
                                                {.path = "/damask.v1.Frontend/ListModels"}};

static void check_files(const reflection_msg *r)
{
    const Grpc__Reflection__V1__FileDescriptorResponse *files = r->file_descriptor_response;

    dmk_assert(files->n_file_descriptor_proto >= 1);
    for (size_t i = 0; i < files->n_file_descriptor_proto; i++) {
        const ProtobufCBinaryData bytes = files->file_descriptor_proto[i];
        Google__Protobuf__FileDescriptorProto *file =
            google__protobuf__file_descriptor_proto__unpack(NULL, bytes.len, bytes.data);

        dmk_assert(file && file->name);
        if (i == 0 &&
            r->original_request->message_request_case ==
                GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME) {
            dmk_assert(strcmp(file->name, r->original_request->file_by_filename) == 0);
        }
        google__protobuf__file_descriptor_proto__free_unpacked(file, NULL);
    }
}

static void check_reflection(const reflection_msg *r)
{
    dmk_assert(r->original_request);
    switch (r->message_response_case) {
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE:
        check_files(r);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE:
        dmk_assert(r->list_services_response->n_service == 4); /* two, and reflection's two names */
        break;
    default:
        dmk_assert(
            r->message_response_case ==
            GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE);
        dmk_assert(r->error_response->error_code == DMK_RPC_NOT_FOUND);
        dmk_assert(r->error_response->error_message[0]);
    }
}

int dmk_rpc_send_message(struct dmk_rpc_stream *stream, const ProtobufCMessage *message)
{
    const size_t len = protobuf_c_message_get_packed_size(message);
    uint8_t *bytes = malloc(len > 0 ? len : 1);

    (void)stream;
    dmk_assert(bytes && !call.finished);
    dmk_assert(protobuf_c_message_pack(message, bytes) == len);
    free(bytes);
    if (call.is_health) {
        const Grpc__Health__V1__HealthCheckResponse *r = (const void *)message;

        dmk_assert(r->status >= 1 && r->status <= 3);
    } else {
        check_reflection((const void *)message);
    }
    call.n_sent++;
    return 0;
}

void dmk_rpc__stream_until_drain(struct dmk_rpc_stream *stream)
{
    (void)stream;
}

void dmk_rpc_finish(struct dmk_rpc_stream *stream, enum dmk_rpc_code code, const char *text)
{
    (void)stream;
    dmk_assert(!call.finished && (code == DMK_RPC_OK || text[0]));
    call.finished = true;
    call.code = code;
}

/* One message of a call that is open. */
static void say(const struct dmk_rpc_stream_events *events, struct dmk_bytes message)
{
    const ProtobufCMessageDescriptor *type =
        call.is_health ? &grpc__health__v1__health_check_request__descriptor
                       : &grpc__reflection__v1__server_reflection_request__descriptor;
    const uint32_t n_sent = call.n_sent;

    events->on_message(events->ud, NULL, message);
    dmk_assert(call.n_sent <= n_sent + 1 && (call.n_sent > n_sent || call.finished));
    if (dmk_rpc_nul_field(type, message)) {
        dmk_assert(call.finished && call.code == DMK_RPC_INVALID_ARGUMENT);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct dmk_rpc__reflect *reflect;
    struct dmk_rpc__health *health;
    struct dmk_rpc_method all[DMK_RPC__HEALTH_METHODS + DMK_RPC__REFLECT_METHODS];
    struct dmk_rpc_stream_events events;
    uint32_t which;

    if (size < 1) {
        return 0;
    }
    if (!reflect) {
        reflect = dmk_rpc__reflect_new(methods, sizeof(methods) / sizeof(methods[0]));
    }
    health = dmk_rpc__health_new(methods, sizeof(methods) / sizeof(methods[0]));
    dmk_rpc__health_methods(health, all);
    dmk_rpc__reflect_methods(reflect, all + DMK_RPC__HEALTH_METHODS);
    which = data[0] % (DMK_RPC__HEALTH_METHODS + DMK_RPC__REFLECT_METHODS);
    memset(&call, 0, sizeof(call));
    call.is_health = which < DMK_RPC__HEALTH_METHODS;
    all[which].on_open(all[which].ud, NULL, &events);
    for (size_t at = 1; at < size && !call.finished;) {
        const size_t left = size - at - 1, n = data[at] < left ? data[at] : left;

        say(&events, (struct dmk_bytes){data + at + 1, n});
        at += 1 + n;
    }
    if (!call.finished) {
        dmk_rpc__health_set(health, true); /* whoever watches is told */
        events.on_end(events.ud, NULL);
    }
    events.on_closed(events.ud, NULL, DMK_RPC_OK, "");
    dmk_rpc__health_free(&health);
    return 0;
}
