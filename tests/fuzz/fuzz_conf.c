/* Fuzz target of the options: a YAML file and a command line.
 *
 * Input: the file, then arguments, each behind a NUL. Checked: they are refused with a sentence, or every
 * value is within the bounds of its option, and what --dump-config prints reads back to the same print. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "common/base/assert.h"
#include "common/conf/internal.h"
#include "tests/fuzz/fuzz.h"

#define MAX_ARGS 16

struct conf {
    char *model;
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
    {"model", DMK_CONF_STR, "m", 0, 0, NULL, "Folder of the model.", AT(model)},
    {"fast", DMK_CONF_BOOL, "false", 0, 0, NULL, "Be fast.", AT(fast)},
    {"http-port", DMK_CONF_U32, "8000", 1, 65535, NULL, "Port.", AT(port)},
    {"max-bytes", DMK_CONF_U64, "1Mi", 1, 1e12, NULL, "Bound of a body.", AT(bytes)},
    {"memory", DMK_CONF_MEMORY, "0", 0, 0, NULL, "Size or share.", AT(memory)},
    {"rate", DMK_CONF_DOUBLE, "0.5", 0, 1, NULL, "Share.", AT(rate)},
    {"wait", DMK_CONF_MS, "5s", 1, 60000, NULL, "How long to wait.", AT(wait_ms)},
    {"mode", DMK_CONF_ENUM, "auto", 0, 0, modes, "When.", AT(mode)},
    {"workers", DMK_CONF_STR_LIST, "", 0, 3, NULL, "Addresses.", AT(workers)},
};
static const struct dmk_conf_program program = {
    "damask-fuzz", "a test", "", NULL, options, sizeof(options) / sizeof(options[0])};

/* Loads the file with the arguments, argv[0] not counted among them. */
static int load(struct dmk_bytes file, int n_args, char **args, struct conf *ret_conf,
                struct dmk_error *err)
{
    const int fd = memfd_create("fuzz", MFD_CLOEXEC);
    char name[] = "fuzz", option[] = "--config", path[64];
    char *argv[MAX_ARGS + 4] = {name, option, path};
    int n_positional, r;

    dmk_assert(fd >= 0);
    dmk_assert(file.len == 0 || write(fd, file.data, file.len) == (ssize_t)file.len);
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    for (int i = 0; i < n_args; i++) {
        argv[3 + i] = args[i];
    }
    *ret_conf = (struct conf){0};
    r = dmk_conf_load(&program, 3 + n_args, argv, ret_conf, &n_positional, err);
    (void)close(fd);
    dmk_assert(r != 0 || (n_positional >= 0 && n_positional <= n_args));
    return r;
}

static void check(const struct conf *c)
{
    dmk_assert(c->model && c->port >= 1 && c->port <= 65535);
    dmk_assert(c->bytes >= 1 && c->bytes <= 1000000000000u);
    dmk_assert(c->memory.percent >= 0 && c->memory.percent <= 100 &&
               (c->memory.percent == 0 || c->memory.bytes == 0));
    dmk_assert(isfinite(c->rate) && c->rate >= 0 && c->rate <= 1);
    dmk_assert(c->wait_ms >= 1 && c->wait_ms <= 60000);
    dmk_assert(c->mode < 3 && c->workers.n <= 3);
}

static void check_dump(const struct conf *c)
{
    struct dmk_error err = {0};
    struct dmk_buf first, second;
    struct conf again;

    dmk_buf_init(&first, 0);
    dmk_buf_init(&second, 0);
    dmk_conf__dump(&program, c, &first);
    if (load(dmk_buf_bytes(&first), 0, NULL, &again, &err) != 0) {
        (void)fprintf(stderr, "%s\n%.*s\n", err.text, (int)first.len, first.data);
        abort();
    }
    dmk_conf__dump(&program, &again, &second);
    dmk_assert(first.len == second.len && memcmp(first.data, second.data, first.len) == 0);
    dmk_conf_free(&program, &again);
    dmk_buf_fini(&first);
    dmk_buf_fini(&second);
}

/* Whether an argument makes the program print or read another file: that is not what is tried here. */
static bool is_wish(const char *arg)
{
    static const char *const names[] = {"--config", "--help",     "-h",
                                        "--dump",   "--document", "--version"};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (strncmp(arg, names[i], strlen(names[i])) == 0) {
            return true;
        }
    }
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dmk_error err = {0};
    char *text = malloc(size + 1), *args[MAX_ARGS];
    size_t file_len, at;
    int n_args = 0;
    struct conf conf;

    dmk_assert(text);
    if (size > 0) {
        memcpy(text, data, size);
    }
    text[size] = '\0';
    file_len = strlen(text);
    for (at = file_len + 1; at < size && n_args < MAX_ARGS; at += strlen(text + at) + 1) {
        if (!is_wish(text + at)) {
            args[n_args++] = text + at;
        }
    }
    if (load((struct dmk_bytes){(uint8_t *)text, file_len}, n_args, args, &conf, &err) < 0) {
        dmk_assert(err.status < 0 && err.text[0]);
    } else {
        check(&conf);
        check_dump(&conf);
    }
    dmk_conf_free(&program, &conf);
    free(text);
    return 0;
}
