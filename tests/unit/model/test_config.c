/* Both layouts of config.json, and every way in which a config can describe another model. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/model/config.h"
#include "tests/unit/model/maker.h"

/* The config with `from` replaced by `to`; from must be there. */
static void write_edited(const char *dir, const char *config, const char *from, const char *to)
{
    const char *at = strstr(config, from);
    char text[4096];

    assert_non_null(at);
    (void)snprintf(text, sizeof(text), "%.*s%s%s", (int)(at - config), config, to,
                   at + strlen(from));
    mk_text(dir, "config.json", text);
}

static void expect_refusal(const char *dir, const char *sentence)
{
    struct dmk_config c = {.shape.n_layers = 77};
    struct dmk_error err = {0};
    const int r = dmk_config_load(dir, NULL, &c, &err);

    if (r >= 0 || !strstr(err.text, sentence)) {
        print_error("want %s\ngot  %d %s\n", sentence, r, err.text);
    }
    assert_true(r < 0);
    assert_non_null(strstr(err.text, sentence));
    assert_non_null(strstr(err.text, dir)); /* the file is named */
    assert_int_equal(c.shape.n_layers, 77);
}

static const struct {
    enum mk_kind kind;
    const char *from, *to, *sentence;
} bad[] = {
    {MK_HF, "\"gpt_oss\"", "\"llama\"",
     "\"model_type\" is \"llama\" but only \"gpt_oss\" is supported"},
    {MK_HF, "\"num_hidden_layers\":2,", "", "\"num_hidden_layers\" is missing"},
    {MK_HF, "\"num_hidden_layers\":2,", "\"num_hidden_layers\":\"2\",",
     "\"num_hidden_layers\" must be an integer from 1 to 16777216, not \"2\""},
    {MK_HF, "\"head_dim\":64", "\"head_dim\":128", "\"head_dim\" is 128 but only 64 is supported"},
    {MK_HF, "\"hidden_size\":64", "\"hidden_size\":65",
     "hidden is 65 but must be a multiple of 32"},
    {MK_HF, "\"num_experts_per_tok\":4", "\"num_experts_per_tok\":4,\"experts_per_token\":2",
     "\"num_experts_per_tok\" is 4 but \"experts_per_token\" is 2"},
    {MK_HF, "\"sliding_window\":128", "\"sliding_window\":64", "window is 64 but must be 128"},
    {MK_HF, "\"sliding_window\":128", "\"sliding_window\":null", "\"sliding_window\" is null"},
    {MK_HF, "\"head_dim\"", "\"tie_word_embeddings\":true,\"head_dim\"",
     "\"tie_word_embeddings\" is true but only false is supported"},
    {MK_HF, "\"head_dim\"", "\"attention_bias\":false,\"head_dim\"",
     "\"attention_bias\" is false but only true is supported"},
    {MK_HF, "\"head_dim\"", "\"hidden_act\":\"gelu\",\"head_dim\"", "\"hidden_act\" is \"gelu\""},
    {MK_HF, "\"head_dim\"", "\"layer_types\":[\"full_attention\",\"full_attention\"],\"head_dim\"",
     "\"layer_types\" entry 0 must be \"sliding_attention\", not \"full_attention\""},
    {MK_HF, "\"head_dim\"", "\"layer_types\":[\"sliding_attention\"],\"head_dim\"",
     "\"layer_types\" has 1 entries for 2 layers"},
    {MK_HF, "\"truncate\":false", "\"truncate\":true",
     "rope_scaling: \"truncate\" is true but only false is supported"},
    {MK_HF, ",\"truncate\":false", "", "rope_scaling: \"truncate\" is missing"},
    {MK_HF, "\"yarn\"", "\"linear\"", "rope_scaling: \"rope_type\" is \"linear\""},
    {MK_HF, "\"factor\":32.0,", "", "rope_scaling: \"factor\" is missing"},
    {MK_HF, "\"factor\":32.0,", "\"factor\":32.0,\"attention_factor\":1.0,",
     "rope_scaling: \"attention_factor\" is 1 but only 0.1 ln(factor) + 1 = 1.34657"},
    {MK_HF, "\"factor\":32.0,", "\"factor\":32.0,\"mscale\":1.0,",
     "rope_scaling: \"mscale\" is not supported"},
    {MK_HF, "\"rope_theta\":150000,", "", "\"rope_theta\" is missing"},
    {MK_HF, "\"eos_token_id\":[3,5]", "\"eos_token_id\":[3,16]",
     "\"eos_token_id\" must hold ids below the vocabulary's 16, not 16"},
    {MK_HF, "\"eos_token_id\":[3,5]", "\"eos_token_id\":[]", "\"eos_token_id\" lists 0 ids"},
    {MK_HF, "\"eos_token_id\":[3,5]", "\"eos_token_id\":\"x\"", "not \"x\""},
    {MK_HF, "\"mxfp4\"", "\"gptq\"",
     "quantization_config: \"quant_method\" is \"gptq\" but only \"mxfp4\" is supported"},
    {MK_ORIGINAL, "\"rope_ntk_beta\":32", "\"rope_ntk_beta\":0", "\"rope_ntk_beta\" must be"},
    {MK_ORIGINAL, "\"num_experts\":8", "\"num_experts\":12", "n_experts is 12"},
    {MK_ORIGINAL, "\"initial_context_length\":4096,", "", "\"initial_context_length\" is missing"},
};

