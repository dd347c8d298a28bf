/* Configuration: one table per program - name, type, default as text, bounds, one help sentence,
 * offset.
 *
 * From the table come parsing, --help, --dump-config and docs/CONFIG.md. Precedence: file (YAML,
 * --config) < environment (DAMASK_ROUTER_HTTP_PORT) < command line (--http-port 8000,
 * --http-port=8000). Unknown keys and values out of range are refused by name, with the bound.
 * getenv appears only in this folder.
 *
 * Variables with the prefix that name no option are left alone: Kubernetes puts NAME_SERVICE_HOST,
 * NAME_PORT_80_TCP and the like there for each service. Avoid options called "port", "service-port"
 * or "service-host" for that reason.
 *
 * Every program also has --config FILE, --dump-config, --help, --version and --document (the program's
 * part of docs/CONFIG.md). On the command line a
 * bool reads --x, --x=false or --no-x; a list may be given several times, each adds to it. */
#pragma once

#include "common/base/buf.h"
#include "common/base/error.h"

enum dmk_conf_type {
    DMK_CONF_STR,      /* char * (owned by the conf) */
    DMK_CONF_BOOL,     /* bool */
    DMK_CONF_U32,      /* uint32_t */
    DMK_CONF_U64,      /* uint64_t; accepts k, M, G, Ki, Mi, Gi */
    DMK_CONF_MEMORY,   /* struct dmk_conf_memory: as U64, or a share of what there is, as 90% */
    DMK_CONF_DOUBLE,   /* double, finite */
    DMK_CONF_MS,       /* uint64_t milliseconds; accepts 100ms, 5s, 2m, 1h, and 0 */
    DMK_CONF_ENUM,     /* uint32_t index into words */
    DMK_CONF_STR_LIST, /* struct dmk_conf_list; comma-separated, or a YAML list */
    DMK_CONF_SECRETS,  /* the same, and never printed */
};

struct dmk_conf_memory {
    uint64_t bytes; /* 0 with a share */
    double percent; /* above 0, at most 100; 0: bytes says it */
};

struct dmk_conf_list {
    char **items;
    size_t n;
};

struct dmk_conf_option {
    const char *name; /* "http-port"; in files the same word, in the environment HTTP_PORT */
    enum dmk_conf_type type;
    const char *def;          /* default as text; NULL = required */
    double min, max;          /* numbers (ms for times; items for lists); both 0 = no bounds */
    const char *const *words; /* enum: NULL-terminated */
    const char *help;
    size_t offset; /* into the program's struct */
};

/* Rows that several programs have, and where their struct lies in that of the program. */
struct dmk_conf_part {
    const struct dmk_conf_option *options;
    size_t n_options;
    size_t offset;
};

/* Another default for a row of a part, and another help unless that is NULL. */
struct dmk_conf_change {
    const char *name, *def, *help;
};

/* Its rows stand in options, or in parts one after the other. */
struct dmk_conf_program {
    const char *name;       /* "damask-router" */
    const char *summary;    /* one line */
    const char *usage;      /* positional arguments, or "" */
    const char *env_prefix; /* "DAMASK_ROUTER_" or NULL */
    const struct dmk_conf_option *options;
    size_t n_options;
    const struct dmk_conf_part *const *parts; /* ends with NULL; NULL = options */
    const struct dmk_conf_change *changes;
    size_t n_changes;
};

/* Fills *conf (zeroed by the caller). Returns 0; 1 when --help, --version, --dump-config or --document was
 * answered on stdout (the caller exits 0); negative with a sentence. Positional arguments: their
 * number in *ret_n_args and argv[i] moved to the front from index 1, when ret_n_args is given; else
 * refused. Whatever is returned, dmk_conf_free may be called after. */
int dmk_conf_load(const struct dmk_conf_program *program, int argc, char **argv, void *conf,
                  int *ret_n_args, struct dmk_error *reterr);
void dmk_conf_free(const struct dmk_conf_program *program, void *conf);
/* Markdown table for docs/CONFIG.md. */
void dmk_conf_document(const struct dmk_conf_program *program, struct dmk_buf *out);
