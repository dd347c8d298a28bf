/* Memory for one message at a time: protobuf-c asks for several pieces an event, which here is a step of a
 * pointer. What does not fit comes from the heap. Owner: one thread. */
#pragma once

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>

struct dmk_rpc_arena {
    ProtobufCAllocator allocator; /* for the _unpack and _free_unpacked of generated code */
    char *block;
    size_t cap, used;
    size_t n_live; /* pieces of the block that are in use; with the last one it is empty again */
};

/* Without memory for the block everything comes from the heap. The arena must not move. */
void dmk_rpc_arena_init(struct dmk_rpc_arena *arena, size_t bytes);
/* No piece may be in use. */
void dmk_rpc_arena_fini(struct dmk_rpc_arena *arena);
