/* Paths of the HTTP side: which are served on a port, with which method and key, and who answers. Loop only. */
#include "router/http_front.h"

#include <stdio.h>
#include <strings.h>
#include "common/base/spell.h"

/* Probes are for everybody; pages about the server want the admin's key. */
enum key { KEY_NONE, KEY_API, KEY_ADMIN };

/* What a path serves: its methods, the key it wants, and who answers. */
struct route {
    const char *path;
    bool below;     /* and every path one level below it */
    unsigned parts; /* on which ports */
    enum key key;
    bool post; /* else GET and HEAD */
    void (*answer)(struct dmk_router *router, struct dmk_http_req *req, struct dmk_str rest);
};

/* A browser asks before it sends JSON to another origin, but not before it sends text or a form: so a page that is
 * not allowed could make work here whose answer it never reads. Who is no browser may leave the type out. */
static bool is_json_of_page(const struct dmk_http_req *req)
{
    const struct dmk_str type = dmk_http_header(req, "content-type");
    const size_t n = strlen(DMK_HTTP_FRONT__JSON);

    return !dmk_http_header(req, "origin").data ||
           (type.len >= n && strncasecmp(type.data, DMK_HTTP_FRONT__JSON, n) == 0 &&
            (type.len == n || strchr("; \t", type.data[n])));
}

static void post_dialect(struct dmk_router *router, struct dmk_http_req *req, struct dmk_str rest)
{
    (void)rest;
    if (!is_json_of_page(req)) {
        struct dmk_api_error error;

        (void)dmk_api_fail(
            &error, 415, "unsupported_media_type",
            "a request with an Origin must have Content-Type: " DMK_HTTP_FRONT__JSON);
        dmk_http_front__refuse(router, req, &error, NULL);
        return;
    }
    dmk_http_front__start(router, req, dmk_dialect_find(true, dmk_http_path(req)));
}

/* A name as a path spells it (openai%2Fgpt-oss): undone once, then a text to be compared and no more. False: it is
 * too long, or holds what no name holds. */
static bool read_name(struct dmk_str path, char ret[DMK_ASK_MAX_MODEL_BYTES + 1])
{
    size_t n = 0;

    for (size_t i = 0; i < path.len; i++) {
        unsigned char c = (unsigned char)path.data[i];

        if (c == '%') {
            const int high = i + 2 < path.len ? dmk_hex_digit(path.data[i + 1]) : -1;
            const int low = i + 2 < path.len ? dmk_hex_digit(path.data[i + 2]) : -1;

            if (high < 0 || low < 0) {
                return false;
            }
            c = (unsigned char)(high << 4 | low);
            i += 2;
        }
        if (c < 0x20 || c == 0x7f || n == DMK_ASK_MAX_MODEL_BYTES) {
            return false;
        }
        ret[n++] = (char)c;
    }
    ret[n] = '\0';
    return true;
}

static void get_models(struct dmk_router *router, struct dmk_http_req *req, struct dmk_str rest)
{
    char name[DMK_ASK_MAX_MODEL_BYTES + 1];
    struct dmk_buf body;

    if (!read_name(rest, name)) {
        struct dmk_api_error error;

        (void)dmk_api_bad(&error, "model",
                          "the model's name has more than %d bytes or control characters",
                          DMK_ASK_MAX_MODEL_BYTES);
        dmk_http_front__refuse(router, req, &error, NULL);
        return;
    }

    dmk_buf_init(&body, 0);
    if (rest.len == 0) {
        dmk_admin_models(router, &body);
    } else if (!dmk_admin_model(router, dmk_str_from(name), &body)) {
        struct dmk_api_error error;
        char quoted[68];

        (void)dmk_api_fail(&error, 404, "model_not_found", "the model \"%s\" does not exist here",
                           dmk_api_quote(dmk_str_from(name), quoted));
        (void)snprintf(error.param, sizeof(error.param), "model");
        dmk_http_front__refuse(router, req, &error, NULL);
        dmk_buf_fini(&body);
        return;
    }
    dmk_http_respond(req, 200, DMK_HTTP_FRONT__JSON, NULL, dmk_buf_str(&body));
    dmk_buf_fini(&body);
}

static void get_openapi(struct dmk_router *router, struct dmk_http_req *req, struct dmk_str rest)
{
    (void)rest;
    dmk_http_respond(req, 200, DMK_HTTP_FRONT__JSON, NULL, dmk_buf_str(&router->openapi));
}

static void get_health(struct dmk_router *router, struct dmk_http_req *req, struct dmk_str rest)
{
    struct dmk_buf body;

    (void)rest;
    dmk_buf_init(&body, 0);
    dmk_admin_health(router, &body);
    dmk_http_respond(req, dmk_router_is_ready(router) ? 200 : 503, DMK_HTTP_FRONT__JSON, NULL,
                     dmk_buf_str(&body));
    dmk_buf_fini(&body);
}

static void get_livez(struct dmk_router *router, struct dmk_http_req *req, struct dmk_str rest)
{
    (void)router;
    (void)rest;
    dmk_http_respond(req, 200, "text/plain", NULL, dmk_str_from("ok\n"));
}

static void get_readyz(struct dmk_router *router, struct dmk_http_req *req, struct dmk_str rest)
{
    const bool ready = dmk_router_is_ready(router);

    (void)rest;
    dmk_http_respond(req, ready ? 200 : 503, "text/plain", NULL,
                     dmk_str_from(ready              ? "ok\n"
                                  : router->draining ? "draining\n"
                                                     : "no decode worker is up, or no prefill "
                                                       "worker where one is needed\n"));
}

