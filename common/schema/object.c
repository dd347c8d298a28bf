/* Objects and arrays.
 *
 * Members come in the order of `properties`. Nodes for property i: next[i] = the next member is i or a later one
 * (or a further one), has[i] = some member was written and those before i are decided.
 *
 *   { --> next[0] ... key i ":" value --> has[i + 1] --","--> next[i + 1] ...
 *   next[i], has[i] go on to i + 1 for nothing when i may be missing */
#include "common/schema/schema_impl.h"

#include <stdlib.h>
#include <string.h>

struct member {
    const char *name;
    uint32_t rule;
    bool required;
    bool never; /* its schema is false */
};

struct object {
    struct member *members;
    uint32_t n;
    bool further; /* members that are not listed */
    uint32_t further_rule, key_rule;
};

/* ---------------------------------------------------------------- further keys */

/* A name's characters, in the tree of all names. */
struct name_node {
    uint32_t code; /* the character that leads here */
    uint32_t parent, child, sibling;
    bool ends;
    uint32_t node; /* of the build */
};

struct names {
    struct name_node *nodes;
    uint32_t n, cap;
};

static bool add_name(struct dmk_build *b, struct names *names, const char *name)
{
    const struct dmk_str text = dmk_str_from(name);
    uint32_t at = 0;

    for (size_t i = 0; i < text.len;) {
        const uint32_t code = dmk_chars_next(text, &i);
        uint32_t next = names->nodes[at].child;

        while (next && names->nodes[next].code != code) {
            next = names->nodes[next].sibling;
        }
        if (!next) {
            if (names->n == names->cap) {
                dmk_build_fail(b, "its property names are too long");
                return false;
            }
            next = names->n++;
            names->nodes[next] =
                (struct name_node){.code = code, .parent = at, .sibling = names->nodes[at].child};
            names->nodes[at].child = next;
        }
        at = next;
    }
    names->nodes[at].ends = true;
    return true;
}

/* A rule for a key (with both quotes) that is none of the names, however it is spelled. Inside of a name only
 * one way to write a character is open, so that none of them comes in disguise. */
static void build_key(struct dmk_schemas *s, const struct names *names, uint32_t rule)
{
    struct dmk_build *b = s->build;
    const uint32_t tail = dmk_values_string_tail(&s->values);
    struct dmk_chars chars;
    uint32_t in, out, free_text;

    dmk_build_begin(b, rule);
    in = dmk_build_node(b);
    out = dmk_build_node(b);
    free_text = dmk_build_node(b);
    dmk_build_call(b, free_text, tail, out);
    for (uint32_t i = 0; i < names->n; i++) {
        names->nodes[i].node = dmk_build_node(b);
    }
    dmk_build_bytes(b, in, '"', '"', names->nodes[0].node);
    for (uint32_t i = 0; i < names->n && !dmk_build_failed(b); i++) {
        const struct name_node *n = &names->nodes[i];

        dmk_chars_clear(&chars);
        for (uint32_t c = n->child; c; c = names->nodes[c].sibling) {
            struct dmk_chars one = {.n = 1,
                                    .ranges = {{names->nodes[c].code, names->nodes[c].code}}};

            dmk_chars_join(b, &one, DMK_SPELL_JSON, false, n->node, names->nodes[c].node);
            if (!dmk_chars_add(&chars, names->nodes[c].code, names->nodes[c].code)) {
                dmk_build_fail(b, "its property names have too many beginnings");
            }
        }
        if (!dmk_chars_invert(&chars)) {
            dmk_build_fail(b, "its property names have too many beginnings");
        }
        dmk_chars_join(b, &chars, DMK_SPELL_JSON, false, n->node, free_text);
        if (!n->ends) {
            dmk_build_bytes(b, n->node, '"', '"', out);
        }
    }
    dmk_build_end(b, dmk_piece_nodes(b, in, out, in), 0, DMK_BUILD_NO_MAX);
}

