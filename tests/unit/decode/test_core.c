/* The decode core alone: whatever the company, the chunks, the pages and the interruptions, an answer is the
 * one that a request alone on an empty worker gets; and pages balance. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/rng.h"
#include "common/base/status.h"
#include "tests/support/cell.h"
#include "tests/support/shadow_engine.h"

enum { VOCAB = 300, MAX_PROMPT = 700 };

static const uint32_t lengths[] = {1, 2, 63, 64, 65, 66, 127, 128, 129, 200, 513};
enum { N_LENGTHS = sizeof(lengths) / sizeof(lengths[0]) };

static const struct dmk_sample_params seeded = {
    .temperature = 1, .top_p = 0.95f, .repetition_penalty = 1, .seed = 99, .logprobs = true};

struct bed {
    struct shadow_engine *engine;
    struct cell *cell;
};

static struct bed open_bed(uint32_t n_pages, uint32_t max_sequences, uint32_t chunk, bool reuse,
                           uint32_t dp)
{
    const struct shadow_conf shadow = {.n_layers = 4,
                                       .n_kv_heads = 2,
                                       .vocab = VOCAB,
                                       .tp = 1,
                                       .dp = dp,
                                       .n_full_pages = n_pages,
                                       .n_window_pages = 3 * max_sequences + 12,
                                       .seed = 5};
    struct bed bed = {.engine = shadow_engine_new(&shadow)};
    const struct cell_conf conf = {.decode = shadow_engine_port(bed.engine),
                                   .d_full_pages = n_pages,
                                   .d_window_pages = shadow.n_window_pages,
                                   .max_sequences = max_sequences,
                                   .max_context = 4096,
                                   .chunk_tokens = chunk,
                                   .no_reuse = !reuse};

    bed.cell = cell_new(&conf);
    return bed;
}

static void close_bed(struct bed *bed)
{
    assert_true(cell_settle(bed->cell, 10));
    assert_true(cell_check(bed->cell, true));
    cell_free(&bed->cell);
    shadow_engine_free(&bed->engine);
}

static void fill_prompt(uint32_t *ids, uint32_t n, uint64_t seed)
{
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (uint32_t)(dmk_rng_u64(seed, 3, i) % (VOCAB - 1));
    }
}

static uint32_t ask(struct bed *bed, uint32_t n_prompt, uint64_t seed, uint32_t max_tokens,
                    const struct dmk_sample_params *sampling)
{
    uint32_t ids[MAX_PROMPT];
    const struct dmk_decode_request r = {.prompt = ids,
                                         .n_prompt = n_prompt,
                                         .max_tokens = max_tokens,
                                         .sampling = sampling,
                                         .ignore_eos = true};

    fill_prompt(ids, n_prompt, seed);
    return cell_ask(bed->cell, &r);
}

/* What the request gets alone. */
static void solo(uint32_t n_prompt, uint64_t seed, uint32_t max_tokens,
                 const struct dmk_sample_params *sampling, struct cell_choice *ret)
{
    struct bed bed = open_bed(32, 1, 4096, false, 1);

    ask(&bed, n_prompt, seed, max_tokens, sampling);
    assert_true(cell_run(bed.cell, 2000));
    assert_false(bed.cell->answers[0].failed);
    *ret = bed.cell->answers[0].choices[0];
    close_bed(&bed);
}

static void assert_same(const struct cell_choice *got, const struct cell_choice *want)
{
    assert_true(got->finished);
    assert_int_equal(got->n, want->n);
    assert_memory_equal(got->ids, want->ids, want->n * sizeof(want->ids[0]));
    assert_memory_equal(got->logprobs, want->logprobs, want->n * sizeof(want->logprobs[0]));
}

static void company_and_chunks_change_nothing(void **state)
{
    static const uint32_t chunks[] = {1, 7, 64, 100, 4096};

    (void)state;
    for (uint32_t c = 0; c < sizeof(chunks) / sizeof(chunks[0]); c++) {
        struct bed bed = open_bed(160, 12, chunks[c], false, c == 2 ? 2 : 1);

        for (uint32_t i = 0; i < N_LENGTHS; i++) {
            ask(&bed, lengths[i], i, 20, i % 2 ? &seeded : NULL);
        }
        assert_true(cell_run(bed.cell, 5000));
        for (uint32_t i = 0; i < N_LENGTHS; i++) {
            struct cell_choice want;

            solo(lengths[i], i, 20, i % 2 ? &seeded : NULL, &want);
            assert_same(&bed.cell->answers[i].choices[0], &want);
        }
        close_bed(&bed);
    }
}

