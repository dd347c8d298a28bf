/* What a model may write, well formed and broken, and what the client must get. Outputs start right behind
 * the prompt's "<|start|>assistant". The table holds outputs as text; below it are those whose exact ids
 * matter. */
#include "tests/unit/chat/chat_test.h"

struct expectation {
    const char *what;
    const char *output;
    const char *tools; /* NULL: not allowed */
    bool cut;
    const char *reasoning, *content;
    const char *calls; /* "name(arguments) name(arguments)"; '!' behind one that was not finished */
    enum dmk_parse_end end;
    int n_recovered; /* -1: at least one */
};

#define NEXT "<|end|><|start|>assistant"

static const struct expectation table[] = {
    {"reasoning and answer",
     "<|channel|>analysis<|message|>plan" NEXT "<|channel|>final<|message|>Hi<|return|>", NULL,
     false, "plan", "Hi", "", DMK_PARSE_STOP, 0},
    {"answer at once", "<|channel|>final<|message|>{\"issues\":[]}<|return|>", NULL, false, "",
     "{\"issues\":[]}", "", DMK_PARSE_STOP, 0},
    {"several messages of a kind are joined by one newline",
     "<|channel|>analysis<|message|>a" NEXT "<|channel|>analysis<|message|>b" NEXT
     "<|channel|>commentary<|message|>c" NEXT "<|channel|>final<|message|>d<|return|>",
     NULL, false, "a\nb", "c\nd", "", DMK_PARSE_STOP, 0},
    {"empty messages add no newline",
     "<|channel|>final<|message|>" NEXT "<|channel|>final<|message|>d" NEXT
     "<|channel|>final<|message|><|return|>",
     NULL, false, "", "d", "", DMK_PARSE_STOP, 0},

    /* calls */
    {"recipient behind the channel",
     "<|channel|>commentary to=functions.get_weather "
     "<|constrain|>json<|message|>{\"city\":\"Oslo\"}<|call|>",
     "get_weather", false, "", "", "get_weather({\"city\":\"Oslo\"})", DMK_PARSE_TOOL_CALLS, 0},
    {"recipient before the channel",
     " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
     "get_weather", false, "", "", "get_weather({})", DMK_PARSE_TOOL_CALLS, 0},
    {"no blank before the constrain mark",
     "<|channel|>commentary "
     "to=functions.get_weather<|constrain|>json<|message|>{\"city\":\"Oslo\"}<|call|>",
     "get_weather", false, "", "", "get_weather({\"city\":\"Oslo\"})", DMK_PARSE_TOOL_CALLS, 0},
    {"blank behind the constrain mark",
     "<|channel|>analysis to=functions.f <|constrain|> json<|message|>{}<|call|>", "f", false, "",
     "", "f({})", DMK_PARSE_TOOL_CALLS, 0},
    {"channel said again behind the recipient",
     "<|channel|>commentary to=functions.run_cmd<|channel|>commentary "
     "json<|message|>{\"cmd\":\"ls\"}<|call|>",
     "run_cmd", false, "", "", "run_cmd({\"cmd\":\"ls\"})", DMK_PARSE_TOOL_CALLS, 1},
    {"call on the analysis channel",
     "<|channel|>analysis to=functions.grep code<|message|>{\"pattern\":\"foo\"}<|call|>", "grep",
     false, "", "", "grep({\"pattern\":\"foo\"})", DMK_PARSE_TOOL_CALLS, 0},
    {"two types", "<|channel|>commentary to=functions.f code json<|message|>{}<|call|>", "f", false,
     "", "", "f({})", DMK_PARSE_TOOL_CALLS, 1},
    {"misspelt channel, valid recipient",
     "<|channel|>comment to=functions.a json<|message|>{}<|call|>", "a", false, "", "", "a({})",
     DMK_PARSE_TOOL_CALLS, 1},
    {"bare name that is declared",
     "<|channel|>commentary to=get_weather <|constrain|>json<|message|>{\"city\":\"Oslo\"}<|call|>",
     "other get_weather", false, "", "", "get_weather({\"city\":\"Oslo\"})", DMK_PARSE_TOOL_CALLS,
     0},
    {"bare name without tools",
     "<|channel|>commentary to=get_weather <|constrain|>json<|message|>{\"city\":\"Oslo\"}<|call|>",
     NULL, false, "", "{\"city\":\"Oslo\"}", "", DMK_PARSE_STOP, 1},
    {"call without tools goes into the content",
     "<|channel|>commentary to=functions.ask_user json<|message|>{\"question\":\"Which "
     "file?\"}<|call|>",
     NULL, false, "", "{\"question\":\"Which file?\"}", "", DMK_PARSE_STOP, 1},
    {"so does one on the analysis channel",
     "<|channel|>analysis to=functions.ask_user json<|message|>{}<|call|>", NULL, false, "", "{}",
     "", DMK_PARSE_STOP, 1},
    {"function that was not declared is passed on",
     "<|channel|>commentary to=functions.made_up json<|message|>{}<|call|>", "f", false, "", "",
     "made_up({})", DMK_PARSE_TOOL_CALLS, 0},
    {"built-in tool that nobody offered",
     "<|channel|>analysis to=python code<|message|>print(1)<|call|>", NULL, false, "print(1)", "",
     "", DMK_PARSE_STOP, 1},
    {"function with a built-in tool's name",
     "<|channel|>analysis to=python code<|message|>print(1)<|call|>", "python", false, "", "",
     "python(print(1))", DMK_PARSE_TOOL_CALLS, 0},
    {"arguments that are no JSON",
     "<|channel|>commentary to=functions.shell code<|message|>ls -R\n<|call|>", "shell", false, "",
     "", "shell(ls -R\n)", DMK_PARSE_TOOL_CALLS, 0},
    {"two calls in one turn",
     "<|channel|>commentary to=functions.a json<|message|>{\"i\":1}" NEXT
     "<|channel|>commentary to=functions.b json<|message|>{\"i\":2}<|call|>",
     "a b", false, "", "", "a({\"i\":1}) b({\"i\":2})", DMK_PARSE_TOOL_CALLS, 0},
    {"reasoning, text, call",
     "<|channel|>analysis<|message|>plan" NEXT "<|channel|>commentary<|message|>Let me see." NEXT
     "<|channel|>commentary to=functions.search <|constrain|>json<|message|>{\"q\":\"x\"}<|call|>",
     "search", false, "plan", "Let me see.", "search({\"q\":\"x\"})", DMK_PARSE_TOOL_CALLS, 0},
    {"what follows a call's end is nothing",
     "<|channel|>commentary to=functions.locate json<|message|>{\"city\":\"Paris\"}<|call|>"
     "commentary<|channel|>commentary to=functions.locate json<|message|>{\"lat\":1}<|call|>",
     "locate", false, "", "", "locate({\"city\":\"Paris\"})", DMK_PARSE_TOOL_CALLS, 0},
    {"call without its message mark", "<|channel|>commentary to=functions.f {\"a\": 1}<|call|>",
     "f", false, "", "", "f({\"a\": 1})", DMK_PARSE_TOOL_CALLS, 1},
    {"a mark inside a call ends it",
     "<|channel|>commentary to=functions.f<|message|>{}<|channel|>final<|message|>Hi<|return|>",
     "f", false, "", "Hi", "f({})", DMK_PARSE_TOOL_CALLS, 1},
    {"so does the next message's start",
     "<|channel|>commentary "
     "to=functions.f<|message|>{}<|start|>assistant<|channel|>final<|message|>Hi<|return|>",
     "f", false, "", "Hi", "f({})", DMK_PARSE_TOOL_CALLS, 1},
    {"call cut inside its arguments",
     "<|channel|>commentary to=functions.w json<|message|>{\"text\":\"abc", "w", true, "", "",
     "w({\"text\":\"abc)!", DMK_PARSE_STOP, 0},
    {"call cut inside its name", "<|channel|>commentary to=functions.get_we", "get_weather", true,
     "", "", "", DMK_PARSE_STOP, 0},

    /* types and names */
    {"type on a final answer",
     "<|channel|>final <|constrain|>json<|message|>{\"result\":true}<|return|>", "f", false, "",
     "{\"result\":true}", "", DMK_PARSE_STOP, 0},
    {"type on a final answer, no mark", "<|channel|>final json<|message|>{}<|return|>", "f", false,
     "", "{}", "", DMK_PARSE_STOP, 0},
    {"type of no known name", "<|channel|>final <|constrain|>response<|message|>Hi<|return|>", NULL,
     false, "", "Hi", "", DMK_PARSE_STOP, 1},

    /* headers and marks */
    {"message mark missing", "<|channel|>final Hello there<|return|>", NULL, false, "",
     "Hello there", "", DMK_PARSE_STOP, 1},
    {"message mark missing on analysis",
     "<|channel|>analysis We must think." NEXT "<|channel|>final<|message|>ok<|return|>", NULL,
     false, "We must think.", "ok", "", DMK_PARSE_STOP, 1},
    {"cut behind the channel's name", "<|channel|>final", NULL, true, "", "", "", DMK_PARSE_STOP,
     0},
    {"cut inside the recipient mark", "<|channel|>commentary to", "f", true, "", "", "",
     DMK_PARSE_STOP, 0},
    {"cut without a message mark", "<|channel|>final Hello there", NULL, true, "", "Hello there",
     "", DMK_PARSE_STOP, 1},
    {"start mark twice",
     "<|channel|>analysis<|message|>t<|end|><|start|><|start|>assistant<|channel|>final<|message|>"
     "Hi<|return|>",
     NULL, false, "t", "Hi", "", DMK_PARSE_STOP, 1},
    {"role said again", "assistant<|channel|>final<|message|>Hi<|return|>", NULL, false, "", "Hi",
     "", DMK_PARSE_STOP, 1},
    {"role said twice",
     "<|channel|>analysis<|message|>t<|end|><|start|>assistantassistant<|channel|>final<|message|>"
     "Hi<|return|>",
     NULL, false, "t", "Hi", "", DMK_PARSE_STOP, 1},
    {"start mark and role said again", "<|start|>assistant<|channel|>final<|message|>Hi<|return|>",
     NULL, false, "", "Hi", "", DMK_PARSE_STOP, 1},
    {"role missing",
     "<|channel|>analysis<|message|>t<|end|><|start|><|channel|>final<|message|>Hi<|return|>", NULL,
     false, "t", "Hi", "", DMK_PARSE_STOP, 1},
    {"blank before the channel's name", "<|channel|>\nfinal<|message|>Hi<|return|>", NULL, false,
     "", "Hi", "", DMK_PARSE_STOP, 1},
    {"type said before its mark and again",
     " to=functions.f<|channel|>analysis json<|constrain|>json<|message|>{}<|call|>", "f", false,
     "", "", "f({})", DMK_PARSE_TOOL_CALLS, 1},
    {"prose where a channel belongs",
     "<|channel|>We need to answer." NEXT "<|channel|>final<|message|>ok<|return|>", NULL, false,
     "We need to answer.", "ok", "", DMK_PARSE_STOP, -1},
    {"text before the channel of a whole header",
     "I may not.<|channel|>final<|message|>Sorry, no.<|return|>", NULL, false, "I may not.",
     "Sorry, no.", "", DMK_PARSE_STOP, 2},
    {"message on no channel, then the usual",
     "Not allowed. Must refuse." NEXT "<|channel|>analysis<|message|>Refuse." NEXT
     "<|channel|>final<|message|>Sorry, no.<|return|>",
     NULL, false, "Not allowed. Must refuse.\nRefuse.", "Sorry, no.", "", DMK_PARSE_STOP, -1},
    {"nothing but text", "Sorry, no.<|return|>", NULL, false, "", "Sorry, no.", "", DMK_PARSE_STOP,
     -1},
    {"nothing but text, cut", "Sorry, no.", NULL, true, "Sorry, no.", "", "", DMK_PARSE_STOP, -1},
    {"text that begins like a header", "assistants are final code words<|return|>", NULL, false, "",
     "assistants are final code words", "", DMK_PARSE_STOP, -1},
    {"unknown channel alone", "<|channel|>answer<|message|>42<|return|>", NULL, false, "", "42", "",
     DMK_PARSE_STOP, 1},
    {"unknown channel and reasoning, no answer",
     "<|channel|>answer<|message|>42" NEXT "<|channel|>analysis<|message|>hm<|return|>", NULL,
     false, "hm", "42", "", DMK_PARSE_STOP, 1},
    {"unknown channel and reasoning, cut",
     "<|channel|>answer<|message|>42" NEXT "<|channel|>analysis<|message|>hm", NULL, true, "42\nhm",
     "", "", DMK_PARSE_STOP, 1},
    {"unknown channel before a call",
     "<|channel|>plan<|message|>see" NEXT
     "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
     "f", false, "see", "", "f({})", DMK_PARSE_TOOL_CALLS, 1},
    {"no channel at all", "<|message|>Hi<|return|>", NULL, false, "", "Hi", "", DMK_PARSE_STOP, 1},
    {"answer ended twice", "<|channel|>final<|message|>Answer<|end|><|return|>", NULL, false, "",
     "Answer", "", DMK_PARSE_STOP, 1},
    {"answer ended twice the same way", "<|channel|>final<|message|>Answer<|end|><|end|>", NULL,
     false, "", "Answer", "", DMK_PARSE_STOP, 1},
    {"text behind an end", "<|channel|>analysis<|message|>t<|end|>Hi there.<|return|>", NULL, false,
     "t", "Hi there.", "", DMK_PARSE_STOP, -1},
    {"message without a start mark",
     "<|channel|>analysis<|message|>t<|end|>assistant<|channel|>final<|message|>Hi<|return|>", NULL,
     false, "t", "Hi", "", DMK_PARSE_STOP, -1},
    {"message that was not ended",
     "<|channel|>analysis<|message|>t<|start|>assistant<|channel|>final<|message|>Hi<|return|>",
     NULL, false, "t", "Hi", "", DMK_PARSE_STOP, 1},
    {"channel mark inside a message",
     "<|channel|>analysis<|message|>t<|channel|>final<|message|>Hi<|return|>", NULL, false, "t",
     "Hi", "", DMK_PARSE_STOP, 1},
    {"control tokens inside a message are dropped",
     "<|channel|>final<|message|>a<|message|>b<|constrain|>c<|reserved_200014|>d<|startoftext|>e<|"
     "return|>",
     NULL, false, "", "abcde", "", DMK_PARSE_STOP, 4},
    {"end of text stops", "<|channel|>final<|message|>a<|endoftext|>b", NULL, false, "", "a", "",
     DMK_PARSE_STOP, 0},
    {"the model plays the user",
     "<|channel|>final<|message|>Hi<|end|><|start|>user<|message|>More!<|return|>", NULL, false,
     "More!", "Hi", "", DMK_PARSE_STOP, 1},
    {"the model plays the tool",
     "<|channel|>commentary to=functions.f<|message|>{}<|end|><|start|>functions.f "
     "to=assistant<|channel|>commentary<|message|>4<|end|><|start|>assistant<|channel|>final<|"
     "message|>Four.<|return|>",
     "f", false, "4", "Four.", "f({})", DMK_PARSE_TOOL_CALLS, 1},
    {"words in a header are shown when nothing else is",
     "<|channel|>final Hello there<|message|><|return|>", NULL, false, "", "Hello there", "",
     DMK_PARSE_STOP, 1},
    {"and not when something is", "<|channel|>final Hello there<|message|>Hi<|return|>", NULL,
     false, "", "Hi", "", DMK_PARSE_STOP, 1},
    {"nothing", "<|return|>", NULL, false, "", "", "", DMK_PARSE_STOP, 1},
};

