/* The table of options.h. */
#include "common/worker/options.h"
#include "common/kv/layout.h"
#include "common/model/checkpoint.h"
#include "common/model/config.h"
#include "common/model/engine.h"

#define AT(field) offsetof(struct dmk_worker_conf, field)

static const char *const transports[] = {"tcp", "shm", "cuda", "none", NULL};
static const char *const weights[] = {"checkpoint", "random", NULL};
static const char *const experts[] = {"checkpoint", "fp8", NULL};
static const char *const dense[] = {"checkpoint", "fp8", NULL};
static const char *const levels[] = {"error", "warn", "info", "debug", NULL};

static const struct dmk_conf_option options[] = {
    {"worker-id", DMK_CONF_STR, "", 0, 0, NULL,
     "Name of this worker in logs, metrics and at the routers; empty: host name and address.",
     AT(worker_id)},
    {"model", DMK_CONF_STR, NULL, 0, 0, NULL,
     "Folder of the checkpoint, as downloaded or as damask convert made it.", AT(model)},
    {"verify-weights", DMK_CONF_BOOL, "true", 0, 0, NULL,
     "Read a converted folder's files under the checksums of its manifest while loading.",
     AT(verify_weights)},
    {"model-name", DMK_CONF_STR, "", 0, 0, NULL,
     "Name that clients ask for; empty: the last part of the folder's path.", AT(model_name)},
    {"revision", DMK_CONF_STR, "", 0, 0, NULL, "Revision of the rollout, told to the routers.",
     AT(revision)},
    {"backend", DMK_CONF_STR, "cpu", 0, 0, NULL,
     "Where the model runs: cpu, ref (plain kernels) or cuda.", AT(backend)},
    {"weights", DMK_CONF_ENUM, "checkpoint", 0, 0, weights,
     "random: no file is read; a model of the published dimensions that --model then names "
     "(gpt-oss-20b, gpt-oss-120b) gets random weights, to measure on machines without the "
     "checkpoint (cuda).",
     AT(weights)},
    {"experts", DMK_CONF_ENUM, "checkpoint", 0, 0, experts,
     "Format of the experts' weights in memory: as in the checkpoint, or fp8, which reads prompts "
     "faster (cuda). Workers that exchange pages must agree, or the decode worker be told what the "
     "prefill pool has (prompt-experts).",
     AT(experts)},
    {"dense", DMK_CONF_ENUM, "checkpoint", 0, 0, dense,
     "Format of the dense weights in memory (attention's projections and the head): as in the "
     "checkpoint, or fp8, half the bytes: E4M3 with a scale for each block of 128 x 128, and "
     "activations with one for 128 channels of a token. The numbers change a little. Workers that "
     "exchange pages must agree, or the decode worker be told what the prefill pool has "
     "(prompt-dense).",
     AT(dense)},
    {"listen", DMK_CONF_STR, "0.0.0.0:9000", 0, 0, NULL,
     "Address of the gRPC server that routers call.", AT(listen)},
    {"admin-host", DMK_CONF_STR, "0.0.0.0", 0, 0, NULL,
     "Address of the admin HTTP server (probes, metrics, state).", AT(admin_host)},
    {"admin-port", DMK_CONF_U32, "9001", 0, 65535, NULL, "Its port; 0: any free one.",
     AT(admin_port)},
    {"admin-tls", DMK_CONF_BOOL, "false", 0, 0, NULL,
     "The admin server speaks TLS too, with the same certificate and without one of clients.",
     AT(admin_tls)},
    {"admin-keys", DMK_CONF_SECRETS, "", 0, 0, NULL,
     "Keys of which one must be sent as a bearer token for /health, /metrics and /state; none: "
     "they are open.",
     AT(admin_keys)},
    {"admin-keys-file", DMK_CONF_STR, "", 0, 0, NULL,
     "File of further such keys, one a line; read again when it changes.", AT(admin_keys_file)},
    {"tls-cert", DMK_CONF_STR, "", 0, 0, NULL,
     "Certificate chain (PEM) shown to routers; read again when it changes; empty: no TLS.",
     AT(tls_cert)},
    {"tls-key", DMK_CONF_STR, "", 0, 0, NULL, "Its private key (PEM).", AT(tls_key)},
    {"tls-router-ca", DMK_CONF_STR, "", 0, 0, NULL,
     "Routers must show a certificate that this CA (PEM) has signed; required with tls-cert.",
     AT(tls_router_ca)},
    {"tls-router-name", DMK_CONF_STR, "", 0, 0, NULL,
     "Name that the certificates of routers must have; empty: any that the CA has signed.",
     AT(tls_router_name)},
    {"tp", DMK_CONF_U32, "1", 1, 8, NULL,
     "Ranks that share a sequence's attention heads. With cuda each wants a device; ranks beyond "
     "the devices "
     "share them.",
     AT(tp)},
    {"dp", DMK_CONF_U32, "1", 1, 8, NULL,
     "Groups of tp ranks that hold different sequences; experts are spread over tp x dp ranks, 8 "
     "at "
     "most. A prefill worker has one group.",
     AT(dp)},
    {"threads", DMK_CONF_U32, "0", 0, 1024, NULL,
     "Threads of the CPU backends over all ranks; 0: one a core.", AT(threads)},
    {"kv-memory", DMK_CONF_MEMORY, "0", 0, 0, NULL,
     "Memory for the pages of both pools: bytes on each rank, as 40Gi, or a share of each device's "
     "whole memory, as 90%, which this worker's weights, steps and pages fill together. full-pages "
     "and window-pages follow from it and the model; 0: they are given.",
     AT(kv_memory)},
    {"full-pages", DMK_CONF_U32, "4096", 4, 16777216, NULL,
     "Pages (64 tokens) of the pool for full-attention layers, in each group.", AT(full_pages)},
    {"window-pages", DMK_CONF_U32, "1024", 4, 16777216, NULL,
     "Pages of the pool for sliding layers, in each group.", AT(window_pages)},
    {"max-context", DMK_CONF_U32, "131072", 64, 131072, NULL,
     "Tokens of prompt and answer together, at most.", AT(max_context)},
    {"reuse", DMK_CONF_BOOL, "true", 0, 0, NULL,
     "Keep and reuse pages of prompts with the same beginning.", AT(reuse)},
    {"xfer-transport", DMK_CONF_ENUM, "tcp", 0, 0, transports,
     "How KV pages travel between workers; none: they do not.", AT(xfer_transport)},
    {"xfer-bind", DMK_CONF_STR, "", 0, 0, NULL,
     "Address (and port) that the page transport listens on; empty: 127.0.0.1, any port.",
     AT(xfer_bind)},
    {"transfer-budget", DMK_CONF_MS, "120s", 10, 3600000, NULL,
     "Time that a transfer may take from its claim on, the computing of the prompt included.",
     AT(transfer_budget_ms)},
    {"drain-limit", DMK_CONF_MS, "120s", 0, 3600000, NULL,
     "Time that running requests get after SIGTERM.", AT(drain_limit_ms)},
    {"stuck-after", DMK_CONF_MS, "60s", 100, 3600000, NULL,
     "A step that takes longer makes liveness and readiness fail.", AT(stuck_after_ms)},
    {"load-every", DMK_CONF_MS, "200ms", 10, 60000, NULL,
     "Pause between load reports to the routers.", AT(load_every_ms)},
    {"keepalive", DMK_CONF_MS, "10s", 500, 600000, NULL,
     "A silent connection of a router is pinged this often.", AT(keepalive_ms)},
    {"keepalive-timeout", DMK_CONF_MS, "5s", 100, 600000, NULL,
     "A ping without answer for this long ends the connection.", AT(keepalive_timeout_ms)},
    {"log-level", DMK_CONF_ENUM, "info", 0, 0, levels, "What is logged to stderr.", AT(log_level)},
    {"log-json", DMK_CONF_BOOL, "false", 0, 0, NULL, "Log lines as JSON.", AT(log_json)},
};

