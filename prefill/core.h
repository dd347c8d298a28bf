/* The prefill worker without its sockets: requests and messages go in, events come out of one callback.
 *
 * It computes the KV of a prompt less its last token, in chunks of one job at a time (sched.h says whose),
 * and pushes finished layers to the decode worker that the ticket names. It never samples. It knows no gRPC
 * and no threads; time is passed in. Whoever drives it turns messages into calls and runs steps:
 * dmk_prefill_plan on the loop gives a step, dmk_prefill_run runs it (any one thread; it calls on_layer
 * there after each layer), dmk_prefill_layers on the loop pushes the layers that are final so far (as often
 * as on_layer asks for it), dmk_prefill_done on the loop takes the result. One step is in flight at most;
 * everything else may be called meanwhile.
 *
 *   QUEUED > CLAIMING > RUNNING(chunk, layer) > PUSHED > ended
 *      |         |          |                     |
 *      +---------+----------+---------------------+--> FAILING > ended
 *
 * A job holds its pages until the sender has done with it: D may still be reading them. The prefix cache
 * keeps what was computed, for prompts with the same beginning.
 *
 * Owner: the worker's loop. Nothing allocates after new. */
#pragma once

#include "common/kv/prefix.h"
#include "common/worker/engine_port.h"
#include "common/worker/request.h"
#include "common/xfer/sender.h"

struct dmk_prefill_core;
struct dmk_prefill_step;

struct dmk_prefill_request {
    uint32_t router; /* index of its stream, below DMK_MAX_ROUTERS */
    struct dmk_request_id id;
    const uint32_t *prompt; /* [n_prompt], copied; KV is computed for all but the last */
    uint32_t n_prompt;      /* at least 2 */
    struct dmk_bytes ticket;
    struct dmk_bytes salt;
    int64_t shift_ns; /* its turn comes as if it had arrived so much later */
};

enum dmk_prefill_event_kind {
    DMK_PREFILL_DONE,        /* D has accepted; the request is over here */
    DMK_PREFILL_FAILED,      /* the request is over; its pages may be leased for a while */
    DMK_PREFILL_CLOSED_WORD, /* for any router; request fields are unset */
};

/* Pointers are valid during the callback. */
struct dmk_prefill_event {
    enum dmk_prefill_event_kind kind;
    uint32_t router;
    struct dmk_request_id id;
    union {
        struct {
            uint32_t n_computed, n_cached; /* tokens of the prompt */
            uint64_t queue_us, compute_us, transfer_us, transfer_bytes;
        } done;
        struct dmk_failed failed;
        struct {
            struct dmk_id128 cookie;
            uint64_t d_incarnation;
        } closed_word;
    };
};

struct dmk_prefill_conf {
    struct dmk_engine_port engine;
    uint64_t incarnation;  /* rises with every start of this worker */
    const char *worker_id; /* the same over restarts */
    uint32_t n_full_pages, n_window_pages;
    uint32_t max_jobs;     /* waiting, running or waiting for their answer */
    uint32_t max_context;  /* tokens of a prompt */
    uint32_t chunk_tokens; /* at most in a step */
    bool reuse;            /* prefix cache */
    const struct dmk_xfer_ops *ops;
    struct dmk_xfer *xfer;
    uint64_t queue_budget_ns, transfer_budget_ns, resend_every_ns, give_up_ns;
    uint32_t max_puts_in_flight;
    /* Called by dmk_prefill_run on its thread after each layer: dmk_prefill_layers should be called on the
     * loop soon. May be NULL: then all layers of a chunk are pushed by dmk_prefill_done. */
    void (*on_layer)(void *ud);
    void (*on_event)(void *ud, const struct dmk_prefill_event *event);
    void *ud;
};

/* Refuses bounds that can not work together, by name. Registers page memory with the transport. */
int dmk_prefill_core_new(const struct dmk_prefill_conf *conf, struct dmk_prefill_core **ret,
                         struct dmk_error *reterr);
/* No step may be in flight. The transport must still be open. */
void dmk_prefill_core_free(struct dmk_prefill_core **core);

/* FAILED comes before it returns when the request can not be taken. One that is here already is not taken
 * again, and no event says so; a ticket is taken once. */
void dmk_prefill_submit(struct dmk_prefill_core *core, const struct dmk_prefill_request *request,
                        uint64_t now_ns);
/* Idempotent; no event follows. Computing stops before the next layer. */
void dmk_prefill_cancel(struct dmk_prefill_core *core, uint32_t router, struct dmk_request_id id);
/* A router's stream ended: as a cancel of all it asked for. */
void dmk_prefill_router_gone(struct dmk_prefill_core *core, uint32_t router);
/* `quiet{cookie, p_incarnation}?`, relayed. */
void dmk_prefill_quiet_ask(struct dmk_prefill_core *core, struct dmk_id128 cookie,
                           uint64_t p_incarnation, uint64_t d_incarnation);
/* No new requests from now on; those taken go on. */
void dmk_prefill_drain(struct dmk_prefill_core *core);
/* From the transport's events. */
bool dmk_prefill_xfer_message(struct dmk_prefill_core *core, struct dmk_xfer_ep *ep,
                              struct dmk_bytes message, uint64_t now_ns);
void dmk_prefill_xfer_closed(struct dmk_prefill_core *core, struct dmk_xfer_ep *ep,
                             uint64_t now_ns);
/* At least every 100 ms. */
void dmk_prefill_tick(struct dmk_prefill_core *core, uint64_t now_ns);

/* The next chunk, or NULL when there is nothing to compute or a step is in flight. */
struct dmk_prefill_step *dmk_prefill_plan(struct dmk_prefill_core *core, uint64_t now_ns);
void dmk_prefill_run(struct dmk_prefill_step *step);
void dmk_prefill_layers(struct dmk_prefill_core *core);
void dmk_prefill_done(struct dmk_prefill_core *core, struct dmk_prefill_step *step,
                      uint64_t now_ns);

struct dmk_prefill_load {
    uint32_t n_running, n_waiting; /* running: has pages; waiting: queued */
    uint64_t tokens_waiting;       /* prompt tokens not computed yet */
    struct dmk_kv_pool_counts full, window;
    double step_ms; /* recent mean */
    uint64_t n_steps, n_done, n_failed, n_tokens_computed, n_hit_tokens, bytes_sent;
    uint64_t n_puts;   /* page writes; runs of pages make them few */
    uint64_t n_staged; /* prompts whose pages leave through the staging memory */
};
struct dmk_prefill_load dmk_prefill_load(const struct dmk_prefill_core *core);
/* Nothing queued, running or waiting for an answer. */
bool dmk_prefill_idle(const struct dmk_prefill_core *core);
/* Pools and cache agree with themselves; for tests and when idle. */
bool dmk_prefill_check(const struct dmk_prefill_core *core);

/* Changes of the prefix cache (kv/prefix.h). */
uint32_t dmk_prefill_block_events(struct dmk_prefill_core *core,
                                  struct dmk_kv_prefix_event *ret_events, uint32_t cap,
                                  bool *ret_lost);
uint32_t dmk_prefill_block_list(const struct dmk_prefill_core *core, uint32_t *inout_at,
                                struct dmk_kv_prefix_event *ret_events, uint32_t cap);
/* Evicts everything that is cached and not in use. */
void dmk_prefill_flush_cache(struct dmk_prefill_core *core);
