/* Staging of weights; see stage.h. */
#include "common/model/stage.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "common/backend/team.h"
#include "common/base/assert.h"
#include "kernels/dtype.h"
#include "kernels/pack.h"

#define SLOT_BYTES  ((size_t)32 << 20)
#define ITEM_BYTES  ((size_t)1 << 20)
#define MAX_THREADS 16u

struct slot {
    uint8_t *pinned;
    struct dmk_event *free; /* recorded behind the copy out of it */
    bool used;
};

struct dmk_stage {
    struct dmk_rank *rank;
    struct dmk_team *team;
    struct slot slots[2];
    uint32_t next;
};

static uint32_t count_threads(void)
{
    cpu_set_t set;
    uint32_t n = 1;

    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        n = (uint32_t)CPU_COUNT(&set);
    }
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
}

int dmk_stage_new(struct dmk_rank *rank, struct dmk_stage **ret, struct dmk_error *reterr)
{
    struct dmk_backend *be = rank->backend;
    struct dmk_stage *s = calloc(1, sizeof(*s));
    int status = -DMK_ENOMEM;

    if (s) {
        s->rank = rank;
        status = dmk_team_new("load", count_threads(), false, 0, &s->team, reterr);
        for (int i = 0; i < 2 && status == 0; i++) {
            void *pinned = NULL;

            status = be->ops->alloc(be, DMK_MEM_HOST, SLOT_BYTES, &pinned);
            s->slots[i].pinned = pinned;
            if (status == 0 && (status = be->ops->event_new(be, &s->slots[i].free)) != 0) {
                s->slots[i].free = NULL;
            }
        }
    }
    if (status != 0) {
        dmk_stage_free(&s);
        return dmk_error_set(reterr, status, "no memory to load the weights of rank %u: %zu bytes",
                             rank->index, 2 * SLOT_BYTES);
    }
    *ret = s;
    return 0;
}

void dmk_stage_free(struct dmk_stage **stage)
{
    struct dmk_stage *s = *stage;

    if (!s) {
        return;
    }
    for (int i = 0; i < 2; i++) {
        struct dmk_backend *be = s->rank->backend;

        if (s->slots[i].free) {
            be->ops->event_free(be, s->slots[i].free);
        }
        if (s->slots[i].pinned) {
            be->ops->free(be, DMK_MEM_HOST, s->slots[i].pinned, SLOT_BYTES);
        }
    }
    dmk_team_free(&s->team);
    free(s);
    *stage = NULL;
}

/* A piece that the device has taken. Its failures come out of the stream's next sync. */
static struct slot *take_slot(struct dmk_stage *s)
{
    struct slot *slot = &s->slots[s->next++ % 2];
    struct dmk_backend *be = s->rank->backend;

    if (slot->used) {
        (void)be->ops->wait_host(be, slot->free);
    }
    slot->used = true;
    return slot;
}

static void send(struct dmk_stage *s, const uint8_t *pinned, uint8_t *dst, size_t bytes)
{
    struct dmk_backend *be = s->rank->backend;

    be->ops->copy(be, s->rank->stream, dst, pinned, bytes);
}

static void release_slot(struct dmk_stage *s, struct slot *slot)
{
    struct dmk_backend *be = s->rank->backend;

    be->ops->record(be, s->rank->stream, slot->free);
}

static void run(struct dmk_stage *s, dmk_task_fn *fn, const void *args, size_t n_items)
{
    struct dmk_stream *stream = dmk_team_stream(s->team);

    stream->run(stream, fn, args, (uint32_t)n_items);
}

/* ---- rows ---- */

/* Bytes [at, at + n) of the packed rows. */
struct gather {
    const uint8_t *src;
    uint8_t *pinned;
    size_t src_stride, row_bytes, at, n;
};

static void gather_item(const void *args, uint32_t item, void *scratch)
{
    const struct gather *g = args;
    size_t from = g->at + item * ITEM_BYTES;
    const size_t end = g->n - item * ITEM_BYTES < ITEM_BYTES ? g->at + g->n : from + ITEM_BYTES;

    (void)scratch;
    while (from < end) {
        const size_t in = from % g->row_bytes, left = g->row_bytes - in;
        const size_t n = end - from < left ? end - from : left;

        memcpy(g->pinned + (from - g->at), g->src + from / g->row_bytes * g->src_stride + in, n);
        from += n;
    }
}