const struct dmk_conf_part dmk_worker_part = {.options = options,
                                              .n_options = sizeof(options) / sizeof(options[0])};

int dmk_worker_options_check(const struct dmk_worker_conf *c, bool prefill,
                             struct dmk_error *reterr)
{
    return dmk_layout_check_ranks((struct dmk_layout){c->tp, c->dp}, prefill, reterr);
}

/* The shape of the model that will be opened. */
static int find_shape(const struct dmk_worker_conf *c, struct dmk_shape *ret,
                      struct dmk_error *reterr)
{
    struct dmk_config config = {0};
    struct dmk_checkpoint *checkpoint = NULL;
    int r;

    if (c->weights == DMK_WORKER_WEIGHTS_RANDOM) {
        return dmk_shape_preset(c->model, ret, reterr);
    }
    r = dmk_config_load(c->model, NULL, &config, reterr);
    if (r < 0 && dmk_checkpoint_open(c->model, &checkpoint, reterr) == 0) { /* in original/ */
        r = dmk_config_load(dmk_checkpoint_dir(checkpoint), c->model, &config, reterr);
        dmk_checkpoint_close(&checkpoint);
    }
    if (r < 0) {
        return r;
    }
    *ret = config.shape;
    return 0;
}

int dmk_worker_options_size_pools(struct dmk_worker_conf *c, uint32_t n_sequences,
                                  struct dmk_error *reterr)
{
    const uint64_t bytes = c->kv_memory.bytes;
    struct dmk_shape shape = {0};
    struct dmk_kv_layout layout;
    int r;

    if (bytes == 0) {
        return 0;
    }
    r = find_shape(c, &shape, reterr);
    if (r < 0) {
        return r;
    }
    layout =
        dmk_engine_page_layout(&shape, 0, shape.n_kv_heads > c->tp ? shape.n_kv_heads / c->tp : 1);
    layout.n_full_pages = c->full_pages;
    if (dmk_kv_fit(&layout, bytes, n_sequences) < 0) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "kv-memory is %llu bytes: the smallest pools for %u sequences take "
                             "%llu; give as much, or fewer sequences",
                             (unsigned long long)bytes, n_sequences,
                             (unsigned long long)dmk_kv_least_bytes(&layout, n_sequences));
    }
    c->full_pages = layout.n_full_pages;
    c->window_pages = layout.n_window_pages;
    return 0;
}
