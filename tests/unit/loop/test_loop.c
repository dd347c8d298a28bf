/* The loop: order of posts, timers, jobs and their bound, deferred calls, prepare hooks, polling,
 * signals, stopping from another thread. Everything runs on one real loop per test. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>
#include "common/base/clock.h"
#include "common/loop/loop.h"

#define N_THREADS 4
#define N_POSTS   2000

struct fixture {
    struct dmk_loop *loop;
    char log[256];
    size_t n_log;
    int count;
    struct dmk_timer *timer;
    struct dmk_defer defer;
    struct dmk_prepare *prepare;
    struct dmk_poll *poll;
    int fd;
    bool stop_when_done;
};

static void note(struct fixture *f, char c)
{
    assert_true(f->n_log + 1 < sizeof(f->log));
    f->log[f->n_log++] = c;
    f->log[f->n_log] = 0;
}

static void stop_loop(void *ud)
{
    dmk_loop_stop(((struct fixture *)ud)->loop);
}

static void set_up(struct fixture *f)
{
    *f = (struct fixture){.fd = -1};
    assert_int_equal(dmk_loop_new(&f->loop, NULL), 0);
}

struct numbered {
    struct dmk_post post;
    struct fixture *f;
    int thread, index;
};

static int last_index[N_THREADS];

static void on_numbered(void *ud)
{
    struct numbered *n = ud;

    assert_true(dmk_loop_on_thread(n->f->loop));
    assert_int_equal(n->index, last_index[n->thread] + 1);
    last_index[n->thread] = n->index;
    if (++n->f->count == N_THREADS * N_POSTS) {
        dmk_loop_stop(n->f->loop);
    }
}

static struct numbered numbered[N_THREADS][N_POSTS];

static void *post_all(void *arg)
{
    struct numbered *n = arg;

    assert_false(dmk_loop_on_thread(n->f->loop));
    for (int i = 0; i < N_POSTS; i++) {
        dmk_loop_post(n->f->loop, &n[i].post);
    }
    return NULL;
}

static void posts_keep_order_per_thread(void **state)
{
    struct fixture f;
    pthread_t threads[N_THREADS];

    (void)state;
    set_up(&f);
    for (int t = 0; t < N_THREADS; t++) {
        last_index[t] = -1;
        for (int i = 0; i < N_POSTS; i++) {
            numbered[t][i] = (struct numbered){.f = &f, .thread = t, .index = i};
            numbered[t][i].post.fn = on_numbered;
            numbered[t][i].post.ud = &numbered[t][i];
        }
        assert_int_equal(pthread_create(&threads[t], NULL, post_all, numbered[t]), 0);
    }
    dmk_loop_run(f.loop);
    for (int t = 0; t < N_THREADS; t++) {
        pthread_join(threads[t], NULL);
    }
    assert_int_equal(f.count, N_THREADS * N_POSTS);
    dmk_loop_free(&f.loop);
}

static void on_repeat(void *ud)
{
    struct fixture *f = ud;

    if (++f->count == 3) {
        dmk_timer_free(&f->timer); /* inside its own callback */
        dmk_loop_stop(f->loop);
    }
}

static void timers_repeat_and_free_themselves(void **state)
{
    struct fixture f;
    uint64_t start;

    (void)state;
    set_up(&f);
    start = dmk_loop_now_ns(f.loop);
    f.timer = dmk_timer_new(f.loop, on_repeat, &f);
    dmk_timer_start(f.timer, 10, 10);
    dmk_loop_run(f.loop);
    assert_int_equal(f.count, 3);
    assert_null(f.timer);
    assert_true(dmk_loop_now_ns(f.loop) - start >= 29 * DMK_NS_PER_MS);
    dmk_loop_free(&f.loop);
}

static void work_job(void *ud)
{
    struct fixture *f = ud;

    __atomic_fetch_add(&f->count, 1, __ATOMIC_RELAXED);
}

static void work_done(void *ud)
{
    struct fixture *f = ud;

    if (++f->n_log == DMK_LOOP_MAX_WORK) {
        dmk_loop_stop(f->loop);
    }
}

