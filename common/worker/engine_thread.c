/* See engine_thread.h. The job's fields are written by the loop before the semaphore is posted and read by
 * the thread after it was taken; the way back is a post to the loop. */
#include "common/worker/engine_thread.h"
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/clock.h"

struct dmk_engine_thread {
    struct dmk_loop *loop;
    pthread_t thread;
    sem_t start;
    struct dmk_post ended;
    dmk_loop_fn run; /* NULL: end the thread */
    dmk_loop_fn done;
    void *ud;
    bool busy;
    uint64_t started_ns;
};

static void on_ended(void *arg)
{
    struct dmk_engine_thread *t = arg;

    t->busy = false;
    t->done(t->ud); /* may start the next job */
}

static void *work(void *arg)
{
    struct dmk_engine_thread *t = arg;

    for (;;) {
        while (sem_wait(&t->start) < 0 && errno == EINTR) {
        }
        if (!t->run) {
            return NULL;
        }
        t->run(t->ud);
        dmk_loop_post(t->loop, &t->ended);
    }
}

struct dmk_engine_thread *dmk_engine_thread_new(struct dmk_loop *loop)
{
    struct dmk_engine_thread *t = calloc(1, sizeof(*t));

    dmk_assert(t);
    t->loop = loop;
    t->ended.fn = on_ended;
    t->ended.ud = t;
    dmk_assert(sem_init(&t->start, 0, 0) == 0);
    dmk_assert(pthread_create(&t->thread, NULL, work, t) == 0);
    return t;
}

void dmk_engine_thread_run(struct dmk_engine_thread *t, dmk_loop_fn run, dmk_loop_fn done, void *ud)
{
    dmk_assert(!t->busy);
    dmk_assert(run);
    t->run = run;
    t->done = done;
    t->ud = ud;
    t->busy = true;
    t->started_ns = dmk_clock_ns();
    (void)sem_post(&t->start);
}

bool dmk_engine_thread_busy(const struct dmk_engine_thread *t)
{
    return t->busy;
}

uint64_t dmk_engine_thread_age_ns(const struct dmk_engine_thread *t)
{
    return t->busy ? dmk_clock_ns() - t->started_ns : 0;
}

void dmk_engine_thread_free(struct dmk_engine_thread **tp)
{
    struct dmk_engine_thread *t = *tp;

    if (!t) {
        return;
    }
    *tp = NULL;
    dmk_assert(!t->busy);
    t->run = NULL;
    (void)sem_post(&t->start);
    (void)pthread_join(t->thread, NULL);
    (void)sem_destroy(&t->start);
    free(t);
}
