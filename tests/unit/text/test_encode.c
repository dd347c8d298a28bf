/* Known texts and their ids, specials, repair of invalid text, decoding. */
#include "tests/unit/text/text_test.h"
#include <stdlib.h>

struct vector {
    const char *text;
    size_t len; /* 0: up to NUL */
    const uint32_t *ids;
    size_t n_ids;
};

#define IDS(...) (const uint32_t[]){__VA_ARGS__}, sizeof((const uint32_t[]){__VA_ARGS__}) / 4
#define V(text, ...)                                                                               \
    {                                                                                              \
        text, 0, IDS(__VA_ARGS__)                                                                  \
    }

static const struct vector vectors[] = {
    V("hello world", 24912, 2375),
    V(" hello  world", 40617, 220, 2375),
    V("Hello, world! How's it going?", 13225, 11, 2375, 0, 3253, 885, 480, 2966, 30),
    V("I'LL don't WE'VE", 40, 6, 7454, 4128, 26919, 6, 19511),
    V("HTTPServer fooBarBAZ", 17893, 6444, 30551, 4622, 7431, 57),
    V("123456789 1 12 1234", 7633, 19354, 29338, 220, 16, 220, 899, 220, 7633, 19),
    V("    return x;\n", 271, 622, 1215, 307),
    V("a\n\n\nb", 64, 2499, 65),
    V("a \n b", 64, 793, 287),
    V("a  \n\n  b", 64, 11691, 220, 287),
    V("\t\tint x = 0;\r\n", 197, 4084, 1215, 314, 220, 15, 610),
    V("end   ", 419, 271),
    V("   ", 271),
    V("\n\n", 279),
    V("\r\n\r\n", 1414),
    V(" \u00a0x", 220, 5310, 87),
    V("https://example.com/a/b?c=d&e=1", 4172, 1684, 18582, 1136, 23839, 7611, 30, 66, 56413, 63734,
      28, 16),
    V("//comment\n///\n", 393, 12606, 198, 73672),
    V("a/\n/b", 64, 66186, 65),
    V("!\n/\n//x", 4175, 124040, 87),
    V("na\u00efve caf\u00e9", 1503, 9954, 737, 30469),
    V("Привет, мир!", 23881, 131903, 11, 37934, 0),
    V("你好，世界", 177519, 979, 28428),
    V("こんにちは", 95839),
    V("안녕하세요", 14307, 171731),
    V("😊👋🏾", 102630, 28823, 233, 52622, 122),
    V("👨\u200d👩\u200d👧\u200d👦", 28823, 101, 2524, 28823, 102, 2524, 28823, 100, 2524, 28823, 99),
    V("🇺🇸", 55506, 118, 55506, 116),
    V("💖", 31446, 244),
    V("ⅧⅨ ²³", 25371, 100, 25371, 101, 220, 13848, 45681),
    V("1²Ⅷ4", 16, 13848, 25371, 100, 19),
    V("don\u2019t", 22130, 1573),
    V("it'\u017f", 278, 6, 70067),
    V("'s 'S '\u017f", 885, 461, 50, 461, 70067),
    V("a'S b'LL c'Re", 64, 31233, 287, 6, 7454, 274, 146756),
    V("'tis", 1507, 276),
    V("A中B x", 32, 1404, 33, 1215),
    V("e\u0301A", 68, 13430, 32),
    V("\u0301a", 13430, 64),
    V("\u01c5ungla", 131, 227, 988, 1675),
    V("\u2028a", 51008, 64),
    V("  \n  x", 4066, 220, 1215),
    {"\0\1", 2, IDS(188, 189)},
    V("{\"location\": \"Tokyo\"}", 10848, 7693, 1243, 392, 173844, 18583),
    V("<|start|>", 27, 91, 5236, 91, 29),
    V("<|channel|>", 27, 91, 21453, 91, 29),
    V("<|endoftext|>", 27, 91, 419, 1440, 919, 91, 29),
    V(" unhappily", 137500, 903, 1810),
    V("aaaaaa", 45037, 3545),
    V("xxxxxxx", 30950, 49993),
    V("We'VE", 2167, 6, 19511),
    /* Where the splitters of other vocabularies cut otherwise. */
    V("don't", 91418),
    V("DON'T", 134882, 51532),
    V("it's", 64190),
    V("it\u2019s", 278, 802),
    V("I'LL we've", 40, 6, 7454, 24716),
    V("HTTPSession", 129093, 1685),
    V("camelCase", 178067, 6187),
    V("12345678", 7633, 19354, 4388),
    V(" 4", 220, 19),
    V("path//\n/x", 4189, 22704, 14, 87),
};

