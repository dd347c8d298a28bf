/* Numbers of a run, as text and as JSON; see report.h. */
#include "bench/load/report.h"

#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static struct report_values values_new(size_t cap)
{
    struct report_values v = {calloc(cap + 1, sizeof(double)), 0};

    dmk_assert(v.v);
    return v;
}

double report_percentile(const struct report_values *values, double p)
{
    size_t i = (size_t)(p / 100 * (double)values->n);

    return values->n == 0 ? 0 : values->v[i < values->n ? i : values->n - 1];
}

static double ms_between(uint64_t from_ns, uint64_t to_ns)
{
    return to_ns > from_ns ? (double)(to_ns - from_ns) / 1e6 : 0;
}

void report_make(const struct report_conf *conf, const struct client_record *records, size_t n,
                 double *added, size_t n_added, struct report *ret)
{
    struct report r = {.conf = *conf, .records = records, .n = n, .start_ns = UINT64_MAX};
    uint64_t end = 0;

    r.ttft = values_new(n);
    r.tpot = values_new(n);
    r.total = values_new(n);
    r.late = values_new(n);
    r.added = values_new(n_added);
    for (size_t i = 0; i < n; i++) {
        const struct client_record *c = &records[i];
        const double ttft = ms_between(c->start_ns, c->first_ns);
        const double tpot =
            c->n_out > 1 ? ms_between(c->first_ns, c->last_ns) / (double)(c->n_out - 1) : 0;

        r.start_ns = c->start_ns < r.start_ns ? c->start_ns : r.start_ns;
        end = c->end_ns > end ? c->end_ns : end;
        r.late.v[r.late.n++] = ms_between(c->due_ns, c->start_ns);
        r.n_reads += c->n_reads;
        r.n_events += c->n_events;
        r.n_out += c->n_out;
        r.n_in += c->n_in;
        r.n_ok += c->ok;
        if (!c->ok || c->first_ns == 0) { /* an answer may have no text */
            continue;
        }
        r.n_good += ttft <= conf->ttft_limit_ms && tpot <= conf->tpot_limit_ms;
        r.ttft.v[r.ttft.n++] = ttft;
        r.total.v[r.total.n++] = ms_between(c->start_ns, c->end_ns);
        if (c->n_out > 1) {
            r.tpot.v[r.tpot.n++] = tpot;
        }
    }
    if (n_added > 0) {
        memcpy(r.added.v, added, n_added * sizeof(*added));
        r.added.n = n_added;
    }
    qsort(r.ttft.v, r.ttft.n, sizeof(double), compare);
    qsort(r.tpot.v, r.tpot.n, sizeof(double), compare);
    qsort(r.total.v, r.total.n, sizeof(double), compare);
    qsort(r.late.v, r.late.n, sizeof(double), compare);
    qsort(r.added.v, r.added.n, sizeof(double), compare);
    r.seconds = n > 0 ? ms_between(r.start_ns, end) / 1e3 : 0;
    *ret = r;
}

void report_free(struct report *r)
{
    free(r->ttft.v);
    free(r->tpot.v);
    free(r->total.v);
    free(r->late.v);
    free(r->added.v);
}

static void print_values(FILE *out, const char *name, const struct report_values *v)
{
    if (v->n > 0) {
        (void)fprintf(out, "%-22s %9.2f %9.2f %9.2f %9.2f %9.2f\n", name, report_percentile(v, 50),
                      report_percentile(v, 90), report_percentile(v, 95), report_percentile(v, 99),
                      v->v[v->n - 1]);
    }
}

void report_text(const struct report *r, FILE *out)
{
    const double s = r->seconds > 0 ? r->seconds : 1;
    size_t shown = 0;

    (void)fprintf(out, "machine  %s\ncommand  %s\ncommit   %s\n", r->conf.machine, r->conf.command,
                  r->conf.commit);
    (void)fprintf(out,
                  "requests %zu, answered %zu, failed %zu, in %.2f s: %.2f requests/s\n"
                  "tokens   %.0f in, %.0f out: %.0f in/s, %.0f out/s; %.2f events a read\n",
                  r->n, r->n_ok, r->n - r->n_ok, r->seconds, (double)r->n_ok / s, (double)r->n_in,
                  (double)r->n_out, (double)r->n_in / s, (double)r->n_out / s,
                  r->n_reads ? (double)r->n_events / (double)r->n_reads : 0);
    (void)fprintf(
        out,
        "goodput  %.1f%% of all requests, %.2f requests/s, within %.0f ms to the first token and "
        "%.1f ms a token\n",
        r->n ? 100.0 * (double)r->n_good / (double)r->n : 0, (double)r->n_good / s,
        r->conf.ttft_limit_ms, r->conf.tpot_limit_ms);
    (void)fprintf(out, "%-22s %9s %9s %9s %9s %9s\n", "ms", "p50", "p90", "p95", "p99", "max");
    print_values(out, "first token", &r->ttft);
    print_values(out, "a token after it", &r->tpot);
    print_values(out, "whole request", &r->total);
    print_values(out, "added to a token", &r->added);
    print_values(out, "sent behind its time", &r->late);
    for (size_t i = 0; i < r->n && shown < 5; i++) {
        if (!r->records[i].ok) {
            (void)fprintf(out, "failed: request %zu: %s\n", i, r->records[i].error);
            shown++;
        }
    }
}

static void put_text(FILE *out, const char *text)
{
    (void)fputc('"', out);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') {
            (void)fputc('\\', out);
        }
        (void)fputc((unsigned char)*text < 32 ? ' ' : *text, out);
    }
    (void)fputc('"', out);
}

static void put_values(FILE *out, const char *name, const struct report_values *v)
{
    (void)fprintf(
        out, ",\"%s\":{\"n\":%zu,\"p50\":%.4f,\"p90\":%.4f,\"p95\":%.4f,\"p99\":%.4f,\"max\":%.4f}",
        name, v->n, report_percentile(v, 50), report_percentile(v, 90), report_percentile(v, 95),
        report_percentile(v, 99), report_percentile(v, 100));
}

void report_json(const struct report *r, FILE *out)
{
    (void)fprintf(out, "{\"machine\":");
    put_text(out, r->conf.machine);
    (void)fprintf(out, ",\"command\":");
    put_text(out, r->conf.command);
    (void)fprintf(out, ",\"commit\":");
    put_text(out, r->conf.commit);
    (void)fprintf(
        out,
        ",\"requests\":%zu,\"answered\":%zu,\"good\":%zu,\"seconds\":%.4f,\"tokens_in\":%.0f,"
        "\"tokens_out\":%.0f,\"events\":%.0f,\"reads\":%.0f",
        r->n, r->n_ok, r->n_good, r->seconds, (double)r->n_in, (double)r->n_out,
        (double)r->n_events, (double)r->n_reads);
    put_values(out, "ttft_ms", &r->ttft);
    put_values(out, "tpot_ms", &r->tpot);
    put_values(out, "total_ms", &r->total);
    put_values(out, "added_ms", &r->added);
    put_values(out, "late_ms", &r->late);
    (void)fprintf(out, "}\n");
}
