/* Checks the device's operations against the plain ones, and the device engine against the host's.
 *
 *   check_cuda [--test NAME] [--seed N] [--bench]
 *
 * Every array has a twin in device memory between guard zones; outputs are full of NaN before a run. An operation
 * either gives the plain one's bits, or its distance is stated: `l2`, the norm of the difference over the norm of the
 * result, and `worst`, the largest difference of an element over the root mean square of all. Where no device
 * is, the program says so and exits with 77. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "common/backend/backend.h"

struct device {
    struct dmk_backend *be;
    struct dmk_stream *stream;
    struct dmk_kernels ref, cuda;
    uint64_t seed, draw;
    bool bench;
    const char *test;
    uint32_t n_checks, n_failed;
};

/* Memory on both sides, freed by device_end. in: random or zeroed by the caller on the host, sent by
 * device_send. */
struct twin {
    void *host; /* what the plain operation works on */
    void *dev;
    size_t bytes;
};

struct twin twin_new(struct device *d, size_t bytes); /* host and device poisoned with 0xff */
struct twin twin_device(struct device *d,
                        size_t bytes); /* device only, without guards: for benches */
struct twin twin_bf16(struct device *d, size_t n, float scale);
struct twin twin_f32(struct device *d, size_t n, float scale);
struct twin twin_bytes(struct device *d, size_t n, uint32_t low,
                       uint32_t count); /* low .. low + count - 1 */
struct twin twin_u32(struct device *d, size_t n, uint32_t below);
void twin_send(struct device *d,
               struct twin t); /* host to device, also done by the makers of random ones */

uint32_t draw_u32(struct device *d, uint32_t below);

/* Waits, looks at all guards and frees all twins. */
void device_end(struct device *d, const char *what);

void expect_bits(struct device *d, struct twin t, const char *what);
/* t.host has the plain result. */
void expect_bf16(struct device *d, struct twin t, double l2, double worst, const char *what);
void expect_f32(struct device *d, struct twin t, double l2, double worst, const char *what);
/* Two device results must be equal to the bit. */
void expect_same(struct device *d, const void *a_dev, const void *b_dev, size_t bytes,
                 const char *what);
void device_fetch(struct device *d, void *host, const void *dev, size_t bytes);
void fail(struct device *d, const char *what, const char *how);

/* With --bench: median of graph replays of `per` launches, with what one launch moves and computes. */
void device_bench(struct device *d, const char *what, void (*fn)(struct device *d, void *ud),
                  void *ud, double bytes, double flops);

void check_rows(struct device *d);
void check_pages(struct device *d);
void check_linear(struct device *d);
void check_linear_fp8(struct device *d); /* a part of it */
void check_attn(struct device *d);
void check_moe(struct device *d);
void check_sample(struct device *d);
void check_engine(struct device *d);
void check_ranks(struct device *d);
