/* Listening, the count of connections, and the end of a turn, where output is written and clients that
 * left are told. Owner: the loop's thread. */
#include "common/http/internal.h"
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"

#define BACKLOG 512

static void on_connection(uv_stream_t *stream, int status)
{
    struct dmk_http_server *server = stream->data;

    if (status == 0 && !server->draining) {
        dmk_http__conn_open(server);
    }
}

static void on_turn_end(void *ud)
{
    dmk_http__server_turn_end(ud);
}

void dmk_http__server_turn_end(struct dmk_http_server *server)
{
    while (!dmk_list_empty(&server->dirty)) {
        struct dmk_http__conn *conn =
            dmk_container_of(server->dirty.next, struct dmk_http__conn, dirty_node);

        dmk_list_remove(&conn->dirty_node);
        dmk_http__conn_flush(conn);
    }
    while (!dmk_list_empty(&server->gone)) {
        struct dmk_http_req *req =
            dmk_container_of(server->gone.next, struct dmk_http_req, gone_node);

        dmk_list_remove(&req->gone_node);
        req->on_gone(req->ud); /* may end it */
    }
}

static int resolve(const struct dmk_http_conf *conf, struct sockaddr_storage *ret_addr,
                   struct dmk_error *reterr)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    struct addrinfo *found = NULL;
    char port[8];
    int err;

    (void)snprintf(port, sizeof(port), "%u", conf->port);
    err = getaddrinfo(conf->host, port, &hints, &found);
    if (err != 0) {
        return dmk_error_set(reterr, -DMK_EINVAL, "HTTP host \"%s\" has no address: %s", conf->host,
                             gai_strerror(err));
    }
    memcpy(ret_addr, found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    return 0;
}

static void free_server(struct dmk_http_server *server)
{
    dmk_http__tls_free(&server->tls);
    free(server->tls_in);
    free(server);
}

void dmk_http__handle_closed(struct dmk_http_server *server)
{
    dmk_assert(server->n_handles > 0);
    server->n_handles--;
    if (server->freed && server->n_handles == 0) {
        free_server(server);
    }
}

static void on_listener_closed(uv_handle_t *handle)
{
    dmk_http__handle_closed(handle->data);
}

int dmk_http_server_new(struct dmk_loop *loop, const struct dmk_http_conf *conf,
                        struct dmk_http_server **ret, struct dmk_error *reterr)
{
    struct dmk_http_server *server;
    struct sockaddr_storage addr;
    int err;
    struct dmk_http__tls *tls = NULL;
    int status = resolve(conf, &addr, reterr);

    for (size_t i = 0; i < conf->n_origins && status == 0; i++) {
        if (!dmk_http__origin_is_valid(conf->origins[i])) {
            status = dmk_error_set(reterr, -DMK_EINVAL,
                                   "\"%s\" is no origin: scheme://host, with :port where it is not "
                                   "the usual one and nothing behind it, or *",
                                   conf->origins[i]);
        }
    }
    if (status == 0 &&
        ((conf->tls_cert && conf->tls_cert[0]) || (conf->tls_key && conf->tls_key[0]))) {
        status = dmk_http__tls_new(conf, &tls, reterr);
    }
    if (status < 0) {
        return status;
    }
    dmk_assert(conf->on_request);
    dmk_assert(conf->max_header_bytes > 0);
    dmk_assert(conf->max_connections > 0);
    server = calloc(1, sizeof(*server));
    dmk_assert(server);
    server->loop = loop;
    server->conf = *conf;
    dmk_list_init(&server->conns);
    dmk_list_init(&server->reqs);
    dmk_list_init(&server->dirty);
    dmk_list_init(&server->gone);
    dmk_defer_init(&server->flush, on_turn_end, server);
    dmk_http__settings_init(&server->settings);
    server->tls = tls;
    server->conf.tls_cert = server->conf.tls_key = server->conf.tls_client_ca = NULL;
    if (tls) {
        server->tls_in = malloc(DMK_HTTP__READ_BYTES);
        dmk_assert(server->tls_in);
    }
    uv_tcp_init(dmk_loop__uv(loop), &server->listener);
    server->listener.data = server;
    server->n_handles = 1;
    err = uv_tcp_bind(&server->listener, (const struct sockaddr *)&addr, 0);
    if (err == 0) {
        err = uv_listen((uv_stream_t *)&server->listener, BACKLOG, on_connection);
    }
    if (err < 0) {
        server->freed = true;
        uv_close((uv_handle_t *)&server->listener, on_listener_closed);
        return dmk_error_set(reterr, -DMK_EIO, "HTTP can not listen on %s:%u: %s", conf->host,
                             conf->port, uv_strerror(err));
    }
    *ret = server;
    return 0;
}

void dmk_http_server_reload(struct dmk_http_server *server)
{
    if (server->tls) {
        dmk_http__tls_reload(server->tls);
    }
}

uint16_t dmk_http_server_port(const struct dmk_http_server *server)
{
    struct sockaddr_storage addr = {0};
    int len = sizeof(addr);

    if (uv_tcp_getsockname(&server->listener, (struct sockaddr *)&addr, &len) < 0) {
        return 0; /* draining: it listens no more */
    }
    return ntohs(addr.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&addr)->sin6_port
                                            : ((struct sockaddr_in *)&addr)->sin_port);
}

uint32_t dmk_http_server_n_connections(const struct dmk_http_server *server)
{
    return server->n_conns;
}

uint32_t dmk_http_server_n_answering(const struct dmk_http_server *server)
{
    uint32_t n = 0;

    for (struct dmk_list *at = server->conns.next; at != &server->conns; at = at->next) {
        const struct dmk_http__conn *conn = dmk_container_of(at, struct dmk_http__conn, node);

        n += conn->state == DMK_HTTP__PENDING || dmk_http__conn_waiting(conn) > 0;
    }
    return n;
}

void dmk_http_server_drain(struct dmk_http_server *server)
{
    struct dmk_list *node = server->conns.next;

    if (server->draining) {
        return;
    }
    server->draining = true;
    uv_close((uv_handle_t *)&server->listener, on_listener_closed);
    while (node != &server->conns) {
        struct dmk_http__conn *conn = dmk_container_of(node, struct dmk_http__conn, node);

        node = node->next;
        if (conn->state == DMK_HTTP__IDLE || (conn->ssl && !conn->tls_ready)) {
            dmk_http__conn_close(conn);
        }
    }
}

void dmk_http_server_free(struct dmk_http_server **serverp)
{
    struct dmk_http_server *server = *serverp;

    if (!server) {
        return;
    }
    *serverp = NULL;
    dmk_http_server_drain(server);
    while (!dmk_list_empty(&server->conns)) {
        dmk_http__conn_close(dmk_container_of(server->conns.next, struct dmk_http__conn, node));
    }
    dmk_http__server_turn_end(server); /* tells the open requests */
    dmk_defer_cancel(&server->flush);
    while (!dmk_list_empty(&server->reqs)) {
        struct dmk_http_req *req = dmk_container_of(server->reqs.next, struct dmk_http_req, node);

        dmk_list_remove(&req->node);
        req->server = NULL;
    }
    server->freed = true;
    if (server->n_handles == 0) {
        free_server(server);
    } /* else the last closed handle does */
}