static void encode(const struct fixture *f, const char *text, size_t len, struct dmk_ids *ids)
{
    dmk_ids_init(ids, 0);
    dmk_encode(f->vocab, f->scratch, (struct dmk_str){text, len}, ids);
    assert_false(ids->failed);
}

static void check_ids(const char *text, const struct dmk_ids *ids, const uint32_t *want, size_t n)
{
    if (ids->len != n || memcmp(ids->data, want, n * sizeof(*want)) != 0) {
        print_error("text '%s' gives", text);
        for (size_t i = 0; i < ids->len; i++) {
            print_error(" %u", ids->data[i]);
        }
        print_error("\n");
        fail();
    }
}

static void test_vectors(void **state)
{
    const struct fixture *f = *state;

    for (size_t i = 0; i < sizeof(vectors) / sizeof(vectors[0]); i++) {
        const struct vector *v = &vectors[i];
        struct dmk_ids ids;

        /* Twice: the second time out of the cache of pieces. */
        for (int turn = 0; turn < 2; turn++) {
            encode(f, v->text, v->len ? v->len : strlen(v->text), &ids);
            check_ids(v->text, &ids, v->ids, v->n_ids);
            dmk_ids_fini(&ids);
        }
    }
}

/* A text of n copies of unit, and its ids as runs. */
struct repeated {
    const char *before, *unit;
    size_t n;
    const char *after;
    struct {
        uint32_t id;
        size_t n;
    } runs[4];
};

static const struct repeated repeats[] = {
    {"", "x", 50, "", {{92984, 6}, {7605, 1}}},   {"", "-", 200, "", {{7535, 2}, {32635, 1}}},
    {"", " ", 200, "", {{72056, 1}, {88017, 1}}}, {"", "0", 20, "", {{1302, 6}, {504, 1}}},
    {"", "a", 10000, "", {{117525, 1250}}},       {"", "^", 10000, "", {{168586, 1250}}},
    {"", "\n", 10000, "", {{64469, 625}}},        {"", " ", 10000, "", {{72056, 78}, {408, 1}}},
    {"", "'s", 10000, "", {{885, 10000}}},        {"", "x", 1000000, "", {{92984, 125000}}},
};

/* Endless words of which only the number of tokens is named: as many as tiktoken's. */
static void test_counts_of_endless_words(void **state)
{
    static const struct {
        const char *unit;
        size_t n, n_ids;
    } words[] = {{"a", 100000, 12500},     {"_", 50000, 782},    {"=", 100000, 1562},
                 {"\u6f22", 20000, 20000}, {"ab", 50000, 25000}, {"0", 100000, 33334}};
    const struct fixture *f = *state;

    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        struct dmk_buf text;
        struct dmk_ids ids;

        dmk_buf_init(&text, 0);
        for (size_t k = 0; k < words[i].n; k++) {
            dmk_buf_puts(&text, words[i].unit);
        }
        encode(f, text.data, text.len, &ids);
        assert_int_equal(ids.len, words[i].n_ids);
        dmk_ids_fini(&ids);
        dmk_buf_fini(&text);
    }
}

static void test_repeats(void **state)
{
    const struct fixture *f = *state;

    for (size_t i = 0; i < sizeof(repeats) / sizeof(repeats[0]); i++) {
        const struct repeated *r = &repeats[i];
        struct dmk_buf text;
        struct dmk_ids ids;
        size_t at = 0;

        dmk_buf_init(&text, 0);
        for (size_t k = 0; k < r->n; k++) {
            dmk_buf_puts(&text, r->unit);
        }
        encode(f, text.data, text.len, &ids);
        for (size_t k = 0; k < 4; k++) {
            for (size_t m = 0; m < r->runs[k].n; m++) {
                assert_true(at < ids.len);
                assert_int_equal(ids.data[at++], r->runs[k].id);
            }
        }
        assert_int_equal(at, ids.len);
        dmk_ids_fini(&ids);
        dmk_buf_fini(&text);
    }
}

