/* All-reduce between threads: the tree's order to the bit, many rounds, every number of ranks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "common/backend/team.h"
#include "common/base/rng.h"
#include "common/coll/coll.h"

#define N      101
#define ROUNDS 50

struct job {
    struct dmk_coll *coll;
    uint32_t n_ranks;
    float bufs[8][N];
    bool bad[8];
};

static float value(uint32_t rank, uint32_t round, uint32_t i)
{
    return (float)(dmk_rng_unit(rank, round, i) * 2000.0 - 1000.0);
}

static float pair(float a, float b)
{
    return a + b;
}

static float expected(uint32_t n_ranks, uint32_t round, uint32_t i)
{
    float v[8] = {0};
    for (uint32_t r = 0; r < n_ranks; r++) {
        v[r] = value(r, round, i);
    }
    if (n_ranks == 1) {
        return v[0];
    }
    if (n_ranks == 2) {
        return pair(v[0], v[1]);
    }
    float left = pair(pair(v[0], v[1]), pair(v[2], v[3]));
    return n_ranks == 4 ? left : pair(left, pair(pair(v[4], v[5]), pair(v[6], v[7])));
}

static void run_rank(void *ud, uint32_t rank)
{
    struct job *job = ud;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint32_t n = round % 2 ? N : 3; /* fewer elements than ranks, too */
        for (uint32_t i = 0; i < n; i++) {
            job->bufs[rank][i] = value(rank, round, i);
        }
        dmk_coll_allreduce(job->coll, rank, job->bufs[rank], n);
        for (uint32_t i = 0; i < n; i++) {
            float want = expected(job->n_ranks, round, i);
            job->bad[rank] =
                job->bad[rank] || memcmp(&want, &job->bufs[rank][i], sizeof(want)) != 0;
        }
        dmk_coll_barrier(job->coll, rank);
    }
}

static void test_allreduce(void **state)
{
    (void)state;
    for (uint32_t n_ranks = 1; n_ranks <= 8; n_ranks *= 2) {
        for (int sleepy = 0; sleepy < 2; sleepy++) {
            static struct job job;
            struct dmk_team *team = NULL;
            memset(&job, 0, sizeof(job));
            job.n_ranks = n_ranks;
            assert_int_equal(dmk_coll_local_new(n_ranks, sleepy, &job.coll, NULL), 0);
            assert_int_equal(dmk_team_new("rank", n_ranks, !sleepy, 0, &team, NULL), 0);
            dmk_team_each(team, run_rank, &job);
            for (uint32_t r = 0; r < n_ranks; r++) {
                assert_false(job.bad[r]);
            }
            dmk_team_free(&team);
            dmk_coll_free(&job.coll);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_allreduce)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
