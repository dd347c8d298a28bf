/* The dimensions of a gpt-oss model, and which part of it a rank owns. Pure arithmetic: no files,
 * no memory. Everything that needs a size takes it from here, so another checkpoint is another
 * struct. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include "common/base/error.h"

#define DMK_HEAD_DIM 64 /* of queries, keys and values; the page format depends on it */
#define DMK_REDUCE_LEAVES                                                                          \
    8 /* leaves of the fixed reduction tree: KV-head groups and expert groups */
#define DMK_MAX_EOS 8

struct dmk_shape {
    uint32_t n_layers;
    uint32_t hidden;            /* H, a multiple of 32 */
    uint32_t n_heads;           /* query heads */
    uint32_t n_kv_heads;        /* 8 */
    uint32_t n_experts;         /* E, a multiple of 8 */
    uint32_t experts_per_token; /* 4 */
    uint32_t intermediate;      /* I, a multiple of 32 */
    uint32_t vocab;
    uint32_t window; /* keys that a sliding layer sees, the query's own included: 128 */
    uint32_t max_positions;
    float norm_eps;
    float swiglu_alpha; /* 1.702 */
    float swiglu_limit; /* 7.0 */
    double rope_theta;
    double rope_factor; /* YaRN; 1 = plain RoPE */
    double rope_beta_fast, rope_beta_slow;
    uint32_t rope_original_positions;
    uint32_t eos_ids[DMK_MAX_EOS]; /* from generation_config.json, else config.json */
    uint32_t n_eos;
};

/* Even layers slide over a window, odd layers see everything. */
static inline bool dmk_shape_layer_is_full(uint32_t layer)
{
    return (layer & 1) != 0;
}

static inline uint32_t dmk_shape_n_full_layers(const struct dmk_shape *s)
{
    return s->n_layers / 2;
}

static inline uint32_t dmk_shape_n_window_layers(const struct dmk_shape *s)
{
    return s->n_layers - s->n_layers / 2;
}

/* Index of a layer among the layers of its own kind. */
static inline uint32_t dmk_shape_kind_index(uint32_t layer)
{
    return layer / 2;
}

/* Published dimensions: "gpt-oss-20b", "gpt-oss-120b". -DMK_ENOENT for other names. */
int dmk_shape_preset(const char *name, struct dmk_shape *ret_shape, struct dmk_error *reterr);

/* Refuses every dimension that the kernels or the page format can not serve, by name and value. */
int dmk_shape_check(const struct dmk_shape *shape, struct dmk_error *reterr);

/* How a pool is cut. ep = tp x dp; legal: tp and dp powers of two, ep <= 8, tp | n_kv_heads, 8 | E.
 */
struct dmk_layout {
    uint32_t tp; /* ranks that share one sequence's attention heads */
    uint32_t dp; /* groups that hold different sequences */
};

/* What can be said without a model. prefill: a prefill pool has one group. */
int dmk_layout_check_ranks(struct dmk_layout layout, bool prefill, struct dmk_error *reterr);
/* And whether the model can be cut so. */
int dmk_layout_check(const struct dmk_shape *shape, struct dmk_layout layout, bool prefill,
                     struct dmk_error *reterr);

/* What one rank (0 .. tp*dp-1; rank = dp_index * tp + tp_index) owns. */
struct dmk_shard {
    uint32_t kv_head_first, n_kv_heads; /* and the query heads of these groups */
    uint32_t expert_first, n_experts;   /* whole experts, by id */
    uint32_t vocab_first, n_vocab;      /* rows of the LM head, in blocks of 1571; cut by tp only */
};

struct dmk_shard dmk_layout_shard(const struct dmk_shape *shape, struct dmk_layout layout,
                                  uint32_t rank);
