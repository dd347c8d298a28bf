/* The line that shows how far something is: its words, and when and how it is written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pty.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "common/base/clock.h"
#include "tools/progress.h"

static void assert_text(uint64_t skipped, uint64_t done, uint64_t total, uint64_t ms,
                        const char *want)
{
    const struct dmk_progress p = {.what = "converting", .start_ns = 500, .skipped = skipped};
    char text[128];

    dmk_progress_text(&p, done, total, 500 + ms * DMK_NS_PER_MS, text);
    assert_string_equal(text, want);
}

static void the_words(void **state)
{
    (void)state;
    assert_text(0, 2500000000, 10000000000, 5000,
                "converting  25.0%  2.50 of 10.00 GB  500 MB/s  0:15 left");
    assert_text(0, 0, 65248815744, 0, "converting   0.0%  0.00 of 65.25 GB  0 MB/s  0:00 left");
    assert_text(0, 10000000000, 10000000000, 20000,
                "converting 100.0%  10.00 of 10.00 GB  500 MB/s  0:00 left");
    /* What was there already counts for the share and not for the speed. */
    assert_text(9000000000, 9500000000, 10000000000, 1000,
                "converting  95.0%  9.50 of 10.00 GB  500 MB/s  0:01 left");
    assert_text(9000000000, 8000000000, 10000000000, 1000,
                "converting  80.0%  8.00 of 10.00 GB  0 MB/s  0:00 left");
    assert_text(0, 1, 65248815744, 1000000,
                "converting   0.0%  0.00 of 65.25 GB  0 MB/s  5999:59 left");
    assert_text(0, 0, 0, 1000, "converting 100.0%  0.00 of 0.00 GB  0 MB/s  0:00 left");
}

/* stderr is a terminal, or a pipe; what came out of it goes to ret_out. */
static void show(bool tty, bool quiet, uint64_t step_ms, char ret_out[1024])
{
    struct dmk_progress p;
    int ends[2], saved = dup(STDERR_FILENO);
    size_t len = 0;
    ssize_t n;

    assert_true((tty ? openpty(&ends[0], &ends[1], NULL, NULL, NULL) : pipe(ends)) == 0);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
    dmk_progress_begin(&p, "writing", quiet);
    p.last_ns -= step_ms * DMK_NS_PER_MS; /* as if so much time had passed */
    dmk_progress_show(&p, 50, 100);
    if (!tty) { /* a terminal's pause is too short to count on */
        dmk_progress_show(&p, 51, 100);
    }
    dmk_progress_end(&p);
    dmk_progress_end(&p);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    (void)close(saved);
    (void)close(ends[1]); /* so that what was written is followed by an end */
    while ((n = read(ends[0], ret_out + len, 1023 - len)) > 0) {
        len += (size_t)n;
    }
    ret_out[len] = '\0';
    (void)close(ends[0]);
}

static void on_a_terminal_one_line_is_written_over(void **state)
{
    char out[1024];

    (void)state;
    show(true, false, 100, out);
    assert_memory_equal(out, "\rwriting  50.0%", 15);
    assert_non_null(strstr(out, " left\x1b[K\r\n")); /* one line, and one end of it */
    show(true, true, 100000, out);
    assert_string_equal(out, "");
}

static void elsewhere_a_line_comes_every_few_seconds(void **state)
{
    char out[1024];

    (void)state;
    show(false, false, 4000, out);
    assert_string_equal(out, "");
    show(false, false, 5000, out);
    assert_memory_equal(out, "writing  50.0%", 14);
    assert_string_equal(strchr(out, '\n'), "\n");
    assert_null(strchr(out, '\r'));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_words),
        cmocka_unit_test(on_a_terminal_one_line_is_written_over),
        cmocka_unit_test(elsewhere_a_line_comes_every_few_seconds),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
