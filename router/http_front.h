/* What the files of the HTTP side share: http_front.c (paths), http_answer.c (answers). */
#pragma once

#include "common/http/http.h"
#include "router/router.h"

#define DMK_HTTP_FRONT__JSON "application/json"

/* Starts a request to the model, or refuses it. */
void dmk_http_front__start(struct dmk_router *router, struct dmk_http_req *req,
                           const struct dmk_dialect *dialect);
/* Answers what is no request to the model with an error, which is counted. lines: further header lines, or NULL. */
void dmk_http_front__refuse(struct dmk_router *router, struct dmk_http_req *req,
                            const struct dmk_api_error *error, const char *lines);
