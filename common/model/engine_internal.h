/* Inside the engine: the plan of a step, what a rank holds, and the forward pass.
 *
 * The plan is a group's part of the step turned into arrays that kernels index; it is the same for all ranks
 * of the group, and has no rows when the group has no sequence in the step. A rank has
 * its device, its slices of the weights, its pages and its activations. Everything is allocated when
 * the engine opens. */
#pragma once

#include "common/backend/backend.h"
#include "common/coll/coll.h"
#include "common/model/engine.h"
#include "common/model/weights.h"
#include "kernels/fp8.h"
#include "kernels/kernels.h"

struct dmk_team;

/* What a device reads of a step besides the plan's arrays, since a captured step runs with other ones. */
struct dmk_step_counts {
    uint32_t n_live; /* rows that are no padding */
    uint32_t n_splits;
    uint32_t meetings; /* of all steps before, see device_step.c */
};

struct dmk_step_plan {
    uint32_t n_rows; /* T: token rows of the group, sequence after sequence */
    uint32_t n_seqs, n_tiles;
    uint32_t n_logit_rows;
    uint32_t *ids;         /* [T] */
    uint32_t *positions;   /* [T] */
    uint32_t *slot;        /* [T] token inside its page */
    uint32_t *full_page;   /* [T] */
    uint32_t *window_page; /* [T] or DMK_NONE: a later row of the step takes its place */
    uint32_t *page_ids;    /* full pages of all sequences, one after the other */
    uint32_t *logit_rows;  /* [n_logit_rows] */
    float *logits;         /* [n_logit_rows][vocab], the caller's; NULL without rows */
    struct dmk_attn_seq *seqs;
    struct dmk_attn_tile *tiles;
    /* Of devices, where sequences of one token have splits instead of tiles. */
    uint32_t n_page_ids, n_singles, max_splits;
    struct dmk_attn_split *splits;
    struct dmk_step_counts *counts;
    struct dmk_sample_row *picks; /* [n_logit_rows] */
};

/* Activations of a rank; widths are the rank's own share. */
struct dmk_acts {
    uint16_t *x;     /* [T][H] residual stream, bf16; equal on all ranks of a group */
    uint16_t *norm;  /* [T][H] */
    uint16_t *q;     /* [T][heads][64]; on a device [T][heads + 2 kv heads][64], k and v are NULL */
    uint16_t *k, *v; /* [T][kv heads][64] */
    uint16_t *heads; /* [T][heads][64] attention output */
    float *sum;      /* [T][H] partial sums that cross ranks; on a device those of attention */
    uint16_t *scores; /* [T][E] router */
    uint32_t *chosen; /* [T][k] expert ids */
    float *weights;   /* [T][k] */
    struct dmk_moe_plan moe;
    uint16_t *z;    /* [T*k][I] */
    float *y;       /* [T*k][H] */
    uint16_t *last; /* [logit rows][H] */
    /* Working memory of dense products in FP8: [rows][widest K], and the groups' scales. */
    uint8_t *codes;
    float *code_scales;
    /* With more than one group: rows that came from all of them for the rank's experts, and its partial sum
     * for each. Room for all rows of a step, since all may choose the same experts. On a device part is there
     * with one group too, so that the two sums of a layer never share memory (see device_step.c). */
    struct dmk_coll_rows got;
    float *part; /* [rows got][H] */
};

struct dmk_engine;
struct dmk_device;

struct dmk_rank {
    struct dmk_engine *engine;
    uint32_t index;
    uint32_t group; /* data-parallel */
    struct dmk_shard shard;
    struct dmk_rank_weights weights;
    struct dmk_backend *backend;
    struct dmk_stream *stream;
    struct dmk_kernels kernels;
    struct dmk_kv_mem kv;
    struct dmk_kv_mem stage; /* host memory; NULL pointers where there is none */
    struct dmk_acts acts;
    int status; /* of the last step */
};

#define DMK_ENGINE_MAX_RANKS   8
#define DMK_ENGINE_RANK_ALLOCS 48 /* of a rank at most, besides one for each layer */

