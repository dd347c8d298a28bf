/* The decode worker without its sockets: requests and messages go in, events come out of one callback.
 *
 * It owns the request table, page accounting, the scheduler and the receiving side of the page transfer. It
 * knows no gRPC and no threads; time is passed in. Whoever drives it turns messages into calls, and runs
 * steps: dmk_decode_plan on the loop gives a step, dmk_decode_run runs it (any one thread, it touches only
 * what belongs to the step), dmk_decode_done on the loop takes the results. One step is in flight at most;
 * everything else may be called meanwhile.
 *
 * States of a sequence: KV_WAIT (its prompt comes from a prefill worker) > RUNNING (computing a prompt of its
 * own, or decoding) > ended; PREEMPTED gives its pages up and comes back; DRAINING keeps a dead ticket's
 * pages until no write can land in them.
 *
 * Owner: the worker's loop. Nothing allocates after new but the vocabulary and the automata of constraints, at
 * admission and within a bound. */
#pragma once

#include "common/kv/prefix.h"
#include "common/sample/sample.h"
#include "common/worker/engine_port.h"
#include "common/worker/request.h"
#include "common/xfer/receiver.h"
#include "decode/constrain.h"

#define DMK_DECODE_MAX_STOP_IDS  64
#define DMK_DECODE_MAX_CHOICES   128  /* and never more than max_sequences */
#define DMK_DECODE_RESERVE_AHEAD 1024 /* answer tokens that a reservation covers */
#define DMK_DECODE_LOCAL_ALWAYS  UINT32_MAX

struct dmk_decode_core;
struct dmk_decode_step;

struct dmk_decode_request {
    uint32_t router; /* index of its stream, below DMK_MAX_ROUTERS */
    struct dmk_request_id id;
    const uint32_t *prompt; /* copied */
    uint32_t n_prompt;
    const struct dmk_sample_params *sampling; /* copied */
    uint32_t max_tokens, min_tokens;
    const uint32_t *stop_ids; /* copied */
    uint32_t n_stop_ids;
    bool ignore_eos; /* the model's own end ids do not end the answer */
    uint32_t n;      /* choices */
    struct dmk_bytes salt;
    struct dmk_bytes
        constraint;     /* serialised automaton (common/grammar); empty: the answer is free */
    bool echo_logprobs; /* of the prompt; computed here, nothing is reused for it */
    bool force_local;
};

enum dmk_decode_event_kind {
    DMK_DECODE_RESERVED,
    DMK_DECODE_TRANSFERRED,
    DMK_DECODE_PROMPT_LOGPROBS, /* may come in parts, in order */
    DMK_DECODE_TOKEN,
    DMK_DECODE_FINISHED,  /* of one choice; the request is over with its last choice */
    DMK_DECODE_FAILED,    /* the request is over */
    DMK_DECODE_QUIET_ASK, /* for any router; request fields are unset */
};

/* Pointers are valid during the callback. */
struct dmk_decode_event {
    enum dmk_decode_event_kind kind;
    uint32_t router;
    struct dmk_request_id id;
    union {
        struct {
            bool needs_prefill;
            struct dmk_bytes ticket;
            uint32_t have;
        } reserved;
        struct {
            uint64_t bytes, us;
        } transferred;
        struct {
            uint32_t first; /* index in the prompt of rows[0] */
            uint32_t n;
            const struct dmk_sample_result *rows; /* id is the prompt's token */
        } prompt_logprobs;
        struct {
            uint32_t choice, index; /* index in the choice's output */
            bool with_logprobs;     /* the request asked for them */
            const struct dmk_sample_result *result;
        } token;
        struct {
            uint32_t choice;
            bool stopped; /* by a stop id; else by length */
            uint32_t n_tokens, n_cached, n_preemptions;
            uint64_t queue_us, prefill_us, transfer_us, transfer_bytes, decode_us;
        } finished;
        struct dmk_failed failed;
        struct {
            struct dmk_id128 cookie;
            uint64_t p_incarnation;
        } quiet_ask;
    };
};

struct dmk_decode_conf {
    struct dmk_engine_port engine;
    uint64_t incarnation;
    /* Of each group; DMK_WINDOW_RING window pages for each sequence at least, and as many again in mixed pools, where the
     * window of its prompt is kept beside its own. */
    uint32_t n_full_pages, n_window_pages;
    uint32_t max_sequences; /* choices running or waiting for their pages */
    uint32_t max_context;   /* prompt and answer; cut to what one pool holds */
    uint32_t max_step_tokens, max_chunk_tokens, max_logit_rows;
    uint32_t
        local_prefill_below; /* new tokens; DMK_DECODE_LOCAL_ALWAYS = colocated, no prefill worker */
    bool reuse;              /* prefix cache */
    uint32_t constraint_masks;   /* kept masks; 0 = a default */
    size_t max_constraint_bytes; /* of all automata; 0 = a default */
    /* Page transfer; ops NULL when there is none (then everything is computed here). */
    const struct dmk_xfer_ops *ops;
    struct dmk_xfer *xfer;
    uint64_t ticket_expiry_ns, transfer_budget_ns, quiet_ask_every_ns;
    uint32_t max_draining_pages;
    void (*on_event)(void *ud, const struct dmk_decode_event *event);
    void *ud;
};

