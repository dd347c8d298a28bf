/* The operations of the forward pass: what each one computes, to the bit.
 *
 * Each operation takes one const struct of arguments, with every shape in a comment, and a stream (where
 * it runs). `struct dmk_kernels` is the table of them. dmk_kernels_ref fills it with the plain C that
 * defines the results; dmk_kernels_cpu overwrites entries with what this processor runs fastest. All
 * host implementations give the same bits, and a row's result does not depend on the other rows of the
 * call (see kernels/numeric.h for the order of sums). Nothing here allocates, waits or fails.
 * dmk_kernels_cuda (kernels/cuda/stream.h) fills it with device operations: they agree with the plain ones
 * within the tolerance that tests/check states for each, keep a row's result free of its company too, and
 * have the fused entries, which are NULL in the host's tables.
 *
 * A call without rows (n_rows, n_tiles 0) does nothing; moe_group then leaves every expert without slots.
 *
 * Shapes are row-major; a `stride` counts elements from row to row. Pointers need the alignment of their
 * element only. T stands for token rows of the step, H for the hidden size, I for the intermediate size,
 * G for query heads per KV head. Head and expert counts are those of the calling rank. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DMK_KERNEL_HEAD_DIM 64
#define DMK_KERNEL_PAGE     64 /* tokens of a KV page; attention sums keys in blocks of this size */
#define DMK_MAX_TOPK        8  /* experts per token */
#define DMK_MAX_SOURCES     8  /* ranks whose memory an operation of a device reads */
#define DMK_ATTN_TILE       16 /* query tokens of one attention tile, on the host */
#define DMK_ATTN_TILE_WIDE  24 /* ... on a device */
#define DMK_ATTN_SPLIT      512 /* fewest keys of a piece of a row on a device: dmk_attn_split_keys */
#define DMK_NONE            UINT32_MAX

/* Where an operation runs. On the host: a team of threads, and the call returns when the work is done.
 * Items are taken in order by whichever thread is free; thread numbers the scratch memory. */
struct dmk_stream;
typedef void dmk_task_fn(const void *args, uint32_t item, void *scratch);
struct dmk_stream {
    uint32_t n_threads;
    size_t scratch_bytes; /* per thread, 64-byte aligned; >= dmk_kernels_scratch_bytes */
    void (*run)(struct dmk_stream *stream, dmk_task_fn *fn, const void *args, uint32_t n_items);
};

/* x[t] = table[ids[t]] */
struct dmk_embed_args {
    const uint16_t *table; /* [vocab][hidden] bf16 */
    const uint32_t *ids;   /* [n_rows] */
    uint16_t *x;           /* [n_rows][hidden] bf16 */
    uint32_t n_rows, hidden;
};

/* r = 1 / sqrt(sum(x*x) / hidden + eps), the sum in 16 lanes; y = bf16((x * r) * scale) */
struct dmk_rmsnorm_args {
    const uint16_t *x;     /* [*][hidden] bf16 */
    const uint32_t *rows;  /* [n_rows] rows of x to take, or NULL: row i is i */
    const uint16_t *scale; /* [hidden] bf16 */
    uint16_t *y;           /* [n_rows][hidden] bf16 */
    uint32_t n_rows, hidden;
    float eps;
};

/* y[t][n] = tree over slices s of dot(w[n][s*k ..], x[t][s*k ..]), then + bias[n] when there is one.
 * The tree adds neighbours: n_slices is 1, 2, 4 or 8. Exactly one of y_bf16 and y_f32 is set. */
struct dmk_linear_args {
    const uint16_t *w;    /* [n_out][w_stride] bf16 */
    const uint16_t *bias; /* [n_out] bf16, or NULL */
    const uint16_t *x;    /* [n_rows][x_stride] bf16 */
    uint16_t *y_bf16;     /* [n_rows][y_stride] */
    float *y_f32;         /* [n_rows][y_stride] */
    uint64_t w_stride, x_stride, y_stride;
    uint32_t n_rows, n_out, k, n_slices;
    uint32_t
        n_whole; /* outputs of the weight over all ranks, 0: n_out; a device cuts its sums by it */
    bool leaf;   /* a device must not cut a slice's sum, not even that of the only one */
};

