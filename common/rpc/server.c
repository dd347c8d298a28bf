/* A server: accepting calls of its methods, refusing unknown ones, and going away. Owner: the loop.
 *
 * One accept is always waiting for each method and one for everything else; draining ends them. The server's memory and
 * gRPC's server go when the shutdown, all accepts and all calls have come back. */
#include "common/rpc/internal.h"
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/clock.h"

#define MAX_METHODS   32
#define LOOK_EVERY_MS 500 /* for calls whose first message is late */

struct dmk_rpc_server {
    struct dmk_list node; /* in rpc.servers */
    struct dmk_rpc *rpc;
    grpc_server *server;
    struct dmk_rpc_method methods[MAX_METHODS];
    void *registered[MAX_METHODS];
    size_t n_methods;
    size_t max_queue_bytes;
    uint32_t max_streams;
    uint32_t n_streams;
    uint32_t n_calls; /* streams and refusals until all their ops have come back */
    unsigned refs;    /* accepts, refusals, calls, the shutdown, and one for the owner */
    bool freed, drained;
    uint64_t request_timeout_ns; /* 0: none */
    struct dmk_timer *timer;     /* NULL: there is no such time */
    bool (*allow)(void *ud, const char *authorization);
    void (*on_refused)(void *ud, enum dmk_rpc_code code);
    void *ud;
    struct dmk_rpc__tls *tls; /* NULL: none */
    uint16_t port;
    struct dmk_list streams;
    struct dmk_rpc__op op_drain, op_shutdown;
    struct dmk_rpc__health *health;
    struct dmk_rpc__reflect *reflect; /* NULL: not served */
};

/* A call that waits to come, or one that is only told why it can not be. */
struct accept {
    struct dmk_rpc__op op;
    struct dmk_rpc_server *server;
    const struct dmk_rpc_method *method; /* NULL: whatever is not registered */
    grpc_call *call;
    gpr_timespec deadline;
    grpc_metadata_array md;
    grpc_call_details details;
    int cancelled;
};

size_t dmk_rpc__args(const struct dmk_rpc *rpc, size_t max_message_bytes, grpc_arg *args)
{
    const struct {
        const char *key;
        int value;
    } rows[] = {
        {"grpc.max_receive_message_length", (int)max_message_bytes},
        {"grpc.max_send_message_length", -1},
        {"grpc.keepalive_time_ms", (int)rpc->keepalive_ms},
        {"grpc.keepalive_timeout_ms", (int)rpc->keepalive_timeout_ms},
        {"grpc.keepalive_permit_without_calls", 1},
        {"grpc.http2.max_pings_without_data", 0},
        {"grpc.compression_enabled_algorithms_bitset", 1}, /* identity only: no bombs */
    };
    const size_t n = sizeof(rows) / sizeof(rows[0]);

    for (size_t i = 0; i < n; i++) {
        args[i] = (grpc_arg){.type = GRPC_ARG_INTEGER,
                             .key = (char *)(uintptr_t)rows[i].key,
                             .value.integer = rows[i].value};
    }
    return n;
}

static void add_arg(grpc_arg *args, size_t *n, const char *key, int value)
{
    args[(*n)++] =
        (grpc_arg){.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)key, .value.integer = value};
}

static void unref(struct dmk_rpc_server *server)
{
    dmk_assert(server->refs > 0);
    if (--server->refs == 0) {
        server->rpc->n_objects--;
        grpc_server_destroy(server->server);
        dmk_rpc__health_free(&server->health);
        dmk_rpc__reflect_free(&server->reflect);
        dmk_rpc__tls_free(&server->tls); /* no handshake asks for a certificate any more */
        free(server);
    }
}

void dmk_rpc__server_call_done(struct dmk_rpc_server *server)
{
    server->n_calls--;
    unref(server);
}

static void free_accept(struct accept *accept)
{
    struct dmk_rpc_server *server = accept->server;

    grpc_metadata_array_destroy(&accept->md);
    if (!accept->method) {
        grpc_call_details_destroy(&accept->details);
    }
    if (accept->call) {
        grpc_call_unref(accept->call);
    }
    free(accept);
    unref(server);
}

static void on_refused(void *obj, bool ok)
{
    struct accept *accept = obj;

    (void)ok; /* the client may be gone already */
    accept->server->n_calls--;
    free_accept(accept);
}

