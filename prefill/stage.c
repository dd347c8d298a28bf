/* A job's share of the staging memory: host memory that a device's pages leave through, where the transport can not read
 * the device. A run of pages for all that the ticket names, taken before the claim and given back with the job; jobs that
 * find none go without. On the loop. */
#include "prefill/internal.h"

static void give_run(struct dmk_kv_pool *pool, const uint32_t *pages, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        dmk_kv_pool_drop(pool, pages[i]);
    }
}

/* n pages with ids that rise by one, or none. */
static bool take_run(struct dmk_kv_pool *pool, uint32_t *scratch, uint32_t n, uint32_t *ret_first)
{
    if (dmk_kv_pool_alloc(pool, n, DMK_PAGE_NONE, scratch) < 0) {
        return false;
    }
    for (uint32_t i = 1; i < n; i++) {
        if (scratch[i] != scratch[0] + i) {
            give_run(pool, scratch, n);
            return false;
        }
    }
    *ret_first = scratch[0];
    return true;
}

void dmk_prefill__stage(struct dmk_prefill_core *core, struct dmk_prefill_job *job)
{
    const uint32_t n = job->ticket.n_pages;
    uint32_t ring[DMK_WINDOW_RING_MAX];

    /* A prompt that is cached as a whole needs no step, and so has nobody to stage it. */
    if (!core->stage.full || n == 0 || job->pos >= job->n ||
        !take_run(core->stage.full, core->stage_ids, n, &job->stage_at)) {
        return;
    }
    job->n_stage = n;
    job->staged = take_run(core->stage.window, ring, job->table.n_ring, &job->stage_window_at);
    if (!job->staged) {
        give_run(core->stage.full, core->stage_ids, n);
        return;
    }
    core->load.n_staged++;
}

void dmk_prefill__unstage(struct dmk_prefill_core *core, struct dmk_prefill_job *job)
{
    if (!job->staged) {
        return;
    }
    job->staged = false;
    for (uint32_t i = 0; i < job->n_stage; i++) {
        dmk_kv_pool_drop(core->stage.full, job->stage_at + i);
    }
    for (uint32_t i = 0; i < job->table.n_ring; i++) {
        dmk_kv_pool_drop(core->stage.window, job->stage_window_at + i);
    }
}
