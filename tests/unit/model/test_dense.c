/* Dense weights in FP8: what a rank's share holds, and that a sequence's logits are the same bits in every layout,
 * in any chunks and in company, as with weights in BF16. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "common/base/hash.h"
#include "common/base/rng.h"
#include "common/model/engine_internal.h"
#include "common/model/weights_internal.h"
#include "kernels/dtype.h"
#include "tests/unit/model/memory.h"

/* Three blocks of the head, whose rows ranks cut where no block of FP8 ends; K of two groups, the last not full. */
enum { VOCAB = 3 * 1571, HIDDEN = 160, N_IDS = 70, N_SHORT = 9 };

static uint64_t seed;

static struct dmk_shape dense_shape(void)
{
    struct dmk_shape shape = small_shape(2);
    shape.hidden = HIDDEN;
    shape.vocab = VOCAB;
    return shape;
}

static struct dmk_engine *open_engine(struct dmk_weights *weights, const char *backend, uint32_t tp,
                                      uint32_t dp, bool dense)
{
    const struct dmk_engine_conf conf = {.backend = backend,
                                         .layout = {tp, dp},
                                         .fp8_dense = dense,
                                         .n_threads = 2,
                                         .n_full_pages = 4,
                                         .n_window_pages = 8,
                                         .max_step_tokens = 128,
                                         .max_step_seqs = 2,
                                         .max_logit_rows = 128};
    struct dmk_engine *engine = NULL;
    struct dmk_error error = {0};
    if (dmk_engine_open_weights(&conf, weights, &engine, &error) != 0) {
        fail_msg("open: %s", error.text);
    }
    return engine;
}

/* All logits of a text of N_IDS tokens, in chunks; a second one keeps it company from its start on, in its group or
 * in the last one. */
static float *run_text(struct dmk_engine *engine, uint32_t chunk, bool company)
{
    static uint32_t ids[2][N_IDS];
    static const uint32_t pages[2] = {0, 1}, more[2] = {2, 3};
    const uint32_t last = engine->conf.layout.dp - 1;
    float *logits = malloc(sizeof(float) * VOCAB * N_IDS),
          *scrap = malloc(sizeof(float) * VOCAB * 128);
    assert_true(logits && scrap);
    memset(logits, 0xff, sizeof(float) * VOCAB * N_IDS);
    for (uint32_t i = 0; i < N_IDS; i++) {
        ids[0][i] = (uint32_t)(dmk_rng_u64(seed, 1, i) % VOCAB);
        ids[1][i] = (uint32_t)(dmk_rng_u64(seed, 2, i) % VOCAB);
    }
    for (uint32_t pos = 0, other = 0; pos < N_IDS; pos += chunk) {
        const uint32_t n = N_IDS - pos < chunk ? N_IDS - pos : chunk;
        struct dmk_step_seq parts[2] = {{.ids = ids[0] + pos,
                                         .n_tokens = n,
                                         .pos = pos,
                                         .full_pages = pages,
                                         .ring = {0, 1, 2},
                                         .n_ring = 3,
                                         .logits = DMK_LOGITS_ALL},
                                        {.ids = ids[1] + other,
                                         .n_tokens = 3,
                                         .pos = other,
                                         .full_pages = last ? pages : more,
                                         .ring = {4, 5, 6},
                                         .n_ring = 3,
                                         .logits = DMK_LOGITS_LAST,
                                         .dp = last}};
        const bool both = company && other < N_SHORT;
        const struct dmk_step step = {.seqs = parts, .n_seqs = 1 + both, .logits = scrap};
        assert_int_equal(dmk_engine_step(engine, &step), 0);
        memcpy(logits + (size_t)pos * VOCAB, scrap, sizeof(float) * VOCAB * n);
        other += 3;
    }
    free(scrap);
    return logits;
}

