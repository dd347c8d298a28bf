/* Every bound of the worker protocol, from both sides: each case starts from a message that passes and
 * changes one field to its limit or past it; the sentence must name the field. Also batches, and noise. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "common/base/rng.h"
#include "common/rpc/arena.h"
#include "common/rpc/msg.h"

#define T(text) ((char *)(uintptr_t)(text))

static const struct dmk_msg_limits limits = {
    .vocab_size = 1000, .max_context = 50, .max_choices = 4};

static uint8_t wire[1u << 20];
static struct dmk_error err;

static void assert_says(const char *part)
{
    if (!strstr(err.text, part)) {
        fail_msg("\"%s\" does not hold \"%s\"", err.text, part);
    }
}

/* ---- generate and prefill ---- */

struct generate {
    Damask__V1__RouterMessage m;
    Damask__V1__Generate g;
    Damask__V1__RequestId id;
    Damask__V1__Sampling s;
    uint32_t prompt[64], stops[DMK_MSG_MAX_STOP_IDS + 1], bias_ids[DMK_MSG_MAX_BIAS + 1];
    float bias[DMK_MSG_MAX_BIAS + 1];
    uint8_t salt[DMK_MSG_MAX_SALT + 1];
};

static struct generate x;

static void good_generate(void)
{
    x = (struct generate){.m = DAMASK__V1__ROUTER_MESSAGE__INIT,
                          .g = DAMASK__V1__GENERATE__INIT,
                          .id = DAMASK__V1__REQUEST_ID__INIT,
                          .s = DAMASK__V1__SAMPLING__INIT};
    x.m.body_case = DAMASK__V1__ROUTER_MESSAGE__BODY_GENERATE;
    x.m.generate = &x.g;
    x.g.id = &x.id;
    x.id.lo = 1;
    x.g.sampling = &x.s;
    x.g.prompt = x.prompt;
    x.g.n_prompt = 3;
    x.prompt[1] = 999;
    x.g.max_tokens = 1;
    x.g.n = 4;
    x.s.top_p = 1;
    x.s.temperature = 1;
}

/* Packs, reads, and checks; what refuses first. */
static int pass_generate(void)
{
    Damask__V1__RouterMessage *m = NULL;
    const size_t len = damask__v1__router_message__pack(&x.m, wire);
    int ret = dmk_msg_router_unpack((struct dmk_bytes){wire, len}, &m, &err);

    if (ret == 0) {
        ret = dmk_msg_generate_check(m->generate, &limits, &err);
        damask__v1__router_message__free_unpacked(m, NULL);
    } else {
        assert_null(m); /* outputs are untouched on failure */
    }
    return ret;
}

#define REFUSED(change, says)                                                                      \
    do {                                                                                           \
        good_generate();                                                                           \
        change;                                                                                    \
        assert_true(pass_generate() < 0);                                                          \
        assert_says(says);                                                                         \
    } while (0)
#define PASSED(change)                                                                             \
    do {                                                                                           \
        good_generate();                                                                           \
        change;                                                                                    \
        assert_int_equal(pass_generate(), 0);                                                      \
    } while (0)

static void generate_is_checked(void **state)
{
    (void)state;
    PASSED((void)0);
    REFUSED(x.id.lo = 0, "no request id");
    REFUSED(x.g.id = NULL, "no request id");
    REFUSED(x.g.n_prompt = 0, "prompt is empty");
    PASSED(x.g.n_prompt = 49);
    REFUSED(x.g.n_prompt = 50, "the prompt has 50 tokens, but the context holds 50");
    REFUSED(x.prompt[2] = 1000, "prompt token 2 is 1000, but the vocabulary ends at 999");
    REFUSED(x.g.max_tokens = 0, "max_tokens is 0");
    PASSED((x.g.max_tokens = 7, x.g.min_tokens = 7));
    REFUSED((x.g.max_tokens = 7, x.g.min_tokens = 8), "min_tokens 8 is more than max_tokens 7");
    REFUSED(x.g.n = 5, "n is 5, at most 4");
    PASSED(x.g.n = 0);
    PASSED((x.g.stop_ids = x.stops, x.g.n_stop_ids = DMK_MSG_MAX_STOP_IDS));
    REFUSED((x.g.stop_ids = x.stops, x.g.n_stop_ids = DMK_MSG_MAX_STOP_IDS + 1),
            "stop ids: 65 entries");
    REFUSED((x.g.stop_ids = x.stops, x.g.n_stop_ids = 1, x.stops[0] = 4000000000u),
            "stop token 0 is 4000000000");
    PASSED((x.g.cache_salt.data = x.salt, x.g.cache_salt.len = DMK_MSG_MAX_SALT));
    REFUSED((x.g.cache_salt.data = x.salt, x.g.cache_salt.len = DMK_MSG_MAX_SALT + 1),
            "cache salt: 257");
    REFUSED(x.g.request_id = T("a\nb"), "request id holds a control character");
    REFUSED(x.g.traceparent = T("\x7f"), "traceparent holds a control character");
}

