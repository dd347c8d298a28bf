/* Converted folders of the small checkpoint, in every layout and from every kind of source: each rank sees the same
 * bytes as of the checkpoint itself. Whole runs, crashes and damage are in tests/integ/test_convert.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/hash.h"
#include "common/model/engine.h"
#include "kernels/dtype.h"
#include "tests/unit/model/maker.h"
#include "tools/convert/convert.h"

static void write_source(const char *dir, enum mk_kind kind, uint32_t n_files, bool pad)
{
    struct mk_checkpoint c;

    mk_checkpoint_make(&c, kind);
    mk_checkpoint_write(&c, dir, n_files, pad);
    mk_text(dir, "config.json", mk_config(kind));
    mk_checkpoint_free(&c);
}

static struct dmk_weights *open_weights(const char *dir)
{
    const struct dmk_weights_conf conf = {.dir = dir, .prefault = true};
    struct dmk_weights *w = NULL;
    struct dmk_error err = {0};

    if (dmk_weights_open(&conf, &w, &err) < 0) {
        fail_msg("%s", err.text);
    }
    return w;
}

static void convert(const char *src, const char *dst, struct dmk_layout layout,
                    enum dmk_expert_format experts, struct dmk_convert_report *ret_report)
{
    const struct dmk_convert_conf conf = {
        .src = src, .dst = dst, .layout = layout, .experts = experts, .n_jobs = 2, .verify = true};
    struct dmk_error err = {0};

    if (dmk_convert(&conf, ret_report, &err) < 0) {
        fail_msg("%s", err.text);
    }
    free(ret_report->inexact);
    ret_report->inexact = NULL;
}

static struct dmk_rank_weights rank_of(const struct dmk_weights *w, struct dmk_layout layout,
                                       uint32_t rank)
{
    struct dmk_rank_weights r = {0};

    assert_int_equal(dmk_weights_of_rank(w, layout, rank, &r, NULL), 0);
    return r;
}

static void same_experts(const struct dmk_expert_matrix *a, const struct dmk_expert_matrix *b,
                         size_t n_experts, size_t rows, size_t cols)
{
    assert_memory_equal(a->blocks, b->blocks, n_experts * rows * cols / 2);
    assert_memory_equal(a->scales, b->scales, n_experts * rows * cols / 32);
    assert_memory_equal(a->bias, b->bias, n_experts * rows * 2);
}

static void same_columns(const struct dmk_layer_weights *a, const struct dmk_layer_weights *b,
                         size_t width)
{
    for (size_t row = 0; row < MK_H; row++) {
        assert_memory_equal(a->o_w + row * a->o_stride, b->o_w + row * b->o_stride, width * 2);
    }
}

static void same_layer(const struct dmk_layer_weights *a, const struct dmk_layer_weights *b,
                       const struct dmk_shard *shard)
{
    const size_t q = (size_t)shard->n_kv_heads * (MK_HEADS / 8) * 64,
                 kv = (size_t)shard->n_kv_heads * 64;

    assert_memory_equal(a->attn_norm, b->attn_norm, MK_H * 2);
    assert_memory_equal(a->q_w, b->q_w, q * MK_H * 2);
    assert_memory_equal(a->q_b, b->q_b, q * 2);
    assert_memory_equal(a->k_w, b->k_w, kv * MK_H * 2);
    assert_memory_equal(a->k_b, b->k_b, kv * 2);
    assert_memory_equal(a->v_w, b->v_w, kv * MK_H * 2);
    assert_memory_equal(a->v_b, b->v_b, kv * 2);
    same_columns(a, b, q);
    assert_memory_equal(a->o_b, b->o_b, MK_H * 2);
    assert_memory_equal(a->sinks, b->sinks, q / 64 * 2);
    assert_memory_equal(a->mlp_norm, b->mlp_norm, MK_H * 2);
    assert_memory_equal(a->router_w, b->router_w, MK_E * MK_H * 2);
    assert_memory_equal(a->router_b, b->router_b, MK_E * 2);
    same_experts(&a->gate_up, &b->gate_up, shard->n_experts, 2 * MK_I, MK_H);
    same_experts(&a->down, &b->down, shard->n_experts, MK_H, MK_I);
}

static void same_weights(const struct dmk_weights *a, const struct dmk_weights *b,
                         struct dmk_layout layout)
{
    struct dmk_id128 ids[2];

    for (uint32_t i = 0; i < layout.tp * layout.dp; i++) {
        const struct dmk_shard shard = dmk_layout_shard(&a->shape, layout, i);
        struct dmk_rank_weights x = rank_of(a, layout, i), y = rank_of(b, layout, i);

        assert_memory_equal(x.embedding, y.embedding, MK_V * MK_H * 2);
        assert_memory_equal(x.final_norm, y.final_norm, MK_H * 2);
        assert_memory_equal(x.unembedding, y.unembedding, (size_t)shard.n_vocab * MK_H * 2);
        for (uint32_t l = 0; l < MK_LAYERS; l++) {
            same_layer(&x.layers[l], &y.layers[l], &shard);
        }
        dmk_weights_rank_release(&x);
        dmk_weights_rank_release(&y);
    }
    assert_int_equal(dmk_weights_model_id(a, NULL, NULL, &ids[0]), 0);
    assert_int_equal(dmk_weights_model_id(b, NULL, NULL, &ids[1]), 0);
    assert_true(dmk_id128_equal(ids[0], ids[1]));
}

static void test_every_layout(void **state)
{
    static const struct dmk_layout layouts[] = {{1, 1}, {2, 1}, {4, 1}, {8, 1},
                                                {1, 8}, {2, 2}, {4, 2}};
    char src[64], dst[80];
    struct dmk_weights *whole;

    (void)state;
    mk_folder(src);
    write_source(src, MK_HF, 3, true); /* three files, and BF16 at odd addresses */
    whole = open_weights(src);
    (void)snprintf(dst, sizeof(dst), "%s-cut", src);
    for (size_t i = 0; i < sizeof(layouts) / sizeof(layouts[0]); i++) {
        struct dmk_convert_report report = {0};
        struct dmk_weights *cut;

        convert(src, dst, layouts[i], DMK_EXPERTS_MXFP4, &report);
        assert_false(report.was_complete);
        assert_int_equal(report.n_files,
                         1 + 2 * layouts[i].tp + MK_LAYERS * layouts[i].tp * layouts[i].dp);
        cut = open_weights(dst);
        same_weights(whole, cut, layouts[i]);
        dmk_weights_close(&cut);
        mk_remove(dst);
    }
    dmk_weights_close(&whole);
    mk_remove(src);
}

