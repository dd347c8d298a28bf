/* The engine against transformers, layer by layer.
 *
 * The files beside this one were made by tools/vectors/make_vectors.py, which says what they hold. The
 * checkpoints are written again here from their seeds. Each layer is fed the same seeded input as there
 * (its rows go over the residual stream before the layer runs), and its output is compared at the chosen
 * positions: with W the distance of transformers in bf16 from transformers in fp32, ours must be no
 * farther from fp32 than W. Positions whose routing is a toss-up are marked in the file, skipped and
 * counted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/rng.h"
#include "common/model/engine_internal.h"
#include "common/model/safetensors.h"
#include "kernels/dtype.h"
#include "tests/unit/model/maker.h"
#include "tools/tinymodel/tinymodel.h"

/* The same numbers stand in make_vectors.py. */
#define INPUT_SEED      11
#define INPUT_DEVIATION 1.5
#define IDS_SEED        12
#define TOP             64

#define MAX_CASES  32
#define MAX_AT     32 /* chosen positions of a case */
#define MAX_LAYERS 4
#define CHUNK      256
#define MAX_TOKENS 4224

/* Over a case the errors of some 5,000 to 45,000 numbers are summed, so chance moves the ratio by about
 * 1% and systematic differences stand out. A single position of hidden size 256 moves by
 * 1/sqrt(2 * 256) = 4.4% in each of both errors: 25% is four times their joint deviation. */
#define MAX_CASE_RATIO     1.00
#define MAX_POSITION_RATIO 1.25

/* Chance of a toss-up is 6 to 13% in the published model; far more would leave too little to compare. */
#define MAX_SKIPPED_SHARE 0.2

struct model {
    const char *name;
    uint32_t layers, hidden, intermediate, experts, heads, vocab;
    uint64_t seed;
};

static const struct model tiny = {"tiny", 4, 256, 256, 32, 16, 2048, 21};
static const struct model wide = {"wide", 2, 2880, 2880, 16, 64, 512, 22};

/* What the engine gave for one run over `first .. first + n`. */
struct run {
    const struct model *model;
    struct dmk_engine *engine;
    uint16_t *table;       /* [CHUNK][H] what the embedding is replaced by */
    uint32_t first, n, at; /* rows of the run; first row of the running chunk */
    uint32_t positions[MAX_AT], n_positions;
    float *out[MAX_LAYERS]; /* [n_positions][H] */
};

static const struct dmk_tensor *find_tensor(const struct dmk_safetensors *file, const char *prefix,
                                            const char *suffix)
{
    char name[96];

    (void)snprintf(name, sizeof(name), "%s.%s", prefix, suffix);
    for (size_t i = 0; i < dmk_safetensors_count(file); i++) {
        if (strcmp(dmk_safetensors_at(file, i)->name, name) == 0) {
            return dmk_safetensors_at(file, i);
        }
    }
    fail_msg("%s lacks tensor %s", dmk_safetensors_path(file), name);
    return NULL;
}

static uint32_t read_u32(const struct dmk_tensor *t, size_t i)
{
    uint32_t v;

    assert_int_equal(t->dtype, DMK_DTYPE_I32);
    memcpy(&v, t->data + 4 * i, 4);
    return v;
}

static float read_float(const struct dmk_tensor *t, size_t i)
{
    uint16_t half;
    float v;

    if (t->dtype == DMK_DTYPE_BF16) {
        memcpy(&half, t->data + 2 * i, 2);
        return dmk_bf16_to_f32(half);
    }
    assert_int_equal(t->dtype, DMK_DTYPE_F32);
    memcpy(&v, t->data + 4 * i, 4);
    return v;
}

static struct dmk_safetensors *open_vectors(const char *name)
{
    struct dmk_safetensors *file = NULL;
    struct dmk_error err = {0};
    char path[512];

    (void)snprintf(path, sizeof(path), "%s/%s.safetensors", DMK_TEST_VECTORS, name);
    if (dmk_safetensors_open(path, &file, &err) < 0) {
        fail_msg("%s", err.text);
    }
    return file;
}

/* Writes the checkpoint to a folder, opens it, and removes the folder: the mappings stay. */
static struct dmk_weights *make_weights(const struct model *m)
{
    struct dmk_tinymodel_conf conf = {.seed = m->seed};
    struct dmk_weights *w = NULL;
    struct dmk_error err = {0};
    char top[64], out[96];
    uint64_t bytes = 0;

