/* The engine: a loaded model and its page memory, and one function that runs a step.
 *
 * A step is a list of sequences, each with some new tokens; prefill chunks and decode tokens are the
 * same thing and mix freely. The engine hides ranks (threads of this process or devices, each with its shard of
 * heads, experts and page memory), backends and kernels. It knows no requests, no text and no sampling.
 *
 * Results depend on a sequence's own tokens only: not on the other sequences of the step, the cut into
 * chunks, the pages used, nor the number of ranks and groups (bit for bit).
 *
 * Ranks form dp groups of tp. A sequence lives in one group: its pages are in the pools of that group's ranks,
 * which share its attention heads. Experts are spread over all ranks. Page ids count within a group.
 *
 * dmk_engine_step blocks and is called by one thread, the worker's engine thread. */
#pragma once

#include <stdatomic.h>
#include "common/kv/layout.h"
#include "common/shape/shape.h"

struct dmk_engine;

#define DMK_ENGINE_NUMERICS_MAX 48 /* of a numerics id, with its end */

/* Formats of the engines that compute the prompts of a decode worker, where they are not its own. */
enum dmk_prompt_experts {
    DMK_PROMPT_EXPERTS_SAME,
    DMK_PROMPT_EXPERTS_MXFP4,
    DMK_PROMPT_EXPERTS_FP8,
    DMK_PROMPT_EXPERTS_BF16,
};
enum dmk_prompt_dense { DMK_PROMPT_DENSE_SAME, DMK_PROMPT_DENSE_BF16, DMK_PROMPT_DENSE_FP8 };

struct dmk_engine_conf {
    const char *model_dir;
    const char *backend;      /* "cpu", "ref" (plain kernels), "cuda" */
    struct dmk_layout layout; /* ranks = tp * dp; rank = group * tp + index in it */
    bool prefill;             /* no LM head is loaded and no logits are to be had */
    uint32_t n_threads;       /* over all ranks; 0 = one a core */
    uint32_t n_full_pages;    /* of each group */
    uint32_t n_window_pages;
    /* Above 0: instead of these, as many as fit when weights, steps and pages of this engine fill each device up to
     * this share of its whole memory, with room for n_pool_seqs sequences at least (dmk_kv_fit). */
    double memory_percent;
    uint32_t n_pool_seqs;
    /* Of each rank in host memory, for dmk_step.stage; 0: none. Hosts have none. */
    uint32_t n_stage_full_pages, n_stage_window_pages;
    uint32_t max_step_tokens; /* bound of the sum of n_tokens in a step, over all groups */
    uint32_t max_step_seqs;
    uint32_t max_logit_rows;
    bool
        fp8_experts; /* device: MXFP4 experts become FP8 with power-of-two scales, fast for prompts */
    /* Products of attention (q, k, v and o) and of the head in FP8: weights with a scale for each block of 128 x 128,
     * activations with one for 128 channels of a token. Made of the checkpoint's BF16, so numbers change. */
    bool fp8_dense;
    enum dmk_prompt_experts prompt_experts; /* for dmk_engine_prompt_numerics alone */
    enum dmk_prompt_dense prompt_dense;
    bool no_verify; /* a converted folder's files are not read under their checksums */
    /* Not NULL: instead of model_dir, a model of these dimensions (dmk_shape_preset) with random weights made
     * in device memory, for benches; they are others in another layout. */
    const char *random_preset;
    uint64_t random_seed;
    void (*on_progress)(void *ud, uint64_t done_bytes,
                        uint64_t total_bytes); /* while loading; may be NULL */
    void *ud;
};

enum dmk_logits { DMK_LOGITS_NONE, DMK_LOGITS_LAST, DMK_LOGITS_ALL };

/* One sequence's part of a step: tokens at positions [pos, pos + n_tokens). A chunk may be longer than the
 * ring: sliding layers read what the ring holds of positions [pos - 127, pos) before they replace it, and
 * leave the last n_ring blocks of the chunk behind. */
struct dmk_step_seq {
    const uint32_t *ids; /* [n_tokens] */
    uint32_t n_tokens;
    uint32_t pos;
    const uint32_t *full_pages;         /* [pages_for(pos + n_tokens)] page ids of the full pool */
    uint32_t ring[DMK_WINDOW_RING_MAX]; /* window page of each ring slot */
    uint32_t n_ring;                    /* 3, or 4 with speculation */
    enum dmk_logits logits;
    uint32_t dp; /* group that holds the sequence; 0 when dp = 1 */
};

/* Pages of a step's only sequence that a device also copies to the staging memory, each layer's before on_layer says
 * that it is done: for a transport that can not read the device's memory itself. Blocks [first, end) of full layers go
 * to staging pages full_at and following, the slots of the ring of sliding layers to window_at and following. */
struct dmk_step_stage {
    uint32_t first_block, end_block, full_at;
    bool window;
    uint32_t window_at;
};

struct dmk_step_pick;
struct dmk_step_picked;

