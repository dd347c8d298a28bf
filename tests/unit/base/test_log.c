/* What a line looks like as text and as JSON, also where a text of somebody else is in it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "common/base/log.h"

static char line[32768];

/* Logs one text and returns what stands behind the time. */
static const char *logged(const char *text)
{
    int ends[2], saved = dup(STDERR_FILENO);
    ssize_t n;

    assert_true(saved >= 0);
    assert_int_equal(pipe(ends), 0);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
    dmk_log_info("%s", text);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(ends[1]);
    close(saved);
    n = read(ends[0], line, sizeof(line) - 1);
    close(ends[0]);
    assert_true(n > 0);
    line[n] = '\0';
    assert_int_equal(line[n - 1], '\n');
    line[n - 1] = '\0';
    assert_null(strchr(line, '\n'));
    return strchr(line, 'Z') + 1;
}

#define HEAD "\",\"level\":\"info\",\"program\":\"prog\",\"msg\":"

static void lines_of_text(void **state)
{
    (void)state;
    dmk_log_init("prog", DMK_LOG_INFO, false);
    assert_string_equal(logged("req=a id=1 done"), " info  prog: req=a id=1 done");
    assert_string_equal(logged("one\ntwo\r\x1b[31m\x7f"), " info  prog: one?two??[31m?");
}

static void lines_of_json(void **state)
{
    (void)state;
    dmk_log_init("prog", DMK_LOG_INFO, true);
    assert_string_equal(logged("model \"a\\b\" is ready"),
                        HEAD "\"model \\\"a\\\\b\\\" is ready\"}");
    assert_string_equal(logged("a\nb\x7f"), HEAD "\"a\\u000ab\\u007f\"}");
    /* Broken UTF-8 in any place, and whole characters. */
    assert_string_equal(logged("\xc3\xa9 \xe2\x82\xac \xf0\x9f\x92\x96"),
                        HEAD "\"\xc3\xa9 \xe2\x82\xac \xf0\x9f\x92\x96\"}");
    assert_string_equal(logged("\xff \xc3 \xe0\x80\x80 \xed\xa0\x80\xf4\x90\x80\x80 \xe2\x82"),
                        HEAD "\"\\ufffd \\ufffd \\ufffd\\ufffd\\ufffd "
                             "\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd \\ufffd\\ufffd\"}");
}

static void words_in_front_are_members(void **state)
{
    (void)state;
    dmk_log_init("prog", DMK_LOG_INFO, true);
    assert_string_equal(logged("req=12 result=200 d=- total_ms=0.074 big=007 n=1. worker: x=1"),
                        HEAD "\"req=12 result=200 d=- total_ms=0.074 big=007 n=1. worker: x=1\""
                             ",\"req\":\"12\",\"result\":200,\"d\":\"-\",\"total_ms\":0.074"
                             ",\"big\":\"007\",\"n\":\"1.\"}");
    /* Words behind others may be anybody's. */
    assert_string_equal(logged("req=a failed: result=200"),
                        HEAD "\"req=a failed: result=200\",\"req\":\"a\"}");
    assert_string_equal(logged("worker=\"x\" up"),
                        HEAD "\"worker=\\\"x\\\" up\",\"worker\":\"\\\"x\\\"\"}");
    assert_string_equal(logged("req="), HEAD "\"req=\",\"req\":\"\"}");
    assert_string_equal(logged("=x Y=1"), HEAD "\"=x Y=1\"}");
}

static void long_lines_stay_whole(void **state)
{
    static char text[8192];

    (void)state;
    dmk_log_init("prog", DMK_LOG_INFO, true);
    (void)snprintf(text, sizeof(text), "req=");
    memset(text + 4, 1, sizeof(text) - 5);
    (void)logged(text);
    assert_true(strlen(line) > 2 * 6 * 2000);
    assert_string_equal(line + strlen(line) - 8, "\\u0001\"}");
    memset(text, 'x', sizeof(text) - 1);
    (void)logged(text);
    assert_string_equal(line + strlen(line) - 3, "x\"}");
}

/* A pipe that nobody reads takes lines until it is full; the next ones are lost and counted. */
static void nobody_is_waited_for(void **state)
{
    enum { N_LINES = 2000 }; /* more than a pipe holds */
    static char text[1 << 20];
    int ends[2], saved = dup(STDERR_FILENO);
    unsigned n_whole = 0;
    const char *notice;
    char *rest;
    ssize_t n;

    (void)state;
    dmk_log_init("prog", DMK_LOG_INFO, false);
    assert_true(saved >= 0);
    assert_int_equal(pipe(ends), 0);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
    for (int i = 0; i < N_LINES; i++) {
        dmk_log_info("%100d", i);
    }
    n = read(ends[0], text, sizeof(text) - 1);
    dmk_log_info("%s", "the end");
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(ends[1]);
    close(saved);
    assert_true(n > 0);
    text[n] = '\0';
    for (const char *at = text; (at = strchr(at, '\n')) != NULL; at++) {
        n_whole++;
    }
    assert_true(n_whole > 0 && n_whole < N_LINES && text[n - 1] == '\n');
    n = read(ends[0], text, sizeof(text) - 1);
    close(ends[0]);
    assert_true(n > 0);
    text[n] = '\0';
    notice = strstr(text, "Z warn  prog: ");
    assert_non_null(notice);
    assert_int_equal(n_whole + strtoul(notice + strlen("Z warn  prog: "), &rest, 10), N_LINES);
    assert_memory_equal(rest, " log lines are lost", strlen(" log lines are lost"));
    assert_non_null(strstr(text, "the end\n"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_of_text),
        cmocka_unit_test(lines_of_json),
        cmocka_unit_test(words_in_front_are_members),
        cmocka_unit_test(long_lines_stay_whole),
        cmocka_unit_test(nobody_is_waited_for),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
