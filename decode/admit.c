/* From a request to its pages: what can never work is refused for good, what does not fit now is refused
 * with a hint when to come again, all else gets its pages at once - with a ticket for a prefill worker, or
 * to compute its prompt here. Owner: the worker's loop. */
#include "decode/core_state.h"

#include <stdio.h>
#include <string.h>
#include "common/base/assert.h"

/* A sequence more in a group's steps weighs as much as this many prompt tokens that need no computing. */
#define SEQUENCE_TOKENS 256

/* Where a request goes and what it takes, before anything is taken. */
struct placement {
    uint32_t group;
    uint32_t have;      /* cached tokens it can start from */
    bool local;         /* the prompt is computed here */
    uint32_t n_covered; /* tokens that the reservation covers, per choice */
};

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static void refuse(struct dmk_decode_core *core, const struct dmk_decode_request *r,
                   enum dmk_failure code, uint32_t retry_after_ms, const char *text)
{
    struct dmk_decode_event event = {.kind = DMK_DECODE_FAILED, .router = r->router, .id = r->id};

    event.failed.code = code;
    event.failed.text = text;
    event.failed.retry_after_ms = retry_after_ms;
    dmk_decode_emit(core, NULL, &event);
}

/* What is wrong with a request that no wait would cure; NULL = nothing. text has room for a sentence. */
static const char *find_fault(const struct dmk_decode_core *core,
                              const struct dmk_decode_request *r, char *text, size_t cap)
{
    const struct dmk_sample_params *s = r->sampling;
    const uint32_t vocab = core->conf.engine.shape->vocab;
    struct dmk_error error;

    if (r->n_prompt == 0) {
        return "the prompt is empty";
    }
    if (r->n_prompt >= core->conf.max_context) {
        snprintf(text, cap, "the prompt has %u tokens, the context of this worker ends at %u",
                 r->n_prompt, core->conf.max_context);
        return text;
    }
    for (uint32_t i = 0; i < r->n_prompt; i++) {
        if (r->prompt[i] >= vocab) {
            snprintf(text, cap, "token id %u of the prompt is not below the vocabulary's size %u",
                     r->prompt[i], vocab);
            return text;
        }
    }
    if (dmk_sample_params_check(s, vocab, &error) < 0) {
        snprintf(text, cap, "%.*s", (int)cap - 1, error.text);
        return text;
    }
    if (r->max_tokens == 0) {
        return "max_tokens is 0";
    }
    if (r->n == 0 || r->n > DMK_DECODE_MAX_CHOICES || r->n > core->conf.max_sequences) {
        snprintf(text, cap, "%u choices are asked for, this worker gives 1 to %u", r->n,
                 min_u32(DMK_DECODE_MAX_CHOICES, core->conf.max_sequences));
        return text;
    }
    if (r->n_stop_ids > DMK_DECODE_MAX_STOP_IDS) {
        snprintf(text, cap, "%u stop ids are given, the bound is %u", r->n_stop_ids,
                 DMK_DECODE_MAX_STOP_IDS);
        return text;
    }
    for (uint32_t i = 0; i < r->n_stop_ids; i++) {
        if (r->stop_ids[i] >= vocab) {
            snprintf(text, cap, "stop id %u is not below the vocabulary's size %u", r->stop_ids[i],
                     vocab);
            return text;
        }
    }
    return NULL;
}

/* Pages of all choices: the first one's own, what each further one does not share with it, and the spare one of an
 * origin. */
static uint64_t pages_of(const struct dmk_decode_core *core, const struct dmk_decode_request *r,
                         uint32_t n_covered)
{
    const uint32_t all = dmk_kv_pages_for(n_covered);
    const uint32_t spare = dmk_decode_needs_origin(core, r->n_prompt, r->echo_logprobs) ? 1 : 0;

    return all + (uint64_t)(r->n - 1) * (all - (r->n_prompt - 1) / DMK_PAGE_TOKENS) + spare;
}

