/* grpc.reflection of one server, v1 and v1alpha: which services there are, and the files that describe them.
 * The descriptions are carried in the program (proto/descriptors.h). Owner: the loop. */
#include <stdio.h>
#include <stdlib.h>
#include "common/rpc/internal.h"
#include "common/rpc/msg.h"
#include "common/rpc/nul.h"
#include "proto/descriptor.pb-c.h"
#include "proto/descriptors.h"
#include "proto/grpc_reflection.pb-c.h"

#define MAX_FILES    24
#define MAX_SERVICES 16

typedef Google__Protobuf__FileDescriptorProto file_desc;
typedef Google__Protobuf__DescriptorProto message_desc;
typedef Grpc__Reflection__V1__ServerReflectionRequest request_msg;
typedef Grpc__Reflection__V1__ServerReflectionResponse response_msg;

struct dmk_rpc__reflect {
    Google__Protobuf__FileDescriptorSet *set;
    char services[MAX_SERVICES][128];
    size_t n_services;
};

static void add_service(struct dmk_rpc__reflect *reflect, const char *path)
{
    const int len = (int)(strrchr(path, '/') - path) - 1;
    char *to = reflect->services[reflect->n_services];

    dmk_assert(len > 0 && len < (int)sizeof(reflect->services[0]));
    dmk_assert(reflect->n_services < MAX_SERVICES);
    (void)snprintf(to, sizeof(reflect->services[0]), "%.*s", len, path + 1);
    for (size_t i = 0; i < reflect->n_services; i++) {
        if (strcmp(reflect->services[i], to) == 0) {
            return;
        }
    }
    reflect->n_services++;
}

struct dmk_rpc__reflect *dmk_rpc__reflect_new(const struct dmk_rpc_method *methods,
                                              size_t n_methods)
{
    struct dmk_rpc__reflect *reflect = calloc(1, sizeof(*reflect));
    struct dmk_rpc_method own[DMK_RPC__REFLECT_METHODS];

    dmk_assert(reflect);
    reflect->set = google__protobuf__file_descriptor_set__unpack(NULL, dmk_proto_descriptors_size,
                                                                 dmk_proto_descriptors);
    dmk_assert(reflect->set && reflect->set->n_file <= MAX_FILES);
    for (size_t i = 0; i < n_methods; i++) {
        add_service(reflect, methods[i].path);
    }
    dmk_rpc__reflect_methods(reflect, own);
    for (size_t i = 0; i < DMK_RPC__REFLECT_METHODS; i++) {
        add_service(reflect, own[i].path);
    }
    return reflect;
}

void dmk_rpc__reflect_free(struct dmk_rpc__reflect **reflect)
{
    if (*reflect) {
        google__protobuf__file_descriptor_set__free_unpacked((*reflect)->set, NULL);
        free(*reflect);
        *reflect = NULL;
    }
}

/* ---- finding ---- */

/* The rest of symbol behind "name." or "" when it is name; NULL when it is neither. */
static const char *behind(const char *symbol, const char *name)
{
    const size_t len = strlen(name);

    if (len == 0) {
        return symbol;
    }
    if (strncmp(symbol, name, len) != 0 || (symbol[len] != '.' && symbol[len] != '\0')) {
        return NULL;
    }
    return symbol[len] == '.' ? symbol + len + 1 : "";
}

static bool names_enum(Google__Protobuf__EnumDescriptorProto *const *enums, size_t n,
                       const char *symbol)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(enums[i]->name, symbol) == 0) {
            return true;
        }
    }
    return false;
}

/* Goes down one nested message at a time; a field counts as a symbol too. */
static bool names_message(message_desc *const *list, size_t n, const char *symbol)
{
    size_t i = 0;

    while (i < n) {
        const message_desc *m = list[i++];
        const char *rest = behind(symbol, m->name);

        if (!rest) {
            continue;
        }
        if (!rest[0] || names_enum(m->enum_type, m->n_enum_type, rest)) {
            return true;
        }
        for (size_t k = 0; k < m->n_field; k++) {
            if (strcmp(m->field[k]->name, rest) == 0) {
                return true;
            }
        }
        symbol = rest;
        list = m->nested_type;
        n = m->n_nested_type;
        i = 0;
    }
    return false;
}

static bool names_service(const file_desc *file, const char *symbol)
{
    for (size_t i = 0; i < file->n_service; i++) {
        const Google__Protobuf__ServiceDescriptorProto *s = file->service[i];
        const char *rest = behind(symbol, s->name);

        if (!rest) {
            continue;
        }
        for (size_t k = 0; k < s->n_method && rest[0]; k++) {
            rest = strcmp(s->method[k]->name, rest) == 0 ? "" : rest;
        }
        return !rest[0];
    }
    return false;
}

static const file_desc *find_file(const struct dmk_rpc__reflect *reflect, const char *name)
{
    for (size_t i = 0; i < reflect->set->n_file; i++) {
        if (strcmp(reflect->set->file[i]->name, name) == 0) {
            return reflect->set->file[i];
        }
    }
    return NULL;
}

static const file_desc *find_symbol(const struct dmk_rpc__reflect *reflect, const char *symbol)
{
    if (!symbol) {
        return NULL;
    }
    for (size_t i = 0; i < reflect->set->n_file; i++) {
        const file_desc *f = reflect->set->file[i];
        const char *rest = behind(symbol, f->package ? f->package : "");

        if (rest && rest[0] &&
            (names_service(f, rest) || names_message(f->message_type, f->n_message_type, rest) ||
             names_enum(f->enum_type, f->n_enum_type, rest))) {
            return f;
        }
    }
    return NULL;
}

