/* One .safetensors file, mapped read-only and checked completely when opened.
 *
 * The format: a little-endian u64 N, N bytes of JSON {"name": {"dtype", "shape", "data_offsets"}},
 * then the data, packed without holes or overlap. Everything that the header says is checked
 * against the file's size before anybody reads data; every refusal names file, tensor and cause.
 *
 * Data pointers lie in the mapping and are NOT aligned to anything but by chance. Immutable after
 * open: any thread. A file that is truncated while mapped raises SIGBUS, as every mapped file does.
 */
#pragma once

#include "common/base/error.h"
#include "common/base/span.h"

#define DMK_TENSOR_MAX_RANK 8

enum dmk_dtype {
    DMK_DTYPE_BOOL,
    DMK_DTYPE_U8,
    DMK_DTYPE_I8,
    DMK_DTYPE_F8_E4M3,
    DMK_DTYPE_F8_E5M2,
    DMK_DTYPE_F8_E8M0,
    DMK_DTYPE_U16,
    DMK_DTYPE_I16,
    DMK_DTYPE_F16,
    DMK_DTYPE_BF16,
    DMK_DTYPE_U32,
    DMK_DTYPE_I32,
    DMK_DTYPE_F32,
    DMK_DTYPE_U64,
    DMK_DTYPE_I64,
    DMK_DTYPE_F64,
    DMK_N_DTYPES,
};

/* The format's own word for it, e.g. "BF16". */
const char *dmk_dtype_name(enum dmk_dtype dtype);
uint32_t dmk_dtype_bytes(enum dmk_dtype dtype);

struct dmk_tensor {
    const char *name; /* lives as long as the file */
    enum dmk_dtype dtype;
    uint32_t rank;
    uint64_t dims[DMK_TENSOR_MAX_RANK];
    const uint8_t *data;
    uint64_t n_bytes;
};

struct dmk_safetensors;

int dmk_safetensors_open(const char *path, struct dmk_safetensors **ret, struct dmk_error *reterr);
void dmk_safetensors_close(struct dmk_safetensors **file);

const char *dmk_safetensors_path(const struct dmk_safetensors *file);
size_t dmk_safetensors_count(const struct dmk_safetensors *file);

/* In the order of their data. */
const struct dmk_tensor *dmk_safetensors_at(const struct dmk_safetensors *file, size_t index);

/* The data section: all tensors, one after the other. */
struct dmk_bytes dmk_safetensors_data(const struct dmk_safetensors *file);
/* The whole file. */
struct dmk_bytes dmk_safetensors_bytes(const struct dmk_safetensors *file);
