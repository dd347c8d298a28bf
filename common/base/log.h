/* Logging: one line per event, to stderr, as text or JSON.
 *
 * Libraries return errors and do not log above debug; whoever decides what a failure means logs it
 * once. Lines are lower case without a final period; ids stand as req=..., worker=..., seq=....
 * Prompt text is never logged. Safe from any thread; a line is one write(2), which waits for nobody: a line that
 * finds stderr full is lost, and the next one that does not is preceded by a word on how many were.
 *
 * In JSON the words NAME=VALUE that a line begins with are members too: numbers as numbers but for ids, so
 * that a field has one type. A line is cut at 2047 bytes; control characters and broken UTF-8 are replaced. */
#pragma once

#include <stdbool.h>

enum dmk_log_level { DMK_LOG_ERROR, DMK_LOG_WARN, DMK_LOG_INFO, DMK_LOG_DEBUG };

/* Called once at start, before other threads. name is the program, for each line; it is not copied. */
void dmk_log_init(const char *name, enum dmk_log_level level, bool json);

/* -DMK_EINVAL for a word that is no level. */
int dmk_log_level_parse(const char *word, enum dmk_log_level *ret_level);

bool dmk_log_enabled(enum dmk_log_level level);

void dmk_log_at(enum dmk_log_level level, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

#define dmk_log_error(...) dmk_log_at(DMK_LOG_ERROR, __VA_ARGS__)
#define dmk_log_warn(...)  dmk_log_at(DMK_LOG_WARN, __VA_ARGS__)
#define dmk_log_info(...)  dmk_log_at(DMK_LOG_INFO, __VA_ARGS__)
#define dmk_log_debug(...)                                                                         \
    do {                                                                                           \
        if (dmk_log_enabled(DMK_LOG_DEBUG)) {                                                      \
            dmk_log_at(DMK_LOG_DEBUG, __VA_ARGS__);                                                \
        }                                                                                          \
    } while (0)
