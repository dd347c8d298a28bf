/* Which prompt is computed and which claims; see sched.h. */
#include "prefill/sched.h"
#include "common/base/assert.h"

static uint32_t earliest(const struct dmk_prefill_turn *turns, uint32_t n,
                         enum dmk_prefill_state state, bool with_work)
{
    uint32_t best = UINT32_MAX;

    for (uint32_t i = 0; i < n; i++) {
        if (turns[i].state == state && (!with_work || turns[i].n_left > turns[i].n_flight) &&
            (best == UINT32_MAX || turns[i].order < turns[best].order)) {
            best = i;
        }
    }
    return best;
}

uint32_t dmk_prefill_pick_run(const struct dmk_prefill_turn *turns, uint32_t n)
{
    return earliest(turns, n, DMK_PREFILL_RUNNING, true);
}

uint32_t dmk_prefill_pick_claim(const struct dmk_prefill_turn *turns, uint32_t n)
{
    uint32_t n_claiming = 0;

    for (uint32_t i = 0; i < n; i++) {
        n_claiming += turns[i].state == DMK_PREFILL_CLAIMING;
    }
    if (n_claiming >= DMK_PREFILL_MAX_CLAIMING || dmk_prefill_pick_run(turns, n) != UINT32_MAX) {
        return UINT32_MAX;
    }
    return earliest(turns, n, DMK_PREFILL_QUEUED, false);
}

uint32_t dmk_prefill_chunk(uint32_t pos, uint32_t n, uint32_t chunk_tokens, uint32_t boundary)
{
    const uint32_t to_boundary = boundary - pos % boundary;
    uint32_t len = n - pos;

    dmk_assert(pos < n && chunk_tokens > 0 && boundary > 0);
    len = len < chunk_tokens ? len : chunk_tokens;
    return len < to_boundary ? len : to_boundary;
}
