/* Binding the tensors of a checkpoint to the model's places; see weights.h.
 *
 * One table of rules per layout says name, dtype and shape of every tensor; what a rule does not
 * name does not belong there. Runs once at start, on the opener's thread. */
#include "common/model/weights.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/buf.h"
#include "common/model/checkpoint.h"
#include "common/model/config.h"
#include "common/model/cut_weights.h"
#include "common/model/weights_internal.h"

#define MAX_PATH_BYTES 4096u
#define MAX_LISTED     4 /* tensors named in a sentence */

enum dim {
    DIM_NONE,
    DIM_H,
    DIM_H32, /* H/32: MXFP4 blocks of a row */
    DIM_I,
    DIM_I32,
    DIM_2I,
    DIM_Q,   /* rows of the query projection */
    DIM_KV,  /* rows of the key or value projection */
    DIM_QKV, /* all three */
    DIM_HEADS,
    DIM_E,
    DIM_V,
    DIM_16, /* bytes of an MXFP4 block */
};

struct rule {
    const char *name; /* after the layer's prefix */
    enum dmk_dtype dtype;
    enum dim dims[4];
    size_t offset; /* of the pointer in struct dmk_layer_weights or struct dmk_weights */
};

#define LAYER(f)  offsetof(struct dmk_layer_weights, f)
#define GLOBAL(f) offsetof(struct dmk_weights, f)
#define BF16      DMK_DTYPE_BF16
#define U8        DMK_DTYPE_U8

static const struct rule hf_layer[] = {
    {"input_layernorm.weight", BF16, {DIM_H}, LAYER(attn_norm)},
    {"self_attn.q_proj.weight", BF16, {DIM_Q, DIM_H}, LAYER(q_w)},
    {"self_attn.q_proj.bias", BF16, {DIM_Q}, LAYER(q_b)},
    {"self_attn.k_proj.weight", BF16, {DIM_KV, DIM_H}, LAYER(k_w)},
    {"self_attn.k_proj.bias", BF16, {DIM_KV}, LAYER(k_b)},
    {"self_attn.v_proj.weight", BF16, {DIM_KV, DIM_H}, LAYER(v_w)},
    {"self_attn.v_proj.bias", BF16, {DIM_KV}, LAYER(v_b)},
    {"self_attn.o_proj.weight", BF16, {DIM_H, DIM_Q}, LAYER(o_w)},
    {"self_attn.o_proj.bias", BF16, {DIM_H}, LAYER(o_b)},
    {"self_attn.sinks", BF16, {DIM_HEADS}, LAYER(sinks)},
    {"post_attention_layernorm.weight", BF16, {DIM_H}, LAYER(mlp_norm)},
    {"mlp.router.weight", BF16, {DIM_E, DIM_H}, LAYER(router_w)},
    {"mlp.router.bias", BF16, {DIM_E}, LAYER(router_b)},
    {"mlp.experts.gate_up_proj_bias", BF16, {DIM_E, DIM_2I}, LAYER(gate_up.bias)},
    {"mlp.experts.down_proj_bias", BF16, {DIM_E, DIM_H}, LAYER(down.bias)},
    {0},
};

static const struct rule hf_experts_mxfp4[] = {
    {"mlp.experts.gate_up_proj_blocks",
     U8,
     {DIM_E, DIM_2I, DIM_H32, DIM_16},
     LAYER(gate_up.blocks)},
    {"mlp.experts.gate_up_proj_scales", U8, {DIM_E, DIM_2I, DIM_H32}, LAYER(gate_up.scales)},
    {"mlp.experts.down_proj_blocks", U8, {DIM_E, DIM_H, DIM_I32, DIM_16}, LAYER(down.blocks)},
    {"mlp.experts.down_proj_scales", U8, {DIM_E, DIM_H, DIM_I32}, LAYER(down.scales)},
    {0},
};

/* (in, out): turned around after binding. */
static const struct rule hf_experts_bf16[] = {
    {"mlp.experts.gate_up_proj", BF16, {DIM_E, DIM_H, DIM_2I}, LAYER(gate_up.blocks)},
    {"mlp.experts.down_proj", BF16, {DIM_E, DIM_I, DIM_H}, LAYER(down.blocks)},
    {0},
};

