/* Chat Completions: bodies, good and bad, and the bytes of answers. */
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include "router/api.h"

#define M "\"model\":\"gpt-oss-20b\""
#define U "\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"

static const struct dmk_api_limits limits = {.max_choices = 128,
                                             .max_conv_bytes = 1 << 20,
                                             .max_messages = 16,
                                             .max_tools = 4,
                                             .date_unix_s = -1};

static int parse(const char *body, struct dmk_ask *ask, struct dmk_api_error *error)
{
    dmk_ask_init(ask, 0);
    return dmk_dialect_chat.parse((struct dmk_bytes){(const uint8_t *)body, strlen(body)}, &limits,
                                  ask, error);
}

static void test_bad_bodies(void **state)
{
    static const struct {
        const char *body;
        const char *param;
    } rows[] = {
        {"{:", ""},
        {"", ""},
        {"null", ""},
        {"[]", ""},
        {"{" M ",\"messages\":[{\"role\":\"user\",\"content\":\"", ""},
        {"{" M "," U ",\"x\":\"\xff\"}", ""},
        {"{" M "," U "}x", ""},
        {"{" M "," U "," M "}", ""},
        {"{" U "}", "model"},
        {"{\"model\":5," U "}", "model"},
        {"{\"model\":\"a\\nb\"," U "}", "model"},
        {"{" M "}", "messages"},
        {"{" M ",\"messages\":[]}", "messages"},
        {"{" M ",\"messages\":{}}", "messages"},
        {"{" M ",\"messages\":[\"x\"]}", "messages[0]"},
        {"{" M ",\"messages\":[{\"role\":\"wizard\",\"content\":\"x\"}]}", "messages[0].role"},
        {"{" M ",\"messages\":[{\"content\":\"x\"}]}", "messages[0].role"},
        {"{" M ",\"messages\":[{\"role\":\"user\"}]}", "messages[0].content"},
        {"{" M ",\"messages\":[{\"role\":\"user\",\"content\":5}]}", "messages[0].content"},
        {"{" M ",\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}",
         "messages[0].content[0].type"},
        {"{" M ",\"messages\":[{\"role\":\"user\",\"content\":[7]}]}", "messages[0].content[0]"},
        {"{" M ",\"messages\":[{\"role\":\"user\",\"content\":\"x\",\"name\":\"a<b\"}]}",
         "messages[0].name"},
        {"{" M ",\"messages\":[{\"role\":\"assistant\"}]}", "messages[0].content"},
        {"{" M ",\"messages\":[{\"role\":\"tool\",\"content\":\"x\"}]}",
         "messages[0].tool_call_id"},
        {"{" M ",\"messages\":[{\"role\":\"tool\",\"content\":\"x\",\"tool_call_id\":\"c\"}]}",
         "messages[0].tool_call_id"},
        {"{" M ",\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"c\",\"function\":"
         "{\"name\":\"a b\",\"arguments\":\"\"}}]}]}",
         "messages[0].tool_calls[0].function.name"},
        {"{" M ",\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"c\",\"function\":"
         "{\"name\":\"f\",\"arguments\":{\"a\":1}}}]}]}",
         "messages[0].tool_calls[0].function.arguments"},
        {"{" M ",\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"c\",\"type\":"
         "\"custom\",\"function\":{\"name\":\"f\",\"arguments\":\"\"}}]}]}",
         "messages[0].tool_calls[0]"},
        {"{" M ",\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":"
         "{\"name\":\"f\",\"arguments\":\"\"}}]}]}",
         "messages[0].tool_calls[0].id"},
        {"{" M ",\"messages\":[{\"role\":\"assistant\",\"content\":\"x\",\"function_call\":{}}]}",
         "messages[0].function_call"},
        {"{" M ",\"messages\":[{\"role\":\"assistant\",\"content\":\"x\",\"reasoning\":5}]}",
         "messages[0].reasoning"},
        {"{" M "," U ",\"metadata\":[]}", "metadata"},
        {"{" M "," U ",\"metadata\":{\"a\":1}}", "metadata"},
        {"{" M "," U ",\"user\":1}", "user"},
        {"{" M "," U ",\"store\":\"yes\"}", "store"},
        {"{" M "," U ",\"reasoning\":\"high\"}", "reasoning"},
        {"{" M "," U ",\"reasoning_effort\":\"HIGH\"}", "reasoning_effort"},
        {"{" M "," U ",\"stream\":true,\"stream_options\":{\"include_usage\":1}}",
         "stream_options.include_usage"},
        {"{" M "," U ",\"top_k\":0.01}", "top_k"},
        {"{" M "," U ",\"temperature\":999999.0}", "temperature"},
        {"{" M "," U ",\"temperature\":-1}", "temperature"},
        {"{" M "," U ",\"temperature\":\"hot\"}", "temperature"},
        {"{" M "," U ",\"top_p\":-1.0}", "top_p"},
        {"{" M "," U ",\"top_p\":0}", "top_p"},
        {"{" M "," U ",\"top_p\":1.5}", "top_p"},
        {"{" M "," U ",\"presence_penalty\":3}", "presence_penalty"},
        {"{" M "," U ",\"stop\":\"\"}", "stop"},
        {"{" M "," U ",\"stop\":[\"\"]}", "stop"},
        {"{" M "," U ",\"stop\":[\"a\",\"b\",\"c\",\"d\",\"e\"]}", "stop"},
        {"{" M "," U ",\"stop\":[1]}", "stop"},
        {"{" M "," U ",\"n\":0}", "n"},
        {"{" M "," U ",\"n\":129}", "n"},
        {"{" M "," U ",\"seed\":-9223372036854775809}", "seed"},
        {"{" M "," U ",\"seed\":1.5}", "seed"},
        {"{" M "," U ",\"seed\":9223372036854775808}", "seed"},
        {"{" M "," U ",\"max_tokens\":0}", "max_tokens"},
        {"{" M "," U ",\"max_completion_tokens\":1000000000000000}", "max_completion_tokens"},
        {"{" M "," U ",\"reasoning_effort\":\"minimal\"}", "reasoning_effort"},
        {"{" M "," U ",\"reasoning\":{\"effort\":\"none\"}}", "reasoning.effort"},
        {"{" M "," U ",\"tool_choice\":\"required\"}", "tool_choice"},
        {"{" M "," U ",\"tool_choice\":{\"type\":\"function\"}}", "tool_choice"},
        {"{" M "," U ",\"tool_choice\":{\"type\":\"function\",\"name\":\"f\"}}", "tool_choice"},
        {"{" M "," U ",\"response_format\":{\"type\":\"xml\"}}", "response_format.type"},
        {"{" M "," U ",\"response_format\":{\"type\":\"json_schema\",\"schema\":{}}}",
         "response_format.name"},
        {"{" M "," U
         ",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"a\"}}}",
         "response_format.json_schema.schema"},
        {"{" M "," U ",\"top_logprobs\":3}", "top_logprobs"},
        {"{" M "," U ",\"logprobs\":true,\"top_logprobs\":21}", "top_logprobs"},
        {"{" M "," U ",\"logit_bias\":{\"x\":1}}", "logit_bias"},
        {"{" M "," U ",\"logit_bias\":{\"5\":101}}", "logit_bias"},
        {"{" M "," U ",\"logit_bias\":{\"201088\":1}}", "logit_bias"},
        {"{" M "," U ",\"stream_options\":{\"include_usage\":true}}", "stream_options"},
        {"{" M "," U ",\"stream\":\"yes\"}", "stream"},
        {"{" M "," U ",\"functions\":[{}]}", "functions"},
        {"{" M "," U ",\"kv_transfer_params\":{\"remote_port\":80}}", "kv_transfer_params"},
        {"{" M "," U ",\"modalities\":[\"audio\"]}", "modalities"},
        {"{" M "," U ",\"tools\":[{\"type\":\"web\"}]}", "tools[0].type"},
        {"{" M "," U ",\"tools\":[{\"type\":\"function\",\"function\":{}}]}",
         "tools[0].function.name"},
        {"{" M "," U ",\"tools\":[1,2,3,4,5]}", "tools"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct dmk_api_error error = {0};
        struct dmk_ask ask;

        if (parse(rows[i].body, &ask, &error) >= 0) {
            fail_msg("accepted: %s", rows[i].body);
        }
        if (error.status != 400 || strcmp(error.param, rows[i].param) != 0 || !error.text[0]) {
            fail_msg("%s gave %u param \"%s\": %s", rows[i].body, error.status, error.param,
                     error.text);
        }
        dmk_ask_fini(&ask);
    }
}

static void test_deep_json(void **state)
{
    struct dmk_api_error error = {0};
    struct dmk_ask ask;
    char *body = malloc(200002);

    (void)state;
    memset(body, '[', 200001);
    body[200001] = '\0';
    assert_true(parse(body, &ask, &error) < 0);
    assert_int_equal(error.status, 400);
    dmk_ask_fini(&ask);
    free(body);
}

static void test_seeds_are_64_bits(void **state)
{
    static const struct {
        const char *seed;
        uint64_t want;
    } rows[] = {
        {"0", 0},
        {"-0.0", 0},
        {"-1", UINT64_MAX},
        {"-1.0", UINT64_MAX},
        {"9223372036854775807", INT64_MAX},
        {"-9223372036854775808", (uint64_t)INT64_MAX + 1},
    };
    struct dmk_api_error error;
    struct dmk_ask ask;
    char body[256];

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        (void)snprintf(body, sizeof(body), "{" M "," U ",\"seed\":%s}", rows[i].seed);
        assert_int_equal(parse(body, &ask, &error), 0);
        assert_true(ask.has_seed && ask.seed == rows[i].want);
        dmk_ask_fini(&ask);
    }
}