static void work_is_bounded(void **state)
{
    struct fixture f;

    (void)state;
    set_up(&f);
    for (int i = 0; i < DMK_LOOP_MAX_WORK; i++) {
        assert_int_equal(dmk_loop_work(f.loop, work_job, work_done, &f), 0);
    }
    assert_int_equal(dmk_loop_work(f.loop, work_job, work_done, &f), -DMK_EFULL);
    dmk_loop_run(f.loop);
    assert_int_equal(f.count, DMK_LOOP_MAX_WORK);
    /* A job in flight is waited for. */
    f.n_log = 0;
    assert_int_equal(dmk_loop_work(f.loop, work_job, work_done, &f), 0);
    dmk_loop_free(&f.loop);
    assert_int_equal(f.count, DMK_LOOP_MAX_WORK + 1);
    assert_int_equal(f.n_log, 1);
}

static void on_defer(void *ud)
{
    struct fixture *f = ud;

    note(f, 'd');
    if (++f->count < 3) {
        dmk_loop_defer(f->loop, &f->defer); /* the next turn, without waiting */
    } else {
        dmk_loop_stop(f->loop);
    }
}

static void on_post_for_defer(void *ud)
{
    struct fixture *f = ud;

    note(f, 'p');
    dmk_loop_defer(f->loop, &f->defer);
    dmk_loop_defer(f->loop, &f->defer);
}

static bool on_prepare(void *ud)
{
    struct fixture *f = ud;

    if (f->n_log > 0) {
        note(f, 'h');
    }
    return true;
}

static void deferred_runs_once_after_the_turn_and_the_hooks(void **state)
{
    struct fixture f;
    struct dmk_post post = {.fn = on_post_for_defer, .ud = &f};
    uint64_t start;

    (void)state;
    set_up(&f);
    dmk_defer_init(&f.defer, on_defer, &f);
    f.prepare = dmk_prepare_new(f.loop, on_prepare, &f);
    start = dmk_loop_now_ns(f.loop);
    dmk_loop_post(f.loop, &post);
    dmk_loop_run(f.loop);
    assert_string_equal(f.log, "phdhdhd");
    assert_true(dmk_loop_now_ns(f.loop) - start < 90 * DMK_NS_PER_MS);
    /* A cancelled one does not run. */
    dmk_loop_defer(f.loop, &f.defer);
    dmk_defer_cancel(&f.defer);
    dmk_prepare_free(&f.prepare);
    dmk_loop_free(&f.loop);
    assert_int_equal(f.count, 3);
}

static bool on_busy_prepare(void *ud)
{
    struct fixture *f = ud;

    if (++f->count == 1000) {
        dmk_loop_stop(f->loop);
        dmk_prepare_free(&f->prepare); /* inside its own callback */
        return true;
    }
    return false;
}

static void prepare_runs_again_without_waiting(void **state)
{
    struct fixture f;
    uint64_t start;

    (void)state;
    set_up(&f);
    start = dmk_loop_now_ns(f.loop);
    f.prepare = dmk_prepare_new(f.loop, on_busy_prepare, &f);
    dmk_loop_run(f.loop);
    assert_int_equal(f.count, 1000);
    assert_true(dmk_loop_now_ns(f.loop) - start < 5 * DMK_NS_PER_S);
    dmk_loop_free(&f.loop);
}

static void on_readable(void *ud)
{
    struct fixture *f = ud;
    char c;

    assert_int_equal(read(f->fd, &c, 1), 1);
    note(f, c);
    if (c == 'z') {
        dmk_loop_stop(f->loop);
    }
}

static void on_signal(void *ud)
{
    struct fixture *f = ud;

    note(f, 's');
    assert_int_equal(write(f->count, "z", 1), 1);
}

