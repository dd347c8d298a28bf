/* Pieces of conversations as JSON has them: what the dialects that carry messages share.
 *
 * Each function reads one value of a request body into the conversation and names the path of what it does
 * not like. Pure but for the conversation; runs on pool threads. */
#pragma once

#include "common/json/json.h"
#include "router/api.h"

struct dmk_conv_in {
    const struct dmk_api_limits *limits;
    struct dmk_conv *conv;
    struct dmk_api_error *err;
    uint32_t n_calls;
};

/* A name that goes into a message header: no white space, no part of a marker. */
bool dmk_conv_in_is_name(struct dmk_str name);

/* Fails with "larger than"; for whoever has found dmk_conv_failed. */
int dmk_conv_in_too_big(struct dmk_conv_in *in);

/* A string, copied. */
int dmk_conv_in_copy(struct dmk_conv_in *in, const json_t *string, struct dmk_str *ret);

/* A string or a list of text parts, which are joined. at is the value's path. */
int dmk_conv_in_text(struct dmk_conv_in *in, const json_t *v, const char *at, struct dmk_str *ret);

/* A tool call of m, the newest message: name and arguments stand in fn, whose path with its dot is prefix;
 * the id is the string id_key of v, whose path with its dot is at. */
int dmk_conv_in_call(struct dmk_conv_in *in, struct dmk_message *m, const json_t *v, const char *at,
                     const char *id_key, const json_t *fn, const char *prefix);

/* The call that tool message m answers; param is the path of id. Without such a call the message's own name
 * stands, or it is a failure. */
int dmk_conv_in_answer(struct dmk_conv_in *in, struct dmk_message *m, const json_t *id,
                       const char *param);

/* A declared function: name, description, parameters, strict in fn, whose path with its dot is prefix. */
int dmk_conv_in_tool(struct dmk_conv_in *in, const json_t *fn, const char *prefix);

/* A JSON schema that a client sent: an object within the limits of depth and size. */
int dmk_conv_in_schema(const json_t *schema, const struct dmk_api_limits *limits, const char *param,
                       struct dmk_api_error *reterr);

/* Reasoning effort; NULL: medium. */
int dmk_conv_in_effort(struct dmk_conv_in *in, const json_t *v, const char *param);
