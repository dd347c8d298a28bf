/* Structural tags: what gateways that know the model's format ask of an engine; see constraint.h.
 *
 *   format  := element | {"type": "sequence" | "or", "elements": [element ...]}
 *   element := simple | tag | triggered_tags | tags_with_separator
 *   tag     := {"begin", "content": simple, "end"}
 *   simple  := const_string | json_schema | regex | any_text
 *
 * Texts are letters, and free text between triggered tags is followed for all triggers at a time, so that none can be
 * passed by (constraint_search.h).
 *
 * A tag that begins a message ("...<|message|>") and has no end of its own is the body of that message: gateways write
 * so. Nothing but the mark that ends the message, or the turn, may stand behind it. */
#include "router/constraint_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/schema/regex.h"
#include "router/constraint_search.h"

#define MAX_TAGS     512u
#define MAX_TRIGGERS 64u
#define MAX_SCHEMAS  512u

struct tags {
    struct dmk_compiler c;
    const char *param;
    struct {
        const json_t *schema;
        uint32_t rule;
    } schemas[MAX_SCHEMAS];
    uint32_t n_schemas;
};

static int bad(struct tags *t, const char *what)
{
    return dmk_error_set(&t->c.error, -DMK_EINVAL, "%s: %s", t->param, what);
}

static const char *type_of(const json_t *v)
{
    const json_t *type = json_object_get(v, "type");

    return json_is_string(type) ? json_string_value(type) : "";
}

/* ---------------------------------------------------------------- simple contents */

static uint32_t rule_of(const struct tags *t, const json_t *schema)
{
    for (uint32_t i = 0; i < t->n_schemas; i++) {
        if (t->schemas[i].schema == schema) {
            return t->schemas[i].rule;
        }
    }
    return 0;
}

/* Content between two nodes; end is the text behind it ("" when there is none), which is joined too, so that
 * free text ends where it comes. */
static int join_content(struct tags *t, const json_t *v, const char *end, uint32_t from,
                        uint32_t to)
{
    struct dmk_build *b = t->c.build;
    const char *type = type_of(v);
    const json_t *value;

    if (strcmp(type, "any_text") == 0) {
        struct dmk_search *s = calloc(1, sizeof(*s));
        const uint32_t hits[1] = {to};
        bool ok = s != NULL;

        if (s) {
            s->n = 1;
            ok = !*end || dmk_search_add(s, end, 0);
            dmk_search_join(t->c.build, s, from, hits, *end ? DMK_BUILD_NO_MAX : to);
        }
        free(s);
        return ok ? 0 : bad(t, "an end is too long");
    }
    if (strcmp(type, "const_string") == 0) {
        value = json_object_get(v, "value");
        if (!json_is_string(value)) {
            return bad(t, "a const_string has no value");
        }
        from = dmk_letters_behind(b, from, json_string_value(value));
    } else if (strcmp(type, "json_schema") == 0) {
        const uint32_t node = dmk_build_node(b);
        const json_t *style = json_object_get(v, "style");

        if (style && (!json_is_string(style) || strcmp(json_string_value(style), "json") != 0)) {
            return bad(t, "only the style json is supported");
        }
        dmk_build_call(b, from, rule_of(t, json_object_get(v, "json_schema")), node);
        from = node;
    } else if (strcmp(type, "regex") == 0) {
        struct dmk_piece piece;
        int rc;

        value = json_object_get(v, "pattern");
        if (!json_is_string(value)) {
            return bad(t, "a regex has no pattern");
        }
        rc = dmk_regex_piece(b, dmk_str_from(json_string_value(value)), DMK_REGEX_WHOLE,
                             DMK_SPELL_PLAIN, false, &piece, &t->c.error);
        if (rc < 0) {
            return rc;
        }
        dmk_build_skip(b, from, piece.in);
        from = piece.out;
    } else {
        return bad(t, "content must be const_string, json_schema, regex or any_text");
    }
    dmk_build_skip(b, dmk_letters_behind(b, from, end), to);
    return 0;
}

/* ---------------------------------------------------------------- tags */

struct tag {
    const char *begin, *end;
    const json_t *content;
};

static int read_tag(struct tags *t, const json_t *v, struct tag *ret)
{
    const json_t *begin = json_object_get(v, "begin"), *end = json_object_get(v, "end");

    ret->content = json_object_get(v, "content");
    if (!json_is_string(begin) || !json_is_string(end) || !json_is_object(ret->content)) {
        return bad(t, "a tag needs begin, content and one end");
    }
    ret->begin = json_string_value(begin);
    ret->end = json_string_value(end);
    return 0;
}

static int join_tag(struct tags *t, const json_t *v, size_t skip, uint32_t from, uint32_t to)
{
    struct tag tag = {0};
    const int rc = read_tag(t, v, &tag);

    return rc < 0 ? rc
                  : join_content(t, tag.content, tag.end,
                                 dmk_letters_behind(t->c.build, from, tag.begin + skip), to);
}