static void test_good_body(void **state)
{
    const struct dmk_conv_view *view;
    struct dmk_api_error error = {0};
    struct dmk_ask ask;
    const int rc = parse(
        "{" M ",\"messages\":["
        "{\"role\":\"system\",\"content\":\"Be short.\"},"
        "{\"role\":\"user\",\"name\":\"ann\",\"content\":[{\"type\":\"text\",\"text\":\"He\"},"
        "{\"type\":\"text\",\"text\":\"llo\"}]},"
        "{\"role\":\"assistant\",\"content\":null,\"reasoning\":\"hm\",\"tool_calls\":[{\"id\":"
        "\"c1\","
        "\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"a\\\": 1}\"}},"
        "{\"id\":\"c2\",\"type\":\"function\",\"function\":{\"name\":\"g\",\"arguments\":\"{\"}"
        "}]},"
        "{\"role\":\"tool\",\"tool_call_id\":\"c2\",\"content\":\"7\"}],"
        "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":\"d\","
        "\"parameters\":{\"type\":\"object\"},\"strict\":true}}],\"tool_choice\":\"none\","
        "\"reasoning_effort\":\"high\",\"temperature\":0.5,\"top_p\":0.9,\"top_k\":4.0,\"seed\":7,"
        "\"n\":2,\"stop\":[\"x\",\"yy\"],\"max_completion_tokens\":9,\"logprobs\":true,"
        "\"top_logprobs\":2,\"logit_bias\":{\"5\":-100},\"stream\":true,"
        "\"stream_options\":{\"include_usage\":true},\"parallel_tool_calls\":false,"
        "\"store\":false,\"metadata\":{\"a\":\"b\"},\"user\":\"u1\",\"foo\":1,"
        "\"response_format\":{\"type\":\"text\"},\"cache_salt\":\"s\",\"min_p\":null}",
        &ask, &error);

    (void)state;
    if (rc < 0) {
        fail_msg("refused: %s: %s", error.param, error.text);
    }
    view = dmk_conv_view(ask.conv);
    assert_string_equal(ask.model, "gpt-oss-20b");
    assert_int_equal(view->n_messages, 4);
    assert_true(dmk_str_is(view->messages[1].content, "Hello"));
    assert_true(dmk_str_is(view->messages[1].name, "ann"));
    assert_true(dmk_str_is(view->messages[2].reasoning, "hm"));
    assert_false(view->messages[2].has_content);
    assert_int_equal(view->messages[2].n_calls, 2);
    assert_true(dmk_str_is(view->messages[2].calls[0].arguments, "{\"a\": 1}"));
    assert_true(dmk_str_is(view->messages[2].calls[1].arguments, "{"));
    assert_true(dmk_str_is(view->messages[3].name, "g"));
    assert_int_equal(view->n_tools, 1);
    assert_non_null(view->tools[0].parameters);
    assert_int_equal(view->tool_choice, DMK_TOOLS_NONE);
    assert_int_equal(view->effort, DMK_EFFORT_HIGH);
    assert_true(ask.has_seed && ask.seed == 7);
    assert_true(ask.has_max_tokens && ask.max_tokens == 9);
    assert_int_equal(ask.n, 2);
    assert_int_equal(ask.n_stops, 2);
    assert_int_equal(ask.top_k, 4);
    assert_int_equal(ask.n_bias, 1);
    assert_int_equal(ask.top_logprobs, 2);
    assert_true(ask.stream && ask.include_usage && !ask.parallel_calls && ask.logprobs);
    assert_string_equal(ask.cache_salt, "s");
    dmk_ask_fini(&ask);
}

