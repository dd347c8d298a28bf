/* Messages to requests, events to messages. */
#include "decode/wire.h"

#include "common/base/assert.h"

#define MAX_SCORES 64 /* prompt tokens in one message */

static void read_sampling(const Damask__V1__Sampling *s, struct dmk_sample_params *ret)
{
    *ret = (struct dmk_sample_params){.top_p = 1, .repetition_penalty = 1};
    if (!s) {
        return;
    }
    ret->temperature = s->temperature;
    ret->top_p = s->top_p > 0 ? s->top_p : 1;
    ret->top_k = s->top_k;
    ret->min_p = s->min_p;
    ret->frequency_penalty = s->frequency_penalty;
    ret->presence_penalty = s->presence_penalty;
    ret->repetition_penalty = s->repetition_penalty > 0 ? s->repetition_penalty : 1;
    ret->seed = s->seed;
    ret->n_bias = (uint32_t)s->n_bias_ids;
    ret->bias_ids = s->bias_ids;
    ret->bias_values = s->bias_values;
    ret->logprobs = s->logprobs;
    ret->top_logprobs = s->top_logprobs;
}

const char *dmk_decode_wire_request(const Damask__V1__Generate *m, uint32_t router,
                                    struct dmk_decode_wire *wire, struct dmk_decode_request *ret)
{
    *ret = (struct dmk_decode_request){.router = router};
    if (!m->id) {
        return "the request has no id";
    }
    ret->id = dmk_request_id_of(m->id);
    if (m->n_prompt > UINT32_MAX || m->n_stop_ids > DMK_DECODE_MAX_STOP_IDS) {
        return "more stop ids or prompt tokens than a request may have";
    }
    if (m->sampling && (m->sampling->n_bias_ids != m->sampling->n_bias_values ||
                        m->sampling->n_bias_ids > DMK_SAMPLE_MAX_BIAS)) {
        return "bias ids and values are not two lists of one length within the bound";
    }
    read_sampling(m->sampling, &wire->sampling);
    ret->prompt = m->prompt;
    ret->n_prompt = (uint32_t)m->n_prompt;
    ret->sampling = &wire->sampling;
    ret->max_tokens = m->max_tokens;
    ret->min_tokens = m->min_tokens;
    ret->stop_ids = m->stop_ids;
    ret->n_stop_ids = (uint32_t)m->n_stop_ids;
    ret->ignore_eos = m->ignore_eos;
    ret->n = m->n > 0 ? m->n : 1;
    ret->salt = (struct dmk_bytes){m->cache_salt.data, m->cache_salt.len};
    ret->constraint = (struct dmk_bytes){m->constraint.data, m->constraint.len};
    ret->echo_logprobs = m->echo_logprobs;
    ret->force_local = m->force_local;
    return NULL;
}

/* The likeliest tokens of one position; entries and pointers have room for DMK_SAMPLE_MAX_TOP. */
static void fill_top(const struct dmk_sample_result *r, Damask__V1__TopLogprob *entries,
                     Damask__V1__TopLogprob **pointers, Damask__V1__TopLogprobs *ret)
{
    damask__v1__top_logprobs__init(ret);
    for (uint32_t i = 0; i < r->n_top; i++) {
        damask__v1__top_logprob__init(&entries[i]);
        entries[i].token = r->top[i].id;
        entries[i].logprob = r->top[i].logprob;
        pointers[i] = &entries[i];
    }
    ret->n_entries = r->n_top;
    ret->entries = pointers;
}

static void emit_token(const struct dmk_decode_event *e, Damask__V1__RequestId *id,
                       dmk_decode_wire_emit emit, void *ud)
{
    const struct dmk_sample_result *r = e->token.result;
    Damask__V1__TopLogprob entries[DMK_SAMPLE_MAX_TOP];
    Damask__V1__TopLogprob *pointers[DMK_SAMPLE_MAX_TOP];
    Damask__V1__TopLogprobs top, *tops = &top;
    Damask__V1__Tokens tokens = DAMASK__V1__TOKENS__INIT;
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;
    uint32_t token = r->id;
    float logprob = r->logprob;

    tokens.id = id;
    tokens.choice = e->token.choice;
    tokens.first_index = e->token.index;
    tokens.n_ids = 1;
    tokens.ids = &token;
    if (e->token.with_logprobs) {
        tokens.n_logprobs = 1;
        tokens.logprobs = &logprob;
        fill_top(r, entries, pointers, &top);
        tokens.n_top = 1;
        tokens.top = &tops;
    }
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_TOKENS;
    event.tokens = &tokens;
    emit(ud, &event);
}

