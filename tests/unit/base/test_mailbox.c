/* The mailbox: order of one producer is kept, nothing is lost or doubled with four of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include "common/base/mailbox.h"

#define N_THREADS 4
#define N_EACH    20000

struct note {
    struct dmk_mail mail; /* first */
    int thread, index;
};

static struct dmk_mailbox box;
static struct note notes[N_THREADS][N_EACH];

static void *produce(void *ud)
{
    const int t = (int)(intptr_t)ud;

    for (int i = 0; i < N_EACH; i++) {
        notes[t][i] = (struct note){.thread = t, .index = i};
        (void)dmk_mailbox_push(&box, &notes[t][i].mail);
    }
    return NULL;
}

static void test_many_producers(void **state)
{
    pthread_t threads[N_THREADS];
    int next[N_THREADS] = {0};
    int total = 0;

    (void)state;
    for (int t = 0; t < N_THREADS; t++) {
        assert_int_equal(pthread_create(&threads[t], NULL, produce, (void *)(intptr_t)t), 0);
    }
    while (total < N_THREADS * N_EACH) {
        for (struct dmk_mail *m = dmk_mailbox_take(&box); m; total++) {
            const struct note *n = (const struct note *)m;

            m = m->next;
            assert_int_equal(n->index, next[n->thread]);
            next[n->thread]++;
        }
    }
    for (int t = 0; t < N_THREADS; t++) {
        assert_int_equal(pthread_join(threads[t], NULL), 0);
        assert_int_equal(next[t], N_EACH);
    }
    assert_null(dmk_mailbox_take(&box));
}

static void test_push_says_when_the_box_was_empty(void **state)
{
    struct dmk_mail a, b;

    (void)state;
    assert_true(dmk_mailbox_push(&box, &a));
    assert_false(dmk_mailbox_push(&box, &b));
    assert_ptr_equal(dmk_mailbox_take(&box), &a);
    assert_ptr_equal(a.next, &b);
    assert_true(dmk_mailbox_push(&box, &a));
    (void)dmk_mailbox_take(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_push_says_when_the_box_was_empty),
        cmocka_unit_test(test_many_producers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
