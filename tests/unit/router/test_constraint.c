/* Turns and structural tags: which outputs the automata let through. Outputs are written with the spellings of
 * control tokens, which stand for their ids; everything else is bytes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>
#include <string.h>
#include "common/grammar/walk.h"
#include "common/json/json.h"
#include "common/text/tokenizer.h"
#include "router/constraint.h"
#include "router/structured.h"

static struct dmk_trie *trie;
static struct dmk_walker *walker;

static struct dmk_bytes bytes_of(void *ud, uint32_t id)
{
    static uint8_t bytes[256];

    (void)ud;
    if (id >= 256) {
        return (struct dmk_bytes){0};
    }
    bytes[id] = (uint8_t)id;
    return (struct dmk_bytes){&bytes[id], 1};
}

static int set_up(void **state)
{
    struct dmk_buf blob;
    struct dmk_error error;

    (void)state;
    dmk_buf_init(&blob, 0);
    assert_int_equal(dmk_trie_write(DMK_VOCAB_SIZE, bytes_of, NULL, &blob), 0);
    assert_int_equal(dmk_trie_read(dmk_buf_bytes(&blob), &trie, &error), 0);
    assert_int_equal(dmk_walker_new(trie, 4, &walker), 0);
    dmk_buf_fini(&blob);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    dmk_walker_free(&walker);
    dmk_trie_free(&trie);
    return 0;
}

static uint32_t next_id(const char **at)
{
    static const struct {
        const char *text;
        uint32_t id;
    } controls[] = {{"<|channel|>", DMK_TOKEN_CHANNEL},     {"<|message|>", DMK_TOKEN_MESSAGE},
                    {"<|start|>", DMK_TOKEN_START},         {"<|end|>", DMK_TOKEN_END},
                    {"<|constrain|>", DMK_TOKEN_CONSTRAIN}, {"<|call|>", DMK_TOKEN_CALL},
                    {"<|return|>", DMK_TOKEN_RETURN}};

    for (size_t i = 0; i < sizeof(controls) / sizeof(controls[0]); i++) {
        if (strncmp(*at, controls[i].text, strlen(controls[i].text)) == 0) {
            *at += strlen(controls[i].text);
            return controls[i].id;
        }
    }
    return (uint8_t) * (*at)++;
}

enum fit { FITS, DOES_NOT_FIT, IS_CUT };

static enum fit fit(const struct dmk_buf *blob, const char *text)
{
    static uint64_t mask[(DMK_VOCAB_SIZE + 63) / 64];
    struct dmk_automaton *a = NULL;
    struct dmk_error error = {0};
    struct dmk_walk walk;
    enum fit r = FITS;

    if (dmk_automaton_load(dmk_buf_bytes(blob), &a, &error) < 0) {
        fail_msg("%s", error.text);
    }
    dmk_walk_begin(&walk, a);
    for (const char *at = text; *at && r == FITS;) {
        if (dmk_walk_advance(walker, &walk, next_id(&at)) < 0) {
            r = DOES_NOT_FIT;
        }
    }
    if (r == FITS && dmk_walk_mask(walker, &walk, mask) == DMK_WALK_OPEN) {
        r = IS_CUT;
    }
    dmk_automaton_free(&a);
    return r;
}

static void expect(const struct dmk_buf *blob, enum fit want, const char *text)
{
    if (fit(blob, text) != want) {
        fail_msg("%s: %d instead of %d", text, fit(blob, text), want);
    }
}

#define ANALYSIS "<|channel|>analysis<|message|>I think <b>.<|end|><|start|>assistant"
#define PREAMBLE "<|channel|>commentary<|message|>Now.<|end|><|start|>assistant"
#define FINAL    "<|channel|>final<|message|>"

static struct dmk_conv *make_conv(const char *format, const char *tools, const char *choice)
{
    struct dmk_conv *conv = dmk_conv_new(1 << 20);
    json_t *v = format ? json_loads(format, 0, NULL) : NULL;
    struct dmk_api_error error;
    json_t *list = tools ? json_loads(tools, 0, NULL) : NULL, *tool;
    size_t i;

    assert_int_equal(dmk_structured_format(v, "response_format", conv, &error), 0);
    json_array_foreach(list, i, tool)
    {
        struct dmk_tool *t = dmk_conv_add_tool(conv);

        t->name =
            dmk_conv_copy(conv, dmk_str_from(json_string_value(json_object_get(tool, "name"))));
        t->parameters = json_incref(json_object_get(tool, "parameters"));
        t->strict = json_is_true(json_object_get(tool, "strict"));
    }
    json_decref(list);
    json_decref(v);
    v = choice ? json_loads(choice, JSON_DECODE_ANY, NULL) : NULL;
    if (dmk_structured_tool_choice(v, "tool_choice", conv, &error) < 0) {
        fail_msg("%s", error.text);
    }
    json_decref(v);
    return conv;
}

static void compile(struct dmk_conv **conv, struct dmk_buf *blob)
{
    struct dmk_api_error error = {0};

    dmk_buf_init(blob, 0);
    if (dmk_constraint_from_conv(dmk_conv_view(*conv), blob, &error) < 0) {
        fail_msg("%s", error.text);
    }
    dmk_conv_free(conv);
}

#define SCHEMA                                                                                     \
    "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"boolean\"}},\"required\":[\"a\"],"     \
    "\"additionalProperties\":false}"
#define FORMAT                                                                                     \
    "{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"n\",\"strict\":true,\"schema\":" SCHEMA \
    "}}"
#define TOOLS                                                                                      \
    "[{\"name\":\"get_a\",\"strict\":true,\"parameters\":" SCHEMA "},{\"name\":\"get_b\"}]"

static void test_unconstrained(void **state)
{
    struct dmk_conv *conv = make_conv("{\"type\":\"text\"}", "[{\"name\":\"f\"}]", "\"auto\"");
    struct dmk_buf blob;

    (void)state;
    compile(&conv, &blob);
    assert_int_equal(blob.len, 0);
    conv = make_conv(NULL, TOOLS, "\"none\"");
    compile(&conv, &blob);
    assert_int_equal(blob.len, 0);
    dmk_buf_fini(&blob);
}

static void test_format(void **state)
{
    struct dmk_conv *conv = make_conv(FORMAT, NULL, NULL);
    struct dmk_buf blob;

    (void)state;
    compile(&conv, &blob);
    expect(&blob, FITS, FINAL "{\"a\":true}<|return|>");
    expect(&blob, FITS, ANALYSIS ANALYSIS FINAL "{\"a\": false}<|return|>");
    /* A preamble is content too: before the answer it would spoil it. */
    expect(&blob, DOES_NOT_FIT, "<|channel|>c");
    expect(&blob, DOES_NOT_FIT, ANALYSIS PREAMBLE);
    expect(&blob, FITS, "<|channel|>final <|constrain|>json<|message|>{\"a\":true}<|return|>");
    expect(&blob, FITS, "<|channel|>final<|constrain|>json<|message|>{\"a\":true}<|return|>");
    expect(&blob, IS_CUT, FINAL "{\"a\":true}");
    expect(&blob, IS_CUT, "");
    expect(&blob, DOES_NOT_FIT, FINAL "{\"a\":1");
    expect(&blob, DOES_NOT_FIT, FINAL "{\"a\":true}<|end|>");
    expect(&blob, DOES_NOT_FIT, FINAL "<|return|>");
    expect(&blob, DOES_NOT_FIT, "<|channel|>analysis<|message|>x<|return|>");
    expect(&blob, DOES_NOT_FIT, "<|channel|>commentary<|message|>x<|return|>");
    expect(&blob, DOES_NOT_FIT, "<|channel|>commentary to=functions.f");
    expect(&blob, DOES_NOT_FIT, "{\"a\":true}");
    dmk_buf_fini(&blob);
}

