/* Pages of one pool: two counters a page, a bitmap of free ones, four counts.
 *
 * Owner: the worker's loop. Runs are found by scanning the bitmap a word at a time: a pool of
 * 100000 pages is 1600 words, so no index is kept. */
#include "common/kv/pool.h"

#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "common/base/status.h"
#include "common/kv/layout.h"

struct page {
    uint16_t leases;
    uint16_t caches;
    bool draining;
};

enum page_state { PAGE_FREE, PAGE_CACHED, PAGE_LEASED, PAGE_DRAINING, N_PAGE_STATES };

struct dmk_kv_pool {
    uint32_t n_pages, n_words;
    uint32_t counts[N_PAGE_STATES];
    uint64_t *free_bits; /* [n_words], 1 = free; bits past the end are 0 */
    struct page pages[];
};

static enum page_state state_of(const struct page *p)
{
    if (p->leases == 0) {
        return p->caches == 0 ? PAGE_FREE : PAGE_CACHED;
    }
    return p->draining ? PAGE_DRAINING : PAGE_LEASED;
}

/* Moves the page from the state it was in to the one it is in now. */
static void recount(struct dmk_kv_pool *pool, uint32_t page, enum page_state before)
{
    const enum page_state after = state_of(&pool->pages[page]);
    const uint64_t bit = 1ull << (page % 64);

    pool->counts[before]--;
    pool->counts[after]++;
    if (after == PAGE_FREE) {
        pool->free_bits[page / 64] |= bit;
    } else {
        pool->free_bits[page / 64] &= ~bit;
    }
}

int dmk_kv_pool_new(uint32_t n_pages, struct dmk_kv_pool **ret)
{
    struct dmk_kv_pool *pool;

    if (n_pages == 0 || n_pages >= DMK_PAGE_NONE) {
        return -DMK_EINVAL;
    }
    pool = calloc(1, sizeof(*pool) + (size_t)n_pages * sizeof(pool->pages[0]));
    if (!pool) {
        return -DMK_ENOMEM;
    }
    pool->n_pages = n_pages;
    pool->n_words = (n_pages + 63) / 64;
    pool->free_bits = calloc(pool->n_words, sizeof(*pool->free_bits));
    if (!pool->free_bits) {
        free(pool);
        return -DMK_ENOMEM;
    }
    for (uint32_t i = 0; i < n_pages; i++) {
        pool->free_bits[i / 64] |= 1ull << (i % 64);
    }
    pool->counts[PAGE_FREE] = n_pages;
    *ret = pool;
    return 0;
}

void dmk_kv_pool_free(struct dmk_kv_pool **pool)
{
    if (*pool) {
        free((*pool)->free_bits);
        free(*pool);
        *pool = NULL;
    }
}

static bool is_free(const struct dmk_kv_pool *pool, uint32_t page)
{
    return page < pool->n_pages && (pool->free_bits[page / 64] >> (page % 64) & 1) != 0;
}

/* First page at or after `from` whose free bit equals want; n_pages when there is none. */
static uint32_t scan(const struct dmk_kv_pool *pool, uint32_t from, bool want)
{
    uint32_t w = from / 64;
    uint64_t bits;

    if (from >= pool->n_pages) {
        return pool->n_pages;
    }
    bits = (want ? pool->free_bits[w] : ~pool->free_bits[w]) & (~0ull << (from % 64));
    while (bits == 0) {
        if (++w == pool->n_words) {
            return pool->n_pages;
        }
        bits = want ? pool->free_bits[w] : ~pool->free_bits[w];
    }
    const uint32_t page = w * 64 + (uint32_t)__builtin_ctzll(bits);
    return page < pool->n_pages ? page : pool->n_pages;
}

static void take(struct dmk_kv_pool *pool, uint32_t page)
{
    dmk_assert(is_free(pool, page));
    pool->pages[page].leases = 1;
    recount(pool, page, PAGE_FREE);
}

/* The smallest run that holds n pages; else the longest one. Returns its length. */
static uint32_t find_run(const struct dmk_kv_pool *pool, uint32_t n, uint32_t *ret_start)
{
    uint32_t best = 0;

    for (uint32_t at = scan(pool, 0, true); at < pool->n_pages;) {
        const uint32_t end = scan(pool, at, false);
        const uint32_t len = end - at;
        const bool better = best < n ? len > best : len >= n && len < best;

        if (better) {
            best = len;
            *ret_start = at;
            if (len == n) {
                break;
            }
        }
        at = scan(pool, end, true);
    }
    return best;
}

