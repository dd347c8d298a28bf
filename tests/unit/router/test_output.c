/* Token ids to events of an answer, without workers: any cut of the ids into messages says the same. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include "common/base/hash.h"
#include "common/base/rng.h"
#include "router/request_internal.h"

struct fixture {
    struct dmk_loop *loop;
    struct dmk_vocab *vocab;
    struct dmk_stats stats;
    struct dmk_router_conf conf;
    struct dmk_requests all;
};

static int set_up(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    struct dmk_error error;

    if (dmk_vocab_open(DMK_TEST_VOCAB, &f->vocab, &error) < 0 ||
        dmk_loop_new(&f->loop, &error) < 0) {
        fail_msg("%s", error.text);
    }
    assert_int_equal(dmk_stats_init(&f->stats, "m"), 0);
    f->all.conf = (struct dmk_requests_conf){
        .loop = f->loop, .conf = &f->conf, .vocab = f->vocab, .stats = &f->stats};
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;

    dmk_buf_fini(&f->all.text);
    free(f->all.lps);
    dmk_stats_fini(&f->stats);
    dmk_loop_free(&f->loop);
    dmk_vocab_close(&f->vocab);
    free(f);
    return 0;
}

/* What an answer said, as one text: events of a kind are joined. */
struct heard {
    struct dmk_buf text;
    int last; /* kind of the last event, or -1 */
    struct dmk_buf lp_bytes;
};

static void hear_event(void *reply, uint32_t choice, const struct dmk_event *e,
                       const struct dmk_lp *lps, size_t n_lps)
{
    struct heard *h = reply;
    static const char marks[] = "RC({)";

    (void)choice;
    if ((int)e->kind != h->last || e->kind == DMK_EVENT_CALL_BEGIN) {
        dmk_buf_printf(&h->text, "[%c%.*s]", marks[e->kind],
                       e->kind == DMK_EVENT_CALL_BEGIN ? (int)e->name.len : 0, e->name.data);
    }
    h->last = (int)e->kind;
    if (e->kind != DMK_EVENT_CALL_BEGIN && e->kind != DMK_EVENT_CALL_END) {
        dmk_buf_append_str(&h->text, e->text);
    }
    for (size_t i = 0; i < n_lps; i++) {
        assert_int_equal(e->kind, DMK_EVENT_CONTENT);
        dmk_buf_append(&h->lp_bytes, lps[i].bytes.data, lps[i].bytes.len);
    }
}

static void hear_end(void *reply, uint32_t choice, enum dmk_finish finish)
{
    struct heard *h = reply;

    (void)choice;
    dmk_buf_printf(&h->text, "[%s]", dmk_finish_name(finish));
}

static const struct dmk_dialect ear = {.name = "ear", .event = hear_event, .choice_end = hear_end};

/* Plays ids in messages of 1 to max_cut ids; seed 0 = one id each. */
static void play(struct fixture *f, const struct dmk_ids *ids, const char *stop, bool one_call,
                 uint64_t seed, struct heard *h)
{
    struct dmk_request r = {.lead = &r, .all = &f->all, .dialect = &ear, .reply = h};
    Damask__V1__Finished finished = DAMASK__V1__FINISHED__INIT;
    float logprobs[16] = {0};

    *h = (struct heard){.last = -1};
    dmk_ask_init(&r.ask, 0);
    r.format = dmk_format_find("harmony");
    r.ask.logprobs = true;
    r.ask.parallel_calls = !one_call;
    r.ask.conv = dmk_conv_new(1 << 16);
    dmk_conv_add_tool(r.ask.conv)->name = dmk_str_from("a");
    if (stop) {
        assert_int_equal(dmk_ask_add_stop(&r.ask, dmk_str_from(stop)), 0);
    }
    assert_int_equal(dmk_request__output_init(&r), 0);
    for (size_t at = 0; at < ids->len && r.n_ended == 0;) {
        Damask__V1__Tokens t = DAMASK__V1__TOKENS__INIT;
        size_t n = seed ? 1 + dmk_rng_u64(seed, 0, at) % 8 : 1;

        n = n < ids->len - at ? n : ids->len - at;
        t.first_index = (uint32_t)at;
        t.ids = ids->data + at;
        t.logprobs = logprobs;
        t.n_ids = t.n_logprobs = n;
        assert_true(dmk_request__tokens(&r, &t));
        at += n;
    }
    finished.n_tokens = (uint32_t)ids->len;
    finished.reason = DAMASK__V1__FINISH_REASON__FINISH_STOP;
    assert_true(dmk_request__finished(&r, &finished));
    assert_int_equal(r.n_ended, 1);
    dmk_request__output_fini(&r);
    dmk_ask_fini(&r.ask);
}

