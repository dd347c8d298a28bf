/* One step: planned on the loop, run on the engine's thread, its results taken on the loop.
 *
 * While a step is in flight nothing that it points to changes: ids are only appended and tables only grown
 * here, and a sequence whose request ends meanwhile keeps its pages until the step is done. */
#include "decode/core_state.h"

#include "common/base/assert.h"
#include "common/base/status.h"

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Running sequences, oldest first. */
static uint32_t collect_by_age(struct dmk_decode_core *core)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < core->n_slots; i++) {
        uint32_t at = n;

        if (core->seqs[i].state != SEQ_RUNNING) {
            continue;
        }
        for (; at > 0 && core->seqs[core->by_age[at - 1]].order > core->seqs[i].order; at--) {
            core->by_age[at] = core->by_age[at - 1];
        }
        core->by_age[at] = i;
        n++;
    }
    return n;
}

/* Scoring the prompt goes on where it was, also after a preemption. */
static bool scores_prompt(const struct request *q, const struct seq *seq)
{
    return q->echo && seq->choice == 0 && seq->n_computed >= q->echo_done &&
           seq->n_computed + 1 < q->n_prompt;
}

static struct dmk_sched_seq describe(const struct dmk_decode_core *core, const struct seq *seq)
{
    const struct request *q = &core->requests[seq->request];
    struct dmk_sched_seq s = {
        .order = seq->order,
        .todo = seq->n_ids - seq->n_computed,
        .to_boundary = DMK_KV_BOUNDARY_TOKENS - seq->n_computed % DMK_KV_BOUNDARY_TOKENS,
        .all_logits = scores_prompt(q, seq),
    };

    if (s.all_logits) {
        s.to_boundary = min_u32(s.to_boundary, q->n_prompt - 1 - seq->n_computed);
    } else if (q->echo && seq->n_computed < q->echo_done) {
        s.to_boundary = min_u32(s.to_boundary, q->echo_done - seq->n_computed);
    }
    return s;
}

/* Pages for the pick: free ones, else cached ones, else those of the youngest sequence. False when that is
 * this sequence itself. */
static bool grow(struct dmk_decode_core *core, struct seq *seq, uint32_t n_tokens)
{
    struct group *group = &core->groups[seq->group];
    struct dmk_decode_step *step = &core->step;
    const uint32_t first_copy = step->n_copies;
    int r;

    for (;;) {
        struct seq *victim;

        if (dmk_kv_prefix_make_room(
                group->prefix,
                dmk_kv_table_advance_need(&seq->table, group->pools, seq->n_computed, n_tokens))) {
            dmk_decode_origin_keep(core, seq); /* before the sequence's own pages change */
            r = dmk_kv_table_advance(&seq->table, group->pools, seq->n_computed, n_tokens,
                                     step->copies, &step->n_copies);
            dmk_assert(r == 0);
            break;
        }
        victim = dmk_decode_victim(core, seq->group);
        dmk_assert(victim && !victim->in_step);
        dmk_decode_seq_preempt(core, victim);
        if (victim == seq) {
            return false;
        }
    }
    dmk_decode_copies_of(step, first_copy, seq->group);
    return true;
}

static void add_to_step(struct dmk_decode_core *core, struct seq *seq,
                        const struct dmk_sched_pick *pick)
{
    struct dmk_decode_step *step = &core->step;
    struct request *q = &core->requests[seq->request];
    struct dmk_step_seq *s = &step->seqs[step->n_seqs];
    const bool decodes = pick->n_rows > 0 && seq->n_computed + pick->n_tokens == seq->n_ids;

    step->slots[step->n_seqs++] = seq->index;
    *s = (struct dmk_step_seq){
        .ids = seq->ids + seq->n_computed,
        .n_tokens = pick->n_tokens,
        .pos = seq->n_computed,
        .full_pages = seq->table.full,
        .n_ring = seq->table.n_ring,
        .logits = decodes            ? DMK_LOGITS_LAST
                  : pick->n_rows > 0 ? DMK_LOGITS_ALL
                                     : DMK_LOGITS_NONE,
        .dp = seq->group,
    };
    for (uint32_t i = 0; i < seq->table.n_ring; i++) {
        s->ring[i] = seq->table.ring[i];
    }
    for (uint32_t i = 0; i < pick->n_rows; i++) {
        step->rows[step->n_rows++] =
            (struct row){.seq = seq->index,
                         .pos = seq->n_computed + pick->n_tokens - pick->n_rows + i,
                         .score = !decodes};
    }
    step->n_tokens += pick->n_tokens;
    seq->in_step = true;
    if (q->started_ns == 0) {
        q->started_ns = core->now_ns;
    }
    if (decodes && seq->decode_start_ns == 0) {
        seq->decode_start_ns = core->now_ns;
    }
}

