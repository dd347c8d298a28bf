/* What people read: --help, --dump-config (YAML that --config reads back) and the page of
 * documentation. */
#include "common/conf/internal.h"
#include "common/base/assert.h"
#include "common/base/spell.h"

static void put_type(const struct dmk_conf_option *opt, struct dmk_buf *out)
{
    static const char *const names[] = {
        [DMK_CONF_STR] = "text",     [DMK_CONF_BOOL] = "bool",
        [DMK_CONF_U32] = "number",   [DMK_CONF_U64] = "size",
        [DMK_CONF_DOUBLE] = "real",  [DMK_CONF_MS] = "time",
        [DMK_CONF_ENUM] = "word",    [DMK_CONF_STR_LIST] = "list",
        [DMK_CONF_SECRETS] = "list", [DMK_CONF_MEMORY] = "size or share",
    };

    dmk_buf_puts(out, names[opt->type]);
}

void dmk_conf__help(const struct dmk_conf_program *program, struct dmk_buf *out)
{
    dmk_buf_printf(out, "%s: %s\n\nUsage: %s [OPTIONS]%s%s\n\n", program->name, program->summary,
                   program->name, program->usage[0] ? " " : "", program->usage);
    for (size_t i = 0; i < program->n_options; i++) {
        const struct dmk_conf_option *opt = &program->options[i];

        dmk_buf_printf(out, "  --%s", opt->name);
        if (opt->type != DMK_CONF_BOOL) {
            dmk_buf_puts(out, " <");
            put_type(opt, out);
            dmk_buf_putc(out, '>');
        }
        dmk_buf_printf(out, "\n        %s", opt->help);
        dmk_buf_puts(out, "\n        [");
        if (opt->def) {
            dmk_buf_printf(out, "default: %s", opt->def[0] ? opt->def : "none");
        } else {
            dmk_buf_puts(out, "required");
        }
        if (opt->type == DMK_CONF_ENUM || opt->min != 0 || opt->max != 0) {
            dmk_buf_puts(out, "; allowed: ");
            dmk_conf__bound_text(opt, out);
        }
        if (program->env_prefix) {
            char name[256];

            dmk_conf__env_name(program, opt, name, sizeof(name));
            dmk_buf_printf(out, "; env: %s", name);
        }
        dmk_buf_puts(out, "]\n");
    }
    dmk_buf_puts(
        out,
        "\n  --config <file>\n        YAML file of the options above, as lines of name: value.\n"
        "  --dump-config\n        Print the options in effect as such a file and exit.\n"
        "  --version\n  --help\n");
}

bool dmk_conf__is_utf8(const char *text)
{
    uint32_t code;

    for (size_t len; *text; text += len) {
        len = dmk_utf8_get(text, &code);
        if (len == 0) {
            return false;
        }
    }
    return true;
}

/* A YAML double-quoted scalar; everything is written so, which any reader takes. Control characters, line
 * breaks of any kind and what YAML does not take as it is are written as escapes. */
static void put_quoted(const char *text, struct dmk_buf *out)
{
    uint32_t c;
    size_t len;

    dmk_buf_putc(out, '"');
    for (const char *p = text; *p; p += len) {
        len = dmk_utf8_get(p, &c);
        dmk_assert(len > 0); /* values are checked when they are set */
        if (c == '"' || c == '\\') {
            dmk_buf_printf(out, "\\%c", (char)c);
        } else if (c < 0x20 || (c >= 0x7f && c < 0xa0)) {
            dmk_buf_printf(out, "\\x%02x", c);
        } else if (c == 0x2028 || c == 0x2029 || c == 0xfeff || c == 0xfffe || c == 0xffff) {
            dmk_buf_printf(out, "\\u%04x", c);
        } else {
            dmk_buf_append(out, p, len);
        }
    }
    dmk_buf_putc(out, '"');
}

void dmk_conf__dump(const struct dmk_conf_program *program, const void *conf, struct dmk_buf *out)
{
    for (size_t i = 0; i < program->n_options; i++) {
        const struct dmk_conf_option *opt = &program->options[i];

        if (opt->type == DMK_CONF_SECRETS) {
            dmk_buf_printf(out, "# %s: not shown\n", opt->name);
            continue;
        }
        dmk_buf_printf(out, "%s: ", opt->name);
        if (opt->type == DMK_CONF_STR) {
            const char *text = *(char *const *)(const void *)((const char *)conf + opt->offset);

            put_quoted(text ? text : "", out);
        } else if (opt->type == DMK_CONF_STR_LIST) {
            const struct dmk_conf_list *list =
                (const struct dmk_conf_list *)(const void *)((const char *)conf + opt->offset);

            dmk_buf_putc(out, '[');
            for (size_t k = 0; k < list->n; k++) {
                dmk_buf_puts(out, k ? ", " : "");
                put_quoted(list->items[k], out);
            }
            dmk_buf_putc(out, ']');
        } else {
            dmk_conf__value_text(opt, conf, out);
        }
        dmk_buf_putc(out, '\n');
    }
}

void dmk_conf__document(const struct dmk_conf_program *program, struct dmk_buf *out)
{
    dmk_buf_printf(out,
                   "## %s\n\n%s\n\n| option | type | default | allowed | meaning |\n"
                   "| --- | --- | --- | --- | --- |\n",
                   program->name, program->summary);
    for (size_t i = 0; i < program->n_options; i++) {
        const struct dmk_conf_option *opt = &program->options[i];

        dmk_buf_printf(out, "| `%s` | ", opt->name);
        put_type(opt, out);
        if (!opt->def) {
            dmk_buf_puts(out, " | required | ");
        } else if (opt->def[0]) {
            dmk_buf_printf(out, " | `%s` | ", opt->def);
        } else {
            dmk_buf_puts(out, " | | ");
        }
        if (opt->type != DMK_CONF_BOOL) {
            dmk_conf__bound_text(opt, out);
        }
        dmk_buf_puts(out, " | ");
        for (const char *p = opt->help; *p; p++) {
            dmk_buf_puts(out, *p == '|' ? "\\" : "");
            dmk_buf_putc(out, *p);
        }
        dmk_buf_puts(out, " |\n");
    }
    if (program->env_prefix) {
        dmk_buf_printf(out,
                       "\nEnvironment: `%s` and the option's name in capitals with `_` for `-`.\n",
                       program->env_prefix);
    }
}