void dmk_stage_rows(struct dmk_stage *s, void *dst, const void *src, size_t src_stride,
                    size_t row_bytes, size_t n_rows)
{
    const size_t total = row_bytes * n_rows;

    for (size_t at = 0; at < total; at += SLOT_BYTES) {
        const size_t n = total - at < SLOT_BYTES ? total - at : SLOT_BYTES;
        struct slot *slot = take_slot(s);
        const struct gather g = {src, slot->pinned, src_stride, row_bytes, at, n};

        run(s, gather_item, &g, (n + ITEM_BYTES - 1) / ITEM_BYTES);
        send(s, slot->pinned, (uint8_t *)dst + at, n);
        release_slot(s, slot);
    }
}

/* ---- FP8 ---- */

/* Strips of 128 rows (fewer at a matrix's end), numbered through all matrices; first stands first in the piece. */
struct recover {
    const uint8_t *codes;
    const float *scales;
    uint8_t *blocks, *block_scales; /* in the piece */
    uint32_t rows, cols, per_matrix, first;
    atomic_uint *bad; /* matrix + 1, the least */
};

/* Rows before a strip, through all matrices. */
static size_t rows_before(const struct recover *r, uint32_t strip)
{
    return (size_t)(strip / r->per_matrix) * r->rows +
           (size_t)(strip % r->per_matrix) * DMK_FP8_BLOCK;
}

static uint32_t rows_of(const struct recover *r, uint32_t strip)
{
    const uint32_t row = strip % r->per_matrix * DMK_FP8_BLOCK;

    return r->rows - row < DMK_FP8_BLOCK ? r->rows - row : DMK_FP8_BLOCK;
}

static void recover_item(const void *args, uint32_t item, void *scratch)
{
    const struct recover *r = args;
    const uint32_t strip = r->first + item;
    const size_t row = rows_before(r, strip), out = row - rows_before(r, r->first);
    const size_t across = (r->cols + DMK_FP8_BLOCK - 1) / DMK_FP8_BLOCK,
                 groups = r->cols / DMK_MXFP4_BLOCK;

    (void)scratch;
    if (!dmk_fp8_to_mxfp4(r->codes + row * r->cols, r->scales + strip * across, rows_of(r, strip),
                          r->cols, r->blocks + out * r->cols / 2, r->block_scales + out * groups)) {
        const unsigned matrix = strip / r->per_matrix + 1;
        unsigned seen = atomic_load(r->bad);

        while ((seen == 0 || matrix < seen) &&
               !atomic_compare_exchange_weak(r->bad, &seen, matrix)) {
        }
    }
}

int dmk_stage_fp8(struct dmk_stage *s, uint8_t *dst_blocks, uint8_t *dst_scales,
                  const uint8_t *codes, const float *scales, uint32_t n, uint32_t rows,
                  uint32_t cols, uint32_t *ret_bad)
{
    const size_t groups = cols / DMK_MXFP4_BLOCK, row_bytes = cols / 2 + groups;
    const uint32_t fit = (uint32_t)(SLOT_BYTES / (DMK_FP8_BLOCK * row_bytes));
    struct recover r = {.codes = codes,
                        .scales = scales,
                        .rows = rows,
                        .cols = cols,
                        .per_matrix = (rows + DMK_FP8_BLOCK - 1) / DMK_FP8_BLOCK};
    atomic_uint bad = 0;
    const uint32_t n_strips = n * r.per_matrix;

    dmk_assert(fit > 0);
    r.bad = &bad;
    while (r.first < n_strips && atomic_load(&bad) == 0) {
        const uint32_t count = n_strips - r.first < fit ? n_strips - r.first : fit;
        const size_t before = rows_before(&r, r.first),
                     n_rows = rows_before(&r, r.first + count) - before;
        struct slot *slot = take_slot(s);

        r.blocks = slot->pinned;
        r.block_scales = slot->pinned + n_rows * cols / 2;
        run(s, recover_item, &r, count);
        send(s, r.blocks, dst_blocks + before * cols / 2, n_rows * cols / 2);
        send(s, r.block_scales, dst_scales + before * groups, n_rows * groups);
        release_slot(s, slot);
        r.first += count;
    }
    if (atomic_load(&bad) != 0) {
        *ret_bad = atomic_load(&bad) - 1;
        return -DMK_EFORMAT;
    }
    return 0;
}
