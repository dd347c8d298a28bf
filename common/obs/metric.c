/* The registry: families in order of creation, each with its series. Everything is allocated when series
 * are made; adding, setting and observing touch a few numbers. Owner: the loop's thread. */
#include "common/obs/metric.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/list.h"

enum kind { COUNTER, GAUGE, HISTOGRAM };

static const char *const kind_names[] = {"counter", "gauge", "histogram"};

/* One sample, or for a histogram its buckets. The three public types are this one. */
struct series {
    struct dmk_list node; /* in family.series */
    char *labels;
    double value; /* histogram: the sum */
    uint64_t count;
    size_t n_bounds;
    double *bounds;    /* [n_bounds], rising */
    uint64_t *buckets; /* [n_bounds + 1], not cumulative */
};

struct dmk_counter {
    struct series s;
};
struct dmk_gauge {
    struct series s;
};
struct dmk_histogram {
    struct series s;
};

struct family {
    struct dmk_list node; /* in metrics.families */
    char *name, *help;
    enum kind kind;
    struct dmk_list series;
};

struct dmk_metrics {
    struct dmk_list families;
    void (*on_collect)(void *ud);
    void *ud;
};

const double dmk_buckets_ttft[] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,
                                   0.25,  0.5,   0.75, 1.0,  2.5,  5.0,  7.5,  10,
                                   20,    40,    80,   160,  640,  2560};
const double dmk_buckets_itl[] = {
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1,
    0.15,  0.2,   0.3,   0.4,   0.5,   0.75,  1.0,   2.5,  5.0,   7.5,  10,    20,   40,    80};
const double dmk_buckets_e2e[] = {0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1,   1.5, 2,   2.5, 5,    10,
                                  15,   20,   30,  40,  50,  60,  120, 240, 480, 960, 1920, 7680};
const double dmk_buckets_tokens[] = {1,    2,    5,    10,    20,    50,    100,    200,   500,
                                     1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000};
const size_t dmk_n_buckets_ttft = sizeof(dmk_buckets_ttft) / sizeof(double);
const size_t dmk_n_buckets_itl = sizeof(dmk_buckets_itl) / sizeof(double);
const size_t dmk_n_buckets_e2e = sizeof(dmk_buckets_e2e) / sizeof(double);
const size_t dmk_n_buckets_tokens = sizeof(dmk_buckets_tokens) / sizeof(double);

