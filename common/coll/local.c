/* Collectives between threads of one process: barriers, and sums and copies straight from others' memory.
 *
 * All-reduce: the ranks of a group show their buffers and meet; each sums its own slice of the elements over
 * all buffers and writes it into all of them; they meet again. A slice is read and written by one rank only.
 *
 * Dispatch: all ranks show their groups' rows and meet; each takes what its experts need and notes where it
 * put each row of the step. Combine: all ranks show their partial sums and meet; the ranks of a group share
 * its rows out, and each sums its own rows over all partial sums into the out of every rank of the group. */
#include "common/coll/coll.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "common/base/assert.h"

#define MAX_RANKS 8
#define SPINS     2000
#define SPAN      64 /* floats that are summed at a time */

/* Where some ranks meet. */
struct meeting {
    _Alignas(64) _Atomic uint32_t n_arrived;
    _Alignas(64) _Atomic uint32_t round;
};

struct dmk_coll {
    uint32_t group_ranks, n_groups, n_ranks;
    uint32_t max_rows;
    bool spin;
    uint32_t *places;                         /* [n_ranks][max_rows], see places_of */
    float *bufs[MAX_RANKS];                   /* shown for an all-reduce, or as combine's out */
    const float *parts[MAX_RANKS];            /* shown for a combine */
    struct dmk_coll_dispatch sent[MAX_RANKS]; /* the last dispatch of each rank */
    struct meeting all, groups[MAX_RANKS];
};

static bool is_power_of_two(uint32_t v)
{
    return v != 0 && (v & (v - 1)) == 0;
}

int dmk_coll_local_new(const struct dmk_coll_conf *conf, struct dmk_coll **ret,
                       struct dmk_error *reterr)
{
    dmk_assert(is_power_of_two(conf->group_ranks) && is_power_of_two(conf->n_groups));
    dmk_assert(conf->group_ranks <= MAX_RANKS && conf->n_groups <= MAX_RANKS / conf->group_ranks);
    dmk_assert(conf->n_groups == 1 || conf->max_rows > 0);
    struct dmk_coll *coll = aligned_alloc(64, sizeof(*coll));
    if (!coll) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the collectives");
    }
    memset(coll, 0, sizeof(*coll));
    coll->group_ranks = conf->group_ranks;
    coll->n_groups = conf->n_groups;
    coll->n_ranks = conf->group_ranks * conf->n_groups;
    coll->max_rows = conf->max_rows;
    coll->spin = !conf->oversubscribed;
    if (coll->n_groups > 1) {
        coll->places = calloc((size_t)coll->n_ranks * coll->max_rows, sizeof(*coll->places));
        if (!coll->places) {
            free(coll);
            return dmk_error_set(reterr, -DMK_ENOMEM,
                                 "no memory to note where %u rows of a step go", conf->max_rows);
        }
    }
    *ret = coll;
    return 0;
}

void dmk_coll_free(struct dmk_coll **coll)
{
    if (*coll) {
        free((*coll)->places);
    }
    free(*coll);
    *coll = NULL;
}

