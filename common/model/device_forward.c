/* A rank's parts of the forward pass on a device, in the order in which they run: the same sums and rounding points
 * as forward.c, with the operations fused as the device has them. Every function only launches, on the rank's
 * stream; device_step.c calls them for all ranks and orders the ranks where one reads what others have written. */
#include "common/model/device.h"

#include "common/base/assert.h"

#define HEAD_ROWS 128 /* a call of the unembedding over ranks, whose columns may begin anywhere */

struct dmk_device_rank *dmk_device_of(const struct dmk_rank *rank)
{
    return &rank->engine->device->ranks[rank->index];
}

void *dmk_device_at(const struct dmk_rank *rank, const void *host)
{
    return dmk_device_of(rank)->plan +
           ((const uint8_t *)host - rank->engine->plan_blocks[rank->group]);
}

static const struct dmk_step_plan *plan_of(const struct dmk_rank *rank)
{
    return &rank->engine->plans[rank->group];
}

static const struct dmk_step_counts *counts_of(const struct dmk_rank *rank)
{
    return dmk_device_at(rank, plan_of(rank)->counts);
}

/* Rows of the groups before this one, and of all with n_groups: how the rows of a step are counted where experts see
 * those of all groups. */
static uint32_t rows_before(const struct dmk_engine *engine, uint32_t group)
{
    uint32_t n = 0;
    for (uint32_t g = 0; g < group; g++) {
        n += engine->plans[g].n_rows;
    }
    return n;
}

static struct dmk_rank *first_of_group(const struct dmk_rank *rank)
{
    return &rank->engine->ranks[rank->group * rank->engine->conf.layout.tp];
}

/* The meeting of n ranks from the first one on, where it is one inside a kernel. */
static struct dmk_meeting meeting_of(const struct dmk_rank *rank, const struct dmk_rank *first,
                                     uint32_t n, uint32_t layer, enum dmk_device_meeting which)
{
    struct dmk_meeting m = {0};
    if (rank->engine->device->tell && n > 1) {
        m.n = n;
        m.number = layer * DMK_MEETINGS + which + 1;
        m.base = &counts_of(rank)->meetings;
        m.hear = dmk_device_of(rank)->heard + first->index;
        for (uint32_t i = 0; i < n; i++) {
            m.tell[i] = dmk_device_of(&first[i])->heard + rank->index;
        }
    }
    return m;
}

/* The norm that the next layer begins with. */
static const uint16_t *norm_after(const struct dmk_rank *rank, uint32_t layer)
{
    return layer + 1 < rank->engine->shape.n_layers
               ? dmk_device_of(rank)->layers[layer + 1].attn_norm
               : NULL;
}

void dmk_device_begin(struct dmk_rank *rank)
{
    const struct dmk_shape *s = &rank->engine->shape;
    const struct dmk_step_plan *p = plan_of(rank);
    const struct dmk_device_rank *dev = dmk_device_of(rank);
    struct dmk_acts *a = &rank->acts;
    rank->kernels.embed(&(struct dmk_embed_args){dev->embedding, dmk_device_at(rank, p->ids), a->x,
                                                 p->n_rows, s->hidden},
                        rank->stream);
    rank->kernels.rmsnorm(&(struct dmk_rmsnorm_args){a->x, NULL, dev->layers[0].attn_norm, a->norm,
                                                     p->n_rows, s->hidden, s->norm_eps},
                          rank->stream);
}

