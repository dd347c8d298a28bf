/* The splitter: against the regular expression taken literally (a small back-tracking matcher), and pieces
 * that tile the text. */
#include "tests/unit/text/text_test.h"
#include "common/text/split.h"
#include "common/text/unicode.h"
#include "common/text/utf8.h"

#define CHARS_MAX 64

#define UP     (DMK_CLASS_UPPER | DMK_CLASS_CASELESS | DMK_CLASS_MARK)
#define LOW    (DMK_CLASS_LOWER | DMK_CLASS_CASELESS | DMK_CLASS_MARK)
#define LETTER (DMK_CLASS_UPPER | DMK_CLASS_LOWER | DMK_CLASS_CASELESS)
#define WHITE  (DMK_CLASS_SPACE | DMK_CLASS_NEWLINE)

/* A text as code points and their classes; the class at the end is 0. */
struct line {
    uint32_t code[CHARS_MAX + 1];
    unsigned class[CHARS_MAX + 1];
    size_t start[CHARS_MAX + 1]; /* in bytes */
    size_t n;
};

static size_t run(const struct line *l, size_t pos, unsigned mask)
{
    while (pos < l->n && (l->class[pos] & mask)) {
        pos++;
    }
    return pos;
}

static bool folds(uint32_t code, char letter)
{
    return code == (uint32_t)letter || code == (uint32_t)letter - 32 ||
           (letter == 's' && code == 0x17f);
}

static size_t contraction(const struct line *l, size_t pos)
{
    static const char *const words[] = {"s", "t", "re", "ve", "m", "ll", "d"};

    for (size_t w = 0; l->code[pos] == '\'' && w < 7; w++) {
        size_t k = 0;

        while (words[w][k] && pos + 1 + k < l->n && folds(l->code[pos + 1 + k], words[w][k])) {
            k++;
        }
        if (!words[w][k]) {
            return pos + 1 + k;
        }
    }
    return pos;
}

/* [^\r\n\p{L}\p{N}]? U{least_u,} W{least_w,} contraction?, greedy, with back-tracking. */
static size_t match_word(const struct line *l, size_t pos, size_t least_u, size_t least_w)
{
    const bool may = !(l->class[pos] & (DMK_CLASS_NEWLINE | LETTER | DMK_CLASS_NUMBER));

    for (int prefix = may; prefix >= 0; prefix--) {
        const size_t q = pos + (size_t)prefix;

        for (size_t u = run(l, q, UP) + 1; u-- > q + least_u;) {
            const size_t w = run(l, u, LOW);

            if (w - u >= least_w) {
                return contraction(l, w);
            }
        }
    }
    return pos;
}

static size_t match(const struct line *l, size_t pos)
{
    size_t end = match_word(l, pos, 0, 1), q;

    if (end == pos) {
        end = match_word(l, pos, 1, 0);
    }
    if (end > pos) {
        return end;
    }
    for (end = pos; end < pos + 3 && l->class[end] == DMK_CLASS_NUMBER;) {
        end++;
    }
    if (end > pos) {
        return end;
    }
    q = pos + (l->code[pos] == ' ');
    end = run(l, q, DMK_CLASS_OTHER | DMK_CLASS_MARK);
    if (end > q) {
        while (l->code[end] == '\r' || l->code[end] == '\n' || l->code[end] == '/') {
            end++;
        }
        return end;
    }
    end = run(l, pos, WHITE);
    for (size_t e = end; e > pos; e--) { /* \s*[\r\n]+ */
        if (l->class[e - 1] == DMK_CLASS_NEWLINE) {
            return e;
        }
    }
    for (size_t e = end; e > pos; e--) { /* \s+(?!\S) */
        if (e == l->n || (l->class[e] & WHITE)) {
            return e;
        }
    }
    return end;
}

static void append(struct dmk_buf *text, uint32_t code)
{
    if (code < 0x80) {
        dmk_buf_putc(text, (char)code);
    } else if (code < 0x800) {
        dmk_buf_putc(text, (char)(0xc0 | code >> 6));
        dmk_buf_putc(text, (char)(0x80 | (code & 63)));
    } else {
        if (code < 0x10000) {
            dmk_buf_putc(text, (char)(0xe0 | code >> 12));
        } else {
            dmk_buf_putc(text, (char)(0xf0 | code >> 18));
            dmk_buf_putc(text, (char)(0x80 | (code >> 12 & 63)));
        }
        dmk_buf_putc(text, (char)(0x80 | (code >> 6 & 63)));
        dmk_buf_putc(text, (char)(0x80 | (code & 63)));
    }
}

/* At least two characters of each class, and those that the expression names. */
static const uint32_t alphabet[] = {
    'a',   'b',    's',    'S',     't',     'r',    'e',     'v',    'E',    'm',    'l',
    'L',   'd',    'D',    'A',     'Z',     '\'',   '\'',    '0',    '9',    ' ',    ' ',
    '\t',  '\r',   '\n',   '/',     '.',     '-',    0,       0x7f,   0x85,   0xa0,   0xb2,
    0xdf,  0x17f,  0x1c5,  0x2b0,   0x301,   0x4e2d, 0x3042,  0x2028, 0x3000, 0x200b, 0x2019,
    0x660, 0x2167, 0x20dd, 0x1f600, 0x1d400, 0xe000, 0x10fffd};

