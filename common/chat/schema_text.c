/* JSON schema to type text, as the model was trained to read it.
 *
 * The rules are openai-harmony 0.0.8's, oddities included (an object's description appears twice, an enum
 * inside an array has no parentheses, unknown keywords are dropped). One function per rule; the order of
 * the rules in write_type is part of the format. Recursion is bounded. Any thread. */
#include "common/chat/schema_text.h"

#include "common/json/json.h"

struct writer {
    struct dmk_buf *out;
    bool library_text;
    struct dmk_error *reterr;
};

static int write_type(struct writer *w, const json_t *schema, unsigned indent, unsigned depth);

static void write_indent(struct writer *w, unsigned indent)
{
    for (unsigned i = 0; i < indent; i++) {
        dmk_buf_putc(w->out, ' ');
    }
}

static struct dmk_str string_of(const json_t *value)
{
    return (struct dmk_str){json_string_value(value), json_string_length(value)};
}

/* The member's text, or data == NULL when it is absent or no string. */
static struct dmk_str string_member(const json_t *schema, const char *key)
{
    const json_t *value = json_object_get(schema, key);

    return json_is_string(value) ? string_of(value) : (struct dmk_str){NULL, 0};
}

static bool is_enum(const json_t *schema)
{
    return json_array_size(json_object_get(schema, "enum")) > 0;
}

struct dmk_str dmk_take_line(struct dmk_str *text)
{
    const char *lf = memchr(text->data, '\n', text->len);
    struct dmk_str line = {text->data, lf ? (size_t)(lf - text->data) : text->len};

    text->data += lf ? line.len + 1 : line.len;
    text->len -= lf ? line.len + 1 : line.len;
    if (lf && line.len && line.data[line.len - 1] == '\r') {
        line.len--;
    }
    return line;
}

void dmk_comment_lines(struct dmk_buf *out, struct dmk_str text)
{
    while (text.len) {
        dmk_buf_puts(out, "// ");
        dmk_buf_append_str(out, dmk_take_line(&text));
        dmk_buf_putc(out, '\n');
    }
}

/* A description where one line is expected: later lines start a comment of their own. */
static void write_description(struct writer *w, struct dmk_str text, unsigned indent)
{
    if (w->library_text || !text.len) {
        dmk_buf_append_str(w->out, text);
        return;
    }
    dmk_buf_append_str(w->out, dmk_take_line(&text));
    while (text.len) {
        dmk_buf_putc(w->out, '\n');
        write_indent(w, indent);
        dmk_buf_puts(w->out, "// ");
        dmk_buf_append_str(w->out, dmk_take_line(&text));
    }
}

static void write_description_line(struct writer *w, struct dmk_str text, unsigned indent)
{
    write_indent(w, indent);
    dmk_buf_puts(w->out, "// ");
    write_description(w, text, indent);
    dmk_buf_putc(w->out, '\n');
}

/* "default: V". A string that is one of an enum's is a bare word, except where quote_enum. */
static int write_default(struct writer *w, const json_t *schema, bool quote_enum)
{
    const json_t *value = json_object_get(schema, "default");

    dmk_buf_puts(w->out, "default: ");
    if (json_is_string(value) && !is_enum(schema)) {
        dmk_buf_putc(w->out, '"');
        dmk_buf_append_str(w->out, string_of(value));
        dmk_buf_putc(w->out, '"');
        return 0;
    }
    if (json_is_string(value) && !quote_enum) {
        dmk_buf_append_str(w->out, string_of(value));
        return 0;
    }
    return dmk_json_text(value, w->out, w->reterr);
}

/* The type, and " | null" when the schema is nullable and the text has no "null" so far. */
static int write_nullable_type(struct writer *w, const json_t *schema, unsigned indent,
                               unsigned depth)
{
    const size_t from = w->out->len;
    const int r = write_type(w, schema, indent, depth);

    if (r < 0) {
        return r;
    }
    if (json_is_true(json_object_get(schema, "nullable")) && !w->out->failed &&
        !memmem(w->out->data + from, w->out->len - from, "null", 4)) {
        dmk_buf_puts(w->out, " | null");
    }
    return 0;
}

/* " // DESCRIPTION default: V" behind a variant; nothing when there is neither. */
static int write_variant_comment(struct writer *w, const json_t *variant,
                                 struct dmk_str description, unsigned indent, bool quote_enum)
{
    const bool has_default = json_object_get(variant, "default") != NULL;

    if (!description.data && !has_default) {
        return 0;
    }
    dmk_buf_puts(w->out, " // ");
    if (description.data) {
        write_description(w, description, indent);
        if (has_default) {
            dmk_buf_putc(w->out, ' ');
        }
    }
    return has_default ? write_default(w, variant, quote_enum) : 0;
}

