/* Which worker holds which prefix: block hashes as the workers publish them.
 *
 * A table of fixed size, eight entries a set; when a set is full the entry that was looked at
 * longest ago goes. It is a hint for affinity only: the worker's own answer is the truth. Owner:
 * the loop. */
#pragma once

#include "common/base/hash.h"

#define DMK_INDEX_MAX_WORKERS 64

struct dmk_index;

/* cap_blocks is rounded up to a power of two, at least 8. NULL: no memory. */
struct dmk_index *dmk_index_new(size_t cap_blocks);
void dmk_index_free(struct dmk_index **index);

void dmk_index_add(struct dmk_index *index, uint32_t worker, struct dmk_id128 hash);
void dmk_index_remove(struct dmk_index *index, uint32_t worker, struct dmk_id128 hash);
void dmk_index_clear_worker(struct dmk_index *index, uint32_t worker);
/* Bit w is set when worker w holds the block. */
uint64_t dmk_index_find(struct dmk_index *index, struct dmk_id128 hash);
size_t dmk_index_n_blocks(const struct dmk_index *index);

/* Walks the chain of ids from root and raises ret_tokens[w] to the longest prefix that worker w
 * holds. */
void dmk_index_match(struct dmk_index *index, struct dmk_id128 root, const uint32_t *ids,
                     size_t n_ids, uint32_t ret_tokens[DMK_INDEX_MAX_WORKERS]);
