/* The tensors of a checkpoint as one rank sees them, whatever the file layout was.
 *
 * Pointers go straight into the mapped files where the layout allows (BF16 matrices, MXFP4 blocks
 * read in place), else into memory that the loader owns. Matrices are row-major (out, in). All
 * counts are of the whole model; a rank slices rows by its shard. Tensors in the files are NOT
 * aligned to 16 bytes, BF16 ones to 2 bytes only. Immutable after open: any thread. */
#pragma once

#include "common/shape/shape.h"

enum dmk_expert_format { DMK_EXPERTS_MXFP4, DMK_EXPERTS_BF16, DMK_EXPERTS_FP8 };

/* MXFP4: blocks [E][rows][cols/32][16] bytes, low nibble first, and scales [E][rows][cols/32]
 * (UE8M0). BF16: blocks is [E][rows][cols] bf16 and scales is NULL. FP8 (converted folders only): blocks
 * is [E][rows][cols] E4M3 and scales are floats, powers of two, [E][ceil(rows/128)][ceil(cols/128)]. Gate
 * and up rows are interleaved: 2j, 2j+1. */
struct dmk_expert_matrix {
    const uint8_t *blocks;
    const uint8_t *scales;
    const uint16_t *bias; /* [E][rows] bf16 */
};

/* A rank's share of a dense matrix in FP8: codes [rows][cols] E4M3 and their scales, as kernels/fp8.h says; those of the
 * first rows may be of a block that begins with another rank's. codes NULL: there is none. */
struct dmk_dense_fp8 {
    const uint8_t *codes;
    const float *scales;
};

struct dmk_layer_weights {
    const uint16_t *attn_norm;           /* [H] */
    const uint16_t *q_w, *q_b;           /* [n_heads*64][H], [n_heads*64] */
    const uint16_t *k_w, *k_b;           /* [n_kv_heads*64][H], [n_kv_heads*64] */
    const uint16_t *v_w, *v_b;           /* as k */
    const uint16_t *o_w, *o_b;           /* [H][n_heads*64], [H] */
    uint64_t o_stride;                   /* elements from row to row of o_w; 0: packed */
    const uint16_t *sinks;               /* [n_heads] */
    const uint16_t *mlp_norm;            /* [H] */
    const uint16_t *router_w, *router_b; /* [E][H], [E] */
    struct dmk_expert_matrix gate_up;    /* rows 2I, cols H */
    struct dmk_expert_matrix down;       /* rows H, cols I */
    /* Of a rank whose engine wants dense weights in FP8: what is multiplied by instead of q_w and so on. */
    struct dmk_dense_fp8 q8, k8, v8, o8;
};

/* The largest of all MXFP4 scales and where it stands, known after a prefault; tensor NULL: there is none. */
struct dmk_scale_top {
    uint8_t scale;
    const char *path, *tensor;
    uint64_t expert, row;
};

struct dmk_weights {
    struct dmk_shape shape;
    enum dmk_expert_format expert_format;
    const uint16_t *embedding;        /* [vocab][H] bf16 */
    const uint16_t *final_norm;       /* [H] */
    const uint16_t *unembedding;      /* [vocab][H] */
    struct dmk_layer_weights *layers; /* [n_layers] */
    uint64_t total_bytes;
    struct dmk_checkpoint *checkpoint; /* owns the mappings */
    struct dmk_cut_weights
        *cut; /* of a converted folder, else NULL; layers and unembedding are NULL then */
    struct dmk_scale_top top_scale;
    struct dmk_weights_block *owned; /* copies: BF16 experts turned around, odd addresses */
};

struct dmk_weights_conf {
    const char *dir;
    /* Read everything at once with several threads, reporting progress. Refuses scales of 255, and files of a
     * converted folder whose checksum is not the manifest's. */
    bool prefault;
    bool no_verify; /* no checksums then */
    bool no_head;   /* and not the head, where it has a file of its own */
    const struct dmk_layout
        *layout; /* of the caller, or NULL: a folder converted for another one is refused */
    bool
        raw; /* pointers are addresses in the files and nothing else: no copies, BF16 experts as they lie */
    void (*on_progress)(void *ud, uint64_t done_bytes, uint64_t total_bytes);
    void *ud;
};

/* What one rank computes with. Tensors that all ranks share are whole; of the others these are the rank's own
 * rows (q, k, v, sinks, head), columns (o_w, whose o_stride is set) and experts. */
struct dmk_rank_weights {
    const uint16_t *embedding;        /* [vocab][H] */
    const uint16_t *final_norm;       /* [H] */
    const uint16_t *unembedding;      /* [shard.n_vocab][H], or NULL */
    struct dmk_dense_fp8 head8;       /* of unembedding, as in layers */
    struct dmk_layer_weights *layers; /* [n_layers]; NULL where the weights are random */
};

/* Opens a converted folder (manifest.json), or one in the Hugging Face layout, or in the `original/` layout (given itself, or found
 * as a subfolder when there is no index beside it). Checks every name, dtype, shape and range; on
 * failure reterr names file, tensor and cause. */
int dmk_weights_open(const struct dmk_weights_conf *conf, struct dmk_weights **ret,
                     struct dmk_error *reterr);
void dmk_weights_close(struct dmk_weights **weights);
/* What they take on a host: of files that are mapped, and copies. */
uint64_t dmk_weights_bytes(const struct dmk_weights *weights);

/* The pointers live as long as the weights; the array of layers is given back by _release. */
int dmk_weights_of_rank(const struct dmk_weights *weights, struct dmk_layout layout, uint32_t rank,
                        struct dmk_rank_weights *ret_rank, struct dmk_error *reterr);
void dmk_weights_rank_release(struct dmk_rank_weights *rank);

/* For hosts: a rank's FP8 experts as BF16, which holds the same numbers, in memory that the weights own. */
int dmk_weights_expand_rank(struct dmk_weights *weights, struct dmk_rank_weights *rank,
                            uint32_t n_experts, struct dmk_error *reterr);

/* A rank's dense matrices (q, k, v, o, and the head if asked for) as FP8, in memory that the weights own; refuses
 * numbers that are not finite. */
int dmk_weights_dense_rank(struct dmk_weights *weights, struct dmk_layout layout, uint32_t rank,
                           bool head, struct dmk_rank_weights *ret_rank, struct dmk_error *reterr);

struct dmk_id128;
/* Reads weights by their address; 0 or negative. */
typedef int dmk_weights_read_fn(const void *ud, const void *address, uint64_t n_bytes, void *dst);
/* A hash over the dimensions and samples of all tensors. read may be NULL: memory is read. The
 * weights are not random; those of a converted folder have the id of the checkpoint that it was made from. */
int dmk_weights_model_id(const struct dmk_weights *weights, dmk_weights_read_fn *read,
                         const void *ud, struct dmk_id128 *ret_id);

/* The refusal of an MXFP4 scale: 255, or above what the device's product can multiply by. */
int dmk_scale_refused(const char *path, const char *tensor, uint64_t expert, uint64_t row,
                      unsigned scale, struct dmk_error *reterr);
