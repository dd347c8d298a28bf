/* Counter-based random numbers: pure, sensitive to each word, and uniform (chi-square, fixed seeds). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "common/base/rng.h"

static void test_pure_and_sensitive(void **state)
{
    (void)state;
    assert_true(dmk_rng_u64(1, 2, 3) == dmk_rng_u64(1, 2, 3));
    assert_true(dmk_rng_u64(1, 2, 3) != dmk_rng_u64(1, 3, 2));
    assert_true(dmk_rng_u64(1, 2, 3) != dmk_rng_u64(2, 2, 3));
    assert_true(dmk_rng_u64(0, 0, 0) != 0);
}

/* 100 cells, 99 degrees of freedom: the statistic is below 148.2 with probability 0.999. */
static void test_uniform(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 3; seed++) {
        uint32_t cells[100] = {0};
        double chi = 0;

        for (uint64_t i = 0; i < 100000; i++) {
            const double u = dmk_rng_unit(seed, 7, i);

            assert_true(u >= 0 && u < 1);
            cells[(int)(u * 100)]++;
        }
        for (int c = 0; c < 100; c++) {
            chi += (cells[c] - 1000.0) * (cells[c] - 1000.0) / 1000.0;
        }
        assert_true(chi < 148.2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pure_and_sensitive),
        cmocka_unit_test(test_uniform),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
