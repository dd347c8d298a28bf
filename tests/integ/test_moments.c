/* Moments that a test with processes hits only by luck, hit on purpose: both cores in one process on the
 * engine of hashes, virtual time, one step of each side a turn. Short prompts behind a long one; source pages
 * while a transfer crawls; a cancel at every turn of a hand-over; a prompt that fails at every chunk. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <string.h>
#include "common/base/rng.h"
#include "common/base/status.h"
#include "tests/support/cell.h"
#include "tests/support/shadow_engine.h"

enum { VOCAB = 300, N_PAGES = 160, N_WINDOW = 60, MAX_PROMPT = 5000, CHUNK = 64 };

static const struct dmk_sample_params seeded = {
    .temperature = 1, .top_p = 0.95f, .repetition_penalty = 1, .seed = 11, .logprobs = true};

struct bed {
    struct shadow_engine *alone_engine, *d_engine, *p_engine;
    struct cell *alone, *split;
};

static struct shadow_engine *open_engine(void)
{
    const struct shadow_conf conf = {.n_layers = 4,
                                     .n_kv_heads = 2,
                                     .vocab = VOCAB,
                                     .tp = 1,
                                     .dp = 1,
                                     .n_full_pages = N_PAGES,
                                     .n_window_pages = N_WINDOW,
                                     .seed = 5};

    return shadow_engine_new(&conf);
}

static struct bed open_bed(uint32_t p_full_pages, bool reuse, struct dmk_loopback_conf fabric)
{
    struct bed bed = {open_engine(), open_engine(), open_engine(), NULL, NULL};
    struct cell_conf conf = {.decode = shadow_engine_port(bed.alone_engine),
                             .d_full_pages = N_PAGES,
                             .d_window_pages = N_WINDOW,
                             .max_sequences = 16,
                             .max_context = p_full_pages < N_PAGES ? p_full_pages * DMK_PAGE_TOKENS
                                                                   : MAX_PROMPT + 100,
                             .chunk_tokens = CHUNK,
                             .no_reuse = true};

    bed.alone = cell_new(&conf);
    conf.decode = shadow_engine_port(bed.d_engine);
    conf.prefill = shadow_engine_port(bed.p_engine);
    conf.p_full_pages = p_full_pages;
    conf.p_window_pages = N_WINDOW;
    conf.no_reuse = !reuse;
    conf.transfer_budget_ms = conf.ticket_expiry_ms = conf.queue_budget_ms = 60000;
    conf.fabric = fabric;
    bed.split = cell_new(&conf);
    return bed;
}

static void close_bed(struct bed *bed)
{
    cell_free(&bed->alone);
    cell_free(&bed->split);
    shadow_engine_free(&bed->alone_engine);
    shadow_engine_free(&bed->d_engine);
    shadow_engine_free(&bed->p_engine);
}

static struct cell_answer *ask(struct cell *cell, uint32_t n, uint64_t seed)
{
    static uint32_t ids[MAX_PROMPT];
    const struct dmk_decode_request r = {.prompt = ids,
                                         .n_prompt = n,
                                         .max_tokens = 6,
                                         .sampling = seed % 2 ? &seeded : NULL,
                                         .ignore_eos = true};

    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (uint32_t)(dmk_rng_u64(seed, 3, i) % (VOCAB - 1));
    }
    return &cell->answers[cell_ask(cell, &r)];
}

/* The answer is the one of a worker alone. */
static void assert_right(struct bed *bed, const struct cell_answer *got, uint32_t n, uint64_t seed)
{
    const struct cell_choice *a = &got->choices[0], *b;

    if (got->failed) {
        fail_msg("prompt of %u, seed %llu: %s", n, (unsigned long long)seed, got->text);
    }
    b = &ask(bed->alone, n, seed)->choices[0];
    assert_true(cell_run(bed->alone, 20000));
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->ids, b->ids, a->n * sizeof(a->ids[0]));
    assert_memory_equal(a->logprobs, b->logprobs, a->n * sizeof(a->logprobs[0]));
    cell_forget(bed->alone);
}

static void assert_idle_within(struct cell *cell, uint32_t turns)
{
    if (!cell_settle(cell, turns)) {
        const struct dmk_decode_load d = dmk_decode_load(cell->decode);
        const struct dmk_prefill_load p = dmk_prefill_load(cell->prefill);

        fail_msg("after %u turns D has %u leased and %u draining, P %u leased", turns,
                 d.full.leased, d.full.draining, p.full.leased);
    }
    assert_true(cell_check(cell, true));
}

