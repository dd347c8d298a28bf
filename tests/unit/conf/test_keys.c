/* Bearer keys: which are taken, from where, and what a file may hold. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "common/conf/keys.h"

static char first[] = "one", second[] = "second-key", *items[] = {first, second};
static const struct dmk_conf_list list = {items, 2}, none = {0};

static bool allows(struct dmk_keys *keys, const char *text)
{
    return dmk_keys_allow(keys, dmk_str_from(text));
}

static void takes_the_keys_and_nothing_else(void **state)
{
    static const char *const bad[] = {NULL,
                                      "",
                                      "Bearer",
                                      "Bearer ",
                                      "Bearer  one",
                                      "Bearer one ",
                                      "Bearer One",
                                      "Bearer on",
                                      "Bearer onee",
                                      "Bearer oneone",
                                      "one",
                                      "Basic one",
                                      "Bearer\tone",
                                      "Bearerone",
                                      "Bearer second",
                                      "Bearer second-keysecond-key",
                                      "Bearer *"};
    struct dmk_keys *keys = NULL;
    struct dmk_error error;

    (void)state;
    assert_int_equal(dmk_keys_new(&list, "", &keys, &error), 0);
    assert_true(dmk_keys_needed(keys));
    assert_true(allows(keys, "Bearer one"));
    assert_true(allows(keys, "bearer one"));
    assert_true(allows(keys, "Bearer second-key"));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_false(allows(keys, bad[i]));
    }
    dmk_keys_free(&keys);
    assert_int_equal(dmk_keys_new(&none, NULL, &keys, &error), 0);
    assert_false(dmk_keys_needed(keys));
    assert_true(allows(keys, NULL));
    dmk_keys_free(&keys);
}

static void write_file(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");

    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void reads_files(void **state)
{
    static const char *const bad[] = {"", "# only this\n", "two words\n", "tab\there\n"};
    char path[] = "/tmp/damask-keys-XXXXXX";
    const int fd = mkstemp(path);
    struct dmk_keys *keys = NULL;
    struct dmk_error error;

    (void)state;
    assert_true(fd >= 0);
    close(fd);
    write_file(path, "\n# people\n  alpha \r\nbeta");
    assert_int_equal(dmk_keys_new(&none, path, &keys, &error), 0);
    assert_true(allows(keys, "Bearer alpha"));
    assert_true(allows(keys, "Bearer beta"));
    assert_false(allows(keys, "Bearer # people"));
    assert_false(allows(keys, "Bearer "));
    dmk_keys_free(&keys);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        write_file(path, bad[i]);
        assert_true(dmk_keys_new(&none, path, &keys, &error) < 0);
        assert_non_null(strstr(error.text, path));
        assert_null(keys);
    }
    unlink(path);
    assert_true(dmk_keys_new(&none, path, &keys, &error) < 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_the_keys_and_nothing_else),
        cmocka_unit_test(reads_files),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
