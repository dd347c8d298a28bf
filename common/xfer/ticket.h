/* A ticket: D's answer to a reservation, opaque to the router, read by P.
 *
 * It names everything P needs to write pages: who D is, where it listens, the memory of each of its
 * ranks, the page ids, and what the pages must look like. Wire form: versioned, little-endian, with
 * a checksum; every field is checked on reading. */
#pragma once

#include "common/base/buf.h"
#include "common/kv/layout.h"
#include "common/xfer/xfer.h"

#define DMK_TICKET_MAX_RANKS  8
#define DMK_TICKET_MAX_PAGES  2048 /* full pages: 131072 tokens */
#define DMK_NUMERICS_MAX      64
#define DMK_TICKET_MAX_BYTES  32768
#define DMK_TICKET_MAX_LAYERS 128 /* of each kind */
#define DMK_TICKET_MAX_HEADS  64

struct dmk_ticket_rank {
    uint32_t kv_head_first, n_kv_heads;
    uint32_t n_full_pages, n_window_pages; /* pool sizes: strides of the regions */
    uint64_t full_base, window_base;       /* remote addresses */
    uint8_t full_key[DMK_XFER_KEY_MAX], window_key[DMK_XFER_KEY_MAX];
    size_t full_key_len, window_key_len;
};

struct dmk_ticket {
    uint64_t d_incarnation;
    struct dmk_id128 cookie;
    uint64_t generation;
    uint64_t expires_unix_ms; /* for people; D's own clock decides */
    struct dmk_id128 model_id;
    char numerics[DMK_NUMERICS_MAX];
    uint32_t n_full_layers, n_window_layers, n_kv_heads, page_tokens, page_bytes;
    uint8_t address[DMK_XFER_ADDRESS_MAX];
    size_t address_len;
    uint32_t have;     /* positions [0, have) are already at D, a multiple of 64 */
    uint32_t n_tokens; /* P computes KV up to here: [0, n_tokens) = prompt less its last token */
    uint32_t n_pages;  /* full pages from block have/64 on: pages_for(n_tokens) - have/64 */
    uint32_t pages[DMK_TICKET_MAX_PAGES];
    uint32_t ring[DMK_WINDOW_RING_MAX]; /* DMK_PAGE_NONE where no block of the window lies */
    uint32_t n_ring;
    uint64_t bytes_expected; /* dmk_ticket_bytes */
    uint32_t n_ranks;
    struct dmk_ticket_rank ranks[DMK_TICKET_MAX_RANKS];
};

/* Bytes P puts for this ticket over all heads and layers: whole pages, n_pages full ones and the
 * window's blocks (dmk_kv_window_blocks of n_tokens). */
static inline uint64_t dmk_ticket_bytes(const struct dmk_ticket *t)
{
    uint32_t first;
    const uint64_t full = (uint64_t)t->n_full_layers * t->n_pages;
    const uint64_t window =
        (uint64_t)t->n_window_layers * dmk_kv_window_blocks(t->n_tokens, &first);

    return (full + window) * t->n_kv_heads * t->page_bytes;
}

/* Whether every field is inside its bound and they fit together: what decode does after reading. */
int dmk_ticket_check(const struct dmk_ticket *ticket, struct dmk_error *reterr);

/* The layout of one of D's ranks, for offsets into its regions. */
struct dmk_kv_layout dmk_ticket_layout(const struct dmk_ticket *ticket, uint32_t rank);

/* Appends the wire form, at most DMK_TICKET_MAX_BYTES. The ticket passes dmk_ticket_check. */
void dmk_ticket_encode(const struct dmk_ticket *ticket, struct dmk_buf *out);
/* -DMK_EFORMAT with a sentence: not a whole ticket of this version, damaged, or a field out of
 * bounds. */
int dmk_ticket_decode(struct dmk_bytes blob, struct dmk_ticket *ret_ticket,
                      struct dmk_error *reterr);