static void polls_and_signals(void **state)
{
    struct fixture f;
    struct dmk_poll *poll;
    struct dmk_signal *sig;
    int fds[2];

    (void)state;
    set_up(&f);
    assert_int_equal(pipe(fds), 0);
    f.fd = fds[0];
    f.count = fds[1];
    poll = dmk_poll_new(f.loop, fds[0], on_readable, &f);
    sig = dmk_signal_new(f.loop, SIGUSR1, on_signal, &f);
    assert_int_equal(write(fds[1], "ab", 2), 2);
    raise(SIGUSR1);
    dmk_loop_run(f.loop);
    assert_int_equal(f.n_log, 4);
    assert_int_equal(f.log[3], 'z');
    dmk_poll_free(&poll);
    dmk_signal_free(&sig);
    dmk_loop_free(&f.loop);
    close(fds[0]);
    close(fds[1]);
}

static void on_reset_readable(void *ud)
{
    struct fixture *f = ud;
    char c;
    const ssize_t n = recv(f->fd, &c, 1, 0);

    if (n == 1) {
        note(f, c);
        return;
    }
    assert_int_equal(n, -1);
    assert_int_equal(errno, ECONNRESET);
    note(f, 'r');
    dmk_poll_free(&f->poll); /* inside its own callback */
    dmk_loop_stop(f->loop);
}

/* A peer that sent something and then reset the connection: its bytes are read, then the error. */
static void polls_past_an_error(void **state)
{
    const struct linger reset = {.l_onoff = 1};
    struct sockaddr_in addr = {.sin_family = AF_INET};
    socklen_t len = sizeof(addr);
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct fixture f;
    int peer;

    (void)state;
    set_up(&f);
    addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(bind(listener, (struct sockaddr *)&addr, sizeof(addr)), 0);
    assert_int_equal(listen(listener, 1), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&addr, &len), 0);
    f.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(f.fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    peer = accept(listener, NULL, NULL);
    assert_true(peer >= 0);
    assert_int_equal(send(peer, "ab", 2, 0), 2);
    assert_int_equal(setsockopt(peer, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)), 0);
    close(peer);
    f.poll = dmk_poll_new(f.loop, f.fd, on_reset_readable, &f);
    dmk_loop_run(f.loop);
    assert_int_equal(f.n_log, 3);
    assert_memory_equal(f.log, "abr", 3);
    dmk_loop_free(&f.loop);
    close(f.fd);
    close(listener);
}

static void *stop_later(void *arg)
{
    usleep(20000);
    stop_loop(arg);
    return NULL;
}

static void on_slow(void *ud)
{
    (void)ud;
    usleep(150000);
}

static void stops_from_another_thread_and_measures_delay(void **state)
{
    struct fixture f;
    pthread_t thread;

    (void)state;
    set_up(&f);
    assert_int_equal(pthread_create(&thread, NULL, stop_later, &f), 0);
    dmk_loop_run(f.loop); /* would never end without the stop */
    pthread_join(thread, NULL);
    dmk_loop_stop(f.loop);
    dmk_loop_run(f.loop); /* a stop before the run ends it at once */

    f.timer = dmk_timer_new(f.loop, on_slow, &f);
    dmk_timer_start(f.timer, 90, 0);
    struct dmk_timer *end = dmk_timer_new(f.loop, stop_loop, &f);
    dmk_timer_start(end, 300, 0);
    (void)dmk_loop_max_delay_ns(f.loop);
    dmk_loop_run(f.loop);
    assert_true(dmk_loop_max_delay_ns(f.loop) >= 100 * DMK_NS_PER_MS);
    assert_int_equal(dmk_loop_max_delay_ns(f.loop), 0);
    dmk_timer_free(&f.timer);
    dmk_timer_free(&end);
    dmk_loop_free(&f.loop);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(posts_keep_order_per_thread),
        cmocka_unit_test(timers_repeat_and_free_themselves),
        cmocka_unit_test(work_is_bounded),
        cmocka_unit_test(deferred_runs_once_after_the_turn_and_the_hooks),
        cmocka_unit_test(prepare_runs_again_without_waiting),
        cmocka_unit_test(polls_and_signals),
        cmocka_unit_test(polls_past_an_error),
        cmocka_unit_test(stops_from_another_thread_and_measures_delay),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
