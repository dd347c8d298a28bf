/* What is not strict JSON is refused with its place; getters hold their bounds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/json/json.h"

static const struct {
    const char *text;
    int status;
    const char *sentence;
} bad[] = {
    {"", -DMK_EFORMAT, "the body: not valid JSON at line 1"},
    {"{", -DMK_EFORMAT, "the body: not valid JSON"},
    {"{\"a\":1,}", -DMK_EFORMAT, "not valid JSON"},
    {"{'a':1}", -DMK_EFORMAT, "not valid JSON"},
    {"[01]", -DMK_EFORMAT, "not valid JSON"},
    {"[NaN]", -DMK_EFORMAT, "not valid JSON"},
    {"[1e999]", -DMK_EFORMAT, "beyond what a double holds"},
    {"[1] 2", -DMK_EFORMAT, "not valid JSON at line 1 column 5: end of file expected"},
    {"{\"a\":1,\"a\":2}", -DMK_EFORMAT, "duplicate object key near '\"a\"'"},
    {"[\"\xc0\x80\"]", -DMK_EFORMAT, "the body: not UTF-8 at byte 2"},
    {"\xef\xbb\xbf[]", -DMK_EFORMAT, "not valid JSON"},
    {"[9223372036854775808, 1e400]", -DMK_EFORMAT, "beyond what a double holds"},
    {"[9223372036854775808, x]", -DMK_EFORMAT, "not valid JSON"},
    {"[--9223372036854775808]", -DMK_EFORMAT, "not valid JSON"},
    {"[[[[[1]]]]]", -DMK_EFORMAT, "the body: nested deeper than 4 levels"},
};

/* Half a character as an escape is replaced; two halves that belong together are one. */
static void test_lone_surrogates(void **state)
{
    static const char *const texts[][2] = {
        {"\\ud83d", "\xef\xbf\xbd"},
        {"\\udc4d", "\xef\xbf\xbd"},
        {"\\ud83d\\udc4d", "\xf0\x9f\x91\x8d"},
        {"\\uD83D\\uDC4D", "\xf0\x9f\x91\x8d"},
        {"\\udc4d\\ud83d", "\xef\xbf\xbd\xef\xbf\xbd"},
        {"\\ud83d\\ud83d\\udc4d", "\xef\xbf\xbd\xf0\x9f\x91\x8d"},
        {"\\ud83dx\\udc4d", "\xef\xbf\xbdx\xef\xbf\xbd"},
        {"\\ud83d\\n\\u00e9", "\xef\xbf\xbd\n\xc3\xa9"},
        {"\\\\ud83d", "\\ud83d"},
        {"\\\\\\ud83d", "\\\xef\xbf\xbd"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        struct dmk_error err = {0};
        json_t *root = NULL;
        char text[64];

        (void)snprintf(text, sizeof(text), "\"%s\"", texts[i][0]);
        assert_int_equal(dmk_json_parse(dmk_str_from(text), "x", 4, &root, &err), 0);
        assert_string_equal(json_string_value(root), texts[i][1]);
        json_decref(root);
        (void)snprintf(text, sizeof(text), "{\"%s\":1}", texts[i][0]);
        assert_int_equal(dmk_json_parse(dmk_str_from(text), "x", 4, &root, &err), 0);
        assert_non_null(json_object_get(root, texts[i][1]));
        json_decref(root);
    }
    for (const char *const *cut = (const char *const[]){"\"\\ud83", "\"\\ud83d", "\"\\ud83d\\u",
                                                        "\"\\", "\\ud83d", NULL};
         *cut; cut++) {
        json_t *root = NULL;

        assert_int_equal(dmk_json_parse(dmk_str_from(*cut), "x", 4, &root, NULL), -DMK_EFORMAT);
        assert_null(root);
    }
}

static void test_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct dmk_error err = {0};
        json_t *root = NULL;
        const int r = dmk_json_parse(dmk_str_from(bad[i].text), "the body", 4, &root, &err);

        if (r != bad[i].status || !strstr(err.text, bad[i].sentence)) {
            print_error("%s\nwant %d ...%s...\ngot  %d %s\n", bad[i].text, bad[i].status,
                        bad[i].sentence, r, err.text);
        }
        assert_int_equal(r, bad[i].status);
        assert_non_null(strstr(err.text, bad[i].sentence));
        assert_null(root);
    }
}

