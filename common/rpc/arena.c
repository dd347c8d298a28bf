/* The arena of messages; see arena.h. */
#include "common/rpc/arena.h"

#include <stdlib.h>
#include "common/base/assert.h"

#define ALIGN ((size_t)16)

static void *take(void *ud, size_t bytes)
{
    struct dmk_rpc_arena *a = ud;
    const size_t size = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    void *piece;

    if (size < bytes || size > a->cap - a->used) {
        return malloc(bytes);
    }
    piece = a->block + a->used;
    a->used += size;
    a->n_live++;
    return piece;
}

static void give(void *ud, void *piece)
{
    struct dmk_rpc_arena *a = ud;

    if (!a->block || (char *)piece < a->block || (char *)piece >= a->block + a->cap) {
        free(piece);
        return;
    }
    dmk_assert(a->n_live > 0);
    if (--a->n_live == 0) {
        a->used = 0;
    }
}

void dmk_rpc_arena_init(struct dmk_rpc_arena *arena, size_t bytes)
{
    *arena = (struct dmk_rpc_arena){.allocator = {take, give, arena}, .block = malloc(bytes)};
    arena->cap = arena->block ? bytes : 0;
}

void dmk_rpc_arena_fini(struct dmk_rpc_arena *arena)
{
    dmk_assert(arena->n_live == 0);
    free(arena->block);
    arena->block = NULL;
    arena->cap = 0;
}
