/* The plan of a converted folder; see cut.h. No files, no state. */
#include "common/model/cut.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "kernels/dtype.h"
#include "kernels/pack.h"

enum dim {
    DIM_NONE,
    DIM_H,
    DIM_H32,  /* H/32 */
    DIM_H128, /* H/128, rounded up: blocks of FP8 that share a scale */
    DIM_I32,
    DIM_I,
    DIM_I128,
    DIM_2I,
    DIM_2I128,
    DIM_Q,
    DIM_KV,
    DIM_HEADS,
    DIM_E,
    DIM_V,
    DIM_16,
};

/* A tensor that a rank has; axis is the one that is cut (of shared tensors none is). */
struct part {
    const char *name;
    enum dmk_dtype dtype;
    enum dim dims[4];
    uint32_t axis;
    size_t place;
};

#define LAYER(f)  offsetof(struct dmk_layer_weights, f)
#define GLOBAL(f) offsetof(struct dmk_rank_weights, f)
#define BF16      DMK_DTYPE_BF16
#define U8        DMK_DTYPE_U8
#define F8        DMK_DTYPE_F8_E4M3
#define F32       DMK_DTYPE_F32

static const struct part shared_global[] = {
    {"model.embed_tokens.weight", BF16, {DIM_V, DIM_H}, 0, GLOBAL(embedding)},
    {"model.norm.weight", BF16, {DIM_H}, 0, GLOBAL(final_norm)},
    {0},
};

static const struct part shared_layer[] = {
    {"input_layernorm.weight", BF16, {DIM_H}, 0, LAYER(attn_norm)},
    {"self_attn.o_proj.bias", BF16, {DIM_H}, 0, LAYER(o_b)},
    {"post_attention_layernorm.weight", BF16, {DIM_H}, 0, LAYER(mlp_norm)},
    {"mlp.router.weight", BF16, {DIM_E, DIM_H}, 0, LAYER(router_w)},
    {"mlp.router.bias", BF16, {DIM_E}, 0, LAYER(router_b)},
    {0},
};

static const struct part attention_layer[] = {
    {"self_attn.q_proj.weight", BF16, {DIM_Q, DIM_H}, 0, LAYER(q_w)},
    {"self_attn.q_proj.bias", BF16, {DIM_Q}, 0, LAYER(q_b)},
    {"self_attn.k_proj.weight", BF16, {DIM_KV, DIM_H}, 0, LAYER(k_w)},
    {"self_attn.k_proj.bias", BF16, {DIM_KV}, 0, LAYER(k_b)},
    {"self_attn.v_proj.weight", BF16, {DIM_KV, DIM_H}, 0, LAYER(v_w)},
    {"self_attn.v_proj.bias", BF16, {DIM_KV}, 0, LAYER(v_b)},
    {"self_attn.o_proj.weight", BF16, {DIM_H, DIM_Q}, 1, LAYER(o_w)},
    {"self_attn.sinks", BF16, {DIM_HEADS}, 0, LAYER(sinks)},
    {0},
};

static const struct part head_global[] = {
    {"lm_head.weight", BF16, {DIM_V, DIM_H}, 0, GLOBAL(unembedding)},
    {0},
};

/* Codes before scales: a writer that makes FP8 knows the scales of a matrix only at its end. */
static const struct part experts_mxfp4[] = {
    {"mlp.experts.gate_up_proj_blocks",
     U8,
     {DIM_E, DIM_2I, DIM_H32, DIM_16},
     0,
     LAYER(gate_up.blocks)},
    {"mlp.experts.gate_up_proj_scales", U8, {DIM_E, DIM_2I, DIM_H32}, 0, LAYER(gate_up.scales)},
    {"mlp.experts.gate_up_proj_bias", BF16, {DIM_E, DIM_2I}, 0, LAYER(gate_up.bias)},
    {"mlp.experts.down_proj_blocks", U8, {DIM_E, DIM_H, DIM_I32, DIM_16}, 0, LAYER(down.blocks)},
    {"mlp.experts.down_proj_scales", U8, {DIM_E, DIM_H, DIM_I32}, 0, LAYER(down.scales)},
    {"mlp.experts.down_proj_bias", BF16, {DIM_E, DIM_H}, 0, LAYER(down.bias)},
    {0},
};

