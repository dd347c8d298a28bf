/* What only a decode worker counts for /metrics: tickets by state, where prompts were computed, constraints. What
 * both kinds of worker have is in common/worker/metrics.c. Owner: the loop. */
#pragma once

#include "common/worker/worker.h"
#include "decode/core.h"

struct dmk_decode_metrics {
    struct dmk_gauge *unclaimed, *claimed, *draining_tickets, *draining_pages, *refusing;
    struct dmk_counter *local, *remote, *refused, *expired, *failed;
    struct dmk_counter *masks, *masks_computed, *masks_uncached, *mask_seconds;
    struct dmk_gauge *mask_max_seconds, *automata, *automata_bytes;
};

/* All series exist from here on; they belong to the worker. */
void dmk_decode_metrics_make(struct dmk_worker *worker, struct dmk_decode_metrics *ret);
void dmk_decode_metrics_set(const struct dmk_decode_metrics *metrics,
                            const struct dmk_decode_load *load);
