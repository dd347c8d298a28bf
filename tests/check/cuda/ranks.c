/* The device engine in every layout beside one rank: the same bits, for random models, lengths, chunks, batches and
 * places. On one device the ranks share it; on several each has its own as far as they go. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "common/base/rng.h"
#include "common/model/engine_internal.h"
#include "tests/check/cuda/device.h"
#include "tests/unit/model/memory.h"

enum { MAX_SEQS = 5, MAX_IDS = 420, N_FULL = 64, N_WINDOW = 24, MAX_ROWS = 400 };

struct seq {
    uint32_t ids[MAX_IDS], n_ids, pos, group, chunk, n_prompt;
    uint32_t pages[MAX_IDS / 64 + 1], ring[4];
};

struct model {
    struct dmk_weights *weights;
    bool fp8, dense8;
    struct seq seqs[MAX_SEQS];
    float *want[MAX_SEQS]; /* [n_ids][vocab] of one rank */
    float *out;            /* [MAX_ROWS][vocab] */
};

static struct dmk_engine *open_engine(const struct model *m, uint32_t tp, uint32_t dp, bool prefill)
{
    const struct dmk_engine_conf conf = {.backend = "cuda",
                                         .layout = {tp, dp},
                                         .prefill = prefill,
                                         .fp8_experts = m->fp8,
                                         .fp8_dense = m->dense8,
                                         .n_full_pages = N_FULL,
                                         .n_window_pages = N_WINDOW,
                                         .max_step_tokens = MAX_ROWS,
                                         .max_step_seqs = MAX_SEQS,
                                         .max_logit_rows = prefill ? 0 : MAX_ROWS};
    struct dmk_engine *engine = NULL;
    struct dmk_error error = {0};
    if (dmk_engine_open_weights(&conf, m->weights, &engine, &error) != 0) {
        printf("FAIL engine of tp %u, dp %u: %s\n", tp, dp, error.text);
        exit(1);
    }
    return engine;
}

static void place(struct seq *s, uint32_t at, uint32_t group)
{
    s->pos = 0;
    s->group = group;
    for (uint32_t i = 0; i < MAX_IDS / 64 + 1; i++) {
        s->pages[i] = at * 7 + 6 - i;
    }
    for (uint32_t i = 0; i < 4; i++) {
        s->ring[i] = at * 4 + i;
    }
}

static struct dmk_step_seq take(struct seq *s, enum dmk_logits logits)
{
    const uint32_t left = s->pos < s->n_prompt ? s->n_prompt - s->pos : 1;
    struct dmk_step_seq part = {.ids = s->ids + s->pos,
                                .n_tokens = left < s->chunk ? left : s->chunk,
                                .pos = s->pos,
                                .full_pages = s->pages,
                                .ring = {s->ring[0], s->ring[1], s->ring[2], s->ring[3]},
                                .n_ring = 3,
                                .logits = logits,
                                .dp = s->group};
    s->pos += part.n_tokens;
    return part;
}

static void run(struct device *d, struct dmk_engine *engine, const struct dmk_step *step)
{
    const int status = dmk_engine_step(engine, step);
    if (status != 0) {
        struct dmk_rank *r = &engine->ranks[0];
        printf("FAIL step: %d, %s\n", status, r->backend->ops->describe(r->backend, r->stream));
        exit(1);
    }
    d->n_checks++;
}

static void same(struct device *d, const float *got, const float *want, size_t n, const char *what,
                 uint32_t seq, uint32_t row)
{
    char how[128];
    for (size_t i = 0; i < n; i++) {
        if (memcmp(&got[i], &want[i], 4) != 0) {
            snprintf(how, sizeof(how), "sequence %u, row %u, logit %zu is %.9g, not %.9g", seq, row,
                     i, (double)got[i], (double)want[i]);
            fail(d, what, how);
            return;
        }
    }
}

/* Steps with a part of each sequence that is not done, until all are. */
static void run_together(struct device *d, struct model *m, struct dmk_engine *engine,
                         const char *what)
{
    const size_t vocab = m->weights->shape.vocab;
    for (;;) {
        struct dmk_step_seq parts[MAX_SEQS];
        uint32_t who[MAX_SEQS], at[MAX_SEQS], n = 0;
        for (uint32_t i = 0; i < MAX_SEQS; i++) {
            if (m->seqs[i].pos < m->seqs[i].n_ids) {
                who[n] = i;
                at[n] = m->seqs[i].pos;
                parts[n++] = take(&m->seqs[i], DMK_LOGITS_ALL);
            }
        }
        if (n == 0) {
            return;
        }
        run(d, engine, &(struct dmk_step){.seqs = parts, .n_seqs = n, .logits = m->out});
        const float *row = m->out;
        for (uint32_t i = 0; i < n; i++) {
            for (uint32_t r = 0; r < parts[i].n_tokens; r++, row += vocab) {
                same(d, row, m->want[who[i]] + (size_t)(at[i] + r) * vocab, vocab, what, who[i],
                     at[i] + r);
            }
        }
    }
}

