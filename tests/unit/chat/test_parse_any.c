/* Properties of the parser that hold for any ids: good outputs, outputs with tokens changed, lost, doubled
 * and moved, and noise. The oracle is a walk over the ids that knows the marks and nothing of headers:
 *   - what was sent before the end of a part of the ids is what the whole sends first
 *   - text between a message mark and the next mark is in some field, whole
 *   - a header of several odd words that never became a message is not lost without a trace
 *   - no field holds a control token's spelling; each delta is valid UTF-8 (turn_event checks) */
#include "tests/unit/chat/chat_test.h"

#define SEED    20250628
#define ROUNDS  20000
#define MAX_IDS 200

#define NEXT "<|end|><|start|>assistant"

static const char *const outputs[] = {
    "<|channel|>analysis<|message|>we plan it" NEXT
    "<|channel|>final<|message|>The answer is four.<|return|>",
    "<|channel|>final<|message|>one two three<|return|>",
    "<|channel|>analysis<|message|>look" NEXT "<|channel|>commentary<|message|>I look it up." NEXT
    "<|channel|>commentary to=functions.search <|constrain|>json<|message|>{\"q\": \"x\"}<|call|>",
    " to=functions.search<|channel|>commentary json<|message|>{\"a\": 1}" NEXT
    "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
    "Sorry, I can not do that.<|return|>",
    "<|channel|>final Hello out there<|return|>",
    "<|channel|>comment<|message|>odd one" NEXT "<|channel|>analysis<|message|>hm hm<|return|>",
};

static const uint32_t marks[] = {200002, 200003, 200005, 200006, 200007, 200008,    200012,
                                 199998, 199999, 200014, 201087, 201088, UINT32_MAX};

#define N_OUTPUTS (sizeof(outputs) / sizeof(outputs[0]))
#define N_MARKS   (sizeof(marks) / sizeof(marks[0]))

struct list {
    uint32_t ids[MAX_IDS];
    size_t n;
};

static bool is_ascii(const struct fixture *f, uint32_t id)
{
    const struct dmk_bytes bytes = dmk_token_bytes(f->vocab, id);

    for (size_t i = 0; i < bytes.len; i++) {
        if (bytes.data[i] >= 0x80 || bytes.data[i] == '<') {
            return false;
        }
    }
    return bytes.len > 0;
}

/* An ordinary token; ascii: one without '<', so that texts can be found again. */
static uint32_t some_token(const struct fixture *f, struct random *r, bool ascii)
{
    uint32_t id;

    do {
        id = random_below(r, DMK_TOKEN_FIRST_SPECIAL);
    } while (ascii && !is_ascii(f, id));
    return id;
}

static void mutate(const struct fixture *f, struct random *r, bool ascii, struct list *l)
{
    const size_t at = l->n ? random_below(r, (uint32_t)l->n) : 0;
    const uint32_t id =
        random_below(r, 2) ? marks[random_below(r, N_MARKS)] : some_token(f, r, ascii);

    switch (random_below(r, 4)) {
    case 0: /* insert */
        if (l->n < MAX_IDS) {
            memmove(l->ids + at + 1, l->ids + at, (l->n - at) * sizeof(l->ids[0]));
            l->ids[at] = id;
            l->n++;
        }
        break;
    case 1: /* lose */
        if (l->n) {
            l->n--;
            memmove(l->ids + at, l->ids + at + 1, (l->n - at) * sizeof(l->ids[0]));
        }
        break;
    case 2: /* change */
        if (l->n) {
            l->ids[at] = id;
        }
        break;
    default: /* swap with another */
        if (l->n) {
            const size_t other = random_below(r, (uint32_t)l->n);
            const uint32_t was = l->ids[at];

            l->ids[at] = l->ids[other];
            l->ids[other] = was;
        }
    }
}

