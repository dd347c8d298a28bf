/* The two halves of the Completions dialect, which api_completions_out.c joins. */
#pragma once

#include "router/api.h"

extern const struct dmk_field_tables dmk_api_completions_tables;
int dmk_api_completions_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                              struct dmk_ask *ask, struct dmk_api_error *reterr);