static uint32_t make_key_rule(struct dmk_schemas *s, const struct object *o)
{
    struct dmk_build *b = s->build;
    struct names names = {.n = 1, .cap = 4096};
    uint32_t rule;

    if (o->n == 0) {
        return dmk_values_string(&s->values);
    }
    names.nodes = calloc(names.cap, sizeof(*names.nodes));
    if (!names.nodes) {
        dmk_build_fail(b, "there is no memory for it");
        return 0;
    }
    for (uint32_t i = 0; i < o->n; i++) {
        (void)add_name(b, &names, o->members[i].name);
    }
    rule = dmk_build_declare(b);
    build_key(s, &names, rule);
    free(names.nodes);
    return rule;
}

/* ---------------------------------------------------------------- objects */

static int add_member(struct dmk_schemas *s, const struct dmk_job *job, struct object *o,
                      const char *name, json_t *schema, const char *under)
{
    struct member *m = &o->members[o->n];
    char key[PATH_BYTES];

    if (o->n == MAX_PROPERTIES) {
        return dmk_schema__bad(s, job, "more than %u properties", MAX_PROPERTIES);
    }
    *m = (struct member){.name = name, .never = json_is_false(schema)};
    o->n++;
    (void)snprintf(key, sizeof(key), "%s%s", under, name);
    return m->never ? 0 : dmk_schema__rule(s, job, schema, key, &m->rule);
}

/* Names that are required; those that nobody lists are members like further ones. */
static int read_required(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                         json_t *further, struct object *o)
{
    const json_t *list = json_object_get(schema, "required");
    size_t i;
    json_t *name;

    if (list && !json_is_array(list)) {
        return dmk_schema__bad(s, job, "\"required\" must be a list of names");
    }
    json_array_foreach(list, i, name)
    {
        uint32_t k = 0;

        if (!json_is_string(name)) {
            return dmk_schema__bad(s, job, "\"required\" must be a list of names");
        }
        while (k < o->n && strcmp(o->members[k].name, json_string_value(name)) != 0) {
            k++;
        }
        if (k == o->n) {
            int r;

            if (!o->further) {
                return dmk_schema__bad(s, job,
                                       "\"required\" names \"%.60s\", which may not be there",
                                       json_string_value(name));
            }
            r = add_member(s, job, o, json_string_value(name), further, "required.");
            if (r < 0) {
                return r;
            }
        }
        o->members[k].required = true;
        if (o->members[k].never) {
            return dmk_schema__bad(s, job, "\"required\" names \"%.60s\", whose schema is false",
                                   json_string_value(name));
        }
    }
    return 0;
}

static int read_object(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                       struct object *o)
{
    json_t *properties = json_object_get(schema, "properties");
    json_t *further = json_object_get(schema, "additionalProperties");
    json_t *anything = json_true();
    const char *name;
    json_t *value;
    int r = 0;

    if (properties && !json_is_object(properties)) {
        return dmk_schema__bad(s, job, "\"properties\" must be an object of schemas");
    }
    if (further && !json_is_boolean(further) && !json_is_object(further)) {
        return dmk_schema__bad(s, job, "\"additionalProperties\" must be a schema");
    }
    further = further ? further : anything;
    o->further = !json_is_false(further);
    if (o->further) {
        r = dmk_schema__rule(s, job, further, "additionalProperties", &o->further_rule);
    }
    json_object_foreach(properties, name, value)
    {
        r = r < 0 ? r : add_member(s, job, o, name, value, "properties.");
    }
    return r < 0 ? r : read_required(s, job, schema, further, o);
}

static void build_key_text(struct dmk_build *b, const char *name, struct dmk_piece *ret)
{
    json_t *text = json_string(name);

    if (!text || dmk_piece_literal(b, text, ret) < 0) {
        dmk_build_fail(b, "a property's name is too long");
        *ret = dmk_piece_empty(b);
    }
    json_decref(text);
}

