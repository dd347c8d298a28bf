/* Checks every set of fast kernels against the plain ones, bit for bit, and times them.
 *
 *   check [--test NAME] [--variant NAME] [--seed N] [--repeat N] [--bench]
 *
 * One file per family of operations. A test fills inputs from the seed, runs the plain operation and the
 * variant on buffers of their own, poisoned with NaN and with guard zones on both sides, and compares
 * whole buffers, what must not be written included. The stream hands out items in a shuffled order and
 * scratch memory full of NaN, since no item may lean on another. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kernels/kernels.h"

struct check {
    struct dmk_kernels ref, fast;
    struct dmk_stream *stream;
    uint64_t seed, stream_id; /* of the next random array */
    bool bench;
    const char *test;
    uint32_t n_checks, n_failed;
};

/* Memory of `bytes`, 8-byte aligned only, filled with 0xff (NaN) between guards; freed by check_end. */
void *check_buf(struct check *c, size_t bytes);

/* Ends a case: looks at all guards, frees all buffers. what names the case for the report. */
void check_end(struct check *c, const char *what);

/* Reports the first differing element of two outputs. */
void check_equal(struct check *c, const void *want, const void *got, size_t bytes, size_t element,
                 const char *what);

/* Random inputs. bf16 values are spread evenly over [-scale, scale], with some exact zeros;
 * these arrays are aligned to their elements only. */
uint16_t *check_bf16(struct check *c, size_t n, float scale);
uint32_t check_u32(struct check *c, uint32_t below);
uint8_t *check_bytes(struct check *c, size_t n);

/* Times fn (with --bench) on one thread, in processor time: median, spread, and rates from what one call
 * moves and computes. */
void check_bench(struct check *c, const char *what, void (*fn)(void *ud), void *ud, double bytes,
                 double flops);

void check_exp(struct check *c);
void check_linear(struct check *c);
void check_rows(struct check *c);
void check_pages(struct check *c);
void check_attn(struct check *c);
void check_moe(struct check *c);
