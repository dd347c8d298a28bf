/* The admin port: /livez, /readyz, /health, /metrics, /state. Any other path is 404.
 *
 * livez fails only when restarting would help: the engine is stuck. readyz and health fail also while the
 * model is loading and while draining. */
#include <inttypes.h>
#include <stdio.h>
#include "common/base/clock.h"
#include "common/worker/internal.h"

#define MAX_CONNECTIONS 64
#define MAX_STATE_BYTES (8u << 20)

static const char *const phase_names[] = {"loading", "ok", "draining", "ending"};

static const char *status_word(const struct dmk_worker *w)
{
    return dmk_worker__stuck(w) ? "stuck" : phase_names[w->phase];
}

/* Text as a JSON string; bytes above 0x7f pass as they are. */
static void put_string(struct dmk_buf *out, const char *text)
{
    dmk_buf_putc(out, '"');
    for (const char *p = text; *p; p++) {
        const unsigned char c = (unsigned char)*p;

        if (c == '"' || c == '\\') {
            dmk_buf_printf(out, "\\%c", c);
        } else if (c < 0x20) {
            dmk_buf_printf(out, "\\u%04x", c);
        } else {
            dmk_buf_putc(out, (char)c);
        }
    }
    dmk_buf_putc(out, '"');
}

static const char *lane_name(const struct dmk_worker *w)
{
    if (!w->xfer) {
        return "none";
    }
    return w->ops->lane(w->xfer) == DMK_LANE_DIRECT ? "direct" : "emulated";
}

/* How pages travel, for people: what was asked for, what came of it, and how fast it was. */
static void put_lane(const struct dmk_worker *w, struct dmk_buf *out)
{
    const double gb_s = dmk_worker__transfer_gb_s(w);

    if (!w->xfer) {
        return;
    }
    dmk_buf_printf(out, "pages by %s on \"%s\", %s", w->xfer_info.transport, w->xfer_info.device,
                   lane_name(w));
    if (gb_s > 0) {
        dmk_buf_printf(out, ", %.3f GB/s", gb_s);
    } else if (!w->role->decode) {
        dmk_buf_puts(out, ", not measured yet");
    }
    dmk_buf_putc(out, '\n');
}

static void put_identity(struct dmk_worker *w, struct dmk_buf *out)
{
    dmk_buf_puts(out, "\"status\":");
    put_string(out, status_word(w));
    dmk_buf_puts(out, ",\"worker_id\":");
    put_string(out, w->id);
    dmk_buf_printf(out, ",\"role\":\"%s\",\"incarnation\":\"%" PRIu64 "\",\"model\":",
                   dmk_worker__role_name(w), w->incarnation);
    put_string(out, w->model_name);
    dmk_buf_printf(out, ",\"lane\":\"%s\",\"transport\":\"%s\",\"device\":", lane_name(w),
                   w->xfer ? w->xfer_info.transport : "none");
    put_string(out, w->xfer_info.device);
    if (!w->role->decode) {
        dmk_buf_printf(out, ",\"transfer_gb_s\":%.3f", dmk_worker__transfer_gb_s(w));
    }
    dmk_buf_printf(out, ",\"routers\":%" PRIu32, dmk_worker__routers_count(w));
    if (w->phase == DMK_WORKER__LOADING) {
        dmk_buf_printf(out, ",\"loaded_percent\":%u", atomic_load(&w->load_percent));
    }
    if (w->role_open && w->role->health) {
        w->role->health(w->role->ud, out);
    }
}

void dmk_worker_put_pool(struct dmk_buf *out, const char *name, const struct dmk_kv_pool_counts *c)
{
    dmk_buf_printf(out,
                   "\"%s\":{\"total\":%" PRIu32 ",\"free\":%" PRIu32 ",\"cached\":%" PRIu32
                   ",\"leased\":%" PRIu32 ",\"draining\":%" PRIu32 "}",
                   name, c->total, c->free, c->cached, c->leased, c->draining);
}

