/* What the fronts of the router share. Built by main.c; everything on the loop. */
#pragma once

#include "common/conf/keys.h"
#include "router/request.h"

struct dmk_router {
    struct dmk_loop *loop;
    const struct dmk_router_conf *conf;
    struct dmk_vocab *vocab;
    struct dmk_buf vocabulary; /* its tokens' bytes, for decode workers */
    struct dmk_stats *stats;
    struct dmk_requests *requests;
    struct dmk_fleet *fleet;
    struct dmk_keys *api_keys, *admin_keys;
    bool draining;
    int64_t started_unix_s;
    struct dmk_buf openapi; /* the served description of the API */
};

/* May serve: a decode worker is up, and a prefill worker too unless decode workers may do its work.
 * */
bool dmk_router_is_ready(const struct dmk_router *router);
/* Whether text ("Bearer ...", data NULL = none sent) opens the API, and the admin pages but probes. */
bool dmk_router_is_allowed(const struct dmk_router *router, struct dmk_str text);
bool dmk_router_is_admin(const struct dmk_router *router, struct dmk_str text);

/* Tokens of prompt and answer together; 0: no decode worker is up. */
uint32_t dmk_router_context(const struct dmk_router *router);

/* ---- admin.c: bodies of what both ports serve */
void dmk_admin_health(const struct dmk_router *router, struct dmk_buf *out);
void dmk_admin_models(const struct dmk_router *router, struct dmk_buf *out);
/* False: no such model. */
bool dmk_admin_model(const struct dmk_router *router, struct dmk_str name, struct dmk_buf *out);
void dmk_admin_metrics(const struct dmk_router *router, struct dmk_buf *out);

/* ---- http_front.c */
enum dmk_http_part { DMK_HTTP_API = 1, DMK_HTTP_ADMIN = 2 };
struct dmk_http_front {
    struct dmk_router *router;
    unsigned parts; /* of enum dmk_http_part: what this port serves */
};
/* on_request of an HTTP server; ud is a dmk_http_front. */
struct dmk_http_req;
void dmk_http_front_on_request(void *ud, struct dmk_http_req *req);
/* The body of what the HTTP server answers by itself: malformed, too large, too slow. */
void dmk_http_front_on_error(void *ud, unsigned status, const char *sentence, struct dmk_buf *body);

/* ---- grpc_front.c */
struct dmk_grpc_front;
int dmk_grpc_front_new(struct dmk_router *router, struct dmk_rpc *rpc, struct dmk_grpc_front **ret,
                       struct dmk_error *reterr);
void dmk_grpc_front_set_serving(struct dmk_grpc_front *front, bool serving);
/* Listens no more and sends clients elsewhere; open calls go on. Once. */
void dmk_grpc_front_drain(struct dmk_grpc_front *front);
/* Calls that run, and those whose end waits for a client that does not read. */
uint32_t dmk_grpc_front_n_calls(const struct dmk_grpc_front *front);
/* After a drain: nothing is on its way any more, all connections are closed. */
bool dmk_grpc_front_is_drained(const struct dmk_grpc_front *front);
void dmk_grpc_front_free(struct dmk_grpc_front **front);
