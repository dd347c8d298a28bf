/* The event loop of a process: one loop, one thread, all state of that process's control on it.
 *
 * The only home of <uv.h> (common/http, which is plumbing of sockets, sees it through internal.h).
 * Timers, work on a thread pool, posts from other threads, descriptors to poll, signals. All
 * callbacks run on the loop's thread. Nothing here but dmk_loop_post and dmk_loop_stop may be
 * called from another thread. */
#pragma once

#include "common/base/error.h"
#include "common/base/list.h"
#include "common/base/mailbox.h"
#include "common/base/span.h"

struct dmk_loop;

int dmk_loop_new(struct dmk_loop **ret, struct dmk_error *reterr);
/* All handles must have been freed before (asserted); waits for jobs that run on the pool. */
void dmk_loop_free(struct dmk_loop **loop);
/* Runs until dmk_loop_stop. The calling thread becomes the loop's thread. */
void dmk_loop_run(struct dmk_loop *loop);
/* Ends dmk_loop_run (at once, if it has not begun) after the callbacks that are due. Any thread. */
void dmk_loop_stop(struct dmk_loop *loop);
/* Monotonic time, read afresh. */
uint64_t dmk_loop_now_ns(const struct dmk_loop *loop);
/* True on the loop's own thread (and on any once dmk_loop_run has ended); owners assert it at their doors. */
bool dmk_loop_on_thread(const struct dmk_loop *loop);

typedef void (*dmk_loop_fn)(void *ud);

/* A post is embedded in the poster's object and may be posted again once its fn has started. Posts
 * run in the order of posting. Any thread. */
struct dmk_post {
    struct dmk_mail mail;
    dmk_loop_fn fn;
    void *ud;
};
void dmk_loop_post(struct dmk_loop *loop, struct dmk_post *post);

/* Something to do once at the end of this turn of the loop, before it waits: what a turn's
 * callbacks have gathered is then written in one go. Embedded in its owner's object, set up by
 * dmk_defer_init. Scheduling it again before it ran changes nothing; fn may schedule it again, for
 * the next turn (which then comes without waiting). */
struct dmk_defer {
    struct dmk_list node;
    dmk_loop_fn fn;
    void *ud;
};
void dmk_defer_init(struct dmk_defer *defer, dmk_loop_fn fn, void *ud);
void dmk_loop_defer(struct dmk_loop *loop, struct dmk_defer *defer);
void dmk_defer_cancel(struct dmk_defer *defer);

struct dmk_timer;
struct dmk_timer *dmk_timer_new(struct dmk_loop *loop, dmk_loop_fn fn, void *ud);
/* repeat_ms 0 = once. Starting a running timer moves it. */
void dmk_timer_start(struct dmk_timer *timer, uint64_t delay_ms, uint64_t repeat_ms);
void dmk_timer_stop(struct dmk_timer *timer);
void dmk_timer_free(struct dmk_timer **timer); /* safe inside its own callback; NULL is ignored */

/* Jobs that may wait or run at a time. */
#define DMK_LOOP_MAX_WORK 1024
/* Runs work on the pool, then done on the loop. -DMK_EFULL when the bound is reached. */
int dmk_loop_work(struct dmk_loop *loop, dmk_loop_fn work, dmk_loop_fn done, void *ud);

/* Calls fn when fd is readable or broken, again and again as long as it is; what is wrong with it fn learns by
 * reading. fd stays the caller's and must outlive it. */
struct dmk_poll;
struct dmk_poll *dmk_poll_new(struct dmk_loop *loop, int fd, dmk_loop_fn fn, void *ud);
void dmk_poll_free(struct dmk_poll **poll);

/* Calls fn before each wait of the loop; fn returns false when it must be called again without
 * waiting. */
struct dmk_prepare;
typedef bool (*dmk_prepare_fn)(void *ud);
struct dmk_prepare *dmk_prepare_new(struct dmk_loop *loop, dmk_prepare_fn fn, void *ud);
void dmk_prepare_free(struct dmk_prepare **prepare); /* safe inside its own callback */

struct dmk_signal;
struct dmk_signal *dmk_signal_new(struct dmk_loop *loop, int signo, dmk_loop_fn fn, void *ud);
void dmk_signal_free(struct dmk_signal **signal);

/* How late the loop's own 100 ms tick ran at worst since the last call: the loop's own health. */
uint64_t dmk_loop_max_delay_ns(struct dmk_loop *loop);
