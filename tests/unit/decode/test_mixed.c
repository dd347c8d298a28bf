/* Mixed pools: the prefill worker's engine has other weights than the decode worker's, so a page of the wrong one
 * changes all further tokens. Whatever the company, the reuse, the room and the interruptions, an answer is the one
 * that a request alone in such a pair gets; and pages balance. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/rng.h"
#include "common/base/status.h"
#include "tests/support/cell.h"
#include "tests/support/shadow_engine.h"

enum { VOCAB = 300, MAX_PROMPT = 1500 };

static const uint32_t lengths[] = {1, 2, 63, 64, 65, 66, 127, 128, 129, 200, 513};
enum { N_LENGTHS = sizeof(lengths) / sizeof(lengths[0]) };

static const struct dmk_sample_params seeded = {
    .temperature = 1, .top_p = 0.95f, .repetition_penalty = 1, .seed = 99, .logprobs = true};

struct bed {
    struct shadow_engine *d, *p;
    struct cell *cell;
};

enum kind { MIXED, ALL_D, ALL_P };

static struct bed open_kind(enum kind kind, uint32_t n_pages, uint32_t max_sequences,
                            uint32_t chunk, bool reuse, uint32_t dp)
{
    struct shadow_conf shadow = {.n_layers = 4,
                                 .n_kv_heads = 2,
                                 .vocab = VOCAB,
                                 .tp = 1,
                                 .dp = dp,
                                 .n_full_pages = n_pages,
                                 .n_window_pages = 6 * max_sequences + 4,
                                 .seed = kind == ALL_P ? 6 : 5};
    struct bed bed = {.d = shadow_engine_new(&shadow)};
    struct cell_conf conf = {.decode = shadow_engine_port(bed.d),
                             .d_full_pages = n_pages,
                             .d_window_pages = shadow.n_window_pages,
                             .p_full_pages = 64,
                             .p_window_pages = 64,
                             .max_sequences = max_sequences,
                             .max_context = 4096,
                             .chunk_tokens = chunk,
                             .no_reuse = !reuse,
                             .ticket_expiry_ms = 20000,
                             .transfer_budget_ms = 20000,
                             .queue_budget_ms = 20000};

    if (kind == MIXED) {
        shadow.seed = 6;
        shadow.dp = 1;
        shadow.n_full_pages = shadow.n_window_pages = 64;
        bed.p = shadow_engine_new(&shadow);
        conf.prefill = shadow_engine_port(bed.p);
        conf.prefill.model_id = conf.decode.model_id;
        conf.prefill.numerics = "shadow-of-p";
        conf.decode.prompt_numerics = "shadow-of-p";
    }
    bed.cell = cell_new(&conf);
    return bed;
}

static struct bed open_bed(uint32_t n_pages, uint32_t max_sequences, uint32_t chunk, bool reuse)
{
    return open_kind(MIXED, n_pages, max_sequences, chunk, reuse, 1);
}

static void close_bed(struct bed *bed)
{
    assert_true(cell_settle(bed->cell, 200));
    assert_true(cell_check(bed->cell, true));
    cell_free(&bed->cell);
    shadow_engine_free(&bed->d);
    if (bed->p) {
        shadow_engine_free(&bed->p);
    }
}

static void fill_prompt(uint32_t *ids, uint32_t n, uint64_t seed)
{
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (uint32_t)(dmk_rng_u64(seed, 3, i) % (VOCAB - 1));
    }
}

static uint32_t ask_n(struct bed *bed, uint32_t n_prompt, uint64_t seed, uint32_t max_tokens,
                      const struct dmk_sample_params *sampling, uint32_t n)
{
    uint32_t ids[MAX_PROMPT];
    const struct dmk_decode_request r = {.prompt = ids,
                                         .n_prompt = n_prompt,
                                         .max_tokens = max_tokens,
                                         .sampling = sampling,
                                         .n = n,
                                         .ignore_eos = true};

    fill_prompt(ids, n_prompt, seed);
    return cell_ask(bed->cell, &r);
}

static uint32_t ask(struct bed *bed, uint32_t n_prompt, uint64_t seed, uint32_t max_tokens,
                    const struct dmk_sample_params *sampling)
{
    return ask_n(bed, n_prompt, seed, max_tokens, sampling, 1);
}

/* What the request gets alone. */
static void solo(enum kind kind, uint32_t n_prompt, uint64_t seed, uint32_t max_tokens,
                 const struct dmk_sample_params *sampling, uint32_t choice, struct cell_choice *ret)
{
    struct bed bed = open_kind(kind, 100, 8, 4096, false, 1);

    ask_n(&bed, n_prompt, seed, max_tokens, sampling, choice + 1);
    assert_true(cell_run(bed.cell, 4000));
    if (bed.cell->answers[0].failed) {
        print_message("%s\n", bed.cell->answers[0].text);
    }
    assert_false(bed.cell->answers[0].failed);
    *ret = bed.cell->answers[0].choices[choice];
    close_bed(&bed);
}