static void tell_refused(const struct dmk_rpc_server *server, enum dmk_rpc_code code)
{
    if (server->on_refused) {
        server->on_refused(server->ud, code);
    }
}

static void refuse(struct accept *accept, enum dmk_rpc_code code, const char *text)
{
    grpc_slice details = grpc_slice_from_copied_string(text);
    const grpc_op ops[] = {
        {.op = GRPC_OP_SEND_INITIAL_METADATA},
        {.op = GRPC_OP_SEND_STATUS_FROM_SERVER,
         .data.send_status_from_server = {.status = (grpc_status_code)code,
                                          .status_details = &details}},
        {.op = GRPC_OP_RECV_CLOSE_ON_SERVER,
         .data.recv_close_on_server.cancelled = &accept->cancelled},
    };

    tell_refused(accept->server, code);
    accept->server->n_calls++;
    accept->op.fn = on_refused;
    dmk_rpc__start(accept->server->rpc, accept->call, ops, 3, &accept->op);
    grpc_slice_unref(details);
}

static void open_stream(struct accept *accept)
{
    struct dmk_rpc_server *server = accept->server;
    const struct dmk_rpc_method *method = accept->method;
    struct dmk_rpc_stream *s =
        dmk_rpc__stream_new(server->rpc, accept->call, server->max_queue_bytes);

    accept->call = NULL;
    grpc_metadata_array_destroy(&s->request_md);
    s->request_md = accept->md;
    grpc_metadata_array_init(&accept->md);
    s->server = server;
    s->opened_ns = dmk_clock_ns();
    server->refs++;
    server->n_streams++;
    server->n_calls++;
    dmk_list_push_back(&server->streams, &s->node);
    free_accept(accept);
    s->refs++;
    dmk_rpc__stream_open_server(s);
    method->on_open(method->ud, s, &s->events);
    dmk_assert(s->events.on_message);
    dmk_assert(s->events.on_closed);
    if (!s->closed) {
        dmk_rpc__stream_recv(s);
    }
    dmk_rpc__stream_put(s);
}

static void accept_next(struct dmk_rpc_server *server, const struct dmk_rpc_method *method);

/* Probes of a cluster have no keys. */
static bool is_health(const struct dmk_rpc_method *method)
{
    return strncmp(method->path, "/grpc.health.v1.", 16) == 0;
}

static bool is_allowed(const struct accept *accept)
{
    const struct dmk_rpc_server *server = accept->server;
    char *sent = NULL;
    bool ok;

    if (!server->allow || is_health(accept->method)) {
        return true;
    }
    for (size_t i = 0; i < accept->md.count && !sent; i++) {
        if (grpc_slice_str_cmp(accept->md.metadata[i].key, "authorization") == 0) {
            sent = grpc_slice_to_c_string(accept->md.metadata[i].value);
        }
    }
    ok = server->allow(server->ud, sent);
    gpr_free(sent);
    return ok;
}

static void on_accept(void *obj, bool ok)
{
    struct accept *accept = obj;
    struct dmk_rpc_server *server = accept->server;

    if (!ok || server->freed) { /* shutting down */
        free_accept(accept);
        return;
    }
    accept_next(server, accept->method); /* first, so that none has to wait */
    if (!dmk_rpc__tls_is_client(server->tls, accept->call)) {
        refuse(accept, DMK_RPC_PERMISSION_DENIED,
               "the client's certificate does not have the name that may call here");
    } else if (!accept->method) {
        refuse(accept, DMK_RPC_UNIMPLEMENTED, "this method is not served here");
    } else if (!is_allowed(accept)) {
        refuse(accept, DMK_RPC_UNAUTHENTICATED,
               "a key is needed: metadata authorization: Bearer KEY");
    } else if (server->n_streams >= server->max_streams) {
        refuse(accept, DMK_RPC_RESOURCE_EXHAUSTED, "too many calls are open at this server");
    } else {
        open_stream(accept);
    }
}

static void accept_next(struct dmk_rpc_server *server, const struct dmk_rpc_method *method)
{
    grpc_completion_queue *cq = server->rpc->cq;
    struct accept *accept = calloc(1, sizeof(*accept));
    grpc_call_error err;

    dmk_assert(accept);
    accept->server = server;
    accept->method = method;
    accept->op.fn = on_accept;
    accept->op.obj = accept;
    grpc_metadata_array_init(&accept->md);
    server->refs++;
    dmk_rpc__release(&accept->op);
    if (method) {
        err = grpc_server_request_registered_call(
            server->server, server->registered[method - server->methods], &accept->call,
            &accept->deadline, &accept->md, NULL, cq, cq, &accept->op);
    } else {
        grpc_call_details_init(&accept->details);
        err = grpc_server_request_call(server->server, &accept->call, &accept->details, &accept->md,
                                       cq, cq, &accept->op);
    }
    dmk_assert(err == GRPC_CALL_OK);
}