/* One allocation of a rank's backend, to give back. */
struct dmk_engine_alloc {
    struct dmk_backend *backend;
    enum dmk_mem mem;
    void *ptr;
    size_t bytes;
};

struct dmk_engine {
    struct dmk_weights *weights;
    bool owns_weights;
    struct dmk_shape shape;
    struct dmk_engine_conf conf;
    uint32_t n_ranks;
    uint32_t n_positions;      /* rows of the rope table: positions that pages can hold */
    float *rope;               /* [n_positions][32][2] */
    struct dmk_device *device; /* NULL on hosts */
    bool shares_devices;       /* two ranks are on one */
    /* The arrays of plans, for the rows of all groups, and the blocks in which they lie one after the other. On
     * hosts the groups share the first, on devices each has its own. */
    struct dmk_step_plan rooms[DMK_ENGINE_MAX_RANKS];
    uint8_t *plan_blocks[DMK_ENGINE_MAX_RANKS];
    size_t plan_bytes;
    uint32_t max_row_splits;                          /* of the longest row */
    uint32_t max_moe_rows;                            /* that a rank's experts may see in a step */
    struct dmk_step_plan plans[DMK_ENGINE_MAX_RANKS]; /* each group's */
    struct dmk_coll *coll;
    struct dmk_team *team; /* one thread a rank; rank 0 is the caller's */
    struct dmk_rank ranks[DMK_ENGINE_MAX_RANKS];
    const struct dmk_step *step;
    bool cancelled; /* written by rank 0 between two barriers */
    char numerics[DMK_ENGINE_NUMERICS_MAX], prompt_numerics[DMK_ENGINE_NUMERICS_MAX];
    struct dmk_engine_alloc *allocs; /* [max_allocs] */
    uint32_t n_allocs, max_allocs;
};

/* As dmk_engine_open, over weights that are in memory already and stay the caller's. */
int dmk_engine_open_weights(const struct dmk_engine_conf *conf, struct dmk_weights *weights,
                            struct dmk_engine **ret, struct dmk_error *reterr);

/* Fills in both numerics ids by conf, weights and shape. */
int dmk_engine_name_numerics(struct dmk_engine *engine, struct dmk_error *reterr);
/* Refuses dense weights in FP8 where the backend has no kernels for the shape. */
int dmk_engine_dense_check(const struct dmk_shape *shape, const char *backend,
                           struct dmk_error *reterr);

/* Allocates the plan and the activations of all ranks. */
int dmk_engine_plan_alloc(struct dmk_engine *engine, struct dmk_error *reterr);
int dmk_engine_acts_alloc(struct dmk_engine *engine, struct dmk_rank *rank,
                          struct dmk_error *reterr);

/* A rank's page memory and its staging, by the numbers of pages of the conf. */
int dmk_engine_pages_alloc(struct dmk_rank *rank, struct dmk_error *reterr);
/* Where the conf has a memory_percent instead: makes the numbers of pages of what that leaves, and allocates for all
 * ranks. Everything else that stays has to be there already. */
int dmk_engine_pages_fill(struct dmk_engine *engine, struct dmk_error *reterr);

/* Zeroed memory of the rank's backend that lives as long as the engine. */
int dmk_engine_alloc_mem(struct dmk_rank *rank, enum dmk_mem mem, size_t bytes, void *ret_ptr,
                         const char *what, struct dmk_error *reterr);

/* A group's plan without rows, over arrays of its own. */
void dmk_engine_plan_empty(struct dmk_engine *engine, uint32_t group);

/* Turns the step into the plans of its groups; asserts the bounds that the caller promised. */
void dmk_engine_plan(struct dmk_engine *engine, const struct dmk_step *step);

/* linear, with w8 instead of args->w where it is there; first_row: of the rank's rows in the model's matrix. */
void dmk_engine_linear(struct dmk_rank *rank, const struct dmk_linear_args *args,
                       const struct dmk_dense_fp8 *w8, uint32_t first_row);

/* One rank's whole step, with its group's plan. 0 or -DMK_ECANCELLED, the same on all ranks. */
int dmk_forward(struct dmk_rank *rank, const struct dmk_step_plan *plan,
                const struct dmk_step *step);
