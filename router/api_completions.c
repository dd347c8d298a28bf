/* Completions: raw prompts, text or token ids, in and text out (POST /v1/completions).
 *
 * The second dialect: it keeps api.h honest. parse is pure and runs on a pool thread; a reply lives
 * on the loop. Prompt text is encoded as ordinary text: spellings of control tokens stay text. Who
 * wants control tokens gives ids. */
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/text/utf8.h"
#include "router/fields.h"
#include "router/json_out.h"

static const struct dmk_field_refused refused[] = {
    {"suffix", ""},
    {"best_of", "1"},
    {"use_beam_search", "false"},
    {"length_penalty", "1"},
    {"include_stop_str_in_output", "false"},
    {"prompt_logprobs", NULL},
    {"prompt_embeds", NULL},
    {"add_special_tokens", "false"},
    {"guided_json", NULL},
    {"guided_regex", NULL},
    {"guided_choice", NULL},
    {"guided_grammar", NULL},
    {"structured_outputs", NULL},
    {"logits_processors", NULL},
    {"bad_words", "[]"},
    {"truncate_prompt_tokens", NULL},
    {"kv_transfer_params", NULL},
};

static int read_ids(const json_t *list, struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);

        if (!json_is_integer(v) || json_integer_value(v) < 0 ||
            json_integer_value(v) >= DMK_VOCAB_SIZE) {
            return dmk_api_bad(reterr, "prompt", "prompt[%zu] must be a token id from 0 to %u", i,
                               DMK_VOCAB_SIZE - 1);
        }
        dmk_ids_push(&ask->prompt, (uint32_t)json_integer_value(v));
    }
    return 0;
}

static int read_prompt(const json_t *root, struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    const json_t *v = dmk_field_get(root, "prompt");

    if (json_is_array(v) && json_array_size(v) > 0 && !json_is_integer(json_array_get(v, 0))) {
        if (json_array_size(v) > 1) {
            return dmk_api_bad_code(reterr, "unsupported_value", "prompt",
                                    "prompt has %zu prompts; this server takes one a request",
                                    json_array_size(v));
        }
        v = json_array_get(v, 0);
    }
    if (json_is_string(v) && json_string_length(v) > 0) {
        dmk_buf_append_str(&ask->text, dmk_field_text(v));
        return ask->text.failed ? dmk_api_fail(reterr, 413, NULL, "the prompt is too large") : 0;
    }
    if (json_is_array(v) && json_array_size(v) > 0) {
        return read_ids(v, ask, reterr);
    }
    return dmk_api_bad(reterr, "prompt",
                       "prompt must be a text or a list of token ids, and not empty");
}

static int parse_root(const json_t *root, const struct dmk_api_limits *limits, struct dmk_ask *ask,
                      struct dmk_api_error *reterr)
{
    int64_t max_tokens = 16; /* what this API's documents say */
    int64_t logprobs = -1;
    int rc;

    if ((rc = dmk_fields_common(root, limits, ask, reterr)) < 0 ||
        (rc = dmk_fields_refuse(root, refused, sizeof(refused) / sizeof(refused[0]), reterr)) < 0 ||
        (rc = dmk_field_int(root, "", "max_tokens", 1, INT32_MAX, &max_tokens, reterr)) < 0 ||
        (rc = dmk_field_int(root, "", "logprobs", 0, DMK_ASK_MAX_TOP, &logprobs, reterr)) < 0 ||
        (rc = dmk_field_bool(root, "", "echo", &ask->echo, reterr)) < 0 ||
        (rc = read_prompt(root, ask, reterr)) < 0) {
        return rc;
    }
    ask->has_max_tokens = dmk_field_get(root, "max_tokens") != NULL;
    ask->max_tokens = (uint32_t)max_tokens;
    ask->logprobs = logprobs >= 0;
    ask->top_logprobs = logprobs > 0 ? (uint32_t)logprobs : 0;
    return 0;
}

static int completions_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                             struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    json_t *root;
    int rc = dmk_fields_open(body, &root, reterr);

    if (rc == 0) {
        rc = parse_root(root, limits, ask, reterr);
        json_decref(root);
    }
    return rc;
}

/* Lists of equal length, with commas; all that was not sent yet. */
struct lists {
    struct dmk_buf tokens, logprobs, top, offsets;
    uint32_t n;
};

struct choice {
    struct dmk_buf text;
    struct lists lists;
    size_t n_chars; /* code points of the text so far */
    enum dmk_finish finish;
};

