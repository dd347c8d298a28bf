/* Converting a checkpoint: the files of common/model/cut.h for the ranks of one layout, and their manifest.
 *
 * Threads take whole files. A file is written under a name that ends in .part, synced, renamed, and noted in
 * convert.journal with its checksum; manifest.json comes last and ends the conversion. So after a crash at any
 * time the same call goes on: files of the journal are read and kept if their checksums hold, all others are
 * made again, and the outcome is the same to the byte. Memory does not grow with the checkpoint: the source is
 * read piece by piece (dmk_convert_memory says how much a run may take). */
#pragma once

#include "common/model/manifest.h"

struct dmk_convert_conf {
    const char *src, *dst;
    struct dmk_layout layout;
    enum dmk_expert_format experts;
    uint32_t n_jobs; /* 0 = one a core, 8 at most */
    bool force;      /* replace what another conversion left in dst */
    bool verify;     /* read everything back at the end, or what is there already */
    /* From the caller's thread, some times a second; skipped: bytes that were kept. */
    void (*on_progress)(void *ud, const char *what, uint64_t done, uint64_t total,
                        uint64_t skipped);
    void *ud;
};

struct dmk_convert_report {
    uint64_t n_bytes;   /* of all files */
    uint64_t n_written; /* in this run */
    uint32_t n_files, n_kept;
    bool was_complete;           /* nothing had to be done */
    uint64_t n_blocks;           /* of FP8 */
    struct dmk_inexact *inexact; /* freed by the caller */
    uint32_t n_inexact;
};

int dmk_convert(const struct dmk_convert_conf *conf, struct dmk_convert_report *ret_report,
                struct dmk_error *reterr);

/* Bytes that a run may take, for a model of the published width. */
uint64_t dmk_convert_memory(uint32_t n_jobs);
