/* The engine's opening and closing, jobs of its thread: weights with progress in the log, what was taken for pages, and a
 * first step that shows that it computes. Nothing else touches the engine meanwhile; the loop reads load_percent. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/worker/engine_canary.h"
#include "common/worker/internal.h"

#define LOAD_LOG_NS 3000000000ull

static void on_load_progress(void *ud, uint64_t done_bytes, uint64_t total_bytes)
{
    struct dmk_worker *w = ud;
    const unsigned percent = total_bytes ? (unsigned)(done_bytes * 100 / total_bytes) : 0;
    const uint64_t now = dmk_clock_ns();

    atomic_store(&w->load_percent, percent);
    if (now - w->load_logged_ns >= LOAD_LOG_NS) {
        const double seconds = (double)(now - w->load_logged_ns) / 1e9;

        const uint64_t since = done_bytes - w->load_logged_bytes;

        dmk_log_info("loading weights %u%% %.1f GB/s", percent, (double)since / 1e9 / seconds);
        w->load_logged_ns = now;
        w->load_logged_bytes = done_bytes;
    }
}

static void tell_pages(const struct dmk_worker *w, const struct dmk_engine_conf *conf)
{
    const struct dmk_kv_layout *l = &w->port.kv[0]->layout;
    const uint64_t bytes = dmk_kv_full_bytes(l) + dmk_kv_window_bytes(l);

    dmk_log_info("worker=%s kv-memory %.10g%%: %u full and %u window pages in each group, %.1f GiB "
                 "on each rank",
                 w->id, conf->memory_percent, l->n_full_pages, l->n_window_pages,
                 (double)bytes / 1073741824.0);
}

static int open_real_engine(struct dmk_worker *w)
{
    const struct dmk_worker_conf *c = w->conf;
    struct dmk_engine_conf conf = {
        .model_dir = c->model,
        .backend = c->backend,
        .layout = {.tp = c->tp, .dp = c->dp},
        .prefill = !w->role->decode,
        .n_threads = c->threads,
        .random_preset = c->weights == DMK_WORKER_WEIGHTS_RANDOM ? c->model : NULL,
        .fp8_experts = c->experts == DMK_WORKER_EXPERTS_FP8,
        .fp8_dense = c->dense == DMK_WORKER_DENSE_FP8,
        .no_verify = !c->verify_weights,
        .n_full_pages = c->full_pages,
        .n_window_pages = c->window_pages,
        .memory_percent = c->kv_memory.percent,
        .on_progress = on_load_progress,
        .ud = w,
    };
    const uint64_t start = dmk_clock_ns();
    int ret;

    w->role->engine_conf(w->role->ud, &conf);
    w->load_logged_ns = start;
    ret = dmk_engine_open(&conf, &w->engine, &w->open_error);
    if (ret == 0) {
        const struct dmk_engine_graphs graphs = dmk_engine_graphs(w->engine);

        dmk_log_info("weights are loaded after %.1f s", (double)(dmk_clock_ns() - start) / 1e9);
        w->port = dmk_engine_port_from(w->engine, conf.layout);
        if (dmk_engine_shares_devices(w->engine)) {
            dmk_log_warn(
                "worker=%s has fewer devices than its tp %u x dp %u ranks, which share them", w->id,
                conf.layout.tp, conf.layout.dp);
        }
        if (conf.memory_percent > 0) {
            tell_pages(w, &conf);
        }
        if (graphs.n_wanted > 0) {
            dmk_log_info("worker=%s captured %u of %u decode graphs in %.1f s", w->id,
                         graphs.n_graphs, graphs.n_wanted, graphs.seconds);
        }
    }
    return ret;
}

static void shut_engine(struct dmk_worker *w)
{
    const struct dmk_engine_source *source = w->role->source;

    if (source) {
        source->close(source->ud);
    } else {
        dmk_engine_close(&w->engine);
    }
}

void dmk_worker__engine_open(void *ud)
{
    struct dmk_worker *w = ud;
    const struct dmk_engine_source *source = w->role->source;
    struct dmk_engine_conf conf = {0};

    w->open_status =
        source ? source->open(source->ud, &w->port, &w->open_error) : open_real_engine(w);
    if (w->open_status == 0) {
        w->role->engine_conf(w->role->ud, &conf);
        w->open_status =
            dmk_engine_canary(&w->port, w->role->decode, conf.max_step_tokens, &w->open_error);
        if (w->open_status < 0) {
            shut_engine(w);
        }
    }
}

void dmk_worker__engine_close(void *ud)
{
    shut_engine(ud);
}