/* Takes up to n pages from runs of at least min_len, lowest ids first. */
static uint32_t take_runs(struct dmk_kv_pool *pool, uint32_t n, uint32_t min_len, uint32_t *pages)
{
    uint32_t got = 0;

    for (uint32_t at = scan(pool, 0, true); at < pool->n_pages && got < n;) {
        const uint32_t end = scan(pool, at, false);

        if (end - at >= min_len) {
            for (uint32_t p = at; p < end && got < n; p++) {
                take(pool, p);
                pages[got++] = p;
            }
        }
        at = scan(pool, end, true);
    }
    return got;
}

int dmk_kv_pool_alloc(struct dmk_kv_pool *pool, uint32_t n, uint32_t after, uint32_t *ret_pages)
{
    uint32_t got = 0;

    if (n > pool->counts[PAGE_FREE]) {
        return -DMK_EFULL;
    }
    if (after != DMK_PAGE_NONE) {
        while (got < n && is_free(pool, after + 1)) {
            take(pool, ++after);
            ret_pages[got++] = after;
        }
    }
    /* Runs get shorter from round to round, each at most half of the longest left: few rounds. */
    while (got < n) {
        uint32_t start = 0;
        const uint32_t len = find_run(pool, n - got, &start);

        dmk_assert(len > 0);
        if (len >= n - got) {
            for (; got < n; start++) {
                take(pool, start);
                ret_pages[got++] = start;
            }
        } else {
            got += take_runs(pool, n - got, len / 2 + 1, ret_pages + got);
        }
    }
    return 0;
}

void dmk_kv_pool_hold(struct dmk_kv_pool *pool, uint32_t page)
{
    struct page *p = &pool->pages[page];
    const enum page_state before = state_of(p);

    dmk_assert(page < pool->n_pages && (before == PAGE_CACHED || before == PAGE_LEASED));
    dmk_assert(p->leases < UINT16_MAX);
    p->leases++;
    recount(pool, page, before);
}

void dmk_kv_pool_drop(struct dmk_kv_pool *pool, uint32_t page)
{
    struct page *p = &pool->pages[page];
    const enum page_state before = state_of(p);

    dmk_assert(page < pool->n_pages && p->leases > 0);
    p->leases--;
    p->draining = false;
    recount(pool, page, before);
}

void dmk_kv_pool_cache(struct dmk_kv_pool *pool, uint32_t page)
{
    struct page *p = &pool->pages[page];
    const enum page_state before = state_of(p);

    dmk_assert(page < pool->n_pages && (before == PAGE_CACHED || before == PAGE_LEASED));
    dmk_assert(p->caches < UINT16_MAX);
    p->caches++;
    recount(pool, page, before);
}

void dmk_kv_pool_uncache(struct dmk_kv_pool *pool, uint32_t page)
{
    struct page *p = &pool->pages[page];
    const enum page_state before = state_of(p);

    dmk_assert(page < pool->n_pages && p->caches > 0);
    p->caches--;
    recount(pool, page, before);
}

void dmk_kv_pool_drain(struct dmk_kv_pool *pool, uint32_t page)
{
    struct page *p = &pool->pages[page];
    const enum page_state before = state_of(p);

    dmk_assert(page < pool->n_pages && before == PAGE_LEASED && p->leases == 1 && p->caches == 0);
    p->draining = true;
    recount(pool, page, before);
}

bool dmk_kv_pool_shared(const struct dmk_kv_pool *pool, uint32_t page)
{
    dmk_assert(page < pool->n_pages);
    return (uint32_t)pool->pages[page].leases + pool->pages[page].caches > 1;
}

uint32_t dmk_kv_pool_cache_holds(const struct dmk_kv_pool *pool, uint32_t page)
{
    dmk_assert(page < pool->n_pages);
    return pool->pages[page].caches;
}

struct dmk_kv_pool_counts dmk_kv_pool_counts(const struct dmk_kv_pool *pool)
{
    return (struct dmk_kv_pool_counts){
        .total = pool->n_pages,
        .free = pool->counts[PAGE_FREE],
        .cached = pool->counts[PAGE_CACHED],
        .leased = pool->counts[PAGE_LEASED],
        .draining = pool->counts[PAGE_DRAINING],
    };
}

bool dmk_kv_pool_check(const struct dmk_kv_pool *pool)
{
    uint32_t counts[N_PAGE_STATES] = {0};
    uint32_t sum = 0;

    for (uint32_t i = 0; i < pool->n_pages; i++) {
        const struct page *p = &pool->pages[i];
        const enum page_state state = state_of(p);

        counts[state]++;
        if (is_free(pool, i) != (state == PAGE_FREE) ||
            (p->draining && (p->leases != 1 || p->caches != 0))) {
            return false;
        }
    }
    for (int s = 0; s < N_PAGE_STATES; s++) {
        sum += counts[s];
        if (counts[s] != pool->counts[s]) {
            return false;
        }
    }
    return sum == pool->n_pages;
}
