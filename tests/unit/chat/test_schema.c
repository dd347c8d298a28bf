/* Schemas as type text, and JSON as text, byte for byte. The rules that the library shares are compared
 * with it on thousands of schemas by tests/python/test_harmony.py; here are the named ones and the lines
 * where we differ. */
#include "tests/unit/chat/chat_test.h"
#include "common/chat/schema_text.h"
#include "common/json/json.h"

static json_t *json_of(const char *text)
{
    struct dmk_error error;
    json_t *value = NULL;

    if (dmk_json_parse(dmk_str_from(text), "the test's JSON", 1000, &value, &error) < 0) {
        fail_msg("%s", error.text);
    }
    return value;
}

static void expect_type(const char *schema_text, bool library_text, const char *want)
{
    json_t *schema = json_of(schema_text);
    struct dmk_buf out;

    dmk_buf_init(&out, 0);
    assert_int_equal(dmk_schema_text(schema, library_text, &out, NULL), 0);
    assert_string_equal(text_of(&out), want);
    dmk_buf_fini(&out);
    json_decref(schema);
}

static void test_odd_types(void **state)
{
    (void)state;
    expect_type(
        "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":[\"string\",\"null\"]},\"b\":{"
        "\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"null\"}],\"description\":\"maybe "
        "int\"},\"c\":{\"$ref\":\"#/$defs/C\"},\"d\":{\"type\":\"integer\",\"enum\":[1,2,3],"
        "\"default\":2},\"e\":{\"enum\":[\"x\",\"y\"]},\"f\":{\"type\":\"null\"},\"g\":{"
        "\"const\":\"k\"}},\"required\":[\"a\",\"c\"],\"$defs\":{\"C\":{\"type\":\"object\","
        "\"properties\":{\"z\":{\"type\":\"string\"}}}}}",
        false,
        "{\na: string | null,\n// maybe int\nb?: any,\nc: any,\nd?: number, // default: 2\n"
        "e?: any,\nf?: any,\ng?: any,\n}");
}

/* Properties keep the document's order, and an object's description stands twice. */
static void test_order_and_nesting(void **state)
{
    (void)state;
    expect_type(
        "{\"type\":\"object\",\"properties\":{\"zeta\":{\"type\":\"string\"},\"alpha\":{"
        "\"type\":\"string\"},\"mid\":{\"type\":\"boolean\",\"default\":false},\"addr\":{"
        "\"type\":\"object\",\"description\":\"Postal address\",\"properties\":{\"street\":{"
        "\"type\":\"string\"},\"zip\":{\"type\":\"string\",\"default\":\"00000\"}},"
        "\"required\":[\"street\"]}},\"required\":[\"addr\"]}",
        false,
        "{\nzeta?: string,\nalpha?: string,\nmid?: boolean, // default: false\n"
        "// Postal address\naddr:     // Postal address\n{\n    street: string,\n"
        "    zip?: string, // default: \"00000\"\n    },\n}");
}

static void test_variants(void **state)
{
    (void)state;
    expect_type("{\"type\":\"object\",\"properties\":{\"v\":{\"oneOf\":[{\"type\":\"string\","
                "\"default\":\"d\"},{\"type\":\"number\",\"description\":\"numbers "
                "too\",\"nullable\":true}],\"description\":\"a oneof\",\"default\":20}}}",
                false,
                "{\n// a oneof\n// default: 20\nv?:\n | string // default: \"d\"\n"
                " | number | null // numbers too\n,\n}");
    expect_type("{\"oneOf\":[{\"type\":\"string\",\"enum\":[\"a\"],\"default\":\"a\"},{\"type\":"
                "\"array\",\"items\":{\"type\":\"string\",\"enum\":[\"x\",\"y\"]}}]}",
                false, "\n | \"a\" // default: \"a\"\n | \"x\" | \"y\"[]");
}

/* Every line of a description is a comment; the library leaves the later ones bare. */
static void test_lines_of_descriptions(void **state)
{
    static const char schema[] =
        "{\"type\":\"object\",\"properties\":{\"o\":{\"type\":\"object\",\"properties\":{\"p\":{"
        "\"type\":\"string\",\"description\":\"one\\r\\ntwo\\n\\nthree\\n\"}}}}}";

    (void)state;
    expect_type(
        schema, false,
        "{\no?: {\n    // one\n    // two\n    // \n    // three\n    p?: string,\n    },\n}");
    expect_type(schema, true, "{\no?: {\n    // one\r\ntwo\n\nthree\n\n    p?: string,\n    },\n}");
}

static void test_numbers_and_escapes(void **state)
{
    static const char text[] = "[0,-1,9007199254740993,1.0,-0.0,0.1,1e15,1e16,123456789012345680.0,"
                               "1e21,1.5e300,1e-4,0.00001,1e-6,"
                               "1.25e-7,5e-324,\"\\u0001\\b\\f\\n\\r\\t\\\"\\\\/"
                               "\\u007f\\u00e9\\ud83d\\udc96\",{\"b\":null,"
                               "\"a\":[true,false,{}]}]";
    json_t *value = json_of(text);
    struct dmk_buf out;

    (void)state;
    dmk_buf_init(&out, 0);
    assert_int_equal(dmk_json_text(value, &out, NULL), 0);
    assert_string_equal(
        text_of(&out),
        "[0,-1,9007199254740993,1.0,-0.0,0.1,1000000000000000.0,1e16,"
        "1.2345678901234568e17,1e21,1.5e300,0.0001,0.00001,1e-6,1.25e-7,5e-324,"
        "\"\\u0001\\b\\f\\n\\r\\t\\\"\\\\/\x7fé💖\",{\"b\":null,\"a\":[true,false,{}]}]");
    dmk_buf_fini(&out);
    json_decref(value);
}

/* Depth is refused with a sentence, not followed. */
static void test_depth(void **state)
{
    static const char open[] = "{\"type\":\"array\",\"items\":";
    struct dmk_buf text, out;
    struct dmk_error error;

    (void)state;
    for (int depth = 127; depth <= 129; depth++) {
        dmk_buf_init(&text, 0);
        dmk_buf_init(&out, 0);
        for (int i = 0; i < depth; i++) {
            dmk_buf_puts(&text, open);
        }
        dmk_buf_puts(&text, "{}");
        for (int i = 0; i < depth; i++) {
            dmk_buf_putc(&text, '}');
        }
        json_t *schema = json_of(text_of(&text));
        const int r = dmk_schema_text(schema, false, &out, &error);

        assert_int_equal(r, depth <= DMK_SCHEMA_MAX_DEPTH ? 0 : -DMK_EINVAL);
        if (r < 0) {
            assert_non_null(strstr(error.text, "128"));
        }
        json_decref(schema);
        dmk_buf_fini(&text);
        dmk_buf_fini(&out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_odd_types),
        cmocka_unit_test(test_order_and_nesting),
        cmocka_unit_test(test_variants),
        cmocka_unit_test(test_lines_of_descriptions),
        cmocka_unit_test(test_numbers_and_escapes),
        cmocka_unit_test(test_depth),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
