/* The streaming parser of what a model writes behind "<|start|>assistant".
 *
 *                 text, <|channel|>             <|message|>
 *   EXPECT_START -------------------> HEADER ----------------> CONTENT
 *     ^  ^   |        <|start|>        |  ^                     |  |
 *     |  |   '-------------------------'  '---------------------'  |
 *     |  |           <|end|>           |    <|start|>, <|channel|> |
 *     |  '-----------------------------'                           |
 *     '----------------------------- <|end|> ----------------------'
 *   any state: <|return|>, <|call|>, <|endoftext|> -> STOPPED, where ids are ignored
 *
 * The parser starts in HEADER with the assistant as author. Arrows that a good output does not take are
 * repairs: counted, never errors. A header that ends without its mark becomes text of its channel. Other
 * control tokens are dropped, so no spelling of one reaches a client.
 *
 * What text is, and when it may be shown, is decided in harmony_fields.h. Single words dropped from headers
 * are shown only when nothing else is. One thread at a time; memory grows with what is held back, up to a
 * bound. */
#include "common/chat/harmony_parse.h"

#include <stdlib.h>
#include "common/chat/harmony_fields.h"
#include "common/chat/harmony_header.h"
#include "common/text/utf8.h"

#define MAX_HEADER_IDS  256
#define MAX_SPARE_BYTES ((size_t)1 << 20)

enum state { EXPECT_START, HEADER, CONTENT, STOPPED };

/* Where the text of a message goes. */
enum target {
    TO_HELD = DMK_FIELD_HELD,
    TO_REASONING = DMK_FIELD_REASONING,
    TO_CONTENT = DMK_FIELD_CONTENT,
    TO_CALL
};

struct parser {
    struct dmk_parser_conf conf;
    struct dmk_str *tool_names;

    enum state state;
    enum target target; /* in CONTENT */
    bool assistant;     /* in HEADER: the author is known */
    bool has_text;      /* the message's text has begun */
    uint32_t n_calls;   /* begun */
    uint32_t n_tokens;
    uint32_t n_body_tokens; /* of the open message: those that its text comes from */

    uint32_t header_ids[MAX_HEADER_IDS];
    size_t n_header_ids;
    uint32_t n_header_words; /* tokens of text in the header that was read last */
    struct dmk_harmony_header header;

    struct dmk_utf8_stream utf8;
    struct dmk_buf delta; /* begins with a newline that is sent only between messages */
    struct dmk_harmony_fields fields;
    struct dmk_buf spare; /* words dropped from headers */
    struct dmk_parse_result result;
};

static struct parser *self(struct dmk_parser *parser)
{
    return (struct parser *)(void *)parser;
}

static void count(struct parser *p, enum dmk_repair repair)
{
    p->result.repairs[repair]++;
    p->result.n_recovered++;
}

/* ---- text ---- */

static void send_call_event(struct parser *p, enum dmk_event_kind kind, struct dmk_str text)
{
    const struct dmk_event event = {.kind = kind,
                                    .text = text,
                                    .call_index = p->n_calls - 1,
                                    .token_index = p->fields.token_index};

    p->conf.on_event(p->conf.ud, &event);
}

/* Passes on what delta has behind its newline. */
static void send_delta(struct parser *p)
{
    const struct dmk_str text = {p->delta.data + 1, p->delta.len - 1};
    const bool begins = !p->has_text;

    if (text.len == 0) {
        return;
    }
    p->has_text = true;
    if (p->target == TO_CALL) {
        send_call_event(p, DMK_EVENT_CALL_DELTA, text);
        return;
    }
    dmk_harmony_fields_add(&p->fields, (enum dmk_harmony_field)p->target, begins, text);
    if (p->target == TO_HELD && !p->fields.held) {
        p->target = TO_REASONING; /* There was too much of it to hold. */
    }
}

static void push_bytes(struct parser *p, struct dmk_bytes bytes)
{
    p->delta.len = 1;
    dmk_utf8_stream_push(&p->utf8, bytes, &p->delta);
    send_delta(p);
}

/* ---- messages ---- */

static bool is_declared(const struct parser *p, struct dmk_str name)
{
    for (size_t i = 0; i < p->conf.n_tool_names; i++) {
        if (dmk_str_equal(p->tool_names[i], name)) {
            return true;
        }
    }
    return false;
}