static void build_object(struct dmk_build *b, const struct object *o, uint32_t *next, uint32_t *has)
{
    const uint32_t in = dmk_build_node(b), out = dmk_build_node(b), open = dmk_build_node(b);
    bool may_be_empty = true;

    for (uint32_t i = 0; i <= o->n; i++) {
        next[i] = dmk_build_node(b);
        has[i] = dmk_build_node(b);
    }
    dmk_build_bytes(b, in, '{', '{', open);
    dmk_build_skip(b, open, next[0]);
    for (uint32_t i = 0; i < o->n; i++) {
        const struct member *m = &o->members[i];
        const struct dmk_piece comma = dmk_piece_mark(b, ',');

        if (i > 0) {
            dmk_build_skip(b, has[i], comma.in);
            dmk_build_skip(b, comma.out, next[i]);
        }
        if (!m->required) {
            dmk_build_skip(b, next[i], next[i + 1]);
        }
        if (!m->required && i > 0) {
            /* The comma is written on the way to whichever member comes next. */
            dmk_build_skip(b, has[i], has[i + 1]);
        }
        may_be_empty = may_be_empty && !m->required;
        if (!m->never) {
            struct dmk_piece key;
            const struct dmk_piece colon = dmk_piece_mark(b, ':');

            build_key_text(b, m->name, &key);
            dmk_build_skip(b, next[i], key.in);
            dmk_build_skip(b, key.out, colon.in);
            dmk_build_call(b, colon.out, m->rule, has[i + 1]);
        }
    }
    dmk_build_bytes(b, has[o->n], '}', '}', out);
    if (o->further) {
        const struct dmk_piece colon = dmk_piece_mark(b, ':'), comma = dmk_piece_mark(b, ',');

        dmk_build_call(b, next[o->n], o->key_rule, colon.in);
        dmk_build_call(b, colon.out, o->further_rule, has[o->n]);
        dmk_build_skip(b, has[o->n], comma.in);
        dmk_build_skip(b, comma.out, next[o->n]);
    }
    if (may_be_empty) {
        dmk_build_bytes(b, open, '}', '}', out);
    }
    dmk_build_end(b, dmk_piece_nodes(b, in, out, in), 0, DMK_BUILD_NO_MAX);
}

/* The rule of an object that has been read; nodes holds 2 * (MAX_PROPERTIES + 1). */
static uint32_t make_rule(struct dmk_schemas *s, struct object *o, uint32_t *nodes)
{
    uint32_t rule;

    if (o->n == 0 && o->further && o->further_rule == dmk_values_any(&s->values)) {
        return dmk_values_any_object(&s->values);
    }
    if (o->further) {
        o->key_rule = make_key_rule(s, o);
    }
    rule = dmk_build_declare(s->build);
    dmk_build_begin(s->build, rule);
    build_object(s->build, o, nodes, nodes + MAX_PROPERTIES + 1);
    return rule;
}

int dmk_schema__object(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                       uint32_t *ret_rule)
{
    struct object o = {0};
    uint32_t *nodes = calloc(2 * (size_t)(MAX_PROPERTIES + 1), sizeof(*nodes));
    int r;

    o.members = calloc(MAX_PROPERTIES, sizeof(*o.members));
    if (nodes && o.members) {
        r = read_object(s, job, schema, &o);
        if (r == 0) {
            *ret_rule = make_rule(s, &o, nodes);
        }
    } else {
        r = dmk_schema__bad(s, job, "there is no memory for it");
    }
    free(nodes);
    free(o.members);
    return r;
}

/* ---------------------------------------------------------------- arrays */

struct array {
    uint32_t *prefix; /* rules */
    uint32_t n_prefix;
    bool more; /* elements behind the prefix */
    uint32_t rule;
    uint32_t min, max;
};

static int read_array(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                      struct array *a)
{
    json_t *items = json_object_get(schema, "items");
    json_t *prefix = json_object_get(schema, "prefixItems");
    json_t *anything = json_true();
    char key[64];
    int r;

    /* The older form: a list in items, what follows in additionalItems. */
    if (json_is_array(items)) {
        prefix = items;
        items = json_object_get(schema, "additionalItems");
    }
    if ((r = dmk_schema__count(s, job, schema, "minItems", 0, &a->min)) < 0 ||
        (r = dmk_schema__count(s, job, schema, "maxItems", DMK_BUILD_NO_MAX, &a->max)) < 0) {
        return r;
    }
    if (prefix && (!json_is_array(prefix) || json_array_size(prefix) > MAX_PROPERTIES)) {
        return dmk_schema__bad(s, job, "\"prefixItems\" must be a list of at most %u schemas",
                               MAX_PROPERTIES);
    }
    a->n_prefix = (uint32_t)json_array_size(prefix);
    a->n_prefix = a->n_prefix < a->max ? a->n_prefix : a->max;
    items = items ? items : anything;
    a->more = !json_is_false(items) && a->max > a->n_prefix;
    if (a->min > a->max || (!a->more && a->min > a->n_prefix)) {
        return dmk_schema__bad(s, job, "\"minItems\" is above what the array may hold");
    }
    for (uint32_t i = 0; i < a->n_prefix; i++) {
        (void)snprintf(key, sizeof(key), "prefixItems[%u]", i);
        r = dmk_schema__rule(s, job, json_array_get(prefix, i), key, &a->prefix[i]);
        if (r < 0) {
            return r;
        }
    }
    return a->more ? dmk_schema__rule(s, job, items, "items", &a->rule) : 0;
}

