/* Collectives between threads of one process: a barrier, and sums read straight from the others' memory.
 *
 * All-reduce: all ranks show their buffers and meet; each sums its own slice of the elements over all
 * buffers and writes it into all of them; they meet again. A slice is read and written by one rank only. */
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

struct dmk_coll {
    uint32_t n_ranks;
    bool spin;
    float *bufs[MAX_RANKS];
    _Alignas(64) _Atomic uint32_t n_arrived;
    _Alignas(64) _Atomic uint32_t round;
};

int dmk_coll_local_new(uint32_t n_ranks, bool oversubscribed, struct dmk_coll **ret,
                       struct dmk_error *reterr)
{
    dmk_assert(n_ranks == 1 || n_ranks == 2 || n_ranks == 4 || n_ranks == 8);
    struct dmk_coll *coll = aligned_alloc(64, sizeof(*coll));
    if (!coll) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the collectives");
    }
    memset(coll, 0, sizeof(*coll));
    coll->n_ranks = n_ranks;
    coll->spin = !oversubscribed;
    *ret = coll;
    return 0;
}

void dmk_coll_free(struct dmk_coll **coll)
{
    free(*coll);
    *coll = NULL;
}

void dmk_coll_barrier(struct dmk_coll *coll, uint32_t rank)
{
    (void)rank;
    if (coll->n_ranks == 1) {
        return;
    }
    uint32_t round = atomic_load(&coll->round);
    if (atomic_fetch_add(&coll->n_arrived, 1) == coll->n_ranks - 1) {
        atomic_store(&coll->n_arrived, 0);
        atomic_fetch_add(&coll->round, 1);
        syscall(SYS_futex, &coll->round, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
        return;
    }
    for (int i = 0; i < (coll->spin ? SPINS : 0); i++) {
        if (atomic_load(&coll->round) != round) {
            return;
        }
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    while (atomic_load(&coll->round) == round) {
        syscall(SYS_futex, &coll->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
    }
}

static float tree_sum(float *const bufs[], uint32_t n_ranks, size_t i)
{
    float leaf[MAX_RANKS];
    for (uint32_t r = 0; r < n_ranks; r++) {
        leaf[r] = bufs[r][i];
    }
    for (uint32_t width = n_ranks; width > 1; width /= 2) {
        for (uint32_t r = 0; r < width / 2; r++) {
            leaf[r] = leaf[2 * r] + leaf[2 * r + 1];
        }
    }
    return leaf[0];
}

void dmk_coll_allreduce(struct dmk_coll *coll, uint32_t rank, float *buf, size_t n)
{
    if (coll->n_ranks == 1) {
        return;
    }
    coll->bufs[rank] = buf;
    dmk_coll_barrier(coll, rank);
    size_t end = n * (rank + 1) / coll->n_ranks;
    for (size_t i = n * rank / coll->n_ranks; i < end; i++) {
        float sum = tree_sum(coll->bufs, coll->n_ranks, i);
        for (uint32_t r = 0; r < coll->n_ranks; r++) {
            coll->bufs[r][i] = sum;
        }
    }
    dmk_coll_barrier(coll, rank);
}
