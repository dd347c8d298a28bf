/* The dimensions of a model from its config files.
 *
 * Reads config.json of the Hugging Face layout (rope_scaling or rope_parameters) or of the
 * `original/` layout, told apart by their keys, and generation_config.json for the end-of-sequence
 * ids. Whatever in them would make the model another one than this program computes (another RoPE,
 * tied embeddings, an activation, layers that do not alternate) is refused with the key and its
 * value. No state. */
#pragma once

#include "common/shape/shape.h"

enum dmk_config_layout { DMK_CONFIG_HF, DMK_CONFIG_ORIGINAL };

struct dmk_config {
    struct dmk_shape shape; /* checked with dmk_shape_check */
    enum dmk_config_layout layout;
    bool mxfp4; /* quantization_config says so; the original layout says nothing and counts as true
                 */
};

/* dir holds config.json. generation_config.json is looked for in dir, then in outer_dir (may be
 * NULL); without one the ids are those of config.json, without any those of the o200k_harmony
 * vocabulary. */
int dmk_config_load(const char *dir, const char *outer_dir, struct dmk_config *ret_config,
                    struct dmk_error *reterr);