/* The same product in FP8 (kernels/fp8.h): row n of w and block b of 128 columns of slice s share the scale
 * w_scales[(first + n) / 64][s * n_groups + b], n_groups = ceil(k / 128); rows of x become E4M3 with a scale for each of
 * these groups. dot: in each group lanes take products of codes, and go on as lane * (w scale * x scale), fused,
 * into the lanes of the slice, which begin at +0; those are halved at the end. What is not finite makes a row NaN. */
struct dmk_linear_fp8_args {
    const uint8_t *w; /* [n_out][w_stride] E4M3, none NaN */
    const float *w_scales;
    const uint16_t *bias, *x; /* as in dmk_linear_args, also what follows */
    uint16_t *y_bf16;
    float *y_f32;
    uint64_t w_stride, x_stride, y_stride;
    uint32_t n_rows, n_out, k, n_slices, n_whole;
    uint32_t first; /* below 64: rows of w's first 64 that are another rank's */
    bool leaf;
    uint8_t *x_codes; /* [n_rows][k * n_slices], working memory */
    float *x_scales;  /* [n_rows][n_slices * n_groups], the same, in any order */
};

/* In place, pairs (i, i+32): a' = bf16(a*cos - b*sin), b' = bf16(b*cos + a*sin), each product rounded. */
struct dmk_rope_args {
    uint16_t *x;               /* [n_rows][n_heads][64] bf16 */
    const uint32_t *positions; /* [n_rows] */
    const float *table;        /* [positions][32][2]: cos, sin, both times the concentration */
    uint32_t n_rows, n_heads;
};

/* Writes a step's keys and values of one layer into its pages. */
struct dmk_kv_write_args {
    const uint16_t *k, *v;    /* [n_rows][n_heads][64] bf16, keys after RoPE */
    const uint32_t *row_page; /* [n_rows] page id, DMK_NONE: the row is not kept */
    const uint32_t *row_slot; /* [n_rows] token inside the page */
    uint8_t *pages;           /* [n_heads][n_pages][page_bytes]: K[64][64], then V[64][64], bf16 */
    uint32_t n_rows, n_heads, n_pages, page_bytes;
    uint64_t stride; /* of k and v; 0: packed. Hosts have packed rows. */
};

/* One sequence's rows in an attention call. Block b of its keys (positions 64b .. 64b+63) lies in page
 * ring[b % n_ring] of a sliding layer, page_ids[first_page + b] of a full one. */
struct dmk_attn_seq {
    uint32_t row, n_tokens; /* its rows are row .. row + n_tokens - 1 */
    uint32_t pos;           /* position of the first */
    uint32_t first_page;
    uint32_t ring[4];
    uint32_t n_ring;
};

/* A piece of the work: n_tokens <= DMK_ATTN_TILE rows of one sequence, or dmk_attn_tile_tokens (kernels/attn_cut.h) on a device. */
struct dmk_attn_tile {
    uint32_t seq;
    uint32_t first, n_tokens; /* relative to the sequence's first row */
};

/* A piece of a decode row's keys: positions dmk_attn_split_keys * index and following. How a row is cut depends on
 * its own position only. */
struct dmk_attn_split {
    uint32_t seq, index;
};

/* Attention with a sink, for each query head of each row at position p:
 *   visible keys: p - window + 1 .. p, or all up to p when window is 0.
 *   m = sink, l = 1, acc = 0; then for each block of 64 positions that has a visible key, ascending:
 *     s_j = 0.125 * (sum over d ascending, fused multiply-adds from +0)
 *     m' = max(m, s_j);  c = exp(m - m');  p_j = exp(s_j - m') (0 where not visible)
 *     l = l * c + (p summed over the block: 16 lanes, lane j % 16 takes its four ascending)
 *     acc_d = acc_d * c, then fused += p_j * v_j[d] over visible j ascending
 *   out_d = bf16(acc_d / l)
 * Keys come from the pages; those at or after seq.pos come from k and v instead where fresh is set
 * (sliding layers, whose ring can not hold a whole chunk). What a page holds behind the sequence may be anything;
 * what it holds before the window, in the block where that begins, are keys of the sequence. */
