/* Reading config.json and generation_config.json; see config.h. */
#include "common/model/config.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "common/json/json.h"

#define MAX_CONFIG_BYTES 1000000u
#define MAX_CONFIG_DEPTH 16u
#define MAX_PATH_BYTES   4096u
#define MAX_DIM          (1u << 24)

struct source {
    const json_t *root;
    const char *path;
    struct dmk_error *reterr;
};

static int read_dim(const struct source *src, const char *key, enum dmk_json_need need,
                    uint32_t *ret)
{
    return dmk_json_get_u32(src->root, src->path, key, need, 1, MAX_DIM, ret, src->reterr);
}

static int read_float(const struct source *src, const char *key, float *ret)
{
    double v = 0;
    const int r =
        dmk_json_get_real(src->root, src->path, key, DMK_JSON_OPTIONAL, 0.0, 1e9, &v, src->reterr);

    if (r > 0) {
        *ret = (float)v;
    }
    return r;
}

/* A key that, where present, must have one value. */
static int expect_bool(const struct source *src, const char *key, bool want)
{
    bool v = want;
    const int r = dmk_json_get_bool(src->root, src->path, key, DMK_JSON_OPTIONAL, &v, src->reterr);

    if (r < 0) {
        return r;
    }
    if (v != want) {
        return dmk_error_set(src->reterr, -DMK_ENOTSUP, "%s: \"%s\" is %s but only %s is supported",
                             src->path, key, v ? "true" : "false", want ? "true" : "false");
    }
    return 0;
}

static int expect_str(const struct source *src, const json_t *obj, const char *where,
                      const char *key, const char *want)
{
    struct dmk_str v = dmk_str_from(want);
    const int r = dmk_json_get_str(obj, where, key, DMK_JSON_OPTIONAL, &v, src->reterr);

    if (r < 0) {
        return r;
    }
    if (!dmk_str_is(v, want)) {
        return dmk_error_set(src->reterr, -DMK_ENOTSUP,
                             "%s: \"%s\" is \"%.60s\" but only \"%s\" is supported", where, key,
                             v.data, want);
    }
    return 0;
}

/* Dimensions that both layouts spell alike. */
static int read_common(const struct source *src, struct dmk_shape *s)
{
    uint32_t head_dim = DMK_HEAD_DIM;
    int r;

    if ((r = read_dim(src, "num_hidden_layers", DMK_JSON_REQUIRED, &s->n_layers)) < 0 ||
        (r = read_dim(src, "hidden_size", DMK_JSON_REQUIRED, &s->hidden)) < 0 ||
        (r = read_dim(src, "intermediate_size", DMK_JSON_REQUIRED, &s->intermediate)) < 0 ||
        (r = read_dim(src, "num_attention_heads", DMK_JSON_REQUIRED, &s->n_heads)) < 0 ||
        (r = read_dim(src, "num_key_value_heads", DMK_JSON_REQUIRED, &s->n_kv_heads)) < 0 ||
        (r = read_dim(src, "vocab_size", DMK_JSON_REQUIRED, &s->vocab)) < 0 ||
        (r = read_dim(src, "sliding_window", DMK_JSON_REQUIRED, &s->window)) < 0 ||
        (r = read_dim(src, "head_dim", DMK_JSON_OPTIONAL, &head_dim)) < 0 ||
        (r = read_float(src, "swiglu_limit", &s->swiglu_limit)) < 0 ||
        (r = read_float(src, "swiglu_alpha", &s->swiglu_alpha)) < 0) {
        return r;
    }
    if (head_dim != DMK_HEAD_DIM) {
        return dmk_error_set(src->reterr, -DMK_ENOTSUP,
                             "%s: \"head_dim\" is %u but only %d is supported", src->path, head_dim,
                             DMK_HEAD_DIM);
    }
    return 0;
}

/* The number of experts a token goes to has two names; where both stand they must agree. */
static int read_experts_per_token(const struct source *src, struct dmk_shape *s)
{
    uint32_t a = 0, b = 0;
    int r;

    if ((r = read_dim(src, "num_experts_per_tok", DMK_JSON_OPTIONAL, &a)) < 0 ||
        (r = read_dim(src, "experts_per_token", a ? DMK_JSON_OPTIONAL : DMK_JSON_REQUIRED, &b)) <
            0) {
        return r;
    }
    if (a && b && a != b) {
        return dmk_error_set(src->reterr, -DMK_EFORMAT,
                             "%s: \"num_experts_per_tok\" is %u but \"experts_per_token\" is %u",
                             src->path, a, b);
    }
    s->experts_per_token = a ? a : b;
    return 0;
}

