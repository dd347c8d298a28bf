/* The shell that both kinds of worker share: start and end of the process, the stream of each router, the
 * engine's thread, the page transport on the loop, the admin port.
 *
 * A program fills in a struct dmk_worker_role and calls dmk_worker_run. The role turns messages into calls
 * of its core and the core's events into WorkerEvents; everything else is here:
 *
 *   boot   loop, signals, admin port (alive, not ready) > engine opened on the engine's thread > transport
 *          > role.open > gRPC server > ready
 *   drain  on SIGTERM: not ready, Drain to the routers, new work refused; when the role is idle, or at the
 *          limit, the process ends; a second SIGTERM ends it at once
 *
 * Router streams are numbered below DMK_MAX_ROUTERS. One begins with hello from both sides (version and
 * incarnation are checked), then the worker's prefixes and load are told, then messages flow. Events given
 * to dmk_worker_emit leave as one WorkerMessage per router at the end of the loop's turn. A message that
 * breaks the protocol ends its stream; a request whose content can not be served is failed here (INVALID,
 * or DRAINING), so the role only sees requests that dmk_msg_generate_check or dmk_msg_prefill_check passed.
 *
 * All callbacks run on the loop unless said otherwise. */
#pragma once

#include "common/kv/pool.h"
#include "common/kv/prefix.h"
#include "common/loop/loop.h"
#include "common/obs/metric.h"
#include "common/rpc/msg.h"
#include "common/worker/engine_port.h"
#include "common/worker/options.h"
#include "common/worker/request.h"
#include "common/worker/wire.h"
#include "common/xfer/xfer.h"

struct dmk_worker;

#define DMK_ROUTER_ALL UINT32_MAX /* emit to every router that is connected */

/* What the role counts; totals only grow. */
struct dmk_worker_stats {
    uint32_t n_running, n_waiting;          /* sequences (decode) or jobs (prefill) */
    uint64_t tokens_waiting;                /* prompt tokens not computed yet */
    struct dmk_kv_pool_counts full, window; /* over all groups */
    uint32_t most_full_free; /* free or cached, in the group that has most; 0: as in full */
    double step_ms;          /* recent mean */
    uint64_t n_steps;
    uint64_t n_prompt_tokens;     /* computed here */
    uint64_t n_generation_tokens; /* sampled here */
    uint64_t n_preemptions;
    uint64_t n_prefix_queries, n_prefix_hits; /* prompt tokens looked up, found */
};

struct dmk_worker_role {
    bool decode;         /* else prefill */
    const char *program; /* "damask-decode" */
    void *ud;

    /* An engine from elsewhere; NULL: dmk_engine_open by the options and engine_conf. */
    const struct dmk_engine_source *source;
    /* Bounds of a step and whatever else the shared options do not say. */
    void (*engine_conf)(void *ud, struct dmk_engine_conf *inout_conf);

    /* Builds the core; engine and transport are there (dmk_worker_engine ...). Sets dmk_worker_set_limits. */
    int (*open)(void *ud, struct dmk_worker *worker, struct dmk_error *reterr);
    /* Frees the core; no step is in flight, the transport is still open. Only after a good open. */
    void (*close)(void *ud);

    /* Requests; generate for decode, prefill for prefill, the other NULL. */
    void (*on_generate)(void *ud, uint32_t router, const Damask__V1__Generate *generate);
    void (*on_prefill)(void *ud, uint32_t router, const Damask__V1__Prefill *prefill);
    void (*on_cancel)(void *ud, uint32_t router, struct dmk_request_id id);
    /* decode; else NULL. A failure ends the router's stream with the sentence. */
    int (*on_vocabulary)(void *ud, struct dmk_bytes bytes, struct dmk_error *reterr);
    void (*on_quiet_ask)(void *ud, const Damask__V1__QuietAsk *ask);      /* prefill; else NULL */
    void (*on_closed_word)(void *ud, const Damask__V1__ClosedWord *word); /* decode; else NULL */
    void (*on_peer_report)(void *ud, uint64_t peer_incarnation);          /* may be NULL */
    /* The stream ended: as a cancel of all it asked for. Events to it are dropped from then on. */
    void (*on_router_gone)(void *ud, uint32_t router);

