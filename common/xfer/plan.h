/* Which puts carry a piece of a sequence from P's pages to D's: pure functions.
 *
 * A head goes from the rank of P that owns it to the rank of D that owns it, so the two sides' TP
 * need not match. Within a (layer, head), blocks whose page ids rise by one on both sides travel in
 * one put. */
#pragma once

#include "common/xfer/ticket.h"

/* In an id of a source page: it is one of the rank's staging memory, not of its pools. */
#define DMK_PLAN_STAGED 0x80000000u

struct dmk_plan_head {
    uint8_t src_rank, dst_rank;   /* owners */
    uint8_t src_local, dst_local; /* its index among the owner's heads */
};

struct dmk_plan {
    uint32_t n_heads;
    uint32_t max_run; /* pages a put may carry */
    struct dmk_plan_head heads[DMK_TICKET_MAX_HEADS];
    struct dmk_kv_layout src[DMK_TICKET_MAX_RANKS];
    struct dmk_kv_layout dst[DMK_TICKET_MAX_RANKS];
    struct dmk_kv_layout staged[DMK_TICKET_MAX_RANKS]; /* of P's staging memory; set by the owner */
};

/* A layer of one kind of pages, and blocks [first, end) of it. Arrays are indexed by block. */
struct dmk_plan_piece {
    bool window;
    uint32_t layer; /* among the layers of its kind */
    const uint32_t *src_pages, *dst_pages;
    uint32_t first, end;
};

/* Where a walk stands: the next put begins at this head and block. Start from {0, first}. */
struct dmk_plan_cursor {
    uint32_t head, block;
};

struct dmk_plan_put {
    uint32_t src_rank, dst_rank;
    uint64_t src_offset, dst_offset; /* in the ranks' full or window regions */
    uint64_t bytes;
    uint32_t n_pages;
    bool staged; /* src_offset is in the rank's staging memory */
};

/* src: layouts of P's ranks. max_put_bytes bounds a put (0 = 64 MiB). -DMK_EMISMATCH with a
 * sentence when layers, heads or page size differ or P's heads are not all owned. The ticket has
 * passed its check. */
int dmk_plan_init(struct dmk_plan *plan, const struct dmk_kv_layout *src, uint32_t n_src,
                  const struct dmk_ticket *ticket, uint64_t max_put_bytes,
                  struct dmk_error *reterr);

/* The next put of the piece; false when the walk is over. Heads outside, blocks inside. */
bool dmk_plan_next(const struct dmk_plan *plan, const struct dmk_plan_piece *piece,
                   struct dmk_plan_cursor *inout_cursor, struct dmk_plan_put *ret_put);