static int check_layer_types(const struct source *src, const struct dmk_shape *s)
{
    json_t *types = NULL;
    const int r = dmk_json_get_array(src->root, src->path, "layer_types", DMK_JSON_OPTIONAL, &types,
                                     src->reterr);

    if (r <= 0) {
        return r;
    }
    if (json_array_size(types) != s->n_layers) {
        return dmk_error_set(src->reterr, -DMK_EFORMAT,
                             "%s: \"layer_types\" has %zu entries for %u layers", src->path,
                             json_array_size(types), s->n_layers);
    }
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const char *want = dmk_shape_layer_is_full(i) ? "full_attention" : "sliding_attention";
        const json_t *v = json_array_get(types, i);
        char shown[DMK_JSON_SHOW_BYTES];

        if (!json_is_string(v) || strcmp(json_string_value(v), want) != 0) {
            return dmk_error_set(src->reterr, -DMK_ENOTSUP,
                                 "%s: \"layer_types\" entry %u must be \"%s\", not %s", src->path,
                                 i, want, dmk_json_show(v, shown));
        }
    }
    return 0;
}

/* YaRN as published: no rounding of the ramp, the usual attention factor, no DeepSeek extras. */
static int check_yarn_extras(const struct source *src, const json_t *rope, const char *where,
                             const struct dmk_shape *s)
{
    const double usual = s->rope_factor > 1.0 ? 0.1 * log(s->rope_factor) + 1.0 : 1.0;
    double factor = usual;
    bool truncate = true; /* what transformers takes when the key is absent */
    int r = dmk_json_get_bool(rope, where, "truncate", DMK_JSON_REQUIRED, &truncate, src->reterr);

    if (r < 0) {
        return r;
    }
    if (truncate) {
        return dmk_error_set(src->reterr, -DMK_ENOTSUP,
                             "%s: \"truncate\" is true but only false is supported", where);
    }
    r = dmk_json_get_real(rope, where, "attention_factor", DMK_JSON_OPTIONAL, 0.0, 1e6, &factor,
                          src->reterr);
    if (r < 0) {
        return r;
    }
    if (fabs(factor - usual) > 1e-6) {
        return dmk_error_set(src->reterr, -DMK_ENOTSUP,
                             "%s: \"attention_factor\" is %g but only 0.1 ln(factor) + 1 = %g is "
                             "supported",
                             where, factor, usual);
    }
    for (int i = 0; i < 2; i++) {
        const char *key = i ? "mscale_all_dim" : "mscale";
        const json_t *v = json_object_get(rope, key);

        if (v && !json_is_null(v)) {
            return dmk_error_set(src->reterr, -DMK_ENOTSUP, "%s: \"%s\" is not supported", where,
                                 key);
        }
    }
    return 0;
}

static int read_yarn(const struct source *src, const json_t *rope, const char *where,
                     struct dmk_shape *s)
{
    int r;

    if ((r = dmk_json_get_real(rope, where, "factor", DMK_JSON_REQUIRED, 1.0, 4096.0,
                               &s->rope_factor, src->reterr)) < 0 ||
        (r = dmk_json_get_real(rope, where, "beta_fast", DMK_JSON_OPTIONAL, 1e-3, 1e6,
                               &s->rope_beta_fast, src->reterr)) < 0 ||
        (r = dmk_json_get_real(rope, where, "beta_slow", DMK_JSON_OPTIONAL, 1e-3, 1e6,
                               &s->rope_beta_slow, src->reterr)) < 0 ||
        (r = dmk_json_get_u32(rope, where, "original_max_position_embeddings", DMK_JSON_OPTIONAL, 1,
                              MAX_DIM, &s->rope_original_positions, src->reterr)) < 0) {
        return r;
    }
    if (r == 0) {
        r = read_dim(src, "initial_context_length", DMK_JSON_REQUIRED, &s->rope_original_positions);
        if (r < 0) {
            return r;
        }
    }
    return check_yarn_extras(src, rope, where, s);
}

/* rope_parameters (transformers 5) holds theta too; rope_scaling (before) stands beside rope_theta.
 */
