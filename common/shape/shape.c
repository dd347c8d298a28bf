/* Checks and arithmetic on model dimensions; see shape.h. No state, any thread.
 *
 * The bounds are those that the page format (head size, window), the fixed reduction tree (eight
 * KV-head groups, eight expert groups) and the kernels' inner loops (multiples of 32) rest on. */
#include "common/shape/shape.h"

#include <stddef.h>
#include <string.h>
#include "common/base/assert.h"

#define HEAD_BLOCK_ROWS                                                                            \
    1571u /* the head's reductions run in blocks of this many vocabulary rows  \
                               */
#define MAX_RANKS 8u

static const struct dmk_shape published = {
    .n_layers = 24,
    .hidden = 2880,
    .n_heads = 64,
    .n_kv_heads = 8,
    .n_experts = 32,
    .experts_per_token = 4,
    .intermediate = 2880,
    .vocab = 201088,
    .window = 128,
    .max_positions = 131072,
    .norm_eps = 1e-5f,
    .swiglu_alpha = 1.702f,
    .swiglu_limit = 7.0f,
    .rope_theta = 150000.0,
    .rope_factor = 32.0,
    .rope_beta_fast = 32.0,
    .rope_beta_slow = 1.0,
    .rope_original_positions = 4096,
    .eos_ids = {200002, 199999, 200012}, /* return, end of text, call */
    .n_eos = 3,
};

int dmk_shape_preset(const char *name, struct dmk_shape *ret_shape, struct dmk_error *reterr)
{
    if (strcmp(name, "gpt-oss-20b") == 0) {
        *ret_shape = published;
        return 0;
    }
    if (strcmp(name, "gpt-oss-120b") == 0) {
        *ret_shape = published;
        ret_shape->n_layers = 36;
        ret_shape->n_experts = 128;
        return 0;
    }
    return dmk_error_set(reterr, -DMK_ENOENT,
                         "no model is known as \"%s\"; there are gpt-oss-20b and gpt-oss-120b",
                         name);
}

/* One dimension: its value must lie in [min, max] and be a multiple of `multiple`. */
struct bound {
    const char *name;
    size_t offset; /* of a uint32_t in struct dmk_shape */
    uint32_t min, max, multiple;
    const char *why;
};

#define FIELD(f) #f, offsetof(struct dmk_shape, f)

static const struct bound bounds[] = {
    {FIELD(n_layers), 2, 512, 1, "sliding and full layers alternate"},
    {FIELD(hidden), 32, 65536, 32, "MXFP4 blocks hold 32 inputs"},
    {FIELD(n_kv_heads), 8, 8, 1, "the attention sum is a tree of eight KV-head groups"},
    {FIELD(n_heads), 8, 512, 8, "each KV head serves equally many query heads"},
    {FIELD(n_experts), 8, 1024, 8, "the expert sum is a tree of eight groups"},
    {FIELD(experts_per_token), 4, 4, 1, "the router picks four experts"},
    {FIELD(intermediate), 32, 65536, 32, "MXFP4 blocks hold 32 inputs"},
    {FIELD(vocab), 8, 1u << 24, 1, "token ids are 24 bits at most"},
    {FIELD(window), 128, 128, 1, "a window is a ring of pages made for 128 keys"},
    {FIELD(max_positions), 128, 1u << 24, 1, "positions are exact in fp32 up to there"},
    {FIELD(rope_original_positions), 1, 1u << 24, 1, "YaRN stretches from there"},
};

static int check_bounds(const struct dmk_shape *shape, struct dmk_error *reterr)
{
    for (size_t i = 0; i < sizeof(bounds) / sizeof(bounds[0]); i++) {
        const struct bound *b = &bounds[i];
        uint32_t v;

        memcpy(&v, (const char *)shape + b->offset, sizeof(v));
        if (v >= b->min && v <= b->max && v % b->multiple == 0) {
            continue;
        }
        if (b->min == b->max) {
            return dmk_error_set(reterr, -DMK_ENOTSUP, "%s is %u but must be %u: %s", b->name, v,
                                 b->min, b->why);
        }
        if (b->multiple == 1) {
            return dmk_error_set(reterr, -DMK_ENOTSUP, "%s is %u but must be from %u to %u: %s",
                                 b->name, v, b->min, b->max, b->why);
        }
        return dmk_error_set(reterr, -DMK_ENOTSUP,
                             "%s is %u but must be a multiple of %u from %u to %u: %s", b->name, v,
                             b->multiple, b->min, b->max, b->why);
    }
    return 0;
}

static int check_real(const char *name, double v, double min, double max, struct dmk_error *reterr)
{
    if (v >= min && v <= max) { /* false for NaN */
        return 0;
    }
    return dmk_error_set(reterr, -DMK_ENOTSUP, "%s is %g but must be from %g to %g", name, v, min,
                         max);
}

