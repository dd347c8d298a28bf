/* One option's value: from text with all its checks, and back to text. Pure but for memory. */
#include "common/conf/internal.h"
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include "common/base/assert.h"

struct unit {
    const char *word;
    uint64_t factor;
};

static const struct unit size_units[] = {
    {"", 1},
    {"k", 1000},
    {"M", 1000000},
    {"G", 1000000000},
    {"Ki", 1ull << 10},
    {"Mi", 1ull << 20},
    {"Gi", 1ull << 30},
    {NULL, 0},
};
static const struct unit time_units[] = {
    {"ms", 1}, {"s", 1000}, {"m", 60000}, {"h", 3600000}, {NULL, 0},
};
static const struct unit no_units[] = {{"", 1}, {NULL, 0}};

static void *field(const struct dmk_conf_option *opt, void *conf)
{
    return (char *)conf + opt->offset;
}

static bool is_bounded(const struct dmk_conf_option *opt)
{
    return opt->min != 0 || opt->max != 0;
}

/* A whole number with a unit; false when it is none or does not fit. */
static bool parse_whole(const char *text, const struct unit *units, uint64_t *ret)
{
    char *end;
    uint64_t v;

    if (text[0] < '0' || text[0] > '9') {
        return false; /* strtoull would take signs and spaces */
    }
    errno = 0;
    v = strtoull(text, &end, 10);
    if (errno != 0) {
        return false;
    }
    if (v == 0 && *end == '\0') {
        *ret = 0; /* the only number that is the same in all units */
        return true;
    }
    for (const struct unit *u = units; u->word; u++) {
        if (strcmp(end, u->word) == 0) {
            return !__builtin_mul_overflow(v, u->factor, ret);
        }
    }
    return false;
}

static bool parse_double(const char *text, double *ret)
{
    char *end;
    double v;

    if (text[0] == 0 || strchr(" \t\n\v\f\r", text[0])) {
        return false;
    }
    v = strtod(text, &end);
    if (*end != 0 || !isfinite(v)) {
        return false;
    }
    *ret = v;
    return true;
}

static bool parse_bool(const char *text, bool *ret)
{
    static const char *const yes[] = {"true", "yes", "on", "1"};
    static const char *const no[] = {"false", "no", "off", "0"};

    for (size_t i = 0; i < sizeof(yes) / sizeof(yes[0]); i++) {
        if (strcmp(text, yes[i]) == 0 || strcmp(text, no[i]) == 0) {
            *ret = strcmp(text, yes[i]) == 0;
            return true;
        }
    }
    return false;
}

void dmk_conf__bound_text(const struct dmk_conf_option *opt, struct dmk_buf *out)
{
    if (opt->type == DMK_CONF_ENUM) {
        for (size_t i = 0; opt->words[i]; i++) {
            dmk_buf_printf(out, "%s%s", i ? ", " : "", opt->words[i]);
        }
    } else if (opt->type == DMK_CONF_BOOL) {
        dmk_buf_puts(out, "true, false");
    } else if (is_bounded(opt)) {
        dmk_buf_printf(out, "%.10g to %.10g", opt->min, opt->max);
        if (opt->type == DMK_CONF_MS) {
            dmk_buf_puts(out, " ms");
        } else if (dmk_conf__is_list(opt)) {
            dmk_buf_puts(out, " items");
        }
    }
}

static int refuse(const struct dmk_conf_option *opt, const char *text, const char *where,
                  const char *what, struct dmk_error *reterr)
{
    struct dmk_buf bound;
    int ret;

    dmk_buf_init(&bound, 0);
    dmk_conf__bound_text(opt, &bound);
    if (bound.len > 0) {
        ret = dmk_error_set(reterr, -DMK_EINVAL, "%s: \"%s\" is not %s (allowed: %s)", where, text,
                            what, bound.data);
    } else {
        ret = dmk_error_set(reterr, -DMK_EINVAL, "%s: \"%s\" is not %s", where, text, what);
    }
    dmk_buf_fini(&bound);
    return ret;
}

static int check_range(const struct dmk_conf_option *opt, double v, const char *text,
                       const char *where, struct dmk_error *reterr)
{
    if (is_bounded(opt) && (v < opt->min || v > opt->max)) {
        return refuse(opt, text, where, "in range", reterr);
    }
    return 0;
}

static int set_whole(const struct dmk_conf_option *opt, const char *text, void *conf,
                     const char *where, struct dmk_error *reterr)
{
    const bool small = opt->type == DMK_CONF_U32;
    const bool time = opt->type == DMK_CONF_MS;
    uint64_t v;
    int ret;

    if (!parse_whole(text,
                     small  ? no_units
                     : time ? time_units
                            : size_units,
                     &v) ||
        (small && v > UINT32_MAX)) {
        return refuse(opt, text, where,
                      time    ? "a time with its unit (like 100ms, 5s, 2m, 1h)"
                      : small ? "a whole number"
                              : "a whole number (units k, M, G, Ki, Mi, Gi)",
                      reterr);
    }
    ret = check_range(opt, (double)v, text, where, reterr);
    if (ret < 0) {
        return ret;
    }
    if (small) {
        *(uint32_t *)field(opt, conf) = (uint32_t)v;
    } else {
        *(uint64_t *)field(opt, conf) = v;
    }
    return 0;
}