static void compute_wanted(struct device *d, struct model *m)
{
    struct dmk_engine *one = open_engine(m, 1, 1, false);
    const size_t vocab = m->weights->shape.vocab;
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        struct seq *s = &m->seqs[i];
        s->n_ids = i == 0 ? 400 : 10 + draw_u32(d, 240);
        s->n_prompt = s->n_ids - 4 - draw_u32(d, 6);
        s->chunk = i == 0 ? 100 : 1 + draw_u32(d, 70);
        for (uint32_t k = 0; k < s->n_ids; k++) {
            s->ids[k] = draw_u32(d, (uint32_t)vocab);
        }
        free(m->want[i]);
        m->want[i] = malloc(s->n_ids * vocab * sizeof(float));
        dmk_assert(m->want[i]);
        place(s, i, 0);
        while (s->pos < s->n_ids) {
            float *to = m->want[i] + s->pos * vocab;
            struct dmk_step_seq part = take(s, DMK_LOGITS_ALL);
            run(d, one, &(struct dmk_step){.seqs = &part, .n_seqs = 1, .logits = to});
        }
    }
    dmk_engine_close(&one);
}

static struct model new_model(struct device *d, const struct dmk_shape *shape,
                              enum dmk_expert_format format, bool fp8)
{
    struct model m = {.weights = memory_weights(shape, format, d->seed + 11), .fp8 = fp8};
    m.out = malloc((size_t)MAX_ROWS * shape->vocab * sizeof(float));
    dmk_assert(m.out);
    compute_wanted(d, &m);
    return m;
}

static void free_model(struct model *m)
{
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        free(m->want[i]);
    }
    free(m->out);
    memory_weights_free(m->weights);
}

static void one_layout(struct device *d, struct model *m, uint32_t tp, uint32_t dp,
                       const char *model)
{
    struct dmk_engine *engine = open_engine(m, tp, dp, false);
    uint32_t group = 0, at = 0, before = d->n_failed;
    char what[96];
    snprintf(what, sizeof(what), "%s, tp %u, dp %u", model, tp, dp);
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        const uint32_t next = group + draw_u32(d, dp - group);
        at = next == group ? at : 0;
        group = next;
        place(&m->seqs[i], at++, group);
    }
    run_together(d, m, engine, what);
    const struct dmk_engine_graphs graphs = dmk_engine_graphs(engine);
    printf("ranks   %s: %s, %u graphs in %.2f s\n", what, d->n_failed == before ? "same" : "OTHER",
           graphs.n_graphs, graphs.seconds);
    dmk_engine_close(&engine);
}

static void all_layouts(struct device *d, struct model *m, const char *model)
{
    for (uint32_t tp = 1; tp <= 8; tp *= 2) {
        for (uint32_t dp = 1; tp * dp <= 8; dp *= 2) {
            one_layout(d, m, tp, dp, model);
        }
    }
}

/* Every head of the pages of one engine to the rank of the other that has it. */
static void move_pages(struct device *d, struct dmk_engine *from, struct dmk_engine *to)
{
    for (uint32_t head = 0; head < 8; head++) {
        const struct dmk_kv_mem *a = dmk_engine_kv(from, head * dmk_engine_n_ranks(from) / 8);
        const struct dmk_kv_mem *b = dmk_engine_kv(to, head * dmk_engine_n_ranks(to) / 8);
        const uint32_t ha = head - a->layout.kv_head_first, hb = head - b->layout.kv_head_first;
        const size_t full = (size_t)N_FULL * a->layout.page_bytes,
                     window = (size_t)N_WINDOW * a->layout.page_bytes;
        for (uint32_t l = 0; l < a->layout.n_full_layers; l++) {
            d->be->ops->copy(d->be, d->stream,
                             (uint8_t *)b->full + dmk_kv_full_offset(&b->layout, l, hb, 0),
                             (uint8_t *)a->full + dmk_kv_full_offset(&a->layout, l, ha, 0), full);
        }
        for (uint32_t l = 0; l < a->layout.n_window_layers; l++) {
            d->be->ops->copy(
                d->be, d->stream, (uint8_t *)b->window + dmk_kv_window_offset(&b->layout, l, hb, 0),
                (uint8_t *)a->window + dmk_kv_window_offset(&a->layout, l, ha, 0), window);
        }
    }
    if (d->be->ops->sync(d->be, d->stream) != 0) {
        fail(d, "hand-over", "pages could not be copied");
    }
}

