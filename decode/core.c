/* The decode core's doors: making it, cancels, ticks, what it says about itself. Owner: the worker's loop. */
#include "decode/core_state.h"

#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "common/base/status.h"

#define MAX_BLOCK_EVENTS 4096
#define CONSTRAINT_MASKS 128
#define CONSTRAINT_BYTES ((size_t)64 << 20)

/* What mixed pools need: prompts that come, a window ring more for each sequence, a full page for a copy. */
static int check_mixed(const struct dmk_decode_conf *c, struct dmk_error *reterr)
{
    const char *why = !c->ops ? "xfer-transport is none"
                      : c->local_prefill_below == DMK_DECODE_LOCAL_ALWAYS
                          ? "local-prefill-below is max"
                      : c->n_full_pages < 2 ? "full-pages is below 2"
                                            : NULL;

    if (why) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "prompts are to come as \"%s\" from prefill workers, but %s: without "
                             "prompt-experts and prompt-dense this worker computes them itself",
                             c->engine.prompt_numerics, why);
    }
    return 0;
}

static int check_conf(const struct dmk_decode_conf *c, struct dmk_error *reterr)
{
    const bool mixed = dmk_engine_port_is_mixed(&c->engine);
    const uint32_t ring = DMK_WINDOW_RING * (mixed ? 2 : 1);

    if (c->max_sequences == 0 || c->max_context < 2) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "max-sequences is %u and max-context %u: too small", c->max_sequences,
                             c->max_context);
    }
    if (c->max_logit_rows < c->max_sequences) {
        return dmk_error_set(
            reterr, -DMK_EINVAL,
            "max-logit-rows %u is below max-sequences %u: a step needs a row for each",
            c->max_logit_rows, c->max_sequences);
    }
    if (c->max_step_tokens <= c->max_sequences || c->max_chunk_tokens == 0) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "max-step-tokens %u must be above max-sequences %u, or prompts starve",
                             c->max_step_tokens, c->max_sequences);
    }
    if (c->n_window_pages < ring * c->max_sequences) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "window-pages %u is below %u for each of %u sequences",
                             c->n_window_pages, ring, c->max_sequences);
    }
    if (c->engine.n_ranks == 0 || c->engine.n_ranks > DMK_PORT_MAX_RANKS ||
        c->engine.n_ranks != c->engine.layout.tp * c->engine.layout.dp) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%u ranks do not make tp %u x dp %u",
                             c->engine.n_ranks, c->engine.layout.tp, c->engine.layout.dp);
    }
    return mixed ? check_mixed(c, reterr) : 0;
}

