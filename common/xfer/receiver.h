/* D's side of the hand-over: tickets from reservation to READY or freed, and the quiet rule.
 *
 * The rules stand in receive_state.[hc] as one table (docs/WIRE.md draws it); this module drives it
 * with messages, timers and endpoint events, and owns the watch on each claimant. It never touches
 * pages: it says when a ticket's pages may go back to their pool (on_freed), once, and not before
 * no write can land. Owner: the worker's loop. */
#pragma once

#include "common/xfer/ticket.h"

struct dmk_receiver;

enum dmk_receive_failure {
    DMK_RECEIVE_EXPIRED,   /* never claimed in time */
    DMK_RECEIVE_DEADLINE,  /* claimed, not finished in time */
    DMK_RECEIVE_PEER_LOST, /* endpoint broke or the claimant's process ended */
    DMK_RECEIVE_PEER_FAIL, /* P said so */
    DMK_RECEIVE_SHORT,     /* terminal ok, but bytes differ from the ticket */
};

/* Callbacks may call any function of the receiver but free. A ticket's story as its owner hears it:
 * on_claimed (maybe), then on_ready, or on_failed and on_freed; after cancel on_freed alone. */
struct dmk_receiver_events {
    void (*on_claimed)(void *ud, uint64_t key); /* may be NULL */
    /* All pages are here and they are the owner's: nothing more comes for key until finish. */
    void (*on_ready)(void *ud, uint64_t key, uint64_t bytes, uint64_t ns_since_claim);
    /* The request has lost its transfer. Its pages come back later, by on_freed. */
    void (*on_failed)(void *ud, uint64_t key, enum dmk_receive_failure why);
    /* No write can land any more: pages may be reused. Also after cancel. Not after on_ready. */
    void (*on_freed)(void *ud, uint64_t key);
    /* Ask P, through any router, whether it has finished with this cookie. */
    void (*on_quiet_ask)(void *ud, struct dmk_id128 cookie, uint64_t p_incarnation);
    void *ud;
};

struct dmk_receiver_conf {
    const struct dmk_xfer_ops *ops;
    struct dmk_xfer *xfer;
    uint64_t incarnation;        /* rises with every start of this worker */
    uint64_t expiry_ns;          /* unclaimed tickets */
    uint64_t transfer_budget_ns; /* from the claim on */
    uint64_t
        quiet_ask_every_ns; /* also: how long a P may keep silent before its endpoint is closed */
    uint32_t max_tickets;
    uint32_t max_endpoints;      /* 0 = 256 */
    uint32_t max_draining_pages; /* beyond it claims of the P in question are refused */
    struct dmk_receiver_events events;
};

struct dmk_receiver_stats {
    uint32_t n_unclaimed, n_claimed, n_draining, n_ready, draining_pages, n_endpoints;
    uint64_t n_accepted, n_failed, n_expired, n_stale, n_refused_claims, n_quiet_asks;
    bool refusing; /* some P has too many pages draining: say so in health */
};

int dmk_receiver_new(const struct dmk_receiver_conf *conf, struct dmk_receiver **ret);
/* Before the node's close. Closes its endpoints and moves the node on until they are (a second at
 * most); no event comes any more. */
void dmk_receiver_free(struct dmk_receiver **rx);

/* Registers a ticket whose owner has filled in model, numerics, layers and heads, ranks, have,
 * n_tokens, pages and ring; sets incarnation, cookie, generation, expiry, page_tokens, address and
 * bytes_expected. key is the owner's handle, unique among its tickets. n_pages_counted is what it
 * holds for the draining bound. -DMK_EFULL: table full. -DMK_EINVAL: a filled-in field is out of
 * bounds (reterr says which). */
int dmk_receiver_reserve(struct dmk_receiver *rx, uint64_t key, uint32_t n_pages_counted,
                         uint64_t now_ns, struct dmk_ticket *inout_ticket,
                         struct dmk_error *reterr);
/* The request is gone. on_freed may come at once, inside this call. Unknown keys are ignored, and
 * so are those of READY tickets but for forgetting them: their pages are the owner's. */
void dmk_receiver_cancel(struct dmk_receiver *rx, uint64_t key, uint64_t now_ns);
/* A READY ticket's pages now belong to a running sequence that ended: forget it. Until then a
 * repeated terminal is answered ALREADY, afterwards STALE. */
void dmk_receiver_finish(struct dmk_receiver *rx, uint64_t key);
/* `closed{cookie}` relayed by a router. */
void dmk_receiver_closed_word(struct dmk_receiver *rx, struct dmk_id128 cookie, uint64_t now_ns);

/* From the transport's events. A message that is not ours returns false;
 * its endpoint is then closed. */
bool dmk_receiver_message(struct dmk_receiver *rx, struct dmk_xfer_ep *ep, struct dmk_bytes message,
                          uint64_t now_ns);
/* Takes the broken endpoint and gives it back to the transport, known or not. */
void dmk_receiver_ep_closed(struct dmk_receiver *rx, struct dmk_xfer_ep *ep, uint64_t now_ns);
/* Timers and watches; call at least every 100 ms. */
void dmk_receiver_tick(struct dmk_receiver *rx, uint64_t now_ns);
struct dmk_receiver_stats dmk_receiver_stats(const struct dmk_receiver *rx);
