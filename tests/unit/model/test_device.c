/* The engine on devices, with a device that runs late and out of order (fake_device.h): in every layout the logits,
 * tokens and pages of one rank on the host, bit for bit, whatever the order in which ranks happen to run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "common/base/clock.h"
#include "common/base/rng.h"
#include "common/model/device.h"
#include "tests/unit/model/fake_device.h"
#include "tests/unit/model/memory.h"

enum { VOCAB = 512, MAX_IDS = 150, MAX_SEQS = 5, N_FULL = 24, N_WINDOW = 24, MAX_ROWS = 256 };

static uint64_t seed;
static bool dense8; /* dense weights in FP8 */

/* Group, chunk of its prompt, and from where on its tokens go one by one. */
struct seq {
    uint32_t ids[MAX_IDS], n_ids, pos, group, chunk, n_prompt;
    uint32_t pages[MAX_IDS / 64 + 1], ring[4];
};

static uint32_t draw(uint64_t what, uint64_t i, uint32_t below)
{
    return (uint32_t)(dmk_rng_u64(seed, what, i) % below);
}

static struct dmk_engine *open_with(struct dmk_weights *weights, const char *backend, uint32_t tp,
                                    uint32_t dp, bool prefill, struct dmk_engine_conf *more)
{
    struct dmk_engine_conf conf = {.backend = backend,
                                   .layout = {tp, dp},
                                   .prefill = prefill,
                                   .fp8_dense = dense8,
                                   .n_threads = 1,
                                   .n_full_pages = N_FULL,
                                   .n_window_pages = N_WINDOW,
                                   .max_step_tokens = MAX_ROWS,
                                   .max_step_seqs = MAX_SEQS,
                                   .max_logit_rows = prefill ? 0 : MAX_ROWS};
    struct dmk_engine *engine = NULL;
    struct dmk_error error = {0};
    if (more) {
        conf.on_progress = more->on_progress;
        conf.ud = more->ud;
        conf.n_stage_full_pages = more->n_stage_full_pages;
        conf.n_stage_window_pages = more->n_stage_window_pages;
        conf.memory_percent = more->memory_percent;
        conf.n_pool_seqs = more->n_pool_seqs;
    }
    if (dmk_engine_open_weights(&conf, weights, &engine, &error) != 0) {
        fail_msg("open: %s", error.text);
    }
    return engine;
}

static struct dmk_engine *open_layout(struct dmk_weights *weights, const char *backend, uint32_t tp,
                                      uint32_t dp)
{
    return open_with(weights, backend, tp, dp, false, NULL);
}

static void seq_init(struct seq *s, uint32_t text, uint32_t place, uint32_t group)
{
    memset(s, 0, sizeof(*s));
    /* One is longer than the window. */
    s->n_ids = text == 1 ? MAX_IDS : 12 + draw(text, 0, 40);
    s->n_prompt = s->n_ids - 3 - draw(text, 1, 5);
    s->chunk = 10 + draw(text, 2, 40);
    s->group = group;
    for (uint32_t i = 0; i < s->n_ids; i++) {
        s->ids[i] = draw(1000 + text, i, VOCAB);
    }
    for (uint32_t i = 0; i < MAX_IDS / 64 + 1; i++) {
        s->pages[i] = place * 4 + 3 - i;
    }
    for (uint32_t i = 0; i < 4; i++) {
        s->ring[i] = place * 4 + i;
    }
}

static struct dmk_step_seq take(struct seq *s, enum dmk_logits logits)
{
    const uint32_t left = s->pos < s->n_prompt ? s->n_prompt - s->pos : 1;
    struct dmk_step_seq part = {.ids = s->ids + s->pos,
                                .n_tokens = left < s->chunk ? left : s->chunk,
                                .pos = s->pos,
                                .full_pages = s->pages,
                                .n_ring = 3 + s->group % 2,
                                .logits = logits,
                                .dp = s->group};
    memcpy(part.ring, s->ring, sizeof(part.ring));
    s->pos += part.n_tokens;
    return part;
}

static float *new_logits(uint32_t n_rows)
{
    float *logits = malloc((size_t)n_rows * VOCAB * sizeof(*logits));
    assert_non_null(logits);
    memset(logits, 0xff, (size_t)n_rows * VOCAB * sizeof(*logits)); /* NaN */
    return logits;
}

