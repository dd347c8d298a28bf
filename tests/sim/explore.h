/* A small world around the two tables of the page hand-over (common/xfer/receive_state.h, send_state.h), whose
 * states can be visited one and all.
 *
 * The tables are the code's own: every change of a ticket or of a job is what dmk_receive_step and
 * dmk_send_step answer. What stands around them is modelled here: routers with one retry, workers that die,
 * hang and come back, connections and streams that break, messages that are late, doubled or lost, puts
 * that land late, timers that may fire at any moment. Events of one world happen one at a time, in every order.
 *
 * What is promised, by the names used in reports:
 *   S1 a write lands in a page that is leased to its ticket, or nowhere
 *   S2 no token comes from an incomplete transfer
 *   S3 a page has one owner or none; nothing is freed twice
 *   S4 a client gets tokens of one attempt
 *   S5 a message of an incarnation that does not hold the ticket changes nothing
 *   L1 every request can still end, without further faults and without a hung worker's help
 *   L2 then every page can come back, and L3 every table empty itself, once hung workers move again
 *   L4 until then the jobs of a P that runs can still end, whichever D hangs
 *
 * `others`: one attempt of one request is followed, beside its other attempt and any number of other requests
 * on other routers that are not followed: they may do at any moment whatever an attempt could do to what is
 * shared. See explore_others.c.
 * One thread; no clock. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    EX_MAX_REQUESTS = 2,
    EX_MAX_ROUTERS = 2,
    EX_MAX_WORKERS = 2,
    EX_SLOTS = 2,
    EX_MAX_PAGES = 2
};
enum { EX_ATTEMPTS = 2, EX_MAX_TICKETS = EX_MAX_REQUESTS * EX_ATTEMPTS };

/* How often each fault may strike in one story. */
enum ex_fault {
    EX_CRASH_P,
    EX_CRASH_D,
    EX_CRASH_ROUTER,
    EX_CUT,        /* a connection between P and D */
    EX_CUT_STREAM, /* between a router and a worker */
    EX_LEAVE,      /* a client leaves */
    EX_HANG_P,
    EX_HANG_D,
    EX_PARTITION, /* P and D hear nothing of each other, for good */
    EX_LOSE,      /* a message between P and D */
    EX_DOUBLE,    /* likewise */
    EX_N_FAULTS,
};

/* Tables made wrong on purpose, to see that the explorer finds it. */
enum ex_mutation {
    EX_MUTATE_NOTHING,
    EX_MUTATE_DEADLINE_FREES,
    EX_MUTATE_BREAK_FREES,    /* direct: the end of the endpoint frees */
    EX_MUTATE_WORD_FREES,     /* emulated: `closed` frees without closing the endpoint */
    EX_MUTATE_NO_EXPIRY,      /* unclaimed tickets stay */
    EX_MUTATE_DEAF_TO_QUIET,  /* P does not answer `quiet?` */
    EX_MUTATE_ANY_ENDPOINT,   /* a failed terminal counts as if it came on the claim's endpoint */
    EX_MUTATE_DEADLINE_READY, /* what is there at the deadline is taken for all */
    EX_MUTATE_NEEDS_BREAK,    /* P gives a terminal up only once the connection is broken */
    EX_N_MUTATIONS,
};

struct ex_conf {
    uint8_t n_requests, n_routers, n_p, n_d, n_pages,
        n_puts;  /* pages: of each D; puts: of a ticket */
    bool direct; /* lane */
    bool bound;  /* D refuses claims of a P of which a ticket drains */
    /* Routers wait for ever once reserved: the workers' timers must do. Not with a hung D. */
    bool patient;
    bool once; /* routers do not try again */
    bool others;
    uint8_t budget[EX_N_FAULTS];
    enum ex_mutation mutation;
};

struct ex_ticket {
    uint8_t d, p, d_inc, p_inc; /* p_inc: of the job */
    uint8_t rx, tx;             /* states of the two tables */
    uint8_t page;               /* that it names, on d */
    uint8_t claimant;           /* incarnation of P, 0 = none */
    uint8_t d_slot, p_slot;     /* endpoint it is bound to + 1, 0 = none */
    uint8_t put_slot;           /* where its puts went + 1 */
    uint8_t landed, posted, in_flight;
    uint8_t flags;
    uint8_t to_workers, from_workers; /* on the router's streams */
    uint8_t wire[EX_SLOTS];           /* between P and D */
};

struct ex_request {
    uint8_t state, attempt, heard; /* heard: attempts of which tokens were taken */
};

struct ex_conn {
    uint8_t p_end, d_end, broken;
};

struct ex_pair {
    struct ex_conn conn[EX_SLOTS];
    uint8_t known; /* newest incarnation of P that D has heard of */
    uint8_t partitioned;
};

struct ex_worker {
    uint8_t incarnation, down, hung;
    uint8_t dying; /* P: bits of incarnations whose process has not quite gone */
};

struct ex_state {
    struct ex_request requests[EX_MAX_REQUESTS];
    struct ex_ticket tickets[EX_MAX_TICKETS];
    struct ex_worker p[EX_MAX_WORKERS], d[EX_MAX_WORKERS];
    uint8_t owner[EX_MAX_WORKERS][EX_MAX_PAGES]; /* ticket + 1, 0 = free */
    struct ex_pair pairs[EX_MAX_WORKERS][EX_MAX_WORKERS];
    uint8_t streams[EX_MAX_ROUTERS][2 * EX_MAX_WORKERS]; /* P's first, D's from EX_MAX_WORKERS on */
    uint8_t budget[EX_N_FAULTS];
};

enum ex_edge {
    EX_PROGRESS, /* happens by itself, sooner or later */
    EX_RESUME,   /* a hung worker moves again */
    EX_MAYBE,    /* a fault, or what need never happen */
};

struct ex_world {
    const struct ex_conf *conf;
    /* Called with each successor; text is a sentence when `telling`, else empty. */
    void (*on_next)(void *ud, const struct ex_state *next, enum ex_edge edge, const char *text);
    void *ud;
    bool telling;
    const char *violation; /* set by the first broken promise */
    /* scratch of the transition under way */
    struct ex_state s;
    unsigned choice; /* what others made of the matter that the transition asks about */
    bool asked;
    unsigned n_choices; /* that some transition of this state has */
};

void ex_init(const struct ex_conf *conf, struct ex_state *ret);
/* All that can happen next. Stops early when a promise is broken: see violation. */
void ex_successors(struct ex_world *w, const struct ex_state *state);
/* With `others`: what is left of a state when only ticket t of it is followed. */
void ex_project(const struct ex_conf *conf, const struct ex_state *state, int t,
                struct ex_state *ret);
bool ex_requests_ended(const struct ex_conf *conf, const struct ex_state *state);
bool ex_jobs_ended(const struct ex_conf *conf, const struct ex_state *state);
bool ex_all_quiet(const struct ex_conf *conf, const struct ex_state *state);
/* The same state under the least of all renamings of equal workers and requests. */
void ex_canonical(const struct ex_conf *conf, const struct ex_state *state, struct ex_state *ret);
/* The bytes of a state that matter for conf. */
size_t ex_pack(const struct ex_conf *conf, const struct ex_state *state, uint8_t *ret);
void ex_unpack(const struct ex_conf *conf, const uint8_t *bytes, struct ex_state *ret);
#define EX_MAX_PACKED sizeof(struct ex_state)
/* One line about a state. */
void ex_print(const struct ex_conf *conf, const struct ex_state *state);