static enum target target_of_channel(struct parser *p, enum dmk_harmony_channel channel)
{
    switch (channel) {
    case DMK_CHANNEL_ANALYSIS:
        return TO_REASONING;
    case DMK_CHANNEL_COMMENTARY:
    case DMK_CHANNEL_FINAL:
        return TO_CONTENT;
    case DMK_CHANNEL_NONE:
    case DMK_CHANNEL_UNKNOWN:
        break;
    }
    count(p, DMK_REPAIR_NO_CHANNEL);
    return TO_HELD;
}

/* What the recipient makes of the message; *ret_name is the function's name for a call. */
static enum target find_target(struct parser *p, struct dmk_str *ret_name)
{
    static const char prefix[] = "functions.";
    const struct dmk_harmony_header *header = &p->header;
    struct dmk_str name = header->recipient;
    const bool is_function = name.len >= sizeof(prefix) && !header->form.bare_name;

    if (header->foreign) {
        count(p, DMK_REPAIR_FOREIGN_AUTHOR);
        return TO_HELD;
    }
    if (is_function) {
        name = (struct dmk_str){name.data + sizeof(prefix) - 1, name.len - sizeof(prefix) + 1};
    }
    if (name.len && (is_function || is_declared(p, name))) {
        if (p->conf.tools_allowed) {
            if (header->channel == DMK_CHANNEL_UNKNOWN) {
                count(p, DMK_REPAIR_NO_CHANNEL);
            }
            *ret_name = name;
            return TO_CALL;
        }
        count(p, DMK_REPAIR_CALL_NOT_ALLOWED);
        return TO_CONTENT;
    }
    if (name.len && !dmk_str_is(name, "all")) {
        count(p, DMK_REPAIR_UNKNOWN_RECIPIENT);
    }
    return target_of_channel(p, header->channel);
}

static void begin_call(struct parser *p, struct dmk_str name)
{
    char id[DMK_CALL_ID_BYTES];
    struct dmk_event event = {.kind = DMK_EVENT_CALL_BEGIN,
                              .call_index = p->n_calls,
                              .token_index = p->fields.token_index};

    dmk_call_id_make(p->conf.call_id_seed, p->n_calls, &p->header.form, id);
    p->delta.len = 1;
    dmk_utf8_append_lossy(&p->delta, (struct dmk_bytes){(const uint8_t *)name.data, name.len});
    event.name = (struct dmk_str){p->delta.data + 1, p->delta.len - 1};
    if (event.name.len != name.len || memcmp(event.name.data, name.data, name.len) != 0) {
        count(p, DMK_REPAIR_HEADER_NOISE); /* The name held bytes that are no text. */
    }
    event.call_id = (struct dmk_str){id, DMK_CALL_ID_LEN};
    p->n_calls++;
    p->conf.on_event(p->conf.ud, &event);
}

static void begin_message(struct parser *p)
{
    struct dmk_str name = {"", 0};

    p->state = CONTENT;
    p->has_text = false;
    p->target = find_target(p, &name);
    if (p->target == TO_CALL) {
        dmk_harmony_fields_decide(&p->fields, false);
        begin_call(p, name);
    }
}

/* cut: from outside, so a call is not finished. */
static void end_message(struct parser *p, bool cut)
{
    p->delta.len = 1;
    dmk_utf8_stream_end(&p->utf8, &p->delta);
    send_delta(p);
    if (p->target != TO_CALL) {
        dmk_harmony_fields_count(&p->fields, (enum dmk_harmony_field)p->target, p->n_body_tokens);
    } else if (!cut) {
        send_call_event(p, DMK_EVENT_CALL_END, (struct dmk_str){"", 0});
        p->result.n_calls++;
        p->result.end = DMK_PARSE_TOOL_CALLS;
    }
    p->n_body_tokens = 0;
    p->state = EXPECT_START;
}

static void read_header(struct parser *p, bool closed)
{
    p->n_header_words = 0;
    for (size_t i = 0; i < p->n_header_ids; i++) {
        p->n_header_words += !dmk_token_is_special(p->header_ids[i]);
    }
    dmk_harmony_header_read(&p->header, p->conf.vocab, p->header_ids, p->n_header_ids, p->assistant,
                            closed);
    p->n_header_ids = 0;
}

static void begin_header(struct parser *p, bool assistant)
{
    p->state = HEADER;
    p->assistant = assistant;
    p->n_header_ids = 0;
}