struct reply {
    struct dmk_reply_conf conf; /* strings in it are not kept */
    struct dmk_buf head, out;
    uint32_t n;
    struct choice choices[];
};

static void *completions_reply_new(const struct dmk_reply_conf *conf)
{
    struct reply *r = calloc(1, sizeof(*r) + conf->n * sizeof(r->choices[0]));

    if (!r) {
        return NULL;
    }
    r->conf = *conf;
    r->n = conf->n;
    dmk_buf_printf(&r->head,
                   "{\"id\":\"cmpl-%s\",\"object\":\"text_completion\",\"created\":%lld,\"model\":",
                   conf->id_hex, (long long)conf->created_unix_s);
    dmk_out_str(&r->head, dmk_str_from(conf->model));
    dmk_buf_puts(&r->head, ",\"choices\":[");
    r->conf.id_hex = r->conf.model = NULL;
    return r;
}

static void completions_reply_free(void *reply)
{
    struct reply *r = reply;

    if (!r) {
        return;
    }
    for (uint32_t i = 0; i < r->n; i++) {
        dmk_buf_fini(&r->choices[i].text);
        dmk_buf_fini(&r->choices[i].lists.tokens);
        dmk_buf_fini(&r->choices[i].lists.logprobs);
        dmk_buf_fini(&r->choices[i].lists.top);
        dmk_buf_fini(&r->choices[i].lists.offsets);
    }
    dmk_buf_fini(&r->head);
    dmk_buf_fini(&r->out);
    free(r);
}

static void completions_error(const struct dmk_api_error *error, struct dmk_buf *out)
{
    dmk_api_error_json(error, out);
}

static void send_frame(struct reply *r)
{
    if (r->out.failed) {
        const struct dmk_api_error error = {.status = 500,
                                            .type = "server_error",
                                            .code = "out_of_memory",
                                            .text = "out of memory"};

        dmk_buf_reset(&r->out);
        completions_error(&error, &r->out);
    }
    r->conf.sink.frame(r->conf.sink.ud, NULL, dmk_buf_bytes(&r->out));
    dmk_buf_reset(&r->out);
}

/* A token as a key or list entry: text, or its bytes spelled out where it is no text by itself. */
static void write_token(struct dmk_buf *out, struct dmk_bytes bytes)
{
    if (dmk_utf8_valid_prefix(bytes.data, bytes.len) == bytes.len) {
        dmk_out_str(out, (struct dmk_str){(const char *)bytes.data, bytes.len});
        return;
    }
    dmk_buf_puts(out, "\"bytes:");
    for (size_t i = 0; i < bytes.len; i++) {
        dmk_buf_printf(out, "\\\\x%02x", bytes.data[i]);
    }
    dmk_buf_putc(out, '"');
}

static size_t count_chars(struct dmk_bytes bytes)
{
    size_t n = 0;

    for (size_t i = 0; i < bytes.len; i++) {
        n += (bytes.data[i] & 0xc0) != 0x80;
    }
    return n;
}

static void add_lps(struct choice *c, const struct dmk_lp *lps, size_t n)
{
    struct lists *l = &c->lists;
    size_t at = c->n_chars;

    for (size_t i = 0; i < n; i++) {
        const char *comma = l->n++ > 0 ? "," : "";

        dmk_buf_puts(&l->tokens, comma);
        write_token(&l->tokens, lps[i].bytes);
        dmk_buf_puts(&l->logprobs, comma);
        dmk_buf_puts(&l->top, comma);
        dmk_buf_printf(&l->offsets, "%s%zu", comma, at);
        at += count_chars(lps[i].bytes);
        if (!lps[i].has_logprob) {
            dmk_buf_puts(&l->logprobs, "null");
            dmk_buf_puts(&l->top, "null");
            continue;
        }
        dmk_out_logprob(&l->logprobs, lps[i].logprob);
        dmk_buf_putc(&l->top, '{');
        for (uint32_t k = 0; k < lps[i].n_top; k++) {
            dmk_buf_puts(&l->top, k ? "," : "");
            write_token(&l->top, lps[i].top[k].bytes);
            dmk_buf_putc(&l->top, ':');
            dmk_out_logprob(&l->top, lps[i].top[k].logprob);
        }
        dmk_buf_putc(&l->top, '}');
    }
}

