/* A small world for the hand-over: one D and two P's over the loopback, page pools that know who
 * may be written to, routers that relay, and faults drawn from a seed. world.c owns it;
 * test_handover.c runs it. */
#pragma once

#include "common/xfer/receiver.h"
#include "common/xfer/loopback.h"
#include "common/xfer/sender.h"

enum { WORLD_REQUESTS = 6, WORLD_P = 2 };

struct world_conf {
    uint64_t seed;
    enum dmk_xfer_lane lane;
    bool faults;    /* lossy messages, delays, late puts */
    bool disasters; /* cancels, cuts, partitions, pauses, kills and restarts */
};

struct world_result {
    uint32_t n_ready, n_failed, n_cancelled, n_freed; /* as D's owner heard it */
    uint32_t n_done_ok;                               /* as P's owners heard it */
    uint64_t n_writes, n_late_writes;                 /* late: into a DRAINING ticket's pages */
    uint32_t n_kills;
    uint64_t n_puts;
};

/* Runs one schedule to its end. Returns NULL, or what went wrong. */
const char *world_run(const struct world_conf *conf, struct world_result *ret);