/* Words of a header that turn out to be text. */
static void push_header_text(struct parser *p, struct dmk_bytes bytes)
{
    p->n_body_tokens += p->n_header_words;
    p->n_header_words = 0;
    push_bytes(p, bytes);
}

/* Text that stands before any channel is a message of its own, on no channel. */
static void push_prose(struct parser *p)
{
    if (p->header.prose.len == 0) {
        return;
    }
    p->state = CONTENT;
    p->has_text = false;
    p->target = target_of_channel(p, DMK_CHANNEL_NONE);
    push_header_text(p, dmk_buf_bytes(&p->header.prose));
}

/* <|message|>. Several words before the channel are text; other words that meant nothing are kept in case
 * nothing else is shown. */
static void close_header(struct parser *p)
{
    read_header(p, true);
    if (p->header.noise) {
        count(p, DMK_REPAIR_HEADER_NOISE);
    }
    if (p->header.no_author) {
        count(p, DMK_REPAIR_NO_AUTHOR);
    }
    if (p->header.prose.len && memchr(p->header.prose.data, ' ', p->header.prose.len)) {
        push_prose(p);
        end_message(p, false);
    } else if (p->spare.len < MAX_SPARE_BYTES) {
        dmk_utf8_append_lossy(&p->spare, dmk_buf_bytes(&p->header.prose));
    }
    if (p->spare.len < MAX_SPARE_BYTES) {
        dmk_utf8_append_lossy(&p->spare, dmk_buf_bytes(&p->header.rest));
    }
    begin_message(p);
}

/* A header that ended, or grew too long, without its mark: what can not be header is the body. Afterwards
 * the parser stands in CONTENT if there was any, else where it was. */
static void open_header(struct parser *p, bool cut)
{
    read_header(p, false);
    if (cut && p->header.partial) {
        return;
    }
    count(p, DMK_REPAIR_NO_MESSAGE);
    push_prose(p);
    if (p->header.rest.len || (p->header.recipient.len && !p->header.prose.len)) {
        if (p->state == CONTENT) {
            end_message(p, cut);
        }
        begin_message(p);
        push_header_text(p, dmk_buf_bytes(&p->header.rest));
    }
}

static bool header_says_nothing(const struct parser *p)
{
    return p->n_header_ids == 0;
}

/* Ends whatever is open. */
static void finish(struct parser *p, bool cut)
{
    if (p->state == HEADER && !header_says_nothing(p)) {
        open_header(p, cut);
    }
    if (p->state == CONTENT) {
        end_message(p, cut);
    }
    p->state = EXPECT_START;
}

/* ---- ids ---- */

static void push_header_id(struct parser *p, uint32_t id)
{
    p->header_ids[p->n_header_ids++] = id;
    if (p->n_header_ids == MAX_HEADER_IDS) {
        open_header(p, false);
        if (p->state == HEADER) {
            begin_message(p);
        }
    }
}

static void push_start(struct parser *p)
{
    if (p->state == CONTENT) {
        count(p, DMK_REPAIR_OPEN_MESSAGE);
        finish(p, false);
    } else if (p->state == HEADER && header_says_nothing(p)) {
        count(p, DMK_REPAIR_STRAY_TOKEN);
    } else {
        finish(p, false);
    }
    begin_header(p, false);
}

static void push_channel(struct parser *p)
{
    if (p->state == CONTENT) {
        count(p, DMK_REPAIR_OPEN_MESSAGE);
        finish(p, false);
        begin_header(p, true);
    } else if (p->state == EXPECT_START) {
        count(p, DMK_REPAIR_NO_START);
        begin_header(p, true);
    }
    push_header_id(p, DMK_TOKEN_CHANNEL);
}

static void push_message(struct parser *p)
{
    if (p->state == CONTENT) {
        count(p, DMK_REPAIR_STRAY_TOKEN);
        return;
    }
    if (p->state == EXPECT_START) {
        count(p, DMK_REPAIR_NO_START);
        begin_header(p, true);
    }
    close_header(p);
}

static void push_text(struct parser *p, uint32_t id)
{
    if (p->state == CONTENT) {
        p->n_body_tokens++;
        push_bytes(p, dmk_token_bytes(p->conf.vocab, id));
        return;
    }
    if (p->state == EXPECT_START) {
        count(p, DMK_REPAIR_NO_START);
        begin_header(p, true);
    }
    push_header_id(p, id);
}

