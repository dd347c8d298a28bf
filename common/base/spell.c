/* Hexadecimal digits and UTF-8; see spell.h. Pure functions. */
#include "common/base/spell.h"

int dmk_hex_digit(char c)
{
    const char low = (char)(c | 0x20);

    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    return low >= 'a' && low <= 'f' ? low - 'a' + 10 : -1;
}

int64_t dmk_hex_value(const char *text, size_t n)
{
    int64_t value = 0;

    for (size_t i = 0; i < n; i++) {
        const int digit = dmk_hex_digit(text[i]);

        if (digit < 0) {
            return -1;
        }
        value = value * 16 + digit;
    }
    return value;
}

size_t dmk_utf8_put(uint32_t code, uint8_t ret[4])
{
    if (code < 0x80) {
        ret[0] = (uint8_t)code;
        return 1;
    }
    if (code < 0x800) {
        ret[0] = (uint8_t)(0xc0 | code >> 6);
        ret[1] = (uint8_t)(0x80 | (code & 63));
        return 2;
    }
    if (code < 0x10000) {
        ret[0] = (uint8_t)(0xe0 | code >> 12);
        ret[1] = (uint8_t)(0x80 | (code >> 6 & 63));
        ret[2] = (uint8_t)(0x80 | (code & 63));
        return 3;
    }
    ret[0] = (uint8_t)(0xf0 | code >> 18);
    ret[1] = (uint8_t)(0x80 | (code >> 12 & 63));
    ret[2] = (uint8_t)(0x80 | (code >> 6 & 63));
    ret[3] = (uint8_t)(0x80 | (code & 63));
    return 4;
}

size_t dmk_utf8_get(const char *text, uint32_t *ret_code)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const unsigned char *p = (const unsigned char *)text;
    const size_t len = p[0] < 0x80             ? 1
                       : (p[0] & 0xe0) == 0xc0 ? 2
                       : (p[0] & 0xf0) == 0xe0 ? 3
                       : (p[0] & 0xf8) == 0xf0 ? 4
                                               : 0;
    uint32_t code = len > 1 ? p[0] & (0x7fu >> len) : p[0];

    for (size_t i = 1; i < len; i++) {
        if ((p[i] & 0xc0) != 0x80) {
            return 0;
        }
        code = code << 6 | (p[i] & 0x3f);
    }
    if (len == 0 || code < least[len] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) {
        return 0;
    }
    *ret_code = code;
    return len;
}