static bool wants_local(const struct dmk_decode_core *core, const struct dmk_decode_request *r,
                        uint32_t have)
{
    const uint32_t missing = r->n_prompt - 1 - have;

    if (core->mixed) {
        return missing == 0 || r->echo_logprobs;
    }
    return missing == 0 || !core->receiver || r->force_local || r->echo_logprobs ||
           missing < core->conf.local_prefill_below ||
           core->conf.local_prefill_below == DMK_DECODE_LOCAL_ALWAYS ||
           dmk_kv_pages_for(r->n_prompt - 1) - have / DMK_PAGE_TOKENS > DMK_TICKET_MAX_PAGES;
}

/* Tokens that the reservation covers for each choice. */
static uint32_t covered_by(const struct dmk_decode_core *core, const struct dmk_decode_request *r)
{
    const uint64_t n = (uint64_t)r->n_prompt + min_u32(r->max_tokens, DMK_DECODE_RESERVE_AHEAD);

    return n < core->conf.max_context ? (uint32_t)n : core->conf.max_context;
}

/* Of each group: its sequences that a request waits for, and whether one of them waits for pages to come
 * back; new requests come after that one. */
static void survey(const struct dmk_decode_core *core, uint32_t n_live[DMK_PORT_MAX_RANKS],
                   bool starved[DMK_PORT_MAX_RANKS])
{
    memset(n_live, 0, DMK_PORT_MAX_RANKS * sizeof(*n_live));
    memset(starved, 0, DMK_PORT_MAX_RANKS * sizeof(*starved));
    for (uint32_t i = 0; i < core->n_slots; i++) {
        const struct seq *seq = &core->seqs[i];

        n_live[seq->group] += seq->state == SEQ_KV_WAIT || seq->state == SEQ_FORK_WAIT ||
                              seq->state == SEQ_RUNNING || seq->state == SEQ_PREEMPTED;
        starved[seq->group] = starved[seq->group] || seq->state == SEQ_PREEMPTED;
    }
}

/* Picks a group among those that are not in `tried`: a cached prefix speaks for a group, by its tokens, and
 * each sequence that the group has beyond the one with fewest speaks against it, or a beginning that all
 * prompts share would draw everything into one group. The most room decides among equals. False when no
 * group can take a new request. */
static bool place(const struct dmk_decode_core *core, const struct dmk_decode_request *r,
                  struct dmk_id128 root, uint32_t tried, struct placement *ret)
{
    uint32_t n_live[DMK_PORT_MAX_RANKS], fewest = UINT32_MAX, best_room = 0;
    bool starved[DMK_PORT_MAX_RANKS], found = false;
    int64_t best = 0;

    survey(core, n_live, starved);
    for (uint32_t g = 0; g < core->n_groups; g++) {
        fewest = min_u32(fewest, n_live[g]);
    }
    for (uint32_t g = 0; g < core->n_groups; g++) {
        const struct dmk_kv_pool_counts c = dmk_kv_pool_counts(core->groups[g].pools.full);
        uint32_t have = 0;
        int64_t score;

        if ((tried >> g & 1) || starved[g] || !dmk_decode_origin_fits(core, g, r)) {
            continue;
        }
        if (core->conf.reuse && !r->echo_logprobs) {
            have = dmk_kv_prefix_find(core->groups[g].prefix, root, r->prompt, r->n_prompt - 1);
        }
        score = (int64_t)have - (int64_t)(n_live[g] - fewest) * SEQUENCE_TOKENS;
        if (!found || score > best || (score == best && c.free + c.cached > best_room)) {
            *ret = (struct placement){.group = g, .have = have};
            best = score;
            best_room = c.free + c.cached;
            found = true;
        }
    }
    ret->n_covered = covered_by(core, r);
    ret->local = found && wants_local(core, r, ret->have);
    return found;
}

static uint32_t wait_hint(const struct dmk_decode_core *core)
{
    uint32_t left = UINT32_MAX;

    for (uint32_t i = 0; i < core->n_slots; i++) {
        const struct seq *seq = &core->seqs[i];

        if (seq->state == SEQ_RUNNING) {
            const struct request *r = &core->requests[seq->request];

            left = min_u32(left, r->n_prompt + r->max_tokens - seq->n_ids);
        }
    }
    return dmk_sched_wait_hint_ms(core->step_ms, left == UINT32_MAX ? 0 : left);
}

