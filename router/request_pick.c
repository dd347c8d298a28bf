/* Which worker a request goes to: a snapshot of the fleet for route.c. On the loop. */
#include <limits.h>
#include "common/base/blocks.h"
#include "common/grammar/automaton.h"
#include "router/request_internal.h"
#include "router/route.h"

/* Prefixes of this prompt by worker; workers whose prompts are of one numerics share a chain of hashes. */
static void match_prefixes(struct dmk_request *r, uint32_t ret_tokens[DMK_INDEX_MAX_WORKERS])
{
    struct dmk_worker *const *workers = dmk_fleet_workers(r->all->fleet);
    struct dmk_index *index = dmk_fleet_index(r->all->fleet);
    const struct dmk_bytes salt = {(const uint8_t *)r->ask.cache_salt, strlen(r->ask.cache_salt)};
    const char *seen[4];
    size_t n_seen = 0;

    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS && n_seen < 4; i++) {
        bool known = !workers[i] || !workers[i]->up;

        for (size_t k = 0; k < n_seen && !known; k++) {
            known = strcmp(seen[k], workers[i]->prompt_numerics) == 0;
        }
        if (!known) {
            seen[n_seen++] = workers[i]->prompt_numerics;
            /* The last prompt token is always computed, so the block that it ends does not count.
             * */
            dmk_index_match(index, dmk_block_root(workers[i]->prompt_numerics, salt),
                            r->ask.prompt.data, r->ask.prompt.len - 1, ret_tokens);
        }
    }
}

static uint64_t load_of(const struct dmk_worker *w)
{
    uint64_t reported = w->load.tokens_waiting;

    if (!w->has_load) {
        return w->n_tokens;
    }
    if (w->role == DMK_WORKER_DECODE) {
        reported += (uint64_t)(w->load.full_pages_total - w->load.full_pages_free) * w->page_tokens;
    }
    return reported > w->n_tokens ? reported : w->n_tokens;
}

/* How little a worker is to be trusted with this request; who has more of it is taken only when there is nobody with
 * less. Failing this very request may have been the other worker's fault; hanging is its own. */
static unsigned doubt_of(const struct dmk_request *r, const struct dmk_worker *w)
{
    return (w->hangs ? 2u : 0u) + (w->incarnation == r->avoid[w->role] ? 1u : 0u);
}

bool dmk_request__may_force(const struct dmk_request *r, const struct dmk_worker *d)
{
    return r->all->conf.conf->local_prefill && !dmk_worker_is_mixed(d);
}

/* Whether D would get this prompt's pages, from others or from itself. */
static bool gets_prompt(const struct dmk_request *r, const struct dmk_worker *d)
{
    return dmk_request__may_force(r, d) || dmk_ask_scores_prompt(&r->ask) ||
           dmk_fleet_has_prefill_for(r->all->fleet, d);
}

struct dmk_worker *dmk_request__pick(struct dmk_request *r, enum dmk_worker_role role,
                                     const struct dmk_worker *d)
{
    struct dmk_requests *all = r->all;
    struct dmk_worker *const *workers = dmk_fleet_workers(all->fleet);
    struct dmk_route_worker view[DMK_FLEET_MAX_WORKERS];
    uint32_t prefixes[DMK_INDEX_MAX_WORKERS] = {0};
    const struct dmk_route_ask ask = {
        .prompt_tokens = (uint32_t)r->ask.prompt.len,
        .room_tokens = role == DMK_WORKER_DECODE ? r->ask.prompt.len : 0,
        .turn = all->turn++,
    };
    const uint64_t now = dmk_requests__now_ns(all);
    unsigned least_doubt = UINT_MAX;
    int best;

    match_prefixes(r, prefixes);
    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        const struct dmk_worker *w = workers[i];

        view[i] = (struct dmk_route_worker){0};
        if (!w || w->role != role || !w->up || w->draining || w->full_until_ns > now) {
            continue;
        }
        if (role == DMK_WORKER_DECODE && r->ask.constraint.len > 0 &&
            w->grammar_version != DMK_GRAMMAR_VERSION) {
            continue;
        }
        if (role == DMK_WORKER_DECODE ? !gets_prompt(r, w) : d && !dmk_worker_fits(w, d)) {
            continue;
        }
        view[i].usable = true;
        view[i].load_tokens = load_of(w);
        view[i].prefix_tokens = prefixes[w->slot];
        view[i].free_tokens = role == DMK_WORKER_DECODE && w->has_load
                                  ? (uint64_t)w->load.full_pages_most_free * w->page_tokens
                                  : UINT64_MAX;
        least_doubt = doubt_of(r, w) < least_doubt ? doubt_of(r, w) : least_doubt;
    }
    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        view[i].usable = view[i].usable && doubt_of(r, workers[i]) == least_doubt;
    }
    best = dmk_route_pick(view, DMK_FLEET_MAX_WORKERS, &ask);
    return best < 0 ? NULL : workers[best];
}