static int read_rope(const struct source *src, struct dmk_shape *s)
{
    const char *key = "rope_parameters";
    struct dmk_str type = {0};
    char where[MAX_PATH_BYTES + 32];
    json_t *rope = NULL;
    int r;

    r = dmk_json_get_object(src->root, src->path, key, DMK_JSON_OPTIONAL, &rope, src->reterr);
    if (r == 0) {
        key = "rope_scaling";
        r = dmk_json_get_object(src->root, src->path, key, DMK_JSON_OPTIONAL, &rope, src->reterr);
    }
    if (r < 0) {
        return r;
    }
    (void)snprintf(where, sizeof(where), "%s: %s", src->path, key);
    if (rope) {
        r = dmk_json_get_real(rope, where, "rope_theta", DMK_JSON_OPTIONAL, 2.0, 1e12,
                              &s->rope_theta, src->reterr);
    }
    if (r >= 0 && (!rope || r == 0)) {
        r = dmk_json_get_real(src->root, src->path, "rope_theta", DMK_JSON_REQUIRED, 2.0, 1e12,
                              &s->rope_theta, src->reterr);
    }
    if (r < 0) {
        return r;
    }
    if (!rope) {
        return 0; /* the published YaRN, as transformers has it */
    }
    if ((r = dmk_json_get_str(rope, where, "rope_type", DMK_JSON_OPTIONAL, &type, src->reterr)) <
            0 ||
        (r == 0 &&
         (r = dmk_json_get_str(rope, where, "type", DMK_JSON_REQUIRED, &type, src->reterr)) < 0)) {
        return r;
    }
    if (dmk_str_is(type, "yarn")) {
        return read_yarn(src, rope, where, s);
    }
    if (dmk_str_is(type, "default")) {
        s->rope_factor = 1.0;
        return 0;
    }
    return dmk_error_set(src->reterr, -DMK_ENOTSUP,
                         "%s: \"rope_type\" is \"%.60s\" but only \"yarn\" and \"default\" are "
                         "supported",
                         where, type.data);
}

static int read_quantization(const struct source *src, bool *ret_mxfp4)
{
    char where[MAX_PATH_BYTES + 32];
    json_t *quant = NULL;
    int r = dmk_json_get_object(src->root, src->path, "quantization_config", DMK_JSON_OPTIONAL,
                                &quant, src->reterr);

    if (r < 0) {
        return r;
    }
    if (r > 0) {
        (void)snprintf(where, sizeof(where), "%s: quantization_config", src->path);
        r = expect_str(src, quant, where, "quant_method", "mxfp4");
        if (r < 0) {
            return r;
        }
    }
    *ret_mxfp4 = quant != NULL;
    return 0;
}

static int read_hf(const struct source *src, struct dmk_config *c)
{
    struct dmk_shape *s = &c->shape;
    int r;

    if ((r = expect_str(src, src->root, src->path, "model_type", "gpt_oss")) < 0 ||
        (r = expect_str(src, src->root, src->path, "hidden_act", "silu")) < 0 ||
        (r = expect_bool(src, "tie_word_embeddings", false)) < 0 ||
        (r = expect_bool(src, "attention_bias", true)) < 0 || (r = read_common(src, s)) < 0 ||
        (r = read_dim(src, "num_local_experts", DMK_JSON_REQUIRED, &s->n_experts)) < 0 ||
        (r = read_dim(src, "max_position_embeddings", DMK_JSON_REQUIRED, &s->max_positions)) < 0 ||
        (r = read_float(src, "rms_norm_eps", &s->norm_eps)) < 0 ||
        (r = read_experts_per_token(src, s)) < 0 || (r = check_layer_types(src, s)) < 0 ||
        (r = read_rope(src, s)) < 0) {
        return r;
    }
    return read_quantization(src, &c->mxfp4);
}

/* This layout has neither eps nor alpha nor a maximum: the published constants stand. */
static int read_original(const struct source *src, struct dmk_config *c)
{
    struct dmk_shape *s = &c->shape;
    double max;
    int r;

    if ((r = read_common(src, s)) < 0 ||
        (r = read_dim(src, "num_experts", DMK_JSON_REQUIRED, &s->n_experts)) < 0 ||
        (r = read_experts_per_token(src, s)) < 0 ||
        (r = read_dim(src, "initial_context_length", DMK_JSON_REQUIRED,
                      &s->rope_original_positions)) < 0 ||
        (r = dmk_json_get_real(src->root, src->path, "rope_theta", DMK_JSON_REQUIRED, 2.0, 1e12,
                               &s->rope_theta, src->reterr)) < 0 ||
        (r = dmk_json_get_real(src->root, src->path, "rope_scaling_factor", DMK_JSON_REQUIRED, 1.0,
                               4096.0, &s->rope_factor, src->reterr)) < 0 ||
        (r = dmk_json_get_real(src->root, src->path, "rope_ntk_beta", DMK_JSON_REQUIRED, 1e-3, 1e6,
                               &s->rope_beta_fast, src->reterr)) < 0 ||
        (r = dmk_json_get_real(src->root, src->path, "rope_ntk_alpha", DMK_JSON_REQUIRED, 1e-3, 1e6,
                               &s->rope_beta_slow, src->reterr)) < 0) {
        return r;
    }
    max = s->rope_original_positions * s->rope_factor;
    s->max_positions = max < MAX_DIM ? (uint32_t)max : MAX_DIM;
    c->mxfp4 = true;
    return 0;
}

