/* Completions: the body of POST /v1/completions to raw prompts, text or token ids.
 *
 * Pure, on a pool thread. The answer's form is in api_completions_out.c. Prompt text is encoded as ordinary
 * text: spellings of control tokens stay text. Who wants control tokens gives ids. */
#include "router/api_completions.h"

#include <stdio.h>
#include "router/fields.h"
#include "router/structured.h"

static const struct dmk_field fields[] = {
    {"max_tokens", DMK_KIND_INT, 0, INT32_MAX, DMK_ASK_AT(max_tokens),
     .has_at = offsetof(struct dmk_ask, has_max_tokens),
     .about = "16 when absent; 0 only with echo, for the prompt alone."},
    {"logprobs", DMK_KIND_INT, 0, DMK_ASK_MAX_TOP, DMK_ASK_AT(top_logprobs),
     .has_at = offsetof(struct dmk_ask, logprobs),
     .about = "Log-probability of each token, and of this many of the likeliest."},
    {"echo", DMK_KIND_BOOL, 0, 0, DMK_ASK_AT(echo),
     .about = "The prompt stands before the answer; with logprobs its tokens have theirs."},
    {"best_of", DMK_KIND_INT, 1, DMK_ASK_MAX_CHOICES, DMK_ASK_AT(best_of),
     .about = "Samples this many choices and tells the n of the highest mean log-probability; at "
              "least n, and not with stream."},
};

static const struct dmk_field_refused refused[] = {
    {"suffix", ""},
    {"response_format", NULL},
    {"prompt_embeds", NULL},
    {"add_special_tokens", "false"},
};

const struct dmk_field_tables dmk_api_completions_tables = {
    .schema = "CompletionRequest",
    .fields = fields,
    .n_fields = sizeof(fields) / sizeof(fields[0]),
    .refused = refused,
    .n_refused = sizeof(refused) / sizeof(refused[0]),
    .samples = true,
};

static int read_ids(const json_t *list, struct dmk_ids *ids, const char *at,
                    struct dmk_api_error *reterr)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        int64_t id;

        if (!dmk_field_token(json_array_get(list, i), &id)) {
            return dmk_api_bad(reterr, at, "%s[%zu] must be a token id from 0 to %u", at, i,
                               DMK_VOCAB_SIZE - 1);
        }
        dmk_ids_push(ids, (uint32_t)id);
    }
    return 0;
}

static int read_prompt(const json_t *v, struct dmk_buf *text, struct dmk_ids *ids, const char *at,
                       struct dmk_api_error *reterr)
{
    if (json_is_string(v) && json_string_length(v) > 0) {
        dmk_buf_append_str(text, dmk_field_text(v));
        return text->failed ? dmk_api_fail(reterr, 413, NULL, "the prompt is too large") : 0;
    }
    if (json_is_array(v) && json_array_size(v) > 0) {
        return read_ids(v, ids, at, reterr);
    }
    return dmk_api_bad(reterr, at, "%s must be a text or a list of token ids, and not empty", at);
}

/* One prompt, or a list of them; a list that begins with a number is one prompt. */
static int read_prompts(const json_t *root, struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    const json_t *v = dmk_field_get(root, "prompt");
    const size_t n = json_array_size(v);
    char at[32];
    int rc;

    if (n == 0 || json_is_number(json_array_get(v, 0))) {
        return read_prompt(v, &ask->text, &ask->prompt, "prompt", reterr);
    }
    if (n > DMK_ASK_MAX_PROMPTS) {
        return dmk_api_bad(reterr, "prompt", "prompt must have at most %d prompts, not %zu",
                           DMK_ASK_MAX_PROMPTS, n);
    }
    rc = read_prompt(json_array_get(v, 0), &ask->text, &ask->prompt, "prompt[0]", reterr);
    for (size_t i = 1; i < n && rc == 0; i++) {
        struct dmk_ask_prompt *more = dmk_ask_add_prompt(ask);

        if (!more) {
            return dmk_api_fail(reterr, 500, "out_of_memory", "no memory for the prompts");
        }
        (void)snprintf(at, sizeof(at), "prompt[%zu]", i);
        rc = read_prompt(json_array_get(v, i), &more->text, &more->ids, at, reterr);
    }
    return rc;
}

static int check_choices(const struct dmk_api_limits *limits, struct dmk_ask *ask,
                         struct dmk_api_error *reterr)
{
    const int rc = dmk_fields_best_of(limits, ask, reterr);

    if (rc < 0) {
        return rc;
    }
    if (ask->n * (1 + ask->n_more) > limits->max_choices) {
        return dmk_api_bad(reterr, "prompt",
                           "%zu prompts with %u choices each are more than %u choices",
                           1 + ask->n_more, ask->n, limits->max_choices);
    }
    return 0;
}

static int parse_root(const json_t *root, const struct dmk_api_limits *limits, struct dmk_ask *ask,
                      struct dmk_api_error *reterr)
{
    int rc;

    ask->max_tokens = 16; /* what this API's documents say */
    if ((rc = dmk_fields_common(root, limits, ask, reterr)) < 0 ||
        (rc = dmk_fields_read(root, &dmk_api_completions_tables, ask, reterr)) < 0 ||
        (rc = read_prompts(root, ask, reterr)) < 0) {
        return rc;
    }
    if (dmk_ask_is_prompt_only(ask) && !ask->echo) {
        return dmk_api_bad(reterr, "max_tokens",
                           "max_tokens must be at least 1, not 0, unless echo asks for the prompt");
    }
    rc = check_choices(limits, ask, reterr);
    return rc < 0 ? rc
                  : dmk_structured_outputs(dmk_field_get(root, "structured_outputs"),
                                           DMK_CONSTRAIN_ALL, &ask->constraint, reterr);
}

int dmk_api_completions_parse(struct dmk_bytes body, const struct dmk_api_limits *limits,
                              struct dmk_ask *ask, struct dmk_api_error *reterr)
{
    json_t *root;
    int rc = dmk_fields_open(body, &root, reterr);

    if (rc == 0) {
        rc = parse_root(root, limits, ask, reterr);
        json_decref(root);
    }
    return rc;
}
