/* Options: every type from every source, precedence, bounds named in the sentence, unknown keys,
 * what is printed for --help and --dump-config and that the dump reads back to the same values. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "common/conf/conf.h"

struct conf {
    char *model;
    char *host;
    bool fast;
    uint32_t port;
    uint64_t bytes;
    struct dmk_conf_memory memory;
    double rate;
    uint64_t wait_ms;
    uint32_t mode;
    struct dmk_conf_list workers;
};

static const char *const modes[] = {"auto", "always", "never", NULL};

#define AT(field) offsetof(struct conf, field)
static const struct dmk_conf_option options[] = {
    {"model", DMK_CONF_STR, NULL, 0, 0, NULL, "Folder of the model.", AT(model)},
    {"host", DMK_CONF_STR, "127.0.0.1", 0, 0, NULL, "Address to listen on.", AT(host)},
    {"fast", DMK_CONF_BOOL, "false", 0, 0, NULL, "Be fast.", AT(fast)},
    {"http-port", DMK_CONF_U32, "8000", 0, 65535, NULL, "Port.", AT(port)},
    {"max-bytes", DMK_CONF_U64, "1Mi", 1, 1e12, NULL, "Bound of a body.", AT(bytes)},
    {"memory", DMK_CONF_MEMORY, "0", 0, 0, NULL, "Size or share.", AT(memory)},
    {"rate", DMK_CONF_DOUBLE, "0.5", 0, 1, NULL, "Share | part.", AT(rate)},
    {"wait", DMK_CONF_MS, "5s", 1, 60000, NULL, "How long to wait.", AT(wait_ms)},
    {"mode", DMK_CONF_ENUM, "auto", 0, 0, modes, "When.", AT(mode)},
    {"workers", DMK_CONF_STR_LIST, "", 0, 3, NULL, "Addresses.", AT(workers)},
};
static const struct dmk_conf_program program = {
    "damask-test", "a test", "", "DAMASK_TEST_", options, sizeof(options) / sizeof(options[0])};

static struct dmk_error err;

/* dmk_conf_load moves pointers in argv and never writes through them. */
static int load_args(struct conf *conf, int *ret_n_args, int argc, const char **argv)
{
    *conf = (struct conf){0};
    err.text[0] = 0;
    return dmk_conf_load(&program, argc, (char **)(uintptr_t)argv, conf, ret_n_args, &err);
}

#define LOAD(conf, n_args, ...)                                                                    \
    load_args((conf), (n_args),                                                                    \
              (int)(sizeof((const char *[]){"x", __VA_ARGS__}) / sizeof(char *)),                  \
              (const char *[]){"x", __VA_ARGS__})

static void assert_says(const char *part)
{
    if (!strstr(err.text, part)) {
        fail_msg("\"%s\" does not hold \"%s\"", err.text, part);
    }
}

static char path[] = "/tmp/dmk-conf-test-XXXXXX";

static void write_file(const char *text)
{
    FILE *f = fopen(path, "w");

    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    fclose(f);
}

static void defaults_and_command_line(void **state)
{
    struct conf c;

    (void)state;
    assert_int_equal(LOAD(&c, NULL, "--model", "/m"), 0);
    assert_string_equal(c.model, "/m");
    assert_string_equal(c.host, "127.0.0.1");
    assert_false(c.fast);
    assert_int_equal(c.port, 8000);
    assert_int_equal(c.bytes, 1 << 20);
    assert_true(c.memory.bytes == 0 && c.memory.percent == 0);
    assert_true(c.rate == 0.5);
    assert_int_equal(c.wait_ms, 5000);
    assert_int_equal(c.mode, 0);
    assert_int_equal(c.workers.n, 0);
    dmk_conf_free(&program, &c);

    assert_int_equal(LOAD(&c, NULL, "--model=/m", "--fast", "--http-port=0", "--max-bytes", "3k",
                          "--rate=1e-1", "--wait", "1m", "--mode=never", "--workers", "a:1,b:2",
                          "--workers=c:3"),
                     0);
    assert_true(c.fast);
    assert_int_equal(c.port, 0);
    assert_int_equal(c.bytes, 3000);
    assert_true(c.rate == 0.1);
    assert_int_equal(c.wait_ms, 60000);
    assert_int_equal(c.mode, 2);
    assert_int_equal(c.workers.n, 3);
    assert_string_equal(c.workers.items[1], "b:2");
    assert_string_equal(c.workers.items[2], "c:3");
    dmk_conf_free(&program, &c);
    assert_null(c.model);
    assert_int_equal(LOAD(&c, NULL, "--model=/m", "--fast", "--no-fast"), 0);
    assert_false(c.fast);
    dmk_conf_free(&program, &c);
}

