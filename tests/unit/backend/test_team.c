/* Teams: every item once, every thread once, sleeping members wake, and the doors that are shut say so. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include "common/backend/backend.h"
#include "common/backend/team.h"

#define N_ITEMS 1000

struct count {
    atomic_uint items[N_ITEMS];
    atomic_uint threads[8];
    void *scratch[8];
};

static void take_item(const void *args, uint32_t item, void *scratch)
{
    struct count *c = (struct count *)args;
    atomic_fetch_add(&c->items[item], 1);
    if (scratch) {
        ((char *)scratch)[63] = 1;
    }
}

static void take_thread(void *ud, uint32_t thread)
{
    struct count *c = ud;
    atomic_fetch_add(&c->threads[thread], 1);
}

static void check_team(uint32_t n_threads, bool spin, uint32_t rounds, uint32_t pause_us)
{
    static struct count c;
    struct dmk_team *team = NULL;
    memset(&c, 0, sizeof(c));
    assert_int_equal(dmk_team_new("test", n_threads, spin, 64, &team, NULL), 0);
    struct dmk_stream *stream = dmk_team_stream(team);
    assert_int_equal(stream->n_threads, n_threads);
    for (uint32_t i = 0; i < rounds; i++) {
        stream->run(stream, take_item, &c, i % 3 ? N_ITEMS : 1);
        dmk_team_each(team, take_thread, &c);
        if (pause_us) {
            usleep(pause_us);
        }
    }
    uint32_t full = rounds - (rounds + 2) / 3;
    for (uint32_t i = 0; i < N_ITEMS; i++) {
        assert_int_equal(atomic_load(&c.items[i]), i == 0 ? rounds : full);
    }
    for (uint32_t i = 0; i < n_threads; i++) {
        assert_int_equal(atomic_load(&c.threads[i]), rounds);
    }
    dmk_team_free(&team);
    assert_null(team);
}

static void test_items(void **state)
{
    (void)state;
    check_team(1, true, 10, 0);
    check_team(2, true, 300, 0);
    check_team(4, false, 300, 0);
    check_team(8, true, 50, 0);
}

/* Long enough between jobs for the members to fall asleep. */
static void test_sleepers(void **state)
{
    (void)state;
    check_team(3, true, 20, 2000);
    check_team(3, false, 20, 100);
}

static void test_backends(void **state)
{
    (void)state;
    struct dmk_backend_conf conf = {.n_threads = 2, .max_k = 64};
    struct dmk_backend *be = NULL;
    struct dmk_error error;
    const char *names[] = {"cpu", "ref"};
    for (int i = 0; i < 2; i++) {
        void *a, *b;
        struct dmk_event *event;
        struct dmk_kernels kernels;
        assert_int_equal(dmk_backend_open(names[i], &conf, &be, &error), 0);
        struct dmk_stream *stream = be->ops->stream(be, DMK_STREAM_COMPUTE);
        assert_true(stream->scratch_bytes >= dmk_kernels_scratch_bytes(64));
        be->ops->kernels(be, &kernels);
        assert_true(i == 0 || strcmp(kernels.name, "ref") == 0);
        assert_int_equal(be->ops->alloc(be, DMK_MEM_DEVICE, 5000, &a), 0);
        assert_int_equal(be->ops->alloc(be, DMK_MEM_HOST, 5000, &b), 0);
        assert_int_equal(((char *)b)[4999], 0);
        memset(a, 7, 5000);
        be->ops->copy(be, stream, b, a, 5000);
        assert_int_equal(be->ops->event_new(be, &event), 0);
        be->ops->record(be, stream, event);
        assert_int_equal(be->ops->wait_host(be, event), 0);
        be->ops->event_free(be, event);
        assert_int_equal(be->ops->sync(be, stream), 0);
        assert_memory_equal(a, b, 5000);
        be->ops->free(be, DMK_MEM_DEVICE, a, 5000);
        be->ops->free(be, DMK_MEM_HOST, b, 5000);
        dmk_backend_close(&be);
        assert_null(be);
    }
    assert_int_equal(dmk_backend_open("abacus", &conf, &be, &error), -DMK_ENOENT);
    assert_non_null(strstr(error.text, "abacus"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_items),
        cmocka_unit_test(test_sleepers),
        cmocka_unit_test(test_backends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
