/* Pages between a pool and one contiguous piece. */
#include <string.h>
#include "kernels/ref/ref.h"

static uint8_t *pool_page(const struct dmk_page_move_args *a, uint32_t array, uint32_t i)
{
    return a->pool + ((size_t)array * a->n_pages + a->ids[i]) * a->page_bytes;
}

static uint8_t *piece_page(const struct dmk_page_move_args *a, uint32_t array, uint32_t i)
{
    return a->piece +
           ((size_t)array * (a->piece_pages ? a->piece_pages : a->n_ids) + i) * a->page_bytes;
}

void dmk_ref_page_gather(const struct dmk_page_move_args *a, struct dmk_stream *stream)
{
    (void)stream;
    for (uint32_t array = 0; array < a->n_arrays; array++) {
        for (uint32_t i = 0; i < a->n_ids; i++) {
            memcpy(piece_page(a, array, i), pool_page(a, array, i), a->page_bytes);
        }
    }
}

void dmk_ref_page_scatter(const struct dmk_page_move_args *a, struct dmk_stream *stream)
{
    (void)stream;
    for (uint32_t array = 0; array < a->n_arrays; array++) {
        for (uint32_t i = 0; i < a->n_ids; i++) {
            memcpy(pool_page(a, array, i), piece_page(a, array, i), a->page_bytes);
        }
    }
}
