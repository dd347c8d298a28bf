/* Prompts as token ids in, token ids out: vllm.grpc.engine.VllmEngine/Generate, as gateways that render and
 * parse by themselves speak it. No HTTP in it, and no chat format.
 *
 * parse is pure and runs on a pool thread; answers are in api_engine_out.c. In this wire plain zeros mean "not set". What would change the answer and is not had here is refused by name. */
#include <stdlib.h>
#include "common/rpc/nul.h"
#include "common/text/utf8.h"
#include "router/api_engine.h"
#include "router/constraint.h"

typedef Vllm__Grpc__Engine__SamplingParams params_msg;
typedef Vllm__Grpc__Engine__GenerateRequest request_msg;

struct parse {
    const struct dmk_api_limits *limits;
    struct dmk_ask *ask;
    struct dmk_api_error *err;
};

static int check_real(struct parse *p, const char *param, double x, double min, double max)
{
    if (!(x >= min && x <= max)) {
        return dmk_api_bad(p->err, param, "%s must be between %g and %g, not %g", param, min, max,
                           x);
    }
    return 0;
}

static int check_text(struct parse *p, const char *text, const char *param)
{
    const size_t len = strlen(text);

    if (dmk_utf8_valid_prefix((const uint8_t *)text, len) != len) {
        return dmk_api_bad(p->err, param, "%s is not UTF-8", param);
    }
    return 0;
}

static int read_numbers(struct parse *p, const params_msg *in)
{
    struct dmk_ask *ask = p->ask;
    int rc;

    if (in->opt_temperature_case ==
        VLLM__GRPC__ENGINE__SAMPLING_PARAMS__OPT_TEMPERATURE_TEMPERATURE) {
        ask->temperature = in->temperature;
    }
    if (in->top_p != 0) {
        ask->top_p = in->top_p;
    }
    if (in->repetition_penalty != 0) {
        ask->repetition_penalty = in->repetition_penalty;
    }
    ask->top_k = in->top_k;
    ask->min_p = in->min_p;
    ask->frequency_penalty = in->frequency_penalty;
    ask->presence_penalty = in->presence_penalty;
    ask->min_tokens = in->min_tokens;
    ask->ignore_eos = in->ignore_eos;
    if (in->opt_seed_case == VLLM__GRPC__ENGINE__SAMPLING_PARAMS__OPT_SEED_SEED) {
        ask->has_seed = true;
        ask->seed = (uint64_t)(int64_t)in->seed;
    }
    if (in->opt_max_tokens_case == VLLM__GRPC__ENGINE__SAMPLING_PARAMS__OPT_MAX_TOKENS_MAX_TOKENS) {
        if (in->max_tokens == 0) {
            return dmk_api_bad(p->err, "max_tokens", "max_tokens must be at least 1, not 0");
        }
        ask->has_max_tokens = true;
        ask->max_tokens = in->max_tokens;
    }
    if ((rc = check_real(p, "temperature", (double)ask->temperature, 0, 2)) < 0 ||
        (rc = check_real(p, "top_p", (double)ask->top_p, 1e-6, 1)) < 0 ||
        (rc = check_real(p, "min_p", (double)ask->min_p, 0, 1)) < 0 ||
        (rc = check_real(p, "frequency_penalty", (double)ask->frequency_penalty, -2, 2)) < 0 ||
        (rc = check_real(p, "presence_penalty", (double)ask->presence_penalty, -2, 2)) < 0 ||
        (rc = check_real(p, "repetition_penalty", (double)ask->repetition_penalty, 0.01, 10)) < 0) {
        return rc;
    }
    ask->top_k = ask->top_k < DMK_VOCAB_SIZE ? ask->top_k : 0;
    if (in->n > p->limits->max_choices) {
        return dmk_api_bad(p->err, "n", "n must be at most %u, not %u", p->limits->max_choices,
                           in->n);
    }
    ask->n = in->n ? in->n : 1;
    return 0;
}

/* Alternatives of the answer's and of the prompt's tokens: damask asks its workers for one number of both. */
static int read_logprobs(struct parse *p, const params_msg *in)
{
    struct dmk_ask *ask = p->ask;
    int32_t top = -1, of_prompt = -1;

    if (in->opt_logprobs_case == VLLM__GRPC__ENGINE__SAMPLING_PARAMS__OPT_LOGPROBS_LOGPROBS) {
        top = in->logprobs;
    }
    if (in->opt_prompt_logprobs_case ==
        VLLM__GRPC__ENGINE__SAMPLING_PARAMS__OPT_PROMPT_LOGPROBS_PROMPT_LOGPROBS) {
        of_prompt = in->prompt_logprobs;
    }
    if (top > DMK_ASK_MAX_TOP || of_prompt > DMK_ASK_MAX_TOP) {
        return dmk_api_bad(p->err, "logprobs", "logprobs must be at most %d", DMK_ASK_MAX_TOP);
    }
    ask->logprobs = top >= 0 || of_prompt >= 0;
    ask->echo = of_prompt >= 0;
    top = top > of_prompt ? top : of_prompt;
    ask->top_logprobs = top > 0 ? (uint32_t)top : 0;
    return 0;
}

