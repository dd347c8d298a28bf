/* What the files of the sender share, and nobody else: sender.c (doors), sender_drive.c drives the table (messages,
 * broken endpoints, time), sender_io.c owns endpoints, keys and the puts in flight. */
#pragma once

#include "common/xfer/message.h"
#include "common/xfer/plan.h"
#include "common/xfer/send_state.h"
#include "common/xfer/sender.h"

struct job;

/* An endpoint to a D, shared by the jobs for that D. */
struct endpoint {
    struct dmk_sender *tx;
    struct dmk_xfer_ep *ep; /* NULL: slot is free */
    bool closing;
    uint64_t needed_ns; /* a job last needed it */
    uint64_t d_incarnation;
    uint8_t address[DMK_XFER_ADDRESS_MAX];
    size_t address_len;
    bool keyed; /* keys are unpacked */
    uint32_t n_ranks;
    struct dmk_ticket_rank ranks[DMK_TICKET_MAX_RANKS]; /* what the keys were unpacked from */
    struct dmk_xfer_key *full_key[DMK_TICKET_MAX_RANKS];
    struct dmk_xfer_key *window_key[DMK_TICKET_MAX_RANKS];
};

struct put {
    struct job *job;
    uint64_t bytes;
    struct put *next_free;
};

/* How far a layer is: blocks [next, ready) may be put. */
struct layer {
    uint32_t ready;                  /* full: first block that is not final; window: all or none */
    struct dmk_plan_cursor cursor;   /* inside the piece that is being put */
    uint32_t piece_first, piece_end; /* equal: no piece is being put */
};

struct job {
    enum dmk_send_state state; /* NONE: slot is free */
    struct dmk_sender *tx;
    uint64_t id;
    struct dmk_ticket *ticket;
    struct dmk_plan plan;
    struct endpoint *endpoint; /* NULL: its endpoint is closed */
    bool finished, flushing;
    bool retired;  /* FAILING: own puts were flushed, or their endpoint is closed */
    bool accepted; /* D's answer */
    enum dmk_message_reply refusal;
    uint32_t n_in_flight;
    uint64_t claimed_ns, due_ns, terminal_ns; /* terminal_ns: its first sending */
    uint64_t bytes;                           /* put and complete */
    uint64_t moving_ns, moved_ns; /* puts or flush under way: since (0 = none are), and in sum */
    uint32_t full_at, window_at;  /* layers before these have nothing to put */
    struct layer full[DMK_TICKET_MAX_LAYERS], window[DMK_TICKET_MAX_LAYERS];
    uint32_t src_pages[DMK_TICKET_MAX_PAGES]; /* by block */
    uint32_t dst_pages[DMK_TICKET_MAX_PAGES];
    uint32_t src_window[DMK_WINDOW_RING_MAX],
        dst_window[DMK_WINDOW_RING_MAX]; /* by block - first */
};

struct dmk_sender {
    struct dmk_sender_conf conf;
    char numerics[DMK_NUMERICS_MAX];
    struct dmk_kv_layout layouts[DMK_TICKET_MAX_RANKS];
    uint64_t worker, now_ns;
    bool stopping, pumping;
    uint32_t n_in_flight, next_job; /* next_job: whose turn it is to put */
    struct dmk_sender_stats stats;
    struct job *jobs;           /* [conf.max_jobs] */
    struct endpoint *endpoints; /* [conf.max_endpoints] */
    struct put *puts;           /* [conf.max_puts_in_flight] */
    struct put *free_puts;
};

/* sender_drive.c */

/* NULL when no job has this ticket. */
struct job *dmk_sender_find_cookie(struct dmk_sender *tx, struct dmk_id128 cookie);
int dmk_sender_send_claim(struct dmk_sender *tx, struct job *job);
/* The event happens to the job: its state changes and what the table lists is done. The slot may be another's
 * when this returns. */
void dmk_sender_feed(struct dmk_sender *tx, struct job *job, enum dmk_send_event event,
                     uint32_t guards);

/* sender_io.c */

/* A living endpoint to the ticket's D with its keys unpacked, opened if need be. */
int dmk_sender_endpoint_take(struct dmk_sender *tx, const struct dmk_ticket *ticket,
                             struct endpoint **ret, struct dmk_error *reterr);
/* EP_GONE to its jobs now, RETIRED to those that fail once it is closed. */
void dmk_sender_endpoint_lose(struct dmk_sender *tx, struct endpoint *endpoint);
/* Whether a message may go out on it. */
static inline bool dmk_sender_endpoint_works(const struct endpoint *e)
{
    return e && e->ep && !e->closing;
}
/* Posts what may be posted, over all jobs; then flushes jobs that have nothing left. */
void dmk_sender_pump(struct dmk_sender *tx);
/* A job that fails: RETIRED once none of its puts can land any more. */
void dmk_sender_retire(struct dmk_sender *tx, struct job *job);
