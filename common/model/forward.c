/* The forward pass of one rank, top to bottom.
 *
 * Runs on the rank's thread; all ranks walk through it in step and meet in the two sums of each layer: that
 * of attention among the ranks of a data-parallel group, that of the experts among all. T rows of the group's
 * tokens (any mix of prefill chunks and decode tokens, or none) go in, K and V go to the pages, logits of the
 * wanted rows come out. A group without rows still has its experts to offer, so its ranks take every turn.
 * Rounding points are those of the kernels' contracts: whatever is called bf16 below is rounded there and
 * nowhere else. */
#include "common/model/engine_internal.h"
#include "kernels/dtype.h"

/* Rank 0 looks at the caller's flag; the others hear of it before any of them goes on. */
static bool step_cancelled(struct dmk_rank *rank, const struct dmk_step *step)
{
    struct dmk_engine *engine = rank->engine;
    if (rank->index == 0) {
        engine->cancelled = step->cancel && atomic_load(step->cancel);
    }
    dmk_coll_barrier(engine->coll, rank->index);
    return engine->cancelled;
}

static void copy_pages(struct dmk_rank *rank, const struct dmk_step *step)
{
    const struct dmk_kv_layout *l = &rank->kv.layout;
    for (uint32_t i = 0; i < step->n_copies; i++) {
        const struct dmk_page_copy *copy = &step->copies[i];
        if (copy->dp != rank->group) {
            continue;
        }
        uint8_t *pages = copy->window ? rank->kv.window : rank->kv.full;
        uint64_t n_pages = copy->window ? l->n_window_pages : l->n_full_pages;
        uint32_t n_layers = copy->window ? l->n_window_layers : l->n_full_layers;
        for (uint64_t array = 0; array < (uint64_t)n_layers * l->n_local_heads; array++) {
            uint8_t *first = pages + array * n_pages * l->page_bytes;
            rank->backend->ops->copy(rank->backend, rank->stream,
                                     first + (uint64_t)copy->dst * l->page_bytes,
                                     first + (uint64_t)copy->src * l->page_bytes, l->page_bytes);
        }
    }
}

/* y [T][n_out] = bf16(x [T][k] times w [n_out][k] + b), or times w8 where that is there */
static void project(struct dmk_rank *rank, const uint16_t *w, const struct dmk_dense_fp8 *w8,
                    const uint16_t *b, const uint16_t *x, uint16_t *y, uint32_t n_rows,
                    uint32_t n_out, uint32_t k)
{
    struct dmk_linear_args args = {.w = w,
                                   .bias = b,
                                   .x = x,
                                   .y_bf16 = y,
                                   .w_stride = k,
                                   .x_stride = k,
                                   .y_stride = n_out,
                                   .n_rows = n_rows,
                                   .n_out = n_out,
                                   .k = k,
                                   .n_slices = 1};
    dmk_engine_linear(rank, &args, w8, 0);
}

static struct dmk_expert_weights describe(const struct dmk_engine *engine,
                                          const struct dmk_expert_matrix *m, uint32_t rows,
                                          uint32_t cols)
{
    return (struct dmk_expert_weights){
        .format = engine->weights->expert_format == DMK_EXPERTS_MXFP4 ? DMK_WEIGHT_MXFP4
                                                                      : DMK_WEIGHT_BF16,
        .blocks = m->blocks,
        .scales = m->scales,
        .bias = m->bias,
        .rows = rows,
        .cols = cols,
    };
}

/* sum [n_rows][H] = what the rank's experts, whole ones, make of the rows that chose them: z [slots][I],
 * y [slots][H], then the tree over the rank's share of the eight groups of experts. */
static void run_experts(struct dmk_rank *rank, const struct dmk_layer_weights *lw,
                        struct dmk_coll_rows rows, float *sum)
{
    const struct dmk_engine *engine = rank->engine;
    const struct dmk_shape *s = &engine->shape;
    const struct dmk_kernels *kernels = &rank->kernels;
    const uint32_t H = s->hidden, k = s->experts_per_token;
    const uint32_t first = rank->shard.expert_first, n_experts = rank->shard.n_experts;
    struct dmk_stream *stream = rank->stream;
    struct dmk_acts *a = &rank->acts;

