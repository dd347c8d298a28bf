/* Loading in the order of precedence: defaults, file, environment, command line. */
#include "common/conf/internal.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"

void dmk_conf__env_name(const struct dmk_conf_program *program, const struct dmk_conf_option *opt,
                        char *ret_name, size_t cap)
{
    const int n = snprintf(ret_name, cap, "%s%s", program->env_prefix, opt->name);

    dmk_assert(n > 0 && (size_t)n < cap);
    for (char *p = ret_name; *p; p++) {
        *p = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
    }
}

const struct dmk_conf_option *dmk_conf__find(const struct dmk_conf_program *program,
                                             struct dmk_str name)
{
    for (size_t i = 0; i < program->n_options; i++) {
        if (dmk_str_is(name, program->options[i].name)) {
            return &program->options[i];
        }
    }
    return NULL;
}

static void load_defaults(const struct dmk_conf_program *program, void *conf)
{
    for (size_t i = 0; i < program->n_options; i++) {
        const struct dmk_conf_option *opt = &program->options[i];

        /* A default that its own bounds refuse is a mistake in the table. */
        if (opt->def) {
            dmk_assert(dmk_conf__set(opt, opt->def, false, conf, opt->name, NULL) == 0);
        }
    }
}

static int load_env(const struct dmk_conf_program *program, void *conf, bool *given,
                    struct dmk_error *reterr)
{
    char name[256];

    for (size_t i = 0; program->env_prefix && i < program->n_options; i++) {
        const char *text;
        int ret;

        dmk_conf__env_name(program, &program->options[i], name, sizeof(name));
        text = getenv(name);
        if (!text) {
            continue;
        }
        ret = dmk_conf__set(&program->options[i], text, false, conf, name, reterr);
        if (ret < 0) {
            return ret;
        }
        given[i] = true;
    }
    return 0;
}

/* What the command line asks for besides options of the table. */
struct wish {
    const char *config; /* file */
    bool help, version, dump, document;
    int n_args;
};

struct cli {
    const struct dmk_conf_program *program;
    int argc;
    char **argv;
    void *conf;      /* NULL in the first pass, which only looks for wishes */
    bool *given;     /* [n_options] set by file, environment or command line */
    bool *cli_given; /* [n_options] set by the command line */
    bool positional; /* allowed */
    struct wish wish;
};

/* The text of the option at argv[*i]: behind '=', or the next argument. */
static int take_value(const struct cli *cli, struct dmk_str name, const char *eq, int *i,
                      const char **ret, struct dmk_error *reterr)
{
    if (eq) {
        *ret = eq + 1;
        return 0;
    }
    if (*i + 1 >= cli->argc) {
        return dmk_error_set(reterr, -DMK_EINVAL, "--%.*s: a value is missing", (int)name.len,
                             name.data);
    }
    *ret = cli->argv[++*i];
    return 0;
}

static int set_from_cli(struct cli *cli, const struct dmk_conf_option *opt, const char *text,
                        struct dmk_error *reterr)
{
    const size_t index = (size_t)(opt - cli->program->options);
    char where[256];
    int ret;

    if (!cli->conf) {
        return 0;
    }
    (void)snprintf(where, sizeof(where), "--%s", opt->name);
    ret = dmk_conf__set(opt, text, cli->cli_given[index], cli->conf, where, reterr);
    cli->given[index] = cli->cli_given[index] = true;
    return ret;
}

static int read_option(struct cli *cli, int *i, struct dmk_error *reterr)
{
    const char *arg = cli->argv[*i] + 2;
    const char *eq = strchr(arg, '=');
    const struct dmk_str name = {arg, eq ? (size_t)(eq - arg) : strlen(arg)};
    const struct dmk_conf_option *opt = dmk_conf__find(cli->program, name);
    const char *text = NULL;
    int ret;

    if (!opt && name.len > 3 && memcmp(arg, "no-", 3) == 0 && !eq) {
        opt = dmk_conf__find(cli->program, (struct dmk_str){arg + 3, name.len - 3});
        if (opt && opt->type == DMK_CONF_BOOL) {
            return set_from_cli(cli, opt, "false", reterr);
        }
        opt = NULL;
    }
    if (opt && opt->type == DMK_CONF_BOOL) {
        return set_from_cli(cli, opt, eq ? eq + 1 : "true", reterr);
    }
    if (opt) {
        ret = take_value(cli, name, eq, i, &text, reterr);
        return ret < 0 ? ret : set_from_cli(cli, opt, text, reterr);
    }
    if (dmk_str_is(name, "config")) {
        return take_value(cli, name, eq, i, &cli->wish.config, reterr);
    }
    if (!eq && dmk_str_is(name, "help")) {
        cli->wish.help = true;
    } else if (!eq && dmk_str_is(name, "version")) {
        cli->wish.version = true;
    } else if (!eq && dmk_str_is(name, "dump-config")) {
        cli->wish.dump = true;
    } else if (!eq && dmk_str_is(name, "document")) {
        cli->wish.document = true;
    } else {
        return dmk_error_set(reterr, -DMK_EINVAL, "--%.*s: unknown option (see %s --help)",
                             (int)name.len, name.data, cli->program->name);
    }
    return 0;
}

