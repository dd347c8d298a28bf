/* What a parsed stream of model output can say. Dialects turn events into bytes; formats produce
 * them. Deltas are valid UTF-8 and never hold the spelling of a special token that came from a
 * special id. */
#pragma once

#include "common/base/span.h"

enum dmk_event_kind {
    DMK_EVENT_REASONING,  /* text: analysis */
    DMK_EVENT_CONTENT,    /* text: what the user sees */
    DMK_EVENT_CALL_BEGIN, /* call_index, name, call_id: a tool call's header is complete */
    DMK_EVENT_CALL_DELTA, /* call_index, text: a piece of its arguments */
    DMK_EVENT_CALL_END,   /* call_index */
};

struct dmk_event {
    enum dmk_event_kind kind;
    struct dmk_str text;    /* valid until the callback returns */
    struct dmk_str name;    /* CALL_BEGIN: function name without prefix */
    struct dmk_str call_id; /* CALL_BEGIN: id to hand to the client */
    uint32_t call_index;
    uint32_t token_index; /* index in the output of the last token that went into this event */
};

typedef void (*dmk_event_fn)(void *ud, const struct dmk_event *event);