static void reuse_changes_nothing(void **state)
{
    struct bed bed = open_bed(160, 4, 100, true, 1);
    uint64_t before, repeated;

    (void)state;
    for (uint32_t round = 0; round < 2; round++) {
        before = shadow_engine_tokens(bed.engine);
        for (uint32_t i = 0; i < N_LENGTHS; i++) {
            struct cell_choice want;
            const uint32_t a = ask(&bed, lengths[i], 77, 70, NULL); /* prompts share their heads */

            assert_true(cell_run(bed.cell, 5000));
            solo(lengths[i], 77, 70, NULL, &want);
            assert_same(&bed.cell->answers[a].choices[0], &want);
            if (round == 1 && lengths[i] > 64) {
                assert_int_equal(bed.cell->answers[a].have, (lengths[i] - 1) / 64 * 64);
                assert_int_equal(bed.cell->answers[a].choices[0].n_cached,
                                 (lengths[i] - 1) / 64 * 64);
            }
        }
        repeated = shadow_engine_tokens(bed.engine) - before;
    }
    assert_true(repeated < N_LENGTHS * (70 + 64));
    dmk_decode_flush_cache(bed.cell->decode);
    assert_int_equal(dmk_decode_load(bed.cell->decode).full.free, 160);
    close_bed(&bed);
}

/* An answer's own pages serve a prompt that goes on with it. */
static void answers_are_reused(void **state)
{
    struct bed bed = open_bed(160, 4, 100, true, 1);
    uint32_t ids[MAX_PROMPT];
    struct dmk_decode_request r = {
        .prompt = ids, .n_prompt = 30, .max_tokens = 200, .ignore_eos = true};
    struct cell_answer *a = bed.cell->answers;

    (void)state;
    fill_prompt(ids, 30, 4);
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 500));
    memcpy(ids + 30, a[0].choices[0].ids, 190 * sizeof(ids[0]));
    r.n_prompt = 220;
    r.max_tokens = 10;
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 500));
    assert_int_equal(a[1].have, 192);
    assert_memory_equal(a[1].choices[0].ids, a[0].choices[0].ids + 190, 10 * sizeof(ids[0]));
    close_bed(&bed);
}

/* A reservation covers 1024 tokens of an answer: four answers of 1200 outgrow 70 pages. */
static void preemption_changes_nothing(void **state)
{
    (void)state;
    for (uint32_t reuse = 0; reuse < 2; reuse++) {
        struct bed bed = open_bed(70, 6, 64, reuse != 0, 1);
        uint32_t n_preempted = 0;

        for (uint32_t i = 0; i < 4; i++) {
            ask(&bed, 10 + 13 * i, 50 + i, 1200, i % 2 ? &seeded : NULL);
        }
        assert_true(cell_run(bed.cell, 8000));
        for (uint32_t i = 0; i < 4; i++) {
            struct cell_choice want;

            solo(10 + 13 * i, 50 + i, 1200, i % 2 ? &seeded : NULL, &want);
            assert_same(&bed.cell->answers[i].choices[0], &want);
            n_preempted += bed.cell->answers[i].choices[0].n_preemptions;
        }
        assert_true(n_preempted > 0);
        /* The oldest is never the one that gives way. */
        assert_int_equal(bed.cell->answers[0].choices[0].n_preemptions, 0);
        close_bed(&bed);
    }
}

/* While a preempted sequence waits, nobody new takes the pages it waits for. */
static void preempted_sequences_come_before_new_requests(void **state)
{
    struct bed bed = open_bed(70, 6, 64, false, 1);

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        ask(&bed, 10 + 13 * i, 50 + i, 1200, NULL);
    }
    while (dmk_decode_load(bed.cell->decode).n_waiting == 0) {
        cell_turn(bed.cell);
        assert_true(bed.cell->n_turns < 3000);
    }
    const uint32_t late = ask(&bed, 5, 1, 4, NULL);
    assert_true(bed.cell->answers[late].failed);
    assert_int_equal(bed.cell->answers[late].code, DMK_FAILURE_FULL);
    assert_true(bed.cell->answers[late].retry_after_ms > 0);
    for (uint32_t i = 0; i < 4; i++) {
        cell_cancel(bed.cell, i);
    }
    close_bed(&bed);
}