/* ---- answers ---- */

/* An answer to the request, without its contents; a view of the request. */
static response_msg begin_answer(request_msg *request)
{
    response_msg response = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;

    response.valid_host = request->host;
    response.original_request = request;
    return response;
}

static void send_error(struct dmk_rpc_stream *stream, request_msg *request, const char *text)
{
    response_msg response = begin_answer(request);
    Grpc__Reflection__V1__ErrorResponse error = GRPC__REFLECTION__V1__ERROR_RESPONSE__INIT;

    error.error_code = DMK_RPC_NOT_FOUND;
    error.error_message = (char *)(uintptr_t)text; /* only read */
    response.message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE;
    response.error_response = &error;
    (void)dmk_rpc_send_message(stream, &response.base); /* a dead stream is closed by its end */
}

static void send_services(const struct dmk_rpc__reflect *reflect, struct dmk_rpc_stream *stream,
                          request_msg *request)
{
    response_msg response = begin_answer(request);
    Grpc__Reflection__V1__ListServiceResponse list =
        GRPC__REFLECTION__V1__LIST_SERVICE_RESPONSE__INIT;
    Grpc__Reflection__V1__ServiceResponse rows[MAX_SERVICES];
    Grpc__Reflection__V1__ServiceResponse *ptrs[MAX_SERVICES];

    for (size_t i = 0; i < reflect->n_services; i++) {
        rows[i] =
            (Grpc__Reflection__V1__ServiceResponse)GRPC__REFLECTION__V1__SERVICE_RESPONSE__INIT;
        rows[i].name = (char *)(uintptr_t)reflect->services[i];
        ptrs[i] = &rows[i];
    }
    list.service = ptrs;
    list.n_service = reflect->n_services;
    response.message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE;
    response.list_services_response = &list;
    (void)dmk_rpc_send_message(stream, &response.base);
}

static void add_file(const file_desc **files, size_t *n, const file_desc *file)
{
    for (size_t i = 0; i < *n; i++) {
        if (files[i] == file) {
            return;
        }
    }
    files[(*n)++] = file;
}

/* The file and all that it imports, the file first. */
static void send_file(const struct dmk_rpc__reflect *reflect, struct dmk_rpc_stream *stream,
                      request_msg *request, const file_desc *file)
{
    response_msg response = begin_answer(request);
    Grpc__Reflection__V1__FileDescriptorResponse answer =
        GRPC__REFLECTION__V1__FILE_DESCRIPTOR_RESPONSE__INIT;
    ProtobufCBinaryData bytes[MAX_FILES];
    const file_desc *files[MAX_FILES];
    size_t n = 0;

    if (!file) {
        send_error(stream, request, "there is nothing of this name here");
        return;
    }
    add_file(files, &n, file);
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < files[i]->n_dependency; k++) {
            const file_desc *needed = find_file(reflect, files[i]->dependency[k]);

            dmk_assert(needed); /* the set holds all imports */
            add_file(files, &n, needed);
        }
    }
    for (size_t i = 0; i < n; i++) {
        bytes[i].len = google__protobuf__file_descriptor_proto__get_packed_size(files[i]);
        bytes[i].data = malloc(bytes[i].len);
        dmk_assert(bytes[i].data);
        (void)google__protobuf__file_descriptor_proto__pack(files[i], bytes[i].data);
    }
    answer.file_descriptor_proto = bytes;
    answer.n_file_descriptor_proto = n;
    response.message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE;
    response.file_descriptor_response = &answer;
    (void)dmk_rpc_send_message(stream, &response.base);
    for (size_t i = 0; i < n; i++) {
        free(bytes[i].data);
    }
}

static void on_message(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes message)
{
    const struct dmk_rpc__reflect *reflect = ud;
    request_msg *request =
        dmk_rpc_nul_field(&grpc__reflection__v1__server_reflection_request__descriptor, message)
            ? NULL /* half a name may be another's */
            : grpc__reflection__v1__server_reflection_request__unpack(NULL, message.len,
                                                                      message.data);

    if (!request) {
        dmk_rpc_finish(stream, DMK_RPC_INVALID_ARGUMENT, "the request can not be read");
        return;
    }
    switch (request->message_request_case) {
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES:
        send_services(reflect, stream, request);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME:
        send_file(reflect, stream, request, find_file(reflect, request->file_by_filename));
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL:
        send_file(reflect, stream, request, find_symbol(reflect, request->file_containing_symbol));
        break;
    default:
        send_error(stream, request, "no message here has extensions");
        break;
    }
    grpc__reflection__v1__server_reflection_request__free_unpacked(request, NULL);
}

static void on_end(void *ud, struct dmk_rpc_stream *stream)
{
    (void)ud;
    dmk_rpc_finish(stream, DMK_RPC_OK, NULL);
}

static void on_closed(void *ud, struct dmk_rpc_stream *stream, enum dmk_rpc_code code,
                      const char *text)
{
    (void)ud;
    (void)stream;
    (void)code;
    (void)text;
}

static void on_open(void *ud, struct dmk_rpc_stream *stream,
                    struct dmk_rpc_stream_events *ret_events)
{
    *ret_events = (struct dmk_rpc_stream_events){
        .on_message = on_message, .on_end = on_end, .on_closed = on_closed, .ud = ud};
    dmk_rpc__stream_until_drain(stream);
}

void dmk_rpc__reflect_methods(struct dmk_rpc__reflect *reflect, struct dmk_rpc_method *ret_methods)
{
    ret_methods[0] = (struct dmk_rpc_method){
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", on_open, reflect};
    ret_methods[1] = (struct dmk_rpc_method){
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", on_open, reflect};
}
