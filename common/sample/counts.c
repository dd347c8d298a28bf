/* Token counts; see counts.h. Open addressing at a load of at most one half. */
#include "common/sample/counts.h"
#include "common/base/assert.h"
#include "common/base/status.h"
#include <stdlib.h>

int dmk_token_counts_init(struct dmk_token_counts *counts, uint32_t max_tokens)
{
    const uint32_t cap = max_tokens ? max_tokens : 1;
    uint32_t n_slots = 16;

    dmk_assert(max_tokens <= 1u << 30);
    while (n_slots < 2 * cap) {
        n_slots *= 2;
    }
    *counts = (struct dmk_token_counts){
        .items = malloc(cap * sizeof(*counts->items)),
        .slots = calloc(n_slots, sizeof(*counts->slots)),
        .cap = cap,
        .slot_mask = n_slots - 1,
    };
    if (!counts->items || !counts->slots) {
        dmk_token_counts_fini(counts);
        return -DMK_ENOMEM;
    }
    return 0;
}

void dmk_token_counts_fini(struct dmk_token_counts *counts)
{
    free(counts->items);
    free(counts->slots);
    *counts = (struct dmk_token_counts){0};
}

/* The item of id, made on first sight. */
static struct dmk_token_count *item_of(struct dmk_token_counts *counts, uint32_t id)
{
    uint32_t slot = id * 0x9e3779b1u >> 7 & counts->slot_mask;
    struct dmk_token_count *item;

    while (counts->slots[slot] != 0) {
        item = &counts->items[counts->slots[slot] - 1];
        if (item->id == id) {
            return item;
        }
        slot = (slot + 1) & counts->slot_mask;
    }
    dmk_assert(counts->n < counts->cap);
    item = &counts->items[counts->n++];
    *item = (struct dmk_token_count){.id = id};
    counts->slots[slot] = counts->n;
    return item;
}

void dmk_token_counts_add_prompt(struct dmk_token_counts *counts, const uint32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        item_of(counts, ids[i])->in_prompt = true;
    }
}

void dmk_token_counts_add_output(struct dmk_token_counts *counts, uint32_t id)
{
    item_of(counts, id)->n_output++;
}
