/* P's side of a hand-over as one table: a pure function of state, event and guards.
 *
 * docs/WIRE.md draws the same table and says why. The driver (sender_drive.c) finds the guards, calls
 * dmk_send_step, and carries the actions out in the order of their bits. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum dmk_send_state {
    DMK_SEND_NONE,       /* no such job, or no longer */
    DMK_SEND_QUEUED,     /* waits for its turn; D knows nothing yet */
    DMK_SEND_CLAIM_SENT, /* from here on a terminal is owed */
    DMK_SEND_RUNNING,    /* D has said yes: puts may go */
    DMK_SEND_FAILING,    /* no further puts; those posted have not all ended */
    DMK_SEND_TERM_OK,    /* terminal(ok) is sent again until answered */
    DMK_SEND_TERM_FAIL,  /* terminal(fail) is sent again until answered */
    DMK_SEND_N_STATES,
};

enum dmk_send_event {
    DMK_SEND_EV_PREFILL,
    DMK_SEND_EV_SCHEDULED,
    DMK_SEND_EV_YES,
    DMK_SEND_EV_NO,
    DMK_SEND_EV_CANCEL,   /* by the job's owner, or the router's stream has ended */
    DMK_SEND_EV_DEADLINE, /* in FAILING: the own puts have not ended in time */
    DMK_SEND_EV_EP_GONE,  /* the claim's endpoint broke */
    DMK_SEND_EV_FLUSHED,  /* everything was put and the flush has succeeded */
    DMK_SEND_EV_RETIRED,  /* own puts: flushed, or the endpoint is closed and no copy runs */
    DMK_SEND_EV_ANSWER,
    DMK_SEND_EV_RESEND,  /* timer */
    DMK_SEND_EV_GIVE_UP, /* the terminal has been without an answer for long */
    DMK_SEND_EV_QUIET_ASK,
    DMK_SEND_N_EVENTS,
};

enum dmk_send_guard {
    DMK_SEND_IF_D_EQUAL = 1 << 0, /* scheduled: the ticket is of D's incarnation as known */
    DMK_SEND_IF_OWN = 1 << 1,     /* quiet ask: it names our incarnation */
    DMK_SEND_IF_EP = 1 << 2,      /* the claim's endpoint is alive */
};
#define DMK_SEND_ALL_GUARDS 0x7u

enum dmk_send_action {
    DMK_SEND_DO_CLAIM = 1 << 0,         /* once */
    DMK_SEND_DO_CLOSE_EP = 1 << 1,      /* RETIRED follows */
    DMK_SEND_DO_RETIRE = 1 << 2,        /* drop queued puts, flush those posted; RETIRED follows */
    DMK_SEND_DO_TERMINAL_OK = 1 << 3,   /* send, on a new endpoint when the old one is gone */
    DMK_SEND_DO_TERMINAL_FAIL = 1 << 4, /* likewise */
    DMK_SEND_DO_CLOSED_WORD = 1 << 5,   /* closed{cookie} through a router */
    DMK_SEND_DO_TELL_CLAIMED = 1 << 6,
    DMK_SEND_DO_TELL_FAILED = 1 << 7,
    DMK_SEND_DO_TELL_DONE = 1 << 8, /* source pages may be reused; the job is forgotten */
};

struct dmk_send_result {
    enum dmk_send_state next;
    uint32_t actions;
    bool listed; /* false: the cell is empty ("cannot happen"); state unchanged, no actions */
};

struct dmk_send_result dmk_send_step(enum dmk_send_state state, enum dmk_send_event event,
                                     uint32_t guards);

const char *dmk_send_state_name(enum dmk_send_state state);
