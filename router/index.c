/* The table of block hashes; see index.h. */
#include "router/index.h"

#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/blocks.h"

#define WAYS 8

struct entry {
    struct dmk_id128 hash;
    uint64_t workers; /* 0 = entry is free */
    uint64_t used;    /* clock of the last look */
};

struct dmk_index {
    size_t n_sets; /* power of two */
    size_t n_blocks;
    uint64_t clock;
    struct entry entries[]; /* [n_sets][WAYS] */
};

struct dmk_index *dmk_index_new(size_t cap_blocks)
{
    struct dmk_index *index;
    size_t n_sets = 1;

    while (n_sets * WAYS < cap_blocks) {
        n_sets *= 2;
    }
    index = calloc(1, sizeof(*index) + n_sets * WAYS * sizeof(index->entries[0]));
    if (index) {
        index->n_sets = n_sets;
    }
    return index;
}

void dmk_index_free(struct dmk_index **index)
{
    free(*index);
    *index = NULL;
}

static struct entry *set_of(struct dmk_index *index, struct dmk_id128 hash)
{
    return &index->entries[(hash.lo & (index->n_sets - 1)) * WAYS];
}

static struct entry *find(struct dmk_index *index, struct dmk_id128 hash)
{
    struct entry *set = set_of(index, hash);

    for (size_t i = 0; i < WAYS; i++) {
        if (set[i].workers != 0 && dmk_id128_equal(set[i].hash, hash)) {
            return &set[i];
        }
    }
    return NULL;
}

static void drop(struct dmk_index *index, struct entry *e, uint64_t bit)
{
    if (e->workers & bit) {
        e->workers &= ~bit;
        index->n_blocks -= e->workers == 0;
    }
}

void dmk_index_add(struct dmk_index *index, uint32_t worker, struct dmk_id128 hash)
{
    struct entry *set = set_of(index, hash);
    struct entry *e = find(index, hash);

    dmk_assert(worker < DMK_INDEX_MAX_WORKERS);
    if (!e) {
        e = &set[0];
        for (size_t i = 0; i < WAYS && e->workers != 0; i++) {
            if (set[i].workers == 0 || set[i].used < e->used) {
                e = &set[i];
            }
        }
        index->n_blocks += e->workers == 0;
        *e = (struct entry){.hash = hash, .used = ++index->clock};
    }
    e->workers |= 1ull << worker;
}

void dmk_index_remove(struct dmk_index *index, uint32_t worker, struct dmk_id128 hash)
{
    struct entry *e = find(index, hash);

    dmk_assert(worker < DMK_INDEX_MAX_WORKERS);
    if (e) {
        drop(index, e, 1ull << worker);
    }
}

void dmk_index_clear_worker(struct dmk_index *index, uint32_t worker)
{
    dmk_assert(worker < DMK_INDEX_MAX_WORKERS);
    for (size_t i = 0; i < index->n_sets * WAYS; i++) {
        drop(index, &index->entries[i], 1ull << worker);
    }
}

uint64_t dmk_index_find(struct dmk_index *index, struct dmk_id128 hash)
{
    struct entry *e = find(index, hash);

    if (!e) {
        return 0;
    }
    e->used = ++index->clock;
    return e->workers;
}

size_t dmk_index_n_blocks(const struct dmk_index *index)
{
    return index->n_blocks;
}

void dmk_index_match(struct dmk_index *index, struct dmk_id128 root, const uint32_t *ids,
                     size_t n_ids, uint32_t ret_tokens[DMK_INDEX_MAX_WORKERS])
{
    struct dmk_id128 hash = root;

    if (index->n_blocks == 0) {
        return;
    }
    for (size_t at = 0; at + DMK_BLOCK_TOKENS <= n_ids; at += DMK_BLOCK_TOKENS) {
        uint64_t workers;

        hash = dmk_block_next(hash, ids + at);
        workers = dmk_index_find(index, hash);
        while (workers) {
            const unsigned w = (unsigned)__builtin_ctzll(workers);

            workers &= workers - 1;
            if (at + DMK_BLOCK_TOKENS > ret_tokens[w]) {
                ret_tokens[w] = (uint32_t)(at + DMK_BLOCK_TOKENS);
            }
        }
    }
}