static void meet(struct meeting *m, uint32_t n_ranks, bool spin)
{
    if (n_ranks == 1) {
        return;
    }
    uint32_t round = atomic_load(&m->round);
    if (atomic_fetch_add(&m->n_arrived, 1) == n_ranks - 1) {
        atomic_store(&m->n_arrived, 0);
        atomic_fetch_add(&m->round, 1);
        syscall(SYS_futex, &m->round, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
        return;
    }
    for (int i = 0; i < (spin ? SPINS : 0); i++) {
        if (atomic_load(&m->round) != round) {
            return;
        }
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    while (atomic_load(&m->round) == round) {
        syscall(SYS_futex, &m->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
    }
}

void dmk_coll_barrier(struct dmk_coll *coll, uint32_t rank)
{
    (void)rank;
    meet(&coll->all, coll->n_ranks, coll->spin);
}

/* sum [n] = the tree over src [n_ranks][n], n <= SPAN; NULL stands for a row of +0. */
static void tree_sum(const float *const src[], uint32_t n_ranks, uint32_t n, float *sum)
{
    float leaf[MAX_RANKS][SPAN];
    for (uint32_t r = 0; r < n_ranks; r++) {
        for (uint32_t i = 0; i < n; i++) {
            leaf[r][i] = src[r] ? src[r][i] : 0.0f;
        }
    }
    for (uint32_t width = n_ranks; width > 1; width /= 2) {
        for (uint32_t r = 0; r < width / 2; r++) {
            for (uint32_t i = 0; i < n; i++) {
                leaf[r][i] = leaf[2 * r][i] + leaf[2 * r + 1][i];
            }
        }
    }
    memcpy(sum, leaf[0], n * sizeof(*sum));
}

void dmk_coll_allreduce(struct dmk_coll *coll, uint32_t rank, float *buf, size_t n)
{
    const uint32_t n_ranks = coll->group_ranks, group = rank / n_ranks, index = rank % n_ranks;
    float **bufs = &coll->bufs[group * n_ranks];
    if (n_ranks == 1) {
        return;
    }
    coll->bufs[rank] = buf;
    meet(&coll->groups[group], n_ranks, coll->spin);
    const size_t end = n * (index + 1) / n_ranks;
    for (size_t i = n * index / n_ranks; i < end; i += SPAN) {
        const uint32_t span = end - i < SPAN ? (uint32_t)(end - i) : SPAN;
        const float *src[MAX_RANKS];
        float sum[SPAN];
        for (uint32_t r = 0; r < n_ranks; r++) {
            src[r] = bufs[r] + i;
        }
        tree_sum(src, n_ranks, span, sum);
        for (uint32_t r = 0; r < n_ranks; r++) {
            memcpy(bufs[r] + i, sum, span * sizeof(*sum));
        }
    }
    meet(&coll->groups[group], n_ranks, coll->spin);
}

/* The rows of a group, as shown by its rank `index`: all show the same. */
static const struct dmk_coll_rows *rows_of(const struct dmk_coll *coll, uint32_t group,
                                           uint32_t index)
{
    return &coll->sent[group * coll->group_ranks + index].own;
}

/* Where a rank put the rows of a group: places_of(..)[row] is an index into its got, or DMK_COLL_NONE. */
static uint32_t *places_of(const struct dmk_coll *coll, uint32_t rank, uint32_t group)
{
    uint32_t *places = coll->places + (size_t)rank * coll->max_rows;
    for (uint32_t g = 0; g < group; g++) {
        places += rows_of(coll, g, 0)->n_rows;
    }
    return places;
}

static bool chose_any(const uint32_t *ids, uint32_t k, uint32_t first, uint32_t n)
{
    for (uint32_t i = 0; i < k; i++) {
        if (ids[i] - first < n) { /* wraps for experts before the first */
            return true;
        }
    }
    return false;
}

/* Takes the rows of one group that are meant for this rank; n_got had come before. */
static uint32_t take_rows(const struct dmk_coll_dispatch *d, const struct dmk_coll_rows *rows,
                          uint32_t *places, uint32_t n_got)
{
    for (uint32_t row = 0; row < rows->n_rows; row++) {
        const uint32_t *ids = rows->ids + (size_t)row * d->k;
        places[row] = DMK_COLL_NONE;
        if (chose_any(ids, d->k, d->expert_first, d->n_experts)) {
            memcpy(d->got.x + (size_t)n_got * d->width, rows->x + (size_t)row * d->width,
                   d->width * sizeof(*d->got.x));
            memcpy(d->got.ids + (size_t)n_got * d->k, ids, d->k * sizeof(*ids));
            memcpy(d->got.weights + (size_t)n_got * d->k, rows->weights + (size_t)row * d->k,
                   d->k * sizeof(*d->got.weights));
            places[row] = n_got++;
        }
    }
    return n_got;
}

uint32_t dmk_coll_dispatch(struct dmk_coll *coll, uint32_t rank, const struct dmk_coll_dispatch *d)
{
    dmk_assert(coll->n_groups > 1);
    coll->sent[rank] = *d;
    dmk_coll_barrier(coll, rank);
    uint32_t n_rows = 0, n_got = 0;
    for (uint32_t g = 0; g < coll->n_groups; g++) {
        n_rows += rows_of(coll, g, 0)->n_rows;
    }
    dmk_assert(n_rows <= coll->max_rows);
    for (uint32_t g = 0; g < coll->n_groups; g++) {
        /* From a rank of the group that fewest others read. */
        n_got = take_rows(d, rows_of(coll, g, rank % coll->group_ranks), places_of(coll, rank, g),
                          n_got);
    }
    return n_got;
}

void dmk_coll_combine(struct dmk_coll *coll, uint32_t rank, const float *part, float *out)
{
    const uint32_t group = rank / coll->group_ranks, index = rank % coll->group_ranks;
    const uint32_t n_rows = coll->sent[rank].own.n_rows, width = coll->sent[rank].width;
    const uint32_t *places[MAX_RANKS];
    coll->parts[rank] = part;
    coll->bufs[rank] = out;
    dmk_coll_barrier(coll, rank);
    for (uint32_t r = 0; r < coll->n_ranks; r++) {
        places[r] = places_of(coll, r, group);
    }
    for (uint32_t row = index; row < n_rows; row += coll->group_ranks) {
        for (uint32_t i = 0; i < width; i += SPAN) {
            const uint32_t span = width - i < SPAN ? width - i : SPAN;
            const float *src[MAX_RANKS];
            float sum[SPAN];
            for (uint32_t r = 0; r < coll->n_ranks; r++) {
                const uint32_t place = places[r][row];
                src[r] = place == DMK_COLL_NONE ? NULL : coll->parts[r] + (size_t)place * width + i;
            }
            tree_sum(src, coll->n_ranks, span, sum);
            for (uint32_t r = 0; r < coll->group_ranks; r++) {
                memcpy(coll->bufs[group * coll->group_ranks + r] + (size_t)row * width + i, sum,
                       span * sizeof(*sum));
            }
        }
    }
    dmk_coll_barrier(coll, rank);
}
