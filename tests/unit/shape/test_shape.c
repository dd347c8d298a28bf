/* Presets, refusals by name and value, and shards that cover everything once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include "common/shape/shape.h"

static struct dmk_shape preset(const char *name)
{
    struct dmk_shape s;

    assert_int_equal(dmk_shape_preset(name, &s, NULL), 0);
    return s;
}

static void test_presets(void **state)
{
    struct dmk_shape s = preset("gpt-oss-120b");
    struct dmk_error err = {0};

    (void)state;
    assert_int_equal(s.n_layers, 36);
    assert_int_equal(s.n_experts, 128);
    assert_int_equal(s.hidden, 2880);
    assert_int_equal(dmk_shape_check(&s, &err), 0);
    s = preset("gpt-oss-20b");
    assert_int_equal(s.n_layers, 24);
    assert_int_equal(s.n_experts, 32);
    assert_int_equal(dmk_shape_n_full_layers(&s), 12);
    /* config.json and generation_config.json as published, the same for both. */
    assert_true(s.hidden == 2880 && s.intermediate == 2880 && s.vocab == 201088);
    assert_true(s.n_heads == 64 && s.n_kv_heads == 8 && s.experts_per_token == 4);
    assert_true(s.window == 128 && s.max_positions == 131072 && s.norm_eps == 1e-5f);
    assert_true(s.swiglu_alpha == 1.702f && s.swiglu_limit == 7.0f);
    assert_true(s.rope_theta == 150000.0 && s.rope_factor == 32.0);
    assert_true(s.rope_beta_fast == 32.0 && s.rope_beta_slow == 1.0);
    assert_int_equal(s.rope_original_positions, 4096);
    assert_true(s.n_eos == 3 && s.eos_ids[0] == 200002 && s.eos_ids[1] == 199999);
    assert_int_equal(s.eos_ids[2], 200012);
    {
        struct dmk_shape large = preset("gpt-oss-120b");

        large.n_layers = s.n_layers;
        large.n_experts = s.n_experts;
        assert_memory_equal(&large, &s, sizeof(s));
    }
    assert_int_equal(dmk_shape_check(&s, &err), 0);
    assert_int_equal(dmk_shape_preset("gpt-2", &s, &err), -DMK_ENOENT);
    assert_non_null(strstr(err.text, "\"gpt-2\""));
}

static void expect_shape_refusal(struct dmk_shape s, const char *sentence)
{
    struct dmk_error err = {0};

    assert_int_equal(dmk_shape_check(&s, &err), -DMK_ENOTSUP);
    if (!strstr(err.text, sentence)) {
        print_error("want %s\ngot  %s\n", sentence, err.text);
    }
    assert_non_null(strstr(err.text, sentence));
}

static void test_refused_shapes(void **state)
{
    const struct dmk_shape good = preset("gpt-oss-20b");
    struct dmk_shape s;

    (void)state;
#define REFUSE(field, value, sentence)                                                             \
    do {                                                                                           \
        s = good;                                                                                  \
        s.field = (value);                                                                         \
        expect_shape_refusal(s, sentence);                                                         \
    } while (0)
    REFUSE(n_layers, 1,
           "n_layers is 1 but must be from 2 to 512: sliding and full layers alternate");
    REFUSE(hidden, 2881, "hidden is 2881 but must be a multiple of 32");
    REFUSE(hidden, 0, "hidden is 0");
    REFUSE(n_heads, 60, "n_heads is 60 but must be a multiple of 8");
    REFUSE(n_kv_heads, 4, "n_kv_heads is 4 but must be 8");
    REFUSE(n_experts, 12, "n_experts is 12 but must be a multiple of 8");
    REFUSE(experts_per_token, 2, "experts_per_token is 2 but must be 4");
    REFUSE(window, 256, "window is 256 but must be 128");
    REFUSE(norm_eps, 0.0f, "norm_eps is 0");
    REFUSE(rope_factor, 0.5, "rope_factor is 0.5");
    REFUSE(rope_beta_slow, 64.0, "rope_beta_slow 64 is above rope_beta_fast 32");
    REFUSE(eos_ids[1], 201088, "end-of-sequence id 201088 is outside the vocabulary of 201088");
    REFUSE(n_eos, 9, "9 end-of-sequence ids");
#undef REFUSE
}

static void test_layouts(void **state)
{
    const struct dmk_shape s = preset("gpt-oss-20b");
    const struct {
        uint32_t tp, dp;
        bool prefill;
        const char *sentence; /* NULL = legal */
    } cases[] = {
        {1, 1, true, NULL},
        {8, 1, true, NULL},
        {2, 4, false, NULL},
        {1, 8, false, NULL},
        {3, 1, false, "tp is 3 but must be 1, 2, 4 or 8"},
        {0, 1, false, "tp is 0"},
        {16, 1, false, "tp is 16"},
        {1, 6, false, "dp is 6"},
        {4, 4, false, "tp 4 x dp 4 makes 16 ranks but a node has 8 at most"},
        {1, 2, true, "dp is 2 but a prefill worker has dp 1"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct dmk_error err = {0};
        const int r = dmk_layout_check(&s, (struct dmk_layout){cases[i].tp, cases[i].dp},
                                       cases[i].prefill, &err);

        assert_int_equal(r, cases[i].sentence ? -DMK_ENOTSUP : 0);
        assert_true(!cases[i].sentence || strstr(err.text, cases[i].sentence));
    }
}

/* Heads and vocabulary are covered once a group, experts once over all ranks, for any legal layout. */
static void test_shards(void **state)
{
    const uint32_t vocabs[] = {201088, 1571, 100, 5000};

    (void)state;
    for (size_t v = 0; v < sizeof(vocabs) / sizeof(vocabs[0]); v++) {
        for (uint32_t tp = 1; tp <= 8; tp *= 2) {
            for (uint32_t dp = 1; tp * dp <= 8; dp *= 2) {
                struct dmk_shape s = preset("gpt-oss-120b");
                uint32_t expert = 0;

                s.vocab = vocabs[v];
                for (uint32_t d = 0; d < dp; d++) {
                    uint32_t head = 0, row = 0;

                    for (uint32_t t = 0; t < tp; t++) {
                        const struct dmk_shard x =
                            dmk_layout_shard(&s, (struct dmk_layout){tp, dp}, d * tp + t);

                        assert_int_equal(x.kv_head_first, head);
                        assert_int_equal(x.expert_first, expert);
                        assert_true(x.n_vocab == 0 || x.vocab_first == row);
                        assert_int_equal(x.vocab_first % 1571, 0);
                        head += x.n_kv_heads;
                        expert += x.n_experts;
                        row += x.n_vocab;
                    }
                    assert_int_equal(head, 8);
                    assert_int_equal(row, s.vocab);
                }
                assert_int_equal(expert, 128);
            }
        }
    }
    {
        const struct dmk_shape s = preset("gpt-oss-20b");

        assert_int_equal(dmk_layout_shard(&s, (struct dmk_layout){8, 1}, 3).n_vocab, 25136);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_presets),
        cmocka_unit_test(test_refused_shapes),
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_shards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