static void test_format_with_tools(void **state)
{
    static const char call[] = "<|channel|>commentary to=functions.get_b<|message|>{}<|call|>";
    struct dmk_conv *conv = make_conv(FORMAT, TOOLS, "\"auto\"");
    struct dmk_buf blob;
    char text[512];

    (void)state;
    compile(&conv, &blob);
    expect(&blob, FITS, ANALYSIS FINAL "{\"a\":true}<|return|>");
    expect(&blob, FITS, call);
    (void)snprintf(text, sizeof(text), "%s%s", ANALYSIS PREAMBLE ANALYSIS PREAMBLE, call);
    expect(&blob, FITS, text);
    expect(&blob, FITS, PREAMBLE " to=functions.get_b<|channel|>analysis<|message|>{}<|call|>");
    expect(&blob, IS_CUT, PREAMBLE ANALYSIS);
    expect(&blob, DOES_NOT_FIT, PREAMBLE "<|channel|>final");
    expect(&blob, DOES_NOT_FIT, PREAMBLE ANALYSIS "<|channel|>final");
    expect(&blob, DOES_NOT_FIT, "<|channel|>commentary<|message|>x<|return|>");
    expect(&blob, DOES_NOT_FIT, PREAMBLE "<|channel|>analysis<|message|>x<|return|>");
    expect(&blob, DOES_NOT_FIT, FINAL "any");
    dmk_buf_fini(&blob);
    /* The answer is free: a preamble goes before it, and between. */
    conv = make_conv(NULL, TOOLS, "\"auto\"");
    compile(&conv, &blob);
    expect(&blob, FITS, PREAMBLE ANALYSIS PREAMBLE FINAL "any<|return|>");
    expect(&blob, FITS, PREAMBLE "<|channel|>commentary<|message|>x<|return|>");
    dmk_buf_fini(&blob);
    /* No answer at all. */
    conv = make_conv(FORMAT, TOOLS, "\"required\"");
    compile(&conv, &blob);
    (void)snprintf(text, sizeof(text), "%s%s", PREAMBLE ANALYSIS, call);
    expect(&blob, FITS, text);
    expect(&blob, DOES_NOT_FIT, "<|channel|>commentary<|message|>x<|return|>");
    dmk_buf_fini(&blob);
}

