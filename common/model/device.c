/* Opening a device engine: weights to the device, or made there, and the memory of steps; see device.h. */
#include "common/model/device.h"

#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "kernels/dtype.h"

#define ALIGN 256u

/* Memory that is handed out piece by piece; two passes: first sizes with base NULL, then places. */
struct arena {
    uint8_t *base;
    size_t used;
};

static void *take(struct arena *arena, size_t bytes)
{
    void *at = arena->base ? arena->base + arena->used : NULL;
    arena->used += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return at;
}

/* What the loader needs beside the engine: where plain expert matrices wait to be packed. */
struct loader {
    struct dmk_engine *engine;
    struct dmk_rank *rank;
    uint8_t *staged_blocks, *staged_scales;
    size_t block_bytes, scale_bytes;
    uint64_t seed;
    uint64_t done, total;
};

static void send(struct loader *l, const void *dst, const void *src, size_t bytes,
                 enum dmk_fill kind, float scale)
{
    const struct dmk_backend_ops *ops = l->rank->backend->ops;
    void *to = (void *)(uintptr_t)dst;
    if (!l->rank->weights.layers) {
        ops->fill(l->rank->backend, l->rank->stream, to, bytes, kind, scale, l->seed++);
    } else {
        ops->copy(l->rank->backend, l->rank->stream, to, src, bytes);
    }
    l->done += bytes;
    if (l->engine->conf.on_progress) {
        l->engine->conf.on_progress(l->engine->conf.ud, l->done, l->total);
    }
}

/* The matrix as the checkpoint has it, without memory. */
static struct dmk_expert_weights describe_experts(const struct dmk_engine *engine, bool gate_up)
{
    const struct dmk_shape *s = &engine->shape;
    return (struct dmk_expert_weights){
        .format = engine->weights->expert_format == DMK_EXPERTS_MXFP4 ? DMK_WEIGHT_MXFP4
                                                                      : DMK_WEIGHT_BF16,
        .rows = gate_up ? 2 * s->intermediate : s->hidden,
        .cols = gate_up ? s->hidden : s->intermediate,
    };
}

static struct dmk_moe_packed plain_bytes(const struct dmk_engine *engine, bool gate_up)
{
    struct dmk_expert_weights w = describe_experts(engine, gate_up);
    size_t n = (size_t)engine->shape.n_experts * w.rows * w.cols;
    bool mxfp4 = w.format == DMK_WEIGHT_MXFP4;
    return (struct dmk_moe_packed){w.format, mxfp4 ? n / 2 : n * 2,
                                   mxfp4 ? n / DMK_MXFP4_BLOCK : 0};
}

static bool packs(const struct dmk_engine *engine, bool gate_up, struct dmk_moe_packed *ret)
{
    const struct dmk_kernels *kernels = &engine->ranks[0].kernels;
    struct dmk_expert_weights w = describe_experts(engine, gate_up);
    *ret = plain_bytes(engine, gate_up);
    if (!kernels->moe_packed || w.format != DMK_WEIGHT_MXFP4) {
        return false;
    }
    w.format = engine->conf.fp8_experts ? DMK_WEIGHT_FP8 : w.format;
    struct dmk_moe_packed packed = kernels->moe_packed(&w, engine->shape.n_experts, gate_up);
    if (packed.blocks == 0) {
        return false;
    }
    *ret = packed;
    return true;
}

static struct dmk_expert_weights place_experts(struct arena *arena, const struct dmk_engine *engine,
                                               bool gate_up)
{
    struct dmk_expert_weights w = describe_experts(engine, gate_up);
    struct dmk_moe_packed bytes;
    w.packed = packs(engine, gate_up, &bytes);
    w.format = bytes.format;
    w.blocks = take(arena, bytes.blocks);
    w.scales = bytes.scales ? take(arena, bytes.scales) : NULL;
    w.bias = take(arena, (size_t)engine->shape.n_experts * w.rows * sizeof(uint16_t));
    return w;
}

