/* The splitter; see split.h.
 *
 * The alternatives of the expression, in order (U = upper, caseless, marks; W = lower, caseless, marks):
 *   1  [^ CR LF L N]? U* W+ contraction?       word with a lower-case or caseless end
 *   2  [^ CR LF L N]? U+ W* contraction?       word of capitals
 *   3  N{1,3}                                  digits
 *   4  ' '? [^ \s L N]+ [CR LF /]*             punctuation
 *   5  \s* [CR LF]+     6  \s+ (?!\S)     7  \s+
 * Each function below handles one of them and says why the scan equals what the expression finds. */
#include "common/text/split.h"
#include "common/text/unicode.h"
#include <stdbool.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first of eight bytes is the lowest");

#define LETTER     (DMK_CLASS_UPPER | DMK_CLASS_LOWER | DMK_CLASS_CASELESS)
#define WORD_UPPER (DMK_CLASS_UPPER | DMK_CLASS_CASELESS | DMK_CLASS_MARK)
#define WORD_LOWER (DMK_CLASS_LOWER | DMK_CLASS_CASELESS | DMK_CLASS_MARK)
#define WORD_BOTH  (DMK_CLASS_CASELESS | DMK_CLASS_MARK)
#define PREFIX     (DMK_CLASS_OTHER | DMK_CLASS_MARK | DMK_CLASS_SPACE)
#define PUNCT      (DMK_CLASS_OTHER | DMK_CLASS_MARK)
#define WHITE      (DMK_CLASS_SPACE | DMK_CLASS_NEWLINE)

struct text {
    const uint8_t *data;
    size_t len;
};

static const uint8_t ascii_class[128] = {
    [0x00 ... 0x08] = DMK_CLASS_OTHER,  [0x09] = DMK_CLASS_SPACE,
    [0x0a] = DMK_CLASS_NEWLINE,         [0x0b ... 0x0c] = DMK_CLASS_SPACE,
    [0x0d] = DMK_CLASS_NEWLINE,         [0x0e ... 0x1f] = DMK_CLASS_OTHER,
    [0x20] = DMK_CLASS_SPACE,           [0x21 ... 0x2f] = DMK_CLASS_OTHER,
    [0x30 ... 0x39] = DMK_CLASS_NUMBER, [0x3a ... 0x40] = DMK_CLASS_OTHER,
    [0x41 ... 0x5a] = DMK_CLASS_UPPER,  [0x5b ... 0x60] = DMK_CLASS_OTHER,
    [0x61 ... 0x7a] = DMK_CLASS_LOWER,  [0x7b ... 0x7f] = DMK_CLASS_OTHER,
};

/* Whether a lead byte leads only letters without case: U+5000 to U+9FFF, ideographs. */
static inline bool leads_ideograph(uint8_t lead)
{
    return lead >= 0xe5 && lead <= 0xe9;
}

/* The class of the character at pos < len; its length goes to *ret_len. */
static inline unsigned class_at(struct text t, size_t pos, size_t *ret_len)
{
    const uint8_t *p = t.data + pos;
    uint32_t code;

    if (p[0] < 0x80) {
        *ret_len = 1;
        return ascii_class[p[0]];
    }
    if (p[0] < 0xe0) {
        *ret_len = 2;
        code = (uint32_t)(p[0] & 0x1f) << 6 | (p[1] & 0x3f);
    } else if (p[0] < 0xf0) {
        *ret_len = 3;
        code = (uint32_t)(p[0] & 0x0f) << 12 | (uint32_t)(p[1] & 0x3f) << 6 | (p[2] & 0x3f);
    } else {
        *ret_len = 4;
        code = (uint32_t)(p[0] & 0x07) << 18 | (uint32_t)(p[1] & 0x3f) << 12 |
               (uint32_t)(p[2] & 0x3f) << 6 | (p[3] & 0x3f);
    }
    return dmk_unicode_class(code);
}

/* The end of the run of characters of mask from pos on. */
static inline size_t run_end(struct text t, size_t pos, unsigned mask)
{
    size_t n;

    while (pos < t.len && (class_at(t, pos, &n) & mask)) {
        pos += n;
    }
    return pos;
}

static uint8_t lower(uint8_t c)
{
    return c >= 'A' && c <= 'Z' ? (uint8_t)(c + 32) : c;
}

/* Extends a word's end over 's 't 're 've 'm 'll 'd in any case; s also folds from U+017F. */
static size_t contraction_end(struct text t, size_t pos)
{
    uint8_t a, b;

    if (t.len - pos < 2 || t.data[pos] != '\'') {
        return pos;
    }
    a = lower(t.data[pos + 1]);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') {
        return pos + 2;
    }
    if (t.len - pos < 3) {
        return pos;
    }
    b = t.data[pos + 2];
    if (a == 0xc5 && b == 0xbf) {
        return pos + 3;
    }
    b = lower(b);
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) {
        return pos + 3;
    }
    return pos;
}

