/* Fuzz target of the worker protocol: the input is a message of either direction. Checked: it is refused
 * with a sentence, or everything that the readers promise about it holds. */
#include <math.h>
#include "common/base/assert.h"
#include "common/rpc/msg.h"
#include "tests/fuzz/fuzz.h"

static void check_generate(const Damask__V1__Generate *g)
{
    static const struct dmk_msg_limits limits = {
        .vocab_size = 1000, .max_context = 64, .max_choices = 4};

    dmk_assert(g->id && g->sampling);
    if (dmk_msg_generate_check(g, &limits, NULL) < 0) {
        return;
    }
    dmk_assert(g->n_prompt >= 1 && g->n_prompt < 64 && g->max_tokens >= 1 && g->n <= 4);
    for (size_t i = 0; i < g->n_prompt; i++) {
        dmk_assert(g->prompt[i] < 1000);
    }
    dmk_assert(g->sampling->top_p > 0 && g->sampling->top_p <= 1);
    dmk_assert(isfinite(g->sampling->temperature));
    dmk_assert(g->sampling->n_bias_ids == g->sampling->n_bias_values);
}

static void check_event(const Damask__V1__WorkerEvent *e)
{
    if (e->body_case == DAMASK__V1__WORKER_EVENT__BODY_TOKENS) {
        const Damask__V1__Tokens *t = e->tokens;

        dmk_assert(t->id && t->n_ids >= 1);
        dmk_assert(t->n_logprobs == 0 || t->n_logprobs == t->n_ids);
        dmk_assert(t->n_top == 0 || t->n_top == t->n_ids);
        for (size_t i = 0; i < t->n_ids; i++) {
            dmk_assert(t->ids[i] < 1000);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct dmk_bytes bytes = {data, size};
    Damask__V1__RouterMessage *r = NULL;
    Damask__V1__WorkerMessage *w = NULL;
    struct dmk_error err = {0};

    if (dmk_msg_router_unpack(bytes, &r, &err) < 0) {
        dmk_assert(!r && err.text[0]);
    } else {
        if (r->body_case == DAMASK__V1__ROUTER_MESSAGE__BODY_GENERATE) {
            check_generate(r->generate);
        }
        damask__v1__router_message__free_unpacked(r, NULL);
    }
    err.text[0] = 0;
    if (dmk_msg_worker_unpack(bytes, 1000, NULL, &w, &err) < 0) {
        dmk_assert(!w && err.text[0]);
    } else {
        for (size_t i = 0; i < w->n_events; i++) {
            check_event(w->events[i]);
        }
        damask__v1__worker_message__free_unpacked(w, NULL);
    }
    return 0;
}