/* Refuses bounds that can not work together, by name. Registers page memory with the transport. */
int dmk_decode_core_new(const struct dmk_decode_conf *conf, struct dmk_decode_core **ret,
                        struct dmk_error *reterr);
/* No step may be in flight. The transport must still be open. */
void dmk_decode_core_free(struct dmk_decode_core **core);

/* Answers with RESERVED or FAILED before it returns. */
void dmk_decode_generate(struct dmk_decode_core *core, const struct dmk_decode_request *request,
                         uint64_t now_ns);
/* Idempotent; no event follows. */
void dmk_decode_cancel(struct dmk_decode_core *core, uint32_t router, struct dmk_request_id id,
                       uint64_t now_ns);
/* A router's stream ended: as a cancel of all it asked for. */
void dmk_decode_router_gone(struct dmk_decode_core *core, uint32_t router, uint64_t now_ns);
/* `closed{cookie}`, relayed. */
void dmk_decode_closed_word(struct dmk_decode_core *core, struct dmk_id128 cookie, uint64_t now_ns);
/* No new requests from now on; running ones go on. */
void dmk_decode_drain(struct dmk_decode_core *core);
/* The bytes of the vocabulary, which constraints need; before the first of them. As
 * dmk_constraints_vocabulary. */
int dmk_decode_vocabulary(struct dmk_decode_core *core, struct dmk_bytes bytes,
                          struct dmk_error *reterr);
struct dmk_id128 dmk_decode_vocabulary_hash(const struct dmk_decode_core *core);
/* From the transport's events. */
bool dmk_decode_xfer_message(struct dmk_decode_core *core, struct dmk_xfer_ep *ep,
                             struct dmk_bytes message, uint64_t now_ns);
void dmk_decode_xfer_closed(struct dmk_decode_core *core, struct dmk_xfer_ep *ep, uint64_t now_ns);
/* At least every 100 ms. */
void dmk_decode_tick(struct dmk_decode_core *core, uint64_t now_ns);

/* The next step, or NULL when there is nothing to compute or one is in flight. */
struct dmk_decode_step *dmk_decode_plan(struct dmk_decode_core *core, uint64_t now_ns);
void dmk_decode_run(struct dmk_decode_step *step);
/* Emits what the step brought. A failed step fails all its requests. */
void dmk_decode_done(struct dmk_decode_core *core, struct dmk_decode_step *step, uint64_t now_ns);

struct dmk_decode_load {
    uint32_t n_requests;
    uint32_t n_running, n_waiting;          /* sequences; waiting: for pages from P, or preempted */
    uint64_t tokens_waiting;                /* prompt tokens not computed yet */
    struct dmk_kv_pool_counts full, window; /* over all groups */
    uint32_t most_full_free; /* full pages, free or cached, of the group that has most */
    double step_ms;          /* recent mean */
    uint64_t n_steps, n_tokens, n_preemptions, n_prompt_tokens_computed;
    uint64_t n_local_prefills, n_remote_prefills;
    uint64_t n_query_tokens, n_hit_tokens; /* prompt tokens looked up in the cache, found */
    struct dmk_receiver_stats receiver;
    struct dmk_constraints_stats constraints;
};
struct dmk_decode_load dmk_decode_load(const struct dmk_decode_core *core);

/* One data-parallel group: the page equation holds in each. */
struct dmk_decode_group {
    struct dmk_kv_pool_counts full, window;
    uint32_t n_sequences; /* that have pages or wait for them */
};
uint32_t dmk_decode_n_groups(const struct dmk_decode_core *core);
struct dmk_decode_group dmk_decode_group(const struct dmk_decode_core *core, uint32_t group);
/* Nothing runs, waits or drains. */
bool dmk_decode_idle(const struct dmk_decode_core *core);
uint32_t dmk_decode_max_context(const struct dmk_decode_core *core);
/* Pools and caches agree with themselves; for tests and when idle. */
bool dmk_decode_check(const struct dmk_decode_core *core);

/* Whether a page write at this address of our memory belongs to a ticket that is out: a write anywhere else
 * breaks the quiet rule. For tests. */
bool dmk_decode_expects_write(const struct dmk_decode_core *core, const void *addr);

/* Changes of the prefix caches, as dmk_kv_prefix_events and dmk_kv_prefix_list over all groups: a prefix is
 * gone when no group holds it any more. */
uint32_t dmk_decode_block_events(struct dmk_decode_core *core,
                                 struct dmk_kv_prefix_event *ret_events, uint32_t cap,
                                 bool *ret_lost);
/* inout_at: two words, zero at first. */
uint32_t dmk_decode_block_list(const struct dmk_decode_core *core, uint32_t inout_at[2],
                               struct dmk_kv_prefix_event *ret_events, uint32_t cap);
/* Evicts everything that is cached and not in use. */
void dmk_decode_flush_cache(struct dmk_decode_core *core);
