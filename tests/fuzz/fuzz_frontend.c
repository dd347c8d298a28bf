/* Fuzz target of the gRPC front: any message for Frontend.Chat, and the events of its answer.
 *
 * Input: a ChatRequest. Checked: it is refused with a status of 4xx and a sentence that is UTF-8, or every
 * value is within the bounds that the router relies on; the texts of the conversation, sent as an answer, come
 * back from the frames unharmed. */
#include <math.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/text/utf8.h"
#include "proto/damask_frontend.pb-c.h"
#include "router/api.h"
#include "tests/fuzz/fuzz.h"

static const struct dmk_api_limits limits = {.max_choices = 4,
                                             .max_conv_bytes = 1 << 18,
                                             .max_messages = 16,
                                             .max_tools = 4,
                                             .date_unix_s = -1};

static bool is_utf8(const char *text, size_t len)
{
    return dmk_utf8_valid_prefix((const uint8_t *)text, len) == len;
}

static void check_ask(const struct dmk_ask *ask)
{
    const struct dmk_conv_view *view = dmk_conv_view(ask->conv);

    dmk_assert(ask->n >= 1 && ask->n <= limits.max_choices);
    dmk_assert(ask->temperature >= 0 && ask->temperature <= 2);
    dmk_assert(ask->top_p > 0 && ask->top_p <= 1 && ask->min_p >= 0 && ask->min_p <= 1);
    dmk_assert(isfinite(ask->frequency_penalty) && isfinite(ask->presence_penalty));
    dmk_assert(ask->repetition_penalty > 0 && isfinite(ask->repetition_penalty));
    dmk_assert(ask->top_k <= DMK_VOCAB_SIZE && ask->top_logprobs <= DMK_ASK_MAX_TOP);
    dmk_assert(ask->model[0] && strlen(ask->model) <= DMK_ASK_MAX_MODEL_BYTES);
    for (size_t i = 0; i < ask->n_stops; i++) {
        dmk_assert(ask->stops[i].len >= 1 && ask->stops[i].len <= DMK_ASK_MAX_STOP_BYTES);
    }
    for (size_t i = 0; i < ask->n_bias; i++) {
        dmk_assert(ask->bias[i].id < DMK_VOCAB_SIZE && isfinite(ask->bias[i].value));
    }
    dmk_assert(view->n_messages >= 1 && view->n_messages <= limits.max_messages);
    for (size_t i = 0; i < view->n_messages; i++) {
        dmk_assert(is_utf8(view->messages[i].content.data, view->messages[i].content.len));
    }
}

/* What the last frame said. */
struct seen {
    uint32_t n_frames;
    struct dmk_str want; /* of a content delta */
};

static void on_frame(void *ud, const char *event, struct dmk_bytes payload)
{
    struct seen *seen = ud;
    Damask__V1__ChatEvent *e = damask__v1__chat_event__unpack(NULL, payload.len, payload.data);

    (void)event;
    dmk_assert(e);
    if (e->kind_case == DAMASK__V1__CHAT_EVENT__KIND_DELTA &&
        e->delta->kind_case == DAMASK__V1__CHAT_DELTA__KIND_CONTENT) {
        dmk_assert(dmk_str_is(seen->want, e->delta->content));
    }
    damask__v1__chat_event__free_unpacked(e, NULL);
    seen->n_frames++;
}

static void answer(const struct dmk_ask *ask)
{
    const struct dmk_conv_view *view = dmk_conv_view(ask->conv);
    struct seen seen = {0};
    const struct dmk_reply_conf conf = {.id_hex = "0123456789abcdef0123456789abcdef",
                                        .model = ask->model,
                                        .stream = true,
                                        .n = ask->n,
                                        .sink = {on_frame, &seen}};
    const struct dmk_usage usage = {1, 0, 1, 0};
    void *reply = dmk_dialect_grpc.reply_new(&conf);

    dmk_assert(reply);
    for (size_t i = 0; i < view->n_messages; i++) {
        const struct dmk_event event = {.kind = DMK_EVENT_CONTENT,
                                        .text = view->messages[i].content};

        if (event.text.len > 0) {
            const uint32_t before = seen.n_frames;

            seen.want = event.text;
            dmk_dialect_grpc.event(reply, 0, &event, NULL, 0);
            dmk_assert(seen.n_frames == before + 1);
        }
    }
    dmk_dialect_grpc.choice_end(reply, 0, DMK_FINISH_STOP);
    dmk_dialect_grpc.end(reply, &usage);
    dmk_assert(seen.n_frames >= 2);
    dmk_dialect_grpc.reply_free(reply);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dmk_api_error error = {0};
    struct dmk_ask ask;

    dmk_ask_init(&ask, 1 << 16);
    if (dmk_dialect_grpc.parse((struct dmk_bytes){data, size}, &limits, &ask, &error) < 0) {
        dmk_assert(error.status >= 400 && error.status < 500 && error.text[0]);
        dmk_assert(is_utf8(error.text, strlen(error.text)));
    } else {
        check_ask(&ask);
        answer(&ask);
    }
    dmk_ask_fini(&ask);
    return 0;
}