static void fill_request(struct dmk_decode_core *core, struct request *q,
                         const struct dmk_decode_request *r, struct dmk_id128 root, uint64_t now_ns)
{
    const struct dmk_shape *shape = core->conf.engine.shape;

    q->used = true;
    q->router = r->router;
    q->id = r->id;
    q->sampling = *r->sampling;
    if (q->sampling.n_bias > 0) {
        memcpy(q->bias_ids, r->sampling->bias_ids, q->sampling.n_bias * sizeof(q->bias_ids[0]));
        memcpy(q->bias_values, r->sampling->bias_values,
               q->sampling.n_bias * sizeof(q->bias_values[0]));
    }
    q->sampling.bias_ids = q->bias_ids;
    q->sampling.bias_values = q->bias_values;
    q->n_stop_ids = r->n_stop_ids;
    if (r->n_stop_ids > 0) {
        memcpy(q->stop_ids, r->stop_ids, r->n_stop_ids * sizeof(q->stop_ids[0]));
    }
    for (uint32_t i = 0; !r->ignore_eos && i < shape->n_eos; i++) {
        q->stop_ids[q->n_stop_ids++] = shape->eos_ids[i];
    }
    q->n_prompt = r->n_prompt;
    q->max_tokens = r->max_tokens;
    q->min_tokens = r->min_tokens;
    q->root = root;
    q->have = 0;
    q->echo = r->echo_logprobs;
    q->echo_done = 0;
    q->origin_kept = q->origin_leaving = false;
    q->n_choices = q->n_live = 0;
    q->arrived_ns = now_ns;
    q->ready_ns = q->started_ns = q->prompt_done_ns = 0;
    q->transfer_bytes = q->transfer_us = 0;
    q->remote = false;
}

/* Takes the pages of one choice: 0, or -DMK_EFULL and nothing is held. */
static int take_pages(struct dmk_decode_core *core, struct seq *seq, const struct request *q,
                      const struct placement *p)
{
    const struct group *group = &core->groups[seq->group];
    struct dmk_kv_table *table = &seq->table;
    uint32_t n_tokens = p->n_covered;

    if (seq->choice > 0) {
        n_tokens -= (q->n_prompt - 1) / DMK_PAGE_TOKENS * DMK_PAGE_TOKENS;
    } else if (p->have > 0) {
        seq->n_computed =
            dmk_kv_prefix_take(group->prefix, q->root, seq->ids, q->n_prompt - 1, p->local, table);
        dmk_assert(seq->n_computed == p->have);
    }
    if (!dmk_kv_prefix_make_room(group->prefix, dmk_kv_table_reserve_need(table, n_tokens)) ||
        dmk_kv_table_reserve(table, group->pools, n_tokens) != 0) {
        dmk_kv_table_release(table, group->pools);
        return -DMK_EFULL;
    }
    return 0;
}

static int take_nothing(struct dmk_decode_core *core, struct request *q)
{
    dmk_decode_request_end(core, q);
    q->used = false;
    return -DMK_EFULL;
}

/* Makes the sequences of all choices with their pages: all or none. */
static int take_all(struct dmk_decode_core *core, struct request *q, uint32_t n,
                    const uint32_t *prompt, const struct placement *p)
{
    q->group = p->group;
    for (uint32_t c = 0; c < n; c++) {
        struct seq *seq = dmk_decode_seq_new(core, (uint32_t)(q - core->requests), c, p->group);

        if (seq) {
            memcpy(seq->ids, prompt, q->n_prompt * sizeof(*prompt));
            seq->n_ids = q->n_prompt;
        }
        if (!seq || take_pages(core, seq, q, p) != 0) {
            if (seq) {
                core->n_active--; /* the slot is still free: it never got a state */
            }
            return take_nothing(core, q);
        }
        seq->state = c > 0 ? SEQ_FORK_WAIT : SEQ_RUNNING;
        q->seqs[c] = seq->index;
        q->n_choices = q->n_live = c + 1;
    }
    if (dmk_decode_origin_reserve(core, q) != 0) {
        return take_nothing(core, q);
    }
    q->have = p->have;
    return 0;
}

