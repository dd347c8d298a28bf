/* The block reductions: against fp64, and independent of how the vocabulary is cut. */
#include "tests/unit/sample/sample_test.h"
#include "common/sample/reduce.h"
#include <string.h>

#define VOCAB    (DMK_SAMPLE_BLOCK * 12 + 100)
#define N_BLOCKS 13

static uint32_t block_len(uint32_t block)
{
    return block == N_BLOCKS - 1 ? 100 : DMK_SAMPLE_BLOCK;
}

static void fill(float *x, uint32_t n, struct random *r, float spread)
{
    for (uint32_t i = 0; i < n; i++) {
        x[i] = random_normal(r) * spread;
    }
}

static void test_max(void **state)
{
    struct random r = {1, 0};
    float *x = malloc(DMK_SAMPLE_BLOCK * sizeof(*x));

    (void)state;
    for (uint32_t n = 1; n <= DMK_SAMPLE_BLOCK; n = n * 3 / 2 + 1) {
        float max = -INFINITY;
        struct dmk_block_max m;

        fill(x, n, &r, 5.0f);
        for (uint32_t i = 0; i < n; i++) {
            max = x[i] > max ? x[i] : max;
        }
        m = dmk_reduce_max(x, n);
        assert_false(m.broken);
        assert_true(m.max == max);
        for (uint32_t i = 0; i < n; i += n / 7 + 1) {
            const float bad[] = {NAN, INFINITY, -NAN};
            const float old = x[i];

            for (int k = 0; k < 3; k++) {
                x[i] = bad[k];
                assert_true(dmk_reduce_max(x, n).broken);
            }
            x[i] = -INFINITY;
            assert_false(dmk_reduce_max(x, n).broken);
            x[i] = old;
        }
    }
    for (int i = 0; i < 40; i++) {
        x[i] = -INFINITY;
    }
    assert_true(dmk_reduce_max(x, 40).max == -INFINITY);
    assert_true(dmk_reduce_max(x, 0).max == -INFINITY);
    free(x);
}

static void test_weights(void **state)
{
    float x[1000], w[1000];

    (void)state;
    for (int i = 0; i < 1000; i++) {
        x[i] = -0.09f * (float)i;
    }
    dmk_reduce_weights(x, 1000, 0.0f, 1.0f, 0.0f, w);
    assert_true(w[0] == 1.0f);
    for (int i = 0; i < 1000; i++) {
        const double want = x[i] < -86.0f ? 0.0 : exp((double)x[i]);

        assert_true(fabs(w[i] - want) <= 4e-7 * want);
    }
    /* Any n, a minimum, another scale, in place. */
    for (uint32_t n = 0; n < 40; n++) {
        float y[41];

        memcpy(y, x, sizeof(y));
        dmk_reduce_weights(y, n, 0.0f, 2.0f, 0.5f, y);
        for (uint32_t i = 0; i < n; i++) {
            const double want = exp(2.0 * (double)x[i]);

            assert_true(want < 0.5 ? y[i] == 0.0f : fabs(y[i] - want) < 1e-6);
        }
        assert_true(y[n] == x[n]);
    }
    x[0] = -INFINITY;
    x[1] = -3e38f;
    dmk_reduce_weights(x, 2, 3e38f, 1e5f, 0.0f, w);
    assert_true(w[0] == 0.0f && w[1] == 0.0f);
}

static void test_sum(void **state)
{
    struct random r = {2, 0};
    float *x = malloc(DMK_SAMPLE_BLOCK * sizeof(*x));

    (void)state;
    for (int turn = 0; turn < 50; turn++) {
        const uint32_t n = 1 + random_below(&r, DMK_SAMPLE_BLOCK);
        const float scale = 0.3f + (float)random_unit(&r), least = turn % 3 ? 0.0f : 0.01f;
        double want = 0.0;
        float max;

        fill(x, n, &r, 4.0f);
        max = dmk_reduce_max(x, n).max;
        for (uint32_t i = 0; i < n; i++) {
            const double w = exp(((double)x[i] - max) * scale);

            want += w >= least ? w : 0.0;
        }
        assert_true(fabs(dmk_reduce_sum(x, n, max, scale, least) - want) <= 3e-6 * want);
    }
    free(x);
}

/* Every rank reduces the blocks it holds out of its own memory, at any alignment; what is put together has
 * the same bits for every cut. */
static void test_cut(void **state)
{
    struct random r = {3, 0};
    float *x = malloc(VOCAB * sizeof(*x));
    float *rank = malloc((VOCAB + 16) * sizeof(*rank));
    double whole[N_BLOCKS];
    float max = -INFINITY;

    (void)state;
    fill(x, VOCAB, &r, 6.0f);
    for (uint32_t b = 0; b < N_BLOCKS; b++) {
        const struct dmk_block_max m = dmk_reduce_max(x + b * DMK_SAMPLE_BLOCK, block_len(b));

        max = m.max > max ? m.max : max;
    }
    for (uint32_t b = 0; b < N_BLOCKS; b++) {
        whole[b] = dmk_reduce_sum(x + b * DMK_SAMPLE_BLOCK, block_len(b), max, 0.7f, 0.0f);
    }
    for (uint32_t n_ranks = 1; n_ranks <= N_BLOCKS; n_ranks++) {
        for (uint32_t i = n_ranks; i-- > 0;) { /* ranks finish in any order */
            const uint32_t first = i * N_BLOCKS / n_ranks, end = (i + 1) * N_BLOCKS / n_ranks;
            const uint32_t shift = i % 16, from = first * DMK_SAMPLE_BLOCK;
            const uint32_t to = end == N_BLOCKS ? VOCAB : end * DMK_SAMPLE_BLOCK;

            memcpy(rank + shift, x + from, (to - from) * sizeof(*x));
            for (uint32_t b = end; b-- > first;) {
                const float *held = rank + shift + (b - first) * DMK_SAMPLE_BLOCK;
                const double part = dmk_reduce_sum(held, block_len(b), max, 0.7f, 0.0f);

                assert_memory_equal(&part, &whole[b], sizeof(part));
            }
        }
    }
    free(x);
    free(rank);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_max),
        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_sum),
        cmocka_unit_test(test_cut),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
