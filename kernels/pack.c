/* Expert weights for the CUDA kernels: repacked MXFP4, and FP8 made from it. */
#include "kernels/pack.h"

#include <math.h>
#include <string.h>
#include "kernels/dtype.h"

#define PACK_GROUP_COLS 192 /* columns of one group of warps in a stage */
#define FP8_TILE        128

/* Row of the matrix that stands at row `at` of the packed one. In groups of 16 rows the first 8 are gates
 * and the last 8 their ups, since one thread of a matrix product holds rows g and g + 8. */
static uint32_t source_row(uint32_t at, bool paired)
{
    if (!paired) {
        return at;
    }
    uint32_t in = at % 16;
    return at / 16 * 16 + 2 * (in % 8) + in / 8;
}

static uint32_t packed_row(uint32_t row, bool paired)
{
    if (!paired) {
        return row;
    }
    uint32_t in = row % 16;
    return row / 16 * 16 + in / 2 + 8 * (in % 2);
}

static uint32_t div_up(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* Where the 4 bits of code j (0, 1: row g, columns 2t and 2t + 1; 2, 3: row g + 8; 4 to 7: the same eight
 * columns on) stand in a word: the two low ones of its magnitude, the third, and its sign. */
static const uint8_t code_low_at[8] = {6, 22, 2, 18, 12, 28, 0, 16};
static const uint8_t code_top_at[8] = {8, 24, 4, 20, 14, 30, 10, 26};
static const uint8_t code_sign_at[8] = {15, 31, 11, 27, 21, 5, 9, 25};

static uint32_t word_encode(const uint8_t code[8])
{
    uint32_t word = 0;
    for (int j = 0; j < 8; j++) {
        word |= (uint32_t)(code[j] & 3) << code_low_at[j];
        word |= (uint32_t)(code[j] >> 2 & 1) << code_top_at[j];
        word |= (uint32_t)(code[j] >> 3) << code_sign_at[j];
    }
    return word;
}

static uint8_t matrix_code(const uint8_t *blocks, uint32_t rows, uint32_t cols, uint32_t row,
                           uint32_t col)
{
    if (row >= rows || col >= cols) {
        return 0;
    }
    uint8_t byte = blocks[((size_t)row * cols + col) / 2];
    return col % 2 ? byte >> 4 : byte & 15;
}

size_t dmk_mxfp4_pack_bytes(uint32_t rows, uint32_t cols)
{
    return (size_t)div_up(rows, DMK_MXPACK_ROWS) * div_up(cols, DMK_MXPACK_STAGE_COLS) *
           DMK_MXPACK_STAGE_BYTES;
}

/* The 16 bytes of one thread: four words, 64 columns. */
static void pack_thread(const uint8_t *blocks, uint32_t rows, uint32_t cols, bool paired,
                        uint32_t row0, uint32_t col0, uint32_t lane, uint8_t *dst)
{
    uint32_t row[2] = {source_row(row0 + lane / 4, paired),
                       source_row(row0 + lane / 4 + 8, paired)};
    for (uint32_t i = 0; i < 4; i++) {
        uint8_t code[8];
        for (uint32_t j = 0; j < 8; j++) {
            uint32_t col = col0 + 16 * i + 8 * (j / 4) + 2 * (lane % 4) + j % 2;
            code[j] = matrix_code(blocks, rows, cols, row[j / 2 % 2], col);
        }
        uint32_t word = word_encode(code);
        memcpy(dst + (size_t)4 * i, &word, sizeof(word));
    }
}

/* Bytes of a stage's scales: group, warp, row g, block of 32 columns, row g or g + 8. Stored is the
 * exponent field of the bf16 multiplier, scale + 126. */
static size_t pack_scales(const uint8_t *scales, uint32_t rows, uint32_t cols, bool paired,
                          uint32_t row0, uint32_t col0, uint8_t *dst)
{
    size_t n_bad = 0;
    for (uint32_t i = 0; i < DMK_MXPACK_SPLITS * 384; i++) {
        uint32_t group = i / 384, warp = i / 96 % 4, g = i / 12 % 8, block = i / 2 % 6;
        uint32_t row = source_row(row0 + 16 * warp + g + 8 * (i % 2), paired);
        uint32_t col = col0 + group * PACK_GROUP_COLS + 32 * block;
        uint8_t scale = 1;
        if (row < rows && col < cols) {
            scale = scales[(size_t)row * (cols / 32) + col / 32];
        }
        n_bad += scale > DMK_MXPACK_MAX_SCALE;
        dst[i] = (uint8_t)(scale + 126);
    }
    return n_bad;
}

size_t dmk_mxfp4_pack(const uint8_t *blocks, const uint8_t *scales, uint32_t rows, uint32_t cols,
                      bool paired, uint8_t *dst)
{
    size_t n_bad = 0;
    uint32_t n_stages = div_up(cols, DMK_MXPACK_STAGE_COLS);
    for (uint32_t tile = 0; tile < div_up(rows, DMK_MXPACK_ROWS); tile++) {
        for (uint32_t s = 0; s < n_stages; s++) {
            for (uint32_t i = 0; i < 3 * DMK_MXPACK_SPLITS * 128; i++) {
                uint32_t quad = i / 128, thread = i % 128;
                pack_thread(blocks, rows, cols, paired, tile * DMK_MXPACK_ROWS + thread / 32 * 16,
                            s * DMK_MXPACK_STAGE_COLS + quad * 64, thread % 32,
                            dst + (size_t)16 * i);
            }
            n_bad += pack_scales(scales, rows, cols, paired, tile * DMK_MXPACK_ROWS,
                                 s * DMK_MXPACK_STAGE_COLS, dst + DMK_MXPACK_CODE_BYTES);
            dst += DMK_MXPACK_STAGE_BYTES;
        }
    }
    return n_bad;
}

float dmk_mxfp4_packed_value(const uint8_t *packed, uint32_t rows, uint32_t cols, bool paired,
                             uint32_t row, uint32_t col)
{
    (void)rows;
    uint32_t at = packed_row(row, paired), in = at % DMK_MXPACK_ROWS;
    uint32_t stage =
        at / DMK_MXPACK_ROWS * div_up(cols, DMK_MXPACK_STAGE_COLS) + col / DMK_MXPACK_STAGE_COLS;
    const uint8_t *src = packed + (size_t)stage * DMK_MXPACK_STAGE_BYTES;
    uint32_t c = col % DMK_MXPACK_STAGE_COLS, warp = in / 16, high = in / 8 % 2, g = in % 8;
    uint32_t thread = 32 * warp + 4 * g + c % 8 / 2;
    uint32_t j = c / 8 % 2 * 4 + 2 * high + c % 2, word;
    memcpy(&word, src + ((size_t)c / 64 * 128 + thread) * 16 + c / 16 % 4 * 4, sizeof(word));
    uint32_t code = (word >> code_low_at[j] & 3) | (word >> code_top_at[j] & 1) << 2 |
                    (word >> code_sign_at[j] & 1) << 3;
    uint32_t block = c % PACK_GROUP_COLS / 32;
    uint8_t field = src[DMK_MXPACK_CODE_BYTES + c / PACK_GROUP_COLS * 384 + warp * 96 + g * 12 +
                        2 * block + high];
    /* The multiplier has the exponent field as stored, bias 127; the code counts for 2^-126 less. */
    return ldexpf(dmk_e2m1_to_f32(code), field - 127 - 126);
}

/* Largest and smallest scale of the groups of a 128 x 128 block that are not all zero. */
static void block_range(const uint8_t *blocks, const uint8_t *scales, uint32_t rows, uint32_t cols,
                        uint32_t row0, uint32_t col0, int *ret_min, int *ret_max)
{
    int min = 255, max = -1;
    for (uint32_t r = row0; r < rows && r < row0 + DMK_FP8_BLOCK; r++) {
        for (uint32_t c = col0; c < cols && c < col0 + DMK_FP8_BLOCK; c += DMK_MXFP4_BLOCK) {
            size_t group = ((size_t)r * cols + c) / DMK_MXFP4_BLOCK;
            uint8_t any = 0;
            for (int i = 0; i < DMK_MXFP4_BLOCK_BYTES; i++) {
                any |= blocks[group * DMK_MXFP4_BLOCK_BYTES + i] & 0x77;
            }
            if (any) {
                min = scales[group] < min ? scales[group] : min;
                max = scales[group] > max ? scales[group] : max;
            }
        }
    }
    *ret_min = min;
    *ret_max = max;
}

/* Codes of the 16 values times 2^shift. */
#define SHIFT_LOW  DMK_FP8PACK_SHIFT_LOW
#define SHIFT_HIGH DMK_FP8PACK_SHIFT_HIGH
/* By shift, then by a byte of MXFP4: the codes of its two numbers in the order of memory. */
typedef uint8_t shift_table[SHIFT_HIGH - SHIFT_LOW + 1][256][2];

static void fill_shift_table(shift_table table)
{
    for (int shift = SHIFT_LOW; shift <= SHIFT_HIGH; shift++) {
        uint8_t codes[16];
        for (uint32_t code = 0; code < 16; code++) {
            codes[code] = dmk_f32_to_e4m3(ldexpf(dmk_e2m1_to_f32(code), shift));
        }
        for (uint32_t byte = 0; byte < 256; byte++) {
            table[shift - SHIFT_LOW][byte][0] = codes[byte & 15];
            table[shift - SHIFT_LOW][byte][1] = codes[byte >> 4];
        }
    }
}

/* Exponent of a block's scale: 6 * 2^6 = 384 is the largest number that fits; 0.5 * 2^-8 the smallest code. */
static int block_exponent(const uint8_t *blocks, const uint8_t *scales, uint32_t rows,
                          uint32_t cols, uint32_t row0, uint32_t col0, size_t *n_inexact)
{
    int min, max;
    block_range(blocks, scales, rows, cols, row0, col0, &min, &max);
    *n_inexact += max - min > 14;
    return max < 0 ? 127 : max - SHIFT_HIGH;
}

size_t dmk_mxfp4_to_fp8(const uint8_t *blocks, const uint8_t *scales, uint32_t rows, uint32_t cols,
                        uint8_t *ret_codes, float *ret_scales)
{
    size_t n_inexact = 0;
    uint32_t n_col_blocks = div_up(cols, DMK_FP8_BLOCK);
    shift_table table;
    fill_shift_table(table);
    for (uint32_t row0 = 0; row0 < rows; row0 += DMK_FP8_BLOCK) {
        for (uint32_t col0 = 0; col0 < cols; col0 += DMK_FP8_BLOCK) {
            int shared = block_exponent(blocks, scales, rows, cols, row0, col0, &n_inexact);
            ret_scales[row0 / DMK_FP8_BLOCK * n_col_blocks + col0 / DMK_FP8_BLOCK] =
                ldexpf(1.0f, shared - 127);
            for (uint32_t r = row0; r < rows && r < row0 + DMK_FP8_BLOCK; r++) {
                for (uint32_t c = col0; c < cols && c < col0 + DMK_FP8_BLOCK;
                     c += DMK_MXFP4_BLOCK) {
                    size_t group = ((size_t)r * cols + c) / DMK_MXFP4_BLOCK;
                    int shift = scales[group] - shared;
                    /* All-zero groups may have any scale; of others none is above. */
                    shift = shift > SHIFT_HIGH ? SHIFT_HIGH : shift < SHIFT_LOW ? SHIFT_LOW : shift;
                    for (uint32_t i = 0; i < DMK_MXFP4_BLOCK_BYTES; i++) {
                        memcpy(ret_codes + group * DMK_MXFP4_BLOCK + (size_t)2 * i,
                               table[shift - SHIFT_LOW][blocks[group * DMK_MXFP4_BLOCK_BYTES + i]],
                               2);
                    }
                }
            }
        }
    }
    return n_inexact;
}

/* Scales under which numbers of E4M3 are of E2M1: 2^-11 for the smallest, 2^7 for 448, which none is. */
#define BACK_LOW  (-11)
#define BACK_HIGH 7
typedef uint8_t back_table[BACK_HIGH - BACK_LOW + 1][256];

#define NO_CODE 0xff

/* By shift of the scale, the E2M1 code of an E4M3 code, or NO_CODE where none is. */
static void fill_back_table(back_table table)
{
    memset(table, NO_CODE, sizeof(back_table));
    for (int shift = BACK_LOW; shift <= BACK_HIGH; shift++) {
        for (uint32_t code = 0; code < 16; code++) {
            float x = ldexpf(dmk_e2m1_to_f32(code), shift);
            uint8_t e4m3 = dmk_f32_to_e4m3(x);
            if (dmk_e4m3_to_f32(e4m3) == x) {
                table[shift - BACK_LOW][e4m3] = (uint8_t)code;
            }
        }
    }
}

/* The smallest scale under which 6 is not below the number; of 0 and NaN any. */
static int least_shift(uint8_t magnitude)
{
    int exponent;
    float f = frexpf(dmk_e4m3_to_f32(magnitude), &exponent); /* in [0.5, 1): 6 is 0.75 * 2^3 */
    if (magnitude == 0 || magnitude == 0x7f) {
        return 0;
    }
    return f <= 0.75f ? exponent - 3 : exponent - 2;
}

/* 32 codes to 16 bytes. */
static bool group_to_mxfp4(const uint8_t *codes, const uint8_t *back, uint8_t *ret_block)
{
    uint8_t any = 0;
    for (uint32_t i = 0; i < DMK_MXFP4_BLOCK_BYTES; i++) {
        uint8_t low = back[codes[2 * i]], high = back[codes[2 * i + 1]];
        any |= low | high;
        ret_block[i] = (uint8_t)((low & 15) | high << 4);
    }
    return any < 16;
}

bool dmk_fp8_to_mxfp4(const uint8_t *codes, const float *scales, uint32_t rows, uint32_t cols,
                      uint8_t *ret_blocks, uint8_t *ret_scales)
{
    back_table table;
    fill_back_table(table);
    for (size_t group = 0; group < (size_t)rows * cols / DMK_MXFP4_BLOCK; group++) {
        const uint8_t *at = codes + group * DMK_MXFP4_BLOCK;
        const float scale = scales[group * DMK_MXFP4_BLOCK % cols / DMK_FP8_BLOCK];
        uint8_t most = 0;
        int exponent;
        for (uint32_t i = 0; i < DMK_MXFP4_BLOCK; i++) {
            most = (at[i] & 0x7f) > most ? at[i] & 0x7f : most;
        }
        const int shift = least_shift(most);
        /* A power of two is 0.5 * 2^exponent. */
        if (frexpf(scale, &exponent) != 0.5f) {
            return false;
        }
        const int byte = most == 0 ? 127 : shift + exponent - 1 + 127;
        if (byte < 0 || byte > 254 ||
            !group_to_mxfp4(at, table[shift - BACK_LOW],
                            ret_blocks + group * DMK_MXFP4_BLOCK_BYTES)) {
            return false;
        }
        ret_scales[group] = (uint8_t)byte;
    }
    return true;
}

/* A word of packed FP8 codes: where the magnitude and the sign of code j stand; codes 0 to 3 are columns 4t to 4t + 3, 4
 * to 7 those 16 on. */
static const uint8_t fp8_mag_at[8] = {0, 4, 8, 12, 16, 20, 24, 28};
static const uint8_t fp8_sign_at[8] = {7, 15, 23, 31, 3, 11, 19, 27};

size_t dmk_fp8_pack_bytes(uint32_t rows, uint32_t cols)
{
    return (size_t)div_up(rows, FP8_TILE) * div_up(cols, FP8_TILE) * DMK_FP8PACK_PIECE_BYTES;
}

/* What the 32 columns from `col` on of a row say of their exponent, `shared` being the block's. */
static uint8_t shift_byte(const uint8_t *blocks, const uint8_t *scales, uint32_t rows,
                          uint32_t cols, uint32_t row, uint32_t col, int shared)
{
    if (row >= rows || col >= cols) {
        return 0;
    }
    size_t group = ((size_t)row * cols + col) / DMK_MXFP4_BLOCK;
    uint8_t any = 0;
    for (int i = 0; i < DMK_MXFP4_BLOCK_BYTES; i++) {
        any |= blocks[group * DMK_MXFP4_BLOCK_BYTES + i] & 0x77;
    }
    /* Zero has no exponent. Of others none is above the block's by more than SHIFT_HIGH. */
    int shift = any ? scales[group] - shared : SHIFT_LOW;
    return (uint8_t)(8 * ((shift < SHIFT_LOW ? SHIFT_LOW : shift) - SHIFT_LOW));
}

/* One piece: 128 rows, 128 columns. */
static void pack_piece(const uint8_t *blocks, const uint8_t *scales, uint32_t rows, uint32_t cols,
                       bool paired, uint32_t row0, uint32_t col0, int shared, uint8_t *dst)
{
    for (uint32_t i = 0; i < DMK_FP8PACK_CODE_BYTES / 4; i++) {
        /* Warpgroup, half of the columns, thread, then 32 columns and row within the 16 bytes. */
        uint32_t thread = i / 4 % 128, lane = thread % 32, k = i / 512 % 2 * 2 + i / 2 % 2,
                 word = 0;
        uint32_t at = i / 1024 * 64 + thread / 32 * 16 + lane / 4 + 8 * (i % 2);
        for (uint32_t j = 0; j < 8; j++) {
            uint32_t col = col0 + 32 * k + 16 * (j / 4) + 4 * (lane % 4) + j % 4;
            uint32_t code = matrix_code(blocks, rows, cols, source_row(row0 + at, paired), col);
            word |= (code & 7) << fp8_mag_at[j] | code >> 3 << fp8_sign_at[j];
        }
        memcpy(dst + (size_t)4 * i, &word, sizeof(word));
    }
    for (uint32_t i = 0; i < DMK_FP8_BLOCK * 4; i++) {
        /* 16 rows, row g, row g or g + 8, 32 columns. */
        uint32_t at = i / 64 * 16 + i / 8 % 8 + 8 * (i / 4 % 2);
        dst[DMK_FP8PACK_CODE_BYTES + i] = shift_byte(
            blocks, scales, rows, cols, source_row(row0 + at, paired), col0 + i % 4 * 32, shared);
    }
}

size_t dmk_fp8_pack(const uint8_t *blocks, const uint8_t *scales, uint32_t rows, uint32_t cols,
                    bool paired, uint8_t *dst, float *ret_scales)
{
    size_t n_inexact = 0;
    for (uint32_t row0 = 0; row0 < rows; row0 += FP8_TILE) {
        for (uint32_t col0 = 0; col0 < cols; col0 += FP8_TILE) {
            /* Pairs stay within 16 rows, so a tile holds the rows of its block. */
            int shared = block_exponent(blocks, scales, rows, cols, row0, col0, &n_inexact);
            pack_piece(blocks, scales, rows, cols, paired, row0, col0, shared, dst);
            *ret_scales++ = ldexpf(1.0f, shared - 127);
            dst += DMK_FP8PACK_PIECE_BYTES;
        }
    }
    return n_inexact;
}

uint8_t dmk_fp8_packed_code(const uint8_t *packed, uint32_t cols, bool paired, uint32_t row,
                            uint32_t col)
{
    uint32_t at = packed_row(row, paired), in = at % FP8_TILE, c = col % FP8_TILE;
    const uint8_t *piece =
        packed +
        ((size_t)at / FP8_TILE * div_up(cols, FP8_TILE) + col / FP8_TILE) * DMK_FP8PACK_PIECE_BYTES;
    uint32_t thread = in / 16 % 4 * 32 + in % 8 * 4 + c % 16 / 4, high = in / 8 % 2,
             j = c / 16 % 2 * 4 + c % 4;
    uint32_t i = ((in / 64 * 2 + c / 64) * 128 + thread) * 4 + c / 32 % 2 * 2 + high, word;
    memcpy(&word, piece + (size_t)4 * i, sizeof(word));
    uint32_t code = (word >> fp8_mag_at[j] & 7) | (word >> fp8_sign_at[j] & 1) << 3;
    uint8_t byte = piece[DMK_FP8PACK_CODE_BYTES + in / 16 * 64 + in % 8 * 8 + high * 4 + c / 32];
    int shift = byte / 8 + SHIFT_LOW;
    return dmk_f32_to_e4m3(ldexpf(dmk_e2m1_to_f32(code), shift));
}
