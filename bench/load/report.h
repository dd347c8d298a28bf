/* What came of a run: percentiles, rates, goodput; as text, JSON and a page with drawings. */
#pragma once

#include <stdio.h>
#include "bench/load/client.h"

struct report_conf {
    const char *machine, *command, *commit;
    double ttft_limit_ms, tpot_limit_ms; /* goodput */
};

/* Sorted values in ms. */
struct report_values {
    double *v;
    size_t n;
};

struct report {
    struct report_conf conf;
    const struct client_record *records;
    size_t n;
    size_t n_ok, n_good;
    double seconds;
    uint64_t start_ns, n_in, n_out, n_reads, n_events;
    struct report_values ttft, tpot, total, late, added; /* late: start behind its time */
};

/* added: latency from a step's end to the reading of its token, in ms; NULL when not measured. Sorts it. */
void report_make(const struct report_conf *conf, const struct client_record *records, size_t n,
                 double *added, size_t n_added, struct report *ret);
void report_free(struct report *report);
double report_percentile(const struct report_values *values, double p);

void report_text(const struct report *report, FILE *out);
void report_json(const struct report *report, FILE *out);
void report_html(const struct report *report, FILE *out);