    assert_int_equal(dmk_shape_preset("gpt-oss-20b", &conf.shape, NULL), 0);
    conf.shape.n_layers = m->layers;
    conf.shape.hidden = m->hidden;
    conf.shape.intermediate = m->intermediate;
    conf.shape.n_experts = m->experts;
    conf.shape.n_heads = m->heads;
    conf.shape.vocab = m->vocab;
    conf.shape.n_eos = 0;
    mk_folder(top);
    (void)snprintf(out, sizeof(out), "%s/model", top);
    conf.out = out;
    if (dmk_tinymodel_write(&conf, &bytes, &err) < 0 ||
        dmk_weights_open(&(struct dmk_weights_conf){.dir = out}, &w, &err) < 0) {
        fail_msg("%s", err.text);
    }
    mk_remove(top);
    return w;
}

static struct dmk_engine *open_engine(struct dmk_weights *w)
{
    const struct dmk_engine_conf conf = {
        .backend = "cpu",
        .layout = {1, 1},
        .n_full_pages = dmk_kv_pages_for(MAX_TOKENS),
        .n_window_pages = DMK_WINDOW_RING,
        .max_step_tokens = CHUNK,
        .max_step_seqs = 1,
        .max_logit_rows = CHUNK,
    };
    struct dmk_engine *engine = NULL;
    struct dmk_error err = {0};

    if (dmk_engine_open_weights(&conf, w, &engine, &err) < 0) {
        fail_msg("%s", err.text);
    }
    return engine;
}

/* Rows [row, row + n) of a layer's input; hidden is a multiple of 4, and four numbers share a draw. */
static void fill_input(uint32_t layer, uint32_t row, uint32_t n, uint32_t hidden, uint16_t *out)
{
    const float width = (float)(INPUT_DEVIATION * sqrt(3.0));
    const uint64_t begin = (uint64_t)row * hidden;

    for (uint64_t i = 0; i < (uint64_t)n * hidden; i++) {
        const uint64_t draw = dmk_rng_u64(INPUT_SEED, layer, (begin + i) / 4);
        const int16_t part = (int16_t)(draw >> (16 * ((begin + i) % 4)));

        out[i] = dmk_f32_to_bf16(width * (((float)part + 0.5f) * 0x1.0p-15f));
    }
}

/* Keeps the layer's output at the chosen positions and puts the next layer's input in its place. */
static void swap_layer(void *ud, uint32_t layer)
{
    struct run *run = ud;
    uint16_t *x = run->engine->ranks[0].acts.x;
    const uint32_t h = run->model->hidden, begin = run->first + run->at;
    const uint32_t left = run->n - run->at, n = left < CHUNK ? left : CHUNK;

    for (uint32_t i = 0; i < run->n_positions; i++) {
        if (run->positions[i] < begin || run->positions[i] >= begin + n) {
            continue;
        }
        for (uint32_t j = 0; j < h; j++) {
            run->out[layer][(size_t)i * h + j] =
                dmk_bf16_to_f32(x[(size_t)(run->positions[i] - begin) * h + j]);
        }
    }
    if (layer + 1 < run->model->layers) {
        fill_input(layer + 1, begin, n, h, x);
    }
}

/* Feeds rows [first, first + n) chunk by chunk. ids are rows of the table; with no table, tokens. */
static void run_rows(struct run *run, const uint32_t *tokens, float *logits)
{
    uint32_t pages[MAX_TOKENS / DMK_PAGE_TOKENS + 1], ids[CHUNK];
    const uint32_t vocab = run->model->vocab;

    for (uint32_t i = 0; i < sizeof(pages) / sizeof(pages[0]); i++) {
        pages[i] = i;
    }
    for (run->at = 0; run->at < run->n; run->at += CHUNK) {
        const uint32_t left = run->n - run->at, n = left < CHUNK ? left : CHUNK;
        struct dmk_step_seq seq = {
            .ids = tokens ? tokens + run->at : ids,
            .n_tokens = n,
            .pos = run->first + run->at,
            .full_pages = pages,
            .ring = {0, 1, 2},
            .n_ring = DMK_WINDOW_RING,
            .logits = tokens ? DMK_LOGITS_ALL : DMK_LOGITS_NONE,
        };
        struct dmk_step step = {.seqs = &seq, .n_seqs = 1};

        if (tokens) {
            step.logits = logits + (size_t)run->at * vocab;
        } else {
            for (uint32_t i = 0; i < n; i++) {
                ids[i] = i;
            }
            fill_input(0, run->first + run->at, n, run->model->hidden, run->table);
            step.on_layer = swap_layer;
            step.ud = run;
        }
        assert_int_equal(dmk_engine_step(run->engine, &step), 0);
    }
}