static int read_lists(struct parse *p, const params_msg *in)
{
    struct dmk_ask *ask = p->ask;
    int rc;

    for (size_t i = 0; i < in->n_stop; i++) {
        if ((rc = check_text(p, in->stop[i], "stop")) < 0) {
            return rc;
        }
        if (dmk_ask_add_stop(ask, dmk_str_from(in->stop[i])) < 0) {
            return dmk_api_bad(p->err, "stop", "stop must have at most %d strings of 1 to %d bytes",
                               DMK_ASK_MAX_STOPS, DMK_ASK_MAX_STOP_BYTES);
        }
    }
    if (in->n_stop_token_ids > DMK_ASK_MAX_STOP_IDS) {
        return dmk_api_bad(p->err, "stop_token_ids", "stop_token_ids must have at most %d entries",
                           DMK_ASK_MAX_STOP_IDS);
    }
    for (size_t i = 0; i < in->n_stop_token_ids; i++) {
        if (in->stop_token_ids[i] >= DMK_VOCAB_SIZE) {
            return dmk_api_bad(p->err, "stop_token_ids", "there is no token id %u",
                               in->stop_token_ids[i]);
        }
        ask->stop_ids[ask->n_stop_ids++] = in->stop_token_ids[i];
    }
    for (size_t i = 0; i < in->n_logit_bias; i++) {
        const int32_t id = in->logit_bias[i]->key;

        if (id < 0 || id >= (int32_t)DMK_VOCAB_SIZE) {
            return dmk_api_bad(p->err, "logit_bias", "logit_bias has no token id %d", id);
        }
        if ((rc = check_real(p, "logit_bias", (double)in->logit_bias[i]->value, -100, 100)) < 0) {
            return rc;
        }
        if (dmk_ask_add_bias(ask, (uint32_t)id, in->logit_bias[i]->value) < 0) {
            return dmk_api_bad(p->err, "logit_bias", "logit_bias must have at most %d entries",
                               DMK_ASK_MAX_BIAS);
        }
    }
    return 0;
}

static int read_choice(struct parse *p, const Vllm__Grpc__Engine__ChoiceConstraint *in)
{
    struct dmk_str *list;
    int rc = 0;

    if (!in || in->n_choices == 0 || in->n_choices > 4096) {
        return dmk_api_bad(p->err, "choice", "choice must have 1 to 4096 texts");
    }
    list = calloc(in->n_choices, sizeof(*list));
    if (!list) {
        return dmk_api_fail(p->err, 503, "out_of_memory", "no memory for the choices");
    }
    for (size_t i = 0; i < in->n_choices && rc == 0; i++) {
        list[i] = dmk_str_from(in->choices[i]);
        rc = check_text(p, in->choices[i], "choice");
    }
    if (rc == 0) {
        rc = dmk_constraint_from_choice(list, in->n_choices, "choice", DMK_CONSTRAIN_ALL,
                                        &p->ask->constraint, p->err);
    }
    free(list);
    return rc;
}

/* How a constraint of the final message is meant is the gateway's word: from the first token on, or behind the
 * analysis of a Harmony turn. */
static int read_constraint(struct parse *p, const params_msg *in)
{
    const enum dmk_constraint_scope scope =
        in->grammar_from_first_token ? DMK_CONSTRAIN_ALL : DMK_CONSTRAIN_FINAL;
    struct dmk_buf *out = &p->ask->constraint;
    int rc;

    switch (in->constraint_case) {
    case VLLM__GRPC__ENGINE__SAMPLING_PARAMS__CONSTRAINT_STRUCTURAL_TAG:
        rc = check_text(p, in->structural_tag, "structural_tag");
        return rc < 0 ? rc
                      : dmk_constraint_from_structural_tag(dmk_str_from(in->structural_tag),
                                                           "structural_tag", out, p->err);
    case VLLM__GRPC__ENGINE__SAMPLING_PARAMS__CONSTRAINT_JSON_SCHEMA:
        rc = check_text(p, in->json_schema, "json_schema");
        return rc < 0 ? rc
                      : dmk_constraint_from_json_schema(dmk_str_from(in->json_schema),
                                                        "json_schema", scope, out, p->err);
    case VLLM__GRPC__ENGINE__SAMPLING_PARAMS__CONSTRAINT_REGEX:
        rc = check_text(p, in->regex, "regex");
        return rc < 0 ? rc
                      : dmk_constraint_from_regex(dmk_str_from(in->regex), "regex", scope, out,
                                                  p->err);
    case VLLM__GRPC__ENGINE__SAMPLING_PARAMS__CONSTRAINT_JSON_OBJECT:
        return in->json_object ? dmk_constraint_from_json_object(scope, out, p->err) : 0;
    case VLLM__GRPC__ENGINE__SAMPLING_PARAMS__CONSTRAINT_CHOICE:
        return read_choice(p, in->choice);
    case VLLM__GRPC__ENGINE__SAMPLING_PARAMS__CONSTRAINT_GRAMMAR:
        rc = check_text(p, in->grammar, "grammar");
        return rc < 0 ? rc
                      : dmk_constraint_from_grammar(dmk_str_from(in->grammar), "grammar", scope,
                                                    out, p->err);
    default:
        return 0;
    }
}

