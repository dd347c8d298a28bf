/* Every layout that one may write on a command line, for both programs: legal ones are taken, each other one is
 * refused before anything is loaded, with the sentence that says why. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include "common/shape/shape.h"
#include "decode/conf.h"
#include "prefill/conf.h"

enum { MOST = 17 }; /* of tp and dp; one more than two nodes have ranks */

static bool is_rank_count(uint32_t v)
{
    return v == 1 || v == 2 || v == 4 || v == 8;
}

/* Why a layout is refused; "" when it is legal. */
static void expected(bool prefill, uint32_t tp, uint32_t dp, char *text, size_t cap)
{
    const uint32_t values[] = {tp, dp};
    const char *const names[] = {"tp", "dp"};

    text[0] = 0;
    for (uint32_t i = 0; i < 2; i++) {
        if (values[i] < 1 || values[i] > 8) {
            snprintf(text, cap, "--%s: \"%u\" is not in range (allowed: 1 to 8)", names[i],
                     values[i]);
            return;
        }
    }
    for (uint32_t i = 0; i < 2; i++) {
        if (!is_rank_count(values[i])) {
            snprintf(text, cap, "%s is %u but must be 1, 2, 4 or 8", names[i], values[i]);
            return;
        }
    }
    if (tp * dp > 8) {
        snprintf(text, cap, "tp %u x dp %u makes %u ranks but a node has 8 at most", tp, dp,
                 tp * dp);
    } else if (prefill && dp > 1) {
        snprintf(text, cap, "dp is %u but a prefill worker has dp 1: run more workers instead", dp);
    }
}

static int load(bool prefill, uint32_t tp, uint32_t dp, struct dmk_error *error)
{
    char words[][16] = {"damask", "--model", "/none", "--tp", "", "--dp", ""};
    enum { N_WORDS = sizeof(words) / sizeof(words[0]) };
    char *argv[N_WORDS + 1] = {0};
    int r;

    snprintf(words[4], sizeof(words[4]), "%u", tp);
    snprintf(words[6], sizeof(words[6]), "%u", dp);
    for (uint32_t i = 0; i < N_WORDS; i++) {
        argv[i] = words[i];
    }
    if (prefill) {
        struct dmk_prefill_options options = {0};

        r = dmk_prefill_options_load(N_WORDS, argv, &options, error);
        assert_true(r < 0 || (options.worker.tp == tp && options.worker.dp == dp));
        dmk_prefill_options_free(&options);
    } else {
        struct dmk_decode_options options = {0};
        uint32_t below;

        r = dmk_decode_options_load(N_WORDS, argv, &options, &below, error);
        assert_true(r < 0 || (options.worker.tp == tp && options.worker.dp == dp));
        dmk_decode_options_free(&options);
    }
    return r;
}

static void test_every_layout(void **state)
{
    uint32_t n_legal[2] = {0};

    (void)state;
    for (uint32_t prefill = 0; prefill < 2; prefill++) {
        for (uint32_t tp = 0; tp <= MOST; tp++) {
            for (uint32_t dp = 0; dp <= MOST; dp++) {
                struct dmk_error error = {0};
                char want[160];
                const int r = load(prefill, tp, dp, &error);

                expected(prefill, tp, dp, want, sizeof(want));
                n_legal[prefill] += r == 0;
                if ((r == 0) != (want[0] == 0) || (r < 0 && strcmp(error.text, want) != 0)) {
                    fail_msg("%s, tp %u, dp %u: \"%s\" instead of \"%s\"",
                             prefill ? "prefill" : "decode", tp, dp, r < 0 ? error.text : "taken",
                             want[0] ? want : "taken");
                }
            }
        }
    }
    assert_int_equal(n_legal[0], 10);
    assert_int_equal(n_legal[1], 4);
}

/* What the command line can not know: whether the model can be cut so. */
static void test_models(void **state)
{
    static const struct {
        const char *preset;
        uint32_t n_kv_heads, n_experts, tp, dp;
        const char *text; /* NULL: legal */
    } cases[] = {
        {"gpt-oss-20b", 8, 32, 8, 1, NULL},
        {"gpt-oss-20b", 8, 32, 1, 8, NULL},
        {"gpt-oss-120b", 8, 128, 4, 2, NULL},
        {"gpt-oss-20b", 4, 32, 8, 1, "tp 8 does not divide the model's 4 KV heads"},
        {"gpt-oss-20b", 4, 32, 4, 2, NULL},
        {"gpt-oss-20b", 8, 36, 2, 2, "the model's 36 experts are no multiple of 8"},
        {"gpt-oss-20b", 8, 4, 1, 1, "the model's 4 experts are no multiple of 8"},
    };

    (void)state;
    for (uint32_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct dmk_error error = {0};
        struct dmk_shape shape;
        int r;

        assert_int_equal(dmk_shape_preset(cases[i].preset, &shape, NULL), 0);
        shape.n_kv_heads = cases[i].n_kv_heads;
        shape.n_experts = cases[i].n_experts;
        r = dmk_layout_check(&shape, (struct dmk_layout){cases[i].tp, cases[i].dp}, false, &error);
        assert_int_equal(r < 0, cases[i].text != NULL);
        if (cases[i].text) {
            assert_string_equal(error.text, cases[i].text);
        }
    }
}

/* 40 GiB of the 120b: 18 layers of each kind, 8 heads over tp ranks, 16 KiB a page. */
static void test_kv_memory(void **state)
{
    const uint64_t page = UINT64_C(18) * 8 * 16384;
    char model[] = "gpt-oss-120b", missing[] = "/none";
    struct dmk_worker_conf c = {.model = model,
                                .weights = DMK_WORKER_WEIGHTS_RANDOM,
                                .tp = 1,
                                .dp = 1,
                                .kv_memory.bytes = UINT64_C(40) << 30,
                                .full_pages = 7,
                                .window_pages = 7};
    struct dmk_error error;

    (void)state;
    assert_int_equal(dmk_worker_options_size_pools(&c, 64, &error), 0);
    assert_int_equal(c.window_pages, (UINT64_C(40) << 30) / (5 * page));
    assert_int_equal(c.full_pages, (UINT64_C(40) << 30) / page - c.window_pages);
    c.tp = 4; /* a quarter of the heads on a rank */
    assert_int_equal(dmk_worker_options_size_pools(&c, 64, &error), 0);
    assert_int_equal(c.window_pages, (UINT64_C(40) << 30) / (5 * page / 4));
    c.tp = 1;
    assert_int_equal(dmk_worker_options_size_pools(&c, 2000, &error), 0);
    assert_int_equal(c.window_pages, 6000); /* three for each of many sequences */
    assert_int_equal(c.full_pages, (UINT64_C(40) << 30) / page - 6000);
    assert_true(dmk_worker_options_size_pools(&c, 7000, &error) < 0);
    assert_non_null(strstr(
        error.text, "kv-memory is 42949672960 bytes: the smallest pools for 7000 sequences take "));
    c.weights = DMK_WORKER_WEIGHTS_CHECKPOINT;
    c.model = missing;
    assert_true(dmk_worker_options_size_pools(&c, 64, &error) < 0);
    assert_non_null(strstr(error.text, "/none"));
    c.kv_memory.bytes = 0;
    c.full_pages = 7;
    assert_int_equal(dmk_worker_options_size_pools(&c, 64, &error), 0);
    assert_int_equal(c.full_pages, 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_kv_memory),
                                       cmocka_unit_test(test_every_layout),
                                       cmocka_unit_test(test_models)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