static void choices_share_a_prompt(void **state)
{
    struct bed bed = open_bed(60, 8, 64, true, 1);
    uint32_t ids[MAX_PROMPT];
    struct dmk_decode_request r = {
        .prompt = ids, .n_prompt = 200, .max_tokens = 90, .ignore_eos = true, .n = 3};
    struct cell_answer *a = bed.cell->answers;
    struct cell_choice want;

    (void)state;
    fill_prompt(ids, 200, 6);
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 1000));
    assert_int_equal(a[0].n_finished, 3);
    solo(200, 6, 90, NULL, &want);
    for (uint32_t c = 0; c < 3; c++) {
        assert_same(&a[0].choices[c], &want);
    }
    /* The prompt was computed once. */
    assert_true(shadow_engine_tokens(bed.engine) < 200 + 3 * 92);
    r.sampling = &seeded;
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 1000));
    solo(200, 6, 90, &seeded, &want);
    assert_same(&a[1].choices[0], &want);
    assert_memory_not_equal(a[1].choices[1].ids, want.ids, sizeof(want.ids[0]) * 90);
    assert_memory_not_equal(a[1].choices[1].ids, a[1].choices[2].ids, sizeof(want.ids[0]) * 90);
    close_bed(&bed);
}

static void scores_equal_what_decoding_said(void **state)
{
    static const uint32_t chunks[] = {5, 64, 4096};
    uint32_t ids[MAX_PROMPT];
    float first[MAX_PROMPT];

    (void)state;
    for (uint32_t c = 0; c < 3; c++) {
        struct bed bed = open_bed(60, 2, chunks[c], true, 1);
        struct dmk_decode_request r = {
            .prompt = ids, .n_prompt = 130, .max_tokens = 80, .ignore_eos = true};
        const struct cell_answer *a = bed.cell->answers;

        fill_prompt(ids, 130, 8);
        cell_ask(bed.cell, &r);
        assert_true(cell_run(bed.cell, 1000));
        memcpy(ids + 130, a[0].choices[0].ids, 80 * sizeof(ids[0]));
        r.n_prompt = 210;
        r.max_tokens = 3;
        r.echo_logprobs = true;
        cell_ask(bed.cell, &r);
        assert_true(cell_run(bed.cell, 1000));
        assert_int_equal(a[1].have, 0);
        assert_int_equal(a[1].n_scores, 209);
        assert_memory_equal(a[1].scores + 129, a[0].choices[0].logprobs, 80 * sizeof(float));
        if (c == 0) {
            memcpy(first, a[1].scores, 209 * sizeof(float));
        }
        assert_memory_equal(a[1].scores, first, 209 * sizeof(float));
        close_bed(&bed);
    }
}

static void answers_end_where_they_must(void **state)
{
    struct bed bed = open_bed(64, 4, 64, true, 1);
    uint32_t ids[MAX_PROMPT], stops[2];
    struct dmk_decode_request r = {
        .prompt = ids, .n_prompt = 20, .max_tokens = 50, .ignore_eos = true, .stop_ids = stops};
    const struct cell_answer *a = bed.cell->answers;
    uint32_t first = 0;

    (void)state;
    fill_prompt(ids, 20, 9);
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 200));
    assert_int_equal(a[0].choices[0].n, 50);
    assert_false(a[0].choices[0].stopped);
    stops[0] = a[0].choices[0].ids[30];
    r.n_stop_ids = 1;
    while (a[0].choices[0].ids[first] != stops[0]) {
        first++;
    }
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 200));
    assert_true(a[1].choices[0].stopped);
    assert_int_equal(a[1].choices[0].n, first + 1);
    assert_int_equal(a[1].choices[0].ids[first], stops[0]);
    r.min_tokens = first + 1; /* the stop id can not be picked where it would be */
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 200));
    assert_true(a[2].choices[0].n > first + 1);
    assert_memory_equal(a[2].choices[0].ids, a[1].choices[0].ids, first * sizeof(ids[0]));
    for (uint32_t i = 0; i <= first; i++) {
        assert_int_not_equal(a[2].choices[0].ids[i], stops[0]);
    }
    close_bed(&bed);

    /* The context's end: one page of 64 positions. */
    const struct shadow_conf shadow = {2, 1, VOCAB, 1, 1, 1, 12, 5};
    struct shadow_engine *engine = shadow_engine_new(&shadow);
    const struct cell_conf conf = {.decode = shadow_engine_port(engine),
                                   .d_full_pages = 1,
                                   .d_window_pages = 12,
                                   .max_sequences = 1,
                                   .max_context = 4096,
                                   .chunk_tokens = 64};
    struct cell *cell = cell_new(&conf);
    const struct dmk_decode_request full = {
        .prompt = ids, .n_prompt = 20, .max_tokens = 5000, .ignore_eos = true};

    assert_int_equal(dmk_decode_max_context(cell->decode), 64);
    cell_ask(cell, &full);
    assert_true(cell_run(cell, 200));
    assert_int_equal(cell->answers[0].choices[0].n, 44);
    assert_false(cell->answers[0].choices[0].stopped);
    cell_free(&cell);
    shadow_engine_free(&engine);
}