static void memory_is_a_size_or_a_share(void **state)
{
    static const struct {
        const char *arg;
        uint64_t bytes;
        double percent;
    } good[] = {{"--memory=40Gi", UINT64_C(40) << 30, 0},
                {"--memory=7", 7, 0},
                {"--memory=0", 0, 0},
                {"--memory=90%", 0, 90},
                {"--memory=92.5%", 0, 92.5},
                {"--memory=100%", 0, 100}};
    struct conf c;

    (void)state;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        assert_int_equal(LOAD(&c, NULL, "--model=/m", "--memory=33%", good[i].arg), 0);
        assert_true(c.memory.bytes == good[i].bytes && c.memory.percent == good[i].percent);
        dmk_conf_free(&program, &c);
    }
}

static void refuse(const char *arg, const char *says)
{
    struct conf c;

    assert_true(LOAD(&c, NULL, "--model=/m", arg) < 0);
    assert_says(says);
    dmk_conf_free(&program, &c);
}

static void refusals_name_key_value_and_bound(void **state)
{
    struct conf c;

    (void)state;
    refuse("--http-port=65536", "--http-port: \"65536\" is not in range (allowed: 0 to 65535)");
    refuse("--http-port=4294967296", "--http-port");
    refuse("--http-port=-1", "--http-port: \"-1\" is not a whole number");
    refuse("--http-port=", "--http-port: \"\"");
    refuse("--http-port= 1", "--http-port");
    refuse("--http-port=1x", "\"1x\"");
    refuse("--http-port", "--http-port: a value is missing");
    refuse("--max-bytes=0", "--max-bytes: \"0\" is not in range (allowed: 1 to 1e+12)");
    refuse("--max-bytes=99999999999999999999", "--max-bytes");
    refuse("--max-bytes=18446744073709551615k", "--max-bytes");
    refuse("--max-bytes=1K", "units k, M, G");
    refuse("--memory=0%",
           "--memory: \"0%\" is not a size (like 40Gi; units k, M, G, Ki, Mi, Gi) or "
           "a share (like 90%, above 0 and at most 100%)");
    refuse("--memory=0.9", "a share (like 90%");
    refuse("--memory=100.1%", "a share");
    refuse("--memory=-5%", "a share");
    refuse("--memory=nan%", "a share");
    refuse("--memory=%", "a share");
    refuse("--memory=9 %", "a share");
    refuse("--memory=1.00000000000000000000000000000000000000001%", "a share");
    refuse("--rate=nan", "--rate: \"nan\" is not a finite number");
    refuse("--rate=inf", "--rate");
    refuse("--rate=1.01", "--rate: \"1.01\" is not in range (allowed: 0 to 1)");
    refuse("--wait=61s", "--wait: \"61s\" is not in range (allowed: 1 to 60000 ms)");
    refuse("--wait=5d", "--wait: \"5d\" is not a time");
    refuse("--wait=30", "--wait: \"30\" is not a time with its unit (like 100ms, 5s, 2m, 1h)");
    refuse("--wait=0", "--wait: \"0\" is not in range");
    refuse("--mode=some",
           "--mode: \"some\" is not one of the words (allowed: auto, always, never)");
    refuse("--fast=maybe", "--fast: \"maybe\"");
    refuse("--workers=a,,b", "empty item");
    refuse("--workers=a,b,c,d", "allowed: 0 to 3 items");
    refuse("--colour=red", "--colour: unknown option (see damask-test --help)");
    refuse("--no-mode", "--no-mode: unknown option");
    refuse("-x", "-x: unknown option");
    refuse("word", "\"word\": no argument is expected");
    assert_true(LOAD(&c, NULL, "--fast") < 0);
    assert_says("--model is required: Folder of the model.");
    dmk_conf_free(&program, &c);
}

