/* The class of a code point, as the splitter needs it: one bit, so that a set of classes is a mask. */
#pragma once

#include <stdint.h>

/* Numbers of the generated table are the bit positions here (tools/gen_unicode.py). */
#define DMK_CLASS_OTHER    0x01u /* punctuation, symbols, controls, unassigned */
#define DMK_CLASS_UPPER    0x02u /* Lu, Lt */
#define DMK_CLASS_LOWER    0x04u /* Ll */
#define DMK_CLASS_CASELESS 0x08u /* Lm, Lo */
#define DMK_CLASS_MARK     0x10u /* M */
#define DMK_CLASS_NUMBER   0x20u /* N */
#define DMK_CLASS_SPACE    0x40u /* White_Space without CR and LF */
#define DMK_CLASS_NEWLINE  0x80u /* CR, LF */

extern const uint8_t dmk_unicode_index[8704];
extern const char dmk_unicode_blocks[];

/* code <= 0x10ffff. */
static inline unsigned dmk_unicode_class(uint32_t code)
{
    const uint32_t block = dmk_unicode_index[code >> 7];

    return 1u << (dmk_unicode_blocks[block << 7 | (code & 127)] & 7);
}