static int set_memory(const struct dmk_conf_option *opt, const char *text, void *conf,
                      const char *where, struct dmk_error *reterr)
{
    struct dmk_conf_memory *memory = field(opt, conf);
    const size_t len = strlen(text);
    char digits[32];
    double percent;
    uint64_t bytes;

    if (parse_whole(text, size_units, &bytes)) {
        *memory = (struct dmk_conf_memory){.bytes = bytes};
        return 0;
    }
    if (len > 1 && len <= sizeof(digits) && text[len - 1] == '%') {
        memcpy(digits, text, len - 1);
        digits[len - 1] = 0;
        if (parse_double(digits, &percent) && percent > 0 && percent <= 100) {
            *memory = (struct dmk_conf_memory){.percent = percent};
            return 0;
        }
    }
    return refuse(opt, text, where,
                  "a size (like 40Gi; units k, M, G, Ki, Mi, Gi) or a share (like 90%, above 0 and "
                  "at most 100%)",
                  reterr);
}

void dmk_conf__list_add(struct dmk_conf_list *list, const char *text, size_t len)
{
    list->items = realloc(list->items, (list->n + 1) * sizeof(*list->items));
    dmk_assert(list->items);
    list->items[list->n] = strndup(text, len);
    dmk_assert(list->items[list->n]);
    list->n++;
}

void dmk_conf__list_clear(struct dmk_conf_list *list)
{
    for (size_t i = 0; i < list->n; i++) {
        free(list->items[i]);
    }
    free(list->items);
    *list = (struct dmk_conf_list){0};
}

static int set_list(const struct dmk_conf_option *opt, const char *text, bool add, void *conf,
                    const char *where, struct dmk_error *reterr)
{
    struct dmk_conf_list *list = field(opt, conf);
    const char *p = text;

    if (!add) {
        dmk_conf__list_clear(list);
    }
    while (*p) {
        const size_t len = strcspn(p, ",");

        if (len == 0) {
            return dmk_error_set(reterr, -DMK_EINVAL, "%s: \"%s\" has an empty item", where, text);
        }
        dmk_conf__list_add(list, p, len);
        p += len;
        if (p[0] == ',') {
            p++;
        }
    }
    return check_range(opt, (double)list->n, text, where, reterr);
}

int dmk_conf__set(const struct dmk_conf_option *opt, const char *text, bool add, void *conf,
                  const char *where, struct dmk_error *reterr)
{
    double d;
    int ret;

    if (!dmk_conf__is_utf8(text)) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s: the value is not UTF-8 text", where);
    }
    switch (opt->type) {
    case DMK_CONF_STR: {
        char **str = field(opt, conf);

        free(*str);
        *str = strdup(text);
        dmk_assert(*str);
        return 0;
    }
    case DMK_CONF_BOOL:
        return parse_bool(text, field(opt, conf)) ? 0
                                                  : refuse(opt, text, where, "yes or no", reterr);
    case DMK_CONF_U32:
    case DMK_CONF_U64:
    case DMK_CONF_MS:
        return set_whole(opt, text, conf, where, reterr);
    case DMK_CONF_MEMORY:
        return set_memory(opt, text, conf, where, reterr);
    case DMK_CONF_DOUBLE:
        if (!parse_double(text, &d)) {
            return refuse(opt, text, where, "a finite number", reterr);
        }
        ret = check_range(opt, d, text, where, reterr);
        if (ret == 0) {
            *(double *)field(opt, conf) = d;
        }
        return ret;
    case DMK_CONF_ENUM:
        for (uint32_t i = 0; opt->words[i]; i++) {
            if (strcmp(text, opt->words[i]) == 0) {
                *(uint32_t *)field(opt, conf) = i;
                return 0;
            }
        }
        return refuse(opt, text, where, "one of the words", reterr);
    case DMK_CONF_STR_LIST:
    case DMK_CONF_SECRETS:
        return set_list(opt, text, add, conf, where, reterr);
    }
    dmk_unreachable("option type");
}

void dmk_conf__value_text(const struct dmk_conf_option *opt, const void *conf, struct dmk_buf *out)
{
    const void *v = (const char *)conf + opt->offset;

    switch (opt->type) {
    case DMK_CONF_STR:
        dmk_buf_puts(out, *(char *const *)v ? *(char *const *)v : "");
        break;
    case DMK_CONF_BOOL:
        dmk_buf_puts(out, *(const bool *)v ? "true" : "false");
        break;
    case DMK_CONF_U32:
        dmk_buf_printf(out, "%" PRIu32, *(const uint32_t *)v);
        break;
    case DMK_CONF_U64:
        dmk_buf_printf(out, "%" PRIu64, *(const uint64_t *)v);
        break;
    case DMK_CONF_MEMORY: {
        const struct dmk_conf_memory *memory = v;

        if (memory->percent > 0) {
            dmk_buf_printf(out, "%.17g%%", memory->percent);
        } else {
            dmk_buf_printf(out, "%" PRIu64, memory->bytes);
        }
        break;
    }
    case DMK_CONF_MS:
        dmk_buf_printf(out, "%" PRIu64 "ms", *(const uint64_t *)v);
        break;
    case DMK_CONF_DOUBLE:
        dmk_buf_printf(out, "%.17g", *(const double *)v);
        break;
    case DMK_CONF_ENUM:
        dmk_buf_puts(out, opt->words[*(const uint32_t *)v]);
        break;
    case DMK_CONF_SECRETS:
        break;
    case DMK_CONF_STR_LIST: {
        const struct dmk_conf_list *list = v;

        for (size_t i = 0; i < list->n; i++) {
            dmk_buf_printf(out, "%s%s", i ? "," : "", list->items[i]);
        }
        break;
    }
    }
}

void dmk_conf__values_free(const struct dmk_conf_program *program, void *conf)
{
    for (size_t i = 0; i < program->n_options; i++) {
        const struct dmk_conf_option *opt = &program->options[i];

        if (opt->type == DMK_CONF_STR) {
            char **str = field(opt, conf);

            free(*str);
            *str = NULL;
        } else if (dmk_conf__is_list(opt)) {
            dmk_conf__list_clear(field(opt, conf));
        }
    }
}