static void test_refused(void **state)
{
    char dir[64];

    (void)state;
    mk_folder(dir);
    expect_refusal(dir, "config.json: can not be opened");
    mk_text(dir, "config.json", "[]");
    expect_refusal(dir, "config.json: the top level must be an object");
    mk_text(dir, "config.json", "{\"a\":1,\"a\":1}");
    expect_refusal(dir, "duplicate object key");
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        write_edited(dir, mk_config(bad[i].kind), bad[i].from, bad[i].to);
        expect_refusal(dir, bad[i].sentence);
    }
    mk_text(dir, "config.json", mk_config(MK_HF));
    mk_text(dir, "generation_config.json", "{\"eos_token_id\":[1,99]}");
    expect_refusal(dir, "generation_config.json: \"eos_token_id\" must hold ids below");
    mk_remove(dir);
}

static struct dmk_config load(const char *dir)
{
    struct dmk_config c = {0};
    struct dmk_error err = {0};

    if (dmk_config_load(dir, NULL, &c, &err) < 0) {
        fail_msg("%s", err.text);
    }
    return c;
}

/* Alike but for the ids, which only one of them has. */
static void test_layouts_agree(void **state)
{
    struct dmk_config a, b;
    char dir[64];

    (void)state;
    mk_folder(dir);
    mk_text(dir, "config.json", mk_config(MK_HF));
    a = load(dir);
    mk_text(dir, "config.json", mk_config(MK_ORIGINAL));
    b = load(dir);
    assert_int_equal(a.layout, DMK_CONFIG_HF);
    assert_int_equal(b.layout, DMK_CONFIG_ORIGINAL);
    assert_true(a.mxfp4 && b.mxfp4);
    assert_int_equal(a.shape.n_eos, 2);
    assert_int_equal(b.shape.n_eos, 0);
    memcpy(b.shape.eos_ids, a.shape.eos_ids, sizeof(a.shape.eos_ids));
    b.shape.n_eos = a.shape.n_eos;
    assert_memory_equal(&a.shape, &b.shape, sizeof(a.shape));
    assert_int_equal(a.shape.max_positions, 131072);
    assert_true(a.shape.rope_theta == 150000.0 && a.shape.rope_factor == 32.0);
    assert_true(a.shape.swiglu_alpha == 1.702f && a.shape.swiglu_limit == 7.0f);
    mk_remove(dir);
}

/* rope_parameters, plain RoPE, the default, and where end-of-sequence ids come from. */
static void test_variants(void **state)
{
    struct dmk_config a, b;
    char dir[64];

    (void)state;
    mk_folder(dir);
    mk_text(dir, "config.json", mk_config(MK_HF));
    a = load(dir);
    write_edited(dir, mk_config(MK_HF), "\"rope_theta\":150000,\"rope_scaling\":{",
                 "\"rope_parameters\":{\"rope_theta\":150000.0,");
    b = load(dir);
    assert_memory_equal(&a, &b, sizeof(a));
    write_edited(dir, mk_config(MK_HF), "\"rope_type\":\"yarn\"", "\"rope_type\":\"default\"");
    assert_true(load(dir).shape.rope_factor == 1.0);
    write_edited(dir, mk_config(MK_HF), "\"rope_type\"", "\"type\"");
    assert_true(load(dir).shape.rope_factor == 32.0);
    write_edited(dir, mk_config(MK_HF), "\"rope_scaling\"", "\"something_else\"");
    assert_true(load(dir).shape.rope_factor == 32.0);
    write_edited(dir, mk_config(MK_HF), "\"eos_token_id\":[3,5]", "\"eos_token_id\":4");
    a = load(dir);
    assert_int_equal(a.shape.n_eos, 1);
    assert_int_equal(a.shape.eos_ids[0], 4);
    mk_text(dir, "generation_config.json", "{\"eos_token_id\":[9,8,7]}");
    a = load(dir);
    assert_int_equal(a.shape.n_eos, 3);
    assert_int_equal(a.shape.eos_ids[2], 7);
    mk_text(dir, "generation_config.json", "{\"do_sample\":true}");
    assert_int_equal(load(dir).shape.eos_ids[0], 4);
    /* No ids are named: the usual ones where the vocabulary has all of them, else none. */
    write_edited(dir, mk_config(MK_ORIGINAL), "\"vocab_size\":16,", "\"vocab_size\":200005,");
    assert_int_equal(load(dir).shape.n_eos, 0);
    write_edited(dir, mk_config(MK_ORIGINAL), "\"vocab_size\":16,", "\"vocab_size\":201088,");
    a = load(dir);
    assert_int_equal(a.shape.n_eos, 3);
    assert_int_equal(a.shape.eos_ids[2], 200012);
    mk_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_layouts_agree),
        cmocka_unit_test(test_variants),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