static void on_shutdown(void *obj, bool ok)
{
    (void)ok;
    unref(obj);
}

/* gRPC closes a connection when its last call has ended and what it wrote has left. */
static void on_drained(void *obj, bool ok)
{
    struct dmk_rpc_server *server = obj;

    server->drained = true;
    on_shutdown(server, ok);
}

/* Calls that were opened and then said nothing hold a place that others may want. */
static void on_timer(void *ud)
{
    struct dmk_rpc_server *server = ud;
    const uint64_t now = dmk_clock_ns();

    for (struct dmk_list *at = server->streams.next; at != &server->streams; at = at->next) {
        struct dmk_rpc_stream *s = dmk_container_of(at, struct dmk_rpc_stream, node);

        if (!s->heard && !s->finishing && now - s->opened_ns >= server->request_timeout_ns) {
            tell_refused(server, DMK_RPC_DEADLINE_EXCEEDED);
            dmk_rpc_finish(s, DMK_RPC_DEADLINE_EXCEEDED,
                           "the call took too long to send its request");
        }
    }
}

static int listen_on(struct dmk_rpc_server *server, const struct dmk_rpc_server_conf *conf,
                     struct dmk_error *reterr)
{
    grpc_server_credentials *creds;
    int port;

    if (conf->tls) {
        const int rc = dmk_rpc__tls_server(conf->tls, &server->tls, &creds, reterr);

        if (rc < 0) {
            return rc;
        }
    } else {
        creds = grpc_insecure_server_credentials_create();
    }
    port = grpc_server_add_http2_port(server->server, conf->listen, creds);
    grpc_server_credentials_release(creds);
    if (port <= 0) {
        return dmk_error_set(
            reterr, -DMK_EIO,
            "gRPC can not listen on \"%s\": the address is in use or not of this "
            "host%s",
            conf->listen, conf->tls ? ", or the certificate and its key do not go together" : "");
    }
    server->port = (uint16_t)port;
    return 0;
}

int dmk_rpc_server_new(struct dmk_rpc *rpc, const struct dmk_rpc_server_conf *conf,
                       struct dmk_rpc_server **ret, struct dmk_error *reterr)
{
    struct dmk_rpc_server *server = calloc(1, sizeof(*server));
    grpc_arg args[DMK_RPC__MAX_ARGS];
    size_t n;
    int status;

    dmk_assert(server);
    dmk_assert(conf->n_methods + DMK_RPC__HEALTH_METHODS + DMK_RPC__REFLECT_METHODS <= MAX_METHODS);
    server->rpc = rpc;
    server->allow = conf->allow;
    server->on_refused = conf->on_refused;
    server->ud = conf->ud;
    server->request_timeout_ns = conf->request_timeout_ms * DMK_NS_PER_MS;
    server->max_streams = conf->max_streams;
    server->max_queue_bytes =
        conf->max_queue_bytes ? conf->max_queue_bytes : DMK_RPC_MAX_QUEUE_BYTES;
    server->refs = 1;
    dmk_list_init(&server->streams);
    n = dmk_rpc__args(
        rpc, conf->max_message_bytes ? conf->max_message_bytes : DMK_RPC_MAX_MESSAGE_BYTES, args);
    if (conf->request_timeout_ms > 0) { /* TLS and the first words of HTTP/2 */
        add_arg(args, &n, "grpc.server_handshake_timeout_ms", (int)conf->request_timeout_ms);
    }
    add_arg(args, &n, "grpc.so_reuseport", 0); /* a second server on the port must be told */
    /* Clients ping as often as we do; by default a server would take that for an attack. */
    add_arg(args, &n, "grpc.http2.min_ping_interval_without_data_ms", 500);
    server->server = grpc_server_create(&(grpc_channel_args){n, args}, NULL);
    grpc_server_register_completion_queue(server->server, rpc->cq, NULL);
    server->health = dmk_rpc__health_new(conf->methods, conf->n_methods);
    memcpy(server->methods, conf->methods, conf->n_methods * sizeof(*conf->methods));
    dmk_rpc__health_methods(server->health, &server->methods[conf->n_methods]);
    server->n_methods = conf->n_methods + DMK_RPC__HEALTH_METHODS;
    if (conf->reflect) {
        server->reflect = dmk_rpc__reflect_new(server->methods, server->n_methods);
        dmk_rpc__reflect_methods(server->reflect, &server->methods[server->n_methods]);
        server->n_methods += DMK_RPC__REFLECT_METHODS;
    }
    for (size_t i = 0; i < server->n_methods; i++) {
        server->registered[i] = grpc_server_register_method(server->server, server->methods[i].path,
                                                            NULL, GRPC_SRM_PAYLOAD_NONE, 0);
        dmk_assert(server->registered[i]);
    }
    status = listen_on(server, conf, reterr);
    grpc_server_start(server->server);
    rpc->n_objects++;
    dmk_list_push_back(&rpc->servers, &server->node);
    if (status < 0) {
        dmk_rpc_server_free(&server);
        return status;
    }
    for (size_t i = 0; i < server->n_methods; i++) {
        accept_next(server, &server->methods[i]);
    }
    accept_next(server, NULL);
    if (conf->request_timeout_ms > 0) {
        server->timer = dmk_timer_new(rpc->loop, on_timer, server);
        dmk_assert(server->timer);
        dmk_timer_start(server->timer, LOOK_EVERY_MS, LOOK_EVERY_MS);
    }
    *ret = server;
    return 0;
}

