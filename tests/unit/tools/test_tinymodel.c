/* The synthetic checkpoint must load, hold the same values in both expert formats, be the same whatever
 * the threads, and never replace what it should not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "tests/unit/model/maker.h"
#include "tools/tinymodel/internal.h"
#include "tools/tinymodel/tinymodel.h"

static struct dmk_tinymodel_conf small_conf(const char *out)
{
    struct dmk_tinymodel_conf conf = {.out = out, .seed = 7};

    assert_int_equal(dmk_shape_preset("gpt-oss-20b", &conf.shape, NULL), 0);
    conf.shape.n_layers = 3;
    conf.shape.hidden = 96;
    conf.shape.intermediate = 64;
    conf.shape.n_experts = 8;
    conf.shape.n_heads = 8;
    conf.shape.vocab = 500;
    conf.shape.n_eos = 0;
    return conf;
}

/* What was told while weights were read. */
struct told {
    uint64_t done, total;
    uint32_t n;
};

static void on_progress(void *ud, uint64_t done, uint64_t total)
{
    struct told *t = ud;

    assert_true(done >= t->done && done <= total && (t->n == 0 || total == t->total));
    *t = (struct told){done, total, t->n + 1};
}

static struct dmk_weights *write_and_open(const struct dmk_tinymodel_conf *conf)
{
    struct dmk_weights *w = NULL;
    struct dmk_error err = {0};
    struct told told = {0};
    const struct dmk_weights_conf how = {
        .dir = conf->out, .prefault = true, .on_progress = on_progress, .ud = &told};
    uint64_t bytes = 0;
    int r = dmk_tinymodel_write(conf, &bytes, &err);

    if (r == 0) {
        r = dmk_weights_open(&how, &w, &err);
    }
    if (r < 0 || !w) {
        fail_msg("%s", err.text);
        return NULL;
    }
    assert_int_equal(w->total_bytes, bytes);
    assert_true(told.n > 0 && told.done == told.total && told.total >= bytes);
    return w;
}