static void expect_refusal(struct bed *bed, const struct dmk_decode_request *r,
                           enum dmk_failure code)
{
    const uint32_t i = cell_ask(bed->cell, r);

    assert_true(bed->cell->answers[i].failed);
    assert_int_equal(bed->cell->answers[i].code, code);
    assert_true(strlen(bed->cell->answers[i].text) > 10);
}

static void refusals(void **state)
{
    struct bed bed = open_bed(40, 2, 64, true, 1);
    uint32_t ids[40 * 64];
    struct dmk_sample_params biased = seeded;
    const uint32_t bad_id = VOCAB;
    const float bias = 1;
    struct dmk_decode_request r = {.prompt = ids, .n_prompt = 20, .max_tokens = 5};

    (void)state;
    fill_prompt(ids, 40 * 64, 9);
    r.n_prompt = 0;
    expect_refusal(&bed, &r, DMK_FAILURE_INVALID);
    r.n_prompt = 40 * 64;
    expect_refusal(&bed, &r, DMK_FAILURE_INVALID);
    r.n_prompt = 20;
    ids[3] = VOCAB;
    expect_refusal(&bed, &r, DMK_FAILURE_INVALID);
    ids[3] = 1;
    r.n = 3; /* more choices than sequences */
    expect_refusal(&bed, &r, DMK_FAILURE_INVALID);
    r.n = 1;
    biased.n_bias = 1;
    biased.bias_ids = &bad_id;
    biased.bias_values = &bias;
    r.sampling = &biased;
    expect_refusal(&bed, &r, DMK_FAILURE_INVALID);
    biased = seeded;
    biased.temperature = NAN;
    expect_refusal(&bed, &r, DMK_FAILURE_INVALID);
    r.sampling = NULL;
    r.stop_ids = &bad_id;
    r.n_stop_ids = 1;
    expect_refusal(&bed, &r, DMK_FAILURE_INVALID);
    r.n_stop_ids = 0;
    r.n = 2; /* 20 + 1024 tokens twice: 34 pages; with 1900 more of a prompt never */
    r.max_tokens = 2000;
    r.n_prompt = 600;
    expect_refusal(&bed, &r, DMK_FAILURE_INVALID);
    r.n_prompt = 20;
    cell_ask(bed.cell, &r);
    r.n = 1;
    expect_refusal(&bed, &r, DMK_FAILURE_FULL); /* no sequence is left */
    cell_cancel(bed.cell, bed.cell->n_answers - 2);
    r.n_prompt = 600;
    r.max_tokens = 1024; /* 26 pages */
    cell_ask(bed.cell, &r);
    ids[0]++;
    expect_refusal(&bed, &r, DMK_FAILURE_FULL); /* no pages are left */
    cell_cancel(bed.cell, bed.cell->n_answers - 2);
    dmk_decode_drain(bed.cell->decode);
    expect_refusal(&bed, &r, DMK_FAILURE_DRAINING);
    close_bed(&bed);
}

static void a_cancel_in_the_middle_of_a_step(void **state)
{
    struct bed bed = open_bed(40, 4, 64, true, 1);
    struct dmk_decode_step *step;

    (void)state;
    ask(&bed, 300, 1, 50, NULL);
    ask(&bed, 30, 2, 50, NULL);
    for (uint32_t t = 0; t < 3; t++) {
        cell_turn(bed.cell);
    }
    step = dmk_decode_plan(bed.cell->decode, bed.cell->now_ns);
    assert_non_null(step);
    assert_null(dmk_decode_plan(bed.cell->decode, bed.cell->now_ns));
    cell_cancel(bed.cell, 0);
    cell_cancel(bed.cell, 0);
    dmk_decode_router_gone(bed.cell->decode, 0, bed.cell->now_ns);
    bed.cell->answers[1].over = bed.cell->answers[1].cancelled = true;
    assert_true(dmk_decode_load(bed.cell->decode).full.leased > 0); /* the step still writes */
    dmk_decode_run(step);
    dmk_decode_done(bed.cell->decode, step, bed.cell->now_ns);
    assert_int_equal(dmk_decode_load(bed.cell->decode).full.leased, 0);
    close_bed(&bed);
}

