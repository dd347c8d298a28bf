/* The two halves of the Chat Completions dialect, which api_chat_out.c joins. */
#pragma once

#include "router/api.h"

extern const struct dmk_field_tables dmk_api_chat_tables;
int dmk_api_chat_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                       struct dmk_ask *ask, struct dmk_api_error *reterr);
struct json_t;
/* The same for a body that is parsed already. */
int dmk_api_chat_parse_root(const struct json_t *root, const struct dmk_api_limits *limits,
                            struct dmk_ask *ask, struct dmk_api_error *reterr);
/* Messages, tools and what else makes the prompt, without limits of the answer. */
int dmk_api_chat_parse_prompt(const struct json_t *root, const struct dmk_api_limits *limits,
                              struct dmk_ask *ask, struct dmk_api_error *reterr);