static bool is_name(const char *name)
{
    for (const char *p = name; *p; p++) {
        const bool letter =
            (*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z') || *p == '_' || *p == ':';

        if (!letter && !(p > name && *p >= '0' && *p <= '9')) {
            return false;
        }
    }
    return name[0] != 0;
}

/* name="value",... with the escapes of the format and nothing else. */
static bool is_labels(const char *p)
{
    while (*p) {
        while ((*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z') || *p == '_') {
            p++;
        }
        if (*p++ != '=' || *p++ != '"') {
            return false;
        }
        while (*p && *p != '"') {
            if (*p == '\n' || (*p == '\\' && !strchr("\\\"n", p[1]))) {
                return false;
            }
            p += *p == '\\' ? 2 : 1;
        }
        if (*p++ != '"') {
            return false;
        }
        if (*p == ',' && p[1]) {
            p++;
        } else if (*p) {
            return false;
        }
    }
    return true;
}

struct dmk_metrics *dmk_metrics_new(void)
{
    struct dmk_metrics *m = calloc(1, sizeof(*m));

    dmk_assert(m);
    dmk_list_init(&m->families);
    return m;
}

static void free_family(struct family *family)
{
    for (struct dmk_list *node = family->series.next, *next; node != &family->series; node = next) {
        struct series *s = dmk_container_of(node, struct series, node);

        next = node->next;
        free(s->labels);
        free(s->bounds);
        free(s->buckets);
        free(s);
    }
    free(family->name);
    free(family->help);
    free(family);
}

void dmk_metrics_free(struct dmk_metrics **mp)
{
    struct dmk_metrics *m = *mp;

    if (!m) {
        return;
    }
    *mp = NULL;
    for (struct dmk_list *node = m->families.next, *next; node != &m->families; node = next) {
        next = node->next;
        free_family(dmk_container_of(node, struct family, node));
    }
    free(m);
}

static struct family *take_family(struct dmk_metrics *m, const char *name, const char *help,
                                  enum kind kind)
{
    struct family *family;

    for (struct dmk_list *node = m->families.next; node != &m->families; node = node->next) {
        family = dmk_container_of(node, struct family, node);
        if (strcmp(family->name, name) == 0) {
            dmk_assert(family->kind == kind);
            return family;
        }
    }
    dmk_assert(is_name(name));
    dmk_assert(!strpbrk(help, "\\\n"));
    family = calloc(1, sizeof(*family));
    dmk_assert(family);
    family->name = strdup(name);
    family->help = strdup(help);
    dmk_assert(family->name && family->help);
    family->kind = kind;
    dmk_list_init(&family->series);
    dmk_list_push_back(&m->families, &family->node);
    return family;
}

static struct series *new_series(struct dmk_metrics *m, const char *name, const char *labels,
                                 const char *help, enum kind kind)
{
    struct family *family = take_family(m, name, help, kind);
    struct series *s;

    dmk_assert(is_labels(labels));
    for (struct dmk_list *node = family->series.next; node != &family->series; node = node->next) {
        s = dmk_container_of(node, struct series, node);
        dmk_assert(strcmp(s->labels, labels) != 0);
    }
    s = calloc(1, sizeof(*s));
    dmk_assert(s);
    s->labels = strdup(labels);
    dmk_assert(s->labels);
    dmk_list_push_back(&family->series, &s->node);
    return s;
}

struct dmk_counter *dmk_counter_new(struct dmk_metrics *m, const char *name, const char *labels,
                                    const char *help)
{
    const size_t len = strlen(name);

    dmk_assert(len > 6 && strcmp(name + len - 6, "_total") == 0);
    return (struct dmk_counter *)new_series(m, name, labels, help, COUNTER);
}

struct dmk_gauge *dmk_gauge_new(struct dmk_metrics *m, const char *name, const char *labels,
                                const char *help)
{
    return (struct dmk_gauge *)new_series(m, name, labels, help, GAUGE);
}

struct dmk_histogram *dmk_histogram_new(struct dmk_metrics *m, const char *name, const char *labels,
                                        const char *help, const double *bounds, size_t n_bounds)
{
    struct series *s = new_series(m, name, labels, help, HISTOGRAM);

    dmk_assert(n_bounds > 0);
    for (size_t i = 1; i < n_bounds; i++) {
        dmk_assert(bounds[i - 1] < bounds[i]);
    }
    s->n_bounds = n_bounds;
    s->bounds = malloc(n_bounds * sizeof(*s->bounds));
    s->buckets = calloc(n_bounds + 1, sizeof(*s->buckets));
    dmk_assert(s->bounds && s->buckets);
    memcpy(s->bounds, bounds, n_bounds * sizeof(*bounds));
    return (struct dmk_histogram *)s;
}

void dmk_counter_add(struct dmk_counter *c, double v)
{
    dmk_assert(v >= 0);
    c->s.value += v;
}

void dmk_counter_raise(struct dmk_counter *c, double total)
{
    if (total > c->s.value) {
        c->s.value = total;
    }
}

double dmk_counter_value(const struct dmk_counter *c)
{
    return c->s.value;
}

void dmk_gauge_set(struct dmk_gauge *g, double v)
{
    g->s.value = v;
}

void dmk_gauge_add(struct dmk_gauge *g, double v)
{
    g->s.value += v;
}

/* A value equal to a bound counts in that bound's bucket. */
void dmk_histogram_observe(struct dmk_histogram *h, double v)
{
    struct series *s = &h->s;
    size_t lo = 0, hi = s->n_bounds;

    while (lo < hi) {
        const size_t mid = (lo + hi) / 2;

        if (v <= s->bounds[mid]) {
            hi = mid;
        } else {
            lo = mid + 1;
        }
    }
    s->buckets[lo]++;
    s->count++;
    s->value += v;
}

void dmk_metrics_on_collect(struct dmk_metrics *m, void (*fn)(void *ud), void *ud)
{
    m->on_collect = fn;
    m->ud = ud;
}

void dmk_metric_label(const char *text, char *ret_escaped, size_t cap)
{
    size_t n = 0;

    dmk_assert(cap > 0);
    for (const char *p = text; *p; p++) {
        const bool escape = *p == '\\' || *p == '"' || *p == '\n';

        if (n + (escape ? 2 : 1) >= cap) {
            break;
        }
        if (escape) {
            ret_escaped[n++] = '\\';
        }
        ret_escaped[n++] = *p == '\n' ? 'n' : *p;
    }
    ret_escaped[n] = 0;
}

/* The shortest text that reads back as the same number. */
static void put_number(double v, struct dmk_buf *out)
{
    char text[32];

    if (isnan(v)) {
        dmk_buf_puts(out, "NaN");
        return;
    }
    if (isinf(v)) {
        dmk_buf_puts(out, v > 0 ? "+Inf" : "-Inf");
        return;
    }
    for (int digits = 6; digits <= 17; digits++) {
        (void)snprintf(text, sizeof(text), "%.*g", digits, v);
        if (strtod(text, NULL) == v) {
            break;
        }
    }
    dmk_buf_puts(out, text);
}

static void put_series(const struct family *family, const char *suffix, const struct series *s,
                       struct dmk_buf *out)
{
    dmk_buf_printf(out, "%s%s", family->name, suffix);
    if (s->labels[0]) {
        dmk_buf_printf(out, "{%s}", s->labels);
    }
    dmk_buf_putc(out, ' ');
}

static void put_sample(const struct family *family, const struct series *s, struct dmk_buf *out)
{
    put_series(family, "", s, out);
    put_number(s->value, out);
    dmk_buf_putc(out, '\n');
}

static void put_histogram(const struct family *family, const struct series *s, struct dmk_buf *out)
{
    const char *comma = s->labels[0] ? "," : "";
    uint64_t below = 0;

    for (size_t i = 0; i <= s->n_bounds; i++) {
        below += s->buckets[i];
        dmk_buf_printf(out, "%s_bucket{%s%sle=\"", family->name, s->labels, comma);
        put_number(i < s->n_bounds ? s->bounds[i] : INFINITY, out);
        dmk_buf_printf(out, "\"} %" PRIu64 "\n", below);
    }
    put_series(family, "_sum", s, out);
    put_number(s->value, out);
    dmk_buf_putc(out, '\n');
    put_series(family, "_count", s, out);
    dmk_buf_printf(out, "%" PRIu64 "\n", s->count);
}

void dmk_metrics_text(struct dmk_metrics *m, struct dmk_buf *out)
{
    if (m->on_collect) {
        m->on_collect(m->ud);
    }
    for (struct dmk_list *f = m->families.next; f != &m->families; f = f->next) {
        const struct family *family = dmk_container_of(f, struct family, node);

        dmk_buf_printf(out, "# HELP %s %s\n# TYPE %s %s\n", family->name, family->help,
                       family->name, kind_names[family->kind]);
        for (struct dmk_list *n = family->series.next; n != &family->series; n = n->next) {
            const struct series *s = dmk_container_of(n, struct series, node);

            if (family->kind == HISTOGRAM) {
                put_histogram(family, s, out);
            } else {
                put_sample(family, s, out);
            }
        }
    }
}