/* All logits of a text, from one rank on the host with the plain kernels. */
static float *plain_logits(struct dmk_weights *weights, uint32_t text)
{
    struct dmk_engine *engine = open_layout(weights, "ref", 1, 1);
    static struct seq s;
    seq_init(&s, text, 0, 0);
    float *logits = new_logits(s.n_ids);
    while (s.pos < s.n_ids) {
        const uint32_t at = s.pos;
        struct dmk_step_seq part = take(&s, DMK_LOGITS_ALL);
        struct dmk_step step = {.seqs = &part, .n_seqs = 1, .logits = logits + (size_t)at * VOCAB};
        assert_int_equal(dmk_engine_step(engine, &step), 0);
    }
    dmk_engine_close(&engine);
    return logits;
}

static void check_row(const float *got, const float *want, const char *what, uint32_t row)
{
    for (uint32_t i = 0; i < VOCAB; i++) {
        if (memcmp(&got[i], &want[i], sizeof(float)) != 0) {
            fail_msg("%s: row %u, token %u: %a instead of %a (seed %llu)", what, row, i,
                     (double)got[i], (double)want[i], (unsigned long long)seed);
        }
    }
}

static uint32_t largest(const float *x)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < VOCAB; i++) {
        best = x[i] > x[best] ? i : best;
    }
    return best;
}

/* One step with a part of every sequence that is not done; false when all are. Every third row of a step with
 * single tokens only is picked on the device. */
static bool step_all(struct dmk_engine *engine, struct seq *seqs, float *const *want,
                     const char *what)
{
    static float out[MAX_ROWS * VOCAB];
    struct dmk_step_seq parts[MAX_SEQS];
    struct dmk_step_pick picks[MAX_ROWS] = {0};
    struct dmk_step_picked picked[MAX_ROWS];
    uint32_t who[MAX_SEQS], at[MAX_SEQS], n = 0, row = 0;
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        if (seqs[i].pos < seqs[i].n_ids) {
            who[n] = i;
            at[n] = seqs[i].pos;
            parts[n] = take(&seqs[i], i % 2 ? DMK_LOGITS_LAST : DMK_LOGITS_ALL);
            picks[n].pick = parts[n].n_tokens == 1 && i % 3 == 0;
            n++;
        }
    }
    bool single = n > 0;
    for (uint32_t i = 0; i < n; i++) {
        single = single && parts[i].n_tokens == 1;
    }
    struct dmk_step step = {.seqs = parts,
                            .n_seqs = n,
                            .logits = out,
                            .picks = single ? picks : NULL,
                            .picked = picked};
    memset(out, 0xff, sizeof(out));
    if (n > 0) {
        assert_int_equal(dmk_engine_step(engine, &step), 0);
    }
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t rows = parts[i].logits == DMK_LOGITS_LAST ? 1 : parts[i].n_tokens;
        for (uint32_t r = parts[i].n_tokens - rows; r < parts[i].n_tokens; r++, row++) {
            const float *expected = want[who[i]] + (size_t)(at[i] + r) * VOCAB;
            if (single && picks[i].pick) {
                assert_int_equal(picked[row].id, largest(expected));
                assert_int_equal(picked[row].status, 0);
            } else {
                check_row(out + (size_t)row * VOCAB, expected, what, at[i] + r);
            }
        }
    }
    return n > 0;
}

/* Sequences somewhere in every layout: prompts in chunks beside single tokens, then batches of single tokens
 * through graphs that shrink from group to group until most are idle. */
