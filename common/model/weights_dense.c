/* Dense weights as FP8, made of BF16 when an engine opens: codes, and a scale for each block of 128 x 128 of the
 * whole model's matrix (kernels/fp8.h), so that a rank's share has the same numbers in every layout. Rows of a block
 * that are another rank's are read for its scale, from the files of that rank where a folder was converted. Into
 * memory that the weights own, half the size of what it stands for. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/model/cut_weights.h"
#include "common/model/weights_internal.h"
#include "kernels/fp8.h"

#define MAX_PARTS    8 /* ranks that rows lie with */
#define PER_LAYER    4
#define SCALE_BLOCKS (DMK_FP8_BLOCK / DMK_FP8_SCALE_ROWS)

/* A matrix [n_rows][n_slices * k] of the model in parts of rows, and the share of it that shall become FP8. */
struct matrix {
    const uint16_t *part[MAX_PARTS];
    uint32_t begin[MAX_PARTS + 1]; /* rows where parts begin, then n_rows to the end */
    uint64_t stride;
    uint32_t n_slices, k;
    uint32_t first, n; /* the share */
    uint8_t *codes;
    float *scales;
    uint32_t layer;
    const char *name;
    atomic_bool not_finite;
};

struct job {
    struct matrix *m;
    uint32_t row; /* of a block */
};

static const uint16_t *row_of(const struct matrix *m, uint32_t row)
{
    uint32_t p = 0;

    while (row >= m->begin[p + 1]) {
        p++;
    }
    return m->part[p] + (row - m->begin[p]) * m->stride;
}

/* n columns from col on of the rows [row, end), of which those of the share become codes under the block's scale. */
static float make_block(struct matrix *m, uint32_t row, uint32_t end, uint32_t col, uint32_t n)
{
    const uint32_t own_end = m->first + m->n;
    uint16_t top = 0;
    float scale, inverse;

    for (uint32_t r = row; r < end; r++) {
        const uint16_t *x = row_of(m, r) + col;

        for (uint32_t c = 0; c < n; c++) {
            const uint16_t magnitude = x[c] & 0x7fff;

            top = magnitude > top ? magnitude : top;
        }
    }
    if (top >= 0x7f80) {
        atomic_store(&m->not_finite, true);
        return 1.0f;
    }
    scale = dmk_fp8_weight_scale(dmk_bf16_to_f32(top));
    inverse = 1.0f / scale;
    for (uint32_t r = row > m->first ? row : m->first; r < end && r < own_end; r++) {
        const uint16_t *x = row_of(m, r) + col;
        uint8_t *codes = m->codes + (uint64_t)(r - m->first) * m->k * m->n_slices + col;

        for (uint32_t c = 0; c < n; c++) {
            codes[c] = dmk_f32_to_e4m3(dmk_bf16_to_f32(x[c]) * inverse);
        }
    }
    return scale;
}

static void make_rows(const void *jobs, uint32_t i)
{
    const struct job *job = (const struct job *)jobs + i;
    struct matrix *m = job->m;
    const uint32_t n_groups = dmk_fp8_groups(m->k), n_rows = m->begin[MAX_PARTS];
    const uint32_t end = job->row + DMK_FP8_BLOCK < n_rows ? job->row + DMK_FP8_BLOCK : n_rows;
    const uint32_t low = m->first / DMK_FP8_SCALE_ROWS,
                   high = (m->first + m->n - 1) / DMK_FP8_SCALE_ROWS;

    for (uint32_t g = 0; g < n_groups * m->n_slices; g++) {
        const uint32_t at = g % n_groups * DMK_FP8_BLOCK;
        const uint32_t n = m->k - at < DMK_FP8_BLOCK ? m->k - at : DMK_FP8_BLOCK;
        const float scale = make_block(m, job->row, end, g / n_groups * m->k + at, n);

        for (uint32_t b = 0; b < SCALE_BLOCKS; b++) {
            const uint32_t to = job->row / DMK_FP8_SCALE_ROWS + b;

            if (to >= low && to <= high) {
                m->scales[(uint64_t)(to - low) * n_groups * m->n_slices + g] = scale;
            }
        }
    }
}

