/* One small checkpoint in every layout must load to identical views; wrong ones must be refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "common/model/weights_internal.h"
#include "tests/unit/model/maker.h"

static struct dmk_weights *open_good(const char *dir, bool prefault)
{
    struct dmk_weights *w = NULL;
    struct dmk_error err = {0};
    const int r =
        dmk_weights_open(&(struct dmk_weights_conf){.dir = dir, .prefault = prefault}, &w, &err);

    if (r < 0) {
        print_error("%s\n", err.text);
    }
    assert_int_equal(r, 0);
    return w;
}

static void expect_refusal(const char *dir, int status, const char *sentence)
{
    struct dmk_weights *w = NULL;
    struct dmk_error err = {0};
    const int r =
        dmk_weights_open(&(struct dmk_weights_conf){.dir = dir, .prefault = true}, &w, &err);

    if (r != status || !strstr(err.text, sentence)) {
        print_error("want %d ...%s...\ngot  %d %s\n", status, sentence, r, err.text);
    }
    assert_int_equal(r, status);
    assert_non_null(strstr(err.text, sentence));
    assert_null(w);
}

static void write_kind(const char *dir, enum mk_kind kind, uint32_t n_files, bool pad)
{
    struct mk_checkpoint c;

    mk_checkpoint_make(&c, kind);
    mk_checkpoint_write(&c, dir, n_files, pad);
    mk_text(dir, "config.json", mk_config(kind));
    mk_checkpoint_free(&c);
}

static void same(const void *a, const void *b, size_t n_bytes)
{
    assert_memory_equal(a, b, n_bytes);
}

static void compare_dense(const struct dmk_weights *a, const struct dmk_weights *b)
{
    same(a->embedding, b->embedding, 2 * MK_V * MK_H);
    same(a->final_norm, b->final_norm, 2 * MK_H);
    same(a->unembedding, b->unembedding, 2 * MK_V * MK_H);
    for (int i = 0; i < MK_LAYERS; i++) {
        const struct dmk_layer_weights *x = &a->layers[i], *y = &b->layers[i];

        same(x->attn_norm, y->attn_norm, 2 * MK_H);
        same(x->q_w, y->q_w, 2 * MK_Q * MK_H);
        same(x->k_w, y->k_w, 2 * MK_KV * MK_H);
        same(x->v_w, y->v_w, 2 * MK_KV * MK_H);
        same(x->q_b, y->q_b, 2 * MK_Q);
        same(x->k_b, y->k_b, 2 * MK_KV);
        same(x->v_b, y->v_b, 2 * MK_KV);
        same(x->o_w, y->o_w, 2 * MK_H * MK_Q);
        same(x->o_b, y->o_b, 2 * MK_H);
        same(x->sinks, y->sinks, 2 * MK_HEADS);
        same(x->mlp_norm, y->mlp_norm, 2 * MK_H);
        same(x->router_w, y->router_w, 2 * MK_E * MK_H);
        same(x->router_b, y->router_b, 2 * MK_E);
        same(x->gate_up.bias, y->gate_up.bias, 2 * MK_E * 2 * MK_I);
        same(x->down.bias, y->down.bias, 2 * MK_E * MK_H);
    }
}

static void compare_mxfp4(const struct dmk_weights *a, const struct dmk_weights *b)
{
    for (int i = 0; i < MK_LAYERS; i++) {
        const struct dmk_layer_weights *x = &a->layers[i], *y = &b->layers[i];

        same(x->gate_up.blocks, y->gate_up.blocks, MK_E * 2 * MK_I * MK_H / 2);
        same(x->gate_up.scales, y->gate_up.scales, MK_E * 2 * MK_I * MK_H / 32);
        same(x->down.blocks, y->down.blocks, MK_E * MK_H * MK_I / 2);
        same(x->down.scales, y->down.scales, MK_E * MK_H * MK_I / 32);
    }
}

static float bf16_float(uint16_t v)
{
    const uint32_t bits = (uint32_t)v << 16;
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

/* BF16 rows against the MXFP4 numbers they were made of. */
static void compare_experts(const struct dmk_expert_matrix *q, const struct dmk_expert_matrix *b,
                            size_t rows, size_t cols)
{
    static const float values[16] = {0, 0.5f,  1,  1.5f,  2,  3,  4,  6,
                                     0, -0.5f, -1, -1.5f, -2, -3, -4, -6};

    assert_null(b->scales);
    for (size_t i = 0; i < MK_E * rows * cols; i++) {
        const uint8_t byte = q->blocks[i / 2];
        float want = values[i & 1 ? byte >> 4 : byte & 15];
        uint16_t got;

        for (int s = q->scales[i / 32]; s < 127; s++) {
            want *= 0.5f;
        }
        memcpy(&got, b->blocks + 2 * i, 2);
        assert_true(bf16_float(got) == want);
    }
}