static void test_required(void **state)
{
    struct dmk_conv *conv = make_conv(NULL, TOOLS, "\"required\"");
    struct dmk_buf blob;

    (void)state;
    compile(&conv, &blob);
    expect(&blob, FITS,
           ANALYSIS "<|channel|>commentary to=functions.get_a "
                    "<|constrain|>json<|message|>{\"a\":true}<|call|>");
    expect(
        &blob, FITS,
        " to=functions.get_a<|channel|>commentary<|constrain|>json<|message|>{\"a\":true}<|call|>");
    expect(&blob, FITS,
           "<|channel|>analysis to=functions.get_a code<|message|>{\"a\":true}<|call|>");
    expect(&blob, FITS,
           "<|channel|>commentary to=functions.get_b<|message|>{\"x\":[1,{}]}<|call|>");
    expect(&blob, FITS,
           "<|channel|>commentary to=functions.get_b<|message|>{}<|end|><|start|>assistant"
           "<|channel|>commentary to=functions.get_a<|message|>{\"a\":true}<|call|>");
    expect(&blob, DOES_NOT_FIT, "<|channel|>final");
    expect(&blob, DOES_NOT_FIT, "<|channel|>commentary to=functions.get_c");
    expect(&blob, DOES_NOT_FIT, "<|channel|>commentary to=functions.get_a<|message|>{}");
    expect(&blob, DOES_NOT_FIT, "<|channel|>commentary to=functions.get_b<|message|>[");
    expect(&blob, DOES_NOT_FIT, "<|channel|>commentary to=functions.get_b<|message|>{}<|return|>");
    expect(&blob, DOES_NOT_FIT,
           "<|channel|>commentary to=functions.get_b<|message|>{}<|end|><|start|>assistant"
           "<|channel|>analysis<|message|>");
    dmk_buf_fini(&blob);
}

static void test_choices(void **state)
{
    struct dmk_conv *conv =
        make_conv(NULL, TOOLS, "{\"type\":\"function\",\"function\":{\"name\":\"get_b\"}}");
    struct dmk_buf blob;

    (void)state;
    compile(&conv, &blob);
    expect(&blob, FITS, "<|channel|>commentary to=functions.get_b<|message|>{}<|call|>");
    expect(&blob, DOES_NOT_FIT, "<|channel|>commentary to=functions.get_a");
    expect(&blob, DOES_NOT_FIT, "<|channel|>final");
    dmk_buf_fini(&blob);
    conv =
        make_conv(NULL, TOOLS,
                  "{\"type\":\"allowed_tools\",\"mode\":\"auto\",\"tools\":[{\"type\":\"function\","
                  "\"name\":\"get_a\"}]}");
    dmk_conv_edit(conv)->single_call = true;
    compile(&conv, &blob);
    expect(&blob, FITS, "<|channel|>commentary to=functions.get_a<|message|>{\"a\":true}<|call|>");
    expect(&blob, FITS, FINAL "any <text><|return|>");
    expect(&blob, FITS, "<|channel|>commentary<|message|>any<|return|>");
    expect(&blob, DOES_NOT_FIT, "<|channel|>commentary to=functions.get_b");
    expect(&blob, DOES_NOT_FIT,
           "<|channel|>commentary to=functions.get_a<|message|>{\"a\":true}<|end|>");
    dmk_buf_fini(&blob);
}

