/* Reads o200k_base.tiktoken: a line per token, base64 of its bytes, a space, its rank. Cold code.
 *
 * Lines must stand in the order of their ranks, as in the published file; a fault is reported with its
 * line. Whether the tokens are the right ones is for the hash to say. */
#include "common/text/vocab.h"
#include <stdio.h>

#define LINE_BYTES_MAX 256

/* Six bits of a base64 digit, or -1. */
static int digit(uint8_t c)
{
    if (c >= 'A' && c <= 'Z') {
        return c - 'A';
    }
    if (c >= 'a' && c <= 'z') {
        return c - 'a' + 26;
    }
    if (c >= '0' && c <= '9') {
        return c - '0' + 52;
    }
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Returns the number of bytes, or -1 for malformed base64 or more than cap bytes. */
static int decode_base64(struct dmk_bytes text, uint8_t *out, size_t cap)
{
    size_t n = 0, len = text.len;

    if (len == 0 || len % 4 != 0 || len / 4 * 3 > cap + 2) {
        return -1;
    }
    while (len > text.len - 2 && text.data[len - 1] == '=') {
        len--;
    }
    for (size_t i = 0; i < len; i += 4) {
        const size_t m = len - i < 4 ? len - i : 4;
        uint32_t bits = 0;

        for (size_t k = 0; k < m; k++) {
            const int d = digit(text.data[i + k]);

            if (d < 0) {
                return -1;
            }
            bits |= (uint32_t)d << (18 - 6 * k);
        }
        for (size_t k = 0; k + 1 < m; k++) {
            if (n == cap) {
                return -1;
            }
            out[n++] = (uint8_t)(bits >> (16 - 8 * k));
        }
    }
    return (int)n;
}

/* Decimal digits only, up to six of them. */
static int parse_rank(struct dmk_bytes text)
{
    int rank = 0;

    if (text.len == 0 || text.len > 6) {
        return -1;
    }
    for (size_t i = 0; i < text.len; i++) {
        if (text.data[i] < '0' || text.data[i] > '9') {
            return -1;
        }
        rank = rank * 10 + (text.data[i] - '0');
    }
    return rank;
}

static int read_line(struct dmk_vocab *vocab, struct dmk_bytes line)
{
    const uint8_t *space = memchr(line.data, ' ', line.len);
    uint8_t token[DMK_RANK_BYTES_MAX];
    struct dmk_bytes left, right;
    int n;

    if (!space) {
        return -DMK_EFORMAT;
    }
    left = (struct dmk_bytes){line.data, (size_t)(space - line.data)};
    right = (struct dmk_bytes){space + 1, line.len - left.len - 1};
    n = decode_base64(left, token, sizeof(token));
    if (n < 0 || parse_rank(right) != (int)vocab->n_added) {
        return -DMK_EFORMAT;
    }
    return dmk_vocab_add(vocab, token, (size_t)n);
}

int dmk_vocab_read_tiktoken(struct dmk_vocab *vocab, const char *path, struct dmk_bytes data,
                            struct dmk_error *reterr)
{
    size_t pos = 0, n_line = 0;

    while (pos < data.len) {
        const uint8_t *start = data.data + pos;
        const uint8_t *newline = memchr(start, '\n', data.len - pos);
        const size_t len = newline ? (size_t)(newline - start) : data.len - pos;

        n_line++;
        pos += len + 1;
        if (len > 0) {
            const int r = len <= LINE_BYTES_MAX ? read_line(vocab, (struct dmk_bytes){start, len})
                                                : -DMK_EFORMAT;

            if (r == -DMK_ENOMEM) {
                return dmk_error_set(reterr, r, "no memory for the tokens of %s", path);
            }
            if (r < 0) {
                return dmk_error_set(
                    reterr, r, "%s, line %zu: '%.*s' is not base64, a space and the rank %u", path,
                    n_line, (int)(len < 40 ? len : 40), (const char *)start, vocab->n_added);
            }
        }
    }
    if (vocab->n_added != DMK_RANKS) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s holds %u tokens, o200k_base has %u", path,
                             vocab->n_added, DMK_RANKS);
    }
    return 0;
}
