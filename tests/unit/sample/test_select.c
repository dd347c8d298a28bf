/* Selection of the largest logits: order, ties, and cutoffs. */
#include "tests/unit/sample/sample_test.h"
#include "common/sample/select.h"
#include <string.h>

#define VOCAB    (DMK_SAMPLE_BLOCK * 30 + 7)
#define N_BLOCKS 31

struct fixture {
    float x[VOCAB], block_max[N_BLOCKS];
    struct dmk_candidate a[VOCAB], b[VOCAB], want[VOCAB];
    struct dmk_row row;
};

/* Kinds of rows: spread out, many ties, all equal, signed zeros, mostly -INFINITY. */
static void fill(struct fixture *f, int kind, struct random *r)
{
    for (uint32_t i = 0; i < VOCAB; i++) {
        switch (kind) {
        case 0:
            f->x[i] = random_normal(r) * 5.0f;
            break;
        case 1:
            f->x[i] = (float)random_below(r, 9) - 4.0f;
            break;
        case 2:
            f->x[i] = 1.0f;
            break;
        case 3:
            f->x[i] = random_below(r, 2) ? 0.0f : -0.0f;
            break;
        default:
            f->x[i] = random_below(r, 5000) ? -INFINITY : random_normal(r);
        }
    }
    for (uint32_t b = 0; b < N_BLOCKS; b++) {
        f->block_max[b] = -INFINITY;
        for (uint32_t i = b * DMK_SAMPLE_BLOCK; i < VOCAB && i < (b + 1) * DMK_SAMPLE_BLOCK; i++) {
            f->block_max[b] = f->x[i] > f->block_max[b] ? f->x[i] : f->block_max[b];
        }
    }
    f->row = (struct dmk_row){f->x, VOCAB, f->block_max};
}

static int compare(const void *a, const void *b)
{
    const struct dmk_candidate *p = a, *q = b;

    if (p->x != q->x) {
        return p->x > q->x ? -1 : 1;
    }
    return p->id < q->id ? -1 : p->id > q->id;
}

static void check_same(const struct dmk_candidate *got, const struct dmk_candidate *want,
                       uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(got[i].id, want[i].id);
    }
}

static void test_order(void **state)
{
    struct fixture *f = malloc(sizeof(*f));
    struct random r = {7, 0};

    (void)state;
    for (int kind = 0; kind < 5; kind++) {
        uint32_t n = 0;

        fill(f, kind, &r);
        for (uint32_t i = 0; i < VOCAB; i++) {
            if (f->x[i] > -INFINITY) {
                f->want[n++] = (struct dmk_candidate){f->x[i], i};
            }
        }
        qsort(f->want, n, sizeof(*f->want), compare);
        assert_int_equal(dmk_select_above(&f->row, -INFINITY, f->a), n);
        dmk_select_sort(f->a, f->b, n);
        check_same(f->a, f->want, n);
        for (uint32_t k = 0; k <= 64; k = k < 5 ? k + 1 : k * 2) {
            const uint32_t m = dmk_select_top(&f->row, k, f->a);

            assert_int_equal(m, k < n ? k : n);
            check_same(f->a, f->want, m);
        }
        for (uint32_t k = 1; k <= N_BLOCKS + 1; k++) {
            const float cutoff = dmk_select_cutoff(&f->row, k);

            assert_true(cutoff == -INFINITY || dmk_select_above(&f->row, cutoff, f->a) >= k);
            assert_true(k <= N_BLOCKS || cutoff == -INFINITY);
            assert_true(kind == 4 || k > N_BLOCKS || cutoff > -INFINITY);
        }
        /* Sorting few elements takes another path. */
        for (uint32_t m = 0; m < 70 && m < n; m++) {
            (void)dmk_select_above(&f->row, -INFINITY, f->a);
            memcpy(f->want, f->a, m * sizeof(*f->want));
            qsort(f->want, m, sizeof(*f->want), compare);
            dmk_select_sort(f->a, f->b, m);
            check_same(f->a, f->want, m);
        }
    }
    free(f);
}

static void test_above(void **state)
{
    struct fixture *f = malloc(sizeof(*f));
    struct random r = {8, 0};

    (void)state;
    fill(f, 0, &r);
    for (float cutoff = -30.0f; cutoff < 30.0f; cutoff += 2.5f) {
        const uint32_t n = dmk_select_above(&f->row, cutoff, f->a);
        uint32_t k = 0;

        for (uint32_t i = 0; i < VOCAB; i++) {
            if (f->x[i] >= cutoff) {
                assert_true(k < n);
                assert_int_equal(f->a[k++].id, i);
            }
        }
        assert_int_equal(k, n);
    }
    free(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_above),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
