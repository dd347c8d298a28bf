/* From what a request says about its answer to an automaton; see constraint.h. */
#include "router/constraint_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include "common/chat/format.h"
#include "common/schema/ebnf.h"
#include "common/schema/regex.h"

#define MAX_CHOICES      1024
#define MAX_CHOICE_BYTES 65536

static int out_of_memory(struct dmk_api_error *reterr)
{
    return dmk_api_fail(reterr, 500, "out_of_memory", "no memory for the constraint");
}

int dmk_constraint__open(struct dmk_compiler *c, struct dmk_api_error *reterr)
{
    *c = (struct dmk_compiler){.build = dmk_build_new()};
    c->schemas = c->build ? dmk_schemas_new(c->build) : NULL;
    if (!c->schemas) {
        dmk_build_free(&c->build);
        return out_of_memory(reterr);
    }
    c->root = dmk_build_declare(c->build);
    return 0;
}

/* Writes the automaton when rc is 0; what went wrong else. */
int dmk_constraint__close(struct dmk_compiler *c, int rc, const char *param, struct dmk_buf *out,
                          struct dmk_api_error *reterr)
{
    if (rc == 0) {
        rc = dmk_build_finish(c->build, out, &c->error);
    }
    dmk_schemas_free(&c->schemas);
    dmk_build_free(&c->build);
    if (rc < 0) {
        dmk_buf_reset(out);
        return dmk_api_bad(reterr, param, "%s", c->error.text);
    }
    return 0;
}

/* ---------------------------------------------------------------- conversations */

static bool is_usable(const struct dmk_conv_view *view, const struct dmk_tool *tool)
{
    return view->tool_choice != DMK_TOOLS_NONE && !tool->withheld;
}

/* Whether anything is asked for that free output could break. */
static bool needs_constraint(const struct dmk_conv_view *view)
{
    if (view->output != DMK_OUTPUT_TEXT || view->tool_choice == DMK_TOOLS_REQUIRED ||
        view->tool_choice == DMK_TOOLS_NAMED) {
        return true;
    }
    for (size_t i = 0; i < view->n_tools; i++) {
        if (view->tool_choice != DMK_TOOLS_NONE &&
            (view->tools[i].withheld || view->tools[i].strict)) {
            return true;
        }
    }
    return false;
}

/* Arguments of strict tools follow their schema, those of others are any object. */
static int add_calls(struct dmk_compiler *c, const struct dmk_conv_view *view,
                     struct dmk_turn_call *calls, size_t *ret_n, char *ret_param, size_t cap)
{
    char path[64];

    *ret_n = 0;
    for (size_t i = 0; i < view->n_tools; i++) {
        const struct dmk_tool *tool = &view->tools[i];
        struct dmk_turn_call *call = &calls[*ret_n];
        int rc = 0;

        if (!is_usable(view, tool)) {
            continue;
        }
        call->name = tool->name;
        (void)snprintf(path, sizeof(path), "tools[%zu].parameters", i);
        if (tool->strict && tool->parameters) {
            rc = dmk_schemas_add(c->schemas, tool->parameters, path, &call->rule, &c->error);
        } else {
            call->rule = dmk_schemas_any_object(c->schemas);
        }
        if (rc < 0) {
            (void)snprintf(ret_param, cap, "tools[%zu]", i);
            return rc;
        }
        (*ret_n)++;
    }
    return 0;
}

static int add_answer(struct dmk_compiler *c, const struct dmk_conv_view *view, const char *param,
                      uint32_t *ret)
{
    char path[96];

    *ret = DMK_TURN_TEXT;
    if (view->output == DMK_OUTPUT_JSON_OBJECT) {
        *ret = dmk_schemas_any_object(c->schemas);
    } else if (view->output == DMK_OUTPUT_JSON_SCHEMA) {
        (void)snprintf(path, sizeof(path), "%s.schema", param);
        return dmk_schemas_add(c->schemas, view->response_schema, path, ret, &c->error);
    }
    return 0;
}

static int build_conv(struct dmk_compiler *c, const struct dmk_conv_view *view, char *ret_param,
                      size_t cap)
{
    struct dmk_turn turn = {
        .may_answer =
            view->tool_choice != DMK_TOOLS_REQUIRED && view->tool_choice != DMK_TOOLS_NAMED,
        .single_call = view->single_call,
    };
    struct dmk_turn_call *calls = calloc(view->n_tools + 1, sizeof(*calls));
    int rc;

    if (!calls) {
        return dmk_error_set(&c->error, -DMK_ENOMEM, "no memory for the constraint");
    }
    (void)snprintf(ret_param, cap, "%.*s", (int)view->output_param.len, view->output_param.data);
    rc = add_answer(c, view, ret_param, &turn.answer);
    if (rc == 0) {
        rc = add_calls(c, view, calls, &turn.n_calls, ret_param, cap);
    }
    if (rc == 0) {
        turn.calls = calls;
        dmk_format_find("harmony")->turn(c->build, c->root, &turn);
    }
    free(calls);
    return rc;
}

int dmk_constraint_from_conv(const struct dmk_conv_view *view, struct dmk_buf *out,
                             struct dmk_api_error *reterr)
{
    struct dmk_compiler c;
    char param[96] = "";
    int rc;

    if (!needs_constraint(view)) {
        return 0;
    }
    rc = dmk_constraint__open(&c, reterr);
    if (rc < 0) {
        return rc;
    }
    rc = build_conv(&c, view, param, sizeof(param));
    return dmk_constraint__close(&c, rc, param, out, reterr);
}