/* What is valid JSON and has no place in a json_t comes as the nearest that has; all else stays. */
static void test_nearest(void **state)
{
    static const struct {
        const char *text;
        double number;
    } numbers[] = {
        {"18446744073709551615", 18446744073709551615.0},
        {"9223372036854775808", 9223372036854775808.0},
        {"-9223372036854775809", -9223372036854775808.0},
        {"123456789012345678901234567890", 123456789012345678901234567890.0},
    };
    json_t *root = NULL;

    (void)state;
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        char text[300];
        const json_t *v;

        /* Beside it: numbers that fit, and strings of digits. */
        snprintf(text, sizeof(text),
                 "[%s, 9223372036854775807, -9223372036854775808, -999999999999999999, "
                 "\"99999999999999999999\", \"\\\"99999999999999999999\", {\"a\": %s}]",
                 numbers[i].text, numbers[i].text);
        assert_int_equal(dmk_json_parse(dmk_str_from(text), "x", 4, &root, NULL), 0);
        v = json_array_get(root, 0);
        assert_true(json_is_real(v) && json_real_value(v) == numbers[i].number);
        assert_true(json_integer_value(json_array_get(root, 1)) == INT64_MAX);
        assert_true(json_integer_value(json_array_get(root, 2)) == INT64_MIN);
        assert_true(json_integer_value(json_array_get(root, 3)) == -999999999999999999);
        assert_string_equal(json_string_value(json_array_get(root, 4)), "99999999999999999999");
        assert_string_equal(json_string_value(json_array_get(root, 5)), "\"99999999999999999999");
        assert_true(json_real_value(json_object_get(json_array_get(root, 6), "a")) ==
                    numbers[i].number);
        json_decref(root);
    }
    assert_int_equal(
        dmk_json_parse(dmk_str_from("[\"a\\u0000b\", \"\\\\u0000\"]"), "x", 4, &root, NULL), 0);
    assert_string_equal(json_string_value(json_array_get(root, 0)), "a\xef\xbf\xbd"
                                                                    "b");
    assert_string_equal(json_string_value(json_array_get(root, 1)), "\\u0000");
    json_decref(root);
    assert_int_equal(dmk_json_parse(dmk_str_from("{\"a\\u0000b\": 1}"), "x", 4, &root, NULL), 0);
    assert_true(json_integer_value(json_object_get(root, "a\xef\xbf\xbd"
                                                         "b")) == 1);
    json_decref(root);
}

/* Brackets in strings are no depth; a NUL in the text is no end. */
static void test_accepted(void **state)
{
    json_t *root = NULL;

    (void)state;
    assert_int_equal(
        dmk_json_parse(dmk_str_from(" [\"[[[[[\\\"[[\", [[[ ]]]] "), "x", 4, &root, NULL), 0);
    assert_int_equal(json_array_size(root), 2);
    json_decref(root);
    assert_int_equal(dmk_json_parse(dmk_str_from("\"text\""), "x", 4, &root, NULL), 0);
    json_decref(root);
    root = NULL;
    assert_int_equal(dmk_json_parse((struct dmk_str){"[1]\0[2]", 7}, "x", 4, &root, NULL),
                     -DMK_EFORMAT);
    assert_null(root);
}

static json_t *parse(const char *text)
{
    json_t *root = NULL;

    assert_int_equal(dmk_json_parse(dmk_str_from(text), "x", 8, &root, NULL), 0);
    return root;
}