static double distance(const float *a, const float *b)
{
    double diff = 0, norm = 0;
    for (size_t i = 0; i < (size_t)N_IDS * VOCAB; i++) {
        diff += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(diff / norm);
}

static void same_bits_in_every_layout(void **state)
{
    static const struct {
        const char *backend;
        uint32_t tp, dp, chunk;
        bool company;
    } runs[] = {
        {"cpu", 1, 1, N_IDS, false}, {"cpu", 1, 1, 7, true},  {"ref", 2, 1, 33, true},
        {"cpu", 2, 1, 1, true},      {"cpu", 4, 1, 64, true}, {"cpu", 8, 1, 5, true},
        {"cpu", 1, 2, 20, true},     {"cpu", 2, 4, 9, true},
    };
    const struct dmk_shape shape = dense_shape();
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    struct dmk_engine *engine = open_engine(weights, "ref", 1, 1, true);
    float *want = run_text(engine, N_IDS, false);
    (void)state;
    assert_string_equal(dmk_engine_numerics(engine), "mxfp4-bf16-dense8-k1-cpu");
    dmk_engine_close(&engine);
    for (size_t i = 0; i < sizeof(runs) / sizeof(runs[0]); i++) {
        engine = open_engine(weights, runs[i].backend, runs[i].tp, runs[i].dp, true);
        float *got = run_text(engine, runs[i].chunk, runs[i].company);
        for (size_t k = 0; k < (size_t)N_IDS * VOCAB; k++) {
            if (dmk_f32_bits(got[k]) != dmk_f32_bits(want[k]) || isnan(want[k])) {
                fail_msg("%s, tp %u, dp %u, chunks of %u: row %zu, token %zu: %a instead of %a",
                         runs[i].backend, runs[i].tp, runs[i].dp, runs[i].chunk, k / VOCAB,
                         k % VOCAB, (double)got[k], (double)want[k]);
            }
        }
        free(got);
        dmk_engine_close(&engine);
    }
    /* Near what BF16 gives, and not the same. */
    engine = open_engine(weights, "cpu", 1, 1, false);
    assert_string_equal(dmk_engine_numerics(engine), "mxfp4-bf16-k1-cpu");
    float *exact = run_text(engine, N_IDS, false);
    const double apart = distance(want, exact);
    if (!(apart > 0.005 && apart < 0.5)) {
        fail_msg("logits are %g of their norm away from those of BF16", apart);
    }
    dmk_engine_close(&engine);
    free(exact);
    free(want);
    memory_weights_free(weights);
}

/* A matrix of the model [rows][cols] and the share of it from row `first` and column `col` on, cols_own wide. */
struct share {
    const char *name;
    struct dmk_dense_fp8 d;
    const uint16_t *w;
    uint32_t rows, cols, k; /* of the model; k: columns of a slice */
    uint32_t first, n, col, cols_own;
};

/* The scale of a block as it should be: the plain way, over the model's matrix. */
static float block_scale(const struct share *s, uint32_t row, uint32_t col)
{
    const uint32_t row0 = row / 128 * 128, in = col % s->k / 128 * 128,
                   col0 = col - col % s->k + in;
    const uint32_t end = in + 128 < s->k ? col0 + 128 : col0 + s->k - in;
    float top = 0, scale = 0x1p-40f;
    for (uint32_t r = row0; r < row0 + 128 && r < s->rows; r++) {
        for (uint32_t c = col0; c < end; c++) {
            const float x = fabsf(dmk_bf16_to_f32(s->w[(size_t)r * s->cols + c]));
            top = x > top ? x : top;
        }
    }
    while (top > 448.0f * scale) {
        scale *= 2;
    }
    return top == 0 ? 1.0f : scale;
}

static void check_share(const struct share *s, uint32_t tp)
{
    const uint32_t per_slice = (s->k + 127) / 128, groups = s->cols_own / s->k * per_slice;
    for (uint32_t r = 0; r < s->n; r++) {
        const float *scales = s->d.scales + (s->first % 64 + r) / 64 * groups;
        for (uint32_t c = 0; c < s->cols_own; c++) {
            const uint32_t row = s->first + r, col = s->col + c;
            const float x = dmk_bf16_to_f32(s->w[(size_t)row * s->cols + col]);
            const float scale = scales[c / s->k * per_slice + c % s->k / 128];
            const uint8_t code = s->d.codes[(size_t)r * s->cols_own + c];
            const bool look = c % 32 == 0 && (r == 0 || row % 64 == 0); /* at each scale */
            if ((look && scale != block_scale(s, row, col)) || code != dmk_f32_to_e4m3(x / scale)) {
                fail_msg("tp %u, %s, row %u, column %u: code %#x under %a for %a", tp, s->name, row,
                         col, code, (double)scale, (double)x);
            }
        }
    }
}

static void shares_of_every_layout(void **state)
{
    struct dmk_shape shape = dense_shape();
    shape.n_heads = 24; /* slices of 192, queries of 192 rows for a KV head */
    struct dmk_weights *w = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed + 1);
    (void)state;
    for (uint32_t tp = 1; tp <= 8; tp *= 2) {
        const struct dmk_layout layout = {tp, 1};
        for (uint32_t rank = 0; rank < tp; rank++) {
            const struct dmk_shard shard = dmk_layout_shard(&shape, layout, rank);
            const uint32_t q = 192 * shard.n_kv_heads, kv = 64 * shard.n_kv_heads;
            struct dmk_rank_weights r = {0};
            assert_int_equal(dmk_weights_of_rank(w, layout, rank, &r, NULL), 0);
            assert_int_equal(dmk_weights_dense_rank(w, layout, rank, true, &r, NULL), 0);
            const struct dmk_layer_weights *l = &r.layers[1], *m = &w->layers[1];
            const struct share shares[] = {
                {"q", l->q8, m->q_w, 24 * 64, HIDDEN, HIDDEN, q * rank, q, 0, HIDDEN},
                {"k", l->k8, m->k_w, 8 * 64, HIDDEN, HIDDEN, kv * rank, kv, 0, HIDDEN},
                {"v", l->v8, m->v_w, 8 * 64, HIDDEN, HIDDEN, kv * rank, kv, 0, HIDDEN},
                {"o", l->o8, m->o_w, HIDDEN, 24 * 64, 192, 0, HIDDEN, q * rank, q},
                {"head", r.head8, w->unembedding, VOCAB, HIDDEN, HIDDEN, shard.vocab_first,
                 shard.n_vocab, 0, HIDDEN},
            };
            for (size_t i = 0; i < sizeof(shares) / sizeof(shares[0]); i++) {
                assert_true(shares[i].n == 0 || shares[i].d.codes);
                check_share(&shares[i], tp);
            }
            dmk_weights_rank_release(&r);
        }
    }
    memory_weights_free(w);
}