static void test_error_does_not_echo_the_body(void **state)
{
    struct dmk_api_error error = {0};
    struct dmk_ask ask;

    (void)state;
    assert_true(parse("{\"model\": secretword}", &ask, &error) < 0);
    assert_null(strstr(error.text, "secretword"));
    dmk_ask_fini(&ask);
}

/* ---------------------------------------------------------------- answers */

struct frames {
    json_t *list;
};

static void take_frame(void *ud, const char *event, struct dmk_bytes payload)
{
    struct frames *f = ud;
    json_error_t error;
    json_t *v = json_loadb((const char *)payload.data, payload.len, JSON_REJECT_DUPLICATES, &error);

    assert_null(event);
    if (!v) {
        fail_msg("not JSON: %.*s (%s)", (int)payload.len, (const char *)payload.data, error.text);
    }
    json_array_append_new(f->list, v);
}

static const struct dmk_usage usage = {
    .n_prompt = 68, .n_cached = 64, .n_output = 12, .n_reasoning = 1};

static void *reply(struct frames *f, bool stream, uint32_t n)
{
    const struct dmk_reply_conf conf = {.id_hex = "00ff",
                                        .model = "a\"b",
                                        .created_unix_s = 5,
                                        .stream = stream,
                                        .include_usage = true,
                                        .logprobs = true,
                                        .n = n,
                                        .sink = {take_frame, f}};

    f->list = json_array();
    return dmk_dialect_chat.reply_new(&conf);
}