static void print_calls(const struct turn *turn, struct dmk_buf *out)
{
    for (size_t i = 0; i < turn->n_calls; i++) {
        const struct call *call = &turn->calls[i];

        dmk_buf_printf(out, "%s%s(%s)%s", i ? " " : "", call->name, text_of(&call->arguments),
                       call->ended ? "" : "!");
    }
}

static void expect_text(const char *what, const struct dmk_buf *got, const char *want)
{
    if (strcmp(text_of(got), want) != 0) {
        fail_msg("%s: got \"%s\", want \"%s\"", what, text_of(got), want);
    }
}

static void check(const struct fixture *f, const struct expectation *e)
{
    struct turn turn;
    struct dmk_buf calls;

    parse_text(f, e->output, e->tools, e->cut, &turn);
    dmk_buf_init(&calls, 0);
    print_calls(&turn, &calls);
    expect_text(e->what, &turn.reasoning, e->reasoning);
    expect_text(e->what, &turn.content, e->content);
    expect_text(e->what, &calls, e->calls);
    assert_int_equal(turn.result.end, e->end);
    if (e->n_recovered < 0 ? turn.result.n_recovered == 0
                           : turn.result.n_recovered != (uint32_t)e->n_recovered) {
        fail_msg("%s: %u repairs", e->what, turn.result.n_recovered);
    }
    dmk_buf_fini(&calls);
    turn_fini(&turn);
}