static void test_layouts_agree(void **state)
{
    char hf[64], single[64], odd[64], orig[64], inner[64], bf16[64];
    struct dmk_weights *a, *b;

    (void)state;
    mk_folder(hf);
    write_kind(hf, MK_HF, 3, false);
    a = open_good(hf, true);
    assert_int_equal(a->expert_format, DMK_EXPERTS_MXFP4);
    assert_int_equal(a->shape.n_layers, MK_LAYERS);
    assert_int_equal(a->shape.n_eos, 2);
    assert_int_equal(a->shape.eos_ids[1], 5);

    mk_folder(single);
    write_kind(single, MK_HF, 1, false);
    b = open_good(single, false);
    compare_dense(a, b);
    compare_mxfp4(a, b);
    assert_int_equal(a->total_bytes, b->total_bytes);
    dmk_weights_close(&b);

    mk_folder(odd); /* BF16 tensors at odd addresses are copied */
    write_kind(odd, MK_HF, 3, true);
    b = open_good(odd, false);
    assert_non_null(b->owned);
    compare_dense(a, b);
    compare_mxfp4(a, b);
    dmk_weights_close(&b);

    mk_folder(orig); /* the original folder itself, in several files */
    write_kind(orig, MK_ORIGINAL, 3, false);
    b = open_good(orig, false);
    compare_dense(a, b);
    compare_mxfp4(a, b);
    assert_int_equal(b->shape.max_positions, 131072);
    dmk_weights_close(&b);

    mk_folder(inner); /* found as a subfolder */
    mk_subfolder(inner, "original");
    {
        char sub[128];

        (void)snprintf(sub, sizeof(sub), "%s/original", inner);
        write_kind(sub, MK_ORIGINAL, 1, false);
    }
    mk_text(inner, "generation_config.json", "{\"eos_token_id\":[7]}");
    b = open_good(inner, false);
    compare_dense(a, b);
    assert_int_equal(b->shape.n_eos, 1);
    assert_int_equal(b->shape.eos_ids[0], 7);
    dmk_weights_close(&b);

    mk_folder(bf16);
    write_kind(bf16, MK_HF_BF16, 3, false);
    b = open_good(bf16, true);
    assert_int_equal(b->expert_format, DMK_EXPERTS_BF16);
    compare_dense(a, b);
    for (int i = 0; i < MK_LAYERS; i++) {
        compare_experts(&a->layers[i].gate_up, &b->layers[i].gate_up, 2 * MK_I, MK_H);
        compare_experts(&a->layers[i].down, &b->layers[i].down, MK_H, MK_I);
    }
    dmk_weights_close(&b);
    dmk_weights_close(&a);
    mk_remove(hf);
    mk_remove(single);
    mk_remove(odd);
    mk_remove(orig);
    mk_remove(inner);
    mk_remove(bf16);
}

/* The folder's own checkpoint is taken before original/, whatever lies there. */
static void test_outer_wins(void **state)
{
    struct dmk_weights *w;
    char dir[64];

    (void)state;
    mk_folder(dir);
    write_kind(dir, MK_HF, 3, false);
    mk_subfolder(dir, "original");
    {
        char sub[128];

        (void)snprintf(sub, sizeof(sub), "%s/original", dir);
        mk_text(sub, "model.safetensors", "broken");
    }
    mk_text(dir, "stray.safetensors", "broken");
    w = open_good(dir, false);
    dmk_weights_close(&w);
    mk_remove(dir);
}