static void assert_same(const struct cell_choice *got, const struct cell_choice *want)
{
    assert_true(got->finished);
    assert_int_equal(got->n, want->n);
    assert_memory_equal(got->ids, want->ids, want->n * sizeof(want->ids[0]));
    assert_memory_equal(got->logprobs, want->logprobs, want->n * sizeof(want->logprobs[0]));
}

/* One step of one sequence whose pages are 0, 1, 2 ... */
static void step_by_hand(struct dmk_engine_port port, const uint32_t *ids, uint32_t pos, uint32_t n,
                         float logits[VOCAB])
{
    uint32_t pages[MAX_PROMPT / DMK_PAGE_TOKENS];
    const struct dmk_step_seq seq = {.ids = ids + pos,
                                     .n_tokens = n,
                                     .pos = pos,
                                     .full_pages = pages,
                                     .ring = {0, 1, 2},
                                     .n_ring = DMK_WINDOW_RING,
                                     .logits = logits ? DMK_LOGITS_LAST : DMK_LOGITS_NONE};
    const struct dmk_step step = {.seqs = &seq, .n_seqs = 1, .logits = logits};

    for (uint32_t i = 0; i < sizeof(pages) / sizeof(pages[0]); i++) {
        pages[i] = i;
    }
    assert_int_equal(port.step(port.engine, &step), 0);
}

/* The engines alone, without any worker: P's computes the prompt but for its last token, its page memory is copied as it
 * is, D's goes on from there. */
static void workers_do_what_is_done_by_hand(void **state)
{
    (void)state;
    for (uint32_t i = 1; i < N_LENGTHS; i++) {
        struct bed bed = open_bed(64, 10, 4096, false);
        const struct dmk_engine_port d = shadow_engine_port(bed.d), p = shadow_engine_port(bed.p);
        uint32_t ids[MAX_PROMPT], n = lengths[i];
        struct cell_choice want;
        float logits[VOCAB];

        solo(MIXED, n, i, 30, NULL, 0, &want);
        assert_int_equal(dmk_kv_window_bytes(&d.kv[0]->layout),
                         dmk_kv_window_bytes(&p.kv[0]->layout));
        fill_prompt(ids, n, i);
        step_by_hand(p, ids, 0, n - 1, NULL);
        memcpy(d.kv[0]->full, p.kv[0]->full, dmk_kv_full_bytes(&d.kv[0]->layout));
        memcpy(d.kv[0]->window, p.kv[0]->window, dmk_kv_window_bytes(&d.kv[0]->layout));
        for (uint32_t t = 0; t < 30; t++, n++) {
            uint32_t best = 0;

            step_by_hand(d, ids, n - 1, 1, logits);
            for (uint32_t v = 1; v < VOCAB; v++) {
                best = logits[v] > logits[best] ? v : best;
            }
            ids[n] = best;
            assert_int_equal(best, want.ids[t]);
        }
        close_bed(&bed);
    }
}