static void sampling_is_checked(void **state)
{
    (void)state;
    REFUSED(x.g.sampling = NULL, "no sampling");
    PASSED(x.s.temperature = 0);
    REFUSED(x.s.temperature = -0.1f, "temperature is -0.1, allowed are 0 to 100");
    REFUSED(x.s.temperature = NAN, "temperature is nan");
    REFUSED(x.s.temperature = INFINITY, "temperature is inf");
    REFUSED(x.s.top_p = 0, "top_p is 0");
    REFUSED(x.s.top_p = 1.5f, "top_p");
    REFUSED(x.s.top_p = NAN, "top_p");
    REFUSED(x.s.min_p = -1, "min_p");
    PASSED(x.s.min_p = 1);
    PASSED(x.s.frequency_penalty = -2);
    REFUSED(x.s.frequency_penalty = -2.01f, "frequency_penalty");
    REFUSED(x.s.presence_penalty = NAN, "presence_penalty");
    PASSED(x.s.repetition_penalty = 0);
    REFUSED(x.s.repetition_penalty = -1, "repetition_penalty");
    PASSED((x.s.logprobs = true, x.s.top_logprobs = 20));
    REFUSED((x.s.logprobs = true, x.s.top_logprobs = 21), "top_logprobs");
    REFUSED(x.s.top_logprobs = 1, "without logprobs");
    PASSED((x.s.bias_ids = x.bias_ids, x.s.bias_values = x.bias,
            x.s.n_bias_ids = x.s.n_bias_values = DMK_MSG_MAX_BIAS));
    REFUSED((x.s.bias_ids = x.bias_ids, x.s.bias_values = x.bias,
             x.s.n_bias_ids = x.s.n_bias_values = DMK_MSG_MAX_BIAS + 1),
            "logit bias: 1025 entries");
    REFUSED((x.s.bias_ids = x.bias_ids, x.s.bias_values = x.bias, x.s.n_bias_ids = 2,
             x.s.n_bias_values = 1),
            "2 ids but 1 values");
    REFUSED((x.s.bias_ids = x.bias_ids, x.s.bias_values = x.bias,
             x.s.n_bias_ids = x.s.n_bias_values = 1, x.bias_ids[0] = 1000),
            "logit bias token 0 is 1000");
    REFUSED((x.s.bias_ids = x.bias_ids, x.s.bias_values = x.bias,
             x.s.n_bias_ids = x.s.n_bias_values = 1, x.bias[0] = 101),
            "a logit bias is 101");
}

static int pass_prefill(Damask__V1__Prefill *p)
{
    Damask__V1__RouterMessage m = DAMASK__V1__ROUTER_MESSAGE__INIT, *back = NULL;
    int ret;

    m.body_case = DAMASK__V1__ROUTER_MESSAGE__BODY_PREFILL;
    m.prefill = p;
    ret = dmk_msg_router_unpack(
        (struct dmk_bytes){wire, damask__v1__router_message__pack(&m, wire)}, &back, &err);
    if (ret == 0) {
        ret = dmk_msg_prefill_check(back->prefill, &limits, &err);
        damask__v1__router_message__free_unpacked(back, NULL);
    }
    return ret;
}