/* One pass over the command line. With conf set, positional arguments move to the front. */
static int read_cli(struct cli *cli, struct dmk_error *reterr)
{
    bool only_args = false;

    cli->wish = (struct wish){0};
    for (int i = 1; i < cli->argc; i++) {
        const char *arg = cli->argv[i];
        int ret = 0;

        if (!only_args && strcmp(arg, "--") == 0) {
            only_args = true;
        } else if (!only_args && strcmp(arg, "-h") == 0) {
            cli->wish.help = true;
        } else if (!only_args && strncmp(arg, "--", 2) == 0) {
            ret = read_option(cli, &i, reterr);
        } else if (!only_args && arg[0] == '-' && arg[1] != 0) {
            ret = dmk_error_set(reterr, -DMK_EINVAL, "%s: unknown option (see %s --help)", arg,
                                cli->program->name);
        } else if (!cli->positional) {
            ret = dmk_error_set(reterr, -DMK_EINVAL,
                                "\"%s\": no argument is expected (see %s --help)", arg,
                                cli->program->name);
        } else {
            cli->wish.n_args++;
            if (cli->conf) {
                cli->argv[cli->wish.n_args] = cli->argv[i];
            }
        }
        if (ret < 0) {
            return ret;
        }
    }
    return 0;
}

static int print(const struct dmk_buf *text)
{
    (void)fwrite(text->data, 1, text->len, stdout);
    (void)fflush(stdout);
    return 1;
}

static int answer_wish(const struct cli *cli)
{
    struct dmk_buf text;
    int ret = 0;

    dmk_buf_init(&text, 0);
    if (cli->wish.help) {
        dmk_conf__help(cli->program, &text);
        ret = print(&text);
    } else if (cli->wish.version) {
        dmk_buf_printf(&text, "%s %s\n", cli->program->name, DMK_VERSION);
        ret = print(&text);
    } else if (cli->wish.document) {
        dmk_conf__document(cli->program, &text);
        ret = print(&text);
    } else if (cli->wish.dump && cli->conf) {
        dmk_conf__dump(cli->program, cli->conf, &text);
        ret = print(&text);
    }
    dmk_buf_fini(&text);
    return ret;
}

static int check_required(const struct cli *cli, struct dmk_error *reterr)
{
    for (size_t i = 0; i < cli->program->n_options; i++) {
        const struct dmk_conf_option *opt = &cli->program->options[i];

        if (!opt->def && !cli->given[i]) {
            return dmk_error_set(reterr, -DMK_EINVAL, "--%s is required: %s", opt->name, opt->help);
        }
    }
    return 0;
}

static int load(const struct dmk_conf_program *program, int argc, char **argv, void *conf,
                int *ret_n_args, struct dmk_error *reterr)
{
    struct cli cli = {
        .program = program, .argc = argc, .argv = argv, .positional = ret_n_args != NULL};
    const size_t n = program->n_options;
    int ret;

    ret = read_cli(&cli, reterr);
    if (ret < 0) {
        return ret;
    }
    ret = answer_wish(&cli);
    if (ret != 0) {
        return ret;
    }
    cli.given = calloc(2 * n + 1, sizeof(*cli.given));
    dmk_assert(cli.given);
    cli.cli_given = cli.given + n;
    cli.conf = conf;
    load_defaults(program, conf);
    if (cli.wish.config) {
        ret = dmk_conf__load_file(program, cli.wish.config, conf, cli.given, reterr);
    }
    if (ret == 0) {
        ret = load_env(program, conf, cli.given, reterr);
    }
    if (ret == 0) {
        ret = read_cli(&cli, reterr);
    }
    if (ret == 0) {
        ret = check_required(&cli, reterr);
    }
    if (ret == 0) {
        ret = answer_wish(&cli);
    }
    free(cli.given);
    if (ret == 0 && ret_n_args) {
        *ret_n_args = cli.wish.n_args;
    }
    return ret;
}

int dmk_conf_load(const struct dmk_conf_program *program, int argc, char **argv, void *conf,
                  int *ret_n_args, struct dmk_error *reterr)
{
    struct dmk_conf_program joined = dmk_conf__join(program);
    const int ret = load(&joined, argc, argv, conf, ret_n_args, reterr);

    dmk_conf__join_free(&joined);
    return ret;
}

void dmk_conf_free(const struct dmk_conf_program *program, void *conf)
{
    struct dmk_conf_program joined = dmk_conf__join(program);

    dmk_conf__values_free(&joined, conf);
    dmk_conf__join_free(&joined);
}

void dmk_conf_document(const struct dmk_conf_program *program, struct dmk_buf *out)
{
    struct dmk_conf_program joined = dmk_conf__join(program);

    dmk_conf__document(&joined, out);
    dmk_conf__join_free(&joined);
}
