/* Working memory of the tokenizer for the jobs on the pool: a job takes one and gives it back, so that its caches
 * stay warm and its memory mapped. Any thread. */
#pragma once

#include <pthread.h>
#include "common/text/tokenizer.h"

#define DMK_SCRATCHES_MAX 16 /* kept; more jobs at once make their own */

struct dmk_scratches {
    pthread_mutex_t lock; /* of the list; held for some instructions */
    struct dmk_bpe_scratch *items[DMK_SCRATCHES_MAX];
    uint32_t n;
};

void dmk_scratches_init(struct dmk_scratches *scratches);
/* All must have been given back. */
void dmk_scratches_fini(struct dmk_scratches *scratches);

/* The one that was used last, else a new one; NULL: no memory. */
struct dmk_bpe_scratch *dmk_scratches_take(struct dmk_scratches *scratches);
/* scratch may be NULL. */
void dmk_scratches_give(struct dmk_scratches *scratches, struct dmk_bpe_scratch *scratch);
