/* What reading and writing of manifest.json share. Internal to common/model. */
#pragma once

#include <jansson.h>
#include "common/model/manifest.h"

/* The last key, whose value is over all text in front of it. */
#define DMK_MANIFEST_CHECKSUM "\"checksum\""

/* The list of a file's tensors, as the manifest has it: names, shapes, offsets, slices. The caller's. */
json_t *dmk_manifest__tensors(const struct dmk_cut *cut, const struct dmk_cut_file *f);
