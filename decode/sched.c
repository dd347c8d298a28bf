/* The decode scheduler's rules. Pure. */
#include "decode/sched.h"

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* What a step has room for still. */
struct room {
    uint32_t prompt_tokens, seqs, rows;
};

static uint32_t pick_decodes(const struct dmk_sched_seq *seqs, uint32_t n_seqs,
                             struct dmk_sched_limits limits, struct dmk_sched_pick *picks)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < n_seqs; i++) {
        const bool decodes = seqs[i].todo == 1 && n < limits.step_tokens && n < limits.step_seqs &&
                             n < limits.logit_rows;

        picks[i] = (struct dmk_sched_pick){i, decodes, decodes};
        n += decodes;
    }
    return n;
}

/* Adds tokens to prompt i's chunk, at most `most`. */
static void extend(const struct dmk_sched_seq *seq, uint32_t most, struct room *room,
                   struct dmk_sched_pick *pick)
{
    const uint32_t had = pick->n_tokens;
    uint32_t take =
        min_u32(min_u32(seq->todo - 1, seq->to_boundary) - had, min_u32(most, room->prompt_tokens));

    if (had == 0 && room->seqs == 0) {
        return;
    }
    if (seq->all_logits) {
        take = min_u32(take, room->rows);
        room->rows -= take;
        pick->n_rows += take;
    }
    room->seqs -= had == 0 && take > 0;
    room->prompt_tokens -= take;
    pick->n_tokens += take;
}

/* The prompt with the least to compute of those that come after `todo` tokens and index `after`; n_seqs:
 * none. */
static uint32_t next_shortest(const struct dmk_sched_seq *seqs, uint32_t n_seqs, uint32_t todo,
                              uint32_t after)
{
    uint32_t best = n_seqs;

    for (uint32_t i = 0; i < n_seqs; i++) {
        const bool comes = seqs[i].todo > todo || (seqs[i].todo == todo && i > after);

        if (seqs[i].todo > 1 && comes && (best == n_seqs || seqs[i].todo < seqs[best].todo)) {
            best = i;
        }
    }
    return best;
}

static uint32_t oldest_prompt(const struct dmk_sched_seq *seqs, uint32_t n_seqs)
{
    uint32_t i = 0;

    while (i < n_seqs && seqs[i].todo == 1) {
        i++;
    }
    return i;
}

uint32_t dmk_sched_pick(const struct dmk_sched_seq *seqs, uint32_t n_seqs,
                        struct dmk_sched_limits limits, struct dmk_sched_pick *ret_picks)
{
    const uint32_t n_decodes = pick_decodes(seqs, n_seqs, limits, ret_picks);
    const uint32_t oldest = oldest_prompt(seqs, n_seqs);
    struct room room = {
        .prompt_tokens = min_u32(limits.step_tokens - n_decodes, limits.chunk_tokens),
        .seqs = limits.step_seqs - n_decodes,
        .rows = limits.logit_rows - n_decodes,
    };
    uint32_t n = 0;

    if (oldest < n_seqs) {
        extend(&seqs[oldest], (room.prompt_tokens + 1) / 2, &room, &ret_picks[oldest]);
        for (uint32_t i = next_shortest(seqs, n_seqs, 1, 0); i < n_seqs && room.prompt_tokens > 0;
             i = next_shortest(seqs, n_seqs, seqs[i].todo, i)) {
            if (i != oldest) {
                extend(&seqs[i], UINT32_MAX, &room, &ret_picks[i]);
            }
        }
        extend(&seqs[oldest], UINT32_MAX, &room, &ret_picks[oldest]);
    }
    for (uint32_t i = 0; i < n_seqs; i++) {
        if (ret_picks[i].n_tokens > 0) {
            ret_picks[n++] = ret_picks[i];
        }
    }
    return n;
}

bool dmk_sched_may_resume(uint32_t n_running, uint32_t need_pages, uint32_t available_pages)
{
    return available_pages >= need_pages && available_pages - need_pages >= n_running;
}

uint32_t dmk_sched_wait_hint_ms(double step_ms, uint32_t min_tokens_left)
{
    const double ms = step_ms * min_tokens_left;

    return ms < 50 ? 50 : ms > 10000 ? 10000 : (uint32_t)ms;
}