static const struct part experts_fp8[] = {
    {"mlp.experts.gate_up_proj", F8, {DIM_E, DIM_2I, DIM_H}, 0, LAYER(gate_up.blocks)},
    {"mlp.experts.gate_up_proj_scale", F32, {DIM_E, DIM_2I128, DIM_H128}, 0, LAYER(gate_up.scales)},
    {"mlp.experts.gate_up_proj_bias", BF16, {DIM_E, DIM_2I}, 0, LAYER(gate_up.bias)},
    {"mlp.experts.down_proj", F8, {DIM_E, DIM_H, DIM_I}, 0, LAYER(down.blocks)},
    {"mlp.experts.down_proj_scale", F32, {DIM_E, DIM_H128, DIM_I128}, 0, LAYER(down.scales)},
    {"mlp.experts.down_proj_bias", BF16, {DIM_E, DIM_H}, 0, LAYER(down.bias)},
    {0},
};

static uint64_t div_up(uint64_t a, uint64_t b)
{
    return (a + b - 1) / b;
}

static uint64_t size_of(const struct dmk_shape *s, enum dim dim)
{
    const uint64_t sizes[] = {
        [DIM_H] = s->hidden,
        [DIM_H32] = s->hidden / DMK_MXFP4_BLOCK,
        [DIM_H128] = div_up(s->hidden, DMK_FP8_BLOCK),
        [DIM_I32] = s->intermediate / DMK_MXFP4_BLOCK,
        [DIM_I] = s->intermediate,
        [DIM_I128] = div_up(s->intermediate, DMK_FP8_BLOCK),
        [DIM_2I] = 2ull * s->intermediate,
        [DIM_2I128] = div_up(2ull * s->intermediate, DMK_FP8_BLOCK),
        [DIM_Q] = (uint64_t)s->n_heads * DMK_HEAD_DIM,
        [DIM_KV] = (uint64_t)s->n_kv_heads * DMK_HEAD_DIM,
        [DIM_HEADS] = s->n_heads,
        [DIM_E] = s->n_experts,
        [DIM_V] = s->vocab,
        [DIM_16] = DMK_MXFP4_BLOCK_BYTES,
    };

    return sizes[dim];
}

static uint64_t align_up(uint64_t n)
{
    return div_up(n, DMK_CUT_ALIGN) * DMK_CUT_ALIGN;
}

struct planner {
    const struct dmk_shape *shape;
    struct dmk_cut *cut; /* with room for everything, or with NULLs while counting */
    struct dmk_cut_file file;
    uint64_t data_bytes; /* of the file so far */
};

/* The part [begin, end) of an axis that is `of` long. */
static void choose_range(const struct planner *p, const struct part *part, struct dmk_cut_tensor *t)
{
    const struct dmk_cut_file *f = &p->file;
    const struct dmk_layout layout = p->cut->layout;
    const uint64_t of = size_of(p->shape, part->dims[part->axis]);
    uint64_t n = 1;

    if (f->kind == DMK_CUT_HEAD) {
        const struct dmk_shard shard = dmk_layout_shard(p->shape, layout, f->index);

        t->begin = shard.vocab_first;
        t->end = t->begin + shard.n_vocab;
        t->of = of;
        return;
    }
    if (f->kind != DMK_CUT_SHARED) {
        n = f->kind == DMK_CUT_EXPERTS ? layout.tp * layout.dp : layout.tp;
    }
    t->begin = of / n * f->index;
    t->end = t->begin + of / n;
    t->of = of;
}

static void add_tensor(struct planner *p, const struct part *part, uint32_t layer)
{
    struct dmk_cut *cut = p->cut;
    struct dmk_cut_tensor t = {
        .dtype = part->dtype, .layer = layer, .place = part->place, .axis = part->axis};

    if (layer == DMK_CUT_GLOBAL) {
        (void)snprintf(t.name, sizeof(t.name), "%s", part->name);
    } else {
        (void)snprintf(t.name, sizeof(t.name), "model.layers.%u.%s", layer, part->name);
    }
    choose_range(p, part, &t);
    t.n_bytes = dmk_dtype_bytes(part->dtype);
    while (t.rank < 4 && part->dims[t.rank] != DIM_NONE) {
        t.dims[t.rank] =
            t.rank == part->axis ? t.end - t.begin : size_of(p->shape, part->dims[t.rank]);
        t.n_bytes *= t.dims[t.rank++];
    }
    t.offset = align_up(p->data_bytes); /* the header's length is added when it is known */
    p->data_bytes = t.offset + t.n_bytes;
    if (cut->tensors) {
        cut->tensors[cut->n_tensors] = t;
    }
    cut->n_tensors++;
    p->file.n_tensors++;
}

