/* Pool accounting: states, runs, and a random walk against plain arrays. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/rng.h"
#include "common/base/status.h"
#include "common/kv/layout.h"
#include "common/kv/pool.h"

static void states(void **state)
{
    struct dmk_kv_pool *pool = NULL;
    uint32_t pages[4];
    struct dmk_kv_pool_counts c;

    (void)state;
    assert_int_equal(dmk_kv_pool_new(0, &pool), -DMK_EINVAL);
    assert_int_equal(dmk_kv_pool_new(4, &pool), 0);
    assert_int_equal(dmk_kv_pool_alloc(pool, 5, DMK_PAGE_NONE, pages), -DMK_EFULL);
    assert_int_equal(dmk_kv_pool_counts(pool).free, 4);
    assert_int_equal(dmk_kv_pool_alloc(pool, 3, DMK_PAGE_NONE, pages), 0);
    dmk_kv_pool_cache(pool, pages[0]);
    assert_true(dmk_kv_pool_shared(pool, pages[0]));
    dmk_kv_pool_drop(pool, pages[0]);
    assert_false(dmk_kv_pool_shared(pool, pages[0]));
    dmk_kv_pool_drain(pool, pages[1]);
    c = dmk_kv_pool_counts(pool);
    assert_int_equal(c.free, 1);
    assert_int_equal(c.cached, 1);
    assert_int_equal(c.leased, 1);
    assert_int_equal(c.draining, 1);
    assert_true(dmk_kv_pool_check(pool));
    dmk_kv_pool_drop(pool, pages[1]);
    dmk_kv_pool_drop(pool, pages[2]);
    dmk_kv_pool_uncache(pool, pages[0]);
    assert_int_equal(dmk_kv_pool_counts(pool).free, 4);
    assert_true(dmk_kv_pool_check(pool));
    dmk_kv_pool_free(&pool);
    assert_null(pool);
}

static void runs_are_preferred(void **state)
{
    struct dmk_kv_pool *pool = NULL;
    uint32_t all[200], got[100];

    (void)state;
    assert_int_equal(dmk_kv_pool_new(200, &pool), 0);
    assert_int_equal(dmk_kv_pool_alloc(pool, 200, DMK_PAGE_NONE, all), 0);
    for (uint32_t i = 0; i < 200; i++) {
        assert_int_equal(all[i], i);
    }
    /* Free: 3, 10-19, 60-69, 100-139. */
    dmk_kv_pool_drop(pool, 3);
    for (uint32_t i = 10; i < 20; i++) {
        dmk_kv_pool_drop(pool, i);
        dmk_kv_pool_drop(pool, i + 50);
    }
    for (uint32_t i = 100; i < 140; i++) {
        dmk_kv_pool_drop(pool, i);
    }
    assert_int_equal(dmk_kv_pool_alloc(pool, 1, DMK_PAGE_NONE, got), 0);
    assert_int_equal(got[0], 3); /* the smallest hole that fits */
    assert_int_equal(dmk_kv_pool_alloc(pool, 12, DMK_PAGE_NONE, got), 0);
    for (uint32_t i = 0; i < 12; i++) {
        assert_int_equal(got[i], 100 + i);
    }
    assert_int_equal(dmk_kv_pool_alloc(pool, 2, 111, got), 0); /* goes on where it was */
    assert_int_equal(got[0], 112);
    assert_int_equal(got[1], 113);
    /* 26 + 10 + 10 are left: longest first, no page left out. */
    assert_int_equal(dmk_kv_pool_alloc(pool, 46, DMK_PAGE_NONE, got), 0);
    assert_int_equal(got[0], 114);
    assert_int_equal(got[25], 139);
    assert_int_equal(dmk_kv_pool_counts(pool).free, 0);
    assert_true(dmk_kv_pool_check(pool));
    dmk_kv_pool_free(&pool);
}

static void random_walk(void **state)
{
    enum { N = 97, STEPS = 20000 };
    const uint64_t seed = 42;
    struct dmk_kv_pool *pool = NULL;
    uint32_t leases[N] = {0}, caches[N] = {0}, got[N];
    bool draining[N] = {false};

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    assert_int_equal(dmk_kv_pool_new(N, &pool), 0);
    for (uint32_t i = 0; i < STEPS; i++) {
        const uint64_t r = dmk_rng_u64(seed, 0, i);
        const uint32_t page = (uint32_t)(r >> 8) % N;
        uint32_t want = (uint32_t)(r >> 40) % 9, n_free = 0;

        for (uint32_t k = 0; k < N; k++) {
            n_free += leases[k] == 0 && caches[k] == 0;
        }
        assert_int_equal(dmk_kv_pool_counts(pool).free, n_free);
        switch (r % 6) {
        case 0:
            if (dmk_kv_pool_alloc(pool, want, page, got) == 0) {
                assert_true(want <= n_free);
                for (uint32_t k = 0; k < want; k++) {
                    assert_true(got[k] < N && leases[got[k]] == 0 && caches[got[k]] == 0);
                    leases[got[k]] = 1;
                }
            } else {
                assert_true(want > n_free);
            }
            break;
        case 1:
            if ((leases[page] > 0 || caches[page] > 0) && !draining[page]) {
                dmk_kv_pool_hold(pool, page);
                leases[page]++;
            }
            break;
        case 2:
            if ((leases[page] > 0 || caches[page] > 0) && !draining[page]) {
                dmk_kv_pool_cache(pool, page);
                caches[page]++;
            }
            break;
        case 3:
            if (caches[page] > 0) {
                dmk_kv_pool_uncache(pool, page);
                caches[page]--;
            }
            break;
        case 4:
            if (leases[page] == 1 && caches[page] == 0 && !draining[page]) {
                dmk_kv_pool_drain(pool, page);
                draining[page] = true;
            }
            break;
        default:
            if (leases[page] > 0) {
                dmk_kv_pool_drop(pool, page);
                leases[page]--;
                draining[page] = false;
            }
        }
        assert_true(dmk_kv_pool_check(pool));
    }
    dmk_kv_pool_free(&pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(states),
        cmocka_unit_test(runs_are_preferred),
        cmocka_unit_test(random_walk),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
