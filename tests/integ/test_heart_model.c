/* The heart test on the real engine and a tiny checkpoint made in a temporary folder, in every pair of
 * layouts. The argument "long" runs the prompts that take minutes, any other one names the tests to run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "tests/integ/heart.h"
#include "tools/tinymodel/tinymodel.h"

enum { N_WINDOW = 40 };

static char folder[] = "/tmp/damask-heart-XXXXXX";
static char model_dir[64];
static uint32_t n_pages = 40, max_context = 1200;

static int make_model(void **state)
{
    struct dmk_tinymodel_conf conf = {.out = model_dir, .seed = 7};
    struct dmk_error err = {0};
    uint64_t bytes;

    (void)state;
    if (!mkdtemp(folder)) {
        return -1;
    }
    snprintf(model_dir, sizeof(model_dir), "%s/model", folder);
    assert_int_equal(dmk_shape_preset("gpt-oss-20b", &conf.shape, NULL), 0);
    conf.shape.n_layers = 4;
    conf.shape.hidden = 96;
    conf.shape.intermediate = 64;
    conf.shape.n_experts = 8;
    conf.shape.n_heads = 8;
    conf.shape.vocab = 500;
    conf.shape.n_eos = 0;
    if (dmk_tinymodel_write(&conf, &bytes, &err) != 0) {
        print_error("%s\n", err.text);
        return -1;
    }
    return 0;
}

static int remove_model(void **state)
{
    char command[128];

    (void)state;
    snprintf(command, sizeof(command), "rm -rf '%s'", folder);
    return system(command);
}

static struct dmk_engine *open_engine(bool prefill, struct dmk_layout layout)
{
    const struct dmk_engine_conf conf = {.model_dir = model_dir,
                                         .backend = "cpu",
                                         .layout = layout,
                                         .prefill = prefill,
                                         .n_threads = layout.tp * layout.dp,
                                         .n_full_pages = n_pages,
                                         .n_window_pages = N_WINDOW,
                                         .max_step_tokens = 600,
                                         .max_step_seqs = 8,
                                         .max_logit_rows = prefill ? 0 : 64};
    struct dmk_engine *engine = NULL;
    struct dmk_error err = {0};

    if (dmk_engine_open(&conf, &engine, &err) != 0) {
        fail_msg("%s", err.text);
    }
    return engine;
}

struct engines {
    struct dmk_engine *alone, *decode, *prefill;
    struct heart_ports ports;
};

static struct engines open_engines(struct dmk_layout d, struct dmk_layout p)
{
    const struct dmk_layout one = {1, 1};
    struct engines e = {.alone = open_engine(false, one),
                        .decode = open_engine(false, d),
                        .prefill = open_engine(true, p)};

    e.ports = (struct heart_ports){dmk_engine_port_from(e.alone, one),
                                   dmk_engine_port_from(e.decode, d),
                                   dmk_engine_port_from(e.prefill, p),
                                   n_pages,
                                   N_WINDOW,
                                   max_context,
                                   512,
                                   false};
    return e;
}

static void close_engines(struct engines *e)
{
    dmk_engine_close(&e->alone);
    dmk_engine_close(&e->decode);
    dmk_engine_close(&e->prefill);
}

static void lengths(void **state)
{
    static const uint32_t list[] = {1, 2, 63, 64, 65, 127, 128, 129, 200, 513};
    struct engines e = open_engines((struct dmk_layout){1, 1}, (struct dmk_layout){1, 1});

    (void)state;
    heart_lengths(&e.ports, list, sizeof(list) / sizeof(list[0]), 6);
    close_engines(&e);
}

static void other_ranks_on_each_side(void **state)
{
    static const uint32_t list[] = {2, 65, 200};
    struct engines e = open_engines((struct dmk_layout){1, 1}, (struct dmk_layout){2, 1});

    (void)state;
    heart_lengths(&e.ports, list, 3, 4);
    close_engines(&e);
    e = open_engines((struct dmk_layout){2, 1}, (struct dmk_layout){1, 1});
    heart_lengths(&e.ports, list, 3, 4);
    close_engines(&e);
}

static struct heart_ports ports_of(struct dmk_engine *alone, struct dmk_engine *decode,
                                   struct dmk_layout d, struct dmk_engine *prefill,
                                   struct dmk_layout p)
{
    return (struct heart_ports){dmk_engine_port_from(alone, (struct dmk_layout){1, 1}),
                                dmk_engine_port_from(decode, d),
                                dmk_engine_port_from(prefill, p),
                                n_pages,
                                N_WINDOW,
                                max_context,
                                512,
                                true};
}

/* Prefill TP a with decode (TP b, DP d): all a, and all b x d <= 8. */
static void every_layout_with_every_other(void **state)
{
    static struct cell_choice want[HEART_TOGETHER];
    struct dmk_engine *prefill[4], *alone = open_engine(false, (struct dmk_layout){1, 1});
    uint32_t n_pairs = 0;

    (void)state;
    for (uint32_t a = 0; a < 4; a++) {
        prefill[a] = open_engine(true, (struct dmk_layout){1u << a, 1});
    }
    for (uint32_t tp = 1; tp <= 8; tp *= 2) {
        for (uint32_t dp = 1; tp * dp <= 8; dp *= 2) {
            const struct dmk_layout d = {tp, dp};
            struct dmk_engine *decode = open_engine(false, d);

            for (uint32_t a = 0; a < 4; a++, n_pairs++) {
                const struct dmk_layout p = {1u << a, 1};
                const struct heart_ports ports = ports_of(alone, decode, d, prefill[a], p);

                if (n_pairs == 0) {
                    heart_alone(&ports, want);
                }
                print_message("prefill tp %u, decode tp %u dp %u\n", p.tp, tp, dp);
                heart_together(&ports, want);
            }
            dmk_engine_close(&decode);
        }
    }
    assert_int_equal(n_pairs, 40);
    for (uint32_t a = 0; a < 4; a++) {
        dmk_engine_close(&prefill[a]);
    }
    dmk_engine_close(&alone);
}