static const struct rule hf_global[] = {
    {"model.embed_tokens.weight", BF16, {DIM_V, DIM_H}, GLOBAL(embedding)},
    {"model.norm.weight", BF16, {DIM_H}, GLOBAL(final_norm)},
    {"lm_head.weight", BF16, {DIM_V, DIM_H}, GLOBAL(unembedding)},
    {0},
};

static const struct rule original_layer[] = {
    {"attn.norm.scale", BF16, {DIM_H}, LAYER(attn_norm)},
    {"attn.qkv.weight", BF16, {DIM_QKV, DIM_H}, LAYER(q_w)}, /* cut in three after binding */
    {"attn.qkv.bias", BF16, {DIM_QKV}, LAYER(q_b)},
    {"attn.sinks", BF16, {DIM_HEADS}, LAYER(sinks)},
    {"attn.out.weight", BF16, {DIM_H, DIM_Q}, LAYER(o_w)},
    {"attn.out.bias", BF16, {DIM_H}, LAYER(o_b)},
    {"mlp.norm.scale", BF16, {DIM_H}, LAYER(mlp_norm)},
    {"mlp.gate.weight", BF16, {DIM_E, DIM_H}, LAYER(router_w)},
    {"mlp.gate.bias", BF16, {DIM_E}, LAYER(router_b)},
    {"mlp.mlp1_bias", BF16, {DIM_E, DIM_2I}, LAYER(gate_up.bias)},
    {"mlp.mlp2_bias", BF16, {DIM_E, DIM_H}, LAYER(down.bias)},
    {0},
};

static const struct rule original_experts_mxfp4[] = {
    {"mlp.mlp1_weight.blocks", U8, {DIM_E, DIM_2I, DIM_H32, DIM_16}, LAYER(gate_up.blocks)},
    {"mlp.mlp1_weight.scales", U8, {DIM_E, DIM_2I, DIM_H32}, LAYER(gate_up.scales)},
    {"mlp.mlp2_weight.blocks", U8, {DIM_E, DIM_H, DIM_I32, DIM_16}, LAYER(down.blocks)},
    {"mlp.mlp2_weight.scales", U8, {DIM_E, DIM_H, DIM_I32}, LAYER(down.scales)},
    {0},
};

static const struct rule original_experts_bf16[] = {
    {"mlp.mlp1_weight", BF16, {DIM_E, DIM_2I, DIM_H}, LAYER(gate_up.blocks)},
    {"mlp.mlp2_weight", BF16, {DIM_E, DIM_H, DIM_I}, LAYER(down.blocks)},
    {0},
};

static const struct rule original_global[] = {
    {"embedding.weight", BF16, {DIM_V, DIM_H}, GLOBAL(embedding)},
    {"norm.scale", BF16, {DIM_H}, GLOBAL(final_norm)},
    {"unembedding.weight", BF16, {DIM_V, DIM_H}, GLOBAL(unembedding)},
    {0},
};

static const struct layout {
    const char *prefix;     /* of a layer's tensors, before its number */
    const char *witness[2]; /* stands in every checkpoint with experts of this format */
    const struct rule *global, *layer, *experts[2]; /* experts by format, as witness is */
    bool bf16_transposed;
} layouts[] = {
    [DMK_CONFIG_HF] = {"model.layers",
                       {"model.layers.0.mlp.experts.gate_up_proj_blocks",
                        "model.layers.0.mlp.experts.gate_up_proj"},
                       hf_global,
                       hf_layer,
                       {hf_experts_mxfp4, hf_experts_bf16},
                       true},
    [DMK_CONFIG_ORIGINAL] = {"block",
                             {"block.0.mlp.mlp1_weight.blocks", "block.0.mlp.mlp1_weight"},
                             original_global,
                             original_layer,
                             {original_experts_mxfp4, original_experts_bf16},
                             false},
};