static void load_experts(struct loader *l, const struct dmk_expert_weights *w,
                         const struct dmk_expert_matrix *m, bool gate_up)
{
    const struct dmk_moe_packed plain = plain_bytes(l->engine, gate_up);
    const uint8_t *blocks = w->packed ? l->staged_blocks : w->blocks;
    const uint8_t *scales = w->packed ? l->staged_scales : w->scales;
    enum dmk_fill kind = plain.scales ? DMK_FILL_CODES : DMK_FILL_BF16;
    send(l, blocks, m ? m->blocks : NULL, plain.blocks, kind, 0.02f);
    if (plain.scales) {
        send(l, scales, m ? m->scales : NULL, plain.scales, DMK_FILL_SCALES, 0);
    }
    send(l, w->bias, m ? m->bias : NULL,
         (size_t)l->engine->shape.n_experts * w->rows * sizeof(uint16_t), DMK_FILL_BF16, 0.1f);
    if (w->packed) {
        struct dmk_moe_pack_args args = {
            .w = describe_experts(l->engine, gate_up),
            .n_experts = l->engine->shape.n_experts,
            .gate_up = gate_up,
            .blocks = (uint8_t *)(uintptr_t)w->blocks,
            .scales = (uint8_t *)(uintptr_t)w->scales,
        };
        args.w.format = w->format; /* MXFP4 that shall become FP8, or stay what it is */
        args.w.blocks = blocks;
        args.w.scales = scales;
        args.w.bias = w->bias;
        l->rank->kernels.moe_pack(&args, l->rank->stream);
    }
}

static void place_layer(struct arena *arena, const struct dmk_engine *engine,
                        struct dmk_device_layer *d)
{
    const struct dmk_shape *s = &engine->shape;
    const size_t H = s->hidden, q = (size_t)s->n_heads * DMK_HEAD_DIM, u16 = sizeof(uint16_t);
    const size_t qkv = q + (size_t)2 * s->n_kv_heads * DMK_HEAD_DIM;
    d->attn_norm = take(arena, H * u16);
    d->qkv_w = take(arena, qkv * H * u16);
    d->qkv_b = take(arena, qkv * u16);
    d->o_w = take(arena, H * q * u16);
    d->o_b = take(arena, H * u16);
    d->sinks = take(arena, s->n_heads * u16);
    d->mlp_norm = take(arena, H * u16);
    d->router_w = take(arena, s->n_experts * H * u16);
    d->router_b = take(arena, s->n_experts * u16);
    d->gate_up = place_experts(arena, engine, true);
    d->down = place_experts(arena, engine, false);
}

/* Random models keep their size: rows of a matrix of n inputs have standard deviation 1 / sqrt(n). */
static void load_layer(struct loader *l, const struct dmk_device_layer *d,
                       const struct dmk_layer_weights *w)
{
    const struct dmk_shape *s = &l->engine->shape;
    const size_t H = s->hidden, q = (size_t)s->n_heads * DMK_HEAD_DIM, u16 = sizeof(uint16_t);
    const size_t kv = (size_t)s->n_kv_heads * DMK_HEAD_DIM;
    send(l, d->attn_norm, w ? w->attn_norm : NULL, H * u16, DMK_FILL_ONES, 0);
    send(l, d->qkv_w, w ? w->q_w : NULL, q * H * u16, DMK_FILL_BF16, 0.0186f);
    send(l, d->qkv_w + q * H, w ? w->k_w : NULL, kv * H * u16, DMK_FILL_BF16, 0.0186f);
    send(l, d->qkv_w + (q + kv) * H, w ? w->v_w : NULL, kv * H * u16, DMK_FILL_BF16, 0.0186f);
    send(l, d->qkv_b, w ? w->q_b : NULL, q * u16, DMK_FILL_BF16, 0.1f);
    send(l, d->qkv_b + q, w ? w->k_b : NULL, kv * u16, DMK_FILL_BF16, 0.1f);
    send(l, d->qkv_b + q + kv, w ? w->v_b : NULL, kv * u16, DMK_FILL_BF16, 0.1f);
    send(l, d->o_w, w ? w->o_w : NULL, H * q * u16, DMK_FILL_BF16, 0.0156f);
    send(l, d->o_b, w ? w->o_b : NULL, H * u16, DMK_FILL_BF16, 0.1f);
    send(l, d->sinks, w ? w->sinks : NULL, s->n_heads * u16, DMK_FILL_BF16, 1.0f);
    send(l, d->mlp_norm, w ? w->mlp_norm : NULL, H * u16, DMK_FILL_ONES, 0);
    send(l, d->router_w, w ? w->router_w : NULL, s->n_experts * H * u16, DMK_FILL_BF16, 0.0186f);
    send(l, d->router_b, w ? w->router_b : NULL, s->n_experts * u16, DMK_FILL_BF16, 0.1f);
    load_experts(l, &d->gate_up, w ? &w->gate_up : NULL, true);
    load_experts(l, &d->down, w ? &w->down : NULL, false);
}

