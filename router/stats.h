/* The router's metrics. All series are made at start; values are set by whoever the thing happens
 * to. Names are vLLM's where the meaning is the same, else damask_router_*. Owner: the loop. */
#pragma once

#include "common/chat/format.h"
#include "common/obs/process.h"
#include "router/api.h"

enum dmk_fail_cause {
    DMK_CAUSE_FULL,
    DMK_CAUSE_PEER,
    DMK_CAUSE_TIMEOUT,
    DMK_CAUSE_MISMATCH,
    DMK_CAUSE_DRAINING,
    DMK_CAUSE_REFUSED,
    DMK_CAUSE_INTERNAL,
    DMK_CAUSE_PROTOCOL,
    DMK_N_CAUSES,
};
const char *dmk_fail_cause_name(enum dmk_fail_cause cause);

enum { DMK_N_FINISH = DMK_FINISH_TOOL_CALLS + 1, DMK_MAX_DIALECTS = 8, DMK_N_STATUS = 6 };
enum { DMK_N_REFUSALS = 16 };
/* By what clients come. */
enum dmk_entry { DMK_ENTRY_HTTP, DMK_ENTRY_GRPC, DMK_N_ENTRIES };

struct dmk_stats {
    struct dmk_metrics *metrics;
    /* vllm:* */
    struct dmk_gauge *n_running, *n_waiting;
    struct dmk_counter *prompt_tokens, *generation_tokens, *cached_tokens;
    struct dmk_counter *success[DMK_N_FINISH + 1]; /* the last: abort */
    struct dmk_histogram *ttft, *itl, *e2e, *queue_time, *prefill_time, *decode_time;
    struct dmk_histogram *request_prompt_tokens, *request_generation_tokens;
    /* damask_router_* */
    struct dmk_counter *requests[DMK_MAX_DIALECTS][DMK_N_STATUS]; /* by hundreds of the status */
    struct dmk_counter *refused[DMK_N_ENTRIES][DMK_N_REFUSALS];   /* see dmk_stats_refused */
    struct dmk_counter *client_gone;
    struct dmk_counter *retries[DMK_N_CAUSES], *failures[DMK_N_CAUSES];
    struct dmk_counter *rejected_queue, *rejected_deadline;
    struct dmk_counter *prefill_remote, *prefill_local, *prefill_forced;
    struct dmk_counter *transfer_bytes;
    struct dmk_histogram *transfer_gb_s, *tokenize_time;
    struct dmk_gauge *tokens_in_flight, *open_requests;
    struct dmk_gauge *workers_up[2], *workers_known[2], *workers_draining[2], *workers_hanging[2];
    struct dmk_counter *worker_downs[2], *hello_refused, *relayed_quiet, *relayed_closed;
    struct dmk_counter *stale_events;
    struct dmk_counter *recovered[DMK_N_REPAIRS];
    struct dmk_gauge *index_blocks, *ready;
    struct dmk_gauge *loop_delay;
    struct dmk_process_metrics process;
};

/* -DMK_ENOMEM. model is the label model_name. */
int dmk_stats_init(struct dmk_stats *stats, const char *model);
/* What never became a request was refused: no such path or method, no key, malformed, too large, no room ... status:
 * of HTTP, also where gRPC has another word for it. */
void dmk_stats_refused(struct dmk_stats *stats, enum dmk_entry entry, unsigned status);
void dmk_stats_fini(struct dmk_stats *stats);
