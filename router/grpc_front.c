/* The gRPC side: calls of damask.v1.Frontend to requests, frames to messages. Loop only.
 *
 * A call is freed when both its stream has closed and its request has ended, whichever comes first.
 * */
#include <stdlib.h>
#include "proto/damask_frontend.pb-c.h"
#include "router/router.h"

struct dmk_grpc_front {
    struct dmk_router *router;
    struct dmk_rpc_server *server;
};

struct call {
    struct dmk_grpc_front *front;
    struct dmk_rpc_stream *stream; /* NULL: closed */
    struct dmk_request *request;   /* NULL: none yet, or ended */
    bool answered;                 /* a status was set or a request is running */
    struct dmk_buf body;
};

static void free_call(struct call *c)
{
    if (!c->stream && !c->request) {
        dmk_buf_fini(&c->body);
        free(c);
    }
}

static enum dmk_rpc_code code_of(const struct dmk_api_error *error)
{
    switch (error->status) {
    case 400:
    case 413:
        return DMK_RPC_INVALID_ARGUMENT;
    case 401:
        return DMK_RPC_UNAUTHENTICATED;
    case 404:
        return DMK_RPC_NOT_FOUND;
    case 429:
        return DMK_RPC_RESOURCE_EXHAUSTED;
    case 503:
        return DMK_RPC_UNAVAILABLE;
    default:
        return DMK_RPC_INTERNAL;
    }
}

/* ---------------------------------------------------------------- the front of a request */

static void front_begin(void *ud, bool stream)
{
    (void)ud;
    (void)stream;
}

static void front_frame(void *ud, const char *event, struct dmk_bytes payload)
{
    struct call *c = ud;

    (void)event;
    if (c->stream) {
        (void)dmk_rpc_send(c->stream, payload); /* a failure comes as on_closed */
    }
}

static void front_nothing(void *ud)
{
    (void)ud;
}

static void end_call(struct call *c, enum dmk_rpc_code code, const char *text)
{
    c->request = NULL;
    if (c->stream) {
        dmk_rpc_finish(c->stream, code, text);
    }
    free_call(c);
}

static void front_done(void *ud, struct dmk_str timeline)
{
    (void)timeline;
    end_call(ud, DMK_RPC_OK, "");
}

static void front_fail(void *ud, const struct dmk_api_error *error, struct dmk_str timeline)
{
    (void)timeline;
    end_call(ud, code_of(error), error->text);
}

static void front_release(void *ud)
{
    end_call(ud, DMK_RPC_CANCELLED, "the client left");
}

static const struct dmk_front front = {
    .begin = front_begin,
    .frame = front_frame,
    .flush = front_nothing,
    .idle = front_nothing,
    .done = front_done,
    .fail = front_fail,
    .release = front_release,
};

/* ---------------------------------------------------------------- calls */

static void on_closed(void *ud, struct dmk_rpc_stream *stream, enum dmk_rpc_code code,
                      const char *text)
{
    struct call *c = ud;

    (void)stream;
    (void)code;
    (void)text;
    c->stream = NULL;
    if (c->request) {
        dmk_request_abandon(c->request); /* release frees the call */
    } else {
        free_call(c);
    }
}

static const char *valid(const char *text, bool (*is_valid)(struct dmk_str))
{
    return text && is_valid(dmk_str_from(text)) ? text : NULL;
}

/* True for the first message of a call; what comes after it is ignored. */
static bool check_call(struct call *c)
{
    const bool first = !c->answered;

    c->answered = true;
    return first;
}

static bool allow(void *ud, const char *authorization)
{
    const struct dmk_grpc_front *f = ud;

    return dmk_router_is_allowed(f->router, dmk_str_from(authorization));
}

static void on_chat(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes message)
{
    struct call *c = ud;
    struct dmk_api_error error;
    struct dmk_request_conf conf;

    if (!check_call(c)) {
        return;
    }
    dmk_buf_append(&c->body, message.data, message.len);
    if (c->body.failed) {
        dmk_rpc_finish(stream, DMK_RPC_RESOURCE_EXHAUSTED, "the request is too large");
        return;
    }
    conf = (struct dmk_request_conf){
        .dialect = &dmk_dialect_grpc,
        .body = dmk_buf_bytes(&c->body),
        .request_id = valid(dmk_rpc_metadata(stream, "x-request-id"), dmk_request_id_is_valid),
        .traceparent = valid(dmk_rpc_metadata(stream, "traceparent"), dmk_traceparent_is_valid),
        .front = &front,
        .ud = c,
    };
    if (dmk_request_id_check(dmk_str_from(dmk_rpc_metadata(stream, "x-request-id")), &error) < 0 ||
        dmk_request_start(c->front->router->requests, &conf, &c->request, &error) < 0) {
        c->request = NULL;
        dmk_rpc_finish(stream, code_of(&error), error.text);
    }
}

