/* Byte-pair merging: every token, both algorithms and both starts against the rule taken literally, and time
 * that does not grow with the square. */
#include "tests/unit/text/text_test.h"
#include "common/text/utf8.h"
#include <stdlib.h>
#include <time.h>

/* The rule, literally: the bytes of two neighbours are looked up as a whole; no table of pairs is used. */
static size_t merge_literally(const struct dmk_vocab *v, struct dmk_bytes piece, uint32_t *ret_ids)
{
    size_t start[DMK_BPE_LINEAR_MAX + 1], n = piece.len;

    for (size_t i = 0; i <= n; i++) {
        start[i] = i;
    }
    for (;;) {
        uint32_t best = DMK_NO_TOKEN;
        size_t at = 0;

        for (size_t i = 0; i + 1 < n; i++) {
            const uint32_t id = dmk_vocab_find(v, piece.data + start[i], start[i + 2] - start[i]);

            if (id < best) {
                best = id;
                at = i;
            }
        }
        if (best == DMK_NO_TOKEN) {
            break;
        }
        memmove(start + at + 1, start + at + 2, (n - at - 1) * sizeof(*start));
        n--;
    }
    for (size_t i = 0; i < n; i++) {
        ret_ids[i] = dmk_vocab_find(v, piece.data + start[i], start[i + 1] - start[i]);
    }
    return n;
}

/* Both algorithms from one start. */
static void check(const struct fixture *f, struct dmk_bytes piece, enum dmk_bpe_start start,
                  const uint32_t *want, size_t n)
{
    struct dmk_ids ids;

    for (int heap = 0; heap < 2; heap++) {
        dmk_ids_init(&ids, 0);
        if (heap) {
            dmk_bpe_heap(f->vocab, f->scratch, piece, start, &ids);
        } else {
            dmk_bpe_linear(f->vocab, f->scratch, piece, start, &ids);
        }
        if (ids.len != n || memcmp(ids.data, want, n * sizeof(*want)) != 0) {
            print_error("%s from %s: %zu bytes from %02x give %zu tokens, not %zu\n",
                        heap ? "heap" : "array", start == DMK_BPE_CHARS ? "characters" : "bytes",
                        piece.len, piece.data[0], ids.len, n);
            fail();
        }
        dmk_ids_fini(&ids);
    }
}

static void test_every_token(void **state)
{
    struct fixture *f = *state;

    dmk_bpe_scratch_begin(f->scratch, f->vocab);
    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        const struct dmk_bytes piece = dmk_token_bytes(f->vocab, id);

        assert_int_equal(dmk_vocab_find(f->vocab, piece.data, piece.len), id);
        check(f, piece, DMK_BPE_BYTES, &id, 1);
    }
}

static void test_random_bytes(void **state)
{
    struct fixture *f = *state;
    struct random r = {31, 0};
    uint8_t data[DMK_BPE_LINEAR_MAX];
    uint32_t want[DMK_BPE_LINEAR_MAX];

    print_message("seed %llu\n", (unsigned long long)r.seed);
    dmk_bpe_scratch_begin(f->scratch, f->vocab);
    for (int turn = 0; turn < 8000; turn++) {
        const size_t len = 1 + random_below(&r, turn % 8 ? 24 : DMK_BPE_LINEAR_MAX);
        const uint32_t kind = random_below(&r, 4);
        size_t n = 0;

        /* Pieces of tokens make for many merges; few letters for many ties. */
        while (n < len) {
            if (kind == 0) {
                data[n++] = (uint8_t)random_below(&r, 256);
            } else if (kind == 1) {
                data[n++] = (uint8_t)("aA x-e\n"[random_below(&r, 7)]);
            } else {
                const struct dmk_bytes t = dmk_token_bytes(f->vocab, random_below(&r, DMK_RANKS));
                const size_t skip = random_below(&r, 2) ? random_below(&r, (uint32_t)t.len) : 0;

                for (size_t i = skip; i < t.len && n < len; i++) {
                    data[n++] = t.data[i];
                }
            }
        }
        n = merge_literally(f->vocab, (struct dmk_bytes){data, len}, want);
        check(f, (struct dmk_bytes){data, len}, DMK_BPE_BYTES, want, n);
    }
}

static size_t put_char(uint8_t *p, uint32_t code)
{
    if (code < 0x80) {
        p[0] = (uint8_t)code;
        return 1;
    }
    if (code < 0x800) {
        p[0] = (uint8_t)(0xc0 | code >> 6);
        p[1] = (uint8_t)(0x80 | (code & 63));
        return 2;
    }
    p[0] = (uint8_t)(0xe0 | code >> 12);
    p[1] = (uint8_t)(0x80 | (code >> 6 & 63));
    p[2] = (uint8_t)(0x80 | (code & 63));
    return 3;
}

