/* The forward pass on a device, top to bottom, and the step around it: the same sums and rounding points as
 * forward.c, with the operations fused as the device has them. Only launches; see device.h. */
#include "common/model/device.h"

#include <string.h>
#include "common/base/assert.h"

void *dmk_device_at(const struct dmk_engine *engine, const void *host)
{
    return engine->device->plan + ((const uint8_t *)host - engine->plan_block);
}

static void linear(struct dmk_rank *rank, const uint16_t *w, const uint16_t *b, const uint16_t *x,
                   void *y, bool f32, uint32_t n_rows, uint32_t n_out, uint32_t k,
                   uint32_t n_slices)
{
    rank->kernels.linear(&(struct dmk_linear_args){.w = w,
                                                   .bias = b,
                                                   .x = x,
                                                   .y_bf16 = f32 ? NULL : y,
                                                   .y_f32 = f32 ? y : NULL,
                                                   .w_stride = (uint64_t)k * n_slices,
                                                   .x_stride = (uint64_t)k * n_slices,
                                                   .y_stride = n_out,
                                                   .n_rows = n_rows,
                                                   .n_out = n_out,
                                                   .k = k,
                                                   .n_slices = n_slices},
                         rank->stream);
}

/* z [slots][I], where the device keeps it, and y [slots][H] */
static void run_experts(struct dmk_rank *rank, const struct dmk_device_layer *lw,
                        const struct dmk_shape *s, uint32_t n_rows)
{
    const struct dmk_kernels *kernels = &rank->kernels;
    struct dmk_acts *a = &rank->acts;
    if (kernels->moe_experts && lw->gate_up.packed && lw->down.packed) {
        kernels->moe_experts(&(struct dmk_moe_experts_args){.gate_up = lw->gate_up,
                                                            .down = lw->down,
                                                            .x = a->norm,
                                                            .plan = a->moe,
                                                            .z = a->z,
                                                            .y = a->y,
                                                            .n_rows = n_rows,
                                                            .k = s->experts_per_token,
                                                            .n_experts = s->n_experts,
                                                            .alpha = s->swiglu_alpha,
                                                            .limit = s->swiglu_limit},
                             rank->stream);
        return;
    }
    kernels->moe_gate_up(&(struct dmk_moe_gate_up_args){lw->gate_up, a->norm, a->moe, a->z,
                                                        s->n_experts, s->swiglu_alpha,
                                                        s->swiglu_limit, n_rows},
                         rank->stream);
    kernels->moe_down(
        &(struct dmk_moe_down_args){lw->down, a->z, a->moe, a->y, s->n_experts, n_rows},
        rank->stream);
}

