/* Values worked out by hand from the published description of the model: YaRN, MXFP4, SwiGLU, sinks. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "common/base/rng.h"
#include "common/model/rope.h"
#include "kernels/kernels.h"
#include "kernels/numeric.h"

static void check_near(double got, double want, double tolerance)
{
    if (!(fabs(got - want) <= tolerance)) {
        fail_msg("%.9g instead of %.9g, more than %g apart", got, want, tolerance);
    }
}

static struct dmk_shape published(void)
{
    struct dmk_shape shape;
    assert_int_equal(dmk_shape_preset("gpt-oss-20b", &shape, NULL), 0);
    return shape;
}

static void test_frequencies(void **state)
{
    (void)state;
    static const struct {
        int pair;
        double inv_freq;
    } want[] = {{0, 1.0},
                {1, 6.890443059e-01},
                {8, 5.081327482e-02},
                {9, 3.170569618e-02},
                {12, 6.794959490e-03},
                {13, 3.860359e-03},
                {15, 1.052602101e-03},
                {17, 1.293187012e-04},
                {18, 3.830881237e-05},
                {31, 3.023511428e-07}};
    struct dmk_shape shape = published();
    float freq[DMK_ROPE_PAIRS];
    dmk_rope_inv_freq(&shape, freq);
    for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++) {
        check_near(freq[want[i].pair], want[i].inv_freq, want[i].inv_freq * 2e-7);
    }
    check_near(dmk_rope_concentration(&shape), 1.3465735902799727, 1e-15);
}

static void test_angles(void **state)
{
    (void)state;
    /* Slow pairs, where the rounding of the angle does not show. */
    static const struct {
        uint32_t position;
        int pair;
        double cos, sin;
    } want[] = {{0, 5, 1.346574, 0.0},
                {1, 0, 0.727557, 1.133103},
                {100, 8, 0.485609, -1.255964},
                {4096, 12, -1.217062, 0.576213},
                {131071, 18, 0.409226, -1.282885},
                {131071, 31, 1.345516, 0.053350},
                {131071, 0, -1.101475, -0.774605}};
    struct dmk_shape shape = published();
    const uint32_t n = 131072;
    float *table = malloc((size_t)n * DMK_ROPE_PAIRS * 2 * sizeof(float));
    assert_non_null(table);
    dmk_rope_table(&shape, n, table);
    for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++) {
        const float *at = table + ((size_t)want[i].position * DMK_ROPE_PAIRS + want[i].pair) * 2;
        check_near(at[0], want[i].cos, 2e-5);
        check_near(at[1], want[i].sin, 2e-5);
    }
    /* A fast pair far out: the angle is the fp32 product, which lies off the exact one. */
    const float *fast = table + ((size_t)131071 * DMK_ROPE_PAIRS + 3) * 2;
    check_near(fast[0], -1.300774, 8e-3);
    float freq[DMK_ROPE_PAIRS];
    dmk_rope_inv_freq(&shape, freq);
    check_near(fast[0], cos((double)(131071.0f * freq[3])) * 1.3465735902799727, 1e-7);
    free(table);
}

/* Element j turns with j + 32, not with its neighbour. */
static void test_rotated_pairs(void **state)
{
    (void)state;
    struct dmk_kernels k;
    dmk_kernels_ref(&k);
    for (uint32_t j = 0; j < 64; j++) {
        static float table[2][DMK_ROPE_PAIRS][2];
        uint16_t x[64] = {0};
        const uint32_t position = 1, pair = j % DMK_ROPE_PAIRS;
        for (uint32_t i = 0; i < DMK_ROPE_PAIRS; i++) {
            table[1][i][0] = 0.5f;
            table[1][i][1] = 0.25f + (float)i; /* told apart by the sine */
        }
        x[j] = dmk_f32_to_bf16(1.0f);
        k.rope(&(struct dmk_rope_args){x, &position, &table[0][0][0], 1, 1}, NULL);
        for (uint32_t i = 0; i < 64; i++) {
            const float sine = (j < DMK_ROPE_PAIRS ? 1.0f : -1.0f) * table[1][pair][1];
            const float want = i == j ? 0.5f : i % DMK_ROPE_PAIRS == pair ? sine : 0.0f;
            check_near(dmk_bf16_to_f32(x[i]), want, fabsf(want) / 256);
        }
    }
}

