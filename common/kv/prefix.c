/* The prefix cache's tree. A node is addressed by its full page: the array of nodes is as long as
 * the full pool, and a page that is a node holds one block of one chain. Owner: the worker's loop.
 */
#include "common/kv/prefix.h"

#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "common/base/list.h"
#include "common/base/status.h"

#define NONE            DMK_PAGE_NONE
#define SNAP_BLOCKS     2u /* window pages of a snapshot */
#define BLOCK_TOKENS    DMK_PAGE_TOKENS
#define SLACK_MIN_PAGES 512u
#define SLACK_PART      16u

_Static_assert(DMK_BLOCK_TOKENS == DMK_PAGE_TOKENS, "a block fills a page");

struct node {
    bool used;
    uint32_t parent; /* page, NONE at the root */
    uint32_t next;   /* in the hash chain */
    uint32_t n_children;
    uint32_t n_tokens;          /* up to its end */
    uint32_t snap[SNAP_BLOCKS]; /* window pages of the last blocks, oldest first; [1] NONE = no
                                   boundary */
    struct dmk_id128 hash;
    struct dmk_list lru; /* boundaries only */
    uint32_t ids[BLOCK_TOKENS];
};

struct dmk_kv_prefix {
    struct dmk_kv_pools pools;
    uint32_t n_pages;
    struct node *nodes;                 /* [n_pages] */
    uint32_t *heads;                    /* [n_heads], first node of each chain */
    uint32_t n_heads;                   /* a power of two */
    struct dmk_list lru;                /* boundaries, least recently used first */
    struct dmk_kv_prefix_event *events; /* [max_events], a ring */
    uint32_t max_events, first_event, n_events;
    bool lost;
    struct dmk_kv_prefix_stats stats;
};

int dmk_kv_prefix_new(struct dmk_kv_pools pools, uint32_t max_events, struct dmk_kv_prefix **ret)
{
    const uint32_t n_pages = dmk_kv_pool_counts(pools.full).total;
    struct dmk_kv_prefix *p = calloc(1, sizeof(*p));

    dmk_assert(max_events > 0);
    if (!p) {
        return -DMK_ENOMEM;
    }
    p->pools = pools;
    p->n_pages = n_pages;
    p->max_events = max_events;
    p->n_heads = 64;
    while (p->n_heads < n_pages) {
        p->n_heads *= 2;
    }
    p->nodes = calloc(n_pages, sizeof(*p->nodes));
    p->heads = calloc(p->n_heads, sizeof(*p->heads));
    p->events = calloc(max_events, sizeof(*p->events));
    dmk_list_init(&p->lru);
    if (!p->nodes || !p->heads || !p->events) {
        free(p->nodes);
        free(p->heads);
        free(p->events);
        free(p);
        return -DMK_ENOMEM;
    }
    for (uint32_t i = 0; i < p->n_heads; i++) {
        p->heads[i] = NONE;
    }
    *ret = p;
    return 0;
}

void dmk_kv_prefix_free(struct dmk_kv_prefix **prefix)
{
    struct dmk_kv_prefix *p = *prefix;

    if (!p) {
        return;
    }
    while (dmk_kv_prefix_evict(p)) {
    }
    free(p->nodes);
    free(p->heads);
    free(p->events);
    free(p);
    *prefix = NULL;
}

static uint32_t *chain_of(const struct dmk_kv_prefix *p, struct dmk_id128 hash)
{
    return &p->heads[hash.lo & (p->n_heads - 1)];
}

static bool is_boundary(const struct node *node)
{
    return node->snap[SNAP_BLOCKS - 1] != NONE;
}

/* The node of a block, or NONE. The ids and the parent are compared, so equal hashes alone never
 * hit. */
static uint32_t lookup(const struct dmk_kv_prefix *p, struct dmk_id128 hash, uint32_t parent,
                       const uint32_t *ids)
{
    for (uint32_t i = *chain_of(p, hash); i != NONE; i = p->nodes[i].next) {
        const struct node *node = &p->nodes[i];

        if (dmk_id128_equal(node->hash, hash) && node->parent == parent &&
            memcmp(node->ids, ids, sizeof(node->ids)) == 0) {
            return i;
        }
    }
    return NONE;
}

static bool has_hash(const struct dmk_kv_prefix *p, struct dmk_id128 hash)
{
    for (uint32_t i = *chain_of(p, hash); i != NONE; i = p->nodes[i].next) {
        if (dmk_id128_equal(p->nodes[i].hash, hash)) {
            return true;
        }
    }
    return false;
}