static void file_then_environment_then_command_line(void **state)
{
    struct conf c;

    (void)state;
    write_file(
        "# comment\nmodel: /from/file\nhttp-port: 1\nmax-bytes: 2Mi\nwait: 1h # refused below\n");
    assert_true(LOAD(&c, NULL, "--config", path) < 0);
    assert_says("line 5: wait: \"1h\" is not in range");
    assert_says(path);
    dmk_conf_free(&program, &c);

    write_file("---\nmodel: /from/file\nhttp-port: 1\nmax-bytes: 2Mi\nfast: on\nworkers:\n  - w1\n "
               " - w2\n");
    setenv("DAMASK_TEST_HTTP_PORT", "2", 1);
    setenv("DAMASK_TEST_MAX_BYTES", "4k", 1);
    setenv("DAMASK_TEST_WORKERS", "e1", 1);
    setenv("DAMASK_TEST_PORT", "tcp://10.0.0.1:80", 1); /* as Kubernetes does */
    assert_int_equal(
        LOAD(&c, NULL, "--max-bytes=5", "--config", path, "--workers=c1", "--workers=c2"), 0);
    assert_string_equal(c.model, "/from/file");
    assert_int_equal(c.port, 2);
    assert_int_equal(c.bytes, 5);
    assert_true(c.fast);
    assert_int_equal(c.workers.n, 2);
    assert_string_equal(c.workers.items[0], "c1");
    dmk_conf_free(&program, &c);
    setenv("DAMASK_TEST_HTTP_PORT", "2.5", 1);
    assert_true(LOAD(&c, NULL, "--config", path) < 0);
    assert_says("DAMASK_TEST_HTTP_PORT: \"2.5\"");
    dmk_conf_free(&program, &c);
    unsetenv("DAMASK_TEST_HTTP_PORT");
    unsetenv("DAMASK_TEST_MAX_BYTES");
    unsetenv("DAMASK_TEST_WORKERS");
    unsetenv("DAMASK_TEST_PORT");
}

static void refuse_file(const char *text, const char *says)
{
    struct conf c;

    write_file(text);
    assert_true(LOAD(&c, NULL, "--model=/m", "--config", path) < 0);
    assert_says(says);
    dmk_conf_free(&program, &c);
}

static void bad_files(void **state)
{
    struct conf c;

    (void)state;
    refuse_file("colour: red\n", "line 1: colour: unknown key");
    refuse_file("host: a\nhost: b\n", "line 2: host: given twice");
    refuse_file("host: {a: b}\n", "line 1: host: must be plain text");
    refuse_file("host: [a]\n", "host: must be plain text");
    refuse_file("workers: [a, [b]]\n", "workers: every item must be plain text");
    refuse_file("workers: [a, b, c, d]\n", "workers: has 4 items (allowed: 0 to 3)");
    refuse_file("- a\n", "must be lines of \"name: value\"");
    refuse_file("? [a]\n: b\n", "keys must be plain words");
    refuse_file("host: &x a\nmodel: *x\n", "aliases");
    refuse_file("host: a\n---\nhost: b\n", "a second document");
    refuse_file("host: 'a\n", "line");
    refuse_file("\tx\n", "line 1");
    assert_true(LOAD(&c, NULL, "--model=/m", "--config=/nonexistent/x.yaml") < 0);
    assert_says("/nonexistent/x.yaml");
    assert_says("No such file");
    dmk_conf_free(&program, &c);
    write_file("");
    assert_int_equal(LOAD(&c, NULL, "--model=/m", "--config", path), 0);
    dmk_conf_free(&program, &c);
    write_file("---\n...\n");
    assert_int_equal(LOAD(&c, NULL, "--model=/m", "--config", path), 0);
    dmk_conf_free(&program, &c);
}

static void positional_arguments_move_to_the_front(void **state)
{
    struct conf c = {0};
    const char *argv[] = {"x", "--model", "/m", "in", "--fast", "out", "--", "--host", NULL};
    int n = -1;

    (void)state;
    assert_int_equal(dmk_conf_load(&program, 8, (char **)(uintptr_t)argv, &c, &n, &err), 0);
    assert_int_equal(n, 3);
    assert_string_equal(argv[1], "in");
    assert_string_equal(argv[2], "out");
    assert_string_equal(argv[3], "--host");
    dmk_conf_free(&program, &c);
}

/* Runs fn's output on stdout into the file. */
static int load_to_file(struct conf *c, const char *arg1, const char *arg2)
{
    const int keep = dup(STDOUT_FILENO);
    int ret;

    fflush(stdout);
    assert_non_null(freopen(path, "w", stdout));
    ret = LOAD(c, NULL, arg1, arg2);
    fflush(stdout);
    assert_true(dup2(keep, STDOUT_FILENO) >= 0);
    close(keep);
    return ret;
}