static void test_layouts(void **state)
{
    const struct dmk_shape shape = small_shape(3);
    float *want[MAX_SEQS];
    static struct seq seqs[MAX_SEQS];
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        const enum dmk_expert_format format = kind == 1 ? DMK_EXPERTS_BF16 : DMK_EXPERTS_MXFP4;
        struct dmk_weights *weights = memory_weights(&shape, format, seed);
        dense8 = kind == 2;
        for (uint32_t i = 0; i < MAX_SEQS; i++) {
            want[i] = plain_logits(weights, i);
        }
        for (uint32_t tp = 1; tp <= 8; tp *= 2) {
            for (uint32_t dp = 1; tp * dp <= 8; dp *= 2) {
                if ((kind == 1 && tp * dp != 4) || (kind == 2 && tp * tp * dp != 8 && tp != 8)) {
                    continue;
                }
                /* Two ranks meet by words, four by events, others by either. */
                const bool share = tp * dp == 4 || (tp * dp != 2 && draw(77, tp, 2) == 0);
                fake_device_share(share);
                struct dmk_engine *engine = open_layout(weights, "cuda", tp, dp);
                const struct fake_device_stats before = fake_device_stats();
                uint32_t group = 0, place = 0;
                char what[64];
                snprintf(what, sizeof(what), "kind %d, tp %u, dp %u, %s", kind, tp, dp,
                         share ? "events" : "words");
                for (uint32_t i = 0; i < MAX_SEQS; i++) {
                    const uint32_t next = group + draw(tp * 10 + dp, i, dp - group);
                    place = next == group ? place : 0;
                    group = next;
                    seq_init(&seqs[i], i, place++, group);
                }
                while (step_all(engine, seqs, want, what)) {
                }
                const struct fake_device_stats after = fake_device_stats();
                assert_int_equal(after.n_allocs, before.n_allocs);
                assert_int_equal(after.n_events, before.n_events);
                assert_int_equal(after.n_graphs, before.n_graphs);
                assert_true(after.n_graph_runs > before.n_graph_runs);
                dmk_engine_close(&engine);
            }
        }
        for (uint32_t i = 0; i < MAX_SEQS; i++) {
            free(want[i]);
        }
        memory_weights_free(weights);
    }
    dense8 = false;
}

/* A rank's pages of one layer are those that one rank on the host has of its heads. */
static void check_pages(struct dmk_engine *engine, struct dmk_engine *host, const struct seq *s,
                        uint32_t layer)
{
    const bool full = dmk_shape_layer_is_full(layer);
    const uint32_t kind = dmk_shape_kind_index(layer), bytes = 64 * 64 * 2;
    const struct dmk_kv_mem *b = dmk_engine_kv(host, 0);
    for (uint32_t r = 0; r < dmk_engine_n_ranks(engine); r++) {
        const struct dmk_kv_mem *a = dmk_engine_kv(engine, r);
        for (uint32_t head = 0; head < a->layout.n_local_heads; head++) {
            for (uint32_t block = 0; block <= (s->pos - 1) / 64; block++) {
                const uint32_t page = full ? s->pages[block] : s->ring[block % 3];
                const uint32_t of_model = a->layout.kv_head_first + head;
                const uint8_t *got = full ? a->full : a->window, *want = full ? b->full : b->window;
                got += full ? dmk_kv_full_offset(&a->layout, kind, head, page)
                            : dmk_kv_window_offset(&a->layout, kind, head, page);
                want += full ? dmk_kv_full_offset(&b->layout, kind, of_model, page)
                             : dmk_kv_window_offset(&b->layout, kind, of_model, page);
                const uint32_t used = s->pos - block * 64 < 64 ? s->pos - block * 64 : 64;
                if (full || block + 3 > (s->pos - 1) / 64) {
                    assert_memory_equal(got, want, used * 128);
                    assert_memory_equal(got + bytes, want + bytes, used * 128);
                }
            }
        }
    }
}

struct watch {
    struct dmk_engine *engine, *host;
    const struct seq *seq;
    uint32_t next, cancel_at;
    atomic_bool cancel;
};

static void see_layer(void *ud, uint32_t layer)
{
    struct watch *w = ud;
    assert_int_equal(layer, w->next);
    w->next++;
    if (layer == w->cancel_at) {
        atomic_store(&w->cancel, true);
    }
    check_pages(w->engine, w->host, w->seq, layer);
}

