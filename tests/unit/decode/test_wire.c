/* Messages to requests and events to messages: every field arrives, defaults are those of the protocol. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <string.h>
#include "decode/wire.h"

/* The packed message of the last event, read again. */
struct sink {
    Damask__V1__WorkerEvent *last;
    unsigned n;
};

static void take(void *ud, const Damask__V1__WorkerEvent *event)
{
    struct sink *sink = ud;
    uint8_t bytes[65536];
    const size_t len = damask__v1__worker_event__pack(event, bytes);

    if (sink->last) {
        damask__v1__worker_event__free_unpacked(sink->last, NULL);
    }
    sink->last = damask__v1__worker_event__unpack(NULL, len, bytes);
    assert_non_null(sink->last);
    sink->n++;
}

static Damask__V1__WorkerEvent *send(struct sink *sink, struct dmk_decode_event *event)
{
    event->id = (struct dmk_request_id){3, 4, 5};
    dmk_decode_wire_event(event, 77, take, sink);
    return sink->last;
}

static void close_sink(struct sink *sink)
{
    damask__v1__worker_event__free_unpacked(sink->last, NULL);
}

static void requests(void **state)
{
    Damask__V1__Generate m = DAMASK__V1__GENERATE__INIT;
    Damask__V1__Sampling s = DAMASK__V1__SAMPLING__INIT;
    Damask__V1__RequestId id = DAMASK__V1__REQUEST_ID__INIT;
    uint32_t prompt[] = {5, 6, 7}, stops[] = {9}, bias_ids[] = {1, 2};
    float bias[] = {0.5f, -1};
    struct dmk_decode_wire wire;
    struct dmk_decode_request r;

    (void)state;
    assert_non_null(dmk_decode_wire_request(&m, 2, &wire, &r));
    id.hi = 1;
    id.lo = 2;
    id.attempt = 3;
    m.id = &id;
    m.n_prompt = 3;
    m.prompt = prompt;
    assert_null(
        dmk_decode_wire_request(&m, 2, &wire, &r)); /* no sampling: greedy, everything off */
    assert_true(r.sampling->temperature == 0 && r.sampling->top_p == 1 &&
                r.sampling->repetition_penalty == 1 && !r.sampling->logprobs);
    assert_int_equal(r.n, 1);
    m.sampling = &s;
    s.temperature = 0.5f;
    s.top_p = 0.25f;
    s.top_k = 7;
    s.min_p = 0.125f;
    s.frequency_penalty = 1;
    s.presence_penalty = -1;
    s.repetition_penalty = 0; /* read as 1 */
    s.seed = 99;
    s.n_bias_ids = 2;
    s.bias_ids = bias_ids;
    s.n_bias_values = 2;
    s.bias_values = bias;
    s.logprobs = true;
    s.top_logprobs = 4;
    m.max_tokens = 10;
    m.min_tokens = 1;
    m.n_stop_ids = 1;
    m.stop_ids = stops;
    m.ignore_eos = true;
    m.n = 2;
    m.echo_logprobs = m.force_local = true;
    assert_null(dmk_decode_wire_request(&m, 2, &wire, &r));
    assert_int_equal(r.router, 2);
    assert_true(r.id.hi == 1 && r.id.lo == 2 && r.id.attempt == 3);
    assert_true(r.n_prompt == 3 && r.prompt == prompt && r.stop_ids == stops && r.n_stop_ids == 1);
    assert_true(r.max_tokens == 10 && r.min_tokens == 1 && r.ignore_eos && r.n == 2);
    assert_true(r.echo_logprobs && r.force_local);
    assert_true(r.sampling->temperature == 0.5f && r.sampling->top_p == 0.25f);
    assert_true(r.sampling->top_k == 7 && r.sampling->min_p == 0.125f);
    assert_true(r.sampling->frequency_penalty == 1 && r.sampling->presence_penalty == -1);
    assert_true(r.sampling->repetition_penalty == 1 && r.sampling->seed == 99);
    assert_true(r.sampling->n_bias == 2 && r.sampling->bias_ids == bias_ids);
    assert_true(r.sampling->bias_values == bias && r.sampling->logprobs);
    assert_int_equal(r.sampling->top_logprobs, 4);
    s.n_bias_values = 1;
    assert_non_null(dmk_decode_wire_request(&m, 2, &wire, &r));
}