/* A group's picks, oldest first. Growing takes pages from younger sequences of the group only, which come
 * after it and may have lost their place by then. */
static void add_group(struct dmk_decode_core *core, uint32_t group, uint32_t n_picks)
{
    for (uint32_t i = 0; i < n_picks; i++) {
        struct seq *seq = &core->seqs[core->by_age[core->picks[i].index]];

        if (seq->group == group && seq->state == SEQ_RUNNING &&
            grow(core, seq, core->picks[i].n_tokens)) {
            add_to_step(core, seq, &core->picks[i]);
        }
    }
}

struct dmk_decode_step *dmk_decode_plan(struct dmk_decode_core *core, uint64_t now_ns)
{
    struct dmk_decode_step *step = &core->step;
    const struct dmk_sched_limits limits = {
        .step_tokens = core->conf.max_step_tokens,
        .step_seqs = core->conf.max_sequences,
        .logit_rows = core->conf.max_logit_rows,
        .chunk_tokens = core->conf.max_chunk_tokens,
    };
    uint32_t n, n_picks;

    if (step->in_flight || core->broken) {
        return NULL;
    }
    core->now_ns = now_ns;
    step->n_seqs = step->n_copies = step->n_rows = step->n_tokens = 0;
    dmk_decode_resume(core);
    dmk_decode_fork_ready(core);
    n = collect_by_age(core);
    for (uint32_t i = 0; i < n; i++) {
        core->sched[i] = describe(core, &core->seqs[core->by_age[i]]);
    }
    n_picks = dmk_sched_pick(core->sched, n, limits, core->picks);
    for (uint32_t g = 0; g < core->n_groups; g++) {
        add_group(core, g, n_picks);
    }
    if (step->n_seqs == 0) {
        return NULL;
    }
    step->step = (struct dmk_step){.seqs = step->seqs,
                                   .n_seqs = step->n_seqs,
                                   .copies = step->copies,
                                   .n_copies = step->n_copies,
                                   .logits = core->logits};
    step->start_ns = now_ns;
    step->in_flight = true;
    return step;
}

static struct dmk_sample_context context_of(const struct dmk_decode_core *core,
                                            const struct row *row)
{
    const struct seq *seq = &core->seqs[row->seq];
    const struct request *q = &core->requests[seq->request];
    const bool too_short = seq->n_ids - q->n_prompt < q->min_tokens;

    return (struct dmk_sample_context){
        .ids = seq->ids,
        .n_prompt = q->n_prompt,
        .n_ids = seq->n_ids,
        .choice = seq->choice,
        .banned = q->stop_ids,
        .n_banned = too_short ? q->n_stop_ids : 0,
    };
}

static const struct dmk_sample_params *params_of(const struct dmk_decode_core *core,
                                                 const struct row *row)
{
    return &core->requests[core->seqs[row->seq].request].sampling;
}

/* The mask of a sequence's constraint; NULL when its answer is free. As dmk_constraint_mask. */
static int mask_row(struct dmk_decode_core *core, const struct row *row, const uint64_t **ret_mask)
{
    struct seq *seq = &core->seqs[row->seq];
    const struct request *q = &core->requests[seq->request];

    *ret_mask = NULL;
    if (!seq->constraint) {
        return 0;
    }
    return dmk_constraint_mask(core->constraints, seq->constraint, seq->index,
                               seq->ids + q->n_prompt, seq->n_ids - q->n_prompt,
                               &seq->n_constrained, q->stop_ids, q->n_stop_ids, ret_mask);
}

static int sample_row(struct dmk_decode_core *core, const struct row *row, const float *logits,
                      struct dmk_sample_result *ret)
{
    struct dmk_sample_context context = context_of(core, row);
    int r = mask_row(core, row, &context.allowed);

    if (r != 0) {
        return r;
    }
    r = dmk_sample(core->sampler, params_of(core, row), &context, logits, ret);
    if (r == -DMK_ENOENT && context.n_banned > 0 && context.allowed) {
        /* The constraint ends the answer before min_tokens: it goes first. */
        context.n_banned = 0;
        r = dmk_sample(core->sampler, params_of(core, row), &context, logits, ret);
    }
    return r;
}

