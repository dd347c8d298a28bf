/* A sequence's pages. Every function that takes pages first counts what it needs, so that it takes
 * all or nothing. Owner: the worker's loop. */
#include "common/kv/table.h"

#include "common/base/assert.h"
#include "common/base/status.h"

void dmk_kv_table_init(struct dmk_kv_table *table, uint32_t *storage, uint32_t cap, uint32_t n_ring)
{
    dmk_assert(n_ring >= DMK_WINDOW_RING && n_ring <= DMK_WINDOW_RING_MAX);
    *table = (struct dmk_kv_table){.full = storage, .cap = cap, .n_ring = n_ring};
    for (uint32_t i = 0; i < DMK_WINDOW_RING_MAX; i++) {
        table->ring[i] = DMK_PAGE_NONE;
    }
}

static bool has_room(struct dmk_kv_pools pools, struct dmk_kv_need need)
{
    return dmk_kv_pool_counts(pools.full).free >= need.full &&
           dmk_kv_pool_counts(pools.window).free >= need.window;
}

/* Only after has_room: it can not fail then. */
static uint32_t take_one(struct dmk_kv_pool *pool, uint32_t after)
{
    uint32_t page = DMK_PAGE_NONE;
    const int r = dmk_kv_pool_alloc(pool, 1, after, &page);

    dmk_assert(r == 0);
    return page;
}

static void append_full(struct dmk_kv_table *table, struct dmk_kv_pool *pool, uint32_t n)
{
    const uint32_t after = table->n_full > 0 ? table->full[table->n_full - 1] : DMK_PAGE_NONE;
    int r;

    dmk_assert(table->n_full + n <= table->cap);
    r = dmk_kv_pool_alloc(pool, n, after, &table->full[table->n_full]);
    dmk_assert(r == 0);
    table->n_full += n;
}

struct dmk_kv_need dmk_kv_table_reserve_need(const struct dmk_kv_table *table, uint32_t n_tokens)
{
    const uint32_t pages = dmk_kv_pages_for(n_tokens);
    struct dmk_kv_need need = {pages > table->n_full ? pages - table->n_full : 0, 0};

    for (uint32_t i = 0; i < table->n_ring; i++) {
        need.window += table->ring[i] == DMK_PAGE_NONE;
    }
    return need;
}

int dmk_kv_table_reserve(struct dmk_kv_table *table, struct dmk_kv_pools pools, uint32_t n_tokens)
{
    const struct dmk_kv_need need = dmk_kv_table_reserve_need(table, n_tokens);
    uint32_t after = DMK_PAGE_NONE;

    if (!has_room(pools, need)) {
        return -DMK_EFULL;
    }
    append_full(table, pools.full, need.full);
    for (uint32_t i = 0; i < table->n_ring; i++) {
        if (table->ring[i] == DMK_PAGE_NONE) {
            table->ring[i] = take_one(pools.window, after);
        }
        after = table->ring[i];
    }
    return 0;
}

/* What happens to ring slot s when positions [pos, pos + n) are computed. */
struct slot_use {
    bool written;
    bool kept; /* its old content is read, or stays beside what is written */
};

static struct slot_use use_of_slot(const struct dmk_kv_table *table, uint32_t slot, uint32_t pos,
                                   uint32_t n)
{
    const uint32_t first = pos / DMK_PAGE_TOKENS, last = (pos + n - 1) / DMK_PAGE_TOKENS;
    struct slot_use use = {false, false};
    uint32_t read_first, n_read;

    for (uint32_t b = first; b <= last && b < first + table->n_ring; b++) {
        use.written = use.written || b % table->n_ring == slot;
    }
    /* The first query looks back on the same blocks that a transfer at pos would bring; the
     * half-filled block at pos is the last of them. */
    n_read = dmk_kv_window_blocks(pos, &read_first);
    for (uint32_t b = read_first; b < read_first + n_read; b++) {
        use.kept = use.kept || b % table->n_ring == slot;
    }
    return use;
}

static bool must_swap(const struct dmk_kv_table *table, struct dmk_kv_pools pools, uint32_t slot,
                      struct slot_use use)
{
    return use.written && (table->ring[slot] == DMK_PAGE_NONE ||
                           dmk_kv_pool_shared(pools.window, table->ring[slot]));
}

struct dmk_kv_need dmk_kv_table_advance_need(const struct dmk_kv_table *table,
                                             struct dmk_kv_pools pools, uint32_t pos, uint32_t n)
{
    const uint32_t pages = dmk_kv_pages_for((uint64_t)pos + n);
    struct dmk_kv_need need = {pages > table->n_full ? pages - table->n_full : 0, 0};

    dmk_assert(n > 0);
    for (uint32_t s = 0; s < table->n_ring; s++) {
        need.window += must_swap(table, pools, s, use_of_slot(table, s, pos, n));
    }
    return need;
}

