/* What the parts of the checkpoint writer share. */
#pragma once

#include "common/base/buf.h"
#include "tools/tinymodel/tinymodel.h"

enum tm_fill {
    TM_UNIFORM,      /* bf16: mean + uniform of the given deviation */
    TM_HEAD,         /* TM_UNIFORM with planted rows; see numbers.c */
    TM_BLOCKS,       /* MXFP4 codes */
    TM_SCALES,       /* MXFP4 exponents */
    TM_EXPERTS_BF16, /* what TM_BLOCKS and TM_SCALES of the same streams stand for, (in, out) */
};

struct tm_tensor {
    char name[80];
    bool is_bf16;
    uint32_t rank;
    uint64_t dims[4];
    uint64_t n_bytes;
    enum tm_fill fill;
    uint64_t stream; /* of the random numbers; scales use stream + 1 */
    float mean, deviation;
    uint32_t file;
    uint64_t offset; /* in the data section of its file */
};

struct tm_plan {
    const struct dmk_tinymodel_conf *conf;
    struct tm_tensor *tensors; /* in file order */
    uint32_t n_tensors;
    uint32_t n_files;
    uint64_t total_bytes;
    float embedding_deviation;
    uint64_t embedding_stream;
};

int tm_plan_make(const struct dmk_tinymodel_conf *conf, struct tm_plan *ret_plan,
                 struct dmk_error *reterr);
void tm_plan_free(struct tm_plan *plan);
void tm_file_name(const struct tm_plan *plan, uint32_t file, char ret_name[48]);

/* Bytes [begin, begin + n) of a tensor; begin is a multiple of 16. */
void tm_fill_bytes(const struct tm_plan *plan, const struct tm_tensor *tensor, uint64_t begin,
                   uint64_t n, uint8_t *out);

/* Texts of the small files. */
void tm_text_header(const struct tm_plan *plan, uint32_t file, struct dmk_buf *out);
void tm_text_index(const struct tm_plan *plan, struct dmk_buf *out);
void tm_text_config(const struct tm_plan *plan, struct dmk_buf *out);
void tm_text_generation(const struct tm_plan *plan, struct dmk_buf *out);
