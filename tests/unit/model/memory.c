/* Seeded weights in memory. Every tensor lies at an odd multiple of two bytes, as in real files. */
#include "tests/unit/model/memory.h"

#include <math.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/rng.h"
#include "common/model/weights_internal.h"
#include "kernels/dtype.h"

struct dmk_shape small_shape(uint32_t n_layers)
{
    struct dmk_shape shape;
    dmk_assert(dmk_shape_preset("gpt-oss-20b", &shape, NULL) == 0);
    shape.n_layers = n_layers;
    shape.hidden = 96;
    shape.n_heads = 16;
    shape.n_experts = 16;
    shape.intermediate = 64;
    shape.vocab = 512;
    shape.max_positions = 16384;
    return shape;
}

struct maker {
    uint64_t seed, stream;
    void *blocks[512];
    uint32_t n_blocks;
    uint64_t bytes;
};

static void *take(struct maker *m, size_t bytes)
{
    char *ptr = malloc(bytes + 2);
    dmk_assert(ptr && m->n_blocks < sizeof(m->blocks) / sizeof(m->blocks[0]));
    m->blocks[m->n_blocks++] = ptr;
    m->bytes += bytes;
    m->stream++;
    return ptr + 2;
}

static uint16_t *uniform(struct maker *m, size_t n, float mean, float spread)
{
    uint16_t *x = take(m, n * sizeof(uint16_t));
    for (size_t i = 0; i < n; i++) {
        double unit = dmk_rng_unit(m->seed, m->stream, i);
        x[i] = dmk_f32_to_bf16(mean + spread * (float)(2.0 * unit - 1.0));
    }
    return x;
}

static struct dmk_expert_matrix experts(struct maker *m, enum dmk_expert_format format, size_t n,
                                        size_t rows, size_t cols)
{
    struct dmk_expert_matrix e = {0};
    size_t elements = n * rows * cols;
    if (format == DMK_EXPERTS_BF16) {
        e.blocks = (const uint8_t *)uniform(m, elements, 0.0f, 2.0f / sqrtf((float)cols));
    } else {
        uint8_t *blocks = take(m, elements / 2);
        for (size_t i = 0; i < elements / 2; i++) {
            blocks[i] = (uint8_t)dmk_rng_u64(m->seed, m->stream, i);
        }
        uint8_t *scales = take(m, elements / 32);
        for (size_t i = 0; i < elements / 32; i++) {
            scales[i] = (uint8_t)(121 + dmk_rng_u64(m->seed, m->stream, i) % 4);
        }
        e.blocks = blocks;
        e.scales = scales;
    }
    e.bias = uniform(m, n * rows, 0.0f, 0.1f);
    return e;
}

/* The list of blocks lies behind the weights, so that freeing finds it. */
struct memory {
    struct dmk_weights weights;
    struct maker maker;
};

struct dmk_weights *memory_weights(const struct dmk_shape *s, enum dmk_expert_format format,
                                   uint64_t seed)
{
    struct memory *memory = calloc(1, sizeof(*memory));
    dmk_assert(memory);
    struct dmk_weights *w = &memory->weights;
    struct maker *m = &memory->maker;
    m->seed = seed;
    const size_t H = s->hidden, q = (size_t)s->n_heads * 64, kv = (size_t)s->n_kv_heads * 64;
    const float in = 2.0f / sqrtf((float)H);
    w->shape = *s;
    w->expert_format = format;
    w->embedding = uniform(m, s->vocab * H, 0.0f, 1.5f);
    w->final_norm = uniform(m, H, 1.0f, 0.2f);
    w->unembedding = uniform(m, s->vocab * H, 0.0f, in);
    w->layers = calloc(s->n_layers, sizeof(*w->layers));
    dmk_assert(w->layers);
    for (uint32_t i = 0; i < s->n_layers; i++) {
        w->layers[i] = (struct dmk_layer_weights){
            .attn_norm = uniform(m, H, 1.0f, 0.2f),
            .q_w = uniform(m, q * H, 0.0f, in),
            .q_b = uniform(m, q, 0.0f, 0.2f),
            .k_w = uniform(m, kv * H, 0.0f, in),
            .k_b = uniform(m, kv, 0.0f, 0.2f),
            .v_w = uniform(m, kv * H, 0.0f, in),
            .v_b = uniform(m, kv, 0.0f, 0.2f),
            .o_w = uniform(m, H * q, 0.0f, 2.0f / sqrtf((float)q)),
            .o_b = uniform(m, H, 0.0f, 0.1f),
            .sinks = uniform(m, s->n_heads, 0.0f, 2.0f),
            .mlp_norm = uniform(m, H, 1.0f, 0.2f),
            .router_w = uniform(m, s->n_experts * H, 0.0f, in),
            .router_b = uniform(m, s->n_experts, 0.0f, 0.2f),
            .gate_up = experts(m, format, s->n_experts, 2 * (size_t)s->intermediate, H),
            .down = experts(m, format, s->n_experts, H, s->intermediate),
        };
    }
    w->total_bytes = m->bytes;
    return w;
}

void memory_weights_free(struct dmk_weights *weights)
{
    struct memory *memory = (struct memory *)weights;
    for (uint32_t i = 0; i < memory->maker.n_blocks; i++) {
        free(memory->maker.blocks[i]);
    }
    dmk_weights_disown(&memory->weights);
    free(memory->weights.layers);
    free(memory);
}
