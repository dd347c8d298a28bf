/* The HTTP side: paths to handlers, dialects to requests, frames to bodies and server-sent events.
 *
 * Loop only. An answer lives from a request's start to the one call of done, fail or release; the
 * client's leaving comes from the HTTP server later than the call that caused it, never within.
 * Bytes of one batch of worker events go out in one write. */
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include "common/base/assert.h"
#include "common/base/spell.h"
#include "common/http/http.h"
#include "router/router.h"
#include "router/sse.h"

#define JSON "application/json"

struct answer {
    struct dmk_http_req *req;
    const struct dmk_dialect *dialect;
    struct dmk_request *request;
    bool stream;
    bool begun; /* status and headers have gone */
    bool wants_timeline;
    struct dmk_buf out; /* events to be written, or the body */
};

/* Further header lines. retry_after_s: 0 = none. */
static void put_headers(struct dmk_buf *out, const char *request_id, uint32_t retry_after_s)
{
    if (request_id) {
        dmk_buf_printf(out, "x-request-id: %s\r\n", request_id);
    }
    if (retry_after_s > 0) {
        dmk_buf_printf(out, "Retry-After: %u\r\n", retry_after_s);
    }
}

/* A header as text, or NULL when it is absent or not valid. */
static const char *take_header(const struct dmk_http_req *req, const char *name, char *to,
                               size_t cap, bool (*is_valid)(struct dmk_str))
{
    const struct dmk_str v = dmk_http_header(req, name);

    if (!v.data || v.len >= cap || !is_valid(v)) {
        return NULL;
    }
    memcpy(to, v.data, v.len);
    to[v.len] = '\0';
    return to;
}

#define ID_BYTES 132 /* of a request's id, with its end */

static const char *take_id(const struct dmk_http_req *req, char to[ID_BYTES])
{
    return take_header(req, "x-request-id", to, ID_BYTES, dmk_request_id_is_valid);
}

/* Answers what is no request to the model: the client's id comes back here too. lines may be NULL. */
static void respond(struct dmk_http_req *req, unsigned status, const char *type, const char *lines,
                    struct dmk_str body)
{
    char id[ID_BYTES];
    struct dmk_buf headers;

    dmk_buf_init(&headers, 0);
    put_headers(&headers, take_id(req, id), 0);
    dmk_buf_puts(&headers, lines ? lines : "");
    dmk_http_respond(req, status, type, headers.data, body);
    dmk_buf_fini(&headers);
}

static void refuse(struct dmk_router *router, struct dmk_http_req *req,
                   const struct dmk_api_error *error, const char *lines)
{
    struct dmk_buf body, headers;

    dmk_stats_refused(router->stats, error->status);
    dmk_buf_init(&body, 0);
    dmk_api_error_json(error, &body);
    dmk_buf_init(&headers, 0);
    dmk_buf_puts(&headers, lines ? lines : "");
    put_headers(&headers, NULL, error->retry_after_s);
    respond(req, error->status, JSON, headers.data, dmk_buf_str(&body));
    dmk_buf_fini(&headers);
    dmk_buf_fini(&body);
}

/* ---------------------------------------------------------------- the front of a request */

static void begin_stream(struct answer *a)
{
    struct dmk_buf headers;

    dmk_buf_init(&headers, 0);
    put_headers(&headers, dmk_request_id(a->request), 0);
    dmk_buf_puts(&headers, "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n");
    dmk_http_begin(a->req, 200, "text/event-stream; charset=utf-8", headers.data);
    dmk_buf_fini(&headers);
    a->begun = true;
}

static void write_out(struct answer *a)
{
    if (a->out.len == 0) {
        return;
    }
    if (!a->begun) {
        begin_stream(a);
    }
    /* A client that is gone or too slow is told by on_gone. */
    (void)dmk_http_write(a->req, dmk_buf_str(&a->out));
    dmk_buf_reset(&a->out);
}

static void free_answer(struct answer *a)
{
    dmk_buf_fini(&a->out);
    free(a);
}

static void front_begin(void *ud, bool stream)
{
    struct answer *a = ud;

    a->stream = stream;
}