/* Five prompts of ten tokens come while one of 4000 is computed: each has its first token within twenty
 * steps; the long one ends too. On the prefill worker, and on a decode worker that computes its own. */
static void short_prompts_pass_a_long_one(void **state)
{
    enum { N = 5, LONG = 4000, SHORT = 10 };

    (void)state;
    for (int alone = 0; alone < 2; alone++) {
        struct bed bed = open_bed(N_PAGES, true, (struct dmk_loopback_conf){0});
        struct cell *cell = alone ? bed.alone : bed.split;
        const struct cell_answer *a[N], *first = ask(cell, LONG, 1);
        uint64_t begun, ended[N] = {0};

        for (uint32_t t = 0; t < 6; t++) {
            cell_turn(cell);
        }
        begun = cell->n_turns;
        for (uint32_t i = 0; i < N; i++) {
            a[i] = ask(cell, SHORT, 10 + i);
        }
        for (uint32_t t = 0; t < 400 && !first->over; t++) {
            cell_turn(cell);
            for (uint32_t i = 0; i < N; i++) {
                ended[i] = !ended[i] && a[i]->choices[0].n > 0 ? cell->n_turns : ended[i];
            }
        }
        assert_true(first->over && !first->failed);
        for (uint32_t i = 0; i < N; i++) {
            assert_true(ended[i] > 0 && ended[i] - begun <= 20);
        }
        if (!alone) {
            assert_right(&bed, first, LONG, 1);
            for (uint32_t i = 0; i < N; i++) {
                assert_right(&bed, a[i], SHORT, 10 + i);
            }
            assert_idle_within(cell, 1000);
        }
        close_bed(&bed);
    }
}

/* Puts take seconds and P has pages for two prompts: what is not answered yet keeps its pages, later prompts
 * wait for them, and what lands is what was computed. */
static void source_pages_stay_until_the_answer(void **state)
{
    enum { N = 10, LENGTH = 600, PAGES = 24 };

    (void)state;
    for (int lane = 0; lane < 2; lane++) {
        const struct dmk_loopback_conf crawl = {
            .seed = 3,
            .lane = lane ? DMK_LANE_DIRECT : DMK_LANE_EMULATED,
            .faults = {.max_delay = 300, .late = 500, .late_steps = 2000}};
        struct bed bed = open_bed(PAGES, true, crawl);
        const struct cell_answer *a[N];
        uint32_t n_waited = 0;

        for (uint32_t i = 0; i < N; i++) {
            a[i] = ask(bed.split, LENGTH, 100 + i / 2); /* every second one has a prefix there */
        }
        for (uint32_t t = 0; t < 60000 && !a[N - 1]->over; t++) {
            const struct dmk_prefill_load p = dmk_prefill_load(bed.split->prefill);

            cell_turn(bed.split);
            assert_true(cell_check(bed.split, false));
            n_waited += p.n_waiting > 0 && p.full.free + p.full.cached < LENGTH / DMK_PAGE_TOKENS;
        }
        assert_true(cell_run(bed.split, 60000));
        assert_true(n_waited > 0);
        for (uint32_t i = 0; i < N; i++) {
            assert_right(&bed, a[i], LENGTH, 100 + i / 2);
        }
        assert_idle_within(bed.split, 5000);
        close_bed(&bed);
    }
}

/* The client leaves at turn 0, 1, 2, ... of a hand-over, between P's end and D's beginning too. Pages come
 * back by the word of the other side: long before a ticket expires or a deadline passes. */
