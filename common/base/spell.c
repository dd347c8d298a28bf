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
