/* Steps of the prefill core: claiming, chunks, and handing finished layers to the sender. */
#include "prefill/internal.h"
#include "common/base/assert.h"

/* ---------------------------------------------------------------- pages */

/* Evicts from the cache, one boundary at a time, until the need is met. Evicting may also lower the need,
 * since a page that only this job uses is not shared any more. */
static bool room_for_advance(struct dmk_prefill_core *core, const struct dmk_kv_table *table,
                             uint32_t pos, uint32_t n)
{
    for (;;) {
        const struct dmk_kv_need need = dmk_kv_table_advance_need(table, core->pools, pos, n);

        if (dmk_kv_pool_counts(core->pools.full).free >= need.full &&
            dmk_kv_pool_counts(core->pools.window).free >= need.window) {
            dmk_kv_prefix_keep_slack(core->prefix, need.full);
            return true;
        }
        if (!dmk_kv_prefix_evict(core->prefix)) {
            return false;
        }
    }
}

static bool is_computing(const struct dmk_prefill_core *core)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        if (core->jobs[i].state == DMK_PREFILL_CLAIMING ||
            core->jobs[i].state == DMK_PREFILL_RUNNING) {
            return true;
        }
    }
    return false;
}

/* The longest cached beginning and fresh pages for the rest; false when they are not to be had now.
 *
 * Jobs with one beginning share its two window pages, and each needs pages of its own in their place before it
 * goes on. A ring of them stays free beside those that are computed already: enough for the earliest or the
 * shortest, which then ends and gives back what it took. Without it all might wait for each other. */
static bool take_pages(struct dmk_prefill_core *core, struct dmk_prefill_job *job)
{
    const uint32_t slack = is_computing(core) ? DMK_WINDOW_RING : 0;
    struct dmk_kv_need need;

    if (core->conf.reuse) {
        job->pos =
            dmk_kv_prefix_take(core->prefix, job->root, job->prompt, job->n, true, &job->table);
    }
    need = dmk_kv_table_reserve_need(&job->table, job->n);
    need.window += slack;
    if (!dmk_kv_prefix_make_room(core->prefix, need)) {
        dmk_kv_table_release(&job->table, core->pools);
        job->pos = 0;
        return false;
    }
    dmk_assert(dmk_kv_table_reserve(&job->table, core->pools, job->n) == 0);
    job->n_cached = job->pos;
    core->load.n_hit_tokens += job->n_cached;
    return true;
}

/* ---------------------------------------------------------------- pushing */

/* The sender's names of blocks [first, end), by block, and of the ring's slots. */
static const uint32_t *source_pages(struct dmk_prefill_core *core,
                                    const struct dmk_prefill_job *job, uint32_t first, uint32_t end)
{
    if (!job->staged) {
        return job->table.full;
    }
    for (uint32_t b = first; b < end; b++) {
        core->stage_ids[b] =
            DMK_PLAN_STAGED | (job->stage_at + b - job->ticket.have / DMK_PAGE_TOKENS);
    }
    return core->stage_ids;
}

static void push_ring(struct dmk_prefill_core *core, const struct dmk_prefill_job *job,
                      uint32_t kind_index)
{
    uint32_t ring[DMK_WINDOW_RING_MAX];

    for (uint32_t i = 0; i < job->table.n_ring; i++) {
        ring[i] = job->staged ? DMK_PLAN_STAGED | (job->stage_window_at + i) : job->table.ring[i];
    }
    dmk_sender_push_window(core->tx, job->order, kind_index, ring, job->table.n_ring);
}

static void push_layer(struct dmk_prefill_core *core, struct dmk_prefill_job *job, uint32_t layer,
                       uint32_t end_block, bool last)
{
    const uint32_t kind_index = dmk_shape_kind_index(layer);

    if (dmk_shape_layer_is_full(layer)) {
        if (end_block > job->pushed_blocks) {
            dmk_sender_push_full(core->tx, job->order, kind_index,
                                 source_pages(core, job, job->pushed_blocks, end_block),
                                 job->pushed_blocks, end_block);
        }
    } else if (last) {
        push_ring(core, job, kind_index);
    }
}

static void finish_job(struct dmk_prefill_core *core, struct dmk_prefill_job *job)
{
    job->computed_ns = core->now_ns;
    job->state = DMK_PREFILL_PUSHED;
    dmk_sender_finish(core->tx, job->order);
}

