/* The prefill core beside a decode core: whose prompts share pages, what reaches a step that runs, how long a prompt
 * waits for its turn, and tickets that are not for this worker or this prompt. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <string.h>
#include "common/base/blocks.h"
#include "common/base/rng.h"
#include "tests/support/cell.h"
#include "tests/support/shadow_engine.h"

enum { VOCAB = 300, N_LAYERS = 6, N_PAGES = 80, N_WINDOW = 60, LENGTH = 300, CHUNK = 64 };

struct bed {
    struct shadow_engine *d_engine, *p_engine;
    struct cell_conf conf;
    struct cell *cell;
};

static struct shadow_engine *open_engine(void)
{
    const struct shadow_conf conf = {.n_layers = N_LAYERS,
                                     .n_kv_heads = 2,
                                     .vocab = VOCAB,
                                     .tp = 1,
                                     .dp = 1,
                                     .n_full_pages = N_PAGES,
                                     .n_window_pages = N_WINDOW,
                                     .seed = 5};

    return shadow_engine_new(&conf);
}

static struct bed prepare(void)
{
    struct bed bed = {.d_engine = open_engine(), .p_engine = open_engine()};

    bed.conf = (struct cell_conf){.decode = shadow_engine_port(bed.d_engine),
                                  .prefill = shadow_engine_port(bed.p_engine),
                                  .d_full_pages = N_PAGES,
                                  .d_window_pages = N_WINDOW,
                                  .p_full_pages = N_PAGES,
                                  .p_window_pages = N_WINDOW,
                                  .max_sequences = 16,
                                  .max_context = 4096,
                                  .chunk_tokens = CHUNK};
    return bed;
}

static void close_bed(struct bed *bed)
{
    assert_true(cell_settle(bed->cell, 500));
    assert_true(cell_check(bed->cell, true));
    cell_free(&bed->cell);
    shadow_engine_free(&bed->d_engine);
    shadow_engine_free(&bed->p_engine);
}

static void fill_prompt(uint32_t *ids, uint32_t n, uint64_t seed)
{
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (uint32_t)(dmk_rng_u64(seed, 3, i) % (VOCAB - 1));
    }
}

static struct cell_answer *ask(struct bed *bed, uint32_t n, uint64_t seed, const char *salt)
{
    uint32_t ids[4096];
    const struct dmk_decode_request r = {.prompt = ids,
                                         .n_prompt = n,
                                         .max_tokens = 4,
                                         .salt = {(const uint8_t *)salt, strlen(salt)},
                                         .ignore_eos = true};

    fill_prompt(ids, n, seed);
    return &bed->cell->answers[cell_ask(bed->cell, &r)];
}

/* A prompt is found again by those with its salt only, on both workers, and is the same to all. */
static void salts_share_no_pages(void **state)
{
    static const char *const salts[] = {"a", "", "b", "aa"};
    enum {
        N = sizeof(salts) / sizeof(salts[0]),
        WHOLE = (LENGTH - 1) / DMK_PAGE_TOKENS * DMK_PAGE_TOKENS
    };
    struct bed bed = prepare();
    const struct cell_answer *first = NULL;

    (void)state;
    bed.cell = cell_new(&bed.conf);
    for (uint32_t i = 0; i < 2 * N; i++) {
        const struct cell_answer *a = ask(&bed, LENGTH, 1, salts[i % N]);

        assert_true(cell_run(bed.cell, 500));
        assert_false(a->failed);
        assert_int_equal(a->have, i < N ? 0 : WHOLE);
        if (i < N) {
            assert_true(a->prefill_done);
            assert_int_equal(a->p_cached, 0);
        }
        first = first ? first : a;
        assert_memory_equal(a->choices[0].ids, first->choices[0].ids, 4 * sizeof(uint32_t));
    }
    close_bed(&bed);
}

/* What a worker publishes are chains from its numerics and the salt: a router finds them by those alone, and workers
 * of other numerics never by chance. */
static void published_hashes_begin_with_the_numerics(void **state)
{
    struct bed bed = prepare();
    struct dmk_kv_prefix_event events[16];
    uint32_t ids[LENGTH], at[2] = {0}, n_found = 0;
    struct dmk_id128 hash;

    (void)state;
    bed.cell = cell_new(&bed.conf);
    (void)ask(&bed, LENGTH, 1, "s");
    assert_true(cell_run(bed.cell, 500));
    fill_prompt(ids, LENGTH, 1);
    hash = dmk_block_root(bed.conf.decode.numerics, (struct dmk_bytes){(const uint8_t *)"s", 1});
    const uint32_t n = dmk_decode_block_list(bed.cell->decode, at, events, 16);

    assert_true(n > 0);
    for (uint32_t b = 0; b < LENGTH / DMK_PAGE_TOKENS; b++) {
        hash = dmk_block_next(hash, ids + (size_t)b * DMK_PAGE_TOKENS);
        for (uint32_t i = 0; i < n; i++) {
            n_found += dmk_id128_equal(events[i].hash, hash) &&
                       events[i].n_tokens == (b + 1) * DMK_PAGE_TOKENS;
        }
    }
    assert_int_equal(n_found, n);
    close_bed(&bed);
}