/* When a layer is reported, all ranks have written its pages; a cancelled step stops soon, and the next is right. */
static void test_layers_and_cancel(void **state)
{
    const struct dmk_shape shape = small_shape(6);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    static struct seq s;
    (void)state;
    for (uint32_t tp = 1; tp <= 4; tp *= 4) {
        struct dmk_engine *engine = open_with(weights, "cuda", tp, 1, true, NULL),
                          *host = open_with(weights, "ref", 1, 1, true, NULL);
        assert_int_equal(dmk_engine_graphs(engine).n_graphs, 0);
        for (uint32_t round = 0; round < 2; round++) {
            seq_init(&s, 7, 1, 0);
            s.n_prompt = s.n_ids = s.chunk = 90;
            struct dmk_step_seq part = take(&s, DMK_LOGITS_NONE);
            struct dmk_step step = {.seqs = &part, .n_seqs = 1};
            assert_int_equal(dmk_engine_step(host, &step), 0);
            struct watch w = {engine, host, &s, 0, round == 0 ? 1 : 100, false};
            step.on_layer = see_layer;
            step.ud = &w;
            step.cancel = &w.cancel;
            const int status = dmk_engine_step(engine, &step);
            assert_int_equal(status, round == 0 ? -DMK_ECANCELLED : 0);
            assert_true(round == 0 ? w.next < 6 : w.next == 6);
        }
        dmk_engine_close(&engine);
        dmk_engine_close(&host);
    }
    memory_weights_free(weights);
}

/* Pages that a step copies first, each in its own group only. */
static void test_copies(void **state)
{
    const struct dmk_shape shape = small_shape(2);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    struct dmk_engine *engine = open_layout(weights, "cuda", 2, 2);
    (void)state;
    for (uint32_t r = 0; r < 4; r++) {
        memset(dmk_engine_kv(engine, r)->full, (int)r + 1,
               dmk_kv_full_bytes(&dmk_engine_kv(engine, r)->layout));
        const struct dmk_kv_mem *kv = dmk_engine_kv(engine, r);
        memset((uint8_t *)kv->full + dmk_kv_full_offset(&kv->layout, 0, 0, 5), 50 + (int)r, 16384);
    }
    const struct dmk_page_copy copies[] = {{.src = 5, .dst = 6, .dp = 1},
                                           {.src = 6, .dst = 7, .dp = 1}};
    struct dmk_step step = {.copies = copies, .n_copies = 2};
    assert_int_equal(dmk_engine_step(engine, &step), 0);
    for (uint32_t r = 0; r < 4; r++) {
        const struct dmk_kv_mem *kv = dmk_engine_kv(engine, r);
        const uint8_t *page = (uint8_t *)kv->full + dmk_kv_full_offset(&kv->layout, 0, 0, 7);
        assert_int_equal(page[100], r < 2 ? r + 1 : 50 + r);
    }
    dmk_engine_close(&engine);
    memory_weights_free(weights);
}

struct stage_watch {
    struct dmk_engine *engine;
    const struct dmk_step_seq *seq;
    const struct dmk_step_stage *stage;
    uint32_t n_seen;
};

static void see_staged(void *ud, uint32_t layer)
{
    struct stage_watch *w = ud;
    const bool full = dmk_shape_layer_is_full(layer);
    const uint32_t at = dmk_shape_kind_index(layer), first = full ? w->stage->first_block : 0,
                   end = full               ? w->stage->end_block
                         : w->stage->window ? w->seq->n_ring
                                            : 0;
    w->n_seen++;
    for (uint32_t r = 0; r < dmk_engine_n_ranks(w->engine); r++) {
        const struct dmk_kv_mem *kv = dmk_engine_kv(w->engine, r),
                                *stage = dmk_engine_stage(w->engine, r);
        for (uint32_t h = 0; h < kv->layout.n_local_heads; h++) {
            for (uint32_t b = first; b < end; b++) {
                const uint64_t from =
                    full ? dmk_kv_full_offset(&kv->layout, at, h, w->seq->full_pages[b])
                         : dmk_kv_window_offset(&kv->layout, at, h, w->seq->ring[b]);
                const uint64_t to =
                    full ? dmk_kv_full_offset(&stage->layout, at, h, w->stage->full_at + b - first)
                         : dmk_kv_window_offset(&stage->layout, at, h, w->stage->window_at + b);
                assert_memory_equal((uint8_t *)(full ? kv->full : kv->window) + from,
                                    (uint8_t *)(full ? stage->full : stage->window) + to,
                                    kv->layout.page_bytes);
            }
        }
    }
}

