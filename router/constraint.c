/* From what a request says about its answer to an automaton; see constraint.h. */
#include "router/constraint.h"

static int not_yet(const char *param, struct dmk_api_error *reterr)
{
    return dmk_api_bad_code(reterr, "unsupported_value", param,
                            "structured output is not available yet");
}

int dmk_constraint_from_conv(const struct dmk_conv_view *view, struct dmk_buf *out,
                             struct dmk_api_error *reterr)
{
    (void)out;
    if (view->output != DMK_OUTPUT_TEXT) {
        return not_yet("response_format", reterr);
    }
    if (view->tool_choice == DMK_TOOLS_REQUIRED || view->tool_choice == DMK_TOOLS_NAMED) {
        return not_yet("tool_choice", reterr);
    }
    return 0;
}

int dmk_constraint_from_json_object(enum dmk_constraint_scope scope, struct dmk_buf *out,
                                    struct dmk_api_error *reterr)
{
    (void)scope;
    (void)out;
    return not_yet("", reterr);
}

int dmk_constraint_from_json_schema(struct dmk_str schema, const char *param,
                                    enum dmk_constraint_scope scope, struct dmk_buf *out,
                                    struct dmk_api_error *reterr)
{
    (void)schema;
    (void)scope;
    (void)out;
    return not_yet(param, reterr);
}

int dmk_constraint_from_regex(struct dmk_str pattern, const char *param,
                              enum dmk_constraint_scope scope, struct dmk_buf *out,
                              struct dmk_api_error *reterr)
{
    (void)pattern;
    (void)scope;
    (void)out;
    return not_yet(param, reterr);
}

int dmk_constraint_from_choice(const struct dmk_str *choices, size_t n, const char *param,
                               enum dmk_constraint_scope scope, struct dmk_buf *out,
                               struct dmk_api_error *reterr)
{
    (void)choices;
    (void)n;
    (void)scope;
    (void)out;
    return not_yet(param, reterr);
}

int dmk_constraint_from_structural_tag(struct dmk_str json, const char *param, struct dmk_buf *out,
                                       struct dmk_api_error *reterr)
{
    (void)json;
    (void)out;
    return not_yet(param, reterr);
}