static void groups_in_a_crowd_and_short_of_pages(void **state)
{
    struct engines e = open_engines((struct dmk_layout){1, 2}, (struct dmk_layout){2, 1});

    (void)state;
    heart_preemption(&e.ports);
    heart_shared_beginnings(&e.ports, 4);
    close_engines(&e);
    e = open_engines((struct dmk_layout){2, 4}, (struct dmk_layout){1, 1});
    e.ports.light = true;
    heart_crowd(&e.ports, 2, 6);
    heart_crowd(&e.ports, 3, 6);
    close_engines(&e);
}

static void shared_beginnings_and_crowds(void **state)
{
    struct engines e = open_engines((struct dmk_layout){1, 1}, (struct dmk_layout){1, 1});

    (void)state;
    heart_shared_beginnings(&e.ports, 4);
    heart_crowd(&e.ports, 1, 6);
    close_engines(&e);
}

static void faults(void **state)
{
    const struct dmk_loopback_faults f = {
        .max_delay = 4, .drop = 50, .duplicate = 50, .reorder = 100, .late = 100, .late_steps = 30};
    struct engines e = open_engines((struct dmk_layout){1, 1}, (struct dmk_layout){1, 1});
    uint32_t n_failed;

    (void)state;
    assert_true(heart_faults(&e.ports, DMK_LANE_EMULATED, f, 12, 5, &n_failed) > 5);
    assert_true(heart_faults(&e.ports, DMK_LANE_DIRECT, f, 12, 6, &n_failed) > 5);
    close_engines(&e);
}

static void long_lengths(void **state)
{
    static const uint32_t list[] = {4095, 4096, 4097, 9000};
    struct engines e;

    (void)state;
    n_pages = 200;
    max_context = 9100;
    e = open_engines((struct dmk_layout){1, 1}, (struct dmk_layout){1, 1});
    heart_lengths(&e.ports, list, 4, 4);
    close_engines(&e);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest short_tests[] = {
        cmocka_unit_test(lengths),
        cmocka_unit_test(other_ranks_on_each_side),
        cmocka_unit_test(every_layout_with_every_other),
        cmocka_unit_test(groups_in_a_crowd_and_short_of_pages),
        cmocka_unit_test(shared_beginnings_and_crowds),
        cmocka_unit_test(faults),
    };
    const struct CMUnitTest long_tests[] = {cmocka_unit_test(long_lengths)};

    if (argc > 1 && strcmp(argv[1], "long") == 0) {
        return cmocka_run_group_tests(long_tests, make_model, remove_model);
    }
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    return cmocka_run_group_tests(short_tests, make_model, remove_model);
}
