/* What the answer may be, compiled to an automaton that the decode worker walks (common/grammar).
 *
 * Every function appends a serialised automaton to out, which is empty, or leaves it so when the answer is
 * free. What a schema asks for and is not enforced is refused by keyword and path, never ignored;
 * docs/API.md lists what is. Work and size are bounded. Pure; on pool threads. Returns 0, or negative with
 * the sentence for the client; param is the path of the schema in the request.
 *
 * A raw constraint (the others than from_conv) either rules the answer from its first token on, or a whole
 * Harmony turn behind "<|start|>assistant", of which only the final message is constrained. */
#pragma once

#include "common/chat/conv.h"
#include "router/api_error.h"

enum dmk_constraint_scope {
    DMK_CONSTRAIN_ALL,   /* from the first token; then an end id */
    DMK_CONSTRAIN_FINAL, /* the final message of a Harmony turn; analysis is free */
};

/* Response format, forced tools, strict tools: a whole Harmony turn. */
int dmk_constraint_from_conv(const struct dmk_conv_view *view, struct dmk_buf *out,
                             struct dmk_api_error *reterr);

int dmk_constraint_from_json_object(enum dmk_constraint_scope scope, struct dmk_buf *out,
                                    struct dmk_api_error *reterr);
/* schema: JSON text. */
int dmk_constraint_from_json_schema(struct dmk_str schema, const char *param,
                                    enum dmk_constraint_scope scope, struct dmk_buf *out,
                                    struct dmk_api_error *reterr);
/* The whole text matches the expression. */
int dmk_constraint_from_regex(struct dmk_str pattern, const char *param,
                              enum dmk_constraint_scope scope, struct dmk_buf *out,
                              struct dmk_api_error *reterr);
/* grammar: EBNF (common/schema/ebnf.h). */
int dmk_constraint_from_grammar(struct dmk_str grammar, const char *param,
                                enum dmk_constraint_scope scope, struct dmk_buf *out,
                                struct dmk_api_error *reterr);
int dmk_constraint_from_choice(const struct dmk_str *choices, size_t n, const char *param,
                               enum dmk_constraint_scope scope, struct dmk_buf *out,
                               struct dmk_api_error *reterr);
/* JSON text of a structural tag: {"format": {...}} with const_string, json_schema, regex, any_text,
 * sequence, or, tag, triggered_tags, tags_with_separator; or the older {"structures", "triggers"}. Spellings
 * of special tokens in it are those tokens. From the first token on. */
int dmk_constraint_from_structural_tag(struct dmk_str json, const char *param, struct dmk_buf *out,
                                       struct dmk_api_error *reterr);
