/* What a rank owns of the weights, as pointers; see dmk_weights_of_rank. */
#include <stdlib.h>
#include <string.h>
#include "common/model/cut_weights.h"
#include "kernels/dtype.h"

/* The rank's experts, whole ones, out of those of the model. */
static struct dmk_expert_matrix slice_experts(const struct dmk_weights *w,
                                              const struct dmk_expert_matrix *m, uint32_t first,
                                              uint32_t rows, uint32_t cols)
{
    const bool mxfp4 = w->expert_format == DMK_EXPERTS_MXFP4;
    const size_t elements = (size_t)first * rows * cols;

    return (struct dmk_expert_matrix){
        .blocks = m->blocks + (mxfp4 ? elements / 2 : elements * 2),
        .scales = mxfp4 ? m->scales + elements / DMK_MXFP4_BLOCK : NULL,
        .bias = m->bias + (size_t)first * rows,
    };
}

static struct dmk_layer_weights slice_layer(const struct dmk_weights *w,
                                            const struct dmk_shard *shard,
                                            const struct dmk_layer_weights *whole)
{
    const struct dmk_shape *s = &w->shape;
    const uint64_t group = s->n_heads / s->n_kv_heads, head = shard->kv_head_first, H = s->hidden;
    const uint64_t q_first = head * group * DMK_HEAD_DIM, kv_first = head * DMK_HEAD_DIM;
    struct dmk_layer_weights l = *whole;

    l.q_w += q_first * H;
    l.q_b += q_first;
    l.k_w += kv_first * H;
    l.k_b += kv_first;
    l.v_w += kv_first * H;
    l.v_b += kv_first;
    l.o_w += q_first;
    l.o_stride = (uint64_t)s->n_heads * DMK_HEAD_DIM;
    l.sinks += head * group;
    l.gate_up =
        slice_experts(w, &whole->gate_up, shard->expert_first, 2 * s->intermediate, s->hidden);
    l.down = slice_experts(w, &whole->down, shard->expert_first, s->hidden, s->intermediate);
    return l;
}

static int copy_cut(const struct dmk_weights *w, uint32_t rank, struct dmk_rank_weights *ret_rank)
{
    const size_t n_bytes = w->shape.n_layers * sizeof(struct dmk_layer_weights);
    struct dmk_rank_weights r = w->cut->ranks[rank];

    r.layers = malloc(n_bytes);
    if (!r.layers) {
        return -DMK_ENOMEM;
    }
    memcpy(r.layers, w->cut->ranks[rank].layers, n_bytes);
    *ret_rank = r;
    return 0;
}

int dmk_weights_of_rank(const struct dmk_weights *w, struct dmk_layout layout, uint32_t rank,
                        struct dmk_rank_weights *ret_rank, struct dmk_error *reterr)
{
    const struct dmk_shard shard = dmk_layout_shard(&w->shape, layout, rank);
    struct dmk_rank_weights r = {.embedding = w->embedding, .final_norm = w->final_norm};

    if (w->cut) {
        const int status = dmk_cut_weights_check(w->cut, layout, reterr);

        return status < 0 ? status : copy_cut(w, rank, ret_rank);
    }
    if (w->unembedding) {
        r.unembedding = w->unembedding + (uint64_t)shard.vocab_first * w->shape.hidden;
    }
    if (w->layers) {
        r.layers = calloc(w->shape.n_layers, sizeof(r.layers[0]));
        if (!r.layers) {
            return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the tables of rank %u", rank);
        }
        for (uint32_t i = 0; i < w->shape.n_layers; i++) {
            r.layers[i] = slice_layer(w, &shard, &w->layers[i]);
        }
    }
    *ret_rank = r;
    return 0;
}

void dmk_weights_rank_release(struct dmk_rank_weights *rank)
{
    free(rank->layers);
    *rank = (struct dmk_rank_weights){0};
}
