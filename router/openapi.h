/* The description of the HTTP API that the router serves at /openapi.json (OpenAPI 3.1).
 *
 * Paths, answers and nested values are written by hand in openapi.json, which is compiled in; scalar fields of
 * request bodies, and those that are refused, come from the very tables that read them (fields.h). Made once at
 * start. */
#pragma once

#include "router/conf.h"
#include "router/fields.h"

extern const unsigned char dmk_openapi_json[]; /* openapi.json */
extern const size_t dmk_openapi_json_size;

int dmk_openapi_build(const struct dmk_router_conf *conf, struct dmk_buf *out,
                      struct dmk_error *reterr);