static void dump_reads_back(void **state)
{
    struct conf c, d;
    char text[4096];
    FILE *f;
    size_t n;

    (void)state;
    assert_int_equal(setenv("DAMASK_TEST_MEMORY", "92.5%", 1), 0);
    /* A name that needs quoting. */
    assert_int_equal(load_to_file(&c, "--model=/m \"x\": \\ #\n[1]", "--dump-config"), 1);
    dmk_conf_free(&program, &c);
    assert_int_equal(unsetenv("DAMASK_TEST_MEMORY"), 0);
    assert_int_equal(LOAD(&d, NULL, "--config", path), 0);
    assert_true(d.memory.percent == 92.5 && d.memory.bytes == 0);
    assert_string_equal(d.model, "/m \"x\": \\ #\n[1]");
    assert_int_equal(d.wait_ms, 5000);
    assert_int_equal(d.bytes, 1 << 20);
    assert_true(d.rate == 0.5);
    dmk_conf_free(&program, &d);

    assert_int_equal(load_to_file(&c, "--fast", "--help"),
                     1); /* though a required one is missing */
    dmk_conf_free(&program, &c);
    f = fopen(path, "r");
    assert_non_null(f);
    n = fread(text, 1, sizeof(text) - 1, f);
    text[n] = 0;
    fclose(f);
    for (size_t i = 0; i < program.n_options; i++) {
        assert_non_null(strstr(text, options[i].name));
        assert_non_null(strstr(text, options[i].help));
    }
    assert_non_null(strstr(text, "default: 5s; allowed: 1 to 60000 ms; env: DAMASK_TEST_WAIT"));
}

/* Two structs in one: each part's rows write into its own, and a change gives a row another default. */
static void joins_parts(void **state)
{
    struct inner {
        uint32_t n;
        char *name;
    };
    struct outer {
        uint32_t first;
        struct inner inner;
    };
    static const struct dmk_conf_option outer_rows[] = {
        {"first", DMK_CONF_U32, "1", 0, 9, NULL, "The first.", offsetof(struct outer, first)}};
    static const struct dmk_conf_option inner_rows[] = {
        {"n", DMK_CONF_U32, "2", 0, 9, NULL, "A number.", offsetof(struct inner, n)},
        {"name", DMK_CONF_STR, NULL, 0, 0, NULL, "A name.", offsetof(struct inner, name)}};
    static const struct dmk_conf_part outer_part = {outer_rows, 1, 0};
    static const struct dmk_conf_part inner_part = {inner_rows, 2, offsetof(struct outer, inner)};
    static const struct dmk_conf_part *const parts[] = {&outer_part, &inner_part, NULL};
    static const struct dmk_conf_change changes[] = {{"name", "bob", "Whose."}, {"n", "3", NULL}};
    static const struct dmk_conf_program joined = {.name = "joined",
                                                   .summary = "x",
                                                   .usage = "",
                                                   .parts = parts,
                                                   .changes = changes,
                                                   .n_changes = 2};
    char a0[] = "joined", a1[] = "--first", a2[] = "7", a3[] = "--n=10";
    char *argv[] = {a0, a1, a2, a3, NULL};
    struct outer conf = {0};
    struct dmk_error error;
    struct dmk_buf out;

    (void)state;
    assert_int_equal(dmk_conf_load(&joined, 3, argv, &conf, NULL, &error), 0);
    assert_true(conf.first == 7 && conf.inner.n == 3);
    assert_string_equal(conf.inner.name, "bob");
    dmk_conf_free(&joined, &conf);
    assert_null(conf.inner.name);
    assert_true(dmk_conf_load(&joined, 4, argv, &conf, NULL, &error) < 0);
    assert_non_null(strstr(error.text, "--n"));
    dmk_conf_free(&joined, &conf);
    dmk_buf_init(&out, 0);
    dmk_conf_document(&joined, &out);
    dmk_buf_putc(&out, 0);
    assert_non_null(strstr((char *)out.data, "| `first` | number | `1` | 0 to 9 | The first. |\n"
                                             "| `n` | number | `3` | 0 to 9 | A number. |\n"
                                             "| `name` | text | `bob` |  | Whose. |\n"));
    dmk_buf_fini(&out);
}

static void documents_as_markdown(void **state)
{
    struct dmk_buf out;

    (void)state;
    dmk_buf_init(&out, 0);
    dmk_conf_document(&program, &out);
    assert_false(out.failed);
    assert_non_null(strstr(out.data, "| `http-port` | number | `8000` | 0 to 65535 | Port. |\n"));
    assert_non_null(strstr(out.data, "Share \\| part."));
    assert_non_null(strstr(out.data, "| `model` | text | required | "));
    dmk_buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_and_command_line),
        cmocka_unit_test(memory_is_a_size_or_a_share),
        cmocka_unit_test(refusals_name_key_value_and_bound),
        cmocka_unit_test(file_then_environment_then_command_line),
        cmocka_unit_test(bad_files),
        cmocka_unit_test(positional_arguments_move_to_the_front),
        cmocka_unit_test(dump_reads_back),
        cmocka_unit_test(joins_parts),
        cmocka_unit_test(documents_as_markdown),
    };
    const int fd = mkstemp(path);
    int ret;

    if (fd < 0) {
        return 1;
    }
    close(fd);
    ret = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return ret;
}
