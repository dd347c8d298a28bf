/* The `damask` tool: subcommands are functions in files cmd_*.c, listed in damask.c. */
#pragma once

/* argv[0] is the subcommand's name. The return value is the process's exit status. */
int dmk_cmd_chat(int argc, char **argv);
int dmk_cmd_convert(int argc, char **argv);
int dmk_cmd_mock(int argc, char **argv);
int dmk_cmd_expand(int argc, char **argv);
int dmk_cmd_tinymodel(int argc, char **argv);
int dmk_cmd_tokenize(int argc, char **argv);