/* eos_token_id is one id or a list. 1 = found, 0 = absent. */
static int read_eos(const struct source *src, struct dmk_shape *s)
{
    const json_t *v = json_object_get(src->root, "eos_token_id");
    const bool is_list = json_is_array(v);
    const size_t n = is_list ? json_array_size(v) : 1;

    if (!v || json_is_null(v)) {
        return 0;
    }
    if (n == 0 || n > DMK_MAX_EOS) {
        return dmk_error_set(src->reterr, -DMK_ENOTSUP,
                             "%s: \"eos_token_id\" lists %zu ids; 1 to %d are supported", src->path,
                             n, DMK_MAX_EOS);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *id = is_list ? json_array_get(v, i) : v;
        char shown[DMK_JSON_SHOW_BYTES];

        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= (json_int_t)s->vocab) {
            return dmk_error_set(src->reterr, -DMK_EFORMAT,
                                 "%s: \"eos_token_id\" must hold ids below the vocabulary's %u, "
                                 "not %s",
                                 src->path, s->vocab, dmk_json_show(id, shown));
        }
        s->eos_ids[i] = (uint32_t)json_integer_value(id);
    }
    s->n_eos = (uint32_t)n;
    return 1;
}

static int read_generation(const char *dir, struct dmk_shape *s, struct dmk_error *reterr)
{
    char path[MAX_PATH_BYTES];
    json_t *root = NULL;
    int r;

    (void)snprintf(path, sizeof(path), "%s/generation_config.json", dir);
    r = dmk_json_load(path, MAX_CONFIG_BYTES, MAX_CONFIG_DEPTH, &root, reterr);
    if (r == -DMK_ENOENT) {
        return 0;
    }
    if (r == 0) {
        r = read_eos(&(struct source){root, path, reterr}, s);
        json_decref(root);
    }
    return r;
}

static int read_all(const struct source *src, const char *dir, const char *outer_dir,
                    struct dmk_config *c)
{
    int r;

    if (json_object_get(src->root, "num_experts") &&
        !json_object_get(src->root, "num_local_experts")) {
        c->layout = DMK_CONFIG_ORIGINAL;
        r = read_original(src, c);
    } else {
        c->layout = DMK_CONFIG_HF;
        r = read_hf(src, c);
    }
    if (r < 0) {
        return r;
    }
    r = read_generation(dir, &c->shape, src->reterr); /* 1 once ids are found */
    if (r == 0 && outer_dir) {
        r = read_generation(outer_dir, &c->shape, src->reterr);
    }
    if (r == 0) {
        r = read_eos(src, &c->shape);
    }
    if (r < 0) {
        return r;
    }
    for (uint32_t i = 0; r == 0 && i < c->shape.n_eos; i++) {
        if (c->shape.eos_ids[i] >= c->shape.vocab) {
            c->shape.n_eos = 0; /* another vocabulary: the usual ids mean nothing in it */
        }
    }
    r = dmk_shape_check(&c->shape, src->reterr);
    if (r < 0) {
        (void)dmk_error_prefix(src->reterr, "%s", src->path);
    }
    return r;
}

int dmk_config_load(const char *dir, const char *outer_dir, struct dmk_config *ret_config,
                    struct dmk_error *reterr)
{
    struct dmk_config c = {0};
    char path[MAX_PATH_BYTES];
    json_t *root = NULL;
    int r = dmk_shape_preset("gpt-oss-20b", &c.shape, reterr); /* defaults of optional keys */

    if (r < 0) {
        return r;
    }
    (void)snprintf(path, sizeof(path), "%s/config.json", dir);
    r = dmk_json_load(path, MAX_CONFIG_BYTES, MAX_CONFIG_DEPTH, &root, reterr);
    if (r < 0) {
        return r;
    }
    r = read_all(&(struct source){root, path, reterr}, dir, outer_dir, &c);
    json_decref(root);
    if (r == 0) {
        *ret_config = c;
    }
    return r;
}
