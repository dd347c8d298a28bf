/* What a client asks for, free of any API dialect.
 *
 * A dialect's parse fills it on a pool thread; the request that owns it reads it on the loop
 * afterwards. Either `conv` is set (a conversation, rendered by the chat format) or it is NULL and
 * the prompt is raw: `text` to be encoded, or ids that stand in `prompt` already. */
#pragma once

#include "common/base/buf.h"
#include "common/chat/conv.h"
#include "common/text/tokenizer.h"

#define DMK_ASK_MAX_MODEL_BYTES 256
#define DMK_ASK_MAX_STOPS       4
#define DMK_ASK_MAX_STOP_BYTES  1024
#define DMK_ASK_MAX_STOP_IDS    16
#define DMK_ASK_MAX_CHOICES     128
#define DMK_ASK_MAX_PROMPTS     128
#define DMK_ASK_MAX_TOP         20
#define DMK_ASK_MAX_BIAS        1024
#define DMK_ASK_MAX_SALT_BYTES  256

struct dmk_ask_bias {
    uint32_t id;
    float value;
};

/* A further prompt of a request that has several. */
struct dmk_ask_prompt {
    struct dmk_buf text;
    struct dmk_ids ids;
};

struct dmk_ask {
    char model[DMK_ASK_MAX_MODEL_BYTES + 1];

    struct dmk_conv *conv;
    struct dmk_buf text;
    struct dmk_ids prompt;       /* rendered ids, or those that the client gave */
    struct dmk_ask_prompt *more; /* [n_more]: raw prompts besides the first */
    size_t n_more;
    bool shares; /* all but text and prompt belong to another ask */
    /* What the answer may be: a serialised automaton (common/grammar), empty when it is free. A dialect of
     * raw prompts fills it while it parses (router/constraint.h); for conversations it is made from conv. */
    struct dmk_buf constraint;

    float temperature, top_p, min_p;
    float frequency_penalty, presence_penalty, repetition_penalty;
    uint32_t top_k;
    bool has_seed;
    uint64_t seed; /* a negative one by its bits: -1 is UINT64_MAX, whatever API it came by */
    struct dmk_ask_bias *bias; /* [n_bias] */
    size_t n_bias;
    bool logprobs;
    uint32_t top_logprobs;

    uint32_t n;
    uint32_t best_of;    /* as given; dmk_fields_best_of makes n and n_shown of it */
    uint32_t n_shown;    /* of n, the best by mean log-probability; 0 = all */
    struct dmk_buf note; /* from a dialect's parse to its reply; means nothing to others */
    bool has_max_tokens; /* given explicitly: beyond the context it is an error, not clamped */
    uint32_t max_tokens; /* 0: no bound but the context; given: see dmk_ask_is_prompt_only */
    uint32_t min_tokens;
    bool ignore_eos;
    uint32_t stop_ids[DMK_ASK_MAX_STOP_IDS];
    size_t n_stop_ids;
    struct dmk_str stops[DMK_ASK_MAX_STOPS]; /* owned */
    size_t n_stops;
    int32_t priority;
    char cache_salt[DMK_ASK_MAX_SALT_BYTES + 1];

    bool stream;
    bool include_usage;
    bool parallel_calls; /* false: only the first tool call of a turn is kept, and ends it */
    bool echo;           /* raw prompts: the prompt stands before the answer */
    bool token_strs;     /* of a prompt that is only encoded: its tokens as text too */
};

/* Defaults of a request that names nothing. */
void dmk_ask_init(struct dmk_ask *ask, size_t max_prompt_tokens);
void dmk_ask_fini(struct dmk_ask *ask);

/* No answer is asked for, only the prompt back (echo): max_tokens was given as 0. Workers always sample a token:
 * it is no part of anything then. */
bool dmk_ask_is_prompt_only(const struct dmk_ask *ask);
/* Log-probabilities of the prompt are asked for: the decode worker computes all of it, whatever pages there are. */
bool dmk_ask_scores_prompt(const struct dmk_ask *ask);

/* One prompt more, empty; NULL: no memory, or more than DMK_ASK_MAX_PROMPTS. */
struct dmk_ask_prompt *dmk_ask_add_prompt(struct dmk_ask *ask);
/* Makes *part what `of` is, but for its prompt, which is the one of more[i] and moves over. `of` must
 * outlive it. */
void dmk_ask_split(struct dmk_ask *of, size_t i, struct dmk_ask *part);

/* Appends a copy of a stop string; -DMK_EFULL beyond the bounds, -DMK_ENOMEM. */
int dmk_ask_add_stop(struct dmk_ask *ask, struct dmk_str stop);
/* -DMK_EFULL beyond the bound. */
int dmk_ask_add_bias(struct dmk_ask *ask, uint32_t id, float value);