static void make_list(const struct fixture *f, struct random *r, bool ascii, struct list *l)
{
    struct dmk_ids ids;

    ids_of(f, outputs[random_below(r, N_OUTPUTS)], &ids);
    assert_true(ids.len < MAX_IDS);
    memcpy(l->ids, ids.data, ids.len * sizeof(*ids.data));
    l->n = ids.len;
    dmk_ids_fini(&ids);
    for (uint32_t i = random_below(r, 7); i > 0; i--) {
        mutate(f, r, ascii, l);
    }
}

static void make_noise(const struct fixture *f, struct random *r, struct list *l)
{
    l->n = random_below(r, 40);
    for (size_t i = 0; i < l->n; i++) {
        l->ids[i] = random_below(r, 3) ? some_token(f, r, false) : marks[random_below(r, N_MARKS)];
    }
}

/* ---- the oracle ---- */

enum place { IN_HEADER, IN_TEXT, BETWEEN, AFTER };

struct oracle {
    const struct fixture *f;
    const struct turn *turn;
    enum place place;
    struct dmk_buf run; /* text of the header or of the message */
};

static bool is_stop(uint32_t id)
{
    return id == DMK_TOKEN_RETURN || id == DMK_TOKEN_CALL || id == DMK_TOKEN_END_OF_TEXT;
}

static bool holds(const struct dmk_buf *field, const struct dmk_buf *text)
{
    return memmem(text_of(field), field->len, text->data, text->len) != NULL;
}

static bool is_shown(const struct turn *turn, const struct dmk_buf *text)
{
    bool shown = holds(&turn->reasoning, text) || holds(&turn->content, text);

    for (size_t i = 0; i < turn->n_calls && !shown; i++) {
        shown = holds(&turn->calls[i].arguments, text);
    }
    return shown;
}

/* More words than any header has, none of which a header could hold. */
static bool is_prose(const struct dmk_buf *text)
{
    static const char *const header_words[] = {"to=",        "functions", "assistant", "analysis",
                                               "commentary", "final",     "user",      "system",
                                               "developer",  "tool"};
    size_t n_words = 0;

    for (size_t i = 0; i < sizeof(header_words) / sizeof(header_words[0]); i++) {
        if (memmem(text_of(text), text->len, header_words[i], strlen(header_words[i]))) {
            return false;
        }
    }
    for (size_t i = 0; i < text->len; i++) {
        const bool space = strchr(" \t\n\v\f\r", text->data[i]) != NULL;

        n_words += !space && (i == 0 || strchr(" \t\n\v\f\r", text->data[i - 1]) != NULL);
    }
    return n_words >= 4;
}

static void leave_run(struct oracle *o, enum place next)
{
    if (o->place == IN_TEXT && o->run.len && !is_shown(o->turn, &o->run)) {
        fail_msg("lost text: \"%s\"; events:\n%s", text_of(&o->run), text_of(&o->turn->log));
    }
    if (o->place == IN_HEADER && is_prose(&o->run)) {
        assert_true(o->turn->log.len > 0);
    }
    dmk_buf_reset(&o->run);
    o->place = next;
}

static void check_fields(const struct fixture *f, const struct list *l, const struct turn *turn)
{
    struct oracle o = {.f = f, .turn = turn, .place = IN_HEADER};

    dmk_buf_init(&o.run, 0);
    for (size_t i = 0; i < l->n && o.place != AFTER; i++) {
        const uint32_t id = l->ids[i];
        const struct dmk_bytes bytes = dmk_token_bytes(f->vocab, id);

        if (is_stop(id)) {
            leave_run(&o, AFTER);
        } else if (id == DMK_TOKEN_END) {
            leave_run(&o, BETWEEN);
        } else if (id == DMK_TOKEN_START || (id == DMK_TOKEN_CHANNEL && o.place != IN_HEADER)) {
            leave_run(&o, IN_HEADER);
        } else if (id == DMK_TOKEN_MESSAGE && o.place != IN_TEXT) {
            dmk_buf_reset(&o.run);
            o.place = IN_TEXT;
        } else if (!dmk_token_is_special(id)) {
            o.place = o.place == BETWEEN ? IN_HEADER : o.place;
            dmk_buf_append(&o.run, bytes.data, bytes.len);
        }
    }
    leave_run(&o, AFTER);
    dmk_buf_fini(&o.run);
    assert_false(memmem(text_of(&turn->reasoning), turn->reasoning.len, "<|", 2));
    assert_false(memmem(text_of(&turn->content), turn->content.len, "<|", 2));
}

