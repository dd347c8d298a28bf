/* API dialects: a request body to a `dmk_ask`, events of the answer to bytes.
 *
 * A dialect never sees a token id and a chat format never sees a body, so N formats and M dialects
 * are N + M pieces of code. A dialect is a const struct in the static array of api.c; adding one
 * touches nothing else.
 *
 * parse runs on a pool thread and has no state. A reply is the state of one answer; it lives on the
 * loop and hands finished frames to its sink: over HTTP a frame is one server-sent event (or the
 * whole body when the client did not ask for a stream), over gRPC one message. The order of calls:
 * prompt (echo only), any number of event and choice_end (once for each choice, no event of that
 * choice after it), end. A failure before the first frame is told by `error`; one after it too, as
 * the last frame. */
#pragma once

#include "common/base/clock.h"
#include "common/chat/event.h"
#include "router/api_error.h"
#include "router/ask.h"

/* Takes one frame; event is the event's name where the framing has names, else NULL. */
struct dmk_sink {
    void (*frame)(void *ud, const char *event, struct dmk_bytes payload);
    void *ud;
};

enum dmk_finish { DMK_FINISH_STOP, DMK_FINISH_LENGTH, DMK_FINISH_TOOL_CALLS };
const char *dmk_finish_name(enum dmk_finish finish);

/* One token as people see it. Valid until the call returns. */
struct dmk_lp_top {
    struct dmk_bytes bytes;
    float logprob;
    uint32_t id;
};
struct dmk_lp {
    struct dmk_bytes bytes;
    float logprob;
    uint32_t id;
    bool has_logprob; /* false: the first token of an echoed prompt */
    uint32_t n_top;
    struct dmk_lp_top top[DMK_ASK_MAX_TOP];
};

struct dmk_usage {
    uint32_t n_prompt;
    uint32_t n_cached; /* of the prompt */
    uint32_t n_output; /* all sampled tokens of all choices, control and stop tokens included */
    uint32_t n_reasoning;
};

struct dmk_reply_conf {
    const char *id_hex; /* 32 hex digits, unique */
    const char *model;  /* as the client named it */
    int64_t created_unix_s;
    bool stream;
    bool include_usage;
    bool logprobs;
    uint32_t top_logprobs;
    uint32_t n;
    uint32_t n_prompt;   /* tokens */
    struct dmk_str note; /* what the dialect's parse left in the ask for the reply */
    struct dmk_sink sink;
};

struct dmk_api_limits {
    uint32_t max_choices;
    size_t max_conv_bytes;
    uint32_t max_messages;
    uint32_t max_tools;
    uint32_t max_schema_depth; /* of a schema; 0 = no bound */
    size_t max_schema_bytes;   /* of its compact text; 0 = no bound */
    uint32_t max_context;      /* of the workers that are up; 0 = none is */
    int64_t date_unix_s;       /* what a chat format prints as the current date; < 0 = none */
};

struct dmk_field_tables; /* fields.h */

struct dmk_dialect {
    const char *name;                      /* label in metrics and logs */
    const char *path;                      /* POST, or the gRPC method */
    bool http;                             /* else gRPC */
    const char *content_type;              /* whole answers */
    const struct dmk_field_tables *tables; /* of its body, for the served description; or NULL */
    bool done_mark;                        /* a stream over HTTP ends with "data: [DONE]" */
    int (*parse)(struct dmk_bytes body, const struct dmk_api_limits *limits, struct dmk_ask *ask,
                 struct dmk_api_error *reterr);
    /* Set where the answer follows from the prompt and no worker is asked: the whole body. On the pool, when
     * the prompt has been encoded. Such a dialect has no reply. */
    void (*local)(const struct dmk_vocab *vocab, const struct dmk_api_limits *limits,
                  const struct dmk_ask *ask, struct dmk_buf *out);
    void *(*reply_new)(
        const struct dmk_reply_conf *conf); /* copies what it keeps; NULL: no memory */
    void (*prompt)(void *reply, uint32_t choice, struct dmk_str text, const struct dmk_lp *lps,
                   size_t n_lps);
    /* lps: the tokens whose text this event holds (content only, when logprobs were asked for). */
    void (*event)(void *reply, uint32_t choice, const struct dmk_event *event,
                  const struct dmk_lp *lps, size_t n_lps);
    /* Set where an answer is token ids and no text: all of them, control and stop tokens included, instead of
     * events; n_cached of the prompt's tokens no worker had to compute. stop: the stop string that ends
     * the choice here, or empty. */
    void (*tokens)(void *reply, uint32_t choice, const struct dmk_lp *lps, size_t n_lps,
                   uint32_t n_cached, struct dmk_str stop);
    void (*choice_end)(void *reply, uint32_t choice, enum dmk_finish finish);
    /* Before end, where fewer choices are shown than were sampled: the n that are, best first. NULL: this
     * dialect always shows all. */
    void (*rank)(void *reply, const uint32_t *order, uint32_t n);
    void (*end)(void *reply, const struct dmk_usage *usage);
    /* A stream that fails has frames of its own for that. NULL: the last frame is what `error` writes. */
    void (*fail)(void *reply, const struct dmk_api_error *error);
    void (*reply_free)(void *reply);
    /* The body of a failure. */
    void (*error)(const struct dmk_api_error *error, struct dmk_buf *out);
};

extern const struct dmk_dialect dmk_dialect_chat;
extern const struct dmk_dialect dmk_dialect_completions;
extern const struct dmk_dialect dmk_dialect_responses;
extern const struct dmk_dialect dmk_dialect_tokenize;
extern const struct dmk_dialect dmk_dialect_detokenize;
extern const struct dmk_dialect dmk_dialect_grpc;
extern const struct dmk_dialect dmk_dialect_engine;

/* All dialects, NULL-terminated. */
extern const struct dmk_dialect *const dmk_dialects[];
const struct dmk_dialect *dmk_dialect_find(bool http, struct dmk_str path);
