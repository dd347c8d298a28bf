/* Expert weights in the order in which the CUDA kernels read them.
 *
 * Pure functions on host memory, one expert's matrix a call, any number of threads. They need no device,
 * so a converter may run anywhere. A matrix is [rows][cols] along K = cols; `paired` says that rows 2j and
 * 2j + 1 are the gate and the up of intermediate j and shall end in one thread's registers.
 *
 * Packed MXFP4: tiles of 64 rows; a tile holds ceil(cols / 960) stages of 32640 bytes, each what the copy
 * engine brings at once: for each of 5 groups of four warps (192 columns each) 3 x 128 threads x 16 bytes of
 * codes, then for all of them the scales, 12 bytes for the row pair of 4 threads. A 32-bit word holds the 8
 * codes of one thread's A operand of a 16 x 16 matrix product, its bits placed so that shifts and masks leave
 * bf16 numbers. What lies outside the matrix is zero.
 *
 * Packed for FP8 products: the kernel makes E4M3 numbers with a power-of-two scale a block of 128 x 128, and
 * memory holds the four bits that they came from. Tiles of 128 rows; a tile holds ceil(cols / 128) pieces of 8704
 * bytes: for each of two warpgroups (64 rows) 2 x 128 threads x 16 bytes of codes, then 4 bytes a row, one for each 32
 * columns, that say how far the group's exponent lies from the block's. A word holds the 8 codes of a thread's row in
 * a product of 32 columns: magnitudes of columns 4t to 4t + 3 in the low nibbles, of 4t + 16 to 4t + 19 in the high
 * ones, and in the fourth bits of the nibbles, from the lowest, signs of columns 16, 0, 17, 1, 18, 2, 19 and 3 on. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define DMK_MXPACK_ROWS        64
#define DMK_MXPACK_SPLITS      5 /* groups of warps that share the columns of a stage */
#define DMK_MXPACK_STAGE_COLS  960
#define DMK_MXPACK_CODE_BYTES  30720
#define DMK_MXPACK_STAGE_BYTES 32640
#define DMK_MXPACK_MAX_SCALE   128 /* the multiplier 2^(scale - 1) has to be a bf16 number */

#define DMK_FP8PACK_CODE_BYTES  8192
#define DMK_FP8PACK_PIECE_BYTES 8704
/* A group's byte is 8 * (its shift - the lowest). */
#define DMK_FP8PACK_SHIFT_LOW  (-14) /* from here down every number rounds to zero */
#define DMK_FP8PACK_SHIFT_HIGH 6     /* 6 * 2^6 is the largest that fits */

/* Bytes of one expert's matrix. */
size_t dmk_mxfp4_pack_bytes(uint32_t rows, uint32_t cols);

/* blocks [rows][cols/32][16], scales [rows][cols/32]; cols is a multiple of 32, rows of 2 when paired.
 * Returns the number of scales above DMK_MXPACK_MAX_SCALE, whose blocks are wrong: the caller refuses the
 * matrix unless it is 0. dst is 16-byte aligned and need not be cleared. */
size_t dmk_mxfp4_pack(const uint8_t *blocks, const uint8_t *scales, uint32_t rows, uint32_t cols,
                      bool paired, uint8_t *dst);

/* Row and column of the packed matrix as a number: what the kernel multiplies by. For tests. */
float dmk_mxfp4_packed_value(const uint8_t *packed, uint32_t rows, uint32_t cols, bool paired,
                             uint32_t row, uint32_t col);

/* Codes [rows][cols] E4M3 and scales [ceil(rows/128)][ceil(cols/128)], powers of two. A block is exact when
 * the exponents of its MXFP4 scales (all-zero groups aside) spread over at most 14 octaves; returns the
 * number of blocks that are not, in which the smallest values were rounded to the nearest code. */
size_t dmk_mxfp4_to_fp8(const uint8_t *blocks, const uint8_t *scales, uint32_t rows, uint32_t cols,
                        uint8_t *ret_codes, float *ret_scales);

/* The way back: codes [rows][cols] and the scales [ceil(cols/128)] of these rows, 128 at most, to blocks and scales
 * that stand for the same numbers. Scales come out as small as they can be, so not always as they were. False when
 * a group of 32 is not of MXFP4; cols is a multiple of 32. */
bool dmk_fp8_to_mxfp4(const uint8_t *codes, const float *scales, uint32_t rows, uint32_t cols,
                      uint8_t *ret_blocks, uint8_t *ret_scales);

/* As dmk_mxfp4_pack, with the scales of the blocks. The numbers are those of dmk_mxfp4_to_fp8, which also says what is
 * returned. */
size_t dmk_fp8_pack_bytes(uint32_t rows, uint32_t cols);
size_t dmk_fp8_pack(const uint8_t *blocks, const uint8_t *scales, uint32_t rows, uint32_t cols,
                    bool paired, uint8_t *dst, float *ret_scales);

/* The E4M3 code that the kernel makes of a row and a column. For tests. */
uint8_t dmk_fp8_packed_code(const uint8_t *packed, uint32_t cols, bool paired, uint32_t row,
                            uint32_t col);

#if defined(__cplusplus)
}
#endif
