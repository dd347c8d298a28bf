/* Timers, polled descriptors and signals: small heap objects around one libuv handle each.
 *
 * libuv closes handles in a later turn, so free only begins the close; the object goes in its close
 * callback, and no callback of the user runs after free. */
#include "common/loop/internal.h"
#include <stdlib.h>
#include "common/base/assert.h"

struct dmk_timer {
    uv_timer_t uv;
    dmk_loop_fn fn;
    void *ud;
};

struct dmk_poll {
    uv_poll_t uv;
    dmk_loop_fn fn;
    void *ud;
};

struct dmk_signal {
    uv_signal_t uv;
    dmk_loop_fn fn;
    void *ud;
};

static void on_close(uv_handle_t *handle)
{
    free(handle->data);
}

static void on_timer(uv_timer_t *uv)
{
    struct dmk_timer *timer = uv->data;

    timer->fn(timer->ud);
}

struct dmk_timer *dmk_timer_new(struct dmk_loop *loop, dmk_loop_fn fn, void *ud)
{
    struct dmk_timer *timer = calloc(1, sizeof(*timer));

    dmk_assert(timer);
    dmk_assert(dmk_loop_on_thread(loop));
    timer->fn = fn;
    timer->ud = ud;
    uv_timer_init(dmk_loop__uv(loop), &timer->uv);
    timer->uv.data = timer;
    return timer;
}

void dmk_timer_start(struct dmk_timer *timer, uint64_t delay_ms, uint64_t repeat_ms)
{
    uv_update_time(timer->uv.loop); /* a long callback must not shorten the delay */
    uv_timer_start(&timer->uv, on_timer, delay_ms, repeat_ms);
}

void dmk_timer_stop(struct dmk_timer *timer)
{
    uv_timer_stop(&timer->uv);
}

void dmk_timer_free(struct dmk_timer **timer)
{
    if (*timer) {
        uv_close((uv_handle_t *)&(*timer)->uv, on_close);
        *timer = NULL;
    }
}

static void on_poll(uv_poll_t *uv, int status, int events)
{
    struct dmk_poll *poll = uv->data;

    /* libuv ends the watch of a descriptor that reports an error. What came before the error is still to
     * be read, though, and the owner finds the error itself behind it. */
    if (status < 0) {
        dmk_assert(uv_poll_start(uv, UV_READABLE, on_poll) == 0);
    }
    (void)events;
    poll->fn(poll->ud);
}

struct dmk_poll *dmk_poll_new(struct dmk_loop *loop, int fd, dmk_loop_fn fn, void *ud)
{
    struct dmk_poll *poll = calloc(1, sizeof(*poll));

    dmk_assert(poll);
    dmk_assert(dmk_loop_on_thread(loop));
    poll->fn = fn;
    poll->ud = ud;
    dmk_assert(uv_poll_init(dmk_loop__uv(loop), &poll->uv, fd) == 0);
    poll->uv.data = poll;
    dmk_assert(uv_poll_start(&poll->uv, UV_READABLE, on_poll) == 0);
    return poll;
}

void dmk_poll_free(struct dmk_poll **poll)
{
    if (*poll) {
        uv_close((uv_handle_t *)&(*poll)->uv, on_close);
        *poll = NULL;
    }
}

static void on_signal(uv_signal_t *uv, int signo)
{
    struct dmk_signal *signal = uv->data;

    (void)signo;
    signal->fn(signal->ud);
}

struct dmk_signal *dmk_signal_new(struct dmk_loop *loop, int signo, dmk_loop_fn fn, void *ud)
{
    struct dmk_signal *signal = calloc(1, sizeof(*signal));

    dmk_assert(signal);
    dmk_assert(dmk_loop_on_thread(loop));
    signal->fn = fn;
    signal->ud = ud;
    dmk_assert(uv_signal_init(dmk_loop__uv(loop), &signal->uv) == 0);
    signal->uv.data = signal;
    dmk_assert(uv_signal_start(&signal->uv, on_signal, signo) == 0);
    return signal;
}

void dmk_signal_free(struct dmk_signal **signal)
{
    if (*signal) {
        uv_close((uv_handle_t *)&(*signal)->uv, on_close);
        *signal = NULL;
    }
}