/* Everything in a ticket that does not depend on the request. */
void dmk_decode_ticket_prepare(struct dmk_decode_core *core)
{
    const struct dmk_engine_port *e = &core->conf.engine;
    struct dmk_ticket *t = core->ticket;

    t->model_id = e->model_id;
    snprintf(t->numerics, sizeof(t->numerics), "%s", core->conf.engine.prompt_numerics);
    t->n_full_layers = dmk_shape_n_full_layers(e->shape);
    t->n_window_layers = dmk_shape_n_window_layers(e->shape);
    t->n_kv_heads = e->shape->n_kv_heads;
    t->page_tokens = DMK_PAGE_TOKENS;
    t->page_bytes = e->kv[0]->layout.page_bytes;
    t->n_ring = DMK_WINDOW_RING;
}

/* Registers and encodes the ticket of a sequence whose pages are pinned. */
static int make_ticket(struct dmk_decode_core *core, struct seq *seq, const struct request *q,
                       uint64_t now_ns)
{
    struct dmk_ticket *t = core->ticket;
    const uint32_t tp = core->conf.engine.layout.tp;
    int r;

    seq->ticket_first = q->have / DMK_PAGE_TOKENS;
    seq->ticket_end = dmk_kv_pages_for(q->n_prompt - 1);
    t->have = q->have;
    t->n_tokens = q->n_prompt - 1;
    t->n_pages = seq->ticket_end - seq->ticket_first;
    memcpy(t->pages, &seq->table.full[seq->ticket_first], t->n_pages * sizeof(t->pages[0]));
    memcpy(t->ring, seq->table.ring, sizeof(t->ring));
    t->n_ranks = tp;
    memcpy(t->ranks, &core->ranks[seq->group * tp], tp * sizeof(t->ranks[0]));
    r = dmk_receiver_reserve(core->receiver, dmk_decode_key(seq), t->n_pages + t->n_ring, now_ns, t,
                             NULL);
    if (r != 0) {
        return r;
    }
    seq->has_ticket = true;
    dmk_buf_reset(&core->ticket_blob);
    dmk_ticket_encode(t, &core->ticket_blob);
    return core->ticket_blob.failed ? -DMK_EFULL : 0;
}

static struct request *find_free(struct dmk_decode_core *core)
{
    for (uint32_t i = 0; i < core->n_slots; i++) {
        if (!core->requests[i].used && core->requests[i].n_leaving == 0) {
            return &core->requests[i];
        }
    }
    return NULL;
}

static bool is_known(const struct dmk_decode_core *core, const struct dmk_decode_request *r)
{
    for (uint32_t i = 0; i < core->n_slots; i++) {
        const struct request *q = &core->requests[i];

        if (q->used && q->router == r->router && dmk_request_id_equal(q->id, r->id)) {
            return true;
        }
    }
    return false;
}

/* The request has its pages: hands out a ticket, or leaves the prompt to the scheduler. */
static void begin(struct dmk_decode_core *core, struct request *q, bool local, uint64_t now_ns)
{
    struct seq *first = &core->seqs[q->seqs[0]];
    struct dmk_decode_event event = {.kind = DMK_DECODE_RESERVED};

    if (local) {
        q->ready_ns = now_ns;
        core->n_local += q->n_prompt - 1 > q->have;
        if (first->n_computed == q->n_prompt - 1) {
            q->prompt_done_ns = now_ns;
        }
    } else {
        first->state = SEQ_KV_WAIT;
        q->remote = true;
        if (make_ticket(core, first, q, now_ns) != 0) {
            first->quiet = !first->has_ticket;
            dmk_decode_request_fail(core, q, DMK_FAILURE_FULL, 100,
                                    "no further page transfer can be taken at this moment");
            return;
        }
        core->n_remote++;
        event.reserved.needs_prefill = true;
        event.reserved.ticket = dmk_buf_bytes(&core->ticket_blob);
    }
    core->n_query_tokens += core->conf.reuse && !q->echo ? q->n_prompt : 0;
    core->n_hit_tokens += q->have;
    event.reserved.have = q->have;
    dmk_decode_emit(core, q, &event);
}