int dmk_kv_table_advance(struct dmk_kv_table *table, struct dmk_kv_pools pools, uint32_t pos,
                         uint32_t n, struct dmk_page_copy *copies, uint32_t *inout_n_copies)
{
    const struct dmk_kv_need need = dmk_kv_table_advance_need(table, pools, pos, n);

    if (!has_room(pools, need)) {
        return -DMK_EFULL;
    }
    append_full(table, pools.full, need.full);
    /* A half-filled full page belongs to this sequence alone (fork copies it, the cache takes whole
     * ones). */
    dmk_assert(!dmk_kv_pool_shared(pools.full, table->full[pos / DMK_PAGE_TOKENS]));
    for (uint32_t s = 0; s < table->n_ring; s++) {
        const struct slot_use use = use_of_slot(table, s, pos, n);
        const uint32_t old = table->ring[s];

        if (!must_swap(table, pools, s, use)) {
            continue;
        }
        table->ring[s] = take_one(pools.window, old);
        if (old != DMK_PAGE_NONE) {
            if (use.kept) {
                copies[(*inout_n_copies)++] =
                    (struct dmk_page_copy){.window = true, .src = old, .dst = table->ring[s]};
            }
            dmk_kv_pool_drop(pools.window, old);
        }
    }
    return 0;
}

struct dmk_kv_need dmk_kv_table_fork_need(const struct dmk_kv_table *parent, uint32_t n_tokens,
                                          uint32_t max_tokens)
{
    return (struct dmk_kv_need){dmk_kv_pages_for(max_tokens) - n_tokens / DMK_PAGE_TOKENS,
                                parent->n_ring};
}

int dmk_kv_table_fork(const struct dmk_kv_table *parent, struct dmk_kv_table *child,
                      struct dmk_kv_pools pools, uint32_t n_tokens, uint32_t max_tokens,
                      struct dmk_page_copy *copies, uint32_t *inout_n_copies)
{
    const struct dmk_kv_need need = dmk_kv_table_fork_need(parent, n_tokens, max_tokens);
    const uint32_t n_shared = n_tokens / DMK_PAGE_TOKENS;

    dmk_assert(child->n_full == 0 && child->cap >= dmk_kv_pages_for(max_tokens));
    dmk_assert(child->n_ring == parent->n_ring && max_tokens >= n_tokens);
    if (!has_room(pools, need)) {
        return -DMK_EFULL;
    }
    for (uint32_t i = 0; i < n_shared; i++) {
        dmk_kv_pool_hold(pools.full, parent->full[i]);
        child->full[i] = parent->full[i];
    }
    child->n_full = n_shared;
    append_full(child, pools.full, need.full);
    if (n_tokens % DMK_PAGE_TOKENS != 0) {
        copies[(*inout_n_copies)++] =
            (struct dmk_page_copy){.src = parent->full[n_shared], .dst = child->full[n_shared]};
    }
    for (uint32_t s = 0; s < child->n_ring; s++) {
        child->ring[s] = take_one(pools.window, s > 0 ? child->ring[s - 1] : DMK_PAGE_NONE);
        if (parent->ring[s] != DMK_PAGE_NONE) {
            copies[(*inout_n_copies)++] = (struct dmk_page_copy){
                .window = true, .src = parent->ring[s], .dst = child->ring[s]};
        }
    }
    return 0;
}

void dmk_kv_table_move(struct dmk_kv_table *from, struct dmk_kv_table *to,
                       struct dmk_kv_pools pools, uint32_t n_tokens)
{
    const uint32_t n = dmk_kv_pages_for(n_tokens);

    dmk_assert(to->n_full == 0 && n <= from->n_full && n <= to->cap && to->n_ring == from->n_ring);
    for (uint32_t i = 0; i < from->n_full; i++) {
        if (i < n) {
            to->full[i] = from->full[i];
        } else {
            dmk_kv_pool_drop(pools.full, from->full[i]);
        }
    }
    for (uint32_t s = 0; s < from->n_ring; s++) {
        dmk_assert(to->ring[s] == DMK_PAGE_NONE);
        to->ring[s] = from->ring[s];
        from->ring[s] = DMK_PAGE_NONE;
    }
    to->n_full = n;
    from->n_full = 0;
}

void dmk_kv_table_release(struct dmk_kv_table *table, struct dmk_kv_pools pools)
{
    for (uint32_t i = 0; i < table->n_full; i++) {
        if (table->full[i] != DMK_PAGE_NONE) {
            dmk_kv_pool_drop(pools.full, table->full[i]);
        }
    }
    table->n_full = 0;
    for (uint32_t s = 0; s < table->n_ring; s++) {
        if (table->ring[s] != DMK_PAGE_NONE) {
            dmk_kv_pool_drop(pools.window, table->ring[s]);
            table->ring[s] = DMK_PAGE_NONE;
        }
    }
}

void dmk_kv_table_drain(struct dmk_kv_table *table, struct dmk_kv_pools pools, uint32_t first_block,
                        uint32_t end_block)
{
    for (uint32_t i = 0; i < table->n_full; i++) {
        if (i >= first_block && i < end_block) {
            dmk_kv_pool_drain(pools.full, table->full[i]);
        } else {
            dmk_kv_pool_drop(pools.full, table->full[i]);
            table->full[i] = DMK_PAGE_NONE;
        }
    }
    for (uint32_t s = 0; s < table->n_ring; s++) {
        if (table->ring[s] != DMK_PAGE_NONE) {
            dmk_kv_pool_drain(pools.window, table->ring[s]);
        }
    }
}
