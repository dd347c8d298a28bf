/* The gRPC dialect: requests, good and bad, and the messages of answers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdlib.h>
#include <cmocka.h>
#include "proto/damask_frontend.pb-c.h"
#include "router/api.h"

static const struct dmk_api_limits limits = {.max_choices = 4,
                                             .max_conv_bytes = 1 << 16,
                                             .max_messages = 4,
                                             .max_tools = 2,
                                             .date_unix_s = -1};

static int parse(const Damask__V1__ChatRequest *m, struct dmk_ask *ask, struct dmk_api_error *error)
{
    const size_t n = damask__v1__chat_request__get_packed_size(m);
    uint8_t *bytes = malloc(n + 1);
    int rc;

    damask__v1__chat_request__pack(m, bytes);
    dmk_ask_init(ask, 0);
    rc = dmk_dialect_grpc.parse((struct dmk_bytes){bytes, n}, &limits, ask, error);
    free(bytes);
    return rc;
}

/* The generated structs want char * and change nothing. */
static char *text(const char *literal)
{
    return (char *)(uintptr_t)literal;
}

struct fixture {
    Damask__V1__ChatRequest request;
    Damask__V1__ChatMessage user;
    Damask__V1__ChatMessage *messages[1];
};

static void make(struct fixture *f)
{
    f->request = (Damask__V1__ChatRequest)DAMASK__V1__CHAT_REQUEST__INIT;
    f->user = (Damask__V1__ChatMessage)DAMASK__V1__CHAT_MESSAGE__INIT;
    f->user.role = DAMASK__V1__CHAT_ROLE__CHAT_ROLE_USER;
    f->user.content = text("Hi");
    f->messages[0] = &f->user;
    f->request.model = text("m");
    f->request.messages = f->messages;
    f->request.n_messages = 1;
}

static void test_defaults_and_zeros(void **state)
{
    struct dmk_api_error error = {0};
    struct dmk_ask ask;
    struct fixture f;

    (void)state;
    make(&f);
    assert_int_equal(parse(&f.request, &ask, &error), 0);
    assert_true(ask.temperature == 1 && ask.top_p == 1 && ask.repetition_penalty == 1);
    assert_true(ask.n == 1 && !ask.has_seed && !ask.has_max_tokens && ask.parallel_calls);
    assert_int_equal(dmk_conv_view(ask.conv)->n_messages, 1);
    assert_int_equal(dmk_conv_view(ask.conv)->effort, DMK_EFFORT_MEDIUM);
    dmk_ask_fini(&ask);

    f.request.opt_temperature_case = DAMASK__V1__CHAT_REQUEST__OPT_TEMPERATURE_TEMPERATURE;
    f.request.temperature = 0;
    f.request.opt_seed_case = DAMASK__V1__CHAT_REQUEST__OPT_SEED_SEED;
    f.request.seed = 0;
    f.request.effort = DAMASK__V1__CHAT_EFFORT__CHAT_EFFORT_LOW;
    f.request.single_tool_call = 1;
    assert_int_equal(parse(&f.request, &ask, &error), 0);
    assert_true(ask.temperature == 0 && ask.has_seed && ask.seed == 0 && !ask.parallel_calls);
    assert_int_equal(dmk_conv_view(ask.conv)->effort, DMK_EFFORT_LOW);
    dmk_ask_fini(&ask);

    f.request.seed = UINT64_MAX;
    assert_int_equal(parse(&f.request, &ask, &error), 0);
    assert_true(ask.has_seed && ask.seed == UINT64_MAX);
    dmk_ask_fini(&ask);
}

static void refuse(const Damask__V1__ChatRequest *m, const char *param)
{
    struct dmk_api_error error = {0};
    struct dmk_ask ask;

    assert_true(parse(m, &ask, &error) < 0);
    assert_int_equal(error.status, 400);
    assert_string_equal(error.param, param);
    dmk_ask_fini(&ask);
}

