/* What every Prometheus client library tells of its process: process_* with the usual names, so that the usual
 * dashboards and alerts find them. Read when a scrape asks; owner: the loop. */
#pragma once

#include "common/obs/metric.h"

struct dmk_process_metrics {
    struct dmk_counter *cpu;
    struct dmk_gauge *start, *resident, *virtual_size, *open_fds, *max_fds;
};

/* Called at the start of the program, which is taken for the start of the process. */
void dmk_process_metrics_init(struct dmk_process_metrics *p, struct dmk_metrics *m);
/* Sets all to what holds now; what can not be read keeps its value. */
void dmk_process_metrics_read(struct dmk_process_metrics *p);