/* One layer: norm [T][H] goes in as the norm of x, and comes out as that of the new x under next_norm. */
static void run_layer(struct dmk_engine *engine, const struct dmk_step_plan *p, uint32_t layer,
                      const uint16_t *next_norm)
{
    struct dmk_rank *rank = &engine->ranks[0];
    const struct dmk_device *dev = engine->device;
    const struct dmk_device_layer *lw = &dev->layers[layer];
    const struct dmk_kernels *kernels = &rank->kernels;
    const struct dmk_shape *s = &engine->shape;
    const struct dmk_kv_layout *kv = &rank->kv.layout;
    struct dmk_stream *stream = rank->stream;
    struct dmk_acts *a = &rank->acts;
    const struct dmk_step_counts *counts = dmk_device_at(engine, p->counts);
    const uint32_t T = p->n_rows, H = s->hidden, D = DMK_HEAD_DIM, k = s->experts_per_token;
    const uint32_t n_kv = s->n_kv_heads, n_q = s->n_heads, G = n_q / n_kv;
    const uint64_t width = (uint64_t)(n_q + 2 * n_kv) * D;
    const bool full = dmk_shape_layer_is_full(layer);
    const uint32_t at = dmk_shape_kind_index(layer);
    uint8_t *pages = full ? (uint8_t *)rank->kv.full + dmk_kv_full_offset(kv, at, 0, 0)
                          : (uint8_t *)rank->kv.window + dmk_kv_window_offset(kv, at, 0, 0);
    const uint32_t n_pages = full ? kv->n_full_pages : kv->n_window_pages;
    const uint32_t *row_page = dmk_device_at(engine, full ? p->full_page : p->window_page);
    const uint32_t *row_slot = dmk_device_at(engine, p->slot);
    /* A chunk must not overwrite ring pages that its first rows still see; a single token may. */
    const bool write_first = full || p->n_tiles == 0;

    /* q [T][n_q][64], k and v [T][n_kv][64], side by side in rows of width */
    linear(rank, lw->qkv_w, lw->qkv_b, a->norm, a->q, false, T, (uint32_t)width, H, 1);
    kernels->rope_write(
        &(struct dmk_rope_write_args){.qkv = a->q,
                                      .positions = dmk_device_at(engine, p->positions),
                                      .table = dev->rope,
                                      .row_page = row_page,
                                      .row_slot = row_slot,
                                      .pages = write_first ? pages : NULL,
                                      .n_rows = T,
                                      .n_q_heads = n_q,
                                      .n_kv_heads = n_kv,
                                      .n_pages = n_pages,
                                      .page_bytes = kv->page_bytes},
        stream);
    /* heads [T][n_q][64] */
    kernels->attn(&(struct dmk_attn_args){.q = a->q,
                                          .k = a->q + (size_t)n_q * D,
                                          .v = a->q + (size_t)(n_q + n_kv) * D,
                                          .pages = pages,
                                          .page_ids = dmk_device_at(engine, p->page_ids),
                                          .seqs = dmk_device_at(engine, p->seqs),
                                          .tiles = dmk_device_at(engine, p->tiles),
                                          .sinks = lw->sinks,
                                          .out = a->heads,
                                          .n_seqs = p->n_seqs,
                                          .n_tiles = p->n_tiles,
                                          .n_kv_heads = n_kv,
                                          .group = G,
                                          .n_pages = n_pages,
                                          .page_bytes = kv->page_bytes,
                                          .n_rows = T,
                                          .window = full ? 0 : s->window,
                                          .fresh = !write_first,
                                          .q_stride = width,
                                          .kv_stride = width,
                                          .splits = p->n_singles > 0
                                                        ? dmk_device_at(engine, p->splits)
                                                        : NULL,
                                          .n_splits = &counts->n_splits,
                                          .max_splits = p->max_splits},
                  stream);
    if (!write_first) {
        kernels->kv_write(&(struct dmk_kv_write_args){.k = a->q + (size_t)n_q * D,
                                                      .v = a->q + (size_t)(n_q + n_kv) * D,
                                                      .row_page = row_page,
                                                      .row_slot = row_slot,
                                                      .pages = pages,
                                                      .n_rows = T,
                                                      .n_heads = n_kv,
                                                      .n_pages = n_pages,
                                                      .page_bytes = kv->page_bytes,
                                                      .stride = width},
                          stream);
    }
    /* sum [T][H] = o_proj, a leaf for each KV head; x = bf16(x + bf16(sum + bias)); norm [T][H] of it */
    linear(rank, lw->o_w, NULL, a->heads, a->sum, true, T, H, G * D, n_kv);
    kernels->add_norm(&(struct dmk_add_norm_args){a->x, a->sum, lw->o_b, lw->mlp_norm, a->norm, T,
                                                  H, s->norm_eps},
                      stream);

    /* scores [T][E]; chosen and weights [T][k]; slots by expert */
    linear(rank, lw->router_w, lw->router_b, a->norm, a->scores, false, T, s->n_experts, H, 1);
    kernels->route(
        &(struct dmk_route_args){.topk = {a->scores, a->chosen, a->weights, T, s->n_experts, k},
                                 .group = {.ids = a->chosen,
                                           .weights = a->weights,
                                           .plan = a->moe,
                                           .n_rows = T,
                                           .k = k,
                                           .n_experts = s->n_experts,
                                           .experts_per_group = s->n_experts / DMK_REDUCE_LEAVES,
                                           .n_live = &counts->n_live}},
        stream);
    /* z [slots][I], y [slots][H], the tree over eight groups of experts, and the norm for the next layer */
    run_experts(rank, lw, s, T);
    kernels->combine_norm(
        &(struct dmk_combine_norm_args){{a->y, a->moe, NULL, T, k, H, DMK_REDUCE_LEAVES},
                                        a->x,
                                        next_norm,
                                        a->norm,
                                        s->norm_eps},
        stream);
}

/* logits [rows][vocab] of the wanted rows, on the device, and their tokens. Rows that want none pick one too. */
static void run_head(struct dmk_engine *engine, const struct dmk_step_plan *p)
{
    struct dmk_rank *rank = &engine->ranks[0];
    const struct dmk_device *dev = engine->device;
    const struct dmk_shape *s = &engine->shape;
    struct dmk_acts *a = &rank->acts;
    if (p->n_logit_rows == 0) {
        return;
    }
    rank->kernels.rmsnorm(&(struct dmk_rmsnorm_args){a->x, dmk_device_at(engine, p->logit_rows),
                                                     dev->final_norm, a->last, p->n_logit_rows,
                                                     s->hidden, s->norm_eps},
                          rank->stream);
    linear(rank, dev->unembedding, NULL, a->last, dev->logits, true, p->n_logit_rows, s->vocab,
           s->hidden, 1);
    rank->kernels.sample(&(struct dmk_sample_args){dev->logits, dmk_device_at(engine, p->picks),
                                                   dev->picked, p->n_logit_rows, s->vocab},
                         rank->stream);
}

