/* The index of block hashes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>
#include "common/base/blocks.h"
#include "common/base/rng.h"
#include "router/index.h"

static struct dmk_id128 hash_of(uint64_t i)
{
    return (struct dmk_id128){.lo = dmk_rng_mix(i), .hi = i + 1};
}

static void test_add_remove_clear(void **state)
{
    struct dmk_index *index = dmk_index_new(1000);

    (void)state;
    assert_non_null(index);
    dmk_index_add(index, 3, hash_of(1));
    dmk_index_add(index, 63, hash_of(1));
    dmk_index_add(index, 3, hash_of(2));
    assert_int_equal(dmk_index_n_blocks(index), 2);
    assert_true(dmk_index_find(index, hash_of(1)) == ((1ull << 3) | (1ull << 63)));
    assert_int_equal(dmk_index_find(index, hash_of(9)), 0);
    dmk_index_remove(index, 63, hash_of(1));
    dmk_index_remove(index, 63, hash_of(1));
    dmk_index_remove(index, 5, hash_of(9));
    assert_int_equal(dmk_index_find(index, hash_of(1)), 1ull << 3);
    dmk_index_clear_worker(index, 3);
    assert_int_equal(dmk_index_n_blocks(index), 0);
    dmk_index_free(&index);
    assert_null(index);
}

static void test_is_bounded(void **state)
{
    struct dmk_index *index = dmk_index_new(64);

    (void)state;
    for (uint64_t i = 0; i < 100000; i++) {
        dmk_index_add(index, (uint32_t)(i % 64), hash_of(i));
        assert_true(dmk_index_n_blocks(index) <= 64);
        /* What was added last is there. */
        assert_true(dmk_index_find(index, hash_of(i)) & (1ull << (i % 64)));
    }
    assert_true(dmk_index_n_blocks(index) > 32);
    for (uint32_t w = 0; w < 64; w++) {
        dmk_index_clear_worker(index, w);
    }
    assert_int_equal(dmk_index_n_blocks(index), 0);
    dmk_index_free(&index);
}

static void test_match_chain(void **state)
{
    struct dmk_index *index = dmk_index_new(1024);
    const struct dmk_bytes salt = {(const uint8_t *)"s", 1};
    const struct dmk_id128 root = dmk_block_root("mxfp4", salt);
    uint32_t ids[4 * DMK_BLOCK_TOKENS + 10];
    uint32_t tokens[DMK_INDEX_MAX_WORKERS] = {0};
    struct dmk_id128 hash = root;

    (void)state;
    for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++) {
        ids[i] = (uint32_t)i * 7;
    }
    for (size_t b = 0; b < 4; b++) {
        hash = dmk_block_next(hash, ids + b * DMK_BLOCK_TOKENS);
        if (b == 1) {
            dmk_index_add(index, 0, hash);
        }
        if (b == 3) {
            dmk_index_add(index, 7, hash); /* only its last block is named: that is enough */
        }
    }
    dmk_index_match(index, root, ids, sizeof(ids) / sizeof(ids[0]), tokens);
    assert_int_equal(tokens[0], 128);
    assert_int_equal(tokens[7], 256);
    assert_int_equal(tokens[1], 0);

    memset(tokens, 0, sizeof(tokens));
    dmk_index_match(index, root, ids, 255, tokens);
    assert_int_equal(tokens[7], 0);
    assert_int_equal(tokens[0], 128);

    memset(tokens, 0, sizeof(tokens));
    dmk_index_match(index, dmk_block_root("fp8", salt), ids, 256, tokens);
    assert_int_equal(tokens[0], 0);
    ids[0]++;
    dmk_index_match(index, root, ids, 256, tokens);
    assert_int_equal(tokens[0], 0);
    dmk_index_free(&index);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_add_remove_clear),
        cmocka_unit_test(test_is_bounded),
        cmocka_unit_test(test_match_chain),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