struct dmk_attn_args {
    const uint16_t *q;     /* [n_rows][n_kv_heads][G][64] bf16, after RoPE */
    const uint16_t *k, *v; /* [n_rows][n_kv_heads][64] bf16, the step's own; read when fresh */
    const uint8_t *pages;  /* [n_kv_heads][n_pages][page_bytes] of this layer */
    const uint32_t *page_ids;
    const struct dmk_attn_seq *seqs;   /* [n_seqs] */
    const struct dmk_attn_tile *tiles; /* [n_tiles], every row of every sequence once */
    const uint16_t *sinks;             /* [n_kv_heads][G] bf16 */
    uint16_t *out;                     /* [n_rows][n_kv_heads][G][64] bf16 */
    uint32_t n_seqs, n_tiles, n_kv_heads, group, n_pages, page_bytes;
    uint32_t n_rows; /* of q, k and v; read by devices */
    uint32_t window; /* 0: full attention */
    bool fresh;
    /* For devices; hosts have packed rows and walk the tiles. */
    uint64_t q_stride, kv_stride; /* of q, and of k and v; 0: packed */
    /* Not NULL: tiles cover the sequences of several tokens only, and splits the rows of the others, the pieces
     * of a row one after the other (on sliding layers such a row is one piece, and splits is not looked at). A
     * sequence without tokens pads a batch bucket. Counts are read on the device, since a captured graph runs
     * with other ones. */
    const struct dmk_attn_split *splits; /* [*n_splits] */
    const uint32_t *n_splits;            /* device memory; at most max_splits */
    uint32_t max_splits;
};

/* The k largest of each row, equal values by lowest index first; weights = softmax over them in fp32
 * (sum in that order), rounded to bf16. */
struct dmk_topk_args {
    const uint16_t *scores; /* [n_rows][n_experts] bf16 */
    uint32_t *ids;          /* [n_rows][k] */
    float *weights;         /* [n_rows][k] bf16 values */
    uint32_t n_rows, n_experts, k;
};

/* Which rows go to which of a rank's experts. A slot is one (row, expert) pair; slots are ordered by
 * expert, then by row. */
struct dmk_moe_plan {
    uint32_t *expert_begin; /* [n_experts + 1] first slot of each local expert */
    uint32_t *slot_row;     /* [n_rows * k] */
    float *slot_weight;     /* [n_rows * k] */
    uint32_t *row_slots;    /* [n_rows][k] the row's slots by ascending expert, then DMK_NONE */
    uint32_t
        *slot_group;  /* [n_rows * k] local group: (expert - expert_first) / experts_per_group */
    uint32_t *row_at; /* [n_experts] working memory */
};

struct dmk_moe_group_args {
    const uint32_t *ids;  /* [n_rows][k] over the whole model's experts */
    const float *weights; /* [n_rows][k] */
    struct dmk_moe_plan plan;
    uint32_t n_rows, k;
    uint32_t expert_first, n_experts, experts_per_group;
    const uint32_t *n_live; /* NULL, or in device memory: rows from *n_live on go to no expert */
};

enum dmk_weight_format {
    DMK_WEIGHT_BF16,
    DMK_WEIGHT_MXFP4,
    DMK_WEIGHT_FP8, /* a device's own: MXFP4 in memory, E4M3 with a scale a block of 128 x 128 in products */
};

/* A matrix for each local expert, rows of K = cols. */
struct dmk_expert_weights {
    enum dmk_weight_format format;
    bool packed;           /* blocks and scales lie as moe_pack of this table left them */
    const uint8_t *blocks; /* MXFP4 [n_experts][rows][cols/32][16]; bf16 [n_experts][rows][cols] */
    const uint8_t *scales; /* MXFP4 [n_experts][rows][cols/32] UE8M0 */
    const uint16_t *bias;  /* [n_experts][rows] bf16 */
    uint32_t rows, cols;
};

/* h = dot + bias in fp32 (rows 2j gate, 2j+1 up); a = min(gate, limit), u = clamp(up, -limit, limit);
 * z = bf16((a * sigmoid(alpha * a)) * (u + 1)) */
struct dmk_moe_gate_up_args {
    struct dmk_expert_weights w; /* rows 2I, cols H */
    const uint16_t *x;           /* [n_rows][H] bf16 */
    struct dmk_moe_plan plan;
    uint16_t *z; /* [slots][I] bf16 */
    uint32_t n_experts;
    float alpha, limit;
    uint32_t
        n_rows; /* rows of x; devices choose by it between kernels for few and for many tokens */
};

/* y = dot + bias, fp32 */
struct dmk_moe_down_args {
    struct dmk_expert_weights w; /* rows H, cols I */
    const uint16_t *z;           /* [slots][I] bf16 */
    struct dmk_moe_plan plan;
    float *y; /* [slots][H] */
    uint32_t n_experts;
    uint32_t n_rows; /* as in gate_up; there are n_rows * experts per token slots at most */
};