enum { MAX_ROWS = 64 };

/* The shadow engine, but for the tokens: it notes whose rows it is asked for. */
static struct {
    struct dmk_engine_port shadow;
    float logits[MAX_ROWS * VOCAB];
    uint32_t n_prompt, n_ids;
} watched;

static int watched_step(void *engine, const struct dmk_step *step)
{
    struct dmk_step s = *step;

    s.logits = watched.logits;
    return watched.shadow.step(engine, &s);
}

static uint32_t watched_pick(void *engine, const struct dmk_engine_pick *pick)
{
    (void)engine;
    watched.n_prompt = pick->n_prompt;
    watched.n_ids = pick->n_ids;
    return 1;
}

/* What a step in flight reads of a request stays as it is when the request leaves and others come. */
static void a_step_reads_its_own_requests(void **state)
{
    struct bed bed = open_bed(40, 4, 64, true, 1);
    struct cell_conf conf = bed.cell->conf;
    struct dmk_decode_step *step;

    (void)state;
    cell_free(&bed.cell);
    watched.shadow = conf.decode;
    conf.decode.step = watched_step;
    conf.decode.pick = watched_pick;
    conf.decode.samples = false;
    bed.cell = cell_new(&conf);
    ask(&bed, 10, 1, 50, NULL);
    for (uint32_t t = 0; t < 3; t++) {
        cell_turn(bed.cell);
    }
    step = dmk_decode_plan(bed.cell->decode, bed.cell->now_ns);
    assert_non_null(step);
    cell_cancel(bed.cell, 0);
    for (uint32_t i = 0; i < 4; i++) { /* as many as there may be */
        ask(&bed, 100 + i, 2 + i, 5, NULL);
        assert_false(bed.cell->answers[1 + i].failed);
    }
    dmk_decode_run(step);
    assert_int_equal(watched.n_prompt, 10);
    assert_true(watched.n_ids > 10 && watched.n_ids < 20);
    dmk_decode_done(bed.cell->decode, step, bed.cell->now_ns);
    assert_true(cell_run(bed.cell, 100));
    close_bed(&bed);
}

static void a_failed_step_fails_its_requests(void **state)
{
    struct bed bed = open_bed(40, 4, 64, true, 1);

    (void)state;
    ask(&bed, 300, 1, 50, NULL);
    shadow_engine_fail(bed.engine, 1, -DMK_EIO);
    assert_true(cell_run(bed.cell, 10));
    assert_true(bed.cell->answers[0].failed);
    assert_int_equal(bed.cell->answers[0].code, DMK_FAILURE_INTERNAL);
    /* The device is not trusted any more. */
    ask(&bed, 30, 2, 5, NULL);
    assert_true(bed.cell->answers[1].failed);
    close_bed(&bed);
}

/* A request whose biases forbid every token fails alone, with a sentence. */
static void no_token_left_fails_the_request(void **state)
{
    struct bed bed = open_bed(40, 4, 64, true, 1);
    struct dmk_sample_params none = seeded;
    uint32_t ids[VOCAB];
    float never[VOCAB];

    (void)state;
    for (uint32_t i = 0; i < VOCAB; i++) {
        ids[i] = i;
        never[i] = -INFINITY;
    }
    none.n_bias = VOCAB;
    none.bias_ids = ids;
    none.bias_values = never;
    ask(&bed, 100, 1, 5, &seeded);
    ask(&bed, 100, 2, 5, &none);
    assert_true(cell_run(bed.cell, 100));
    assert_false(bed.cell->answers[0].failed);
    assert_true(bed.cell->answers[1].failed);
    assert_int_equal(bed.cell->answers[1].code, DMK_FAILURE_INTERNAL);
    assert_non_null(strstr(bed.cell->answers[1].text, "no token"));
    close_bed(&bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(company_and_chunks_change_nothing),
        cmocka_unit_test(reuse_changes_nothing),
        cmocka_unit_test(answers_are_reused),
        cmocka_unit_test(preemption_changes_nothing),
        cmocka_unit_test(preempted_sequences_come_before_new_requests),
        cmocka_unit_test(choices_share_a_prompt),
        cmocka_unit_test(scores_equal_what_decoding_said),
        cmocka_unit_test(answers_end_where_they_must),
        cmocka_unit_test(refusals),
        cmocka_unit_test(a_cancel_in_the_middle_of_a_step),
        cmocka_unit_test(a_step_reads_its_own_requests),
        cmocka_unit_test(a_failed_step_fails_its_requests),
        cmocka_unit_test(no_token_left_fails_the_request),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