static void prefill_is_checked(void **state)
{
    static uint8_t ticket[DMK_MSG_MAX_TICKET + 1];
    uint32_t prompt[64] = {0};
    Damask__V1__RequestId id = DAMASK__V1__REQUEST_ID__INIT;
    Damask__V1__Prefill p = DAMASK__V1__PREFILL__INIT;

    (void)state;
    id.hi = 1;
    p.id = &id;
    p.prompt = prompt;
    p.n_prompt = 2;
    p.ticket = (ProtobufCBinaryData){DMK_MSG_MAX_TICKET, ticket};
    assert_int_equal(pass_prefill(&p), 0);
    p.ticket.len++;
    assert_true(pass_prefill(&p) < 0);
    assert_says("ticket bytes: 32769");
    p.ticket.len = 0;
    assert_true(pass_prefill(&p) < 0);
    assert_says("ticket is missing");
    p.ticket.len = 1;
    p.n_prompt = 1;
    assert_true(pass_prefill(&p) < 0);
    assert_says("1 tokens");
    p.n_prompt = 50;
    assert_true(pass_prefill(&p) < 0);
    assert_says("50 tokens");
    p.n_prompt = 2;
    prompt[0] = 1000;
    assert_true(pass_prefill(&p) < 0);
    assert_says("prompt token 0");
    prompt[0] = 0;
    p.id = NULL;
    assert_true(pass_prefill(&p) < 0);
    assert_says("prefill has no request id");
}

static void later_bodies_are_let_through(void **state)
{
    static const uint8_t later[] = {0x08, 0x05, 0xa2, 0x06, 0x01, 'x'}; /* field 100: bytes */
    Damask__V1__RouterMessage *m;
    Damask__V1__WorkerMessage *w;
    static const uint8_t event[] = {0x08, 0x05, 0x12, 0x04, 0xa2, 0x06, 0x01, 'x'};

    (void)state;
    assert_int_equal(dmk_msg_router_unpack((struct dmk_bytes){later, sizeof(later)}, &m, &err), 0);
    assert_int_equal(m->body_case, DAMASK__V1__ROUTER_MESSAGE__BODY__NOT_SET);
    assert_int_equal(m->worker_incarnation, 5);
    damask__v1__router_message__free_unpacked(m, NULL);
    assert_int_equal(
        dmk_msg_worker_unpack((struct dmk_bytes){event, sizeof(event)}, 0, NULL, &w, &err), 0);
    assert_int_equal(w->n_events, 1);
    assert_int_equal(w->events[0]->body_case, DAMASK__V1__WORKER_EVENT__BODY__NOT_SET);
    damask__v1__worker_message__free_unpacked(w, NULL);
    assert_int_equal(
        dmk_msg_router_unpack((struct dmk_bytes){(const uint8_t *)"\xff\xff", 2}, &m, &err),
        -DMK_EFORMAT);
    assert_says("not a RouterMessage");
    assert_int_equal(dmk_msg_worker_unpack((struct dmk_bytes){NULL, 0}, 0, NULL, &w, &err),
                     -DMK_EFORMAT);
    assert_says("incarnation is missing");
}

/* ---- worker events ---- */

static struct dmk_buf batch;

static int pass_event(const Damask__V1__WorkerEvent *event)
{
    /* The heap, an arena that is too small for all of it, and one that is not. */
    static const size_t sizes[] = {0, 64, 65536};
    Damask__V1__WorkerMessage *m;
    int ret = 0;

    dmk_msg_batch_begin(&batch, 9);
    dmk_msg_batch_add(&batch, event);
    assert_false(batch.failed);
    for (size_t i = 0; i < 3; i++) {
        struct dmk_rpc_arena arena;
        ProtobufCAllocator *allocator = sizes[i] > 0 ? &arena.allocator : NULL;
        int again;

        dmk_rpc_arena_init(&arena, sizes[i]);
        again = dmk_msg_worker_unpack(dmk_buf_bytes(&batch), 1000, allocator, &m, &err);
        assert_true(i == 0 || again == ret);
        ret = again;
        if (ret == 0) {
            damask__v1__worker_message__free_unpacked(m, allocator);
        }
        assert_int_equal(arena.used, 0);
        dmk_rpc_arena_fini(&arena);
    }
    return ret;
}

