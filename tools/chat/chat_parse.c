/* A model's output, as ids in a line of JSON, to what a client would get. Cold code for a tool; one
 * thread. */
#include "tools/chat/chat_json.h"

#include <stdlib.h>

#define MAX_TOOL_NAMES 1024

/* What the events add up to. */
struct collector {
    struct dmk_buf reasoning, content, arguments;
    json_t *calls;  /* array */
    json_t *events; /* array, or NULL */
};

static json_t *text_or_null(const struct dmk_buf *buf)
{
    return buf->len ? json_stringn(buf->data, buf->len) : json_null();
}

static void collect_call(struct collector *c, const struct dmk_event *event)
{
    json_t *call = json_array_get(c->calls, event->call_index);

    switch (event->kind) {
    case DMK_EVENT_CALL_BEGIN:
        dmk_buf_reset(&c->arguments);
        json_array_append_new(c->calls,
                              json_pack("{s:s%, s:s%, s:s, s:b}", "id", event->call_id.data,
                                        event->call_id.len, "name", event->name.data,
                                        event->name.len, "arguments", "", "finished", 0));
        break;
    case DMK_EVENT_CALL_DELTA:
        dmk_buf_append_str(&c->arguments, event->text);
        json_object_set_new(call, "arguments", json_stringn(c->arguments.data, c->arguments.len));
        break;
    default:
        json_object_set_new(call, "finished", json_true());
    }
}

static void collect(void *ud, const struct dmk_event *event)
{
    static const char *const kinds[] = {[DMK_EVENT_REASONING] = "reasoning",
                                        [DMK_EVENT_CONTENT] = "content",
                                        [DMK_EVENT_CALL_BEGIN] = "call_begin",
                                        [DMK_EVENT_CALL_DELTA] = "call_delta",
                                        [DMK_EVENT_CALL_END] = "call_end"};
    struct collector *c = ud;
    const struct dmk_str text = event->kind == DMK_EVENT_CALL_BEGIN ? event->name : event->text;

    if (c->events) {
        json_array_append_new(c->events, json_pack("[s, i, s%]", kinds[event->kind],
                                                   (int)event->token_index, text.data, text.len));
    }
    if (event->kind == DMK_EVENT_REASONING) {
        dmk_buf_append_str(&c->reasoning, event->text);
    } else if (event->kind == DMK_EVENT_CONTENT) {
        dmk_buf_append_str(&c->content, event->text);
    } else {
        collect_call(c, event);
    }
}

static json_t *make_result(struct collector *c, const struct dmk_parse_result *result)
{
    json_t *repairs = json_object();

    for (unsigned i = 0; i < DMK_N_REPAIRS; i++) {
        if (result->repairs[i]) {
            json_object_set_new(repairs, dmk_repair_name((enum dmk_repair)i),
                                json_integer(result->repairs[i]));
        }
    }
    json_t *object =
        json_pack("{s:o, s:o, s:O, s:s, s:i, s:i, s:o}", "reasoning", text_or_null(&c->reasoning),
                  "content", text_or_null(&c->content), "calls", c->calls, "finish",
                  result->end == DMK_PARSE_TOOL_CALLS ? "tool_calls" : "stop", "stop_id",
                  (int)result->stop_id, "n_reasoning_tokens", (int)result->n_reasoning_tokens,
                  "repairs", repairs);

    if (object && c->events) {
        json_object_set(object, "events", c->events);
    }
    return object;
}

static void feed(const struct dmk_format *format, struct dmk_parser *parser, const json_t *line,
                 struct dmk_parse_result *ret_result)
{
    const json_t *ids = json_object_get(line, "ids");

    for (size_t i = 0; i < json_array_size(ids); i++) {
        const json_int_t id = json_integer_value(json_array_get(ids, i));

        format->parser_push(parser, id < 0 || id > UINT32_MAX ? UINT32_MAX : (uint32_t)id);
    }
    format->parser_end(parser, json_is_true(json_object_get(line, "cut")), ret_result);
}

int dmk_chat_parse_ids(const json_t *line, const struct dmk_format *format,
                       const struct dmk_vocab *vocab, json_t **ret_result, struct dmk_error *reterr)
{
    static struct dmk_str names[MAX_TOOL_NAMES];
    struct collector c = {.calls = json_array()};
    struct dmk_parser_conf conf = {
        .vocab = vocab, .tool_names = names, .on_event = collect, .ud = &c};
    struct dmk_parse_result result;
    json_t *tools = NULL, *ids = NULL, *object = NULL;
    int r = dmk_json_get_array(line, "line", "ids", DMK_JSON_REQUIRED, &ids, reterr);

    r = r < 0 ? r : dmk_json_get_array(line, "line", "tools", DMK_JSON_OPTIONAL, &tools, reterr);
    r = r < 0 ? r
              : dmk_json_get_u64(line, "line", "seed", DMK_JSON_OPTIONAL, 0, INT64_MAX,
                                 &conf.call_id_seed, reterr);
    if (r < 0) {
        json_decref(c.calls);
        return r;
    }
    r = 0;
    c.events = json_is_true(json_object_get(line, "events")) ? json_array() : NULL;
    conf.tools_allowed = tools != NULL;
    for (size_t i = 0; i < json_array_size(tools) && i < MAX_TOOL_NAMES; i++) {
        const json_t *name = json_array_get(tools, i);

        names[conf.n_tool_names++] =
            (struct dmk_str){json_string_value(name), json_string_length(name)};
    }
    dmk_buf_init(&c.reasoning, 0);
    dmk_buf_init(&c.content, 0);
    dmk_buf_init(&c.arguments, 0);
    struct dmk_parser *parser = format->parser_new(&conf);

    if (parser) {
        feed(format, parser, line, &result);
        format->parser_free(&parser);
        object = make_result(&c, &result);
    }
    if (object) {
        *ret_result = object;
    } else {
        r = dmk_error_set(reterr, -DMK_ENOMEM, "out of memory");
    }
    dmk_buf_fini(&c.reasoning);
    dmk_buf_fini(&c.content);
    dmk_buf_fini(&c.arguments);
    json_decref(c.calls);
    json_decref(c.events);
    return r;
}
