/* The "plain" format: ids are text, for completions. The prompt is the messages' texts one after the other;
 * the output is content. Control tokens in the output are dropped and counted, so that their spelling never
 * reaches a client. One thread per parser. */
#include "common/chat/formats.h"

#include <stdlib.h>
#include "common/text/utf8.h"

struct dmk_parser {
    struct dmk_parser_conf conf;
    struct dmk_utf8_stream utf8;
    struct dmk_buf delta;
    uint32_t n_tokens;
    struct dmk_parse_result result;
};

static const uint32_t stop_ids[] = {DMK_TOKEN_RETURN, DMK_TOKEN_CALL, DMK_TOKEN_END_OF_TEXT};

static int render(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                  const struct dmk_conv_view *conv, const struct dmk_format_options *options,
                  struct dmk_ids *ids, struct dmk_error *reterr)
{
    (void)options;
    for (size_t i = 0; i < conv->n_messages; i++) {
        dmk_encode(vocab, scratch, conv->messages[i].content, ids);
    }
    if (ids->failed) {
        return dmk_error_set(reterr, -DMK_EFULL,
                             "the prompt has more tokens than fit into one prompt");
    }
    return 0;
}

static struct dmk_parser *parser_new(const struct dmk_parser_conf *conf)
{
    struct dmk_parser *parser = calloc(1, sizeof(*parser));

    if (parser) {
        parser->conf = *conf;
        dmk_buf_init(&parser->delta, 0);
    }
    return parser;
}

static void send_delta(struct dmk_parser *parser)
{
    if (parser->delta.len) {
        const struct dmk_event event = {.kind = DMK_EVENT_CONTENT,
                                        .text = dmk_buf_str(&parser->delta),
                                        .token_index = parser->n_tokens ? parser->n_tokens - 1 : 0};

        parser->conf.on_event(parser->conf.ud, &event);
        dmk_buf_reset(&parser->delta);
    }
}

static void parser_push(struct dmk_parser *parser, uint32_t id)
{
    if (parser->result.stop_id) {
        return;
    }
    parser->n_tokens++;
    for (size_t i = 0; i < sizeof(stop_ids) / sizeof(stop_ids[0]); i++) {
        if (id == stop_ids[i]) {
            parser->result.stop_id = parser->conf.runs_on ? 0 : id;
            return;
        }
    }
    if (dmk_token_is_special(id)) {
        parser->result.n_recovered++;
        parser->result.repairs[DMK_REPAIR_STRAY_TOKEN]++;
        return;
    }
    dmk_utf8_stream_push(&parser->utf8, dmk_token_bytes(parser->conf.vocab, id), &parser->delta);
    send_delta(parser);
}

static void parser_end(struct dmk_parser *parser, bool cut, struct dmk_parse_result *ret_result)
{
    (void)cut;
    dmk_utf8_stream_end(&parser->utf8, &parser->delta);
    send_delta(parser);
    *ret_result = parser->result;
}

static void parser_free(struct dmk_parser **parser)
{
    if (*parser) {
        dmk_buf_fini(&(*parser)->delta);
        free(*parser);
        *parser = NULL;
    }
}

const struct dmk_format dmk_format_plain = {
    .name = "plain",
    .render = render,
    .stop_ids = stop_ids,
    .n_stop_ids = sizeof(stop_ids) / sizeof(stop_ids[0]),
    .parser_new = parser_new,
    .parser_push = parser_push,
    .parser_end = parser_end,
    .parser_free = parser_free,
};