static void get_metrics(struct dmk_router *router, struct dmk_http_req *req, struct dmk_str rest)
{
    struct dmk_buf body;

    (void)rest;
    dmk_buf_init(&body, 0);
    dmk_admin_metrics(router, &body);
    dmk_http_respond(req, 200, "text/plain; version=0.0.4; charset=utf-8", NULL,
                     dmk_buf_str(&body));
    dmk_buf_fini(&body);
}

static const struct route routes[] = {
    {"/v1/models", true, DMK_HTTP_API, KEY_API, .answer = get_models},
    {"/openapi.json", false, DMK_HTTP_API, KEY_API, .answer = get_openapi},
    {"/livez", false, DMK_HTTP_API | DMK_HTTP_ADMIN, KEY_NONE, .answer = get_livez},
    {"/readyz", false, DMK_HTTP_API | DMK_HTTP_ADMIN, KEY_NONE, .answer = get_readyz},
    {"/health", false, DMK_HTTP_API | DMK_HTTP_ADMIN, KEY_ADMIN, .answer = get_health},
    {"/metrics", false, DMK_HTTP_ADMIN, KEY_ADMIN, .answer = get_metrics},
};

/* All dialects share this one. */
static const struct route dialect_route = {NULL,    false,        DMK_HTTP_API,
                                           KEY_API, .post = true, .answer = post_dialect};

/* NULL: no such path on this port. *ret_rest: what stands below the path. */
static const struct route *find_route(unsigned parts, struct dmk_str path, struct dmk_str *ret_rest)
{
    *ret_rest = (struct dmk_str){0};
    if ((parts & DMK_HTTP_API) && dmk_dialect_find(true, path)) {
        return &dialect_route;
    }
    for (size_t i = 0; i < sizeof(routes) / sizeof(routes[0]); i++) {
        const size_t n = strlen(routes[i].path);

        if (!(routes[i].parts & parts) || path.len < n ||
            memcmp(path.data, routes[i].path, n) != 0) {
            continue;
        }
        if (path.len == n) {
            return &routes[i];
        }
        if (routes[i].below && path.data[n] == '/' && path.len > n + 1) {
            *ret_rest = (struct dmk_str){path.data + n + 1, path.len - n - 1};
            return &routes[i];
        }
    }
    return NULL;
}

/* A path that is none (NULL) wants the key of its port. */
static bool check_key(const struct dmk_http_front *port, struct dmk_http_req *req,
                      const struct route *route)
{
    const struct dmk_str sent = dmk_http_header(req, "authorization");
    const enum key key = route ? route->key : port->parts & DMK_HTTP_API ? KEY_API : KEY_ADMIN;
    struct dmk_api_error error;

    if (key == KEY_NONE || (key == KEY_API && dmk_router_is_allowed(port->router, sent)) ||
        (key == KEY_ADMIN && dmk_router_is_admin(port->router, sent))) {
        return true;
    }
    (void)dmk_api_fail(&error, 401, "invalid_api_key",
                       "an API key is needed: Authorization: Bearer KEY");
    dmk_http_front__refuse(port->router, req, &error, "WWW-Authenticate: Bearer\r\n");
    return false;
}

/* True when the handler is to answer; OPTIONS and wrong methods are answered here. */
static bool check_method(const struct dmk_http_front *port, const struct route *route,
                         struct dmk_http_req *req)
{
    const struct dmk_str method = dmk_http_method(req);
    const char *allow = route->post ? "Allow: POST, OPTIONS\r\n" : "Allow: GET, HEAD, OPTIONS\r\n";
    struct dmk_api_error error;

    if (route->post ? dmk_str_is(method, "POST")
                    : dmk_str_is(method, "GET") || dmk_str_is(method, "HEAD")) {
        return true;
    }
    if (dmk_str_is(method, "OPTIONS")) {
        dmk_http_respond(req, 204, NULL, allow, dmk_str_from(""));
        return false;
    }
    (void)dmk_api_fail(&error, 405, "method_not_allowed", "this path takes %s only",
                       route->post ? "POST" : "GET");
    dmk_http_front__refuse(port->router, req, &error, allow);
    return false;
}

void dmk_http_front_on_request(void *ud, struct dmk_http_req *req)
{
    const struct dmk_http_front *port = ud;
    struct dmk_str rest;
    const struct route *route = find_route(port->parts, dmk_http_path(req), &rest);
    struct dmk_api_error error;
    char quoted[68];

    if (port->router->draining) {
        dmk_http_last(req);
    }
    /* Whoever has no key learns no more than that, whatever the path. */
    if (!check_key(port, req, route)) {
        return;
    }
    if (!route) {
        (void)dmk_api_fail(&error, 404, "not_found", "there is no path \"%s\"",
                           dmk_api_quote(dmk_http_path(req), quoted));
        dmk_http_front__refuse(port->router, req, &error, NULL);
    } else if (check_method(port, route, req)) {
        route->answer(port->router, req, rest);
    }
}

void dmk_http_front_on_error(void *ud, unsigned status, const char *sentence, struct dmk_buf *body)
{
    const struct dmk_http_front *port = ud;
    struct dmk_api_error error;

    dmk_stats_refused(port->router->stats, DMK_ENTRY_HTTP, status);
    (void)dmk_api_fail(&error, status, NULL, "%s", sentence);
    dmk_api_error_json(&error, body);
}