/* Neither worker alone says what both together do: pages of the one are read by the other. */
static void both_engines_count(void **state)
{
    struct cell_choice mixed, d, p;

    (void)state;
    solo(MIXED, 200, 4, 30, NULL, 0, &mixed);
    solo(ALL_D, 200, 4, 30, NULL, 0, &d);
    solo(ALL_P, 200, 4, 30, NULL, 0, &p);
    assert_memory_not_equal(mixed.ids, d.ids, 30 * sizeof(d.ids[0]));
    assert_memory_not_equal(mixed.ids, p.ids, 30 * sizeof(p.ids[0]));
    /* A prompt of one token has no pages to send. */
    solo(MIXED, 1, 4, 30, NULL, 0, &mixed);
    solo(ALL_D, 1, 4, 30, NULL, 0, &d);
    assert_same(&mixed, &d);
}

static void company_and_chunks_change_nothing(void **state)
{
    static const uint32_t chunks[] = {1, 64, 100, 4096};

    (void)state;
    for (uint32_t c = 0; c < sizeof(chunks) / sizeof(chunks[0]); c++) {
        struct bed bed = open_kind(MIXED, 160, 12, chunks[c], c % 2, c == 2 ? 2 : 1);

        for (uint32_t i = 0; i < N_LENGTHS; i++) {
            ask(&bed, lengths[i], i, 20, i % 2 ? &seeded : NULL);
        }
        assert_true(cell_run(bed.cell, 8000));
        for (uint32_t i = 0; i < N_LENGTHS; i++) {
            struct cell_choice want;

            solo(MIXED, lengths[i], i, 20, i % 2 ? &seeded : NULL, 0, &want);
            assert_same(&bed.cell->answers[i].choices[0], &want);
            assert_int_equal(bed.cell->answers[i].needs_prefill, lengths[i] > 1);
        }
        assert_int_equal(dmk_decode_load(bed.cell->decode).n_local_prefills, 0);
        assert_int_equal(dmk_decode_load(bed.cell->decode).n_prompt_tokens_computed, 0);
        close_bed(&bed);
    }
}

/* Prompts are reused, here and at the prefill worker; answers, which are of the other engine, are not. */
static void prompts_are_reused_and_answers_are_not(void **state)
{
    struct bed bed = open_bed(160, 4, 100, true);
    uint32_t ids[MAX_PROMPT];
    struct dmk_decode_request r = {
        .prompt = ids, .n_prompt = 150, .max_tokens = 200, .ignore_eos = true};
    struct cell_answer *a = bed.cell->answers;
    struct cell_choice want;
    struct dmk_kv_prefix_event told;
    struct dmk_id128 hash;
    uint32_t at[2] = {0};

    (void)state;
    fill_prompt(ids, 150, 4);
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 800));
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 800));
    assert_int_equal(a[1].have, 128);
    assert_same(&a[1].choices[0], &a[0].choices[0]);
    /* Routers are told of it by the name of the other engine. */
    hash = dmk_block_root("shadow-of-p", (struct dmk_bytes){0});
    hash = dmk_block_next(dmk_block_next(hash, ids), ids + 64);
    assert_int_equal(dmk_decode_block_list(bed.cell->decode, at, &told, 1), 1);
    assert_true(told.n_tokens == 128 && dmk_id128_equal(told.hash, hash));
    /* The next turn of a conversation: only the first prompt is there. */
    memcpy(ids + 150, a[0].choices[0].ids, 190 * sizeof(ids[0]));
    r.n_prompt = 340;
    r.max_tokens = 30;
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 800));
    assert_int_equal(a[2].have, 128);
    want = a[2].choices[0];
    close_bed(&bed);

    bed = open_bed(100, 1, 4096, false);
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 800));
    assert_same(&want, &bed.cell->answers[0].choices[0]);
    close_bed(&bed);

    /* All of the prompt but its last token is there: no prefill worker is asked. */
    bed = open_bed(100, 1, 4096, true);
    r.n_prompt = 129;
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 800));
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 800));
    assert_true(bed.cell->answers[0].needs_prefill && !bed.cell->answers[1].needs_prefill);
    assert_same(&bed.cell->answers[1].choices[0], &bed.cell->answers[0].choices[0]);
    close_bed(&bed);
}

