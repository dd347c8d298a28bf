/* A prefill core and a decode core in one process, over the loopback transport, with a router of thirty
 * lines between them: what tests of the hand-over need.
 *
 * Every write of the transport is checked against the tickets that are out (the quiet rule).
 * Time is virtual: a turn lasts a millisecond. Everything runs on the caller's thread; engine steps run
 * inside a turn. Events are kept as answers, one for each request. */
#pragma once

#include "common/xfer/loopback.h"
#include "decode/core.h"
#include "prefill/core.h"

struct cell;

#define CELL_MAX_ANSWERS 64
#define CELL_MAX_TOKENS  1400

struct cell_choice {
    uint32_t n;
    uint32_t ids[CELL_MAX_TOKENS];
    float logprobs[CELL_MAX_TOKENS];
    bool finished, stopped;
    uint32_t n_cached, n_preemptions;
};

struct cell_answer {
    bool used, over;
    bool reserved, needs_prefill, transferred, prefill_done, cancelled;
    uint32_t have;
    bool failed;
    enum dmk_failure code;
    char text[160];
    uint32_t retry_after_ms;
    uint32_t n_choices, n_finished;
    struct cell_choice choices[DMK_DECODE_MAX_CHOICES];
    float *scores; /* of prompt tokens 1.., made when asked for */
    uint32_t n_scores;
    uint32_t p_computed, p_cached;
    uint64_t transfer_bytes;
    /* for the prefill message */
    uint32_t *prompt;
    uint32_t n_prompt;
    struct dmk_bytes salt; /* the caller's */
    uint8_t ticket[DMK_TICKET_MAX_BYTES];
    size_t ticket_len;
};

struct cell_conf {
    struct dmk_engine_port decode, prefill; /* prefill.step NULL: colocated */
    uint32_t d_full_pages, d_window_pages, p_full_pages, p_window_pages;
    uint32_t max_sequences, max_context, chunk_tokens, step_tokens;
    uint32_t local_prefill_below;
    bool no_reuse;
    uint64_t transfer_budget_ms; /* 0 = 2000 */
    uint64_t ticket_expiry_ms;   /* 0 = 500 */
    uint64_t queue_budget_ms;    /* of the prefill worker; 0 = 5000 */
    uint32_t max_draining_pages; /* 0 = no bound that matters */
    struct dmk_loopback_conf fabric;
    /* Called when the prefill worker has computed a layer, on its step; may be NULL. */
    void (*on_layer)(void *ud, struct cell *cell);
    void *ud;
};

struct cell {
    struct cell_conf conf;
    struct dmk_loopback *fabric;
    struct dmk_xfer *d_node, *p_node;
    struct dmk_decode_core *decode;
    struct dmk_prefill_core *prefill;
    uint64_t now_ns;
    uint64_t n_turns;
    struct cell_answer *answers; /* [CELL_MAX_ANSWERS] */
    uint32_t n_answers;
    struct cell_act *acts; /* what the router does in the next turn */
    uint32_t n_acts;
    bool p_dead;
    uint32_t n_restarts;
};

struct cell *cell_new(const struct cell_conf *conf);
/* Checks both cores before. */
void cell_free(struct cell **cell);

/* Sends a request; returns its answer's index. Fields of request other than prompt may be zero: n 1,
 * max_tokens 8, greedy. */
uint32_t cell_ask(struct cell *cell, const struct dmk_decode_request *request);
void cell_cancel(struct cell *cell, uint32_t answer);
void cell_turn(struct cell *cell);
/* Turns until all answers are over; false after max_turns. */
bool cell_run(struct cell *cell, uint32_t max_turns);
/* Turns until no page is leased or draining on either side. */
bool cell_settle(struct cell *cell, uint32_t max_turns);
/* The prefill worker's process ends: its direct copies may land for linger_steps more. */
void cell_kill_prefill(struct cell *cell, uint32_t linger_steps);
/* The same worker again, as a new incarnation with an empty cache. */
void cell_restart_prefill(struct cell *cell);
/* Forgets answers that are over. */
void cell_forget(struct cell *cell);
/* Both cores agree with themselves; with idle also nothing is leased or draining. */
bool cell_check(struct cell *cell, bool idle);