static int read_params(struct parse *p, const params_msg *in)
{
    int rc;

    if (in->opt_truncate_prompt_tokens_case !=
        VLLM__GRPC__ENGINE__SAMPLING_PARAMS__OPT_TRUNCATE_PROMPT_TOKENS__NOT_SET) {
        return dmk_api_bad_code(p->err, "unsupported_parameter", "truncate_prompt_tokens",
                                "truncate_prompt_tokens is not available");
    }
    if ((rc = read_numbers(p, in)) < 0 || (rc = read_logprobs(p, in)) < 0 ||
        (rc = read_lists(p, in)) < 0) {
        return rc;
    }
    return read_constraint(p, in);
}

static int read_prompt(struct parse *p, const request_msg *in)
{
    struct dmk_ask *ask = p->ask;

    if (in->input_case == VLLM__GRPC__ENGINE__GENERATE_REQUEST__INPUT_TOKENIZED) {
        const Vllm__Grpc__Engine__TokenizedInput *t = in->tokenized;

        for (size_t i = 0; i < t->n_input_ids; i++) {
            if (t->input_ids[i] >= DMK_VOCAB_SIZE) {
                return dmk_api_bad(p->err, "input_ids", "input_ids[%zu] is %u, the last id is %u",
                                   i, t->input_ids[i], DMK_VOCAB_SIZE - 1);
            }
        }
        dmk_ids_append(&ask->prompt, t->input_ids, t->n_input_ids);
    } else if (in->input_case == VLLM__GRPC__ENGINE__GENERATE_REQUEST__INPUT_TEXT) {
        const int rc = check_text(p, in->text, "text");

        if (rc < 0) {
            return rc;
        }
        dmk_buf_puts(&ask->text, in->text);
    }
    if (ask->prompt.len == 0 && !ask->prompt.failed && ask->text.len == 0) {
        return dmk_api_bad(p->err, "input", "the prompt is empty");
    }
    return ask->text.failed ? dmk_api_fail(p->err, 413, NULL, "the prompt is too large") : 0;
}

static int read_request(struct parse *p, const request_msg *in)
{
    const bool media = in->mm_inputs || in->media_refs || in->n_extra_mm_inputs > 0;
    int rc;

    if (media) {
        return dmk_api_bad_code(p->err, "unsupported_parameter", "mm_inputs",
                                "this model takes text only");
    }
    /* Where pages come from is decided here and nowhere else: a caller's word on it opens no connection. */
    if (in->kv_transfer_params ||
        in->opt_kv_transfer_params_json_case ==
            VLLM__GRPC__ENGINE__GENERATE_REQUEST__OPT_KV_TRANSFER_PARAMS_JSON_KV_TRANSFER_PARAMS_JSON) {
        return dmk_api_bad_code(p->err, "unsupported_parameter", "kv_transfer_params",
                                "kv_transfer_params are not taken: this server hands pages over by "
                                "itself");
    }
    p->ask->stream = in->stream;
    rc = read_prompt(p, in);
    return rc < 0 || !in->sampling_params ? rc : read_params(p, in->sampling_params);
}

int dmk_engine_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                     struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    struct parse p = {.limits = limits, .ask = ask, .err = reterr};
    const char *nul = dmk_rpc_nul_field(&vllm__grpc__engine__generate_request__descriptor, body);
    request_msg *in =
        nul ? NULL : vllm__grpc__engine__generate_request__unpack(NULL, body.len, body.data);
    int rc;

    if (nul) {
        return dmk_api_bad(reterr, nul, "%s holds a NUL character, which is not taken here", nul);
    }
    if (!in) {
        return dmk_api_bad(reterr, "", "the request is not a vllm.grpc.engine.GenerateRequest");
    }
    rc = read_request(&p, in);
    vllm__grpc__engine__generate_request__free_unpacked(in, NULL);
    return rc;
}