static void tag(const char *json, struct dmk_buf *blob)
{
    struct dmk_api_error error = {0};

    dmk_buf_init(blob, 0);
    if (dmk_constraint_from_structural_tag(dmk_str_from(json), "structural_tag", blob, &error) <
        0) {
        fail_msg("%s: %s", json, error.text);
    }
}

static void test_tags(void **state)
{
    struct dmk_buf blob;

    (void)state;
    tag("{\"format\":{\"type\":\"triggered_tags\",\"triggers\":[\"<|start|>assistant\"],\"tags\":[{"
        "\"type\":"
        "\"tag\",\"begin\":\"<|start|>assistant<|channel|>commentary "
        "to=functions.f<|constrain|>json<|message|>\","
        "\"content\":{\"type\":\"json_schema\",\"json_schema\":" SCHEMA
        "},\"end\":\"\"}],\"at_least_one\":true,"
        "\"stop_after_first\":true}}",
        &blob);
    expect(&blob, FITS,
           ANALYSIS "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{\"a\":true}");
    expect(&blob, IS_CUT, "<|channel|>analysis<|message|>x<|end|>");
    expect(&blob, DOES_NOT_FIT, ANALYSIS "<|channel|>final");
    expect(&blob, DOES_NOT_FIT, "x<|return|>");
    dmk_buf_fini(&blob);
    tag("{\"type\":\"structural_tag\",\"format\":{\"type\":\"triggered_tags\",\"triggers\":[\"<f="
        "\",\"<g\"],"
        "\"tags\":[{\"begin\":\"<f=1>\",\"content\":{\"type\":\"any_text\"},\"end\":\"</"
        "f>\"},{\"begin\":\"<g>\","
        "\"content\":{\"type\":\"regex\",\"pattern\":\"[0-9]+\"},\"end\":\"!\"}]}}",
        &blob);
    expect(&blob, FITS, "");
    expect(&blob, FITS, "text < f <f=1>x</</f> more <g>12! <");
    expect(&blob, IS_CUT, "<f=1>x</f");
    expect(&blob, IS_CUT, "<f=");
    expect(&blob, DOES_NOT_FIT, "<f=2");
    expect(&blob, DOES_NOT_FIT, "<<g>x");
    dmk_buf_fini(&blob);
    /* A message's body without an end of its own: only the end of the message or of the turn follows. */
    tag("{\"format\":{\"type\":\"triggered_tags\",\"triggers\":[\"<|channel|>final\"],\"tags\":[{"
        "\"begin\":\"<|channel|>final<|message|>\",\"content\":{\"type\":\"json_schema\","
        "\"json_schema\":" SCHEMA
        "},\"end\":\"\"}],\"at_least_one\":true,\"stop_after_first\":false}}",
        &blob);
    expect(&blob, FITS, ANALYSIS "<|channel|>final<|message|>{\"a\":true}");
    expect(&blob, FITS, "<|channel|>final<|message|>{\"a\":true}<|end|><|start|>assistant x");
    expect(&blob, DOES_NOT_FIT, "<|channel|>final<|message|>{\"a\":true} and more");
    expect(&blob, DOES_NOT_FIT, "<|channel|>final<|message|>{\"a\":true}<|start|>");
    dmk_buf_fini(&blob);
    tag("{\"structures\":[{\"begin\":\"<a>\",\"schema\":{\"type\":\"integer\"},\"end\":\"</"
        "a>\"}],\"triggers\":[\"<a\"]}",
        &blob);
    expect(&blob, FITS, "x<a>12</a>y");
    expect(&blob, DOES_NOT_FIT, "x<a>z");
    dmk_buf_fini(&blob);
    tag("{\"format\":{\"type\":\"sequence\",\"elements\":[{\"type\":\"tag\",\"begin\":\"\","
        "\"content\":{\"type\":"
        "\"any_text\"},\"end\":\"<|end|>\"},{\"type\":\"tags_with_separator\",\"separator\":\",\","
        "\"at_least_one\":true,"
        "\"tags\":[{\"begin\":\"a\",\"content\":{\"type\":\"const_string\",\"value\":\"b\"},"
        "\"end\":\"c\"}]}]}}",
        &blob);
    expect(&blob, FITS, "think<|end|>abc,abc");
    expect(&blob, IS_CUT, "think<|end|>abc,");
    expect(&blob, DOES_NOT_FIT, "<|end|>b");
    dmk_buf_fini(&blob);
}

