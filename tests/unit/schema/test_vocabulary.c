/* Masks over the real vocabulary against the definition: a token is allowed when its bytes can be taken. All tokens
 * are tried at places where masks are put together in different ways. */
#include "tests/unit/schema/words.h"
#include "common/text/tokenizer.h"

static struct dmk_bytes real_bytes(void *ud, uint32_t id)
{
    return dmk_token_is_special(id) ? (struct dmk_bytes){0} : dmk_token_bytes(ud, id);
}

static const struct {
    const char *schema, *text; /* what was written so far */
} places[] = {
    {"{\"type\":\"string\"}", "\"some text"},
    {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\"},\"b\":{\"type\":\"string\"}}"
     ",\"required\":[\"a\"],"
     "\"additionalProperties\":false}",
     "{\"a\":\"x\xe4\xb8"},
    {"{\"type\":\"array\",\"items\":{\"type\":\"string\",\"minLength\":2,\"maxLength\":5}}",
     "[\"a"},
    {"{\"type\":\"array\",\"items\":{\"type\":\"string\",\"maxLength\":500}}", "[\"abc\\n"},
    {"{\"type\":\"object\",\"properties\":{\"name\":{},\"nam\xc3\xa9\":{}}}", "{\"x\":1,\"n"},
    {"{\"type\":\"string\",\"pattern\":\"^[^\\\"]*;.*$\"}", "\"ab"},
    {"{}", "[[1,{\"a\":12.5"},
    {"{\"type\":\"string\"}", "\"\\ud83d"},
};

static void test_places(void **state)
{
    struct dmk_vocab *vocab = NULL;
    struct dmk_trie *trie = NULL;
    struct dmk_walker *walker;
    struct dmk_error error = {0};
    struct dmk_buf blob;
    uint64_t *mask;

    (void)state;
    if (dmk_vocab_open(DMK_TEST_VOCAB, &vocab, &error) < 0) {
        fail_msg("%s", error.text);
    }
    dmk_buf_init(&blob, 0);
    assert_int_equal(dmk_trie_write(DMK_VOCAB_SIZE, real_bytes, vocab, &blob), 0);
    assert_int_equal(dmk_trie_read(dmk_buf_bytes(&blob), &trie, &error), 0);
    assert_int_equal(dmk_walker_new(trie, 16, &walker), 0);
    mask = calloc(DMK_VOCAB_SIZE / 64 + 1, sizeof(*mask));
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        struct dmk_automaton *a = compile(places[i].schema, &error);
        struct dmk_walk walk, next;
        uint32_t n_allowed = 0;

        assert_non_null(a);
        dmk_walk_begin(&walk, a);
        for (const char *at = places[i].text; *at; at++) {
            uint32_t id = 0; /* the token of this byte alone */

            while (dmk_trie_token(trie, id).len != 1 ||
                   dmk_trie_token(trie, id).data[0] != (uint8_t)*at) {
                id++;
            }
            assert_int_equal(dmk_walk_advance(walker, &walk, id), 0);
        }
        for (unsigned round = 0; round < 2; round++) {
            (void)dmk_walk_mask(walker, &walk, mask); /* the second time from what was kept */
        }
        for (uint32_t id = 0; id < DMK_VOCAB_SIZE; id++) {
            const bool bit = mask[id / 64] >> (id % 64) & 1;

            next.n = 0;
            memcpy(&next, &walk,
                   offsetof(struct dmk_walk, words) + walk.n_words * sizeof(uint32_t));
            n_allowed += bit;
            if (bit != (dmk_walk_advance(walker, &next, id) == 0)) {
                const struct dmk_bytes b = dmk_trie_token(trie, id);

                fail_msg("%s behind %s: token %u \"%.*s\" is %d", places[i].schema, places[i].text,
                         id, (int)b.len, b.data, bit);
            }
        }
        print_message("%s: %u tokens\n", places[i].text, n_allowed);
        dmk_automaton_free(&a);
    }
    free(mask);
    dmk_walker_free(&walker);
    dmk_trie_free(&trie);
    dmk_buf_fini(&blob);
    dmk_vocab_close(&vocab);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_places)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
