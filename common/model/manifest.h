/* manifest.json of a converted folder: what was converted, how it was cut, and the checksum of every file.
 *
 * A folder that has one is a converted checkpoint; it is written last, so a folder with one is whole. The last
 * member is a checksum over the text before it, so that damage and edits by hand are noticed. Tensors are listed
 * for people and for other programs; a reader here plans them itself (cut.h) and refuses a list that differs. */
#pragma once

#include <jansson.h>
#include "common/base/hash.h"
#include "common/model/cut.h"

#define DMK_MANIFEST_NAME    "manifest.json"
#define DMK_MANIFEST_JOURNAL "convert.journal"  /* of a conversion that has not ended */
#define DMK_MANIFEST_FORMAT  "damask-converted" /* stands at its beginning */
#define DMK_MANIFEST_VERSION 2u

struct dmk_manifest_file {
    char name[64];
    uint64_t n_bytes;
    struct dmk_id128 checksum; /* XXH3-128 of the whole file, as `xxhsum -H2` prints it */
};

/* A matrix of an expert in which FP8 could not hold every value of MXFP4. */
struct dmk_inexact {
    uint32_t layer, expert; /* of the whole model */
    bool gate_up;           /* else down */
    uint64_t n_blocks;      /* blocks of 128 x 128 that spread over more than 14 octaves */
    double largest_error;   /* of a value, in absolute terms */
};

struct dmk_manifest {
    struct dmk_id128 model_id; /* of the checkpoint that was converted: equal ids, equal model */
    char *source;              /* its folder */
    struct dmk_layout layout;
    enum dmk_expert_format experts;
    struct dmk_manifest_file *files; /* [n_files] in the order of the plan */
    uint32_t n_files;
    struct dmk_manifest_file *copied; /* [n_copied] config and vocabulary, as they were */
    uint32_t n_copied;
    uint64_t n_blocks; /* of FP8 in all */
    struct dmk_inexact *inexact;
    uint32_t n_inexact;
    json_t *root; /* of the text it was read from; NULL in one that is to be written */
};

/* -DMK_ENOENT when dir has none. */
int dmk_manifest_load(const char *dir, struct dmk_manifest *ret_manifest, struct dmk_error *reterr);
/* As load does with the file's text, but for the checksum. path is what the text is called in sentences. */
int dmk_manifest_parse(struct dmk_str text, const char *path, struct dmk_manifest *ret_manifest,
                       struct dmk_error *reterr);
void dmk_manifest_free(struct dmk_manifest *manifest);

/* Whether it lists the files and tensors of the plan, to the byte. */
int dmk_manifest_check(const struct dmk_manifest *manifest, const struct dmk_cut *cut,
                       const char *path, struct dmk_error *reterr);

/* Whether the config files that the engine reads are in dir as they were converted; all: whatever was copied. Others
 * than the engine's may be changed by whoever likes. */
int dmk_manifest_check_copied(const struct dmk_manifest *manifest, const char *dir, bool all,
                              struct dmk_error *reterr);

/* The text of the file. */
int dmk_manifest_write(const struct dmk_manifest *manifest, const struct dmk_cut *cut,
                       struct dmk_buf *out, struct dmk_error *reterr);
