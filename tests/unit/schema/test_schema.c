/* Schemas and texts that fit them or do not. */
#include "tests/unit/schema/words.h"
#include "common/base/rng.h"

struct row {
    const char *schema;
    const char *good[8], *bad[10];
};

static const struct row rows[] = {
    {"{}",
     {"1", "\"a\"", "{}", "[]", "{\"a\":[1, 2,{}]}", "null"},
     {"{a}", "[1,]", "01", "nul", " 1"}},
    {"{\"type\":\"string\"}",
     {"\"\"", "\"ab\"", "\"\xc3\xa9\"", "\"\\n\\u00e9\\ud83d\\ude00\"", "\"\\/\""},
     {"ab", "\"a", "\"\\x\"", "\"\n\"", "\"\xff\"", "\"\\ud83d\"", "\"\\ude00\"", "\"\xc3\""}},
    {"{\"type\":\"integer\"}",
     {"0", "-1", "12", "999999999999999999"},
     {"-0", "01", "1.0", "1e2", "+1", "1234567890123456789"}},
    {"{\"type\":\"number\"}",
     {"0", "-0.5", "12.25", "1e10", "1.5E-3"},
     {".5", "1.", "00", "1e", "-"}},
    {"{\"type\":\"boolean\"}", {"true", "false"}, {"null", "True"}},
    {"{\"type\":[\"string\",\"null\"]}", {"\"a\"", "null"}, {"1"}},
    {"{\"type\":\"string\",\"nullable\":true}", {"\"a\"", "null"}, {"1"}},
    {"{\"enum\":[\"a\",1,null,{\"b\":[1.5]},\"\\u00e9\\\"\"]}",
     {"\"a\"", "1", "null", "{\"b\":[1.5]}", "\"\xc3\xa9\\\"\""},
     {"\"b\"", "2", "{\"b\":[1]}"}},
    {"{\"const\":\"x\"}", {"\"x\""}, {"\"y\""}},
    {"{\"type\":\"integer\",\"enum\":[1,\"a\",2]}", {"1", "2"}, {"\"a\"", "3"}},
    {"{\"type\":\"integer\",\"minimum\":-12,\"maximum\":105}",
     {"-12", "-1", "0", "9", "99", "100", "105"},
     {"-13", "106", "110", "-20", "-0", "200"}},
    {"{\"type\":\"integer\",\"exclusiveMinimum\":1.5,\"exclusiveMaximum\":5}",
     {"2", "4"},
     {"1", "5", "0"}},
    {"{\"type\":\"integer\",\"minimum\":100}", {"100", "101", "999", "1000"}, {"99", "-100", "0"}},
    {"{\"type\":\"integer\",\"minimum\":0,\"maximum\":1000000000000000000}",
     {"0", "999999999999999999"},
     {"-1", "1000000000000000000"}},
    {"{\"type\":\"integer\",\"minimum\":-9223372036854775808,\"maximum\":1.8446744073709552e19}",
     {"0", "-999999999999999999", "999999999999999999"},
     {"1000000000000000000", "-1000000000000000000"}},
    {"{\"type\":\"integer\",\"minimum\":999999999999999999}",
     {"999999999999999999"},
     {"999999999999999998", "1000000000000000000"}},
    {"{\"type\":\"number\",\"exclusiveMinimum\":-1e300,\"exclusiveMaximum\":1000000000000000000}",
     {"0.5", "-999999999999999998.25", "999999999999999998.5"},
     {"1000000000000000000", "1e5"}},
    {"{\"type\":\"integer\",\"maximum\":-5}", {"-5", "-10"}, {"-4", "0", "5"}},
    {"{\"type\":\"number\",\"minimum\":0,\"maximum\":1}",
     {"0", "0.5", "1", "1.00", "0.0"},
     {"1.01", "-0.5", "2", "1e0"}},
    {"{\"type\":\"number\",\"exclusiveMinimum\":0}",
     {"0.5", "1", "0.01", "12.5"},
     {"0", "0.0", "-1"}},
    {"{\"type\":\"number\",\"minimum\":-2,\"exclusiveMaximum\":3}",
     {"-2", "-1.5", "2.99", "0", "-0.1"},
     {"3", "-2.1", "3.0"}},
    {"{\"type\":\"string\",\"maxLength\":2147483647}", {"\"\"", "\"abc\""}, {"\""}},
    {"{\"type\":\"array\",\"items\":{\"type\":\"null\"},\"minItems\":1,\"maxItems\":1e30}",
     {"[null]", "[null,null,null]"},
     {"[]"}},
    {"{\"type\":\"string\",\"minLength\":1,\"maxLength\":3}",
     {"\"a\"", "\"abc\"", "\"\xc3\xa9\xc3\xa9\xc3\xa9\"", "\"\\n\\n\\n\"", "\"\\ud83d\\ude00ab\""},
     {"\"\"", "\"abcd\"", "\"\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\""}},
    {"{\"type\":\"string\",\"pattern\":\"^[a-c]{2,3}$\"}",
     {"\"ab\"", "\"abc\""},
     {"\"a\"", "\"abca\"", "\"ad\""}},
    {"{\"type\":\"string\",\"pattern\":\"b+\"}", {"\"abc\"", "\"b\""}, {"\"\"", "\"ac\""}},
    {"{\"type\":\"string\",\"pattern\":\"^(foo|ba[rz])-\\\\d$\"}",
     {"\"foo-1\"", "\"baz-9\""},
     {"\"bat-1\"", "\"foo-\""}},
    {"{\"type\":\"string\",\"pattern\":\"^a|b$\"}", {"\"ax\"", "\"xb\""}, {"\"xa\"", "\"bx\""}},
    {"{\"type\":\"string\",\"pattern\":\"^[^a\\\\n]$\"}",
     {"\"b\"", "\"\xc3\xa9\"", "\"\\\"\""},
     {"\"a\"", "\"\\n\""}},
    {"{\"type\":\"string\",\"pattern\":\"^[a-z]*$\",\"maxLength\":2}",
     {"\"\"", "\"ab\""},
     {"\"abc\"", "\"A\""}},
    {"{\"type\":\"string\",\"pattern\":\"^(ab)+$\",\"minLength\":3,\"maxLength\":5}",
     {"\"abab\""},
     {"\"ab\"", "\"ababa\"", "\"ababab\""}},
    {"{\"type\":\"string\",\"format\":\"date\"}",
     {"\"2024-02-29\"", "\"2023-12-31\""},
     {"\"2023-02-29\"", "\"2023-13-01\"", "\"2023-4-1\""}},
    {"{\"type\":\"string\",\"format\":\"uuid\"}",
     {"\"01234567-89ab-cdef-0123-456789abcdef\""},
     {"\"0123456789abcdef0123456789abcdef\""}},
    {"{\"type\":\"string\",\"format\":\"something\"}", {"\"x\""}, {"1"}},
    {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{\"type\":"
     "\"boolean\"}},"
     "\"required\":[\"a\"],\"additionalProperties\":false}",
     {"{\"a\":1}", "{\"a\": 1, \"b\": true}", "{\"a\":1,\"b\":false}"},
     {"{}", "{\"b\":true}", "{\"a\":1,\"c\":1}", "{\"a\":1,}", "{\"a\":1,\"a\":1}", "{ \"a\":1}",
      "{\"a\":  1}"}},
    {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"ab\":{\"type\":\"null\"},"
     "\"b\":{\"type\":\"integer\"}},\"additionalProperties\":false}",
     {"{}", "{\"ab\":null}", "{\"a\":1,\"b\":2}", "{\"b\":2}", "{\"ab\":null, \"b\":2}"},
     {"{\"b\":2,\"a\":1}", "{,\"b\":2}", "{\"abc\":1}"}},
    {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},"
     "\"additionalProperties\":{\"type\":\"string\"}}",
     {"{\"a\":1}", "{\"b\":\"x\"}", "{\"a\":1,\"aa\":\"x\", \"\":\"y\"}", "{\"\\n\":\"x\"}"},
     {"{\"a\":\"x\"}", "{\"b\":1}", "{\"b\":\"x\",\"a\":1}", "{\"\\u0061\":\"x\"}"}},
    {"{\"type\":\"object\",\"required\":[\"z\"]}",
     {"{\"z\":1}", "{\"z\":{},\"y\":2}"},
     {"{}", "{\"y\":1}"}},
    {"{\"type\":\"object\",\"properties\":{\"a\":false}}", {"{}", "{\"b\":1}"}, {"{\"a\":1}"}},
    {"{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"minItems\":2,\"maxItems\":3}",
     {"[1,2]", "[1, 2,3]"},
     {"[]", "[1]", "[1,2,3,4]", "[1,2,]"}},
    {"{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"maxItems\":1}",
     {"[]", "[1]"},
     {"[1,2]"}},
    {"{\"type\":\"array\",\"maxItems\":0}", {"[]"}, {"[1]"}},
    {"{\"type\":\"array\",\"prefixItems\":[{\"type\":\"integer\"},{\"type\":\"string\"}],\"items\":"
     "false}",
     {"[]", "[1]", "[1,\"a\"]"},
     {"[\"a\"]", "[1,\"a\",1]"}},
    {"{\"type\":\"array\",\"prefixItems\":[{\"type\":\"integer\"}],\"items\":{\"type\":\"null\"},"
     "\"minItems\":2,"
     "\"maxItems\":3}",
     {"[1,null]", "[1,null,null]"},
     {"[1]", "[]", "[1,null,null,null]", "[1,1]"}},
    {"{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"string\"},{\"type\":\"object\",\"properties\":"
     "{\"k\":"
     "{\"const\":\"a\"},\"v\":{\"type\":\"integer\"}},\"required\":[\"k\",\"v\"],"
     "\"additionalProperties\":false},"
     "{\"type\":\"object\",\"properties\":{\"k\":{\"const\":\"b\"}},\"required\":[\"k\"],"
     "\"additionalProperties\":false}]}",
     {"1", "\"a\"", "{\"k\":\"a\",\"v\":1}", "{\"k\":\"b\"}"},
     {"{\"k\":\"a\"}", "{\"k\":\"b\",\"v\":1}", "null"}},
    {"{\"oneOf\":[{\"type\":\"integer\"},{\"type\":\"null\"}]}", {"1", "null"}, {"\"a\""}},
    {"{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"integer\"},\"next\":{\"anyOf\":[{\"$"
     "ref\":\"#\"},"
     "{\"type\":\"null\"}]}},\"required\":[\"v\",\"next\"],\"additionalProperties\":false}",
     {"{\"v\":1,\"next\":null}", "{\"v\":1,\"next\":{\"v\":2,\"next\":null}}"},
     {"{\"v\":1}", "{\"v\":1,\"next\":{}}"}},
    {"{\"$defs\":{\"n\":{\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/n\"}}},\"$ref\":\"#/"
     "$defs/n\"}",
     {"[]", "[[],[[]]]"},
     {"[1]"}},
    {"{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},\"required\":["
     "\"a\"]},"
     "{\"properties\":{\"b\":{\"type\":\"null\"}},\"required\":[\"b\"]}],\"additionalProperties\":"
     "true}",
     {"{\"a\":1,\"b\":null}", "{\"a\":1,\"b\":null,\"c\":0}"},
     {"{\"a\":1}", "{\"b\":null}"}},
    {"{\"allOf\":[{\"$ref\":\"#/$defs/"
     "p\"}],\"description\":\"x\",\"$defs\":{\"p\":{\"type\":\"integer\","
     "\"minimum\":3}},\"maximum\":5}",
     {"3", "5"},
     {"2", "6"}},
    {"{\"$ref\":\"#/definitions/a~1b\",\"definitions\":{\"a/b\":{\"type\":\"null\"}}}",
     {"null"},
     {"1"}},
    {"{\"type\":\"object\",\"properties\":{\"\\\"q\\\\\":{\"type\":\"null\"}},\"required\":["
     "\"\\\"q\\\\\"],"
     "\"additionalProperties\":false}",
     {"{\"\\\"q\\\\\":null}"},
     {"{\"q\":null}"}},
};