/* ---------------------------------------------------------------- raw constraints */

/* The root: the rule alone, or as the final message of a turn. */
static void build_root(struct dmk_compiler *c, uint32_t rule, enum dmk_constraint_scope scope)
{
    const struct dmk_turn turn = {.may_answer = true, .answer = rule};

    if (scope == DMK_CONSTRAIN_FINAL) {
        dmk_format_find("harmony")->turn(c->build, c->root, &turn);
        return;
    }
    dmk_build_begin(c->build, c->root);
    dmk_build_end(c->build, dmk_piece_call(c->build, rule), 0, DMK_BUILD_NO_MAX);
}

int dmk_constraint_from_json_object(enum dmk_constraint_scope scope, struct dmk_buf *out,
                                    struct dmk_api_error *reterr)
{
    struct dmk_compiler c;
    const int rc = dmk_constraint__open(&c, reterr);

    if (rc < 0) {
        return rc;
    }
    build_root(&c, dmk_schemas_any_object(c.schemas), scope);
    return dmk_constraint__close(&c, 0, "", out, reterr);
}

int dmk_constraint_from_json_schema(struct dmk_str schema, const char *param,
                                    enum dmk_constraint_scope scope, struct dmk_buf *out,
                                    struct dmk_api_error *reterr)
{
    struct dmk_compiler c;
    json_t *root = NULL;
    uint32_t rule = 0;
    int rc = dmk_constraint__open(&c, reterr);

    if (rc < 0) {
        return rc;
    }
    if (schema.len > DMK_CONSTRAINT_MAX_JSON) {
        rc = dmk_error_set(&c.error, -DMK_EINVAL, "%s has more than %zu bytes", param,
                           DMK_CONSTRAINT_MAX_JSON);
    }
    rc = rc < 0 ? rc : dmk_json_parse(schema, param, DMK_CONSTRAINT_MAX_DEPTH, &root, &c.error);
    rc = rc < 0 ? rc : dmk_schemas_add(c.schemas, root, param, &rule, &c.error);
    if (rc == 0) {
        build_root(&c, rule, scope);
    }
    rc = dmk_constraint__close(&c, rc, param, out, reterr);
    json_decref(root);
    return rc;
}

int dmk_constraint_from_regex(struct dmk_str pattern, const char *param,
                              enum dmk_constraint_scope scope, struct dmk_buf *out,
                              struct dmk_api_error *reterr)
{
    struct dmk_compiler c;
    struct dmk_piece piece;
    uint32_t rule;
    int rc = dmk_constraint__open(&c, reterr);

    if (rc < 0) {
        return rc;
    }
    rule = scope == DMK_CONSTRAIN_FINAL ? dmk_build_declare(c.build) : c.root;
    dmk_build_begin(c.build, rule);
    rc = dmk_regex_piece(c.build, pattern, DMK_REGEX_WHOLE, DMK_SPELL_PLAIN, false, &piece,
                         &c.error);
    if (rc == 0) {
        dmk_build_end(c.build, piece, 0, DMK_BUILD_NO_MAX);
    }
    if (rc == 0 && scope == DMK_CONSTRAIN_FINAL) {
        build_root(&c, rule, scope);
    }
    return dmk_constraint__close(&c, rc, param, out, reterr);
}

int dmk_constraint_from_grammar(struct dmk_str grammar, const char *param,
                                enum dmk_constraint_scope scope, struct dmk_buf *out,
                                struct dmk_api_error *reterr)
{
    struct dmk_compiler c;
    uint32_t rule = 0;
    int rc = dmk_constraint__open(&c, reterr);

    if (rc < 0) {
        return rc;
    }
    rc = dmk_ebnf_add(c.build, grammar, &rule, &c.error);
    if (rc == 0) {
        build_root(&c, rule, scope);
    }
    return dmk_constraint__close(&c, rc, param, out, reterr);
}

int dmk_constraint_from_choice(const struct dmk_str *choices, size_t n, const char *param,
                               enum dmk_constraint_scope scope, struct dmk_buf *out,
                               struct dmk_api_error *reterr)
{
    struct dmk_compiler c;
    uint32_t rule, in, end;
    size_t bytes = 0;
    int rc = dmk_constraint__open(&c, reterr);

    if (rc < 0) {
        return rc;
    }
    rule = dmk_build_declare(c.build);
    dmk_build_begin(c.build, rule);
    in = dmk_build_node(c.build);
    end = dmk_build_node(c.build);
    for (size_t i = 0; i < n && rc == 0; i++) {
        const struct dmk_piece text = dmk_piece_text(c.build, choices[i]);

        bytes += choices[i].len;
        if (choices[i].len == 0 || bytes > MAX_CHOICE_BYTES) {
            rc = dmk_error_set(&c.error, -DMK_EINVAL,
                               "%s must be texts of %d bytes together, none empty", param,
                               MAX_CHOICE_BYTES);
        }
        dmk_build_skip(c.build, in, text.in);
        dmk_build_skip(c.build, text.out, end);
    }
    if (rc == 0 && (n == 0 || n > MAX_CHOICES)) {
        rc = dmk_error_set(&c.error, -DMK_EINVAL, "%s must have 1 to %d entries", param,
                           MAX_CHOICES);
    }
    dmk_build_end(c.build, dmk_piece_nodes(c.build, in, end, in), 0, DMK_BUILD_NO_MAX);
    if (rc == 0) {
        build_root(&c, rule, scope);
    }
    return dmk_constraint__close(&c, rc, param, out, reterr);
}
