/* Completions: bodies, good and bad, and the bytes of answers. */
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>
#include "router/api.h"

static const struct dmk_api_limits limits = {.max_choices = 4};

static int parse(const char *body, struct dmk_ask *ask, struct dmk_api_error *error)
{
    dmk_ask_init(ask, 0);
    return dmk_dialect_completions.parse((struct dmk_bytes){(const uint8_t *)body, strlen(body)},
                                         &limits, ask, error);
}

static void test_bad_bodies(void **state)
{
    static const struct {
        const char *body, *param;
    } rows[] = {
        {"{\"model\":\"m\"}", "prompt"},
        {"{\"model\":\"m\",\"prompt\":\"\"}", "prompt"},
        {"{\"model\":\"m\",\"prompt\":[]}", "prompt"},
        {"{\"model\":\"m\",\"prompt\":[\"a\",\"\"]}", "prompt[1]"},
        {"{\"model\":\"m\",\"prompt\":[\"a\",5]}", "prompt[1]"},
        {"{\"model\":\"m\",\"prompt\":[[1],[]]}", "prompt[1]"},
        {"{\"model\":\"m\",\"prompt\":[[1],[2,\"x\"]]}", "prompt[1]"},
        {"{\"model\":\"m\",\"prompt\":[\"a\",\"b\",\"c\"],\"n\":2}", "prompt"},
        {"{\"model\":\"m\",\"prompt\":[{}]}", "prompt[0]"},
        {"{\"model\":\"m\",\"prompt\":[1,\"a\"]}", "prompt"},
        {"{\"model\":\"m\",\"prompt\":[1,-1]}", "prompt"},
        {"{\"model\":\"m\",\"prompt\":[201088]}", "prompt"},
        {"{\"model\":\"m\",\"prompt\":\"a\",\"suffix\":\"b\"}", "suffix"},
        {"{\"model\":\"m\",\"prompt\":\"a\",\"best_of\":1,\"n\":2}", "best_of"},
        {"{\"model\":\"m\",\"prompt\":\"a\",\"best_of\":5}", "best_of"},
        {"{\"model\":\"m\",\"prompt\":\"a\",\"best_of\":2,\"stream\":true}", "best_of"},
        {"{\"model\":\"m\",\"prompt\":\"a\",\"logprobs\":true}", "logprobs"},
        {"{\"model\":\"m\",\"prompt\":\"a\",\"logprobs\":21}", "logprobs"},
        {"{\"model\":\"m\",\"prompt\":\"a\",\"max_tokens\":0}", "max_tokens"},
        {"{\"model\":\"m\",\"prompt\":\"a\",\"max_tokens\":0,\"echo\":false}", "max_tokens"},
        {"{\"model\":\"m\",\"prompt\":\"a\",\"max_tokens\":-1,\"echo\":true}", "max_tokens"},
        {"{\"model\":\"m\",\"prompt\":\"a\",\"n\":5}", "n"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct dmk_api_error error = {0};
        struct dmk_ask ask;

        if (parse(rows[i].body, &ask, &error) >= 0) {
            fail_msg("accepted: %s", rows[i].body);
        }
        assert_int_equal(error.status, 400);
        assert_string_equal(error.param, rows[i].param);
        dmk_ask_fini(&ask);
    }
}

static void test_prompts(void **state)
{
    struct dmk_api_error error = {0};
    struct dmk_ask ask;

    (void)state;
    assert_int_equal(parse("{\"model\":\"m\",\"prompt\":\"hi\"}", &ask, &error), 0);
    assert_null(ask.conv);
    assert_string_equal(ask.text.data, "hi");
    assert_true(!ask.has_max_tokens && ask.max_tokens == 16 && !ask.logprobs);
    dmk_ask_fini(&ask);

    assert_int_equal(parse("{\"model\":\"m\",\"prompt\":[[5,6,7]],\"logprobs\":0,\"echo\":true,"
                           "\"max_tokens\":3,\"suffix\":\"\"}",
                           &ask, &error),
                     0);
    assert_int_equal(ask.prompt.len, 3);
    assert_int_equal(ask.prompt.data[2], 7);
    assert_true(ask.has_max_tokens && ask.max_tokens == 3 && ask.logprobs && ask.echo);
    assert_false(dmk_ask_is_prompt_only(&ask));
    assert_int_equal(ask.top_logprobs, 0);
    dmk_ask_fini(&ask);

    assert_int_equal(
        parse("{\"model\":\"m\",\"prompt\":\"a\",\"echo\":true,\"max_tokens\":0}", &ask, &error),
        0);
    assert_true(dmk_ask_is_prompt_only(&ask));
    dmk_ask_fini(&ask);

    assert_int_equal(
        parse("{\"model\":\"m\",\"prompt\":[\"a\",[5,6.0]],\"best_of\":2}", &ask, &error), 0);
    assert_string_equal(ask.text.data, "a");
    assert_int_equal(ask.n_more, 1);
    assert_int_equal(ask.more[0].ids.len, 2);
    assert_true(ask.n == 2 && ask.n_shown == 1);
    dmk_ask_fini(&ask);
}

static void test_parts_share_the_ask(void **state)
{
    struct dmk_api_error error = {0};
    struct dmk_ask ask, part;

    (void)state;
    assert_int_equal(
        parse("{\"model\":\"m\",\"prompt\":[\"a\",\"b\"],\"stop\":\"x\",\"logit_bias\":{\"5\":1}}",
              &ask, &error),
        0);
    dmk_ask_split(&ask, 0, &part);
    assert_string_equal(part.text.data, "b");
    assert_true(dmk_str_is(part.stops[0], "x") && part.n_bias == 1);
    assert_string_equal(ask.text.data, "a");
    dmk_ask_fini(&part);
    assert_true(dmk_str_is(ask.stops[0], "x"));
    dmk_ask_fini(&ask);
}

static void take_frame(void *ud, const char *event, struct dmk_bytes payload)
{
    json_t *v = json_loadb((const char *)payload.data, payload.len, JSON_REJECT_DUPLICATES, NULL);

    assert_null(event);
    assert_non_null(v);
    json_array_append_new(ud, v);
}

static void play(json_t *frames, bool stream)
{
    const struct dmk_reply_conf conf = {.id_hex = "0a",
                                        .model = "m",
                                        .stream = stream,
                                        .logprobs = true,
                                        .top_logprobs = 2,
                                        .n = 1,
                                        .sink = {take_frame, frames}};
    const struct dmk_usage usage = {.n_prompt = 1, .n_output = 3};
    const struct dmk_lp prompt = {.bytes = {(const uint8_t *)"\xc3\xa9t", 3}};
    /* Two pieces of one character: alone neither is text, and both must stay apart as keys. */
    const struct dmk_lp lps[2] = {
        {.bytes = {(const uint8_t *)" \xf0\x9f", 3},
         .logprob = -0.5f,
         .has_logprob = true,
         .n_top = 2,
         .top = {{{(const uint8_t *)" \xf0\x9f", 3}, -0.5f},
                 {{(const uint8_t *)"\xf0\x9e", 2}, -2}}},
        {.bytes = {(const uint8_t *)"\x92\x96", 2}, .logprob = -0.25f, .has_logprob = true},
    };
    const struct dmk_event event = {.kind = DMK_EVENT_CONTENT,
                                    .text = dmk_str_from(" \xf0\x9f\x92\x96")};
    void *r = dmk_dialect_completions.reply_new(&conf);

    dmk_dialect_completions.prompt(r, 0, dmk_str_from("\xc3\xa9t"), &prompt, 1);
    dmk_dialect_completions.event(r, 0, &event, lps, 2);
    dmk_dialect_completions.choice_end(r, 0, DMK_FINISH_LENGTH);
    dmk_dialect_completions.end(r, &usage);
    dmk_dialect_completions.reply_free(r);
}

static void test_answers(void **state)
{
    json_t *whole = json_array(), *chunks = json_array();
    json_t *choice, *lp;
    char *text;

    (void)state;
    play(whole, false);
    assert_int_equal(json_array_size(whole), 1);
    choice = json_array_get(json_object_get(json_array_get(whole, 0), "choices"), 0);
    assert_string_equal(json_string_value(json_object_get(choice, "text")),
                        "\xc3\xa9t \xf0\x9f\x92\x96");
    lp = json_object_get(choice, "logprobs");
    text = json_dumps(lp, JSON_COMPACT | JSON_REAL_PRECISION(4));
    assert_string_equal(
        text,
        "{\"tokens\":[\"\xc3\xa9t\",\"bytes:\\\\x20\\\\xf0\\\\x9f\",\"bytes:\\\\x92\\\\x96\"],"
        "\"token_logprobs\":[null,-0.5,-0.25],\"top_logprobs\":[null,{\"bytes:"
        "\\\\x20\\\\xf0\\\\x9f\":-0.5,\"bytes:\\\\xf0\\\\x9e\":-2},{}],\"text_offset\":[0,2,4]}");
    free(text);
    json_decref(whole);
    play(chunks, true);
    assert_int_equal(json_array_size(chunks), 3);
    choice = json_array_get(json_object_get(json_array_get(chunks, 2), "choices"), 0);
    assert_string_equal(json_string_value(json_object_get(choice, "finish_reason")), "length");
    assert_null(json_object_get(json_array_get(chunks, 2), "usage"));
    json_decref(chunks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_bodies),
        cmocka_unit_test(test_prompts),
        cmocka_unit_test(test_parts_share_the_ask),
        cmocka_unit_test(test_answers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