    /* From the transport. A message that is not ours returns false. */
    bool (*xfer_message)(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message);
    void (*xfer_closed)(void *ud, struct dmk_xfer_ep *ep, int status);

    /* At the end of every turn in which anything above or below was called: plan and start a step
     * (dmk_worker_step) if none is in flight. */
    void (*on_turn)(void *ud);
    void (*on_poke)(void *ud); /* after dmk_worker_poke; may be NULL */
    void (*on_tick)(void *ud); /* every 50 ms */

    void (*on_drain)(void *ud);
    bool (*idle)(void *ud); /* nothing runs, waits or drains */

    void (*stats)(void *ud, struct dmk_worker_stats *ret_stats);
    /* Changes of the prefix cache and its listing (kv/prefix.h); at is zero at first. */
    uint32_t (*block_events)(void *ud, struct dmk_kv_prefix_event *ret_events, uint32_t cap,
                             bool *ret_lost);
    uint32_t (*block_list)(void *ud, uint32_t inout_at[2], struct dmk_kv_prefix_event *ret_events,
                           uint32_t cap);
    void (*hello)(void *ud,
                  Damask__V1__WorkerHello *inout_hello); /* fields the shell does not know */
    /* Further members of /health and /state, of what people should see at once. May be NULL. */
    void (*health)(void *ud, struct dmk_buf *out);
    /* Further members of /state, each as `,"name":value` (dmk_worker_put_pool). May be NULL. */
    void (*state)(void *ud, struct dmk_buf *out);
    /* Before /metrics is written: further metrics, made in open by dmk_worker_metrics. May be NULL. */
    void (*collect)(void *ud);
};

/* Runs the worker from start to end; returns the process's exit status. conf stays the caller's. */
int dmk_worker_run(const struct dmk_worker_role *role, const struct dmk_worker_conf *conf);

struct dmk_loop *dmk_worker_loop(struct dmk_worker *worker);
uint64_t dmk_worker_incarnation(const struct dmk_worker *worker);
const struct dmk_engine_port *dmk_worker_engine(const struct dmk_worker *worker);
/* NULL when there is no transfer. */
const struct dmk_xfer_ops *dmk_worker_xfer_ops(const struct dmk_worker *worker);
struct dmk_xfer *dmk_worker_xfer(struct dmk_worker *worker);
struct dmk_metrics *dmk_worker_metrics(struct dmk_worker *worker);
const char *dmk_worker_labels(const struct dmk_worker *worker); /* model_name="..." */

/* `"name":{"total":..,"free":..,"cached":..,"leased":..,"draining":..}`, as /state has it. */
void dmk_worker_put_pool(struct dmk_buf *out, const char *name,
                         const struct dmk_kv_pool_counts *counts);

void dmk_worker_set_limits(struct dmk_worker *worker, const struct dmk_msg_limits *limits);

/* The event is written at once and need not outlive the call. Finished, Failed and PrefillDone are also
 * counted for the metrics. */
void dmk_worker_emit(struct dmk_worker *worker, uint32_t router,
                     const Damask__V1__WorkerEvent *event);
/* Tells the router that its request is over without an answer, and says so in the log. */
void dmk_worker_fail(struct dmk_worker *worker, uint32_t router, struct dmk_request_id id,
                     const struct dmk_failed *why);

/* Runs run on the engine's thread, then done on the loop. One at a time (asserted). */
void dmk_worker_step(struct dmk_worker *worker, dmk_loop_fn run, dmk_loop_fn done, void *ud);
bool dmk_worker_stepping(const struct dmk_worker *worker);
/* From any thread: role.on_poke runs on the loop soon; several pokes may become one. */
void dmk_worker_poke(struct dmk_worker *worker);
