/* Bodies about the router itself: health, models, metrics; and who may ask. Loop only. */
#include "router/json_out.h"
#include "router/router.h"

bool dmk_router_is_ready(const struct dmk_router *router)
{
    return !router->draining && dmk_fleet_gets_prompts(router->fleet, router->conf->local_prefill);
}

bool dmk_router_is_allowed(const struct dmk_router *router, struct dmk_str text)
{
    return dmk_keys_allow(router->api_keys, text);
}

bool dmk_router_is_admin(const struct dmk_router *router, struct dmk_str text)
{
    return dmk_keys_allow(
        dmk_keys_needed(router->admin_keys) ? router->admin_keys : router->api_keys, text);
}

static void put_worker(struct dmk_buf *out, const struct dmk_worker *w)
{
    dmk_buf_printf(
        out, "{\"role\":\"%s\",\"id\":", w->role == DMK_WORKER_PREFILL ? "prefill" : "decode");
    dmk_out_str(out, dmk_str_from(w->id));
    dmk_buf_puts(out, ",\"address\":");
    dmk_out_str(out, dmk_str_from(w->address));
    dmk_buf_printf(out, ",\"up\":%s,\"draining\":%s,\"hangs\":%s,\"requests\":%u,\"tokens\":%llu",
                   w->up ? "true" : "false", w->draining ? "true" : "false",
                   w->hangs ? "true" : "false", w->n_requests, (unsigned long long)w->n_tokens);
    if (w->up) {
        /* As text: a 64-bit number is not safe in everybody's JSON. */
        dmk_buf_printf(
            out, ",\"incarnation\":\"%llu\",\"numerics\":", (unsigned long long)w->incarnation);
        dmk_out_str(out, dmk_str_from(w->numerics));
        if (dmk_worker_is_mixed(w)) {
            dmk_buf_puts(out, ",\"prompt_numerics\":");
            dmk_out_str(out, dmk_str_from(w->prompt_numerics));
        }
    } else if (w->why) {
        dmk_buf_puts(out, ",\"why\":");
        dmk_out_str(out, dmk_str_from(w->why));
    }
    if (w->has_load) {
        dmk_buf_printf(out,
                       ",\"running\":%u,\"waiting\":%u,\"tokens_waiting\":%llu,"
                       "\"full_pages_free\":%u,\"full_pages_total\":%u,\"pages_draining\":%u",
                       w->load.n_running, w->load.n_waiting,
                       (unsigned long long)w->load.tokens_waiting, w->load.full_pages_free,
                       w->load.full_pages_total, w->load.pages_draining);
    }
    dmk_buf_putc(out, '}');
}

void dmk_admin_health(const struct dmk_router *router, struct dmk_buf *out)
{
    struct dmk_worker *const *workers = dmk_fleet_workers(router->fleet);
    const char *comma = "";

    dmk_buf_printf(out,
                   "{\"status\":\"%s\",\"workers\":{\"prefill\":%u,\"decode\":%u},"
                   "\"open_requests\":%u,\"fleet\":[",
                   router->draining              ? "draining"
                   : dmk_router_is_ready(router) ? "ok"
                                                 : "not_ready",
                   dmk_fleet_n_usable(router->fleet, DMK_WORKER_PREFILL),
                   dmk_fleet_n_usable(router->fleet, DMK_WORKER_DECODE),
                   dmk_requests_n_open(router->requests));
    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        if (workers[i]) {
            dmk_buf_puts(out, comma);
            put_worker(out, workers[i]);
            comma = ",";
        }
    }
    dmk_buf_puts(out, "]}\n");
}

uint32_t dmk_router_context(const struct dmk_router *router)
{
    const uint32_t fleet = dmk_fleet_max_context(router->fleet);
    const uint32_t own = router->conf->max_context;

    return own > 0 && own < fleet ? own : fleet;
}

static void put_model(const struct dmk_router *router, const char *name, struct dmk_buf *out)
{
    const uint32_t context = dmk_router_context(router);

    dmk_buf_puts(out, "{\"id\":");
    dmk_out_str(out, dmk_str_from(name));
    dmk_buf_printf(out, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"damask\"",
                   (long long)router->started_unix_s);
    if (strcmp(name, router->conf->model_name) != 0) {
        dmk_buf_puts(out, ",\"root\":");
        dmk_out_str(out, dmk_str_from(router->conf->model_name));
    }
    if (context > 0) {
        dmk_buf_printf(out, ",\"max_model_len\":%u", context);
    }
    dmk_buf_putc(out, '}');
}

void dmk_admin_models(const struct dmk_router *router, struct dmk_buf *out)
{
    dmk_buf_puts(out, "{\"object\":\"list\",\"data\":[");
    put_model(router, router->conf->model_name, out);
    for (size_t i = 0; i < router->conf->model_aliases.n; i++) {
        dmk_buf_putc(out, ',');
        put_model(router, router->conf->model_aliases.items[i], out);
    }
    dmk_buf_puts(out, "]}");
}

bool dmk_admin_model(const struct dmk_router *router, struct dmk_str name, struct dmk_buf *out)
{
    if (dmk_str_is(name, router->conf->model_name)) {
        put_model(router, router->conf->model_name, out);
        return true;
    }
    for (size_t i = 0; i < router->conf->model_aliases.n; i++) {
        if (dmk_str_is(name, router->conf->model_aliases.items[i])) {
            put_model(router, router->conf->model_aliases.items[i], out);
            return true;
        }
    }
    return false;
}

void dmk_admin_metrics(const struct dmk_router *router, struct dmk_buf *out)
{
    dmk_gauge_set(router->stats->ready, dmk_router_is_ready(router));
    dmk_gauge_set(router->stats->loop_delay, (double)dmk_loop_max_delay_ns(router->loop) / 1e9);
    dmk_process_metrics_read(&router->stats->process);
    dmk_metrics_text(router->stats->metrics, out);
}
