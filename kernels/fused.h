/* Entries of the table that an implementation may leave NULL: fusions of the operations of kernels/kernels.h, with
 * the same rounding points, and what only a device does. Included by that header, never by itself. */
#pragma once

#include "kernels/kernels.h"

/* Where ranks meet inside an operation, before it reads what others have written: it tells them that all that its
 * stream has queued before is done, and waits to hear the same of them. Numbers ascend (and wrap). Every rank that
 * takes part must be able to run while others wait: each on a device of its own, with few rows. */
struct dmk_meeting {
    uint32_t *tell[DMK_MAX_SOURCES]; /* a word for each of the ranks, in the memory of its device */
    const uint32_t *hear;            /* [n] what they have told this rank */
    const uint32_t *base;            /* in device memory; base + number is what is told */
    uint32_t number;
    uint32_t n; /* 0: no meeting, the order is kept otherwise */
};

/* residual, then rmsnorm of the new x into y (scale NULL: no norm, y is not written). The sum that is added is a
 * tree over the sums of n_ranks (1, 2, 4 or 8) ranks, neighbours first; those of other ranks may lie in memory of
 * other devices. Where one rank has all of the sum it may have rounded it itself: `whole` is bf16(sum + bias) then, and
 * sum, n_ranks and bias are not read. */
struct dmk_add_norm_args {
    uint16_t *x;                       /* [n_rows][hidden] bf16 */
    const uint16_t *whole;             /* [n_rows][hidden] bf16, or NULL */
    const float *sum[DMK_MAX_SOURCES]; /* n_ranks of [n_rows][hidden] */
    uint32_t n_ranks;
    const uint16_t *bias;  /* [hidden] bf16, or NULL */
    const uint16_t *scale; /* [hidden] bf16, or NULL */
    uint16_t *y;           /* [n_rows][hidden] bf16 */
    uint32_t n_rows, hidden;
    float eps;
    struct dmk_meeting meeting; /* before the sums are read */
};

/* moe_combine over all of the model's groups, then residual without bias, then rmsnorm into y (scale NULL:
 * no norm, y is not written). */
struct dmk_combine_norm_args {
    struct dmk_moe_combine_args combine; /* out is not written */
    uint16_t *x;                         /* [n_rows][hidden] bf16 */
    const uint16_t *scale;               /* [hidden] bf16, or NULL */
    uint16_t *y;                         /* [n_rows][hidden] bf16 */
    float eps;
};

/* topk, then moe_group of what it chose; group.ids and group.weights are topk's. */
struct dmk_route_args {
    struct dmk_topk_args topk;
    struct dmk_moe_group_args group;
};

/* The rows of a step that are for a rank's experts, out of the memory of all groups of ranks. Row i of a
 * group becomes row first + i: its choices, which are DMK_NONE for rows from *n_live of the group on, its weights,
 * and x if it chose one of the rank's experts; else x is left as it is. */
struct dmk_gather_args {
    struct {
        const uint16_t *x;      /* [n_rows][hidden] bf16 */
        const uint32_t *ids;    /* [n_rows][k] */
        const float *weights;   /* [n_rows][k] */
        const uint32_t *n_live; /* device memory */
        uint32_t first;         /* the group's first row of the results */
    } from[DMK_MAX_SOURCES];    /* first ascends */
    uint32_t n_from, n_rows;    /* n_rows: of all groups */
    uint16_t *x;                /* [n_rows][hidden] */
    uint32_t *ids;              /* [n_rows][k] */
    float *weights;             /* [n_rows][k] */
    uint32_t k, hidden;
    uint32_t expert_first, n_experts; /* of the rank */
    struct dmk_meeting meeting;       /* before anything is read */
};

