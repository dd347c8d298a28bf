/* A fabric that connects nodes inside one process, for tests: every fault can be had on command.
 *
 * Progress-driven and deterministic: time is a count of steps (each progress call of any node is
 * one), and chance is a function of the seed. All nodes of a fabric belong to one thread. Nodes are
 * opened with the ops of dmk_xfer_find("loopback") and conf.fabric; conf.bind names the node (an
 * address of a name leads to the newest node opened under it, as after a restart).
 *
 * The lanes behave as the real ones do:
 *   EMULATED  a put is a message that the target's own progress copies, while its endpoint is open
 * there: also after the writer's endpoint broke or its process ended. DIRECT    a put is a copy
 * that needs nobody's progress: it lands after breaks and failed flushes, until it was done or the
 * writer's process has gone (which kill delays). A put into the memory of a process that has ended
 * "succeeds". What a connection held is kept until the fabric is freed. */
#pragma once

#include "common/xfer/xfer.h"

/* Rates in a thousand; delays in steps. All zero: everything arrives, in order, at the next
 * progress. */
struct dmk_loopback_faults {
    uint32_t max_delay; /* of anything */
    uint32_t drop;      /* messages */
    uint32_t duplicate; /* messages */
    uint32_t reorder;   /* messages that may overtake earlier ones */
    uint32_t late;      /* puts that land up to late_steps later */
    uint32_t late_steps;
    bool silent_death; /* a killed node's peers are not told (shared memory without PEER) */
};

struct dmk_loopback_conf {
    uint64_t seed;
    enum dmk_xfer_lane lane;
    struct dmk_loopback_faults faults;
    /* Just before bytes are written at addr, by a put of `writer`; may be NULL. */
    void (*on_write)(void *ud, const struct dmk_xfer *writer, void *addr, size_t bytes);
    void *ud;
};

int dmk_loopback_new(const struct dmk_loopback_conf *conf, struct dmk_loopback **ret);
/* After all its nodes were closed. */
void dmk_loopback_free(struct dmk_loopback **fabric);

void dmk_loopback_set_faults(struct dmk_loopback *fabric, const struct dmk_loopback_faults *faults);
uint64_t dmk_loopback_step_count(const struct dmk_loopback *fabric);
/* Writes that were posted and may still land. */
uint32_t dmk_loopback_n_pending_writes(const struct dmk_loopback *fabric);

/* Breaks every connection between the two; each side learns at its own time. */
void dmk_loopback_cut(struct dmk_loopback *fabric, struct dmk_xfer *a, struct dmk_xfer *b);
/* Nothing passes between the two and nobody is told, until it is switched off again. DIRECT copies
 * pass. */
void dmk_loopback_partition(struct dmk_loopback *fabric, struct dmk_xfer *a, struct dmk_xfer *b,
                            bool on);
/* The process ends: no more progress, no callbacks but those of closing. Its DIRECT copies may land
 * for up to linger_steps more; after that it counts as gone. The node still has to be closed. */
void dmk_loopback_kill(struct dmk_loopback *fabric, struct dmk_xfer *node, uint32_t linger_steps);

extern const struct dmk_xfer_ops dmk_xfer_loopback_ops;
