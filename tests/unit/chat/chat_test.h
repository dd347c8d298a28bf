/* What the tests of common/chat share: the vocabulary, opened once; a turn that collects a parser's events
 * the way a client joins deltas; texts with control tokens spelled out, as ids. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/buf.h"
#include "common/base/rng.h"
#include "common/chat/format.h"
#include "common/text/utf8.h"

#ifndef DMK_TEST_VOCAB
#define DMK_TEST_VOCAB ".deps/vocab" /* the build names the folder */
#endif
#define MAX_CALLS  64
#define MAX_DELTAS 4096

struct fixture {
    struct dmk_vocab *vocab;
    struct dmk_bpe_scratch *scratch;
    const struct dmk_format *format;
};

static inline int fixture_open(void **state)
{
    static struct fixture f;
    struct dmk_error error;

    if (dmk_vocab_open(DMK_TEST_VOCAB, &f.vocab, &error) < 0) {
        (void)fprintf(stderr, "%s (./dev deps brings it)\n", error.text);
        return -1;
    }
    f.scratch = dmk_bpe_scratch_new();
    f.format = dmk_format_find("harmony");
    *state = &f;
    return f.scratch && f.format ? 0 : -1;
}

static inline int fixture_close(void **state)
{
    struct fixture *f = *state;

    dmk_bpe_scratch_free(&f->scratch);
    dmk_vocab_close(&f->vocab);
    return 0;
}

/* The ids of text, where spellings of control tokens are control tokens. */
static inline void ids_of(const struct fixture *f, const char *text, struct dmk_ids *ids)
{
    dmk_ids_init(ids, 0);
    dmk_encode_with_specials(f->vocab, f->scratch, dmk_str_from(text), ids);
    assert_false(ids->failed);
}

struct call {
    char name[256], id[64];
    struct dmk_buf arguments;
    bool ended;
};

/* One parsed output, joined. */
struct turn {
    struct dmk_buf reasoning, content;
    struct call calls[MAX_CALLS];
    size_t n_calls;
    struct dmk_buf log; /* every event, one a line */
    struct dmk_parse_result result;
};

static inline void turn_event(void *ud, const struct dmk_event *event)
{
    struct turn *turn = ud;
    struct call *call = &turn->calls[event->call_index < MAX_CALLS ? event->call_index : 0];

    assert_int_equal(dmk_utf8_valid_prefix((const uint8_t *)event->text.data, event->text.len),
                     event->text.len);
    dmk_buf_printf(&turn->log, "%d %u %u %.*s|%.*s|%.*s\n", event->kind, event->token_index,
                   event->call_index, (int)event->text.len,
                   event->text.data ? event->text.data : "", (int)event->name.len,
                   event->name.data ? event->name.data : "", (int)event->call_id.len,
                   event->call_id.data ? event->call_id.data : "");
    switch (event->kind) {
    case DMK_EVENT_REASONING:
        assert_true(event->text.len > 0);
        dmk_buf_append_str(&turn->reasoning, event->text);
        break;
    case DMK_EVENT_CONTENT:
        assert_true(event->text.len > 0);
        dmk_buf_append_str(&turn->content, event->text);
        break;
    case DMK_EVENT_CALL_BEGIN:
        assert_int_equal(event->call_index, turn->n_calls);
        assert_true(turn->n_calls < MAX_CALLS && event->name.len > 0);
        turn->n_calls++;
        (void)snprintf(call->name, sizeof(call->name), "%.*s", (int)event->name.len,
                       event->name.data);
        (void)snprintf(call->id, sizeof(call->id), "%.*s", (int)event->call_id.len,
                       event->call_id.data);
        dmk_buf_init(&call->arguments, 0);
        break;
    case DMK_EVENT_CALL_DELTA:
        assert_int_equal(event->call_index + 1, turn->n_calls);
        assert_false(call->ended);
        assert_true(event->text.len > 0);
        dmk_buf_append_str(&call->arguments, event->text);
        break;
    case DMK_EVENT_CALL_END:
        assert_int_equal(event->call_index + 1, turn->n_calls);
        assert_false(call->ended);
        call->ended = true;
        break;
    }
}

static inline void turn_init(struct turn *turn)
{
    *turn = (struct turn){0};
    dmk_buf_init(&turn->reasoning, 0);
    dmk_buf_init(&turn->content, 0);
    dmk_buf_init(&turn->log, 0);
}

static inline void turn_fini(struct turn *turn)
{
    dmk_buf_fini(&turn->reasoning);
    dmk_buf_fini(&turn->content);
    dmk_buf_fini(&turn->log);
    for (size_t i = 0; i < turn->n_calls; i++) {
        dmk_buf_fini(&turn->calls[i].arguments);
    }
}

/* tools: names with one space between; NULL: calls are not allowed. */
static inline struct dmk_parser *parser_open(const struct fixture *f, const char *tools,
                                             struct turn *turn)
{
    struct dmk_str names[16];
    struct dmk_parser_conf conf = {.vocab = f->vocab,
                                   .tool_names = names,
                                   .tools_allowed = tools != NULL,
                                   .call_id_seed = 7,
                                   .on_event = turn_event,
                                   .ud = turn};

    while (tools && *tools && conf.n_tool_names < 16) {
        const size_t len = strcspn(tools, " ");

        names[conf.n_tool_names++] = (struct dmk_str){tools, len};
        tools += len + (tools[len] == ' ');
    }
    turn_init(turn);
    struct dmk_parser *parser = f->format->parser_new(&conf);

    assert_non_null(parser);
    return parser;
}

static inline void parse_ids(const struct fixture *f, const uint32_t *ids, size_t n,
                             const char *tools, bool cut, struct turn *turn)
{
    struct dmk_parser *parser = parser_open(f, tools, turn);

    for (size_t i = 0; i < n; i++) {
        f->format->parser_push(parser, ids[i]);
    }
    f->format->parser_end(parser, cut, &turn->result);
    f->format->parser_free(&parser);
    assert_null(parser);
}

static inline void parse_text(const struct fixture *f, const char *text, const char *tools,
                              bool cut, struct turn *turn)
{
    struct dmk_ids ids;

    ids_of(f, text, &ids);
    parse_ids(f, ids.data, ids.len, tools, cut, turn);
    dmk_ids_fini(&ids);
}

static inline const char *text_of(const struct dmk_buf *buf)
{
    return buf->data ? buf->data : "";
}

struct random {
    uint64_t seed, n;
};

static inline uint32_t random_below(struct random *r, uint32_t n)
{
    return (uint32_t)(dmk_rng_u64(r->seed, 0, r->n++) % n);
}
