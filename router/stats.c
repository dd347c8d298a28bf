/* The router's metrics: the table of all series. */
#include "router/stats.h"

#include <stdio.h>

const char *dmk_fail_cause_name(enum dmk_fail_cause cause)
{
    static const char *const names[DMK_N_CAUSES] = {"full",     "peer",    "timeout",  "mismatch",
                                                    "draining", "refused", "internal", "protocol"};

    return names[cause];
}

static const double gb_s_bounds[] = {0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 400};

static void make_engine_series(struct dmk_stats *s, const char *l)
{
    struct dmk_metrics *m = s->metrics;
    char labels[700];

    s->n_running = dmk_gauge_new(m, "vllm:num_requests_running", l,
                                 "Requests that a worker has accepted and not finished.");
    s->n_waiting = dmk_gauge_new(m, "vllm:num_requests_waiting", l,
                                 "Requests that wait for admission in this router.");
    s->prompt_tokens =
        dmk_counter_new(m, "vllm:prompt_tokens_total", l, "Prompt tokens of finished requests.");
    s->generation_tokens = dmk_counter_new(m, "vllm:generation_tokens_total", l,
                                           "Tokens sampled and sent to this router.");
    s->cached_tokens = dmk_counter_new(m, "vllm:prefix_cache_hits_total", l,
                                       "Prompt tokens that no worker had to compute.");
    for (int i = 0; i <= DMK_N_FINISH; i++) {
        (void)snprintf(labels, sizeof(labels), "%s,finished_reason=\"%s\"", l,
                       i < DMK_N_FINISH ? dmk_finish_name((enum dmk_finish)i) : "abort");
        s->success[i] = dmk_counter_new(m, "vllm:request_success_total", labels,
                                        "Choices finished, by reason; abort: the client left.");
    }
    s->ttft = dmk_histogram_new(m, "vllm:time_to_first_token_seconds", l,
                                "From the complete request to its first token.", dmk_buckets_ttft,
                                dmk_n_buckets_ttft);
    s->itl =
        dmk_histogram_new(m, "vllm:inter_token_latency_seconds", l,
                          "Between two tokens of one choice.", dmk_buckets_itl, dmk_n_buckets_itl);
    s->e2e = dmk_histogram_new(m, "vllm:e2e_request_latency_seconds", l,
                               "From the complete request to the end of its answer.",
                               dmk_buckets_e2e, dmk_n_buckets_e2e);
    s->queue_time =
        dmk_histogram_new(m, "vllm:request_queue_time_seconds", l,
                          "Wait for admission in this router.", dmk_buckets_e2e, dmk_n_buckets_e2e);
    s->prefill_time = dmk_histogram_new(m, "vllm:request_prefill_time_seconds", l,
                                        "From the accepted reservation to the first token.",
                                        dmk_buckets_e2e, dmk_n_buckets_e2e);
    s->decode_time =
        dmk_histogram_new(m, "vllm:request_decode_time_seconds", l,
                          "From the first token to the last.", dmk_buckets_e2e, dmk_n_buckets_e2e);
    s->request_prompt_tokens =
        dmk_histogram_new(m, "vllm:request_prompt_tokens", l, "Prompt tokens of a request.",
                          dmk_buckets_tokens, dmk_n_buckets_tokens);
    s->request_generation_tokens =
        dmk_histogram_new(m, "vllm:request_generation_tokens", l, "Tokens sampled for a request.",
                          dmk_buckets_tokens, dmk_n_buckets_tokens);
}

/* Statuses with a series of their own; the last one is that of all others. */
static const unsigned refusals[DMK_N_REFUSALS] = {400, 401, 403, 404, 405, 408, 413, 414,
                                                  415, 417, 429, 431, 501, 503, 505, 0};

void dmk_stats_refused(struct dmk_stats *stats, enum dmk_entry entry, unsigned status)
{
    int i = 0;

    while (refusals[i] != status && refusals[i] != 0) {
        i++;
    }
    dmk_counter_add(stats->refused[entry][i], 1);
}

static void make_refusal_series(struct dmk_stats *s)
{
    static const char *const entries[DMK_N_ENTRIES] = {"http", "grpc"};

    for (int e = 0; e < DMK_N_ENTRIES; e++) {
        for (int i = 0; i < DMK_N_REFUSALS; i++) {
            char status[16] = "other";
            char labels[64];

            if (refusals[i] != 0) {
                (void)snprintf(status, sizeof(status), "%u", refusals[i]);
            }
            (void)snprintf(labels, sizeof(labels), "entry=\"%s\",status=\"%s\"", entries[e],
                           status);
            s->refused[e][i] = dmk_counter_new(
                s->metrics, "damask_router_refused_total", labels,
                "What was refused before it was a request, by the HTTP status that says why.");
        }
    }
}

