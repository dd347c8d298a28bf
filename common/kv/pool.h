/* Accounting of one pool's pages: who may use which page id. It never touches page memory.
 *
 * A page has leases (sequences and tickets that use it) and cache holds (the prefix cache). From
 * these its state follows, one of four, and always free + cached + leased + draining == total:
 *
 *   free      nobody
 *   cached    only the prefix cache; given back by evicting
 *   leased    at least one sequence
 *   draining  named in a ticket whose request is gone, while a write may still land in it
 *
 * Owner: the worker's loop. Nothing allocates after new. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct dmk_kv_pool;

struct dmk_kv_pool_counts {
    uint32_t total, free, cached, leased, draining;
};

/* -DMK_EINVAL without pages, -DMK_ENOMEM. */
int dmk_kv_pool_new(uint32_t n_pages, struct dmk_kv_pool **ret);
void dmk_kv_pool_free(struct dmk_kv_pool **pool);

/* Takes n free pages, each with one lease: all or none (-DMK_EFULL). Prefers runs of consecutive
 * ids, the first one right behind page `after` (DMK_PAGE_NONE: anywhere). */
int dmk_kv_pool_alloc(struct dmk_kv_pool *pool, uint32_t n, uint32_t after, uint32_t *ret_pages);

/* One more lease on a page that is in use or cached; drop gives one back, and ends draining. */
void dmk_kv_pool_hold(struct dmk_kv_pool *pool, uint32_t page);
void dmk_kv_pool_drop(struct dmk_kv_pool *pool, uint32_t page);
/* The prefix cache's holds; several snapshots may hold one window page. */
void dmk_kv_pool_cache(struct dmk_kv_pool *pool, uint32_t page);
void dmk_kv_pool_uncache(struct dmk_kv_pool *pool, uint32_t page);
/* The page's only lease goes on as draining, until drop. */
void dmk_kv_pool_drain(struct dmk_kv_pool *pool, uint32_t page);

/* More than one hold of any kind: the page's content must not change. */
bool dmk_kv_pool_shared(const struct dmk_kv_pool *pool, uint32_t page);
uint32_t dmk_kv_pool_cache_holds(const struct dmk_kv_pool *pool, uint32_t page);
struct dmk_kv_pool_counts dmk_kv_pool_counts(const struct dmk_kv_pool *pool);
/* Counts again from the pages and compares: false is a bug of the caller or of this file. */
bool dmk_kv_pool_check(const struct dmk_kv_pool *pool);
