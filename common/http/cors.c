/* Requests that browsers make for pages of other origins: which of these may read answers, and the preflights
 * in which a browser asks first. A page that is not allowed is not refused here: its browser keeps the answer
 * from it. Credentials that a browser adds by itself are never allowed; a page must know the key it sends. */
#include <strings.h>
#include "common/http/internal.h"

bool dmk_http__origin_is_valid(const char *origin)
{
    const char *mark = strstr(origin, "://");

    if (strcmp(origin, "*") == 0) {
        return true;
    }
    if (!mark || mark == origin || mark[3] == '\0') {
        return false;
    }
    for (const char *p = origin; *p; p++) {
        if (*p <= ' ' || *p >= 0x7f || (p >= mark + 3 && strchr("/?#@\"\\,", *p))) {
            return false;
        }
    }
    return true;
}

static bool allows_any(const struct dmk_http_conf *conf)
{
    for (size_t i = 0; i < conf->n_origins; i++) {
        if (strcmp(conf->origins[i], "*") == 0) {
            return true;
        }
    }
    return false;
}

static bool allows(const struct dmk_http_conf *conf, struct dmk_str origin)
{
    for (size_t i = 0; i < conf->n_origins; i++) {
        if (strlen(conf->origins[i]) == origin.len &&
            strncasecmp(conf->origins[i], origin.data, origin.len) == 0) {
            return true;
        }
    }
    return allows_any(conf);
}

void dmk_http__cors_put(const struct dmk_http_req *req, const struct dmk_http_conf *conf,
                        struct dmk_buf *out)
{
    const struct dmk_str origin = dmk_http_header(req, "origin");
    const bool any = allows_any(conf);

    if (conf->n_origins > 0 && !any) {
        dmk_buf_puts(out, "Vary: Origin\r\n"); /* for caches on the way, whoever asked */
    }
    if (conf->n_origins == 0 || origin.len == 0 || !allows(conf, origin)) {
        return;
    }
    dmk_buf_puts(out, "Access-Control-Allow-Origin: ");
    dmk_buf_append_str(out, any ? dmk_str_from("*") : origin);
    dmk_buf_puts(out, "\r\nAccess-Control-Expose-Headers: *\r\n");
}

bool dmk_http__cors_preflight(struct dmk_http_req *req, const struct dmk_http_conf *conf)
{
    const struct dmk_str origin = dmk_http_header(req, "origin");
    const struct dmk_str headers = dmk_http_header(req, "access-control-request-headers");
    struct dmk_buf extra;

    if (conf->n_origins == 0 || !dmk_str_is(dmk_http_method(req), "OPTIONS") || origin.len == 0 ||
        !dmk_http_header(req, "access-control-request-method").data || !allows(conf, origin)) {
        return false;
    }
    dmk_buf_init(&extra, 0);
    if (conf->allow) {
        dmk_buf_printf(&extra, "Access-Control-Allow-Methods: %s\r\n", conf->allow);
    }
    if (headers.len > 0) { /* which headers a page may send is nobody's secret: any */
        dmk_buf_puts(&extra, "Access-Control-Allow-Headers: ");
        dmk_buf_append_str(&extra, headers);
        dmk_buf_puts(&extra, "\r\n");
    }
    dmk_buf_puts(&extra, "Access-Control-Max-Age: 600\r\n");
    dmk_http_respond(req, 204, NULL, extra.data, dmk_str_from(""));
    dmk_buf_fini(&extra);
    return true;
}
