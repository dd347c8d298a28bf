/* The gRPC side: calls of damask.v1.Frontend and vllm.grpc.engine.VllmEngine to requests, frames to messages.
 *
 * A call is freed when both its stream has closed and its request has ended, whichever comes first. */
#include "router/grpc_front.h"
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "proto/damask_frontend.pb-c.h"

#define MAX_ENGINE_ID 256

struct call {
    struct dmk_list node; /* in front.calls */
    struct dmk_grpc_front *front;
    const struct dmk_dialect *dialect;
    struct dmk_rpc_stream *stream;     /* NULL: closed */
    struct dmk_request *request;       /* NULL: none yet, or ended */
    bool answered;                     /* a status was set or a request is running */
    bool aborted;                      /* by somebody else's call */
    char engine_id[MAX_ENGINE_ID + 1]; /* of an engine's call: its request_id */
    struct dmk_buf body;
};

static void free_call(struct call *c)
{
    if (!c->stream && !c->request) {
        dmk_list_remove(&c->node);
        dmk_buf_fini(&c->body);
        free(c);
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

static void set_id(struct call *c, const char *id)
{
    dmk_rpc_set_trailer(c->stream, "x-request-id",
                        (struct dmk_bytes){(const uint8_t *)id, strlen(id)});
}

/* What goes with the status: the request's id, and its timeline when it was asked for. */
static void set_trailers(struct call *c, struct dmk_str timeline)
{
    const char *wants = dmk_rpc_metadata(c->stream, "x-damask-timeline");

    set_id(c, dmk_request_id(c->request));
    if (wants && strcmp(wants, "1") == 0 && timeline.len > 0) {
        dmk_rpc_set_trailer(c->stream, "x-damask-timeline",
                            (struct dmk_bytes){(const uint8_t *)timeline.data, timeline.len});
    }
}

static void front_done(void *ud, struct dmk_str timeline)
{
    struct call *c = ud;

    if (c->stream) {
        set_trailers(c, timeline);
        dmk_rpc_finish(c->stream, DMK_RPC_OK, "");
    }
    c->request = NULL;
    free_call(c);
}

static void front_fail(void *ud, const struct dmk_api_error *error, struct dmk_str timeline)
{
    struct call *c = ud;

    if (c->stream) {
        set_trailers(c, timeline);
        dmk_grpc_fail(c->stream, error);
    }
    c->request = NULL;
    free_call(c);
}

static void front_release(void *ud)
{
    struct call *c = ud;

    c->request = NULL;
    if (c->stream) {
        dmk_rpc_finish(c->stream, DMK_RPC_CANCELLED,
                       c->aborted ? "the request was aborted" : "the client left");
    }
    free_call(c);
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

/* ---------------------------------------------------------------- calls that are requests */

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

static void on_end(void *ud, struct dmk_rpc_stream *stream)
{
    const struct call *c = ud;

    if (!c->answered) {
        dmk_grpc_refuse_as(c->front, stream, 400, "a request is missing");
    }
}

/* The request_id of a GenerateRequest: field 1, which writers put first. What can not be read is none; parse
 * says what is wrong with it. */
static void read_engine_id(struct dmk_bytes m, char ret[MAX_ENGINE_ID + 1])
{
    size_t len = 0, at = 1;

    ret[0] = '\0';
    if (m.len < 2 || m.data[0] != 0x0a) {
        return;
    }
    for (unsigned shift = 0; at < m.len && shift < 21; shift += 7) {
        const uint8_t byte = m.data[at++];

        len |= (size_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) {
            break;
        }
    }
    if (len > 0 && len <= MAX_ENGINE_ID && len <= m.len - at && !memchr(m.data + at, 0, len)) {
        memcpy(ret, m.data + at, len);
        ret[len] = '\0';
    }
}

static const char *valid(const char *text, bool (*is_valid)(struct dmk_str))
{
    return text && is_valid(dmk_str_from(text)) ? text : NULL;
}

/* id: of the request that it would have been; NULL: it had none. */
static void refuse(struct call *c, const char *id, const struct dmk_api_error *error)
{
    char made[33];

    if (!id) {
        dmk_id128_format(dmk_id128_random(), made);
    }
    set_id(c, id ? id : made);
    dmk_grpc_refuse(c->front, c->stream, error);
}

static void start_request(struct call *c)
{
    const char *sent = dmk_rpc_metadata(c->stream, "x-request-id");
    struct dmk_request_conf conf = {
        .dialect = c->dialect,
        .body = dmk_buf_bytes(&c->body),
        .traceparent = valid(dmk_rpc_metadata(c->stream, "traceparent"), dmk_traceparent_is_valid),
        .front = &front,
        .ud = c,
    };
    struct dmk_api_error error;

    if (c->dialect == &dmk_dialect_engine) {
        c->front->received_unix_s = (double)dmk_clock_unix_s();
        read_engine_id(conf.body, c->engine_id);
        sent = c->engine_id[0] ? c->engine_id : sent;
    }
    if (sent && dmk_request_id_check(dmk_str_from(sent), &error) < 0) {
        refuse(c, NULL, &error);
        return;
    }
    conf.request_id = valid(sent, dmk_request_id_is_valid);
    if (dmk_request_start(c->front->router->requests, &conf, &c->request, &error) < 0) {
        c->request = NULL;
        refuse(c, conf.request_id, &error);
    }
}

static void on_message(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes message)
{
    struct call *c = ud;

    if (c->answered) {
        return; /* one request a call; what follows it means nothing */
    }
    c->answered = true;
    dmk_buf_append(&c->body, message.data, message.len);
    if (c->body.failed) {
        dmk_grpc_refuse_as(c->front, stream, 413, "the request is too large");
        return;
    }
    start_request(c);
}

static void open_call(struct dmk_grpc_front *f, struct dmk_rpc_stream *stream,
                      const struct dmk_dialect *dialect, struct dmk_rpc_stream_events *ret_events)
{
    struct call *c = calloc(1, sizeof(*c));

    dmk_assert(c);
    c->front = f;
    c->dialect = dialect;
    c->stream = stream;
    dmk_buf_init(&c->body, f->router->conf->max_body_bytes + 1);
    dmk_list_push_back(&f->calls, &c->node);
    *ret_events = (struct dmk_rpc_stream_events){
        .on_message = on_message, .on_end = on_end, .on_closed = on_closed, .ud = c};
}

static void on_open_chat(void *ud, struct dmk_rpc_stream *stream,
                         struct dmk_rpc_stream_events *ret_events)
{
    open_call(ud, stream, &dmk_dialect_grpc, ret_events);
}

static void on_open_generate(void *ud, struct dmk_rpc_stream *stream,
                             struct dmk_rpc_stream_events *ret_events)
{
    open_call(ud, stream, &dmk_dialect_engine, ret_events);
}

void dmk_grpc_front_abort(struct dmk_grpc_front *f, const char *request_id)
{
    struct dmk_list *next;

    for (struct dmk_list *at = f->calls.next; at != &f->calls; at = next) {
        struct call *c = dmk_container_of(at, struct call, node);

        next = at->next;
        if (c->request && c->engine_id[0] && strcmp(c->engine_id, request_id) == 0) {
            c->aborted = true;
            dmk_request_abandon(c->request); /* may free the call */
        }
    }
}

/* ---------------------------------------------------------------- calls with one message each way */

struct unary {
    struct dmk_grpc_front *front;
    dmk_grpc_unary fn;
    bool asked;
};

static void unary_message(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes message)
{
    struct unary *u = ud;

    if (!u->asked) {
        u->asked = true;
        u->fn(u->front, stream, message);
    }
}

static void unary_end(void *ud, struct dmk_rpc_stream *stream)
{
    const struct unary *u = ud;

    if (!u->asked) {
        dmk_grpc_refuse_as(u->front, stream, 400, "a request is missing");
    }
}

static void unary_closed(void *ud, struct dmk_rpc_stream *stream, enum dmk_rpc_code code,
                         const char *text)
{
    (void)stream;
    (void)code;
    (void)text;
    free(ud);
}

static void open_unary(struct dmk_grpc_front *f, dmk_grpc_unary fn,
                       struct dmk_rpc_stream_events *ret_events)
{
    struct unary *u = calloc(1, sizeof(*u));

    dmk_assert(u);
    u->front = f;
    u->fn = fn;
    *ret_events = (struct dmk_rpc_stream_events){
        .on_message = unary_message, .on_end = unary_end, .on_closed = unary_closed, .ud = u};
}

static void list_models(struct dmk_grpc_front *f, struct dmk_rpc_stream *stream,
                        struct dmk_bytes message)
{
    const struct dmk_router_conf *conf = f->router->conf;
    const size_t n = 1 + conf->model_aliases.n;
    Damask__V1__ListModelsResponse answer = DAMASK__V1__LIST_MODELS_RESPONSE__INIT;
    Damask__V1__ChatModel *models = calloc(n, sizeof(*models));
    Damask__V1__ChatModel **list = calloc(n, sizeof(Damask__V1__ChatModel *));

    (void)message; /* it has no fields */
    dmk_assert(models && list);
    for (size_t i = 0; i < n; i++) {
        models[i] = (Damask__V1__ChatModel)DAMASK__V1__CHAT_MODEL__INIT;
        models[i].id = i == 0 ? conf->model_name : conf->model_aliases.items[i - 1];
        models[i].max_context = dmk_router_context(f->router);
        list[i] = &models[i];
    }
    answer.models = list;
    answer.n_models = n;
    dmk_grpc_answer(stream, &answer.base);
    free(models);
    free(list);
}

static void on_open_list_models(void *ud, struct dmk_rpc_stream *stream,
                                struct dmk_rpc_stream_events *ret_events)
{
    (void)stream;
    open_unary(ud, list_models, ret_events);
}

/* A method of the engine, as its row and its front: ud of on_open. */
struct engine_method {
    struct dmk_grpc_front *front;
    dmk_grpc_unary fn;
};

static void on_open_engine(void *ud, struct dmk_rpc_stream *stream,
                           struct dmk_rpc_stream_events *ret_events)
{
    const struct engine_method *m = ud;

    (void)stream;
    open_unary(m->front, m->fn, ret_events);
}

/* ---------------------------------------------------------------- the server */

#define MAX_ENGINE_METHODS 16

struct server {
    struct dmk_grpc_front front;
    struct engine_method engine[MAX_ENGINE_METHODS];
};

static bool allow(void *ud, const char *authorization)
{
    const struct dmk_grpc_front *f = ud;

    return dmk_router_is_allowed(f->router, dmk_str_from(authorization));
}

static void on_refused(void *ud, enum dmk_rpc_code code)
{
    const struct dmk_grpc_front *f = ud;

    dmk_stats_refused(f->router->stats, DMK_ENTRY_GRPC, dmk_grpc_status_of(code));
}

static size_t fill_methods(struct server *s, struct dmk_rpc_method *methods)
{
    size_t n = 0;

    methods[n++] = (struct dmk_rpc_method){dmk_dialect_grpc.path, on_open_chat, &s->front};
    methods[n++] =
        (struct dmk_rpc_method){"/damask.v1.Frontend/ListModels", on_open_list_models, &s->front};
    methods[n++] = (struct dmk_rpc_method){dmk_dialect_engine.path, on_open_generate, &s->front};
    methods[n++] = (struct dmk_rpc_method){"/vllm.grpc.engine.VllmEngine/GetTokenizer",
                                           dmk_grpc_engine_open_tokenizer, &s->front};
    dmk_assert(dmk_n_grpc_engine_methods <= MAX_ENGINE_METHODS);
    for (size_t i = 0; i < dmk_n_grpc_engine_methods; i++) {
        s->engine[i] = (struct engine_method){&s->front, dmk_grpc_engine_methods[i].fn};
        methods[n++] =
            (struct dmk_rpc_method){dmk_grpc_engine_methods[i].path, on_open_engine, &s->engine[i]};
    }
    return n;
}

int dmk_grpc_front_new(struct dmk_router *router, struct dmk_rpc *rpc, struct dmk_grpc_front **ret,
                       struct dmk_error *reterr)
{
    struct server *s = calloc(1, sizeof(*s));
    struct dmk_rpc_method methods[MAX_ENGINE_METHODS + 4];
    const struct dmk_rpc_tls tls = {.cert = router->conf->tls_cert,
                                    .key = router->conf->tls_key,
                                    .ca = router->conf->tls_client_ca};
    struct dmk_rpc_server_conf conf = {
        .listen = router->conf->grpc_listen,
        .methods = methods,
        .max_message_bytes = router->conf->max_body_bytes,
        .max_streams = router->conf->max_grpc_calls,
        .request_timeout_ms = (uint32_t)router->conf->read_timeout_ms,
        .tls = router->conf->tls_cert[0] ? &tls : NULL,
        .reflect = true,
        .allow = allow,
        .on_refused = on_refused,
        .ud = &s->front,
    };
    int rc;

    if (!s) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the gRPC server");
    }
    s->front.router = router;
    dmk_list_init(&s->front.calls);
    dmk_list_init(&s->front.zip_waiters);
    conf.n_methods = fill_methods(s, methods);
    rc = dmk_rpc_server_new(rpc, &conf, &s->front.server, reterr);
    if (rc < 0) {
        free(s);
        return rc;
    }
    *ret = &s->front;
    return 0;
}

void dmk_grpc_front_set_serving(struct dmk_grpc_front *front_, bool serving)
{
    dmk_rpc_server_set_serving(front_->server, serving);
}

void dmk_grpc_front_drain(struct dmk_grpc_front *front_)
{
    dmk_rpc_server_drain(front_->server);
}

uint32_t dmk_grpc_front_n_calls(const struct dmk_grpc_front *front_)
{
    return dmk_rpc_server_n_calls(front_->server);
}

bool dmk_grpc_front_is_drained(const struct dmk_grpc_front *front_)
{
    return dmk_rpc_server_is_drained(front_->server);
}

void dmk_grpc_front_free(struct dmk_grpc_front **front_)
{
    if (*front_) {
        dmk_rpc_server_free(&(*front_)->server);
        dmk_grpc_engine_fini(*front_);
        free(dmk_container_of(*front_, struct server, front));
        *front_ = NULL;
    }
}
