/* Stop strings: any cut of a text gives what the whole text gives. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>
#include "common/base/hash.h"
#include "common/base/rng.h"
#include "router/stop.h"

/* The plain definition: the smallest end of a match; of those the longest. Returns the start, or
 * -1. */
static long find_first(struct dmk_str text, const struct dmk_str *words, size_t n)
{
    for (size_t end = 1; end <= text.len; end++) {
        size_t longest = 0;

        for (size_t i = 0; i < n; i++) {
            if (words[i].len <= end && words[i].len > longest &&
                memcmp(text.data + end - words[i].len, words[i].data, words[i].len) == 0) {
                longest = words[i].len;
            }
        }
        if (longest > 0) {
            return (long)(end - longest);
        }
    }
    return -1;
}

/* Pushes text in random pieces; returns whether it stopped, and what came out. */
static bool push_cut(struct dmk_str text, const struct dmk_str *words, size_t n, uint64_t seed,
                     struct dmk_buf *out)
{
    struct dmk_stop stop;
    bool stopped = false;

    assert_int_equal(dmk_stop_init(&stop, words, n), 0);
    for (size_t at = 0; at < text.len && !stopped;) {
        size_t len = 1 + dmk_rng_u64(seed, 1, at) % 5;

        len = len < text.len - at ? len : text.len - at;
        stopped = dmk_stop_push(&stop, (struct dmk_str){text.data + at, len}, out);
        at += len;
    }
    if (!stopped) {
        dmk_stop_flush(&stop, out);
    }
    dmk_stop_fini(&stop);
    return stopped;
}

static void test_any_cut_is_the_whole(void **state)
{
    const uint64_t seed = dmk_random_u64();
    unsigned n_stopped = 0;

    (void)state;
    printf("seed %llu\n", (unsigned long long)seed);
    for (uint64_t round = 0; round < 20000; round++) {
        char text[40], words_text[4][6];
        struct dmk_str words[4];
        const size_t len = dmk_rng_u64(seed, round, 0) % sizeof(text);
        const size_t n = 1 + dmk_rng_u64(seed, round, 1) % 4;
        struct dmk_buf out;
        long at;

        for (size_t i = 0; i < len; i++) {
            text[i] = (char)('a' + dmk_rng_u64(seed, round, 10 + i) % 2);
        }
        for (size_t i = 0; i < n; i++) {
            words[i] = (struct dmk_str){words_text[i], 1 + dmk_rng_u64(seed, round, 100 + i) % 6};
            for (size_t k = 0; k < words[i].len; k++) {
                words_text[i][k] = (char)('a' + dmk_rng_u64(seed, round, 200 + 8 * i + k) % 2);
            }
        }
        dmk_buf_init(&out, 0);
        at = find_first((struct dmk_str){text, len}, words, n);
        assert_int_equal(push_cut((struct dmk_str){text, len}, words, n, seed ^ round, &out),
                         at >= 0);
        assert_int_equal(out.len, at >= 0 ? (size_t)at : len);
        assert_true(out.len == 0 || memcmp(out.data, text, out.len) == 0);
        n_stopped += at >= 0;
        dmk_buf_fini(&out);
    }
    assert_true(n_stopped > 1000 && n_stopped < 20000);
}

static void test_holds_back_no_more_than_needed(void **state)
{
    const struct dmk_str word = dmk_str_from("###END");
    struct dmk_stop stop;
    struct dmk_buf out;

    (void)state;
    dmk_buf_init(&out, 0);
    assert_int_equal(dmk_stop_init(&stop, &word, 1), 0);
    assert_false(dmk_stop_push(&stop, dmk_str_from("hello ##"), &out));
    assert_string_equal(out.data, "hello ");
    assert_false(dmk_stop_push(&stop, dmk_str_from("#"), &out));
    assert_string_equal(out.data, "hello ");
    assert_false(dmk_stop_push(&stop, dmk_str_from("#"), &out));
    assert_string_equal(out.data, "hello #");
    assert_true(dmk_stop_push(&stop, dmk_str_from("END and more"), &out));
    assert_string_equal(out.data, "hello #");
    dmk_stop_fini(&stop);
    dmk_buf_fini(&out);
}

static void test_flush_forgets(void **state)
{
    const struct dmk_str word = dmk_str_from("ab");
    struct dmk_stop stop;
    struct dmk_buf out;

    (void)state;
    dmk_buf_init(&out, 0);
    assert_int_equal(dmk_stop_init(&stop, &word, 1), 0);
    assert_false(dmk_stop_push(&stop, dmk_str_from("a"), &out));
    dmk_stop_flush(&stop, &out);
    assert_string_equal(out.data, "a");
    assert_false(dmk_stop_push(&stop, dmk_str_from("b"), &out));
    assert_string_equal(out.data, "ab");
    dmk_stop_fini(&stop);
    dmk_buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_cut_is_the_whole),
        cmocka_unit_test(test_holds_back_no_more_than_needed),
        cmocka_unit_test(test_flush_forgets),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
