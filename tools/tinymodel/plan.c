/* Which tensors a synthetic checkpoint has, how large their numbers are, and in which file they lie. */
#include "tools/tinymodel/internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"

#define MAX_SHARD_BYTES 4800000000ull
#define PER_LAYER       19u

/* Each of the 2L branches adds about 1/L of the embedding's variance to the residual, at any depth. */
struct deviations {
    float embedding, head;
    float qkv, out, router, gate_up, down;
};

static struct deviations choose_deviations(const struct dmk_shape *s)
{
    const float h = (float)s->hidden, q = (float)s->n_heads * DMK_HEAD_DIM;
    const float branch = 1.0f / sqrtf((float)s->n_layers);

    return (struct deviations){
        .embedding = 1.0f,
        .head = 3.0f / sqrtf(h),           /* logits of deviation 3 */
        .qkv = 1.0f / sqrtf(h),            /* scores of deviation about 1.8 */
        .out = branch / (0.4f * sqrtf(q)), /* attention's averages have a deviation of about 0.4 */
        .router = 2.0f / sqrtf(h),
        .gate_up = 1.5f / sqrtf(h),
        .down = 1.6f * branch / (1.7f * sqrtf((float)s->intermediate)),
    };
}

static struct tm_tensor *add(struct tm_plan *p, const char *prefix, const char *name,
                             enum tm_fill fill, const uint64_t dims[4], uint64_t stream)
{
    struct tm_tensor *t = &p->tensors[p->n_tensors++];

    *t = (struct tm_tensor){.fill = fill, .stream = stream};
    (void)snprintf(t->name, sizeof(t->name), "%s%s", prefix, name);
    t->is_bf16 = fill != TM_BLOCKS && fill != TM_SCALES;
    t->n_bytes = t->is_bf16 ? 2 : 1;
    for (t->rank = 0; t->rank < 4 && dims[t->rank]; t->rank++) {
        t->dims[t->rank] = dims[t->rank];
        t->n_bytes *= dims[t->rank];
    }
    return t;
}

static void add_uniform(struct tm_plan *p, const char *prefix, const char *name, uint64_t d0,
                        uint64_t d1, uint64_t stream, float mean, float deviation)
{
    struct tm_tensor *t = add(p, prefix, name, TM_UNIFORM, (const uint64_t[4]){d0, d1}, stream);

    t->mean = mean;
    t->deviation = deviation;
}

static void add_experts(struct tm_plan *p, const char *prefix, const char *name, uint64_t rows,
                        uint64_t cols, uint64_t stream, float deviation)
{
    const uint64_t e = p->conf->shape.n_experts;
    char full[64];

    if (p->conf->expert_format == DMK_EXPERTS_BF16) {
        add(p, prefix, name, TM_EXPERTS_BF16, (const uint64_t[4]){e, cols, rows}, stream)
            ->deviation = deviation;
        return;
    }
    (void)snprintf(full, sizeof(full), "%s_blocks", name);
    add(p, prefix, full, TM_BLOCKS, (const uint64_t[4]){e, rows, cols / 32, 16}, stream);
    (void)snprintf(full, sizeof(full), "%s_scales", name);
    add(p, prefix, full, TM_SCALES, (const uint64_t[4]){e, rows, cols / 32}, stream)->deviation =
        deviation;
}

static void add_layer(struct tm_plan *p, uint32_t layer, const struct deviations *d)
{
    const struct dmk_shape *s = &p->conf->shape;
    const uint64_t h = s->hidden, i2 = 2ull * s->intermediate, e = s->n_experts;
    const uint64_t q = (uint64_t)s->n_heads * DMK_HEAD_DIM;
    const uint64_t kv = (uint64_t)s->n_kv_heads * DMK_HEAD_DIM;
    const uint64_t stream = ((uint64_t)layer + 1) << 8;
    char prefix[32];

    (void)snprintf(prefix, sizeof(prefix), "model.layers.%u.", layer);
    add_uniform(p, prefix, "input_layernorm.weight", h, 0, stream, 1.0f, 0.1f);
    add_uniform(p, prefix, "self_attn.q_proj.weight", q, h, stream + 1, 0, d->qkv);
    add_uniform(p, prefix, "self_attn.q_proj.bias", q, 0, stream + 2, 0, 0.1f);
    add_uniform(p, prefix, "self_attn.k_proj.weight", kv, h, stream + 3, 0, d->qkv);
    add_uniform(p, prefix, "self_attn.k_proj.bias", kv, 0, stream + 4, 0, 0.1f);
    add_uniform(p, prefix, "self_attn.v_proj.weight", kv, h, stream + 5, 0, d->qkv);
    add_uniform(p, prefix, "self_attn.v_proj.bias", kv, 0, stream + 6, 0, 0.1f);
    add_uniform(p, prefix, "self_attn.o_proj.weight", h, q, stream + 7, 0, d->out);
    add_uniform(p, prefix, "self_attn.o_proj.bias", h, 0, stream + 8, 0, 0.05f);
    add_uniform(p, prefix, "self_attn.sinks", s->n_heads, 0, stream + 9, 0.5f, 0.5f);
    add_uniform(p, prefix, "post_attention_layernorm.weight", h, 0, stream + 10, 1.0f, 0.1f);
    add_uniform(p, prefix, "mlp.router.weight", e, h, stream + 11, 0, d->router);
    add_uniform(p, prefix, "mlp.router.bias", e, 0, stream + 12, 0, 0.1f);
    add_experts(p, prefix, "mlp.experts.gate_up_proj", i2, h, stream + 13, d->gate_up);
    add_uniform(p, prefix, "mlp.experts.gate_up_proj_bias", e, i2, stream + 15, 0, 0.1f);
    add_experts(p, prefix, "mlp.experts.down_proj", h, s->intermediate, stream + 16, d->down);
    add_uniform(p, prefix, "mlp.experts.down_proj_bias", e, h, stream + 18, 0, 0.05f);
}