void dmk_prefill__begin(struct dmk_prefill_core *core, struct dmk_prefill_job *job)
{
    const uint32_t end_block = dmk_kv_pages_for(job->n);

    if (job->pos < job->n) {
        return; /* the first chunk's layers push the cached blocks too */
    }
    job->started_ns = core->now_ns;
    for (uint32_t l = 0; l < core->conf.engine.shape->n_layers && job->state == DMK_PREFILL_RUNNING;
         l++) {
        push_layer(core, job, l, end_block, true);
    }
    if (job->state == DMK_PREFILL_RUNNING) {
        finish_job(core, job);
    }
}

void dmk_prefill_layers(struct dmk_prefill_core *core)
{
    struct dmk_prefill_step *s = &core->step;
    unsigned done;

    if (!core->in_flight || s->job->state != DMK_PREFILL_RUNNING) {
        return;
    }
    done = atomic_load_explicit(&s->layers_done, memory_order_acquire);
    while (s->layers_pushed < done && s->job->state == DMK_PREFILL_RUNNING) {
        push_layer(core, s->job, s->layers_pushed, s->end_block, s->last);
        s->layers_pushed++;
    }
}

/* ---------------------------------------------------------------- planning */

static void fill_turns(struct dmk_prefill_core *core)
{
    for (uint32_t i = 0; i < core->conf.max_jobs; i++) {
        const struct dmk_prefill_job *job = &core->jobs[i];

        core->turns[i] = (struct dmk_prefill_turn){
            .state = job->state,
            .order = job->order,
            .due_ns = job->due_ns,
            .n_left = job->n - job->pos,
            .n_flight = core->in_flight && core->step.job == job ? core->step.seq.n_tokens : 0,
        };
    }
}

/* Lets queued jobs claim while the scheduler says so and there are pages. */
static void claim_jobs(struct dmk_prefill_core *core)
{
    for (;;) {
        struct dmk_prefill_job *job;
        struct dmk_error err;
        uint32_t i;
        int rc;

        fill_turns(core);
        i = dmk_prefill_pick_claim(core->turns, core->conf.max_jobs);
        if (i == UINT32_MAX) {
            return;
        }
        job = &core->jobs[i];
        if (!take_pages(core, job)) {
            return; /* pages of earlier jobs come back when D has answered */
        }
        dmk_prefill__stage(core, job);
        job->claim_ns = core->now_ns;
        job->state = DMK_PREFILL_CLAIMING;
        job->with_tx = true;
        rc = dmk_sender_claim(core->tx, job->order, &job->ticket, core->now_ns, &err);
        if (rc < 0) {
            job->with_tx = false;
            dmk_prefill__fail(core, job, dmk_prefill__failure_of(rc), err.text);
            dmk_prefill__abandon(core, job);
        }
    }
}

static void run_layer_hook(void *ud, uint32_t layer)
{
    struct dmk_prefill_step *s = ud;

    atomic_store_explicit(&s->layers_done, layer + 1, memory_order_release);
    if (s->core->conf.on_layer) {
        s->core->conf.on_layer(s->core->conf.ud);
    }
}

static void fill_step(struct dmk_prefill_core *core, struct dmk_prefill_job *job, uint32_t n)
{
    struct dmk_prefill_step *s = &core->step;
    uint32_t n_copies = 0;

    dmk_assert(dmk_kv_table_advance(&job->table, core->pools, job->pos, n, s->copies, &n_copies) ==
               0);
    s->core = core;
    s->job = job;
    s->last = job->pos + n == job->n;
    s->end_block = s->last ? dmk_kv_pages_for(job->n) : (job->pos + n) / DMK_PAGE_TOKENS;
    s->layers_pushed = 0;
    s->planned_ns = core->now_ns;
    atomic_store_explicit(&s->layers_done, 0, memory_order_relaxed);
    atomic_store_explicit(&s->cancel, false, memory_order_relaxed);
    s->seq = (struct dmk_step_seq){
        .ids = job->prompt + job->pos,
        .n_tokens = n,
        .pos = job->pos,
        .full_pages = job->table.full,
        .n_ring = job->table.n_ring,
        .logits = DMK_LOGITS_NONE,
    };
    for (uint32_t r = 0; r < job->table.n_ring; r++) {
        s->seq.ring[r] = job->table.ring[r];
    }
    s->stage = (struct dmk_step_stage){
        .first_block = job->pushed_blocks,
        .end_block = s->end_block > job->pushed_blocks ? s->end_block : job->pushed_blocks,
        .full_at = job->stage_at + job->pushed_blocks - job->ticket.have / DMK_PAGE_TOKENS,
        .window = s->last,
        .window_at = job->stage_window_at,
    };
    s->step = (struct dmk_step){
        .stage = job->staged ? &s->stage : NULL,
        .seqs = &s->seq,
        .n_seqs = 1,
        .copies = s->copies,
        .n_copies = n_copies,
        .on_layer = run_layer_hook,
        .ud = s,
        .cancel = &s->cancel,
    };
}

