/* Error sentences; see error.h. */
#include "common/base/error.h"
#include <stdio.h>
#include <string.h>

static void clean(char *text)
{
    for (char *p = text; *p; p++) {
        if ((unsigned char)*p < 0x20 || *p == 0x7f) {
            *p = '?';
        }
    }
}

int dmk_error_set(struct dmk_error *reterr, int status, const char *fmt, ...)
{
    va_list ap;

    if (!reterr) {
        return status;
    }
    va_start(ap, fmt);
    (void)vsnprintf(reterr->text, sizeof(reterr->text), fmt, ap); /* a cut text is still a text */
    va_end(ap);
    reterr->status = status;
    clean(reterr->text);
    return status;
}

int dmk_error_prefix(struct dmk_error *reterr, const char *fmt, ...)
{
    char old[DMK_ERROR_TEXT_BYTES];
    va_list ap;
    int n;

    if (!reterr) {
        return -DMK_EINVAL;
    }
    memcpy(old, reterr->text, sizeof(old));
    va_start(ap, fmt);
    n = vsnprintf(reterr->text, sizeof(reterr->text), fmt, ap);
    va_end(ap);
    if (n >= 0 && (size_t)n < sizeof(reterr->text)) {
        (void)snprintf(reterr->text + n, sizeof(reterr->text) - (size_t)n, ": %s", old);
    }
    clean(reterr->text);
    return reterr->status;
}
