/* Reading of request bodies; see fields.h. */
#include "router/fields.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_DEPTH 64

struct path {
    char text[96];
};

static struct path path_of(const char *prefix, const char *key)
{
    struct path p;

    (void)snprintf(p.text, sizeof(p.text), "%s%s", prefix, key);
    return p;
}

json_t *dmk_field_get(const json_t *obj, const char *key)
{
    json_t *v = json_object_get(obj, key);

    return json_is_null(v) ? NULL : v;
}

struct dmk_str dmk_field_text(const json_t *string)
{
    return (struct dmk_str){json_string_value(string), json_string_length(string)};
}

int dmk_field_real(const json_t *obj, const char *prefix, const char *key, double min, double max,
                   float *ret, struct dmk_api_error *reterr)
{
    const json_t *v = dmk_field_get(obj, key);
    const struct path p = path_of(prefix, key);
    double x;

    if (!v) {
        return 0;
    }
    if (!json_is_number(v)) {
        return dmk_api_bad(reterr, p.text, "%s must be a number", p.text);
    }
    x = json_number_value(v);
    if (!(x >= min && x <= max)) {
        return dmk_api_bad(reterr, p.text, "%s must be between %g and %g, not %g", p.text, min, max,
                           x);
    }
    *ret = (float)x;
    return 0;
}

int dmk_field_int(const json_t *obj, const char *prefix, const char *key, int64_t min, int64_t max,
                  int64_t *ret, struct dmk_api_error *reterr)
{
    const json_t *v = dmk_field_get(obj, key);
    const struct path p = path_of(prefix, key);
    int64_t x;

    if (!v) {
        return 0;
    }
    if (json_is_real(v)) {
        const double d = json_real_value(v);

        if (d != floor(d) || fabs(d) > 9e15) {
            return dmk_api_bad(reterr, p.text, "%s must be a whole number, not %g", p.text, d);
        }
        x = (int64_t)d;
    } else if (json_is_integer(v)) {
        x = json_integer_value(v);
    } else {
        return dmk_api_bad(reterr, p.text, "%s must be a whole number", p.text);
    }
    if (x < min || x > max) {
        return dmk_api_bad(reterr, p.text, "%s must be between %lld and %lld, not %lld", p.text,
                           (long long)min, (long long)max, (long long)x);
    }
    *ret = x;
    return 0;
}

int dmk_field_bool(const json_t *obj, const char *prefix, const char *key, bool *ret,
                   struct dmk_api_error *reterr)
{
    const json_t *v = dmk_field_get(obj, key);
    const struct path p = path_of(prefix, key);

    if (!v) {
        return 0;
    }
    if (!json_is_boolean(v)) {
        return dmk_api_bad(reterr, p.text, "%s must be true or false", p.text);
    }
    *ret = json_is_true(v);
    return 0;
}

int dmk_field_str(const json_t *obj, const char *prefix, const char *key, size_t max_bytes,
                  struct dmk_str *ret, struct dmk_api_error *reterr)
{
    const json_t *v = dmk_field_get(obj, key);
    const struct path p = path_of(prefix, key);

    if (!v) {
        return 0;
    }
    if (!json_is_string(v)) {
        return dmk_api_bad(reterr, p.text, "%s must be a string", p.text);
    }
    if (json_string_length(v) > max_bytes) {
        return dmk_api_bad(reterr, p.text, "%s must have at most %zu bytes, not %zu", p.text,
                           max_bytes, json_string_length(v));
    }
    *ret = dmk_field_text(v);
    return 0;
}

int dmk_fields_open(struct dmk_bytes body, json_t **ret_root, struct dmk_api_error *reterr)
{
    const struct dmk_str text = {(const char *)body.data, body.len};
    struct dmk_error error;
    json_t *root;
    char *near;

    if (dmk_json_parse(text, "the request body", MAX_DEPTH, &root, &error) < 0) {
        /* The parser's sentence quotes the text where it failed: that must not go back. */
        near = strstr(error.text, " near ");
        if (near) {
            *near = '\0';
        }
        return dmk_api_bad(reterr, "", "%s", error.text);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return dmk_api_bad(reterr, "", "the request body must be a JSON object");
    }
    *ret_root = root;
    return 0;
}

static bool is_neutral(const json_t *v, const char *neutral)
{
    if (!neutral) {
        return false;
    }
    switch (json_typeof(v)) {
    case JSON_FALSE:
        return strcmp(neutral, "false") == 0;
    case JSON_TRUE:
        return strcmp(neutral, "true") == 0;
    case JSON_INTEGER:
    case JSON_REAL:
        return neutral[0] >= '0' && neutral[0] <= '9' &&
               json_number_value(v) == strtod(neutral, NULL);
    case JSON_STRING:
        return strcmp(neutral, json_string_value(v)) == 0;
    case JSON_ARRAY:
        return strcmp(neutral, "[]") == 0 && json_array_size(v) == 0;
    case JSON_OBJECT:
        return strcmp(neutral, "{}") == 0 && json_object_size(v) == 0;
    default:
        return false;
    }
}