static void test_rows(void **state)
{
    struct dmk_trie *trie = open_words();
    struct dmk_walker *walker;

    (void)state;
    assert_int_equal(dmk_walker_new(trie, 8, &walker), 0);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct dmk_error error = {0};
        struct dmk_automaton *a = compile(rows[i].schema, &error);

        if (!a) {
            fail_msg("%s: %s", rows[i].schema, error.text);
        }
        for (size_t k = 0; k < 8 && rows[i].good[k]; k++) {
            if (fit(walker, a, rows[i].good[k]) != FITS) {
                fail_msg("%s does not accept %s", rows[i].schema, rows[i].good[k]);
            }
        }
        for (size_t k = 0; k < 10 && rows[i].bad[k]; k++) {
            if (fit(walker, a, rows[i].bad[k]) == FITS) {
                fail_msg("%s accepts %s", rows[i].schema, rows[i].bad[k]);
            }
        }
        dmk_automaton_free(&a);
    }
    dmk_walker_free(&walker);
    dmk_trie_free(&trie);
}

static void test_refused(void **state)
{
    static const struct {
        const char *schema, *says;
    } list[] = {
        {"{\"not\":{}}", "schema: the keyword \"not\""},
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"array\",\"items\":{\"if\":{}}}}}",
         "schema.properties.a.items: the keyword \"if\""},
        {"{\"type\":\"object\",\"patternProperties\":{}}", "patternProperties"},
        {"{\"type\":\"array\",\"uniqueItems\":true}", "uniqueItems"},
        {"{\"type\":\"array\",\"contains\":{}}", "contains"},
        {"{\"type\":\"number\",\"multipleOf\":0.1}", "multipleOf"},
        {"{\"type\":\"number\",\"minimum\":0.5}", "minimum"},
        {"{\"type\":\"text\"}", "type"},
        {"{\"type\":\"string\",\"pattern\":\"(?=a)\"}", "look-around"},
        {"{\"type\":\"string\",\"pattern\":\"(a\"}", "not closed"},
        {"{\"type\":\"string\",\"pattern\":\"^a{2}$\",\"minLength\":3}", "can not be met"},
        {"{\"type\":\"string\",\"pattern\":\"a**\"}", "quantifier"},
        {"{\"type\":\"string\",\"pattern\":\"(a)\\\\1\"}", "back references"},
        {"{\"type\":\"string\",\"pattern\":\"[z-a]\"}", "out of order"},
        {"{\"type\":\"string\",\"pattern\":\"a{2000}\"}", "1000"},
        {"{\"type\":\"string\",\"pattern\":\"((a{900}){900}){900}\"}", "repeats too much"},
        {"{\"$ref\":\"#\"}", "refers to itself"},
        {"{\"$ref\":\"#/$defs/x\"}", "leads nowhere"},
        {"{\"$ref\":\"other.json\"}", "leads nowhere"},
        {"{\"anyOf\":[]}", "anyOf"},
        {"{\"oneOf\":[{\"type\":\"integer\"},{\"type\":\"number\"}]}", "oneOf"},
        {"{\"enum\":[]}", "enum"},
        {"{\"type\":\"string\",\"enum\":[1]}", "enum"},
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#\"}},\"required\":[\"a\"]}",
         "can not be met"},
        {"{\"type\":\"object\",\"required\":[\"a\"],\"additionalProperties\":false}", "required"},
        {"{\"type\":\"integer\",\"minimum\":5,\"maximum\":4}", "between"},
        {"{\"type\":\"integer\",\"minimum\":1000000000000000000}", "18 digits"},
        {"{\"type\":\"number\",\"exclusiveMaximum\":-1e19}", "18 digits"},
        {"{\"type\":\"string\",\"minLength\":5,\"maxLength\":4}", "minLength"},
        {"{\"type\":\"string\",\"minLength\":2147483647}", "minLength"},
        {"{\"type\":\"string\",\"maxLength\":1000001}", "1000000"},
        {"{\"allOf\":[{\"type\":\"integer\"},{\"type\":\"string\"}]}", "type"},
        {"{\"allOf\":[{\"pattern\":\"a\"},{\"pattern\":\"b\"}]}", "pattern"},
        {"{\"allOf\":[{\"$ref\":\"#\"}],\"type\":\"object\"}", "without end"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(list) / sizeof(list[0]); i++) {
        struct dmk_error error = {0};

        if (compile(list[i].schema, &error)) {
            fail_msg("accepted: %s", list[i].schema);
        }
        if (!strstr(error.text, list[i].says)) {
            fail_msg("%s: %s", list[i].schema, error.text);
        }
    }
}

