/* Metrics in the Prometheus text format.
 *
 * A registry is made at start with all its series (a dashboard can not tell "none" from "missing"), and
 * written and read on the loop's thread. Names and label sets are literals; a name that the format does not
 * allow, and a series made twice, are programmer errors. */
#pragma once

#include "common/base/buf.h"

struct dmk_metrics;
struct dmk_counter;
struct dmk_gauge;
struct dmk_histogram;

struct dmk_metrics *dmk_metrics_new(void);
void dmk_metrics_free(struct dmk_metrics **metrics);

/* Counters only rise: adding less than 0 is a programmer error.
 *
 * labels: `model_name="x",role="decode"` or "" ; values are escaped by dmk_metric_label. All texts are
 * copied. The same name may be made again with other labels (then with the same kind; the first help
 * counts). Names of counters end in _total. */
struct dmk_counter *dmk_counter_new(struct dmk_metrics *m, const char *name, const char *labels,
                                    const char *help);
struct dmk_gauge *dmk_gauge_new(struct dmk_metrics *m, const char *name, const char *labels,
                                const char *help);
struct dmk_histogram *dmk_histogram_new(struct dmk_metrics *m, const char *name, const char *labels,
                                        const char *help, const double *bounds, size_t n_bounds);
void dmk_counter_add(struct dmk_counter *c, double v);
void dmk_gauge_set(struct dmk_gauge *g, double v);
void dmk_gauge_add(struct dmk_gauge *g, double v);
/* For a counter that mirrors a total kept elsewhere: raises it to total, never lowers it. */
void dmk_counter_raise(struct dmk_counter *c, double total);
double dmk_counter_value(const struct dmk_counter *c);
void dmk_histogram_observe(struct dmk_histogram *h, double v);

/* Bucket bounds in seconds as vLLM's dashboards use them, with finer ones below 10 ms. */
extern const double dmk_buckets_ttft[], dmk_buckets_itl[], dmk_buckets_e2e[], dmk_buckets_tokens[];
extern const size_t dmk_n_buckets_ttft, dmk_n_buckets_itl, dmk_n_buckets_e2e, dmk_n_buckets_tokens;

/* Runs before each dmk_metrics_text: gauges that mirror a state are set there and nowhere else. */
void dmk_metrics_on_collect(struct dmk_metrics *m, void (*fn)(void *ud), void *ud);

/* Writes text escaped for a label value, cut at the bound (never inside an escape). */
void dmk_metric_label(const char *text, char *ret_escaped, size_t cap);
/* Families in the order of creation. */
void dmk_metrics_text(struct dmk_metrics *m, struct dmk_buf *out);
