/* See xferloop.h. Arming is one-shot and fails while events wait, so every turn of the loop ends with
 * "progress until nothing happens, then arm": that also covers operations that other callbacks of the turn
 * have posted. Progress in one turn is bounded; when more is to do, the loop comes back without waiting. */
#include "common/worker/xferloop.h"
#include <stdlib.h>
#include "common/base/assert.h"

#define MAX_ROUNDS 256 /* calls of progress in one turn */
#define TIMER_MS   1   /* without a descriptor */

struct dmk_xferloop {
    const struct dmk_xfer_ops *ops;
    struct dmk_xfer *x;
    struct dmk_poll *poll;
    struct dmk_timer *timer;
    struct dmk_prepare *prepare;
    dmk_loop_fn on_progress;
    void *ud;
};

/* True when nothing is left to do. */
static bool move_on(struct dmk_xferloop *xl)
{
    bool any = false;
    int rounds = 0;

    while (rounds < MAX_ROUNDS && xl->ops->progress(xl->x) > 0) {
        any = true;
        rounds++;
    }
    if (any) {
        xl->on_progress(xl->ud);
    }
    return rounds < MAX_ROUNDS;
}

static void on_readable(void *ud)
{
    (void)move_on(ud); /* the hook before the wait does the rest */
}

static bool before_wait(void *ud)
{
    struct dmk_xferloop *xl = ud;

    return move_on(xl) && xl->ops->arm(xl->x);
}

struct dmk_xferloop *dmk_xferloop_new(struct dmk_loop *loop, const struct dmk_xfer_ops *ops,
                                      struct dmk_xfer *x, dmk_loop_fn on_progress, void *ud)
{
    struct dmk_xferloop *xl = calloc(1, sizeof(*xl));
    const int fd = ops->fd(x);

    dmk_assert(xl);
    *xl = (struct dmk_xferloop){.ops = ops, .x = x, .on_progress = on_progress, .ud = ud};
    if (fd >= 0) {
        xl->poll = dmk_poll_new(loop, fd, on_readable, xl);
    } else {
        xl->timer = dmk_timer_new(loop, on_readable, xl);
        dmk_timer_start(xl->timer, TIMER_MS, TIMER_MS);
    }
    xl->prepare = dmk_prepare_new(loop, before_wait, xl);
    return xl;
}

void dmk_xferloop_free(struct dmk_xferloop **xlp)
{
    struct dmk_xferloop *xl = *xlp;

    if (!xl) {
        return;
    }
    *xlp = NULL;
    dmk_prepare_free(&xl->prepare);
    dmk_poll_free(&xl->poll);
    dmk_timer_free(&xl->timer);
    free(xl);
}
