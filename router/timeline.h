/* The times of one request, and how they are told.
 *
 * Marks are monotonic nanoseconds, 0 = has not happened. A retry overwrites the marks of the
 * attempt before it, so the line tells about the attempt that gave the answer; `attempts` says how
 * many there were. */
#pragma once

#include "common/base/buf.h"

struct dmk_timeline {
    uint64_t received_ns, rendered_ns, dispatched_ns, reserved_ns, prefilled_ns, first_ns, end_ns;
    uint64_t transfer_bytes, transfer_us;
    uint64_t d_queue_us, p_queue_us, p_compute_us, d_prefill_us;
    uint32_t attempts;
};

/* "tokenise_ms=0.41 queue_ms=... total_ms=...", in the order of the path; what did not happen is
 * left out. */
void dmk_timeline_text(const struct dmk_timeline *t, struct dmk_buf *out);
