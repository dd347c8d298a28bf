/* Chat formats: conversation to token ids, token ids to events.
 *
 * A format never sees a request body and a dialect never sees a token: N formats + M dialects, not
 * N x M. Formats are const structs in one static array (registry.c). A parser is fed one id at a
 * time; feeding any cut of the same ids gives the same events, and deltas joined equal the whole.
 * It never fails: model output that breaks the format is repaired and counted. A parser belongs to
 * one thread at a time. */
#pragma once

#include "common/base/error.h"
#include "common/chat/conv.h"
#include "common/chat/event.h"
#include "common/schema/build.h"
#include "common/text/tokenizer.h"

struct dmk_format_options {
    bool recipient_in_channel; /* recipient in the channel part of the header instead of the role
                                  part: tool results, and calls whose id says nothing of it */
    bool library_schema_text;  /* multi-line descriptions as openai-harmony 0.0.8 prints them */
    bool library_drop_rule; /* which old analysis is dropped: the library's rule instead of ours */
};

enum dmk_parse_end {
    DMK_PARSE_STOP,       /* finished by itself */
    DMK_PARSE_TOOL_CALLS, /* at least one call was finished */
};

/* Kinds of repair; the name is the label of a metric. */
#define DMK_REPAIR_MAP(X)                                                                          \
    X(HEADER_NOISE, "header_noise")           /* words in a header that mean nothing */            \
    X(NO_MESSAGE, "no_message")               /* header that ended without its message mark */     \
    X(NO_CHANNEL, "no_channel")               /* message on no channel or on an unknown one */     \
    X(NO_AUTHOR, "no_author")                 /* header that does not say whose message it is */   \
    X(NO_START, "no_start")                   /* message without its start mark */                 \
    X(STRAY_TOKEN, "stray_token")             /* control token where none belongs; dropped */      \
    X(OPEN_MESSAGE, "open_message")           /* message that was not ended before the next */     \
    X(FOREIGN_AUTHOR, "foreign_author")       /* the model wrote somebody else's message */        \
    X(UNKNOWN_RECIPIENT, "unknown_recipient") /* recipient that is no function; ignored */         \
    X(CALL_NOT_ALLOWED, "call_not_allowed")   /* call without tools; goes into the content */

#define DMK_REPAIR_ENUM(code, name) DMK_REPAIR_##code,
enum dmk_repair { DMK_REPAIR_MAP(DMK_REPAIR_ENUM) DMK_N_REPAIRS };
#undef DMK_REPAIR_ENUM

const char *dmk_repair_name(enum dmk_repair repair);

/* What a constrained turn may hold; rules are those of the build that it is written to. */
#define DMK_TURN_TEXT UINT32_MAX /* instead of a rule: any text */

struct dmk_turn {
    const struct dmk_turn_call {
        struct dmk_str name;
        uint32_t rule; /* of the arguments */
    } * calls;         /* functions that may be called */
    size_t n_calls;
    bool may_answer;  /* it may end with a final message; else only with a call */
    uint32_t answer;  /* rule of the final message, or DMK_TURN_TEXT */
    bool single_call; /* the first call ends the turn */
};

struct dmk_parser; /* opaque, owned by the format */

struct dmk_parser_conf {
    const struct dmk_vocab *vocab;
    /* Names declared as tools (a bare recipient is a call only when declared); copied. */
    const struct dmk_str *tool_names;
    size_t n_tool_names;
    bool tools_allowed; /* false: no tools or tool_choice "none": calls go into the content */
    bool runs_on; /* stop ids end a message and not the output: whatever follows is read too */
    uint64_t
        call_id_seed; /* ids of calls are a function of (seed, call index, form of the header) */
    dmk_event_fn on_event;
    void *ud;
};

struct dmk_parse_result {
    enum dmk_parse_end end;
    uint32_t stop_id;            /* the stop id that was read; 0 = none */
    uint32_t n_calls;            /* calls that were finished */
    uint32_t n_reasoning_tokens; /* of bodies that became reasoning, without headers and marks */
    uint32_t n_recovered;        /* repairs made, of all kinds */
    uint32_t repairs[DMK_N_REPAIRS];
};

struct dmk_format {
    const char *name;
    /* Appends the prompt, the generation prefix included. */
    int (*render)(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                  const struct dmk_conv_view *conv, const struct dmk_format_options *options,
                  struct dmk_ids *ids, struct dmk_error *reterr);
    /* Builds rule root of the build: everything behind the prompt, up to the id that ends it. Reasoning is
     * free. NULL for a format without turns. */
    void (*turn)(struct dmk_build *build, uint32_t root, const struct dmk_turn *turn);
    /* Ids that end generation. */
    const uint32_t *stop_ids;
    size_t n_stop_ids;
    struct dmk_parser *(*parser_new)(const struct dmk_parser_conf *conf); /* NULL: out of memory */
    /* Ids after a stop id are ignored, unless the parser runs on. */
    void (*parser_push)(struct dmk_parser *parser, uint32_t id);
    /* Ends the output and flushes what was held back. cut: it was ended from outside (length,
     * cancel), not by the model or a stop string; a call that is open then is not finished. Call
     * once. */
    void (*parser_end)(struct dmk_parser *parser, bool cut, struct dmk_parse_result *ret_result);
    void (*parser_free)(struct dmk_parser **parser);
};

/* "harmony": the model's chat format. "plain": ids are text, nothing is structure (completions).
 * NULL for other names. */
const struct dmk_format *dmk_format_find(const char *name);