static void emit_scores(const struct dmk_decode_event *e, Damask__V1__RequestId *id,
                        dmk_decode_wire_emit emit, void *ud)
{
    for (uint32_t at = 0; at < e->prompt_logprobs.n; at += MAX_SCORES) {
        Damask__V1__TopLogprob entries[MAX_SCORES][DMK_SAMPLE_MAX_TOP];
        Damask__V1__TopLogprob *pointers[MAX_SCORES][DMK_SAMPLE_MAX_TOP];
        Damask__V1__TopLogprobs tops[MAX_SCORES], *top_pointers[MAX_SCORES];
        Damask__V1__PromptLogprobs message = DAMASK__V1__PROMPT_LOGPROBS__INIT;
        Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;
        float logprobs[MAX_SCORES];
        uint32_t n = e->prompt_logprobs.n - at;

        n = n < MAX_SCORES ? n : MAX_SCORES;
        for (uint32_t i = 0; i < n; i++) {
            const struct dmk_sample_result *r = &e->prompt_logprobs.rows[at + i];

            logprobs[i] = r->logprob;
            fill_top(r, entries[i], pointers[i], &tops[i]);
            top_pointers[i] = &tops[i];
        }
        message.id = id;
        message.n_logprobs = n;
        message.logprobs = logprobs;
        message.n_top = n;
        message.top = top_pointers;
        event.body_case = DAMASK__V1__WORKER_EVENT__BODY_PROMPT_LOGPROBS;
        event.prompt_logprobs = &message;
        emit(ud, &event);
    }
}

static void emit_finished(const struct dmk_decode_event *e, Damask__V1__RequestId *id,
                          dmk_decode_wire_emit emit, void *ud)
{
    Damask__V1__Finished m = DAMASK__V1__FINISHED__INIT;
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;

    m.id = id;
    m.choice = e->finished.choice;
    m.reason = e->finished.stopped ? DAMASK__V1__FINISH_REASON__FINISH_STOP
                                   : DAMASK__V1__FINISH_REASON__FINISH_LENGTH;
    m.n_tokens = e->finished.n_tokens;
    m.n_cached = e->finished.n_cached;
    m.queue_us = e->finished.queue_us;
    m.prefill_us = e->finished.prefill_us;
    m.transfer_us = e->finished.transfer_us;
    m.transfer_bytes = e->finished.transfer_bytes;
    m.decode_us = e->finished.decode_us;
    m.n_preemptions = e->finished.n_preemptions;
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_FINISHED;
    event.finished = &m;
    emit(ud, &event);
}

static void emit_reserved(const struct dmk_decode_event *e, Damask__V1__RequestId *id,
                          dmk_decode_wire_emit emit, void *ud)
{
    Damask__V1__Reserved m = DAMASK__V1__RESERVED__INIT;
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;

    m.id = id;
    m.needs_prefill = e->reserved.needs_prefill;
    m.ticket.data = (uint8_t *)(uintptr_t)e->reserved.ticket.data;
    m.ticket.len = e->reserved.ticket.len;
    m.have = e->reserved.have;
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_RESERVED;
    event.reserved = &m;
    emit(ud, &event);
}

static void emit_transferred(const struct dmk_decode_event *e, Damask__V1__RequestId *id,
                             dmk_decode_wire_emit emit, void *ud)
{
    Damask__V1__Transferred m = DAMASK__V1__TRANSFERRED__INIT;
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;

    m.id = id;
    m.bytes = e->transferred.bytes;
    m.us = e->transferred.us;
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_TRANSFERRED;
    event.transferred = &m;
    emit(ud, &event);
}

static void emit_quiet_ask(const struct dmk_decode_event *e, uint64_t incarnation,
                           dmk_decode_wire_emit emit, void *ud)
{
    Damask__V1__QuietAsk m = DAMASK__V1__QUIET_ASK__INIT;
    Damask__V1__WorkerEvent event = DAMASK__V1__WORKER_EVENT__INIT;

    m.cookie_hi = e->quiet_ask.cookie.hi;
    m.cookie_lo = e->quiet_ask.cookie.lo;
    m.p_incarnation = e->quiet_ask.p_incarnation;
    m.d_incarnation = incarnation;
    event.body_case = DAMASK__V1__WORKER_EVENT__BODY_QUIET_ASK;
    event.quiet_ask = &m;
    emit(ud, &event);
}

void dmk_decode_wire_event(const struct dmk_decode_event *e, uint64_t incarnation,
                           dmk_decode_wire_emit emit, void *ud)
{
    Damask__V1__RequestId id = dmk_request_id_message(e->id);

    switch (e->kind) {
    case DMK_DECODE_RESERVED:
        emit_reserved(e, &id, emit, ud);
        break;
    case DMK_DECODE_TRANSFERRED:
        emit_transferred(e, &id, emit, ud);
        break;
    case DMK_DECODE_PROMPT_LOGPROBS:
        emit_scores(e, &id, emit, ud);
        break;
    case DMK_DECODE_TOKEN:
        emit_token(e, &id, emit, ud);
        break;
    case DMK_DECODE_FINISHED:
        emit_finished(e, &id, emit, ud);
        break;
    case DMK_DECODE_QUIET_ASK:
        emit_quiet_ask(e, incarnation, emit, ud);
        break;
    case DMK_DECODE_FAILED: /* dmk_worker_fail tells it */
    default:
        dmk_unreachable("no event for here");
    }
}