static void add_parts(struct planner *p, const struct part *parts, uint32_t layer)
{
    for (const struct part *part = parts; part->name; part++) {
        add_tensor(p, part, layer);
    }
}

static void begin_file(struct planner *p, enum dmk_cut_kind kind, uint32_t index, uint32_t layer)
{
    struct dmk_cut_file *f = &p->file;

    *f = (struct dmk_cut_file){
        .kind = kind, .index = index, .layer = layer, .first = p->cut->n_tensors};
    p->data_bytes = 0;
    switch (kind) {
    case DMK_CUT_SHARED:
        (void)snprintf(f->name, sizeof(f->name), "shared.safetensors");
        break;
    case DMK_CUT_ATTENTION:
        (void)snprintf(f->name, sizeof(f->name), "attention-tp%u.safetensors", index);
        break;
    case DMK_CUT_HEAD:
        (void)snprintf(f->name, sizeof(f->name), "head-tp%u.safetensors", index);
        break;
    case DMK_CUT_EXPERTS:
        (void)snprintf(f->name, sizeof(f->name), "experts-rank%u-layer%02u.safetensors", index,
                       layer);
        break;
    }
}

static void end_file(struct planner *p)
{
    struct dmk_cut *cut = p->cut;

    if (cut->files) {
        cut->files[cut->n_files] = p->file;
        cut->files[cut->n_files].n_bytes = p->data_bytes;
    }
    cut->n_files++;
}

/* In this order; big files first, so that threads that take whole files end together. */
static void add_files(struct planner *p)
{
    const struct dmk_layout layout = p->cut->layout;
    const uint32_t n_layers = p->shape->n_layers;

    begin_file(p, DMK_CUT_SHARED, 0, DMK_CUT_GLOBAL);
    add_parts(p, shared_global, DMK_CUT_GLOBAL);
    for (uint32_t l = 0; l < n_layers; l++) {
        add_parts(p, shared_layer, l);
    }
    end_file(p);
    for (uint32_t i = 0; i < layout.tp; i++) {
        begin_file(p, DMK_CUT_ATTENTION, i, DMK_CUT_GLOBAL);
        for (uint32_t l = 0; l < n_layers; l++) {
            add_parts(p, attention_layer, l);
        }
        end_file(p);
        begin_file(p, DMK_CUT_HEAD, i, DMK_CUT_GLOBAL);
        add_parts(p, head_global, DMK_CUT_GLOBAL);
        end_file(p);
    }
    for (uint32_t l = 0; l < n_layers; l++) {
        for (uint32_t r = 0; r < layout.tp * layout.dp; r++) {
            begin_file(p, DMK_CUT_EXPERTS, r, l);
            add_parts(p, p->cut->experts == DMK_EXPERTS_FP8 ? experts_fp8 : experts_mxfp4, l);
            end_file(p);
        }
    }
}

static void put_entry(struct dmk_buf *out, const char *name, const char *dtype,
                      const uint64_t *dims, uint32_t rank, uint64_t begin, uint64_t end)
{
    dmk_buf_printf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", name, dtype);
    for (uint32_t i = 0; i < rank; i++) {
        dmk_buf_printf(out, "%s%llu", i ? "," : "", (unsigned long long)dims[i]);
    }
    dmk_buf_printf(out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin,
                   (unsigned long long)end);
}

/* Offsets of tensors count from base, which is 0 as long as the header's length is not known. */
static void put_header(const struct dmk_cut *cut, const struct dmk_cut_file *f, uint64_t base,
                       struct dmk_buf *out)
{
    static const uint8_t zeros[8];
    const size_t start = out->len;
    uint64_t end = 0, length;
    uint32_t n_pads = 0;

