/* Kernels of the device that is none: each entry queues a function that calls the host's kernels when it runs. What
 * devices have more of (strides, rows that hold queries, keys and values, sums of several ranks) is unpacked first. */
#include "tests/unit/model/fake_kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "kernels/dtype.h"

#define D DMK_KERNEL_HEAD_DIM

/* The host's, which have the bits of the plain ones. */
static const struct dmk_kernels *host(void)
{
    static struct dmk_kernels kernels;
    if (!kernels.name) {
        dmk_kernels_cpu(&kernels);
    }
    return &kernels;
}

static void run_here(struct dmk_stream *stream, dmk_task_fn *fn, const void *args, uint32_t n_items)
{
    static _Alignas(64) uint8_t scratch[1 << 20];
    dmk_assert(stream->scratch_bytes <= sizeof(scratch));
    for (uint32_t i = 0; i < n_items; i++) {
        fn(args, i, scratch);
    }
}

static struct dmk_stream *here(void)
{
    static struct dmk_stream stream = {.n_threads = 1, .run = run_here};
    stream.scratch_bytes = dmk_kernels_scratch_bytes(1024);
    return &stream;
}

static void *new_room(size_t bytes)
{
    void *room = calloc(1, bytes ? bytes : 1);
    dmk_assert(room);
    return room;
}

/* [n_rows][width] out of rows of stride. */
static uint16_t *packed(const uint16_t *x, uint32_t n_rows, size_t width, uint64_t stride)
{
    uint16_t *to = new_room(n_rows * width * sizeof(*to));
    for (uint32_t t = 0; t < n_rows; t++) {
        memcpy(to + t * width, x + t * stride, width * sizeof(*to));
    }
    return to;
}

static void run_embed(const void *args)
{
    host()->embed(args, here());
}

static void run_rmsnorm(const void *args)
{
    host()->rmsnorm(args, here());
}

static void run_linear(const void *args)
{
    host()->linear(args, here());
}

static void run_linear_fp8(const void *args)
{
    host()->linear_fp8(args, here());
}

static void run_topk(const void *args)
{
    host()->topk(args, here());
}

static void run_moe_group(const void *args)
{
    host()->moe_group(args, here());
}

static void run_gate_up(const void *args)
{
    host()->moe_gate_up(args, here());
}

static void run_down(const void *args)
{
    host()->moe_down(args, here());
}

static void run_combine(const void *args)
{
    host()->moe_combine(args, here());
}

static void run_add_norm(const void *args)
{
    const struct dmk_add_norm_args *a = args;
    const size_t n = (size_t)a->n_rows * a->hidden;
    float *sum = new_room(n * sizeof(*sum));
    for (size_t i = 0; a->whole && i < n; i++) {
        sum[i] = dmk_bf16_to_f32(a->whole[i]);
    }
    for (size_t i = 0; !a->whole && i < n; i++) {
        float leaf[DMK_MAX_SOURCES] = {0};
        for (uint32_t r = 0; r < a->n_ranks; r++) {
            leaf[r] = a->sum[r][i];
        }
        for (uint32_t width = a->n_ranks; width > 1; width /= 2) {
            for (uint32_t r = 0; r < width / 2; r++) {
                leaf[r] = leaf[2 * r] + leaf[2 * r + 1];
            }
        }
        sum[i] = leaf[0];
    }
    host()->residual(
        &(struct dmk_residual_args){a->x, sum, a->whole ? NULL : a->bias, a->n_rows, a->hidden},
        here());
    if (a->scale) {
        host()->rmsnorm(
            &(struct dmk_rmsnorm_args){a->x, NULL, a->scale, a->y, a->n_rows, a->hidden, a->eps},
            here());
    }
    free(sum);
}

static void run_combine_norm(const void *args)
{
    const struct dmk_combine_norm_args *a = args;
    struct dmk_moe_combine_args combine = a->combine;
    float *sum = new_room((size_t)combine.n_rows * combine.hidden * sizeof(*sum));
    combine.out = sum;
    host()->moe_combine(&combine, here());
    run_add_norm(&(struct dmk_add_norm_args){.x = a->x,
                                             .sum = {sum},
                                             .n_ranks = 1,
                                             .scale = a->scale,
                                             .y = a->y,
                                             .n_rows = combine.n_rows,
                                             .hidden = combine.hidden,
                                             .eps = a->eps});
    free(sum);
}