/* Every token that the mask allows can be taken, and no other, wherever a random walk comes; and a walk made
 * again from the ids stands at the same place. */
static void test_masks(void **state)
{
    const uint64_t seed = dmk_random_u64();
    struct dmk_trie *trie = open_words();
    struct dmk_walker *walker, *other;
    uint64_t draws = 0;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    assert_int_equal(dmk_walker_new(trie, 8, &walker), 0);
    assert_int_equal(dmk_walker_new(trie, 1, &other), 0);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct dmk_error error = {0};
        struct dmk_automaton *a = compile(rows[i].schema, &error);
        uint32_t ids[48], n_ids = 0;
        struct dmk_walk walk, again;

        dmk_walk_begin(&walk, a);
        while (n_ids < 48) {
            uint64_t mask[N_TEST_IDS / 64], same[N_TEST_IDS / 64];
            const enum dmk_walk_end end = dmk_walk_mask(walker, &walk, mask);
            uint32_t allowed[N_TEST_IDS], n = 0;

            dmk_walk_begin(&again, a);
            for (uint32_t k = 0; k < n_ids; k++) {
                assert_int_equal(dmk_walk_advance(other, &again, ids[k]), 0);
            }
            assert_int_equal(dmk_walk_mask(other, &again, same), end);
            assert_memory_equal(mask, same, sizeof(mask));
            for (uint32_t id = 0; id < N_TEST_IDS; id++) {
                struct dmk_walk next = walk;
                const bool bit = mask[id / 64] >> (id % 64) & 1;

                if (bit != (dmk_walk_advance(walker, &next, id) == 0)) {
                    fail_msg("%s: id %u behind %u tokens", rows[i].schema, id, n_ids);
                }
                if (bit) {
                    allowed[n++] = id;
                }
            }
            if (n == 0) {
                assert_int_equal(end, DMK_WALK_ENDED);
                break;
            }
            ids[n_ids] = allowed[dmk_rng_u64(seed, i, draws++) % n];
            assert_int_equal(dmk_walk_advance(walker, &walk, ids[n_ids++]), 0);
        }
        dmk_automaton_free(&a);
    }
    dmk_walker_free(&walker);
    dmk_walker_free(&other);
    dmk_trie_free(&trie);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_masks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
