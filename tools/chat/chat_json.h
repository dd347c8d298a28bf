/* The plain JSON that `damask chat` reads and writes, one value a line. Absent and null are the same.
 *
 * A conversation, as dialects build it:
 *   {"messages": [{"role": "user|system|developer|assistant|tool", "content": TEXT, "name": TEXT,
 *                  "reasoning": TEXT, "tool_call_id": TEXT,
 *                  "tool_calls": [{"id": TEXT, "name": TEXT, "arguments": TEXT}]}],
 *    "tools": [{"name": TEXT, "description": TEXT, "parameters": SCHEMA}],
 *    "effort": "low|medium|high", "tool_choice": "auto|none|required|named", "date_unix_s": SECONDS,
 *    "response_format": {"name": TEXT, "description": TEXT, "schema": SCHEMA},
 *    "recipient_in_channel": BOOL, "library_schema_text": BOOL, "library_drop_rule": BOOL}
 *
 * Harmony's own messages, as openai-harmony writes a conversation:
 *   {"harmony": [{"role": ROLE, "name": TEXT, "recipient": TEXT, "channel": TEXT, "content_type": TEXT,
 *                 "content": TEXT or [PART]}],
 *    "drop": "keep|library|old", "turn": BOOL, "library_schema_text": BOOL,
 *    "recipient_in_channel": BOOL}
 * recipient_in_channel writes headers as oss-harmony 0.0.11 does: on commentary the recipient stands behind
 * the channel, and every content type gets its mark.
 *
 *   PART: {"type": "text", "text": TEXT}
 *       | {"type": "system_content", "model_identity": TEXT, "knowledge_cutoff": TEXT,
 *          "conversation_start_date": TEXT, "reasoning_effort": TEXT, "tools": {NAME: NAMESPACE},
 *          "channel_config": {"valid_channels": [TEXT], "channel_required": BOOL}}
 *       | {"type": "developer_content", "instructions": TEXT, "tools": {NAME: NAMESPACE}}
 *   NAMESPACE: {"name": TEXT, "description": TEXT, "tools": [as above]}
 *
 * Output of a model:
 *   {"ids": [ID], "tools": [NAME], "seed": NUMBER, "cut": BOOL, "events": BOOL}; without "tools", calls are
 *   not allowed
 *
 * Readers return 0 or a negative code with a sentence. Values stay good as long as the JSON root does. */
#pragma once

#include "common/chat/arena.h"
#include "common/chat/format.h"
#include "common/chat/harmony.h"
#include "common/json/json.h"

int dmk_chat_read_tools(const json_t *array, const char *where, struct dmk_arena *arena,
                        const struct dmk_tool **ret_tools, size_t *ret_n, struct dmk_error *reterr);

/* Appends the ids of a line with "messages". */
int dmk_chat_render_conversation(const json_t *line, const struct dmk_format *format,
                                 const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                                 struct dmk_ids *ids, struct dmk_error *reterr);

/* Appends the ids of a line with "harmony". */
int dmk_chat_render_harmony(const json_t *line, const struct dmk_vocab *vocab,
                            struct dmk_bpe_scratch *scratch, struct dmk_ids *ids,
                            struct dmk_error *reterr);

/* What a line with "ids" says, as a new value:
 *   {"reasoning": TEXT or null, "content": TEXT or null, "finish": "stop|tool_calls",
 *    "calls": [{"id", "name", "arguments", "finished"}], "stop_id": ID, "n_reasoning_tokens": N,
 *    "repairs": {KIND: N}, "events": [[KIND, TOKEN, TEXT]] when asked for} */
int dmk_chat_parse_ids(const json_t *line, const struct dmk_format *format,
                       const struct dmk_vocab *vocab, json_t **ret_result,
                       struct dmk_error *reterr);
