/* Which worker takes a request. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "router/route.h"

static const struct dmk_route_ask ask_1000 = {.prompt_tokens = 1000, .room_tokens = 1000};

static void test_least_loaded(void **state)
{
    const struct dmk_route_worker w[] = {
        {.usable = true, .load_tokens = 500, .free_tokens = UINT64_MAX},
        {.usable = true, .load_tokens = 100, .free_tokens = UINT64_MAX},
        {.usable = false, .load_tokens = 0, .free_tokens = UINT64_MAX},
    };

    (void)state;
    assert_int_equal(dmk_route_pick(w, 3, &ask_1000), 1);
    assert_int_equal(dmk_route_pick(w + 2, 1, &ask_1000), -1);
    assert_int_equal(dmk_route_pick(w, 0, &ask_1000), -1);
}

static void test_prefix_against_load(void **state)
{
    struct dmk_route_worker w[] = {
        {.usable = true, .load_tokens = 800, .free_tokens = UINT64_MAX, .prefix_tokens = 896},
        {.usable = true, .load_tokens = 0, .free_tokens = UINT64_MAX},
    };

    (void)state;
    assert_int_equal(dmk_route_pick(w, 2, &ask_1000), 0); /* 800 + 104 < 1000 */
    w[0].load_tokens = 950;
    assert_int_equal(dmk_route_pick(w, 2, &ask_1000), 1);
    w[0].prefix_tokens = 5000; /* longer than the prompt: counts as the prompt */
    assert_int_equal(dmk_route_pick(w, 2, &ask_1000), 0);
}

static void test_room_comes_first(void **state)
{
    const struct dmk_route_worker w[] = {
        {.usable = true, .load_tokens = 0, .free_tokens = 999, .prefix_tokens = 960},
        {.usable = true, .load_tokens = 1000000, .free_tokens = 1000},
    };

    (void)state;
    assert_int_equal(dmk_route_pick(w, 2, &ask_1000), 1);
    assert_int_equal(dmk_route_pick(w, 1, &ask_1000), 0); /* the worker's own answer decides */
}

static void test_equals_take_turns(void **state)
{
    const struct dmk_route_worker w[4] = {
        {.usable = true, .free_tokens = UINT64_MAX},
        {.usable = false},
        {.usable = true, .free_tokens = UINT64_MAX},
        {.usable = true, .free_tokens = UINT64_MAX},
    };
    unsigned n[4] = {0};

    (void)state;
    for (uint32_t turn = 0; turn < 4000; turn++) {
        const struct dmk_route_ask ask = {.prompt_tokens = 10, .turn = turn};
        const int i = dmk_route_pick(w, 4, &ask);

        assert_in_range(i, 0, 3);
        n[i]++;
    }
    assert_int_equal(n[1], 0);
    assert_true(n[0] >= 1000 && n[2] >= 1000 && n[3] >= 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_least_loaded),
        cmocka_unit_test(test_prefix_against_load),
        cmocka_unit_test(test_room_comes_first),
        cmocka_unit_test(test_equals_take_turns),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
