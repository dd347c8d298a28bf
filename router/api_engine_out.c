/* Answers of vllm.grpc.engine.VllmEngine/Generate: token ids to messages. On the loop.
 *
 * In a stream every batch of tokens is a chunk and the end of a choice is a message without tokens; else a
 * choice is one message with all of its tokens. Either way the last message of a choice is its `complete`. */
#include <stdlib.h>
#include "proto/vllm_engine.pb-c.h"
#include "router/api.h"
#include "router/api_engine.h"

typedef Vllm__Grpc__Engine__GenerateResponse response_msg;

struct choice {
    struct dmk_engine_tokens tokens; /* whole answers: all of them */
    uint32_t n_tokens, last_id;
    char stop[DMK_ASK_MAX_STOP_BYTES + 1]; /* the stop string that ended it, or "" */
};

struct reply {
    struct dmk_sink sink;
    bool stream, logprobs;
    uint32_t n_prompt, n_cached;
    struct dmk_engine_tokens prompt; /* with log-probabilities, where those were asked for */
    uint32_t n;
    struct choice choices[];
};

static void *engine_reply_new(const struct dmk_reply_conf *conf)
{
    struct reply *r = calloc(1, sizeof(*r) + conf->n * sizeof(r->choices[0]));

    if (r) {
        r->sink = conf->sink;
        r->stream = conf->stream;
        r->logprobs = conf->logprobs;
        r->n_prompt = conf->n_prompt;
        r->n = conf->n;
    }
    return r;
}

static void engine_reply_free(void *reply)
{
    struct reply *r = reply;

    if (r) {
        for (uint32_t i = 0; i < r->n; i++) {
            dmk_engine_tokens_fini(&r->choices[i].tokens);
        }
        dmk_engine_tokens_fini(&r->prompt);
        free(r);
    }
}

static void send_response(struct reply *r, const response_msg *m)
{
    const size_t n = vllm__grpc__engine__generate_response__get_packed_size(m);
    uint8_t *bytes = malloc(n ? n : 1);

    if (bytes) { /* else the stream's end tells of the failure */
        (void)vllm__grpc__engine__generate_response__pack(m, bytes);
        r->sink.frame(r->sink.ud, NULL, (struct dmk_bytes){bytes, n});
        free(bytes);
    }
}

/* The prompt's tokens with their log-probabilities; the same for every choice. */
static void engine_prompt(void *reply, uint32_t choice, struct dmk_str text,
                          const struct dmk_lp *lps, size_t n_lps)
{
    struct reply *r = reply;

    (void)choice;
    (void)text;
    if (r->prompt.n == 0) {
        dmk_engine_tokens_add(&r->prompt, lps, n_lps, true);
    }
}

static void engine_tokens(void *reply, uint32_t choice, const struct dmk_lp *lps, size_t n_lps,
                          uint32_t n_cached, struct dmk_str stop)
{
    struct reply *r = reply;
    struct choice *c = &r->choices[choice];
    response_msg m = VLLM__GRPC__ENGINE__GENERATE_RESPONSE__INIT;
    Vllm__Grpc__Engine__GenerateStreamChunk chunk = VLLM__GRPC__ENGINE__GENERATE_STREAM_CHUNK__INIT;
    const bool first = c->n_tokens == 0;

    c->n_tokens += (uint32_t)n_lps;
    c->last_id = lps[n_lps - 1].id;
    r->n_cached = n_cached;
    if (stop.len > 0) {
        memcpy(c->stop, stop.data, stop.len);
        c->stop[stop.len] = '\0';
    }
    dmk_engine_tokens_add(&c->tokens, lps, n_lps, r->logprobs);
    if (!r->stream) {
        return;
    }
    chunk.token_ids = c->tokens.ids;
    chunk.n_token_ids = c->tokens.n;
    chunk.prompt_tokens = r->n_prompt;
    chunk.completion_tokens = c->n_tokens;
    chunk.cached_tokens = r->n_cached;
    chunk.index = choice;
    chunk.output_logprobs = r->logprobs ? dmk_engine_output_logprobs(&c->tokens) : NULL;
    chunk.input_logprobs = first && r->prompt.n > 0 ? dmk_engine_input_logprobs(&r->prompt) : NULL;
    m.response_case = VLLM__GRPC__ENGINE__GENERATE_RESPONSE__RESPONSE_CHUNK;
    m.chunk = &chunk;
    send_response(r, &m);
    free(chunk.output_logprobs);
    free(chunk.input_logprobs);
    c->tokens.n = 0;
}

static void engine_choice_end(void *reply, uint32_t choice, enum dmk_finish finish)
{
    struct reply *r = reply;
    struct choice *c = &r->choices[choice];
    static char length[] = "length", stop[] = "stop";
    response_msg m = VLLM__GRPC__ENGINE__GENERATE_RESPONSE__INIT;
    Vllm__Grpc__Engine__GenerateComplete done = VLLM__GRPC__ENGINE__GENERATE_COMPLETE__INIT;

    done.output_ids = c->tokens.ids;
    done.n_output_ids = c->tokens.n;
    done.finish_reason = finish == DMK_FINISH_LENGTH ? length : stop;
    done.prompt_tokens = r->n_prompt;
    done.completion_tokens = c->n_tokens;
    done.cached_tokens = r->n_cached;
    done.index = choice;
    if (!r->stream) {
        done.output_logprobs = r->logprobs ? dmk_engine_output_logprobs(&c->tokens) : NULL;
        done.input_logprobs = r->prompt.n > 0 ? dmk_engine_input_logprobs(&r->prompt) : NULL;
    }
    if (c->stop[0]) {
        done.matched_stop_case =
            VLLM__GRPC__ENGINE__GENERATE_COMPLETE__MATCHED_STOP_MATCHED_STOP_STR;
        done.matched_stop_str = c->stop;
    } else if (finish != DMK_FINISH_LENGTH && c->n_tokens > 0) {
        done.matched_stop_case =
            VLLM__GRPC__ENGINE__GENERATE_COMPLETE__MATCHED_STOP_MATCHED_TOKEN_ID;
        done.matched_token_id = c->last_id;
    }
    m.response_case = VLLM__GRPC__ENGINE__GENERATE_RESPONSE__RESPONSE_COMPLETE;
    m.complete = &done;
    send_response(r, &m);
    free(done.output_logprobs);
    free(done.input_logprobs);
    dmk_engine_tokens_fini(&c->tokens);
}

static void engine_end(void *reply, const struct dmk_usage *usage)
{
    (void)reply; /* every choice has said its own */
    (void)usage;
}

static void engine_error(const struct dmk_api_error *error, struct dmk_buf *out)
{
    dmk_buf_puts(out, error->text);
}

const struct dmk_dialect dmk_dialect_engine = {
    .name = "engine",
    .path = "/vllm.grpc.engine.VllmEngine/Generate",
    .http = false,
    .content_type = "application/grpc",
    .parse = dmk_engine_parse,
    .reply_new = engine_reply_new,
    .prompt = engine_prompt,
    .tokens = engine_tokens,
    .choice_end = engine_choice_end,
    .end = engine_end,
    .reply_free = engine_reply_free,
    .error = engine_error,
};
