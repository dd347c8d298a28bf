/* D's side of a hand-over as one table: a pure function of state, event and guards.
 *
 * docs/WIRE.md draws the same table and says why each cell is as it is. The driver (receiver_drive.c)
 * finds the guards, calls dmk_receive_step, and carries the actions out in the order of their bits.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum dmk_receive_state {
    DMK_RECEIVE_FORGOTTEN, /* no such ticket, or no longer */
    DMK_RECEIVE_UNCLAIMED, /* pages are leased, nobody may write */
    DMK_RECEIVE_CLAIMED,   /* one known P may write */
    DMK_RECEIVE_DRAINING,  /* the transfer has failed, but a write may still land */
    DMK_RECEIVE_READY,     /* complete; the pages belong to a sequence */
    DMK_RECEIVE_N_STATES,
};

enum dmk_receive_event {
    DMK_RECEIVE_EV_RESERVE,
    DMK_RECEIVE_EV_CLAIM,
    DMK_RECEIVE_EV_TERMINAL_OK,
    DMK_RECEIVE_EV_TERMINAL_FAIL, /* a quiet word by message */
    DMK_RECEIVE_EV_CLOSED_WORD,   /* a quiet word relayed by a router */
    DMK_RECEIVE_EV_CANCEL,        /* by the request's owner, or the router's stream has ended */
    DMK_RECEIVE_EV_EXPIRY,
    DMK_RECEIVE_EV_DEADLINE,
    DMK_RECEIVE_EV_EP_GONE,      /* the claim's endpoint is closed on our side too, completely */
    DMK_RECEIVE_EV_PROCESS_GONE, /* the claimant's process has ended */
    DMK_RECEIVE_EV_TIMER,
    DMK_RECEIVE_EV_NEWER_P, /* a newer incarnation of the claimant was seen */
    DMK_RECEIVE_EV_FINISH,  /* the sequence has ended */
    DMK_RECEIVE_N_EVENTS,
};

/* Facts that an event's cell may ask for; bits that it does not ask for are ignored. */
enum dmk_receive_guard {
    DMK_RECEIVE_IF_DIRECT = 1 << 0,      /* lane: writes land without our help */
    DMK_RECEIVE_IF_ROOM = 1 << 1,        /* reserve: pages and a table slot were found */
    DMK_RECEIVE_IF_D_EQUAL = 1 << 2,     /* message: it names our incarnation */
    DMK_RECEIVE_IF_P_CURRENT = 1 << 3,   /* message: its P is not an older incarnation */
    DMK_RECEIVE_IF_WATCHED = 1 << 4,     /* claim: the watch is open, or none is needed */
    DMK_RECEIVE_IF_UNDER_BOUND = 1 << 5, /* claim: this P's draining pages are under the bound */
    DMK_RECEIVE_IF_ON_EP = 1 << 6,       /* terminal: it came on the claim's endpoint */
    DMK_RECEIVE_IF_BYTES_EQUAL = 1 << 7, /* terminal ok: bytes are those of the ticket */
    DMK_RECEIVE_IF_LATE = 1 << 8,        /* timer: we have asked before without an answer */
};
#define DMK_RECEIVE_ALL_GUARDS 0x1ffu

enum dmk_receive_action {
    DMK_RECEIVE_DO_BIND = 1 << 0, /* remember the claimant and the endpoint; start the deadline */
    DMK_RECEIVE_DO_YES = 1 << 1,
    DMK_RECEIVE_DO_NO = 1 << 2,
    DMK_RECEIVE_DO_ACCEPTED = 1 << 3,
    DMK_RECEIVE_DO_ALREADY = 1 << 4,
    DMK_RECEIVE_DO_STALE = 1 << 5,
    DMK_RECEIVE_DO_FAILED = 1 << 6,   /* answer FAILED */
    DMK_RECEIVE_DO_CLOSE_EP = 1 << 7, /* close the claim's endpoint; EP_GONE follows */
    DMK_RECEIVE_DO_ASK = 1 << 8,      /* quiet{cookie, P's incarnation}? through any router */
    DMK_RECEIVE_DO_TELL_CLAIMED = 1 << 9,
    DMK_RECEIVE_DO_TELL_READY = 1 << 10,
    DMK_RECEIVE_DO_TELL_FAILED = 1 << 11, /* the request has lost its transfer */
    DMK_RECEIVE_DO_FREE = 1 << 12,        /* no write can land: the pages return to their pool */
};

struct dmk_receive_result {
    enum dmk_receive_state next;
    uint32_t actions;
    bool listed; /* false: the cell is empty ("cannot happen"); state unchanged, no actions */
};

struct dmk_receive_result dmk_receive_step(enum dmk_receive_state state,
                                           enum dmk_receive_event event, uint32_t guards);

const char *dmk_receive_state_name(enum dmk_receive_state state);