/* Alternatives 1 and 2. first and n are the class and length of the character at pos. Returns pos where
 * neither matches.
 *
 * With the prefix taken (or none there), let [q, u) be the longest run of U. If a lower-case letter
 * follows, W+ takes it and all behind it. Otherwise the expression backs off to the last character of
 * the run that is in W too, which then ends the word; a run of capitals alone is left to alternative 2.
 * But alternative 1 comes first also with the prefix not taken, and then a mark is such a character:
 * a mark before capitals, or before nothing, is a word by itself. */
static size_t word_end(struct text t, size_t pos, unsigned first, size_t n)
{
    const size_t q = first & PREFIX ? pos + n : pos;
    size_t u = q, back_off = 0, end;
    unsigned class = 0;

    while (u < t.len) {
        size_t m;

        if (leads_ideograph(t.data[u])) {
            u += 3;
            back_off = u;
            continue;
        }
        class = class_at(t, u, &m);
        if (!(class & WORD_UPPER)) {
            break;
        }
        u += m;
        if (class & WORD_BOTH) {
            back_off = u;
        }
    }
    if (u < t.len && class == DMK_CLASS_LOWER) {
        end = run_end(t, u, WORD_LOWER);
    } else if (back_off) {
        end = back_off;
    } else if (first == DMK_CLASS_MARK) {
        end = q;
    } else if (u > q) {
        end = u;
    } else {
        return pos;
    }
    return contraction_end(t, end);
}

/* Alternative 3. */
static size_t number_end(struct text t, size_t pos)
{
    size_t n;

    for (int i = 0; i < 3 && pos < t.len && class_at(t, pos, &n) == DMK_CLASS_NUMBER; i++) {
        pos += n;
    }
    return pos;
}

/* Alternative 4; returns pos where it does not match. */
static size_t punctuation_end(struct text t, size_t pos)
{
    const size_t q = t.data[pos] == ' ' ? pos + 1 : pos;
    size_t end = run_end(t, q, PUNCT);

    if (end == q) {
        return pos;
    }
    while (end < t.len && (t.data[end] == '\r' || t.data[end] == '\n' || t.data[end] == '/')) {
        end++;
    }
    return end;
}

/* Alternatives 5 to 7: a run of white space ends behind its last line break; without one it leaves its
 * last character to what follows, if anything follows and it is not the only one. */
static size_t white_end(struct text t, size_t pos)
{
    size_t end = pos, newline = 0, last = pos, n;

    while (end < t.len) {
        const unsigned class = class_at(t, end, &n);

        if (!(class & WHITE)) {
            break;
        }
        last = end;
        end += n;
        if (class == DMK_CLASS_NEWLINE) {
            newline = end;
        }
    }
    if (newline) {
        return newline;
    }
    return end < t.len && last > pos ? last : end;
}

/* How many of the eight bytes at p are small letters, up to the first that is none. */
static inline unsigned small_letters(const uint8_t *p)
{
    const uint64_t high = 0x8080808080808080ull;
    uint64_t word, rest, others;

    memcpy(&word, p, 8);
    rest = word & ~high;
    /* The high bit of a byte: the first sum says that it is at least 'a', the second that it is above 'z'. */
    others = ~((rest + 0x1f1f1f1f1f1f1f1full) & ~(rest + 0x0505050505050505ull) & ~word) & high;
    return others ? (unsigned)__builtin_ctzll(others) / 8 : 8;
}

/* The most frequent words, without looking at each character: ASCII letters, all small but maybe the first, with or
 * without a prefix, in front of an ASCII character that can not belong to them. Returns pos for all else. */
static inline size_t plain_word_end(struct text t, size_t pos)
{
    size_t q = pos;
    unsigned n;

    if (t.len - pos < 16 || t.data[pos] >= 0x80) {
        return pos;
    }
    q += (ascii_class[t.data[q]] & PREFIX) != 0;
    q += t.data[q] >= 'A' && t.data[q] <= 'Z';
    n = small_letters(t.data + q);
    if (n == 0) {
        return pos;
    }
    while (n == 8) {
        q += 8;
        if (t.len - q < 8) {
            return pos;
        }
        n = small_letters(t.data + q);
    }
    q += n;
    return t.data[q] >= 0x80 || t.data[q] == '\'' ? pos : q;
}

size_t dmk_split_next(const uint8_t *text, size_t len, size_t pos)
{
    const struct text t = {text, len};
    size_t n, end = plain_word_end(t, pos);
    unsigned first;

    if (end > pos) {
        return end;
    }
    first = class_at(t, pos, &n);
    if (first & (LETTER | PREFIX)) {
        end = word_end(t, pos, first, n);
        if (end > pos) {
            return end;
        }
    }
    if (first == DMK_CLASS_NUMBER) {
        return number_end(t, pos);
    }
    end = punctuation_end(t, pos);
    return end > pos ? end : white_end(t, pos);
}
