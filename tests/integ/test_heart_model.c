/* The heart test on the real engine and a tiny checkpoint made in a temporary folder. The argument
 * "long" runs the prompts that take minutes, any other one names the tests to run. */
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
