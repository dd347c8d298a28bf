/* What the files of the explorer's world share: explore_sides.c drives the two tables, explore_moves.c lists
 * what can happen, explore_state.c knows states as values. */
#pragma once

#include "common/xfer/receive_state.h"
#include "common/xfer/send_state.h"
#include "tests/sim/explore.h"

/* Messages of a ticket. On the wire they are sets: any order, that is. */
enum { W_CLAIM = 1, W_OK = 2, W_FAIL = 4, W_YES = 8, W_NO = 16, W_ACCEPTED = 32, W_REJECTED = 64 };
enum { W_TO_D = W_CLAIM | W_OK | W_FAIL, W_TO_P = W_YES | W_NO | W_ACCEPTED | W_REJECTED };
/* On the streams the lower bit of a worker's two goes first. */
enum { TO_D_RESERVE = 1, TO_D_CANCEL = 2, TO_P_PREFILL = 4, TO_P_CANCEL = 8 };
enum { TO_D = TO_D_RESERVE | TO_D_CANCEL, TO_P = TO_P_PREFILL | TO_P_CANCEL };
enum { FROM_RESERVED = 1, FROM_TOKEN = 2, FROM_END = 4, FROM_FAILED = 8, FROM_P_FAILED = 16 };
enum { FROM_D = FROM_RESERVED | FROM_TOKEN | FROM_END | FROM_FAILED };

enum {
    F_LIVE = 1,     /* the request lives at D */
    F_DECODING = 2, /* its first token was sent */
    F_MUTE = 4,     /* P says nothing to the router any more */
    F_DROPPED = 8,  /* a put was thrown away with its connection: no flush can succeed */
    F_ASK = 16,     /* `quiet?` is under way to P */
    F_WORD = 32,    /* `closed` is under way to D */
};

enum { END_NONE, END_OPEN, END_CLOSING, END_GONE };
enum { STREAM_BROKEN = 1, STREAM_ROUTER_KNOWS = 2, STREAM_WORKER_KNOWS = 4 };
enum { R_NEW, R_RESERVING, R_PREFILLING, R_DECODING, R_DONE, R_FAILED, R_LEFT, R_LOST };

static inline int ex_n_tickets(const struct ex_conf *conf)
{
    return conf->n_requests * EX_ATTEMPTS;
}

static inline int ex_router_of(const struct ex_conf *conf, int ticket)
{
    return ticket / EX_ATTEMPTS % conf->n_routers;
}

static inline uint8_t *ex_stream_p(struct ex_state *s, int router, int p)
{
    return &s->streams[router][p];
}

static inline uint8_t *ex_stream_d(struct ex_state *s, int router, int d)
{
    return &s->streams[router][EX_MAX_WORKERS + d];
}

static inline struct ex_conn *ex_conn(struct ex_state *s, int p, int d, int slot)
{
    return &s->pairs[p][d].conn[slot];
}

static inline bool ex_works(const struct ex_worker *worker)
{
    return !worker->down && !worker->hung;
}

static inline bool ex_is_active(const struct ex_request *q)
{
    return q->state >= R_RESERVING && q->state <= R_DECODING;
}

void ex_bad(struct ex_world *w, const char *what);
/* Brings w->s into its normal form, checks it, and hands it to on_next. */
void ex_emit(struct ex_world *w, enum ex_edge edge, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void ex_normalize(const struct ex_conf *conf, struct ex_state *s);

/* explore_sides.c; all work on w->s. slot: where a message came in, or -1. */
void ex_feed_d(struct ex_world *w, int t, enum dmk_receive_event event, uint32_t guards, int slot);
void ex_feed_p(struct ex_world *w, int t, enum dmk_send_event event, uint32_t guards);
void ex_d_close(struct ex_world *w, int p, int d, int slot);
void ex_d_closed(struct ex_world *w, int p, int d, int slot);
void ex_p_lose(struct ex_world *w, int p, int d, int slot);
void ex_p_closed(struct ex_world *w, int p, int d, int slot);
/* The slot of a connection that P may use, or -1. */
int ex_p_connect(struct ex_world *w, int p, int d);
void ex_send_to_d(struct ex_world *w, int t, int slot, uint8_t message);
void ex_d_message(struct ex_world *w, int t, int slot, uint8_t message);
void ex_p_message(struct ex_world *w, int t, int slot, uint8_t message);
void ex_d_reserve(struct ex_world *w, int t, int page);
void ex_d_cancel(struct ex_world *w, int t);
void ex_d_token(struct ex_world *w, int t);
void ex_d_end(struct ex_world *w, int t);
bool ex_process_gone(const struct ex_state *s, int p, int incarnation);
void ex_land(struct ex_world *w, int t);
bool ex_has_path(const struct ex_world *w, int t, bool to_p, bool to_d);

/* Moves: each starts from the same state. */
struct ex_moves {
    struct ex_world *w;
    const struct ex_state *from;
};

/* w->s is the state before the move again. */
static inline struct ex_state *ex_begin(const struct ex_moves *m)
{
    m->w->s = *m->from;
    m->w->asked = false;
    return &m->w->s;
}

static inline struct ex_ticket *ex_begin_ticket(const struct ex_moves *m, int t)
{
    return &ex_begin(m)->tickets[t];
}

/* explore_router.c */
void ex_move_request(const struct ex_moves *m, int q);
/* mask: of one worker's messages; the lowest bit is the oldest. */
void ex_move_from_worker(const struct ex_moves *m, int t, uint8_t mask);
void ex_move_to_d(const struct ex_moves *m, int t);
void ex_move_to_p(const struct ex_moves *m, int t);
void ex_move_streams(const struct ex_moves *m, int r, int i);
/* explore_others.c */
enum { EX_N_CHOICES = 7 };
/* A ticket is another's from now on. */
void ex_others_take(struct ex_state *s, int t);
/* Asks what others did; 0, and n - 1 more answers when the world has others. */
unsigned ex_ask(struct ex_world *w, unsigned n);
/* A connection that P may use: one that the request followed uses already, or whatever others left. */
int ex_others_connect(struct ex_world *w, int p, int d);
void ex_others_forget_conns(const struct ex_conf *conf, struct ex_state *s, int p, int d);
void ex_move_others_conn(const struct ex_moves *m, int p, int d, int slot);
void ex_move_others_stream(const struct ex_moves *m, int r, int i);
/* explore_faults.c */
void ex_move_worker(const struct ex_moves *m, bool is_d, int x);
void ex_move_pair(const struct ex_moves *m, int p, int d);
void ex_move_router(const struct ex_moves *m, int r);