/* Per row: group sums start at +0 and take weight * y fused, by ascending expert; then the tree over the
 * rank's n_groups (1, 2, 4 or 8) groups adds neighbours, empty ones too. */
struct dmk_moe_combine_args {
    const float *y; /* [slots][hidden] */
    struct dmk_moe_plan plan;
    float *out; /* [n_rows][hidden] */
    uint32_t n_rows, k, hidden, n_groups;
};

/* x = bf16(x + bf16(sum + bias)), bias NULL: nothing is added */
struct dmk_residual_args {
    uint16_t *x;          /* [n_rows][hidden] bf16 */
    const float *sum;     /* [n_rows][hidden] */
    const uint16_t *bias; /* [hidden] bf16, or NULL */
    uint32_t n_rows, hidden;
};

#include "kernels/fused.h"

struct dmk_kernels {
    const char *name; /* "ref", "avx2", "avx512", "cuda" */
    void (*embed)(const struct dmk_embed_args *args, struct dmk_stream *stream);
    void (*rmsnorm)(const struct dmk_rmsnorm_args *args, struct dmk_stream *stream);
    void (*linear)(const struct dmk_linear_args *args, struct dmk_stream *stream);
    void (*linear_fp8)(const struct dmk_linear_fp8_args *args, struct dmk_stream *stream);
    void (*rope)(const struct dmk_rope_args *args, struct dmk_stream *stream);
    void (*kv_write)(const struct dmk_kv_write_args *args, struct dmk_stream *stream);
    void (*attn)(const struct dmk_attn_args *args, struct dmk_stream *stream);
    void (*topk)(const struct dmk_topk_args *args, struct dmk_stream *stream);
    void (*moe_group)(const struct dmk_moe_group_args *args, struct dmk_stream *stream);
    void (*moe_gate_up)(const struct dmk_moe_gate_up_args *args, struct dmk_stream *stream);
    void (*moe_down)(const struct dmk_moe_down_args *args, struct dmk_stream *stream);
    void (*moe_combine)(const struct dmk_moe_combine_args *args, struct dmk_stream *stream);
    void (*residual)(const struct dmk_residual_args *args, struct dmk_stream *stream);
    void (*page_gather)(const struct dmk_page_move_args *args, struct dmk_stream *stream);
    void (*page_scatter)(const struct dmk_page_move_args *args, struct dmk_stream *stream);
    /* All of these, or none. */
    void (*add_norm)(const struct dmk_add_norm_args *args, struct dmk_stream *stream);
    void (*combine_norm)(const struct dmk_combine_norm_args *args, struct dmk_stream *stream);
    void (*route)(const struct dmk_route_args *args, struct dmk_stream *stream);
    void (*gather)(const struct dmk_gather_args *args, struct dmk_stream *stream);
    void (*rope_write)(const struct dmk_rope_write_args *args, struct dmk_stream *stream);
    void (*page_copy)(const struct dmk_page_copy_args *args, struct dmk_stream *stream);
    void (*sample)(const struct dmk_sample_args *args, struct dmk_stream *stream);
    void (*moe_experts)(const struct dmk_moe_experts_args *args, struct dmk_stream *stream);
    /* Both or none; w describes the checkpoint's matrix (or asks for FP8, see dmk_moe_pack_args), the size
     * that it will take comes back; blocks 0: it can not be packed. */
    struct dmk_moe_packed (*moe_packed)(const struct dmk_expert_weights *w, uint32_t n_experts,
                                        bool gate_up);
    void (*moe_pack)(const struct dmk_moe_pack_args *args, struct dmk_stream *stream);
};

/* Bytes of scratch a thread needs for matrices of up to max_k columns. */
size_t dmk_kernels_scratch_bytes(uint32_t max_k);

/* The plain ones. */
void dmk_kernels_ref(struct dmk_kernels *ret_kernels);

/* The fastest ones for this processor. */
void dmk_kernels_cpu(struct dmk_kernels *ret_kernels);

/* Overwrites the entries that the named set ("avx2", "avx512") has; false, and nothing is touched, when
 * it is not built or this processor lacks the instructions. For tests and benches. */
bool dmk_kernels_cpu_variant(const char *name, struct dmk_kernels *kernels);