static void test_table(void **state)
{
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        check(*state, &table[i]);
    }
}

#define PARSE(ids, tools, cut, turn)                                                               \
    parse_ids(*state, (ids), sizeof(ids) / sizeof((ids)[0]), (tools), (cut), (turn))

/* A heart that lies in two tokens comes out whole and alone; no delta holds half of it. */
static void test_character_in_two_tokens(void **state)
{
    static const uint32_t ids[] = {200005, 17196, 200008, 12194, 31446, 244, 0, 200002};
    struct turn turn;

    PARSE(ids, NULL, false, &turn);
    assert_string_equal(text_of(&turn.content), "Hi💖!");
    assert_string_equal(text_of(&turn.log), "1 3 0 Hi||\n1 5 0 💖||\n1 6 0 !||\n");
    turn_fini(&turn);
}

/* Bytes that one message leaves unfinished end with it. */
static void test_bytes_do_not_leak(void **state)
{
    static const uint32_t ids[] = {200005, 35644,  200008, 83,     31446, 200007, 200006,
                                   173781, 200005, 17196,  200008, 12194, 200002};
    struct turn turn;

    PARSE(ids, NULL, false, &turn);
    assert_string_equal(text_of(&turn.reasoning), "t\xef\xbf\xbd");
    assert_string_equal(text_of(&turn.content), "Hi");
    assert_int_equal(turn.result.n_recovered, 0);
    turn_fini(&turn);
}

