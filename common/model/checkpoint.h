/* All tensors of a checkpoint folder by name, whichever files they lie in.
 *
 * A folder is one of
 *   model.safetensors.index.json and the files that it names   (several files; a layer may straddle
 * them) model.safetensors                                          (one file) original/ with either
 * of the above                         (looked at only when neither is beside it) Nothing else is
 * opened: no patterns, no recursion. Names in an index must be plain file names, so nothing outside
 * the folder is reached except through links that the folder itself holds.
 *
 * Immutable after open: any thread. */
#pragma once

#include "common/model/safetensors.h"

struct dmk_checkpoint;

struct dmk_checkpoint_entry {
    const struct dmk_tensor *tensor;
    const char *path; /* of its file */
};

int dmk_checkpoint_open(const char *dir, struct dmk_checkpoint **ret, struct dmk_error *reterr);
void dmk_checkpoint_close(struct dmk_checkpoint **checkpoint);

/* The folder in which the files lie: dir, or dir/original. */
const char *dmk_checkpoint_dir(const struct dmk_checkpoint *checkpoint);
/* The file that decides what belongs to the checkpoint: the index, or the only file. */
const char *dmk_checkpoint_source(const struct dmk_checkpoint *checkpoint);

/* Sorted by name. */
size_t dmk_checkpoint_count(const struct dmk_checkpoint *checkpoint);
const struct dmk_checkpoint_entry *dmk_checkpoint_at(const struct dmk_checkpoint *checkpoint,
                                                     size_t index);

/* NULL when there is none; else its index for dmk_checkpoint_at too, where ret_index is given. */
const struct dmk_checkpoint_entry *dmk_checkpoint_find(const struct dmk_checkpoint *checkpoint,
                                                       const char *name, size_t *ret_index);

size_t dmk_checkpoint_n_files(const struct dmk_checkpoint *checkpoint);
const struct dmk_safetensors *dmk_checkpoint_file(const struct dmk_checkpoint *checkpoint,
                                                  size_t index);
