/* Weights of a rank (weights_rank.c) on their way to its device (stage.c): where they lie there, and the packing of
 * experts. Everything is queued on the rank's stream; the loading of a rank ends with a wait. */
#include "common/model/device.h"

#include "common/model/stage.h"
#include "kernels/dtype.h"
#include "kernels/pack.h"

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

/* What the loader of a rank needs: where plain expert matrices wait to be packed. */
struct loader {
    const struct dmk_engine *engine;
    struct dmk_rank *rank;
    struct dmk_device_load *load;
    uint8_t *staged_blocks, *staged_scales;
    struct dmk_stage *stage; /* NULL: weights are random */
    int status;              /* of FP8 files that can not be read */
    struct dmk_error *reterr;
    uint64_t
        seed; /* of random weights; the same sequence on all ranks, since some tensors must be equal */
};

static void count(struct loader *l, size_t bytes)
{
    struct dmk_device_load *load = l->load;
    load->done += bytes;
    if (l->engine->conf.on_progress) {
        l->engine->conf.on_progress(l->engine->conf.ud, load->done, load->total);
    }
}

/* n_rows of row_bytes, packed on the device, src_stride bytes apart in src. src NULL: random ones. */
static void send_rows(struct loader *l, const void *dst, const void *src, size_t src_stride,
                      size_t row_bytes, size_t n_rows, enum dmk_fill kind, float scale)
{
    const struct dmk_backend_ops *ops = l->rank->backend->ops;
    void *to = (void *)(uintptr_t)dst;
    if (!src) {
        ops->fill(l->rank->backend, l->rank->stream, to, row_bytes * n_rows, kind, scale,
                  l->seed++);
    } else {
        dmk_stage_rows(l->stage, to, src, src_stride, row_bytes, n_rows);
    }
    count(l, row_bytes * n_rows);
}

static void send(struct loader *l, const void *dst, const void *src, size_t bytes,
                 enum dmk_fill kind, float scale)
{
    const struct dmk_backend_ops *ops = l->rank->backend->ops;
    void *to = (void *)(uintptr_t)dst;
    if (!src) {
        ops->fill(l->rank->backend, l->rank->stream, to, bytes, kind, scale, l->seed++);
    } else {
        dmk_stage_rows(l->stage, to, src, bytes, bytes, 1);
    }
    count(l, bytes);
}

/* The matrix as the checkpoint has it, without memory. FP8 of converted files comes as the MXFP4 it was made of. */
static struct dmk_expert_weights describe_experts(const struct dmk_engine *engine, bool gate_up)
{
    const struct dmk_shape *s = &engine->shape;
    return (struct dmk_expert_weights){
        .format =
            engine->weights->expert_format == DMK_EXPERTS_BF16 ? DMK_WEIGHT_BF16 : DMK_WEIGHT_MXFP4,
        .rows = gate_up ? 2 * s->intermediate : s->hidden,
        .cols = gate_up ? s->hidden : s->intermediate,
    };
}

/* Of n_experts. */
static struct dmk_moe_packed plain_bytes(const struct dmk_engine *engine, bool gate_up,
                                         uint32_t n_experts)
{
    struct dmk_expert_weights w = describe_experts(engine, gate_up);
    size_t n = (size_t)n_experts * w.rows * w.cols;
    bool mxfp4 = w.format == DMK_WEIGHT_MXFP4;
    return (struct dmk_moe_packed){w.format, mxfp4 ? n / 2 : n * 2,
                                   mxfp4 ? n / DMK_MXFP4_BLOCK : 0};
}

static bool packs(const struct dmk_rank *rank, bool gate_up, struct dmk_moe_packed *ret)
{
    const struct dmk_engine *engine = rank->engine;
    const struct dmk_kernels *kernels = &rank->kernels;
    struct dmk_expert_weights w = describe_experts(engine, gate_up);
    *ret = plain_bytes(engine, gate_up, rank->shard.n_experts);
    if (!kernels->moe_packed || w.format != DMK_WEIGHT_MXFP4) {
        return false;
    }
    if (engine->conf.fp8_experts || engine->weights->expert_format == DMK_EXPERTS_FP8) {
        w.format = DMK_WEIGHT_FP8;
    }
    struct dmk_moe_packed packed = kernels->moe_packed(&w, rank->shard.n_experts, gate_up);
    if (packed.blocks == 0) {
        return false;
    }
    *ret = packed;
    return true;
}

