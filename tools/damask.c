/* One tool with subcommands for people who run or develop the cluster. */
#include "tools/damask.h"

#include <stdio.h>
#include <string.h>
#include "common/base/log.h"

static const struct command {
    const char *name;
    const char *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"chat", "conversations to token ids, token ids to messages", dmk_cmd_chat},
    {"convert", "cut a checkpoint into aligned files for the ranks of a worker", dmk_cmd_convert},
    {"mock", "a worker without a model: the real protocol at a configured speed", dmk_cmd_mock},
    {"expand", "write the checkpoint that a compact one stands for", dmk_cmd_expand},
    {"tinymodel", "write a gpt-oss checkpoint with seeded weights, of any size", dmk_cmd_tinymodel},
    {"tokenize", "turn text into token ids, or ids into text", dmk_cmd_tokenize},
};

#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

static void print_help(FILE *out)
{
    (void)fprintf(out, "usage: damask COMMAND [options]\n\n");
    for (size_t i = 0; i < N_COMMANDS; i++) {
        (void)fprintf(out, "  %-12s %s\n", commands[i].name, commands[i].summary);
    }
    (void)fprintf(out, "\ndamask COMMAND --help lists the options of a command.\n");
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";

    dmk_log_init("damask", DMK_LOG_INFO, false);
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        print_help(stdout);
        return 0;
    }
    if (strcmp(name, "--version") == 0) {
        (void)printf("damask %s\n", DMK_VERSION);
        return 0;
    }
    for (size_t i = 0; i < N_COMMANDS; i++) {
        if (strcmp(name, commands[i].name) == 0) {
            return commands[i].run(argc - 1, argv + 1);
        }
    }
    if (name[0]) {
        (void)fprintf(stderr, "damask: no command is called \"%s\"\n\n", name);
    }
    print_help(stderr);
    return 2;
}
