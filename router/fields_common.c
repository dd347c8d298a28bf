/* What the request bodies of all prompts share: the sampling table, stop strings, biases, streams. */
#include <math.h>
#include <stdlib.h>
#include "router/fields.h"

static const struct dmk_field sampling[] = {
    {"temperature", DMK_KIND_REAL, 0, 2, DMK_ASK_AT(temperature), .about = "0 is greedy."},
    {"top_p", DMK_KIND_REAL, 0, 1, DMK_ASK_AT(top_p), .above = true,
     .about = "Only the likeliest tokens that have this much probability together."},
    {"top_k", DMK_KIND_INT, -1, DMK_VOCAB_SIZE, DMK_ASK_AT(top_k),
     .about = "Only this many of the likeliest tokens; 0 and -1 mean all."},
    {"min_p", DMK_KIND_REAL, 0, 1, DMK_ASK_AT(min_p),
     .about = "Only tokens of at least this share of the likeliest one's probability."},
    {"frequency_penalty", DMK_KIND_REAL, -2, 2, DMK_ASK_AT(frequency_penalty)},
    {"presence_penalty", DMK_KIND_REAL, -2, 2, DMK_ASK_AT(presence_penalty)},
    {"repetition_penalty", DMK_KIND_REAL, 0.01, 10, DMK_ASK_AT(repetition_penalty)},
    {"seed", DMK_KIND_INT, -0x1p63, 0x1p63, DMK_ASK_AT(seed),
     .has_at = offsetof(struct dmk_ask, has_seed),
     .about = "The same seed gives the same answer, whatever else the server does."},
    {"n", DMK_KIND_INT, 1, DMK_ASK_MAX_CHOICES, DMK_ASK_AT(n),
     .about = "Choices, from one prefill."},
    {"stream", DMK_KIND_BOOL, 0, 0, DMK_ASK_AT(stream), .about = "Answer by server-sent events."},
    {"min_tokens", DMK_KIND_INT, 0, INT32_MAX, DMK_ASK_AT(min_tokens),
     .about = "No end token before this many tokens."},
    {"ignore_eos", DMK_KIND_BOOL, 0, 0, DMK_ASK_AT(ignore_eos)},
    {"priority", DMK_KIND_INT, INT32_MIN, INT32_MAX, DMK_ASK_AT(priority)},
    {"cache_salt", DMK_KIND_TEXT, 0, 0, DMK_ASK_AT(cache_salt),
     .about = "Only requests with the same salt share cached prefixes."},
    {"user", DMK_KIND_TEXT, 0, 65536, 0, 0, .about = "Accepted; not used."},
};

/* What other servers of the same API take with the sampling parameters. */
static const struct dmk_field_refused refused[] = {
    {"use_beam_search", "false"},
    {"length_penalty", "1"},
    {"typical_p", "1"},
    {"bad_words", "[]"},
    {"allowed_token_ids", "[]"},
    {"logits_processors", NULL},
    {"custom_logit_processor", NULL},
    {"lora_path", NULL},
    {"thinking_token_budget", NULL},
    /* constraints by other names than structured_outputs */
    {"guided_json", NULL},
    {"guided_regex", NULL},
    {"guided_choice", NULL},
    {"guided_grammar", NULL},
    {"json_schema", NULL},
    {"regex", NULL},
    {"ebnf", NULL},
    {"grammar", NULL},
    {"structural_tag", NULL},
    /* other forms of the answer */
    {"include_stop_str_in_output", "false"},
    {"no_stop_trim", "false"},
    {"stop_regex", "[]"},
    {"skip_special_tokens", "true"},
    {"prompt_logprobs", NULL},
    {"return_token_ids", "false"},
    {"return_tokens_as_token_ids", "false"},
    {"return_hidden_states", "false"},
    {"truncate_prompt_tokens", NULL},
    /* who hands pages to whom */
    {"kv_transfer_params", NULL},
    {"bootstrap_host", NULL},
};

const struct dmk_field_refused *dmk_fields_refused(size_t *ret_n)
{
    *ret_n = sizeof(refused) / sizeof(refused[0]);
    return refused;
}

const struct dmk_field *dmk_fields_sampling(size_t *ret_n)
{
    *ret_n = sizeof(sampling) / sizeof(sampling[0]);
    return sampling;
}

int dmk_fields_model(const json_t *root, struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    struct dmk_str model = {0};
    int rc = dmk_field_str(root, "", "model", DMK_ASK_MAX_MODEL_BYTES, &model, reterr);

    if (rc < 0) {
        return rc;
    }
    if (model.len == 0) {
        return dmk_api_bad(reterr, "model", "model must name the model to use");
    }
    for (size_t i = 0; i < model.len; i++) {
        if ((unsigned char)model.data[i] < 0x20 || model.data[i] == 0x7f) {
            return dmk_api_bad(reterr, "model", "model must not hold control characters");
        }
    }
    memcpy(ask->model, model.data, model.len);
    ask->model[model.len] = '\0';
    return 0;
}

static int read_stop(const json_t *root, struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    const json_t *v = dmk_field_get(root, "stop");
    const size_t n = json_is_array(v) ? json_array_size(v) : 1;

    if (!v) {
        return 0;
    }
    if (n > DMK_ASK_MAX_STOPS) {
        return dmk_api_bad(reterr, "stop", "stop must have at most %d strings, not %zu",
                           DMK_ASK_MAX_STOPS, n);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_is_array(v) ? json_array_get(v, i) : v;

        if (!json_is_string(s)) {
            return dmk_api_bad(reterr, "stop", "stop must be a string or a list of strings");
        }
        if (dmk_ask_add_stop(ask, dmk_field_text(s)) < 0) {
            return dmk_api_bad(reterr, "stop", "a stop string must have 1 to %d bytes, not %zu",
                               DMK_ASK_MAX_STOP_BYTES, json_string_length(s));
        }
    }
    return 0;
}

