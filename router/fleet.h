/* The workers of this router: who is there, what they hold, what they say.
 *
 * Addresses come as lists; a host name is looked up again and again and stands for all its
 * addresses. Each address has one Connect stream, opened again with a growing pause when it ends. A
 * worker counts as up from its hello on, if that fits (protocol version, role, the model of the
 * workers that are up). The end of a stream is the end of that worker for every request on it.
 * `quiet?` and `closed` words between workers are passed on by incarnation, without any state of
 * requests. Owner: the loop. */
#pragma once

#include "common/base/hash.h"
#include "common/conf/conf.h"
#include "common/rpc/rpc.h"
#include "proto/damask_worker.pb-c.h"
#include "router/index.h"
#include "router/stats.h"

#define DMK_FLEET_MAX_WORKERS DMK_INDEX_MAX_WORKERS

struct dmk_fleet;

enum dmk_worker_role { DMK_WORKER_PREFILL, DMK_WORKER_DECODE };

/* Read by the router; the fields below the line are its own account and only it writes them. */
struct dmk_worker {
    struct dmk_fleet *fleet;
    uint32_t slot; /* bit in the index */
    enum dmk_worker_role role;
    char address[280]; /* what is dialled */

    bool up;       /* hello came and was accepted */
    bool draining; /* takes no new work */
    bool hangs;    /* silent for too long, or its engine is stuck */
    uint64_t incarnation;
    char id[64]; /* as it calls itself; the address until its hello */
    char model_name[257];
    char numerics[64];        /* of what it computes */
    char prompt_numerics[64]; /* of the pages of prompts that it has or takes; of P as numerics */
    struct dmk_id128 model_id;
    uint32_t page_tokens, max_context, max_sequences, local_prefill_threshold;
    uint32_t grammar_version;  /* of constraints that it can walk; 0 = none */
    uint32_t load_at_least_ms; /* it reports its load at least this often; 0 = no promise */
    bool has_load;
    struct {
        uint32_t n_running, n_waiting;
        uint64_t tokens_waiting;
        uint32_t full_pages_free, full_pages_total, window_pages_free, window_pages_total;
        uint32_t full_pages_most_free; /* in one group: what a request can have */
        uint32_t pages_draining;
        double step_ms;
        bool stuck;
    } load;

    /* ---- the router's account */
    uint32_t n_requests;
    uint64_t n_tokens;      /* of work given and not finished */
    uint64_t full_until_ns; /* it said that it has no room */

    /* ---- the fleet's own */
    char host[256]; /* as the list names it: what its certificate must name */
    bool named;     /* came from a host name: may vanish */
    bool removed;   /* vanished; freed when its stream ends */
    struct dmk_rpc_channel *channel;
    struct dmk_rpc_stream *stream;
    uint64_t heard_ns;       /* its last message */
    struct dmk_timer *timer; /* reconnect, or the wait for hello */
    uint32_t pause_ms;
    const char *why; /* last failure, for the log: said once */
    bool told;       /* this dial's failure has been noted */
    bool refused;    /* its hello did not fit: come back later */
};

struct dmk_fleet_events {
    void (*on_event)(void *ud, struct dmk_worker *worker, const Damask__V1__WorkerEvent *event);
    /* All events of one message have been told. */
    void (*on_batch_end)(void *ud);
    /* Its stream ended; it is not up any more when this is called. */
    void (*on_down)(void *ud, struct dmk_worker *worker, const char *why);
    /* A worker came up, has room again or drains: waiting requests may look again. */
    void (*on_change)(void *ud);
    void *ud;
};

struct dmk_fleet_conf {
    struct dmk_loop *loop;
    struct dmk_rpc *rpc;
    const struct dmk_conf_list *prefill, *decode; /* host:port */
    const char *router_id;
    uint64_t incarnation; /* of this router */
    size_t index_blocks;
    uint64_t resolve_ms;
    uint64_t hello_timeout_ms;
    uint64_t silence_ms; /* of a worker, before it counts as hanging */
    /* The bytes of all tokens, for decode workers that have not got them; they stay. Empty: none are sent. */
    struct dmk_bytes vocabulary;
    const struct dmk_rpc_tls
        *tls; /* for all workers, or NULL; copied, its texts are not. Without a name in
                                    * it a worker must have that of its entry in the lists */
    struct dmk_stats *stats;
    struct dmk_fleet_events events;
};

int dmk_fleet_new(const struct dmk_fleet_conf *conf, struct dmk_fleet **ret,
                  struct dmk_error *reterr);
/* No callback comes after it has begun. */
void dmk_fleet_free(struct dmk_fleet **fleet);

/* The workers in no order; NULL where a slot is free. */
struct dmk_worker *const *dmk_fleet_workers(const struct dmk_fleet *fleet);
struct dmk_index *dmk_fleet_index(struct dmk_fleet *fleet);
/* Workers of the role that are up and do not drain. */
uint32_t dmk_fleet_n_usable(const struct dmk_fleet *fleet, enum dmk_worker_role role);
/* Whether pages of prompts that P computes are what D takes. */
bool dmk_worker_fits(const struct dmk_worker *p, const struct dmk_worker *d);
/* D takes pages of other numerics than its own: it computes no prompts but those that it scores. */
bool dmk_worker_is_mixed(const struct dmk_worker *d);
/* Whether a prefill worker that fits D is up and does not drain. */
bool dmk_fleet_has_prefill_for(const struct dmk_fleet *fleet, const struct dmk_worker *d);
/* Whether some decode worker takes new work and gets its prompts: from a prefill worker that fits or, where local,
 * from itself. */
bool dmk_fleet_gets_prompts(const struct dmk_fleet *fleet, bool local);
/* Smallest context of the decode workers that are up; 0 = none is. */
uint32_t dmk_fleet_max_context(const struct dmk_fleet *fleet);
/* Sequences that every decode worker can hold at a time; 0 while none is up. */
uint32_t dmk_fleet_max_sequences(const struct dmk_fleet *fleet);

/* Fills in the incarnation and sends. -DMK_EPEER when the stream is gone (on_down comes or has
 * come). */
int dmk_worker_send(struct dmk_worker *worker, Damask__V1__RouterMessage *message);
