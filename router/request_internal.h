/* What the files of the request share: requests.c (all of them), request.c (its start), request_end.c (its end),
 * request_parts.c (several prompts), request_attempt.c (workers), request_pick.c (which), request_send.c
 * (messages), request_output.c (tokens to events), request_render.c (the job on the pool).
 *
 * A request with several prompts has one part for each: a dmk_request of its own with its own workers,
 * retries and choices. The first, the lead, owns what the client sees: body, reply and front. Parts that have
 * ended stay until all have; the failure of one is the failure of all. */
#pragma once

#include "common/base/list.h"
#include "common/chat/format.h"
#include "router/request.h"
#include "router/scratches.h"
#include "router/stop.h"
#include "router/timeline.h"

enum dmk_request_state {
    DMK_RENDERING,
    DMK_WAITING,
    DMK_RESERVING,
    DMK_PREFILLING,
    DMK_DECODING,
    DMK_OVER, /* a part that waits for the others */
};

/* A token whose log-probability was asked for, until the text that it makes goes out. */
struct dmk_lp_record {
    uint32_t id;
    float logprob;
    bool has_logprob;
    uint32_t n_top;
    size_t start; /* first byte in the choice's content; set when the content is known */
    struct {
        uint32_t id;
        float logprob;
    } top[DMK_ASK_MAX_TOP];
};

struct dmk_lp_list {
    struct dmk_lp_record *items;
    size_t n, cap;
};

struct dmk_choice {
    struct dmk_request *request;
    uint32_t index;
    struct dmk_parser *parser;
    struct dmk_stop stop; /* n = 0: no stop strings */
    uint32_t n_tokens;    /* up to the one that ended the turn */
    uint32_t n_received;  /* n_tokens, and those that the worker's step brought behind them */
    uint32_t n_reasoning;
    double sum_logprobs; /* of its tokens, where choices are ranked */
    uint64_t last_token_ns;
    bool stopped; /* the model ended its turn, or none was asked for; what follows is nothing */
    bool ended;   /* nothing of it goes out any more */
    bool cut; /* ended by the router: a stop string, or the first call where only one is wanted */
    bool echoed;
    enum dmk_finish cut_finish;
    struct dmk_lp_list pending; /* tokens that made no text yet */
    struct dmk_lp_list out;     /* tokens of content that was not sent yet */
    size_t n_content, n_sent;   /* bytes of content: seen, and sent */
};

struct dmk_request {
    struct dmk_requests *all;
    struct dmk_list node;     /* in all->live */
    struct dmk_list queued;   /* in all->queue */
    struct dmk_list dirty;    /* in all->dirty: to be flushed at the end of the batch */
    struct dmk_request *next; /* in its bucket of all->table */
    struct dmk_id128 id;
    char id_hex[33];
    char request_id[129];
    char traceparent[64];
    enum dmk_request_state state;
    bool abandoned; /* the client left while somebody else was at work with this */

    struct dmk_request *lead; /* itself, or the one whose part this is */
    struct dmk_list parts;    /* of a lead: the others; of another: its node there */
    uint32_t n_parts_left;    /* of a lead: parts that have not ended */
    uint32_t first_choice;    /* of this part in the reply */
    struct dmk_usage usage;   /* of a lead: what ended parts have used */

    const struct dmk_dialect *dialect;
    const struct dmk_format *format;
    const struct dmk_front *front;
    void *ud;
    struct dmk_bytes body;
    struct dmk_api_limits limits;
    struct dmk_ask ask;
    int render_rc;
    struct dmk_api_error render_error;
    struct dmk_buf local; /* the whole answer of a dialect that asks no worker */

    void *reply;
    bool begun;                 /* front->begin was called */
    uint64_t out_ns;            /* of the last frame */
    uint64_t flushed_ns;        /* of the last flush; 0 = none yet */
    struct dmk_choice *choices; /* [ask.n] */
    uint32_t n_ended;
    struct dmk_lp_list prompt_lps; /* echo with log-probabilities */

    uint32_t attempt; /* 0 = none yet; each Generate has a number of its own */
    uint32_t n_retries;
    enum dmk_fail_cause last_cause;
    uint64_t avoid[2]; /* by role: incarnation of a worker that failed this request */
    struct dmk_worker *d, *p;
    char d_name[64], p_name[64]; /* of the last attempt, for the log */
    uint64_t d_tokens, p_tokens; /* what was added to their accounts */
    uint64_t admitted_tokens;    /* what was added to all->tokens_in_flight */
    uint32_t max_tokens;         /* of this attempt */
    bool forced_local;
    uint32_t n_cached;
    uint64_t n_output;
    uint64_t queue_deadline_ns, step_deadline_ns, deadline_ns;
    struct dmk_timeline timeline;
};