struct dmk_step {
    const struct dmk_step_seq *seqs; /* by group, ascending; a group may have none */
    uint32_t n_seqs;
    /* Done in order before anything else of the step, each in its group (kv/layout.h). */
    const struct dmk_page_copy *copies;
    uint32_t n_copies;
    /* After each layer, on the calling thread, when all ranks have written that layer's K and V of this
     * step. May be NULL. */
    void (*on_layer)(void *ud, uint32_t layer);
    void *ud;
    const struct dmk_step_stage *stage; /* NULL: nothing is staged */
    const atomic_bool *cancel;          /* looked at before each layer; may be NULL */
    /* [rows][vocab] fp32, rows in the order of seqs (and of tokens for DMK_LOGITS_ALL). */
    float *logits;
    /* Only where dmk_engine_samples says so, else NULL. Rows with a pick get their token where the logits lie:
     * picked[row] is filled, their row of logits is not (and may be NULL when no row wants it). */
    const struct dmk_step_pick *picks; /* [rows] */
    struct dmk_step_picked *picked;    /* [rows] */
};

/* How a row's token is drawn: greedily when scale is 0, else in proportion to exp((logit - max) * scale) where that
 * is at least min_p; unit in [0, 1) is the draw. The same token as common/sample picks. */
struct dmk_step_pick {
    bool pick; /* false: the row's logits go to the caller */
    float scale, min_p;
    double unit;
};

struct dmk_step_picked {
    uint32_t id;
    int status; /* 0; -DMK_EFORMAT: a logit is NaN or +infinity; -DMK_ENOENT: nothing is left to pick */
    float logit, max;
    double sum; /* of exp(logit - max) over the row */
};

/* Where pages of a rank lie that has so many of the model's KV heads; how many pages there are is the caller's to say. */
struct dmk_kv_layout dmk_engine_page_layout(const struct dmk_shape *shape, uint32_t kv_head_first,
                                            uint32_t n_local_heads);

/* reterr names file, tensor and cause, or the option that is out of bounds. */
int dmk_engine_open(const struct dmk_engine_conf *conf, struct dmk_engine **ret,
                    struct dmk_error *reterr);
void dmk_engine_close(struct dmk_engine **engine);

/* 0; -DMK_ECANCELLED when cancel was seen (pages of this step are then undefined);
 * -DMK_EDEVICE when the device failed. Bounds of the step are the caller's promise (asserted). */
int dmk_engine_step(struct dmk_engine *engine, const struct dmk_step *step);

/* Graphs of decode steps that the engine captured when it opened; all 0 where there are none. */
struct dmk_engine_graphs {
    uint32_t n_graphs, n_wanted; /* captured, and one for each size of batch */
    double seconds;              /* that it took */
};
struct dmk_engine_graphs dmk_engine_graphs(const struct dmk_engine *engine);

/* Whether two ranks are on one device: right, but no faster than one rank. */
bool dmk_engine_shares_devices(const struct dmk_engine *engine);

/* Whether a step can pick tokens itself (dmk_step.picks). */
bool dmk_engine_samples(const struct dmk_engine *engine);

const struct dmk_shape *dmk_engine_shape(const struct dmk_engine *engine);
uint32_t dmk_engine_n_ranks(const struct dmk_engine *engine);

/* A rank's page memory: fixed for the engine's life, registered with the transport. */
const struct dmk_kv_mem *dmk_engine_kv(const struct dmk_engine *engine, uint32_t rank);

/* A rank's staging memory, of the same form as its pages; NULL where there is none. */
const struct dmk_kv_mem *dmk_engine_stage(const struct dmk_engine *engine, uint32_t rank);

/* Whether page memory is a device's: the host hands its addresses on and reads nothing there. */
bool dmk_engine_pages_on_device(const struct dmk_engine *engine);

/* For a thread beside the engine's whose library copies pages of a device: makes the first rank's device the one
 * that the thread works with. Nothing on hosts. Not while a step runs. */
void dmk_engine_bind(struct dmk_engine *engine);

/* Waits until all that this process has queued on the ranks' devices has ended, whoever queued it. 0 or
 * -DMK_EDEVICE. From any thread, but only of an engine that captures no graphs (prefill). */
int dmk_engine_wait_devices(struct dmk_engine *engine);

/* What two workers must share for pages to be exchanged: weight format, activation format, kernel
 * generation and backend, e.g. "mxfp4-bf16-k1-cpu". */
const char *dmk_engine_numerics(const struct dmk_engine *engine);
/* The same of an engine of this model and backend that has the conf's prompt_experts and prompt_dense: what pages of
 * prompts come as from elsewhere. Equal to the former where those are the same. Opening refuses formats that no engine
 * of the model can have. */
const char *dmk_engine_prompt_numerics(const struct dmk_engine *engine);

/* Hash over the dimensions and a sample of the weights: two workers with equal ids serve one model. */
struct dmk_id128;
void dmk_engine_model_id(const struct dmk_engine *engine, struct dmk_id128 *ret_id);
