/* Collectives between threads, to the bit: the tree's order of an all-reduce, in one group and in several at
 * once; which rows a dispatch brings, and what a combine makes of them, with groups of very different sizes
 * and without any row. */
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
    uint32_t group_ranks, n_groups, n_ranks;
    float bufs[8][N];
    bool bad[8];
};

/* Runs fn on every rank, with ranks that spin and with ranks that sleep, in every legal layout. */
static void each_layout(struct job *job, uint32_t min_groups, uint32_t max_rows,
                        void (*fn)(void *ud, uint32_t rank))
{
    for (uint32_t n_groups = min_groups; n_groups <= 8; n_groups *= 2) {
        for (uint32_t group_ranks = 1; group_ranks * n_groups <= 8; group_ranks *= 2) {
            for (int sleepy = 0; sleepy < 2; sleepy++) {
                const struct dmk_coll_conf conf = {group_ranks, n_groups, max_rows, sleepy};
                struct dmk_team *team = NULL;

                memset(job->bad, 0, sizeof(job->bad));
                job->group_ranks = group_ranks;
                job->n_groups = n_groups;
                job->n_ranks = group_ranks * n_groups;
                assert_int_equal(dmk_coll_local_new(&conf, &job->coll, NULL), 0);
                assert_int_equal(dmk_team_new("rank", job->n_ranks, !sleepy, 0, &team, NULL), 0);
                dmk_team_each(team, fn, job);
                for (uint32_t r = 0; r < job->n_ranks; r++) {
                    if (job->bad[r]) {
                        fail_msg("rank %u of %u groups of %u", r, n_groups, group_ranks);
                    }
                }
                dmk_team_free(&team);
                dmk_coll_free(&job->coll);
            }
        }
    }
}

static float value(uint32_t rank, uint32_t round, uint32_t i)
{
    return (float)(dmk_rng_unit(rank, round, i) * 2000.0 - 1000.0);
}

static float pair(float a, float b)
{
    return a + b;
}

static float tree(const float v[8], uint32_t n)
{
    if (n == 1) {
        return v[0];
    }
    if (n == 2) {
        return pair(v[0], v[1]);
    }
    float left = pair(pair(v[0], v[1]), pair(v[2], v[3]));
    return n == 4 ? left : pair(left, pair(pair(v[4], v[5]), pair(v[6], v[7])));
}

static bool differ(float a, float b)
{
    return memcmp(&a, &b, sizeof(a)) != 0;
}

static void reduce_rounds(void *ud, uint32_t rank)
{
    struct job *job = ud;
    const uint32_t first = rank / job->group_ranks * job->group_ranks;

    for (uint32_t round = 0; round < ROUNDS; round++) {
        /* Fewer elements than ranks, too, and none; a group may have another number than the others. */
        const uint32_t sizes[] = {3, N, 0, 64}, n = sizes[(round + first) % 4];

        for (uint32_t i = 0; i < n; i++) {
            job->bufs[rank][i] = value(rank, round, i);
        }
        dmk_coll_allreduce(job->coll, rank, job->bufs[rank], n);
        for (uint32_t i = 0; i < n; i++) {
            float v[8] = {0};

            for (uint32_t r = 0; r < job->group_ranks; r++) {
                v[r] = value(first + r, round, i);
            }
            job->bad[rank] |= differ(tree(v, job->group_ranks), job->bufs[rank][i]);
        }
        dmk_coll_barrier(job->coll, rank);
    }
}

static void test_allreduce(void **state)
{
    static struct job job;

    (void)state;
    each_layout(&job, 1, 1, reduce_rounds);
}

/* ---------------------------------------------------------------- rows that travel */

enum { WIDTH = 96, K = 4, EXPERTS = 16, MAX_ROWS = 24 };

struct rows {
    uint16_t x[MAX_ROWS * WIDTH];
    uint32_t ids[MAX_ROWS * K];
    float weights[MAX_ROWS * K];
};

struct travel {
    struct job job; /* first */
    struct rows own[8], got[8];
    float part[8][MAX_ROWS * WIDTH], out[8][MAX_ROWS * WIDTH];
};

/* Rows of a group in a round: some or none each, all in one group, none at all. */
static uint32_t n_rows_of(const struct job *job, uint32_t round, uint32_t group)
{
    switch (round % 5) {
    case 0:
        return MAX_ROWS / job->n_groups;
    case 1:
        return group == round / 5 % job->n_groups ? MAX_ROWS : 0;
    case 2:
        return group == 0 ? 0 : group == 1 ? MAX_ROWS - 6 : 1;
    case 3:
        return (uint32_t)(dmk_rng_u64(3, round, group) % (MAX_ROWS / job->n_groups + 1));
    default:
        return round % 10 == 4 ? 0 : group == job->n_groups - 1;
    }
}