static void run_begin(struct dmk_engine *engine, const struct dmk_step_plan *p)
{
    struct dmk_rank *rank = &engine->ranks[0];
    const struct dmk_shape *s = &engine->shape;
    struct dmk_acts *a = &rank->acts;
    rank->kernels.embed(&(struct dmk_embed_args){engine->device->embedding,
                                                 dmk_device_at(engine, p->ids), a->x, p->n_rows,
                                                 s->hidden},
                        rank->stream);
    rank->kernels.rmsnorm(&(struct dmk_rmsnorm_args){a->x, NULL,
                                                     engine->device->layers[0].attn_norm, a->norm,
                                                     p->n_rows, s->hidden, s->norm_eps},
                          rank->stream);
}

static const uint16_t *norm_after(const struct dmk_engine *engine, uint32_t layer)
{
    return layer + 1 < engine->shape.n_layers ? engine->device->layers[layer + 1].attn_norm : NULL;
}

/* Launches layer by layer. With on_layer the host follows a few layers behind the device's queue, so that it hears
 * of a finished layer soon and of a cancel before much more is queued. */
static int run_eager(struct dmk_engine *engine, const struct dmk_step_plan *p,
                     const struct dmk_step *step)
{
    struct dmk_device *dev = engine->device;
    struct dmk_rank *rank = &engine->ranks[0];
    struct dmk_backend *be = rank->backend;
    const uint32_t n_layers = engine->shape.n_layers,
                   ring = sizeof(dev->layer_done) / sizeof(dev->layer_done[0]);
    const uint32_t ahead = 3;
    int status = 0;
    run_begin(engine, p);
    for (uint32_t layer = 0; layer < n_layers + ahead && status == 0; layer++) {
        if (layer < n_layers) {
            if (step->cancel && atomic_load(step->cancel)) {
                status = be->ops->sync(be, rank->stream);
                return status == 0 ? -DMK_ECANCELLED : status;
            }
            run_layer(engine, p, layer, norm_after(engine, layer));
            be->ops->record(be, rank->stream, dev->layer_done[layer % ring]);
        }
        if (layer >= ahead && (step->on_layer || step->cancel)) {
            status = be->ops->wait_host(be, dev->layer_done[(layer - ahead) % ring]);
            if (status == 0 && step->on_layer) {
                step->on_layer(step->ud, layer - ahead);
            }
        }
    }
    run_head(engine, p);
    return status;
}

/* Batch sizes that have a graph: every one up to 8, then steps of an eighth of the power of two below. */
static uint32_t bucket_of(uint32_t n_rows, uint32_t *ret_index)
{
    uint32_t size = 1, index = 0;
    while (size < n_rows) {
        uint32_t step = 1;
        while (step * 16 <= size) {
            step *= 2;
        }
        size += step;
        index++;
    }
    *ret_index = index;
    return size;
}

/* Rows of the bucket that nobody asked for: no page, no expert, no sequence. */
static void pad_plan(struct dmk_step_plan *p, uint32_t n_rows)
{
    for (uint32_t i = p->n_rows; i < n_rows; i++) {
        p->ids[i] = p->positions[i] = p->slot[i] = 0;
        p->full_page[i] = p->window_page[i] = DMK_NONE;
        p->seqs[i] = (struct dmk_attn_seq){.row = i, .n_ring = 3};
        p->logit_rows[i] = i;
    }
    p->n_rows = p->n_seqs = n_rows;
    if (p->n_logit_rows > 0) {
        p->n_logit_rows = n_rows;
    }
}

static int run_graph(struct dmk_engine *engine, const struct dmk_step_plan *p, uint32_t index)
{
    struct dmk_device *dev = engine->device;
    struct dmk_rank *rank = &engine->ranks[0];
    struct dmk_backend *be = rank->backend;
    if (!dev->graphs[index]) {
        int status = be->ops->graph_begin(be, rank->stream);
        if (status != 0) {
            return status;
        }
        run_begin(engine, p);
        for (uint32_t layer = 0; layer < engine->shape.n_layers; layer++) {
            run_layer(engine, p, layer, norm_after(engine, layer));
        }
        run_head(engine, p);
        status = be->ops->graph_end(be, rank->stream, &dev->graphs[index]);
        if (status != 0) {
            return status;
        }
    }
    return be->ops->graph_run(be, rank->stream, dev->graphs[index]);
}