static void forget(struct heard *h)
{
    dmk_buf_fini(&h->text);
    dmk_buf_fini(&h->lp_bytes);
}

static const struct {
    const char *text;
    const char *stop;
    bool one_call;
    const char *want;
    const char *lps;
} rows[] = {
    {"<|channel|>analysis<|message|>write a "
     "song<|end|><|start|>assistant<|channel|>final<|message|>"
     "La la song la<|return|>",
     "song", false, "[R]write a song[C]La la [stop]",
     /* The token of the last blank also holds the stop string. */
     "La la song"},
    {"<|channel|>final<|message|>Hi \xf0\x9f\x92\x96!<|return|>", NULL, false,
     "[C]Hi \xf0\x9f\x92\x96![stop]", "Hi \xf0\x9f\x92\x96!"},
    {"<|channel|>final<|message|>one two three<|return|>", "threesome", false,
     "[C]one two three[stop]", "one two three"},
    {"<|channel|>commentary to=functions.a "
     "json<|message|>{\"i\":1}<|end|><|start|>assistant<|channel|>"
     "commentary to=functions.a json<|message|>{\"i\":2}<|call|>",
     NULL, false, "[(a][{]{\"i\":1}[)][(a][{]{\"i\":2}[)][tool_calls]", ""},
    {"<|channel|>commentary to=functions.a "
     "json<|message|>{\"i\":1}<|end|><|start|>assistant<|channel|>"
     "commentary to=functions.a json<|message|>{\"i\":2}<|call|>",
     NULL, true, "[(a][{]{\"i\":1}[)][tool_calls]", ""},
};

static void test_any_cut_says_the_same(void **state)
{
    struct fixture *f = *state;
    struct dmk_bpe_scratch *scratch = dmk_bpe_scratch_new();
    const uint64_t seed = dmk_random_u64();

    printf("seed %llu\n", (unsigned long long)seed);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct dmk_ids ids;

        dmk_ids_init(&ids, 0);
        dmk_encode_with_specials(f->vocab, scratch, dmk_str_from(rows[i].text), &ids);
        for (uint64_t k = 0; k < 50; k++) {
            struct heard h;

            play(f, &ids, rows[i].stop, rows[i].one_call, k ? seed + k : 0, &h);
            assert_string_equal(h.text.data, rows[i].want);
            assert_string_equal(h.lp_bytes.data ? h.lp_bytes.data : "", rows[i].lps);
            forget(&h);
        }
        dmk_ids_fini(&ids);
    }
    dmk_bpe_scratch_free(&scratch);
}

static void test_gaps_are_refused(void **state)
{
    struct fixture *f = *state;
    struct heard h = {.last = -1};
    struct dmk_request r = {.lead = &r, .all = &f->all, .dialect = &ear, .reply = &h};
    Damask__V1__Tokens t = DAMASK__V1__TOKENS__INIT;
    Damask__V1__Finished finished = DAMASK__V1__FINISHED__INIT;
    uint32_t id = DMK_TOKEN_CHANNEL;

    dmk_ask_init(&r.ask, 0);
    r.format = dmk_format_find("harmony");
    assert_int_equal(dmk_request__output_init(&r), 0);
    t.ids = &id;
    t.n_ids = 1;
    t.choice = 1;
    assert_false(dmk_request__tokens(&r, &t));
    t.choice = 0;
    t.first_index = 1;
    assert_false(dmk_request__tokens(&r, &t));
    t.first_index = 0;
    assert_true(dmk_request__tokens(&r, &t));
    assert_false(dmk_request__tokens(&r, &t));
    finished.n_tokens = 2;
    assert_false(dmk_request__finished(&r, &finished));
    finished.choice = 1;
    assert_false(dmk_request__finished(&r, &finished));
    assert_int_equal(r.n_ended, 0);
    dmk_request__output_fini(&r);
    dmk_ask_fini(&r.ask);
    forget(&h);
}

static void test_names_from_outside(void **state)
{
    (void)state;
    assert_true(dmk_request_id_is_valid(dmk_str_from("a-Z.0:_")));
    assert_false(dmk_request_id_is_valid(dmk_str_from("")));
    assert_false(dmk_request_id_is_valid(dmk_str_from("a b")));
    assert_false(dmk_request_id_is_valid(dmk_str_from("a\nb")));
    assert_true(dmk_traceparent_is_valid(
        dmk_str_from("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")));
    assert_false(dmk_traceparent_is_valid(
        dmk_str_from("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0G")));
    assert_false(dmk_traceparent_is_valid(dmk_str_from("00-")));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_cut_says_the_same),
        cmocka_unit_test(test_gaps_are_refused),
        cmocka_unit_test(test_names_from_outside),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
