/* The largest logits of a row, in order. Internal to common/sample; pure but for the memory it is given. */
#pragma once

#include <stdint.h>

struct dmk_candidate {
    float x;
    uint32_t id;
};

/* A row cut into blocks, with the largest logit of each. */
struct dmk_row {
    const float *x; /* [n] */
    uint32_t n;
    const float *block_max; /* [ceil(n / DMK_SAMPLE_BLOCK)] */
};

/* Writes the candidates with x >= cutoff (and above -INFINITY) in the order of ids; returns how many. */
uint32_t dmk_select_above(const struct dmk_row *row, float cutoff, struct dmk_candidate *ret);

/* A cutoff above which at least k candidates lie, from the block maxima alone; -INFINITY when they can not
 * tell (more than one a block is asked for). */
float dmk_select_cutoff(const struct dmk_row *row, uint32_t k);

/* Sorts by x descending; equals keep their order. tmp: [n]. */
void dmk_select_sort(struct dmk_candidate *c, struct dmk_candidate *tmp, uint32_t n);

/* The k best above -INFINITY, best first, the lowest id among equals; returns how many there are. For
 * small k. */
uint32_t dmk_select_top(const struct dmk_row *row, uint32_t k, struct dmk_candidate *ret);