static void copy_pages(struct dmk_rank *rank, const struct dmk_step *step)
{
    const struct dmk_kv_layout *l = &rank->kv.layout;
    for (uint32_t i = 0; i < step->n_copies; i++) {
        const struct dmk_page_copy *copy = &step->copies[i];
        rank->kernels.page_copy(
            &(struct dmk_page_copy_args){
                .pool = copy->window ? rank->kv.window : rank->kv.full,
                .pairs = {{copy->src, copy->dst}},
                .n_pairs = 1,
                .n_arrays =
                    (copy->window ? l->n_window_layers : l->n_full_layers) * l->n_local_heads,
                .n_pages = copy->window ? l->n_window_pages : l->n_full_pages,
                .page_bytes = l->page_bytes,
            },
            rank->stream);
    }
}

static void send_range(struct dmk_engine *engine, const void *first, const void *end)
{
    struct dmk_rank *rank = &engine->ranks[0];
    const size_t bytes = (size_t)((const uint8_t *)end - (const uint8_t *)first);
    if (bytes > 0) {
        rank->backend->ops->copy(rank->backend, rank->stream, dmk_device_at(engine, first), first,
                                 bytes);
    }
}

/* The arrays lie one after the other; the two long ones last, of which only what is used travels. */
static void send_plan(struct dmk_engine *engine, const struct dmk_step_plan *p)
{
    send_range(engine, p->counts, p->page_ids + p->n_page_ids);
    send_range(engine, p->splits, p->splits + p->counts->n_splits);
}

static void plan_picks(struct dmk_step_plan *p, const struct dmk_step *step, uint32_t n_rows)
{
    for (uint32_t i = 0; i < p->n_logit_rows; i++) {
        const struct dmk_step_pick *pick = step->picks && i < n_rows ? &step->picks[i] : NULL;
        p->picks[i] = pick && pick->pick
                          ? (struct dmk_sample_row){pick->scale, pick->min_p, pick->unit}
                          : (struct dmk_sample_row){0};
    }
}

/* Tokens, and the logits of rows without a pick, one row at a time through pinned memory. Waits. */
static int fetch_results(struct dmk_engine *engine, const struct dmk_step *step, uint32_t n_rows)
{
    struct dmk_device *dev = engine->device;
    struct dmk_rank *rank = &engine->ranks[0];
    struct dmk_backend *be = rank->backend;
    const size_t vocab = engine->shape.vocab;
    if (step->picks && n_rows > 0) {
        be->ops->copy(be, rank->stream, dev->picked_host, dev->picked,
                      n_rows * sizeof(*dev->picked));
    }
    int status = be->ops->sync(be, rank->stream);
    for (uint32_t i = 0; i < n_rows && status == 0; i++) {
        if (step->picks && step->picks[i].pick) {
            const struct dmk_sample_out *out = &dev->picked_host[i];
            step->picked[i] = (struct dmk_step_picked){
                .id = out->id,
                .status = out->status == 0   ? 0
                          : out->status == 1 ? -DMK_EFORMAT
                                             : -DMK_ENOENT,
                .logit = out->logit,
                .max = out->max,
                .sum = out->sum,
            };
            continue;
        }
        be->ops->copy(be, rank->stream, dev->logits_host, dev->logits + i * vocab,
                      vocab * sizeof(float));
        status = be->ops->sync(be, rank->stream);
        memcpy(step->logits + i * vocab, dev->logits_host, vocab * sizeof(float));
    }
    return status;
}

int dmk_device_step(struct dmk_engine *engine, const struct dmk_step *step)
{
    struct dmk_rank *rank = &engine->ranks[0];
    struct dmk_backend *be = rank->backend;
    struct dmk_step_plan *p = &engine->plans[0];
    const uint32_t n_logits = p->n_logit_rows;
    uint32_t index = 0, bucket = 0;
    int status;
    if (be->ops->bind) {
        be->ops->bind(be);
    }
    p->counts->n_live = p->n_rows;
    const bool all_single =
        p->n_tiles == 0 && p->n_rows > 0 && (n_logits == 0 || n_logits == p->n_rows);
    if (all_single) {
        bucket = bucket_of(p->n_rows, &index);
    }
    /* A prefill worker's single tokens would need graphs without logits; it has none to speak of. */
    const bool graph = all_single && bucket <= engine->conf.max_step_seqs &&
                       bucket <= engine->conf.max_logit_rows &&
                       bucket <= engine->conf.max_step_tokens && n_logits > 0 &&
                       index < DMK_DEVICE_MAX_BUCKETS && !step->on_layer && be->ops->graph_begin;
    if (graph) {
        pad_plan(p, bucket);
        p->max_splits = bucket * engine->max_row_splits;
    }
    plan_picks(p, step, n_logits);
    send_plan(engine, p);
    copy_pages(rank, step);
    if (p->n_rows == 0) {
        return be->ops->sync(be, rank->stream); /* copies alone */
    }
    status = graph ? run_graph(engine, p, index) : run_eager(engine, p, step);
    return status == 0 ? fetch_results(engine, step, n_logits) : status;
}
