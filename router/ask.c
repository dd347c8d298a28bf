/* Lifetime of a dialect-free request. Any one thread at a time. */
#include "router/ask.h"

#include <stdlib.h>

void dmk_ask_init(struct dmk_ask *ask, size_t max_prompt_tokens)
{
    *ask = (struct dmk_ask){
        .temperature = 1.0f,
        .top_p = 1.0f,
        .repetition_penalty = 1.0f,
        .n = 1,
        .parallel_calls = true,
    };
    dmk_buf_init(&ask->text, 0);
    dmk_buf_init(&ask->constraint, 0);
    dmk_buf_init(&ask->note, 0);
    dmk_ids_init(&ask->prompt, max_prompt_tokens);
}

void dmk_ask_fini(struct dmk_ask *ask)
{
    if (ask->shares) {
        dmk_buf_fini(&ask->text);
        dmk_ids_fini(&ask->prompt);
        *ask = (struct dmk_ask){0};
        return;
    }
    dmk_conv_free(&ask->conv);
    dmk_buf_fini(&ask->text);
    dmk_buf_fini(&ask->constraint);
    dmk_buf_fini(&ask->note);
    dmk_ids_fini(&ask->prompt);
    for (size_t i = 0; i < ask->n_more; i++) {
        dmk_buf_fini(&ask->more[i].text);
        dmk_ids_fini(&ask->more[i].ids);
    }
    free(ask->more);
    free(ask->bias);
    for (size_t i = 0; i < ask->n_stops; i++) {
        free((char *)ask->stops[i].data);
    }
    *ask = (struct dmk_ask){0};
}

bool dmk_ask_is_prompt_only(const struct dmk_ask *ask)
{
    return ask->has_max_tokens && ask->max_tokens == 0;
}

bool dmk_ask_scores_prompt(const struct dmk_ask *ask)
{
    return ask->echo && ask->logprobs;
}

struct dmk_ask_prompt *dmk_ask_add_prompt(struct dmk_ask *ask)
{
    struct dmk_ask_prompt *more;

    if (ask->n_more + 1 >= DMK_ASK_MAX_PROMPTS) {
        return NULL;
    }
    more = realloc(ask->more, (ask->n_more + 1) * sizeof(*more));
    if (!more) {
        return NULL;
    }
    ask->more = more;
    more = &ask->more[ask->n_more++];
    dmk_buf_init(&more->text, 0);
    dmk_ids_init(&more->ids, ask->prompt.max_len);
    return more;
}

void dmk_ask_split(struct dmk_ask *of, size_t i, struct dmk_ask *part)
{
    *part = *of;
    part->shares = true;
    part->more = NULL;
    part->n_more = 0;
    part->text = of->more[i].text;
    part->prompt = of->more[i].ids;
    dmk_buf_init(&of->more[i].text, 0);
    dmk_ids_init(&of->more[i].ids, 0);
}

int dmk_ask_add_stop(struct dmk_ask *ask, struct dmk_str stop)
{
    char *copy;

    if (ask->n_stops == DMK_ASK_MAX_STOPS || stop.len == 0 || stop.len > DMK_ASK_MAX_STOP_BYTES) {
        return -DMK_EFULL;
    }
    copy = malloc(stop.len);
    if (!copy) {
        return -DMK_ENOMEM;
    }
    memcpy(copy, stop.data, stop.len);
    ask->stops[ask->n_stops++] = (struct dmk_str){copy, stop.len};
    return 0;
}

int dmk_ask_add_bias(struct dmk_ask *ask, uint32_t id, float value)
{
    if (ask->n_bias == DMK_ASK_MAX_BIAS) {
        return -DMK_EFULL;
    }
    if (!ask->bias) {
        ask->bias = calloc(DMK_ASK_MAX_BIAS, sizeof(*ask->bias));
        if (!ask->bias) {
            return -DMK_ENOMEM;
        }
    }
    ask->bias[ask->n_bias++] = (struct dmk_ask_bias){id, value};
    return 0;
}