/* The residual stream passes the largest fp16 number in the last layers of the 120b model. */
static void test_residual_beyond_fp16(void **state)
{
    (void)state;
    enum { N = 96 };
    struct dmk_kernels k;
    uint16_t x[N], bias[N];
    float sum[N];
    dmk_kernels_ref(&k);
    for (uint32_t i = 0; i < N; i++) {
        x[i] = dmk_f32_to_bf16(58820.0f);
        sum[i] = 33760.0f - 4.0f;
        bias[i] = dmk_f32_to_bf16(4.0f);
    }
    k.residual(&(struct dmk_residual_args){x, sum, bias, 1, N}, NULL);
    for (uint32_t i = 0; i < N; i++) {
        check_near(dmk_bf16_to_f32(x[i]), 92672.0, 0.0);
    }
}

static void test_mxfp4(void **state)
{
    (void)state;
    static const float values[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (uint32_t code = 0; code < 16; code++) {
        float want = code < 8 ? values[code] : -values[code - 8];
        float got = dmk_e2m1_to_f32(code);
        assert_memory_equal(&got, &want, sizeof(got));
    }
    check_near(dmk_ue8m0_to_f32(127), 1.0, 0.0);
    check_near(dmk_ue8m0_to_f32(0), ldexp(1.0, -127), 0.0);
    check_near(dmk_ue8m0_to_f32(254), ldexp(1.0, 127), 0.0);

    /* Byte 0x2b at scale 120: -1.5/128 and +1/128, told apart by what they are multiplied with. */
    struct dmk_kernels k;
    dmk_kernels_ref(&k);
    uint8_t blocks[16] = {0x2b}, scale = 120;
    uint16_t bias = 0, z[32] = {0};
    uint32_t begin[2] = {0, 1};
    float y;
    struct dmk_moe_down_args args = {.w = {.format = DMK_WEIGHT_MXFP4,
                                           .blocks = blocks,
                                           .scales = &scale,
                                           .bias = &bias,
                                           .rows = 1,
                                           .cols = 32},
                                     .z = z,
                                     .plan = {.expert_begin = begin},
                                     .y = &y,
                                     .n_experts = 1};
    z[0] = dmk_f32_to_bf16(1.0f);
    k.moe_down(&args, NULL);
    check_near(y, -1.5 / 128, 0.0);
    z[0] = 0;
    z[1] = dmk_f32_to_bf16(1.0f);
    k.moe_down(&args, NULL);
    check_near(y, 1.0 / 128, 0.0);
}

/* All weights 0: h is the bias. */
static float swiglu(float gate, float up)
{
    struct dmk_kernels k;
    dmk_kernels_ref(&k);
    uint16_t w[2][32] = {{0}}, x[32] = {0}, z,
             bias[2] = {dmk_f32_to_bf16(gate), dmk_f32_to_bf16(up)};
    uint32_t begin[2] = {0, 1}, row = 0;
    struct dmk_moe_gate_up_args args = {.w = {.format = DMK_WEIGHT_BF16,
                                              .blocks = (const uint8_t *)w,
                                              .bias = bias,
                                              .rows = 2,
                                              .cols = 32},
                                        .x = x,
                                        .plan = {.expert_begin = begin, .slot_row = &row},
                                        .z = &z,
                                        .n_experts = 1,
                                        .alpha = 1.702f,
                                        .limit = 7.0f};
    k.moe_gate_up(&args, NULL);
    return dmk_bf16_to_f32(z);
}

static void test_swiglu(void **state)
{
    (void)state;
    check_near(swiglu(10.0f, 9.0f), 55.99963, 56.0 / 512);
    check_near(swiglu(-10.0f, -9.0f), 2.435e-6, 2.435e-6 / 256);
    check_near(swiglu(0.0f, 3.0f), 0.0, 0.0);
    check_near(7.0 * dmk_sigmoidf(1.702f * 7.0f) * 8.0, 55.99963, 1e-5);
}

static void test_exp(void **state)
{
    (void)state;
    double worst = 0.0;
    for (uint32_t i = 0; i < 2000000; i++) {
        float x = -87.2f + (float)i * (175.9f / 2000000.0f);
        double exact = exp((double)x), error = fabs((double)dmk_expf(x) - exact);
        int exponent;
        (void)frexp(exact, &exponent);
        worst = fmax(worst, error / ldexp(1.0, exponent - 24));
    }
    assert_true(worst < 1.02);
    check_near(dmk_expf(0.0f), 1.0, 0.0);
    check_near(dmk_expf(-INFINITY), 0.0, 0.0);
    check_near(dmk_expf(-87.4f), 0.0, 0.0);
    assert_true(isinf(dmk_expf(88.8f)) && isinf(dmk_expf(INFINITY)) && isnan(dmk_expf(NAN)));
}

/* One head against a softmax in double precision over exactly the keys that should be seen. */
static void check_attention(uint32_t position, uint32_t window)
{
    enum { N = 200 };
    static uint16_t q[64], k[N * 64], v[N * 64], out[64];
    static uint8_t pages[4 * 16384];
    uint16_t sink = dmk_f32_to_bf16(0.75f);
    uint32_t ids[4] = {2, 0, 3, 1};
    for (uint32_t i = 0; i < N * 64; i++) {
        k[i] = dmk_f32_to_bf16((float)dmk_rng_unit(1, 1, i) * 2.0f - 1.0f);
        v[i] = dmk_f32_to_bf16((float)dmk_rng_unit(1, 2, i) * 2.0f - 1.0f);
        q[i % 64] = dmk_f32_to_bf16((float)dmk_rng_unit(1, 3, i % 64) * 6.0f - 3.0f);
        uint32_t j = i / 64;
        uint16_t *page = (uint16_t *)(void *)(pages + ids[j / 64] * 16384);
        page[j % 64 * 64 + i % 64] = k[i];
        page[4096 + j % 64 * 64 + i % 64] = v[i];
    }
    struct dmk_attn_seq seq = {.n_tokens = 1, .pos = position, .ring = {2, 0, 3, 1}, .n_ring = 4};
    struct dmk_attn_args args = {.q = q,
                                 .k = k + (size_t)position * 64,
                                 .v = v + (size_t)position * 64,
                                 .pages = pages,
                                 .page_ids = ids,
                                 .seqs = &seq,
                                 .sinks = &sink,
                                 .out = out,
                                 .n_seqs = 1,
                                 .n_kv_heads = 1,
                                 .group = 1,
                                 .n_pages = 4,
                                 .page_bytes = 16384,
                                 .window = window,
                                 .fresh = window != 0};
    struct dmk_kernels kernels;
    dmk_kernels_ref(&kernels);
    kernels.attn(&args, NULL);

    double sum = exp(0.75), acc[64] = {0};
    uint32_t first = window && position >= window ? position - window + 1 : 0;
    for (uint32_t j = first; j <= position; j++) {
        double s = 0.0;
        for (uint32_t d = 0; d < 64; d++) {
            s += (double)dmk_bf16_to_f32(q[d]) * (double)dmk_bf16_to_f32(k[j * 64 + d]);
        }
        double p = exp(s * 0.125);
        sum += p;
        for (uint32_t d = 0; d < 64; d++) {
            acc[d] += p * (double)dmk_bf16_to_f32(v[j * 64 + d]);
        }
    }
    for (uint32_t d = 0; d < 64; d++) {
        check_near(dmk_bf16_to_f32(out[d]), acc[d] / sum, fabs(acc[d] / sum) / 256 + 1e-6);
    }
}

static void test_attention(void **state)
{
    (void)state;
    const uint32_t positions[] = {0, 1, 63, 64, 126, 127, 128, 129, 191, 192, 199};
    for (size_t i = 0; i < sizeof(positions) / sizeof(positions[0]); i++) {
        check_attention(positions[i], 0);
        check_attention(positions[i], 128);
    }
}

/* Which keys a query sees, one by one: all scores are equal, and one key at a time has a value. */
static void check_seen_keys(const struct dmk_kernels *kernels, uint32_t position, uint32_t window)
{
    enum { N = 1024, N_PAGES = N / 64 };
    static uint8_t pages[N_PAGES * 16384];
    static uint16_t zero[N * 64], out[64];
    const uint16_t sink = dmk_f32_to_bf16(-100.0f);
    uint32_t ids[N_PAGES], n_seen = 0;
    const uint32_t first = window && position >= window ? position - window + 1 : 0;
    memset(pages, 0, sizeof(pages));
    for (uint32_t b = 0; b < N_PAGES; b++) {
        ids[b] = b;
    }
    for (uint32_t j = 0; j < N; j++) {
        /* A ring of four pages holds the query's block and the three before it, no others. */
        const uint32_t page = window ? j / 64 % 4 : j / 64;
        uint16_t *value = (uint16_t *)(void *)(pages + page * 16384) + 4096 + j % 64 * 64;
        if (window && (j / 64 + 3 < position / 64 || j / 64 > position / 64)) {
            continue;
        }
        struct dmk_attn_seq seq = {
            .n_tokens = 1, .pos = position, .ring = {0, 1, 2, 3}, .n_ring = 4};
        struct dmk_attn_args args = {.q = zero,
                                     .k = zero,
                                     .v = zero,
                                     .pages = pages,
                                     .page_ids = ids,
                                     .seqs = &seq,
                                     .sinks = &sink,
                                     .out = out,
                                     .n_seqs = 1,
                                     .n_kv_heads = 1,
                                     .group = 1,
                                     .n_pages = N_PAGES,
                                     .page_bytes = 16384,
                                     .window = window};
        value[0] = dmk_f32_to_bf16(1024.0f);
        kernels->attn(&args, NULL);
        value[0] = 0;
        const bool seen = dmk_bf16_to_f32(out[0]) > 0.0f;
        if (seen != (j >= first && j <= position)) {
            fail_msg("query %u, window %u: key %u is %sseen", position, window, j,
                     seen ? "" : "not ");
        }
        n_seen += seen;
    }
    assert_int_equal(n_seen, position - first + 1);
}

static void test_seen_keys(void **state)
{
    (void)state;
    static const struct {
        uint32_t position, in_window;
    } queries[] = {{126, 127}, {127, 128}, {128, 128}, {129, 128}, {1000, 128}};
    const struct dmk_shape shape = published();
    struct dmk_kernels k;
    dmk_kernels_ref(&k);
    for (size_t i = 0; i < sizeof(queries) / sizeof(queries[0]); i++) {
        const uint32_t first = queries[i].position + 1 - queries[i].in_window;
        assert_int_equal(first, queries[i].position < 128 ? 0 : queries[i].position - 127);
        for (uint32_t layer = 0; layer < 2; layer++) {
            const bool full = dmk_shape_layer_is_full(layer);
            assert_int_equal(full, layer == 1);
            check_seen_keys(&k, queries[i].position, full ? 0 : shape.window);
        }
    }
}

static void test_ties(void **state)
{
    (void)state;
    /* 3 and 5 tie at the top, 1, 2 and 7 tie for the last place. */
    const float g[8] = {-1.0f, 2.0f, 2.0f, 4.0f, 3.0f, 4.0f, -9.0f, 2.0f};
    uint16_t scores[8];
    uint32_t ids[4];
    float weights[4];
    for (int i = 0; i < 8; i++) {
        scores[i] = dmk_f32_to_bf16(g[i]);
    }
    struct dmk_kernels k;
    dmk_kernels_ref(&k);
    k.topk(&(struct dmk_topk_args){scores, ids, weights, 1, 8, 4}, NULL);
    const uint32_t want[4] = {3, 5, 4, 1};
    assert_memory_equal(ids, want, sizeof(want));
    double sum = 2.0 + exp(-1.0) + exp(-2.0);
    check_near(weights[0], 1.0 / sum, 1.0 / 512);
    check_near(weights[1], 1.0 / sum, 1.0 / 512);
    check_near(weights[3], exp(-2.0) / sum, exp(-2.0) / 256);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_frequencies),   cmocka_unit_test(test_angles),
        cmocka_unit_test(test_mxfp4),         cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_exp),           cmocka_unit_test(test_attention),
        cmocka_unit_test(test_ties),          cmocka_unit_test(test_seen_keys),
        cmocka_unit_test(test_rotated_pairs), cmocka_unit_test(test_residual_beyond_fp16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
