/* Text to token ids and back: POST /tokenize and POST /detokenize.
 *
 * The bodies and answers are vLLM's. A prompt is text, encoded as /v1/completions does it, or the messages of a
 * chat, rendered as /v1/chat/completions does it. No worker is asked; all of it runs on a pool thread. */
#include <stdio.h>
#include "common/text/utf8.h"
#include "router/api_chat.h"
#include "router/fields.h"
#include "router/json_out.h"

static const struct dmk_field_refused refused[] = {
    {"continue_final_message", "false"}, {"chat_template", NULL},   {"chat_template_kwargs", "{}"},
    {"mm_processor_kwargs", "{}"},       {"media_io_kwargs", "{}"},
};

static const struct dmk_field fields[] = {
    {"return_token_strs", DMK_KIND_BOOL, 0, 0, DMK_ASK_AT(token_strs),
     .about = "The tokens as text too."},
    {"add_special_tokens", DMK_KIND_BOOL, 0, 0, 0, 0,
     .about = "Accepted; prompts have none to add."},
};

static const struct dmk_field_tables tokenize_tables = {
    .schema = "TokenizeRequest",
    .fields = fields,
    .n_fields = sizeof(fields) / sizeof(fields[0]),
    .refused = refused,
    .n_refused = sizeof(refused) / sizeof(refused[0]),
    .samples = false,
};

static const struct dmk_field_tables detokenize_tables = {.schema = "DetokenizeRequest"};

/* The model may be left out here. */
static int read_head(const json_t *root, struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    const int rc = dmk_field_get(root, "model") ? dmk_fields_model(root, ask, reterr) : 0;

    return rc < 0 ? rc : dmk_fields_read(root, &tokenize_tables, ask, reterr);
}

static int read_prompt(const json_t *root, const struct dmk_api_limits *limits, struct dmk_ask *ask,
                       struct dmk_api_error *reterr)
{
    static const char *const of_chats[] = {
        "messages", "tools", "tool_choice", "response_format", "reasoning_effort", "reasoning"};
    const json_t *prompt = dmk_field_get(root, "prompt");
    bool with_turn = true;
    int rc;

    if (!prompt && dmk_field_get(root, "messages")) {
        rc = dmk_field_bool(root, "", "add_generation_prompt", &with_turn, reterr);
        if (rc == 0 && !with_turn) {
            return dmk_api_bad_code(reterr, "unsupported_value", "add_generation_prompt",
                                    "add_generation_prompt can only be true: prompts end where the "
                                    "model goes on");
        }
        return rc < 0 ? rc : dmk_api_chat_parse_prompt(root, limits, ask, reterr);
    }
    for (size_t i = 0; i < sizeof(of_chats) / sizeof(of_chats[0]); i++) {
        if (dmk_field_get(root, of_chats[i])) {
            return dmk_api_bad(reterr, of_chats[i], "%s can not stand beside prompt", of_chats[i]);
        }
    }
    if (!json_is_string(prompt)) {
        return dmk_api_bad(reterr, "prompt", "prompt must be a text, or messages must be there");
    }
    dmk_buf_append_str(&ask->text, dmk_field_text(prompt));
    return ask->text.failed ? dmk_api_fail(reterr, 413, NULL, "the prompt is too large") : 0;
}

static int tokenize_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                          struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    json_t *root;
    int rc = dmk_fields_open(body, &root, reterr);

    if (rc < 0) {
        return rc;
    }
    rc = read_head(root, ask, reterr);
    if (rc == 0) {
        rc = read_prompt(root, limits, ask, reterr);
    }
    json_decref(root);
    return rc;
}

static int detokenize_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                            struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    const json_t *tokens;
    json_t *root;
    int rc = dmk_fields_open(body, &root, reterr);

    (void)limits;
    if (rc < 0) {
        return rc;
    }
    rc = dmk_field_get(root, "model") ? dmk_fields_model(root, ask, reterr) : 0;
    tokens = dmk_field_get(root, "tokens");
    if (rc == 0 && !json_is_array(tokens)) {
        rc = dmk_api_bad(reterr, "tokens", "tokens must be a list of token ids");
    }
    for (size_t i = 0; rc == 0 && i < json_array_size(tokens); i++) {
        int64_t id;

        if (!dmk_field_token(json_array_get(tokens, i), &id)) {
            rc = dmk_api_bad(reterr, "tokens", "tokens[%zu] must be a token id from 0 to %u", i,
                             DMK_VOCAB_SIZE - 1);
        } else {
            dmk_ids_push(&ask->prompt, (uint32_t)id);
        }
    }
    json_decref(root);
    return rc;
}

static void tokenize_local(const struct dmk_vocab *vocab, const struct dmk_api_limits *limits,
                           const struct dmk_ask *ask, struct dmk_buf *out)
{
    const struct dmk_ids *ids = &ask->prompt;

    dmk_buf_printf(out, "{\"count\":%zu,\"max_model_len\":", ids->len);
    if (limits->max_context > 0) {
        dmk_buf_put_u64(out, limits->max_context);
    } else {
        dmk_buf_puts(out, "null"); /* no worker is up that could say */
    }
    dmk_buf_puts(out, ",\"tokens\":[");
    for (size_t i = 0; i < ids->len; i++) {
        dmk_buf_puts(out, i ? "," : "");
        dmk_buf_put_u64(out, ids->data[i]);
    }
    dmk_buf_puts(out, ask->token_strs ? "],\"token_strs\":[" : "],\"token_strs\":null}");
    for (size_t i = 0; ask->token_strs && i < ids->len; i++) {
        dmk_buf_puts(out, i ? "," : "");
        dmk_out_lossy(out, dmk_token_bytes(vocab, ids->data[i]));
    }
    dmk_buf_puts(out, ask->token_strs ? "]}" : "");
}

static void detokenize_local(const struct dmk_vocab *vocab, const struct dmk_api_limits *limits,
                             const struct dmk_ask *ask, struct dmk_buf *out)
{
    struct dmk_buf bytes;

    (void)limits;
    dmk_buf_init(&bytes, 0);
    for (size_t i = 0; i < ask->prompt.len; i++) {
        const struct dmk_bytes b = dmk_token_bytes(vocab, ask->prompt.data[i]);

        dmk_buf_append(&bytes, b.data, b.len);
    }
    dmk_buf_puts(out, "{\"prompt\":");
    dmk_out_lossy(out, dmk_buf_bytes(&bytes));
    dmk_buf_putc(out, '}');
    out->failed = out->failed || bytes.failed;
    dmk_buf_fini(&bytes);
}

const struct dmk_dialect dmk_dialect_tokenize = {
    .name = "tokenize",
    .path = "/tokenize",
    .http = true,
    .content_type = "application/json",
    .parse = tokenize_parse,
    .tables = &tokenize_tables,
    .local = tokenize_local,
    .error = dmk_api_error_json,
};

const struct dmk_dialect dmk_dialect_detokenize = {
    .name = "detokenize",
    .path = "/detokenize",
    .http = true,
    .content_type = "application/json",
    .parse = detokenize_parse,
    .tables = &detokenize_tables,
    .local = detokenize_local,
    .error = dmk_api_error_json,
};
