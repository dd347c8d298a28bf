/* The metrics that both kinds of worker have. Names are vLLM's where the thing is the same (dashboards and
 * gateways know them), else damask_*; those of the process as everywhere. All series exist from the start. */
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/obs/process.h"
#include "common/worker/internal.h"

#define N_FAILURES (DMK_FAILURE_CANCELLED + 1)

struct dmk_worker__metrics {
    struct dmk_gauge *running, *waiting, *usage, *window_usage;
    struct dmk_gauge *tokens_waiting, *step_ms, *routers, *ready, *stuck, *loop_delay;
    struct dmk_gauge *pages[2][4]; /* full, window; free, cached, leased, draining */
    struct dmk_counter *prompt_tokens, *generation_tokens, *preemptions, *queries, *hits, *steps;
    struct dmk_counter *stopped, *length; /* request_success_total by reason */
    struct dmk_counter *failed[N_FAILURES];
    struct dmk_histogram *queue_s, *prefill_s, *decode_s, *generation, *transfer_s;
    struct dmk_counter *transfer_bytes;
    struct dmk_gauge *transfer_gb_s; /* prefill; else NULL */
    struct dmk_process_metrics process;
};

static const char *const failure_names[N_FAILURES] = {
    "unspecified", "full",     "invalid", "peer",     "timeout",
    "mismatch",    "draining", "refused", "internal", "cancelled",
};

static void collect(void *ud)
{
    struct dmk_worker *w = ud;
    struct dmk_worker__metrics *m = w->series;
    struct dmk_worker_stats s = {0};
    const struct dmk_kv_pool_counts *pools[] = {&s.full, &s.window};

    if (w->role_open) {
        w->role->stats(w->role->ud, &s);
    }
    dmk_process_metrics_read(&m->process);
    dmk_gauge_set(m->running, s.n_running);
    dmk_gauge_set(m->waiting, s.n_waiting);
    dmk_gauge_set(m->usage,
                  s.full.total ? (double)(s.full.leased + s.full.draining) / s.full.total : 0);
    dmk_gauge_set(m->window_usage,
                  s.window.total ? (double)(s.window.leased + s.window.draining) / s.window.total
                                 : 0);
    dmk_gauge_set(m->tokens_waiting, (double)s.tokens_waiting);
    dmk_gauge_set(m->step_ms, s.step_ms / 1e3);
    dmk_gauge_set(m->routers, dmk_worker__routers_count(w));
    dmk_gauge_set(m->ready, w->phase == DMK_WORKER__READY && !dmk_worker__stuck(w));
    dmk_gauge_set(m->stuck, dmk_worker__stuck(w));
    dmk_gauge_set(m->loop_delay, (double)dmk_loop_max_delay_ns(w->loop) / 1e9);
    for (int i = 0; i < 2; i++) {
        dmk_gauge_set(m->pages[i][0], pools[i]->free);
        dmk_gauge_set(m->pages[i][1], pools[i]->cached);
        dmk_gauge_set(m->pages[i][2], pools[i]->leased);
        dmk_gauge_set(m->pages[i][3], pools[i]->draining);
    }
    dmk_counter_raise(m->prompt_tokens, (double)s.n_prompt_tokens);
    dmk_counter_raise(m->generation_tokens, (double)s.n_generation_tokens);
    dmk_counter_raise(m->preemptions, (double)s.n_preemptions);
    dmk_counter_raise(m->queries, (double)s.n_prefix_queries);
    dmk_counter_raise(m->hits, (double)s.n_prefix_hits);
    dmk_counter_raise(m->steps, (double)s.n_steps);
    if (w->role_open && w->role->collect) {
        w->role->collect(w->role->ud);
    }
}

static const char *with(struct dmk_worker *w, char *text, size_t cap, const char *name,
                        const char *value)
{
    (void)snprintf(text, cap, "%s,%s=\"%s\"", w->labels, name, value);
    return text;
}