/* One element of "choices"; takes what the lists hold. */
static void write_choice(struct reply *r, uint32_t index, struct dmk_str text, const char *finish)
{
    struct dmk_buf *out = &r->out;
    struct lists *l = &r->choices[index].lists;

    dmk_buf_puts(out, "{\"index\":");
    dmk_buf_put_u64(out, index);
    dmk_buf_puts(out, ",\"text\":");
    dmk_out_str(out, text);
    dmk_buf_puts(out, ",\"logprobs\":");
    if (r->conf.logprobs) {
        dmk_buf_puts(out, "{\"tokens\":[");
        dmk_buf_append_str(out, dmk_buf_str(&l->tokens));
        dmk_buf_puts(out, "],\"token_logprobs\":[");
        dmk_buf_append_str(out, dmk_buf_str(&l->logprobs));
        dmk_buf_puts(out, "],\"top_logprobs\":");
        if (r->conf.top_logprobs > 0) {
            dmk_buf_putc(out, '[');
            dmk_buf_append_str(out, dmk_buf_str(&l->top));
            dmk_buf_putc(out, ']');
        } else {
            dmk_buf_puts(out, "null");
        }
        dmk_buf_puts(out, ",\"text_offset\":[");
        dmk_buf_append_str(out, dmk_buf_str(&l->offsets));
        dmk_buf_puts(out, "]}");
    } else {
        dmk_buf_puts(out, "null");
    }
    if (finish) {
        dmk_buf_printf(out, ",\"finish_reason\":\"%s\"}", finish);
    } else {
        dmk_buf_puts(out, ",\"finish_reason\":null}");
    }
    out->failed = out->failed || l->tokens.failed || l->top.failed || l->logprobs.failed;
    dmk_buf_reset(&l->tokens);
    dmk_buf_reset(&l->logprobs);
    dmk_buf_reset(&l->top);
    dmk_buf_reset(&l->offsets);
    l->n = 0;
}

static void send_chunk(struct reply *r, uint32_t choice, struct dmk_str text, const char *finish)
{
    dmk_buf_append_str(&r->out, dmk_buf_str(&r->head));
    write_choice(r, choice, text, finish);
    dmk_buf_puts(&r->out, r->conf.include_usage ? "],\"usage\":null}" : "]}");
    send_frame(r);
}

static void add_text(struct reply *r, uint32_t choice, struct dmk_str text,
                     const struct dmk_lp *lps, size_t n_lps)
{
    struct choice *c = &r->choices[choice];

    add_lps(c, lps, n_lps);
    c->n_chars += count_chars((struct dmk_bytes){(const uint8_t *)text.data, text.len});
    if (r->conf.stream) {
        send_chunk(r, choice, text, NULL);
    } else {
        dmk_buf_append_str(&c->text, text);
    }
}

static void completions_prompt(void *reply, uint32_t choice, struct dmk_str text,
                               const struct dmk_lp *lps, size_t n_lps)
{
    add_text(reply, choice, text, lps, n_lps);
}

static void completions_event(void *reply, uint32_t choice, const struct dmk_event *event,
                              const struct dmk_lp *lps, size_t n_lps)
{
    struct reply *r = reply;

    dmk_assert(choice < r->n);
    if (event->kind == DMK_EVENT_CONTENT) {
        add_text(r, choice, event->text, lps, n_lps);
    }
}

static void completions_choice_end(void *reply, uint32_t choice, enum dmk_finish finish)
{
    struct reply *r = reply;

    dmk_assert(choice < r->n);
    r->choices[choice].finish = finish;
    if (r->conf.stream) {
        send_chunk(r, choice, dmk_str_from(""), dmk_finish_name(finish));
    }
}

static void completions_end(void *reply, const struct dmk_usage *usage)
{
    struct reply *r = reply;

    if (r->conf.stream && !r->conf.include_usage) {
        return;
    }
    dmk_buf_append_str(&r->out, dmk_buf_str(&r->head));
    for (uint32_t i = 0; i < r->n && !r->conf.stream; i++) {
        dmk_buf_puts(&r->out, i ? "," : "");
        write_choice(r, i, dmk_buf_str(&r->choices[i].text), dmk_finish_name(r->choices[i].finish));
        r->out.failed = r->out.failed || r->choices[i].text.failed;
    }
    dmk_buf_puts(&r->out, "],\"usage\":");
    dmk_out_usage(&r->out, usage);
    dmk_buf_putc(&r->out, '}');
    send_frame(r);
}

const struct dmk_dialect dmk_dialect_completions = {
    .name = "completions",
    .path = "/v1/completions",
    .http = true,
    .content_type = "application/json",
    .parse = completions_parse,
    .reply_new = completions_reply_new,
    .prompt = completions_prompt,
    .event = completions_event,
    .choice_end = completions_choice_end,
    .end = completions_end,
    .reply_free = completions_reply_free,
    .error = completions_error,
};