static void run_route(const void *args)
{
    const struct dmk_route_args *a = args;
    host()->topk(&a->topk, here());
    host()->moe_group(&a->group, here());
}

static void run_gather(const void *args)
{
    const struct dmk_gather_args *a = args;
    for (uint32_t row = 0, g = 0; row < a->n_rows; row++) {
        while (g + 1 < a->n_from && row >= a->from[g + 1].first) {
            g++;
        }
        const size_t at = row - a->from[g].first;
        const bool live = at < *a->from[g].n_live;
        bool ours = false;
        for (uint32_t i = 0; i < a->k; i++) {
            const uint32_t id = live ? a->from[g].ids[at * a->k + i] : DMK_NONE;
            a->ids[(size_t)row * a->k + i] = id;
            a->weights[(size_t)row * a->k + i] = live ? a->from[g].weights[at * a->k + i] : 0.0f;
            ours = ours || id - a->expert_first < a->n_experts;
        }
        if (ours) {
            memcpy(a->x + (size_t)row * a->hidden, a->from[g].x + at * a->hidden,
                   a->hidden * sizeof(*a->x));
        }
    }
}

static void run_kv_write(const void *args)
{
    struct dmk_kv_write_args a = *(const struct dmk_kv_write_args *)args;
    const size_t width = (size_t)a.n_heads * D;
    uint16_t *k = packed(a.k, a.n_rows, width, a.stride ? a.stride : width);
    uint16_t *v = packed(a.v, a.n_rows, width, a.stride ? a.stride : width);
    a.k = k;
    a.v = v;
    host()->kv_write(&a, here());
    free(k);
    free(v);
}

static void run_rope_write(const void *args)
{
    const struct dmk_rope_write_args *a = args;
    const uint32_t n_turned = a->n_q_heads + a->n_kv_heads;
    const size_t width = (size_t)(n_turned + a->n_kv_heads) * D, turned = (size_t)n_turned * D;
    uint16_t *x = packed(a->qkv, a->n_rows, turned, width);
    host()->rope(&(struct dmk_rope_args){x, a->positions, a->table, a->n_rows, n_turned}, here());
    for (uint32_t t = 0; t < a->n_rows; t++) {
        memcpy(a->qkv + t * width, x + t * turned, turned * sizeof(*x));
    }
    free(x);
    if (a->pages) {
        run_kv_write(&(struct dmk_kv_write_args){.k = a->qkv + (size_t)a->n_q_heads * D,
                                                 .v = a->qkv + turned,
                                                 .row_page = a->row_page,
                                                 .row_slot = a->row_slot,
                                                 .pages = a->pages,
                                                 .n_rows = a->n_rows,
                                                 .n_heads = a->n_kv_heads,
                                                 .n_pages = a->n_pages,
                                                 .page_bytes = a->page_bytes,
                                                 .stride = width});
    }
}

static void run_attn(const void *args)
{
    struct dmk_attn_args a = *(const struct dmk_attn_args *)args;
    const size_t q_width = (size_t)a.n_kv_heads * a.group * D, kv_width = (size_t)a.n_kv_heads * D;
    uint16_t *q = packed(a.q, a.n_rows, q_width, a.q_stride);
    uint16_t *k = packed(a.k, a.n_rows, kv_width, a.kv_stride);
    uint16_t *v = packed(a.v, a.n_rows, kv_width, a.kv_stride);
    dmk_assert(!a.splits || *a.n_splits <= a.max_splits);
    struct dmk_attn_tile *tiles = new_room((a.n_rows + a.n_seqs) * sizeof(*tiles));
    a.q = q;
    a.k = k;
    a.v = v;
    a.tiles = tiles;
    a.n_tiles = 0;
    for (uint32_t i = 0; i < a.n_seqs; i++) {
        const uint32_t n = a.seqs[i].n_tokens;
        for (uint32_t t = 0; t < n; t += DMK_ATTN_TILE) {
            tiles[a.n_tiles++] =
                (struct dmk_attn_tile){i, t, n - t < DMK_ATTN_TILE ? n - t : DMK_ATTN_TILE};
        }
    }
    host()->attn(&a, here());
    free(tiles);
    free(q);
    free(k);
    free(v);
}

