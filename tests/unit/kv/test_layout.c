/* How many pages a memory has room for: all that fit, four full ones of five, the rings of all sequences in any case. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "common/base/clock.h"
#include "common/base/error.h"
#include "common/base/rng.h"
#include "common/kv/layout.h"

enum { MOST = 16777216 }; /* pages of a pool */

static void fits_and_no_more(void **state)
{
    const uint64_t seed = dmk_clock_ns();

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (uint64_t i = 0; i < 20000; i++) {
        struct dmk_kv_layout l = {.n_full_layers = (uint32_t)(dmk_rng_u64(seed, i, 0) % 40),
                                  .n_window_layers = 1 + (uint32_t)(dmk_rng_u64(seed, i, 1) % 40),
                                  .n_local_heads = 1u << dmk_rng_u64(seed, i, 2) % 4,
                                  .page_bytes = 16384,
                                  .n_full_pages = 77};
        const uint32_t n = (uint32_t)(dmk_rng_u64(seed, i, 3) % 300);
        const uint64_t full = (uint64_t)l.n_full_layers * l.n_local_heads * l.page_bytes,
                       window = (uint64_t)l.n_window_layers * l.n_local_heads * l.page_bytes;
        const uint64_t least = dmk_kv_least_bytes(&l, n);
        const uint64_t bytes = least + dmk_rng_u64(seed, i, 4) % (UINT64_C(1) << (20 + i % 20));

        if (least > 0) {
            assert_int_equal(dmk_kv_fit(&l, least - 1, n), -DMK_EINVAL);
            assert_int_equal(l.n_full_pages, 77);
        }
        assert_int_equal(dmk_kv_fit(&l, bytes, n), 0);
        const uint64_t used = dmk_kv_full_bytes(&l) + dmk_kv_window_bytes(&l);
        assert_true(l.n_window_pages >= DMK_WINDOW_RING * n);
        if (full == 0) {
            assert_int_equal(l.n_full_pages, 77);
            continue;
        }
        assert_true(l.n_full_pages >= 4 && used <= bytes);
        assert_true(used + full > bytes || l.n_full_pages == MOST);
        if (l.n_window_pages > DMK_WINDOW_RING * n) {
            assert_true(l.n_window_pages <= bytes / (4 * full + window));
            assert_true(l.n_full_pages >= 4 * (uint64_t)l.n_window_pages || l.n_full_pages == MOST);
        }
    }
}

/* What the pools' ids can count is never exceeded, however large the memory. */
static void as_many_as_can_be_counted(void **state)
{
    struct dmk_kv_layout l = {
        .n_full_layers = 1, .n_window_layers = 1, .n_local_heads = 1, .page_bytes = 16384};

    (void)state;
    assert_int_equal(dmk_kv_fit(&l, UINT64_C(1) << 60, 4), 0);
    assert_int_equal(l.n_full_pages, MOST);
    assert_int_equal(l.n_window_pages, MOST);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(fits_and_no_more),
                                       cmocka_unit_test(as_many_as_can_be_counted)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
