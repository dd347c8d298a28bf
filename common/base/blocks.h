/* The chain hash of token blocks: what workers publish and routers look up.
 *
 * A block is 64 tokens. Block i's hash covers all tokens up to its end, the root covers what else must be
 * equal for pages to be reused: the numerics id and the client's cache salt. A hit by hash is a hint; the
 * worker compares the ids themselves. */
#pragma once

#include <string.h>
#include "common/base/hash.h"
#include "common/base/span.h"

#define DMK_BLOCK_TOKENS 64

static inline struct dmk_id128 dmk_block_root(const char *numerics, struct dmk_bytes salt)
{
    const struct dmk_id128 zero = {0, 0};

    return dmk_hash128(dmk_hash128(zero, numerics, strlen(numerics)), salt.data, salt.len);
}

/* ids: the block's 64 token ids. */
static inline struct dmk_id128 dmk_block_next(struct dmk_id128 parent, const uint32_t *ids)
{
    return dmk_hash128(parent, ids, DMK_BLOCK_TOKENS * sizeof(*ids));
}