/* <|end|> and the stop ids. */
static void push_end(struct parser *p)
{
    if (p->state == EXPECT_START || (p->state == HEADER && header_says_nothing(p))) {
        count(p, DMK_REPAIR_STRAY_TOKEN);
    }
    finish(p, false);
}

void dmk_harmony_parser_push(struct dmk_parser *parser, uint32_t id)
{
    struct parser *p = self(parser);

    if (p->state == STOPPED) {
        return;
    }
    p->fields.token_index = p->n_tokens++;
    switch (id) {
    case DMK_TOKEN_RETURN:
    case DMK_TOKEN_CALL:
    case DMK_TOKEN_END_OF_TEXT:
        push_end(p);
        if (!p->conf.runs_on) {
            p->result.stop_id = id;
            p->state = STOPPED;
        }
        break;
    case DMK_TOKEN_END:
        push_end(p);
        break;
    case DMK_TOKEN_START:
        push_start(p);
        break;
    case DMK_TOKEN_CHANNEL:
        push_channel(p);
        break;
    case DMK_TOKEN_MESSAGE:
        push_message(p);
        break;
    case DMK_TOKEN_CONSTRAIN:
        if (p->state == HEADER) {
            push_header_id(p, id);
        } else {
            count(p, DMK_REPAIR_STRAY_TOKEN);
        }
        break;
    default:
        if (dmk_token_is_special(id)) {
            count(p, DMK_REPAIR_STRAY_TOKEN);
        } else {
            push_text(p, id);
        }
    }
}

void dmk_harmony_parser_end(struct dmk_parser *parser, bool cut,
                            struct dmk_parse_result *ret_result)
{
    struct parser *p = self(parser);

    if (p->state != STOPPED) {
        finish(p, cut);
        p->state = STOPPED;
    }
    dmk_harmony_fields_decide(&p->fields, !cut && !p->fields.sent_content && p->n_calls == 0);
    if (p->spare.len && !p->fields.sent_content && !p->fields.sent_reasoning && p->n_calls == 0) {
        dmk_harmony_fields_add(&p->fields, cut ? DMK_FIELD_REASONING : DMK_FIELD_CONTENT, false,
                               dmk_buf_str(&p->spare));
    }
    p->result.n_reasoning_tokens = p->fields.n_reasoning_tokens;
    *ret_result = p->result;
}

/* ---- life ---- */

static bool copy_tool_names(struct parser *p)
{
    const size_t n = p->conf.n_tool_names;
    size_t bytes = n * sizeof(*p->tool_names);

    for (size_t i = 0; i < n; i++) {
        bytes += p->conf.tool_names[i].len;
    }
    p->tool_names = malloc(bytes + 1);
    if (!p->tool_names) {
        return false;
    }
    char *at = (char *)(p->tool_names + n);

    for (size_t i = 0; i < n; i++) {
        const struct dmk_str name = p->conf.tool_names[i];

        if (name.len) {
            memcpy(at, name.data, name.len);
        }
        p->tool_names[i] = (struct dmk_str){at, name.len};
        at += name.len;
    }
    return true;
}

struct dmk_parser *dmk_harmony_parser_new(const struct dmk_parser_conf *conf)
{
    struct parser *p = calloc(1, sizeof(*p));

    if (!p) {
        return NULL;
    }
    p->conf = *conf;
    if (!copy_tool_names(p)) {
        free(p);
        return NULL;
    }
    p->conf.tool_names = p->tool_names;
    dmk_harmony_header_init(&p->header);
    dmk_buf_init(&p->delta, 0);
    dmk_buf_init(&p->spare, 0);
    dmk_harmony_fields_init(&p->fields, conf->on_event, conf->ud);
    dmk_buf_putc(&p->delta, '\n');
    begin_header(p, true);
    struct dmk_parser *parser = (struct dmk_parser *)(void *)p;

    if (p->delta.failed) {
        dmk_harmony_parser_free(&parser);
    }
    return parser;
}

void dmk_harmony_parser_free(struct dmk_parser **parser)
{
    if (!*parser) {
        return;
    }
    struct parser *p = self(*parser);

    dmk_harmony_header_fini(&p->header);
    dmk_buf_fini(&p->delta);
    dmk_buf_fini(&p->spare);
    dmk_harmony_fields_fini(&p->fields);
    free(p->tool_names);
    free(p);
    *parser = NULL;
}