static void push_event(struct dmk_kv_prefix *p, const struct node *node, bool added)
{
    if (p->n_events == p->max_events) {
        p->lost = true;
    }
    if (p->lost) {
        p->n_events = 0;
        return;
    }
    p->events[(p->first_event + p->n_events++) % p->max_events] =
        (struct dmk_kv_prefix_event){added, node->n_tokens, node->hash};
}

/* Makes a boundary and its ancestors the most recently used, the shortest last: so the oldest
 * boundary never has a descendant. */
static void renew(struct dmk_kv_prefix *p, uint32_t at)
{
    for (; at != NONE; at = p->nodes[at].parent) {
        struct node *node = &p->nodes[at];

        if (is_boundary(node)) {
            dmk_list_remove(&node->lru);
            dmk_list_push_back(&p->lru, &node->lru);
        }
    }
}

/* Longest boundary within max_tokens, or NONE. */
static uint32_t find_boundary(const struct dmk_kv_prefix *p, struct dmk_id128 root,
                              const uint32_t *ids, uint32_t max_tokens)
{
    struct dmk_id128 hash = root;
    uint32_t best = NONE, at = NONE;

    for (uint32_t b = 0; b < max_tokens / BLOCK_TOKENS; b++) {
        const uint32_t *block = ids + (size_t)b * BLOCK_TOKENS;

        hash = dmk_block_next(hash, block);
        at = lookup(p, hash, at, block);
        if (at == NONE) {
            break;
        }
        if (is_boundary(&p->nodes[at])) {
            best = at;
        }
    }
    return best;
}

uint32_t dmk_kv_prefix_find(const struct dmk_kv_prefix *p, struct dmk_id128 root,
                            const uint32_t *ids, uint32_t max_tokens)
{
    const uint32_t best = find_boundary(p, root, ids, max_tokens);

    return best == NONE ? 0 : p->nodes[best].n_tokens;
}

uint32_t dmk_kv_prefix_take(struct dmk_kv_prefix *p, struct dmk_id128 root, const uint32_t *ids,
                            uint32_t max_tokens, bool with_ring, struct dmk_kv_table *table)
{
    const uint32_t best = find_boundary(p, root, ids, max_tokens);
    uint32_t n_blocks;

    dmk_assert(table->n_full == 0);
    if (best == NONE) {
        p->stats.n_misses++;
        return 0;
    }
    n_blocks = p->nodes[best].n_tokens / BLOCK_TOKENS;
    dmk_assert(n_blocks <= table->cap);
    for (uint32_t at = best, b = n_blocks; at != NONE; at = p->nodes[at].parent) {
        table->full[--b] = at;
        dmk_kv_pool_hold(p->pools.full, at);
    }
    table->n_full = n_blocks;
    for (uint32_t k = 0; with_ring && k < SNAP_BLOCKS; k++) {
        const uint32_t page = p->nodes[best].snap[k];
        const uint32_t slot = (n_blocks + k + table->n_ring - SNAP_BLOCKS) % table->n_ring;

        if (page != NONE) {
            dmk_assert(table->ring[slot] == NONE);
            table->ring[slot] = page;
            dmk_kv_pool_hold(p->pools.window, page);
        }
    }
    renew(p, best);
    p->stats.n_hits++;
    p->stats.hit_tokens += p->nodes[best].n_tokens;
    return p->nodes[best].n_tokens;
}

/* Links page as the node of a block. */
static void add_node(struct dmk_kv_prefix *p, uint32_t page, uint32_t parent, struct dmk_id128 hash,
                     const uint32_t *ids)
{
    struct node *node = &p->nodes[page];
    uint32_t *head = chain_of(p, hash);

    dmk_assert(!node->used);
    *node = (struct node){.used = true, .parent = parent, .next = *head, .hash = hash};
    memcpy(node->ids, ids, sizeof(node->ids));
    node->n_tokens = BLOCK_TOKENS + (parent == NONE ? 0 : p->nodes[parent].n_tokens);
    node->snap[0] = node->snap[1] = NONE;
    dmk_list_init(&node->lru);
    *head = page;
    if (parent != NONE) {
        p->nodes[parent].n_children++;
    }
    dmk_kv_pool_cache(p->pools.full, page);
    p->stats.n_nodes++;
}

