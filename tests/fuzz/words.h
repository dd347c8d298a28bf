/* A vocabulary of single bytes and some tokens more, and a walk over it. For fuzz targets. */
#pragma once

#include <stdlib.h>
#include "common/base/assert.h"
#include "common/grammar/walk.h"

#define FUZZ_IDS   320u
#define FUZZ_STEPS 48u

static const char *const fuzz_tokens[] = {"\":", "\",\"", "{\"",   "\"}", "true",
                                          "12",  "ab",    "\\u00", "]}",  "\xc3\xa9"};

static struct dmk_bytes fuzz_bytes(void *ud, uint32_t id)
{
    static uint8_t bytes[256];

    (void)ud;
    if (id < 256) {
        bytes[id] = (uint8_t)id;
        return (struct dmk_bytes){&bytes[id], 1};
    }
    if (id - 256 < sizeof(fuzz_tokens) / sizeof(fuzz_tokens[0])) {
        return (struct dmk_bytes){(const uint8_t *)fuzz_tokens[id - 256],
                                  strlen(fuzz_tokens[id - 256])};
    }
    return (struct dmk_bytes){0};
}

static struct dmk_walker *fuzz_walker(void)
{
    static struct dmk_walker *walker;
    static struct dmk_trie *trie;
    struct dmk_buf blob;

    if (!walker) {
        dmk_buf_init(&blob, 0);
        dmk_assert(dmk_trie_write(FUZZ_IDS, fuzz_bytes, NULL, &blob) == 0);
        dmk_assert(dmk_trie_read(dmk_buf_bytes(&blob), &trie, NULL) == 0);
        dmk_assert(dmk_walker_new(trie, 4, &walker) == 0);
        dmk_buf_fini(&blob);
    }
    return walker;
}

/* Walks as the input's bytes choose among the allowed tokens. Returns false at a dead end: the answer is not
 * complete and nothing may come. */
static bool fuzz_walk(const struct dmk_automaton *a, const uint8_t *data, size_t size)
{
    struct dmk_walker *walker = fuzz_walker();
    struct dmk_walk walk, next;

    dmk_walk_begin(&walk, a);
    for (unsigned step = 0; step < FUZZ_STEPS; step++) {
        uint64_t mask[FUZZ_IDS / 64];
        const enum dmk_walk_end end = dmk_walk_mask(walker, &walk, mask);
        uint32_t allowed[FUZZ_IDS], n = 0;

        for (uint32_t id = 0; id < FUZZ_IDS; id++) {
            if (mask[id / 64] >> (id % 64) & 1) {
                allowed[n++] = id;
            }
        }
        if (n == 0) {
            return end == DMK_WALK_ENDED;
        }
        next = walk;
        dmk_assert(dmk_walk_advance(walker, &next, allowed[(size ? data[step % size] : 0) % n]) ==
                   0);
        walk = next;
    }
    return true;
}
