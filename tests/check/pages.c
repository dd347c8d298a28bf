/* Gathering and scattering pages: byte by byte, and there and back. */
#include <stdio.h>
#include <string.h>
#include "common/base/assert.h"
#include "tests/check/check.h"

/* n distinct ids below n_pages, in an order without runs. */
static uint32_t *draw_ids(struct check *c, uint32_t n, uint32_t n_pages)
{
    uint32_t *ids = check_buf(c, n * sizeof(*ids));
    bool taken[256] = {false};
    dmk_assert(n_pages <= 256);
    for (uint32_t i = 0; i < n; i++) {
        do {
            ids[i] = check_u32(c, n_pages);
        } while (taken[ids[i]]);
        taken[ids[i]] = true;
    }
    return ids;
}

static void check_move(struct check *c, uint32_t n_arrays, uint32_t n_ids, uint32_t n_pages,
                       uint32_t page_bytes)
{
    char what[96];
    const size_t pool_bytes = (size_t)n_arrays * n_pages * page_bytes,
                 piece_bytes = (size_t)n_arrays * n_ids * page_bytes;
    const uint32_t *ids = draw_ids(c, n_ids, n_pages);
    uint8_t *pool = check_bytes(c, pool_bytes), *want = check_buf(c, piece_bytes),
            *piece = check_buf(c, piece_bytes);
    uint8_t *back = check_buf(c, pool_bytes), *want_back = check_buf(c, pool_bytes);
    for (uint32_t a = 0; a < n_arrays; a++) {
        for (uint32_t i = 0; i < n_ids; i++) {
            for (uint32_t b = 0; b < page_bytes; b++) {
                const size_t at = ((size_t)a * n_pages + ids[i]) * page_bytes + b;
                want[((size_t)a * n_ids + i) * page_bytes + b] = pool[at];
                want_back[at] = pool[at]; /* the rest keeps its poison */
            }
        }
    }
    snprintf(what, sizeof(what), "pages %u arrays, %u of %u, %u bytes", n_arrays, n_ids, n_pages,
             page_bytes);
    c->fast.page_gather(
        &(struct dmk_page_move_args){pool, piece, 0, ids, n_ids, n_arrays, n_pages, page_bytes},
        c->stream);
    check_equal(c, want, piece, piece_bytes, 1, what);
    c->fast.page_scatter(
        &(struct dmk_page_move_args){back, piece, 0, ids, n_ids, n_arrays, n_pages, page_bytes},
        c->stream);
    check_equal(c, want_back, back, pool_bytes, 1, what);
    check_end(c, what);
}

void check_pages(struct check *c)
{
    const uint32_t n_ids[] = {1, 2, 7, 64};
    if (c->bench) {
        return;
    }
    for (uint32_t a = 1; a <= 3; a++) {
        for (size_t i = 0; i < 4; i++) {
            check_move(c, a, n_ids[i], n_ids[i], 16);
            check_move(c, a, n_ids[i], n_ids[i] + 5, 64);
            check_move(c, a, n_ids[i], n_ids[i] + 1, 16384);
        }
    }
}