static void test_getters(void **state)
{
    json_t *o = parse("{\"n\":7,\"neg\":-1,\"f\":1.5,\"b\":true,\"s\":\"word\",\"o\":{\"k\":1},"
                      "\"a\":[1],\"z\":null,\"big\":4294967296,\"i\":7.0}");
    struct dmk_error err = {0};
    struct dmk_str s = {0};
    uint32_t u = 42;
    uint64_t v = 0;
    double d = 0;
    bool b = false;
    json_t *sub = NULL;

    (void)state;
    assert_int_equal(dmk_json_get_u32(o, "w", "n", DMK_JSON_REQUIRED, 0, 7, &u, &err), 1);
    assert_int_equal(u, 7);
    assert_int_equal(dmk_json_get_u32(o, "w", "none", DMK_JSON_OPTIONAL, 0, 9, &u, &err), 0);
    assert_int_equal(dmk_json_get_u32(o, "w", "z", DMK_JSON_OPTIONAL, 0, 9, &u, &err), 0);
    assert_int_equal(u, 7);
    assert_int_equal(dmk_json_get_u32(o, "w", "z", DMK_JSON_REQUIRED, 0, 9, &u, &err),
                     -DMK_EFORMAT);
    assert_string_equal(err.text, "w: \"z\" is null but must be an integer from 0 to 9");
    assert_int_equal(dmk_json_get_u32(o, "w", "none", DMK_JSON_REQUIRED, 0, 9, &u, &err),
                     -DMK_EFORMAT);
    assert_string_equal(err.text, "w: \"none\" is missing but must be an integer from 0 to 9");
    assert_int_equal(dmk_json_get_u32(o, "w", "n", DMK_JSON_REQUIRED, 8, 9, &u, &err),
                     -DMK_EFORMAT);
    assert_string_equal(err.text, "w: \"n\" must be an integer from 8 to 9, not 7");
    assert_int_equal(dmk_json_get_u32(o, "w", "neg", DMK_JSON_REQUIRED, 0, 9, &u, &err),
                     -DMK_EFORMAT);
    assert_int_equal(dmk_json_get_u32(o, "w", "i", DMK_JSON_REQUIRED, 0, 9, &u, &err),
                     -DMK_EFORMAT);
    assert_int_equal(dmk_json_get_u32(o, "w", "big", DMK_JSON_REQUIRED, 0, UINT32_MAX, &u, &err),
                     -DMK_EFORMAT);
    assert_int_equal(u, 7);
    assert_int_equal(dmk_json_get_u64(o, "w", "big", DMK_JSON_REQUIRED, 0, UINT64_MAX, &v, &err),
                     1);
    assert_int_equal(v, 4294967296ull);
    assert_int_equal(dmk_json_get_real(o, "w", "n", DMK_JSON_REQUIRED, 0, 9, &d, &err), 1);
    assert_true(d == 7.0);
    assert_int_equal(dmk_json_get_real(o, "w", "f", DMK_JSON_REQUIRED, 2, 9, &d, &err),
                     -DMK_EFORMAT);
    assert_string_equal(err.text, "w: \"f\" must be a number from 2 to 9, not 1.5");
    assert_int_equal(dmk_json_get_bool(o, "w", "b", DMK_JSON_REQUIRED, &b, &err), 1);
    assert_true(b);
    assert_int_equal(dmk_json_get_bool(o, "w", "n", DMK_JSON_REQUIRED, &b, &err), -DMK_EFORMAT);
    assert_int_equal(dmk_json_get_str(o, "w", "s", DMK_JSON_REQUIRED, &s, &err), 1);
    assert_true(dmk_str_is(s, "word"));
    assert_int_equal(dmk_json_get_str(o, "w", "a", DMK_JSON_REQUIRED, &s, &err), -DMK_EFORMAT);
    assert_string_equal(err.text, "w: \"a\" must be a string, not an array");
    assert_int_equal(dmk_json_get_object(o, "w", "o", DMK_JSON_REQUIRED, &sub, &err), 1);
    assert_int_equal(json_object_size(sub), 1);
    assert_int_equal(dmk_json_get_array(o, "w", "o", DMK_JSON_REQUIRED, &sub, &err), -DMK_EFORMAT);
    assert_int_equal(dmk_json_get_array(o, "w", "a", DMK_JSON_REQUIRED, &sub, &err), 1);
    assert_int_equal(json_array_size(sub), 1);
    json_decref(o);
}

static void test_show(void **state)
{
    char shown[DMK_JSON_SHOW_BYTES];
    char text[300];
    json_t *v;

    (void)state;
    memset(text, 'x', sizeof(text));
    text[0] = text[298] = '"';
    text[299] = '\0';
    v = parse(text);
    assert_string_equal(dmk_json_show(v, shown), "a longer string");
    json_decref(v);
    text[62] = '"'; /* with both quotes 63 bytes: the longest that fits */
    text[63] = '\0';
    v = parse(text);
    assert_string_equal(dmk_json_show(v, shown), text);
    json_decref(v);
    v = parse("{}");
    assert_string_equal(dmk_json_show(v, shown), "{}");
    json_decref(v);
}

static void test_files(void **state)
{
    char path[] = "/tmp/damask-test-XXXXXX";
    const int fd = mkstemp(path);
    struct dmk_error err = {0};
    json_t *root = NULL;

    (void)state;
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "{\"a\":1}", 7), 7);
    assert_int_equal(dmk_json_load(path, 7, 4, &root, &err), 0);
    json_decref(root);
    root = NULL;
    assert_int_equal(dmk_json_load(path, 6, 4, &root, &err), -DMK_EFULL);
    assert_non_null(strstr(err.text, ": 7 bytes are more than the bound of 6"));
    assert_int_equal(pwrite(fd, "[\"a\",1]", 7, 0), 7);
    assert_int_equal(dmk_json_load(path, 7, 4, &root, &err), -DMK_EFORMAT);
    assert_non_null(strstr(err.text, ": the top level must be an object"));
    close(fd);
    unlink(path);
    assert_int_equal(dmk_json_load(path, 7, 4, &root, &err), -DMK_ENOENT);
    assert_int_equal(dmk_json_load("/tmp", 7, 4, &root, &err), -DMK_EFORMAT);
    assert_string_equal(err.text, "/tmp: not a regular file");
    assert_int_equal(mkfifo(path, 0600), 0); /* a pipe that nobody writes to is not waited for */
    assert_int_equal(dmk_json_load(path, 7, 4, &root, &err), -DMK_EFORMAT);
    unlink(path);
    assert_null(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused), cmocka_unit_test(test_lone_surrogates),
        cmocka_unit_test(test_nearest), cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_getters), cmocka_unit_test(test_show),
        cmocka_unit_test(test_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
