/* See server.h. */
#include "server.h"
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/rpc/msg.h"

#define FLOOD_BYTES (1u << 20)

struct test_server_stats test_stats;

enum kind { ECHO, HOLD, FAIL, BURST, FLOOD, DROP, METADATA, CONNECT };

struct call {
    enum kind kind;
    struct dmk_rpc_stream *stream;
    struct dmk_defer flood;
};

static struct dmk_loop *the_loop;

static void flood(void *ud)
{
    static char block[FLOOD_BYTES];
    struct call *call = ud;
    const int ret =
        dmk_rpc_send(call->stream, (struct dmk_bytes){(const uint8_t *)block, sizeof(block)});

    if (ret < 0) {
        test_stats.last_send_error = ret;
        return;
    }
    dmk_loop_defer(the_loop, &call->flood);
}

static void burst(struct dmk_rpc_stream *stream, struct dmk_bytes message)
{
    char number[16] = "";
    long n;

    memcpy(number, message.data, message.len < 15 ? message.len : 15);
    n = strtol(number, NULL, 10);
    for (long i = 0; i < n; i++) {
        const int len = snprintf(number, sizeof(number), "%ld", i);

        dmk_assert(dmk_rpc_send(stream, (struct dmk_bytes){(uint8_t *)number, (size_t)len}) == 0);
    }
    dmk_rpc_finish(stream, DMK_RPC_OK, NULL);
}

static void answer_generate(struct dmk_buf *batch, Damask__V1__Generate *g)
{
    static const struct dmk_msg_limits limits = {
        .vocab_size = 1000, .max_context = 100, .max_choices = 4};
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;
    Damask__V1__Failed failed = DAMASK__V1__FAILED__INIT;
    Damask__V1__Tokens tokens = DAMASK__V1__TOKENS__INIT;
    Damask__V1__Finished finished = DAMASK__V1__FINISHED__INIT;
    struct dmk_error err;

    if (dmk_msg_generate_check(g, &limits, &err) < 0) {
        failed.id = g->id;
        failed.code = DAMASK__V1__FAILURE_CODE__FAILURE_INVALID;
        failed.text = err.text;
        event.body_case = DAMASK__V1__WORKER_EVENT__BODY_FAILED;
        event.failed = &failed;
        dmk_msg_batch_add(batch, &event);
        return;
    }
    tokens.id = g->id;
    tokens.n_ids = g->n_prompt < g->max_tokens ? g->n_prompt : g->max_tokens;
    tokens.ids = g->prompt;
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_TOKENS;
    event.tokens = &tokens;
    dmk_msg_batch_add(batch, &event);
    finished.id = g->id;
    finished.reason = DAMASK__V1__FINISH_REASON__FINISH_LENGTH;
    finished.n_tokens = (uint32_t)tokens.n_ids;
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_FINISHED;
    event.finished = &finished;
    dmk_msg_batch_add(batch, &event);
}

static void answer_hello(struct dmk_buf *batch, const Damask__V1__RouterHello *hello)
{
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;
    Damask__V1__WorkerHello mine = DAMASK__V1__WORKER_HELLO__INIT;

    mine.version = DMK_PROTOCOL_VERSION;
    mine.role = DAMASK__V1__ROLE__ROLE_DECODE;
    mine.worker_id = hello->router_id; /* shows that it was read */
    mine.model_name = (char *)(uintptr_t) "test";
    mine.page_tokens = 64;
    mine.max_context = 100;
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_HELLO;
    event.hello = &mine;
    dmk_msg_batch_add(batch, &event);
}

static void on_connect_message(struct dmk_rpc_stream *stream, struct dmk_bytes message)
{
    Damask__V1__RouterMessage *m;
    struct dmk_error err;
    struct dmk_buf batch;

    if (dmk_msg_router_unpack(message, &m, &err) < 0) {
        dmk_rpc_finish(stream, DMK_RPC_INVALID_ARGUMENT, err.text);
        return;
    }
    dmk_buf_init(&batch, 0);
    dmk_msg_batch_begin(&batch, 77);
    if (m->body_case == DAMASK__V1__ROUTER_MESSAGE__BODY_HELLO) {
        answer_hello(&batch, m->hello);
    } else if (m->body_case == DAMASK__V1__ROUTER_MESSAGE__BODY_GENERATE) {
        answer_generate(&batch, m->generate);
    }
    dmk_assert(!batch.failed);
    (void)dmk_rpc_send(stream, dmk_buf_bytes(&batch));
    dmk_buf_fini(&batch);
    damask__v1__router_message__free_unpacked(m, NULL);
}