static struct dmk_expert_weights place_experts(struct arena *arena, const struct dmk_rank *rank,
                                               bool gate_up)
{
    struct dmk_expert_weights w = describe_experts(rank->engine, gate_up);
    struct dmk_moe_packed bytes;
    w.packed = packs(rank, gate_up, &bytes);
    w.format = bytes.format;
    w.blocks = take(arena, bytes.blocks);
    w.scales = bytes.scales ? take(arena, bytes.scales) : NULL;
    w.bias = take(arena, (size_t)rank->shard.n_experts * w.rows * sizeof(uint16_t));
    return w;
}

/* Blocks and scales that were FP8 in the files. */
static void send_fp8(struct loader *l, uint8_t *blocks, uint8_t *scales,
                     const struct dmk_expert_matrix *m, const struct dmk_expert_weights *w)
{
    const uint32_t n_experts = l->rank->shard.n_experts;
    uint32_t bad = 0;
    if (l->status != 0) {
        return;
    }
    l->status =
        dmk_stage_fp8(l->stage, blocks, scales, m->blocks, (const float *)(const void *)m->scales,
                      n_experts, w->rows, w->cols, &bad);
    if (l->status != 0) {
        dmk_error_set(
            l->reterr, l->status,
            "an FP8 matrix of expert %u holds numbers that MXFP4 has not, which the device needs: "
            "convert the checkpoint again",
            l->rank->shard.expert_first + bad);
    }
    count(l, (size_t)n_experts * w->rows * (w->cols / 2 + w->cols / DMK_MXFP4_BLOCK));
}