static void new_gauges(struct dmk_worker *w)
{
    static const char *const pools[] = {"full", "window"};
    static const char *const states[] = {"free", "cached", "leased", "draining"};
    struct dmk_worker__metrics *m = w->series;
    struct dmk_metrics *r = w->metrics;
    const char *l = w->labels;
    char text[sizeof(w->labels) + 64];

    m->running = dmk_gauge_new(r, "vllm:num_requests_running", l, "Requests in execution.");
    m->waiting = dmk_gauge_new(r, "vllm:num_requests_waiting", l, "Requests that wait.");
    m->usage =
        dmk_gauge_new(r, "vllm:kv_cache_usage_perc", l, "Share of full pages in use, 0 to 1.");
    m->window_usage = dmk_gauge_new(r, "damask_window_cache_usage_ratio", l,
                                    "Share of window pages in use, 0 to 1.");
    m->tokens_waiting = dmk_gauge_new(r, "damask_prompt_tokens_waiting", l,
                                      "Prompt tokens that are not computed yet.");
    m->step_ms = dmk_gauge_new(r, "damask_step_seconds", l, "Recent mean time of a step.");
    m->routers = dmk_gauge_new(r, "damask_routers", l, "Routers that are connected.");
    m->ready = dmk_gauge_new(r, "damask_ready", l, "1 when new requests are taken.");
    m->stuck =
        dmk_gauge_new(r, "damask_engine_stuck", l, "1 when a step takes longer than allowed.");
    m->loop_delay = dmk_gauge_new(r, "damask_loop_delay_seconds", l,
                                  "How late the event loop was at worst since the last scrape.");
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < 4; k++) {
            char labels[sizeof(text) + 64];

            (void)snprintf(labels, sizeof(labels), "%s,state=\"%s\"",
                           with(w, text, sizeof(text), "pool", pools[i]), states[k]);
            m->pages[i][k] = dmk_gauge_new(r, "damask_kv_pages", labels, "KV pages by state.");
        }
    }
}

static void new_counters(struct dmk_worker *w)
{
    struct dmk_worker__metrics *m = w->series;
    struct dmk_metrics *r = w->metrics;
    const char *l = w->labels;
    char text[sizeof(w->labels) + 64];

    m->prompt_tokens =
        dmk_counter_new(r, "vllm:prompt_tokens_total", l, "Prompt tokens computed here.");
    m->generation_tokens =
        dmk_counter_new(r, "vllm:generation_tokens_total", l, "Tokens sampled here.");
    m->preemptions = dmk_counter_new(r, "vllm:num_preemptions_total", l, "Sequences preempted.");
    m->queries = dmk_counter_new(r, "vllm:prefix_cache_queries_total", l,
                                 "Prompt tokens looked up in the prefix cache.");
    m->hits = dmk_counter_new(r, "vllm:prefix_cache_hits_total", l,
                              "Prompt tokens found in the prefix cache.");
    m->steps = dmk_counter_new(r, "damask_steps_total", l, "Steps of the engine.");
    m->stopped = dmk_counter_new(r, "vllm:request_success_total",
                                 with(w, text, sizeof(text), "finished_reason", "stop"),
                                 "Choices finished, by reason.");
    m->length = dmk_counter_new(r, "vllm:request_success_total",
                                with(w, text, sizeof(text), "finished_reason", "length"), "");
    for (int i = 0; i < N_FAILURES; i++) {
        m->failed[i] = dmk_counter_new(r, "damask_requests_failed_total",
                                       with(w, text, sizeof(text), "code", failure_names[i]),
                                       "Requests failed, by code.");
    }
    m->transfer_bytes =
        dmk_counter_new(r, "damask_transfer_bytes_total", l, "Bytes of KV pages handed over.");
}

static void new_histograms(struct dmk_worker *w)
{
    struct dmk_worker__metrics *m = w->series;
    struct dmk_metrics *r = w->metrics;
    const char *l = w->labels;

    m->queue_s = dmk_histogram_new(r, "vllm:request_queue_time_seconds", l,
                                   "Time a request waited.", dmk_buckets_e2e, dmk_n_buckets_e2e);
    m->prefill_s =
        dmk_histogram_new(r, "vllm:request_prefill_time_seconds", l,
                          "Time of computing a prompt here.", dmk_buckets_e2e, dmk_n_buckets_e2e);
    m->decode_s = dmk_histogram_new(r, "vllm:request_decode_time_seconds", l, "Time of decoding.",
                                    dmk_buckets_e2e, dmk_n_buckets_e2e);
    m->generation = dmk_histogram_new(r, "vllm:request_generation_tokens", l, "Tokens of a choice.",
                                      dmk_buckets_tokens, dmk_n_buckets_tokens);
    m->transfer_s =
        dmk_histogram_new(r, "damask_transfer_seconds", l, "Time of a hand-over, claim to answer.",
                          dmk_buckets_ttft, dmk_n_buckets_ttft);
}

