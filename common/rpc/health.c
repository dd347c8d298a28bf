/* grpc.health.v1 of one server: Check answers once, Watch at once and on every change. Owner: the loop. */
#include <stdio.h>
#include <stdlib.h>
#include "common/rpc/internal.h"
#include "common/rpc/msg.h"
#include "common/rpc/nul.h"
#include "proto/grpc_health.pb-c.h"

#define MAX_SERVICES 16
#define MAX_NAME     128

typedef Grpc__Health__V1__HealthCheckResponse__ServingStatus serving_status;
#define SERVING         GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
#define NOT_SERVING     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING
#define SERVICE_UNKNOWN GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN

/* A call of Check or Watch. */
struct asker {
    struct dmk_list node; /* in health.watchers once it watches */
    struct dmk_rpc__health *health;
    struct dmk_rpc_stream *stream;
    bool watch, asked;
    char service[MAX_NAME];
};

struct dmk_rpc__health {
    bool serving;
    char services[MAX_SERVICES][MAX_NAME];
    size_t n_services;
    struct dmk_list watchers;
};

/* "/damask.v1.Worker/Connect" names the service "damask.v1.Worker". */
static void add_service(struct dmk_rpc__health *health, const char *path)
{
    const char *end = strrchr(path, '/');
    char name[MAX_NAME];

    dmk_assert(path[0] == '/' && end > path);
    dmk_assert((size_t)(end - path) < MAX_NAME);
    (void)snprintf(name, sizeof(name), "%.*s", (int)(end - path - 1), path + 1);
    for (size_t i = 0; i < health->n_services; i++) {
        if (strcmp(health->services[i], name) == 0) {
            return;
        }
    }
    dmk_assert(health->n_services < MAX_SERVICES);
    (void)snprintf(health->services[health->n_services++], MAX_NAME, "%s", name);
}

struct dmk_rpc__health *dmk_rpc__health_new(const struct dmk_rpc_method *methods, size_t n_methods)
{
    struct dmk_rpc__health *health = calloc(1, sizeof(*health));

    dmk_assert(health);
    dmk_list_init(&health->watchers);
    for (size_t i = 0; i < n_methods; i++) {
        add_service(health, methods[i].path);
    }
    return health;
}

void dmk_rpc__health_free(struct dmk_rpc__health **health)
{
    free(*health);
    *health = NULL;
}

static serving_status status_of(const struct dmk_rpc__health *health, const char *service)
{
    bool known = service[0] == 0 || strcmp(service, "readiness") == 0;

    if (strcmp(service, "liveness") == 0) {
        return SERVING;
    }
    for (size_t i = 0; i < health->n_services && !known; i++) {
        known = strcmp(service, health->services[i]) == 0;
    }
    if (!known) {
        return SERVICE_UNKNOWN;
    }
    return health->serving ? SERVING : NOT_SERVING;
}

static void tell(struct asker *asker)
{
    Grpc__Health__V1__HealthCheckResponse response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

    response.status = status_of(asker->health, asker->service);
    (void)dmk_rpc_send_message(asker->stream, &response.base); /* a dead one is closed by its end */
}

void dmk_rpc__health_set(struct dmk_rpc__health *health, bool serving)
{
    if (health->serving == serving) {
        return;
    }
    health->serving = serving;
    for (struct dmk_list *n = health->watchers.next; n != &health->watchers; n = n->next) {
        tell(dmk_container_of(n, struct asker, node));
    }
}

static void on_message(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes message)
{
    struct asker *asker = ud;
    Grpc__Health__V1__HealthCheckRequest *request;

    if (asker->asked) {
        dmk_rpc_finish(stream, DMK_RPC_INVALID_ARGUMENT, "one request is expected");
        return;
    }
    request = dmk_rpc_nul_field(&grpc__health__v1__health_check_request__descriptor, message)
                  ? NULL /* half a name may be another's */
                  : grpc__health__v1__health_check_request__unpack(NULL, message.len, message.data);
    if (!request || strlen(request->service) >= MAX_NAME) {
        dmk_rpc_finish(stream, DMK_RPC_INVALID_ARGUMENT, "the request can not be read");
    } else {
        asker->asked = true;
        (void)snprintf(asker->service, sizeof(asker->service), "%s", request->service);
        if (asker->watch) {
            dmk_list_push_back(&asker->health->watchers, &asker->node);
            tell(asker);
            dmk_rpc__stream_until_drain(stream);
        } else if (status_of(asker->health, asker->service) == SERVICE_UNKNOWN) {
            dmk_rpc_finish(stream, DMK_RPC_NOT_FOUND, "no such service here");
        } else {
            tell(asker);
            dmk_rpc_finish(stream, DMK_RPC_OK, NULL);
        }
    }
    if (request) {
        grpc__health__v1__health_check_request__free_unpacked(request, NULL);
    }
}

static void on_end(void *ud, struct dmk_rpc_stream *stream)
{
    struct asker *asker = ud;

    if (!asker->asked) {
        dmk_rpc_finish(stream, DMK_RPC_INVALID_ARGUMENT, "a request is missing");
    }
}

static void on_closed(void *ud, struct dmk_rpc_stream *stream, enum dmk_rpc_code code,
                      const char *text)
{
    struct asker *asker = ud;

    (void)stream;
    (void)code;
    (void)text;
    dmk_list_remove(&asker->node);
    free(asker);
}

static void open_asker(struct dmk_rpc__health *health, struct dmk_rpc_stream *stream, bool watch,
                       struct dmk_rpc_stream_events *ret_events)
{
    struct asker *asker = calloc(1, sizeof(*asker));

    dmk_assert(asker);
    asker->health = health;
    asker->stream = stream;
    asker->watch = watch;
    dmk_list_init(&asker->node);
    *ret_events = (struct dmk_rpc_stream_events){
        .on_message = on_message, .on_end = on_end, .on_closed = on_closed, .ud = asker};
}

static void on_check(void *ud, struct dmk_rpc_stream *stream,
                     struct dmk_rpc_stream_events *ret_events)
{
    open_asker(ud, stream, false, ret_events);
}

static void on_watch(void *ud, struct dmk_rpc_stream *stream,
                     struct dmk_rpc_stream_events *ret_events)
{
    open_asker(ud, stream, true, ret_events);
}

void dmk_rpc__health_methods(struct dmk_rpc__health *health, struct dmk_rpc_method *ret_methods)
{
    ret_methods[0] = (struct dmk_rpc_method){"/grpc.health.v1.Health/Check", on_check, health};
    ret_methods[1] = (struct dmk_rpc_method){"/grpc.health.v1.Health/Watch", on_watch, health};
}