static void load_experts(struct loader *l, const struct dmk_expert_weights *w,
                         const struct dmk_expert_matrix *m, bool gate_up)
{
    const struct dmk_shard *shard = &l->rank->shard;
    const struct dmk_moe_packed plain = plain_bytes(l->engine, gate_up, shard->n_experts);
    const uint8_t *blocks = w->packed ? l->staged_blocks : w->blocks;
    const uint8_t *scales = w->packed ? l->staged_scales : w->scales;
    const enum dmk_fill kind = plain.scales ? DMK_FILL_CODES : DMK_FILL_BF16;
    if (m && l->engine->weights->expert_format == DMK_EXPERTS_FP8) {
        send_fp8(l, (uint8_t *)(uintptr_t)blocks, (uint8_t *)(uintptr_t)scales, m, w);
    } else {
        send(l, blocks, m ? m->blocks : NULL, plain.blocks, kind, 0.02f);
    }
    if (plain.scales && l->engine->weights->expert_format != DMK_EXPERTS_FP8) {
        send(l, scales, m ? m->scales : NULL, plain.scales, DMK_FILL_SCALES, 0);
    }
    send(l, w->bias, m ? m->bias : NULL, (size_t)shard->n_experts * w->rows * sizeof(uint16_t),
         DMK_FILL_BF16, 0.1f);
    if (w->packed) {
        struct dmk_moe_pack_args args = {
            .w = describe_experts(l->engine, gate_up),
            .n_experts = shard->n_experts,
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

/* Elements of the rank's queries, and of its keys. */
static size_t query_width(const struct dmk_rank *rank)
{
    const struct dmk_shape *s = &rank->engine->shape;
    return (size_t)rank->shard.n_kv_heads * (s->n_heads / s->n_kv_heads) * DMK_HEAD_DIM;
}

static size_t key_width(const struct dmk_rank *rank)
{
    return (size_t)rank->shard.n_kv_heads * DMK_HEAD_DIM;
}

/* Of a dense matrix in FP8 whose first row is row `first` of the model's. */
static size_t scale_bytes(size_t first, size_t rows, size_t groups)
{
    const size_t end = (first + rows + DMK_FP8_SCALE_ROWS - 1) / DMK_FP8_SCALE_ROWS;
    return rows ? (end - first / DMK_FP8_SCALE_ROWS) * groups * sizeof(float) : 0;
}

static size_t hidden_groups(const struct dmk_rank *rank)
{
    return dmk_fp8_groups(rank->engine->shape.hidden);
}

/* Of the output projection, whose slices are KV heads. */
static size_t head_groups(const struct dmk_rank *rank)
{
    return rank->shard.n_kv_heads *
           dmk_fp8_groups((uint32_t)(query_width(rank) / rank->shard.n_kv_heads));
}

static struct dmk_dense_fp8 place_fp8(struct arena *arena, size_t first, size_t rows, size_t cols,
                                      size_t groups)
{
    struct dmk_dense_fp8 d;
    d.codes = take(arena, rows * cols);
    d.scales = take(arena, scale_bytes(first, rows, groups));
    return d;
}

/* Random ones are of order 1, with the scale of those that they stand for. */
static void send_dense(struct loader *l, const uint8_t *codes, const float *scales,
                       const struct dmk_dense_fp8 *src, size_t code_bytes, size_t scales_bytes)
{
    if (code_bytes == 0) {
        return;
    }
    send(l, codes, src->codes, code_bytes, DMK_FILL_E4M3, 0);
    if (!src->scales) {
        scales_bytes = (scales_bytes + 15) / 16 * 16; /* whole pieces; the arena has room */
    }
    send(l, scales, src->scales, scales_bytes, DMK_FILL_F32, 0x1p-5f);
}

static void place_layer(struct arena *arena, const struct dmk_rank *rank,
                        struct dmk_device_layer *d)
{
    const struct dmk_shape *s = &rank->engine->shape;
    const size_t H = s->hidden, q = query_width(rank), kv = key_width(rank), u16 = sizeof(uint16_t);
    d->attn_norm = take(arena, H * u16);
    if (rank->engine->conf.fp8_dense) {
        d->qkv8 = place_fp8(arena, 0, q + 2 * kv, H, hidden_groups(rank));
        d->o8 = place_fp8(arena, 0, H, q, head_groups(rank));
    } else {
        d->qkv_w = take(arena, (q + 2 * kv) * H * u16);
        d->o_w = take(arena, H * q * u16);
    }
    d->qkv_b = take(arena, (q + 2 * kv) * u16);
    d->o_b = take(arena, H * u16);
    d->sinks = take(arena, q / DMK_HEAD_DIM * u16);
    d->mlp_norm = take(arena, H * u16);
    d->router_w = take(arena, s->n_experts * H * u16);
    d->router_b = take(arena, s->n_experts * u16);
    d->gate_up = place_experts(arena, rank, true);
    d->down = place_experts(arena, rank, false);
}

/* Queries, keys and values one below the other, each a multiple of 64 rows. */
static void load_dense(struct loader *l, const struct dmk_device_layer *d,
                       const struct dmk_layer_weights *w)
{
    const size_t H = l->engine->shape.hidden, q = query_width(l->rank), kv = key_width(l->rank),
                 groups = hidden_groups(l->rank), n_q = q / DMK_FP8_SCALE_ROWS * groups,
                 n_kv = kv / DMK_FP8_SCALE_ROWS * groups;
    if (!w->q8.codes) {
        send_dense(l, d->qkv8.codes, d->qkv8.scales, &w->q8, (q + 2 * kv) * H,
                   (n_q + 2 * n_kv) * sizeof(float));
    } else {
        send_dense(l, d->qkv8.codes, d->qkv8.scales, &w->q8, q * H, n_q * sizeof(float));
        send_dense(l, d->qkv8.codes + q * H, d->qkv8.scales + n_q, &w->k8, kv * H,
                   n_kv * sizeof(float));
        send_dense(l, d->qkv8.codes + (q + kv) * H, d->qkv8.scales + n_q + n_kv, &w->v8, kv * H,
                   n_kv * sizeof(float));
    }
    send_dense(l, d->o8.codes, d->o8.scales, &w->o8, H * q,
               scale_bytes(0, H, head_groups(l->rank)));
}

/* Random models keep their size: rows of a matrix of n inputs have standard deviation 1 / sqrt(n). */
static void load_layer(struct loader *l, const struct dmk_device_layer *d,
                       const struct dmk_layer_weights *layer)
{
    const struct dmk_layer_weights none = {0}, *w = layer ? layer : &none;
    const struct dmk_shape *s = &l->engine->shape;
    const size_t H = s->hidden, q = query_width(l->rank), kv = key_width(l->rank),
                 u16 = sizeof(uint16_t);
    send(l, d->attn_norm, w->attn_norm, H * u16, DMK_FILL_ONES, 0);
    if (d->qkv8.codes) {
        load_dense(l, d, w);
    } else {
        send(l, d->qkv_w, w->q_w, q * H * u16, DMK_FILL_BF16, 0.0186f);
        send(l, d->qkv_w + q * H, w->k_w, kv * H * u16, DMK_FILL_BF16, 0.0186f);
        send(l, d->qkv_w + (q + kv) * H, w->v_w, kv * H * u16, DMK_FILL_BF16, 0.0186f);
        send_rows(l, d->o_w, w->o_w, (w->o_stride ? w->o_stride : q) * u16, q * u16, H,
                  DMK_FILL_BF16, 0.0156f);
    }
    send(l, d->qkv_b, w->q_b, q * u16, DMK_FILL_BF16, 0.1f);
    send(l, d->qkv_b + q, w->k_b, kv * u16, DMK_FILL_BF16, 0.1f);
    send(l, d->qkv_b + q + kv, w->v_b, kv * u16, DMK_FILL_BF16, 0.1f);
    send(l, d->o_b, w->o_b, H * u16, DMK_FILL_BF16, 0.1f);
    send(l, d->sinks, w->sinks, q / DMK_HEAD_DIM * u16, DMK_FILL_BF16, 1.0f);
    send(l, d->mlp_norm, w->mlp_norm, H * u16, DMK_FILL_ONES, 0);
    send(l, d->router_w, w->router_w, s->n_experts * H * u16, DMK_FILL_BF16, 0.0186f);
    send(l, d->router_b, w->router_b, s->n_experts * u16, DMK_FILL_BF16, 0.1f);
    load_experts(l, &d->gate_up, layer ? &w->gate_up : NULL, true);
    load_experts(l, &d->down, layer ? &w->down : NULL, false);
}

static void place_globals(struct arena *arena, const struct dmk_rank *rank,
                          struct dmk_device_rank *dev)
{
    const size_t H = rank->engine->shape.hidden, u16 = sizeof(uint16_t);
    dev->embedding = take(arena, rank->engine->shape.vocab * H * u16);
    dev->final_norm = take(arena, H * u16);
    if (rank->engine->conf.prefill) {
        return;
    }
    if (rank->engine->conf.fp8_dense) {
        dev->head8 =
            place_fp8(arena, rank->shard.vocab_first, rank->shard.n_vocab, H, hidden_groups(rank));
    } else {
        dev->unembedding = take(arena, rank->shard.n_vocab * H * u16);
    }
}

static void load_globals(struct loader *l, const struct dmk_device_rank *dev)
{
    const struct dmk_rank_weights *w = &l->rank->weights;
    const size_t H = l->engine->shape.hidden, u16 = sizeof(uint16_t);
    send(l, dev->embedding, w->embedding, l->engine->shape.vocab * H * u16, DMK_FILL_BF16, 1.0f);
    send(l, dev->final_norm, w->final_norm, H * u16, DMK_FILL_ONES, 0);
    if (dev->head8.codes) {
        send_dense(l, dev->head8.codes, dev->head8.scales, &w->head8, l->rank->shard.n_vocab * H,
                   scale_bytes(l->rank->shard.vocab_first, l->rank->shard.n_vocab,
                               hidden_groups(l->rank)));
    } else if (!l->engine->conf.prefill) {
        send(l, dev->unembedding, w->unembedding, l->rank->shard.n_vocab * H * u16, DMK_FILL_BF16,
             0.05f);
    }
}

static int load_all(struct loader *l, struct dmk_error *reterr)
{
    const struct dmk_engine *engine = l->engine;
    struct dmk_device_rank *dev = dmk_device_of(l->rank);
    struct arena arena = {0};
    place_globals(&arena, l->rank, dev);
    int status = dmk_engine_alloc_mem(l->rank, DMK_MEM_DEVICE, arena.used, &arena.base,
                                      "the embedding", reterr);
    if (status != 0) {
        return status;
    }
    arena.used = 0;
    place_globals(&arena, l->rank, dev);
    load_globals(l, dev);
    for (uint32_t i = 0; i < engine->shape.n_layers; i++) {
        arena = (struct arena){0};
        place_layer(&arena, l->rank, &dev->layers[i]);
        status = dmk_engine_alloc_mem(l->rank, DMK_MEM_DEVICE, arena.used, &arena.base,
                                      "a layer's weights", reterr);
        if (status != 0) {
            return status;
        }
        arena.used = 0;
        place_layer(&arena, l->rank, &dev->layers[i]);
        load_layer(l, &dev->layers[i],
                   l->rank->weights.layers ? &l->rank->weights.layers[i] : NULL);
    }
    return l->status;
}

/* Whether the packed product has a multiplier for every scale. */
static int check_scales(const struct dmk_rank *rank, struct dmk_error *reterr)
{
    const struct dmk_scale_top *top = &rank->engine->weights->top_scale;
    struct dmk_moe_packed packed;
    if (top->tensor && top->scale > DMK_MXPACK_MAX_SCALE && packs(rank, true, &packed) &&
        packed.format == DMK_WEIGHT_MXFP4) {
        return dmk_scale_refused(top->path, top->tensor, top->expert, top->row, top->scale, reterr);
    }
    return 0;
}

uint64_t dmk_device_load_bytes(const struct dmk_rank *rank)
{
    const struct dmk_shape *s = &rank->engine->shape;
    const uint64_t H = s->hidden, q = query_width(rank), kv = key_width(rank);
    const uint64_t E = rank->shard.n_experts, u16 = sizeof(uint16_t);
    const struct dmk_moe_packed up = plain_bytes(rank->engine, true, rank->shard.n_experts),
                                down = plain_bytes(rank->engine, false, rank->shard.n_experts);
    const uint64_t head = rank->engine->conf.prefill ? 0 : rank->shard.n_vocab;
    const bool fp8 = rank->engine->conf.fp8_dense;
    const uint64_t rest = q + 2 * kv + q / DMK_HEAD_DIM + 3 * H + s->n_experts * (H + 1) +
                          E * (2 * s->intermediate + H);
    /* Of a layer, and of the head. */
    const uint64_t dense = fp8 ? (q + 2 * kv) * H + H * q +
                                     scale_bytes(0, q + 2 * kv, hidden_groups(rank)) +
                                     scale_bytes(0, H, head_groups(rank))
                               : ((q + 2 * kv) * H + H * q) * u16;
    const uint64_t top =
        fp8 ? head * H + scale_bytes(rank->shard.vocab_first, head, hidden_groups(rank))
            : head * H * u16;
    return ((s->vocab + 1) * H + s->n_layers * rest) * u16 + s->n_layers * dense + top +
           s->n_layers * (up.blocks + up.scales + down.blocks + down.scales);
}

int dmk_device_load(struct dmk_rank *rank, struct dmk_device_load *load, struct dmk_error *reterr)
{
    const struct dmk_backend_ops *ops = rank->backend->ops;
    const struct dmk_moe_packed plain = plain_bytes(rank->engine, true, rank->shard.n_experts);
    struct loader l = {.engine = rank->engine,
                       .rank = rank,
                       .load = load,
                       .seed = rank->engine->conf.random_seed,
                       .reterr = reterr};
    struct dmk_moe_packed packed;
    void *blocks = NULL, *scales = NULL;
    int status = check_scales(rank, reterr);
    if (status == 0 && rank->weights.layers) {
        status = dmk_stage_new(rank, &l.stage, reterr);
    }
    if (status != 0) {
        return status;
    }
    if (packs(rank, true, &packed) || packs(rank, false, &packed)) {
        status = ops->alloc(rank->backend, DMK_MEM_DEVICE, plain.blocks, &blocks);
        if (status == 0) {
            status = ops->alloc(rank->backend, DMK_MEM_DEVICE, plain.scales, &scales);
        }
        if (status != 0) {
            dmk_error_set(reterr, status, "no memory to pack experts of rank %u: %zu bytes",
                          rank->index, plain.blocks);
        }
    }
    l.staged_blocks = blocks;
    l.staged_scales = scales;
    if (status == 0 && (status = load_all(&l, reterr)) == 0) {
        status = ops->sync(rank->backend, rank->stream);
        if (status != 0) {
            dmk_error_set(reterr, status, "loading weights failed on the device of rank %u: %s",
                          rank->index, ops->describe(rank->backend, rank->stream));
        }
    }
    if (status != 0) {
        (void)ops->sync(rank->backend, rank->stream); /* nothing may read what is freed now */
    }
    dmk_stage_free(&l.stage);
    if (blocks) {
        ops->free(rank->backend, DMK_MEM_DEVICE, blocks, plain.blocks);
    }
    if (scales) {
        ops->free(rank->backend, DMK_MEM_DEVICE, scales, plain.scales);
    }
    return status;
}
