/* What a request says about the form of its answer: response formats and tool choices, read into the
 * conversation. Shared by the JSON dialects, which write the same things with and without a nested object.
 *
 * Pure but for the conversation; on pool threads. v may be NULL (absent): then nothing is changed. param is
 * the path of v. What is read here is turned into a constraint by router/constraint.h. */
#pragma once

#include "common/chat/conv.h"
#include "common/json/json.h"
#include "router/constraint.h"

/* {"type": "text" | "json_object" | "json_schema"}; a schema lies in "json_schema" (Chat Completions) or
 * beside the type (Responses, text.format): name, description, schema, strict. */
int dmk_structured_format(const json_t *v, const char *param, struct dmk_conv *conv,
                          struct dmk_api_error *reterr);

/* "auto", "none", "required"; {"type": "function", ...} with the name nested in "function" or beside the
 * type; {"type": "allowed_tools", ...} with mode and tools nested in "allowed_tools" or beside the type.
 * After the tools were read: names are looked up. */
int dmk_structured_tool_choice(const json_t *v, const char *param, struct dmk_conv *conv,
                               struct dmk_api_error *reterr);

/* vLLM's "structured_outputs": {"json" | "regex" | "choice" | "grammar" | "json_object" | "structural_tag": ...}, one of
 * them. Compiled at once, into out, which is empty; the prompt does not tell the model of it. A structural tag rules
 * the answer from its first token on, whatever the scope. */
int dmk_structured_outputs(const json_t *v, enum dmk_constraint_scope scope, struct dmk_buf *out,
                           struct dmk_api_error *reterr);