/* Elements behind the prefix count at the comma before them; without a prefix the first one has none. */
static void build_array(struct dmk_build *b, const struct array *a)
{
    const uint32_t in = dmk_build_node(b), out = dmk_build_node(b), empty = dmk_build_node(b);
    const uint32_t uncounted = a->n_prefix > 0 ? a->n_prefix : 1;
    const uint32_t min = a->min > uncounted ? a->min - uncounted : 0;
    const uint32_t max =
        a->max == DMK_BUILD_NO_MAX || a->max < uncounted ? DMK_BUILD_NO_MAX : a->max - uncounted;
    const bool counts = min > 0 || max != DMK_BUILD_NO_MAX;
    uint32_t at = empty; /* behind the elements so far */

    dmk_build_bytes(b, in, '[', '[', empty);
    if (a->min == 0) {
        dmk_build_bytes(b, empty, ']', ']', out);
    }
    for (uint32_t i = 0; i < a->n_prefix; i++) {
        const uint32_t next = dmk_build_node(b);

        if (i > 0) {
            const struct dmk_piece comma = dmk_piece_mark(b, ',');

            dmk_build_skip(b, at, comma.in);
            dmk_build_call(b, comma.out, a->prefix[i], next);
        } else {
            dmk_build_call(b, at, a->prefix[i], next);
        }
        if (i + 1 >= a->min) {
            dmk_build_bytes(b, next, ']', ']', out);
        }
        at = next;
    }
    if (a->more) {
        const uint32_t element = dmk_build_node(b), comma = dmk_build_node(b);
        const uint32_t space = dmk_build_node(b), end = dmk_build_node(b);

        if (a->n_prefix == 0) {
            dmk_build_call(b, at, a->rule, element);
        } else {
            dmk_build_skip(b, at, element);
        }
        dmk_build_bytes(b, element, ',', ',', comma);
        dmk_build_bytes(b, comma, ' ', ' ', space);
        dmk_build_skip(b, comma, space);
        dmk_build_call(b, space, a->rule, element);
        if (counts) {
            dmk_build_tick(b, comma);
        }
        if (a->n_prefix == 0 || min > 0) {
            dmk_build_bytes(b, element, ']', ']', end);
            dmk_build_skip(b, end, out);
            if (min > 0) {
                dmk_build_gate(b, end);
            }
        } else {
            /* Behind the prefix the array may end when its least is reached there. */
            dmk_build_bytes(b, element, ']', ']', out);
        }
    }
    dmk_build_end(b, dmk_piece_nodes(b, in, out, in), counts ? min : 0,
                  counts ? max : DMK_BUILD_NO_MAX);
}

int dmk_schema__array(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                      uint32_t *ret_rule)
{
    struct array a = {.prefix = calloc(MAX_PROPERTIES, sizeof(uint32_t))};
    int r = a.prefix ? read_array(s, job, schema, &a)
                     : dmk_schema__bad(s, job, "there is no memory for it");

    if (r == 0 && a.n_prefix == 0 && a.more && a.min == 0 && a.max == DMK_BUILD_NO_MAX &&
        a.rule == dmk_values_any(&s->values)) {
        *ret_rule = dmk_values_any_array(&s->values);
    } else if (r == 0) {
        *ret_rule = dmk_build_declare(s->build);
        dmk_build_begin(s->build, *ret_rule);
        build_array(s->build, &a);
    }
    free(a.prefix);
    return r;
}
