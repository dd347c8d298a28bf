/* A conversation, free of any API dialect and of any chat format.
 *
 * A dialect (router/api_*) builds it from a request body; a format (common/chat) renders it to
 * token ids. The JSON values inside (parameter schemas) pass through as parsed values. All memory
 * belongs to the conversation, counts against one bound in bytes, and goes with it. One thread at a
 * time. */
#pragma once

#include "common/base/error.h"
#include "common/base/span.h"

struct dmk_conv;
struct json_t;

enum dmk_role {
    DMK_ROLE_SYSTEM,
    DMK_ROLE_DEVELOPER,
    DMK_ROLE_USER,
    DMK_ROLE_ASSISTANT,
    DMK_ROLE_TOOL
};
enum dmk_effort { DMK_EFFORT_LOW, DMK_EFFORT_MEDIUM, DMK_EFFORT_HIGH };
enum dmk_tool_choice {
    DMK_TOOLS_AUTO,
    DMK_TOOLS_NONE,
    DMK_TOOLS_REQUIRED,
    DMK_TOOLS_NAMED, /* forced_tool */
};

struct dmk_tool_call {
    struct dmk_str id;   /* as the client sent it; may carry the header's form (see call_id.h) */
    struct dmk_str name; /* without "functions." */
    struct dmk_str arguments; /* verbatim */
};

/* A first system or developer message is the developer's instructions; later ones stay where they
 * are. */
struct dmk_message {
    enum dmk_role role;
    struct dmk_str
        name; /* user: optional author name; tool: function name when call_id is unknown */
    struct dmk_str content;      /* text; parts are joined */
    bool has_content;            /* false: the client sent none (null), which differs from "" */
    struct dmk_str reasoning;    /* assistant: analysis that was sent back */
    struct dmk_tool_call *calls; /* assistant */
    size_t n_calls;
    struct dmk_str call_id; /* tool: which call this answers */
};

struct dmk_tool {
    struct dmk_str name;
    struct dmk_str description;
    struct json_t *parameters; /* a reference that the conversation drops; NULL when absent */
    bool strict;               /* arguments follow the schema: enforced while they are written */
    bool withheld;             /* shown to the model, but may not be called in this turn */
};

/* What the final message of the turn is made of. */
enum dmk_output {
    DMK_OUTPUT_TEXT,
    DMK_OUTPUT_JSON_OBJECT, /* any JSON object */
    DMK_OUTPUT_JSON_SCHEMA, /* response_schema */
};

/* What formats read. Scalar fields and response_schema may be set through dmk_conv_edit; messages,
 * calls and tools are added with the functions below. A new conversation has effort medium, tools
 * auto, no date. */
struct dmk_conv_view {
    const struct dmk_message *messages;
    size_t n_messages;
    const struct dmk_tool *tools;
    size_t n_tools;
    enum dmk_effort effort;
    enum dmk_tool_choice tool_choice;
    struct dmk_str forced_tool;
    bool single_call; /* the turn ends with its first call */
    enum dmk_output output;
    struct dmk_str response_format_name; /* with response_schema: shown to the model */
    struct dmk_str response_format_description;
    struct dmk_str output_param;    /* where the request says what output is, for sentences */
    struct json_t *response_schema; /* a reference that the conversation drops; NULL = free text */
    int64_t date_unix_s;            /* "Current date" (UTC); < 0 = none */
};

/* NULL when out of memory. max_bytes bounds text and arrays, not the JSON values. */
struct dmk_conv *dmk_conv_new(size_t max_bytes);
void dmk_conv_free(struct dmk_conv **conv);
struct dmk_conv_view *dmk_conv_edit(struct dmk_conv *conv);
const struct dmk_conv_view *dmk_conv_view(const struct dmk_conv *conv);

/* Copies text into the conversation; an empty view, and failed, when the bound is reached. */
struct dmk_str dmk_conv_copy(struct dmk_conv *conv, struct dmk_str text);
bool dmk_conv_failed(const struct dmk_conv *conv);

/* Append one zeroed message, call or tool and return it (NULL, and failed, when the bound is
 * reached). The pointer is good until the next one of its kind is added. message is the newest
 * message. */
struct dmk_message *dmk_conv_add_message(struct dmk_conv *conv, enum dmk_role role);
struct dmk_tool_call *dmk_conv_add_call(struct dmk_conv *conv, struct dmk_message *message);
struct dmk_tool *dmk_conv_add_tool(struct dmk_conv *conv);

/* Only these tools may be called in this turn; the others stay declared. -DMK_ENOENT when one is not
 * declared: *ret_name is its index. */
int dmk_conv_allow_tools(struct dmk_conv *conv, const struct dmk_str *names, size_t n,
                         size_t *ret_name);

/* Finds for each tool message the name of the function that it answers: that of the nearest earlier
 * call with its call_id, else the message's own name. Fills names[n_messages] (may be NULL; only
 * entries of tool messages are written). -DMK_ENOENT when a tool message has neither: *ret_message
 * is its index. */
int dmk_conv_answered_names(const struct dmk_conv_view *view, struct dmk_str *names,
                            size_t *ret_message);