static bool is_set(const json_t *v, const char *key)
{
    return json_is_true(json_object_get(v, key));
}

static bool is_body(const json_t *tag)
{
    static const char mark[] = "<|message|>";
    const json_t *begin = json_object_get(tag, "begin"), *end = json_object_get(tag, "end");
    const size_t n = json_string_length(begin), m = sizeof(mark) - 1;

    return json_is_string(begin) && json_is_string(end) && json_string_length(end) == 0 && n >= m &&
           strcmp(json_string_value(begin) + n - m, mark) == 0;
}

/* Behind each trigger, those tags that begin with it; bodies of messages lead to body. */
static int join_triggers(struct tags *t, const json_t *v, const uint32_t *hits, uint32_t to,
                         uint32_t body)
{
    const json_t *triggers = json_object_get(v, "triggers"), *tags = json_object_get(v, "tags");
    size_t i, k;
    json_t *trigger, *tag;

    json_array_foreach(tags, k, tag)
    {
        const json_t *begin = json_object_get(tag, "begin");
        bool found = false;

        json_array_foreach(triggers, i, trigger)
        {
            const size_t n = strlen(json_string_value(trigger));

            if (json_is_string(begin) &&
                strncmp(json_string_value(begin), json_string_value(trigger), n) == 0) {
                const int rc = join_tag(t, tag, n, hits[i], is_body(tag) ? body : to);

                if (rc < 0) {
                    return rc;
                }
                found = true;
            }
        }
        if (!found) {
            return bad(t, "a tag begins with none of the triggers");
        }
    }
    return 0;
}

static int join_free(struct tags *t, const json_t *v, uint32_t from, const uint32_t *hits,
                     uint32_t end)
{
    const json_t *triggers = json_object_get(v, "triggers");
    struct dmk_search *s = calloc(1, sizeof(*s));
    bool ok = s != NULL;
    size_t i;
    json_t *trigger;

    if (s) {
        s->n = 1;
        json_array_foreach(triggers, i, trigger)
        {
            ok = ok && json_is_string(trigger) &&
                 dmk_search_add(s, json_string_value(trigger), (uint32_t)i);
        }
        if (ok) {
            dmk_search_join(t->c.build, s, from, hits, end);
        }
    }
    free(s);
    return ok ? 0 : bad(t, "triggers must be texts, not too long");
}

/* Free text before the first tag, then behind each; where at least one tag is wanted, the text may end only
 * behind one. */
static int join_triggered(struct tags *t, const json_t *v, uint32_t from, uint32_t to)
{
    struct dmk_build *b = t->c.build;
    const size_t n = json_array_size(json_object_get(v, "triggers"));
    const uint32_t behind_tag = dmk_build_node(b), body = dmk_build_node(b);
    const bool once = is_set(v, "stop_after_first");
    uint32_t hits[MAX_TRIGGERS];
    int rc;

    if (n == 0 || n > MAX_TRIGGERS || json_array_size(json_object_get(v, "tags")) > MAX_TAGS ||
        json_array_size(json_object_get(v, "excludes")) > 0) {
        return bad(t, "triggered_tags needs triggers and tags, within bounds and without excludes");
    }
    for (size_t i = 0; i < n; i++) {
        hits[i] = dmk_build_node(b);
    }
    rc = join_free(t, v, from, hits, is_set(v, "at_least_one") ? DMK_BUILD_NO_MAX : to);
    rc = rc < 0 ? rc : join_triggers(t, v, hits, behind_tag, body);
    dmk_build_skip(b, body, to);
    dmk_build_skip(b, dmk_letters_behind(b, body, "<|end|>"), once ? to : behind_tag);
    if (rc == 0 && once) {
        dmk_build_skip(b, behind_tag, to);
    } else if (rc == 0) {
        rc = join_free(t, v, behind_tag, hits, to);
    }
    return rc;
}

static int join_separated(struct tags *t, const json_t *v, uint32_t from, uint32_t to)
{
    struct dmk_build *b = t->c.build;
    const json_t *tags = json_object_get(v, "tags"), *separator = json_object_get(v, "separator");
    const uint32_t start = dmk_build_node(b), end = dmk_build_node(b);
    size_t i;
    json_t *tag;

    if (!json_is_array(tags) || json_array_size(tags) > MAX_TAGS || !json_is_string(separator)) {
        return bad(t, "tags_with_separator needs tags and a separator");
    }
    dmk_build_skip(b, from, start);
    dmk_build_skip(b, end, to);
    if (!is_set(v, "at_least_one")) {
        dmk_build_skip(b, from, to);
    }
    json_array_foreach(tags, i, tag)
    {
        const int rc = join_tag(t, tag, 0, start, end);

        if (rc < 0) {
            return rc;
        }
    }
    if (!is_set(v, "stop_after_first")) {
        dmk_build_skip(b, dmk_letters_behind(b, end, json_string_value(separator)), start);
    }
    return 0;
}

