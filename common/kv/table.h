/* The pages of one sequence: full pages of the whole sequence and a ring of window pages.
 *
 * Full page i holds positions [64 i, 64 i + 64). Position p's window page is in ring slot (p / 64)
 * % n_ring. A page that something else holds too (the prefix cache, another sequence) is never
 * written: before a block is begun in it, it is swapped for a fresh one, so a snapshot costs no
 * copy. Only a chunk that both reads such a window page and replaces it, and a fork with
 * half-filled pages, ask for page copies.
 *
 * Owner: the worker's loop. The arrays belong to the caller; nothing allocates. */
#pragma once

#include "common/kv/layout.h"
#include "common/kv/pool.h"

struct dmk_kv_table {
    uint32_t *full; /* [cap] */
    uint32_t cap;
    uint32_t n_full;
    uint32_t ring[DMK_WINDOW_RING_MAX]; /* DMK_PAGE_NONE = no page yet */
    uint32_t n_ring;
};

/* The two pools of one group of ranks. */
struct dmk_kv_pools {
    struct dmk_kv_pool *full, *window;
};

struct dmk_kv_need {
    uint32_t full, window; /* pages */
};

/* storage: cap page ids, for the table's life. */
void dmk_kv_table_init(struct dmk_kv_table *table, uint32_t *storage, uint32_t cap,
                       uint32_t n_ring);

/* Full pages for n_tokens and a page in every ring slot, beyond what the table has: what is
 * missing, and taking it. -DMK_EFULL changes nothing. n_tokens must fit cap. */
struct dmk_kv_need dmk_kv_table_reserve_need(const struct dmk_kv_table *table, uint32_t n_tokens);
int dmk_kv_table_reserve(struct dmk_kv_table *table, struct dmk_kv_pools pools, uint32_t n_tokens);

/* Before a step computes positions [pos, pos + n): what it needs, and taking it. Fresh pages take
 * the place of shared ones that will be written. Copies are appended at copies[*inout_n_copies] (at
 * most two). -DMK_EFULL changes nothing. */
#define DMK_KV_ADVANCE_COPIES 2
struct dmk_kv_need dmk_kv_table_advance_need(const struct dmk_kv_table *table,
                                             struct dmk_kv_pools pools, uint32_t pos, uint32_t n);
int dmk_kv_table_advance(struct dmk_kv_table *table, struct dmk_kv_pools pools, uint32_t pos,
                         uint32_t n, struct dmk_page_copy *copies, uint32_t *inout_n_copies);

/* child, empty, becomes a second sequence with the parent's positions [0, n_tokens), and room for
 * max_tokens (>= n_tokens). Complete full pages are shared; the half-filled one and the window are
 * copied. -DMK_EFULL changes nothing. */
#define DMK_KV_FORK_COPIES (1 + DMK_WINDOW_RING_MAX)
struct dmk_kv_need dmk_kv_table_fork_need(const struct dmk_kv_table *parent, uint32_t n_tokens,
                                          uint32_t max_tokens);
int dmk_kv_table_fork(const struct dmk_kv_table *parent, struct dmk_kv_table *child,
                      struct dmk_kv_pools pools, uint32_t n_tokens, uint32_t max_tokens,
                      struct dmk_page_copy *copies, uint32_t *inout_n_copies);

/* to, empty, gets the pages of positions [0, n_tokens) and the ring; the others go back, from is empty. */
void dmk_kv_table_move(struct dmk_kv_table *from, struct dmk_kv_table *to,
                       struct dmk_kv_pools pools, uint32_t n_tokens);

/* Gives every page back and leaves the table empty. */
void dmk_kv_table_release(struct dmk_kv_table *table, struct dmk_kv_pools pools);
/* Pages that a ticket names - full ones from first_block on, and the ring - go on as draining until
 * release; the others are given back now, their entries become DMK_PAGE_NONE. */
void dmk_kv_table_drain(struct dmk_kv_table *table, struct dmk_kv_pools pools, uint32_t first_block,
                        uint32_t end_block);
