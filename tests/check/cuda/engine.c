/* The device engine beside the host's: logits, company, chunks, copies, layers, cancel. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "common/base/rng.h"
#include "common/model/engine_internal.h"
#include "tests/check/cuda/device.h"
#include "tests/unit/model/memory.h"

#define MAX_SEQS   9
#define MAX_TOKENS 700
#define N_PAGES    400
/* How far the device may be from the host: this many times as far as the host goes when the last bit of a third of
 * the embedding's numbers is turned over. Rounding errors grow on their way through the layers, and a router's tie
 * may fall otherwise, so no fixed number would do for every model. */
#define TIMES 1.5

static bool dense8; /* dense weights in FP8 */

struct seq {
    uint32_t ids[MAX_TOKENS], n_ids, pos;
    uint32_t pages[MAX_TOKENS / 64 + 1], ring[4];
};

static struct dmk_engine *open_role(struct dmk_weights *weights, const char *backend, bool prefill)
{
    struct dmk_engine_conf conf = {.backend = backend,
                                   .prefill = prefill,
                                   .fp8_dense = dense8,
                                   .layout = {1, 1},
                                   .n_threads = 0,
                                   .n_full_pages = N_PAGES,
                                   .n_window_pages = 4 * MAX_SEQS,
                                   .max_step_tokens = MAX_TOKENS,
                                   .max_step_seqs = 16,
                                   .max_logit_rows = MAX_TOKENS};
    struct dmk_engine *engine = NULL;
    struct dmk_error error = {0};
    if (dmk_engine_open_weights(&conf, weights, &engine, &error) != 0) {
        printf("FAIL engine: %s\n", error.text);
        exit(1);
    }
    return engine;
}

static struct dmk_engine *open_engine(struct dmk_weights *weights, const char *backend)
{
    return open_role(weights, backend, false);
}

static void seq_init(struct device *d, struct seq *s, uint32_t index, uint32_t text, uint32_t n_ids,
                     uint32_t vocab)
{
    memset(s, 0, sizeof(*s));
    s->n_ids = n_ids;
    for (uint32_t i = 0; i < n_ids; i++) {
        s->ids[i] = (uint32_t)(dmk_rng_u64(d->seed, 1000 + text, i) % vocab);
    }
    for (uint32_t i = 0; i < sizeof(s->pages) / sizeof(s->pages[0]); i++) {
        s->pages[i] = N_PAGES - 1 - (index * 12 + i) * 3 % N_PAGES;
    }
    for (uint32_t i = 0; i < 4; i++) {
        s->ring[i] = index * 4 + 3 - i;
    }
}

static struct dmk_step_seq take(struct seq *s, uint32_t n, enum dmk_logits logits)
{
    struct dmk_step_seq part = {.ids = s->ids + s->pos,
                                .n_tokens = n,
                                .pos = s->pos,
                                .full_pages = s->pages,
                                .ring = {s->ring[0], s->ring[1], s->ring[2], s->ring[3]},
                                .n_ring = 3,
                                .logits = logits};
    s->pos += n;
    return part;
}

static void run(struct device *d, struct dmk_engine *e, struct dmk_step_seq *parts, uint32_t n,
                float *logits)
{
    struct dmk_step step = {.seqs = parts, .n_seqs = n, .logits = logits};
    int status = dmk_engine_step(e, &step);
    if (status != 0) {
        char how[64];
        snprintf(how, sizeof(how), "status %d", status);
        fail(d, "step", how);
    }
}

