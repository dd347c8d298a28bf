/* The compact checkpoint in models/ must become a checkpoint that loads and holds its numbers, and nothing
 * that is damaged may become one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tests/unit/model/maker.h"
#include "tools/tinymodel/expand.h"

#define COMPACT MODELS_DIR "/tiny"

static struct dmk_compact open_compact(void)
{
    struct dmk_compact c;
    struct dmk_error err = {0};

    if (dmk_compact_open(COMPACT, &c, &err) < 0) {
        fail_msg("%s", err.text);
    }
    return c;
}

static const struct dmk_compact_tensor *find(const struct dmk_compact *c, const char *name)
{
    const struct dmk_compact_tensor *t = dmk_compact_find(c, name, strlen(name));

    assert_non_null(t);
    return t;
}

static float bf16_float(uint16_t v)
{
    const uint32_t bits = (uint32_t)v << 16;
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

static float mxint8_float(const struct dmk_compact_tensor *t, uint64_t i)
{
    return ldexpf((float)(int8_t)t->data[i], t->data[t->n_elements + i / 32] - 127);
}

static void check_matrix(const struct dmk_compact *c, const char *name, const uint16_t *have)
{
    const struct dmk_compact_tensor *t = find(c, name);

    for (uint64_t i = 0; i < t->n_elements; i++) {
        assert_true(bf16_float(have[i]) == mxint8_float(t, i));
    }
}

static void check_rows(const struct dmk_compact *c, const char *name, const uint16_t *have)
{
    const struct dmk_compact_tensor *t = find(c, name), *ids = find(c, "ids");
    const uint32_t h = c->shape.hidden, n = (uint32_t)ids->n_elements;
    uint32_t next = 0;

    for (uint32_t id = 0; id < c->shape.vocab; id++) {
        uint32_t used = UINT32_MAX;

        if (next < n) {
            memcpy(&used, ids->data + 4ull * next, 4);
        }
        const uint64_t row = used == id ? next++ : n;

        for (uint32_t j = 0; j < h; j += id % 97 == 0 || used == id ? 1 : 61) {
            assert_true(bf16_float(have[(uint64_t)id * h + j]) == mxint8_float(t, row * h + j));
        }
    }
    assert_int_equal(next, n);
}

static void test_numbers(void **state)
{
    struct dmk_compact c = open_compact();
    struct dmk_weights *w = NULL;
    struct dmk_error err = {0};
    char top[64], out[80];
    uint64_t bytes = 0;

    (void)state;
    mk_folder(top);
    (void)snprintf(out, sizeof(out), "%s/m", top);
    const struct dmk_tinymodel_conf conf = {.out = out, .n_shards = 1};

    if (dmk_compact_expand(&c, &conf, &bytes, &err) < 0 ||
        dmk_weights_open(&(struct dmk_weights_conf){.dir = out, .prefault = true}, &w, &err) < 0) {
        fail_msg("%s", err.text);
    }
    assert_int_equal(w->total_bytes, bytes);
    assert_int_equal(w->expert_format, DMK_EXPERTS_MXFP4);
    assert_int_equal(w->shape.vocab, 201088);
    check_rows(&c, "model.embed_tokens.weight", w->embedding);
    check_rows(&c, "lm_head.weight", w->unembedding);
    assert_memory_equal(w->final_norm, find(&c, "model.norm.weight")->data, 2ull * c.shape.hidden);
    for (uint32_t l = 0; l < c.shape.n_layers; l++) {
        const struct dmk_compact_tensor *t;
        char name[80];

        (void)snprintf(name, sizeof(name), "model.layers.%u.self_attn.k_proj.weight", l);
        check_matrix(&c, name, w->layers[l].k_w);
        (void)snprintf(name, sizeof(name), "model.layers.%u.mlp.experts.down_proj", l);
        t = find(&c, name);
        assert_memory_equal(w->layers[l].down.blocks, t->data, t->n_elements / 2);
        assert_memory_equal(w->layers[l].down.scales, t->data + t->n_elements / 2,
                            t->n_elements / 32);
    }
    dmk_weights_close(&w);
    mk_remove(top);
    dmk_compact_close(&c);
}

static char *read_file(const char *path, size_t *ret_len)
{
    FILE *f = fopen(path, "rb");
    char *data = malloc(16u << 20);

    assert_non_null(f);
    assert_non_null(data);
    *ret_len = fread(data, 1, (16u << 20) - 1, f);
    data[*ret_len] = '\0';
    (void)fclose(f);
    return data;
}

static void write_file(const char *dir, const char *name, const char *data, size_t len)
{
    char path[128];

    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");

    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, len, f), len);
    assert_int_equal(fclose(f), 0);
}

/* Replaces the first `from` of the text by `to`, of the same length. */
static void edit(char *text, const char *from, const char *to)
{
    char *at = strstr(text, from);

    assert_non_null(at);
    assert_int_equal(strlen(from), strlen(to));
    memcpy(at, to, strlen(to));
}

static void expect_refusal(const char *from, const char *to, int64_t flip, size_t cut,
                           const char *sentence)
{
    char top[64], dir[80], out[96];
    size_t json_len, bin_len;
    char *json = read_file(COMPACT "/model.json", &json_len);
    char *bin = read_file(COMPACT "/model.bin", &bin_len);
    struct dmk_compact c;
    struct dmk_error err = {0};
    uint64_t bytes = 0;

    mk_folder(top);
    mk_subfolder(top, "c");
    (void)snprintf(dir, sizeof(dir), "%s/c", top);
    (void)snprintf(out, sizeof(out), "%s/m", top);
    if (from) {
        edit(json, from, to);
    }
    if (flip >= 0) {
        bin[flip] ^= 1;
    }
    write_file(dir, "model.json", json, json_len);
    write_file(dir, "model.bin", bin, bin_len - cut);
    int r = dmk_compact_open(dir, &c, &err);

    if (r == 0) {
        r = dmk_compact_expand(&c, &(struct dmk_tinymodel_conf){.out = out, .n_shards = 1}, &bytes,
                               &err);
        dmk_compact_close(&c);
    }
    assert_true(r < 0);
    if (!strstr(err.text, sentence)) {
        fail_msg("want %s\ngot  %s", sentence, err.text);
    }
    mk_remove(top);
    free(json);
    free(bin);
}

static void test_damage(void **state)
{
    (void)state;
    expect_refusal(NULL, NULL, 4000000, 0, "its checksum is");
    expect_refusal(NULL, NULL, -1, 1, "holds fewer bytes");
    expect_refusal("damask-compact", "damask-compost", -1, 0, "not damask-compact");
    expect_refusal("\"version\": 1", "\"version\": 2", -1, 0, "version");
    expect_refusal("\"hidden\": 192", "\"hidden\": 160", -1, 0, "have another shape");
    expect_refusal("\"layers\": 4", "\"layers\": 5", -1, 0, "are missing");
    expect_refusal("\"layers\": 4", "\"layers\": 2", -1, 0, "tensors are listed but");
    expect_refusal("\"lm_head.weight\"", "\"lm_hand.weight\"", -1, 0, "are missing");
    expect_refusal("\"format\": \"rows\"", "\"format\": \"bf16\"", -1, 0, "does not go with");
    expect_refusal("\"name\": \"ids\"", "\"name\": \"idz\"", -1, 0, "must be a tensor \"ids\"");
    expect_refusal("\"shape\": [192]", "\"shape\": [-92]", -1, 0, "sizes that fit");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_damage),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