#define EVENT_REFUSED(change, undo, says)                                                          \
    do {                                                                                           \
        assert_int_equal(pass_event(&e), 0);                                                       \
        change;                                                                                    \
        assert_true(pass_event(&e) < 0);                                                           \
        assert_says(says);                                                                         \
        undo;                                                                                      \
    } while (0)

static void tokens_are_checked(void **state)
{
    Damask__V1__WorkerEvent e = DAMASK__V1__WORKER_EVENT__INIT;
    Damask__V1__Tokens t = DAMASK__V1__TOKENS__INIT;
    Damask__V1__RequestId id = DAMASK__V1__REQUEST_ID__INIT;
    Damask__V1__TopLogprob entry = DAMASK__V1__TOP_LOGPROB__INIT;
    Damask__V1__TopLogprob *entries[21];
    Damask__V1__TopLogprobs top = DAMASK__V1__TOP_LOGPROBS__INIT;
    Damask__V1__TopLogprobs *tops[2] = {&top, &top};
    uint32_t ids[DMK_MSG_MAX_STEP_TOKENS + 1] = {1, 2};
    float logprobs[2] = {-1, -INFINITY};

    (void)state;
    for (int i = 0; i < 21; i++) {
        entries[i] = &entry;
    }
    id.hi = 1;
    t.id = &id;
    t.ids = ids;
    t.n_ids = 2;
    t.logprobs = logprobs;
    t.n_logprobs = 2;
    t.top = tops;
    t.n_top = 2;
    top.entries = entries;
    top.n_entries = 20;
    e.body_case = DAMASK__V1__WORKER_EVENT__BODY_TOKENS;
    e.tokens = &t;
    EVENT_REFUSED(t.n_logprobs = 1, t.n_logprobs = 2, "2 ids, 1 logprobs");
    EVENT_REFUSED(t.n_top = 1, t.n_top = 2, "1 top lists");
    EVENT_REFUSED(top.n_entries = 21, top.n_entries = 20, "top logprobs: 21");
    EVENT_REFUSED(entry.token = 1000, entry.token = 0, "top logprob token");
    EVENT_REFUSED(entry.logprob = NAN, entry.logprob = 0, "not a number");
    EVENT_REFUSED(logprobs[1] = NAN, logprobs[1] = 0, "logprob 1 is not a number");
    EVENT_REFUSED(ids[1] = 1000, ids[1] = 2, "token 1 is 1000");
    EVENT_REFUSED(t.choice = DMK_MSG_MAX_CHOICES, t.choice = 0, "choice 128");
    EVENT_REFUSED(t.first_index = UINT32_MAX, t.first_index = 0, "index");
    EVENT_REFUSED(t.id = NULL, t.id = &id, "tokens has no request id");
    t.n_logprobs = t.n_top = 0;
    EVENT_REFUSED(t.n_ids = 0, t.n_ids = 2, "0 ids");
    EVENT_REFUSED(t.n_ids = DMK_MSG_MAX_STEP_TOKENS + 1, t.n_ids = 2, "65 ids");
}

