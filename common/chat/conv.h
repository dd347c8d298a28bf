/* A conversation, free of any API dialect and of any chat format.
 *
 * A dialect (router/api_*) builds it from a request body; a format (common/chat) renders it to token
 * ids. The one JSON value inside is a tool's parameter schema, which passes through as a parsed value.
 * All memory belongs to the conversation's arena and goes with it. */
#pragma once

#include "common/base/error.h"
#include "common/base/span.h"

struct dmk_conv;

enum dmk_role { DMK_ROLE_SYSTEM, DMK_ROLE_DEVELOPER, DMK_ROLE_USER, DMK_ROLE_ASSISTANT, DMK_ROLE_TOOL };
enum dmk_effort { DMK_EFFORT_LOW, DMK_EFFORT_MEDIUM, DMK_EFFORT_HIGH };
enum dmk_tool_choice {
    DMK_TOOLS_AUTO,
    DMK_TOOLS_NONE,
    DMK_TOOLS_REQUIRED,
    DMK_TOOLS_NAMED, /* forced_tool */
};

struct dmk_tool_call {
    struct dmk_str id;        /* as the client sent it; may carry the header's form (see format.h) */
    struct dmk_str name;      /* without "functions." */
    struct dmk_str arguments; /* verbatim */
};

struct dmk_message {
    enum dmk_role role;
    struct dmk_str name;         /* optional author name (user), tool's function name (tool) */
    struct dmk_str content;      /* text; parts are joined */
    bool has_content;
    struct dmk_str reasoning;    /* assistant: analysis that was sent back */
    struct dmk_tool_call *calls; /* assistant */
    size_t n_calls;
    struct dmk_str call_id; /* tool: which call this answers */
};

struct dmk_tool {
    struct dmk_str name;
    struct dmk_str description;
    struct json_t *parameters; /* jansson value, or NULL when absent */
    bool strict;
};

/* Fixed part, read by formats. Add messages and tools with the functions below. */
struct dmk_conv_view {
    const struct dmk_message *messages;
    size_t n_messages;
    const struct dmk_tool *tools;
    size_t n_tools;
    enum dmk_effort effort;
    enum dmk_tool_choice tool_choice;
    struct dmk_str forced_tool;
    struct dmk_str response_format_name; /* with response_schema: shown to the model */
    struct dmk_str response_format_description;
    struct json_t *response_schema; /* NULL = free text */
    int64_t date_unix_s;            /* "Current date"; < 0 = none */
};

struct dmk_conv *dmk_conv_new(size_t max_bytes);
void dmk_conv_free(struct dmk_conv **conv);
struct dmk_conv_view *dmk_conv_edit(struct dmk_conv *conv); /* scalar fields may be set */
const struct dmk_conv_view *dmk_conv_view(const struct dmk_conv *conv);

/* Copies text into the arena; an empty view with failed set when the bound is reached. */
struct dmk_str dmk_conv_copy(struct dmk_conv *conv, struct dmk_str text);
bool dmk_conv_failed(const struct dmk_conv *conv);

/* Append one zeroed message, call or tool and return it (NULL when the bound is reached). */
struct dmk_message *dmk_conv_add_message(struct dmk_conv *conv, enum dmk_role role);
struct dmk_tool_call *dmk_conv_add_call(struct dmk_conv *conv, struct dmk_message *message);
struct dmk_tool *dmk_conv_add_tool(struct dmk_conv *conv); /* keeps a reference to parameters set in it */