struct loader {
    struct dmk_weights *w;
    struct dmk_checkpoint *ckpt;
    const struct layout *layout;
    bool raw;
    bool *used;             /* [tensors of the checkpoint] */
    struct dmk_buf missing; /* names, for the sentence */
    uint32_t n_missing;
    struct dmk_error *reterr;
};

static uint64_t size_of_dim(const struct dmk_shape *s, enum dim dim)
{
    const uint64_t q = (uint64_t)s->n_heads * DMK_HEAD_DIM;
    const uint64_t kv = (uint64_t)s->n_kv_heads * DMK_HEAD_DIM;

    switch (dim) {
    case DIM_H:
        return s->hidden;
    case DIM_H32:
        return s->hidden / 32;
    case DIM_I:
        return s->intermediate;
    case DIM_I32:
        return s->intermediate / 32;
    case DIM_2I:
        return 2ull * s->intermediate;
    case DIM_Q:
        return q;
    case DIM_KV:
        return kv;
    case DIM_QKV:
        return q + 2 * kv;
    case DIM_HEADS:
        return s->n_heads;
    case DIM_E:
        return s->n_experts;
    case DIM_V:
        return s->vocab;
    case DIM_16:
        return 16;
    case DIM_NONE:
        break;
    }
    dmk_unreachable("dimension");
}

static void print_shape(struct dmk_buf *buf, const uint64_t *dims, uint32_t rank)
{
    dmk_buf_putc(buf, '[');
    for (uint32_t i = 0; i < rank; i++) {
        dmk_buf_printf(buf, "%s%llu", i ? "," : "", (unsigned long long)dims[i]);
    }
    dmk_buf_putc(buf, ']');
}

static int check_tensor(struct loader *l, const struct dmk_checkpoint_entry *e,
                        const struct rule *rule)
{
    const struct dmk_tensor *t = e->tensor;
    uint64_t want[4];
    uint32_t rank = 0;
    struct dmk_buf text;
    int r;

    while (rank < 4 && rule->dims[rank] != DIM_NONE) {
        want[rank] = size_of_dim(&l->w->shape, rule->dims[rank]);
        rank++;
    }
    if (t->dtype != rule->dtype) {
        return dmk_error_set(l->reterr, -DMK_EMISMATCH,
                             "%s: tensor \"%.80s\": dtype is %s but must be %s", e->path, t->name,
                             dmk_dtype_name(t->dtype), dmk_dtype_name(rule->dtype));
    }
    if (t->rank == rank && memcmp(t->dims, want, rank * sizeof(want[0])) == 0) {
        return 0;
    }
    dmk_buf_init(&text, 1024);
    dmk_buf_puts(&text, "shape is ");
    print_shape(&text, t->dims, t->rank);
    dmk_buf_puts(&text, " but config.json asks for ");
    print_shape(&text, want, rank);
    r = dmk_error_set(l->reterr, -DMK_EMISMATCH, "%s: tensor \"%.80s\": %s", e->path, t->name,
                      text.data ? text.data : "wrong shape");
    dmk_buf_fini(&text);
    return r;
}

/* A pointer to 16-bit numbers must be even; a checkpoint written elsewhere may have them odd. */
static int align_tensor(struct loader *l, const struct dmk_tensor *t, const uint8_t **ret)
{
    void *copy;

    if (l->raw || t->dtype != DMK_DTYPE_BF16 || ((uintptr_t)t->data & 1) == 0) {
        *ret = t->data;
        return 0;
    }
    copy = dmk_weights_own(l->w, t->n_bytes);
    if (!copy) {
        return dmk_error_set(l->reterr, -DMK_ENOMEM, "tensor \"%.80s\": no memory for %llu bytes",
                             t->name, (unsigned long long)t->n_bytes);
    }
    memcpy(copy, t->data, t->n_bytes);
    *ret = copy;
    return 0;
}

static void note_missing(struct loader *l, const char *name)
{
    if (l->n_missing++ < MAX_LISTED) {
        dmk_buf_printf(&l->missing, "%s%s", l->n_missing > 1 ? ", " : "", name);
    }
}