static void test_long_word_between(void **state)
{
    const struct fixture *f = *state;
    struct dmk_buf text;
    struct dmk_ids ids;

    dmk_buf_init(&text, 0);
    dmk_buf_putc(&text, ' ');
    for (int i = 0; i < 10000; i++) {
        dmk_buf_putc(&text, 'a');
    }
    dmk_buf_putc(&text, '\n');
    encode(f, text.data, text.len, &ids);
    assert_int_equal(ids.len, 1253);
    assert_int_equal(ids.data[0], 261);
    assert_int_equal(ids.data[1], 117525);
    assert_int_equal(ids.data[1251], 55894);
    assert_int_equal(ids.data[1252], 198);
    dmk_ids_fini(&ids);
    dmk_buf_fini(&text);
}

static const struct vector specials[] = {
    V("<|start|>", 200006),
    V("<|end|><|return|>", 200007, 200002),
    V("a<|start|>b", 64, 200006, 65),
    V("<<|call|>|>", 27, 200012, 91, 29),
    V("<|start|<|start|>", 27, 91, 5236, 91, 200006),
    V("<|START|>", 27, 91, 42317, 91, 29),
    V("<|endofprompt|>", 200018),
    V("<|reserved_200018|>", 200018),
    V("<|reserved_201087|>", 201087),
    V("a  <|end|>  b", 64, 256, 200007, 220, 287),
};

static void test_specials(void **state)
{
    const struct fixture *f = *state;
    for (size_t i = 0; i < sizeof(specials) / sizeof(specials[0]); i++) {
        const struct vector *v = &specials[i];
        struct dmk_ids ids;

        dmk_ids_init(&ids, 0);
        dmk_encode_with_specials(f->vocab, f->scratch, dmk_str_from(v->text), &ids);
        check_ids(v->text, &ids, v->ids, v->n_ids);
        dmk_ids_fini(&ids);
    }
}

/* Every special token's spelling becomes its id, and as ordinary text never one. Spellings that look
 * reserved but belong to a named token, or lie outside, are text in both. */
static void test_all_specials(void **state)
{
    const struct fixture *f = *state;
    static const char *const none[] = {"<|reserved_200002|>",  "<|reserved_201088|>",
                                       "<|reserved_199997|>",  "<|reserved_20000|>",
                                       "<|reserved_2000130|>", "<|start"};
    struct dmk_ids ids;

    for (uint32_t id = DMK_TOKEN_FIRST_SPECIAL; id < DMK_VOCAB_SIZE; id++) {
        const struct dmk_bytes b = dmk_token_bytes(f->vocab, id);
        const struct dmk_str text = {(const char *)b.data, b.len};

        assert_true(b.len >= 5 && b.len <= 21);
        dmk_ids_init(&ids, 0);
        dmk_encode_with_specials(f->vocab, f->scratch, text, &ids);
        assert_int_equal(ids.len, 1);
        assert_int_equal(ids.data[0], id);
        ids.len = 0;
        dmk_encode(f->vocab, f->scratch, text, &ids);
        assert_true(ids.len > 1);
        for (size_t i = 0; i < ids.len; i++) {
            assert_false(dmk_token_is_special(ids.data[i]));
        }
        dmk_ids_fini(&ids);
    }
    for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
        dmk_ids_init(&ids, 0);
        dmk_encode_with_specials(f->vocab, f->scratch, dmk_str_from(none[i]), &ids);
        for (size_t k = 0; k < ids.len; k++) {
            assert_false(dmk_token_is_special(ids.data[k]));
        }
        dmk_ids_fini(&ids);
    }
    assert_int_equal(dmk_token_bytes(f->vocab, DMK_VOCAB_SIZE).len, 0);
    assert_int_equal(dmk_token_bytes(f->vocab, UINT32_MAX).len, 0);
}

