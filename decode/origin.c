/* Mixed pools: the prompts' pages are computed as another numerics id than this worker's own, so they come from
 * prefill workers alone and can not be computed again here.
 *
 * A request therefore keeps its origin: the pages of its prompt as they came, which no step writes to. Whole pages are
 * shared with its sequences, the half-filled one and the window are copies. A preempted sequence goes on from there, and
 * computes its answer's tokens again, which were this worker's own. Since origins stay while their requests live, a
 * request is admitted only where any one sequence could still grow to its end beside all origins: then the oldest
 * always can, and nobody waits for ever. Owner: the worker's loop. */
#include "decode/core_state.h"

#include "common/base/assert.h"

/* Pages of a sequence at its end, without those that it shares with its origin. */
static uint32_t pages_at_end(const struct dmk_decode_core *core, bool has_origin, uint32_t n_prompt,
                             uint32_t max_tokens)
{
    const uint64_t end = (uint64_t)n_prompt + max_tokens;
    const uint32_t n = end < core->conf.max_context ? (uint32_t)end : core->conf.max_context;

    return dmk_kv_pages_for(n) - (has_origin ? (n_prompt - 1) / DMK_PAGE_TOKENS : 0);
}

bool dmk_decode_origin_fits(const struct dmk_decode_core *core, uint32_t group,
                            const struct dmk_decode_request *r)
{
    const bool needs_origin = dmk_decode_needs_origin(core, r->n_prompt, r->echo_logprobs);
    uint64_t origins = needs_origin ? dmk_kv_pages_for(r->n_prompt - 1) : 0;
    uint32_t longest = pages_at_end(core, needs_origin, r->n_prompt, r->max_tokens);

    if (!core->mixed) {
        return true;
    }
    for (uint32_t i = 0; i < core->n_slots; i++) {
        const struct request *q = &core->requests[i];

        if (q->used && q->group == group) {
            const bool has_origin = dmk_decode_has_origin(core, q);
            const uint32_t pages = pages_at_end(core, has_origin, q->n_prompt, q->max_tokens);

            origins += has_origin ? dmk_kv_pages_for(q->n_prompt - 1) : 0;
            longest = pages > longest ? pages : longest;
        }
    }
    return origins + longest <= core->conf.n_full_pages;
}

int dmk_decode_origin_reserve(struct dmk_decode_core *core, struct request *q)
{
    struct group *group = &core->groups[q->group];

    if (!dmk_decode_has_origin(core, q)) {
        return 0;
    }
    dmk_assert(q->origin.n_full == 0 && !q->origin_kept);
    if (!dmk_kv_prefix_make_room(group->prefix, dmk_kv_table_reserve_need(&q->origin, 1))) {
        return -DMK_EFULL;
    }
    return dmk_kv_table_reserve(&q->origin, group->pools, 1);
}

/* Its spare pages go back first, and are at least as many as the fork needs. */
void dmk_decode_origin_keep(struct dmk_decode_core *core, const struct seq *seq)
{
    struct request *q = &core->requests[seq->request];
    const struct dmk_kv_pools pools = core->groups[q->group].pools;
    struct dmk_decode_step *step = &core->step;
    const uint32_t first_copy = step->n_copies;
    int r;

    if (!dmk_decode_has_origin(core, q) || q->origin_kept || seq->choice > 0) {
        return;
    }
    dmk_assert(seq->n_computed == q->n_prompt - 1);
    dmk_kv_table_release(&q->origin, pools);
    r = dmk_kv_table_fork(&seq->table, &q->origin, pools, q->n_prompt - 1, q->n_prompt - 1,
                          step->copies, &step->n_copies);
    dmk_assert(r == 0);
    dmk_decode_copies_of(step, first_copy, q->group);
    q->origin_kept = true;
}

void dmk_decode_origin_give_up(struct dmk_decode_core *core, struct seq *seq)
{
    struct request *q = &core->requests[seq->request];
    const struct dmk_kv_pools pools = core->groups[q->group].pools;

    if (dmk_decode_has_origin(core, q) && !q->origin_kept && seq->choice == 0) {
        dmk_assert(seq->n_computed == q->n_prompt - 1);
        dmk_kv_table_release(&q->origin, pools);
        dmk_kv_table_move(&seq->table, &q->origin, pools, q->n_prompt - 1);
        q->origin_kept = true;
    } else {
        dmk_kv_table_release(&seq->table, pools);
    }
}

bool dmk_decode_origin_resume(struct dmk_decode_core *core, struct seq *seq, uint32_t n_tokens)
{
    const struct request *q = &core->requests[seq->request];
    struct group *group = &core->groups[seq->group];
    struct dmk_decode_step *step = &core->step;
    const uint32_t n_prompt = q->n_prompt - 1, first_copy = step->n_copies;

    dmk_assert(q->origin_kept);
    if (!dmk_kv_prefix_make_room(group->prefix,
                                 dmk_kv_table_fork_need(&q->origin, n_prompt, n_tokens)) ||
        dmk_kv_table_fork(&q->origin, &seq->table, group->pools, n_prompt, n_tokens, step->copies,
                          &step->n_copies) != 0) {
        return false;
    }
    dmk_decode_copies_of(step, first_copy, seq->group);
    seq->copied_in = core->n_steps;
    seq->n_computed = n_prompt;
    return true;
}

void dmk_decode_origin_release(struct dmk_decode_core *core, struct request *q)
{
    if (q->origin_kept && core->step.in_flight && !q->origin_leaving) {
        q->origin_leaving = true;
        q->n_leaving++;
        return;
    }
    dmk_kv_table_release(&q->origin, core->groups[q->group].pools);
    q->n_leaving -= q->origin_leaving;
    q->origin_kept = q->origin_leaving = false;
}
