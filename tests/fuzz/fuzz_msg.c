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

static void check_prefill(const Damask__V1__Prefill *p)
{
    static const struct dmk_msg_limits limits = {.vocab_size = 1000, .max_context = 64};

    dmk_assert(p->id && p->ticket.len <= DMK_MSG_MAX_TICKET);
    if (dmk_msg_prefill_check(p, &limits, NULL) == 0) {
        dmk_assert(p->n_prompt >= 2 && p->n_prompt < 64 && p->ticket.len > 0);
        for (size_t i = 0; i < p->n_prompt; i++) {
            dmk_assert(p->prompt[i] < 1000);
        }
    }
}

static void check_router_message(const Damask__V1__RouterMessage *m)
{
    switch (m->body_case) {
    case DAMASK__V1__ROUTER_MESSAGE__BODY_HELLO:
        dmk_assert(strlen(m->hello->router_id) <= DMK_MSG_MAX_ID_TEXT);
        return;
    case DAMASK__V1__ROUTER_MESSAGE__BODY_GENERATE:
        check_generate(m->generate);
        return;
    case DAMASK__V1__ROUTER_MESSAGE__BODY_PREFILL:
        check_prefill(m->prefill);
        return;
    case DAMASK__V1__ROUTER_MESSAGE__BODY_CANCEL:
        dmk_assert(m->cancel->id && (m->cancel->id->hi || m->cancel->id->lo));
        return;
    case DAMASK__V1__ROUTER_MESSAGE__BODY_VOCABULARY:
        dmk_assert(m->vocabulary->data.len <= DMK_MSG_MAX_VOCABULARY);
        return;
    default: /* numbers alone, or a body of a later version */
        return;
    }
}

static void check_top(Damask__V1__TopLogprobs *const *top, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        dmk_assert(top[i]->n_entries <= DMK_MSG_MAX_TOP_LOGPROBS);
        for (size_t k = 0; k < top[i]->n_entries; k++) {
            dmk_assert(top[i]->entries[k]->token < 1000 && !isnan(top[i]->entries[k]->logprob));
        }
    }
}

static void check_tokens(const Damask__V1__Tokens *t)
{
    dmk_assert(t->id && t->n_ids >= 1 && t->n_ids <= DMK_MSG_MAX_STEP_TOKENS);
    dmk_assert(t->choice < DMK_MSG_MAX_CHOICES && t->first_index + t->n_ids >= t->n_ids);
    dmk_assert(t->n_logprobs == 0 || t->n_logprobs == t->n_ids);
    dmk_assert(t->n_top == 0 || t->n_top == t->n_ids);
    for (size_t i = 0; i < t->n_ids; i++) {
        dmk_assert(t->ids[i] < 1000);
    }
    check_top(t->top, t->n_top);
}

static void check_event(const Damask__V1__WorkerEvent *e)
{
    switch (e->body_case) {
    case DAMASK__V1__WORKER_EVENT__BODY_HELLO:
        dmk_assert(strlen(e->hello->worker_id) <= DMK_MSG_MAX_ID_TEXT);
        dmk_assert(e->hello->page_tokens > 0 && e->hello->max_context > 0);
        return;
    case DAMASK__V1__WORKER_EVENT__BODY_RESERVED:
        dmk_assert(e->reserved->id && e->reserved->ticket.len <= DMK_MSG_MAX_TICKET);
        dmk_assert(e->reserved->needs_prefill == (e->reserved->ticket.len > 0));
        return;
    case DAMASK__V1__WORKER_EVENT__BODY_TOKENS:
        check_tokens(e->tokens);
        return;
    case DAMASK__V1__WORKER_EVENT__BODY_FINISHED:
        dmk_assert(e->finished->id && e->finished->choice < DMK_MSG_MAX_CHOICES);
        return;
    case DAMASK__V1__WORKER_EVENT__BODY_FAILED:
        dmk_assert(e->failed->id && strlen(e->failed->text) <= DMK_MSG_MAX_TEXT);
        return;
    case DAMASK__V1__WORKER_EVENT__BODY_PROMPT_LOGPROBS:
        dmk_assert(e->prompt_logprobs->id);
        check_top(e->prompt_logprobs->top, e->prompt_logprobs->n_top);
        return;
    case DAMASK__V1__WORKER_EVENT__BODY_LOAD:
        dmk_assert(e->load->full_pages_free <= e->load->full_pages_total);
        dmk_assert(isfinite(e->load->step_ms));
        return;
    default:
        return;
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
        check_router_message(r);
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