static void tokens(void **state)
{
    const struct dmk_sample_result result = {
        .id = 42, .logprob = -0.5f, .n_top = 2, .top = {{42, -0.5f}, {7, -1.5f}}};
    struct dmk_decode_event e = {.kind = DMK_DECODE_TOKEN};
    struct sink sink = {0};
    const Damask__V1__WorkerEvent *m;

    (void)state;
    e.token.choice = 1;
    e.token.index = 8;
    e.token.result = &result;
    m = send(&sink, &e);
    assert_int_equal(m->body_case, DAMASK__V1__WORKER_EVENT__BODY_TOKENS);
    assert_true(m->tokens->id->hi == 3 && m->tokens->id->lo == 4 && m->tokens->id->attempt == 5);
    assert_true(m->tokens->choice == 1 && m->tokens->first_index == 8);
    assert_true(m->tokens->n_ids == 1 && m->tokens->ids[0] == 42);
    assert_true(m->tokens->n_logprobs == 0 && m->tokens->n_top == 0);
    e.token.with_logprobs = true;
    m = send(&sink, &e);
    assert_true(m->tokens->n_logprobs == 1 && m->tokens->logprobs[0] == -0.5f);
    assert_true(m->tokens->n_top == 1 && m->tokens->top[0]->n_entries == 2);
    assert_true(m->tokens->top[0]->entries[1]->token == 7 &&
                m->tokens->top[0]->entries[1]->logprob == -1.5f);
    close_sink(&sink);
}

static void scores_come_in_pieces(void **state)
{
    static struct dmk_sample_result rows[150];
    struct dmk_decode_event e = {.kind = DMK_DECODE_PROMPT_LOGPROBS};
    struct sink sink = {0};
    const Damask__V1__WorkerEvent *m;

    (void)state;
    for (uint32_t i = 0; i < 150; i++) {
        rows[i] = (struct dmk_sample_result){
            .id = i, .logprob = -(float)i, .n_top = 1, .top = {{i, -(float)i}}};
    }
    e.prompt_logprobs.first = 1;
    e.prompt_logprobs.n = 150;
    e.prompt_logprobs.rows = rows;
    m = send(&sink, &e);
    assert_int_equal(sink.n, 3);
    assert_int_equal(m->prompt_logprobs->n_logprobs, 150 - 128);
    assert_true(m->prompt_logprobs->logprobs[21] == -149);
    assert_int_equal(m->prompt_logprobs->top[21]->entries[0]->token, 149);
    close_sink(&sink);
}

static void others(void **state)
{
    struct dmk_decode_event e = {.kind = DMK_DECODE_FINISHED};
    uint8_t ticket[] = {1, 2, 3};
    struct sink sink = {0};
    const Damask__V1__WorkerEvent *m;

    (void)state;
    e.finished.choice = 2;
    e.finished.stopped = true;
    e.finished.n_tokens = 10;
    e.finished.n_cached = 64;
    e.finished.n_preemptions = 1;
    e.finished.queue_us = 11;
    e.finished.prefill_us = 12;
    e.finished.transfer_us = 13;
    e.finished.transfer_bytes = 14;
    e.finished.decode_us = 15;
    m = send(&sink, &e);
    assert_int_equal(m->finished->reason, DAMASK__V1__FINISH_REASON__FINISH_STOP);
    assert_true(m->finished->choice == 2 && m->finished->n_tokens == 10 &&
                m->finished->n_cached == 64 && m->finished->n_preemptions == 1);
    assert_true(m->finished->queue_us == 11 && m->finished->prefill_us == 12 &&
                m->finished->transfer_us == 13 && m->finished->transfer_bytes == 14 &&
                m->finished->decode_us == 15);
    e.finished.stopped = false;
    assert_int_equal(send(&sink, &e)->finished->reason, DAMASK__V1__FINISH_REASON__FINISH_LENGTH);

    e = (struct dmk_decode_event){.kind = DMK_DECODE_RESERVED};
    e.reserved.needs_prefill = true;
    e.reserved.ticket = (struct dmk_bytes){ticket, 3};
    e.reserved.have = 128;
    m = send(&sink, &e);
    assert_true(m->reserved->needs_prefill && m->reserved->have == 128);
    assert_int_equal(m->reserved->ticket.len, 3);
    assert_memory_equal(m->reserved->ticket.data, ticket, 3);

    e = (struct dmk_decode_event){.kind = DMK_DECODE_TRANSFERRED};
    e.transferred.bytes = 1000;
    e.transferred.us = 20;
    m = send(&sink, &e);
    assert_true(m->transferred->bytes == 1000 && m->transferred->us == 20);

    e = (struct dmk_decode_event){.kind = DMK_DECODE_QUIET_ASK};
    e.quiet_ask.cookie = (struct dmk_id128){.lo = 5, .hi = 6};
    e.quiet_ask.p_incarnation = 8;
    m = send(&sink, &e);
    assert_true(m->quiet_ask->cookie_lo == 5 && m->quiet_ask->cookie_hi == 6);
    assert_true(m->quiet_ask->p_incarnation == 8 && m->quiet_ask->d_incarnation == 77);
    close_sink(&sink);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests),
        cmocka_unit_test(tokens),
        cmocka_unit_test(scores_come_in_pieces),
        cmocka_unit_test(others),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
