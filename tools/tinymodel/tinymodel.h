/* Writing synthetic gpt-oss checkpoints in the Hugging Face layout: same names, dtypes, shapes, shards
 * and config files as the published ones, with seeded random weights.
 *
 * Numbers are a pure function of (seed, tensor, element), so the same options give the same bytes on any
 * machine and number of threads, and MXFP4 and BF16 experts hold the same values. Scales are chosen so
 * that activations stay of order one at any depth and routing varies from token to token.
 *
 * With the real vocabulary size the model also speaks Harmony's frame: after "<|start|>assistant" it
 * says "<|channel|>final<|message|>", then random text; reserved ids are next to never drawn. */
#pragma once

#include "common/model/weights.h"

/* Where numbers come from instead of the seed: called by several threads at a time for bytes
 * [begin, begin + n) of the tensor that is called name in the checkpoint; begin is a multiple of 16. */
struct dmk_tinymodel_source {
    void (*fill)(const void *ud, const char *name, uint64_t begin, uint64_t n, uint8_t *out);
    const void *ud;
};

struct dmk_tinymodel_conf {
    const char *out; /* folder to be made */
    struct dmk_shape shape;
    enum dmk_expert_format expert_format;
    uint64_t seed;
    uint32_t
        n_shards; /* 0 = files of at most 4.8 GB, at least 2; 1 = model.safetensors, no index */
    uint32_t n_threads; /* 0 = one a core */
    bool force;         /* replace a folder that holds files only */
    const char
        *vocab; /* o200k_base.tiktoken, to write tokenizer.json from; NULL = none is written */
    const struct dmk_tinymodel_source *source; /* NULL = random numbers of the seed */
    void (*on_progress)(void *ud, uint64_t done_bytes,
                        uint64_t total_bytes); /* some times a second */
    void *ud;
};

/* Writes everything into a folder beside `out` and renames it at the end: there is never half a
 * checkpoint. *ret_bytes: size of the tensors. */
int dmk_tinymodel_write(const struct dmk_tinymodel_conf *conf, uint64_t *ret_bytes,
                        struct dmk_error *reterr);