/* Unlinks a childless node without snapshot; returns its parent. */
static uint32_t remove_node(struct dmk_kv_prefix *p, uint32_t page)
{
    struct node *node = &p->nodes[page];
    uint32_t *link = chain_of(p, node->hash);
    const uint32_t parent = node->parent;

    dmk_assert(node->used && node->n_children == 0 && !is_boundary(node));
    while (*link != page) {
        link = &p->nodes[*link].next;
    }
    *link = node->next;
    node->used = false;
    if (parent != NONE) {
        p->nodes[parent].n_children--;
    }
    dmk_kv_pool_uncache(p->pools.full, page);
    p->stats.n_nodes--;
    return parent;
}

/* Removes nodes upwards from `at` that are neither a boundary nor lead to one. */
static void prune(struct dmk_kv_prefix *p, uint32_t at)
{
    while (at != NONE && p->nodes[at].n_children == 0 && !is_boundary(&p->nodes[at])) {
        at = remove_node(p, at);
    }
}

void dmk_kv_prefix_insert(struct dmk_kv_prefix *p, struct dmk_id128 root, const uint32_t *ids,
                          uint32_t n_tokens, const struct dmk_kv_table *table)
{
    const uint32_t n_blocks = n_tokens / BLOCK_TOKENS;
    struct dmk_id128 hash = root;
    uint32_t at = NONE;

    dmk_assert(table->n_full >= n_blocks);
    for (uint32_t b = 0; b < n_blocks; b++) {
        const uint32_t *block = ids + (size_t)b * BLOCK_TOKENS;
        uint32_t next;

        hash = dmk_block_next(hash, block);
        next = lookup(p, hash, at, block);
        if (next == NONE) {
            /* A collision of hashes, or a page that is a node under another parent (two sequences
             * computed the same block at once, and one of the chains was evicted): not worth a
             * case. */
            if (has_hash(p, hash) || p->nodes[table->full[b]].used) {
                prune(p, at);
                return;
            }
            next = table->full[b];
            add_node(p, next, at, hash, block);
        }
        at = next;
    }
    if (at == NONE) {
        return;
    }
    struct node *node = &p->nodes[at];
    if (!is_boundary(node)) {
        for (uint32_t k = n_blocks >= SNAP_BLOCKS ? 0 : 1; k < SNAP_BLOCKS; k++) {
            const uint32_t slot = (n_blocks + k - SNAP_BLOCKS) % table->n_ring;

            dmk_assert(table->ring[slot] != NONE);
            node->snap[k] = table->ring[slot];
            dmk_kv_pool_cache(p->pools.window, node->snap[k]);
        }
        p->stats.n_boundaries++;
        push_event(p, node, true);
    }
    renew(p, at);
}

bool dmk_kv_prefix_evict(struct dmk_kv_prefix *p)
{
    struct node *node;

    if (dmk_list_empty(&p->lru)) {
        return false;
    }
    node = dmk_container_of(p->lru.next, struct node, lru);
    dmk_assert(node->n_children == 0);
    push_event(p, node, false);
    for (uint32_t k = 0; k < SNAP_BLOCKS; k++) {
        if (node->snap[k] != NONE) {
            dmk_kv_pool_uncache(p->pools.window, node->snap[k]);
            node->snap[k] = NONE;
        }
    }
    dmk_list_remove(&node->lru);
    p->stats.n_boundaries--;
    p->stats.n_evicted++;
    prune(p, (uint32_t)(node - p->nodes));
    return true;
}

void dmk_kv_prefix_keep_slack(struct dmk_kv_prefix *p, uint32_t n)
{
    const uint32_t total = dmk_kv_pool_counts(p->pools.full).total;
    const uint32_t slack = total < SLACK_MIN_PAGES ? 0 : total / SLACK_PART;
    struct dmk_kv_pool_counts full = dmk_kv_pool_counts(p->pools.full);

    while (slack > 0 && full.free < n + slack && full.cached > 0 && dmk_kv_prefix_evict(p)) {
        full = dmk_kv_pool_counts(p->pools.full);
    }
}

bool dmk_kv_prefix_make_room(struct dmk_kv_prefix *p, struct dmk_kv_need need)
{
    const struct dmk_kv_pool_counts full = dmk_kv_pool_counts(p->pools.full);
    const struct dmk_kv_pool_counts window = dmk_kv_pool_counts(p->pools.window);

    if (full.free + full.cached < need.full || window.free + window.cached < need.window) {
        return false;
    }
    while (dmk_kv_pool_counts(p->pools.full).free < need.full ||
           dmk_kv_pool_counts(p->pools.window).free < need.window) {
        if (!dmk_kv_prefix_evict(p)) {
            return false;
        }
    }
    dmk_kv_prefix_keep_slack(p, need.full);
    return true;
}