static int join_element(struct tags *t, const json_t *v, uint32_t from, uint32_t to)
{
    const char *type = type_of(v);

    if (strcmp(type, "triggered_tags") == 0) {
        return join_triggered(t, v, from, to);
    }
    if (strcmp(type, "tags_with_separator") == 0) {
        return join_separated(t, v, from, to);
    }
    if (strcmp(type, "tag") == 0) {
        return join_tag(t, v, 0, from, to);
    }
    return join_content(t, v, "", from, to);
}

static int join_format(struct tags *t, const json_t *v, uint32_t from, uint32_t to)
{
    const json_t *elements = json_object_get(v, "elements");
    const bool sequence = strcmp(type_of(v), "sequence") == 0;
    size_t i;
    json_t *element;

    if (!sequence && strcmp(type_of(v), "or") != 0) {
        return join_element(t, v, from, to);
    }
    if (json_array_size(elements) == 0 || json_array_size(elements) > MAX_TAGS) {
        return bad(t, "elements must be a list, not empty");
    }
    json_array_foreach(elements, i, element)
    {
        const bool last = i + 1 == json_array_size(elements);
        const uint32_t next = sequence && !last ? dmk_build_node(t->c.build) : to;
        const int rc = join_element(t, element, from, next);

        if (rc < 0) {
            return rc;
        }
        from = sequence ? next : from;
    }
    return 0;
}

/* ---------------------------------------------------------------- schemas first */

/* Rules of all schemas in the tree, since none may be made while the root is under construction. */
static int add_schemas(struct tags *t, json_t *root)
{
    json_t *list[1024];
    unsigned n = 1;

    list[0] = root;
    while (n > 0) {
        json_t *v = list[--n];
        json_t *schema = json_object_get(v, "json_schema");
        const char *key;
        size_t i;
        json_t *member;

        if (json_is_object(v) && strcmp(type_of(v), "json_schema") == 0) {
            int rc;

            if (json_is_true(schema)) {
                schema = json_object();
                (void)json_object_set_new(v, "json_schema", schema);
            }
            if (t->n_schemas == MAX_SCHEMAS) {
                return bad(t, "too many schemas");
            }
            rc = dmk_schemas_add(t->c.schemas, schema, t->param, &t->schemas[t->n_schemas].rule,
                                 &t->c.error);
            t->schemas[t->n_schemas++].schema = schema;
            if (rc < 0) {
                return rc;
            }
            continue;
        }
        if (n + json_object_size(v) + json_array_size(v) > 1000) {
            return bad(t, "too many parts");
        }
        json_object_foreach(v, key, member)
        {
            list[n++] = member;
        }
        json_array_foreach(v, i, member)
        {
            list[n++] = member;
        }
    }
    return 0;
}

/* The older form: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}. */
static json_t *read_old(const json_t *root)
{
    const json_t *structures = json_object_get(root, "structures");
    json_t *tags = json_array();
    size_t i;
    json_t *s;

    json_array_foreach(structures, i, s)
    {
        json_t *schema = json_object_get(s, "schema");

        (void)json_array_append_new(tags, json_pack("{s:O?,s:O?,s:{s:s,s:O?}}", "begin",
                                                    json_object_get(s, "begin"), "end",
                                                    json_object_get(s, "end"), "content", "type",
                                                    "json_schema", "json_schema", schema));
    }
    return json_pack("{s:s,s:O?,s:o}", "type", "triggered_tags", "triggers",
                     json_object_get(root, "triggers"), "tags", tags);
}

static int compile(struct tags *t, json_t *format)
{
    uint32_t in, out;
    int rc = add_schemas(t, format);

    if (rc < 0) {
        return rc;
    }
    dmk_build_begin(t->c.build, t->c.root);
    in = dmk_build_node(t->c.build);
    out = dmk_build_node(t->c.build);
    rc = join_format(t, format, in, out);
    if (rc == 0) {
        dmk_build_end(t->c.build, dmk_piece_nodes(t->c.build, in, out, in), 0, DMK_BUILD_NO_MAX);
    }
    return rc;
}

int dmk_constraint_from_structural_tag(struct dmk_str json, const char *param, struct dmk_buf *out,
                                       struct dmk_api_error *reterr)
{
    struct tags t = {.param = param};
    json_t *root = NULL, *format = NULL;
    int rc = dmk_constraint__open(&t.c, reterr);

    if (rc < 0) {
        return rc;
    }
    if (json.len > DMK_CONSTRAINT_MAX_JSON) {
        rc = bad(&t, "too many bytes");
    }
    rc = rc < 0 ? rc : dmk_json_parse(json, param, DMK_CONSTRAINT_MAX_DEPTH, &root, &t.c.error);
    if (rc == 0) {
        format = json_object_get(root, "structures") ? read_old(root)
                                                     : json_incref(json_object_get(root, "format"));
        rc = json_is_object(format) ? compile(&t, format)
                                    : bad(&t, "a structural tag needs a format");
    }
    rc = dmk_constraint__close(&t.c, rc, param, out, reterr);
    json_decref(format);
    json_decref(root);
    return rc;
}
