/* Prefixes told to the routers: a listing to each that is new (in parts, one a turn), then changes to all.
 * A change that comes while a listing runs is told at once; both say the same in the end, since adding
 * twice and removing what was not known change nothing. */
#include "common/worker/internal.h"

/* Sends n events of scratch as one Blocks: all of them added when listed, else by their kind. */
static void tell(struct dmk_worker *w, uint32_t router, uint32_t n, bool snapshot)
{
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;
    Damask__V1__Blocks blocks = DAMASK__V1__BLOCKS__INIT;

    for (uint32_t i = 0; i < n; i++) {
        damask__v1__block_hash__init(&w->hashes[i]);
        w->hashes[i].hi = w->blocks[i].hash.hi;
        w->hashes[i].lo = w->blocks[i].hash.lo;
        w->hashes[i].n_tokens = w->blocks[i].n_tokens;
        if (w->blocks[i].added) {
            w->added[blocks.n_added++] = &w->hashes[i];
        } else {
            w->removed[blocks.n_removed++] = &w->hashes[i];
        }
    }
    blocks.snapshot = snapshot;
    blocks.added = w->added;
    blocks.removed = w->removed;
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_BLOCKS;
    event.blocks = &blocks;
    dmk_worker_emit(w, router, &event);
}

void dmk_worker__blocks_begin(struct dmk_worker__router *r)
{
    r->listing = true;
    r->list_begun = false;
    r->list_at[0] = r->list_at[1] = 0;
}

static void list_some(struct dmk_worker *w, uint32_t index)
{
    struct dmk_worker__router *r = &w->routers[index];
    const uint32_t n =
        w->role->block_list(w->role->ud, r->list_at, w->blocks, DMK_WORKER__BLOCKS_PER_EVENT);

    if (n == 0) {
        r->listing = false;
        if (r->list_begun) {
            return;
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        w->blocks[i].added = true;
    }
    tell(w, index, n, !r->list_begun);
    r->list_begun = true;
}

void dmk_worker__blocks_turn(struct dmk_worker *w)
{
    bool lost = false, more = false, some_lost;
    uint32_t n;

    do {
        n = w->role->block_events(w->role->ud, w->blocks, DMK_WORKER__BLOCKS_PER_EVENT, &some_lost);
        lost = lost || some_lost;
        if (n > 0) {
            tell(w, DMK_ROUTER_ALL, n, false);
        }
    } while (n > 0);
    for (uint32_t i = 0; i < DMK_MAX_ROUTERS; i++) {
        struct dmk_worker__router *r = &w->routers[i];

        if (r->greeted && lost) {
            dmk_worker__blocks_begin(r);
        }
        if (r->greeted && r->listing) {
            list_some(w, i);
            more |= r->listing;
        }
    }
    if (more) {
        dmk_worker__kick(w);
    }
}
