/* Sums over the ranks of a pool, in one fixed order.
 *
 * Each rank brings the fp32 root of its own subtree; the tree over ranks adds neighbours:
 * ((0+1)+(2+3))+((4+5)+(6+7)). Together with the subtrees that the kernels add, this is the same tree of
 * eight leaves for every number of ranks, so results do not depend on it.
 *
 * "local": the ranks are threads of this process that share memory. Every call below is made by all
 * ranks, each on its own thread, in the same order. Nothing allocates. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "common/base/error.h"

struct dmk_coll;

/* n_ranks 1, 2, 4 or 8. oversubscribed: more ranks than cores, so sleep instead of spinning. */
int dmk_coll_local_new(uint32_t n_ranks, bool oversubscribed, struct dmk_coll **ret,
                       struct dmk_error *reterr);
void dmk_coll_free(struct dmk_coll **coll);

/* buf [n] of every rank becomes the tree sum of all ranks' buf. */
void dmk_coll_allreduce(struct dmk_coll *coll, uint32_t rank, float *buf, size_t n);

/* Returns when all ranks have called. */
void dmk_coll_barrier(struct dmk_coll *coll, uint32_t rank);