/* Rows that the engine itself can pick a token for, so that their logits need not travel. */
static void plan_draws(struct dmk_decode_step *step)
{
    const struct dmk_decode_core *core = step->core;

    for (uint32_t i = 0; i < step->n_rows; i++) {
        const struct row *row = &step->rows[i];
        const struct dmk_sample_context context = context_of(core, row);
        struct dmk_sample_draw draw = {0};
        const bool plain =
            !row->score && !core->seqs[row->seq].constraint &&
            dmk_sample_plain(params_of(core, row), &context, core->conf.engine.shape->vocab, &draw);

        step->draws[i] = (struct dmk_step_pick){plain, draw.scale, draw.min_p, draw.unit};
    }
    step->step.picks = step->draws;
    step->step.picked = step->drawn;
}

/* An engine that picks tokens itself knows no probabilities. */
static int pick_row(struct dmk_decode_core *core, uint32_t index, const struct row *row,
                    struct dmk_sample_result *ret)
{
    const struct seq *seq = &core->seqs[row->seq];
    const struct request *q = &core->requests[seq->request];
    struct dmk_engine_pick pick = {
        .row = index,
        .ids = seq->ids,
        .n_prompt = q->n_prompt,
        .n_ids = seq->n_ids,
        .may_end = seq->n_ids - q->n_prompt >= q->min_tokens,
    };
    const int r = row->score ? 0 : mask_row(core, row, &pick.allowed);

    if (r != 0) {
        return r;
    }
    *ret = (struct dmk_sample_result){
        .id = row->score ? seq->ids[row->pos + 1]
                         : core->conf.engine.pick(core->conf.engine.engine, &pick)};
    return 0;
}

void dmk_decode_run(struct dmk_decode_step *step)
{
    struct dmk_decode_core *core = step->core;
    const size_t vocab = core->conf.engine.shape->vocab;

    if (core->conf.engine.samples) {
        plan_draws(step);
    }
    step->status = core->conf.engine.step(core->conf.engine.engine, &step->step);
    for (uint32_t i = 0; step->status == 0 && i < step->n_rows; i++) {
        struct row *row = &step->rows[i];
        const float *logits = core->logits ? core->logits + i * vocab : NULL;

        if (core->conf.engine.pick) {
            row->status = pick_row(core, i, row, &step->results[i]);
        } else if (step->draws && step->draws[i].pick) {
            const struct dmk_step_picked *p = &step->drawn[i];

            row->status = p->status;
            dmk_sample_plain_result(params_of(core, row), p->id, p->logit, p->max, p->sum,
                                    &step->results[i]);
        } else if (row->score) {
            const struct seq *seq = &core->seqs[row->seq];
            const struct request *q = &core->requests[seq->request];

            row->status = dmk_sample_score(core->sampler, logits, seq->ids[row->pos + 1],
                                           q->sampling.top_logprobs, &step->results[i]);
        } else {
            row->status = sample_row(core, row, logits, &step->results[i]);
        }
    }
}

static bool is_stop_id(const struct request *q, uint32_t id)
{
    for (uint32_t i = 0; i < q->n_stop_ids; i++) {
        if (q->stop_ids[i] == id) {
            return true;
        }
    }
    return false;
}

static uint64_t us_between(uint64_t from_ns, uint64_t to_ns)
{
    return from_ns != 0 && to_ns > from_ns ? (to_ns - from_ns) / 1000 : 0;
}

static void finish_choice(struct dmk_decode_core *core, struct seq *seq, bool stopped)
{
    struct request *q = &core->requests[seq->request];
    struct dmk_decode_event event = {.kind = DMK_DECODE_FINISHED};

    event.finished.choice = seq->choice;
    event.finished.stopped = stopped;
    event.finished.n_tokens = seq->n_ids - q->n_prompt;
    event.finished.n_cached = q->have;
    event.finished.n_preemptions = seq->n_preemptions;
    event.finished.queue_us = us_between(q->remote ? q->ready_ns : q->arrived_ns, q->started_ns);
    event.finished.prefill_us = q->remote ? 0 : us_between(q->started_ns, q->prompt_done_ns);
    event.finished.transfer_us = q->transfer_us;
    event.finished.transfer_bytes = q->transfer_bytes;
    event.finished.decode_us = us_between(seq->decode_start_ns, core->now_ns);
    dmk_decode_seq_cache(core, seq);
    dmk_decode_emit(core, q, &event);
    dmk_decode_seq_end(core, seq);
}

static void take_token(struct dmk_decode_core *core, struct seq *seq,
                       const struct dmk_sample_result *result)
{
    struct request *q = &core->requests[seq->request];
    const uint32_t index = seq->n_ids - q->n_prompt;
    struct dmk_decode_event event = {.kind = DMK_DECODE_TOKEN};

    seq->ids[seq->n_ids++] = result->id;
    core->n_tokens++;
    event.token.choice = seq->choice;
    event.token.index = index;
    event.token.with_logprobs = q->sampling.logprobs;
    event.token.result = result;
    dmk_decode_emit(core, q, &event);
    if (is_stop_id(q, result->id)) {
        finish_choice(core, seq, true);
    } else if (index + 1 == q->max_tokens || seq->n_ids == core->conf.max_context) {
        finish_choice(core, seq, false);
    }
}