    kernels->moe_group(&(struct dmk_moe_group_args){rows.ids, rows.weights, a->moe, rows.n_rows, k,
                                                    first, n_experts,
                                                    s->n_experts / DMK_REDUCE_LEAVES},
                       stream);
    kernels->moe_gate_up(
        &(struct dmk_moe_gate_up_args){describe(engine, &lw->gate_up, 2 * s->intermediate, H),
                                       rows.x, a->moe, a->z, n_experts, s->swiglu_alpha,
                                       s->swiglu_limit},
        stream);
    kernels->moe_down(&(struct dmk_moe_down_args){describe(engine, &lw->down, H, s->intermediate),
                                                  a->z, a->moe, a->y, n_experts},
                      stream);
    kernels->moe_combine(&(struct dmk_moe_combine_args){a->y, a->moe, sum, rows.n_rows, k, H,
                                                        DMK_REDUCE_LEAVES / engine->n_ranks},
                         stream);
}

int dmk_forward(struct dmk_rank *rank, const struct dmk_step_plan *plan,
                const struct dmk_step *step)
{
    struct dmk_engine *engine = rank->engine;
    const struct dmk_rank_weights *w = &rank->weights;
    const struct dmk_shape *s = &engine->shape;
    const struct dmk_kernels *kernels = &rank->kernels;
    const struct dmk_kv_layout *kv = &rank->kv.layout;
    struct dmk_stream *stream = rank->stream;
    struct dmk_acts *a = &rank->acts;

    const uint32_t T = plan->n_rows, H = s->hidden, D = DMK_HEAD_DIM;
    const uint32_t G = s->n_heads / s->n_kv_heads; /* query heads per KV head */
    const uint32_t n_kv = rank->shard.n_kv_heads;  /* of this rank */
    const uint32_t n_q = n_kv * G;                 /* of this rank */
    const uint32_t tp = engine->conf.layout.tp, dp = engine->conf.layout.dp;
    const uint32_t k = s->experts_per_token;

    copy_pages(rank, step);

    /* x [T][H] = rows of the embedding */
    kernels->embed(&(struct dmk_embed_args){w->embedding, plan->ids, a->x, T, H}, stream);

    for (uint32_t layer = 0; layer < s->n_layers; layer++) {
        const struct dmk_layer_weights *lw = &w->layers[layer];
        const bool full = dmk_shape_layer_is_full(layer);
        const uint32_t kind_index = dmk_shape_kind_index(layer);
        if (step_cancelled(rank, step)) {
            return -DMK_ECANCELLED;
        }

        /* norm [T][H] */
        kernels->rmsnorm(
            &(struct dmk_rmsnorm_args){a->x, NULL, lw->attn_norm, a->norm, T, H, s->norm_eps},
            stream);
        /* q [T][n_q][64], k and v [T][n_kv][64]: this rank's heads */
        project(rank, lw->q_w, &lw->q8, lw->q_b, a->norm, a->q, T, n_q * D, H);
        project(rank, lw->k_w, &lw->k8, lw->k_b, a->norm, a->k, T, n_kv * D, H);
        project(rank, lw->v_w, &lw->v8, lw->v_b, a->norm, a->v, T, n_kv * D, H);
        kernels->rope(&(struct dmk_rope_args){a->q, plan->positions, engine->rope, T, n_q}, stream);
        kernels->rope(&(struct dmk_rope_args){a->k, plan->positions, engine->rope, T, n_kv},
                      stream);

        /* heads [T][n_q][64]. A full layer writes its pages first and then reads everything from
         * them. A sliding one reads the ring (positions before the step) and the step's own k and v,
         * and then leaves the last blocks in the ring. */
        struct dmk_kv_write_args write = {
            .k = a->k,
            .v = a->v,
            .row_page = full ? plan->full_page : plan->window_page,
            .row_slot = plan->slot,
            .pages = full ? (uint8_t *)rank->kv.full + dmk_kv_full_offset(kv, kind_index, 0, 0)
                          : (uint8_t *)rank->kv.window + dmk_kv_window_offset(kv, kind_index, 0, 0),
            .n_rows = T,
            .n_heads = n_kv,
            .n_pages = full ? kv->n_full_pages : kv->n_window_pages,
            .page_bytes = kv->page_bytes,
        };
        struct dmk_attn_args attn = {
            .q = a->q,
            .k = a->k,
            .v = a->v,
            .pages = write.pages,
            .page_ids = plan->page_ids,
            .seqs = plan->seqs,
            .tiles = plan->tiles,
            .sinks = lw->sinks,
            .out = a->heads,
            .n_seqs = plan->n_seqs,
            .n_tiles = plan->n_tiles,
            .n_kv_heads = n_kv,
            .group = G,
            .n_pages = write.n_pages,
            .page_bytes = kv->page_bytes,
            .window = full ? 0 : s->window,
            .fresh = !full,
        };
        if (full) {
            kernels->kv_write(&write, stream);
            kernels->attn(&attn, stream);
        } else {
            kernels->attn(&attn, stream);
            kernels->kv_write(&write, stream);
        }

        /* sum [T][H] = o_proj over this rank's columns: a leaf for each KV head, added in the tree,
         * first here and then across ranks; x = bf16(x + bf16(sum + bias)) */
        dmk_engine_linear(rank,
                          &(struct dmk_linear_args){.w = lw->o_w,
                                                    .x = a->heads,
                                                    .y_f32 = a->sum,
                                                    .w_stride = lw->o_stride,
                                                    .x_stride = n_q * D,
                                                    .y_stride = H,
                                                    .n_rows = T,
                                                    .n_out = H,
                                                    .k = G * D,
                                                    .n_slices = DMK_REDUCE_LEAVES / tp},
                          &lw->o8, 0);
        dmk_coll_allreduce(engine->coll, rank->index, a->sum, (size_t)T * H);
        kernels->residual(&(struct dmk_residual_args){a->x, a->sum, lw->o_b, T, H}, stream);

        /* norm [T][H]; scores [T][E]; chosen and weights [T][k], equal on all ranks of the group */
        kernels->rmsnorm(
            &(struct dmk_rmsnorm_args){a->x, NULL, lw->mlp_norm, a->norm, T, H, s->norm_eps},
            stream);
        project(rank, lw->router_w, &(struct dmk_dense_fp8){0}, lw->router_b, a->norm, a->scores, T,
                s->n_experts, H);
        kernels->topk(&(struct dmk_topk_args){a->scores, a->chosen, a->weights, T, s->n_experts, k},
                      stream);

        /* sum [T][H] = the tree over the eight groups of experts, wherever they live: first on each rank,
         * then across ranks. With one group all ranks have all rows; with more of them rows travel to
         * their experts and the results back. x = bf16(x + bf16(sum)) */
        struct dmk_coll_rows rows = {a->norm, a->chosen, a->weights, T};
        if (dp == 1) {
            run_experts(rank, lw, rows, a->sum);
            dmk_coll_allreduce(engine->coll, rank->index, a->sum, (size_t)T * H);
        } else {
            struct dmk_coll_rows got = a->got;
            got.n_rows = dmk_coll_dispatch(engine->coll, rank->index,
                                           &(struct dmk_coll_dispatch){rows, got, H, k,
                                                                       rank->shard.expert_first,
                                                                       rank->shard.n_experts});
            run_experts(rank, lw, got, a->part);
            dmk_coll_combine(engine->coll, rank->index, a->part, a->sum);
        }
        kernels->residual(&(struct dmk_residual_args){a->x, a->sum, NULL, T, H}, stream);

        if (rank->index == 0 && step->on_layer) {
            rank->backend->ops->sync(rank->backend, stream);
            step->on_layer(step->ud, layer);
        }
    }

    /* logits [rows][vocab]: this rank's part of the vocabulary, of the wanted rows only */
    const uint32_t R = plan->n_logit_rows;
    if (R > 0) {
        kernels->rmsnorm(&(struct dmk_rmsnorm_args){a->x, plan->logit_rows, w->final_norm, a->last,
                                                    R, H, s->norm_eps},
                         stream);
        dmk_engine_linear(rank,
                          &(struct dmk_linear_args){.w = w->unembedding,
                                                    .x = a->last,
                                                    .y_f32 = plan->logits + rank->shard.vocab_first,
                                                    .w_stride = H,
                                                    .x_stride = H,
                                                    .y_stride = s->vocab,
                                                    .n_rows = R,
                                                    .n_out = rank->shard.n_vocab,
                                                    .k = H,
                                                    .n_slices = 1},
                          &w->head8, rank->shard.vocab_first);
    }
    return rank->backend->ops->sync(rank->backend, stream);
}
