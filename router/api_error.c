/* Failures as clients see them. No state; any thread. */
#include "router/api_error.h"

#include <stdarg.h>
#include <stdio.h>
#include "common/text/utf8.h"
#include "router/json_out.h"

static const char *type_of(unsigned status)
{
    switch (status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 429:
        return "rate_limit_error";
    case 501: /* of what a client has sent: no fault of this server */
    case 505:
        return "invalid_request_error";
    default:
        return status < 500 ? "invalid_request_error" : "server_error";
    }
}

__attribute__((format(printf, 5, 0))) static int fill(struct dmk_api_error *err, unsigned status,
                                                      const char *code, const char *param,
                                                      const char *fmt, va_list args)
{
    if (err) {
        *err = (struct dmk_api_error){.status = status, .type = type_of(status), .code = code};
        (void)snprintf(err->param, sizeof(err->param), "%s", param);
        /* A cut sentence is better than none; its tail is made whole characters below. */
        (void)vsnprintf(err->text, sizeof(err->text), fmt, args);
        err->text[dmk_utf8_valid_prefix((const uint8_t *)err->text, strlen(err->text))] = '\0';
        err->param[dmk_utf8_valid_prefix((const uint8_t *)err->param, strlen(err->param))] = '\0';
    }
    return status < 500 ? -DMK_EINVAL : -DMK_EPEER;
}

int dmk_api_bad(struct dmk_api_error *reterr, const char *param, const char *fmt, ...)
{
    va_list args;
    int rc;

    va_start(args, fmt);
    rc = fill(reterr, 400, NULL, param, fmt, args);
    va_end(args);
    return rc;
}

int dmk_api_bad_code(struct dmk_api_error *reterr, const char *code, const char *param,
                     const char *fmt, ...)
{
    va_list args;
    int rc;

    va_start(args, fmt);
    rc = fill(reterr, 400, code, param, fmt, args);
    va_end(args);
    return rc;
}

int dmk_api_fail(struct dmk_api_error *reterr, unsigned status, const char *code, const char *fmt,
                 ...)
{
    va_list args;
    int rc;

    va_start(args, fmt);
    rc = fill(reterr, status, code, "", fmt, args);
    va_end(args);
    return rc;
}

const char *dmk_api_quote(struct dmk_str text, char ret[68])
{
    size_t n = text.len < 64 ? text.len : 64;
    const bool cut = n < text.len;

    n = dmk_utf8_valid_prefix((const uint8_t *)text.data, n);
    for (size_t i = 0; i < n; i++) {
        const unsigned char c = (unsigned char)text.data[i];

        ret[i] = (c < 0x20 || c == 0x7f || c == '"') ? '?' : (char)c;
    }
    memcpy(ret + n, cut ? "..." : "", cut ? 4 : 1);
    return ret;
}

void dmk_api_error_json(const struct dmk_api_error *error, struct dmk_buf *out)
{
    dmk_buf_puts(out, "{\"error\":{\"message\":");
    dmk_out_str(out, dmk_str_from(error->text));
    dmk_buf_printf(out, ",\"type\":\"%s\",\"param\":", error->type);
    if (error->param[0]) {
        dmk_out_str(out, dmk_str_from(error->param));
    } else {
        dmk_buf_puts(out, "null");
    }
    dmk_buf_puts(out, ",\"code\":");
    if (error->code) {
        dmk_out_str(out, dmk_str_from(error->code));
    } else {
        dmk_buf_puts(out, "null");
    }
    dmk_buf_puts(out, "}}");
}
