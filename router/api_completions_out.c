/* Completions: text to chunks of a stream or to one whole body.
 *
 * One reply for each request, on the loop. Where a request has several prompts, the choices of the first
 * come first. Log-probabilities are told as lists of equal length, with the place of each token in the
 * text, in characters. */
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/text/utf8.h"
#include "router/answer.h"
#include "router/api_completions.h"
#include "router/json_out.h"

/* Lists of equal length, with commas; all that was not sent yet. */
struct lists {
    struct dmk_buf tokens, logprobs, top, offsets;
    uint32_t n;
    size_t n_chars; /* code points of the choice's text so far */
};

struct reply {
    struct dmk_answer a;
    struct lists *lists; /* [n] */
};

static void completions_reply_free(void *reply)
{
    struct reply *r = reply;

    if (!r) {
        return;
    }
    for (uint32_t i = 0; i < r->a.conf.n; i++) {
        dmk_buf_fini(&r->lists[i].tokens);
        dmk_buf_fini(&r->lists[i].logprobs);
        dmk_buf_fini(&r->lists[i].top);
        dmk_buf_fini(&r->lists[i].offsets);
    }
    free(r->lists);
    dmk_answer_fini(&r->a);
    free(r);
}

static void *completions_reply_new(const struct dmk_reply_conf *conf)
{
    struct reply *r = calloc(1, sizeof(*r));

    if (r) {
        r->lists = calloc(conf->n, sizeof(r->lists[0]));
    }
    if (!r || !r->lists || dmk_answer_init(&r->a, conf, "cmpl-", "text_completion") < 0) {
        free(r ? r->lists : NULL);
        free(r);
        return NULL;
    }
    return r;
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

static void add_lps(struct lists *l, const struct dmk_lp *lps, size_t n)
{
    size_t at = l->n_chars;

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

/* ,"text":...,"logprobs":...; takes what the lists hold. */
static void write_text(struct reply *r, uint32_t choice, struct dmk_str text)
{
    struct dmk_buf *out = &r->a.out;
    struct lists *l = &r->lists[choice];

    dmk_buf_puts(out, ",\"text\":");
    dmk_out_str(out, text);
    if (!r->a.conf.logprobs) {
        dmk_buf_puts(out, ",\"logprobs\":null");
        return;
    }
    dmk_buf_puts(out, ",\"logprobs\":{\"tokens\":[");
    dmk_buf_append_str(out, dmk_buf_str(&l->tokens));
    dmk_buf_puts(out, "],\"token_logprobs\":[");
    dmk_buf_append_str(out, dmk_buf_str(&l->logprobs));
    dmk_buf_puts(out, "],\"top_logprobs\":");
    if (r->a.conf.top_logprobs > 0) {
        dmk_buf_putc(out, '[');
        dmk_buf_append_str(out, dmk_buf_str(&l->top));
        dmk_buf_putc(out, ']');
    } else {
        dmk_buf_puts(out, "null");
    }
    dmk_buf_puts(out, ",\"text_offset\":[");
    dmk_buf_append_str(out, dmk_buf_str(&l->offsets));
    dmk_buf_puts(out, "]}");
    r->a.failed =
        r->a.failed || l->tokens.failed || l->top.failed || l->logprobs.failed || l->offsets.failed;
    dmk_buf_reset(&l->tokens);
    dmk_buf_reset(&l->logprobs);
    dmk_buf_reset(&l->top);
    dmk_buf_reset(&l->offsets);
    l->n = 0;
}

static void send_chunk(struct reply *r, uint32_t choice, struct dmk_str text, const char *finish)
{
    dmk_answer_open(&r->a, choice);
    write_text(r, choice, text);
    dmk_answer_close(&r->a, finish);
}

static void add_text(struct reply *r, uint32_t choice, const struct dmk_event *event,
                     const struct dmk_lp *lps, size_t n_lps)
{
    struct lists *l = &r->lists[choice];

    dmk_assert(choice < r->a.conf.n);
    if (r->a.conf.logprobs) {
        add_lps(l, lps, n_lps);
        l->n_chars +=
            count_chars((struct dmk_bytes){(const uint8_t *)event->text.data, event->text.len});
    }
    if (r->a.conf.stream) {
        send_chunk(r, choice, event->text, NULL);
    } else {
        dmk_answer_keep(&r->a, choice, event);
    }
}

static void completions_prompt(void *reply, uint32_t choice, struct dmk_str text,
                               const struct dmk_lp *lps, size_t n_lps)
{
    const struct dmk_event event = {.kind = DMK_EVENT_CONTENT, .text = text};

    add_text(reply, choice, &event, lps, n_lps);
}

static void completions_event(void *reply, uint32_t choice, const struct dmk_event *event,
                              const struct dmk_lp *lps, size_t n_lps)
{
    if (event->kind == DMK_EVENT_CONTENT) {
        add_text(reply, choice, event, lps, n_lps);
    }
}

static void completions_choice_end(void *reply, uint32_t choice, enum dmk_finish finish)
{
    struct reply *r = reply;

    dmk_assert(choice < r->a.conf.n);
    r->a.choices[choice].finish = finish;
    if (r->a.conf.stream) {
        send_chunk(r, choice, dmk_str_from(""), dmk_finish_name(finish));
    }
}

static void write_choice(struct dmk_answer *a, uint32_t choice)
{
    /* a is the reply's first member. */
    write_text((struct reply *)(void *)a, choice, dmk_buf_str(&a->choices[choice].content));
}

static void completions_end(void *reply, const struct dmk_usage *usage)
{
    struct reply *r = reply;

    dmk_answer_end(&r->a, usage, write_choice);
}

const struct dmk_dialect dmk_dialect_completions = {
    .name = "completions",
    .path = "/v1/completions",
    .http = true,
    .content_type = "application/json",
    .done_mark = true,
    .parse = dmk_api_completions_parse,
    .tables = &dmk_api_completions_tables,
    .reply_new = completions_reply_new,
    .prompt = completions_prompt,
    .event = completions_event,
    .choice_end = completions_choice_end,
    .rank = dmk_answer_rank,
    .end = completions_end,
    .reply_free = completions_reply_free,
    .error = dmk_api_error_json,
};
