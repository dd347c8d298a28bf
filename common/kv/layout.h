/* Where a KV page lies.
 *
 * A page holds 64 consecutive tokens of one KV head of one layer: K[64][64] and then V[64][64],
 * bf16, K after RoPE. Full-attention layers page the whole sequence. Sliding layers keep a ring:
 * position p lives in ring slot (p / 64) % ring, each slot naming a window page.
 *
 * One page id addresses the same index in every (layer of that kind, local KV head) array:
 *
 *   full   region: [n_full_layers]  [n_kv_heads local] [n_full_pages]   [page_bytes]
 *   window region: [n_window_layers][n_kv_heads local] [n_window_pages] [page_bytes]
 *
 * The regions of a rank are two spans of its memory. Since the unit is a head, pools with different
 * TP fit together: a head goes where its owner is. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DMK_PAGE_TOKENS     64
#define DMK_WINDOW_RING     3 /* pages a sequence holds in the window pool; 4 with speculation */
#define DMK_WINDOW_RING_MAX 4
#define DMK_PAGE_NONE       UINT32_MAX

struct dmk_kv_layout {
    uint32_t n_full_layers;
    uint32_t n_window_layers;
    uint32_t n_kv_heads;    /* of the model */
    uint32_t kv_head_first; /* first head of this rank */
    uint32_t n_local_heads;
    uint32_t page_bytes; /* 2 * 64 * 64 * 2 = 16384 for bf16 */
    uint32_t n_full_pages;
    uint32_t n_window_pages;
};

static inline uint64_t dmk_kv_full_bytes(const struct dmk_kv_layout *l)
{
    return (uint64_t)l->n_full_layers * l->n_local_heads * l->n_full_pages * l->page_bytes;
}

static inline uint64_t dmk_kv_window_bytes(const struct dmk_kv_layout *l)
{
    return (uint64_t)l->n_window_layers * l->n_local_heads * l->n_window_pages * l->page_bytes;
}

/* Byte offset inside the full region; layer counts among full layers, head among local heads. */
static inline uint64_t dmk_kv_full_offset(const struct dmk_kv_layout *l, uint32_t full_layer,
                                          uint32_t local_head, uint32_t page)
{
    return (((uint64_t)full_layer * l->n_local_heads + local_head) * l->n_full_pages + page) *
           l->page_bytes;
}

static inline uint64_t dmk_kv_window_offset(const struct dmk_kv_layout *l, uint32_t window_layer,
                                            uint32_t local_head, uint32_t page)
{
    return (((uint64_t)window_layer * l->n_local_heads + local_head) * l->n_window_pages + page) *
           l->page_bytes;
}

/* What pools take that are as small as n_sequences allow, whatever numbers of pages the layout has. */
uint64_t dmk_kv_least_bytes(const struct dmk_kv_layout *l, uint32_t n_sequences);

/* Sets the numbers of pages that fit in so many bytes. Of five pages four are full ones, but n_sequences have their
 * window pages in any case; full pages of a model without full layers stay as many as they are. -DMK_EINVAL where
 * bytes are fewer than the least. */
int dmk_kv_fit(struct dmk_kv_layout *l, uint64_t bytes, uint32_t n_sequences);

/* Pages that hold n tokens. */
static inline uint32_t dmk_kv_pages_for(uint64_t n_tokens)
{
    return (uint32_t)((n_tokens + DMK_PAGE_TOKENS - 1) / DMK_PAGE_TOKENS);
}

/* Blocks of the window of a sequence of n_tokens: what a query at position n_tokens looks back on, and what one
 * at the end of the last whole block would, which reaches a block further when 63 positions follow it. So
 * whoever has these blocks can go on, and can keep the last whole block as a prefix with its window. At most
 * three; only these are ever transferred. Returns their number, *ret_first is the first one's block index. */
static inline uint32_t dmk_kv_window_blocks(uint32_t n_tokens, uint32_t *ret_first)
{
    const uint32_t n_whole = n_tokens / DMK_PAGE_TOKENS;
    const uint32_t first = n_whole > 2 ? n_whole - 2 : 0;

    *ret_first = first;
    return n_tokens == 0 ? 0 : (n_tokens - 1) / DMK_PAGE_TOKENS - first + 1;
}

/* A page's content is copied, in all layers of its pool, from src to dst: half-filled pages of a
 * fork, window pages that a cached snapshot shares and a chunk both reads and replaces. */
struct dmk_page_copy {
    bool window;
    uint32_t src, dst;
    uint32_t dp;
};

/* A rank's page memory; full and window may be device memory, so they are addresses to hand on. */
struct dmk_kv_mem {
    struct dmk_kv_layout layout;
    void *full;
    void *window;
};
