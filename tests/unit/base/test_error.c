/* Error sentences: cut at the bound, cleaned of control characters, prefixed; status tables. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "common/base/error.h"

static void test_set_returns_its_status(void **state)
{
    struct dmk_error err;

    (void)state;
    assert_int_equal(dmk_error_set(&err, -DMK_EINVAL, "tp is %d", 3), -DMK_EINVAL);
    assert_int_equal(err.status, -DMK_EINVAL);
    assert_string_equal(err.text, "tp is 3");
    assert_int_equal(dmk_error_set(NULL, -DMK_EFULL, "ignored"), -DMK_EFULL);
}

static void test_text_from_outside_is_cleaned_and_cut(void **state)
{
    struct dmk_error err;
    char big[2 * DMK_ERROR_TEXT_BYTES];

    (void)state;
    (void)dmk_error_set(&err, -DMK_EFORMAT, "name '%s'", "a\nb\x1b[31m");
    assert_string_equal(err.text, "name 'a?b?[31m'");
    memset(big, 'x', sizeof(big) - 1);
    big[sizeof(big) - 1] = 0;
    (void)dmk_error_set(&err, -DMK_EFORMAT, "%s", big);
    assert_int_equal(strlen(err.text), DMK_ERROR_TEXT_BYTES - 1);
}

static void test_prefix(void **state)
{
    struct dmk_error err;

    (void)state;
    (void)dmk_error_set(&err, -DMK_EIO, "short read");
    assert_int_equal(dmk_error_prefix(&err, "file '%s'", "a.safetensors"), -DMK_EIO);
    assert_string_equal(err.text, "file 'a.safetensors': short read");
}

static void test_every_status_has_a_name_and_a_radius(void **state)
{
    (void)state;
    for (int code = 1; code <= 15; code++) {
        assert_int_equal(dmk_status_name(-code)[0], 'E');
        assert_string_not_equal(dmk_status_name(-code), "EUNKNOWN");
        assert_int_not_equal(dmk_status_radius(-code), DMK_RADIUS_NONE);
    }
    assert_int_equal(dmk_status_radius(0), DMK_RADIUS_NONE);
    assert_int_equal(dmk_status_radius(-DMK_EPEER), DMK_RADIUS_PEER);
    assert_string_equal(dmk_status_name(-99), "EUNKNOWN");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_set_returns_its_status),
        cmocka_unit_test(test_text_from_outside_is_cleaned_and_cut),
        cmocka_unit_test(test_prefix),
        cmocka_unit_test(test_every_status_has_a_name_and_a_radius),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