static void cancel_at_every_turn(void **state)
{
    enum { LENGTH = 200, SOON = 300 };

    (void)state;
    for (int lane = 0; lane < 2; lane++) {
        const struct dmk_loopback_conf fabric = {.seed = 4,
                                                 .lane = lane ? DMK_LANE_DIRECT : DMK_LANE_EMULATED,
                                                 .faults = {.max_delay = 5}};
        struct bed bed = open_bed(N_PAGES, true, fabric);
        uint32_t n_between = 0, n_cancelled = 0, turns = 0;
        bool over = false;

        for (; !over; turns++) {
            const struct cell_answer *a = ask(bed.split, LENGTH, turns);
            const uint64_t before = dmk_prefill_load(bed.split->prefill).n_tokens_computed;

            for (uint32_t t = 0; t < turns && !a->over; t++) {
                cell_turn(bed.split);
            }
            over = a->over;
            n_cancelled += !over;
            n_between +=
                !over && a->needs_prefill && a->choices[0].n == 0 &&
                dmk_prefill_load(bed.split->prefill).n_tokens_computed == before + LENGTH - 1;
            cell_cancel(bed.split, (uint32_t)(a - bed.split->answers));
            assert_idle_within(bed.split, SOON);
            cell_forget(bed.split);
        }
        print_message("%u moments, %u of them between P's last chunk and D's first token\n",
                      n_cancelled, n_between);
        assert_true(n_cancelled >= 15 && n_between >= 3);
        for (uint64_t seed = 0; seed < 50; seed++) { /* and again in between, at other delays */
            const struct cell_answer *a = ask(bed.split, LENGTH, 1000 + seed);
            const uint32_t at = turns / 2 + (uint32_t)(dmk_rng_u64(seed, 1, 1) % (turns / 2 + 1));

            for (uint32_t t = 0; t < at && !a->over; t++) {
                cell_turn(bed.split);
            }
            cell_cancel(bed.split, (uint32_t)(a - bed.split->answers));
            assert_idle_within(bed.split, SOON);
            cell_forget(bed.split);
        }
        assert_true(cell_run(bed.split, 10));
        const struct cell_answer *last = ask(bed.split, LENGTH, 7);

        assert_true(cell_run(bed.split, 2000));
        assert_right(&bed, last, LENGTH, 7);
        close_bed(&bed);
    }
}

/* P's engine fails before the first chunk, or when some pages are at D already. */
static void a_prompt_that_fails_frees_both_sides(void **state)
{
    enum { LENGTH = 400, N_CHUNKS = LENGTH / CHUNK + 1 };

    (void)state;
    for (int lane = 0; lane < 2; lane++) {
        const struct dmk_loopback_conf fabric = {.seed = 5,
                                                 .lane = lane ? DMK_LANE_DIRECT : DMK_LANE_EMULATED,
                                                 .faults = {.max_delay = 3}};
        struct bed bed = open_bed(N_PAGES, true, fabric);

        for (uint32_t chunk = 0; chunk < N_CHUNKS; chunk++) {
            const struct cell_answer *a = ask(bed.split, LENGTH, 50 + chunk);
            const uint64_t steps = dmk_prefill_load(bed.split->prefill).n_steps;
            uint64_t begun;

            while (dmk_prefill_load(bed.split->prefill).n_steps < steps + chunk) {
                cell_turn(bed.split);
            }
            shadow_engine_fail(bed.p_engine, 1, -DMK_EIO);
            begun = bed.split->n_turns;
            assert_true(cell_run(bed.split, 2000));
            assert_true(a->failed && !a->transferred && strlen(a->text) > 10);
            assert_int_equal(a->choices[0].n, 0);
            assert_true(bed.split->n_turns - begun <= 100);
            assert_idle_within(bed.split, 300);
            cell_forget(bed.split);
            a = ask(bed.split, LENGTH, 50 + chunk);
            assert_true(cell_run(bed.split, 2000));
            assert_right(&bed, a, LENGTH, 50 + chunk);
            cell_forget(bed.split);
            assert_idle_within(bed.split, 300);
        }
        close_bed(&bed);
    }
}

/* A prompt for which there are no pages yet costs the cache nothing, and is counted as a hit once. */
static void what_is_cached_outlives_the_wait_for_pages(void **state)
{
    enum { PAGES = 20, CACHED = 192, LONG = 1000, NEXT = 600 };
    struct bed bed = open_bed(PAGES, true, (struct dmk_loopback_conf){.seed = 8});
    const struct cell_answer *next;
    uint64_t hits;

    (void)state;
    (void)ask(bed.split, CACHED + 1, 1);
    assert_true(cell_run(bed.split, 2000) && cell_settle(bed.split, 300));
    dmk_decode_flush_cache(bed.split->decode);
    hits = dmk_prefill_load(bed.split->prefill).n_hit_tokens;
    (void)ask(bed.split, LONG, 2);
    for (uint32_t t = 0; t < 5; t++) {
        cell_turn(bed.split);
    }
    next = ask(bed.split, NEXT, 1); /* begins as the first one */
    assert_true(cell_run(bed.split, 2000));
    assert_int_equal(next->have, 0);
    assert_int_equal(next->p_cached, CACHED);
    assert_int_equal(dmk_prefill_load(bed.split->prefill).n_hit_tokens - hits, CACHED);
    assert_right(&bed, next, NEXT, 1);
    close_bed(&bed);
}