void dmk_worker__metrics_new(struct dmk_worker *w)
{
    struct dmk_worker__metrics *m = calloc(1, sizeof(*m));
    char name[2 * DMK_MSG_MAX_ID_TEXT];

    dmk_assert(m);
    dmk_metric_label(w->model_name, name, sizeof(name));
    (void)snprintf(w->labels, sizeof(w->labels), "model_name=\"%s\"", name);
    w->metrics = dmk_metrics_new();
    w->series = m;
    new_gauges(w);
    new_counters(w);
    new_histograms(w);
    dmk_process_metrics_init(&m->process, w->metrics);
    dmk_metrics_on_collect(w->metrics, collect, w);
}

void dmk_worker__metrics_add_transfer(struct dmk_worker *w)
{
    char device[2 * sizeof(w->xfer_info.device)], labels[sizeof(w->labels) + 512];

    dmk_metric_label(w->xfer_info.device, device, sizeof(device));
    (void)snprintf(labels, sizeof(labels),
                   "%s,transport=\"%s\",device=\"%s\",address=\"%s\",lane=\"%s\"", w->labels,
                   w->xfer_info.transport, device, w->xfer_info.address,
                   w->ops->lane(w->xfer) == DMK_LANE_DIRECT ? "direct" : "emulated");
    dmk_gauge_set(dmk_gauge_new(w->metrics, "damask_transfer_info", labels,
                                "How KV pages travel from and to this worker; always 1."),
                  1);
    if (!w->role->decode) {
        w->series->transfer_gb_s =
            dmk_gauge_new(w->metrics, "damask_transfer_gb_per_second", w->labels,
                          "Rate at which the last hand-overs moved their pages; 0: none was.");
    }
}

void dmk_worker__metrics_free(struct dmk_worker *w)
{
    dmk_metrics_free(&w->metrics);
    free(w->series);
    w->series = NULL;
}

/* A hand-over from here: the time in which its pages were on their way, computing left out. */
static void note_transfer(struct dmk_worker *w, uint64_t bytes, uint64_t us)
{
    if (bytes > 0 && us > 0 && w->series->transfer_gb_s) {
        w->moved_bytes = w->moved_bytes * 7 / 8 + (double)bytes;
        w->moved_us = w->moved_us * 7 / 8 + (double)us;
        dmk_gauge_set(w->series->transfer_gb_s, dmk_worker__transfer_gb_s(w));
    }
}

double dmk_worker__transfer_gb_s(const struct dmk_worker *w)
{
    return w->moved_us > 0 ? w->moved_bytes / w->moved_us / 1e3 : 0;
}

static double seconds(uint64_t us)
{
    return (double)us / 1e6;
}

void dmk_worker__metrics_event(struct dmk_worker *w, const Damask__V1__WorkerEvent *event)
{
    struct dmk_worker__metrics *m = w->series;

    switch (event->body_case) {
    case DAMASK__V1__WORKER_EVENT__BODY_FINISHED: {
        const Damask__V1__Finished *f = event->finished;

        dmk_counter_add(
            f->reason == DAMASK__V1__FINISH_REASON__FINISH_STOP ? m->stopped : m->length, 1);
        dmk_histogram_observe(m->queue_s, seconds(f->queue_us));
        dmk_histogram_observe(m->prefill_s, seconds(f->prefill_us));
        dmk_histogram_observe(m->decode_s, seconds(f->decode_us));
        dmk_histogram_observe(m->generation, f->n_tokens);
        if (f->transfer_bytes > 0) {
            dmk_histogram_observe(m->transfer_s, seconds(f->transfer_us));
            dmk_counter_add(m->transfer_bytes, (double)f->transfer_bytes);
        }
        break;
    }
    case DAMASK__V1__WORKER_EVENT__BODY_PREFILL_DONE: {
        const Damask__V1__PrefillDone *p = event->prefill_done;

        dmk_counter_add(m->stopped, 1);
        dmk_histogram_observe(m->queue_s, seconds(p->queue_us));
        dmk_histogram_observe(m->prefill_s, seconds(p->compute_us));
        dmk_histogram_observe(m->transfer_s, seconds(p->transfer_us));
        dmk_counter_add(m->transfer_bytes, (double)p->transfer_bytes);
        note_transfer(w, p->transfer_bytes, p->transfer_us);
        break;
    }
    case DAMASK__V1__WORKER_EVENT__BODY_FAILED:
        dmk_assert((unsigned)event->failed->code < N_FAILURES);
        dmk_counter_add(m->failed[event->failed->code], 1);
        break;
    default:
        break;
    }
}
