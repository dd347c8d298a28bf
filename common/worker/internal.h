/* What the files of this folder share: worker.c (boot, turns, drain, end), engine_load.c, routers.c (streams), blocks.c
 * (prefixes told to routers), metrics.c, admin.c (HTTP). */
#pragma once

#include "common/conf/keys.h"
#include "common/http/http.h"
#include "common/worker/engine_thread.h"
#include "common/worker/worker.h"
#include "common/worker/xferloop.h"

#define DMK_WORKER__BLOCKS_PER_EVENT 512

enum dmk_worker__phase {
    DMK_WORKER__LOADING,
    DMK_WORKER__READY,
    DMK_WORKER__DRAINING,
    DMK_WORKER__ENDING,
};

/* A router's stream. */
struct dmk_worker__router {
    struct dmk_worker *worker;
    struct dmk_rpc_stream *stream; /* NULL: the slot is free */
    bool greeted;                  /* hellos have been exchanged */
    uint64_t hello_limit_ns;
    char id[DMK_MSG_MAX_ID_TEXT + 1];
    uint64_t incarnation;
    struct dmk_buf batch; /* events of this turn; empty: none */
    bool listing;         /* prefixes are still to be listed */
    bool list_begun;
    uint32_t list_at[2];
};

struct dmk_worker__metrics;

struct dmk_worker {
    const struct dmk_worker_role *role;
    const struct dmk_worker_conf *conf;
    char id[DMK_MSG_MAX_ID_TEXT + 1];
    char model_name[DMK_MSG_MAX_ID_TEXT + 1];
    char labels[2 * DMK_MSG_MAX_ID_TEXT + 32];
    uint64_t incarnation;
    enum dmk_worker__phase phase;
    int exit_status;
    uint64_t drain_deadline_ns, end_deadline_ns; /* 0: none yet */

    struct dmk_loop *loop;
    struct dmk_signal *signals[2], *hup;
    struct dmk_timer *tick, *limit;
    struct dmk_defer turn;
    struct dmk_post poke;
    atomic_bool poked;

    struct dmk_engine_thread *thread;
    struct dmk_engine *engine; /* when the shell opened it */
    struct dmk_engine_port port;
    int open_status;
    struct dmk_error open_error;
    bool engine_open, role_open;
    atomic_uint
        load_percent; /* while loading; written by the engine's thread, whose are the next two */
    uint64_t load_logged_ns, load_logged_bytes;
    dmk_loop_fn step_run, step_done;
    void *step_ud;

    const struct dmk_xfer_ops *ops;
    struct dmk_xfer *xfer;
    struct dmk_xfer_info xfer_info; /* zero without a transport */
    struct dmk_xferloop *xferloop;
    double moved_bytes,
        moved_us; /* of the last hand-overs from here: each new one fades the older by an eighth */

    struct dmk_rpc *rpc;
    struct dmk_rpc_server *server;
    struct dmk_worker__router routers[DMK_MAX_ROUTERS];
    struct dmk_msg_limits limits;
    uint64_t load_sent_ns;
    Damask__V1__Load load_sent;

    /* Scratch of blocks.c. */
    struct dmk_kv_prefix_event blocks[DMK_WORKER__BLOCKS_PER_EVENT];
    Damask__V1__BlockHash hashes[DMK_WORKER__BLOCKS_PER_EVENT];
    Damask__V1__BlockHash *added[DMK_WORKER__BLOCKS_PER_EVENT];
    Damask__V1__BlockHash *removed[DMK_WORKER__BLOCKS_PER_EVENT];

    struct dmk_metrics *metrics;
    struct dmk_worker__metrics *series;
    struct dmk_http_server *admin;
    struct dmk_keys *admin_keys;
};

/* worker.c */
/* The turn's end runs: role.on_turn, blocks, flush. */
void dmk_worker__kick(struct dmk_worker *w);
bool dmk_worker__stuck(const struct dmk_worker *w);
const char *dmk_worker__role_name(const struct dmk_worker *w);

/* engine_load.c: on the engine's thread */
/* Opens it, and sees that it computes: only then is the worker ready. Fills port, open_status and open_error. */
void dmk_worker__engine_open(void *worker);
void dmk_worker__engine_close(void *worker);

/* routers.c */
int dmk_worker__routers_listen(struct dmk_worker *w, struct dmk_error *reterr);
void dmk_worker__routers_flush(struct dmk_worker *w);
void dmk_worker__routers_tick(struct dmk_worker *w, uint64_t now_ns);
void dmk_worker__routers_finish(struct dmk_worker *w); /* no more will come: ends the streams */
uint32_t dmk_worker__routers_count(const struct dmk_worker *w);

/* blocks.c */
void dmk_worker__blocks_begin(struct dmk_worker__router *r);
void dmk_worker__blocks_turn(struct dmk_worker *w);

/* metrics.c */
void dmk_worker__metrics_new(struct dmk_worker *w);
/* Once the transport is open. */
void dmk_worker__metrics_add_transfer(struct dmk_worker *w);
void dmk_worker__metrics_event(struct dmk_worker *w, const Damask__V1__WorkerEvent *event);
/* Rate of the last hand-overs from here, 0 while there was none. */
double dmk_worker__transfer_gb_s(const struct dmk_worker *w);
void dmk_worker__metrics_free(struct dmk_worker *w);

/* admin.c */
int dmk_worker__admin_listen(struct dmk_worker *w, struct dmk_error *reterr);
