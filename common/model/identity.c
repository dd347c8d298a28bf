/* The id of a model: a hash over its dimensions and over samples of all tensors. */
#include "common/base/hash.h"
#include "common/model/cut_weights.h"
#include "common/model/engine_internal.h"
#include "kernels/dtype.h"

#define PIECE_BYTES 256u
#define N_PIECES    16u

struct sampler {
    dmk_weights_read_fn *read;
    const void *ud;
    struct dmk_id128 id;
    int status; /* the first failure; nothing is read after it */
};

static void hash_piece(struct sampler *s, const void *at, uint64_t bytes)
{
    uint8_t piece[PIECE_BYTES * N_PIECES];

    if (s->status == 0 && s->read) {
        s->status = s->read(s->ud, at, bytes, piece);
        at = piece;
    }
    if (s->status == 0) {
        s->id = dmk_hash128(s->id, at, bytes);
    }
}

/* Sixteen pieces of 256 bytes, spread evenly. */
static void hash_sample(struct sampler *s, const void *data, uint64_t bytes)
{
    const uint64_t piece = PIECE_BYTES, n = N_PIECES;
    if (bytes <= piece * n) {
        hash_piece(s, data, bytes);
        return;
    }
    for (uint64_t i = 0; i < n; i++) {
        hash_piece(s, (const char *)data + (bytes - piece) / (n - 1) * i, piece);
    }
}

static void hash_experts(struct sampler *sampler, const struct dmk_weights *w,
                         const struct dmk_expert_matrix *m, uint64_t rows, uint64_t cols)
{
    uint64_t elements = w->shape.n_experts * rows * cols;
    bool mxfp4 = w->expert_format == DMK_EXPERTS_MXFP4;
    hash_sample(sampler, m->blocks, mxfp4 ? elements / 2 : elements * 2);
    if (mxfp4) {
        hash_sample(sampler, m->scales, elements / DMK_MXFP4_BLOCK);
    }
    hash_sample(sampler, m->bias, w->shape.n_experts * rows * sizeof(uint16_t));
}

static struct dmk_id128 hash_shape(const struct dmk_shape *s)
{
    const uint32_t dims[] = {s->n_layers,  s->hidden,
                             s->n_heads,   s->n_kv_heads,
                             s->n_experts, s->intermediate,
                             s->vocab,     s->experts_per_token,
                             s->window,    s->rope_original_positions};
    const double reals[] = {s->norm_eps,    s->swiglu_alpha,   s->swiglu_limit,  s->rope_theta,
                            s->rope_factor, s->rope_beta_fast, s->rope_beta_slow};
    const struct dmk_id128 none = {0};
    return dmk_hash128(dmk_hash128(none, dims, sizeof(dims)), reals, sizeof(reals));
}

int dmk_weights_model_id(const struct dmk_weights *w, dmk_weights_read_fn *read, const void *ud,
                         struct dmk_id128 *ret_id)
{
    const struct dmk_shape *s = &w->shape;
    const uint64_t H = s->hidden, q = (uint64_t)s->n_heads * DMK_HEAD_DIM,
                   kv = (uint64_t)s->n_kv_heads * DMK_HEAD_DIM, bf16 = sizeof(uint16_t);
    struct sampler sampler = {.read = read, .ud = ud, .id = hash_shape(s)};
    if (w->cut) {
        *ret_id = w->cut->manifest.model_id;
        return 0;
    }
    hash_sample(&sampler, w->embedding, s->vocab * H * bf16);
    hash_sample(&sampler, w->final_norm, H * bf16);
    if (w->unembedding) {
        hash_sample(&sampler, w->unembedding, s->vocab * H * bf16);
    }
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct dmk_layer_weights *l = &w->layers[i];
        hash_sample(&sampler, l->attn_norm, H * bf16);
        hash_sample(&sampler, l->q_w, q * H * bf16);
        hash_sample(&sampler, l->q_b, q * bf16);
        hash_sample(&sampler, l->k_w, kv * H * bf16);
        hash_sample(&sampler, l->k_b, kv * bf16);
        hash_sample(&sampler, l->v_w, kv * H * bf16);
        hash_sample(&sampler, l->v_b, kv * bf16);
        hash_sample(&sampler, l->o_w, q * H * bf16);
        hash_sample(&sampler, l->o_b, H * bf16);
        hash_sample(&sampler, l->sinks, s->n_heads * bf16);
        hash_sample(&sampler, l->mlp_norm, H * bf16);
        hash_sample(&sampler, l->router_w, s->n_experts * H * bf16);
        hash_sample(&sampler, l->router_b, s->n_experts * bf16);
        hash_experts(&sampler, w, &l->gate_up, 2ull * s->intermediate, H);
        hash_experts(&sampler, w, &l->down, H, s->intermediate);
    }
    if (sampler.status == 0) {
        *ret_id = sampler.id;
    }
    return sampler.status;
}

void dmk_engine_model_id(const struct dmk_engine *engine, struct dmk_id128 *ret_id)
{
    const struct dmk_weights *w = engine->weights;
    if (!w->layers && !w->cut) { /* random weights are known by their seed */
        *ret_id = dmk_hash128(hash_shape(&w->shape), &engine->conf.random_seed,
                              sizeof(engine->conf.random_seed));
        return;
    }
    (void)dmk_weights_model_id(w, NULL, NULL, ret_id); /* memory does not fail */
}