/* Rule 1: oneOf anywhere but in a property. */
static int write_variants(struct writer *w, const json_t *variants, unsigned indent, unsigned depth)
{
    for (size_t i = 0; i < json_array_size(variants); i++) {
        const json_t *variant = json_array_get(variants, i);

        dmk_buf_putc(w->out, '\n');
        write_indent(w, indent);
        dmk_buf_puts(w->out, " | ");
        int r = write_nullable_type(w, variant, indent + 3, depth + 1);

        if (r == 0) {
            r = write_variant_comment(w, variant, string_member(variant, "description"), indent,
                                      true);
        }
        if (r < 0) {
            return r;
        }
    }
    return 0;
}

/* Rule 2: a list of type names; false when there is no name in it. */
static bool write_type_list(struct writer *w, const json_t *types)
{
    bool any = false;

    for (size_t i = 0; i < json_array_size(types); i++) {
        const json_t *type = json_array_get(types, i);

        if (!json_is_string(type)) {
            continue;
        }
        if (any) {
            dmk_buf_puts(w->out, " | ");
        }
        any = true;
        if (dmk_str_is(string_of(type), "integer")) {
            dmk_buf_puts(w->out, "number");
        } else {
            dmk_buf_append_str(w->out, string_of(type));
        }
    }
    return any;
}

/* Rule 4. */
static void write_string_type(struct writer *w, const json_t *schema)
{
    const json_t *values = json_object_get(schema, "enum");
    bool any = false;

    for (size_t i = 0; i < json_array_size(values); i++) {
        const json_t *value = json_array_get(values, i);

        if (!json_is_string(value)) {
            continue;
        }
        dmk_buf_puts(w->out, any ? " | \"" : "\"");
        dmk_buf_append_str(w->out, string_of(value));
        dmk_buf_putc(w->out, '"');
        any = true;
    }
    if (!any) {
        dmk_buf_puts(w->out, "string");
    }
}

/* The names in "required" as the keys of an object, for a look-up that does not scan. */
static json_t *set_of_names(const json_t *required)
{
    json_t *set = json_object();

    for (size_t i = 0; set && i < json_array_size(required); i++) {
        const char *name = json_string_value(json_array_get(required, i));

        if (name && json_object_set_new(set, name, json_true()) < 0) {
            json_decref(set);
            return NULL;
        }
    }
    return set;
}

static void write_examples(struct writer *w, const json_t *examples, unsigned indent)
{
    if (json_array_size(examples) == 0) {
        return;
    }
    write_indent(w, indent);
    dmk_buf_puts(w->out, "// Examples:\n");
    for (size_t i = 0; i < json_array_size(examples); i++) {
        const json_t *example = json_array_get(examples, i);

        if (json_is_string(example)) {
            write_indent(w, indent);
            dmk_buf_puts(w->out, "// - \"");
            dmk_buf_append_str(w->out, string_of(example));
            dmk_buf_puts(w->out, "\"\n");
        }
    }
}

/* "KEY:" and the variants, one a line. The property's description stands above unless the first variant has
 * the same one; a variant's own stands behind it unless it was said already. */
static int write_variant_property(struct writer *w, const char *key, const json_t *schema,
                                  const json_t *variants, bool required, unsigned indent,
                                  unsigned depth)
{
    const struct dmk_str description = string_member(schema, "description");
    const struct dmk_str first = string_member(json_array_get(variants, 0), "description");
    const bool above = description.data && !(first.data && dmk_str_equal(description, first));
    int r = 0;

    if (above) {
        write_description_line(w, description, indent);
    }
    if (json_object_get(schema, "default")) {
        write_indent(w, indent);
        dmk_buf_puts(w->out, "// ");
        r = write_default(w, schema, false);
        dmk_buf_putc(w->out, '\n');
    }
    write_indent(w, indent);
    dmk_buf_puts(w->out, key);
    dmk_buf_puts(w->out, required ? ":\n" : "?:\n");
    for (size_t i = 0; r == 0 && i < json_array_size(variants); i++) {
        const json_t *variant = json_array_get(variants, i);
        struct dmk_str own = string_member(variant, "description");

        if ((i == 0 && above) ||
            (own.data && description.data && dmk_str_equal(own, description))) {
            own = (struct dmk_str){NULL, 0};
        }
        write_indent(w, indent);
        dmk_buf_puts(w->out, " | ");
        r = write_nullable_type(w, variant, indent + 3, depth + 1);
        if (r == 0) {
            r = write_variant_comment(w, variant, own, indent, false);
        }
        dmk_buf_putc(w->out, '\n');
    }
    write_indent(w, indent);
    dmk_buf_puts(w->out, ",\n");
    return r;
}

