/* The bodies of Harmony's system and developer messages: sections with one blank line between them, no
 * newline at the end. The order of the sections and every word are part of the format. Any thread. */
#include "common/chat/harmony.h"
#include "common/chat/schema_text.h"

/* Starts the next section of a body that began at from. */
static void begin_section(struct dmk_buf *out, size_t from)
{
    if (out->len > from) {
        dmk_buf_puts(out, "\n\n");
    }
}

static void write_top_line(struct dmk_buf *out, const char *label, struct dmk_str value, bool *any)
{
    if (!dmk_harmony_has(value)) {
        return;
    }
    dmk_buf_puts(out, *any ? "\n" : "");
    dmk_buf_puts(out, label);
    dmk_buf_append_str(out, value);
    *any = true;
}

static void write_channels(const struct dmk_harmony_system *sys, struct dmk_buf *out)
{
    dmk_buf_puts(out, "# Valid channels: ");
    for (size_t i = 0; i < sys->n_channels; i++) {
        dmk_buf_puts(out, i ? ", " : "");
        dmk_buf_append_str(out, sys->channels[i]);
    }
    dmk_buf_putc(out, '.');
    if (sys->channel_required) {
        dmk_buf_puts(out, " Channel must be included for every message.");
    }
    if (sys->has_functions) {
        dmk_buf_puts(out, "\nCalls to these tools must go to the commentary channel: 'functions'.");
    }
}

int dmk_harmony_system_text(const struct dmk_harmony_system *sys, bool library_text,
                            struct dmk_buf *out, struct dmk_error *reterr)
{
    const size_t from = out->len;
    bool any = false;

    write_top_line(out, "", sys->identity, &any);
    write_top_line(out, "Knowledge cutoff: ", sys->cutoff, &any);
    write_top_line(out, "Current date: ", sys->date, &any);
    if (dmk_harmony_has(sys->effort)) {
        dmk_buf_puts(out, any ? "\n\n" : "");
        dmk_buf_puts(out, "Reasoning: ");
        dmk_buf_append_str(out, sys->effort);
    }
    if (sys->n_namespaces) {
        begin_section(out, from);
        const int r =
            dmk_harmony_tools_text(sys->namespaces, sys->n_namespaces, library_text, out, reterr);

        if (r < 0) {
            return r;
        }
    }
    if (sys->n_channels) {
        begin_section(out, from);
        write_channels(sys, out);
    }
    return 0;
}

static int write_format(const struct dmk_harmony_developer *dev, struct dmk_buf *out,
                        struct dmk_error *reterr)
{
    dmk_buf_puts(out, "# Response Formats\n\n## ");
    dmk_buf_append_str(out, dev->format_name);
    dmk_buf_puts(out, "\n\n");
    dmk_comment_lines(out, dev->format_description);
    return dmk_json_text(dev->format_schema, out, reterr);
}

int dmk_harmony_developer_text(const struct dmk_harmony_developer *dev, bool library_text,
                               struct dmk_buf *out, struct dmk_error *reterr)
{
    const size_t from = out->len;
    int r = 0;

    if (dmk_harmony_has(dev->instructions)) {
        dmk_buf_puts(out, "# Instructions\n\n");
        dmk_buf_append_str(out, dev->instructions);
    }
    if (dev->n_namespaces) {
        begin_section(out, from);
        r = dmk_harmony_tools_text(dev->namespaces, dev->n_namespaces, library_text, out, reterr);
    }
    if (r == 0 && dev->format_schema) {
        begin_section(out, from);
        r = write_format(dev, out, reterr);
    }
    return r;
}

static int write_function(const struct dmk_tool *tool, bool library_text, struct dmk_buf *out,
                          struct dmk_error *reterr)
{
    dmk_comment_lines(out, tool->description);
    dmk_buf_puts(out, "type ");
    dmk_buf_append_str(out, tool->name);
    dmk_buf_puts(out, tool->parameters ? " = (_: " : " = (");
    if (tool->parameters) {
        const int r = dmk_schema_text(tool->parameters, library_text, out, reterr);

        if (r < 0) {
            return dmk_error_prefix(reterr, "tool \"%.*s\"", (int)tool->name.len, tool->name.data);
        }
    }
    dmk_buf_puts(out, ") => any;\n\n");
    return 0;
}

static int write_namespace(const struct dmk_harmony_namespace *ns, bool library_text,
                           struct dmk_buf *out, struct dmk_error *reterr)
{
    dmk_buf_puts(out, "## ");
    dmk_buf_append_str(out, ns->name);
    if (ns->n_tools == 0) {
        /* Here the description is text, not a comment. */
        struct dmk_str rest = ns->description;

        dmk_buf_puts(out, "\n");
        while (rest.len) {
            dmk_buf_putc(out, '\n');
            dmk_buf_append_str(out, dmk_take_line(&rest));
        }
        return 0;
    }
    dmk_buf_puts(out, "\n\n");
    dmk_comment_lines(out, ns->description);
    dmk_buf_puts(out, "namespace ");
    dmk_buf_append_str(out, ns->name);
    dmk_buf_puts(out, " {\n\n");
    for (size_t i = 0; i < ns->n_tools; i++) {
        const int r = write_function(&ns->tools[i], library_text, out, reterr);

        if (r < 0) {
            return r;
        }
    }
    dmk_buf_puts(out, "} // namespace ");
    dmk_buf_append_str(out, ns->name);
    return 0;
}

int dmk_harmony_tools_text(const struct dmk_harmony_namespace *namespaces, size_t n_namespaces,
                           bool library_text, struct dmk_buf *out, struct dmk_error *reterr)
{
    dmk_buf_puts(out, "# Tools");
    for (size_t i = 0; i < n_namespaces; i++) {
        dmk_buf_puts(out, "\n\n");
        const int r = write_namespace(&namespaces[i], library_text, out, reterr);

        if (r < 0) {
            return r;
        }
    }
    return 0;
}
