/* The decode scheduler's rules. Pure. */
#include "decode/sched.h"

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

uint32_t dmk_sched_pick(const struct dmk_sched_seq *seqs, uint32_t n_seqs,
                        struct dmk_sched_limits limits, struct dmk_sched_pick *ret_picks)
{
    uint32_t tokens = 0, rows = 0, picked = 0, chunk_tokens, n = 0;

    for (uint32_t i = 0; i < n_seqs; i++) {
        if (seqs[i].todo == 1 && tokens < limits.step_tokens && picked < limits.step_seqs &&
            rows < limits.logit_rows) {
            tokens++;
            rows++;
            picked++;
        }
    }
    chunk_tokens = min_u32(limits.step_tokens - tokens, limits.chunk_tokens);
    /* Second walk: the same decodes again, and chunks between them, so that picks stay in order of age. */
    uint32_t decodes = tokens;
    for (uint32_t i = 0; i < n_seqs; i++) {
        if (seqs[i].todo == 1) {
            if (decodes > 0) {
                decodes--;
                ret_picks[n++] = (struct dmk_sched_pick){i, 1, 1};
            }
            continue;
        }
        uint32_t take = min_u32(min_u32(seqs[i].todo - 1, seqs[i].to_boundary), chunk_tokens);
        if (seqs[i].all_logits) {
            take = min_u32(take, limits.logit_rows - rows);
        }
        if (take == 0 || picked == limits.step_seqs) {
            continue;
        }
        picked++;
        chunk_tokens -= take;
        rows += seqs[i].all_logits ? take : 0;
        ret_picks[n++] = (struct dmk_sched_pick){i, take, seqs[i].all_logits ? take : 0};
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