static void test_tags_refused(void **state)
{
    static const char *const list[] = {
        "{}",
        "[]",
        "{",
        "{\"format\":{\"type\":\"x\"}}",
        ("{\"format\":{\"type\":\"triggered_tags\",\"triggers\":[\"a\"],\"tags\":[{\"begin\":\"b\","
         "\"content\":{\"type\":\"any_text\"},\"end\":\"c\"}]}}"),
        "{\"format\":{\"type\":\"triggered_tags\",\"triggers\":[1],\"tags\":[]}}",
        "{\"format\":{\"type\":\"triggered_tags\",\"triggers\":[\"\"],\"tags\":[]}}",
        "{\"format\":{\"type\":\"json_schema\",\"json_schema\":{\"not\":{}}}}",
        ("{\"format\":{\"type\":\"tag\",\"begin\":\"a\",\"content\":{\"type\":\"sequence\"},"
         "\"end\":\"b\"}}"),
        "{\"format\":{\"type\":\"regex\",\"pattern\":\"(\"}}"};

    (void)state;
    for (size_t i = 0; i < sizeof(list) / sizeof(list[0]); i++) {
        struct dmk_api_error error = {0};
        struct dmk_buf blob;

        dmk_buf_init(&blob, 0);
        if (dmk_constraint_from_structural_tag(dmk_str_from(list[i]), "p", &blob, &error) >= 0) {
            fail_msg("accepted: %s", list[i]);
        }
        assert_int_equal(error.status, 400);
        assert_int_equal(blob.len, 0);
        dmk_buf_fini(&blob);
    }
}

static void test_raw(void **state)
{
    const struct dmk_str choices[] = {{"yes", 3}, {"no", 2}};
    struct dmk_api_error error;
    struct dmk_buf blob;

    (void)state;
    dmk_buf_init(&blob, 0);
    assert_int_equal(dmk_constraint_from_choice(choices, 2, "p", DMK_CONSTRAIN_ALL, &blob, &error),
                     0);
    expect(&blob, FITS, "yes");
    expect(&blob, IS_CUT, "n");
    expect(&blob, DOES_NOT_FIT, "yesn");
    dmk_buf_reset(&blob);
    assert_int_equal(
        dmk_constraint_from_regex(dmk_str_from("a*"), "p", DMK_CONSTRAIN_ALL, &blob, &error), 0);
    expect(&blob, FITS, "");
    expect(&blob, FITS, "aa");
    dmk_buf_reset(&blob);
    assert_int_equal(dmk_constraint_from_json_object(DMK_CONSTRAIN_FINAL, &blob, &error), 0);
    expect(&blob, FITS, ANALYSIS FINAL "{\"x\":1}<|return|>");
    expect(&blob, DOES_NOT_FIT, FINAL "[");
    dmk_buf_reset(&blob);
    assert_int_equal(dmk_constraint_from_json_schema(dmk_str_from(SCHEMA), "p", DMK_CONSTRAIN_ALL,
                                                     &blob, &error),
                     0);
    expect(&blob, FITS, "{\"a\":true}");
    dmk_buf_fini(&blob);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unconstrained),     cmocka_unit_test(test_format),
        cmocka_unit_test(test_format_with_tools), cmocka_unit_test(test_required),
        cmocka_unit_test(test_choices),           cmocka_unit_test(test_tags),
        cmocka_unit_test(test_tags_refused),      cmocka_unit_test(test_raw),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