struct dmk_rpc_server *dmk_rpc__server_of(struct dmk_list *node)
{
    return dmk_container_of(node, struct dmk_rpc_server, node);
}

uint16_t dmk_rpc_server_port(const struct dmk_rpc_server *server)
{
    return server->port;
}

void dmk_rpc_server_set_serving(struct dmk_rpc_server *server, bool serving)
{
    dmk_rpc__health_set(server->health, serving);
}

void dmk_rpc__server_stream_closed(struct dmk_rpc_server *server)
{
    server->n_streams--;
}

/* gRPC may be told to shut down more than once: each time it says so when the last call has ended. */
static void shut_down(struct dmk_rpc_server *server, struct dmk_rpc__op *op,
                      void (*fn)(void *obj, bool ok))
{
    *op = (struct dmk_rpc__op){.fn = fn, .obj = server};
    server->refs++;
    dmk_rpc__release(op);
    grpc_server_shutdown_and_notify(server->server, server->rpc->cq, op);
}

void dmk_rpc_server_drain(struct dmk_rpc_server *server)
{
    dmk_assert(!dmk_rpc__server_is_draining(server));
    shut_down(server, &server->op_drain, on_drained);
    for (struct dmk_list *at = server->streams.next; at != &server->streams; at = at->next) {
        struct dmk_rpc_stream *s = dmk_container_of(at, struct dmk_rpc_stream, node);

        if (s->until_drain) {
            dmk_rpc__stream_until_drain(s);
        }
    }
}

bool dmk_rpc__server_is_draining(const struct dmk_rpc_server *server)
{
    return server->op_drain.fn;
}

uint32_t dmk_rpc_server_n_calls(const struct dmk_rpc_server *server)
{
    uint32_t n = server->n_calls;

    for (struct dmk_list *at = server->streams.next; at != &server->streams; at = at->next) {
        const struct dmk_rpc_stream *s = dmk_container_of(at, struct dmk_rpc_stream, node);

        n -= !s->heard && !s->finishing;
    }
    return n;
}

bool dmk_rpc_server_is_drained(const struct dmk_rpc_server *server)
{
    return server->drained && server->n_calls == 0;
}

void dmk_rpc_server_free(struct dmk_rpc_server **serverp)
{
    struct dmk_rpc_server *server = *serverp;

    if (!server) {
        return;
    }
    *serverp = NULL;
    server->freed = true;
    if (server->timer) {
        dmk_timer_free(&server->timer);
    }
    dmk_list_remove(&server->node);
    while (!dmk_list_empty(&server->streams)) {
        dmk_rpc__stream_drop(dmk_container_of(server->streams.next, struct dmk_rpc_stream, node),
                             DMK_RPC_CANCELLED, "this server is shutting down");
    }
    shut_down(server, &server->op_shutdown, on_shutdown);
    grpc_server_cancel_all_calls(server->server);
    unref(server);
}