/* Two broken halves of a character, then text: each is replaced as soon as it is known to be broken. */
static void test_invalid_bytes(void **state)
{
    static const uint32_t ids[] = {200005, 17196, 200008, 9552, 9552, 93013, 200002};
    struct turn turn;

    PARSE(ids, NULL, false, &turn);
    assert_int_equal(strncmp(text_of(&turn.content), " \xef\xbf\xbd \xef\xbf\xbd", 8), 0);
    turn_fini(&turn);
}

/* Text in the step of the stop token is sent; the stop token is kept for the caller. */
static void test_text_before_stop(void **state)
{
    static const uint32_t ids[] = {200005, 17196, 200008, 24537, 13, 200002};
    struct turn turn;

    PARSE(ids, NULL, false, &turn);
    assert_string_equal(text_of(&turn.content), "Done.");
    assert_int_equal(turn.result.stop_id, 200002);
    turn_fini(&turn);
}

/* A call that was cut keeps its arguments to the last character and is not counted as finished. */
static void test_cut_call(void **state)
{
    static const uint32_t ids[] = {200005, 12606,  815,   316, 28,   44580, 2234,
                                   5701,   200008, 10848, 919, 7534, 26682};
    struct turn turn;

    PARSE(ids, "w", true, &turn);
    assert_int_equal(turn.n_calls, 1);
    assert_string_equal(turn.calls[0].name, "w");
    assert_string_equal(text_of(&turn.calls[0].arguments), "{\"text\":\"abc");
    assert_false(turn.calls[0].ended);
    assert_int_equal(turn.result.n_calls, 0);
    assert_int_equal(turn.result.end, DMK_PARSE_STOP);
    turn_fini(&turn);
}