/* Four answers of 1200 outgrow 80 pages, though prompts stay. */
static void preemption_changes_nothing(void **state)
{
    (void)state;
    for (uint32_t round = 0; round < 4; round++) {
        struct bed bed = open_bed(80, 6, round < 2 ? 64 : 7, round % 2);
        uint32_t n_preempted = 0;

        for (uint32_t i = 0; i < 4; i++) {
            ask(&bed, 65 + 31 * i, 50 + i, 1200, i % 2 ? &seeded : NULL);
        }
        assert_true(cell_run(bed.cell, 20000));
        for (uint32_t i = 0; i < 4; i++) {
            struct cell_choice want;

            assert_false(bed.cell->answers[i].failed);
            solo(MIXED, 65 + 31 * i, 50 + i, 1200, i % 2 ? &seeded : NULL, 0, &want);
            assert_same(&bed.cell->answers[i].choices[0], &want);
            n_preempted += bed.cell->answers[i].choices[0].n_preemptions;
        }
        assert_true(n_preempted > 0);
        assert_int_equal(bed.cell->answers[0].choices[0].n_preemptions, 0);
        assert_int_equal(dmk_decode_load(bed.cell->decode).n_prompt_tokens_computed, 0);
        close_bed(&bed);
    }
}

static void choices_are_preempted_too(void **state)
{
    struct bed bed = open_bed(76, 8, 64, true);
    uint32_t n_preempted = 0;

    (void)state;
    ask_n(&bed, 200, 6, 1200, &seeded, 2);
    ask_n(&bed, 100, 7, 1200, &seeded, 2);
    assert_true(cell_run(bed.cell, 20000));
    for (uint32_t i = 0; i < 2; i++) {
        for (uint32_t c = 0; c < 2; c++) {
            const struct cell_choice *got = &bed.cell->answers[i].choices[c];
            struct cell_choice want;

            solo(MIXED, i == 0 ? 200 : 100, 6 + i, 1200, &seeded, c, &want);
            assert_same(got, &want);
            n_preempted += got->n_preemptions;
        }
    }
    assert_true(n_preempted > 0);
    close_bed(&bed);
}

/* A further choice gives its spare pages up while the prompt is still on its way. */
static void a_choice_gives_way_before_its_prompt_is_there(void **state)
{
    struct bed bed = open_bed(18 + 33 + 1, 8, 7, false);
    const struct cell_answer *a = bed.cell->answers;
    struct cell_choice want;

    (void)state;
    ask(&bed, 65, 1, 1200, NULL); /* 18 pages at first */
    while (a[0].choices[0].n < 1085) {
        cell_turn(bed.cell);
    }
    ask_n(&bed, 200, 2, 600, &seeded, 3); /* the other 34, until one more is needed */
    assert_true(a[1].reserved);
    while (dmk_decode_load(bed.cell->decode).n_preemptions == 0) {
        cell_turn(bed.cell);
    }
    assert_false(a[1].transferred);
    assert_true(cell_run(bed.cell, 20000));
    for (uint32_t c = 0; c < 3; c++) {
        solo(MIXED, 200, 2, 600, &seeded, c, &want);
        assert_same(&a[1].choices[c], &want);
    }
    solo(MIXED, 65, 1, 1200, NULL, 0, &want);
    assert_same(&a[0].choices[0], &want);
    close_bed(&bed);
}

/* Requests come and leave at any time, also in the midst of steps, in pools that are too small for all of them. Who is
 * let in gets to its end. */