static void test_wrong_tensors(void **state)
{
    struct mk_checkpoint c;
    struct mk_tensor *t;
    char dir[64];

    (void)state;
    mk_folder(dir);
    mk_text(dir, "config.json", mk_config(MK_HF));
    mk_checkpoint_make(&c, MK_HF);

    t = mk_checkpoint_find(&c, "model.layers.1.self_attn.sinks");
    t->dtype = "F16";
    mk_checkpoint_write(&c, dir, 1, false);
    expect_refusal(
        dir, -DMK_EMISMATCH,
        "/model.safetensors: tensor \"model.layers.1.self_attn.sinks\": dtype is F16 but "
        "must be BF16");
    t->dtype = "BF16";

    t = mk_checkpoint_find(&c, "model.layers.0.self_attn.o_proj.weight");
    t->dims[0] = MK_Q;
    t->dims[1] = MK_H;
    mk_checkpoint_write(&c, dir, 1, false);
    expect_refusal(dir, -DMK_EMISMATCH,
                   "tensor \"model.layers.0.self_attn.o_proj.weight\": shape is [512,64] but "
                   "config.json asks for [64,512]");
    t->dims[0] = MK_H;
    t->dims[1] = MK_Q;

    t = mk_checkpoint_find(&c, "model.layers.1.mlp.experts.down_proj_scales");
    t->data[11] = 255;
    mk_checkpoint_write(&c, dir, 1, false);
    expect_refusal(dir, -DMK_EFORMAT,
                   "tensor \"model.layers.1.mlp.experts.down_proj_scales\": expert 0, row 11 has "
                   "the scale 255");
    t->data[11] = 120;

    t = mk_checkpoint_find(&c, "lm_head.weight");
    (void)snprintf(t->name, sizeof(t->name), "lm_head.wait");
    mk_checkpoint_write(&c, dir, 1, false);
    expect_refusal(
        dir, -DMK_EMISMATCH,
        "/model.safetensors: 1 tensors are missing (lm_head.weight) and 1 are unexpected "
        "(lm_head.wait)");
    (void)snprintf(t->name, sizeof(t->name), "lm_head.weight");

    mk_checkpoint_drop(&c, "model.layers.0.mlp.router.bias");
    mk_checkpoint_write(&c, dir, 3, false);
    expect_refusal(dir, -DMK_EMISMATCH,
                   "/model.safetensors.index.json: 1 tensors are missing: "
                   "model.layers.0.mlp.router.bias");
    mk_checkpoint_free(&c);

    mk_checkpoint_make(&c, MK_HF);
    mk_text(dir, "config.json", mk_config(MK_HF_BF16));
    mk_checkpoint_write(&c, dir, 3, false);
    expect_refusal(dir, -DMK_EMISMATCH, "but config.json has no quantization_config");
    mk_text(dir, "config.json", mk_config(MK_ORIGINAL));
    expect_refusal(dir, -DMK_EMISMATCH,
                   "33 tensors are missing (embedding.weight, norm.scale, "
                   "unembedding.weight, block.0.attn.norm.scale, ...) and 41 "
                   "are unexpected");
    mk_checkpoint_free(&c);
    mk_remove(dir);
}

static void cut_off_meanwhile(void)
{
    struct dmk_error err = {0};
    struct dmk_weights *w;
    char dir[64], path[96];
    const char *said;
    char *rest;
    size_t begin, end;

    mk_folder(dir);
    write_kind(dir, MK_HF, 1, false);
    (void)snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    w = open_good(dir, false);
    assert_int_equal(truncate(path, 4096), 0);
    assert_int_equal(dmk_weights_prefault(w, &(struct dmk_weights_conf){.dir = dir}, &err),
                     -DMK_EIO);
    said = strstr(err.text, "model.safetensors: can not be read between bytes ");
    assert_non_null(said);
    begin = strtoul(strstr(said, "bytes ") + strlen("bytes "), &rest, 10);
    assert_memory_equal(rest, " and ", 5);
    end = strtoul(rest + 5, NULL, 10);
    assert_true(begin < end && end > 4096);
    dmk_weights_close(&w);
    mk_remove(dir);
}

/* A file that is cut off after it was opened is a sentence, not the end of the process, whichever thread is first. */
static void test_cut_off_meanwhile(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        cut_off_meanwhile();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layouts_agree),
        cmocka_unit_test(test_outer_wins),
        cmocka_unit_test(test_wrong_tensors),
        cmocka_unit_test(test_cut_off_meanwhile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