static int read_stop_ids(const json_t *root, struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    const json_t *v = dmk_field_get(root, "stop_token_ids");

    if (!v) {
        return 0;
    }
    if (!json_is_array(v) || json_array_size(v) > DMK_ASK_MAX_STOP_IDS) {
        return dmk_api_bad(reterr, "stop_token_ids",
                           "stop_token_ids must be a list of at most %d token ids",
                           DMK_ASK_MAX_STOP_IDS);
    }
    for (size_t i = 0; i < json_array_size(v); i++) {
        int64_t id;

        if (!dmk_field_token(json_array_get(v, i), &id)) {
            return dmk_api_bad(reterr, "stop_token_ids",
                               "stop_token_ids must hold token ids from 0 to %u",
                               DMK_VOCAB_SIZE - 1);
        }
        ask->stop_ids[ask->n_stop_ids++] = (uint32_t)id;
    }
    return 0;
}

static int read_bias(const json_t *root, struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    json_t *v = dmk_field_get(root, "logit_bias");
    const char *key;
    json_t *value;

    if (!v) {
        return 0;
    }
    if (!json_is_object(v) || json_object_size(v) > DMK_ASK_MAX_BIAS) {
        return dmk_api_bad(reterr, "logit_bias",
                           "logit_bias must be an object of at most %d token ids",
                           DMK_ASK_MAX_BIAS);
    }
    json_object_foreach(v, key, value)
    {
        char *end;
        const unsigned long id = strtoul(key, &end, 10);

        if (key[0] < '0' || key[0] > '9' || *end || id >= DMK_VOCAB_SIZE) {
            char quoted[68];

            return dmk_api_bad(reterr, "logit_bias",
                               "logit_bias has \"%s\" where a token id from 0 to %u must stand",
                               dmk_api_quote(dmk_str_from(key), quoted), DMK_VOCAB_SIZE - 1);
        }
        if (!json_is_number(value) || !(fabs(json_number_value(value)) <= 100)) {
            return dmk_api_bad(reterr, "logit_bias",
                               "logit_bias of token %lu must be a number from -100 to 100", id);
        }
        if (dmk_ask_add_bias(ask, (uint32_t)id, (float)json_number_value(value)) < 0) {
            return dmk_api_fail(reterr, 500, "out_of_memory", "no memory for logit_bias");
        }
    }
    return 0;
}

static int read_stream(const json_t *root, struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    const json_t *options = dmk_field_get(root, "stream_options");
    bool continuous = false;
    bool obfuscation = false; /* padding against guesses by length; this server sends none */
    int rc;

    if (!options) {
        return 0;
    }
    if (!json_is_object(options)) {
        return dmk_api_bad(reterr, "stream_options", "stream_options must be an object");
    }
    if (!ask->stream) {
        return dmk_api_bad(reterr, "stream_options",
                           "stream_options may only stand together with \"stream\": true");
    }
    if ((rc = dmk_field_bool(options, "stream_options.", "include_usage", &ask->include_usage,
                             reterr)) < 0 ||
        (rc = dmk_field_bool(options, "stream_options.", "include_obfuscation", &obfuscation,
                             reterr)) < 0) {
        return rc;
    }
    rc = dmk_field_bool(options, "stream_options.", "continuous_usage_stats", &continuous, reterr);
    if (rc == 0 && continuous) {
        return dmk_api_bad_code(reterr, "unsupported_parameter",
                                "stream_options.continuous_usage_stats",
                                "stream_options.continuous_usage_stats is not supported by this "
                                "server");
    }
    return rc;
}

int dmk_fields_common(const json_t *root, const struct dmk_api_limits *limits, struct dmk_ask *ask,
                      struct dmk_api_error *reterr)
{
    static const struct dmk_field_tables tables = {
        .fields = sampling, .n_fields = sizeof(sampling) / sizeof(sampling[0])};
    int rc;

    if ((rc = dmk_fields_model(root, ask, reterr)) < 0 ||
        (rc = dmk_fields_read(root, &tables, ask, reterr)) < 0 ||
        (rc = read_stream(root, ask, reterr)) < 0 || (rc = read_stop(root, ask, reterr)) < 0 ||
        (rc = read_stop_ids(root, ask, reterr)) < 0 || (rc = read_bias(root, ask, reterr)) < 0) {
        return rc;
    }
    if (ask->n > limits->max_choices) {
        return dmk_api_bad(reterr, "n", "n must be between 1 and %u, not %u", limits->max_choices,
                           ask->n);
    }
    if (ask->top_k == UINT32_MAX) {
        ask->top_k = 0; /* -1 means off too */
    }
    return 0;
}

int dmk_fields_best_of(const struct dmk_api_limits *limits, struct dmk_ask *ask,
                       struct dmk_api_error *reterr)
{
    if (ask->best_of == 0 || ask->best_of == ask->n) {
        return 0;
    }
    if (ask->best_of < ask->n || ask->best_of > limits->max_choices) {
        return dmk_api_bad(reterr, "best_of",
                           "best_of must be between n, which is %u, and %u, not %u", ask->n,
                           limits->max_choices, ask->best_of);
    }
    if (ask->stream) {
        return dmk_api_bad(reterr, "best_of",
                           "best_of above n can not be streamed: which choices are the best is "
                           "known at the end only");
    }
    ask->n_shown = ask->n;
    ask->n = ask->best_of;
    return 0;
}