/* Memory for the share; ret says where it is. */
static int take_room(struct dmk_weights *w, struct matrix *m, struct dmk_dense_fp8 *ret)
{
    const uint64_t groups = (uint64_t)dmk_fp8_groups(m->k) * m->n_slices;
    const uint64_t n_high = (m->first + m->n - 1) / DMK_FP8_SCALE_ROWS + 1;

    if (m->n == 0) {
        return 0;
    }
    m->codes = dmk_weights_own(w, (uint64_t)m->n * m->k * m->n_slices);
    m->scales = dmk_weights_own(w, (n_high - m->first / DMK_FP8_SCALE_ROWS) * groups *
                                       sizeof(m->scales[0]));
    if (!m->codes || !m->scales) {
        return -DMK_ENOMEM;
    }
    *ret = (struct dmk_dense_fp8){m->codes, m->scales};
    return 0;
}

enum what { WHAT_Q, WHAT_K, WHAT_V, WHAT_HEAD };

static const uint16_t *pick(const struct dmk_layer_weights *l, enum what what)
{
    return what == WHAT_Q ? l->q_w : what == WHAT_K ? l->k_w : l->v_w;
}

/* Rows that ranks share, [begin, end) of them tp index i's. */
static void row_range(const struct dmk_weights *w, struct dmk_layout layout, enum what what,
                      uint32_t i, uint32_t *ret_begin, uint32_t *ret_end)
{
    const struct dmk_shape *s = &w->shape;
    const struct dmk_shard shard = dmk_layout_shard(s, layout, i);
    const uint32_t heads = what == WHAT_Q ? s->n_heads / s->n_kv_heads : 1;

    *ret_begin = what == WHAT_HEAD ? shard.vocab_first : shard.kv_head_first * heads * DMK_HEAD_DIM;
    *ret_end =
        *ret_begin + (what == WHAT_HEAD ? shard.n_vocab : shard.n_kv_heads * heads * DMK_HEAD_DIM);
}

static struct matrix rows_matrix(const struct dmk_weights *w, struct dmk_layout layout,
                                 uint32_t rank, uint32_t layer, enum what what)
{
    static const char *const names[] = {[WHAT_Q] = "self_attn.q_proj.weight",
                                        [WHAT_K] = "self_attn.k_proj.weight",
                                        [WHAT_V] = "self_attn.v_proj.weight",
                                        [WHAT_HEAD] = "lm_head.weight"};
    struct matrix m = {.stride = w->shape.hidden,
                       .n_slices = 1,
                       .k = w->shape.hidden,
                       .layer = layer,
                       .name = names[what]};
    uint32_t n_parts = 0, end = 0;

    dmk_assert(layout.tp <= MAX_PARTS); /* as dmk_layout_check has seen */
    for (uint32_t i = 0; i < layout.tp; i++) {
        uint32_t begin;

        row_range(w, layout, what, i, &begin, &end);
        if (i == rank % layout.tp) {
            m.first = begin;
            m.n = end - begin;
        }
        if (w->cut && end > begin) {
            const struct dmk_rank_weights *r = &w->cut->ranks[i];

            m.begin[n_parts] = begin;
            m.part[n_parts++] = what == WHAT_HEAD ? r->unembedding : pick(&r->layers[layer], what);
        }
    }
    if (!w->cut) {
        m.part[n_parts++] = what == WHAT_HEAD ? w->unembedding : pick(&w->layers[layer], what);
    }
    for (uint32_t i = n_parts; i <= MAX_PARTS; i++) {
        m.begin[i] = end;
    }
    return m;
}

