/* Hexadecimal digits and UTF-8 against the C library's own readers, at every value that has one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/spell.h"

static void digits_are_those_of_c(void **state)
{
    (void)state;
    for (int c = 0; c < 256; c++) {
        const char text[2] = {(char)c, '\0'};
        char *end;
        const long value = strtol(text, &end, 16);

        assert_int_equal(dmk_hex_digit((char)c), end == text + 1 ? value : -1);
    }
}

static void values_have_all_their_digits(void **state)
{
    (void)state;
    assert_int_equal(dmk_hex_value("00fF", 4), 0xff);
    assert_int_equal(dmk_hex_value("ffffffff", 8), 0xffffffff);
    assert_int_equal(dmk_hex_value("12g4", 4), -1);
    assert_int_equal(dmk_hex_value("12 4", 4), -1);
    assert_int_equal(dmk_hex_value("+123", 4), -1);
    assert_int_equal(dmk_hex_value("", 0), 0);
}

/* Decoded by the definition: the high bits say the length, each byte behind has six. */
static uint32_t decode(const uint8_t *bytes, size_t n)
{
    static const uint8_t mask[5] = {0, 0x7f, 0x1f, 0x0f, 0x07}, mark[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    uint32_t code = bytes[0] & mask[n];

    assert_int_equal(bytes[0] & (uint8_t)~mask[n], mark[n]);
    for (size_t i = 1; i < n; i++) {
        assert_int_equal(bytes[i] & 0xc0, 0x80);
        code = code << 6 | (bytes[i] & 0x3f);
    }
    return code;
}

static void every_code_point_comes_back(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 0x110000; code++) {
        uint8_t bytes[5] = {0, 0, 0, 0, 0xa5};
        uint32_t got;
        const size_t n = dmk_utf8_put(code, bytes);

        assert_int_equal(n, code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4);
        assert_int_equal(decode(bytes, n), code);
        assert_int_equal(bytes[4], 0xa5);
        bytes[n] = 0;
        got = 7;
        if (code >= 0xd800 && code <= 0xdfff) {
            assert_int_equal(dmk_utf8_get((const char *)bytes, &got), 0);
            assert_int_equal(got, 7);
        } else {
            assert_int_equal(dmk_utf8_get((const char *)bytes, &got), n);
            assert_int_equal(got, code);
        }
    }
}

static void what_is_no_utf8_is_no_character(void **state)
{
    static const char *const bad[] = {"\x80",
                                      "\xbf",
                                      "\xc0\x80",
                                      "\xc1\xbf",
                                      "\xe0\x9f\xbf",
                                      "\xf0\x8f\xbf\xbf",
                                      "\xf4\x90\x80\x80",
                                      "\xf8\x88\x80\x80\x80",
                                      "\xff",
                                      "\xe2\x82",
                                      "\xc3(",
                                      "\xf0\x9f\x98"};
    uint32_t got = 7;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(dmk_utf8_get(bad[i], &got), 0);
    }
    assert_int_equal(got, 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(digits_are_those_of_c),
        cmocka_unit_test(values_have_all_their_digits),
        cmocka_unit_test(every_code_point_comes_back),
        cmocka_unit_test(what_is_no_utf8_is_no_character),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
