/* Options that both kinds of worker have: a part of each program, whose own conf begins with struct
 * dmk_worker_conf. */
#pragma once

#include "common/conf/conf.h"

struct dmk_worker_conf {
    char *worker_id; /* "" = made from the host's name and the address */
    char *model;
    char *model_name; /* "" = last part of the model's path */
    char *revision;   /* of the rollout, for routers */
    char *backend;
    uint32_t weights; /* enum dmk_worker_weights */
    uint32_t experts; /* enum dmk_worker_experts */
    uint32_t dense;   /* enum dmk_worker_dense */
    bool verify_weights;
    char *listen;
    char *admin_host;
    uint32_t admin_port;
    bool admin_tls;
    struct dmk_conf_list admin_keys;
    char *admin_keys_file;
    char *tls_cert, *tls_key, *tls_router_ca, *tls_router_name; /* "" = none */
    uint32_t tp, dp;
    uint32_t threads;
    struct dmk_conf_memory kv_memory;  /* of both pools on a rank, or a share of its device */
    uint32_t full_pages, window_pages; /* of each group's pools, on each of its ranks */
    uint32_t max_context;
    bool reuse;
    uint32_t xfer_transport; /* enum dmk_worker_transport */
    char *xfer_bind;
    uint64_t transfer_budget_ms;
    uint64_t drain_limit_ms;
    uint64_t stuck_after_ms;
    uint64_t load_every_ms;
    uint64_t keepalive_ms, keepalive_timeout_ms;
    uint32_t log_level; /* enum dmk_log_level */
    bool log_json;
};

enum dmk_worker_weights { DMK_WORKER_WEIGHTS_CHECKPOINT, DMK_WORKER_WEIGHTS_RANDOM };

enum dmk_worker_experts { DMK_WORKER_EXPERTS_CHECKPOINT, DMK_WORKER_EXPERTS_FP8 };
enum dmk_worker_dense { DMK_WORKER_DENSE_CHECKPOINT, DMK_WORKER_DENSE_FP8 };

enum dmk_worker_transport {
    DMK_WORKER_TCP,
    DMK_WORKER_SHM,
    DMK_WORKER_CUDA,
    DMK_WORKER_NONE, /* no transfer: everything is computed where it is needed */
};

extern const struct dmk_conf_part dmk_worker_part;

/* Refuses what no worker of this role can do, with a sentence: layouts. */
int dmk_worker_options_check(const struct dmk_worker_conf *conf, bool prefill,
                             struct dmk_error *reterr);

/* Where kv_memory is a size: makes the numbers of pages of it (dmk_kv_fit), by the model that the options name. What a
 * share comes to is seen when the weights are loaded. */
int dmk_worker_options_size_pools(struct dmk_worker_conf *conf, uint32_t n_sequences,
                                  struct dmk_error *reterr);