static void front_frame(void *ud, const char *event, struct dmk_bytes payload)
{
    struct answer *a = ud;
    const struct dmk_str text = {(const char *)payload.data, payload.len};

    if (a->stream) {
        dmk_sse_event(&a->out, event, text);
    } else {
        dmk_buf_append_str(&a->out, text);
    }
}

static void front_flush(void *ud)
{
    struct answer *a = ud;

    if (a->stream) {
        write_out(a);
    }
}

static void front_idle(void *ud)
{
    struct answer *a = ud;

    dmk_sse_comment(&a->out, dmk_str_from("keep-alive"));
    write_out(a);
}

static void end_stream(struct answer *a)
{
    if (a->dialect->done_mark) {
        dmk_sse_done(&a->out);
    }
    write_out(a);
    dmk_http_end(a->req);
}

static void front_done(void *ud, struct dmk_str timeline)
{
    struct answer *a = ud;
    struct dmk_buf headers;

    dmk_http_on_gone(a->req, NULL, NULL);
    if (a->stream) {
        if (a->wants_timeline) {
            struct dmk_buf line;

            dmk_buf_init(&line, 0);
            dmk_buf_puts(&line, "timeline ");
            dmk_buf_append_str(&line, timeline);
            dmk_sse_comment(&a->out, dmk_buf_str(&line));
            dmk_buf_fini(&line);
        }
        end_stream(a);
    } else {
        dmk_buf_init(&headers, 0);
        put_headers(&headers, dmk_request_id(a->request), 0);
        if (a->wants_timeline) {
            dmk_buf_puts(&headers, "x-damask-timeline: ");
            dmk_buf_append_str(&headers, timeline);
            dmk_buf_puts(&headers, "\r\n");
        }
        if (a->out.failed) {
            const struct dmk_api_error error = {.status = 500,
                                                .type = "server_error",
                                                .code = "answer_too_large",
                                                .text =
                                                    "the answer is larger than this server sends"};

            dmk_buf_reset(&a->out);
            dmk_api_error_json(&error, &a->out);
            dmk_http_respond(a->req, error.status, JSON, headers.data, dmk_buf_str(&a->out));
        } else {
            dmk_http_respond(a->req, 200, a->dialect->content_type, headers.data,
                             dmk_buf_str(&a->out));
        }
        dmk_buf_fini(&headers);
    }
    free_answer(a);
}

static void front_fail(void *ud, const struct dmk_api_error *error, struct dmk_str timeline)
{
    struct answer *a = ud;
    struct dmk_buf body;

    dmk_http_on_gone(a->req, NULL, NULL);
    dmk_buf_init(&body, 0);
    a->dialect->error(error, &body);
    if (a->begun) {
        if (!a->dialect->fail) {
            dmk_sse_event(&a->out, NULL, dmk_buf_str(&body));
        } /* else it has framed the failure already */
        dmk_http_last(a->req);
        end_stream(a);
    } else {
        struct dmk_buf headers;

        dmk_buf_init(&headers, 0);
        put_headers(&headers, dmk_request_id(a->request), error->retry_after_s);
        if (a->wants_timeline) {
            dmk_buf_puts(&headers, "x-damask-timeline: ");
            dmk_buf_append_str(&headers, timeline);
            dmk_buf_puts(&headers, "\r\n");
        }
        dmk_http_respond(a->req, error->status, JSON, headers.data, dmk_buf_str(&body));
        dmk_buf_fini(&headers);
    }
    dmk_buf_fini(&body);
    free_answer(a);
}

static void front_release(void *ud)
{
    struct answer *a = ud;

    dmk_http_on_gone(a->req, NULL, NULL);
    if (a->begun) {
        dmk_http_end(a->req);
    } else {
        dmk_http_respond(a->req, 499, JSON, NULL, dmk_str_from(""));
    }
    free_answer(a);
}

static const struct dmk_front front = {
    .begin = front_begin,
    .frame = front_frame,
    .flush = front_flush,
    .idle = front_idle,
    .done = front_done,
    .fail = front_fail,
    .release = front_release,
};

static void on_gone(void *ud)
{
    struct answer *a = ud;

    dmk_request_abandon(a->request);
}

/* ---------------------------------------------------------------- paths */