struct dmk_requests {
    struct dmk_requests_conf conf;
    struct dmk_fleet *fleet;
    struct dmk_list live, queue, dirty;
    struct dmk_request **table; /* [n_buckets] by id */
    size_t n_buckets;           /* power of two */
    uint32_t n_open, n_waiting, n_running;
    uint64_t tokens_in_flight;
    uint32_t turn;
    bool draining, aborting;
    bool in_batch; /* a worker's message is being read: ends of requests wait */
    struct dmk_timer *tick;
    struct dmk_timer *late_flush; /* of dirty requests that were flushed a moment ago */
    bool late_flush_runs;
    int64_t date_unix_s;  /* fixed date, or -1: none, -2: today */
    double prefill_rate;  /* prompt tokens a second that get through, recent mean; 0 = unknown */
    uint64_t rate_tokens; /* got through since rate_ns */
    uint64_t rate_ns;
    struct dmk_scratches scratches; /* of the jobs on the pool */
    struct dmk_buf text;            /* scratch of one event */
    struct dmk_lp *lps;             /* scratch of one event: [cap_lps] */
    size_t cap_lps;
};

static inline uint64_t dmk_requests__now_ns(const struct dmk_requests *all)
{
    return dmk_loop_now_ns(all->conf.loop);
}

/* ---- request.c */
/* Gives a new or another request its place among all. */
void dmk_request__link(struct dmk_request *r);
/* Among those that wait, by arrival and priority. */
void dmk_request__queue(struct dmk_request *r);
void dmk_request__touch(struct dmk_request *r);
/* Seconds a client should wait: what waits, by the rate at which prompts get through. */
uint32_t dmk_requests__retry_after_s(const struct dmk_requests *all);

/* ---- request_end.c: each of these may free every part of r's request */
/* Ends the request with a failure. */
void dmk_request__fail(struct dmk_request *r, const struct dmk_api_error *error);
/* The same with a hint when to come again. */
void dmk_request__fail_busy(struct dmk_request *r, unsigned status, const char *code,
                            const char *text);
/* All choices of this part have ended. */
void dmk_request__complete(struct dmk_request *r);
/* The answer that no worker was asked for. */
void dmk_request__answer_local(struct dmk_request *r);
void dmk_request__end_abandoned(struct dmk_request *r);

/* ---- request_parts.c */
/* Makes the other parts of a lead that was rendered. False: it has failed. */
bool dmk_request__split(struct dmk_request *lead);
/* The part after r, or NULL; begin with the lead. */
struct dmk_request *dmk_request__next_part(const struct dmk_request *r);
/* Tells the dialect which choices are shown, where not all are. */
void dmk_request__rank(struct dmk_request *lead);

/* ---- request_attempt.c */
/* Tokens of prompt and answer that fit; 0: no decode worker is up. */
uint32_t dmk_requests__context(const struct dmk_requests *all);
/* Gives waiting requests to workers, in order, until one must wait. */
void dmk_requests__pump(struct dmk_requests *all);
void dmk_request__on_event(struct dmk_requests *all, struct dmk_worker *w,
                           const Damask__V1__WorkerEvent *e);
/* This attempt has failed: again, or fail. retry_after_ms counts with FULL. */
void dmk_request__fail_attempt(struct dmk_request *r, enum dmk_fail_cause cause, const char *text,
                               uint32_t retry_after_ms);
/* Tells both workers (when tell) and leaves their accounts. */
void dmk_request__leave_workers(struct dmk_request *r, bool tell);

/* ---- request_pick.c */
/* The best worker of a role that may take the request now, or NULL. d: the decode worker that takes a prefill worker's
 * pages; NULL when that is what is looked for. */
struct dmk_worker *dmk_request__pick(struct dmk_request *r, enum dmk_worker_role role,
                                     const struct dmk_worker *d);
/* Whether D may be told to compute the whole prompt while no prefill worker is to be had. */
bool dmk_request__may_force(const struct dmk_request *r, const struct dmk_worker *d);

/* ---- request_send.c */
int dmk_request__send_generate(struct dmk_request *r);
int dmk_request__send_prefill(struct dmk_request *r, const Damask__V1__Reserved *reserved);
/* w may be NULL or gone: then nothing is sent. */
void dmk_request__send_cancel(struct dmk_request *r, struct dmk_worker *w);

/* ---- request_output.c */
int dmk_request__output_init(struct dmk_request *r);
/* For a new attempt; nothing of an answer has come. */
void dmk_request__output_reset(struct dmk_request *r);
void dmk_request__output_fini(struct dmk_request *r);
/* false: the tokens do not follow those before them. */
bool dmk_request__tokens(struct dmk_request *r, const Damask__V1__Tokens *t);
/* They come in pieces, in order. false: there are more than prompt tokens. */
bool dmk_request__prompt_logprobs(struct dmk_request *r, const Damask__V1__PromptLogprobs *m);
/* True when all that an echo needs has come. */
bool dmk_request__has_prompt_logprobs(struct dmk_request *r);
/* The worker says that a choice is finished. false: tokens are missing. */
bool dmk_request__finished(struct dmk_request *r, const Damask__V1__Finished *f);

/* ---- request_render.c */
/* Pool thread: body to ids. Touches ask, render_rc and render_error only. */
void dmk_request__render(void *ud);
