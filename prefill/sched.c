/* Which prompt is computed and which claims; see sched.h. */
#include "prefill/sched.h"
#include "common/base/assert.h"

static uint32_t left_to_plan(const struct dmk_prefill_turn *turn)
{
    return turn->n_left - turn->n_flight;
}

static bool is_before(const struct dmk_prefill_turn *a, const struct dmk_prefill_turn *b,
                      bool shortest)
{
    if (shortest && left_to_plan(a) != left_to_plan(b)) {
        return left_to_plan(a) < left_to_plan(b);
    }
    return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : a->order < b->order;
}

/* The earliest job in a state, or the one with the least left. */
static uint32_t first_of(const struct dmk_prefill_turn *turns, uint32_t n,
                         enum dmk_prefill_state state, bool shortest)
{
    uint32_t best = UINT32_MAX;

    for (uint32_t i = 0; i < n; i++) {
        const bool counts =
            turns[i].state == state && (state != DMK_PREFILL_RUNNING || left_to_plan(&turns[i]));

        if (counts && (best == UINT32_MAX || is_before(&turns[i], &turns[best], shortest))) {
            best = i;
        }
    }
    return best;
}

uint32_t dmk_prefill_pick_run(const struct dmk_prefill_turn *turns, uint32_t n, bool shortest)
{
    return first_of(turns, n, DMK_PREFILL_RUNNING, shortest);
}

uint32_t dmk_prefill_pick_claim(const struct dmk_prefill_turn *turns, uint32_t n)
{
    const uint32_t runs = dmk_prefill_pick_run(turns, n, false);
    const uint32_t earliest = first_of(turns, n, DMK_PREFILL_QUEUED, false);
    const uint32_t shortest = first_of(turns, n, DMK_PREFILL_QUEUED, true);
    uint32_t n_claiming = 0;
    bool is_shortest = true;

    if (earliest == UINT32_MAX) {
        return UINT32_MAX;
    }
    for (uint32_t i = 0; i < n; i++) {
        const bool claims = turns[i].state == DMK_PREFILL_CLAIMING;
        const bool works = turns[i].state == DMK_PREFILL_RUNNING && left_to_plan(&turns[i]) > 0;

        n_claiming += claims;
        if ((claims || works) && left_to_plan(&turns[i]) <= left_to_plan(&turns[shortest])) {
            is_shortest = false;
        }
    }
    if (n_claiming >= DMK_PREFILL_MAX_CLAIMING) {
        return UINT32_MAX;
    }
    if (runs == UINT32_MAX || is_before(&turns[earliest], &turns[runs], false)) {
        return earliest;
    }
    return is_shortest ? shortest : UINT32_MAX;
}

uint32_t dmk_prefill_chunk(uint32_t pos, uint32_t n, uint32_t chunk_tokens, uint32_t boundary)
{
    const uint32_t to_boundary = boundary - pos % boundary;
    uint32_t len = n - pos;

    dmk_assert(pos < n && chunk_tokens > 0 && boundary > 0);
    len = len < chunk_tokens ? len : chunk_tokens;
    return len < to_boundary ? len : to_boundary;
}