static int alloc_device(struct dmk_engine *engine, size_t bytes, void *ret, const char *what,
                        struct dmk_error *reterr)
{
    return dmk_engine_alloc_mem(&engine->ranks[0], DMK_MEM_DEVICE, bytes, ret, what, reterr);
}

static int load_globals(struct loader *l, struct dmk_error *reterr)
{
    struct dmk_engine *engine = l->engine;
    struct dmk_device *dev = engine->device;
    const struct dmk_rank_weights *w = &l->rank->weights;
    const size_t H = engine->shape.hidden,
                 table = (size_t)engine->shape.vocab * H * sizeof(uint16_t);
    struct arena arena = {0};
    int status;
    for (int pass = 0; pass < 2; pass++) {
        arena.used = 0;
        dev->embedding = take(&arena, table);
        dev->final_norm = take(&arena, H * sizeof(uint16_t));
        dev->unembedding = engine->conf.prefill ? NULL : take(&arena, table);
        if (pass == 0 && (status = alloc_device(engine, arena.used, &arena.base, "the embedding",
                                                reterr)) != 0) {
            return status;
        }
    }
    send(l, dev->embedding, w->embedding, table, DMK_FILL_BF16, 1.0f);
    send(l, dev->final_norm, w->final_norm, H * sizeof(uint16_t), DMK_FILL_ONES, 0);
    if (dev->unembedding) {
        send(l, dev->unembedding, w->unembedding, table, DMK_FILL_BF16, 0.05f);
    }
    return 0;
}

static int load_layers(struct loader *l, struct dmk_error *reterr)
{
    struct dmk_engine *engine = l->engine;
    for (uint32_t i = 0; i < engine->shape.n_layers; i++) {
        struct dmk_device_layer *d = &engine->device->layers[i];
        struct arena arena = {0};
        place_layer(&arena, engine, d);
        int status = alloc_device(engine, arena.used, &arena.base, "a layer's weights", reterr);
        if (status != 0) {
            return status;
        }
        arena.used = 0;
        place_layer(&arena, engine, d);
        load_layer(l, d, l->rank->weights.layers ? &l->rank->weights.layers[i] : NULL);
    }
    return 0;
}

static int load_weights(struct dmk_engine *engine, struct dmk_error *reterr)
{
    struct dmk_rank *rank = &engine->ranks[0];
    const struct dmk_backend_ops *ops = rank->backend->ops;
    const struct dmk_moe_packed plain = plain_bytes(engine, true);
    struct loader l = {.engine = engine,
                       .rank = rank,
                       .seed = engine->conf.random_seed,
                       .block_bytes = plain.blocks,
                       .scale_bytes = plain.scales,
                       .total = engine->weights->total_bytes};
    struct dmk_moe_packed packed;
    void *blocks = NULL, *scales = NULL;
    int status = 0;
    if (packs(engine, true, &packed) || packs(engine, false, &packed)) {
        status = ops->alloc(rank->backend, DMK_MEM_DEVICE, l.block_bytes, &blocks);
        if (status == 0) {
            status = ops->alloc(rank->backend, DMK_MEM_DEVICE, l.scale_bytes, &scales);
        }
        if (status != 0) {
            dmk_error_set(reterr, status, "no memory to pack experts: %zu bytes", l.block_bytes);
        }
    }
    l.staged_blocks = blocks;
    l.staged_scales = scales;
    if (status == 0 && (status = load_globals(&l, reterr)) == 0 &&
        (status = load_layers(&l, reterr)) == 0) {
        status = ops->sync(rank->backend, rank->stream);
        if (status != 0) {
            dmk_error_set(reterr, status, "loading weights failed on the device: %s",
                          ops->describe(rank->backend, rank->stream));
        }
    }
    if (blocks) {
        ops->free(rank->backend, DMK_MEM_DEVICE, blocks, l.block_bytes);
    }
    if (scales) {
        ops->free(rank->backend, DMK_MEM_DEVICE, scales, l.scale_bytes);
    }
    return status;
}