/* The original layout, in a folder of its own inside: q, k and v are one tensor there. */
static void test_original(void **state)
{
    const struct dmk_layout layout = {4, 1};
    struct dmk_convert_report report = {0};
    struct dmk_weights *whole, *cut;
    char outer[64], inner[80], dst[80];

    (void)state;
    mk_folder(outer);
    mk_subfolder(outer, "original");
    (void)snprintf(inner, sizeof(inner), "%s/original", outer);
    (void)snprintf(dst, sizeof(dst), "%s-cut", outer);
    write_source(inner, MK_ORIGINAL, 1, false);
    whole = open_weights(outer);
    convert(outer, dst, layout, DMK_EXPERTS_MXFP4, &report);
    cut = open_weights(dst);
    same_weights(whole, cut, layout);
    dmk_weights_close(&cut);
    dmk_weights_close(&whole);
    mk_remove(dst);
    mk_remove(outer);
}

/* Sets the time of a file, as one who writes to it does. */
static void touch(const char *dir, const char *name, time_t seconds)
{
    const struct timespec times[2] = {{.tv_sec = seconds}, {.tv_sec = seconds}};
    char path[160];

    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void touch_source(void *ud, const char *what, uint64_t done, uint64_t total,
                         uint64_t skipped)
{
    (void)what, (void)done, (void)total, (void)skipped;
    touch(ud, "model.safetensors", 2000);
}

/* A source that somebody writes to meanwhile makes no folder that counts. When it is as it was, what had been made is
 * kept, by whatever way its folder is named then. */
static void test_source_that_changes(void **state)
{
    char src[64], dst[80], again[80], manifest[96];
    struct dmk_convert_conf conf = {.src = src,
                                    .dst = dst,
                                    .layout = {2, 1},
                                    .experts = DMK_EXPERTS_MXFP4,
                                    .verify = true,
                                    .on_progress = touch_source,
                                    .ud = src};
    struct dmk_convert_report report = {0};
    struct dmk_error err = {0};

    (void)state;
    mk_folder(src);
    write_source(src, MK_HF, 1, false);
    touch(src, "model.safetensors", 1000);
    (void)snprintf(dst, sizeof(dst), "%s-cut", src);
    (void)snprintf(again, sizeof(again), "%s/../%s", src, strrchr(src, '/') + 1);
    (void)snprintf(manifest, sizeof(manifest), "%s/manifest.json", dst);
    assert_int_equal(dmk_convert(&conf, &report, &err), -DMK_EIO);
    assert_non_null(strstr(err.text, "model.safetensors: has changed while it was converted"));
    assert_int_equal(access(manifest, F_OK), -1);
    conf.on_progress = NULL;
    assert_int_equal(dmk_convert(&conf, &report, &err), -DMK_EMISMATCH);
    touch(src, "model.safetensors", 1000);
    conf.src = again;
    if (dmk_convert(&conf, &report, &err) < 0) {
        fail_msg("%s", err.text);
    }
    assert_int_equal(report.n_kept, report.n_files);
    assert_int_equal(access(manifest, F_OK), 0);
    free(report.inexact);
    mk_remove(dst);
    mk_remove(src);
}

static double value_of(const struct dmk_expert_matrix *m, size_t i)
{
    const uint8_t byte = m->blocks[i / 2];

    return dmk_e2m1_to_f32(i % 2 ? byte >> 4 : byte & 15) *
           (double)dmk_ue8m0_to_f32(m->scales[i / 32]);
}

/* What a host makes of FP8 files is what the MXFP4 ones say, where the blocks are exact. */
static void test_fp8_expanded(void **state)
{
    const struct dmk_layout layout = {2, 1};
    struct dmk_convert_report report = {0};
    struct dmk_weights *whole, *cut;
    char src[64], dst[80];

    (void)state;
    mk_folder(src);
    (void)snprintf(dst, sizeof(dst), "%s-cut", src);
    write_source(src, MK_HF, 1, false);
    whole = open_weights(src);
    convert(src, dst, layout, DMK_EXPERTS_FP8, &report);
    assert_int_equal(report.n_inexact, 0);
    assert_true(report.n_blocks > 0);
    cut = open_weights(dst);
    assert_int_equal(cut->expert_format, DMK_EXPERTS_FP8);
    for (uint32_t r = 0; r < 2; r++) {
        struct dmk_rank_weights x = rank_of(whole, layout, r), y = rank_of(cut, layout, r);

        assert_int_equal(dmk_weights_expand_rank(cut, &y, MK_E / 2, NULL), 0);
        for (uint32_t l = 0; l < MK_LAYERS; l++) {
            const uint16_t *up = (const uint16_t *)(const void *)y.layers[l].gate_up.blocks;
            const uint16_t *down = (const uint16_t *)(const void *)y.layers[l].down.blocks;

            for (size_t i = 0; i < (size_t)MK_E / 2 * 2 * MK_I * MK_H; i++) {
                assert_true(value_of(&x.layers[l].gate_up, i) == (double)dmk_bf16_to_f32(up[i]));
            }
            for (size_t i = 0; i < (size_t)MK_E / 2 * MK_I * MK_H; i++) {
                assert_true(value_of(&x.layers[l].down, i) == (double)dmk_bf16_to_f32(down[i]));
            }
        }
        dmk_weights_rank_release(&x);
        dmk_weights_rank_release(&y);
    }
    dmk_weights_close(&cut);
    dmk_weights_close(&whole);
    mk_remove(dst);
    mk_remove(src);
}

/* Logits of three tokens; what the engine says when it can not be opened, else NULL. dense8: dense weights in FP8. */
static const char *try_engine(const char *dir, const char *backend, struct dmk_layout layout,
                              bool dense8, float *ret_logits)
{
    static const uint32_t ids[] = {3, 7, 15}, pages[] = {1};
    const struct dmk_engine_conf conf = {.model_dir = dir,
                                         .backend = backend,
                                         .layout = layout,
                                         .fp8_dense = dense8,
                                         .n_threads = 1,
                                         .n_full_pages = 4,
                                         .n_window_pages = 4,
                                         .max_step_tokens = 16,
                                         .max_step_seqs = 2,
                                         .max_logit_rows = 16};
    const struct dmk_step_seq seq = {.ids = ids,
                                     .n_tokens = 3,
                                     .full_pages = pages,
                                     .ring = {0, 1, 2},
                                     .n_ring = 3,
                                     .logits = DMK_LOGITS_ALL};
    const struct dmk_step step = {.seqs = &seq, .n_seqs = 1, .logits = ret_logits};
    static struct dmk_error err;
    struct dmk_engine *engine = NULL;

    if (dmk_engine_open(&conf, &engine, &err) < 0) {
        return err.text;
    }
    assert_int_equal(dmk_engine_step(engine, &step), 0);
    dmk_engine_close(&engine);
    return NULL;
}

static void run_engine(const char *dir, const char *backend, struct dmk_layout layout,
                       float *ret_logits)
{
    const char *refusal = try_engine(dir, backend, layout, false, ret_logits);

    if (refusal) {
        fail_msg("%s", refusal);
    }
}

/* A device (one that is none) gets what the host has, of files of either format, through its pinned memory. */
static void test_device_loads(void **state)
{
    static const struct dmk_layout layouts[] = {{1, 1}, {2, 2}};
    float want[3 * MK_V], got[3 * MK_V];
    char src[64], dst[80];

    (void)state;
    mk_folder(src);
    (void)snprintf(dst, sizeof(dst), "%s-cut", src);
    write_source(src, MK_HF, 3, false);
    run_engine(src, "ref", layouts[0], want);
    for (size_t i = 0; i < 2; i++) {
        static const enum dmk_expert_format formats[] = {DMK_EXPERTS_MXFP4, DMK_EXPERTS_FP8};

        run_engine(src, "cuda", layouts[i], got);
        assert_memory_equal(got, want, sizeof(want));
        for (size_t f = 0; f < 2; f++) {
            struct dmk_convert_report report = {0};

            convert(src, dst, layouts[i], formats[f], &report);
            memset(got, 0, sizeof(got));
            run_engine(dst, "cuda", layouts[i], got);
            assert_memory_equal(got, want, sizeof(want));
            run_engine(dst, "ref", layouts[i], got);
            assert_memory_equal(got, want, sizeof(want));
            mk_remove(dst);
        }
    }
    mk_remove(src);
}

/* Dense weights in FP8 of a folder that was cut into eight, whose files end in the middle of blocks: as of the whole. */
static void test_dense_fp8(void **state)
{
    static const struct dmk_layout one = {1, 1}, eight = {8, 1};
    struct dmk_convert_report report = {0};
    float want[3 * MK_V], got[3 * MK_V], bf16[3 * MK_V];
    char src[64], dst[80];

    (void)state;
    mk_folder(src);
    (void)snprintf(dst, sizeof(dst), "%s-cut", src);
    write_source(src, MK_HF, 3, false);
    convert(src, dst, eight, DMK_EXPERTS_MXFP4, &report);
    run_engine(src, "ref", one, bf16);
    assert_null(try_engine(src, "ref", one, true, want));
    assert_memory_not_equal(want, bf16, sizeof(want));
    assert_null(try_engine(dst, "ref", eight, true, got));
    assert_memory_equal(got, want, sizeof(want));
    assert_string_equal(try_engine(src, "cuda", one, true, got),
                        "dense weights in FP8 on backend 'cuda' need an even number of query heads "
                        "for a KV head, not 1");
    mk_remove(dst);
    mk_remove(src);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_layout),        cmocka_unit_test(test_original),
        cmocka_unit_test(test_source_that_changes), cmocka_unit_test(test_fp8_expanded),
        cmocka_unit_test(test_device_loads),        cmocka_unit_test(test_dense_fp8),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
