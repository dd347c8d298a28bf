/* Numbers of this very process, beside what it does to them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#include "common/obs/process.h"

static struct dmk_metrics *m;
static struct dmk_process_metrics p;

static double value(const char *name)
{
    struct dmk_buf out;
    const char *at;
    double v;

    dmk_process_metrics_read(&p);
    dmk_buf_init(&out, 0);
    dmk_metrics_text(m, &out);
    at = dmk_buf_str(&out).data;
    while (at && strncmp(at, name, strlen(name)) != 0) {
        at = strchr(at, '\n');
        at = at ? at + 1 : NULL;
    }
    assert_non_null(at);
    v = at ? strtod(at + strlen(name), NULL) : -1;
    dmk_buf_fini(&out);
    return v;
}

static void follows_the_process(void **state)
{
    const size_t bytes = 64u << 20;
    double before = value("process_open_fds "), cpu = value("process_cpu_seconds_total ");
    struct rlimit limit;
    volatile char *memory;
    volatile double work = 1;
    int fds[2];

    (void)state;
    assert_int_equal(pipe(fds), 0);
    assert_true(value("process_open_fds ") == before + 2);
    close(fds[0]);
    close(fds[1]);
    assert_true(value("process_open_fds ") == before);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    assert_true(value("process_max_fds ") == (double)limit.rlim_cur);

    before = value("process_resident_memory_bytes ");
    assert_true(before > 0 && before < value("process_virtual_memory_bytes "));
    memory = malloc(bytes);
    assert_non_null(memory);
    for (size_t i = 0; i < bytes; i += 4096) {
        memory[i] = 1;
    }
    assert_true(value("process_resident_memory_bytes ") >= before + (double)bytes / 2);
    free((void *)memory);

    for (int i = 0; i < 20000000; i++) {
        work *= 1.0000001;
    }
    assert_true(work > 1);
    assert_true(value("process_cpu_seconds_total ") > cpu);
    assert_true(value("process_start_time_seconds ") <= (double)time(NULL) &&
                value("process_start_time_seconds ") > (double)time(NULL) - 60);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(follows_the_process)};
    int rc;

    m = dmk_metrics_new();
    dmk_process_metrics_init(&p, m);
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    dmk_metrics_free(&m);
    return rc;
}