static void test_bad_requests(void **state)
{
    Damask__V1__ChatTool tool = DAMASK__V1__CHAT_TOOL__INIT;
    Damask__V1__ChatTool *tools[1] = {&tool};
    struct dmk_api_error error = {0};
    struct dmk_ask ask;
    struct fixture f;

    (void)state;
    make(&f);
    f.request.model = text("");
    refuse(&f.request, "model");
    make(&f);
    f.request.n_messages = 0;
    refuse(&f.request, "messages");
    make(&f);
    f.user.role = DAMASK__V1__CHAT_ROLE__CHAT_ROLE_UNSPECIFIED;
    refuse(&f.request, "messages[0].role");
    make(&f);
    f.user.content = text("\xff");
    refuse(&f.request, "messages[0].content");
    make(&f);
    f.user.role = DAMASK__V1__CHAT_ROLE__CHAT_ROLE_TOOL;
    f.user.tool_call_id = text("c");
    refuse(&f.request, "messages[0].tool_call_id");
    make(&f);
    f.request.n = 5;
    refuse(&f.request, "n");
    make(&f);
    f.request.min_p = 2;
    refuse(&f.request, "min_p");
    make(&f);
    tool.name = text("f g");
    f.request.tools = tools;
    f.request.n_tools = 1;
    refuse(&f.request, "tools[0].function.name");
    tool.name = text("f");
    tool.parameters_json = text("[1]");
    refuse(&f.request, "tools[0].function.parameters");
    tool.parameters_json = text("{");
    refuse(&f.request, "tools[0].parameters_json");
    make(&f);
    f.request.frequency_penalty = NAN;
    refuse(&f.request, "frequency_penalty");
    make(&f);
    f.request.tool_choice = (Damask__V1__ChatToolChoice)9;
    refuse(&f.request, "tool_choice");
    make(&f);
    f.request.effort = (Damask__V1__ChatEffort)9;
    refuse(&f.request, "effort");

    dmk_ask_init(&ask, 0);
    assert_true(dmk_dialect_grpc.parse((struct dmk_bytes){(const uint8_t *)"\xff\xff", 2}, &limits,
                                       &ask, &error) < 0);
    assert_int_equal(error.status, 400);
    dmk_ask_fini(&ask);
}

struct frames {
    Damask__V1__ChatEvent *list[8];
    size_t n;
};

static void take_frame(void *ud, const char *event, struct dmk_bytes payload)
{
    struct frames *f = ud;

    (void)event;
    assert_true(f->n < 8);
    f->list[f->n] = damask__v1__chat_event__unpack(NULL, payload.len, payload.data);
    assert_non_null(f->list[f->n]);
    f->n++;
}

static void test_answer(void **state)
{
    struct frames f = {0};
    const struct dmk_reply_conf conf = {
        .id_hex = "0a", .model = "m", .stream = true, .n = 1, .sink = {take_frame, &f}};
    const struct dmk_usage usage = {.n_prompt = 9, .n_cached = 8, .n_output = 7, .n_reasoning = 6};
    const struct dmk_lp lp = {.bytes = {(const uint8_t *)"x\0y", 3},
                              .logprob = -1,
                              .n_top = 1,
                              .top = {{{(const uint8_t *)"z", 1}, -2}}};
    char longer[1000];
    struct dmk_event event = {.kind = DMK_EVENT_CONTENT, .text = {longer, sizeof(longer)}};
    void *r = dmk_dialect_grpc.reply_new(&conf);

    (void)state;
    memset(longer, 'a', sizeof(longer));
    dmk_dialect_grpc.event(r, 0, &event, &lp, 1);
    event = (struct dmk_event){.kind = DMK_EVENT_CALL_BEGIN,
                               .call_index = 1,
                               .name = dmk_str_from("f"),
                               .call_id = dmk_str_from("call_x")};
    dmk_dialect_grpc.event(r, 0, &event, NULL, 0);
    dmk_dialect_grpc.choice_end(r, 0, DMK_FINISH_TOOL_CALLS);
    dmk_dialect_grpc.end(r, &usage);
    dmk_dialect_grpc.reply_free(r);
    assert_int_equal(f.n, 4);
    assert_string_equal(f.list[0]->id, "chatcmpl-0a");
    assert_string_equal(f.list[1]->id, "");
    assert_int_equal(strlen(f.list[0]->delta->content), sizeof(longer));
    assert_int_equal(f.list[0]->delta->n_logprobs, 1);
    assert_int_equal(f.list[0]->delta->logprobs[0]->token.len, 3);
    assert_int_equal(f.list[0]->delta->logprobs[0]->n_top, 1);
    assert_string_equal(f.list[1]->delta->call_begin->id, "call_x");
    assert_string_equal(f.list[1]->delta->call_begin->name, "f");
    assert_int_equal(f.list[1]->delta->call_begin->index, 1);
    assert_int_equal(f.list[2]->delta->finish, DAMASK__V1__CHAT_FINISH__CHAT_FINISH_TOOL_CALLS);
    assert_int_equal(f.list[3]->ended->usage->cached_tokens, 8);
    assert_int_equal(f.list[3]->ended->usage->reasoning_tokens, 6);
    for (size_t i = 0; i < f.n; i++) {
        damask__v1__chat_event__free_unpacked(f.list[i], NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults_and_zeros),
        cmocka_unit_test(test_bad_requests),
        cmocka_unit_test(test_answer),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