struct errors {
    double ours, theirs; /* sums of squares over the positions that count */
    double worst;        /* largest ratio of a single position */
    uint32_t n, n_skipped;
};

static struct errors measure(const struct dmk_safetensors *file, const char *name, const float *out,
                             uint32_t n_positions, uint32_t h)
{
    const struct dmk_tensor *fp32 = find_tensor(file, name, "fp32");
    const struct dmk_tensor *bf16 = find_tensor(file, name, "bf16");
    const struct dmk_tensor *skip = find_tensor(file, name, "skip");
    struct errors e = {0};

    assert_int_equal(fp32->n_bytes, (size_t)n_positions * h * 4);
    assert_int_equal(bf16->n_bytes, (size_t)n_positions * h * 2);
    assert_int_equal(skip->n_bytes, n_positions);
    for (uint32_t i = 0; i < n_positions; i++) {
        double ours = 0, theirs = 0;

        if (skip->data[i]) {
            e.n_skipped++;
            continue;
        }
        for (uint32_t j = 0; j < h; j++) {
            const size_t at = (size_t)i * h + j;
            const double want = read_float(fp32, at);

            ours += (out[at] - want) * (out[at] - want);
            theirs += (read_float(bf16, at) - want) * (read_float(bf16, at) - want);
        }
        e.ours += ours;
        e.theirs += theirs;
        e.worst = fmax(e.worst, sqrt(ours / theirs));
        e.n++;
    }
    return e;
}

/* One length, all layers whose case the file holds. */
static void check_run(const struct dmk_safetensors *file, struct run *run, const char *suffix,
                      uint32_t n_layers)
{
    const uint32_t h = run->model->hidden;
    char name[64];

    (void)snprintf(name, sizeof(name), "l0%s", suffix);
    {
        const struct dmk_tensor *t = find_tensor(file, name, "positions");

        run->n_positions = (uint32_t)t->dims[0];
        assert_true(run->n_positions > 0 && run->n_positions <= MAX_AT);
        for (uint32_t i = 0; i < run->n_positions; i++) {
            run->positions[i] = read_u32(t, i);
        }
    }
    for (uint32_t l = 0; l < run->model->layers; l++) {
        run->out[l] = malloc((size_t)run->n_positions * h * sizeof(float));
        assert_non_null(run->out[l]);
        memset(run->out[l], 0xff, (size_t)run->n_positions * h * sizeof(float)); /* NaN */
    }
    run_rows(run, NULL, NULL);
    for (uint32_t l = 0; l < n_layers; l++) {
        struct errors e;
        double ratio;

        (void)snprintf(name, sizeof(name), "l%u%s", l, suffix);
        e = measure(file, name, run->out[l], run->n_positions, h);
        ratio = sqrt(e.ours / e.theirs);
        print_message("%s %s: %u positions, %u skipped, error %.4f, transformers' in bf16 %.4f, "
                      "ratio %.3f, worst position %.3f\n",
                      run->model->name, name, e.n + e.n_skipped, e.n_skipped, sqrt(e.ours),
                      sqrt(e.theirs), ratio, e.worst);
        assert_true(e.n_skipped <= MAX_SKIPPED_SHARE * run->n_positions);
        assert_true(ratio <= MAX_CASE_RATIO); /* false for NaN */
        assert_true(e.worst <= MAX_POSITION_RATIO);
    }
    for (uint32_t l = 0; l < run->model->layers; l++) {
        free(run->out[l]);
    }
}

/* Opens the model with its embedding replaced by the input of the first layer. */
static void open_run(const struct model *m, struct dmk_weights *w, struct run *ret_run)
{
    *ret_run = (struct run){.model = m};
    ret_run->table = malloc((size_t)CHUNK * m->hidden * sizeof(uint16_t));
    assert_non_null(ret_run->table);
    w->embedding = ret_run->table;
    ret_run->engine = open_engine(w);
}

static void close_run(struct run *run, struct dmk_weights *w)
{
    dmk_engine_close(&run->engine);
    dmk_weights_close(&w);
    free(run->table);
}

static void test_tiny_layers(void **state)
{
    static const uint32_t lengths[] = {96, 200, 4200};
    struct dmk_safetensors *file = open_vectors("tiny");
    struct dmk_weights *w = make_weights(&tiny);
    struct run run;

    (void)state;
    open_run(&tiny, w, &run);
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        char suffix[32];

        (void)snprintf(suffix, sizeof(suffix), ".n%u", lengths[i]);
        run.n = lengths[i];
        check_run(file, &run, suffix, tiny.layers);
    }
    close_run(&run, w);
    dmk_safetensors_close(&file);
}

