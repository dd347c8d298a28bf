/* Byte buffers: growth, the cap, and that a failed append changes nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "common/base/buf.h"

static void test_appends_and_terminates(void **state)
{
    struct dmk_buf b;

    (void)state;
    dmk_buf_init(&b, 0);
    dmk_buf_puts(&b, "ab");
    dmk_buf_putc(&b, 'c');
    dmk_buf_printf(&b, "%d%s", 12, "x");
    assert_string_equal(b.data, "abc12x");
    assert_int_equal(b.len, 6);
    dmk_buf_consume(&b, 3);
    assert_string_equal(b.data, "12x");
    dmk_buf_consume(&b, 3);
    assert_int_equal(b.len, 0);
    dmk_buf_fini(&b);
}

static void test_cap_is_hard(void **state)
{
    struct dmk_buf b;

    (void)state;
    dmk_buf_init(&b, 4);
    dmk_buf_puts(&b, "abcd");
    assert_false(b.failed);
    dmk_buf_puts(&b, "e");
    assert_true(b.failed);
    assert_string_equal(b.data, "abcd");
    dmk_buf_putc(&b, 'f'); /* stays failed, stays unchanged */
    assert_int_equal(b.len, 4);
    dmk_buf_reset(&b);
    dmk_buf_printf(&b, "%s", "12345");
    assert_true(b.failed);
    assert_int_equal(b.len, 0);
    dmk_buf_fini(&b);
}

static void test_grows_over_many_appends(void **state)
{
    struct dmk_buf b;

    (void)state;
    dmk_buf_init(&b, 0);
    for (int i = 0; i < 10000; i++) {
        dmk_buf_printf(&b, "%04d", i);
    }
    assert_false(b.failed);
    assert_int_equal(b.len, 40000);
    assert_memory_equal(b.data + 4 * 9999, "9999", 4);
    dmk_buf_fini(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_appends_and_terminates),
        cmocka_unit_test(test_cap_is_hard),
        cmocka_unit_test(test_grows_over_many_appends),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
