/* The parts of the Responses dialect: api_responses.c (the body's fields), api_responses_in.c (its input items),
 * api_responses_out.c (the answer), which joins them. */
#pragma once

#include "router/conv_in.h"

extern const struct dmk_field_tables dmk_api_responses_tables;
int dmk_api_responses_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                            struct dmk_ask *ask, struct dmk_api_error *reterr);

/* "input": a text, or a list of items that becomes messages. Items that the model wrote in one turn
 * (reasoning, text, calls) become one message. */
int dmk_api_responses_read_input(struct dmk_conv_in *in, const json_t *input);