static void take_scores(struct dmk_decode_core *core, struct seq *seq,
                        const struct dmk_sample_result *rows, uint32_t first, uint32_t n)
{
    struct request *q = &core->requests[seq->request];
    struct dmk_decode_event event = {.kind = DMK_DECODE_PROMPT_LOGPROBS};

    q->echo_done = first + n;
    event.prompt_logprobs.first = first + 1;
    event.prompt_logprobs.n = n;
    event.prompt_logprobs.rows = rows;
    dmk_decode_emit(core, q, &event);
}

/* What one sequence's part of a good step brought. Its rows start at results[0]. */
static void take_results(struct dmk_decode_core *core, struct seq *seq,
                         const struct dmk_step_seq *part, const struct dmk_sample_result *results)
{
    struct request *q = &core->requests[seq->request];
    const uint32_t before = seq->n_computed;

    seq->n_computed += part->n_tokens;
    if (before + 1 < q->n_prompt) {
        core->n_prompt_tokens += min_u32(part->n_tokens, q->n_prompt - 1 - before);
    }
    if (seq->choice == 0 && before < q->n_prompt - 1 && seq->n_computed == q->n_prompt - 1) {
        dmk_decode_prompt_done(core, seq);
    } else if (seq->n_computed % DMK_KV_BOUNDARY_TOKENS == 0) {
        dmk_decode_seq_cache(core, seq);
    }
    if (part->logits == DMK_LOGITS_ALL) {
        take_scores(core, seq, results, before, part->n_tokens);
    } else if (part->logits == DMK_LOGITS_LAST) {
        take_token(core, seq, results);
    }
}

/* Why a sequence's rows gave no token; NULL when all did. */
static const char *find_bad_row(const struct row *rows, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (rows[i].status == -DMK_EFORMAT) {
            return "the model's logits are not finite";
        }
        if (rows[i].status == -DMK_EMISMATCH) {
            return "the answer does not fit its constraint any more";
        }
        if (rows[i].status < 0) {
            return "bans, biases and the constraint leave no token to pick";
        }
    }
    return NULL;
}

void dmk_decode_done(struct dmk_decode_core *core, struct dmk_decode_step *step, uint64_t now_ns)
{
    const double ms = (double)(now_ns - step->start_ns) / 1e6;
    uint32_t row = 0;

    dmk_assert(step->in_flight);
    core->now_ns = now_ns;
    step->in_flight = false;
    core->n_steps++;
    core->step_ms = core->n_steps == 1 ? ms : 0.9 * core->step_ms + 0.1 * ms;
    if (step->status != 0 && dmk_status_radius(step->status) == DMK_RADIUS_DEVICE) {
        core->broken = true;
    }
    for (uint32_t i = 0; i < core->n_slots; i++) {
        core->seqs[i].in_step = false;
        if (core->seqs[i].state == SEQ_LEAVING) {
            dmk_decode_seq_release(core, &core->seqs[i]);
        }
        if (core->requests[i].origin_leaving) {
            dmk_decode_origin_release(core, &core->requests[i]);
        }
    }
    for (uint32_t i = 0; i < step->n_seqs; i++) {
        const struct dmk_step_seq *part = &step->seqs[i];
        struct seq *seq = &core->seqs[step->slots[i]];
        const struct dmk_sample_result *results = &step->results[row];
        const uint32_t n_rows = part->logits == DMK_LOGITS_LAST  ? 1
                                : part->logits == DMK_LOGITS_ALL ? part->n_tokens
                                                                 : 0;
        const char *bad = step->status == 0 ? find_bad_row(&step->rows[row], n_rows) : NULL;

        row += n_rows;
        if (seq->state == SEQ_RUNNING && bad) {
            dmk_decode_request_fail(core, &core->requests[seq->request], DMK_FAILURE_INTERNAL, 0,
                                    bad);
        } else if (seq->state == SEQ_RUNNING && step->status == 0 && n_rows == 1 &&
                   step->rows[row - 1].status == ROW_ENDED) {
            seq->n_computed += part->n_tokens;
            finish_choice(core, seq, true);
        } else if (seq->state == SEQ_RUNNING && step->status == 0) {
            take_results(core, seq, part, results);
        } else if (seq->state == SEQ_RUNNING) {
            dmk_decode_request_fail(core, &core->requests[seq->request], DMK_FAILURE_INTERNAL, 0,
                                    dmk_status_message(step->status));
        }
    }
}
