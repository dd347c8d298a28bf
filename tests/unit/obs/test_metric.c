/* The metrics text: exact lines, bucket edges, escapes, and promtool's opinion where it is installed
 * (DMK_PROMTOOL names it). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "common/obs/metric.h"

static void text_is_exact(void **state)
{
    static const double bounds[] = {0.1, 1, 2.5};
    static const char expected[] = "# HELP damask_a_total Events.\n"
                                   "# TYPE damask_a_total counter\n"
                                   "damask_a_total 0\n"
                                   "# HELP vllm:running Now.\n"
                                   "# TYPE vllm:running gauge\n"
                                   "vllm:running{model_name=\"m\"} 2.5\n"
                                   "vllm:running{model_name=\"n\"} -1\n"
                                   "# HELP damask_t_seconds Times.\n"
                                   "# TYPE damask_t_seconds histogram\n"
                                   "damask_t_seconds_bucket{r=\"x\",le=\"0.1\"} 2\n"
                                   "damask_t_seconds_bucket{r=\"x\",le=\"1\"} 2\n"
                                   "damask_t_seconds_bucket{r=\"x\",le=\"2.5\"} 3\n"
                                   "damask_t_seconds_bucket{r=\"x\",le=\"+Inf\"} 4\n"
                                   "damask_t_seconds_sum{r=\"x\"} 9.25\n"
                                   "damask_t_seconds_count{r=\"x\"} 4\n";
    struct dmk_metrics *m = dmk_metrics_new();
    struct dmk_gauge *g[2];
    struct dmk_histogram *h;
    struct dmk_buf out;

    (void)state;
    (void)dmk_counter_new(m, "damask_a_total", "", "Events.");
    g[0] = dmk_gauge_new(m, "vllm:running", "model_name=\"m\"", "Now.");
    h = dmk_histogram_new(m, "damask_t_seconds", "r=\"x\"", "Times.", bounds, 3);
    g[1] = dmk_gauge_new(m, "vllm:running", "model_name=\"n\"", "ignored"); /* joins its family */
    dmk_gauge_set(g[0], 3);
    dmk_gauge_add(g[0], -0.5);
    dmk_gauge_set(g[1], -1);
    dmk_histogram_observe(h, 0.1); /* on the edge: inside */
    dmk_histogram_observe(h, 0.05);
    dmk_histogram_observe(h, 1.1);
    dmk_histogram_observe(h, 8);
    dmk_buf_init(&out, 0);
    dmk_metrics_text(m, &out);
    assert_string_equal(out.data, expected);
    dmk_buf_fini(&out);
    dmk_metrics_free(&m);
    assert_null(m);
}

static void labels_are_escaped_and_cut(void **state)
{
    char out[64], tiny[5];

    (void)state;
    dmk_metric_label("a\"b\\c\nd", out, sizeof(out));
    assert_string_equal(out, "a\\\"b\\\\c\\nd");
    dmk_metric_label("abc\"d", tiny, sizeof(tiny));
    assert_string_equal(tiny, "abc"); /* half an escape would break the text */
    dmk_metric_label("abcdef", tiny, sizeof(tiny));
    assert_string_equal(tiny, "abcd");
}

static void collect(void *ud)
{
    dmk_gauge_set(ud, 7);
}

static void collect_runs_first_and_numbers_read_back(void **state)
{
    struct dmk_metrics *m = dmk_metrics_new();
    struct dmk_counter *c = dmk_counter_new(m, "damask_b_total", "", "B.");
    struct dmk_buf out;
    double v = 0;

    (void)state;
    dmk_metrics_on_collect(m, collect, dmk_gauge_new(m, "damask_g", "", "G."));
    for (int i = 0; i < 1000; i++) {
        dmk_counter_add(c, 0.1);
        v += 0.1;
    }
    dmk_counter_add(c, 9007199254740000.0);
    v += 9007199254740000.0;
    dmk_buf_init(&out, 0);
    dmk_metrics_text(m, &out);
    assert_non_null(strstr(out.data, "\ndamask_g 7\n"));
    assert_true(strtod(strstr(out.data, "damask_b_total 9") + strlen("damask_b_total "), NULL) ==
                v);
    assert_true(dmk_counter_value(c) == v);
    dmk_buf_fini(&out);
    dmk_metrics_free(&m);
}

static int run_promtool(const char *tool, const struct dmk_buf *text)
{
    char cmd[512];
    FILE *pipe;

    (void)snprintf(cmd, sizeof(cmd), "%s check metrics >/dev/null 2>&1", tool);
    pipe = popen(cmd, "w");
    assert_non_null(pipe);
    (void)fwrite(text->data, 1, text->len, pipe);
    return pclose(pipe);
}

static void promtool_accepts(void **state)
{
    const char *tool = getenv("DMK_PROMTOOL");
    struct dmk_metrics *m = dmk_metrics_new();
    char name[64], labels[96];
    struct dmk_buf out;

    (void)state;
    if (!tool) {
        print_message("promtool is not installed\n");
        dmk_metrics_free(&m);
        skip();
    }
    dmk_metric_label("odd \"name\" \\ with\nline", name, sizeof(name));
    (void)snprintf(labels, sizeof(labels), "model_name=\"%s\"", name);
    dmk_counter_add(dmk_counter_new(m, "damask_things_total", labels, "Things."), 1e9);
    (void)dmk_gauge_new(m, "damask_level", labels, "Level.");
    dmk_histogram_observe(dmk_histogram_new(m, "damask_ttft_seconds", labels, "First token.",
                                            dmk_buckets_ttft, dmk_n_buckets_ttft),
                          0.3);
    (void)dmk_histogram_new(m, "damask_itl_seconds", "", "Between tokens.", dmk_buckets_itl,
                            dmk_n_buckets_itl);
    (void)dmk_histogram_new(m, "damask_e2e_seconds", "", "Whole.", dmk_buckets_e2e,
                            dmk_n_buckets_e2e);
    (void)dmk_histogram_new(m, "damask_prompt_tokens", "", "Tokens.", dmk_buckets_tokens,
                            dmk_n_buckets_tokens);
    dmk_buf_init(&out, 0);
    dmk_metrics_text(m, &out);
    assert_int_equal(run_promtool(tool, &out), 0);
    dmk_buf_puts(&out, "damask_level{broken 1\n"); /* the tool does look */
    assert_int_not_equal(run_promtool(tool, &out), 0);
    dmk_buf_fini(&out);
    dmk_metrics_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_exact),
        cmocka_unit_test(labels_are_escaped_and_cut),
        cmocka_unit_test(collect_runs_first_and_numbers_read_back),
        cmocka_unit_test(promtool_accepts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
