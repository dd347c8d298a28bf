/* A sequence's states: made, ready, forked, preempted, resumed, ended. Every way out of a state is here, so
 * that pages are given back in one place. Owner: the worker's loop. */
#include "decode/core_state.h"

#include "common/base/assert.h"
#include "common/base/status.h"

struct seq *dmk_decode_seq_new(struct dmk_decode_core *core, uint32_t request, uint32_t choice,
                               uint32_t group)
{
    for (uint32_t i = 0; i < core->n_slots; i++) {
        struct seq *seq = &core->seqs[i];

        if (seq->state != SEQ_FREE) {
            continue;
        }
        dmk_assert(seq->table.n_full == 0);
        seq->request = request;
        seq->choice = choice;
        seq->group = group;
        seq->generation++;
        seq->order = core->next_order++;
        seq->n_ids = seq->n_computed = seq->n_constrained = 0;
        seq->constraint = NULL;
        seq->in_step = seq->has_ticket = seq->quiet = false;
        seq->copied_in = UINT64_MAX;
        seq->n_preemptions = 0;
        seq->decode_start_ns = 0;
        core->n_active++;
        return seq;
    }
    return NULL;
}

void dmk_decode_seq_cache(struct dmk_decode_core *core, struct seq *seq)
{
    const struct request *q = &core->requests[seq->request];
    /* In mixed pools only what came from a prefill worker may serve other prompts. */
    const bool of_prompts =
        !core->mixed || (dmk_decode_has_origin(core, q) && seq->n_computed < q->n_prompt);

    if (core->conf.reuse && of_prompts && seq->n_computed >= DMK_PAGE_TOKENS) {
        dmk_kv_prefix_insert(core->groups[seq->group].prefix, q->root, seq->ids, seq->n_computed,
                             &seq->table);
    }
}

void dmk_decode_prompt_done(struct dmk_decode_core *core, struct seq *seq)
{
    struct request *request = &core->requests[seq->request];

    if (request->prompt_done_ns == 0) {
        request->prompt_done_ns = core->now_ns;
    }
    dmk_decode_seq_cache(core, seq);
}

/* The receiver need not remember a ticket whose pages are this sequence's own by now. */
static void forget_ticket(struct dmk_decode_core *core, struct seq *seq)
{
    if (seq->has_ticket) {
        seq->has_ticket = false;
        dmk_receiver_finish(core->receiver, dmk_decode_key(seq));
    }
}

void dmk_decode_seq_release(struct dmk_decode_core *core, struct seq *seq)
{
    dmk_kv_table_release(&seq->table, core->groups[seq->group].pools);
    if (seq->constraint) {
        dmk_constraint_drop(seq->constraint);
        seq->constraint = NULL;
    }
    core->requests[seq->request].n_leaving -= seq->state == SEQ_LEAVING;
    seq->state = SEQ_FREE;
}

/* The sequence has no request any more. What becomes of its pages depends on who may still write to them. */
static void leave(struct dmk_decode_core *core, struct seq *seq)
{
    dmk_assert(core->n_active > 0);
    core->n_active--;
    switch (seq->state) {
    case SEQ_KV_WAIT:
        dmk_kv_table_drain(&seq->table, core->groups[seq->group].pools, seq->ticket_first,
                           seq->ticket_end);
        seq->state = SEQ_DRAINING;
        if (seq->quiet) {
            dmk_decode_seq_release(core, seq);
        } else if (seq->has_ticket) {
            dmk_receiver_cancel(core->receiver, dmk_decode_key(seq), core->now_ns);
        }
        break;
    case SEQ_FORK_WAIT:
    case SEQ_RUNNING:
    case SEQ_PREEMPTED:
        forget_ticket(core, seq);
        if (seq->in_step || (core->step.in_flight && seq->copied_in == core->n_steps)) {
            seq->state = SEQ_LEAVING;
            core->requests[seq->request].n_leaving++;
        } else {
            dmk_decode_seq_release(core, seq);
        }
        break;
    default:
        dmk_unreachable("a sequence without request left twice");
    }
}

void dmk_decode_seq_end(struct dmk_decode_core *core, struct seq *seq)
{
    struct request *request = &core->requests[seq->request];

    request->seqs[seq->choice] = NO_SEQ;
    leave(core, seq);
    dmk_assert(request->n_live > 0);
    if (--request->n_live == 0) {
        request->used = false;
        dmk_decode_origin_release(core, request);
    }
}

void dmk_decode_request_end(struct dmk_decode_core *core, struct request *request)
{
    for (uint32_t c = 0; request->used && c < request->n_choices; c++) {
        if (request->seqs[c] != NO_SEQ) {
            dmk_decode_seq_end(core, &core->seqs[request->seqs[c]]);
        }
    }
}

void dmk_decode_request_fail(struct dmk_decode_core *core, struct request *request,
                             enum dmk_failure code, uint32_t retry_after_ms, const char *text)
{
    struct dmk_decode_event event = {.kind = DMK_DECODE_FAILED};

    event.failed.code = code;
    event.failed.text = text;
    event.failed.retry_after_ms = retry_after_ms;
    dmk_decode_emit(core, request, &event);
    dmk_decode_request_end(core, request);
}

struct seq *dmk_decode_victim(struct dmk_decode_core *core, uint32_t group)
{
    struct seq *best = NULL;

    for (uint32_t i = 0; i < core->n_slots; i++) {
        struct seq *seq = &core->seqs[i];

        if ((seq->state == SEQ_RUNNING || seq->state == SEQ_FORK_WAIT) && seq->group == group &&
            (!best || seq->order > best->order)) {
            best = seq;
        }
    }
    return best;
}

