/* The short way of the parser beside jansson's: what it takes has the same value, plain texts take it, and what
 * jansson refuses it never takes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/buf.h"
#include "common/base/rng.h"
#include "common/json/fast.h"

#define DEPTH 6

static const size_t flags = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY;

/* Whether both agree; *ret_taken: the short way was taken. */
static bool agrees(struct dmk_str text, bool *ret_taken)
{
    json_t *fast = dmk_json__parse_fast(text, DEPTH);
    json_t *slow = json_loadb(text.data, text.len, flags, NULL);
    const bool same =
        !fast || (slow && json_typeof(fast) == json_typeof(slow) && json_equal(fast, slow));

    *ret_taken = fast != NULL;
    json_decref(fast);
    json_decref(slow);
    return same;
}

static const struct {
    const char *text;
    bool taken;
} texts[] = {
    {"{}", true},
    {" [ ] ", true},
    {"\"\"", true},
    {"0", true},
    {"-0", true},
    {"12345678901234567890", false}, /* too wide for json_int_t */
    {"123456789012345678", true},
    {"1234567890123456789", true},
    {"-1.5e-3", true},
    {"[1,2.5,-3,4E2,true,false,null]", true},
    {"{\"a\":{\"b\":[{\"c\":\"d\"}]}}", true},
    {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\u4e2d\\ud83d\\udc4d\"", true},
    {"\"plain text of more than eight bytes\\nwith a break, \xe4\xb8\xad\xe6\x96\x87\"", true},
    {"[[[[[[1]]]]]]", true},
    {"[[[[[[[1]]]]]]]", false},
    {"", false},
    {" ", false},
    {"-", false},
    {"01", false},
    {"+1", false},
    {".5", false},
    {"1.", false},
    {"[1,]", false},
    {"[,1]", false},
    {"[1 2]", false},
    {"{\"a\" 1}", false},
    {"{\"a\":1,}", false},
    {"{\"a\":1,\"a\":2}", false},
    {"{a:1}", false},
    {"[1]]", false},
    {"[1", false},
    {"{\"a\":[}", false},
    {"tru", false},
    {"nul", false},
    {"\"open", false},
    {"\"\\", false},
    {"\"\\x\"", false},
    {"\"\\u12\"", false},
    {"\"\\u12g4\"", false},
    {"\"\\u0000\"", false},
    {"\"\\ud83d\"", false},
    {"\"\\ud83d\\u0041\"", false},
    {"\"\\udc4d\"", false},
    {"\"a line\nbreak\"", false},
    {"\"12345678\x1f\"", false},
    {"\"1234567\xff\"", false},
    {"\"\xed\xa0\x80\"", false},
    {"\"\xc0\x80\"", false},
};

static void test_texts(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        bool taken;

        if (!agrees(dmk_str_from(texts[i].text), &taken) || taken != texts[i].taken) {
            print_error("%s: %s\n", texts[i].text, taken ? "taken" : "not taken");
            fail();
        }
    }
}

struct random {
    uint64_t seed, counter;
};

static uint32_t below(struct random *random, uint32_t n)
{
    return (uint32_t)(dmk_rng_u64(random->seed, 0, random->counter++) % n);
}

static void put_string(struct random *random, struct dmk_buf *out)
{
    static const char *const parts[] = {"a",
                                        "word ",
                                        "\\n",
                                        "\\\"",
                                        "\\\\",
                                        "\\u00e9",
                                        "\\ud83d\\udc4d",
                                        "\xc3\xa9",
                                        "\xe4\xb8\xad",
                                        "\xf0\x9f\x91\x8d",
                                        "0123456789abcdef",
                                        "/"};

    dmk_buf_putc(out, '"');
    for (uint32_t n = below(random, 12); n > 0; n--) {
        dmk_buf_puts(out, parts[below(random, sizeof(parts) / sizeof(parts[0]))]);
    }
    dmk_buf_putc(out, '"');
}

/* Values of a flat list, every few with a list or an object of their own; always whole. */
static void put_text(struct random *random, struct dmk_buf *out)
{
    static const char *const scalars[] = {"0",    "-7",    "123456", "0.25", "1e3",
                                          "true", "false", "null",   " 5 "};
    char open[DEPTH];
    unsigned depth = 0, key = 0;

    open[depth++] = below(random, 2) ? '[' : '{';
    dmk_buf_putc(out, open[0]);
    for (uint32_t n = 1 + below(random, 12); depth > 0; n -= n > 0) {
        const bool first = out->data[out->len - 1] == '[' || out->data[out->len - 1] == '{';

        if (n == 0 || below(random, 5) == 0) {
            dmk_buf_putc(out, open[--depth] == '[' ? ']' : '}');
            continue;
        }
        dmk_buf_puts(out, first ? "" : ",");
        if (open[depth - 1] == '{') {
            dmk_buf_printf(out, "\"key%u\": ", key++);
        }
        switch (below(random, depth < DEPTH ? 4 : 2)) {
        case 0:
            dmk_buf_puts(out, scalars[below(random, sizeof(scalars) / sizeof(scalars[0]))]);
            break;
        case 1:
            put_string(random, out);
            break;
        default:
            open[depth++] = below(random, 2) ? '[' : '{';
            dmk_buf_putc(out, open[depth - 1]);
        }
    }
}

static void test_random(void **state)
{
    struct random random = {61, 0};
    size_t n_taken = 0, n_broken = 0;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)random.seed);
    for (int turn = 0; turn < 30000; turn++) {
        struct dmk_buf text;
        bool taken;

        dmk_buf_init(&text, 0);
        put_text(&random, &text);
        assert_true(agrees(dmk_buf_str(&text), &taken));
        assert_true(taken);
        for (int i = 0; i < 4; i++) { /* with one byte changed, and cut */
            const uint32_t at = below(&random, (uint32_t)text.len);
            const char before = text.data[at];
            const size_t len = i == 3 ? at : text.len;

            text.data[at] =
                i == 0 ? (char)below(&random, 256) : "\"\\,:[]{}u0 \n"[below(&random, 12)];
            if (!agrees((struct dmk_str){text.data, len}, &taken)) {
                print_error("%.*s\n", (int)len, text.data);
                fail();
            }
            n_taken += taken;
            n_broken += !taken;
            text.data[at] = before;
        }
        dmk_buf_fini(&text);
    }
    assert_true(n_taken > 1000);
    assert_true(n_broken > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_random),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