/* The job of the next chunk, when there are pages for it. */
static struct dmk_prefill_job *pick_job(struct dmk_prefill_core *core, bool shortest,
                                        uint32_t *ret_n)
{
    const uint32_t i = dmk_prefill_pick_run(core->turns, core->conf.max_jobs, shortest);
    struct dmk_prefill_job *job = i == UINT32_MAX ? NULL : &core->jobs[i];

    if (!job) {
        return NULL;
    }
    *ret_n = dmk_prefill_chunk(job->pos, job->n, core->conf.chunk_tokens, DMK_KV_BOUNDARY_TOKENS);
    return room_for_advance(core, &job->table, job->pos, *ret_n) ? job : NULL;
}

struct dmk_prefill_step *dmk_prefill_plan(struct dmk_prefill_core *core, uint64_t now_ns)
{
    struct dmk_prefill_job *job;
    uint32_t n = 0;

    core->now_ns = now_ns;
    claim_jobs(core);
    if (core->in_flight) {
        return NULL;
    }
    fill_turns(core);
    job = pick_job(core, core->shortest_next, &n);
    if (!job) {
        job = pick_job(core, !core->shortest_next, &n);
    }
    if (!job) {
        return NULL; /* window pages come back with the jobs that wait for their answers */
    }
    core->shortest_next = !core->shortest_next;
    if (job->started_ns == 0) {
        job->started_ns = now_ns;
    }
    fill_step(core, job, n);
    core->in_flight = true;
    claim_jobs(core); /* with the last chunk under way the next job may claim */
    return &core->step;
}

void dmk_prefill_run(struct dmk_prefill_step *step)
{
    step->status = step->core->conf.engine.step(step->core->conf.engine.engine, &step->step);
}

static void count_step(struct dmk_prefill_core *core, const struct dmk_prefill_step *step)
{
    const double ms = (double)(core->now_ns - step->planned_ns) / 1e6;

    core->load.n_steps++;
    core->load.n_tokens_computed += step->seq.n_tokens;
    core->load.step_ms = core->load.n_steps == 1 ? ms : 0.9 * core->load.step_ms + 0.1 * ms;
}

void dmk_prefill_done(struct dmk_prefill_core *core, struct dmk_prefill_step *step, uint64_t now_ns)
{
    struct dmk_prefill_job *job = step->job;

    dmk_assert(core->in_flight && step == &core->step);
    core->now_ns = now_ns;
    if (step->status == 0) {
        count_step(core, step);
        dmk_prefill_layers(core);
    }
    core->in_flight = false;
    if (job->state != DMK_PREFILL_RUNNING) {
        if (job->released) {
            dmk_prefill__free_job(core, job);
        }
        return;
    }
    if (step->status != 0) {
        dmk_prefill__fail(core, job, DMK_FAILURE_INTERNAL, "the engine could not run the prompt");
        dmk_prefill__abandon(core, job);
        return;
    }
    job->pos += step->seq.n_tokens;
    job->pushed_blocks = step->end_block;
    if (core->conf.reuse && (step->last || job->pos % DMK_KV_BOUNDARY_TOKENS == 0) &&
        job->pos >= DMK_PAGE_TOKENS) {
        dmk_kv_prefix_insert(core->prefix, job->root, job->prompt, job->pos, &job->table);
    }
    if (step->last) {
        finish_job(core, job);
    }
}