    dmk_buf_append(out, zeros, sizeof(zeros));
    dmk_buf_printf(
        out, "{\"__metadata__\":{\"format\":\"pt\",\"damask\":\"%s\",\"tp\":\"%u\",\"dp\":\"%u\"}",
        dmk_cut_format_name(cut->experts), cut->layout.tp, cut->layout.dp);
    for (uint32_t i = f->first; i < f->first + f->n_tensors; i++) {
        const struct dmk_cut_tensor *t = &cut->tensors[i];
        const uint64_t begin = t->offset - base, gap = begin - end;

        if (gap) {
            char name[24];

            (void)snprintf(name, sizeof(name), "_pad.%u", n_pads++);
            put_entry(out, name, "U8", &gap, 1, end, begin);
        }
        end = begin + t->n_bytes;
        put_entry(out, t->name, dmk_dtype_name(t->dtype), t->dims, t->rank, begin, end);
    }
    dmk_buf_putc(out, '}');
    while ((out->len - start) % DMK_CUT_ALIGN != 0 && !out->failed) {
        dmk_buf_putc(out, ' ');
    }
    length = out->len - start - 8;
    for (int i = 0; i < 8 && !out->failed; i++) {
        out->data[start + (size_t)i] = (char)(length >> (8 * i));
    }
}

void dmk_cut_header(const struct dmk_cut *cut, const struct dmk_cut_file *file, struct dmk_buf *out)
{
    put_header(cut, file, file->data_start, out);
}

/* Headers tell offsets from their own end, so their lengths are known without it. */
static int add_headers(struct dmk_cut *cut, struct dmk_error *reterr)
{
    struct dmk_buf text;
    bool failed = false;

    dmk_buf_init(&text, 0);
    for (uint32_t i = 0; i < cut->n_files && !failed; i++) {
        struct dmk_cut_file *f = &cut->files[i];

        dmk_buf_reset(&text);
        put_header(cut, f, 0, &text);
        failed = text.failed;
        f->data_start = text.len;
        f->n_bytes += text.len;
        cut->n_bytes += f->n_bytes;
        for (uint32_t k = f->first; k < f->first + f->n_tensors; k++) {
            cut->tensors[k].offset += text.len;
        }
    }
    dmk_buf_fini(&text);
    return failed ? dmk_error_set(reterr, -DMK_ENOMEM, "no memory to plan %u files", cut->n_files)
                  : 0;
}

int dmk_cut_plan(const struct dmk_shape *shape, struct dmk_layout layout,
                 enum dmk_expert_format experts, struct dmk_cut *ret_cut, struct dmk_error *reterr)
{
    struct dmk_cut cut = {.layout = layout, .experts = experts};
    struct planner p = {.shape = shape, .cut = &cut};
    int r;

    dmk_assert(experts == DMK_EXPERTS_MXFP4 || experts == DMK_EXPERTS_FP8);
    add_files(&p);
    cut.files = calloc(cut.n_files, sizeof(cut.files[0]));
    cut.tensors = calloc(cut.n_tensors, sizeof(cut.tensors[0]));
    if (!cut.files || !cut.tensors) {
        r = dmk_error_set(reterr, -DMK_ENOMEM, "no memory to plan %u files", cut.n_files);
        dmk_cut_free(&cut);
        return r;
    }
    cut.n_files = 0;
    cut.n_tensors = 0;
    add_files(&p);
    r = add_headers(&cut, reterr);
    if (r < 0) {
        dmk_cut_free(&cut);
        return r;
    }
    *ret_cut = cut;
    return 0;
}

void dmk_cut_free(struct dmk_cut *cut)
{
    free(cut->files);
    free(cut->tensors);
    *cut = (struct dmk_cut){0};
}

bool dmk_cut_serves(const struct dmk_cut *cut, const struct dmk_cut_file *file, uint32_t rank)
{
    switch (file->kind) {
    case DMK_CUT_SHARED:
        return true;
    case DMK_CUT_ATTENTION:
    case DMK_CUT_HEAD:
        return rank % cut->layout.tp == file->index;
    case DMK_CUT_EXPERTS:
        return rank == file->index;
    }
    dmk_unreachable("kind of file");
}

const char *dmk_cut_format_name(enum dmk_expert_format format)
{
    static const char *const names[] = {
        [DMK_EXPERTS_MXFP4] = "mxfp4", [DMK_EXPERTS_BF16] = "bf16", [DMK_EXPERTS_FP8] = "fp8"};

    return names[format];
}

const char *dmk_cut_kind_name(enum dmk_cut_kind kind)
{
    static const char *const names[] = {[DMK_CUT_SHARED] = "shared",
                                        [DMK_CUT_ATTENTION] = "attention",
                                        [DMK_CUT_HEAD] = "head",
                                        [DMK_CUT_EXPERTS] = "experts"};

    return names[kind];
}
