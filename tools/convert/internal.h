/* What the parts of the converter share. */
#pragma once

#include <stdatomic.h>
#include "tools/convert/convert.h"

#define CONVERT_PIECE ((size_t)512 << 10) /* bytes that are read at once */

/* The checkpoint as bytes on disk: pointers of the weights are addresses, never read through, so that no page
 * of it counts for this process. Any thread. */
struct convert_source {
    struct dmk_weights *weights;
    struct dmk_rank_weights *ranks; /* [tp * dp] */
    uint32_t n_ranks;
    struct convert_span {
        const uint8_t *begin; /* of the data section, as it is mapped */
        uint64_t n_bytes;
        uint64_t start;     /* of it in the file */
        int64_t changed[2]; /* seconds and nanoseconds, when it was opened */
        int fd;
        const char *path;
    } * spans; /* [n_spans] by address */
    size_t n_spans;
    struct dmk_id128 model_id;
    struct dmk_id128 stamp; /* over names, sizes and times of the files */
};

int convert_source_open(const char *dir, struct dmk_layout layout,
                        struct convert_source *ret_source, struct dmk_error *reterr);
void convert_source_close(struct convert_source *source);
/* Whether its files are still as they were opened. */
int convert_source_check(const struct convert_source *source, struct dmk_error *reterr);
int convert_source_read(const struct convert_source *source, const void *address, uint64_t n_bytes,
                        void *dst, struct dmk_error *reterr);

/* What is known of a file that is done. */
struct convert_done {
    bool noted; /* in the journal; else nothing below holds */
    uint64_t n_bytes;
    struct dmk_id128 checksum;
    struct dmk_inexact *inexact;
    uint32_t n_inexact;
};

struct convert_run {
    const struct dmk_convert_conf *conf;
    const struct convert_source *source;
    const struct dmk_cut *cut;
    struct convert_done *done; /* [n_files] */
    int dir_fd;
    int journal_fd;
    bool verifying;
    atomic_uint next_file, n_kept;
    atomic_ullong done_bytes, skipped_bytes;
    atomic_int failure; /* status; the first one's sentence is in error */
    atomic_flag error_taken;
    struct dmk_error error;
    void *journal_lock; /* pthread_mutex_t */
};

/* Writes one file under its .part name, and syncs it; *ret_done is filled. */
int convert_write_file(struct convert_run *run, const struct dmk_cut_file *file,
                       struct convert_done *ret_done, struct dmk_error *reterr);
/* 1 when the file in dst has the size and checksum, 0 when not. */
int convert_check_file(struct convert_run *run, const char *name, const struct convert_done *done,
                       struct dmk_error *reterr);

/* Config and vocabulary, which are taken along as they are. */
#define CONVERT_N_SMALL 7
extern const char *const convert_small_files[CONVERT_N_SMALL];

/* The folder dst. check refuses what is not of a conversion; empty removes one, with the journal locked; tidy removes
 * what a run that was stopped left half written. */
int convert_folder_open(struct convert_run *run, struct dmk_error *reterr);
int convert_folder_check(struct convert_run *run, struct dmk_error *reterr);
int convert_folder_empty(struct convert_run *run, struct dmk_error *reterr);
int convert_folder_tidy(struct convert_run *run, struct dmk_error *reterr);
bool convert_folder_has(const struct convert_run *run, const char *name);
/* name.part becomes name, on the disk too when it returns. */
int convert_take_name(struct convert_run *run, const char *name, struct dmk_error *reterr);

/* The journal. open makes it where there is none, and locks it against other runs; read takes one with this stamp
 * into done, or begins it. */
int convert_journal_open(struct convert_run *run, struct dmk_error *reterr);
int convert_journal_read(struct convert_run *run, struct dmk_id128 stamp, struct dmk_error *reterr);
int convert_journal_add(struct convert_run *run, uint32_t file, struct dmk_error *reterr);

/* Text to dst/name by way of dst/name.part. */
int convert_put_file(struct convert_run *run, const char *name, struct dmk_str text,
                     struct dmk_error *reterr);
/* 0 or errno's value. */
int convert_write_all(int fd, const void *data, size_t n_bytes);
/* A failed write as a sentence: name in dst, errno's value. */
int convert_write_failed(const struct convert_run *run, const char *name, int err,
                         struct dmk_error *reterr);
