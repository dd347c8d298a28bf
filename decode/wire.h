/* Between messages of the router stream and the core's requests and events. Pure: no streams, no state. */
#pragma once

#include "decode/core.h"
#include "common/worker/wire.h"

/* Where a request points into while the core reads it. */
struct dmk_decode_wire {
    struct dmk_sample_params sampling;
};

/* The request of a message, whose memory it borrows. NULL, or what is wrong with it in one sentence (also
 * then id is set): what the core does not see, such as lists that do not match. */
const char *dmk_decode_wire_request(const Damask__V1__Generate *message, uint32_t router,
                                    struct dmk_decode_wire *wire, struct dmk_decode_request *ret);

/* Builds the message of an event on the stack and hands it to emit, which packs it before it returns. Any event
 * but FAILED, which dmk_worker_fail tells. */
typedef void (*dmk_decode_wire_emit)(void *ud, const Damask__V1__WorkerEvent *event);
void dmk_decode_wire_event(const struct dmk_decode_event *event, uint64_t incarnation,
                           dmk_decode_wire_emit emit, void *ud);
