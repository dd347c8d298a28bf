/* What the files of the receiver share, and nobody else: receiver.c (doors), receiver_drive.c drives the table
 * (messages, closed endpoints, time), receiver_peer.c owns who speaks to us: endpoints, P's processes, their
 * incarnations. */
#pragma once

#include "common/xfer/message.h"
#include "common/xfer/receive_state.h"
#include "common/xfer/receiver.h"

#define DMK_RECEIVER_MAX_WORKERS 64 /* P workers whose newest incarnation is remembered */

struct dmk_rx_endpoint {
    struct dmk_xfer_ep *ep; /* NULL: slot is free */
    struct dmk_receiver *rx;
    bool closing;
    bool proven; /* a valid cookie has come on it */
    uint64_t heard_ns;
};

struct dmk_rx_claimant {
    uint64_t incarnation;         /* 0: slot is free */
    struct dmk_xfer_watch *watch; /* DIRECT only */
    uint32_t n_tickets;
    uint32_t draining_pages;
};

struct dmk_rx_worker {
    uint64_t id, incarnation, heard_ns;
};

struct dmk_rx_ticket {
    enum dmk_receive_state state; /* FORGOTTEN: slot is free */
    uint64_t key;
    struct dmk_id128 cookie;
    uint64_t generation, bytes_expected;
    uint32_t n_pages;
    uint64_t due_ns; /* expiry, then transfer deadline, then the next quiet? */
    uint64_t claimed_ns;
    uint32_t n_asks;
    uint64_t p_incarnation;
    struct dmk_rx_endpoint *endpoint; /* of the claim, until it is closed */
    struct dmk_rx_claimant *claimant;
};

struct dmk_receiver {
    struct dmk_receiver_conf conf;
    bool direct, stopping;
    uint64_t now_ns, next_generation;
    struct dmk_receiver_stats stats;   /* counters only */
    struct dmk_rx_ticket *tickets;     /* [conf.max_tickets] */
    struct dmk_rx_endpoint *endpoints; /* [conf.max_endpoints] */
    struct dmk_rx_claimant *claimants; /* [conf.max_tickets] */
    struct dmk_rx_worker workers[DMK_RECEIVER_MAX_WORKERS];
};

/* What an event has with it besides the guards; what the event does not have is zero. */
struct dmk_rx_cause {
    enum dmk_receive_failure why;
    struct dmk_rx_endpoint *endpoint; /* of the message */
    const struct dmk_message *message;
    struct dmk_rx_claimant *claimant;
    enum dmk_message_reply refusal;
};

/* receiver_drive.c */

/* NULL when no ticket has this cookie. */
struct dmk_rx_ticket *dmk_rx_find_cookie(struct dmk_receiver *rx, struct dmk_id128 cookie);
/* The event happens to the ticket: its state changes and what the table lists is done. t may be NULL for a
 * cookie that we do not know. The slot may be another's when this returns. */
void dmk_rx_feed(struct dmk_receiver *rx, struct dmk_rx_ticket *t, enum dmk_receive_event event,
                 uint32_t guards, const struct dmk_rx_cause *cause);
/* The endpoint is closed, completely. */
void dmk_rx_endpoint_gone(struct dmk_receiver *rx, struct dmk_rx_endpoint *endpoint);

/* receiver_peer.c */

/* The record of an endpoint, made at its first message; NULL when the table is full. */
struct dmk_rx_endpoint *dmk_rx_endpoint_take(struct dmk_receiver *rx, struct dmk_xfer_ep *ep);
/* Begins to close it; dmk_rx_endpoint_gone follows. Again, or for NULL: nothing. */
void dmk_rx_endpoint_close(struct dmk_receiver *rx, struct dmk_rx_endpoint *endpoint);
/* Endpoints that nobody needs, or that never showed a valid cookie. */
void dmk_rx_endpoints_tidy(struct dmk_receiver *rx);

/* The newest incarnation of the worker is remembered; false when the one given is older. Not for ever: an older
 * one that speaks long after the newest was last heard is a start after the clock was set back. What keeps
 * tickets apart are their cookies. */
bool dmk_rx_is_current(struct dmk_receiver *rx, uint64_t worker, uint64_t incarnation);

/* The claimant of that incarnation, with its watch open where the lane needs one; NULL when the process
 * cannot be watched or has ended. Drop it again when no ticket was bound to it. */
struct dmk_rx_claimant *dmk_rx_claimant_take(struct dmk_receiver *rx,
                                             const struct dmk_message *claim);
void dmk_rx_claimant_drop(struct dmk_receiver *rx, struct dmk_rx_claimant *claimant);
bool dmk_rx_claimant_gone(const struct dmk_receiver *rx, const struct dmk_rx_claimant *claimant);
