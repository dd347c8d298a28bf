/* Numbers of the process from the kernel; see process.h. */
#include "common/obs/process.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#include "common/base/clock.h"

void dmk_process_metrics_init(struct dmk_process_metrics *p, struct dmk_metrics *m)
{
    p->cpu = dmk_counter_new(m, "process_cpu_seconds_total", "", "CPU time of all threads.");
    p->start = dmk_gauge_new(m, "process_start_time_seconds", "", "Start, since 1970.");
    p->resident = dmk_gauge_new(m, "process_resident_memory_bytes", "", "Resident memory.");
    p->virtual_size = dmk_gauge_new(m, "process_virtual_memory_bytes", "", "Address space.");
    p->open_fds = dmk_gauge_new(m, "process_open_fds", "", "Open file descriptors.");
    p->max_fds = dmk_gauge_new(m, "process_max_fds", "", "How many there may be.");
    dmk_gauge_set(p->start, (double)dmk_clock_unix_s());
}

static void read_memory(struct dmk_process_metrics *p)
{
    const double page = (double)sysconf(_SC_PAGESIZE);
    FILE *f = fopen("/proc/self/statm", "re");
    char text[128], *rest;

    if (!f) {
        return;
    }
    if (fgets(text, sizeof(text), f)) {
        dmk_gauge_set(p->virtual_size, (double)strtoull(text, &rest, 10) * page);
        dmk_gauge_set(p->resident, (double)strtoull(rest, NULL, 10) * page);
    }
    (void)fclose(f);
}

static void read_descriptors(struct dmk_process_metrics *p)
{
    DIR *dir = opendir("/proc/self/fd");
    struct rlimit limit;
    double n = -1; /* the one that reads is none */

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        dmk_gauge_set(p->max_fds, (double)limit.rlim_cur);
    }
    if (!dir) {
        return;
    }
    for (struct dirent *e = readdir(dir); e; e = readdir(dir)) {
        n += e->d_name[0] != '.';
    }
    (void)closedir(dir);
    dmk_gauge_set(p->open_fds, n);
}

void dmk_process_metrics_read(struct dmk_process_metrics *p)
{
    struct timespec ts;

    if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts) == 0) {
        dmk_counter_raise(p->cpu, (double)ts.tv_sec + (double)ts.tv_nsec / 1e9);
    }
    read_memory(p);
    read_descriptors(p);
}