static void other_events_are_checked(void **state)
{
    static uint8_t ticket[DMK_MSG_MAX_TICKET + 1];
    Damask__V1__WorkerEvent e = DAMASK__V1__WORKER_EVENT__INIT;
    Damask__V1__RequestId id = DAMASK__V1__REQUEST_ID__INIT;
    Damask__V1__WorkerHello h = DAMASK__V1__WORKER_HELLO__INIT;
    Damask__V1__Reserved r = DAMASK__V1__RESERVED__INIT;
    Damask__V1__Finished f = DAMASK__V1__FINISHED__INIT;
    Damask__V1__Failed x1 = DAMASK__V1__FAILED__INIT;
    Damask__V1__Load l = DAMASK__V1__LOAD__INIT;
    Damask__V1__PromptLogprobs p = DAMASK__V1__PROMPT_LOGPROBS__INIT;
    float values[2] = {-1, -2};
    Damask__V1__TopLogprobs top = DAMASK__V1__TOP_LOGPROBS__INIT;
    Damask__V1__TopLogprobs *tops[1] = {&top};
    char long_text[DMK_MSG_MAX_ID_TEXT + 2] = {0};

    (void)state;
    id.lo = 5;
    h.role = DAMASK__V1__ROLE__ROLE_PREFILL;
    h.page_tokens = 64;
    h.max_context = 1000;
    e.body_case = DAMASK__V1__WORKER_EVENT__BODY_HELLO;
    e.hello = &h;
    EVENT_REFUSED(h.role = 0, h.role = DAMASK__V1__ROLE__ROLE_DECODE, "role 0");
    EVENT_REFUSED(h.role = 3, h.role = DAMASK__V1__ROLE__ROLE_DECODE, "role 3");
    EVENT_REFUSED(h.page_tokens = 0, h.page_tokens = 64, "0 tokens a page");
    EVENT_REFUSED(h.worker_id = T("\x01"), h.worker_id = T("w"), "worker id");
    memset(long_text, 'n', sizeof(long_text) - 1);
    EVENT_REFUSED(h.numerics = long_text, h.numerics = T("n"), "numerics has 257 bytes");
    EVENT_REFUSED(h.prompt_numerics = long_text, h.prompt_numerics = T("n"),
                  "prompt numerics has 257 bytes");
    EVENT_REFUSED(h.prompt_numerics = T("\x01"), h.prompt_numerics = T(""), "prompt numerics");

    r.id = &id;
    e.body_case = DAMASK__V1__WORKER_EVENT__BODY_RESERVED;
    e.reserved = &r;
    EVENT_REFUSED(r.needs_prefill = true,
                  r.ticket = ((ProtobufCBinaryData){DMK_MSG_MAX_TICKET, ticket}),
                  "the ticket has 0 bytes");
    EVENT_REFUSED(r.ticket.len++, r.ticket.len--, "ticket bytes");
    EVENT_REFUSED(r.needs_prefill = false, r.needs_prefill = true, "no prefill is needed");

    f.id = &id;
    f.reason = DAMASK__V1__FINISH_REASON__FINISH_STOP;
    e.body_case = DAMASK__V1__WORKER_EVENT__BODY_FINISHED;
    e.finished = &f;
    EVENT_REFUSED(f.reason = 0, f.reason = 2, "reason 0");
    EVENT_REFUSED(f.reason = 3, f.reason = 2, "reason 3");
    EVENT_REFUSED(f.choice = 1000, f.choice = 0, "choice 1000");

    x1.id = &id;
    x1.code = DAMASK__V1__FAILURE_CODE__FAILURE_CANCELLED;
    e.body_case = DAMASK__V1__WORKER_EVENT__BODY_FAILED;
    e.failed = &x1;
    EVENT_REFUSED(x1.code = 0, x1.code = 1, "code 0");
    EVENT_REFUSED(x1.code = 10, x1.code = 1, "code 10");
    EVENT_REFUSED(x1.code = (Damask__V1__FailureCode)-1, x1.code = 1, "code -1");

    l.full_pages_total = l.full_pages_free = 5;
    e.body_case = DAMASK__V1__WORKER_EVENT__BODY_LOAD;
    e.load = &l;
    EVENT_REFUSED(l.full_pages_free = 6, l.full_pages_free = 5, "more pages are free");
    EVENT_REFUSED(l.full_pages_most_free = 6, l.full_pages_most_free = 5, "than all groups");
    EVENT_REFUSED(l.step_ms = NAN, l.step_ms = 0, "step_ms");

    p.id = &id;
    p.logprobs = values;
    p.n_logprobs = 2;
    e.body_case = DAMASK__V1__WORKER_EVENT__BODY_PROMPT_LOGPROBS;
    e.prompt_logprobs = &p;
    EVENT_REFUSED((p.top = tops, p.n_top = 1), p.n_top = 0, "2 values but 1 top lists");
}

