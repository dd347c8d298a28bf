/* The engine on devices that queue their work: weights in device memory, plans that travel there, steps that the
 * host only launches.
 *
 * A rank is a device (or a share of one), its stream and its part of weights, pages and activations. The
 * engine's thread launches the work of all ranks, one part of a layer at a time, and orders them by events: where a
 * sum crosses ranks they meet (device_step.c), and each reads what the others have written straight from their memory.
 *
 * A step of single tokens is a graph of all ranks, captured when the engine opens, one for each size of batch (a
 * bucket), and launched with other plans: what differs from step to step lies in device memory. Every other step
 * is launched kernel by kernel. The host waits once, at the end, or after each layer with on_layer. A step
 * allocates nothing. */
#pragma once

#include "common/model/engine_internal.h"

#define DMK_DEVICE_MAX_BUCKETS 48

struct dmk_device_layer {
    const uint16_t *attn_norm;
    const uint16_t *qkv_w, *qkv_b; /* [(heads + 2 kv heads) * 64][H] */
    const uint16_t *o_w, *o_b;     /* [H][heads * 64] */
    struct dmk_dense_fp8 qkv8, o8; /* instead of qkv_w and o_w, or without codes */
    const uint16_t *sinks;
    const uint16_t *mlp_norm;
    const uint16_t *router_w, *router_b;
    struct dmk_expert_weights gate_up, down;
};

/* What a rank has on its device besides pages and activations. Heads, experts and rows of the unembedding are its
 * own, everything else is whole. */
struct dmk_device_rank {
    const uint16_t *embedding, *final_norm, *unembedding;
    struct dmk_dense_fp8 head8;      /* instead of unembedding, or without codes */
    struct dmk_device_layer *layers; /* [n_layers] */
    float *rope;
    uint8_t *plan;          /* copy of its group's block */
    struct dmk_event *here; /* recorded where ranks meet by events */
    uint32_t *heard;        /* [ranks] the last meeting that each rank has told this one of */
    /* Of the first rank of a group, which gets the logits of all and picks the tokens. */
    float *logits;                      /* [max_logit_rows][vocab] */
    struct dmk_sample_out *picked;      /* [max_logit_rows] */
    struct dmk_sample_out *picked_host; /* the same, pinned */
};

struct dmk_device {
    struct dmk_device_rank ranks[DMK_ENGINE_MAX_RANKS];
    float *logits_host;              /* a row, pinned: logits leave a step through it */
    struct dmk_event *layer_done[8]; /* of rank 0; a ring: so many layers the host may be ahead */
    struct dmk_graph *graphs[DMK_DEVICE_MAX_BUCKETS];
    struct dmk_engine_graphs captured;
    uint32_t meetings; /* of all steps so far, as dmk_step_counts has it */
    bool tell;         /* in this step ranks meet inside kernels, see device_step.c */
};

/* The meetings of a layer, by number. */
enum dmk_device_meeting { DMK_MEET_SUMS, DMK_MEET_ROWS, DMK_MEET_PARTS, DMK_MEETINGS };

/* Both on the engine's open. Weights of engine->weights, or random ones where it has none. */
int dmk_device_open(struct dmk_engine *engine, struct dmk_error *reterr);
void dmk_device_close(struct dmk_engine *engine);

/* Weights of a rank to its device, or made there; load counts the bytes of all ranks for on_progress. */
struct dmk_device_load {
    uint64_t done, total;
};
uint64_t dmk_device_load_bytes(const struct dmk_rank *rank);
int dmk_device_load(struct dmk_rank *rank, struct dmk_device_load *load, struct dmk_error *reterr);

int dmk_device_step(struct dmk_engine *engine, const struct dmk_step *step);

/* Captures the graphs of all buckets and runs each once; stops early when it takes too long, and steps of the
 * buckets that are left run without a graph. */
int dmk_device_capture(struct dmk_engine *engine, struct dmk_error *reterr);

/* Rows of a rank's experts in the largest graph: those of all groups, padding included. 0 without graphs. */
uint32_t dmk_device_moe_rows(const struct dmk_engine_conf *conf);

/* Batch sizes that have a graph: every one up to 16, then steps of an eighth of the power of two below. */
uint32_t dmk_device_bucket(uint32_t n_rows, uint32_t *ret_index);

/* ---- what travels around a step (device_io.c) ---- */

/* Draws of a group's n rows into its plan; picks NULL: none. Padding has none. */
void dmk_device_plan_picks(struct dmk_step_plan *p, const struct dmk_step_pick *picks, uint32_t n);
/* The plan of the rank's group to its device. */
void dmk_device_send_plan(struct dmk_rank *rank);
/* The step's page copies that are of the rank's group. */
void dmk_device_copy_pages(struct dmk_rank *rank, const struct dmk_step *step);
/* Waits for all ranks; 0 or the first one's error. */
int dmk_device_sync(struct dmk_engine *engine);
/* Waits, and writes the step's picked tokens and logits. n_logits: rows of each group, without padding. */
int dmk_device_fetch(struct dmk_engine *engine, const struct dmk_step *step,
                     const uint32_t *n_logits);

/* ---- a rank's parts of a step, launched on its stream (device_forward.c) ---- */

struct dmk_device_rank *dmk_device_of(const struct dmk_rank *rank);
/* Where the rank's device has what the host's plan of its group names. */
void *dmk_device_at(const struct dmk_rank *rank, const void *host);

/* x [T][H] of the tokens, and norm [T][H] for the first layer. */
void dmk_device_begin(struct dmk_rank *rank);
/* From norm to sum [T][H], the rank's subtree of the attention's output; keys and values to the pages. */
void dmk_device_attend(struct dmk_rank *rank, uint32_t layer);
/* The sums of the group's ranks go into x and its norm; then the choice of experts. */
void dmk_device_choose(struct dmk_rank *rank, uint32_t layer);
/* The rank's experts, on the rows of all groups. One rank: goes on to x and the next norm; else to part. */
void dmk_device_experts(struct dmk_rank *rank, uint32_t layer);
/* Of several ranks: the parts of all of them go into x and the norm for the next layer. */
void dmk_device_finish(struct dmk_rank *rank, uint32_t layer);
/* The rank's columns of the logits, to its group's first rank. */
void dmk_device_head(struct dmk_rank *rank);
/* Of a group's first rank: a token for each row, also for those that want none. */
void dmk_device_pick(struct dmk_rank *rank);