static void test_against_expression(void **state)
{
    struct random r = {4711, 0};

    (void)state;
    print_message("seed %llu\n", (unsigned long long)r.seed);
    for (int turn = 0; turn < 200000; turn++) {
        const uint32_t n_letters = 2 + random_below(&r, 12);
        uint32_t letters[14];
        struct dmk_buf text;
        struct line l = {.n = 1 + random_below(&r, turn % 10 ? 12 : CHARS_MAX)};
        size_t pos = 0;

        dmk_buf_init(&text, 0);
        for (uint32_t i = 0; i < n_letters; i++) {
            letters[i] = alphabet[random_below(&r, sizeof(alphabet) / sizeof(alphabet[0]))];
        }
        for (size_t i = 0; i < l.n; i++) {
            l.code[i] = letters[random_below(&r, n_letters)];
            l.class[i] = dmk_unicode_class(l.code[i]);
            l.start[i] = text.len;
            append(&text, l.code[i]);
        }
        l.start[l.n] = text.len;
        for (size_t i = 0; i < l.n;) {
            const size_t end = match(&l, i);
            const size_t got = dmk_split_next((const uint8_t *)text.data, text.len, pos);

            assert_true(end > i);
            if (got != l.start[end]) {
                print_error("turn %d: piece at byte %zu ends at %zu, not %zu\n", turn, pos, got,
                            l.start[end]);
                fail();
            }
            pos = got;
            i = end;
        }
        assert_int_equal(pos, text.len);
        dmk_buf_fini(&text);
    }
}

/* Classes that the text of the expression fixes, whatever the Unicode version. */
static void test_classes(void **state)
{
    static const uint32_t white[] = {0x09,   0x0b,   0x0c,   0x20,   0x85,   0xa0,   0x1680,
                                     0x2000, 0x200a, 0x2028, 0x2029, 0x202f, 0x205f, 0x3000};
    static const uint32_t other[] = {0x1c,   0x1f,   0x200b,   0xfeff, 0x180e, 0x378, 0xd800,
                                     0xdfff, 0xe000, 0x10ffff, '_',    '$',    '\''};

    (void)state;
    for (size_t i = 0; i < sizeof(white) / sizeof(white[0]); i++) {
        assert_int_equal(dmk_unicode_class(white[i]), DMK_CLASS_SPACE);
    }
    for (size_t i = 0; i < sizeof(other) / sizeof(other[0]); i++) {
        assert_int_equal(dmk_unicode_class(other[i]), DMK_CLASS_OTHER);
    }
    assert_int_equal(dmk_unicode_class('\r'), DMK_CLASS_NEWLINE);
    assert_int_equal(dmk_unicode_class('\n'), DMK_CLASS_NEWLINE);
    assert_int_equal(dmk_unicode_class(0x1c5), DMK_CLASS_UPPER);
    assert_int_equal(dmk_unicode_class(0x2b0), DMK_CLASS_CASELESS);
    assert_int_equal(dmk_unicode_class(0x301), DMK_CLASS_MARK);
    assert_int_equal(dmk_unicode_class(0x2167), DMK_CLASS_NUMBER);
    assert_int_equal(dmk_unicode_class(0xdf), DMK_CLASS_LOWER);
    for (uint32_t code = 0x5000; code < 0xa000; code++) { /* not looked up by the splitter */
        assert_int_equal(dmk_unicode_class(code), DMK_CLASS_CASELESS);
    }
    /* The splitter has a table of its own for ASCII: one character alone must be a piece of its class. */
    for (uint32_t c = 0; c < 128; c++) {
        const uint8_t pair[2] = {(uint8_t)c, '1'};
        const bool joined = dmk_split_next(pair, 2, 0) == 2;

        assert_int_equal(joined, dmk_unicode_class(c) == DMK_CLASS_NUMBER);
    }
}

static void check_pieces(const char *text, const char *const *pieces)
{
    const size_t len = strlen(text);
    size_t pos = 0;

    for (size_t i = 0; pos < len; i++) {
        const size_t end = dmk_split_next((const uint8_t *)text, len, pos);

        assert_non_null(pieces[i]);
        assert_int_equal(end - pos, strlen(pieces[i]));
        assert_memory_equal(text + pos, pieces[i], end - pos);
        pos = end;
    }
}

#define PIECES(text, ...) check_pieces(text, (const char *const[]){__VA_ARGS__, NULL})

static void test_pieces(void **state)
{
    (void)state;
    PIECES("A中B x", "A中", "B", " x");
    PIECES("中A", "中", "A");
    PIECES("\u0301A", "\u0301", "A");
    PIECES("HTTPServer", "HTTPServer");
    PIECES("fooBarBAZ", "foo", "Bar", "BAZ");
    PIECES("it'\u017f", "it'\u017f");
    PIECES("don\u2019t", "don", "\u2019t");
    PIECES("we'LL'RE", "we'LL", "'RE");
    PIECES("1234567", "123", "456", "7");
    PIECES("a  \n\n  b", "a", "  \n\n", " ", " b");
    PIECES("  !!//\r\n/x", " ", " !!//\r\n/", "x");
    PIECES("x   ", "x", "   ");
    PIECES("\t\ta", "\t", "\ta");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_expression),
        cmocka_unit_test(test_classes),
        cmocka_unit_test(test_pieces),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