static int bind_rules(struct loader *l, const struct rule *rules, const char *prefix, void *base)
{
    for (const struct rule *rule = rules; rule->name; rule++) {
        const struct dmk_checkpoint_entry *e;
        const uint8_t *data = NULL;
        char name[128];
        size_t index = 0;
        int r;

        (void)snprintf(name, sizeof(name), "%s%s", prefix, rule->name);
        e = dmk_checkpoint_find(l->ckpt, name, &index);
        if (!e) {
            note_missing(l, name);
            continue;
        }
        l->used[index] = true;
        if ((r = check_tensor(l, e, rule)) < 0 || (r = align_tensor(l, e->tensor, &data)) < 0) {
            return r;
        }
        memcpy((char *)base + rule->offset, &data, sizeof(data));
        l->w->total_bytes += e->tensor->n_bytes;
    }
    return 0;
}

static void split_qkv(const struct dmk_shape *s, struct dmk_layer_weights *layer)
{
    const uint64_t q = size_of_dim(s, DIM_Q), kv = size_of_dim(s, DIM_KV);

    layer->k_w = layer->q_w + q * s->hidden;
    layer->v_w = layer->k_w + kv * s->hidden;
    layer->k_b = layer->q_b + q;
    layer->v_b = layer->k_b + kv;
}

/* One sentence for both kinds: names that the config asks for and files lack, and the other way
 * round. */
static int check_complete(struct loader *l)
{
    struct dmk_buf extra;
    uint32_t n_extra = 0;
    int r;

    dmk_buf_init(&extra, 4096);
    for (size_t i = 0; i < dmk_checkpoint_count(l->ckpt); i++) {
        if (!l->used[i] && n_extra++ < MAX_LISTED) {
            dmk_buf_printf(&extra, "%s%.80s", n_extra > 1 ? ", " : "",
                           dmk_checkpoint_at(l->ckpt, i)->tensor->name);
        }
    }
    if (l->n_missing && n_extra) {
        r = dmk_error_set(l->reterr, -DMK_EMISMATCH,
                          "%s: %u tensors are missing (%s%s) and %u are unexpected (%s%s)",
                          dmk_checkpoint_source(l->ckpt), l->n_missing, l->missing.data,
                          l->n_missing > MAX_LISTED ? ", ..." : "", n_extra, extra.data,
                          n_extra > MAX_LISTED ? ", ..." : "");
    } else if (l->n_missing) {
        r = dmk_error_set(l->reterr, -DMK_EMISMATCH, "%s: %u tensors are missing: %s%s",
                          dmk_checkpoint_source(l->ckpt), l->n_missing, l->missing.data,
                          l->n_missing > MAX_LISTED ? ", ..." : "");
    } else if (n_extra) {
        r = dmk_error_set(l->reterr, -DMK_EMISMATCH, "%s: %u tensors are unexpected: %s%s",
                          dmk_checkpoint_source(l->ckpt), n_extra, extra.data,
                          n_extra > MAX_LISTED ? ", ..." : "");
    } else {
        r = 0;
    }
    dmk_buf_fini(&extra);
    return r;
}

static int bind_all(struct loader *l)
{
    struct dmk_weights *w = l->w;
    const struct layout *lay = l->layout;
    int r = bind_rules(l, lay->global, "", w);

    for (uint32_t i = 0; i < w->shape.n_layers && r == 0; i++) {
        char prefix[32];

        (void)snprintf(prefix, sizeof(prefix), "%s.%u.", lay->prefix, i);
        r = bind_rules(l, lay->layer, prefix, &w->layers[i]);
        if (r == 0) {
            r = bind_rules(l, lay->experts[w->expert_format], prefix, &w->layers[i]);
        }
    }
    return r < 0 ? r : check_complete(l);
}

