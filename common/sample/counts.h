/* How often a sequence holds each token: what the penalties need.
 *
 * Owned by the sequence and made only for one that has penalties. Bounded when made; adding does not
 * allocate. One thread at a time. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct dmk_token_count {
    uint32_t id;
    uint32_t n_output; /* times it was generated */
    bool in_prompt;
};

struct dmk_token_counts {
    struct dmk_token_count *items; /* [n] in the order of first sight */
    uint32_t *slots;               /* hash table of indices into items, plus 1; 0: empty */
    uint32_t n, cap;
    uint32_t slot_mask;
};

/* max_tokens: bound of prompt and output together, at most 2^30. 0 or -DMK_ENOMEM. */
int dmk_token_counts_init(struct dmk_token_counts *counts, uint32_t max_tokens);
void dmk_token_counts_fini(struct dmk_token_counts *counts);

/* More different tokens than max_tokens are a programmer's error (asserted). */
void dmk_token_counts_add_prompt(struct dmk_token_counts *counts, const uint32_t *ids, uint32_t n);
void dmk_token_counts_add_output(struct dmk_token_counts *counts, uint32_t id);