/* When a layer is reported, its pages lie in the staging memory too: those asked for, of every rank. */
static void test_staging(void **state)
{
    const struct dmk_shape shape = small_shape(4);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    struct dmk_engine_conf more = {.n_stage_full_pages = 9, .n_stage_window_pages = 7};
    static struct seq s;
    (void)state;
    for (uint32_t tp = 1; tp <= 4; tp *= 4) {
        struct dmk_engine *engine = open_with(weights, "cuda", tp, 1, true, &more);
        seq_init(&s, 7, 1, 0);
        s.n_prompt = s.n_ids = 100;
        s.chunk = 70; /* a whole page, then the rest */
        for (uint32_t chunk = 0; chunk < 2; chunk++) {
            struct dmk_step_seq part = take(&s, DMK_LOGITS_NONE);
            const struct dmk_step_stage stage = {.first_block = chunk,
                                                 .end_block = chunk + 1,
                                                 .full_at = 4 + chunk,
                                                 .window = chunk == 1,
                                                 .window_at = 3};
            struct stage_watch w = {engine, &part, &stage, 0};
            struct dmk_step step = {
                .seqs = &part, .n_seqs = 1, .on_layer = see_staged, .ud = &w, .stage = &stage};
            assert_int_equal(dmk_engine_step(engine, &step), 0);
            assert_int_equal(w.n_seen, 4);
        }
        dmk_engine_close(&engine);
    }
    struct dmk_engine *without = open_with(weights, "cuda", 1, 1, true, NULL);
    assert_null(dmk_engine_stage(without, 0));
    dmk_engine_close(&without);
    memory_weights_free(weights);
}

struct progress {
    uint64_t done, total, n;
};

static void see_progress(void *ud, uint64_t done, uint64_t total)
{
    struct progress *p = ud;
    assert_true(done >= p->done && done <= total);
    assert_true(p->n == 0 || total == p->total);
    *p = (struct progress){done, total, p->n + 1};
}

/* Every bucket up to the bounds has its graph before the first step, and loading ends where it said that it would. */
static void test_start(void **state)
{
    const struct dmk_shape shape = small_shape(2);
    (void)state;
    for (int format = 0; format < 2; format++) {
        for (uint32_t ranks = 1; ranks <= 8; ranks *= 8) {
            struct dmk_weights *weights = memory_weights(&shape, format, seed);
            struct progress p = {0};
            struct dmk_engine_conf more = {.on_progress = see_progress, .ud = &p};
            struct dmk_engine *engine =
                open_with(weights, "cuda", ranks > 4 ? 4 : ranks, ranks > 4 ? 2 : 1, false, &more);
            assert_true(p.total > 0 && p.done == p.total);
            assert_int_equal(dmk_engine_graphs(engine).n_graphs, MAX_SEQS);
            assert_int_equal(dmk_engine_graphs(engine).n_wanted, MAX_SEQS);
            dmk_engine_close(&engine);
            memory_weights_free(weights);
        }
    }
}

/* As many layers as a config may ask for open on as many ranks as there can be. */
static void test_deep(void **state)
{
    const struct dmk_shape shape = small_shape(2);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    const uint32_t n_layers = 128;

    (void)state;
    weights->layers = realloc(weights->layers, n_layers * sizeof(weights->layers[0]));
    assert_non_null(weights->layers);
    for (uint32_t i = 2; i < n_layers; i++) {
        weights->layers[i] = weights->layers[i - 2];
    }
    weights->shape.n_layers = n_layers;
    struct dmk_engine *engine = open_with(weights, "cuda", 8, 1, true, NULL);
    dmk_engine_close(&engine);
    memory_weights_free(weights);
}

/* The sentence with which a share is refused; the number before the word that follows its first "give". */
static double refused_share(struct dmk_weights *weights, double percent, const char *part)
{
    const struct dmk_engine_conf conf = {.backend = "cuda",
                                         .layout = {1, 1},
                                         .n_full_pages = N_FULL,
                                         .n_window_pages = N_WINDOW,
                                         .memory_percent = percent,
                                         .n_pool_seqs = MAX_SEQS,
                                         .max_step_tokens = MAX_ROWS,
                                         .max_step_seqs = MAX_SEQS,
                                         .max_logit_rows = MAX_ROWS};
    struct dmk_engine *engine = NULL;
    struct dmk_error error = {0};
    assert_int_equal(dmk_engine_open_weights(&conf, weights, &engine, &error), -DMK_ENOMEM);
    assert_null(engine);
    if (!strstr(error.text, part)) {
        fail_msg("\"%s\" does not hold \"%s\"", error.text, part);
    }
    const char *give = strstr(error.text, "give ");
    return give ? strtod(give + 5, NULL) : 0;
}

