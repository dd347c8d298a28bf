/* The YAML file: one flat mapping of option names to scalars, or to lists of scalars for list
 * options. Read by libyaml's parser as events, so that every complaint has its line. Bounded: 1
 * MiB. */
#include "common/conf/internal.h"
#include <stdio.h>
#include <yaml.h>
#include "common/base/assert.h"

#define MAX_FILE_BYTES (1u << 20)

struct reader {
    const struct dmk_conf_program *program;
    const char *path;
    void *conf;
    yaml_parser_t parser;
    yaml_event_t event; /* the current one, owned */
    bool *given;        /* [n_options] */
    struct dmk_error *reterr;
};

static unsigned long line_of(const struct reader *r)
{
    return (unsigned long)r->event.start_mark.line + 1;
}

static int next_event(struct reader *r)
{
    yaml_event_delete(&r->event);
    if (!yaml_parser_parse(&r->parser, &r->event)) {
        return dmk_error_set(r->reterr, -DMK_EFORMAT, "file %s line %lu: %s", r->path,
                             (unsigned long)r->parser.problem_mark.line + 1,
                             r->parser.problem ? r->parser.problem : "not YAML");
    }
    if (r->event.type == YAML_ALIAS_EVENT) {
        return dmk_error_set(r->reterr, -DMK_EFORMAT, "file %s line %lu: aliases are not supported",
                             r->path, line_of(r));
    }
    return 0;
}

static const char *scalar_text(const struct reader *r)
{
    const char *text = (const char *)r->event.data.scalar.value;

    /* A value with a NUL inside would be cut; none of ours has one. */
    return strlen(text) == r->event.data.scalar.length ? text : NULL;
}

static int read_list(struct reader *r, const struct dmk_conf_option *opt, const char *where)
{
    struct dmk_conf_list *list = (struct dmk_conf_list *)(void *)((char *)r->conf + opt->offset);
    int ret;

    dmk_conf__list_clear(list);
    for (;;) {
        const char *text;

        ret = next_event(r);
        if (ret < 0) {
            return ret;
        }
        if (r->event.type == YAML_SEQUENCE_END_EVENT) {
            break;
        }
        text = r->event.type == YAML_SCALAR_EVENT ? scalar_text(r) : NULL;
        if (!text || !*text) {
            return dmk_error_set(r->reterr, -DMK_EFORMAT, "%s: every item must be plain text",
                                 where);
        }
        dmk_conf__list_add(list, text, strlen(text));
    }
    if ((opt->min != 0 || opt->max != 0) &&
        ((double)list->n < opt->min || (double)list->n > opt->max)) {
        return dmk_error_set(r->reterr, -DMK_EINVAL, "%s: has %zu items (allowed: %.10g to %.10g)",
                             where, list->n, opt->min, opt->max);
    }
    return 0;
}

/* The current event is a key. */
static int read_entry(struct reader *r)
{
    const struct dmk_conf_option *opt;
    const char *key = r->event.type == YAML_SCALAR_EVENT ? scalar_text(r) : NULL;
    char where[512];
    const char *text;
    int ret;

    if (!key) {
        return dmk_error_set(r->reterr, -DMK_EFORMAT, "file %s line %lu: keys must be plain words",
                             r->path, line_of(r));
    }
    (void)snprintf(where, sizeof(where), "file %s line %lu: %s", r->path, line_of(r), key);
    opt = dmk_conf__find(r->program, dmk_str_from(key));
    if (!opt) {
        return dmk_error_set(r->reterr, -DMK_EINVAL, "%s: unknown key (see %s --help)", where,
                             r->program->name);
    }
    if (r->given[opt - r->program->options]) {
        return dmk_error_set(r->reterr, -DMK_EINVAL, "%s: given twice", where);
    }
    r->given[opt - r->program->options] = true;
    ret = next_event(r);
    if (ret < 0) {
        return ret;
    }
    if (r->event.type == YAML_SEQUENCE_START_EVENT && dmk_conf__is_list(opt)) {
        return read_list(r, opt, where);
    }
    text = r->event.type == YAML_SCALAR_EVENT ? scalar_text(r) : NULL;
    if (!text) {
        return dmk_error_set(r->reterr, -DMK_EFORMAT, "%s: must be %s", where,
                             dmk_conf__is_list(opt) ? "a list or plain text" : "plain text");
    }
    return dmk_conf__set(opt, text, false, r->conf, where, r->reterr);
}

static int read_document(struct reader *r)
{
    int ret;

    do { /* stream start, document start; an empty file has only the former */
        ret = next_event(r);
        if (ret < 0) {
            return ret;
        }
        if (r->event.type == YAML_STREAM_END_EVENT) {
            return 0;
        }
    } while (r->event.type != YAML_DOCUMENT_START_EVENT);
    ret = next_event(r);
    if (ret < 0) {
        return ret;
    }
    if (r->event.type == YAML_SCALAR_EVENT && r->event.data.scalar.length == 0) {
        return 0; /* "---" and nothing else */
    }
    if (r->event.type != YAML_MAPPING_START_EVENT) {
        return dmk_error_set(r->reterr, -DMK_EFORMAT,
                             "file %s line %lu: must be lines of \"name: value\"", r->path,
                             line_of(r));
    }
    for (;;) {
        ret = next_event(r);
        if (ret < 0) {
            return ret;
        }
        if (r->event.type == YAML_MAPPING_END_EVENT) {
            break;
        }
        ret = read_entry(r);
        if (ret < 0) {
            return ret;
        }
    }
    do {
        ret = next_event(r);
        if (ret < 0) {
            return ret;
        }
        if (r->event.type == YAML_DOCUMENT_START_EVENT) {
            return dmk_error_set(r->reterr, -DMK_EFORMAT, "file %s line %lu: a second document",
                                 r->path, line_of(r));
        }
    } while (r->event.type != YAML_STREAM_END_EVENT);
    return 0;
}

static int read_file(const char *path, struct dmk_buf *out, struct dmk_error *reterr)
{
    FILE *file = fopen(path, "rbe");
    char chunk[4096];
    size_t n;
    int ret = 0;

    if (!file) {
        return dmk_error_set(reterr, -DMK_ENOENT, "configuration file \"%s\" can not be opened: %m",
                             path);
    }
    while ((n = fread(chunk, 1, sizeof(chunk), file)) > 0) {
        dmk_buf_append(out, chunk, n);
    }
    if (ferror(file)) {
        ret =
            dmk_error_set(reterr, -DMK_EIO, "configuration file \"%s\" can not be read: %m", path);
    } else if (out->failed) {
        ret = dmk_error_set(reterr, -DMK_EFULL, "configuration file \"%s\" is larger than %u bytes",
                            path, MAX_FILE_BYTES);
    }
    (void)fclose(file);
    return ret;
}

int dmk_conf__load_file(const struct dmk_conf_program *program, const char *path, void *conf,
                        bool *given, struct dmk_error *reterr)
{
    struct reader r = {
        .program = program, .path = path, .conf = conf, .given = given, .reterr = reterr};
    struct dmk_buf text;
    int ret;

    dmk_buf_init(&text, MAX_FILE_BYTES);
    ret = read_file(path, &text, reterr);
    if (ret < 0) {
        goto out;
    }
    dmk_assert(yaml_parser_initialize(&r.parser));
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)dmk_buf_str(&text).data,
                                 text.len);
    ret = read_document(&r);
    yaml_event_delete(&r.event);
    yaml_parser_delete(&r.parser);
out:
    dmk_buf_fini(&text);
    return ret;
}
