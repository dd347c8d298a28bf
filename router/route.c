/* Which worker takes a request. Pure. */
#include "router/route.h"

/* Heavier than any load, so that room decides first; small enough never to wrap. */
#define NO_ROOM_COST ((uint64_t)1 << 48)

static uint64_t cost_of(const struct dmk_route_worker *w, const struct dmk_route_ask *ask)
{
    const uint32_t held =
        w->prefix_tokens < ask->prompt_tokens ? w->prefix_tokens : ask->prompt_tokens;
    uint64_t cost = w->load_tokens + (ask->prompt_tokens - held);

    if (w->free_tokens < ask->room_tokens) {
        cost += NO_ROOM_COST;
    }
    return cost;
}

int dmk_route_pick(const struct dmk_route_worker *workers, size_t n,
                   const struct dmk_route_ask *ask)
{
    int best = -1;
    uint64_t best_cost = 0;

    for (size_t k = 0; k < n; k++) {
        const size_t i = (k + ask->turn) % n;
        uint64_t cost;

        if (!workers[i].usable) {
            continue;
        }
        cost = cost_of(&workers[i], ask);
        if (best < 0 || cost < best_cost) {
            best = (int)i;
            best_cost = cost;
        }
    }
    return best;
}