static void crowds_in_small_pools(void **state)
{
    const uint64_t seed = dmk_random_u64();
    struct bed bed = open_kind(MIXED, 64, 6, 50, true, 2);
    struct cell_choice want[6];
    uint32_t lens[CELL_MAX_ANSWERS], n_right = 0;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (uint32_t i = 0; i < 6; i++) {
        solo(MIXED, 40 + 77 * i, i, 1390, i % 2 ? &seeded : NULL, 0, &want[i]);
    }
    for (uint32_t k = 0; k < CELL_MAX_ANSWERS; k++) {
        const uint32_t i = (uint32_t)(dmk_rng_u64(seed, 1, k) % 6);
        const uint32_t a = ask(&bed, 40 + 77 * i, i, 1390, i % 2 ? &seeded : NULL);
        struct dmk_decode_step *step;

        lens[a] = i;
        for (uint64_t t = dmk_rng_u64(seed, 2, k) % 300; t > 0; t--) {
            cell_turn(bed.cell);
        }
        if (dmk_rng_u64(seed, 3, k) % 4 == 0) {
            step = dmk_decode_plan(bed.cell->decode, bed.cell->now_ns);
            cell_cancel(bed.cell, (uint32_t)(dmk_rng_u64(seed, 4, k) % (a + 1)));
            if (step) {
                dmk_decode_run(step);
                dmk_decode_done(bed.cell->decode, step, bed.cell->now_ns);
            }
        }
        assert_true(cell_check(bed.cell, false));
    }
    assert_true(cell_run(bed.cell, 100000));
    for (uint32_t a = 0; a < CELL_MAX_ANSWERS; a++) {
        const struct cell_answer *answer = &bed.cell->answers[a];

        if (answer->failed) {
            assert_int_equal(answer->code, DMK_FAILURE_FULL);
        } else if (!answer->cancelled) {
            assert_same(&answer->choices[0], &want[lens[a]]);
            n_right++;
        }
    }
    assert_true(n_right > 5);
    assert_true(dmk_decode_load(bed.cell->decode).n_preemptions > 0);
    close_bed(&bed);
}

/* A step in flight copies what it was planned to copy: the pages stay until it is done. */
static void a_cancel_in_the_midst_of_a_step(void **state)
{
    struct bed bed = open_bed(80, 4, 64, false);
    struct dmk_decode_load before, after;
    struct dmk_decode_step *step;

    (void)state;
    ask_n(&bed, 100, 1, 50, NULL, 2);
    while (dmk_decode_load(bed.cell->decode).receiver.n_claimed == 0) {
        cell_turn(bed.cell);
    }
    while (dmk_decode_load(bed.cell->decode).receiver.n_claimed > 0) {
        cell_turn(bed.cell);
    }
    step = dmk_decode_plan(bed.cell->decode, bed.cell->now_ns);
    assert_non_null(step);
    before = dmk_decode_load(bed.cell->decode);
    cell_cancel(bed.cell, 0);
    after = dmk_decode_load(bed.cell->decode);
    assert_int_equal(after.full.leased, before.full.leased);
    assert_int_equal(after.window.leased, before.window.leased);
    dmk_decode_run(step);
    dmk_decode_done(bed.cell->decode, step, bed.cell->now_ns);
    assert_int_equal(dmk_decode_load(bed.cell->decode).full.leased, 0);
    assert_int_equal(dmk_decode_load(bed.cell->decode).window.leased, 0);
    close_bed(&bed);
}

/* Who asks for the prompt's log-probabilities has all of it computed by the decode worker, and leaves nothing. */
static void scored_prompts_are_the_decode_workers(void **state)
{
    float scores[200];
    uint32_t ids[MAX_PROMPT];
    const struct dmk_decode_request r = {.prompt = ids,
                                         .n_prompt = 200,
                                         .max_tokens = 40,
                                         .sampling = &seeded,
                                         .ignore_eos = true,
                                         .echo_logprobs = true};
    struct cell_choice want;
    struct bed bed = open_kind(ALL_D, 100, 2, 64, false, 1);

    (void)state;
    fill_prompt(ids, 200, 8);
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 1000));
    assert_int_equal(bed.cell->answers[0].n_scores, 199);
    memcpy(scores, bed.cell->answers[0].scores, 199 * sizeof(float));
    want = bed.cell->answers[0].choices[0];
    close_bed(&bed);

    bed = open_bed(100, 2, 64, true);
    cell_ask(bed.cell, &r);
    assert_true(cell_run(bed.cell, 1000));
    assert_memory_equal(bed.cell->answers[0].scores, scores, 199 * sizeof(float));
    assert_same(&bed.cell->answers[0].choices[0], &want);
    ask(&bed, 200, 8, 10, NULL);
    assert_true(cell_run(bed.cell, 1000));
    assert_int_equal(bed.cell->answers[1].have, 0);
    solo(MIXED, 200, 8, 10, NULL, 0, &want);
    assert_same(&bed.cell->answers[1].choices[0], &want);
    close_bed(&bed);
}

