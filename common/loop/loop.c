/* The loop itself: running and stopping, posts, deferred calls, prepare hooks, jobs on the pool,
 * and the tick that measures how late the loop is.
 *
 * One uv_prepare serves all prepare hooks and deferred calls, so their order is fixed: hooks first,
 * in the order of creation, then deferred calls, which gather what the hooks have done too. When
 * something is left to do without waiting, an idle handle runs, which makes libuv poll with a zero
 * timeout. */
#include "common/loop/internal.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/clock.h"

#define TICK_MS 100

struct dmk_loop {
    uv_loop_t uv;
    uv_async_t async;     /* wakes for the mailbox and for stop */
    uv_prepare_t prepare; /* hooks and deferred calls */
    uv_idle_t idle;       /* active while the next wait must not block */
    uv_timer_t tick;
    struct dmk_mailbox box;
    struct dmk_list hooks;     /* of struct dmk_prepare */
    struct dmk_list deferred;  /* of struct dmk_defer */
    _Atomic(pthread_t) thread; /* 0 = between runs, when anybody may take it apart */
    atomic_bool stop;
    uint32_t n_jobs;
    uint64_t tick_due_ns;
    uint64_t max_delay_ns;
};

struct dmk_prepare {
    struct dmk_list node;
    struct dmk_loop *loop;
    dmk_prepare_fn fn;
    void *ud;
};

uv_loop_t *dmk_loop__uv(struct dmk_loop *loop)
{
    return &loop->uv;
}

static void on_async(uv_async_t *async)
{
    struct dmk_loop *loop = async->data;
    struct dmk_mail *mail = dmk_mailbox_take(&loop->box);

    while (mail) {
        struct dmk_post *post = dmk_container_of(mail, struct dmk_post, mail);

        mail = mail->next; /* before fn, which may post it again or free it */
        post->fn(post->ud);
    }
    if (atomic_load_explicit(&loop->stop, memory_order_acquire)) {
        uv_stop(&loop->uv);
    }
}

static void on_idle(uv_idle_t *idle)
{
    (void)idle; /* only there to keep the loop from waiting */
}

/* The list may change under the walk: a hook may free itself or any other. */
static bool run_hooks(struct dmk_loop *loop)
{
    struct dmk_list todo;
    bool again = false;

    dmk_list_init(&todo);
    while (!dmk_list_empty(&loop->hooks)) {
        struct dmk_list *node = loop->hooks.next;
        struct dmk_prepare *hook;

        dmk_list_remove(node);
        dmk_list_push_back(&todo, node);
        hook = dmk_container_of(node, struct dmk_prepare, node);
        again |= !hook->fn(hook->ud);
    }
    while (!dmk_list_empty(&todo)) {
        struct dmk_list *node = todo.next;

        dmk_list_remove(node);
        dmk_list_push_back(&loop->hooks, node);
    }
    return again;
}

static void run_deferred(struct dmk_loop *loop)
{
    struct dmk_list todo;

    dmk_list_init(&todo);
    while (!dmk_list_empty(&loop->deferred)) {
        struct dmk_list *node = loop->deferred.next;

        dmk_list_remove(node);
        dmk_list_push_back(&todo, node);
    }
    while (!dmk_list_empty(&todo)) {
        struct dmk_defer *defer = dmk_container_of(todo.next, struct dmk_defer, node);

        dmk_list_remove(&defer->node);
        defer->fn(defer->ud);
    }
}

static void on_prepare(uv_prepare_t *prepare)
{
    struct dmk_loop *loop = prepare->data;
    bool again = run_hooks(loop);

    run_deferred(loop);
    again |= !dmk_list_empty(&loop->deferred);
    if (again) {
        uv_idle_start(&loop->idle, on_idle);
    } else {
        uv_idle_stop(&loop->idle);
    }
}

static void on_tick(uv_timer_t *tick)
{
    struct dmk_loop *loop = tick->data;
    const uint64_t now = dmk_clock_ns();
    const uint64_t late = now > loop->tick_due_ns ? now - loop->tick_due_ns : 0;

    if (late > loop->max_delay_ns) {
        loop->max_delay_ns = late;
    }
    loop->tick_due_ns = now + TICK_MS * DMK_NS_PER_MS;
    uv_timer_start(tick, on_tick, TICK_MS, 0);
}

int dmk_loop_new(struct dmk_loop **ret, struct dmk_error *reterr)
{
    struct dmk_loop *loop = calloc(1, sizeof(*loop));
    int err;

    if (!loop) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for an event loop");
    }
    err = uv_loop_init(&loop->uv);
    if (err < 0) {
        free(loop);
        return dmk_error_set(reterr, -DMK_EIO, "the event loop can not start: %s",
                             uv_strerror(err));
    }
    err = uv_async_init(&loop->uv, &loop->async, on_async);
    if (err < 0) {
        (void)uv_loop_close(&loop->uv); /* holds no handle */
        free(loop);
        return dmk_error_set(reterr, -DMK_EIO, "the event loop can not start: %s",
                             uv_strerror(err));
    }
    dmk_list_init(&loop->hooks);
    dmk_list_init(&loop->deferred);
    loop->async.data = loop->prepare.data = loop->tick.data = loop;
    atomic_store(&loop->thread, pthread_self());
    uv_prepare_init(&loop->uv, &loop->prepare);
    uv_prepare_start(&loop->prepare, on_prepare);
    uv_idle_init(&loop->uv, &loop->idle);
    uv_timer_init(&loop->uv, &loop->tick);
    *ret = loop;
    return 0;
}

