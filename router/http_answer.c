/* Answers of the HTTP side: dialects to requests, frames to bodies and server-sent events, refusals.
 *
 * Loop only. An answer lives from a request's start to the one call of done, fail or release; the
 * client's leaving comes from the HTTP server later than the call that caused it, never within.
 * Bytes of one batch of worker events go out in one write. */
#include "router/http_front.h"

#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "router/sse.h"

struct answer {
    struct dmk_http_req *req;
    const struct dmk_dialect *dialect;
    struct dmk_request *request;
    bool stream;
    bool begun; /* status and headers have gone */
    bool wants_timeline;
    struct dmk_buf out; /* events to be written, or the body */
};

/* seconds: 0 = not said. */
static void put_retry_after(struct dmk_buf *out, uint32_t seconds)
{
    if (seconds > 0) {
        dmk_buf_printf(out, "Retry-After: %u\r\n", seconds);
    }
}

static void put_timeline(struct dmk_buf *out, const struct answer *a, struct dmk_str timeline)
{
    if (a->wants_timeline) {
        dmk_buf_puts(out, "x-damask-timeline: ");
        dmk_buf_append_str(out, timeline);
        dmk_buf_puts(out, "\r\n");
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

void dmk_http_front__refuse(struct dmk_router *router, struct dmk_http_req *req,
                            const struct dmk_api_error *error, const char *lines)
{
    struct dmk_buf body, headers;

    dmk_stats_refused(router->stats, DMK_ENTRY_HTTP, error->status);
    dmk_buf_init(&body, 0);
    dmk_api_error_json(error, &body);
    dmk_buf_init(&headers, 0);
    dmk_buf_puts(&headers, lines ? lines : "");
    put_retry_after(&headers, error->retry_after_s);
    dmk_http_respond(req, error->status, DMK_HTTP_FRONT__JSON, headers.data, dmk_buf_str(&body));
    dmk_buf_fini(&headers);
    dmk_buf_fini(&body);
}

/* ---------------------------------------------------------------- the front of a request */

static void begin_stream(struct answer *a)
{
    dmk_http_begin(a->req, 200, "text/event-stream; charset=utf-8",
                   "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n");
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
        put_timeline(&headers, a, timeline);
        if (a->out.failed) {
            const struct dmk_api_error error = {.status = 500,
                                                .type = "server_error",
                                                .code = "answer_too_large",
                                                .text =
                                                    "the answer is larger than this server sends"};

            dmk_buf_reset(&a->out);
            dmk_api_error_json(&error, &a->out);
            dmk_http_respond(a->req, error.status, DMK_HTTP_FRONT__JSON, headers.data,
                             dmk_buf_str(&a->out));
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
        put_retry_after(&headers, error->retry_after_s);
        put_timeline(&headers, a, timeline);
        dmk_http_respond(a->req, error->status, DMK_HTTP_FRONT__JSON, headers.data,
                         dmk_buf_str(&body));
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
        dmk_http_respond(a->req, 499, DMK_HTTP_FRONT__JSON, NULL, dmk_str_from(""));
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

void dmk_http_front__start(struct dmk_router *router, struct dmk_http_req *req,
                           const struct dmk_dialect *dialect)
{
    struct answer *a = calloc(1, sizeof(*a));
    struct dmk_api_error error;
    char request_id[DMK_HTTP_MAX_ID_BYTES + 1];
    char traceparent[64];
    const struct dmk_request_conf conf = {
        .dialect = dialect,
        .body = dmk_http_body(req),
        .request_id = take_header(req, "x-request-id", request_id, sizeof(request_id),
                                  dmk_request_id_is_valid),
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
            dmk_http_set_id(req, dmk_request_id(a->request));
            dmk_http_on_gone(req, on_gone, a);
            return;
        }
        free_answer(a);
    } else {
        (void)dmk_api_fail(&error, 503, "out_of_memory", "no memory for the request");
    }
    dmk_http_front__refuse(router, req, &error, NULL);
}