struct leaver {
    uint32_t at_layer, n_layers;
};

static void leave_at_layer(void *ud, struct cell *cell)
{
    struct leaver *l = ud;

    if (++l->n_layers == l->at_layer) {
        cell_cancel(cell, 0);
    }
}

/* The client leaves while a layer is computed: that one ends, and no other is begun. */
static void cancel_ends_a_step_at_the_next_layer(void **state)
{
    (void)state;
    for (uint32_t layer = 1; layer <= N_LAYERS; layer++) {
        struct bed bed = prepare();
        struct leaver leaver = {.at_layer = layer};

        bed.conf.on_layer = leave_at_layer;
        bed.conf.ud = &leaver;
        bed.cell = cell_new(&bed.conf);
        (void)ask(&bed, LENGTH, 1, "");
        assert_true(cell_run(bed.cell, 500));
        assert_true(cell_settle(bed.cell, 500));
        assert_int_equal(leaver.n_layers, layer);
        close_bed(&bed);
    }
}

static void prompts_wait_for_their_turn_for_so_long(void **state)
{
    struct bed bed = prepare();
    const struct cell_answer *a[4];
    uint32_t n_late = 0;

    (void)state;
    bed.conf.p_full_pages = 20; /* one prompt at a time: 16 turns each */
    bed.conf.max_context = 20 * DMK_PAGE_TOKENS;
    bed.conf.queue_budget_ms = 20;
    bed.cell = cell_new(&bed.conf);
    for (uint32_t i = 0; i < 4; i++) {
        a[i] = ask(&bed, 1000, i, "");
    }
    assert_true(cell_run(bed.cell, 1000));
    for (uint32_t i = 0; i < 4; i++) {
        if (a[i]->failed) {
            assert_int_equal(a[i]->code, DMK_FAILURE_TIMEOUT);
            assert_non_null(strstr(a[i]->text, "turn"));
            n_late++;
        }
    }
    assert_false(a[0]->failed);
    assert_in_range(n_late, 1, 3);
    close_bed(&bed);
}

static void assert_refused(struct bed *bed, const struct cell_answer *a, enum dmk_failure code,
                           const char *says)
{
    assert_true(cell_run(bed->cell, 100));
    assert_true(a->failed && !a->transferred);
    assert_int_equal(a->code, code);
    assert_non_null(strstr(a->text, says));
    assert_int_equal(dmk_prefill_load(bed->cell->prefill).n_steps, 0);
    close_bed(bed);
}

static void tickets_that_do_not_fit_are_refused(void **state)
{
    struct bed bed = prepare();
    struct cell_answer *a;

    (void)state;
    bed.conf.prefill.model_id.lo ^= 1;
    bed.cell = cell_new(&bed.conf);
    assert_refused(&bed, ask(&bed, LENGTH, 1, ""), DMK_FAILURE_MISMATCH, "another model");

    bed = prepare();
    bed.conf.prefill.numerics = "others";
    bed.cell = cell_new(&bed.conf);
    assert_refused(&bed, ask(&bed, LENGTH, 1, ""), DMK_FAILURE_MISMATCH, "others");

    bed = prepare();
    bed.cell = cell_new(&bed.conf);
    a = ask(&bed, LENGTH, 1, "");
    a->n_prompt--; /* what the router sends the prefill worker */
    assert_refused(&bed, a, DMK_FAILURE_INVALID, "299 tokens");
}

/* Below the threshold means below: as many missing tokens as it says are a prefill worker's. */
static void the_threshold_is_the_first_that_is_sent(void **state)
{
    struct bed bed = prepare();

    (void)state;
    bed.conf.local_prefill_below = 100;
    bed.cell = cell_new(&bed.conf);
    for (uint32_t n = 99; n <= 102; n++) { /* the last token is not prefilled */
        const struct cell_answer *a = ask(&bed, n, n, "");

        assert_true(cell_run(bed.cell, 500));
        assert_int_equal(a->needs_prefill, n - 1 >= 100);
    }
    close_bed(&bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(salts_share_no_pages),
        cmocka_unit_test(published_hashes_begin_with_the_numerics),
        cmocka_unit_test(cancel_ends_a_step_at_the_next_layer),
        cmocka_unit_test(prompts_wait_for_their_turn_for_so_long),
        cmocka_unit_test(tickets_that_do_not_fit_are_refused),
        cmocka_unit_test(the_threshold_is_the_first_that_is_sent),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