static void test_wide_layers(void **state)
{
    struct dmk_safetensors *file = open_vectors("wide");
    struct dmk_weights *w = make_weights(&wide);
    struct run run;

    (void)state;
    open_run(&wide, w, &run);
    run.n = 96;
    check_run(file, &run, ".n96", 2);
    run.n = 200;
    check_run(file, &run, ".n200", 2);
    run.first = 3968; /* the sliding layer sees nothing before; the full one is not compared */
    run.n = 232;
    check_run(file, &run, ".from3968.n232", 1);
    close_run(&run, w);
    dmk_safetensors_close(&file);
}

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

/* The whole model, where one toss-up of the routing moves all that follows: medians only. */
static void check_whole(const struct dmk_safetensors *file, struct dmk_engine *engine, uint32_t n)
{
    struct run run = {.model = &tiny, .engine = engine, .n = n};
    uint32_t *ids = malloc(n * sizeof(ids[0]));
    float *logits = malloc((size_t)n * tiny.vocab * sizeof(float));
    double ours[MAX_AT], theirs[MAX_AT];
    const struct dmk_tensor *at, *top, *fp32, *bf16;
    uint32_t n_best = 0;
    char name[32];

    assert_true(ids && logits);
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (uint32_t)(dmk_rng_u64(IDS_SEED, n, i) % tiny.vocab);
    }
    run_rows(&run, ids, logits);
    (void)snprintf(name, sizeof(name), "model.n%u", n);
    at = find_tensor(file, name, "positions");
    top = find_tensor(file, name, "ids");
    fp32 = find_tensor(file, name, "fp32");
    bf16 = find_tensor(file, name, "bf16");
    assert_true(at->dims[0] <= MAX_AT && top->dims[1] == TOP);
    for (size_t p = 0; p < at->dims[0]; p++) {
        const float *row = logits + (size_t)read_u32(at, p) * tiny.vocab;
        uint32_t best = 0;

        ours[p] = theirs[p] = 0;
        for (size_t k = 0; k < TOP; k++) {
            const double want = read_float(fp32, p * TOP + k);

            ours[p] += pow(row[read_u32(top, p * TOP + k)] - want, 2);
            theirs[p] += pow(read_float(bf16, p * TOP + k) - want, 2);
        }
        for (uint32_t i = 1; i < tiny.vocab; i++) {
            best = row[i] > row[best] ? i : best;
        }
        n_best += best == read_u32(top, p * TOP);
    }
    qsort(ours, at->dims[0], sizeof(ours[0]), compare_doubles);
    qsort(theirs, at->dims[0], sizeof(theirs[0]), compare_doubles);
    print_message(
        "whole model, %u tokens: median error of the top %d logits %.3f, transformers' in "
        "bf16 %.3f; best token alike at %u of %u positions\n",
        n, TOP, sqrt(ours[at->dims[0] / 2]), sqrt(theirs[at->dims[0] / 2]), n_best,
        (uint32_t)at->dims[0]);
    /* Both medians are of 24 positions, some hit by toss-ups: a factor of 1.5 is no news. */
    assert_true(sqrt(ours[at->dims[0] / 2]) <= 1.5 * sqrt(theirs[at->dims[0] / 2]));
    assert_true(n_best * 10 >= at->dims[0] * 8);
    free(ids);
    free(logits);
}

static void test_tiny_whole(void **state)
{
    struct dmk_safetensors *file = open_vectors("tiny");
    struct dmk_weights *w = make_weights(&tiny);
    struct dmk_engine *engine = open_engine(w);

    (void)state;
    check_whole(file, engine, 96);
    check_whole(file, engine, 200);
    check_whole(file, engine, 4200);
    dmk_engine_close(&engine);
    dmk_weights_close(&w);
    dmk_safetensors_close(&file);
}

/* test_vectors tiny | wide */
int main(int argc, char **argv)
{
    const struct CMUnitTest tiny_tests[] = {
        cmocka_unit_test(test_tiny_layers),
        cmocka_unit_test(test_tiny_whole),
    };
    const struct CMUnitTest wide_tests[] = {
        cmocka_unit_test(test_wide_layers),
    };

    if (argc == 2 && strcmp(argv[1], "tiny") == 0) {
        return cmocka_run_group_tests(tiny_tests, NULL, NULL);
    }
    if (argc == 2 && strcmp(argv[1], "wide") == 0) {
        return cmocka_run_group_tests(wide_tests, NULL, NULL);
    }
    (void)fprintf(stderr, "usage: test_vectors tiny | wide\n");
    return 2;
}
