/* The report as one page that needs nothing else: numbers, and drawings as inline SVG. */
#include <math.h>
#include <stdlib.h>
#include "bench/load/report.h"

enum { WIDTH = 640, HEIGHT = 180, LEFT = 60, BOTTOM = 24, BARS = 40 };

static void put_escaped(FILE *out, const char *text)
{
    for (; *text; text++) {
        switch (*text) {
        case '<':
            (void)fputs("&lt;", out);
            break;
        case '&':
            (void)fputs("&amp;", out);
            break;
        default:
            (void)fputc(*text, out);
        }
    }
}

/* Bars from 0 to top, labelled below from first to last. */
static void put_bars(FILE *out, const char *title, const double *bars, size_t n, double first,
                     double last, const char *unit)
{
    const double w = (double)(WIDTH - LEFT) / (double)n;
    double top = 0;

    for (size_t i = 0; i < n; i++) {
        top = bars[i] > top ? bars[i] : top;
    }
    (void)fprintf(out,
                  "<h2>%s</h2><svg viewBox=\"0 0 %d %d\" role=\"img\"><title>%s</title>"
                  "<g fill=\"#36c\">",
                  title, WIDTH, HEIGHT + BOTTOM, title);
    for (size_t i = 0; i < n; i++) {
        const double h = top > 0 ? bars[i] / top * (HEIGHT - 10) : 0;

        (void)fprintf(
            out,
            "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"><title>%.4g</title></rect>",
            LEFT + (double)i * w, HEIGHT - h, w > 2 ? w - 1 : w, h, bars[i]);
    }
    (void)fprintf(out,
                  "</g><path d=\"M%d 0V%dH%d\" fill=\"none\" stroke=\"#888\"/>"
                  "<g font-size=\"12\"><text x=\"%d\" y=\"14\" text-anchor=\"end\">%.4g</text>"
                  "<text x=\"%d\" y=\"%d\">%.4g</text><text x=\"%d\" y=\"%d\" "
                  "text-anchor=\"end\">%.4g %s</text>"
                  "</g></svg>\n",
                  LEFT, HEIGHT, WIDTH, LEFT - 6, top, LEFT, HEIGHT + 16, first, WIDTH, HEIGHT + 16,
                  last, unit);
}

static void put_histogram(FILE *out, const char *title, const struct report_values *v)
{
    double bars[BARS] = {0};
    /* The slowest hundredth would squeeze all others together; it falls into the last bar. */
    const double lo = v->n ? v->v[0] : 0, hi = report_percentile(v, 99);

    for (size_t i = 0; i < v->n; i++) {
        const double at = hi > lo ? (v->v[i] - lo) / (hi - lo) * BARS : 0;

        bars[at < BARS - 1 ? (size_t)at : BARS - 1]++;
    }
    put_bars(out, title, bars, BARS, lo, hi, "ms (p99)");
}

/* Tokens a second, each request's spread evenly over its own time of answering. */
static void put_throughput(FILE *out, const struct report *r)
{
    double bars[BARS] = {0};
    const double width = r->seconds > 0 ? r->seconds / BARS : 1;

    for (size_t i = 0; i < r->n; i++) {
        const struct client_record *c = &r->records[i];
        const double from = c->first_ns ? (double)(c->first_ns - r->start_ns) / 1e9 : 0;
        const double to = c->first_ns ? (double)(c->last_ns - r->start_ns) / 1e9 : 0;

        for (size_t b = 0; c->n_out > 0 && c->first_ns && b < BARS; b++) {
            const double begin = fmax(from, (double)b * width),
                         end = fmin(to, (double)(b + 1) * width);

            if (to > from && end > begin) {
                bars[b] += c->n_out * (end - begin) / (to - from) / width;
            } else if (to <= from && from >= (double)b * width && from < (double)(b + 1) * width) {
                bars[b] += c->n_out / width;
            }
        }
    }
    put_bars(out, "Answer tokens a second over time", bars, BARS, 0, r->seconds, "s");
}

static void put_row(FILE *out, const char *name, const struct report_values *v)
{
    if (v->n > 0) {
        (void)fprintf(out, "<tr><th>%s<td>%zu<td>%.2f<td>%.2f<td>%.2f<td>%.2f<td>%.2f</tr>\n", name,
                      v->n, report_percentile(v, 50), report_percentile(v, 90),
                      report_percentile(v, 95), report_percentile(v, 99), v->v[v->n - 1]);
    }
}

void report_html(const struct report *r, FILE *out)
{
    const double s = r->seconds > 0 ? r->seconds : 1;

    (void)fprintf(
        out,
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>damask load report</title>"
        "<style>body{font:15px/1.4 sans-serif;max-width:720px;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;"
        "border-bottom:1px solid #ccc}th{text-align:left}code{overflow-wrap:anywhere}"
        "h2{font-size:1.05em;margin:1.5em 0 .3em}</style><h1>Load report</h1><p>");
    put_escaped(out, r->conf.machine);
    (void)fprintf(out, "<br>commit ");
    put_escaped(out, r->conf.commit);
    (void)fprintf(out, "<br><code>");
    put_escaped(out, r->conf.command);
    (void)fprintf(out,
                  "</code><p>%zu requests, %zu answered, %zu failed, in %.2f s. %.0f prompt "
                  "tokens/s, %.0f answer "
                  "tokens/s.<br>Goodput: %.1f%% of all requests, %.2f requests/s (first token "
                  "within %.0f ms, %.1f "
                  "ms a token).\n<table><tr><th>ms<th>n<th>p50<th>p90<th>p95<th>p99<th>max</tr>\n",
                  r->n, r->n_ok, r->n - r->n_ok, r->seconds, (double)r->n_in / s,
                  (double)r->n_out / s, r->n ? 100.0 * (double)r->n_good / (double)r->n : 0,
                  (double)r->n_good / s, r->conf.ttft_limit_ms, r->conf.tpot_limit_ms);
    put_row(out, "first token", &r->ttft);
    put_row(out, "a token after it", &r->tpot);
    put_row(out, "whole request", &r->total);
    put_row(out, "added to a token", &r->added);
    put_row(out, "sent behind its time", &r->late);
    (void)fprintf(out, "</table>\n");
    put_histogram(out, "Time to the first token", &r->ttft);
    put_histogram(out, "Time of a token after the first", &r->tpot);
    put_throughput(out, r);
    (void)fprintf(out, "</html>\n");
}