static void make_request_series(struct dmk_stats *s)
{
    struct dmk_metrics *m = s->metrics;
    char labels[128];

    for (int d = 0; dmk_dialects[d] && d < DMK_MAX_DIALECTS; d++) {
        for (int i = 2; i < DMK_N_STATUS; i++) {
            (void)snprintf(labels, sizeof(labels), "api=\"%s\",status=\"%dxx\"",
                           dmk_dialects[d]->name, i);
            s->requests[d][i] =
                dmk_counter_new(m, "damask_router_requests_total", labels,
                                "Requests answered, by API and hundreds of the HTTP status.");
        }
    }
    for (int i = 0; i < DMK_N_CAUSES; i++) {
        (void)snprintf(labels, sizeof(labels), "cause=\"%s\"",
                       dmk_fail_cause_name((enum dmk_fail_cause)i));
        s->retries[i] = dmk_counter_new(m, "damask_router_retries_total", labels,
                                        "Attempts given up before the first token and made again.");
        s->failures[i] = dmk_counter_new(m, "damask_router_failures_total", labels,
                                         "Requests that failed for good because of a worker.");
    }
    s->client_gone = dmk_counter_new(m, "damask_router_client_gone_total", "",
                                     "Clients that left before their answer was complete.");
    s->rejected_queue = dmk_counter_new(m, "damask_router_rejected_total", "cause=\"queue_full\"",
                                        "Requests refused because the router had no room.");
    s->rejected_deadline =
        dmk_counter_new(m, "damask_router_rejected_total", "cause=\"queue_deadline\"",
                        "Requests refused because the router had no room.");
    s->prefill_remote = dmk_counter_new(m, "damask_router_prefills_total", "where=\"prefill\"",
                                        "Prompts by where they were computed.");
    s->prefill_local = dmk_counter_new(m, "damask_router_prefills_total", "where=\"decode\"",
                                       "Prompts by where they were computed.");
    s->prefill_forced = dmk_counter_new(m, "damask_router_prefills_forced_local_total", "",
                                        "Prompts that a decode worker had to compute because no "
                                        "prefill worker was to be had.");
    s->transfer_bytes = dmk_counter_new(m, "damask_router_transfer_bytes_total", "",
                                        "Bytes of KV pages moved, as the workers report them.");
    s->transfer_gb_s = dmk_histogram_new(m, "damask_router_transfer_gigabytes_per_second", "",
                                         "Speed of one request's transfer.", gb_s_bounds,
                                         sizeof(gb_s_bounds) / sizeof(gb_s_bounds[0]));
    s->tokenize_time = dmk_histogram_new(m, "damask_router_tokenize_seconds", "",
                                         "Parsing, rendering and encoding, waits included.",
                                         dmk_buckets_ttft, dmk_n_buckets_ttft);
    s->tokens_in_flight = dmk_gauge_new(m, "damask_router_tokens_in_flight", "",
                                        "Tokens that admitted requests may hold at the workers.");
    s->open_requests = dmk_gauge_new(m, "damask_router_open_requests", "",
                                     "Requests in this router, whatever their state.");
    for (int i = 0; i < DMK_N_REPAIRS; i++) {
        (void)snprintf(labels, sizeof(labels), "kind=\"%s\"", dmk_repair_name((enum dmk_repair)i));
        s->recovered[i] =
            dmk_counter_new(m, "damask_router_harmony_recovered_total", labels,
                            "Repairs made to model output that broke the chat format.");
    }
}

static void make_fleet_series(struct dmk_stats *s)
{
    static const char *const roles[2] = {"role=\"prefill\"", "role=\"decode\""};
    struct dmk_metrics *m = s->metrics;

    for (int i = 0; i < 2; i++) {
        s->workers_known[i] = dmk_gauge_new(m, "damask_router_workers_known", roles[i],
                                            "Addresses that are dialled.");
        s->workers_up[i] = dmk_gauge_new(m, "damask_router_workers_up", roles[i],
                                         "Workers whose hello was accepted.");
        s->workers_draining[i] = dmk_gauge_new(m, "damask_router_workers_draining", roles[i],
                                               "Workers that are up and take no new work.");
        s->workers_hanging[i] =
            dmk_gauge_new(m, "damask_router_workers_hanging", roles[i],
                          "Workers that are up and silent for too long, or whose engine is stuck.");
        s->worker_downs[i] = dmk_counter_new(m, "damask_router_worker_downs_total", roles[i],
                                             "Streams to workers that ended.");
    }
    s->hello_refused = dmk_counter_new(m, "damask_router_hellos_refused_total", "",
                                       "Workers that did not fit: version, role or model.");
    s->relayed_quiet = dmk_counter_new(m, "damask_router_relayed_total", "word=\"quiet\"",
                                       "Words between workers that were passed on.");
    s->relayed_closed = dmk_counter_new(m, "damask_router_relayed_total", "word=\"closed\"",
                                        "Words between workers that were passed on.");
    s->stale_events =
        dmk_counter_new(m, "damask_router_stale_events_total", "",
                        "Events of ended requests, older attempts or older incarnations.");
    s->index_blocks = dmk_gauge_new(m, "damask_router_index_blocks", "",
                                    "Blocks of prefixes that some worker is known to hold.");
    s->ready = dmk_gauge_new(m, "damask_router_ready", "", "1 when /readyz says so.");
    s->loop_delay = dmk_gauge_new(m, "damask_router_loop_delay_seconds", "",
                                  "How late a timer ran at worst since the last scrape.");
}

int dmk_stats_init(struct dmk_stats *stats, const char *model)
{
    char escaped[600];
    char labels[640];

    *stats = (struct dmk_stats){.metrics = dmk_metrics_new()};
    if (!stats->metrics) {
        return -DMK_ENOMEM;
    }
    dmk_metric_label(model, escaped, sizeof(escaped));
    (void)snprintf(labels, sizeof(labels), "model_name=\"%s\"", escaped);
    make_engine_series(stats, labels);
    make_refusal_series(stats);
    make_request_series(stats);
    make_fleet_series(stats);
    dmk_process_metrics_init(&stats->process, stats->metrics);
    return 0;
}

void dmk_stats_fini(struct dmk_stats *stats)
{
    dmk_metrics_free(&stats->metrics);
}