/* All logits of one sequence, in chunks. */
static void run_alone(struct device *d, struct dmk_engine *e, struct seq *s, uint32_t chunk,
                      float *out)
{
    const size_t vocab = dmk_engine_shape(e)->vocab;
    while (s->pos < s->n_ids) {
        const uint32_t n = s->n_ids - s->pos < chunk ? s->n_ids - s->pos : chunk;
        struct dmk_step_seq part = take(s, n, DMK_LOGITS_ALL);
        run(d, e, &part, 1, out);
        out += n * vocab;
    }
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median over rows of the l2 distance. */
static double median_distance(const float *want, const float *got, uint32_t n_rows, size_t vocab)
{
    double *l2 = malloc(n_rows * sizeof(*l2)), median;
    dmk_assert(l2);
    for (uint32_t r = 0; r < n_rows; r++) {
        double sum = 0, diff = 0;
        for (size_t i = 0; i < vocab; i++) {
            double a = want[r * vocab + i], b = got[r * vocab + i];
            sum += a * a;
            diff += (a - b) * (a - b);
        }
        l2[r] = sqrt(diff / sum);
    }
    qsort(l2, n_rows, sizeof(*l2), compare_doubles);
    median = l2[n_rows / 2];
    free(l2);
    return median;
}

static void compare(struct device *d, const float *want, const float *got, uint32_t n_rows,
                    size_t vocab, double bound, const char *what)
{
    char how[128];
    const double l2 = median_distance(want, got, n_rows, vocab);
    printf("engine  %s: median l2 %.5f, of a last bit %.5f\n", what, l2, bound);
    if (!(l2 <= TIMES * bound)) {
        snprintf(how, sizeof(how), "median l2 %.5f, more than %.1f times %.5f", l2, TIMES, bound);
        fail(d, what, how);
    }
}

static void same(struct device *d, const float *a, const float *b, size_t n, const char *what)
{
    char how[96];
    for (size_t i = 0; i < n; i++) {
        if (memcmp(&a[i], &b[i], 4) != 0) {
            snprintf(how, sizeof(how), "logit %zu of %zu is %.9g and %.9g", i, n, a[i], b[i]);
            fail(d, what, how);
            return;
        }
    }
}

static double last_bit(struct device *d, struct dmk_weights *weights, const float *want, uint32_t n)
{
    const struct dmk_shape *shape = &weights->shape;
    const size_t size = (size_t)shape->vocab * shape->hidden;
    uint16_t *embedding = (uint16_t *)(uintptr_t)weights->embedding;
    float *got = malloc(n * shape->vocab * sizeof(float));
    static struct seq s;
    dmk_assert(got);
    for (int pass = 0; pass < 2; pass++) { /* there, and back */
        for (size_t i = 0; i < size; i++) {
            embedding[i] ^= dmk_rng_u64(d->seed, 4242, i) % 3 == 0;
        }
        if (pass == 0) {
            struct dmk_engine *host = open_engine(weights, "cpu");
            seq_init(d, &s, 0, 0, n, shape->vocab);
            run_alone(d, host, &s, 200, got);
            dmk_engine_close(&host);
        }
    }
    const double median = median_distance(want, got, n, shape->vocab);
    free(got);
    return median;
}

static void against_host(struct device *d, enum dmk_expert_format format)
{
    const struct dmk_shape shape = small_shape(4);
    struct dmk_weights *weights = memory_weights(&shape, format, d->seed);
    struct dmk_engine *host = open_engine(weights, "cpu"), *dev = open_engine(weights, "cuda");
    const uint32_t n = 330;
    const size_t vocab = shape.vocab;
    float *want = malloc(n * vocab * 4), *got = malloc(n * vocab * 4),
          *again = malloc(n * vocab * 4);
    static struct seq s;
    dmk_assert(want && got && again);
    seq_init(d, &s, 0, 0, n, shape.vocab);
    run_alone(d, host, &s, 200, want);
    const double bound = last_bit(d, weights, want, n);
    s.pos = 0;
    run_alone(d, dev, &s, 200, got);
    compare(d, want, got, n, vocab, bound,
            dense8                        ? "mxfp4, dense fp8, chunks"
            : format == DMK_EXPERTS_MXFP4 ? "mxfp4, chunks"
                                          : "bf16, chunks");
    /* Other chunks, other pages: the same bits. */
    seq_init(d, &s, 3, 0, n, shape.vocab);
    run_alone(d, dev, &s, 33, again);
    same(d, got, again, n * vocab, "chunks of 33 and of 200");
    /* Single tokens, through graphs and other kernels: the same bits. */
    seq_init(d, &s, 1, 0, n, shape.vocab);
    run_alone(d, dev, &s, 1, again);
    same(d, got, again, n * vocab, "chunks and single tokens");
    seq_init(d, &s, 2, 0, n, shape.vocab);
    run_alone(d, dev, &s, 1, again);
    same(d, got, again, n * vocab, "single tokens twice");
    free(want);
    free(got);
    free(again);
    dmk_engine_close(&host);
    dmk_engine_close(&dev);
    memory_weights_free(weights);
}

/* Sequences of unequal length decode together and one by one; a prompt chunk joins in the middle. */
static void company(struct device *d)
{
    const struct dmk_shape shape = small_shape(4);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, d->seed + 1);
    struct dmk_engine *dev = open_engine(weights, "cuda");
    const uint32_t n_seqs = 7, n_steps = 12, lengths[] = {600, 1, 130, 64, 63, 513, 200};
    const size_t vocab = shape.vocab;
    float *alone = malloc(n_seqs * n_steps * vocab * 4), *row = malloc(16 * vocab * 4);
    static struct seq seqs[MAX_SEQS], chunk;
    dmk_assert(alone && row);
    for (uint32_t pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < n_seqs; i++) {
            seq_init(d, &seqs[i], pass ? n_seqs - 1 - i : i, i, lengths[i] + n_steps, shape.vocab);
            if (lengths[i] > 1) {
                struct dmk_step_seq part = take(&seqs[i], lengths[i], DMK_LOGITS_NONE);
                run(d, dev, &part, 1, row);
            }
        }
        for (uint32_t step = 0; step < n_steps; step++) {
            struct dmk_step_seq parts[MAX_SEQS];
            uint32_t n = 0;
            for (uint32_t i = 0; i < n_seqs; i++) {
                struct dmk_step_seq part = take(&seqs[i], 1, DMK_LOGITS_LAST);
                if (pass == 0) {
                    run(d, dev, &part, 1, alone + (i * n_steps + step) * vocab);
                } else if (i <= step) {
                    parts[n++] = part; /* the batch grows */
                }
            }
            if (pass == 1 && step == 8) {
                seq_init(d, &chunk, 8, 77, 100, shape.vocab);
                parts[n] = take(&chunk, 100, DMK_LOGITS_NONE);
                run(d, dev, parts, n + 1, row);
            } else if (pass == 1) {
                run(d, dev, parts, n, row);
            }
            for (uint32_t i = 0; i < n; i++) {
                const float *want = alone + (i * n_steps + step) * vocab;
                if (i == 0) {
                    same(d, row + i * vocab, want, vocab,
                         step == 8 ? "beside a chunk" : "in a batch");
                }
            }
        }
    }
    free(alone);
    free(row);
    dmk_engine_close(&dev);
    memory_weights_free(weights);
}