static void on_message(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes message)
{
    struct call *call = ud;
    char text[128];

    switch (call->kind) {
    case ECHO:
        (void)dmk_rpc_send(stream, message);
        break;
    case FAIL:
        (void)snprintf(text, sizeof(text), "no such thing: %.*s", (int)message.len, message.data);
        dmk_rpc_finish(stream, DMK_RPC_NOT_FOUND, text);
        break;
    case BURST:
        burst(stream, message);
        break;
    case FLOOD:
        dmk_loop_defer(the_loop, &call->flood);
        break;
    case DROP:
        dmk_rpc_cancel(stream);
        break;
    case METADATA: {
        const char *value = dmk_rpc_metadata(stream, "x-test");

        dmk_assert(dmk_rpc_peer(stream)[0]);
        value = value ? value : "none";
        (void)dmk_rpc_send(stream, (struct dmk_bytes){(const uint8_t *)value, strlen(value)});
        break;
    }
    case CONNECT:
        on_connect_message(stream, message);
        break;
    case HOLD:
        break;
    }
}

static void on_end(void *ud, struct dmk_rpc_stream *stream)
{
    struct call *call = ud;

    test_stats.n_ended++;
    if (call->kind != HOLD && call->kind != FLOOD) {
        dmk_rpc_finish(stream, DMK_RPC_OK, "bye");
    }
}

static void on_closed(void *ud, struct dmk_rpc_stream *stream, enum dmk_rpc_code code,
                      const char *text)
{
    struct call *call = ud;

    (void)text;
    test_stats.n_closed++;
    test_stats.last_code = (int)code;
    if (test_stats.last == stream) {
        test_stats.last = NULL;
    }
    dmk_defer_cancel(&call->flood);
    free(call);
}

static void open_call(enum kind kind, struct dmk_rpc_stream *stream,
                      struct dmk_rpc_stream_events *ret_events)
{
    struct call *call = calloc(1, sizeof(*call));

    dmk_assert(call);
    call->kind = kind;
    call->stream = stream;
    dmk_defer_init(&call->flood, flood, call);
    test_stats.n_open++;
    test_stats.last = stream;
    *ret_events = (struct dmk_rpc_stream_events){
        .on_message = on_message, .on_end = on_end, .on_closed = on_closed, .ud = call};
}

static void on_open(void *ud, struct dmk_rpc_stream *stream,
                    struct dmk_rpc_stream_events *ret_events)
{
    open_call((enum kind)(uintptr_t)ud, stream, ret_events);
}

int test_server_new(struct dmk_loop *loop, struct dmk_rpc *rpc, const char *listen,
                    uint32_t max_streams, struct dmk_rpc_server **ret, struct dmk_error *reterr)
{
    const struct dmk_rpc_method methods[] = {
        {"/test.Test/Echo", on_open, (void *)ECHO},
        {"/test.Test/Hold", on_open, (void *)HOLD},
        {"/test.Test/Fail", on_open, (void *)FAIL},
        {"/test.Test/Burst", on_open, (void *)BURST},
        {"/test.Test/Flood", on_open, (void *)FLOOD},
        {"/test.Test/Drop", on_open, (void *)DROP},
        {"/test.Test/Metadata", on_open, (void *)METADATA},
        {"/damask.v1.Worker/Connect", on_open, (void *)CONNECT},
    };
    const struct dmk_rpc_server_conf conf = {
        .listen = listen,
        .methods = methods,
        .n_methods = sizeof(methods) / sizeof(methods[0]),
        .max_message_bytes = 4u << 20,
        .max_queue_bytes = 32u << 20,
        .max_streams = max_streams,
    };

    the_loop = loop;
    return dmk_rpc_server_new(rpc, &conf, ret, reterr);
}
