/* Gathering and scattering pages: all bits, and nothing else written. */
#include <stdio.h>
#include "tests/check/cuda/device.h"

#define MAX_IDS 600

/* n of n_pages ids, each once, in random order. */
static struct twin draw_ids(struct device *d, uint32_t n, uint32_t n_pages)
{
    struct twin t = twin_new(d, n * sizeof(uint32_t));
    uint32_t all[MAX_IDS], *ids = t.host;
    for (uint32_t i = 0; i < n_pages; i++) {
        all[i] = i;
    }
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t pick = i + draw_u32(d, n_pages - i), id = all[pick];
        all[pick] = all[i];
        ids[i] = id;
    }
    twin_send(d, t);
    return t;
}

static void move(struct device *d, uint32_t n_arrays, uint32_t n_ids, uint32_t page_bytes,
                 bool gather)
{
    char what[96];
    const uint32_t n_pages = n_ids + draw_u32(d, n_ids < 400 ? 150 : 10);
    struct twin ids = draw_ids(d, n_ids, n_pages);
    const size_t pool_bytes = (size_t)n_arrays * n_pages * page_bytes,
                 piece_bytes = (size_t)n_arrays * n_ids * page_bytes;
    struct twin pool = twin_bytes(d, pool_bytes, 0, 256);
    struct twin piece = gather ? twin_new(d, piece_bytes) : twin_bytes(d, piece_bytes, 0, 256);
    struct dmk_page_move_args host = {pool.host, piece.host, 0,       ids.host,
                                      n_ids,     n_arrays,   n_pages, page_bytes};
    struct dmk_page_move_args dev = {pool.dev, piece.dev, 0,       ids.dev,
                                     n_ids,    n_arrays,  n_pages, page_bytes};
    (gather ? d->ref.page_gather : d->ref.page_scatter)(&host, NULL);
    (gather ? d->cuda.page_gather : d->cuda.page_scatter)(&dev, d->stream);
    snprintf(what, sizeof(what), "%s %u arrays, %u of %u pages of %u",
             gather ? "gather" : "scatter", n_arrays, n_ids, n_pages, page_bytes);
    expect_bits(d, pool, what);
    expect_bits(d, piece, what);
    device_end(d, what);
}

/* Into pinned host memory, where the transport reads it. */
static void gather_to_host(struct device *d)
{
    const uint32_t n_arrays = 3, n_ids = 5, n_pages = 9, page_bytes = 16384;
    const size_t bytes = (size_t)n_arrays * n_ids * page_bytes;
    struct twin ids = draw_ids(d, n_ids, n_pages);
    struct twin pool = twin_bytes(d, (size_t)n_arrays * n_pages * page_bytes, 0, 256),
                copy = twin_new(d, bytes);
    void *piece;
    if (d->be->ops->alloc(d->be, DMK_MEM_HOST, bytes, &piece) != 0) {
        fail(d, "gather to host memory", "no pinned memory");
        return;
    }
    d->cuda.page_gather(&(struct dmk_page_move_args){pool.dev, piece, 0, ids.dev, n_ids, n_arrays,
                                                     n_pages, page_bytes},
                        d->stream);
    d->be->ops->copy(d->be, d->stream, copy.dev, piece, bytes);
    d->ref.page_gather(&(struct dmk_page_move_args){pool.host, copy.host, 0, ids.host, n_ids,
                                                    n_arrays, n_pages, page_bytes},
                       NULL);
    expect_bits(d, copy, "gather to host memory");
    d->be->ops->free(d->be, DMK_MEM_HOST, piece, bytes);
    device_end(d, "gather to host memory");
}

static void run_gather(struct device *d, void *ud)
{
    d->cuda.page_gather(ud, d->stream);
}

static void run_scatter(struct device *d, void *ud)
{
    d->cuda.page_scatter(ud, d->stream);
}

static void run_copy(struct device *d, void *ud)
{
    const struct dmk_page_move_args *a = ud;
    d->be->ops->copy(d->be, d->stream, a->piece, a->pool,
                     (size_t)a->n_arrays * a->n_ids * a->page_bytes);
}

/* A layer's pages of a prompt, 8 heads; beside them the device's own copy of as many contiguous bytes. */
static void bench(struct device *d, uint32_t n_layers, uint32_t n_ids)
{
    char what[96];
    const uint32_t n_arrays = 8 * n_layers, n_pages = MAX_IDS, page_bytes = 16384;
    const double bytes = 2.0 * n_arrays * n_ids * page_bytes;
    struct twin ids = draw_ids(d, n_ids, n_pages);
    struct twin pool = twin_device(d, (size_t)n_arrays * n_pages * page_bytes),
                piece = twin_device(d, (size_t)n_arrays * n_ids * page_bytes);
    struct dmk_page_move_args args = {pool.dev, piece.dev, 0,       ids.dev,
                                      n_ids,    n_arrays,  n_pages, page_bytes};
    snprintf(what, sizeof(what), "page_gather %u layers x %u pages", n_layers, n_ids);
    device_bench(d, what, run_gather, &args, bytes, 0);
    snprintf(what, sizeof(what), "page_scatter %u layers x %u pages", n_layers, n_ids);
    device_bench(d, what, run_scatter, &args, bytes, 0);
    snprintf(what, sizeof(what), "  the device's copy of as much");
    device_bench(d, what, run_copy, &args, bytes, 0);
    device_end(d, what);
}

void check_pages(struct device *d)
{
    const uint32_t n_ids[] = {1, 2, 7, 64, 129, 520}, n_arrays[] = {1, 3, 8},
                   page_bytes[] = {16, 48, 4096 + 16, 8192, 16384, 32768};
    if (d->bench) {
        bench(d, 1, 3);
        bench(d, 1, 32);
        bench(d, 1, 128);
        bench(d, 18, 128);
        bench(d, 18, 512);
        return;
    }
    for (size_t a = 0; a < 3; a++) {
        for (size_t i = 0; i < 6; i++) {
            for (size_t b = 0; b < 6; b++) {
                if (n_ids[i] < 500 || page_bytes[b] <= 8192) {
                    move(d, n_arrays[a], n_ids[i], page_bytes[b], true);
                    move(d, n_arrays[a], n_ids[i], page_bytes[b], false);
                }
            }
        }
    }
    gather_to_host(d);
}
