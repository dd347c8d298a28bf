/* The engine on a device that queues its work: weights in device memory, plans that travel there, steps that the
 * host only launches.
 *
 * A step of single tokens is a graph, captured once for each size of batch (a bucket) and launched again
 * with other plans: what differs from step to step lies in device memory. Every other step is launched kernel by kernel.
 * The host waits once, at the end, or after each layer with on_layer. One rank, on the engine's thread. */
#pragma once

#include "common/model/engine_internal.h"

#define DMK_DEVICE_MAX_BUCKETS 40

struct dmk_device_layer {
    const uint16_t *attn_norm;
    const uint16_t *qkv_w, *qkv_b; /* [(heads + 2 kv heads) * 64][H] */
    const uint16_t *o_w, *o_b;
    const uint16_t *sinks;
    const uint16_t *mlp_norm;
    const uint16_t *router_w, *router_b;
    struct dmk_expert_weights gate_up, down;
};

struct dmk_device {
    struct dmk_rank *rank;
    const uint16_t *embedding, *final_norm, *unembedding;
    struct dmk_device_layer *layers; /* [n_layers] */
    float *rope;
    uint8_t *plan;                      /* device copy of engine->plan_block */
    float *logits;                      /* [max_logit_rows][vocab], device memory */
    float *logits_host;                 /* the same, pinned; what leaves a step passes through it */
    struct dmk_sample_out *picked;      /* [max_logit_rows], device memory */
    struct dmk_sample_out *picked_host; /* the same, pinned */
    struct dmk_event *layer_done[8];    /* a ring: so many layers the host may be ahead */
    struct dmk_graph *graphs[DMK_DEVICE_MAX_BUCKETS];
};

/* Both on the engine's open. Weights of engine->weights, or random ones where it has none. */
int dmk_device_open(struct dmk_engine *engine, struct dmk_error *reterr);
void dmk_device_close(struct dmk_engine *engine);

int dmk_device_step(struct dmk_engine *engine, const struct dmk_step *step);

/* Device places of what the host's plan names. */
void *dmk_device_at(const struct dmk_engine *engine, const void *host);