/* Everything that has one element for each slot, row or page. */
static int allocate(struct dmk_decode_core *core)
{
    const struct dmk_decode_conf *c = &core->conf;
    const size_t max_copies = (size_t)core->n_slots *
                              (DMK_KV_ADVANCE_COPIES + DMK_KV_FORK_COPIES * (core->mixed ? 2 : 1));
    struct dmk_decode_step *step = &core->step;

    core->groups = calloc(core->n_groups, sizeof(*core->groups));
    core->seqs = calloc(core->n_slots, sizeof(*core->seqs));
    core->ids_storage = calloc((size_t)core->n_slots * c->max_context, sizeof(uint32_t));
    core->pages_storage = calloc((size_t)core->n_slots * core->max_pages, sizeof(uint32_t));
    if (core->mixed) {
        core->origin_storage = calloc((size_t)core->n_slots * core->max_pages, sizeof(uint32_t));
    }
    core->requests = calloc(core->n_slots, sizeof(*core->requests));
    core->ticket = calloc(1, sizeof(*core->ticket));
    if (!c->engine.pick) {
        core->logits = calloc((size_t)c->max_logit_rows * c->engine.shape->vocab, sizeof(float));
    }
    core->by_age = calloc(core->n_slots, sizeof(*core->by_age));
    core->sched = calloc(core->n_slots, sizeof(*core->sched));
    core->picks = calloc(core->n_slots, sizeof(*core->picks));
    step->seqs = calloc(core->n_slots, sizeof(*step->seqs));
    step->slots = calloc(core->n_slots, sizeof(*step->slots));
    step->copies = calloc(max_copies, sizeof(*step->copies));
    step->rows = calloc(c->max_logit_rows, sizeof(*step->rows));
    step->results = calloc(c->max_logit_rows, sizeof(*step->results));
    if (c->engine.samples) {
        step->draws = calloc(c->max_logit_rows, sizeof(*step->draws));
        step->drawn = calloc(c->max_logit_rows, sizeof(*step->drawn));
    }
    dmk_buf_init(&core->ticket_blob, DMK_TICKET_MAX_BYTES);
    if (!core->groups || !core->seqs || !core->ids_storage || !core->pages_storage ||
        (core->mixed && !core->origin_storage) || !core->requests || !core->ticket ||
        (!c->engine.pick && !core->logits) || !core->by_age || !core->sched || !core->picks ||
        !step->seqs || !step->slots || !step->copies || !step->rows || !step->results ||
        (c->engine.samples && (!step->draws || !step->drawn))) {
        return -DMK_ENOMEM;
    }
    for (uint32_t i = 0; i < core->n_slots; i++) {
        core->seqs[i].index = i;
        core->seqs[i].ids = core->ids_storage + (size_t)i * c->max_context;
        dmk_kv_table_init(&core->seqs[i].table, core->pages_storage + (size_t)i * core->max_pages,
                          core->max_pages, DMK_WINDOW_RING);
        dmk_kv_table_init(&core->requests[i].origin,
                          core->mixed ? core->origin_storage + (size_t)i * core->max_pages : NULL,
                          core->mixed ? core->max_pages : 0, DMK_WINDOW_RING);
    }
    const struct dmk_constraints_conf constraints = {
        .vocab = c->engine.shape->vocab,
        .n_walks = core->n_slots,
        .n_masks = c->constraint_masks ? c->constraint_masks : CONSTRAINT_MASKS,
        .max_bytes = c->max_constraint_bytes ? c->max_constraint_bytes : CONSTRAINT_BYTES,
    };
    const int r = dmk_constraints_new(&constraints, &core->constraints);

    return r < 0 ? r : dmk_sampler_new(c->engine.shape->vocab, &core->sampler);
}

static int make_groups(struct dmk_decode_core *core)
{
    int r = 0;

    for (uint32_t g = 0; r == 0 && g < core->n_groups; g++) {
        struct group *group = &core->groups[g];

        r = dmk_kv_pool_new(core->conf.n_full_pages, &group->pools.full);
        if (r == 0) {
            r = dmk_kv_pool_new(core->conf.n_window_pages, &group->pools.window);
        }
        if (r == 0) {
            r = dmk_kv_prefix_new(group->pools, MAX_BLOCK_EVENTS, &group->prefix);
        }
    }
    return r;
}

/* Registers a rank's two regions and keeps their packed keys for tickets. */
static int register_rank(struct dmk_decode_core *core, uint32_t rank, struct dmk_error *reterr)
{
    const struct dmk_xfer_ops *ops = core->conf.ops;
    struct dmk_xfer *xfer = core->conf.xfer;
    const struct dmk_kv_mem *kv = core->conf.engine.kv[rank];
    struct dmk_ticket_rank *t = &core->ranks[rank];
    int r;

    r = ops->mem_register(xfer, kv->full, dmk_kv_full_bytes(&kv->layout),
                          core->conf.engine.mem_kind, &core->full_mem[rank], reterr);
    if (r == 0) {
        r = ops->mem_register(xfer, kv->window, dmk_kv_window_bytes(&kv->layout),
                              core->conf.engine.mem_kind, &core->window_mem[rank], reterr);
    }
    if (r != 0) {
        return r;
    }
    t->full_key_len = t->window_key_len = DMK_XFER_KEY_MAX;
    r = ops->mem_pack(xfer, core->full_mem[rank], t->full_key, &t->full_key_len);
    if (r == 0) {
        r = ops->mem_pack(xfer, core->window_mem[rank], t->window_key, &t->window_key_len);
    }
    if (r != 0) {
        return dmk_error_set(reterr, r, "the page memory of rank %u has no remote key: %s", rank,
                             dmk_status_message(r));
    }
    t->kv_head_first = kv->layout.kv_head_first;
    t->n_kv_heads = kv->layout.n_local_heads;
    t->n_full_pages = kv->layout.n_full_pages;
    t->n_window_pages = kv->layout.n_window_pages;
    t->full_base = (uint64_t)(uintptr_t)kv->full;
    t->window_base = (uint64_t)(uintptr_t)kv->window;
    return 0;
}