static float bf16_float(const uint8_t *p)
{
    uint16_t v;
    uint32_t bits;
    float f;

    memcpy(&v, p, 2);
    bits = (uint32_t)v << 16;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static float mxfp4_float(const struct dmk_expert_matrix *m, size_t i)
{
    static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    const uint8_t byte = m->blocks[i / 2], code = i & 1 ? byte >> 4 : byte & 15;

    return ldexpf(code & 8 ? -values[code & 7] : values[code & 7], m->scales[i / 32] - 127);
}

static void test_formats_agree(void **state)
{
    char a_dir[80], b_dir[80], top[64];
    struct dmk_tinymodel_conf conf;
    struct dmk_weights *a, *b;

    (void)state;
    mk_folder(top);
    (void)snprintf(a_dir, sizeof(a_dir), "%s/a", top);
    (void)snprintf(b_dir, sizeof(b_dir), "%s/b", top);
    conf = small_conf(a_dir);
    conf.n_threads = 3;
    a = write_and_open(&conf);
    assert_int_equal(a->expert_format, DMK_EXPERTS_MXFP4);
    assert_int_equal(a->shape.n_layers, 3);
    assert_int_equal(a->shape.vocab, 500);
    assert_int_equal(a->shape.n_eos, 2);
    assert_true(a->shape.rope_factor == 32.0 && a->shape.norm_eps == 1e-5f);

    conf.out = b_dir;
    conf.n_threads = 1;
    conf.n_shards = 1;
    conf.expert_format = DMK_EXPERTS_BF16;
    b = write_and_open(&conf);
    assert_int_equal(b->expert_format, DMK_EXPERTS_BF16);
    assert_memory_equal(a->embedding, b->embedding, 2ull * 500 * 96);
    assert_memory_equal(a->unembedding, b->unembedding, 2ull * 500 * 96);
    for (uint32_t l = 0; l < 3; l++) {
        const struct dmk_layer_weights *x = &a->layers[l], *y = &b->layers[l];

        assert_memory_equal(x->q_w, y->q_w, 2ull * 512 * 96);
        assert_memory_equal(x->router_w, y->router_w, 2ull * 8 * 96);
        for (size_t i = 0; i < 8ull * 128 * 96; i++) {
            assert_true(mxfp4_float(&x->gate_up, i) == bf16_float(y->gate_up.blocks + 2 * i));
        }
        for (size_t i = 0; i < 8ull * 96 * 64; i++) {
            assert_true(mxfp4_float(&x->down, i) == bf16_float(y->down.blocks + 2 * i));
        }
        assert_memory_not_equal(x->gate_up.blocks, a->layers[(l + 1) % 3].gate_up.blocks, 64);
    }
    dmk_weights_close(&a);
    dmk_weights_close(&b);
    mk_remove(top);
}

static void expect_refusal(const struct dmk_tinymodel_conf *conf, const char *sentence)
{
    struct dmk_error err = {0};
    uint64_t bytes = 99;

    assert_true(dmk_tinymodel_write(conf, &bytes, &err) < 0);
    if (!strstr(err.text, sentence)) {
        print_error("want %s\ngot  %s\n", sentence, err.text);
    }
    assert_non_null(strstr(err.text, sentence));
    assert_int_equal(bytes, 99);
}

static void test_replacing(void **state)
{
    char out[80], other[96], top[64];
    struct dmk_tinymodel_conf conf;
    struct dmk_weights *w;

    (void)state;
    mk_folder(top);
    (void)snprintf(out, sizeof(out), "%s/m", top);
    conf = small_conf(out);
    w = write_and_open(&conf);
    dmk_weights_close(&w);
    expect_refusal(&conf, "exists already; --force replaces it");
    conf.force = true;
    conf.n_shards = 1;
    w = write_and_open(&conf); /* the old shards are gone: they would be unexpected files */
    dmk_weights_close(&w);
    {
        char index[128];

        (void)snprintf(index, sizeof(index), "%s/model.safetensors.index.json", out);
        assert_int_equal(access(index, F_OK), -1);
    }
    conf.out = top;
    expect_refusal(&conf, "does not look like a checkpoint (it holds folders)");
    conf.out = other;
    (void)snprintf(other, sizeof(other), "%s/link", top);
    assert_int_equal(symlink(out, other), 0);
    expect_refusal(&conf, "is a link; name the folder that it leads to");
    (void)snprintf(other, sizeof(other), "%s/config.json", out);
    assert_int_equal(access(other, F_OK), 0); /* and the folder is as it was */
    mk_subfolder(top, "page");
    (void)snprintf(other, sizeof(other), "%s/page", top);
    mk_text(other, "config.json", "{}");
    mk_text(other, "index.js", "");
    expect_refusal(&conf, "does not look like a checkpoint (no .safetensors)");
    conf.out = out;
    conf.n_shards = 400;
    expect_refusal(&conf, "400 shards are too many");
    conf.n_shards = 0;
    conf.shape.n_kv_heads = 4;
    expect_refusal(&conf, "n_kv_heads is 4 but must be 8");
    mk_remove(top);
}

/* A checkpoint of a preset has the tensors of the published one, byte for byte of their number: metadata.total_size
 * of its index. */
static void test_presets_are_as_large_as_what_is_published(void **state)
{
    static const struct {
        const char *name;
        uint64_t bytes;
        uint32_t n_layers;
    } published[] = {{"gpt-oss-20b", 13761264768, 24}, {"gpt-oss-120b", 65248815744, 36}};

    (void)state;
    for (size_t i = 0; i < sizeof(published) / sizeof(published[0]); i++) {
        struct dmk_tinymodel_conf conf = {.out = "unused", .seed = 7};
        struct dmk_error err = {0};
        struct tm_plan plan;
        uint64_t sum = 0;

        assert_int_equal(dmk_shape_preset(published[i].name, &conf.shape, &err), 0);
        assert_int_equal(tm_plan_make(&conf, &plan, &err), 0);
        for (uint32_t k = 0; k < plan.n_tensors; k++) {
            sum += plan.tensors[k].n_bytes;
        }
        assert_true(sum == published[i].bytes && plan.total_bytes == sum);
        assert_int_equal(plan.n_tensors, published[i].n_layers * 19 + 3);
        tm_plan_free(&plan);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats_agree),
        cmocka_unit_test(test_replacing),
        cmocka_unit_test(test_presets_are_as_large_as_what_is_published),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
