/* What both kinds of worker call a request: the router's id and its attempt, on one router stream. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include "common/base/hash.h"

#define DMK_MAX_ROUTERS 64 /* streams a worker serves at a time */

/* Minted by the router; attempt is its retry number, and every event carries both back. */
struct dmk_request_id {
    uint64_t hi, lo;
    uint32_t attempt;
};

static inline bool dmk_request_id_equal(struct dmk_request_id a, struct dmk_request_id b)
{
    return a.hi == b.hi && a.lo == b.lo && a.attempt == b.attempt;
}

/* As it stands in log lines: without the attempt. */
static inline void dmk_request_id_format(struct dmk_request_id id, char ret_text[33])
{
    dmk_id128_format((struct dmk_id128){.hi = id.hi, .lo = id.lo}, ret_text);
}

/* Codes as on the wire (proto/damask_worker.proto, FailureCode). */
enum dmk_failure {
    DMK_FAILURE_FULL = 1,
    DMK_FAILURE_INVALID = 2,
    DMK_FAILURE_PEER = 3,
    DMK_FAILURE_TIMEOUT = 4,
    DMK_FAILURE_MISMATCH = 5,
    DMK_FAILURE_DRAINING = 6,
    DMK_FAILURE_REFUSED = 7,
    DMK_FAILURE_INTERNAL = 8,
    DMK_FAILURE_CANCELLED = 9,
};

/* Why a request is over without an answer. */
struct dmk_failed {
    enum dmk_failure code;
    const char *text;        /* a sentence for the client */
    uint32_t retry_after_ms; /* 0: the worker has no advice */
};
