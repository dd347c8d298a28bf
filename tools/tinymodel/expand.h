/* Compact checkpoints: model.json (shape, list of tensors, checksum) and model.bin (their numbers), and the
 * checkpoint in the Hugging Face layout that is made of them.
 *
 * A compact checkpoint holds only the vocabulary rows in use; all other ids share one more row. Formats:
 *   bf16    as in the checkpoint
 *   mxint8  signed bytes [rows, cols], then a scale byte s for each 32 of a row: q * 2^(s - 127), which is
 *           exact in BF16
 *   rows    mxint8 of the rows in use, in the order of the tensor "ids", then the row of all other ids
 *   mxfp4   blocks, then scales, as in the checkpoint
 *   u32     whole numbers ("ids", ascending)
 *
 * Opening checks everything: the checksum, that tensors lie inside the file, that there are exactly those
 * of the shape, and that every number can be written. No state outside the struct; any thread. */
#pragma once

#include <stddef.h>
#include "tools/tinymodel/tinymodel.h"

#define DMK_COMPACT_MAX_TENSORS 4096u

enum dmk_compact_format {
    DMK_COMPACT_BF16,
    DMK_COMPACT_MXINT8,
    DMK_COMPACT_ROWS,
    DMK_COMPACT_MXFP4,
    DMK_COMPACT_U32,
};

struct dmk_compact_tensor {
    char name[80];
    enum dmk_compact_format format;
    uint32_t rank;
    uint64_t dims[3];
    uint64_t n_elements;
    const uint8_t *data; /* in dmk_compact.data */
    uint64_t n_bytes;
};

struct dmk_compact {
    struct dmk_shape shape;
    uint8_t *data;
    uint64_t n_bytes;
    struct dmk_compact_tensor *tensors; /* sorted by name */
    uint32_t n_tensors;
    uint32_t *row_of_id; /* [vocab] */
};

/* Reads dir/model.json and dir/model.bin. */
int dmk_compact_open(const char *dir, struct dmk_compact *ret_compact, struct dmk_error *reterr);
void dmk_compact_close(struct dmk_compact *compact);

/* NULL when there is none. */
const struct dmk_compact_tensor *dmk_compact_find(const struct dmk_compact *compact,
                                                  const char *name, size_t name_len);

/* Writes the checkpoint; conf gives the folder, shards, threads, force, vocab and progress. */
int dmk_compact_expand(const struct dmk_compact *compact, const struct dmk_tinymodel_conf *conf,
                       uint64_t *ret_bytes, struct dmk_error *reterr);