struct watch {
    uint32_t next, cancel_at;
    atomic_bool cancel;
};

static void see_layer(void *ud, uint32_t layer)
{
    struct watch *w = ud;
    w->next = layer == w->next ? layer + 1 : 1000;
    if (layer == w->cancel_at) {
        atomic_store(&w->cancel, true);
    }
}

/* A prompt computed by a ranks, once cancelled on the way and then whole, is decoded by b ranks. */
static void hand_over(struct device *d, struct model *m, uint32_t a, uint32_t b)
{
    struct dmk_engine *p = open_engine(m, a, 1, true), *q = open_engine(m, b, 1, false);
    const size_t vocab = m->weights->shape.vocab;
    const uint32_t n_layers = m->weights->shape.n_layers;
    struct seq *s = &m->seqs[0];
    char what[64];
    snprintf(what, sizeof(what), "prompt of tp %u, decode of tp %u", a, b);
    for (int whole = 0; whole < 2; whole++) {
        struct watch w = {.cancel_at = whole ? 1000 : 0};
        place(s, 2, 0);
        while (s->pos < s->n_prompt) {
            struct dmk_step_seq part = take(s, DMK_LOGITS_NONE);
            struct dmk_step step = {
                .seqs = &part, .n_seqs = 1, .on_layer = see_layer, .ud = &w, .cancel = &w.cancel};
            w.next = 0;
            const int status = dmk_engine_step(p, &step);
            if (whole ? status != 0 || w.next != n_layers : w.next > n_layers) {
                fail(d, what, "layers were not reported in order, or a step failed");
            }
        }
    }
    move_pages(d, p, q);
    while (s->pos < s->n_ids) {
        const uint32_t row = s->pos;
        struct dmk_step_seq part = take(s, DMK_LOGITS_LAST);
        run(d, q, &(struct dmk_step){.seqs = &part, .n_seqs = 1, .logits = m->out});
        same(d, m->out, m->want[0] + row * vocab, vocab, what, 0, row);
    }
    dmk_engine_close(&p);
    dmk_engine_close(&q);
}

void check_ranks(struct device *d)
{
    struct dmk_shape shape = small_shape(4);
    if (d->bench) {
        return;
    }
    struct model m = new_model(d, &shape, DMK_EXPERTS_BF16, false);
    all_layouts(d, &m, "bf16");
    free_model(&m);

    const uint32_t widths[] = {96, 256, 512, 1024}, experts[] = {16, 32, 64};
    shape.hidden = widths[draw_u32(d, 4)];
    shape.intermediate = widths[draw_u32(d, 4)];
    shape.n_experts = experts[draw_u32(d, 3)];
    shape.n_heads = 8 << draw_u32(d, 4);
    shape.vocab = 512 + 8 * draw_u32(d, 2000);
    printf("ranks   random model: hidden %u, intermediate %u, %u experts, %u heads, vocab %u\n",
           shape.hidden, shape.intermediate, shape.n_experts, shape.n_heads, shape.vocab);
    m = new_model(d, &shape, DMK_EXPERTS_MXFP4, false);
    all_layouts(d, &m, "mxfp4");
    for (uint32_t a = 1; a <= 8; a *= 2) {
        hand_over(d, &m, a, 8 / a);
    }
    free_model(&m);

    shape = small_shape(2);
    shape.hidden = shape.intermediate = 2880;
    shape.n_heads = 64;
    shape.vocab = 4096;
    m = new_model(d, &shape, DMK_EXPERTS_MXFP4, false);
    for (int kind = 0; kind < 3; kind++) {
        static const char *const names[] = {"full width, mxfp4", "full width, fp8",
                                            "full width, fp8, dense fp8"};
        const char *model = names[kind];
        if (kind > 0) {
            m.fp8 = true;
            m.dense8 = kind == 2;
            compute_wanted(d, &m);
        }
        one_layout(d, &m, 2, 1, model);
        one_layout(d, &m, 8, 1, model);
        one_layout(d, &m, 2, 2, model);
        one_layout(d, &m, 1, 8, model);
    }
    free_model(&m);
}