/* One engine computes a prompt, its pages go to another, which decodes: the logits of an engine that did it all. */
static void handover(struct device *d)
{
    const struct dmk_shape shape = small_shape(6);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, d->seed + 3);
    struct dmk_engine *p = open_role(weights, "cuda", true), *q = open_engine(weights, "cuda"),
                      *alone = open_engine(weights, "cuda");
    const uint32_t n_prompt = 270, n_steps = 9;
    const size_t vocab = shape.vocab;
    float *want = malloc(vocab * 4), *got = malloc(vocab * 4);
    static struct seq a, b;
    dmk_assert(want && got);
    seq_init(d, &a, 1, 5, n_prompt + n_steps, shape.vocab);
    seq_init(d, &b, 1, 5, n_prompt + n_steps, shape.vocab);
    for (uint32_t n = 0; b.pos < n_prompt - 1; n++) {
        const uint32_t chunk = n_prompt - 1 - b.pos < 100 ? n_prompt - 1 - b.pos : 100;
        struct dmk_step_seq part = take(&b, chunk, DMK_LOGITS_NONE);
        run(d, p, &part, 1, NULL);
    }
    const struct dmk_kv_mem *from = dmk_engine_kv(p, 0), *to = dmk_engine_kv(q, 0);
    d->be->ops->copy(d->be, d->stream, to->full, from->full, dmk_kv_full_bytes(&from->layout));
    d->be->ops->copy(d->be, d->stream, to->window, from->window,
                     dmk_kv_window_bytes(&from->layout));
    d->be->ops->sync(d->be, d->stream);
    struct dmk_step_seq whole = take(&a, n_prompt - 1, DMK_LOGITS_NONE);
    run(d, alone, &whole, 1, NULL);
    for (uint32_t step = 0; step < n_steps; step++) {
        struct dmk_step_seq one = take(&a, 1, DMK_LOGITS_LAST),
                            other = take(&b, 1, DMK_LOGITS_LAST);
        run(d, alone, &one, 1, want);
        run(d, q, &other, 1, got);
        same(d, got, want, vocab, "after a hand-over");
    }
    free(want);
    free(got);
    dmk_engine_close(&p);
    dmk_engine_close(&q);
    dmk_engine_close(&alone);
    memory_weights_free(weights);
}

struct watch {
    uint32_t next;
    bool in_order;
    atomic_bool cancel;
    uint32_t cancel_at;
};

static void see_layer(void *ud, uint32_t layer)
{
    struct watch *w = ud;
    w->in_order = w->in_order && layer == w->next;
    w->next = layer + 1;
    if (layer == w->cancel_at) {
        atomic_store(&w->cancel, true);
    }
}

static void layers(struct device *d)
{
    const struct dmk_shape shape = small_shape(8);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_BF16, d->seed + 2);
    struct dmk_engine *dev = open_engine(weights, "cuda");
    static struct seq s;
    for (int cancel = 0; cancel < 2; cancel++) {
        struct watch w = {.in_order = true, .cancel_at = cancel ? 2 : 1000};
        seq_init(d, &s, 0, 0, 90, shape.vocab);
        struct dmk_step_seq part = take(&s, 90, DMK_LOGITS_NONE);
        struct dmk_step step = {
            .seqs = &part, .n_seqs = 1, .on_layer = see_layer, .ud = &w, .cancel = &w.cancel};
        int status = dmk_engine_step(dev, &step);
        if (!w.in_order ||
            (cancel ? status != -DMK_ECANCELLED || w.next > 7 : status != 0 || w.next != 8)) {
            fail(d, "layers",
                 cancel ? "a cancelled step went on" : "layers were not reported in order");
        }
    }
    dmk_engine_close(&dev);
    memory_weights_free(weights);
}

void check_engine(struct device *d)
{
    if (d->bench) {
        return;
    }
    against_host(d, DMK_EXPERTS_BF16);
    against_host(d, DMK_EXPERTS_MXFP4);
    company(d);
    dense8 = true;
    against_host(d, DMK_EXPERTS_MXFP4);
    company(d);
    dense8 = false;
    handover(d);
    layers(d);
    d->n_checks += 7;
}
