/* Drives a transport node on the loop: its descriptor is polled, it is moved on and armed before every wait
 * of the loop, and by a timer where it has no descriptor. */
#pragma once

#include "common/loop/loop.h"
#include "common/xfer/xfer.h"

struct dmk_xferloop;

/* on_progress runs after events have happened. x stays the caller's. */
struct dmk_xferloop *dmk_xferloop_new(struct dmk_loop *loop, const struct dmk_xfer_ops *ops,
                                      struct dmk_xfer *x, dmk_loop_fn on_progress, void *ud);
void dmk_xferloop_free(struct dmk_xferloop **xl);