int dmk_fields_refuse(const json_t *root, const struct dmk_field_refused *refused, size_t n,
                      struct dmk_api_error *reterr)
{
    for (size_t i = 0; i < n; i++) {
        const json_t *v = dmk_field_get(root, refused[i].key);

        if (v && !is_neutral(v, refused[i].neutral)) {
            return dmk_api_bad_code(reterr, "unsupported_parameter", refused[i].key,
                                    "%s is not supported by this server", refused[i].key);
        }
    }
    return 0;
}

static int read_model(const json_t *root, struct dmk_ask *ask, struct dmk_api_error *reterr)
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
        const json_t *id = json_array_get(v, i);

        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= DMK_VOCAB_SIZE) {
            return dmk_api_bad(reterr, "stop_token_ids",
                               "stop_token_ids must hold token ids from 0 to %u",
                               DMK_VOCAB_SIZE - 1);
        }
        ask->stop_ids[ask->n_stop_ids++] = (uint32_t)json_integer_value(id);
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
    int rc = dmk_field_bool(root, "", "stream", &ask->stream, reterr);

    if (rc < 0 || !options) {
        return rc;
    }
    if (!json_is_object(options)) {
        return dmk_api_bad(reterr, "stream_options", "stream_options must be an object");
    }
    if (!ask->stream) {
        return dmk_api_bad(reterr, "stream_options",
                           "stream_options may only stand together with \"stream\": true");
    }
    rc = dmk_field_bool(options, "stream_options.", "include_usage", &ask->include_usage, reterr);
    if (rc < 0) {
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

static int read_sampling(const json_t *root, struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    const struct {
        const char *key;
        double min, max;
        float *to;
    } reals[] = {
        {"temperature", 0, 2, &ask->temperature},
        {"top_p", 0, 1, &ask->top_p},
        {"min_p", 0, 1, &ask->min_p},
        {"frequency_penalty", -2, 2, &ask->frequency_penalty},
        {"presence_penalty", -2, 2, &ask->presence_penalty},
        {"repetition_penalty", 0.01, 10, &ask->repetition_penalty},
    };
    int64_t top_k = 0;
    int64_t seed = -1;
    int rc;

    for (size_t i = 0; i < sizeof(reals) / sizeof(reals[0]); i++) {
        rc =
            dmk_field_real(root, "", reals[i].key, reals[i].min, reals[i].max, reals[i].to, reterr);
        if (rc < 0) {
            return rc;
        }
    }
    if (!(ask->top_p > 0)) {
        return dmk_api_bad(reterr, "top_p", "top_p must be above 0 and at most 1, not %g",
                           (double)ask->top_p);
    }
    rc = dmk_field_int(root, "", "top_k", -1, DMK_VOCAB_SIZE, &top_k, reterr);
    if (rc < 0) {
        return rc;
    }
    ask->top_k = top_k > 0 ? (uint32_t)top_k : 0; /* -1 and 0 both mean off */
    rc = dmk_field_int(root, "", "seed", 0, INT64_MAX, &seed, reterr);
    if (rc < 0) {
        return rc;
    }
    ask->has_seed = seed >= 0;
    ask->seed = ask->has_seed ? (uint64_t)seed : 0;
    return read_bias(root, ask, reterr);
}

int dmk_fields_common(const json_t *root, const struct dmk_api_limits *limits, struct dmk_ask *ask,
                      struct dmk_api_error *reterr)
{
    struct dmk_str salt = {0};
    int64_t n = 1, min_tokens = 0, priority = 0;
    int rc;

    if ((rc = read_model(root, ask, reterr)) < 0 || (rc = read_stream(root, ask, reterr)) < 0 ||
        (rc = read_sampling(root, ask, reterr)) < 0 || (rc = read_stop(root, ask, reterr)) < 0 ||
        (rc = read_stop_ids(root, ask, reterr)) < 0 ||
        (rc = dmk_field_int(root, "", "n", 1, limits->max_choices, &n, reterr)) < 0 ||
        (rc = dmk_field_int(root, "", "min_tokens", 0, INT32_MAX, &min_tokens, reterr)) < 0 ||
        (rc = dmk_field_bool(root, "", "ignore_eos", &ask->ignore_eos, reterr)) < 0 ||
        (rc = dmk_field_int(root, "", "priority", INT32_MIN, INT32_MAX, &priority, reterr)) < 0 ||
        (rc = dmk_field_str(root, "", "cache_salt", DMK_ASK_MAX_SALT_BYTES, &salt, reterr)) < 0) {
        return rc;
    }
    ask->n = (uint32_t)n;
    ask->min_tokens = (uint32_t)min_tokens;
    ask->priority = (int32_t)priority;
    if (salt.len > 0) {
        memcpy(ask->cache_salt, salt.data, salt.len);
        ask->cache_salt[salt.len] = '\0';
    }
    return 0;
}
