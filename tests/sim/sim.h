/* Prefill and decode cores, several of each, and two routers in one process, under a seeded schedule of faults.
 *
 * The cores are the real ones (prefill/core.h, decode/core.h) on the loopback transport, with the engine of
 * hashes. Choosing a worker is router/route.c's; the rest of a router is a model here, since the real one is
 * bound to sockets: attempts with one retry, a budget for each phase, cancels to both workers before anything
 * else, events dropped unless (attempt, worker) are those of now, FULL queued again, relays of `quiet?` and
 * `closed` without state. Time is virtual, a turn lasts a millisecond but for leaps; everything that happens is
 * a function of the seed. */
#pragma once

#include "common/xfer/loopback.h"
#include "decode/core.h"
#include "prefill/core.h"
#include "tests/support/shadow_engine.h"

enum { SIM_N_P = 2, SIM_N_D = 2, SIM_N_WORKERS = SIM_N_P + SIM_N_D, SIM_N_ROUTERS = 2 };
enum { SIM_N_REQUESTS = 8, SIM_MAX_PROMPT = 330, SIM_N_NEW = 5, SIM_QUEUE = 512 };
enum { SIM_N_PROMPTS = 12, SIM_N_KINDS = 2 };

enum sim_message_kind {
    SIM_GENERATE,
    SIM_PREFILL,
    SIM_CANCEL,
    SIM_ASK,  /* both ways: `quiet?` */
    SIM_WORD, /* both ways: `closed` */
    SIM_RESERVED,
    SIM_TOKEN,
    SIM_FINISHED,
    SIM_FAILED,
    SIM_P_DONE,
};

struct sim_message {
    enum sim_message_kind kind;
    uint64_t due; /* turn */
    uint32_t request, attempt;
    struct dmk_id128 cookie;
    uint64_t incarnation; /* ask: of P; word: of D */
    uint64_t from;        /* ask: the incarnation of D that asks */
    bool needs_prefill;
    uint8_t *ticket; /* owned */
    size_t ticket_len;
    uint32_t index, id; /* token */
    float logprob;
    enum dmk_failure code;
    char text[96];
};

struct sim_queue {
    struct sim_message items[SIM_QUEUE];
    uint32_t head, n;
};

/* Between a router and a worker. */
struct sim_stream {
    bool broken;
    uint64_t router_learns, worker_learns; /* turns; 0 = has learnt */
    struct sim_queue to_worker, to_router;
};

struct sim_worker {
    struct sim *sim;
    uint32_t index; /* P's first */
    struct shadow_engine *engine;
    struct dmk_engine_port port;
    struct dmk_xfer *node;
    struct dmk_prefill_core *prefill;
    struct dmk_decode_core *decode;
    bool dead;
    uint64_t incarnation, hung_until, back_at; /* turns; back_at 0 = stays dead */
    struct dmk_prefill_step *p_step;
    struct dmk_decode_step *d_step;
    uint64_t step_until;
};

enum sim_state {
    SIM_NEW,
    SIM_WAITING,
    SIM_RESERVING,
    SIM_PREFILLING,
    SIM_DECODING,
    SIM_OK,
    SIM_ERROR,
    SIM_LEFT
};

struct sim_request {
    enum sim_state state;
    uint32_t prompt, kind, router; /* of the tables */
    uint64_t arrives, leaves;      /* turns; leaves 0 = stays */
    uint64_t deadline, not_before, queue_deadline;
    uint32_t attempt, n_retries;
    int d, p;          /* workers, -1 = none */
    uint64_t avoid[2]; /* incarnations: P, D */
    uint32_t n;
    uint32_t ids[SIM_N_NEW];
    float logprobs[SIM_N_NEW];
    char text[96];
};

struct sim_prompt {
    uint32_t n, ids[SIM_MAX_PROMPT];
    struct {
        uint32_t ids[SIM_N_NEW];
        float logprobs[SIM_N_NEW];
    } want[SIM_N_KINDS];
};

struct sim {
    uint64_t seed, n_chances, turn, now_ns, n_starts, n_deaths;
    bool verbose, calm; /* calm: no further faults */
    struct dmk_loopback *fabric;
    struct sim_worker workers[SIM_N_WORKERS];
    struct sim_stream streams[SIM_N_ROUTERS][SIM_N_WORKERS];
    struct sim_request requests[SIM_N_REQUESTS];
    const struct sim_prompt *prompts;
    uint32_t stream_delay; /* turns at most */
    uint32_t n_faults;
    char broken[160]; /* what went wrong; empty = nothing */
};

extern const struct dmk_sample_params sim_kinds[SIM_N_KINDS];

uint64_t sim_chance(struct sim *sim, uint64_t n); /* uniform in [0, n) */
void sim_say(struct sim *sim, const char *format, ...) __attribute__((format(printf, 2, 3)));
void sim_break(struct sim *sim, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* sim_world.c: workers, streams, time. */
void sim_open(struct sim *sim, struct dmk_loopback_conf fabric);
void sim_close(struct sim *sim);
bool sim_is_d(uint32_t worker);
/* Takes the ticket of the message. Dropped when the stream is broken. */
void sim_send(struct sim *sim, uint32_t router, uint32_t worker, const struct sim_message *m);
void sim_kill(struct sim *sim, uint32_t worker, uint64_t back_after);
void sim_cut_stream(struct sim *sim, uint32_t router, uint32_t worker);
/* A turn of the workers and of the streams; the router's part is sim_route_turn. */
void sim_turn(struct sim *sim);
/* Nothing runs, waits, drains or is leased in any living worker. */
bool sim_is_settled(struct sim *sim);
/* Says what keeps it from being so. */
void sim_tell_rest(struct sim *sim);
void sim_check_workers(struct sim *sim);

/* sim_router.c */
void sim_route_message(struct sim *sim, uint32_t router, uint32_t worker, struct sim_message *m);
void sim_route_lost(struct sim *sim, uint32_t router, uint32_t worker);
void sim_route_turn(struct sim *sim);
void sim_check_answer(struct sim *sim, const struct sim_request *r);