static int open_receiver(struct dmk_decode_core *core, struct dmk_error *reterr)
{
    const struct dmk_decode_conf *c = &core->conf;
    struct dmk_receiver_conf rx = {
        .ops = c->ops,
        .xfer = c->xfer,
        .incarnation = c->incarnation,
        .expiry_ns = c->ticket_expiry_ns,
        .transfer_budget_ns = c->transfer_budget_ns,
        .quiet_ask_every_ns = c->quiet_ask_every_ns,
        .max_tickets = core->n_slots,
        .max_draining_pages = c->max_draining_pages,
        .events = dmk_decode_receiver_events(core),
    };

    for (uint32_t rank = 0; rank < c->engine.n_ranks; rank++) {
        const int r = register_rank(core, rank, reterr);

        if (r != 0) {
            return r;
        }
    }
    dmk_decode_ticket_prepare(core);
    return dmk_receiver_new(&rx, &core->receiver);
}

int dmk_decode_core_new(const struct dmk_decode_conf *conf, struct dmk_decode_core **ret,
                        struct dmk_error *reterr)
{
    struct dmk_decode_core *core;
    int r = check_conf(conf, reterr);

    if (r != 0) {
        return r;
    }
    core = calloc(1, sizeof(*core));
    if (!core) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the decode core");
    }
    core->conf = *conf;
    core->step.core = core;
    if (core->conf.max_context > conf->engine.shape->max_positions) {
        core->conf.max_context = conf->engine.shape->max_positions;
    }
    if (core->conf.max_context > (uint64_t)conf->n_full_pages * DMK_PAGE_TOKENS) {
        core->conf.max_context = conf->n_full_pages * DMK_PAGE_TOKENS;
    }
    core->mixed = dmk_engine_port_is_mixed(&conf->engine);
    if (core->mixed && core->conf.max_context > (conf->n_full_pages - 1) * DMK_PAGE_TOKENS) {
        /* One page is an origin's copy. */
        core->conf.max_context = (conf->n_full_pages - 1) * DMK_PAGE_TOKENS;
    }
    core->n_groups = conf->engine.layout.dp;
    core->n_slots =
        2 * conf->max_sequences; /* draining tickets keep slots beyond the active ones */
    core->max_pages = dmk_kv_pages_for(core->conf.max_context);
    r = allocate(core);
    if (r == 0) {
        r = make_groups(core);
    }
    if (r != 0) {
        dmk_error_set(reterr, r, "no memory for %u sequences of %u tokens and %u logit rows",
                      conf->max_sequences, core->conf.max_context, conf->max_logit_rows);
    } else if (conf->ops) {
        r = open_receiver(core, reterr);
    }
    if (r != 0) {
        dmk_decode_core_free(&core);
        return r;
    }
    *ret = core;
    return 0;
}

static void unregister_ranks(struct dmk_decode_core *core)
{
    for (uint32_t rank = 0; rank < DMK_PORT_MAX_RANKS; rank++) {
        if (core->full_mem[rank]) {
            core->conf.ops->mem_unregister(core->conf.xfer, &core->full_mem[rank]);
        }
        if (core->window_mem[rank]) {
            core->conf.ops->mem_unregister(core->conf.xfer, &core->window_mem[rank]);
        }
    }
}

void dmk_decode_core_free(struct dmk_decode_core **corep)
{
    struct dmk_decode_core *core = *corep;

    if (!core) {
        return;
    }
    dmk_assert(!core->step.in_flight);
    dmk_receiver_free(&core->receiver);
    unregister_ranks(core);
    for (uint32_t i = 0; core->seqs && core->groups && i < core->n_slots; i++) {
        if (core->seqs[i].state != SEQ_FREE) {
            dmk_decode_seq_release(core, &core->seqs[i]);
        }
    }
    for (uint32_t i = 0; core->requests && core->groups && core->mixed && i < core->n_slots; i++) {
        dmk_kv_table_release(&core->requests[i].origin,
                             core->groups[core->requests[i].group].pools);
    }
    for (uint32_t g = 0; core->groups && g < core->n_groups; g++) {
        dmk_kv_prefix_free(&core->groups[g].prefix);
        dmk_kv_pool_free(&core->groups[g].pools.full);
        dmk_kv_pool_free(&core->groups[g].pools.window);
    }
    dmk_sampler_free(&core->sampler);
    dmk_constraints_free(&core->constraints);
    dmk_buf_fini(&core->ticket_blob);
    free(core->groups);
    free(core->seqs);
    free(core->ids_storage);
    free(core->pages_storage);
    free(core->origin_storage);
    free(core->requests);
    free(core->ticket);
    free(core->logits);
    free(core->step.draws);
    free(core->step.drawn);
    free(core->by_age);
    free(core->sched);
    free(core->picks);
    free(core->step.seqs);
    free(core->step.slots);
    free(core->step.copies);
    free(core->step.rows);
    free(core->step.results);
    free(core);
    *corep = NULL;
}