/* Invalid text is encoded as its repaired form. */
static void test_invalid_utf8(void **state)
{
    const struct fixture *f = *state;
    static const struct {
        const char *bad, *good;
    } cases[] = {
        {"a\xff"
         "b",
         "a\ufffd"
         "b"},
        {"\xc0\xaf", "\ufffd\ufffd"},
        {"\xed\xa0\x80", "\ufffd\ufffd\ufffd"},
        {"\xf0\x9f\x92", "\ufffd"},
        {"x \xe4\xb8", "x \ufffd"},
        {"\xf4\x90\x80\x80", "\ufffd\ufffd\ufffd\ufffd"},
        {"\xe2\x82(\xe2\x82\xac", "\ufffd(\u20ac"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct dmk_ids bad, good;

        encode(f, cases[i].bad, strlen(cases[i].bad), &bad);
        encode(f, cases[i].good, strlen(cases[i].good), &good);
        check_ids(cases[i].good, &bad, good.data, good.len);
        dmk_ids_fini(&bad);
        dmk_ids_fini(&good);
    }
}

static void test_round_trip(void **state)
{
    const struct fixture *f = *state;
    struct random r = {20261129, 0};

    print_message("seed %llu\n", (unsigned long long)r.seed);
    for (int turn = 0; turn < 2000; turn++) {
        struct dmk_buf text, back;
        struct dmk_ids ids;

        dmk_buf_init(&text, 0);
        dmk_buf_init(&back, 0);
        for (uint32_t n = random_below(&r, 60); n > 0; n--) {
            uint32_t code =
                random_below(&r, 4) ? random_below(&r, 0x250) : random_below(&r, 0x110000);

            if (code >= 0xd800 && code < 0xe000) {
                code = ' ';
            }
            if (code < 0x80) {
                dmk_buf_putc(&text, (char)code);
            } else if (code < 0x800) {
                dmk_buf_putc(&text, (char)(0xc0 | code >> 6));
                dmk_buf_putc(&text, (char)(0x80 | (code & 63)));
            } else if (code < 0x10000) {
                dmk_buf_putc(&text, (char)(0xe0 | code >> 12));
                dmk_buf_putc(&text, (char)(0x80 | (code >> 6 & 63)));
                dmk_buf_putc(&text, (char)(0x80 | (code & 63)));
            } else {
                dmk_buf_putc(&text, (char)(0xf0 | code >> 18));
                dmk_buf_putc(&text, (char)(0x80 | (code >> 12 & 63)));
                dmk_buf_putc(&text, (char)(0x80 | (code >> 6 & 63)));
                dmk_buf_putc(&text, (char)(0x80 | (code & 63)));
            }
        }
        encode(f, text.data ? text.data : "", text.len, &ids);
        assert_int_equal(dmk_decode(f->vocab, ids.data, ids.len, &back), 0);
        assert_int_equal(back.len, text.len);
        if (text.len) {
            assert_memory_equal(back.data, text.data, text.len);
        }
        dmk_ids_fini(&ids);
        dmk_buf_fini(&text);
        dmk_buf_fini(&back);
    }
}

static void test_bounds(void **state)
{
    const struct fixture *f = *state;
    const uint32_t outside[] = {24912, DMK_VOCAB_SIZE};
    struct dmk_buf out;
    struct dmk_ids ids;

    /* A list that is full says so, keeps what it has and stays full. */
    dmk_ids_init(&ids, 3);
    dmk_encode(f->vocab, f->scratch, dmk_str_from("one two three four"), &ids);
    assert_true(ids.failed);
    assert_int_equal(ids.len, 3);
    dmk_ids_fini(&ids);

    dmk_ids_init(&ids, 0);
    dmk_encode(f->vocab, f->scratch, dmk_str_from(""), &ids);
    dmk_encode_with_specials(f->vocab, f->scratch, dmk_str_from(""), &ids);
    assert_int_equal(ids.len, 0);
    assert_false(ids.failed);
    dmk_ids_fini(&ids);

    dmk_buf_init(&out, 0);
    assert_int_equal(dmk_decode(f->vocab, outside, 2, &out), -DMK_EINVAL);
    dmk_buf_fini(&out);
    dmk_buf_init(&out, 4);
    assert_int_equal(dmk_decode(f->vocab, outside, 1, &out), -DMK_EFULL);
    dmk_buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vectors),
        cmocka_unit_test(test_repeats),
        cmocka_unit_test(test_counts_of_endless_words),
        cmocka_unit_test(test_long_word_between),
        cmocka_unit_test(test_specials),
        cmocka_unit_test(test_all_specials),
        cmocka_unit_test(test_invalid_utf8),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_bounds),
    };

    return cmocka_run_group_tests(tests, fixture_open, fixture_close);
}
