/* Logging; see log.h. The first three variables are written once before threads start and only read after. */
#include "common/base/log.h"
#include "common/base/spell.h"
#include "common/base/status.h"
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 2048

static const char *program = "damask";
static enum dmk_log_level max_level = DMK_LOG_INFO;
static bool as_json;
static atomic_uint n_lost; /* lines since the last one that found a reader */

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

/* What is written. The longest: each byte six, as a JSON escape, and once more in a member. */
struct line {
    char data[LINE_BYTES * 13];
    size_t len;
};

static void put(struct line *line, const char *text, size_t len)
{
    if (len < sizeof(line->data) - line->len) {
        memcpy(line->data + line->len, text, len);
        line->len += len;
    }
}

static void put_text(struct line *line, const char *text)
{
    put(line, text, strlen(text));
}

/* One line stays one line, whatever a name or a message of somebody else holds. */
static void put_plain(struct line *line, const char *text)
{
    for (const char *p = text; *p; p++) {
        const bool control = (unsigned char)*p < 0x20 || *p == 0x7f;

        put(line, control ? "?" : p, 1);
    }
}

/* Cut-off lines and texts of others may hold anything. */
static void put_json(struct line *line, const char *text, size_t len)
{
    put_text(line, "\"");
    for (size_t i = 0; i < len;) {
        uint32_t c = 0xfffd;
        const size_t n = dmk_utf8_get(text + i, &c);
        char code[8];

        if (n == 0 || c < 0x20 || c == 0x7f) {
            (void)snprintf(code, sizeof(code), "\\u%04x", (unsigned)c & 0xffff);
            put_text(line, code);
        } else {
            put(line, "\\", c == '"' || c == '\\');
            put(line, text + i, n);
        }
        i += n > 0 ? n : 1;
    }
    put_text(line, "\"");
}

/* Texts even where they look like numbers: one field has one type. */
static bool is_id(const char *name, size_t len)
{
    static const char *const ids[] = {"req", "id", "worker", "router", "d", "p", "seq"};

    for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++) {
        if (strlen(ids[i]) == len && memcmp(ids[i], name, len) == 0) {
            return true;
        }
    }
    return false;
}

/* Digits, perhaps with a fraction. */
static bool is_number(const char *text, size_t len)
{
    const size_t whole = strspn(text, "0123456789");
    const bool point = whole < len && text[whole] == '.';
    const size_t rest = point ? strspn(text + whole + 1, "0123456789") : 0;

    return whole > 0 && whole < 16 && (whole == 1 || text[0] != '0') &&
           whole + (point ? rest + 1 : 0) == len && (!point || rest > 0);
}

/* The words NAME=VALUE that the text begins with, as members. */
static void put_members(struct line *line, const char *text)
{
    for (;;) {
        const size_t name = strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789_");
        const char *value = text + name + 1;
        size_t len;

        if (name == 0 || text[name] != '=') {
            return;
        }
        len = strcspn(value, " ");
        put_text(line, ",\"");
        put(line, text, name);
        put_text(line, "\":");
        if (is_number(value, len) && !is_id(text, name)) {
            put(line, value, len);
        } else {
            put_json(line, value, len);
        }
        if (value[len] == '\0') {
            return;
        }
        text = value + len + 1;
    }
}

/* False when nobody reads. A pipe that takes anything takes PIPE_BUF bytes, more than a line has but in JSON where
 * most of its characters are escaped. */
static bool write_line(const struct line *line)
{
    struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};

    if (poll(&out, 1, 0) == 0) {
        return false;
    }
    if (write(STDERR_FILENO, line->data, line->len) < 0) {
        /* nowhere left to say it */
    }
    return true;
}

static bool log_text(enum dmk_log_level level, const char *text)
{
    char head[128], when[32];
    struct line line;
    struct timespec ts;
    struct tm tm;

    line.len = 0;
    (void)clock_gettime(CLOCK_REALTIME, &ts);
    (void)gmtime_r(&ts.tv_sec, &tm);
    (void)strftime(when, sizeof(when), "%Y-%m-%dT%H:%M:%S", &tm);
    if (as_json) {
        (void)snprintf(head, sizeof(head),
                       "{\"time\":\"%s.%03ldZ\",\"level\":\"%s\",\"program\":\"%s\",\"msg\":", when,
                       ts.tv_nsec / 1000000, level_names[level], program);
        put_text(&line, head);
        put_json(&line, text, strlen(text));
        put_members(&line, text);
        put_text(&line, "}");
    } else {
        (void)snprintf(head, sizeof(head), "%s.%03ldZ %-5s %s: ", when, ts.tv_nsec / 1000000,
                       level_names[level], program);
        put_text(&line, head);
        put_plain(&line, text);
    }
    line.data[line.len++] = '\n'; /* put leaves room for it */
    return write_line(&line);
}

void dmk_log_at(enum dmk_log_level level, const char *fmt, ...)
{
    char text[LINE_BYTES], notice[80];
    unsigned lost;
    va_list ap;

    if (!dmk_log_enabled(level)) {
        return;
    }
    lost = atomic_exchange_explicit(&n_lost, 0, memory_order_relaxed);
    (void)snprintf(notice, sizeof(notice), "%u log lines are lost, stderr was not read", lost);
    if (lost > 0 && log_text(DMK_LOG_WARN, notice)) {
        lost = 0;
    }
    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    lost += !log_text(level, text);
    atomic_fetch_add_explicit(&n_lost, lost, memory_order_relaxed);
}
