/* Logging; see log.h. The three settings are written once before threads start and only read after. */
#include "common/base/log.h"
#include "common/base/status.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 2048

static const char *program = "damask";
static enum dmk_log_level max_level = DMK_LOG_INFO;
static bool as_json;

static const char *const level_names[] = {"error", "warn", "info", "debug"};

void dmk_log_init(const char *name, enum dmk_log_level level, bool json)
{
    program = name;
    max_level = level;
    as_json = json;
}

int dmk_log_level_parse(const char *word, enum dmk_log_level *ret_level)
{
    for (int i = 0; i <= DMK_LOG_DEBUG; i++) {
        if (strcmp(word, level_names[i]) == 0) {
            *ret_level = (enum dmk_log_level)i;
            return 0;
        }
    }
    return -DMK_EINVAL;
}

bool dmk_log_enabled(enum dmk_log_level level)
{
    return level <= max_level;
}

/* Copies text as the inside of a JSON string; cut at the bound. */
static size_t json_escape(char *dst, size_t cap, const char *text)
{
    size_t n = 0;

    for (const char *p = text; *p && n + 7 < cap; p++) {
        const unsigned char c = (unsigned char)*p;

        if (c == '"' || c == '\\') {
            dst[n++] = '\\';
            dst[n++] = (char)c;
        } else if (c < 0x20) {
            n += (size_t)snprintf(dst + n, cap - n, "\\u%04x", c);
        } else {
            dst[n++] = (char)c;
        }
    }
    dst[n] = 0;
    return n;
}

void dmk_log_at(enum dmk_log_level level, const char *fmt, ...)
{
    char text[LINE_BYTES];
    char line[LINE_BYTES * 2];
    char when[32];
    struct timespec ts;
    struct tm tm;
    va_list ap;
    int n;

    if (!dmk_log_enabled(level)) {
        return;
    }
    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    (void)clock_gettime(CLOCK_REALTIME, &ts);
    (void)gmtime_r(&ts.tv_sec, &tm);
    (void)strftime(when, sizeof(when), "%Y-%m-%dT%H:%M:%S", &tm);
    if (as_json) {
        char escaped[LINE_BYTES + 512];

        (void)json_escape(escaped, sizeof(escaped), text);
        n = snprintf(
            line, sizeof(line),
            "{\"time\":\"%s.%03ldZ\",\"level\":\"%s\",\"program\":\"%s\",\"msg\":\"%s\"}\n", when,
            ts.tv_nsec / 1000000, level_names[level], program, escaped);
    } else {
        n = snprintf(line, sizeof(line), "%s.%03ldZ %-5s %s: %s\n", when, ts.tv_nsec / 1000000,
                     level_names[level], program, text);
    }
    if (n > 0) {
        const size_t len = (size_t)n < sizeof(line) ? (size_t)n : sizeof(line) - 1;

        if (write(STDERR_FILENO, line, len) < 0) {
            return; /* nowhere left to say it */
        }
    }
}