/* Scripts in which characters of several bytes are common, from their first to their last code point. */
static const struct {
    uint32_t first, last;
} scripts[] = {{0x20, 0x7e},     {0xa0, 0x17f},    {0x370, 0x3ff},   {0x400, 0x4ff},
               {0x530, 0x5ff},   {0x600, 0x6ff},   {0x900, 0x97f},   {0x980, 0x9ff},
               {0xb80, 0xdff},   {0xe00, 0xeff},   {0x10a0, 0x10ff}, {0x1780, 0x17ff},
               {0x1e00, 0x1eff}, {0x2000, 0x206f}, {0x3000, 0x30ff}, {0x4e00, 0x9fff},
               {0x4e00, 0x5fff}, {0xac00, 0xd7a3}, {0xff00, 0xff60}};

/* Merging from characters gives what merging from bytes gives. */
static void test_characters(void **state)
{
    struct fixture *f = *state;
    struct random r = {32, 0};
    const uint32_t n_scripts = sizeof(scripts) / sizeof(scripts[0]);
    size_t n_chars = 0, n_parts = 0;
    uint8_t data[DMK_BPE_LINEAR_MAX];
    uint32_t want[DMK_BPE_LINEAR_MAX];

    print_message("seed %llu\n", (unsigned long long)r.seed);
    dmk_bpe_scratch_begin(f->scratch, f->vocab);
    for (int turn = 0; turn < 30000; turn++) {
        const uint32_t script = (uint32_t)turn % n_scripts;
        const size_t max = 3 + random_below(&r, turn % 8 ? 24 : DMK_BPE_LINEAR_MAX - 3);
        size_t len = 0, n;

        while (len + 3 <= max) {
            const uint32_t s = random_below(&r, 8) ? script : random_below(&r, n_scripts);
            uint32_t code =
                scripts[s].first + random_below(&r, scripts[s].last - scripts[s].first + 1);

            /* Half of them are tokens of their own, as frequent characters are. */
            for (int i = 0; i < 20 && code >= 0x80 &&
                            dmk_vocab_char(f->vocab, code) == DMK_NO_PART && turn % 2;
                 i++) {
                code = scripts[s].first + random_below(&r, scripts[s].last - scripts[s].first + 1);
            }
            n_chars += code >= 0x80;
            n_parts += code >= 0x80 && dmk_vocab_char(f->vocab, code) != DMK_NO_PART;
            len += put_char(data + len, code);
        }
        n = merge_literally(f->vocab, (struct dmk_bytes){data, len}, want);
        check(f, (struct dmk_bytes){data, len}, DMK_BPE_CHARS, want, n);
    }
    assert_true(n_parts > n_chars / 4); /* the short cut is really taken */
}

/* Every two neighbours among the characters that merging may start from, in both orders for some. */
static void test_neighbours(void **state)
{
    struct fixture *f = *state;
    struct random r = {33, 0};
    uint32_t *codes = malloc(DMK_CHAR_IDS * sizeof(*codes)), n_codes = 0;

    dmk_bpe_scratch_begin(f->scratch, f->vocab);
    for (uint32_t code = 0x80; code < DMK_CHAR_IDS; code++) {
        if (dmk_vocab_char(f->vocab, code) != DMK_NO_PART) {
            codes[n_codes++] = code;
        }
    }
    assert_true(n_codes > 3000);
    for (uint32_t i = 0; i < n_codes; i++) {
        for (int turn = 0; turn < 12; turn++) {
            uint32_t want[16];
            uint8_t data[16];
            size_t len = 0, n;

            len += put_char(data, turn % 3 == 0 ? ' ' : codes[random_below(&r, n_codes)]);
            len += put_char(data + len, codes[i]);
            len += put_char(data + len, codes[random_below(&r, n_codes)]);
            n = merge_literally(f->vocab, (struct dmk_bytes){data, len}, want);
            check(f, (struct dmk_bytes){data, len}, DMK_BPE_CHARS, want, n);
        }
    }
    free(codes);
}

/* A character of several bytes that ends with these bytes (few), or that starts with them. */
static size_t put_completed(struct random *r, uint8_t *p, const uint8_t *part, size_t n, bool ends)
{
    for (int turn = 0; turn < 200000; turn++) {
        const uint32_t code = 0x80 + random_below(r, 0xd800 - 0x80);
        uint8_t bytes[4];
        const size_t len = put_char(bytes, code);

        if (len >= n && memcmp(ends ? bytes + len - n : bytes, part, n) == 0) {
            memcpy(p, bytes, len);
            return len;
        }
    }
    return 0;
}

/* Every token that begins or ends inside of a character, inside of a text whose characters it cuts: alone, and with
 * more characters around. */
