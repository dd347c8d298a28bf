/* The id of a model: a hash over its dimensions and over samples of every tensor that matters. */
#include "common/base/hash.h"
#include "common/model/engine_internal.h"
#include "kernels/dtype.h"

/* Sixteen pieces of 256 bytes, spread evenly. */
static void hash_sample(struct dmk_id128 *id, const void *data, uint64_t bytes)
{
    const uint64_t piece = 256, n = 16;
    if (bytes <= piece * n) {
        *id = dmk_hash128(*id, data, bytes);
        return;
    }
    for (uint64_t i = 0; i < n; i++) {
        *id = dmk_hash128(*id, (const char *)data + (bytes - piece) / (n - 1) * i, piece);
    }
}

static void hash_experts(struct dmk_id128 *id, const struct dmk_weights *w,
                         const struct dmk_expert_matrix *m, uint64_t rows, uint64_t cols)
{
    uint64_t elements = w->shape.n_experts * rows * cols;
    bool mxfp4 = w->expert_format == DMK_EXPERTS_MXFP4;
    hash_sample(id, m->blocks, mxfp4 ? elements / 2 : elements * 2);
    if (mxfp4) {
        hash_sample(id, m->scales, elements / DMK_MXFP4_BLOCK);
    }
    hash_sample(id, m->bias, w->shape.n_experts * rows * sizeof(uint16_t));
}

void dmk_engine_model_id(const struct dmk_engine *engine, struct dmk_id128 *ret_id)
{
    const struct dmk_weights *w = engine->weights;
    const struct dmk_shape *s = &w->shape;
    const uint64_t H = s->hidden, q = (uint64_t)s->n_heads * DMK_HEAD_DIM,
                   kv = (uint64_t)s->n_kv_heads * DMK_HEAD_DIM, bf16 = sizeof(uint16_t);
    const uint32_t dims[] = {s->n_layers,  s->hidden,
                             s->n_heads,   s->n_kv_heads,
                             s->n_experts, s->intermediate,
                             s->vocab,     s->experts_per_token,
                             s->window,    s->rope_original_positions};
    const double reals[] = {s->norm_eps,    s->swiglu_alpha,   s->swiglu_limit,  s->rope_theta,
                            s->rope_factor, s->rope_beta_fast, s->rope_beta_slow};
    struct dmk_id128 id = {0};
    id = dmk_hash128(id, dims, sizeof(dims));
    id = dmk_hash128(id, reals, sizeof(reals));
    if (!w->layers) { /* random weights are known by their seed */
        *ret_id = dmk_hash128(id, &engine->conf.random_seed, sizeof(engine->conf.random_seed));
        return;
    }
    hash_sample(&id, w->embedding, s->vocab * H * bf16);
    hash_sample(&id, w->final_norm, H * bf16);
    if (w->unembedding) {
        hash_sample(&id, w->unembedding, s->vocab * H * bf16);
    }
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct dmk_layer_weights *l = &w->layers[i];
        hash_sample(&id, l->attn_norm, H * bf16);
        hash_sample(&id, l->q_w, q * H * bf16);
        hash_sample(&id, l->k_w, kv * H * bf16);
        hash_sample(&id, l->v_w, kv * H * bf16);
        hash_sample(&id, l->o_w, q * H * bf16);
        hash_sample(&id, l->sinks, s->n_heads * bf16);
        hash_sample(&id, l->mlp_norm, H * bf16);
        hash_sample(&id, l->router_w, s->n_experts * H * bf16);
        hash_experts(&id, w, &l->gate_up, 2ull * s->intermediate, H);
        hash_experts(&id, w, &l->down, H, s->intermediate);
    }
    *ret_id = id;
}