void dmk_loop_free(struct dmk_loop **loopp)
{
    struct dmk_loop *loop = *loopp;

    if (!loop) {
        return;
    }
    *loopp = NULL;
    atomic_store(&loop->thread, pthread_self());
    while (loop->n_jobs > 0) {
        uv_run(&loop->uv, UV_RUN_ONCE);
    }
    dmk_assert(dmk_list_empty(&loop->hooks));
    uv_close((uv_handle_t *)&loop->prepare, NULL);
    uv_close((uv_handle_t *)&loop->idle, NULL);
    uv_close((uv_handle_t *)&loop->tick, NULL);
    uv_close((uv_handle_t *)&loop->async, NULL);
    /* Twice: a close callback may close something more. */
    uv_run(&loop->uv, UV_RUN_NOWAIT);
    uv_run(&loop->uv, UV_RUN_NOWAIT);
    dmk_assert(uv_loop_close(&loop->uv) == 0);
    free(loop);
}

void dmk_loop_run(struct dmk_loop *loop)
{
    atomic_store(&loop->thread, pthread_self());
    uv_update_time(&loop->uv);
    loop->tick_due_ns = dmk_clock_ns() + TICK_MS * DMK_NS_PER_MS;
    uv_timer_start(&loop->tick, on_tick, TICK_MS, 0);
    while (!atomic_load_explicit(&loop->stop, memory_order_acquire)) {
        uv_run(&loop->uv, UV_RUN_DEFAULT);
    }
    uv_timer_stop(&loop->tick);
    atomic_store(&loop->stop, false);
    atomic_store(&loop->thread, 0);
}

void dmk_loop_stop(struct dmk_loop *loop)
{
    atomic_store_explicit(&loop->stop, true, memory_order_release);
    uv_async_send(&loop->async);
}

uint64_t dmk_loop_now_ns(const struct dmk_loop *loop)
{
    (void)loop;
    return dmk_clock_ns();
}

bool dmk_loop_on_thread(const struct dmk_loop *loop)
{
    const pthread_t owner = atomic_load(&loop->thread);

    return owner == 0 || pthread_equal(owner, pthread_self());
}

void dmk_loop_post(struct dmk_loop *loop, struct dmk_post *post)
{
    if (dmk_mailbox_push(&loop->box, &post->mail)) {
        uv_async_send(&loop->async);
    }
}

void dmk_defer_init(struct dmk_defer *defer, dmk_loop_fn fn, void *ud)
{
    dmk_list_init(&defer->node);
    defer->fn = fn;
    defer->ud = ud;
}

void dmk_loop_defer(struct dmk_loop *loop, struct dmk_defer *defer)
{
    dmk_assert(dmk_loop_on_thread(loop));
    if (dmk_list_empty(&defer->node)) {
        dmk_list_push_back(&loop->deferred, &defer->node);
    }
}

void dmk_defer_cancel(struct dmk_defer *defer)
{
    dmk_list_remove(&defer->node);
}

struct dmk_prepare *dmk_prepare_new(struct dmk_loop *loop, dmk_prepare_fn fn, void *ud)
{
    struct dmk_prepare *prepare = calloc(1, sizeof(*prepare));

    dmk_assert(prepare);
    dmk_assert(dmk_loop_on_thread(loop));
    prepare->loop = loop;
    prepare->fn = fn;
    prepare->ud = ud;
    dmk_list_push_back(&loop->hooks, &prepare->node);
    return prepare;
}

void dmk_prepare_free(struct dmk_prepare **preparep)
{
    struct dmk_prepare *prepare = *preparep;

    if (!prepare) {
        return;
    }
    *preparep = NULL;
    dmk_list_remove(&prepare->node);
    free(prepare);
}

struct job {
    uv_work_t work;
    struct dmk_loop *loop;
    dmk_loop_fn fn;
    dmk_loop_fn done;
    void *ud;
};

static void on_work(uv_work_t *work)
{
    struct job *job = work->data;

    job->fn(job->ud);
}

static void on_worked(uv_work_t *work, int status)
{
    struct job job = *(struct job *)work->data;

    (void)status; /* jobs are never cancelled */
    free(work->data);
    job.loop->n_jobs--;
    job.done(job.ud);
}

int dmk_loop_work(struct dmk_loop *loop, dmk_loop_fn work, dmk_loop_fn done, void *ud)
{
    struct job *job;

    dmk_assert(dmk_loop_on_thread(loop));
    if (loop->n_jobs >= DMK_LOOP_MAX_WORK) {
        return -DMK_EFULL;
    }
    job = calloc(1, sizeof(*job));
    if (!job) {
        return -DMK_ENOMEM;
    }
    *job = (struct job){.loop = loop, .fn = work, .done = done, .ud = ud};
    job->work.data = job;
    if (uv_queue_work(&loop->uv, &job->work, on_work, on_worked) < 0) {
        free(job);
        return -DMK_EFULL;
    }
    loop->n_jobs++;
    return 0;
}

uint64_t dmk_loop_max_delay_ns(struct dmk_loop *loop)
{
    const uint64_t late = loop->max_delay_ns;

    loop->max_delay_ns = 0;
    return late;
}
