/* The event loop of a process: one loop, one thread, all state of that process's control on it.
 *
 * The only home of <uv.h>. Timers, work on a thread pool, posts from other threads, descriptors to poll,
 * signals. Callbacks run on the loop's thread. */
#pragma once

#include "common/base/error.h"
#include "common/base/mailbox.h"
#include "common/base/span.h"

struct dmk_loop;

int dmk_loop_new(struct dmk_loop **ret, struct dmk_error *reterr);
/* All handles must have been freed or stopped before. */
void dmk_loop_free(struct dmk_loop **loop);
/* Runs until dmk_loop_stop. */
void dmk_loop_run(struct dmk_loop *loop);
void dmk_loop_stop(struct dmk_loop *loop);
/* Monotonic time, read afresh. */
uint64_t dmk_loop_now_ns(const struct dmk_loop *loop);
/* True on the loop's own thread; owners assert it at their doors. */
bool dmk_loop_on_thread(const struct dmk_loop *loop);

typedef void (*dmk_loop_fn)(void *ud);

/* A post is embedded in the poster's object and may be posted again once its fn has started. Any thread. */
struct dmk_post {
    struct dmk_mail mail;
    dmk_loop_fn fn;
    void *ud;
};
void dmk_loop_post(struct dmk_loop *loop, struct dmk_post *post);

struct dmk_timer;
struct dmk_timer *dmk_timer_new(struct dmk_loop *loop, dmk_loop_fn fn, void *ud);
/* repeat_ms 0 = once. Starting a running timer moves it. */
void dmk_timer_start(struct dmk_timer *timer, uint64_t delay_ms, uint64_t repeat_ms);
void dmk_timer_stop(struct dmk_timer *timer);
void dmk_timer_free(struct dmk_timer **timer); /* safe inside its own callback */

/* Runs work on the pool, then done on the loop. -DMK_EFULL when the bound of waiting jobs is reached. */
int dmk_loop_work(struct dmk_loop *loop, dmk_loop_fn work, dmk_loop_fn done, void *ud);

/* Calls fn when fd is readable. */
struct dmk_poll;
struct dmk_poll *dmk_poll_new(struct dmk_loop *loop, int fd, dmk_loop_fn fn, void *ud);
void dmk_poll_free(struct dmk_poll **poll);

/* Calls fn before each wait of the loop; fn returns false when it must be called again without waiting. */
struct dmk_prepare;
typedef bool (*dmk_prepare_fn)(void *ud);
struct dmk_prepare *dmk_prepare_new(struct dmk_loop *loop, dmk_prepare_fn fn, void *ud);
void dmk_prepare_free(struct dmk_prepare **prepare);

struct dmk_signal;
struct dmk_signal *dmk_signal_new(struct dmk_loop *loop, int signo, dmk_loop_fn fn, void *ud);
void dmk_signal_free(struct dmk_signal **signal);

/* How late timers ran at worst since the last call: the loop's own health. */
uint64_t dmk_loop_max_delay_ns(struct dmk_loop *loop);
