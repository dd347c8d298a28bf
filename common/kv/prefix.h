/* The prefix cache: prompts and answers whose pages can be used again.
 *
 * It is a tree of 64-token blocks. Each node holds one full page; its key is the chain hash of all
 * tokens up to its end, rooted in the numerics id and the client's salt (base/blocks.h), and the
 * ids themselves are compared on every hit. Sliding layers need the keys just before the point of
 * reuse, so a prefix can be reused only at a boundary: a node that also holds a snapshot, the two
 * window pages that end there. Every leaf of the tree is a boundary; a hit is the longest boundary,
 * never a window of stale keys.
 *
 * The least recently used boundary is always a leaf (a hit renews its ancestors after itself), so
 * evicting it gives its page back, and those of ancestors that lead nowhere any more.
 *
 * What appears and disappears is kept as a bounded list of events for the routers.
 * Owner: the worker's loop. Nothing allocates after new. */
#pragma once

#include "common/base/blocks.h"
#include "common/kv/table.h"

struct dmk_kv_prefix;

#define DMK_KV_BOUNDARY_TOKENS 2048 /* a snapshot at least this often in a long prompt */

struct dmk_kv_prefix_event {
    bool added;
    uint32_t n_tokens;
    struct dmk_id128 hash; /* of the chain up to the boundary */
};

struct dmk_kv_prefix_stats {
    uint32_t n_nodes, n_boundaries;
    uint64_t n_hits, n_misses, hit_tokens, n_evicted;
};

/* pools stay the caller's and must outlive the cache. max_events bounds what is remembered between
 * takes. */
int dmk_kv_prefix_new(struct dmk_kv_pools pools, uint32_t max_events, struct dmk_kv_prefix **ret);
/* Gives every page back first. */
void dmk_kv_prefix_free(struct dmk_kv_prefix **prefix);

/* Length in tokens of the longest boundary that ids[0, max_tokens) begins with; changes nothing. */
uint32_t dmk_kv_prefix_find(const struct dmk_kv_prefix *prefix, struct dmk_id128 root,
                            const uint32_t *ids, uint32_t max_tokens);
/* The same, and table (empty) leases the pages: full ones, and with_ring the snapshot in its ring
 * slots. */
uint32_t dmk_kv_prefix_take(struct dmk_kv_prefix *prefix, struct dmk_id128 root,
                            const uint32_t *ids, uint32_t max_tokens, bool with_ring,
                            struct dmk_kv_table *table);
/* Positions [0, n_tokens) of the table are computed, and nothing beyond the block that n_tokens
 * falls in: remembers the boundary at the last full page. Pages that the cache has already stay as
 * they are. */
void dmk_kv_prefix_insert(struct dmk_kv_prefix *prefix, struct dmk_id128 root, const uint32_t *ids,
                          uint32_t n_tokens, const struct dmk_kv_table *table);

/* False when nothing is cached. */
bool dmk_kv_prefix_evict(struct dmk_kv_prefix *prefix);
/* Evicts a little further than to n free full pages. Where a cache leaves nothing free, the allocator hands out the
 * holes of what was evicted: prompts of sixteen pages lie in seven runs after a while, and each run is a write of its
 * own where pages travel. With a sixteenth of the pool free they lie in two. Small pools keep everything. */
void dmk_kv_prefix_keep_slack(struct dmk_kv_prefix *prefix, uint32_t n);
/* Evicts until `need` pages are free, and keeps some slack. When even an empty cache could not give them, it evicts
 * nothing and returns false. */
bool dmk_kv_prefix_make_room(struct dmk_kv_prefix *prefix, struct dmk_kv_need need);

/* Takes up to cap events, oldest first. *ret_lost: the list overflowed since; what routers know is
 * to be replaced by a listing (and no events are returned). */
uint32_t dmk_kv_prefix_events(struct dmk_kv_prefix *prefix, struct dmk_kv_prefix_event *ret_events,
                              uint32_t cap, bool *ret_lost);
/* Lists boundaries, up to cap from *inout_at (0 at first); 0 at the end. */
uint32_t dmk_kv_prefix_list(const struct dmk_kv_prefix *prefix, uint32_t *inout_at,
                            struct dmk_kv_prefix_event *ret_events, uint32_t cap);
/* Whether there is a boundary of this hash. */
bool dmk_kv_prefix_has(const struct dmk_kv_prefix *prefix, struct dmk_id128 hash);
struct dmk_kv_prefix_stats dmk_kv_prefix_stats(const struct dmk_kv_prefix *prefix);
/* Walks the whole tree and counts every hold; for tests and when idle. */
bool dmk_kv_prefix_check(const struct dmk_kv_prefix *prefix);
