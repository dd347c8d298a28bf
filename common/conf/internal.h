/* What the files of this folder share. */
#pragma once

#include "common/conf/conf.h"

static inline bool dmk_conf__is_list(const struct dmk_conf_option *opt)
{
    return opt->type == DMK_CONF_STR_LIST || opt->type == DMK_CONF_SECRETS;
}

/* Sets one option from text. where names the source for the sentence ("--x", "file a.yaml line 3:
 * x"). add: a list keeps what it holds. */
int dmk_conf__set(const struct dmk_conf_option *opt, const char *text, bool add, void *conf,
                  const char *where, struct dmk_error *reterr);
void dmk_conf__list_add(struct dmk_conf_list *list, const char *text, size_t len);
void dmk_conf__list_clear(struct dmk_conf_list *list);
/* Whether text is UTF-8: what every value that is text must be, so that it can be printed and read back. */
bool dmk_conf__is_utf8(const char *text);
/* The bound or the words, as people read it; "" when there is none. */
void dmk_conf__bound_text(const struct dmk_conf_option *opt, struct dmk_buf *out);
/* A value in the form dmk_conf__set reads. */
void dmk_conf__value_text(const struct dmk_conf_option *opt, const void *conf, struct dmk_buf *out);
/* "DAMASK_ROUTER_" + "http-port" = "DAMASK_ROUTER_HTTP_PORT". */
void dmk_conf__env_name(const struct dmk_conf_program *program, const struct dmk_conf_option *opt,
                        char *ret_name, size_t cap);
const struct dmk_conf_option *dmk_conf__find(const struct dmk_conf_program *program,
                                             struct dmk_str name);

/* given: [n_options], all false; true for what the file sets. */
int dmk_conf__load_file(const struct dmk_conf_program *program, const char *path, void *conf,
                        bool *given, struct dmk_error *reterr);

/* The program with all its rows in options, as the functions above and below want it; its own copy of them when they
 * come in parts. */
struct dmk_conf_program dmk_conf__join(const struct dmk_conf_program *program);
void dmk_conf__join_free(struct dmk_conf_program *joined);

void dmk_conf__help(const struct dmk_conf_program *program, struct dmk_buf *out);
void dmk_conf__document(const struct dmk_conf_program *program, struct dmk_buf *out);
void dmk_conf__values_free(const struct dmk_conf_program *program, void *conf);
void dmk_conf__dump(const struct dmk_conf_program *program, const void *conf, struct dmk_buf *out);