static void on_list_models(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes message)
{
    struct call *c = ud;
    const struct dmk_router_conf *conf = c->front->router->conf;
    Damask__V1__ListModelsResponse answer = DAMASK__V1__LIST_MODELS_RESPONSE__INIT;
    Damask__V1__ChatModel models[17];
    Damask__V1__ChatModel *list[17];
    uint32_t context = dmk_fleet_max_context(c->front->router->fleet);
    uint8_t *bytes;
    size_t n;

    (void)message;
    if (!check_call(c)) {
        return;
    }
    if (conf->max_context > 0 && conf->max_context < context) {
        context = conf->max_context;
    }
    for (size_t i = 0; i <= conf->model_aliases.n && i < 17; i++) {
        models[i] = (Damask__V1__ChatModel)DAMASK__V1__CHAT_MODEL__INIT;
        models[i].id = i == 0 ? conf->model_name : conf->model_aliases.items[i - 1];
        models[i].max_context = context;
        list[i] = &models[i];
        answer.n_models = i + 1;
    }
    answer.models = list;
    n = damask__v1__list_models_response__get_packed_size(&answer);
    bytes = malloc(n + 1);
    if (!bytes) {
        dmk_rpc_finish(stream, DMK_RPC_INTERNAL, "out of memory");
        return;
    }
    damask__v1__list_models_response__pack(&answer, bytes);
    (void)dmk_rpc_send(stream, (struct dmk_bytes){bytes, n});
    free(bytes);
    dmk_rpc_finish(stream, DMK_RPC_OK, "");
}

static void open_call(struct dmk_grpc_front *f, struct dmk_rpc_stream *stream,
                      void (*on_message)(void *, struct dmk_rpc_stream *, struct dmk_bytes),
                      struct dmk_rpc_stream_events *ret_events)
{
    struct call *c = calloc(1, sizeof(*c));

    *ret_events = (struct dmk_rpc_stream_events){0};
    if (!c) {
        dmk_rpc_finish(stream, DMK_RPC_RESOURCE_EXHAUSTED, "out of memory");
        return;
    }
    c->front = f;
    c->stream = stream;
    dmk_buf_init(&c->body, 0);
    *ret_events =
        (struct dmk_rpc_stream_events){.on_message = on_message, .on_closed = on_closed, .ud = c};
}

static void on_open_chat(void *ud, struct dmk_rpc_stream *stream,
                         struct dmk_rpc_stream_events *ret_events)
{
    open_call(ud, stream, on_chat, ret_events);
}

static void on_open_list_models(void *ud, struct dmk_rpc_stream *stream,
                                struct dmk_rpc_stream_events *ret_events)
{
    open_call(ud, stream, on_list_models, ret_events);
}

int dmk_grpc_front_new(struct dmk_router *router, struct dmk_rpc *rpc, struct dmk_grpc_front **ret,
                       struct dmk_error *reterr)
{
    struct dmk_grpc_front *f = calloc(1, sizeof(*f));
    const struct dmk_rpc_method methods[] = {
        {"/damask.v1.Frontend/Chat", on_open_chat, f},
        {"/damask.v1.Frontend/ListModels", on_open_list_models, f},
    };
    const struct dmk_rpc_tls tls = {.cert = router->conf->tls_cert,
                                    .key = router->conf->tls_key,
                                    .ca = router->conf->tls_client_ca};
    const struct dmk_rpc_server_conf conf = {
        .listen = router->conf->grpc_listen,
        .methods = methods,
        .n_methods = sizeof(methods) / sizeof(methods[0]),
        .max_message_bytes = router->conf->max_body_bytes,
        .max_streams = router->conf->max_grpc_calls,
        .request_timeout_ms = (uint32_t)router->conf->read_timeout_ms,
        .tls = router->conf->tls_cert[0] ? &tls : NULL,
        .reflect = true,
        .allow = allow,
        .allow_ud = f,
    };
    int rc;

    if (!f) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the gRPC server");
    }
    f->router = router;
    rc = dmk_rpc_server_new(rpc, &conf, &f->server, reterr);
    if (rc < 0) {
        free(f);
        return rc;
    }
    *ret = f;
    return 0;
}

void dmk_grpc_front_set_serving(struct dmk_grpc_front *front_, bool serving)
{
    dmk_rpc_server_set_serving(front_->server, serving);
}

void dmk_grpc_front_free(struct dmk_grpc_front **front_)
{
    if (*front_) {
        dmk_rpc_server_free(&(*front_)->server);
        free(*front_);
        *front_ = NULL;
    }
}