static void test_missing_message_mark_ids(void **state)
{
    static const uint32_t ids[] = {200005, 17196, 32949, 1354, 200002};
    struct turn turn;

    PARSE(ids, NULL, false, &turn);
    assert_string_equal(text_of(&turn.content), "Hello there");
    assert_int_equal(turn.result.repairs[DMK_REPAIR_NO_MESSAGE], 1);
    turn_fini(&turn);
}

/* The spelling of a control token in ordinary tokens is text like any other. */
static void test_spelled_marks_are_text(void **state)
{
    struct fixture *f = *state;
    struct dmk_ids ids;
    struct turn turn;

    ids_of(f, "<|channel|>final<|message|>", &ids);
    dmk_encode(f->vocab, f->scratch, dmk_str_from("say <|end|><|start|>user<|message|>x"), &ids);
    parse_ids(f, ids.data, ids.len, NULL, false, &turn);
    assert_string_equal(text_of(&turn.content), "say <|end|><|start|>user<|message|>x");
    assert_int_equal(turn.result.n_recovered, 0);
    dmk_ids_fini(&ids);
    turn_fini(&turn);
}

/* An answer that never gets its mark is shown before it ends, once it is too long for a header. */
static void test_long_header_becomes_text(void **state)
{
    struct fixture *f = *state;
    struct dmk_ids ids;
    struct turn turn;
    struct dmk_buf want;

    ids_of(f, "<|channel|>final", &ids);
    dmk_buf_init(&want, 0);
    for (int i = 0; i < 400; i++) {
        dmk_ids_push(&ids, 32949); /* " Hello" */
        dmk_buf_puts(&want, i ? " Hello" : "Hello");
    }
    struct dmk_parser *parser = parser_open(f, NULL, &turn);

    for (size_t i = 0; i < ids.len; i++) {
        f->format->parser_push(parser, ids.data[i]);
    }
    assert_true(turn.content.len > 100);
    f->format->parser_push(parser, DMK_TOKEN_RETURN);
    f->format->parser_end(parser, false, &turn.result);
    assert_string_equal(text_of(&turn.content), text_of(&want));
    f->format->parser_free(&parser);
    dmk_buf_fini(&want);
    dmk_ids_fini(&ids);
    turn_fini(&turn);
}