uint32_t dmk_kv_prefix_events(struct dmk_kv_prefix *p, struct dmk_kv_prefix_event *ret_events,
                              uint32_t cap, bool *ret_lost)
{
    uint32_t n = 0;

    *ret_lost = p->lost;
    p->lost = false;
    for (; n < cap && p->n_events > 0; n++, p->n_events--) {
        ret_events[n] = p->events[p->first_event];
        p->first_event = (p->first_event + 1) % p->max_events;
    }
    return n;
}

uint32_t dmk_kv_prefix_list(const struct dmk_kv_prefix *p, uint32_t *inout_at,
                            struct dmk_kv_prefix_event *ret_events, uint32_t cap)
{
    uint32_t n = 0;

    for (; *inout_at < p->n_pages && n < cap; (*inout_at)++) {
        const struct node *node = &p->nodes[*inout_at];

        if (node->used && is_boundary(node)) {
            ret_events[n++] = (struct dmk_kv_prefix_event){true, node->n_tokens, node->hash};
        }
    }
    return n;
}

bool dmk_kv_prefix_has(const struct dmk_kv_prefix *p, struct dmk_id128 hash)
{
    for (uint32_t i = *chain_of(p, hash); i != NONE; i = p->nodes[i].next) {
        if (dmk_id128_equal(p->nodes[i].hash, hash) && is_boundary(&p->nodes[i])) {
            return true;
        }
    }
    return false;
}

struct dmk_kv_prefix_stats dmk_kv_prefix_stats(const struct dmk_kv_prefix *p)
{
    return p->stats;
}

/* One node's own facts, and how many children it should count. */
static bool check_node(const struct dmk_kv_prefix *p, uint32_t page)
{
    const struct node *node = &p->nodes[page];
    const struct dmk_kv_pool *window = p->pools.window;
    uint32_t n_before = 0, chain = *chain_of(p, node->hash);

    while (chain != page && chain != NONE) {
        chain = p->nodes[chain].next;
    }
    if (node->parent != NONE) {
        if (!p->nodes[node->parent].used) {
            return false;
        }
        n_before = p->nodes[node->parent].n_tokens;
    }
    if (is_boundary(node)) {
        for (uint32_t k = 0; k < SNAP_BLOCKS; k++) {
            const bool wanted = k == 1 || node->n_tokens > BLOCK_TOKENS;

            if (wanted != (node->snap[k] != NONE) ||
                (wanted && dmk_kv_pool_cache_holds(window, node->snap[k]) == 0)) {
                return false;
            }
        }
    }
    return chain == page && node->n_tokens == n_before + BLOCK_TOKENS &&
           (node->n_children > 0 || is_boundary(node)) &&
           dmk_kv_pool_cache_holds(p->pools.full, page) == 1;
}

bool dmk_kv_prefix_check(const struct dmk_kv_prefix *p)
{
    uint32_t n_nodes = 0, n_boundaries = 0, n_listed = 0;
    uint64_t n_child_links = 0, n_children = 0, snap_holds = 0, window_holds = 0;

    for (uint32_t i = 0; i < p->n_pages; i++) {
        const struct node *node = &p->nodes[i];

        if (!node->used) {
            if (dmk_kv_pool_cache_holds(p->pools.full, i) != 0) {
                return false;
            }
            continue;
        }
        if (!check_node(p, i)) {
            return false;
        }
        n_nodes++;
        n_boundaries += is_boundary(node);
        snap_holds += (node->snap[0] != NONE) + (node->snap[1] != NONE);
        n_child_links += node->parent != NONE;
        n_children += node->n_children;
    }
    for (uint32_t w = 0; w < dmk_kv_pool_counts(p->pools.window).total; w++) {
        window_holds += dmk_kv_pool_cache_holds(p->pools.window, w);
    }
    for (const struct dmk_list *l = p->lru.next; l != &p->lru; l = l->next) {
        n_listed++;
    }
    return n_nodes == p->stats.n_nodes && n_boundaries == p->stats.n_boundaries &&
           n_listed == n_boundaries && n_child_links == n_children && snap_holds == window_holds;
}
