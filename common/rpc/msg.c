/* Router to worker: reading with structural checks, and what one request may ask for. */
#include "common/rpc/msg.h"
#include <inttypes.h>
#include <math.h>
#include "common/rpc/msg_internal.h"

int dmk_msg__text(const char *text, size_t max, const char *what, struct dmk_error *reterr)
{
    const size_t len = strlen(text);

    if (len > max) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s has %zu bytes, at most %zu are allowed", what,
                             len, max);
    }
    for (size_t i = 0; i < len; i++) {
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f) {
            return dmk_error_set(reterr, -DMK_EINVAL, "%s holds a control character", what);
        }
    }
    return 0;
}

int dmk_msg__count(size_t n, size_t max, const char *what, struct dmk_error *reterr)
{
    if (n > max) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s: %zu entries, at most %zu are allowed", what,
                             n, max);
    }
    return 0;
}

int dmk_msg__ids(const uint32_t *ids, size_t n, uint32_t vocab_size, const char *what,
                 struct dmk_error *reterr)
{
    for (size_t i = 0; i < n && vocab_size > 0; i++) {
        if (ids[i] >= vocab_size) {
            return dmk_error_set(reterr, -DMK_EINVAL,
                                 "%s %zu is %" PRIu32 ", but the vocabulary ends at %" PRIu32, what,
                                 i, ids[i], vocab_size - 1);
        }
    }
    return 0;
}

int dmk_msg__range(double v, double min, double max, const char *what, struct dmk_error *reterr)
{
    if (!isfinite(v) || v < min || v > max) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s is %g, allowed are %g to %g", what, v, min,
                             max);
    }
    return 0;
}

int dmk_msg__id(const Damask__V1__RequestId *id, const char *what, struct dmk_error *reterr)
{
    if (!id || (id->hi == 0 && id->lo == 0)) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s has no request id", what);
    }
    return 0;
}

static int check_sampling_sizes(const Damask__V1__Sampling *s, struct dmk_error *reterr)
{
    int ret;

    if (!s) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "generate has no sampling");
    }
    ret = dmk_msg__count(s->n_bias_ids, DMK_MSG_MAX_BIAS, "logit bias", reterr);
    if (ret == 0 && s->n_bias_ids != s->n_bias_values) {
        ret = dmk_error_set(reterr, -DMK_EFORMAT, "logit bias: %zu ids but %zu values",
                            s->n_bias_ids, s->n_bias_values);
    }
    return ret;
}

static int check_generate_sizes(const Damask__V1__Generate *g, struct dmk_error *reterr)
{
    int ret = dmk_msg__id(g->id, "generate", reterr);

    if (ret == 0) {
        ret = dmk_msg__count(g->n_prompt, DMK_MSG_MAX_PROMPT, "prompt", reterr);
    }
    if (ret == 0) {
        ret = dmk_msg__count(g->n_stop_ids, DMK_MSG_MAX_STOP_IDS, "stop ids", reterr);
    }
    if (ret == 0) {
        ret = dmk_msg__count(g->cache_salt.len, DMK_MSG_MAX_SALT, "cache salt", reterr);
    }
    if (ret == 0) {
        ret = dmk_msg__count(g->constraint.len, DMK_MSG_MAX_CONSTRAINT, "constraint bytes", reterr);
    }
    if (ret == 0) {
        ret = dmk_msg__text(g->traceparent, DMK_MSG_MAX_ID_TEXT, "traceparent", reterr);
    }
    if (ret == 0) {
        ret = dmk_msg__text(g->request_id, DMK_MSG_MAX_ID_TEXT, "request id", reterr);
    }
    return ret == 0 ? check_sampling_sizes(g->sampling, reterr) : ret;
}

static int check_prefill_sizes(const Damask__V1__Prefill *p, struct dmk_error *reterr)
{
    int ret = dmk_msg__id(p->id, "prefill", reterr);

    if (ret == 0) {
        ret = dmk_msg__count(p->n_prompt, DMK_MSG_MAX_PROMPT, "prompt", reterr);
    }
    if (ret == 0) {
        ret = dmk_msg__count(p->ticket.len, DMK_MSG_MAX_TICKET, "ticket bytes", reterr);
    }
    if (ret == 0) {
        ret = dmk_msg__count(p->cache_salt.len, DMK_MSG_MAX_SALT, "cache salt", reterr);
    }
    if (ret == 0) {
        ret = dmk_msg__text(p->traceparent, DMK_MSG_MAX_ID_TEXT, "traceparent", reterr);
    }
    return ret == 0 ? dmk_msg__text(p->request_id, DMK_MSG_MAX_ID_TEXT, "request id", reterr) : ret;
}

