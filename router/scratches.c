/* Scratches that wait for the next job; see scratches.h. */
#include "router/scratches.h"
#include "common/base/assert.h"

void dmk_scratches_init(struct dmk_scratches *scratches)
{
    scratches->n = 0;
    dmk_assert(pthread_mutex_init(&scratches->lock, NULL) == 0);
}

void dmk_scratches_fini(struct dmk_scratches *scratches)
{
    while (scratches->n > 0) {
        dmk_bpe_scratch_free(&scratches->items[--scratches->n]);
    }
    (void)pthread_mutex_destroy(&scratches->lock);
}

struct dmk_bpe_scratch *dmk_scratches_take(struct dmk_scratches *scratches)
{
    struct dmk_bpe_scratch *scratch = NULL;

    (void)pthread_mutex_lock(&scratches->lock);
    if (scratches->n > 0) {
        scratch = scratches->items[--scratches->n];
    }
    (void)pthread_mutex_unlock(&scratches->lock);
    return scratch ? scratch : dmk_bpe_scratch_new();
}

void dmk_scratches_give(struct dmk_scratches *scratches, struct dmk_bpe_scratch *scratch)
{
    (void)pthread_mutex_lock(&scratches->lock);
    if (scratch && scratches->n < DMK_SCRATCHES_MAX) {
        scratches->items[scratches->n++] = scratch;
        scratch = NULL;
    }
    (void)pthread_mutex_unlock(&scratches->lock);
    dmk_bpe_scratch_free(&scratch);
}
