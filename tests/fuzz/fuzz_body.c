/* Fuzz target of the API dialects: any body.
 *
 * Input: one byte chooses the dialect, the rest is the body. Checked: a refused body has a status of 4xx and a
 * sentence that is UTF-8; an accepted one is within the bounds that the router relies on, and its
 * conversation renders or is refused. The vocabulary is opened once. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/chat/format.h"
#include "common/text/utf8.h"
#include "router/api.h"
#include "tests/fuzz/fuzz.h"

static const struct dmk_api_limits limits = {.max_choices = 8,
                                             .max_conv_bytes = 1 << 20,
                                             .max_messages = 64,
                                             .max_tools = 16,
                                             .date_unix_s = -1};
/* In this order: the corpus counts on it. */
static const struct dmk_dialect *const dialects[] = {
    &dmk_dialect_chat,      &dmk_dialect_completions, &dmk_dialect_grpc,
    &dmk_dialect_responses, &dmk_dialect_tokenize,    &dmk_dialect_detokenize,
};
static struct dmk_vocab *vocab;

static void check_ask(const struct dmk_ask *ask)
{
    dmk_assert(ask->n >= 1 && ask->n <= limits.max_choices);
    dmk_assert(ask->temperature >= 0 && ask->temperature <= 2);
    dmk_assert(ask->top_p > 0 && ask->top_p <= 1);
    dmk_assert(ask->min_p >= 0 && ask->min_p <= 1);
    dmk_assert(isfinite(ask->frequency_penalty) && isfinite(ask->presence_penalty));
    dmk_assert(ask->repetition_penalty > 0);
    dmk_assert(ask->top_k <= DMK_VOCAB_SIZE && ask->top_logprobs <= DMK_ASK_MAX_TOP);
    dmk_assert(strlen(ask->model) <= DMK_ASK_MAX_MODEL_BYTES);
    dmk_assert(ask->n_shown <= ask->n && ask->n * (1 + ask->n_more) <= limits.max_choices);
    for (size_t i = 0; i < ask->n_stops; i++) {
        dmk_assert(ask->stops[i].len >= 1 && ask->stops[i].len <= DMK_ASK_MAX_STOP_BYTES);
    }
    for (size_t i = 0; i < ask->n_bias; i++) {
        dmk_assert(ask->bias[i].id < DMK_VOCAB_SIZE && isfinite(ask->bias[i].value));
    }
    for (size_t i = 0; i < ask->prompt.len; i++) {
        dmk_assert(ask->prompt.data[i] < DMK_VOCAB_SIZE);
    }
}

static void render(struct dmk_ask *ask)
{
    static const struct dmk_format_options options = {0};
    const struct dmk_format *format = dmk_format_find("harmony");
    struct dmk_bpe_scratch *scratch = dmk_bpe_scratch_new();
    struct dmk_error error = {0};

    dmk_assert(scratch);
    if (format->render(vocab, scratch, dmk_conv_view(ask->conv), &options, &ask->prompt, &error) >=
        0) {
        dmk_assert(ask->prompt.len > 0);
    }
    dmk_bpe_scratch_free(&scratch);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dmk_api_error error = {0};
    const struct dmk_dialect *dialect;
    struct dmk_ask ask;

    if (!vocab) {
        struct dmk_error open_error;

        if (dmk_vocab_open(DMK_TEST_VOCAB, &vocab, &open_error) < 0) {
            (void)fprintf(stderr, "%s\n", open_error.text);
            abort();
        }
    }
    if (size == 0) {
        return 0;
    }
    dialect = dialects[data[0] % (sizeof(dialects) / sizeof(dialects[0]))];
    dmk_ask_init(&ask, 1 << 20);
    if (dialect->parse((struct dmk_bytes){data + 1, size - 1}, &limits, &ask, &error) < 0) {
        dmk_assert(error.status >= 400 && error.status < 500 && error.text[0]);
        dmk_assert(dmk_utf8_valid_prefix((const uint8_t *)error.text, strlen(error.text)) ==
                   strlen(error.text));
    } else {
        check_ask(&ask);
        if (ask.conv) {
            render(&ask);
        }
    }
    dmk_ask_fini(&ask);
    return 0;
}
