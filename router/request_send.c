/* What a request says to workers: generate, prefill, cancel. On the loop. */
#include "router/request_internal.h"

static Damask__V1__RequestId make_id(const struct dmk_request *r)
{
    Damask__V1__RequestId id = DAMASK__V1__REQUEST_ID__INIT;

    id.hi = r->id.hi;
    id.lo = r->id.lo;
    id.attempt = r->attempt;
    return id;
}

void dmk_request__send_cancel(struct dmk_request *r, struct dmk_worker *w)
{
    Damask__V1__RouterMessage m = DAMASK__V1__ROUTER_MESSAGE__INIT;
    Damask__V1__Cancel cancel = DAMASK__V1__CANCEL__INIT;
    Damask__V1__RequestId id = make_id(r);

    cancel.id = &id;
    m.body_case = DAMASK__V1__ROUTER_MESSAGE__BODY_CANCEL;
    m.cancel = &cancel;
    if (w && w->up) {
        (void)dmk_worker_send(w, &m); /* a worker that is gone has cancelled by itself */
    }
}

int dmk_request__send_generate(struct dmk_request *r)
{
    struct dmk_ask *ask = &r->ask;
    Damask__V1__RouterMessage m = DAMASK__V1__ROUTER_MESSAGE__INIT;
    Damask__V1__Generate g = DAMASK__V1__GENERATE__INIT;
    Damask__V1__Sampling s = DAMASK__V1__SAMPLING__INIT;
    Damask__V1__RequestId id = make_id(r);
    uint32_t stop_ids[DMK_ASK_MAX_STOP_IDS + 16];
    uint32_t bias_ids[DMK_ASK_MAX_BIAS];
    float bias_values[DMK_ASK_MAX_BIAS];

    for (size_t i = 0; !ask->ignore_eos && i < r->format->n_stop_ids && g.n_stop_ids < 16; i++) {
        stop_ids[g.n_stop_ids++] = r->format->stop_ids[i];
    }
    for (size_t i = 0; i < ask->n_stop_ids; i++) {
        stop_ids[g.n_stop_ids++] = ask->stop_ids[i];
    }
    for (size_t i = 0; i < ask->n_bias; i++) {
        bias_ids[i] = ask->bias[i].id;
        bias_values[i] = ask->bias[i].value;
    }
    s.temperature = ask->temperature;
    s.top_p = ask->top_p;
    s.top_k = ask->top_k;
    s.min_p = ask->min_p;
    s.frequency_penalty = ask->frequency_penalty;
    s.presence_penalty = ask->presence_penalty;
    s.repetition_penalty = ask->repetition_penalty;
    s.seed = ask->seed;
    s.n_bias_ids = s.n_bias_values = ask->n_bias;
    s.bias_ids = bias_ids;
    s.bias_values = bias_values;
    s.logprobs = ask->logprobs || ask->n_shown > 0; /* ranked by them */
    s.top_logprobs = ask->top_logprobs;
    g.id = &id;
    g.n_prompt = ask->prompt.len;
    g.prompt = ask->prompt.data;
    g.sampling = &s;
    g.max_tokens = r->max_tokens;
    g.min_tokens = ask->min_tokens;
    g.stop_ids = stop_ids;
    g.ignore_eos = ask->ignore_eos;
    g.n = ask->n;
    g.cache_salt = (ProtobufCBinaryData){strlen(ask->cache_salt), (uint8_t *)ask->cache_salt};
    g.priority = ask->priority;
    g.traceparent = r->traceparent;
    g.request_id = r->request_id;
    g.echo_logprobs = dmk_ask_scores_prompt(ask);
    g.force_local = r->forced_local;
    g.constraint = (ProtobufCBinaryData){ask->constraint.len, (uint8_t *)ask->constraint.data};
    m.body_case = DAMASK__V1__ROUTER_MESSAGE__BODY_GENERATE;
    m.generate = &g;
    return dmk_worker_send(r->d, &m);
}

int dmk_request__send_prefill(struct dmk_request *r, const Damask__V1__Reserved *reserved)
{
    struct dmk_ask *ask = &r->ask;
    Damask__V1__RouterMessage m = DAMASK__V1__ROUTER_MESSAGE__INIT;
    Damask__V1__Prefill p = DAMASK__V1__PREFILL__INIT;
    Damask__V1__RequestId id = make_id(r);

    p.id = &id;
    p.n_prompt = ask->prompt.len;
    p.prompt = ask->prompt.data;
    p.ticket = reserved->ticket;
    p.cache_salt = (ProtobufCBinaryData){strlen(ask->cache_salt), (uint8_t *)ask->cache_salt};
    p.priority = ask->priority;
    p.traceparent = r->traceparent;
    p.request_id = r->request_id;
    m.body_case = DAMASK__V1__ROUTER_MESSAGE__BODY_PREFILL;
    m.prefill = &p;
    return dmk_worker_send(r->p, &m);
}