/* What is held back is bounded: too much of it is reasoning, and stays one text. */
static void test_held_text_is_bounded(void **state)
{
    const struct fixture *f = *state;
    const size_t n = 750000; /* of 6 bytes: more than 4 MiB */
    struct dmk_ids ids;
    struct turn turn;

    ids_of(f, "<|channel|>odd<|message|>", &ids);
    struct dmk_parser *parser = parser_open(f, NULL, &turn);

    for (size_t i = 0; i < ids.len; i++) {
        f->format->parser_push(parser, ids.data[i]);
    }
    for (size_t i = 0; i < n; i++) {
        f->format->parser_push(parser, 32949); /* " Hello" */
    }
    assert_true(turn.reasoning.len > 0);
    f->format->parser_push(parser, DMK_TOKEN_RETURN);
    f->format->parser_end(parser, false, &turn.result);
    assert_int_equal(turn.reasoning.len, 6 * n);
    assert_int_equal(turn.content.len, 0);
    assert_int_equal(turn.result.n_reasoning_tokens, n);
    f->format->parser_free(&parser);
    dmk_ids_fini(&ids);
    turn_fini(&turn);
}

/* Nothing of a call's header is in any text, and its name comes whole and first. */
static void test_call_events(void **state)
{
    struct turn turn;

    parse_text(*state,
               "<|channel|>analysis<|message|>plan" NEXT
               "<|channel|>commentary to=functions.search "
               "<|constrain|>json<|message|>{\"q\":\"x\"}<|call|>",
               "search", false, &turn);
    assert_int_equal(turn.content.len, 0);
    assert_null(strstr(text_of(&turn.log), "functions."));
    assert_null(strstr(text_of(&turn.log), "commentary"));
    assert_null(strstr(text_of(&turn.log), "<|"));
    assert_int_equal(strlen(turn.calls[0].id), 29);
    turn_fini(&turn);
}

static void test_call_ids_differ(void **state)
{
    const char *text = "<|channel|>commentary to=functions.a json<|message|>{\"i\":1}" NEXT
                       "<|channel|>commentary to=functions.b json<|message|>{\"i\":2}<|call|>";
    struct turn turn, again;

    parse_text(*state, text, "a b", false, &turn);
    parse_text(*state, text, "a b", false, &again);
    assert_string_not_equal(turn.calls[0].id, turn.calls[1].id);
    assert_string_equal(turn.calls[0].id, again.calls[0].id);
    turn_fini(&turn);
    turn_fini(&again);
}