void dmk_decode_cancel(struct dmk_decode_core *core, uint32_t router, struct dmk_request_id id,
                       uint64_t now_ns)
{
    core->now_ns = now_ns;
    for (uint32_t i = 0; i < core->n_slots; i++) {
        struct request *q = &core->requests[i];

        if (q->used && q->router == router && dmk_request_id_equal(q->id, id)) {
            dmk_decode_request_end(core, q);
        }
    }
}

void dmk_decode_router_gone(struct dmk_decode_core *core, uint32_t router, uint64_t now_ns)
{
    core->now_ns = now_ns;
    for (uint32_t i = 0; i < core->n_slots; i++) {
        if (core->requests[i].used && core->requests[i].router == router) {
            dmk_decode_request_end(core, &core->requests[i]);
        }
    }
}

void dmk_decode_closed_word(struct dmk_decode_core *core, struct dmk_id128 cookie, uint64_t now_ns)
{
    core->now_ns = now_ns;
    if (core->receiver) {
        dmk_receiver_closed_word(core->receiver, cookie, now_ns);
    }
}

int dmk_decode_vocabulary(struct dmk_decode_core *core, struct dmk_bytes bytes,
                          struct dmk_error *reterr)
{
    return dmk_constraints_vocabulary(core->constraints, bytes, reterr);
}

struct dmk_id128 dmk_decode_vocabulary_hash(const struct dmk_decode_core *core)
{
    return dmk_constraints_vocabulary_hash(core->constraints);
}

void dmk_decode_drain(struct dmk_decode_core *core)
{
    core->draining = true;
}

bool dmk_decode_xfer_message(struct dmk_decode_core *core, struct dmk_xfer_ep *ep,
                             struct dmk_bytes message, uint64_t now_ns)
{
    core->now_ns = now_ns;
    return core->receiver && dmk_receiver_message(core->receiver, ep, message, now_ns);
}

void dmk_decode_xfer_closed(struct dmk_decode_core *core, struct dmk_xfer_ep *ep, uint64_t now_ns)
{
    core->now_ns = now_ns;
    if (core->receiver) {
        dmk_receiver_ep_closed(core->receiver, ep, now_ns);
    }
}

void dmk_decode_tick(struct dmk_decode_core *core, uint64_t now_ns)
{
    core->now_ns = now_ns;
    if (core->receiver) {
        dmk_receiver_tick(core->receiver, now_ns);
    }
}

static void add_counts(struct dmk_kv_pool_counts *sum, struct dmk_kv_pool_counts c)
{
    sum->total += c.total;
    sum->free += c.free;
    sum->cached += c.cached;
    sum->leased += c.leased;
    sum->draining += c.draining;
}

struct dmk_decode_load dmk_decode_load(const struct dmk_decode_core *core)
{
    struct dmk_decode_load load = {
        .step_ms = core->step_ms,
        .n_steps = core->n_steps,
        .n_tokens = core->n_tokens,
        .n_preemptions = core->n_preemptions,
        .n_prompt_tokens_computed = core->n_prompt_tokens,
        .n_local_prefills = core->n_local,
        .n_remote_prefills = core->n_remote,
        .n_query_tokens = core->n_query_tokens,
        .n_hit_tokens = core->n_hit_tokens,
        .constraints = dmk_constraints_stats(core->constraints),
    };