static void put_state(struct dmk_worker *w, struct dmk_buf *out)
{
    struct dmk_worker_stats s = {0};

    if (w->role_open) {
        w->role->stats(w->role->ud, &s);
    }
    dmk_buf_putc(out, '{');
    put_identity(w, out);
    dmk_buf_puts(out, ",\"pools\":{");
    dmk_worker_put_pool(out, "full", &s.full);
    dmk_buf_putc(out, ',');
    dmk_worker_put_pool(out, "window", &s.window);
    dmk_buf_printf(out,
                   "},\"running\":%" PRIu32 ",\"waiting\":%" PRIu32 ",\"tokens_waiting\":%" PRIu64
                   ",\"steps\":%" PRIu64 ",\"step_ms\":%.3f,\"step_age_ms\":%" PRIu64
                   ",\"router_ids\":[",
                   s.n_running, s.n_waiting, s.tokens_waiting, s.n_steps, s.step_ms,
                   (uint64_t)(dmk_engine_thread_age_ns(w->thread) / DMK_NS_PER_MS));
    for (uint32_t i = 0, n = 0; i < DMK_MAX_ROUTERS; i++) {
        if (w->routers[i].greeted) {
            dmk_buf_puts(out, n++ ? "," : "");
            put_string(out, w->routers[i].id);
        }
    }
    dmk_buf_putc(out, ']');
    if (w->role_open && w->role->state) {
        w->role->state(w->role->ud, out);
    }
    dmk_buf_puts(out, "}\n");
}

static void answer(struct dmk_http_req *req, unsigned status, const char *type,
                   const struct dmk_buf *body)
{
    if (body->failed) {
        dmk_http_respond(req, 500, "text/plain", NULL, dmk_str_from("the answer is too large\n"));
    } else {
        dmk_http_respond(req, status, type, NULL, dmk_buf_str(body));
    }
}

/* Probes of a cluster have no keys. */
static bool is_open(struct dmk_str path)
{
    return dmk_str_is(path, "/livez") || dmk_str_is(path, "/readyz");
}

static void on_request(void *ud, struct dmk_http_req *req)
{
    struct dmk_worker *w = ud;
    const struct dmk_str path = dmk_http_path(req);
    const struct dmk_str method = dmk_http_method(req);
    const bool live = !dmk_worker__stuck(w);
    const bool ready = live && w->phase == DMK_WORKER__READY;
    struct dmk_buf body;

    dmk_buf_init(&body, MAX_STATE_BYTES);
    if (!is_open(path) && !dmk_keys_allow(w->admin_keys, dmk_http_header(req, "authorization"))) {
        dmk_http_respond(req, 401, "text/plain", "WWW-Authenticate: Bearer\r\n",
                         dmk_str_from("a key is needed: Authorization: Bearer KEY\n"));
    } else if (!dmk_str_is(method, "GET") && !dmk_str_is(method, "HEAD")) {
        dmk_http_respond(req, 405, "text/plain", "Allow: GET, HEAD\r\n",
                         dmk_str_from("only GET\n"));
    } else if (dmk_str_is(path, "/livez")) {
        dmk_buf_printf(&body, "%s\n", live ? "ok" : "the engine is stuck");
        answer(req, live ? 200 : 503, "text/plain", &body);
    } else if (dmk_str_is(path, "/readyz")) {
        dmk_buf_printf(&body, "%s\n", status_word(w));
        put_lane(w, &body);
        answer(req, ready ? 200 : 503, "text/plain", &body);
    } else if (dmk_str_is(path, "/health")) {
        dmk_buf_putc(&body, '{');
        put_identity(w, &body);
        dmk_buf_puts(&body, "}\n");
        answer(req, ready ? 200 : 503, "application/json", &body);
    } else if (dmk_str_is(path, "/metrics")) {
        dmk_metrics_text(w->metrics, &body);
        answer(req, 200, "text/plain; version=0.0.4; charset=utf-8", &body);
    } else if (dmk_str_is(path, "/state")) {
        put_state(w, &body);
        answer(req, 200, "application/json", &body);
    } else {
        dmk_http_respond(req, 404, "text/plain", NULL, dmk_str_from("no such page\n"));
    }
    dmk_buf_fini(&body);
}

int dmk_worker__admin_listen(struct dmk_worker *w, struct dmk_error *reterr)
{
    const struct dmk_http_conf conf = {
        .host = w->conf->admin_host,
        .port = (uint16_t)w->conf->admin_port,
        .max_connections = MAX_CONNECTIONS,
        .max_header_bytes = 16384,
        .max_body_bytes = 65536,
        .max_write_bytes = MAX_STATE_BYTES,
        .idle_timeout_ms = 60000,
        .request_timeout_ms = 10000,
        .tls_cert = w->conf->admin_tls ? w->conf->tls_cert : NULL,
        .tls_key = w->conf->admin_tls ? w->conf->tls_key : NULL,
        .on_request = on_request,
        .ud = w,
    };

    const int rc =
        dmk_keys_new(&w->conf->admin_keys, w->conf->admin_keys_file, &w->admin_keys, reterr);

    return rc < 0 ? rc : dmk_http_server_new(w->loop, &conf, &w->admin, reterr);
}
