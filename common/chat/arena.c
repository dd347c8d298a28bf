/* Bump allocation in blocks. A block is 4 KiB, or as large as the one thing in it. The bound counts what
 * was asked for (rounded up), so a small bound means the same whatever the block size is. */
#include "common/chat/arena.h"

#include <stdalign.h>
#include <stdlib.h>

#define BLOCK_BYTES ((size_t)4096)

struct dmk_arena_block {
    struct dmk_arena_block *next;
    size_t used, size;
    alignas(max_align_t) unsigned char data[];
};

void dmk_arena_init(struct dmk_arena *arena, size_t max_bytes)
{
    *arena = (struct dmk_arena){.max_bytes = max_bytes};
}

void dmk_arena_fini(struct dmk_arena *arena)
{
    struct dmk_arena_block *block = arena->blocks;

    while (block) {
        struct dmk_arena_block *next = block->next;

        free(block);
        block = next;
    }
    *arena = (struct dmk_arena){0};
}

void *dmk_arena_alloc(struct dmk_arena *arena, size_t size)
{
    const size_t align = alignof(max_align_t);
    struct dmk_arena_block *block = arena->blocks;

    if (arena->failed || size > arena->max_bytes - arena->used ||
        size > SIZE_MAX - sizeof(*block) - align) {
        arena->failed = true;
        return NULL;
    }
    size = (size + align - 1) & ~(align - 1);
    if (!block || size > block->size - block->used) {
        const size_t block_size = size > BLOCK_BYTES ? size : BLOCK_BYTES;

        block = calloc(1, sizeof(*block) + block_size);
        if (!block) {
            arena->failed = true;
            return NULL;
        }
        block->size = block_size;
        block->next = arena->blocks;
        arena->blocks = block;
    }
    void *memory = block->data + block->used;

    block->used += size;
    arena->used += size < arena->max_bytes - arena->used ? size : arena->max_bytes - arena->used;
    return memory;
}

struct dmk_str dmk_arena_concat(struct dmk_arena *arena, struct dmk_str a, struct dmk_str b)
{
    if (a.len > SIZE_MAX - b.len) {
        arena->failed = true;
        return (struct dmk_str){"", 0};
    }
    char *text = dmk_arena_alloc(arena, a.len + b.len);

    if (!text) {
        return (struct dmk_str){"", 0};
    }
    if (a.len) {
        memcpy(text, a.data, a.len);
    }
    if (b.len) {
        memcpy(text + a.len, b.data, b.len);
    }
    return (struct dmk_str){text, a.len + b.len};
}

void *dmk_arena_grow(struct dmk_arena *arena, void *array, size_t n, size_t *cap,
                     size_t element_size)
{
    if (n < *cap) {
        return array;
    }
    const size_t new_cap = *cap ? *cap * 2 : 8;

    if (new_cap > SIZE_MAX / element_size) {
        arena->failed = true;
        return NULL;
    }
    void *moved = dmk_arena_alloc(arena, new_cap * element_size);

    if (!moved) {
        return NULL;
    }
    if (n) {
        memcpy(moved, array, n * element_size);
    }
    *cap = new_cap;
    return moved;
}