/* rope of queries and keys in rows that hold all three, then, with pages, kv_write. */
struct dmk_rope_write_args {
    uint16_t *qkv; /* [n_rows][n_q_heads + 2 n_kv_heads][64] bf16: queries, keys, values */
    const uint32_t *positions;           /* [n_rows] */
    const float *table;                  /* as dmk_rope_args */
    const uint32_t *row_page, *row_slot; /* as dmk_kv_write_args */
    uint8_t *pages;                      /* NULL: nothing is written */
    uint32_t n_rows, n_q_heads, n_kv_heads, n_pages, page_bytes;
};

/* Copies pages of every (layer, head) array of a pool, in the order of the list. */
struct dmk_page_pair {
    uint32_t src, dst;
};
#define DMK_MAX_PAIRS 16
struct dmk_page_copy_args {
    uint8_t *pool; /* [n_arrays][n_pages][page_bytes] */
    struct dmk_page_pair pairs[DMK_MAX_PAIRS];
    uint32_t n_pairs, n_arrays, n_pages, page_bytes;
};

/* Pages of neighbouring arrays of a pool, all with the same ids, and one contiguous piece of memory that holds them in
 * the order of the ids: page_gather brings them from the pool into the piece, page_scatter from the piece into the
 * pool. A piece has its arrays one after the other, so that what belongs to one (layer, head) is contiguous. */
struct dmk_page_move_args {
    uint8_t *pool;  /* [n_arrays][n_pages][page_bytes]: from the first array of the call on */
    uint8_t *piece; /* [n_arrays][n_ids][page_bytes]; a device also takes pinned host memory */
    uint32_t piece_pages; /* pages from array to array of the piece; 0: n_ids */
    const uint32_t *ids;  /* [n_ids], below n_pages; distinct where they are written to */
    uint32_t n_ids, n_arrays, n_pages;
    uint32_t page_bytes; /* a multiple of 16 */
};

/* Picks a token for each row as common/sample does for parameters without top-k, top-p, penalties, bias, bans
 * and mask, to the bit: block sums of DMK_SAMPLE_BLOCK rows in 16 lanes, blocks in order. */
struct dmk_sample_row {
    float scale; /* 1 / temperature; 0: greedy */
    float min_p;
    double unit; /* the draw, in [0, 1) */
};
struct dmk_sample_out {
    uint32_t id;
    int32_t status; /* 0, 1: a logit is NaN or +infinity, 2: nothing is left to pick */
    float max;      /* the largest logit */
    float logit;    /* of id */
    double sum;     /* of exp(logit - max) over the row */
};
struct dmk_sample_args {
    const float *logits;               /* [n_rows][vocab] */
    const struct dmk_sample_row *rows; /* [n_rows], device memory */
    struct dmk_sample_out *out;        /* [n_rows], device memory */
    uint32_t n_rows, vocab;
};

/* moe_gate_up, then moe_down, with nothing between: z need not be written. */
struct dmk_moe_experts_args {
    struct dmk_expert_weights gate_up; /* rows 2I, cols H */
    struct dmk_expert_weights down;    /* rows H, cols I */
    const uint16_t *x;                 /* [n_rows][H] bf16 */
    struct dmk_moe_plan plan;
    uint16_t *z; /* [n_rows * k][I] bf16, working memory */
    float *y;    /* [slots][H] */
    uint32_t n_rows, k, n_experts;
    float alpha, limit;
};

/* Brings a matrix of every local expert from the checkpoint's layout into the one that this table's
 * expert products read fastest; w.packed then says so. */
struct dmk_moe_pack_args {
    /* As in the checkpoint, in device memory. format DMK_WEIGHT_FP8: MXFP4 there, and shall become FP8. */
    struct dmk_expert_weights w;
    uint32_t n_experts;
    bool gate_up;    /* else: down */
    uint8_t *blocks; /* dmk_moe_packed.blocks bytes */
    uint8_t *scales; /* dmk_moe_packed.scales bytes */
};
struct dmk_moe_packed {
    enum dmk_weight_format format;
    size_t blocks, scales; /* bytes of all local experts */
};