static int open_events(struct dmk_device *dev, struct dmk_error *reterr)
{
    struct dmk_backend *be = dev->rank->backend;
    for (size_t i = 0; i < sizeof(dev->layer_done) / sizeof(dev->layer_done[0]); i++) {
        if (be->ops->event_new(be, &dev->layer_done[i]) != 0) {
            dev->layer_done[i] = NULL;
            return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the events of a step");
        }
    }
    return 0;
}

int dmk_device_open(struct dmk_engine *engine, struct dmk_error *reterr)
{
    struct dmk_rank *rank = &engine->ranks[0];
    const size_t rows = engine->conf.prefill ? 0 : engine->conf.max_logit_rows,
                 vocab = engine->shape.vocab;
    const size_t rope = (size_t)engine->n_positions * DMK_HEAD_DIM * sizeof(float);
    struct dmk_device *dev = calloc(1, sizeof(*dev));
    engine->device = dev;
    if (dev) {
        dev->rank = rank;
        dev->layers = calloc(engine->shape.n_layers, sizeof(*dev->layers));
    }
    if (!dev || !dev->layers) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the engine");
    }
    int status = open_events(dev, reterr);
    if (status != 0 || (status = load_weights(engine, reterr)) != 0 ||
        (status = alloc_device(engine, engine->plan_bytes, &dev->plan, "the step plan", reterr)) !=
            0 ||
        (status = alloc_device(engine, rows * vocab * sizeof(float), &dev->logits, "the logits",
                               reterr)) != 0 ||
        (status = dmk_engine_alloc_mem(rank, DMK_MEM_HOST, vocab * sizeof(float), &dev->logits_host,
                                       "a row of logits", reterr)) != 0 ||
        (status = alloc_device(engine, rows * sizeof(*dev->picked), &dev->picked, "picked tokens",
                               reterr)) != 0 ||
        (status = dmk_engine_alloc_mem(rank, DMK_MEM_HOST, rows * sizeof(*dev->picked),
                                       &dev->picked_host, "picked tokens", reterr)) != 0 ||
        (status = alloc_device(engine, rope, &dev->rope, "the rope table", reterr)) != 0) {
        return status;
    }
    rank->backend->ops->copy(rank->backend, rank->stream, dev->rope, engine->rope, rope);
    status = rank->backend->ops->sync(rank->backend, rank->stream);
    return status == 0 ? 0
                       : dmk_error_set(reterr, status, "the device failed: %s",
                                       rank->backend->ops->describe(rank->backend, rank->stream));
}

void dmk_device_close(struct dmk_engine *engine)
{
    struct dmk_device *dev = engine->device;
    if (!dev) {
        return;
    }
    struct dmk_backend *be = dev->rank->backend;
    for (size_t i = 0; i < sizeof(dev->layer_done) / sizeof(dev->layer_done[0]); i++) {
        if (dev->layer_done[i]) {
            be->ops->event_free(be, dev->layer_done[i]);
        }
    }
    for (uint32_t i = 0; i < DMK_DEVICE_MAX_BUCKETS; i++) {
        if (dev->graphs[i]) {
            be->ops->graph_free(be, dev->graphs[i]);
        }
    }
    free(dev->layers);
    free(dev);
    engine->device = NULL;
}