static void check_cut(const struct fixture *f, struct random *r, struct dmk_bytes token)
{
    size_t head = 0, tail = token.len, len = 0, n;
    uint8_t data[DMK_BPE_LINEAR_MAX];
    uint32_t want[DMK_BPE_LINEAR_MAX];

    while (head < token.len && (token.data[head] & 0xc0) == 0x80) {
        head++;
    }
    while (tail > head && (token.data[tail - 1] & 0xc0) == 0x80) {
        tail--;
    }
    if (tail > head && dmk_utf8_valid_prefix(token.data + tail - 1, token.len - (tail - 1)) > 0) {
        tail = token.len; /* the last character is whole */
    } else if (tail > head) {
        tail--;
    }
    if (tail > token.len || head > tail || (head == 0 && tail == token.len) ||
        dmk_utf8_valid_prefix(token.data + head, tail - head) < tail - head) {
        return;
    }
    for (uint32_t i = random_below(r, 3); i > 0; i--) {
        len += put_char(data + len, 0x4e00 + random_below(r, 0x5200));
    }
    if (head > 0) {
        len += put_completed(r, data + len, token.data, head, true);
    }
    memcpy(data + len, token.data + head, tail - head);
    len += tail - head;
    if (tail < token.len) {
        len += put_completed(r, data + len, token.data + tail, token.len - tail, false);
    }
    for (uint32_t i = random_below(r, 3); i > 0; i--) {
        len += put_char(data + len, 0x4e00 + random_below(r, 0x5200));
    }
    n = merge_literally(f->vocab, (struct dmk_bytes){data, len}, want);
    check(f, (struct dmk_bytes){data, len}, DMK_BPE_CHARS, want, n);
}

static void test_cuts(void **state)
{
    const struct fixture *f = *state;
    const struct dmk_borders *const all[2] = {&f->vocab->tables->starts, &f->vocab->tables->ends};
    struct random r = {35, 0};
    size_t n_cuts = 0;

    print_message("seed %llu\n", (unsigned long long)r.seed);
    dmk_bpe_scratch_begin(f->scratch, f->vocab);
    for (int side = 0; side < 2; side++) {
        for (uint32_t i = 0; i < all[side]->first[DMK_BORDERS]; i++) {
            for (int turn = 0; turn < 8; turn++) {
                check_cut(f, &r, dmk_token_bytes(f->vocab, all[side]->cuts[i].id));
            }
            n_cuts++;
        }
    }
    print_message("%zu cuts\n", n_cuts);
    assert_true(n_cuts > 100);
}

static double seconds(void)
{
    struct timespec ts;

    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

/* The least CPU time of two runs over n bytes of a repeated unit; random letters where it is NULL. */
static double time_of(const struct fixture *f, const char *unit, size_t n)
{
    struct random r = {34, 0};
    double best = 1e9;
    struct dmk_buf text;

    dmk_buf_init(&text, 0);
    while (text.len < n) {
        if (unit) {
            dmk_buf_puts(&text, unit);
        } else {
            dmk_buf_putc(&text, (char)('a' + random_below(&r, 26)));
        }
    }
    for (int i = 0; i < 2; i++) {
        const double start = seconds();
        struct dmk_ids ids;

        dmk_ids_init(&ids, 0);
        dmk_encode(f->vocab, f->scratch, dmk_buf_str(&text), &ids);
        assert_false(ids.failed);
        dmk_ids_fini(&ids);
        best = seconds() - start < best ? seconds() - start : best;
    }
    dmk_buf_fini(&text);
    return best;
}

/* Eight times the text may take up to 48 times as long (n log n, and caches that overflow); a square would take
 * 64 times. Noise of other programs only adds time, so the least of several runs is compared. */
static bool grows_gently(const struct fixture *f, const char *unit)
{
    double small = 1e9, large = 1e9;

    for (int round = 0; round < 10; round++) {
        const double s = time_of(f, unit, 125000), l = time_of(f, unit, 1000000);

        small = s < small ? s : small;
        large = l < large ? l : large;
        if (large <= 48.0 * small) {
            return true;
        }
    }
    print_error("'%s': %.4f s for an eighth, %.4f s for 1 MB\n", unit ? unit : "random letters",
                small, large);
    return false;
}

static void test_growth(void **state)
{
    static const char *const units[] = {"x",       "\n",  "あ",   "'s", "aA", "中A",
                                        "\u0301A", "/\n", "\xff", "😀",  NULL};

    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        assert_true(grows_gently(*state, units[i]));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_token), cmocka_unit_test(test_random_bytes),
        cmocka_unit_test(test_characters),  cmocka_unit_test(test_neighbours),
        cmocka_unit_test(test_cuts),        cmocka_unit_test(test_growth),
    };

    return cmocka_run_group_tests(tests, fixture_open, fixture_close);
}
