/* UTF-8; see utf8.h.
 *
 * One function, measure(), knows what a well-formed sequence is; validity, repair and streaming are
 * loops over it. Pure functions, any thread. */
#include "common/text/utf8.h"
#include "common/base/assert.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first of four bytes is the lowest");

static const char replacement[] = "\xef\xbf\xbd";

/* What stands at data. */
struct sequence {
    unsigned len; /* of the character, or of the maximal invalid part */
    bool valid;
    bool cut; /* not valid, but a proper prefix of a character: more bytes could make it valid */
};

/* len > 0. The second byte's range rules out overlong forms, surrogates and codes above U+10FFFF; every
 * further byte is 80..BF. */
static struct sequence measure(const uint8_t *data, size_t len)
{
    const uint8_t lead = data[0];
    unsigned want;
    uint8_t lo = 0x80, hi = 0xbf;

    if (lead < 0x80) {
        return (struct sequence){1, true, false};
    }
    if (lead >= 0xc2 && lead <= 0xdf) {
        want = 2;
    } else if (lead >= 0xe0 && lead <= 0xef) {
        want = 3;
        lo = lead == 0xe0 ? 0xa0 : lo;
        hi = lead == 0xed ? 0x9f : hi;
    } else if (lead >= 0xf0 && lead <= 0xf4) {
        want = 4;
        lo = lead == 0xf0 ? 0x90 : lo;
        hi = lead == 0xf4 ? 0x8f : hi;
    } else {
        return (struct sequence){1, false, false};
    }
    for (unsigned i = 1; i < want; i++) {
        if (i >= len) {
            return (struct sequence){i, false, true};
        }
        if (data[i] < lo || data[i] > hi) {
            return (struct sequence){i, false, false};
        }
        lo = 0x80;
        hi = 0xbf;
    }
    return (struct sequence){want, true, false};
}

/* Bytes from data on that are plain ASCII, in steps of eight. */
static size_t skip_ascii(const uint8_t *data, size_t len)
{
    size_t n = 0;

    while (n + 8 <= len) {
        uint64_t word;

        memcpy(&word, data + n, 8);
        if (word & 0x8080808080808080ull) {
            break;
        }
        n += 8;
    }
    return n;
}

/* Bytes from data on that are characters of three bytes whose lead is neither E0 nor ED: any further bytes of 80..BF
 * make those valid. */
static size_t skip_wide(const uint8_t *data, size_t len)
{
    size_t n = 0;

    while (len - n >= 4) {
        uint32_t word;

        memcpy(&word, data + n, 4);
        if ((word & 0xc0c0f0u) != 0x8080e0u || data[n] == 0xe0 || data[n] == 0xed) {
            break;
        }
        n += 3;
    }
    return n;
}

size_t dmk_utf8_valid_prefix(const uint8_t *data, size_t len)
{
    size_t pos = 0, n;

    while (pos < len) {
        if (data[pos] < 0x80) {
            n = skip_ascii(data + pos, len - pos);
            pos += n ? n : 1;
        } else if (data[pos] >= 0xe0 && (n = skip_wide(data + pos, len - pos)) > 0) {
            pos += n;
        } else {
            const struct sequence s = measure(data + pos, len - pos);

            if (!s.valid) {
                break;
            }
            pos += s.len;
        }
    }
    return pos;
}

/* Repairs bytes into out; stops before a cut character at the end and returns the bytes consumed. */
static size_t append_complete(struct dmk_buf *out, struct dmk_bytes bytes)
{
    size_t pos = 0;

    while (pos < bytes.len) {
        const size_t n = dmk_utf8_valid_prefix(bytes.data + pos, bytes.len - pos);
        struct sequence s;

        dmk_buf_append(out, bytes.data + pos, n);
        pos += n;
        if (pos == bytes.len) {
            break;
        }
        s = measure(bytes.data + pos, bytes.len - pos);
        if (s.cut) {
            break;
        }
        dmk_buf_append(out, replacement, 3);
        pos += s.len;
    }
    return pos;
}

void dmk_utf8_append_lossy(struct dmk_buf *out, struct dmk_bytes bytes)
{
    if (append_complete(out, bytes) < bytes.len) {
        dmk_buf_append(out, replacement, 3);
    }
}

unsigned dmk_utf8_decode(const uint8_t *data, size_t len, uint32_t *ret_code)
{
    const uint8_t lead = data[0];

    dmk_assert(len > 0);
    if (lead < 0x80) {
        *ret_code = lead;
        return 1;
    }
    if (lead < 0xe0) {
        dmk_assert(len >= 2);
        *ret_code = (uint32_t)(lead & 0x1f) << 6 | (data[1] & 0x3f);
        return 2;
    }
    if (lead < 0xf0) {
        dmk_assert(len >= 3);
        *ret_code =
            (uint32_t)(lead & 0x0f) << 12 | (uint32_t)(data[1] & 0x3f) << 6 | (data[2] & 0x3f);
        return 3;
    }
    dmk_assert(len >= 4);
    *ret_code = (uint32_t)(lead & 0x07) << 18 | (uint32_t)(data[1] & 0x3f) << 12 |
                (uint32_t)(data[2] & 0x3f) << 6 | (data[3] & 0x3f);
    return 4;
}

void dmk_utf8_stream_push(struct dmk_utf8_stream *s, struct dmk_bytes bytes, struct dmk_buf *out)
{
    size_t used;

    /* A held-back tail is completed byte by byte, for at most three bytes more. */
    while (s->n_tail > 0 && bytes.len > 0) {
        struct dmk_bytes tail = {s->tail, 0};

        s->tail[s->n_tail++] = bytes.data[0];
        bytes.data++;
        bytes.len--;
        tail.len = s->n_tail;
        used = append_complete(out, tail);
        memmove(s->tail, s->tail + used, s->n_tail - used);
        s->n_tail = (uint8_t)(s->n_tail - used);
    }
    if (bytes.len == 0) {
        return;
    }
    used = append_complete(out, bytes);
    dmk_assert(bytes.len - used <= 3);
    memcpy(s->tail, bytes.data + used, bytes.len - used);
    s->n_tail = (uint8_t)(bytes.len - used);
}

void dmk_utf8_stream_end(struct dmk_utf8_stream *s, struct dmk_buf *out)
{
    if (s->n_tail > 0) {
        dmk_buf_append(out, replacement, 3);
    }
    s->n_tail = 0;
}
