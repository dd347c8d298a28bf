/* What a client is told when its request fails, free of any dialect's form.
 *
 * A client's fault is never a 5xx and a failure is never a 200. The sentence may quote the request,
 * cut and with control characters replaced; it never holds raw bytes of a body. */
#pragma once

#include "common/base/buf.h"
#include "common/base/error.h"

struct dmk_api_error {
    unsigned status;  /* HTTP */
    const char *type; /* "invalid_request_error", "server_error", "rate_limit_error", ... */
    const char *code; /* or NULL */
    char param[96];   /* "messages[0].role", or "" */
    char text[512];
    uint32_t retry_after_s; /* 0 = none */
};

/* Both fill *reterr and return -DMK_EINVAL. param may be "". */
int dmk_api_bad(struct dmk_api_error *reterr, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
int dmk_api_bad_code(struct dmk_api_error *reterr, const char *code, const char *param,
                     const char *fmt, ...) __attribute__((format(printf, 4, 5)));

/* Any other failure; type follows from the status. Returns -DMK_EINVAL for 4xx, else -DMK_EPEER. */
int dmk_api_fail(struct dmk_api_error *reterr, unsigned status, const char *code, const char *fmt,
                 ...) __attribute__((format(printf, 4, 5)));

/* Copies at most 64 bytes of outside text into ret, whole characters, control characters and quotes
 * as '?'. */
const char *dmk_api_quote(struct dmk_str text, char ret[68]);

/* {"error":{"message":...,"type":...,"param":...,"code":...}} */
void dmk_api_error_json(const struct dmk_api_error *error, struct dmk_buf *out);
