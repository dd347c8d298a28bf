/* What the two attention kernels share besides their arithmetic: the maps of a call's arrays.
 *
 * Both serve heads of 64, groups of at most 8 query heads per KV head and pages of 16 KiB. */
#pragma once

#include "kernels/attn_cut.h"
#include "kernels/cuda/cuda.h"

#define ATTN_PAGE_BYTES                                                                            \
    16384u /* K[64][64], then V[64][64], bf16: a tile of keys as wgmma reads it */

struct attn_maps {
    CUtensorMap q, pages, k, v; /* k and v only with fresh */
};

/* q comes in boxes of q_tokens tokens times the 8 heads of a group, pages in boxes of page_rows of their 128 rows. False,
 * with the stream's error set, when the arrays' alignment forbids it. Host only, about a microsecond. */
bool attn_make_maps(const struct dmk_attn_args *args, uint32_t q_tokens, uint32_t page_rows,
                    struct dmk_cuda_stream *stream, struct attn_maps *ret_maps);

void attn_prefill_sm90(const struct dmk_attn_args *args, struct dmk_stream *stream);
void attn_decode_sm90(const struct dmk_attn_args *args, struct dmk_stream *stream);
