/* Memory that is freed all at once, with a bound in bytes.
 *
 * Blocks come from malloc; nothing is freed singly. When the bound is reached or memory is out, failed is
 * set and NULL comes back: a writer goes on and checks once at the end. One thread at a time. */
#pragma once

#include "common/base/span.h"

struct dmk_arena_block;

struct dmk_arena {
    struct dmk_arena_block *blocks; /* newest first */
    size_t used, max_bytes;
    bool failed;
};

void dmk_arena_init(struct dmk_arena *arena, size_t max_bytes);
void dmk_arena_fini(struct dmk_arena *arena);

/* Zeroed, aligned for any type. */
void *dmk_arena_alloc(struct dmk_arena *arena, size_t size);

/* The concatenation of a and b; an empty view on failure. */
struct dmk_str dmk_arena_concat(struct dmk_arena *arena, struct dmk_str a, struct dmk_str b);

/* Room for one element more in an array of the arena: returns the array, moved and doubled when
 * n == *cap (the old one stays behind until the end), or NULL and leaves *cap. */
void *dmk_arena_grow(struct dmk_arena *arena, void *array, size_t n, size_t *cap,
                     size_t element_size);