static void send(void *r, uint32_t choice, enum dmk_event_kind kind, const char *text)
{
    const struct dmk_event e = {.kind = kind,
                                .text = dmk_str_from(text),
                                .name = dmk_str_from("get"),
                                .call_id = dmk_str_from("call_1")};
    const struct dmk_lp lp = {.bytes = {(const uint8_t *)"\xf0\x9f", 2},
                              .logprob = -0.25f,
                              .has_logprob = true,
                              .n_top = 1,
                              .top = {{{(const uint8_t *)"\n\x01", 2}, -1.0f}}};

    dmk_dialect_chat.event(r, choice, &e, &lp, kind == DMK_EVENT_CONTENT ? 1 : 0);
}

static void play(void *r)
{
    send(r, 0, DMK_EVENT_REASONING, "h\"m");
    send(r, 0, DMK_EVENT_CONTENT, "La ");
    send(r, 0, DMK_EVENT_CONTENT, "la\n");
    send(r, 0, DMK_EVENT_CALL_BEGIN, "");
    send(r, 0, DMK_EVENT_CALL_DELTA, "{\"i\"");
    send(r, 0, DMK_EVENT_CALL_DELTA, ":1}");
    send(r, 0, DMK_EVENT_CALL_END, "");
    dmk_dialect_chat.choice_end(r, 0, DMK_FINISH_TOOL_CALLS);
    dmk_dialect_chat.end(r, &usage);
    dmk_dialect_chat.reply_free(r);
}

static const char *str_at(json_t *v, const char *a, const char *b)
{
    return json_string_value(json_object_get(json_object_get(v, a), b));
}

static void test_whole_answer(void **state)
{
    struct frames f;
    json_t *body, *choice, *message, *call, *lps;

    (void)state;
    play(reply(&f, false, 1));
    assert_int_equal(json_array_size(f.list), 1);
    body = json_array_get(f.list, 0);
    assert_string_equal(json_string_value(json_object_get(body, "id")), "chatcmpl-00ff");
    assert_string_equal(json_string_value(json_object_get(body, "model")), "a\"b");
    assert_string_equal(json_string_value(json_object_get(body, "object")), "chat.completion");
    choice = json_array_get(json_object_get(body, "choices"), 0);
    assert_string_equal(json_string_value(json_object_get(choice, "finish_reason")), "tool_calls");
    message = json_object_get(choice, "message");
    assert_string_equal(json_string_value(json_object_get(message, "content")), "La la\n");
    assert_string_equal(json_string_value(json_object_get(message, "reasoning")), "h\"m");
    assert_string_equal(json_string_value(json_object_get(message, "reasoning_content")), "h\"m");
    call = json_array_get(json_object_get(message, "tool_calls"), 0);
    assert_string_equal(json_string_value(json_object_get(call, "id")), "call_1");
    assert_string_equal(str_at(call, "function", "name"), "get");
    assert_string_equal(str_at(call, "function", "arguments"), "{\"i\":1}");
    lps = json_object_get(json_object_get(choice, "logprobs"), "content");
    assert_int_equal(json_array_size(lps), 2);
    assert_int_equal(
        json_integer_value(json_array_get(json_object_get(json_array_get(lps, 0), "bytes"), 0)),
        0xf0);
    assert_int_equal(
        json_integer_value(json_object_get(json_object_get(body, "usage"), "total_tokens")), 80);
    json_decref(f.list);
}