void dmk_device_attend(struct dmk_rank *rank, uint32_t layer)
{
    const struct dmk_device_rank *dev = dmk_device_of(rank);
    const struct dmk_device_layer *lw = &dev->layers[layer];
    const struct dmk_step_plan *p = plan_of(rank);
    const struct dmk_kernels *kernels = &rank->kernels;
    const struct dmk_shape *s = &rank->engine->shape;
    const struct dmk_kv_layout *kv = &rank->kv.layout;
    struct dmk_stream *stream = rank->stream;
    struct dmk_acts *a = &rank->acts;
    const uint32_t T = p->n_rows, H = s->hidden, D = DMK_HEAD_DIM, G = s->n_heads / s->n_kv_heads;
    const uint32_t n_kv = rank->shard.n_kv_heads, n_q = n_kv * G;
    const uint64_t width = (uint64_t)(n_q + 2 * n_kv) * D;
    const bool full = dmk_shape_layer_is_full(layer);
    const uint32_t at = dmk_shape_kind_index(layer);
    uint8_t *pages = full ? (uint8_t *)rank->kv.full + dmk_kv_full_offset(kv, at, 0, 0)
                          : (uint8_t *)rank->kv.window + dmk_kv_window_offset(kv, at, 0, 0);
    const uint32_t n_pages = full ? kv->n_full_pages : kv->n_window_pages;
    const uint32_t *row_page = dmk_device_at(rank, full ? p->full_page : p->window_page);
    const uint32_t *row_slot = dmk_device_at(rank, p->slot);
    /* A chunk must not overwrite ring pages that its first rows still see; a single token may. */
    const bool write_first = full || p->n_tiles == 0;

    /* q [T][n_q][64], k and v [T][n_kv][64], side by side in rows of width */
    dmk_engine_linear(rank,
                      &(struct dmk_linear_args){.w = lw->qkv_w,
                                                .bias = lw->qkv_b,
                                                .x = a->norm,
                                                .y_bf16 = a->q,
                                                .w_stride = H,
                                                .x_stride = H,
                                                .y_stride = width,
                                                .n_rows = T,
                                                .n_out = (uint32_t)width,
                                                .k = H,
                                                .n_slices = 1,
                                                .n_whole = (s->n_heads + 2 * s->n_kv_heads) * D},
                      &lw->qkv8, 0);
    kernels->rope_write(
        &(struct dmk_rope_write_args){.qkv = a->q,
                                      .positions = dmk_device_at(rank, p->positions),
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
    kernels->attn(
        &(struct dmk_attn_args){.q = a->q,
                                .k = a->q + (size_t)n_q * D,
                                .v = a->q + (size_t)(n_q + n_kv) * D,
                                .pages = pages,
                                .page_ids = dmk_device_at(rank, p->page_ids),
                                .seqs = dmk_device_at(rank, p->seqs),
                                .tiles = dmk_device_at(rank, p->tiles),
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
                                .splits = p->n_singles > 0 ? dmk_device_at(rank, p->splits) : NULL,
                                .n_splits = &counts_of(rank)->n_splits,
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
    /* sum [T][H] = o_proj over the rank's columns, a leaf for each KV head; one rank has all leaves and rounds the
     * tree's root with the bias, in half of sum's memory */
    const bool whole = rank->engine->conf.layout.tp == 1;
    dmk_engine_linear(rank,
                      &(struct dmk_linear_args){.w = lw->o_w,
                                                .bias = whole ? lw->o_b : NULL,
                                                .x = a->heads,
                                                .y_bf16 = whole ? (uint16_t *)a->sum : NULL,
                                                .y_f32 = whole ? NULL : a->sum,
                                                .w_stride = (uint64_t)n_q * D,
                                                .x_stride = (uint64_t)n_q * D,
                                                .y_stride = H,
                                                .n_rows = T,
                                                .n_out = H,
                                                .k = G * D,
                                                .n_slices = n_kv,
                                                .leaf = true},
                      &lw->o8, 0);
}

/* topk of scores [T][E], and of one group, whose ranks all have its rows, slots by expert. */
static void choose_experts(struct dmk_rank *rank)
{
    const struct dmk_shape *s = &rank->engine->shape;
    const struct dmk_step_plan *p = plan_of(rank);
    const uint32_t k = s->experts_per_token;
    struct dmk_acts *a = &rank->acts;
    const struct dmk_topk_args topk = {a->scores, a->chosen,    a->weights,
                                       p->n_rows, s->n_experts, k};
    if (rank->engine->conf.layout.dp > 1) {
        rank->kernels.topk(&topk, rank->stream);
        return;
    }
    rank->kernels.route(
        &(struct dmk_route_args){.topk = topk,
                                 .group = {.ids = a->chosen,
                                           .weights = a->weights,
                                           .plan = a->moe,
                                           .n_rows = p->n_rows,
                                           .k = k,
                                           .expert_first = rank->shard.expert_first,
                                           .n_experts = rank->shard.n_experts,
                                           .experts_per_group = s->n_experts / DMK_REDUCE_LEAVES,
                                           .n_live = &counts_of(rank)->n_live}},
        rank->stream);
}

void dmk_device_choose(struct dmk_rank *rank, uint32_t layer)
{
    const struct dmk_device_layer *lw = &dmk_device_of(rank)->layers[layer];
    const struct dmk_shape *s = &rank->engine->shape;
    const uint32_t T = plan_of(rank)->n_rows, H = s->hidden;
    struct dmk_acts *a = &rank->acts;
    struct dmk_add_norm_args add = {.x = a->x,
                                    .n_ranks = rank->engine->conf.layout.tp,
                                    .bias = lw->o_b,
                                    .scale = lw->mlp_norm,
                                    .y = a->norm,
                                    .n_rows = T,
                                    .hidden = H,
                                    .eps = s->norm_eps};
    for (uint32_t r = 0; r < add.n_ranks; r++) {
        add.sum[r] = first_of_group(rank)[r].acts.sum;
    }
    add.meeting = meeting_of(rank, first_of_group(rank), add.n_ranks, layer, DMK_MEET_SUMS);
    if (add.n_ranks == 1) {
        add.whole = (const uint16_t *)a->sum;
    }
    /* x = bf16(x + bf16(tree of sums + bias)); norm [T][H] of it */
    rank->kernels.add_norm(&add, rank->stream);
    rank->kernels.linear(&(struct dmk_linear_args){.w = lw->router_w,
                                                   .bias = lw->router_b,
                                                   .x = a->norm,
                                                   .y_bf16 = a->scores,
                                                   .w_stride = H,
                                                   .x_stride = H,
                                                   .y_stride = s->n_experts,
                                                   .n_rows = T,
                                                   .n_out = s->n_experts,
                                                   .k = H,
                                                   .n_slices = 1},
                         rank->stream);
    choose_experts(rank);
}

/* z [slots][I], where the device keeps it, and y [slots][H] of the experts over rows x. */
static void run_products(struct dmk_rank *rank, const struct dmk_device_layer *lw,
                         const uint16_t *x, uint32_t n_rows)
{
    const struct dmk_kernels *kernels = &rank->kernels;
    const struct dmk_shape *s = &rank->engine->shape;
    const uint32_t n_experts = rank->shard.n_experts;
    struct dmk_acts *a = &rank->acts;
    if (kernels->moe_experts && lw->gate_up.packed && lw->down.packed) {
        kernels->moe_experts(&(struct dmk_moe_experts_args){.gate_up = lw->gate_up,
                                                            .down = lw->down,
                                                            .x = x,
                                                            .plan = a->moe,
                                                            .z = a->z,
                                                            .y = a->y,
                                                            .n_rows = n_rows,
                                                            .k = s->experts_per_token,
                                                            .n_experts = n_experts,
                                                            .alpha = s->swiglu_alpha,
                                                            .limit = s->swiglu_limit},
                             rank->stream);
        return;
    }
    kernels->moe_gate_up(&(struct dmk_moe_gate_up_args){lw->gate_up, x, a->moe, a->z, n_experts,
                                                        s->swiglu_alpha, s->swiglu_limit, n_rows},
                         rank->stream);
    kernels->moe_down(&(struct dmk_moe_down_args){lw->down, a->z, a->moe, a->y, n_experts, n_rows},
                      rank->stream);
}

/* The rows of all groups that chose the rank's experts, out of the memory of a rank of each group: of the one
 * that fewest others read. Then slots by expert. */
static void gather_rows(struct dmk_rank *rank, uint32_t layer, uint32_t n_rows)
{
    const struct dmk_engine *engine = rank->engine;
    const struct dmk_shape *s = &engine->shape;
    const struct dmk_layout layout = engine->conf.layout;
    struct dmk_acts *a = &rank->acts;
    struct dmk_gather_args args = {.n_from = layout.dp,
                                   .n_rows = n_rows,
                                   .x = a->got.x,
                                   .ids = a->got.ids,
                                   .weights = a->got.weights,
                                   .k = s->experts_per_token,
                                   .hidden = s->hidden,
                                   .expert_first = rank->shard.expert_first,
                                   .n_experts = rank->shard.n_experts};
    for (uint32_t g = 0; g < layout.dp; g++) {
        const struct dmk_rank *from = &engine->ranks[g * layout.tp + rank->index % layout.tp];
        args.from[g].x = from->acts.norm;
        args.from[g].ids = from->acts.chosen;
        args.from[g].weights = from->acts.weights;
        args.from[g].n_live = &counts_of(from)->n_live;
        args.from[g].first = rows_before(engine, g);
    }
    args.meeting = meeting_of(rank, engine->ranks, engine->n_ranks, layer, DMK_MEET_ROWS);
    rank->kernels.gather(&args, rank->stream);
    rank->kernels.moe_group(
        &(struct dmk_moe_group_args){.ids = a->got.ids,
                                     .weights = a->got.weights,
                                     .plan = a->moe,
                                     .n_rows = n_rows,
                                     .k = s->experts_per_token,
                                     .expert_first = rank->shard.expert_first,
                                     .n_experts = rank->shard.n_experts,
                                     .experts_per_group = s->n_experts / DMK_REDUCE_LEAVES},
        rank->stream);
}

void dmk_device_experts(struct dmk_rank *rank, uint32_t layer)
{
    const struct dmk_engine *engine = rank->engine;
    const struct dmk_shape *s = &engine->shape;
    const struct dmk_layout layout = engine->conf.layout;
    const uint32_t n_rows = rows_before(engine, layout.dp), H = s->hidden;
    struct dmk_acts *a = &rank->acts;
    if (layout.dp > 1) {
        gather_rows(rank, layer, n_rows);
    }
    run_products(rank, &dmk_device_of(rank)->layers[layer], layout.dp > 1 ? a->got.x : a->norm,
                 n_rows);
    /* The tree over the rank's groups of experts; with one rank that is all of it. */
    const struct dmk_moe_combine_args combine = {a->y,
                                                 a->moe,
                                                 a->part,
                                                 n_rows,
                                                 s->experts_per_token,
                                                 H,
                                                 DMK_REDUCE_LEAVES / engine->n_ranks};
    if (engine->n_ranks > 1) {
        rank->kernels.moe_combine(&combine, rank->stream);
        return;
    }
    rank->kernels.combine_norm(&(struct dmk_combine_norm_args){combine, a->x,
                                                               norm_after(rank, layer), a->norm,
                                                               s->norm_eps},
                               rank->stream);
}

void dmk_device_finish(struct dmk_rank *rank, uint32_t layer)
{
    const struct dmk_engine *engine = rank->engine;
    const struct dmk_shape *s = &engine->shape;
    const uint32_t first = rows_before(engine, rank->group);
    struct dmk_add_norm_args add = {.x = rank->acts.x,
                                    .n_ranks = engine->n_ranks,
                                    .scale = norm_after(rank, layer),
                                    .y = rank->acts.norm,
                                    .n_rows = plan_of(rank)->n_rows,
                                    .hidden = s->hidden,
                                    .eps = s->norm_eps};
    for (uint32_t r = 0; r < engine->n_ranks; r++) {
        add.sum[r] = engine->ranks[r].acts.part + (size_t)first * s->hidden;
    }
    add.meeting = meeting_of(rank, engine->ranks, engine->n_ranks, layer, DMK_MEET_PARTS);
    rank->kernels.add_norm(&add, rank->stream);
}

void dmk_device_head(struct dmk_rank *rank)
{
    const struct dmk_shape *s = &rank->engine->shape;
    const struct dmk_device_rank *dev = dmk_device_of(rank);
    const struct dmk_step_plan *p = plan_of(rank);
    const uint32_t n = p->n_logit_rows, H = s->hidden,
                   most = rank->engine->conf.layout.tp > 1 ? HEAD_ROWS : n;
    float *logits = dmk_device_of(first_of_group(rank))->logits + rank->shard.vocab_first;
    struct dmk_acts *a = &rank->acts;
    if (n == 0 || rank->shard.n_vocab == 0) {
        return;
    }
    rank->kernels.rmsnorm(&(struct dmk_rmsnorm_args){a->x, dmk_device_at(rank, p->logit_rows),
                                                     dev->final_norm, a->last, n, H, s->norm_eps},
                          rank->stream);
    for (uint32_t row = 0; row < n; row += most) {
        dmk_engine_linear(rank,
                          &(struct dmk_linear_args){.w = dev->unembedding,
                                                    .x = a->last + (size_t)row * H,
                                                    .y_f32 = logits + (size_t)row * s->vocab,
                                                    .w_stride = H,
                                                    .x_stride = H,
                                                    .y_stride = s->vocab,
                                                    .n_rows = n - row < most ? n - row : most,
                                                    .n_out = rank->shard.n_vocab,
                                                    .k = H,
                                                    .n_slices = 1,
                                                    .n_whole = s->vocab},
                          &dev->head8, rank->shard.vocab_first);
    }
}

void dmk_device_pick(struct dmk_rank *rank)
{
    const struct dmk_device_rank *dev = dmk_device_of(rank);
    const struct dmk_step_plan *p = plan_of(rank);
    if (p->n_logit_rows > 0) {
        rank->kernels.sample(&(struct dmk_sample_args){dev->logits, dmk_device_at(rank, p->picks),
                                                       dev->picked, p->n_logit_rows,
                                                       rank->engine->shape.vocab},
                             rank->stream);
    }
}