/* Finds or loads the request's constraint; *ret is NULL when it has none. False: the request was refused. */
static bool take_constraint(struct dmk_decode_core *core, const struct dmk_decode_request *r,
                            struct dmk_constraint **ret)
{
    struct dmk_error error;
    int rc;

    if (r->constraint.len == 0) {
        return true;
    }
    rc = dmk_constraints_take(core->constraints, r->constraint, ret, &error);
    if (rc == -DMK_EFULL) {
        refuse(core, r, DMK_FAILURE_FULL, wait_hint(core), error.text);
    } else if (rc < 0) {
        refuse(core, r, rc == -DMK_EMISMATCH ? DMK_FAILURE_MISMATCH : DMK_FAILURE_INVALID, 0,
               error.text);
    }
    return rc == 0;
}

/* Each choice walks it for itself and holds it until its slot is released. */
static void give_constraint(struct dmk_decode_core *core, const struct request *q,
                            struct dmk_constraint *constraint)
{
    for (uint32_t c = 0; constraint && c < q->n_choices; c++) {
        if (c > 0) {
            dmk_constraint_hold(constraint);
        }
        core->seqs[q->seqs[c]].constraint = constraint;
    }
}

void dmk_decode_generate(struct dmk_decode_core *core, const struct dmk_decode_request *r,
                         uint64_t now_ns)
{
    char text[256];
    const char *fault = find_fault(core, r, text, sizeof(text));
    struct dmk_id128 root;
    struct placement p;
    struct request *q;
    struct dmk_constraint *constraint = NULL;
    uint32_t tried = 0; /* groups without enough pages, a bit each */
    uint64_t n_pages;

    core->now_ns = now_ns;
    if (fault) {
        refuse(core, r, DMK_FAILURE_INVALID, 0, fault);
        return;
    }
    if (core->draining || core->broken) {
        refuse(core, r, DMK_FAILURE_DRAINING, 0, "this worker takes no new requests");
        return;
    }
    if (is_known(core, r)) {
        return; /* sent twice: the first one's events answer it */
    }
    n_pages = pages_of(core, r, covered_by(core, r));
    if (n_pages > core->conf.n_full_pages || r->n * DMK_WINDOW_RING > core->conf.n_window_pages) {
        snprintf(text, sizeof(text), "%llu pages are needed, this worker has %u%s",
                 (unsigned long long)n_pages, core->conf.n_full_pages,
                 core->n_groups > 1 ? " in a group" : "");
        refuse(core, r, DMK_FAILURE_INVALID, 0, text);
        return;
    }
    if (dmk_decode_needs_origin(core, r->n_prompt, r->echo_logprobs) &&
        (r->force_local || dmk_kv_pages_for(r->n_prompt - 1) > DMK_TICKET_MAX_PAGES)) {
        snprintf(text, sizeof(text),
                 "this worker computes no prompts: they are to be computed as \"%s\"",
                 core->conf.engine.prompt_numerics);
        refuse(core, r, DMK_FAILURE_MISMATCH, 0, text);
        return;
    }
    root = dmk_block_root(core->conf.engine.prompt_numerics, r->salt);
    q = find_free(core);
    if (!q || core->n_active + r->n > core->conf.max_sequences ||
        !place(core, r, root, tried, &p)) {
        refuse(core, r, DMK_FAILURE_FULL, wait_hint(core),
               "all sequences of this worker are in use");
        return;
    }
    if (!take_constraint(core, r, &constraint)) {
        return;
    }
    fill_request(core, q, r, root, now_ns);
    while (take_all(core, q, r->n, r->prompt, &p) != 0) {
        tried |= 1u << p.group;
        if (!place(core, r, root, tried, &p)) {
            if (constraint) {
                dmk_constraint_drop(constraint);
            }
            refuse(core, r, DMK_FAILURE_FULL, wait_hint(core), "no pages are free at this moment");
            return;
        }
        q->used = true;
        q->n_choices = q->n_live = 0;
    }
    give_constraint(core, q, constraint);
    begin(core, q, p.local, now_ns);
}