/* Many prompts with one beginning come at once. Each would hold the two window pages of the beginning and one of
 * its own, until none is free for any of them to go on with. */
static void window_pages_do_not_run_out(void **state)
{
    enum { CACHED = 192, N = 8, LONGEST = 1100, WINDOW = 8 }; /* the least there may be */
    struct bed bed = open_bed(N_PAGES, true, (struct dmk_loopback_conf){.seed = 9});
    struct cell_conf conf = bed.split->conf;
    const struct cell_answer *a[N];

    (void)state;
    cell_free(&bed.split);
    conf.p_window_pages = WINDOW;
    bed.split = cell_new(&conf);
    (void)ask(bed.split, CACHED + 1, 3);
    assert_true(cell_run(bed.split, 2000) && cell_settle(bed.split, 300));
    dmk_decode_flush_cache(bed.split->decode);
    for (uint32_t i = 0; i < N; i++) {
        a[i] = ask(bed.split, LONGEST - 100 * i, 3);
    }
    assert_true(cell_run(bed.split, 2000));
    for (uint32_t i = 0; i < N; i++) {
        assert_right(&bed, a[i], LONGEST - 100 * i, 3);
    }
    close_bed(&bed);
}

static void submit(struct bed *bed, const struct cell_answer *whose,
                   const struct cell_answer *ticket_of)
{
    struct cell *c = bed->split;
    const struct dmk_prefill_request r = {.id = {7, (uint64_t)(whose - c->answers), 1},
                                          .prompt = ticket_of->prompt,
                                          .n_prompt = ticket_of->n_prompt,
                                          .ticket = {ticket_of->ticket, ticket_of->ticket_len}};

    dmk_prefill_submit(c->prefill, &r, c->now_ns);
}

/* P is sent the same prompt again, or one with another's ticket, at every turn of a hand-over: the first one
 * alone writes and speaks for the ticket. */
static void a_ticket_is_used_once(void **state)
{
    enum { LENGTH = 200, SOON = 300 };

    (void)state;
    for (int lane = 0; lane < 2; lane++) {
        const struct dmk_loopback_conf fabric = {.seed = 6,
                                                 .lane = lane ? DMK_LANE_DIRECT : DMK_LANE_EMULATED,
                                                 .faults = {.max_delay = 5}};
        struct bed bed = open_bed(N_PAGES, false, fabric);
        bool over = false;

        for (uint32_t turns = 1; !over; turns++) {
            const struct cell_answer *a = ask(bed.split, LENGTH, turns);
            struct cell_answer *b = ask(bed.split, LENGTH, 1000 + turns);

            cell_cancel(bed.split, (uint32_t)(b - bed.split->answers));
            for (uint32_t t = 0; t < turns && !a->prefill_done; t++) {
                cell_turn(bed.split);
            }
            over = a->prefill_done;
            if (!over) {
                b->over = b->cancelled = false; /* its id is P's to fail */
                submit(&bed, a, a);
                submit(&bed, b, a);
            }
            assert_true(cell_run(bed.split, SOON));
            assert_true(over || (b->failed && b->code == DMK_FAILURE_INVALID));
            assert_right(&bed, a, LENGTH, turns);
            assert_idle_within(bed.split, SOON);
            cell_forget(bed.split);
        }
        close_bed(&bed);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(short_prompts_pass_a_long_one),
        cmocka_unit_test(source_pages_stay_until_the_answer),
        cmocka_unit_test(cancel_at_every_turn),
        cmocka_unit_test(a_prompt_that_fails_frees_both_sides),
        cmocka_unit_test(a_ticket_is_used_once),
        cmocka_unit_test(window_pages_do_not_run_out),
        cmocka_unit_test(what_is_cached_outlives_the_wait_for_pages),
    };

    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