static void test_stream(void **state)
{
    struct frames f;
    struct dmk_buf content, arguments;
    unsigned n_roles = 0, n_finish = 0, n_heads = 0;
    const size_t n_frames =
        8; /* role, reasoning, 2 content, call, 2 arguments, finish; then usage */

    (void)state;
    dmk_buf_init(&content, 0);
    dmk_buf_init(&arguments, 0);
    play(reply(&f, true, 1));
    assert_int_equal(json_array_size(f.list), n_frames + 1);
    for (size_t i = 0; i < n_frames; i++) {
        json_t *chunk = json_array_get(f.list, i);
        json_t *choice = json_array_get(json_object_get(chunk, "choices"), 0);
        json_t *delta = json_object_get(choice, "delta");
        json_t *call = json_array_get(json_object_get(delta, "tool_calls"), 0);

        assert_true(json_is_null(json_object_get(chunk, "usage")));
        assert_int_equal(n_finish, 0); /* no chunk of the choice after its finish */
        n_roles += json_object_get(delta, "role") != NULL;
        n_finish += json_is_string(json_object_get(choice, "finish_reason"));
        if (json_object_get(delta, "content")) {
            dmk_buf_puts(&content, json_string_value(json_object_get(delta, "content")));
        }
        if (call) {
            n_heads += json_object_get(call, "id") != NULL;
            dmk_buf_puts(&arguments, str_at(call, "function", "arguments"));
        }
    }
    assert_int_equal(n_roles, 1);
    assert_int_equal(n_finish, 1);
    assert_int_equal(n_heads, 1);
    assert_string_equal(content.data, "La la\n");
    assert_string_equal(arguments.data, "{\"i\":1}");
    dmk_buf_fini(&content);
    dmk_buf_fini(&arguments);
    assert_int_equal(json_array_size(json_object_get(json_array_get(f.list, n_frames), "choices")),
                     0);
    assert_non_null(json_object_get(json_array_get(f.list, n_frames), "usage"));
    json_decref(f.list);
}

static void test_nothing_is_null(void **state)
{
    struct frames f;
    void *r = reply(&f, false, 2);
    json_t *message;

    (void)state;
    dmk_dialect_chat.choice_end(r, 1, DMK_FINISH_LENGTH);
    dmk_dialect_chat.choice_end(r, 0, DMK_FINISH_STOP);
    dmk_dialect_chat.end(r, &usage);
    dmk_dialect_chat.reply_free(r);
    for (size_t i = 0; i < 2; i++) {
        json_t *choice = json_array_get(json_object_get(json_array_get(f.list, 0), "choices"), i);

        message = json_object_get(choice, "message");
        assert_true(json_is_null(json_object_get(message, "content")));
        assert_null(json_object_get(message, "tool_calls"));
        assert_int_equal(json_integer_value(json_object_get(choice, "index")), i);
    }
    json_decref(f.list);
}

static void test_error_body(void **state)
{
    const struct dmk_api_error error = {.status = 400,
                                        .type = "invalid_request_error",
                                        .param = "messages[0]",
                                        .text = "bad \"thing\"\n"};
    struct dmk_buf out;

    (void)state;
    dmk_buf_init(&out, 0);
    dmk_dialect_chat.error(&error, &out);
    assert_string_equal(out.data,
                        "{\"error\":{\"message\":\"bad \\\"thing\\\"\\n\",\"type\":"
                        "\"invalid_request_error\",\"param\":\"messages[0]\",\"code\":null}}");
    dmk_buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_bodies),
        cmocka_unit_test(test_deep_json),
        cmocka_unit_test(test_good_body),
        cmocka_unit_test(test_seeds_are_64_bits),
        cmocka_unit_test(test_error_does_not_echo_the_body),
        cmocka_unit_test(test_whole_answer),
        cmocka_unit_test(test_stream),
        cmocka_unit_test(test_nothing_is_null),
        cmocka_unit_test(test_error_body),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
