/* How the times of a request are told. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "router/timeline.h"

static void test_text(void **state)
{
    struct dmk_timeline t = {
        .received_ns = 1000000000,
        .rendered_ns = 1000500000,
        .dispatched_ns = 1001500000,
        .reserved_ns = 1003500000,
        .prefilled_ns = 1023500000,
        .first_ns = 1025000000,
        .end_ns = 1125000000,
        .transfer_bytes = 2000000,
        .transfer_us = 1000,
        .p_queue_us = 10,
        .p_compute_us = 18000,
        .attempts = 1,
    };
    struct dmk_buf out;

    (void)state;
    dmk_buf_init(&out, 0);
    dmk_timeline_text(&t, &out);
    assert_string_equal(out.data,
                        "tokenise_ms=0.500 queue_ms=1.000 reserve_ms=2.000 prefill_queue_ms=0.010 "
                        "prefill_compute_ms=18.000 prefill_ms=20.000 transfer_bytes=2000000 "
                        "transfer_ms=1.000 transfer_gb_s=2.000 first_token_ms=25.000 "
                        "decode_ms=100.000 total_ms=125.000 attempts=1");
    dmk_buf_reset(&out);
    t = (struct dmk_timeline){.received_ns = 5, .end_ns = 2000005};
    dmk_timeline_text(&t, &out);
    assert_string_equal(out.data, "total_ms=2.000 attempts=0");
    dmk_buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_text)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