static void batches_equal_the_generated_packing(void **state)
{
    Damask__V1__WorkerMessage m = DAMASK__V1__WORKER_MESSAGE__INIT;
    Damask__V1__WorkerEvent events[3] = {DAMASK__V1__WORKER_EVENT__INIT,
                                         DAMASK__V1__WORKER_EVENT__INIT,
                                         DAMASK__V1__WORKER_EVENT__INIT};
    Damask__V1__WorkerEvent *list[3] = {&events[0], &events[1], &events[2]};
    Damask__V1__Drain drain = DAMASK__V1__DRAIN__INIT;
    Damask__V1__WorkerHello hello = DAMASK__V1__WORKER_HELLO__INIT;
    char long_name[200];

    (void)state;
    memset(long_name, 'n', sizeof(long_name) - 1);
    long_name[sizeof(long_name) - 1] = 0;
    hello.worker_id = long_name; /* a length of two varint bytes */
    drain.limit_ms = 300000;
    events[0].body_case = DAMASK__V1__WORKER_EVENT__BODY_DRAIN;
    events[0].drain = &drain;
    events[1].body_case = DAMASK__V1__WORKER_EVENT__BODY_HELLO;
    events[1].hello = &hello;
    m.incarnation = UINT64_MAX;
    m.n_events = 3; /* the last one is empty */
    m.events = list;
    dmk_msg_batch_begin(&batch, UINT64_MAX);
    for (int i = 0; i < 3; i++) {
        dmk_msg_batch_add(&batch, &events[i]);
    }
    assert_int_equal(batch.len, damask__v1__worker_message__pack(&m, wire));
    assert_memory_equal(batch.data, wire, batch.len);
}

/* Damaged messages: read or refused, nothing else (the sanitizers look on). */
static void survives_noise(void **state)
{
    const uint64_t seed = (uint64_t)time(NULL);
    uint64_t counter = 0;
    unsigned n_read = 0, n_refused = 0;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int round = 0; round < 20000; round++) {
        Damask__V1__RouterMessage *m;
        Damask__V1__WorkerMessage *w;
        size_t len;

        good_generate();
        len = damask__v1__router_message__pack(&x.m, wire);
        for (unsigned i = (unsigned)(dmk_rng_u64(seed, 0, counter++) % 4); i < 4; i++) {
            const uint64_t r = dmk_rng_u64(seed, 0, counter++);

            wire[r % len] = (uint8_t)(r >> 40);
        }
        len -= dmk_rng_u64(seed, 0, counter++) % 3;
        if (dmk_msg_router_unpack((struct dmk_bytes){wire, len}, &m, &err) == 0) {
            n_read++;
            if (m->body_case == DAMASK__V1__ROUTER_MESSAGE__BODY_GENERATE) {
                (void)dmk_msg_generate_check(m->generate, &limits, &err);
            }
            damask__v1__router_message__free_unpacked(m, NULL);
        } else {
            n_refused++;
            assert_int_not_equal(err.text[0], 0);
        }
        if (dmk_msg_worker_unpack((struct dmk_bytes){wire, len}, 1000, NULL, &w, &err) == 0) {
            damask__v1__worker_message__free_unpacked(w, NULL);
        }
    }
    assert_true(n_read > 100 && n_refused > 100);
}

/* Lower is sooner, to a bound. */
static void test_priority(void **state)
{
    (void)state;
    assert_true(dmk_msg_priority_ns(0) == 0);
    assert_true(dmk_msg_priority_ns(1) == 1000000000 && dmk_msg_priority_ns(-3) == -3000000000ll);
    assert_true(dmk_msg_priority_ns(INT32_MAX) == 10000000000ll);
    assert_true(dmk_msg_priority_ns(INT32_MIN) == -10000000000ll);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(generate_is_checked),
        cmocka_unit_test(sampling_is_checked),
        cmocka_unit_test(prefill_is_checked),
        cmocka_unit_test(later_bodies_are_let_through),
        cmocka_unit_test(tokens_are_checked),
        cmocka_unit_test(other_events_are_checked),
        cmocka_unit_test(batches_equal_the_generated_packing),
        cmocka_unit_test(survives_noise),
        cmocka_unit_test(test_priority),
    };
    int ret;

    dmk_buf_init(&batch, 0);
    ret = cmocka_run_group_tests(tests, NULL, NULL);
    dmk_buf_fini(&batch);
    return ret;
}