/* A request that might not get to its end beside the others waits. */
static void admission_leaves_room_for_the_longest(void **state)
{
    struct bed bed = open_bed(40, 6, 64, false);
    const struct cell_answer *a = bed.cell->answers;

    (void)state;
    ask(&bed, 600, 1, 1800, NULL); /* 10 pages of the prompt, 29 of its end besides */
    ask(&bed, 30, 2, 50, NULL);    /* one page: all 40 are spoken for */
    ask(&bed, 30, 3, 50, NULL);
    assert_true(a[0].reserved && a[1].reserved && a[2].failed);
    assert_int_equal(a[2].code, DMK_FAILURE_FULL);
    assert_true(a[2].retry_after_ms > 0);
    for (uint32_t i = 0; i < 2; i++) {
        cell_cancel(bed.cell, i);
    }
    close_bed(&bed);
}

/* Of two choices that share two pages, with room for the copy of a third. */
static void what_never_fits_is_said_at_once(void **state)
{
    for (uint32_t n_pages = 36; n_pages <= 37; n_pages++) {
        struct bed bed = open_bed(n_pages, 4, 64, false);
        const struct cell_answer *a = bed.cell->answers;

        ask_n(&bed, 129, 1, 1024, NULL, 2);
        assert_int_equal(a[0].reserved, n_pages == 37);
        assert_int_equal(a[0].failed, n_pages == 36);
        if (a[0].failed) {
            assert_int_equal(a[0].code, DMK_FAILURE_INVALID);
            assert_non_null(strstr(a[0].text, "37 pages are needed, this worker has 36"));
        } else {
            cell_cancel(bed.cell, 0);
        }
        close_bed(&bed);
    }
    (void)state;
}

static void refusals(void **state)
{
    struct bed bed = open_bed(40, 2, 64, false);
    uint32_t ids[MAX_PROMPT];
    struct dmk_decode_request r = {
        .prompt = ids, .n_prompt = 100, .max_tokens = 5, .force_local = true};
    struct dmk_engine_port port = shadow_engine_port(bed.d);
    struct dmk_decode_conf conf = {.engine = port,
                                   .n_full_pages = 40,
                                   .n_window_pages = 11,
                                   .max_sequences = 2,
                                   .max_context = 1000,
                                   .max_step_tokens = 64,
                                   .max_chunk_tokens = 32,
                                   .max_logit_rows = 2};
    struct dmk_decode_core *core;
    struct dmk_error error;

    (void)state;
    fill_prompt(ids, 100, 1);
    cell_ask(bed.cell, &r);
    assert_true(bed.cell->answers[0].failed);
    assert_int_equal(bed.cell->answers[0].code, DMK_FAILURE_MISMATCH);
    assert_non_null(strstr(bed.cell->answers[0].text, "shadow-of-p"));
    conf.engine.prompt_numerics = "other";
    assert_int_equal(dmk_decode_core_new(&conf, &core, &error), -DMK_EINVAL);
    assert_non_null(strstr(error.text, "window-pages 11 is below 6"));
    conf.n_window_pages = 12;
    assert_int_equal(dmk_decode_core_new(&conf, &core, &error), -DMK_EINVAL);
    assert_non_null(strstr(error.text, "prefill workers, but xfer-transport is none"));
    conf.engine.prompt_numerics = conf.engine.numerics;
    assert_int_equal(dmk_decode_core_new(&conf, &core, &error), 0);
    dmk_decode_core_free(&core);
    close_bed(&bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(workers_do_what_is_done_by_hand),
        cmocka_unit_test(both_engines_count),
        cmocka_unit_test(company_and_chunks_change_nothing),
        cmocka_unit_test(prompts_are_reused_and_answers_are_not),
        cmocka_unit_test(preemption_changes_nothing),
        cmocka_unit_test(choices_are_preempted_too),
        cmocka_unit_test(a_choice_gives_way_before_its_prompt_is_there),
        cmocka_unit_test(crowds_in_small_pools),
        cmocka_unit_test(a_cancel_in_the_midst_of_a_step),
        cmocka_unit_test(scored_prompts_are_the_decode_workers),
        cmocka_unit_test(admission_leaves_room_for_the_longest),
        cmocka_unit_test(what_never_fits_is_said_at_once),
        cmocka_unit_test(refusals),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
