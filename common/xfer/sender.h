/* P's side of the hand-over: claim, puts layer by layer, flush, a terminal until it is answered.
 *
 * The rules stand in send_state.[hc] as one table. Source pages are leased to the job until
 * on_done. Owner: the worker's loop. */
#pragma once

#include "common/xfer/ticket.h"

struct dmk_sender;

/* Callbacks may call any function of the sender but free. Each job that claim took hears on_done
 * exactly once, last; before it, on_claimed and on_failed at most once each. */
struct dmk_sender_events {
    void (*on_claimed)(void *ud, uint64_t job); /* yes: puts start; may be NULL */
    /* Not for the owner's own cancel. -DMK_EAGAIN: D has refused the claim (retry elsewhere);
     * -DMK_ETIMEOUT: the budget is spent; -DMK_EPEER: the endpoint broke. `why` is a sentence. */
    void (*on_failed)(void *ud, uint64_t job, int status, const char *why);
    /* The job is over: source pages are free to reuse. ok = D has accepted. ns_moving is how long
     * puts of the job or its flush were under way (computing in between does not count). */
    void (*on_done)(void *ud, uint64_t job, bool ok, uint64_t bytes, uint64_t ns_moving);
    /* `closed{cookie}` for a router to relay to the ticket's D. */
    void (*on_closed_word)(void *ud, struct dmk_id128 cookie, uint64_t d_incarnation);
    void *ud;
};

struct dmk_sender_conf {
    const struct dmk_xfer_ops *ops;
    struct dmk_xfer *xfer;
    uint64_t incarnation; /* rises with every start of this worker */
    const char
        *worker_id; /* the same over restarts; NULL = unnamed (D then cannot tell older starts) */
    struct dmk_id128 model_id;
    const char *numerics;        /* copied */
    uint64_t transfer_budget_ns; /* from the claim on */
    uint64_t resend_every_ns;    /* terminal */
    uint64_t give_up_ns;         /* terminal: without an answer the job is forgotten */
    uint64_t
        retire_ns; /* how long own puts may take to end before the endpoint is closed; 0 = 2 s */
    uint64_t max_put_bytes; /* 0 = 64 MiB */
    uint32_t max_jobs;
    uint32_t max_endpoints; /* 0 = 256 */
    uint32_t max_puts_in_flight;
    uint32_t n_ranks;                                    /* of P */
    const struct dmk_kv_mem *mem[DMK_TICKET_MAX_RANKS];  /* source pages of each rank */
    struct dmk_xfer_mem *full_mem[DMK_TICKET_MAX_RANKS]; /* their registrations */
    struct dmk_xfer_mem *window_mem[DMK_TICKET_MAX_RANKS];
    /* Memory that page ids with DMK_PLAN_STAGED mean; NULL: there is none. */
    const struct dmk_kv_mem *stage[DMK_TICKET_MAX_RANKS];
    struct dmk_xfer_mem *stage_full_mem[DMK_TICKET_MAX_RANKS];
    struct dmk_xfer_mem *stage_window_mem[DMK_TICKET_MAX_RANKS];
    struct dmk_sender_events events;
};

struct dmk_sender_stats {
    uint32_t n_jobs, n_puts_in_flight, n_endpoints;
    uint64_t n_puts, n_bytes, n_done_ok, n_done_failed;
};

int dmk_sender_new(const struct dmk_sender_conf *conf, struct dmk_sender **ret);
/* Before the node's close. Closes its endpoints and moves the node on until its puts have ended (a
 * second at most); no event comes any more. */
void dmk_sender_free(struct dmk_sender **tx);

/* Checks model, numerics and layout of the ticket (-DMK_EMISMATCH with a sentence), connects if
 * needed, and sends the claim. The ticket is copied. On any failure the job does not exist and no
 * event comes. -DMK_EFULL: max_jobs or max_endpoints are in use. -DMK_EINVAL: another job has the same
 * ticket, whose replies and terminals name nothing but its cookie. job is unique among the jobs. */
int dmk_sender_claim(struct dmk_sender *tx, uint64_t job, const struct dmk_ticket *ticket,
                     uint64_t now_ns, struct dmk_error *reterr);
/* A layer's K and V are final for blocks [first_block, end_block) of the sequence: put those not
 * below `have`. src_pages[block] is P's full page of that block (copied; full layers). Pieces of a
 * layer come in ascending order without gaps; pushing before the yes is right, puts wait for it and
 * for their bound. Jobs that have failed or ended ignore it. */
void dmk_sender_push_full(struct dmk_sender *tx, uint64_t job, uint32_t full_layer,
                          const uint32_t *src_pages, uint32_t first_block, uint32_t end_block);
/* The whole window of a sliding layer, when the last chunk has passed it; src_ring as in the step. Puts
 * the blocks that dmk_kv_window_blocks(ticket's n_tokens) names, block b from src_ring[b % n_ring] to
 * the ticket's ring[b % its n_ring]; other slots may be DMK_PAGE_NONE. */
void dmk_sender_push_window(struct dmk_sender *tx, uint64_t job, uint32_t window_layer,
                            const uint32_t *src_ring, uint32_t n_ring);
/* All has been pushed: flush, then terminal(ok). */
void dmk_sender_finish(struct dmk_sender *tx, uint64_t job);
/* The request is gone or computing failed: no further puts; terminal(fail) once own puts have
 * retired. */
void dmk_sender_cancel(struct dmk_sender *tx, uint64_t job);
/* `quiet{cookie, p_incarnation}?` relayed by a router; may answer through on_closed_word. */
void dmk_sender_quiet_ask(struct dmk_sender *tx, struct dmk_id128 cookie, uint64_t p_incarnation,
                          uint64_t d_incarnation);

/* From the transport's events. A message that is not ours returns false;
 * its endpoint is then closed. */
bool dmk_sender_message(struct dmk_sender *tx, struct dmk_xfer_ep *ep, struct dmk_bytes message,
                        uint64_t now_ns);
/* Takes the broken endpoint and gives it back to the transport, known or not. */
void dmk_sender_ep_closed(struct dmk_sender *tx, struct dmk_xfer_ep *ep, uint64_t now_ns);
/* Timers; call at least every 100 ms. */
void dmk_sender_tick(struct dmk_sender *tx, uint64_t now_ns);
uint32_t dmk_sender_n_jobs(const struct dmk_sender *tx);
struct dmk_sender_stats dmk_sender_stats(const struct dmk_sender *tx);