static void add_all(struct tm_plan *p)
{
    const struct dmk_shape *s = &p->conf->shape;
    const struct deviations d = choose_deviations(s);
    struct tm_tensor *head;

    p->embedding_deviation = d.embedding;
    p->embedding_stream = 1;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        add_layer(p, i, &d);
    }
    add_uniform(p, "", "model.embed_tokens.weight", s->vocab, s->hidden, p->embedding_stream, 0,
                d.embedding);
    add_uniform(p, "", "model.norm.weight", s->hidden, 0, 2, 1.0f, 0.1f);
    head = add(p, "", "lm_head.weight", TM_HEAD, (const uint64_t[4]){s->vocab, s->hidden}, 3);
    head->deviation = d.head;
}

/* The published order: by name, which puts layer 10 before layer 2. */
static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct tm_tensor *)a)->name, ((const struct tm_tensor *)b)->name);
}

/* Within a file all BF16 tensors come first, then the bytes. */
static int compare_places(const void *a, const void *b)
{
    const struct tm_tensor *x = a, *y = b;

    if (x->file != y->file) {
        return x->file < y->file ? -1 : 1;
    }
    if (x->is_bf16 != y->is_bf16) {
        return x->is_bf16 ? -1 : 1;
    }
    return strcmp(x->name, y->name);
}

/* Cuts the list into files of about equal size, wherever that falls. */
static void assign_files(struct tm_plan *p)
{
    uint64_t seen = 0, offset = 0;

    qsort(p->tensors, p->n_tensors, sizeof(p->tensors[0]), compare_names);
    for (uint32_t i = 0; i < p->n_tensors; i++) {
        struct tm_tensor *t = &p->tensors[i];
        const double middle = (double)seen + (double)t->n_bytes / 2;

        t->file = (uint32_t)(middle * p->n_files / (double)p->total_bytes);
        seen += t->n_bytes;
    }
    qsort(p->tensors, p->n_tensors, sizeof(p->tensors[0]), compare_places);
    for (uint32_t i = 0; i < p->n_tensors; i++) {
        if (i > 0 && p->tensors[i].file != p->tensors[i - 1].file) {
            offset = 0;
        }
        p->tensors[i].offset = offset;
        offset += p->tensors[i].n_bytes;
    }
}

int tm_plan_make(const struct dmk_tinymodel_conf *conf, struct tm_plan *ret_plan,
                 struct dmk_error *reterr)
{
    struct tm_plan p = {.conf = conf};
    const uint32_t max = conf->shape.n_layers * PER_LAYER + 3;
    uint32_t last = UINT32_MAX, n_used = 0;

    p.tensors = calloc(max, sizeof(p.tensors[0]));
    if (!p.tensors) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for a plan of %u tensors", max);
    }
    add_all(&p);
    dmk_assert(p.n_tensors <= max);
    for (uint32_t i = 0; i < p.n_tensors; i++) {
        p.total_bytes += p.tensors[i].n_bytes;
    }
    p.n_files = conf->n_shards;
    if (p.n_files == 0) {
        p.n_files = (uint32_t)(p.total_bytes / MAX_SHARD_BYTES + 1);
        p.n_files = p.n_files < 2 ? 2 : p.n_files;
    }
    assign_files(&p);
    for (uint32_t i = 0; i < p.n_tensors; i++) {
        n_used += p.tensors[i].file != last;
        last = p.tensors[i].file;
    }
    if (n_used != p.n_files) {
        free(p.tensors);
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "%u shards are too many: the largest tensors would leave some empty",
                             p.n_files);
    }
    *ret_plan = p;
    return 0;
}

void tm_plan_free(struct tm_plan *plan)
{
    free(plan->tensors);
    plan->tensors = NULL;
}

/* Numbered from 0, and "of" names the last number, not the count: as published. */
void tm_file_name(const struct tm_plan *plan, uint32_t file, char ret_name[48])
{
    if (plan->n_files == 1) {
        (void)snprintf(ret_name, 48, "model.safetensors");
    } else {
        (void)snprintf(ret_name, 48, "model-%05u-of-%05u.safetensors", file, plan->n_files - 1);
    }
}