/* Pools of a share of the devices' memory: with everything else they fill it, and one page more would not fit, wherever
 * ranks are; steps are those of any pools. */
static void test_share(void **state)
{
    const uint64_t gib = UINT64_C(1) << 30, total = gib + (UINT64_C(160) << 20);
    const struct dmk_shape shape = small_shape(3);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    struct dmk_engine_conf conf = {.memory_percent = 95, .n_pool_seqs = MAX_SEQS};
    float *want[MAX_SEQS];
    static struct seq seqs[MAX_SEQS];
    double percent;

    (void)state;
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        want[i] = plain_logits(weights, i);
    }
    for (uint32_t tp = 1; tp <= 4; tp *= 2) {
        for (int share = 0; share < (tp > 1 ? 2 : 1); share++) {
            const uint64_t on_device = share || tp == 1 ? tp : 1;
            fake_device_share(share);
            fake_device_memory(total, 0);
            struct dmk_engine *engine = open_with(weights, "cuda", tp, 1, false, &conf);
            const struct dmk_kv_layout *l = &dmk_engine_kv(engine, 0)->layout;
            const uint64_t full = dmk_kv_full_bytes(l) / l->n_full_pages;
            const double whole = (double)total * 0.95;
            bool filled = false;
            for (uint32_t r = 0; r < tp; r++) {
                struct dmk_backend *be = engine->ranks[r].backend;
                struct dmk_backend_memory m;
                assert_int_equal(be->ops->memory(be, &m), 0);
                const double used = (double)(m.total - m.free + gib);
                assert_true(used <= whole);
                filled = filled || used + (double)(on_device * full) + 1 > whole;
            }
            assert_true(filled); /* the first rank's: it has the logits too */
            assert_true(l->n_full_pages >= N_FULL && l->n_window_pages >= N_WINDOW);
            for (uint32_t i = 0; i < MAX_SEQS; i++) {
                seq_init(&seqs[i], i, i, 0);
            }
            while (step_all(engine, seqs, want, "share")) {
            }
            dmk_engine_close(&engine);
        }
    }
    fake_device_share(false);
    percent =
        refused_share(weights, 80, "80% of the 1.2 GiB of rank 0 are 0.9 GiB but the model and");
    assert_true(percent > 80 && percent < 95);
    conf.memory_percent = percent;
    struct dmk_engine *engine = open_with(weights, "cuda", 1, 1, false, &conf);
    assert_true(dmk_engine_kv(engine, 0)->layout.n_window_pages >= 3 * MAX_SEQS);
    dmk_engine_close(&engine);
    fake_device_memory(4 * gib, 3 * gib - (UINT64_C(200) << 20));
    percent = refused_share(weights, 90,
                            "GiB are free: other programs hold the rest; end them, or give ");
    conf.memory_percent = percent;
    engine = open_with(weights, "cuda", 1, 1, false, &conf);
    dmk_engine_close(&engine);
    fake_device_memory(gib / 2, 0);
    (void)refused_share(weights, 90, "use more ranks, fewer sequences or shorter steps");
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        free(want[i]);
    }
    memory_weights_free(weights);
}

static void test_buckets(void **state)
{
    uint32_t index, before = 0, size = 0;
    (void)state;
    for (uint32_t n = 1; n <= 256; n++) {
        const uint32_t got = dmk_device_bucket(n, &index);
        assert_true(got >= n && got <= n + n / 8);
        assert_true(n <= size ? got == size && index == before : got > size);
        assert_true(n <= size || n == 1 || index == before + 1);
        assert_true(index < DMK_DEVICE_MAX_BUCKETS);
        size = got;
        before = index;
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layouts),           cmocka_unit_test(test_start),
        cmocka_unit_test(test_layers_and_cancel), cmocka_unit_test(test_copies),
        cmocka_unit_test(test_staging),           cmocka_unit_test(test_share),
        cmocka_unit_test(test_buckets),           cmocka_unit_test(test_deep),
    };
    seed = argc > 1 ? strtoull(argv[1], NULL, 10) : dmk_clock_ns();
    printf("seed %llu\n", (unsigned long long)seed);
    fake_device_seed(seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