/* The rank's columns, slices of a KV head each. */
static struct matrix o_matrix(const struct dmk_weights *w, struct dmk_layout layout, uint32_t rank,
                              const struct dmk_layer_weights *l, uint32_t layer)
{
    const struct dmk_shape *s = &w->shape;
    struct matrix m = {.part = {l->o_w},
                       .n_slices = dmk_layout_shard(s, layout, rank).n_kv_heads,
                       .k = s->n_heads / s->n_kv_heads * DMK_HEAD_DIM,
                       .n = s->hidden,
                       .layer = layer,
                       .name = "self_attn.o_proj.weight"};

    m.stride = l->o_stride ? l->o_stride : (uint64_t)m.n_slices * m.k;
    for (uint32_t i = 1; i <= MAX_PARTS; i++) {
        m.begin[i] = s->hidden;
    }
    return m;
}

/* Blocks that the share has rows of. */
static uint32_t add_jobs(struct matrix *m, struct job *jobs)
{
    uint32_t n = 0;

    if (m->n == 0) {
        return 0;
    }
    for (uint32_t row = m->first / DMK_FP8_BLOCK * DMK_FP8_BLOCK; row < m->first + m->n;
         row += DMK_FP8_BLOCK) {
        if (jobs) {
            jobs[n] = (struct job){m, row};
        }
        n++;
    }
    return n;
}

/* The tables of a rank: matrices in the order of their layers, the head last. */
static int plan(struct dmk_weights *w, struct dmk_layout layout, uint32_t rank, bool head,
                struct dmk_rank_weights *r, struct matrix *m)
{
    int status = 0;

    for (uint32_t i = 0; i < w->shape.n_layers && status == 0; i++) {
        struct dmk_layer_weights *l = &r->layers[i];
        struct dmk_dense_fp8 *const to[] = {&l->q8, &l->k8, &l->v8, &l->o8};

        for (uint32_t k = 0; k < PER_LAYER && status == 0; k++, m++) {
            *m = k < 3 ? rows_matrix(w, layout, rank, i, (enum what)k)
                       : o_matrix(w, layout, rank, l, i);
            status = take_room(w, m, to[k]);
        }
    }
    if (head && status == 0) {
        *m = rows_matrix(w, layout, rank, 0, WHAT_HEAD);
        status = take_room(w, m, &r->head8);
    }
    return status;
}

static int check_finite(const struct matrix *m, uint32_t n, struct dmk_error *reterr)
{
    for (uint32_t i = 0; i < n; i++) {
        if (atomic_load(&m[i].not_finite)) {
            char layer[32] = "";

            if (i / PER_LAYER == m[i].layer) {
                (void)snprintf(layer, sizeof(layer), "model.layers.%u.", m[i].layer);
            }
            return dmk_error_set(
                reterr, -DMK_EFORMAT,
                "tensor \"%s%s\" holds a number that is not finite, of which dense weights in FP8 "
                "can not be made: use dense 'checkpoint'",
                layer, m[i].name);
        }
    }
    return 0;
}

int dmk_weights_dense_rank(struct dmk_weights *w, struct dmk_layout layout, uint32_t rank,
                           bool head, struct dmk_rank_weights *r, struct dmk_error *reterr)
{
    const uint32_t n = w->shape.n_layers * PER_LAYER + head;
    struct matrix *matrices = calloc(n, sizeof(matrices[0]));
    struct job *jobs = NULL;
    uint32_t n_jobs = 0;
    int status = matrices ? plan(w, layout, rank, head, r, matrices) : -DMK_ENOMEM;

    for (uint32_t i = 0; i < n && status == 0; i++) {
        n_jobs += add_jobs(&matrices[i], NULL);
    }
    jobs = status == 0 ? calloc(n_jobs ? n_jobs : 1, sizeof(jobs[0])) : NULL;
    if (!jobs) {
        free(matrices);
        return dmk_error_set(reterr, -DMK_ENOMEM,
                             "no memory to make the dense weights of %u layers FP8",
                             w->shape.n_layers);
    }
    n_jobs = 0;
    for (uint32_t i = 0; i < n; i++) {
        n_jobs += add_jobs(&matrices[i], jobs + n_jobs);
    }
    dmk_weights_parallel(make_rows, jobs, n_jobs);
    status = check_finite(matrices, n, reterr);
    free(jobs);
    free(matrices);
    return status;
}
