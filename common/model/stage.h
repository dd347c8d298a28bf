/* Host memory to a device through two pinned pieces: while the device takes one, a team of threads fills the other.
 *
 * Mapped files are pageable: the driver would copy them by itself, one thread, into pinned memory of its own. All
 * copies are queued on the rank's stream in the order of the calls. Used at start, by the engine's thread. */
#pragma once

#include "common/model/engine_internal.h"

struct dmk_stage;

int dmk_stage_new(struct dmk_rank *rank, struct dmk_stage **ret, struct dmk_error *reterr);
/* After the stream has been waited for. */
void dmk_stage_free(struct dmk_stage **stage);

/* n_rows of row_bytes, src_stride bytes apart in src, packed at dst. src may be used again when it returns. */
void dmk_stage_rows(struct dmk_stage *stage, void *dst, const void *src, size_t src_stride,
                    size_t row_bytes, size_t n_rows);

/* FP8 matrices of a converted folder ([n][rows][cols] E4M3, a scale for each 128 x 128) as the MXFP4 that they
 * were made of, which is what kernels are given: blocks [n][rows][cols/32][16] and scales [n][rows][cols/32].
 * -DMK_EFORMAT, with the first matrix that no MXFP4 makes; then nothing at dst counts. */
int dmk_stage_fp8(struct dmk_stage *stage, uint8_t *dst_blocks, uint8_t *dst_scales,
                  const uint8_t *codes, const float *scales, uint32_t n, uint32_t rows,
                  uint32_t cols, uint32_t *ret_bad);