static void what_can_not_be_fp8(void **state)
{
    const struct dmk_shape shape = dense_shape();
    const struct dmk_engine_conf conf = {.backend = "cpu",
                                         .layout = {2, 1},
                                         .fp8_dense = true,
                                         .n_full_pages = 4,
                                         .n_window_pages = 8,
                                         .max_step_tokens = 8,
                                         .max_step_seqs = 1,
                                         .max_logit_rows = 8};
    struct dmk_weights *w = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed + 2);
    struct dmk_engine *engine = NULL;
    struct dmk_error error = {0};
    uint16_t *v = (uint16_t *)(uintptr_t)w->layers[1].v_w,
             *head = (uint16_t *)(uintptr_t)w->unembedding;
    (void)state;
    v[300 * HIDDEN + 5] =
        0xff80; /* -infinity, on the second rank, whose block the first does not see */
    assert_int_equal(dmk_engine_open_weights(&conf, w, &engine, &error), -DMK_EFORMAT);
    assert_string_equal(error.text,
                        "tensor \"model.layers.1.self_attn.v_proj.weight\" holds a number "
                        "that is not finite, of which dense weights in FP8 can not be made: "
                        "use dense 'checkpoint'");
    v[300 * HIDDEN + 5] = 0;
    head[(VOCAB - 1) * HIDDEN] = 0x7fc0;
    assert_int_equal(dmk_engine_open_weights(&conf, w, &engine, &error), -DMK_EFORMAT);
    assert_non_null(strstr(error.text, "tensor \"lm_head.weight\" holds"));
    memory_weights_free(w);
}

int main(void)
{
    const char *given = getenv("DMK_TEST_SEED");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits_in_every_layout),
        cmocka_unit_test(shares_of_every_layout),
        cmocka_unit_test(what_can_not_be_fp8),
    };
    seed = given ? strtoull(given, NULL, 0) : dmk_random_u64();
    printf("DMK_TEST_SEED=%#llx\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
