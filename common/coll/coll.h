/* What the ranks of a pool say to each other: sums in one fixed order, and rows on their way to experts.
 *
 * A pool is n_groups data-parallel groups of group_ranks tensor-parallel ranks; rank = group * group_ranks +
 * its index in the group. Ranks of a group hold the same tokens, groups hold different ones.
 *
 * Every sum over ranks adds neighbours: ((0+1)+(2+3))+((4+5)+(6+7)). Each rank brings the fp32 root of its
 * own subtree, so this is the same tree of eight leaves for every number of ranks, and results do not depend
 * on it.
 *
 * Two ways for a layer's experts:
 *   one group      inputs are equal on all ranks, so a rank just picks the rows of its experts, and
 *                  dmk_coll_allreduce adds what all have made of them;
 *   many groups    dmk_coll_dispatch brings each rank the rows that chose one of its experts, from all
 *                  groups, and dmk_coll_combine brings the results back to the group of each row.
 *
 * "local": the ranks are threads of this process that share memory. Every rank makes the same calls in the
 * same order, each on its own thread, also when its group has no tokens: the others wait for it. Nothing
 * allocates after new. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "common/base/error.h"

#define DMK_COLL_NONE UINT32_MAX

struct dmk_coll;

struct dmk_coll_conf {
    uint32_t group_ranks, n_groups; /* powers of two, at most 8 ranks in all */
    uint32_t max_rows;              /* of a step over all groups; 0 when there is one group */
    bool oversubscribed;            /* more ranks than cores, so sleep instead of spinning */
};

int dmk_coll_local_new(const struct dmk_coll_conf *conf, struct dmk_coll **ret,
                       struct dmk_error *reterr);
void dmk_coll_free(struct dmk_coll **coll);

/* buf [n] of every rank of the caller's group becomes the tree sum of the group's buf. */
void dmk_coll_allreduce(struct dmk_coll *coll, uint32_t rank, float *buf, size_t n);

/* Returns when all ranks of all groups have called. */
void dmk_coll_barrier(struct dmk_coll *coll, uint32_t rank);

/* Rows with the experts that each chose. */
struct dmk_coll_rows {
    uint16_t *x;    /* [n_rows][width] */
    uint32_t *ids;  /* [n_rows][k] expert ids */
    float *weights; /* [n_rows][k] */
    uint32_t n_rows;
};

struct dmk_coll_dispatch {
    struct dmk_coll_rows
        own; /* the group's rows, equal on all its ranks; untouched until combine returns */
    struct dmk_coll_rows got; /* room for max_rows; n_rows is ignored */
    uint32_t width, k;
    uint32_t expert_first, n_experts; /* the caller's */
};

/* Copies every row of the step that chose one of the caller's experts into got, by group and then by row,
 * with all its ids and weights. Returns how many came: 0 .. rows of the step. */
uint32_t dmk_coll_dispatch(struct dmk_coll *coll, uint32_t rank,
                           const struct dmk_coll_dispatch *dispatch);

/* After a dispatch: part [rows got][width] is the caller's subtree for each row that it got. out [own
 * rows][width] becomes the tree sum over all ranks, where a rank that did not get a row brings +0 for it. */
void dmk_coll_combine(struct dmk_coll *coll, uint32_t rank, const float *part, float *out);
