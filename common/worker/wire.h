/* The id of a request between its message and its struct. dmk_msg_router_unpack lets no request through that
 * has none. */
#pragma once

#include "common/rpc/msg.h"
#include "common/worker/request.h"

static inline struct dmk_request_id dmk_request_id_of(const Damask__V1__RequestId *message)
{
    return (struct dmk_request_id){
        .hi = message->hi, .lo = message->lo, .attempt = message->attempt};
}

static inline Damask__V1__RequestId dmk_request_id_message(struct dmk_request_id id)
{
    Damask__V1__RequestId message = DAMASK__V1__REQUEST_ID__INIT;

    message.hi = id.hi;
    message.lo = id.lo;
    message.attempt = id.attempt;
    return message;
}
