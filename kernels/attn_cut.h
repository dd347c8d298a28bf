/* How a device cuts attention on full layers into pieces: the keys of a row, and the rows of a sequence into tiles.
 *
 * The sums of a piece are added up after it, so where a row is cut is part of its result: it depends on the row's
 * position and on nothing else. Few pieces cost less to add up, but a row that is alone needs as many as
 * the device has room for. A tile's rows walk through their keys together, so they must be cut alike. */
#pragma once

#include "kernels/kernels.h"

#ifdef __CUDACC__
#define DMK_ATTN_CUT_INLINE static inline __host__ __device__
#else
#define DMK_ATTN_CUT_INLINE static inline
#endif

/* Positions from which on rows are cut into longer pieces of keys. */
#define DMK_ATTN_LONG      4096u
#define DMK_ATTN_VERY_LONG 32768u

/* Keys of a piece of a row at position pos. At most 32 pages. */
DMK_ATTN_CUT_INLINE uint32_t dmk_attn_split_keys(uint32_t pos)
{
    return pos < DMK_ATTN_LONG        ? DMK_ATTN_SPLIT
           : pos < DMK_ATTN_VERY_LONG ? 2 * DMK_ATTN_SPLIT
                                      : 4 * DMK_ATTN_SPLIT;
}

/* Rows that a device's tile takes of the left ones from position pos on: their keys are cut alike. */
DMK_ATTN_CUT_INLINE uint32_t dmk_attn_tile_tokens(uint32_t pos, uint32_t left)
{
    const uint32_t alike = pos < DMK_ATTN_LONG        ? DMK_ATTN_LONG - pos
                           : pos < DMK_ATTN_VERY_LONG ? DMK_ATTN_VERY_LONG - pos
                                                      : UINT32_MAX;
    const uint32_t most = left < DMK_ATTN_TILE_WIDE ? left : DMK_ATTN_TILE_WIDE;
    return most < alike ? most : alike;
}
