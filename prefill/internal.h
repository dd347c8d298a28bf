/* The prefill core's own structures, shared by its files and nobody else: core.c (doors), request.c (from a
 * request to a job), job.c (a job's end, the sender's news of it), step.c (claims, chunks, pushes), stage.c
 * (staging memory). */
#pragma once

#include <stdatomic.h>
#include "common/xfer/plan.h"
#include "prefill/core.h"
#include "prefill/sched.h"

struct dmk_prefill_job {
    enum dmk_prefill_state state;
    uint64_t order; /* also the sender's key */
    int64_t due_ns; /* whose turn comes first */
    uint32_t router;
    struct dmk_request_id id;
    bool mute;        /* cancelled or already answered: no event any more */
    bool with_tx;     /* the sender knows it: pages wait for its on_done */
    bool released;    /* on_done has come while a step of this job was in flight */
    uint32_t *prompt; /* [n] of the slot's storage */
    uint32_t n;       /* tokens to compute: the prompt less its last */
    uint32_t pos;     /* computed so far, cached ones included */
    uint32_t n_cached;
    uint32_t
        pushed_blocks; /* full pages [.., here) have been handed to the sender, in every layer */
    struct dmk_id128 root;
    struct dmk_kv_table table;
    /* Its pages leave through the staging memory: block b of the ticket's by stage_at + b - have / 64, ring slot i by
     * stage_window_at + i. */
    bool staged;
    uint32_t stage_at, n_stage, stage_window_at;
    struct dmk_ticket ticket;
    uint64_t queued_ns, claim_ns, started_ns, computed_ns;
};

struct dmk_prefill_step {
    struct dmk_prefill_core *core;
    struct dmk_prefill_job *job;
    struct dmk_step step;
    struct dmk_step_seq seq;
    struct dmk_page_copy copies[DMK_KV_ADVANCE_COPIES];
    struct dmk_step_stage stage;
    bool last; /* the prompt ends with this chunk */
    uint32_t end_block;
    /* Written by the running thread, read by the loop: release after a layer's pages are final pairs
     * with acquire before they are sent. */
    atomic_uint layers_done;
    uint32_t layers_pushed;
    atomic_bool cancel; /* written by the loop, read by the engine; no data hangs on it */
    int status;
    uint64_t planned_ns;
};

struct dmk_prefill_core {
    struct dmk_prefill_conf conf;
    struct dmk_kv_pools pools;
    struct dmk_kv_prefix *prefix;
    struct dmk_sender *tx;
    struct dmk_xfer_mem *full_mem[DMK_TICKET_MAX_RANKS];
    struct dmk_xfer_mem *window_mem[DMK_TICKET_MAX_RANKS];
    struct dmk_kv_pools stage; /* NULL pools: no staging memory */
    struct dmk_xfer_mem *stage_full_mem[DMK_TICKET_MAX_RANKS];
    struct dmk_xfer_mem *stage_window_mem[DMK_TICKET_MAX_RANKS];
    uint32_t *stage_ids;            /* [pages_for(max_context)] scratch */
    struct dmk_prefill_job *jobs;   /* [max_jobs] */
    struct dmk_prefill_turn *turns; /* [max_jobs] scratch */
    uint32_t *prompts;              /* [max_jobs][max_context] */
    uint32_t *tables;               /* [max_jobs][pages_for(max_context)] */
    struct dmk_prefill_step step;
    bool in_flight;
    bool draining;
    bool shortest_next; /* the next chunk is the shortest job's, not the earliest's */
    uint64_t next_order;
    uint64_t now_ns; /* of the call that is running */
    struct dmk_prefill_load load;
};

/* job.c */
/* Ends the request towards its router, once. */
void dmk_prefill__fail(struct dmk_prefill_core *core, struct dmk_prefill_job *job,
                       enum dmk_failure code, const char *text);
/* What a status of the sender means to the router. */
enum dmk_failure dmk_prefill__failure_of(int status);
/* Pages and slot go back; the sender has done with the job, or never knew it. */
void dmk_prefill__free_job(struct dmk_prefill_core *core, struct dmk_prefill_job *job);
/* The job's next state is FAILING: computing stops, the sender ends it. */
void dmk_prefill__abandon(struct dmk_prefill_core *core, struct dmk_prefill_job *job);
struct dmk_sender_events dmk_prefill__sender_events(struct dmk_prefill_core *core);

/* step.c */
/* Hands over what needs no computing and ends a job whose whole prompt is cached. */
void dmk_prefill__begin(struct dmk_prefill_core *core, struct dmk_prefill_job *job);

/* stage.c */
/* Takes staging pages for what the ticket names, in one run each, or leaves the job unstaged; and gives them back. */
void dmk_prefill__stage(struct dmk_prefill_core *core, struct dmk_prefill_job *job);
void dmk_prefill__unstage(struct dmk_prefill_core *core, struct dmk_prefill_job *job);