/* Tokens of the text count, headers and marks do not, nor do calls on the analysis channel. */
static void test_reasoning_tokens(void **state)
{
    struct turn turn;

    parse_text(*state,
               "<|channel|>analysis<|message|>plan" NEXT "<|channel|>final<|message|>Hi<|return|>",
               NULL, false, &turn);
    assert_int_equal(turn.result.n_reasoning_tokens, 1);
    turn_fini(&turn);
    parse_text(*state, "<|channel|>analysis to=functions.f<|message|>{}<|call|>", "f", false,
               &turn);
    assert_int_equal(turn.result.n_reasoning_tokens, 0);
    turn_fini(&turn);
    parse_text(*state, "no channel" NEXT "<|channel|>final<|message|>Hi<|return|>", NULL, false,
               &turn);
    assert_int_equal(turn.result.n_reasoning_tokens, 2);
    turn_fini(&turn);
}

static void test_plain(void **state)
{
    static const uint32_t ids[] = {12194, 200006, 31446, 244, 31446, 200002, 12194};
    struct fixture plain = *(struct fixture *)*state;
    struct turn turn;

    plain.format = dmk_format_find("plain");
    assert_non_null(plain.format);
    assert_null(dmk_format_find("other"));
    parse_ids(&plain, ids, sizeof(ids) / sizeof(ids[0]), NULL, false, &turn);
    assert_string_equal(text_of(&turn.content), "Hi💖\xef\xbf\xbd");
    assert_int_equal(turn.result.n_recovered, 1);
    assert_int_equal(turn.result.stop_id, 200002);
    turn_fini(&turn);
}

static void push_all(const struct fixture *f, const uint32_t *ids, size_t n, struct turn *turn)
{
    const struct dmk_str name = dmk_str_from("f");
    const struct dmk_parser_conf conf = {.vocab = f->vocab,
                                         .tool_names = &name,
                                         .n_tool_names = 1,
                                         .tools_allowed = true,
                                         .runs_on = true,
                                         .on_event = turn_event,
                                         .ud = turn};
    struct dmk_parser *parser = f->format->parser_new(&conf);

    assert_non_null(parser);
    for (size_t i = 0; i < n; i++) {
        f->format->parser_push(parser, ids[i]);
    }
    f->format->parser_end(parser, true, &turn->result);
    f->format->parser_free(&parser);
}

/* Where the client asked to go on behind the stop ids, they end a message and nothing else. */
static void test_runs_on(void **state)
{
    struct fixture f = *(struct fixture *)*state;
    struct dmk_ids ids;
    struct turn turn;

    ids_of(&f,
           "<|channel|>final<|message|>one<|return|><|start|>assistant<|channel|>commentary "
           "to=functions.f json<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>"
           "two<|end|><|return|><|endoftext|>",
           &ids);
    turn_init(&turn);
    push_all(&f, ids.data, ids.len, &turn);
    assert_string_equal(text_of(&turn.content), "one\ntwo");
    assert_int_equal(turn.n_calls, 1);
    assert_int_equal(turn.result.stop_id, 0);
    turn_fini(&turn);
    dmk_ids_fini(&ids);

    f.format = dmk_format_find("plain");
    ids_of(&f, "one<|return|> two<|call|><|endoftext|> three", &ids);
    turn_init(&turn);
    push_all(&f, ids.data, ids.len, &turn);
    assert_string_equal(text_of(&turn.content), "one two three");
    assert_int_equal(turn.result.n_recovered, 0);
    assert_int_equal(turn.result.stop_id, 0);
    turn_fini(&turn);
    dmk_ids_fini(&ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_character_in_two_tokens),
        cmocka_unit_test(test_bytes_do_not_leak),
        cmocka_unit_test(test_invalid_bytes),
        cmocka_unit_test(test_text_before_stop),
        cmocka_unit_test(test_cut_call),
        cmocka_unit_test(test_missing_message_mark_ids),
        cmocka_unit_test(test_spelled_marks_are_text),
        cmocka_unit_test(test_long_header_becomes_text),
        cmocka_unit_test(test_held_text_is_bounded),
        cmocka_unit_test(test_call_events),
        cmocka_unit_test(test_call_ids_differ),
        cmocka_unit_test(test_reasoning_tokens),
        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_runs_on),
    };

    return cmocka_run_group_tests(tests, fixture_open, fixture_close);
}
