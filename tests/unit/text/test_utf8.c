/* UTF-8: validity of every short sequence, repair, and text in pieces. */
#include "tests/unit/text/text_test.h"
#include "common/text/utf8.h"

/* By the definition: the code point, its shortest form, no surrogates. 0: not one character of len bytes. */
static bool is_character(const uint8_t *p, size_t len)
{
    uint32_t code;
    size_t want;

    if (len == 1) {
        return p[0] < 0x80;
    }
    if (len != (p[0] >= 0xf8   ? 0u
                : p[0] >= 0xf0 ? 4u
                : p[0] >= 0xe0 ? 3u
                : p[0] >= 0xc0 ? 2u
                               : 0u)) {
        return false;
    }
    code = p[0] & (0xffu >> (len + 1));
    for (size_t i = 1; i < len; i++) {
        if ((p[i] & 0xc0) != 0x80) {
            return false;
        }
        code = code << 6 | (p[i] & 0x3f);
    }
    want = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    return want == len && code < 0x110000 && (code < 0xd800 || code > 0xdfff);
}

static void test_validity(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 1u << 24; bits++) {
        const uint8_t p[3] = {(uint8_t)(bits >> 16), (uint8_t)(bits >> 8), (uint8_t)bits};

        /* Three bytes in full; the second byte decides most, so few thirds suffice for the others. */
        if (p[0] >= 0xe0 && p[0] < 0xf0) {
            assert_int_equal(dmk_utf8_valid_prefix(p, 3) == 3, is_character(p, 3));
        } else if (p[2] == 0) {
            assert_int_equal(dmk_utf8_valid_prefix(p, 1) == 1, is_character(p, 1));
            assert_int_equal(dmk_utf8_valid_prefix(p, 2) == 2,
                             is_character(p, 2) || (is_character(p, 1) && is_character(p + 1, 1)));
        }
    }
    for (uint32_t lead = 0xf0; lead < 0x100; lead++) {
        for (uint32_t second = 0; second < 0x100; second++) {
            for (uint32_t last = 0x7f; last < 0xc1; last++) {
                const uint8_t p[4] = {(uint8_t)lead, (uint8_t)second, (uint8_t)last, 0x80};
                const uint8_t q[4] = {(uint8_t)lead, (uint8_t)second, 0xbf, (uint8_t)last};

                assert_int_equal(dmk_utf8_valid_prefix(p, 4) == 4, is_character(p, 4));
                assert_int_equal(dmk_utf8_valid_prefix(q, 4) == 4, is_character(q, 4));
            }
        }
    }
}

static void test_decode(void **state)
{
    static const struct {
        const char *text;
        uint32_t code;
    } cases[] = {
        {"a", 'a'},        {"\x7f", 0x7f},     {"\xc2\x80", 0x80},      {"\u07ff", 0x7ff},
        {"\u0800", 0x800}, {"\uffff", 0xffff}, {"\U00010000", 0x10000}, {"\U0010ffff", 0x10ffff}};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const size_t len = strlen(cases[i].text);
        uint32_t code;

        assert_int_equal(dmk_utf8_decode((const uint8_t *)cases[i].text, len, &code), len);
        assert_int_equal(code, cases[i].code);
    }
}

static void test_prefix(void **state)
{
    const char text[] = "0123456789abcdef\xc3\xa9\xe4\xbd\xa0xyz";
    const size_t len = sizeof(text) - 1;

    (void)state;
    for (size_t n = 0; n <= len; n++) {
        const size_t want = n == 17 ? 16 : n == 19 || n == 20 ? 18 : n;

        assert_int_equal(dmk_utf8_valid_prefix((const uint8_t *)text, n), want);
    }
}

static void test_lossy(void **state)
{
    static const struct {
        const char *bad, *good;
    } cases[] = {
        {"plain", "plain"},
        {"\xff\xfe", "\ufffd\ufffd"},
        {"\xc3(", "\ufffd("},
        {"\xe4\xbd", "\ufffd"}, /* a cut character is one part */
        {"\xe4\xbd\xe4\xbd\xa0", "\ufffd你"},
        {"\xf0\x9f\x92", "\ufffd"},
        {"\xf0\x80\x80\x80", "\ufffd\ufffd\ufffd\ufffd"}, /* F0 80 starts nothing */
        {"\xed\xa0\x80", "\ufffd\ufffd\ufffd"},           /* a surrogate */
        {"\xf4\x90\x80\x80", "\ufffd\ufffd\ufffd\ufffd"},
        {"\x80"
         "abc\x80",
         "\ufffd"
         "abc\ufffd"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct dmk_bytes bytes = {(const uint8_t *)cases[i].bad, strlen(cases[i].bad)};
        struct dmk_buf out;

        dmk_buf_init(&out, 0);
        dmk_utf8_append_lossy(&out, bytes);
        assert_string_equal(out.data, cases[i].good);
        dmk_buf_fini(&out);
    }
}

/* However bytes are cut into pushes, what comes out is the repair of the whole, never late by more than an
 * incomplete character. */
static void test_stream(void **state)
{
    static const char *const parts[] = {"a",
                                        "word ",
                                        "\xc3\xa9",
                                        "\xe4\xbd\xa0",
                                        "\xf0\x9f\x92\x96",
                                        "\xff",
                                        "\x80",
                                        "\xe4\xbd",
                                        "\xf0\x9f",
                                        "\xed\xa0\x80",
                                        "\xc3",
                                        "\xf4",
                                        "\xf0\x9f\x92\x96\x96"};
    struct random r = {99, 0};

    (void)state;
    print_message("seed %llu\n", (unsigned long long)r.seed);
    for (int turn = 0; turn < 5000; turn++) {
        struct dmk_buf in, whole, pieces;
        struct dmk_utf8_stream s = {0};

        dmk_buf_init(&in, 0);
        dmk_buf_init(&whole, 0);
        dmk_buf_init(&pieces, 0);
        for (uint32_t n = 1 + random_below(&r, 8); n > 0; n--) {
            dmk_buf_puts(&in, parts[random_below(&r, sizeof(parts) / sizeof(parts[0]))]);
        }
        dmk_utf8_append_lossy(&whole, dmk_buf_bytes(&in));
        for (size_t pos = 0; pos < in.len;) {
            const size_t left = in.len - pos, n = random_below(&r, 5) % (left + 1);
            const struct dmk_bytes push = {(const uint8_t *)in.data + pos, n};

            dmk_utf8_stream_push(&s, push, &pieces);
            assert_true(s.n_tail <= 3);
            assert_int_equal(dmk_utf8_valid_prefix((const uint8_t *)pieces.data, pieces.len),
                             pieces.len);
            pos += n;
        }
        dmk_utf8_stream_end(&s, &pieces);
        assert_int_equal(s.n_tail, 0);
        assert_int_equal(pieces.len, whole.len);
        assert_memory_equal(pieces.data, whole.data, whole.len);
        dmk_buf_fini(&in);
        dmk_buf_fini(&whole);
        dmk_buf_fini(&pieces);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_validity), cmocka_unit_test(test_decode),
        cmocka_unit_test(test_prefix),   cmocka_unit_test(test_lossy),
        cmocka_unit_test(test_stream),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
