/* What the files of the HTTP side share: http_front.c (paths), http_answer.c (answers). */
#pragma once

#include "common/http/http.h"
#include "router/router.h"

#define DMK_HTTP_FRONT__JSON "application/json"

/* Starts a request to the model, or refuses it. */
void dmk_http_front__start(struct dmk_router *router, struct dmk_http_req *req,
                           const struct dmk_dialect *dialect);
/* Answers what is no request to the model: the client's id comes back here too. lines: further header lines, or
 * NULL. */
void dmk_http_front__respond(struct dmk_http_req *req, unsigned status, const char *type,
                             const char *lines, struct dmk_str body);
/* The same for an error, which is counted. */
void dmk_http_front__refuse(struct dmk_router *router, struct dmk_http_req *req,
                            const struct dmk_api_error *error, const char *lines);