/* Four different experts; in every third round all of them among the first four. */
static uint32_t expert_of(uint32_t round, uint32_t group, uint32_t row, uint32_t i)
{
    const uint32_t n = round % 3 == 0 ? 4 : EXPERTS;
    const uint32_t start = (uint32_t)(dmk_rng_u64(4, round, 100 * group + row) % n);

    return (start + i * (n / K) + (n > 4 ? row * i % 3 : 0)) % n;
}

static uint16_t x_of(uint32_t round, uint32_t group, uint32_t row, uint32_t col)
{
    return (uint16_t)dmk_rng_u64(5, round, (group * 100 + row) * 1000 + col);
}

/* What a rank's experts make of a row; -0 now and then, which only +0 turns into +0. */
static float part_of(uint32_t rank, uint32_t round, uint32_t group, uint32_t row, uint32_t col)
{
    return col % 8 == 0 ? -0.0f : value(rank, round, (group * 100 + row) * 1000 + col);
}

static bool goes_to(const struct job *job, uint32_t rank, uint32_t round, uint32_t group,
                    uint32_t row)
{
    for (uint32_t i = 0; i < K; i++) {
        if (expert_of(round, group, row, i) / (EXPERTS / job->n_ranks) == rank) {
            return true;
        }
    }
    return false;
}

static struct dmk_coll_rows fill_own(struct travel *t, uint32_t rank, uint32_t round)
{
    const uint32_t group = rank / t->job.group_ranks, n = n_rows_of(&t->job, round, group);
    struct rows *own = &t->own[rank];

    for (uint32_t row = 0; row < n; row++) {
        for (uint32_t col = 0; col < WIDTH; col++) {
            own->x[row * WIDTH + col] = x_of(round, group, row, col);
        }
        for (uint32_t i = 0; i < K; i++) {
            own->ids[row * K + i] = expert_of(round, group, row, i);
            own->weights[row * K + i] = value(9, round, group * 1000 + row * 10 + i);
        }
    }
    return (struct dmk_coll_rows){own->x, own->ids, own->weights, n};
}

/* Checks what came, in order, and makes the rank's partial sums; false when something is missing or wrong. */
static bool take_got(struct travel *t, uint32_t rank, uint32_t round, uint32_t n_got)
{
    const struct rows *got = &t->got[rank];
    uint32_t at = 0;
    bool ok = true;

    for (uint32_t g = 0; g < t->job.n_groups; g++) {
        for (uint32_t row = 0; row < n_rows_of(&t->job, round, g); row++) {
            if (!goes_to(&t->job, rank, round, g, row)) {
                continue;
            }
            for (uint32_t i = 0; i < K; i++) {
                ok &= got->ids[at * K + i] == expert_of(round, g, row, i) &&
                      got->weights[at * K + i] == value(9, round, g * 1000 + row * 10 + i);
            }
            for (uint32_t col = 0; col < WIDTH; col++) {
                ok &= got->x[at * WIDTH + col] == x_of(round, g, row, col);
                t->part[rank][at * WIDTH + col] = part_of(rank, round, g, row, col);
            }
            at++;
        }
    }
    return ok && at == n_got;
}

static bool check_out(const struct travel *t, uint32_t rank, uint32_t round)
{
    const uint32_t group = rank / t->job.group_ranks, n = n_rows_of(&t->job, round, group);
    bool ok = true;

    for (uint32_t row = 0; row < n; row++) {
        for (uint32_t col = 0; col < WIDTH; col++) {
            float v[8] = {0};

            for (uint32_t r = 0; r < t->job.n_ranks; r++) {
                if (goes_to(&t->job, r, round, group, row)) {
                    v[r] = part_of(r, round, group, row, col);
                }
            }
            ok &= !differ(tree(v, t->job.n_ranks), t->out[rank][row * WIDTH + col]);
        }
    }
    return ok;
}

static void travel_rounds(void *ud, uint32_t rank)
{
    struct travel *t = ud;

    for (uint32_t round = 0; round < ROUNDS; round++) {
        const uint32_t n_experts = EXPERTS / t->job.n_ranks;
        struct rows *got = &t->got[rank];
        const struct dmk_coll_dispatch d = {.own = fill_own(t, rank, round),
                                            .got = {got->x, got->ids, got->weights, 0},
                                            .width = WIDTH,
                                            .k = K,
                                            .expert_first = rank * n_experts,
                                            .n_experts = n_experts};
        const uint32_t n_got = dmk_coll_dispatch(t->job.coll, rank, &d);

        t->job.bad[rank] |= n_got > MAX_ROWS || !take_got(t, rank, round, n_got);
        memset(t->out[rank], 0xff, sizeof(t->out[rank]));
        dmk_coll_combine(t->job.coll, rank, t->part[rank], t->out[rank]);
        t->job.bad[rank] |= !check_out(t, rank, round);
    }
}

static void test_dispatch_and_combine(void **state)
{
    static struct travel t;

    (void)state;
    each_layout(&t.job, 2, MAX_ROWS, travel_rounds);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_allreduce),
                                       cmocka_unit_test(test_dispatch_and_combine)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
