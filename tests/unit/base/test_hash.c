/* Hash chains and 128-bit ids. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "common/base/blocks.h"

static void test_chain_depends_on_everything_before(void **state)
{
    uint32_t a[DMK_BLOCK_TOKENS], b[DMK_BLOCK_TOKENS];
    const struct dmk_bytes none = {NULL, 0}, salt = {(const uint8_t *)"s", 1};
    struct dmk_id128 root = dmk_block_root("mxfp4", none), h1, h2;

    (void)state;
    for (uint32_t i = 0; i < DMK_BLOCK_TOKENS; i++) {
        a[i] = i;
        b[i] = i == 63 ? 1000 : i;
    }
    h1 = dmk_block_next(dmk_block_next(root, a), b);
    assert_true(dmk_id128_equal(h1, dmk_block_next(dmk_block_next(root, a), b)));
    h2 = dmk_block_next(dmk_block_next(root, b), b);
    assert_false(dmk_id128_equal(h1, h2));
    assert_false(dmk_id128_equal(root, dmk_block_root("fp8", none)));
    assert_false(dmk_id128_equal(root, dmk_block_root("mxfp4", salt)));
    /* The border between numerics and salt counts. */
    assert_false(dmk_id128_equal(dmk_block_root("mxfp4s", none), dmk_block_root("mxfp4", salt)));
}

static void test_ids_format_and_parse(void **state)
{
    const struct dmk_id128 id = {.hi = 0x0123456789abcdefull, .lo = 0xfull};
    struct dmk_id128 back;
    char text[33];

    (void)state;
    dmk_id128_format(id, text);
    assert_string_equal(text, "0123456789abcdef000000000000000f");
    assert_true(dmk_id128_parse(text, 32, &back));
    assert_true(dmk_id128_equal(id, back));
    assert_false(dmk_id128_parse(text, 31, &back));
    text[5] = 'G';
    assert_false(dmk_id128_parse(text, 32, &back));
    assert_false(dmk_id128_equal(dmk_id128_random(), dmk_id128_random()));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chain_depends_on_everything_before),
        cmocka_unit_test(test_ids_format_and_parse),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