static int write_property(struct writer *w, const char *key, const json_t *schema, bool required,
                          unsigned indent, unsigned depth)
{
    const json_t *variants = json_object_get(schema, "oneOf");
    const struct dmk_str title = string_member(schema, "title");
    const struct dmk_str description = string_member(schema, "description");

    if (title.data) {
        write_indent(w, indent);
        dmk_buf_puts(w->out, "// ");
        dmk_buf_append_str(w->out, title);
        dmk_buf_putc(w->out, '\n');
        write_indent(w, indent);
        dmk_buf_puts(w->out, "//\n");
    }
    if (description.data && !variants) {
        write_description_line(w, description, indent);
    }
    write_examples(w, json_object_get(schema, "examples"), indent);
    if (json_is_array(variants)) {
        return write_variant_property(w, key, schema, variants, required, indent, depth);
    }
    write_indent(w, indent);
    dmk_buf_puts(w->out, key);
    dmk_buf_puts(w->out, required ? ": " : "?: ");
    int r = write_nullable_type(w, schema, indent + 4, depth + 1);

    dmk_buf_putc(w->out, ',');
    if (r == 0 && !variants && json_object_get(schema, "default")) {
        dmk_buf_puts(w->out, " // ");
        r = write_default(w, schema, false);
    }
    dmk_buf_putc(w->out, '\n');
    return r;
}

/* Rule 3: properties in the order of the document. */
static int write_object(struct writer *w, const json_t *schema, unsigned indent, unsigned depth)
{
    const struct dmk_str description = string_member(schema, "description");
    json_t *properties = json_object_get(schema, "properties");
    json_t *required = set_of_names(json_object_get(schema, "required"));
    int r = 0;

    if (!required) {
        return dmk_error_set(w->reterr, -DMK_ENOMEM, "out of memory while rendering a schema");
    }
    if (description.data) {
        write_description_line(w, description, indent);
    }
    dmk_buf_puts(w->out, "{\n");
    for (void *at = json_object_iter(properties); at && r == 0;
         at = json_object_iter_next(properties, at)) {
        const char *key = json_object_iter_key(at);

        r = write_property(w, key, json_object_iter_value(at),
                           json_object_get(required, key) != NULL, indent, depth);
    }
    json_decref(required);
    write_indent(w, indent);
    dmk_buf_putc(w->out, '}');
    return r;
}

/* Rule 6: no parentheses around a union. */
static int write_array(struct writer *w, const json_t *schema, unsigned indent, unsigned depth)
{
    const json_t *items = json_object_get(schema, "items");

    if (!items) {
        dmk_buf_puts(w->out, "Array<any>");
        return 0;
    }
    const int r = write_type(w, items, indent, depth + 1);

    dmk_buf_puts(w->out, "[]");
    return r;
}

static int write_type(struct writer *w, const json_t *schema, unsigned indent, unsigned depth)
{
    const json_t *variants = json_object_get(schema, "oneOf");
    const json_t *type = json_object_get(schema, "type");
    const char *name = json_string_value(type);

    if (depth > DMK_SCHEMA_MAX_DEPTH) {
        return dmk_error_set(w->reterr, -DMK_EINVAL,
                             "a tool's parameters are nested deeper than %d levels; flatten them",
                             DMK_SCHEMA_MAX_DEPTH);
    }
    if (json_is_array(variants)) {
        return write_variants(w, variants, indent, depth);
    }
    if (json_is_array(type) && write_type_list(w, type)) {
        return 0;
    }
    if (!name) {
        dmk_buf_puts(w->out, "any");
        return 0;
    }
    if (strcmp(name, "object") == 0) {
        return write_object(w, schema, indent, depth);
    }
    if (strcmp(name, "array") == 0) {
        return write_array(w, schema, indent, depth);
    }
    if (strcmp(name, "string") == 0) {
        write_string_type(w, schema);
    } else if (strcmp(name, "number") == 0 || strcmp(name, "integer") == 0) {
        dmk_buf_puts(w->out, "number");
    } else {
        dmk_buf_puts(w->out, strcmp(name, "boolean") == 0 ? "boolean" : "any");
    }
    return 0;
}

int dmk_schema_text(const struct json_t *schema, bool library_text, struct dmk_buf *out,
                    struct dmk_error *reterr)
{
    struct writer w = {out, library_text, reterr};

    return write_type(&w, schema, 0, 0);
}
