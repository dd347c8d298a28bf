/* Hand-made files for the loader's tests: folders under $TMPDIR, safetensors files of any content, and
 * one small checkpoint that can be written in every layout with the same numbers. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MK_LAYERS 2
#define MK_H      64
#define MK_I      32
#define MK_HEADS  8
#define MK_E      8
#define MK_V      16
#define MK_Q      (MK_HEADS * 64)
#define MK_KV     (8 * 64)

/* A fresh folder; it is removed with all files by mk_remove. */
void mk_folder(char ret_dir[64]);
void mk_subfolder(const char *dir, const char *name);
void mk_remove(const char *dir);

void mk_file(const char *dir, const char *name, const void *data, size_t len);
void mk_text(const char *dir, const char *name, const char *text);

/* 8 bytes of length, the header, n_data bytes of a fixed pattern. */
void mk_safetensors(const char *dir, const char *name, const char *header, size_t n_data);

struct mk_tensor {
    char name[96];
    const char *dtype;
    uint32_t rank;
    uint64_t dims[4];
    uint8_t *data;
    size_t n_bytes;
    uint32_t file; /* shard that it goes to */
};

struct mk_checkpoint {
    struct mk_tensor tensors[64];
    size_t n_tensors;
};

enum mk_kind { MK_HF, MK_HF_BF16, MK_ORIGINAL };

/* The tensors of the small checkpoint. Numbers depend on the place in the model only, not on the kind;
 * BF16 experts are the exact values of the MXFP4 ones, stored (in, out). */
void mk_checkpoint_make(struct mk_checkpoint *ckpt, enum mk_kind kind);
void mk_checkpoint_free(struct mk_checkpoint *ckpt);
struct mk_tensor *mk_checkpoint_find(struct mk_checkpoint *ckpt, const char *name);
void mk_checkpoint_drop(struct mk_checkpoint *ckpt, const char *name);

/* Writes data files (one, or n_files with an index) but no config. pad makes the header's length odd. */
void mk_checkpoint_write(const struct mk_checkpoint *ckpt, const char *dir, uint32_t n_files,
                         bool pad);

/* config.json of the small checkpoint. */
const char *mk_config(enum mk_kind kind);