static void start_request(struct dmk_router *router, struct dmk_http_req *req,
                          const struct dmk_dialect *dialect)
{
    struct answer *a = calloc(1, sizeof(*a));
    struct dmk_api_error error;
    char request_id[ID_BYTES];
    char traceparent[64];
    const struct dmk_request_conf conf = {
        .dialect = dialect,
        .body = dmk_http_body(req),
        .request_id = take_id(req, request_id),
        .traceparent = take_header(req, "traceparent", traceparent, sizeof(traceparent),
                                   dmk_traceparent_is_valid),
        .front = &front,
        .ud = a,
    };

    if (a) {
        a->req = req;
        a->dialect = dialect;
        a->wants_timeline = dmk_str_is(dmk_http_header(req, "x-damask-timeline"), "1");
        dmk_buf_init(&a->out, 0);
        if (dmk_request_id_check(dmk_http_header(req, "x-request-id"), &error) == 0 &&
            dmk_request_start(router->requests, &conf, &a->request, &error) == 0) {
            dmk_http_on_gone(req, on_gone, a);
            return;
        }
        free_answer(a);
    } else {
        (void)dmk_api_fail(&error, 503, "out_of_memory", "no memory for the request");
    }
    refuse(router, req, &error, NULL);
}

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
    const size_t n = strlen(JSON);

    return !dmk_http_header(req, "origin").data ||
           (type.len >= n && strncasecmp(type.data, JSON, n) == 0 &&
            (type.len == n || strchr("; \t", type.data[n])));
}

static void post_dialect(struct dmk_router *router, struct dmk_http_req *req, struct dmk_str rest)
{
    (void)rest;
    if (!is_json_of_page(req)) {
        struct dmk_api_error error;

        (void)dmk_api_fail(&error, 415, "unsupported_media_type",
                           "a request with an Origin must have Content-Type: " JSON);
        refuse(router, req, &error, NULL);
        return;
    }
    start_request(router, req, dmk_dialect_find(true, dmk_http_path(req)));
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
        refuse(router, req, &error, NULL);
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
        refuse(router, req, &error, NULL);
        dmk_buf_fini(&body);
        return;
    }
    respond(req, 200, JSON, NULL, dmk_buf_str(&body));
    dmk_buf_fini(&body);
}

static void get_openapi(struct dmk_router *router, struct dmk_http_req *req, struct dmk_str rest)
{
    (void)rest;
    respond(req, 200, JSON, NULL, dmk_buf_str(&router->openapi));
}

static void get_health(struct dmk_router *router, struct dmk_http_req *req, struct dmk_str rest)
{
    struct dmk_buf body;

    (void)rest;
    dmk_buf_init(&body, 0);
    dmk_admin_health(router, &body);
    respond(req, dmk_router_is_ready(router) ? 200 : 503, JSON, NULL, dmk_buf_str(&body));
    dmk_buf_fini(&body);
}

static void get_livez(struct dmk_router *router, struct dmk_http_req *req, struct dmk_str rest)
{
    (void)router;
    (void)rest;
    respond(req, 200, "text/plain", NULL, dmk_str_from("ok\n"));
}

static void get_readyz(struct dmk_router *router, struct dmk_http_req *req, struct dmk_str rest)
{
    const bool ready = dmk_router_is_ready(router);

    (void)rest;
    respond(req, ready ? 200 : 503, "text/plain", NULL,
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
    respond(req, 200, "text/plain; version=0.0.4; charset=utf-8", NULL, dmk_buf_str(&body));
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
    refuse(port->router, req, &error, "WWW-Authenticate: Bearer\r\n");
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
        respond(req, 204, NULL, allow, dmk_str_from(""));
        return false;
    }
    (void)dmk_api_fail(&error, 405, "method_not_allowed", "this path takes %s only",
                       route->post ? "POST" : "GET");
    refuse(port->router, req, &error, allow);
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
        refuse(port->router, req, &error, NULL);
    } else if (check_method(port, route, req)) {
        route->answer(port->router, req, rest);
    }
}

void dmk_http_front_on_error(void *ud, unsigned status, const char *sentence, struct dmk_buf *body)
{
    const struct dmk_http_front *port = ud;
    struct dmk_api_error error;

    dmk_stats_refused(port->router->stats, status);
    (void)dmk_api_fail(&error, status, NULL, "%s", sentence);
    dmk_api_error_json(&error, body);
}
