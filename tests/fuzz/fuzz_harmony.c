/* Fuzz target of the Harmony parser: any ids, any cut.
 *
 * Input: one byte of flags (1: tools allowed, 2: cut from outside), then three bytes a token, low first,
 * taken modulo a little more than the vocabulary. Checked: deltas are valid UTF-8, calls begin in order and
 * end once, a second parser says the same. The vocabulary is opened once. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/hash.h"
#include "common/chat/format.h"
#include "common/text/utf8.h"
#include "tests/fuzz/fuzz.h"

#define MAX_TOKENS 4096

static struct dmk_vocab *vocab;

struct seen {
    uint64_t hash; /* of all events */
    uint32_t n_begun, n_ended;
};

static void on_event(void *ud, const struct dmk_event *event)
{
    struct seen *seen = ud;
    const uint32_t head[] = {event->kind, event->call_index, event->token_index};

    dmk_assert(dmk_utf8_valid_prefix((const uint8_t *)event->text.data, event->text.len) ==
               event->text.len);
    seen->hash = dmk_hash64(head, sizeof(head), seen->hash);
    seen->hash = dmk_hash64(event->text.data, event->text.len, seen->hash);
    switch (event->kind) {
    case DMK_EVENT_REASONING:
    case DMK_EVENT_CONTENT:
        dmk_assert(event->text.len > 0);
        break;
    case DMK_EVENT_CALL_BEGIN:
        dmk_assert(event->call_index == seen->n_begun && event->name.len > 0);
        dmk_assert(dmk_utf8_valid_prefix((const uint8_t *)event->name.data, event->name.len) ==
                   event->name.len);
        seen->n_begun++;
        break;
    case DMK_EVENT_CALL_DELTA:
        dmk_assert(event->call_index + 1 == seen->n_begun && event->text.len > 0);
        break;
    case DMK_EVENT_CALL_END:
        dmk_assert(event->call_index + 1 == seen->n_begun && seen->n_ended < seen->n_begun);
        seen->n_ended++;
        break;
    }
}

static void parse(const uint32_t *ids, size_t n, uint8_t flags, struct seen *ret_seen)
{
    const struct dmk_str name = dmk_str_from("search");
    const struct dmk_format *format = dmk_format_find("harmony");
    struct dmk_parse_result result;
    const struct dmk_parser_conf conf = {.vocab = vocab,
                                         .tool_names = &name,
                                         .n_tool_names = 1,
                                         .tools_allowed = flags & 1,
                                         .on_event = on_event,
                                         .ud = ret_seen};
    struct dmk_parser *parser = format->parser_new(&conf);

    if (!parser) {
        return;
    }
    for (size_t i = 0; i < n; i++) {
        format->parser_push(parser, ids[i]);
    }
    format->parser_end(parser, flags & 2, &result);
    format->parser_free(&parser);
    dmk_assert(result.n_calls == ret_seen->n_ended);
    dmk_assert((flags & 1) || ret_seen->n_begun == 0);
    dmk_assert((flags & 2) || result.n_calls == ret_seen->n_begun);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint32_t ids[MAX_TOKENS];
    struct seen first = {0}, second = {0};
    struct dmk_error error;
    size_t n = 0;

    if (!vocab && dmk_vocab_open(DMK_TEST_VOCAB, &vocab, &error) < 0) {
        (void)fprintf(stderr, "%s (./dev deps brings it)\n", error.text);
        abort();
    }
    for (size_t i = 1; i + 3 <= size && n < MAX_TOKENS; i += 3) {
        const uint32_t value =
            (uint32_t)data[i] | (uint32_t)data[i + 1] << 8 | (uint32_t)data[i + 2] << 16;

        ids[n++] = value % (DMK_VOCAB_SIZE + 2);
    }
    parse(ids, n, size ? data[0] : 0, &first);
    parse(ids, n, size ? data[0] : 0, &second);
    dmk_assert(first.hash == second.hash);
    return 0;
}
