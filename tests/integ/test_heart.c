/* The heart test on the engine of hashes: fast enough for long prompts, many faults, and other ranks on the
 * two sides. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdlib.h>
#include "common/base/hash.h"
#include "tests/integ/heart.h"
#include "tests/support/shadow_engine.h"

enum { N_PAGES = 200, N_WINDOW = 60 };

struct engines {
    struct shadow_engine *alone, *decode, *prefill;
    struct heart_ports ports;
};

/* Where `staged` is set, pages leave P through its staging memory as far as they fit. */
static bool staged;

static struct engines open_engines(uint32_t d_tp, uint32_t d_dp, uint32_t p_tp, uint32_t n_layers)
{
    struct shadow_conf conf = {.n_layers = n_layers,
                               .n_kv_heads = 4,
                               .vocab = 500,
                               .tp = 1,
                               .dp = 1,
                               .n_full_pages = N_PAGES,
                               .n_window_pages = N_WINDOW,
                               .seed = 3};
    struct engines e = {.alone = shadow_engine_new(&conf)};

    conf.tp = d_tp;
    conf.dp = d_dp;
    e.decode = shadow_engine_new(&conf);
    conf.tp = p_tp;
    conf.dp = 1;
    conf.n_stage_full_pages = staged ? 60 : 0; /* the longest prompts do not fit */
    conf.n_stage_window_pages = staged ? 9 : 0;
    e.prefill = shadow_engine_new(&conf);
    e.ports = (struct heart_ports){shadow_engine_port(e.alone),
                                   shadow_engine_port(e.decode),
                                   shadow_engine_port(e.prefill),
                                   N_PAGES,
                                   N_WINDOW,
                                   10000,
                                   512};
    return e;
}

static void close_engines(struct engines *e)
{
    shadow_engine_free(&e->alone);
    shadow_engine_free(&e->decode);
    shadow_engine_free(&e->prefill);
}

static void lengths(void **state)
{
    static const uint32_t list[] = {1,   2,   15,  16,  17,  63,  64,  65,  127, 128, 129,
                                    143, 144, 145, 191, 192, 193, 200, 255, 256, 257, 513};
    struct engines e = open_engines(1, 1, 1, 4);

    (void)state;
    heart_lengths(&e.ports, list, sizeof(list) / sizeof(list[0]), 64);
    close_engines(&e);
}

static void long_lengths(void **state)
{
    static const uint32_t list[] = {2048, 2049, 4095, 4096, 4097, 9000};
    struct engines e = open_engines(1, 1, 1, 2);

    (void)state;
    heart_lengths(&e.ports, list, sizeof(list) / sizeof(list[0]), 64);
    close_engines(&e);
}

static void other_ranks_on_each_side(void **state)
{
    static const uint32_t list[] = {2, 64, 130, 300};
    static const uint32_t cuts[][3] = {{2, 1, 1}, {1, 1, 4}, {2, 2, 4}, {4, 1, 2}};

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        struct engines e = open_engines(cuts[i][0], cuts[i][1], cuts[i][2], 4);

        heart_lengths(&e.ports, list, 4, 6);
        close_engines(&e);
    }
}

static void shared_beginnings(void **state)
{
    struct engines e = open_engines(1, 1, 2, 4);

    (void)state;
    heart_shared_beginnings(&e.ports, 12);
    close_engines(&e);
}

static void every_remainder(void **state)
{
    struct engines e = open_engines(1, 1, 1, 4);

    (void)state;
    heart_every_remainder(&e.ports);
    close_engines(&e);
}

static void crowds(void **state)
{
    struct engines e = open_engines(1, 2, 1, 4);

    (void)state;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        print_message("seed %llu\n", (unsigned long long)seed);
        heart_crowd(&e.ports, seed, 20);
    }
    close_engines(&e);
}

static void faults(void **state)
{
    static const struct dmk_loopback_faults kinds[] = {
        {.max_delay = 5},
        {.max_delay = 3, .reorder = 200},
        {.max_delay = 3, .duplicate = 200},
        {.max_delay = 3, .drop = 100},
        {.late = 300, .late_steps = 40},
        {.max_delay = 4,
         .drop = 50,
         .duplicate = 50,
         .reorder = 100,
         .late = 100,
         .late_steps = 30},
    };
    struct engines e = open_engines(1, 1, 1, 4);
    uint32_t total_right = 0, total_failed = 0;

    (void)state;
    for (uint32_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        for (uint32_t lane = 0; lane < 2; lane++) {
            uint32_t n_failed = 0;
            const uint32_t n_right =
                heart_faults(&e.ports, lane ? DMK_LANE_DIRECT : DMK_LANE_EMULATED, kinds[k], 30,
                             100 + k, &n_failed);

            print_message("faults %u, lane %u, seed %u: %u right, %u failed\n", k, lane, 100 + k,
                          n_right, n_failed);
            total_right += n_right;
            total_failed += n_failed;
        }
    }
    assert_true(total_right > 100);
    assert_true(total_failed > 0); /* dropped messages end in failures, or the fabric drops none */
    close_engines(&e);
}

static void lose_with(uint64_t seed)
{
    static const char *const names[] = {"cut", "partition", "kill"};
    struct engines e = open_engines(1, 1, 1, 4);
    uint32_t total_failed = 0;

    for (uint32_t loss = 0; loss < N_HEART_LOSSES; loss++) {
        for (uint32_t lane = 0; lane < 2; lane++) {
            uint32_t n_failed;

            print_message("%s, lane %u, seed %llu: ", names[loss], lane, (unsigned long long)seed);
            n_failed = heart_losses(&e.ports, lane ? DMK_LANE_DIRECT : DMK_LANE_EMULATED,
                                    (enum heart_loss)loss, 20, seed);
            print_message("%u of 60 failed\n", n_failed);
            total_failed += n_failed;
        }
    }
    /* Of one lane and one loss it may well be all. */
    assert_true(total_failed > 0 && total_failed < N_HEART_LOSSES * 2 * 60);
    close_engines(&e);
}

static void losses(void **state)
{
    (void)state;
    lose_with(200);
}

/* `test_heart losses_of_any_seed 7` runs the schedules of seed 7 again, with a number behind it so many seeds. */
static uint64_t first_seed, n_seeds = 1;

static void losses_of_any_seed(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < n_seeds; i++) {
        lose_with(first_seed + i);
    }
}

/* The same once more through staging memory, which some prompts find full. */
static void through_staging(void **state)
{
    static const uint32_t list[] = {1, 2, 63, 64, 65, 128, 129, 192, 257, 513, 2049, 9000};
    struct engines e;

    staged = true;
    e = open_engines(2, 1, 1, 4);
    heart_lengths(&e.ports, list, sizeof(list) / sizeof(list[0]), 8);
    assert_true(shadow_engine_staged(e.prefill) > 0);
    close_engines(&e);
    other_ranks_on_each_side(state);
    shared_beginnings(state);
    crowds(state);
    staged = false;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lengths),
        cmocka_unit_test(long_lengths),
        cmocka_unit_test(other_ranks_on_each_side),
        cmocka_unit_test(shared_beginnings),
        cmocka_unit_test(every_remainder),
        cmocka_unit_test(crowds),
        cmocka_unit_test(through_staging),
        cmocka_unit_test(faults),
        cmocka_unit_test(losses),
        cmocka_unit_test(losses_of_any_seed),
    };

    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    first_seed = argc > 2 ? strtoull(argv[2], NULL, 10) : dmk_id128_random().lo % 1000000000;
    n_seeds = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