void dmk_decode_seq_preempt(struct dmk_decode_core *core, struct seq *seq)
{
    dmk_assert(!seq->in_step);
    forget_ticket(core, seq);
    dmk_decode_origin_give_up(core, seq);
    seq->state = SEQ_PREEMPTED;
    seq->n_computed = 0;
    seq->n_preemptions++;
    core->n_preemptions++;
}

/* A further choice that gave way before the first one's prompt was there waits for that. */
static bool may_go_on(const struct dmk_decode_core *core, const struct seq *seq)
{
    const struct request *q = &core->requests[seq->request];

    return !dmk_decode_has_origin(core, q) || q->origin_kept;
}

static struct seq *oldest_preempted(struct dmk_decode_core *core, uint32_t group)
{
    struct seq *best = NULL;

    for (uint32_t i = 0; i < core->n_slots; i++) {
        struct seq *seq = &core->seqs[i];

        if (seq->state == SEQ_PREEMPTED && seq->group == group && may_go_on(core, seq) &&
            (!best || seq->order < best->order)) {
            best = seq;
        }
    }
    return best;
}

/* Pages for what the sequence holds and one page more; a cached prefix, or the origin, shortens the way back. */
static bool try_resume(struct dmk_decode_core *core, struct seq *seq, uint32_t n_running)
{
    const struct group *group = &core->groups[seq->group];
    const struct request *request = &core->requests[seq->request];
    const struct dmk_kv_pool_counts full = dmk_kv_pool_counts(group->pools.full);
    const bool has_origin = dmk_decode_has_origin(core, request);
    const uint64_t end = (uint64_t)request->n_prompt + request->max_tokens;
    uint32_t n_tokens = seq->n_ids + DMK_PAGE_TOKENS;
    uint32_t n_shared = has_origin ? (request->n_prompt - 1) / DMK_PAGE_TOKENS : 0;
    uint32_t have = 0;

    n_tokens = n_tokens < core->conf.max_context ? n_tokens : core->conf.max_context;
    n_tokens = n_tokens < end ? n_tokens : (uint32_t)end;
    if (!dmk_sched_may_resume(n_running, dmk_kv_pages_for(n_tokens) - n_shared,
                              full.free + full.cached)) {
        return false;
    }
    if (has_origin) {
        seq->state = dmk_decode_origin_resume(core, seq, n_tokens) ? SEQ_RUNNING : SEQ_PREEMPTED;
        return seq->state == SEQ_RUNNING;
    }
    if (core->conf.reuse && !core->mixed &&
        !(request->echo && request->echo_done + 1 < request->n_prompt)) {
        have = dmk_kv_prefix_take(group->prefix, request->root, seq->ids, seq->n_ids - 1, true,
                                  &seq->table);
    }
    if (!dmk_kv_prefix_make_room(group->prefix, dmk_kv_table_reserve_need(&seq->table, n_tokens)) ||
        dmk_kv_table_reserve(&seq->table, group->pools, n_tokens) != 0) {
        dmk_kv_table_release(&seq->table, group->pools);
        return false;
    }
    seq->n_computed = have;
    seq->state = SEQ_RUNNING;
    return true;
}

void dmk_decode_resume(struct dmk_decode_core *core)
{
    for (uint32_t g = 0; g < core->n_groups; g++) {
        uint32_t n_running = 0;
        struct seq *seq;

        for (uint32_t i = 0; i < core->n_slots; i++) {
            n_running += core->seqs[i].state == SEQ_RUNNING && core->seqs[i].group == g;
        }
        while ((seq = oldest_preempted(core, g)) != NULL && try_resume(core, seq, n_running)) {
            n_running++;
        }
    }
}

/* Gives one further choice its pages: its spare ones go back first, and are at least as many as the fork
 * needs. */
static void fork_choice(struct dmk_decode_core *core, const struct seq *parent, struct seq *child)
{
    const struct request *request = &core->requests[parent->request];
    const struct dmk_kv_pools pools = core->groups[parent->group].pools;
    const uint32_t n_tokens = request->n_prompt - 1;
    const uint32_t n_spare = child->table.n_full;
    struct dmk_decode_step *step = &core->step;
    const uint32_t first_copy = step->n_copies;
    int r;

    dmk_kv_table_release(&child->table, pools);
    r = dmk_kv_table_fork(&parent->table, &child->table, pools, n_tokens,
                          (n_tokens / DMK_PAGE_TOKENS + n_spare) * DMK_PAGE_TOKENS, step->copies,
                          &step->n_copies);
    dmk_assert(r == 0);
    dmk_decode_copies_of(step, first_copy, child->group);
    child->copied_in = core->n_steps;
    child->n_computed = n_tokens;
    child->state = SEQ_RUNNING;
}

void dmk_decode_fork_ready(struct dmk_decode_core *core)
{
    for (uint32_t i = 0; i < core->n_slots; i++) {
        struct seq *child = &core->seqs[i];
        const struct request *request;
        struct seq *parent;

        if (child->state != SEQ_FORK_WAIT) {
            continue;
        }
        request = &core->requests[child->request];
        if (request->seqs[0] == NO_SEQ) {
            continue; /* can not be: the first choice ends after the step that all start in */
        }
        parent = &core->seqs[request->seqs[0]];
        if (parent->state == SEQ_RUNNING && parent->n_computed == request->n_prompt - 1 &&
            parent->group == child->group) {
            fork_choice(core, parent, child);
        }
    }
}