/* The tensors decide the format; a config that says otherwise belongs to another checkpoint. */
static int choose_format(struct loader *l, const struct dmk_config *config)
{
    const char *mxfp4 = l->layout->witness[DMK_EXPERTS_MXFP4];
    const bool has_mxfp4 = dmk_checkpoint_find(l->ckpt, mxfp4, NULL) != NULL;
    const bool has_bf16 =
        dmk_checkpoint_find(l->ckpt, l->layout->witness[DMK_EXPERTS_BF16], NULL) != NULL;

    l->w->expert_format = has_bf16 && !has_mxfp4 ? DMK_EXPERTS_BF16 : DMK_EXPERTS_MXFP4;
    if (config->layout == DMK_CONFIG_HF && has_mxfp4 != config->mxfp4) {
        return dmk_error_set(l->reterr, -DMK_EMISMATCH,
                             "%s: %s tensor \"%s\" but config.json %s quantization_config",
                             dmk_checkpoint_source(l->ckpt), has_mxfp4 ? "holds" : "lacks", mxfp4,
                             config->mxfp4 ? "has a" : "has no");
    }
    return 0;
}

static int load_cut(struct loader *l, const struct dmk_weights_conf *conf)
{
    int r = dmk_cut_weights_open(conf->dir, l->w, l->reterr);

    if (r == 0 && conf->layout) {
        r = dmk_cut_weights_check(l->w->cut, *conf->layout, l->reterr);
    }
    return r == 0 && conf->prefault ? dmk_weights_prefault(l->w, conf, l->reterr) : r;
}

static int load(struct loader *l, const struct dmk_weights_conf *conf)
{
    struct dmk_weights *w = l->w;
    struct dmk_config config = {0};
    int r = dmk_cut_weights_here(conf->dir, l->reterr);

    if (r != 0) {
        return r < 0 ? r : load_cut(l, conf);
    }
    r = dmk_checkpoint_open(conf->dir, &w->checkpoint, l->reterr);
    if (r < 0) {
        return r;
    }
    l->ckpt = w->checkpoint;
    r = dmk_config_load(dmk_checkpoint_dir(l->ckpt), conf->dir, &config, l->reterr);
    if (r < 0) {
        return r;
    }
    w->shape = config.shape;
    l->layout = &layouts[config.layout];
    w->layers = calloc(w->shape.n_layers, sizeof(w->layers[0]));
    l->used = calloc(dmk_checkpoint_count(l->ckpt) + 1, sizeof(l->used[0]));
    if (!w->layers || !l->used) {
        return dmk_error_set(l->reterr, -DMK_ENOMEM, "%s: no memory for its tables", conf->dir);
    }
    if ((r = choose_format(l, &config)) < 0 || (r = bind_all(l)) < 0) {
        return r;
    }
    if (config.layout == DMK_CONFIG_ORIGINAL) {
        for (uint32_t i = 0; i < w->shape.n_layers; i++) {
            split_qkv(&w->shape, &w->layers[i]);
        }
    }
    if (!conf->raw && w->expert_format == DMK_EXPERTS_BF16 && l->layout->bf16_transposed &&
        (r = dmk_weights_turn_experts(w, l->reterr)) < 0) {
        return r;
    }
    return conf->prefault ? dmk_weights_prefault(w, conf, l->reterr) : 0;
}

int dmk_weights_open(const struct dmk_weights_conf *conf, struct dmk_weights **ret,
                     struct dmk_error *reterr)
{
    struct loader l = {.reterr = reterr, .raw = conf->raw};
    int r;

    l.w = calloc(1, sizeof(*l.w));
    if (!l.w) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory to open it", conf->dir);
    }
    dmk_buf_init(&l.missing, 4096);
    r = load(&l, conf);
    dmk_buf_fini(&l.missing);
    free(l.used);
    if (r < 0) {
        dmk_weights_close(&l.w);
        return r;
    }
    *ret = l.w;
    return 0;
}

void dmk_weights_close(struct dmk_weights **weights)
{
    struct dmk_weights *w = *weights;

    if (!w) {
        return;
    }
    dmk_checkpoint_close(&w->checkpoint);
    dmk_cut_weights_close(w);
    dmk_weights_disown(w);
    free(w->layers);
    free(w);
    *weights = NULL;
}
