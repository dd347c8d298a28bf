/* How text spells numbers and characters: hexadecimal digits, and code points as UTF-8. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* 0..15 of a digit in either case, or -1. */
int dmk_hex_digit(char c);

/* The value of n digits at text, n at most 8, or -1 where one is none. */
int64_t dmk_hex_value(const char *text, size_t n);

/* The bytes of a code point below 0x110000; returns how many, 1 to 4. */
size_t dmk_utf8_put(uint32_t code, uint8_t ret[4]);

/* The code point at text, which ends with NUL; returns its bytes, 1 to 4, or 0 where they are no well-formed UTF-8
 * (overlong, a surrogate, too high, cut off). common/text/utf8.h repairs and streams. */
size_t dmk_utf8_get(const char *text, uint32_t *ret_code);
