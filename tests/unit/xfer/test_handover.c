/* Sender and receiver over the loopback, whole schedules from seeds (world.h). Run with arguments
 * FIRST_SEED COUNT to look at others. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include "world.h"

static uint64_t first_seed = 1;
static uint32_t n_seeds = 1000;

static void run_seeds(enum dmk_xfer_lane lane, bool faults, bool disasters,
                      struct world_result *ret_sum)
{
    struct world_result sum = {0};

    for (uint32_t i = 0; i < n_seeds; i++) {
        const struct world_conf conf = {first_seed + i, lane, faults, disasters};
        struct world_result one = {0};
        const char *wrong = world_run(&conf, &one);

        if (wrong) {
            print_error("seed %llu: %s\n", (unsigned long long)conf.seed, wrong);
            fail();
        }
        sum.n_ready += one.n_ready;
        sum.n_failed += one.n_failed;
        sum.n_cancelled += one.n_cancelled;
        sum.n_freed += one.n_freed;
        sum.n_done_ok += one.n_done_ok;
        sum.n_writes += one.n_writes;
        sum.n_late_writes += one.n_late_writes;
        sum.n_kills += one.n_kills;
        sum.n_puts += one.n_puts;
    }
    print_message("seeds %llu to %llu: ready %u failed %u cancelled %u freed %u, accepted %u, "
                  "writes %llu (late %llu), kills %u, puts %llu\n",
                  (unsigned long long)first_seed, (unsigned long long)(first_seed + n_seeds - 1),
                  sum.n_ready, sum.n_failed, sum.n_cancelled, sum.n_freed, sum.n_done_ok,
                  (unsigned long long)sum.n_writes, (unsigned long long)sum.n_late_writes,
                  sum.n_kills, (unsigned long long)sum.n_puts);
    *ret_sum = sum;
}

/* Without faults every request gets through, on both lanes. */
static void test_calm(void **state)
{
    struct world_result sum;

    (void)state;
    for (int lane = 0; lane < 2; lane++) {
        run_seeds((enum dmk_xfer_lane)lane, false, false, &sum);
        assert_int_equal(sum.n_ready, n_seeds * WORLD_REQUESTS);
        assert_int_equal(sum.n_done_ok, n_seeds * WORLD_REQUESTS);
        assert_int_equal(sum.n_failed, 0);
    }
}

static void test_emulated(void **state)
{
    struct world_result sum;

    (void)state;
    run_seeds(DMK_LANE_EMULATED, true, true, &sum);
    assert_true(sum.n_ready > 0 && sum.n_failed > 0 && sum.n_late_writes > 0 && sum.n_kills > 0);
}

static void test_direct(void **state)
{
    struct world_result sum;

    (void)state;
    run_seeds(DMK_LANE_DIRECT, true, true, &sum);
    assert_true(sum.n_ready > 0 && sum.n_failed > 0 && sum.n_late_writes > 0 && sum.n_kills > 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calm),
        cmocka_unit_test(test_emulated),
        cmocka_unit_test(test_direct),
    };

    first_seed = argc > 1 ? strtoull(argv[1], NULL, 10) : first_seed;
    n_seeds = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : n_seeds;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
