/* How a job ends, and what the sender says of it meanwhile. A request is answered once; the job's pages
 * and its slot come back when neither the sender nor a step in flight knows it any more. On the loop. */
#include "prefill/internal.h"

void dmk_prefill__fail(struct dmk_prefill_core *core, struct dmk_prefill_job *job,
                       enum dmk_failure code, const char *text)
{
    const struct dmk_prefill_event event = {
        .kind = DMK_PREFILL_FAILED,
        .router = job->router,
        .id = job->id,
        .failed = {.code = code, .text = text},
    };

    if (job->mute) {
        return;
    }
    job->mute = true;
    core->load.n_failed++;
    core->conf.on_event(core->conf.ud, &event);
}

/* A step of the job that is in flight ends before its next layer. */
static void stop_computing(struct dmk_prefill_core *core, const struct dmk_prefill_job *job)
{
    if (core->in_flight && core->step.job == job) {
        atomic_store_explicit(&core->step.cancel, true, memory_order_relaxed);
    }
}

void dmk_prefill__free_job(struct dmk_prefill_core *core, struct dmk_prefill_job *job)
{
    if (core->in_flight && core->step.job == job) {
        job->released = true; /* dmk_prefill_done comes back here */
        return;
    }
    dmk_kv_table_release(&job->table, core->pools);
    dmk_prefill__unstage(core, job);
    job->state = DMK_PREFILL_FREE;
}

void dmk_prefill__abandon(struct dmk_prefill_core *core, struct dmk_prefill_job *job)
{
    const enum dmk_prefill_state was = job->state;

    if (was == DMK_PREFILL_FAILING) {
        return;
    }
    job->state = DMK_PREFILL_FAILING;
    stop_computing(core, job);
    if (job->with_tx) {
        dmk_sender_cancel(core->tx, job->order); /* on_done frees the pages */
    } else {
        dmk_prefill__free_job(core, job);
    }
}

/* ---------------------------------------------------------------- what the sender says */

static struct dmk_prefill_job *find_job(struct dmk_prefill_core *core, uint64_t order)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (core->jobs[i].state != DMK_PREFILL_FREE && core->jobs[i].order == order) {
            return &core->jobs[i];
        }
    }
    return NULL;
}

static void on_claimed(void *ud, uint64_t order)
{
    struct dmk_prefill_core *core = ud;
    struct dmk_prefill_job *job = find_job(core, order);

    if (job && job->state == DMK_PREFILL_CLAIMING) {
        job->state = DMK_PREFILL_RUNNING;
        dmk_prefill__begin(core, job);
    }
}

enum dmk_failure dmk_prefill__failure_of(int status)
{
    switch (-status) {
    case DMK_EAGAIN:
        return DMK_FAILURE_REFUSED;
    case DMK_EMISMATCH:
        return DMK_FAILURE_MISMATCH;
    case DMK_ETIMEOUT:
        return DMK_FAILURE_TIMEOUT;
    case DMK_EFULL:
        return DMK_FAILURE_FULL;
    default:
        return DMK_FAILURE_PEER;
    }
}

static void on_failed(void *ud, uint64_t order, int status, const char *why)
{
    struct dmk_prefill_core *core = ud;
    struct dmk_prefill_job *job = find_job(core, order);

    if (!job) {
        return;
    }
    dmk_prefill__fail(core, job, dmk_prefill__failure_of(status), why);
    job->state = DMK_PREFILL_FAILING;
    stop_computing(core, job);
}

static uint64_t us_between(uint64_t from_ns, uint64_t to_ns)
{
    return from_ns && to_ns > from_ns ? (to_ns - from_ns) / 1000 : 0;
}

static void on_done(void *ud, uint64_t order, bool ok, uint64_t bytes, uint64_t ns_moving)
{
    struct dmk_prefill_core *core = ud;
    struct dmk_prefill_job *job = find_job(core, order);

    if (!job) {
        return;
    }
    job->with_tx = false;
    core->load.bytes_sent += bytes;
    if (!ok) {
        dmk_prefill__fail(core, job, DMK_FAILURE_PEER,
                          "the decode worker did not accept the pages");
    } else if (!job->mute) {
        const struct dmk_prefill_event event = {
            .kind = DMK_PREFILL_DONE,
            .router = job->router,
            .id = job->id,
            .done = {.n_computed = job->n - job->n_cached,
                     .n_cached = job->n_cached,
                     .queue_us = us_between(job->queued_ns, job->claim_ns),
                     .compute_us = us_between(job->started_ns, job->computed_ns),
                     .transfer_us = ns_moving / 1000,
                     .transfer_bytes = bytes},
        };

        job->mute = true;
        core->load.n_done++;
        core->conf.on_event(core->conf.ud, &event);
    }
    job->state = DMK_PREFILL_FAILING; /* over; free_job may have to wait for a step */
    dmk_prefill__free_job(core, job);
}

static void on_closed_word(void *ud, struct dmk_id128 cookie, uint64_t d_incarnation)
{
    struct dmk_prefill_core *core = ud;
    const struct dmk_prefill_event event = {
        .kind = DMK_PREFILL_CLOSED_WORD,
        .closed_word = {.cookie = cookie, .d_incarnation = d_incarnation},
    };

    core->conf.on_event(core->conf.ud, &event);
}

struct dmk_sender_events dmk_prefill__sender_events(struct dmk_prefill_core *core)
{
    return (struct dmk_sender_events){
        .on_claimed = on_claimed,
        .on_failed = on_failed,
        .on_done = on_done,
        .on_closed_word = on_closed_word,
        .ud = core,
    };
}