static void run_page_copy(const void *args)
{
    const struct dmk_page_copy_args *a = args;
    for (uint32_t array = 0; array < a->n_arrays; array++) {
        uint8_t *first = a->pool + (size_t)array * a->n_pages * a->page_bytes;
        for (uint32_t i = 0; i < a->n_pairs; i++) {
            memcpy(first + (size_t)a->pairs[i].dst * a->page_bytes,
                   first + (size_t)a->pairs[i].src * a->page_bytes, a->page_bytes);
        }
    }
}

static void run_page_gather(const void *args)
{
    host()->page_gather(args, here());
}

/* Greedy only. */
static void run_sample(const void *args)
{
    const struct dmk_sample_args *a = args;
    for (uint32_t row = 0; row < a->n_rows; row++) {
        const float *x = a->logits + (size_t)row * a->vocab;
        struct dmk_sample_out out = {.max = x[0], .logit = x[0]};
        dmk_assert(a->rows[row].scale == 0.0f);
        for (uint32_t i = 1; i < a->vocab; i++) {
            if (x[i] > out.max) {
                out.id = i;
                out.max = out.logit = x[i];
            }
        }
        a->out[row] = out;
    }
}

/* Tells the others, and looks whether all have told this one. */
static bool met(const struct dmk_meeting *m)
{
    bool all = true;
    for (uint32_t i = 0; i < m->n; i++) {
        *m->tell[i] = *m->base + m->number;
    }
    for (uint32_t i = 0; i < m->n; i++) {
        all = all && (int32_t)(m->hear[i] - (*m->base + m->number)) >= 0;
    }
    return all;
}

static bool add_norm_met(const void *args)
{
    return met(&((const struct dmk_add_norm_args *)args)->meeting);
}

static bool gather_met(const void *args)
{
    return met(&((const struct dmk_gather_args *)args)->meeting);
}

static void add_norm(const struct dmk_add_norm_args *args, struct dmk_stream *stream)
{
    fake_device_queue(stream, args->n_rows > 0 ? add_norm_met : NULL, run_add_norm, args,
                      sizeof(*args));
}

static void gather(const struct dmk_gather_args *args, struct dmk_stream *stream)
{
    fake_device_queue(stream, args->n_rows > 0 ? gather_met : NULL, run_gather, args,
                      sizeof(*args));
}

#define QUEUED(name, type)                                                                         \
    static void name(const struct type *args, struct dmk_stream *stream)                           \
    {                                                                                              \
        fake_device_queue(stream, NULL, run_##name, args, sizeof(*args));                          \
    }

QUEUED(embed, dmk_embed_args)
QUEUED(rmsnorm, dmk_rmsnorm_args)
QUEUED(linear, dmk_linear_args)
QUEUED(linear_fp8, dmk_linear_fp8_args)
QUEUED(topk, dmk_topk_args)
QUEUED(moe_group, dmk_moe_group_args)
QUEUED(gate_up, dmk_moe_gate_up_args)
QUEUED(down, dmk_moe_down_args)
QUEUED(combine, dmk_moe_combine_args)
QUEUED(combine_norm, dmk_combine_norm_args)
QUEUED(route, dmk_route_args)
QUEUED(kv_write, dmk_kv_write_args)
QUEUED(rope_write, dmk_rope_write_args)
QUEUED(attn, dmk_attn_args)
QUEUED(page_copy, dmk_page_copy_args)
QUEUED(page_gather, dmk_page_move_args)
QUEUED(sample, dmk_sample_args)

void fake_kernels(struct dmk_kernels *ret_kernels)
{
    *ret_kernels = (struct dmk_kernels){
        .name = "fake",
        .embed = embed,
        .rmsnorm = rmsnorm,
        .linear = linear,
        .linear_fp8 = linear_fp8,
        .kv_write = kv_write,
        .attn = attn,
        .topk = topk,
        .moe_group = moe_group,
        .moe_gate_up = gate_up,
        .moe_down = down,
        .moe_combine = combine,
        .add_norm = add_norm,
        .combine_norm = combine_norm,
        .route = route,
        .gather = gather,
        .rope_write = rope_write,
        .page_copy = page_copy,
        .page_gather = page_gather,
        .sample = sample,
    };
}