static int check_router_message(const Damask__V1__RouterMessage *m, struct dmk_error *reterr)
{
    switch (m->body_case) {
    case DAMASK__V1__ROUTER_MESSAGE__BODY_HELLO:
        return dmk_msg__text(m->hello->router_id, DMK_MSG_MAX_ID_TEXT, "router id", reterr);
    case DAMASK__V1__ROUTER_MESSAGE__BODY_GENERATE:
        return check_generate_sizes(m->generate, reterr);
    case DAMASK__V1__ROUTER_MESSAGE__BODY_PREFILL:
        return check_prefill_sizes(m->prefill, reterr);
    case DAMASK__V1__ROUTER_MESSAGE__BODY_CANCEL:
        return dmk_msg__id(m->cancel->id, "cancel", reterr);
    case DAMASK__V1__ROUTER_MESSAGE__BODY_VOCABULARY:
        return dmk_msg__count(m->vocabulary->data.len, DMK_MSG_MAX_VOCABULARY, "vocabulary bytes",
                              reterr);
    case DAMASK__V1__ROUTER_MESSAGE__BODY_QUIET_ASK:
    case DAMASK__V1__ROUTER_MESSAGE__BODY_CLOSED:
    case DAMASK__V1__ROUTER_MESSAGE__BODY_PEER_REPORT:
        return 0;
    default: /* a body that a later version has added: to be ignored */
        return 0;
    }
}

int dmk_msg_router_unpack(struct dmk_bytes bytes, Damask__V1__RouterMessage **ret,
                          struct dmk_error *reterr)
{
    Damask__V1__RouterMessage *m = damask__v1__router_message__unpack(NULL, bytes.len, bytes.data);
    int status;

    if (!m) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "a message of %zu bytes is not a RouterMessage",
                             bytes.len);
    }
    status = check_router_message(m, reterr);
    if (status < 0) {
        damask__v1__router_message__free_unpacked(m, NULL);
        return status;
    }
    *ret = m;
    return 0;
}

static int check_prompt(const uint32_t *prompt, size_t n, const struct dmk_msg_limits *limits,
                        struct dmk_error *reterr)
{
    if (n == 0) {
        return dmk_error_set(reterr, -DMK_EINVAL, "the prompt is empty");
    }
    if (n >= limits->max_context) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "the prompt has %zu tokens, but the context holds %" PRIu32
                             " with at least one of the answer",
                             n, limits->max_context);
    }
    return dmk_msg__ids(prompt, n, limits->vocab_size, "prompt token", reterr);
}

static int check_sampling(const Damask__V1__Sampling *s, const struct dmk_msg_limits *limits,
                          struct dmk_error *reterr)
{
    const struct {
        double v, min, max;
        const char *what;
    } rows[] = {
        {s->temperature, 0, 100, "temperature"},
        {s->top_p, 0, 1, "top_p"},
        {s->min_p, 0, 1, "min_p"},
        {s->frequency_penalty, -2, 2, "frequency_penalty"},
        {s->presence_penalty, -2, 2, "presence_penalty"},
        {s->repetition_penalty, 0, 100, "repetition_penalty"},
        {s->top_logprobs, 0, DMK_MSG_MAX_TOP_LOGPROBS, "top_logprobs"},
    };
    int ret = 0;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]) && ret == 0; i++) {
        ret = dmk_msg__range(rows[i].v, rows[i].min, rows[i].max, rows[i].what, reterr);
    }
    if (ret == 0 && s->top_p == 0) {
        return dmk_error_set(reterr, -DMK_EINVAL, "top_p is 0, allowed is more than 0 up to 1");
    }
    if (ret == 0 && s->top_logprobs > 0 && !s->logprobs) {
        return dmk_error_set(reterr, -DMK_EINVAL, "top_logprobs is %" PRIu32 " without logprobs",
                             s->top_logprobs);
    }
    if (ret == 0) {
        ret = dmk_msg__ids(s->bias_ids, s->n_bias_ids, limits->vocab_size, "logit bias token",
                           reterr);
    }
    for (size_t i = 0; i < s->n_bias_values && ret == 0; i++) {
        ret = dmk_msg__range(s->bias_values[i], -100, 100, "a logit bias", reterr);
    }
    return ret;
}

int dmk_msg_generate_check(const Damask__V1__Generate *g, const struct dmk_msg_limits *limits,
                           struct dmk_error *reterr)
{
    int ret = check_prompt(g->prompt, g->n_prompt, limits, reterr);

    if (ret < 0) {
        return ret;
    }
    if (g->max_tokens == 0) {
        return dmk_error_set(reterr, -DMK_EINVAL, "max_tokens is 0, at least 1 is needed");
    }
    if (g->min_tokens > g->max_tokens) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "min_tokens %" PRIu32 " is more than max_tokens %" PRIu32,
                             g->min_tokens, g->max_tokens);
    }
    if (g->n > limits->max_choices) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "n is %" PRIu32 ", at most %" PRIu32 " choices are served", g->n,
                             limits->max_choices);
    }
    ret = dmk_msg__ids(g->stop_ids, g->n_stop_ids, limits->vocab_size, "stop token", reterr);
    return ret == 0 ? check_sampling(g->sampling, limits, reterr) : ret;
}

int dmk_msg_prefill_check(const Damask__V1__Prefill *p, const struct dmk_msg_limits *limits,
                          struct dmk_error *reterr)
{
    if (p->n_prompt < 2) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "the prompt has %zu tokens, prefill computes all but the last",
                             p->n_prompt);
    }
    if (p->ticket.len == 0) {
        return dmk_error_set(reterr, -DMK_EINVAL, "the ticket is missing");
    }
    return check_prompt(p->prompt, p->n_prompt, limits, reterr);
}

int64_t dmk_msg_priority_ns(int32_t priority)
{
    const int32_t level = priority < -10 ? -10 : priority > 10 ? 10 : priority;

    return level * (int64_t)1000000000;
}