int dmk_shape_check(const struct dmk_shape *shape, struct dmk_error *reterr)
{
    int r = check_bounds(shape, reterr);

    if (r < 0) {
        return r;
    }
    if ((r = check_real("norm_eps", shape->norm_eps, 1e-12, 1.0, reterr)) < 0 ||
        (r = check_real("swiglu_alpha", shape->swiglu_alpha, 0.01, 100.0, reterr)) < 0 ||
        (r = check_real("swiglu_limit", shape->swiglu_limit, 0.01, 1e4, reterr)) < 0 ||
        (r = check_real("rope_theta", shape->rope_theta, 2.0, 1e12, reterr)) < 0 ||
        (r = check_real("rope_factor", shape->rope_factor, 1.0, 4096.0, reterr)) < 0 ||
        (r = check_real("rope_beta_fast", shape->rope_beta_fast, 1e-3, 1e6, reterr)) < 0 ||
        (r = check_real("rope_beta_slow", shape->rope_beta_slow, 1e-3, 1e6, reterr)) < 0) {
        return r;
    }
    if (shape->rope_beta_slow > shape->rope_beta_fast) {
        return dmk_error_set(reterr, -DMK_ENOTSUP, "rope_beta_slow %g is above rope_beta_fast %g",
                             shape->rope_beta_slow, shape->rope_beta_fast);
    }
    if (shape->n_eos > DMK_MAX_EOS) {
        return dmk_error_set(reterr, -DMK_ENOTSUP, "%u end-of-sequence ids are given but %d fit",
                             shape->n_eos, DMK_MAX_EOS);
    }
    for (uint32_t i = 0; i < shape->n_eos; i++) {
        if (shape->eos_ids[i] >= shape->vocab) {
            return dmk_error_set(reterr, -DMK_ENOTSUP,
                                 "end-of-sequence id %u is outside the vocabulary of %u tokens",
                                 shape->eos_ids[i], shape->vocab);
        }
    }
    return 0;
}

static bool is_power_of_two(uint32_t v)
{
    return v != 0 && (v & (v - 1)) == 0;
}

int dmk_layout_check_ranks(struct dmk_layout layout, bool prefill, struct dmk_error *reterr)
{
    if (!is_power_of_two(layout.tp) || layout.tp > MAX_RANKS) {
        return dmk_error_set(reterr, -DMK_ENOTSUP, "tp is %u but must be 1, 2, 4 or 8", layout.tp);
    }
    if (!is_power_of_two(layout.dp) || layout.dp > MAX_RANKS) {
        return dmk_error_set(reterr, -DMK_ENOTSUP, "dp is %u but must be 1, 2, 4 or 8", layout.dp);
    }
    if (layout.tp * layout.dp > MAX_RANKS) {
        return dmk_error_set(reterr, -DMK_ENOTSUP,
                             "tp %u x dp %u makes %u ranks but a node has %u at most", layout.tp,
                             layout.dp, layout.tp * layout.dp, MAX_RANKS);
    }
    if (prefill && layout.dp != 1) {
        return dmk_error_set(reterr, -DMK_ENOTSUP,
                             "dp is %u but a prefill worker has dp 1: run more workers instead",
                             layout.dp);
    }
    return 0;
}

int dmk_layout_check(const struct dmk_shape *shape, struct dmk_layout layout, bool prefill,
                     struct dmk_error *reterr)
{
    const int ret = dmk_layout_check_ranks(layout, prefill, reterr);

    if (ret != 0) {
        return ret;
    }
    if (shape->n_kv_heads % layout.tp != 0) {
        return dmk_error_set(reterr, -DMK_ENOTSUP, "tp %u does not divide the model's %u KV heads",
                             layout.tp, shape->n_kv_heads);
    }
    if (shape->n_experts % DMK_REDUCE_LEAVES != 0) {
        return dmk_error_set(reterr, -DMK_ENOTSUP, "the model's %u experts are no multiple of %d",
                             shape->n_experts, DMK_REDUCE_LEAVES);
    }
    return 0;
}

struct dmk_shard dmk_layout_shard(const struct dmk_shape *shape, struct dmk_layout layout,
                                  uint32_t rank)
{
    const uint32_t ep = layout.tp * layout.dp;
    const uint32_t tp_index = rank % layout.tp;
    const uint32_t heads = shape->n_kv_heads / layout.tp;
    const uint32_t experts = shape->n_experts / ep;
    const uint32_t blocks = (shape->vocab + HEAD_BLOCK_ROWS - 1) / HEAD_BLOCK_ROWS;
    struct dmk_shard shard;
    uint32_t first, end;

    dmk_assert(rank < ep);
    /* Whole blocks of the head, so that its reductions never see where ranks meet. */
    first = (uint32_t)((uint64_t)blocks * tp_index / layout.tp) * HEAD_BLOCK_ROWS;
    end = (uint32_t)((uint64_t)blocks * (tp_index + 1) / layout.tp) * HEAD_BLOCK_ROWS;
    if (end > shape->vocab) {
        end = shape->vocab;
    }
    shard.kv_head_first = heads * tp_index;
    shard.n_kv_heads = heads;
    shard.expert_first = experts * rank;
    shard.n_experts = experts;
    shard.vocab_first = first;
    shard.n_vocab = end > first ? end - first : 0;
    return shard;
}