    for (uint32_t i = 0; i < core->n_slots; i++) {
        load.n_requests += core->requests[i].used;
    }
    for (uint32_t i = 0; i < core->n_slots; i++) {
        const struct seq *seq = &core->seqs[i];

        if (seq->state == SEQ_RUNNING) {
            load.n_running++;
            load.tokens_waiting += seq->n_ids - seq->n_computed - 1;
        } else if (seq->state == SEQ_KV_WAIT || seq->state == SEQ_PREEMPTED) {
            load.n_waiting++;
            load.tokens_waiting += seq->n_ids - seq->n_computed - 1;
        }
    }
    for (uint32_t g = 0; g < core->n_groups; g++) {
        const struct dmk_kv_pool_counts full = dmk_kv_pool_counts(core->groups[g].pools.full);

        add_counts(&load.full, full);
        add_counts(&load.window, dmk_kv_pool_counts(core->groups[g].pools.window));
        if (full.free + full.cached > load.most_full_free) {
            load.most_full_free = full.free + full.cached;
        }
    }
    if (core->receiver) {
        load.receiver = dmk_receiver_stats(core->receiver);
    }
    return load;
}

uint32_t dmk_decode_n_groups(const struct dmk_decode_core *core)
{
    return core->n_groups;
}

struct dmk_decode_group dmk_decode_group(const struct dmk_decode_core *core, uint32_t group)
{
    struct dmk_decode_group g = {
        .full = dmk_kv_pool_counts(core->groups[group].pools.full),
        .window = dmk_kv_pool_counts(core->groups[group].pools.window),
    };

    for (uint32_t i = 0; i < core->n_slots; i++) {
        g.n_sequences += core->seqs[i].state != SEQ_FREE && core->seqs[i].group == group;
    }
    return g;
}

bool dmk_decode_idle(const struct dmk_decode_core *core)
{
    for (uint32_t i = 0; i < core->n_slots; i++) {
        if (core->seqs[i].state != SEQ_FREE) {
            return false;
        }
    }
    return !core->step.in_flight;
}

uint32_t dmk_decode_max_context(const struct dmk_decode_core *core)
{
    return core->conf.max_context;
}

bool dmk_decode_check(const struct dmk_decode_core *core)
{
    for (uint32_t g = 0; g < core->n_groups; g++) {
        if (!dmk_kv_pool_check(core->groups[g].pools.full) ||
            !dmk_kv_pool_check(core->groups[g].pools.window) ||
            !dmk_kv_prefix_check(core->groups[g].prefix)) {
            return false;
        }
    }
    return true;
}

static bool any_group_has(const struct dmk_decode_core *core, struct dmk_id128 hash)
{
    for (uint32_t g = 0; g < core->n_groups; g++) {
        if (dmk_kv_prefix_has(core->groups[g].prefix, hash)) {
            return true;
        }
    }
    return false;
}

uint32_t dmk_decode_block_events(struct dmk_decode_core *core,
                                 struct dmk_kv_prefix_event *ret_events, uint32_t cap,
                                 bool *ret_lost)
{
    uint32_t n = 0, n_taken;
    bool lost = false;

    /* Some of what is taken may be of no interest, and 0 says that nothing is left. */
    do {
        n_taken = 0;
        for (uint32_t g = 0; g < core->n_groups; g++) {
            struct dmk_kv_prefix_event *events = ret_events + n;
            bool l = false;
            const uint32_t got = dmk_kv_prefix_events(core->groups[g].prefix, events, cap - n, &l);

            for (uint32_t i = 0; i < got; i++) {
                if (events[i].added || !any_group_has(core, events[i].hash)) {
                    ret_events[n++] = events[i];
                }
            }
            n_taken += got;
            lost = lost || l;
        }
    } while (n == 0 && n_taken > 0);
    *ret_lost = lost;
    return n;
}

uint32_t dmk_decode_block_list(const struct dmk_decode_core *core, uint32_t inout_at[2],
                               struct dmk_kv_prefix_event *ret_events, uint32_t cap)
{
    for (; inout_at[0] < core->n_groups; inout_at[0]++, inout_at[1] = 0) {
        const uint32_t n =
            dmk_kv_prefix_list(core->groups[inout_at[0]].prefix, &inout_at[1], ret_events, cap);

        if (n > 0) {
            return n;
        }
    }
    return 0;
}

void dmk_decode_flush_cache(struct dmk_decode_core *core)
{
    for (uint32_t g = 0; g < core->n_groups; g++) {
        while (dmk_kv_prefix_evict(core->groups[g].prefix)) {
        }
    }
}