/* ---- the properties ---- */

static void print_list(const struct list *l)
{
    for (size_t i = 0; i < l->n; i++) {
        print_message("%u,", l->ids[i]);
    }
    print_message("\n");
}

/* What has been sent by the first n ids is what all of them send first. */
static void check_part(const struct fixture *f, const struct list *l, size_t n,
                       const struct turn *whole)
{
    struct turn part;
    struct dmk_parser *parser = parser_open(f, "search", &part);

    for (size_t i = 0; i < n; i++) {
        f->format->parser_push(parser, l->ids[i]);
    }
    assert_true(part.log.len <= whole->log.len);
    assert_memory_equal(text_of(&part.log), text_of(&whole->log), part.log.len);
    f->format->parser_end(parser, true, &part.result);
    f->format->parser_free(&parser);
    turn_fini(&part);
}

static void test_changed_outputs(void **state)
{
    const struct fixture *f = *state;
    struct random r = {.seed = SEED};

    print_message("seed %u\n", SEED);
    for (int round = 0; round < ROUNDS; round++) {
        const bool cut = round % 3 == 0;
        const char *tools = round % 2 ? "search" : NULL;
        struct list l;
        struct turn turn;

        make_list(f, &r, true, &l);
        parse_ids(f, l.ids, l.n, tools, cut, &turn);
        check_fields(f, &l, &turn);
        if (tools && round % 8 == 1) {
            check_part(f, &l, random_below(&r, (uint32_t)l.n + 1), &turn);
        }
        turn_fini(&turn);
    }
}

/* Only the last call may be open, and only when the output was cut. */
static void test_every_cut(void **state)
{
    const struct fixture *f = *state;

    for (size_t i = 0; i < N_OUTPUTS; i++) {
        struct dmk_ids ids;

        ids_of(f, outputs[i], &ids);
        for (size_t n = 0; n <= ids.len; n++) {
            struct list l = {.n = n};
            struct turn turn;

            memcpy(l.ids, ids.data, n * sizeof(*ids.data));
            parse_ids(f, l.ids, n, "search", true, &turn);
            for (size_t j = 0; j < turn.n_calls; j++) {
                assert_true(turn.calls[j].ended || n < ids.len);
            }
            check_fields(f, &l, &turn);
            turn_fini(&turn);
        }
        dmk_ids_fini(&ids);
    }
}

static void test_noise(void **state)
{
    const struct fixture *f = *state;
    struct random r = {.seed = SEED + 1};

    print_message("seed %u\n", SEED + 1);
    for (int round = 0; round < ROUNDS; round++) {
        struct list l;
        struct turn turn;

        if (round % 2) {
            make_noise(f, &r, &l);
        } else {
            make_list(f, &r, false, &l);
        }
        parse_ids(f, l.ids, l.n, round % 4 < 2 ? "search" : NULL, round % 3 == 0, &turn);
        if (turn.result.n_calls > turn.n_calls ||
            (turn.result.end == DMK_PARSE_TOOL_CALLS) != (turn.result.n_calls > 0)) {
            print_list(&l);
            fail();
        }
        turn_fini(&turn);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_changed_outputs),
        cmocka_unit_test(test_every_cut),
        cmocka_unit_test(test_noise),
    };

    return cmocka_run_group_tests(tests, fixture_open, fixture_close);
}
