/* Fuzz target of the engine service for gateways: any message for VllmEngine.Generate.
 *
 * Input: a GenerateRequest. Checked: it is refused with a status of 4xx and a sentence that is UTF-8, or every value
 * is within the bounds that the router relies on, and the prompt holds ids of the vocabulary only. */
#include <math.h>
#include "common/base/assert.h"
#include "common/text/utf8.h"
#include "router/api_engine.h"
#include "tests/fuzz/fuzz.h"

static const struct dmk_api_limits limits = {.max_choices = 4,
                                             .max_conv_bytes = 1 << 18,
                                             .max_messages = 16,
                                             .max_tools = 4,
                                             .date_unix_s = -1};

static void check_ask(const struct dmk_ask *ask)
{
    dmk_assert(ask->n >= 1 && ask->n <= limits.max_choices);
    dmk_assert(ask->temperature >= 0 && isfinite(ask->temperature));
    dmk_assert(ask->top_p > 0 && ask->top_p <= 1 && ask->min_p >= 0 && ask->min_p <= 1);
    dmk_assert(isfinite(ask->frequency_penalty) && isfinite(ask->presence_penalty));
    dmk_assert(ask->repetition_penalty > 0 && isfinite(ask->repetition_penalty));
    dmk_assert(ask->top_k <= DMK_VOCAB_SIZE && ask->top_logprobs <= DMK_ASK_MAX_TOP);
    dmk_assert(strlen(ask->model) <= DMK_ASK_MAX_MODEL_BYTES);
    for (size_t i = 0; i < ask->n_stops; i++) {
        dmk_assert(ask->stops[i].len >= 1 && ask->stops[i].len <= DMK_ASK_MAX_STOP_BYTES);
    }
    for (size_t i = 0; i < ask->n_bias; i++) {
        dmk_assert(ask->bias[i].id < DMK_VOCAB_SIZE && isfinite(ask->bias[i].value));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dmk_api_error error = {0};
    struct dmk_ask ask;

    dmk_ask_init(&ask, 1 << 16);
    if (dmk_engine_parse((struct dmk_bytes){data, size}, &limits, &ask, &error) < 0) {
        dmk_assert(error.status >= 400 && error.status < 500 && error.text[0]);
        dmk_assert(dmk_utf8_valid_prefix((const uint8_t *)error.text, strlen(error.text)) ==
                   strlen(error.text));
    } else {
        check_ask(&ask);
    }
    dmk_ask_fini(&ask);
    return 0;
}
