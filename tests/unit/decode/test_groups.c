/* Data-parallel groups in the decode core: where a request goes, that pools and caches of groups are apart,
 * and what the routers hear of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/rng.h"
#include "tests/support/cell.h"
#include "tests/support/shadow_engine.h"

enum { VOCAB = 300, MAX_PROMPT = 3000, MAX_EVENTS = 64 };

struct bed {
    struct shadow_engine *engine;
    struct cell *cell;
};

static struct bed open_bed(uint32_t n_pages, uint32_t n_window_pages, uint32_t max_sequences,
                           uint32_t dp)
{
    const struct shadow_conf shadow = {.n_layers = 4,
                                       .n_kv_heads = 2,
                                       .vocab = VOCAB,
                                       .tp = 1,
                                       .dp = dp,
                                       .n_full_pages = n_pages,
                                       .n_window_pages = n_window_pages,
                                       .seed = 5};
    struct bed bed = {.engine = shadow_engine_new(&shadow)};
    const struct cell_conf conf = {.decode = shadow_engine_port(bed.engine),
                                   .d_full_pages = n_pages,
                                   .d_window_pages = n_window_pages,
                                   .max_sequences = max_sequences,
                                   .max_context = 4096,
                                   .chunk_tokens = 512};

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

/* Prompts share their first `shared` ids; returns the answer's index. */
static uint32_t ask(struct bed *bed, uint32_t n_prompt, uint32_t shared, uint64_t seed,
                    uint32_t max_tokens)
{
    static uint32_t ids[MAX_PROMPT];
    const struct dmk_decode_request r = {
        .prompt = ids, .n_prompt = n_prompt, .max_tokens = max_tokens, .ignore_eos = true};

    for (uint32_t i = 0; i < n_prompt; i++) {
        ids[i] = (uint32_t)(dmk_rng_u64(i < shared ? 1 : seed, 3, i) % (VOCAB - 1));
    }
    return cell_ask(bed->cell, &r);
}

static uint32_t n_in(const struct bed *bed, uint32_t group)
{
    return dmk_decode_group(bed->cell->decode, group).n_sequences;
}

static void assert_equations(const struct bed *bed)
{
    const struct dmk_decode_load load = dmk_decode_load(bed->cell->decode);
    struct dmk_kv_pool_counts sum = {0};
    uint32_t most = 0;

    for (uint32_t g = 0; g < dmk_decode_n_groups(bed->cell->decode); g++) {
        const struct dmk_decode_group group = dmk_decode_group(bed->cell->decode, g);
        const struct dmk_kv_pool_counts pools[] = {group.full, group.window};

        for (uint32_t i = 0; i < 2; i++) {
            assert_int_equal(pools[i].free + pools[i].cached + pools[i].leased + pools[i].draining,
                             pools[i].total);
        }
        sum.total += group.full.total;
        sum.free += group.full.free;
        sum.cached += group.full.cached;
        sum.leased += group.full.leased;
        most =
            group.full.free + group.full.cached > most ? group.full.free + group.full.cached : most;
    }
    assert_int_equal(load.full.total, sum.total);
    assert_int_equal(load.full.free, sum.free);
    assert_int_equal(load.full.cached, sum.cached);
    assert_int_equal(load.full.leased, sum.leased);
    assert_int_equal(load.most_full_free, most);
}

static void sequences_spread(void **state)
{
    struct bed bed = open_bed(100, 60, 12, 4);

    (void)state;
    for (uint32_t i = 0; i < 8; i++) {
        ask(&bed, 40 + i, 0, i, 30);
        assert_equations(&bed);
    }
    for (uint32_t g = 0; g < 4; g++) {
        assert_int_equal(n_in(&bed, g), 2);
    }
    assert_true(cell_run(bed.cell, 2000));
    assert_equations(&bed);
    close_bed(&bed);
}

/* Of groups with as many sequences each, the one with the most room. */
static void room_decides_among_equals(void **state)
{
    enum { N = 4 };

    (void)state;
    for (uint32_t turn = 0; turn < N; turn++) {
        struct bed bed = open_bed(100, 60, 12, N);
        uint32_t home[N] = {0}, roomy;

        for (uint32_t i = 0; i < N; i++) { /* one in each, one of them short */
            uint32_t before[N];

            for (uint32_t g = 0; g < N; g++) {
                before[g] = n_in(&bed, g);
            }
            ask(&bed, (i + turn) % N == 0 ? 40 : 1500, 0, i, 30);
            for (uint32_t g = 0; g < N; g++) {
                home[i] = n_in(&bed, g) > before[g] ? g : home[i];
            }
        }
        roomy = home[(N - turn) % N];
        ask(&bed, 40, 0, 9, 30);
        for (uint32_t g = 0; g < N; g++) {
            assert_int_equal(n_in(&bed, g), g == roomy ? 2 : 1);
        }
        assert_true(cell_run(bed.cell, 2000));
        close_bed(&bed);
    }
}

/* A beginning that all prompts share lies in one group's cache: it must not draw all of them there, unless
 * it is worth more than the others' company. */
static void a_shared_beginning_does_not_crowd_a_group(void **state)
{
    static const struct {
        uint32_t shared, most; /* sequences in the group that holds it */
    } cases[] = {{64, 3}, {2048, 6}};

    (void)state;
    for (uint32_t c = 0; c < 2; c++) {
        struct bed bed = open_bed(400, 60, 12, 2);
        uint32_t home;

        ask(&bed, cases[c].shared + 1, cases[c].shared, 1, 2);
        assert_true(cell_run(bed.cell, 2000));
        home = dmk_decode_group(bed.cell->decode, 0).full.cached > 0 ? 0 : 1;
        for (uint32_t i = 0; i < 6; i++) {
            const uint32_t a = ask(&bed, cases[c].shared + 20 + i, cases[c].shared, 10 + i, 30);

            /* The first one finds the group as empty as the other. */
            assert_true(i > 0 || bed.cell->answers[a].have == cases[c].shared);
        }
        assert_int_equal(n_in(&bed, home), cases[c].most);
        assert_int_equal(n_in(&bed, 1 - home), 6 - cases[c].most);
        assert_true(cell_run(bed.cell, 2000));
        close_bed(&bed);
    }
}

/* The cache speaks for a group that has no pages left: the request goes to another one. */
static void a_full_group_is_passed_over(void **state)
{
    struct bed bed = open_bed(40, 24, 8, 2);
    uint32_t home, first, second;

    (void)state;
    ask(&bed, 641, 640, 1, 2);
    assert_true(cell_run(bed.cell, 2000));
    home = dmk_decode_group(bed.cell->decode, 0).full.cached > 0 ? 0 : 1;
    first = ask(&bed, 660, 640, 2, 1500); /* 27 pages */
    assert_int_equal(bed.cell->answers[first].have, 640);
    assert_int_equal(n_in(&bed, home), 1);
    second = ask(&bed, 661, 640, 3, 1500);
    assert_false(bed.cell->answers[second].failed);
    assert_int_equal(bed.cell->answers[second].have, 0);
    assert_int_equal(n_in(&bed, 1 - home), 1);
    assert_equations(&bed);
    /* Now neither has room. */
    second = ask(&bed, 662, 640, 4, 1500);
    assert_true(bed.cell->answers[second].failed);
    assert_int_equal(bed.cell->answers[second].code, DMK_FAILURE_FULL);
    cell_cancel(bed.cell, first);
    cell_cancel(bed.cell, first + 1);
    close_bed(&bed);
}

/* A group with a preempted sequence takes nobody new; the other one does. */
static void a_starved_group_takes_nobody(void **state)
{
    struct bed bed = open_bed(35, 24, 8, 2);
    uint32_t late[3];

    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        ask(&bed, 10 + i, 0, i, 1200); /* 17 pages, then 19 */
    }
    assert_int_equal(n_in(&bed, 0), 2);
    while (dmk_decode_load(bed.cell->decode).n_waiting == 0) {
        cell_turn(bed.cell);
        assert_true(bed.cell->n_turns < 3000);
    }
    for (uint32_t i = 0; i < 3; i++) {
        late[i] = ask(&bed, 5, 0, 50 + i, 4);
        assert_false(bed.cell->answers[late[i]].failed);
    }
    assert_int_equal(n_in(&bed, 0), 2);
    assert_int_equal(n_in(&bed, 1), 4);
    assert_true(cell_run(bed.cell, 8000));
    assert_equations(&bed);
    assert_int_equal(bed.cell->answers[1].choices[0].n_preemptions, 0);
    assert_true(bed.cell->answers[2].choices[0].n_preemptions > 0);
    close_bed(&bed);
}

struct told {
    struct dmk_kv_prefix_event events[MAX_EVENTS];
    uint32_t n, n_added, n_removed;
};

static struct told take_events(struct bed *bed)
{
    struct told told = {0};
    bool lost;

    told.n = dmk_decode_block_events(bed->cell->decode, told.events, MAX_EVENTS, &lost);
    assert_false(lost);
    for (uint32_t i = 0; i < told.n; i++) {
        told.n_added += told.events[i].added;
        told.n_removed += !told.events[i].added;
    }
    return told;
}

/* One prefix in both groups is gone for the routers when the last of them has lost it. */
static void a_prefix_is_gone_with_its_last_group(void **state)
{
    struct bed bed = open_bed(40, 24, 8, 2);
    struct told told;

    (void)state;
    /* At the same time, so that neither can use the other's. */
    ask(&bed, 129, 128, 1, 1);
    ask(&bed, 129, 128, 1, 1);
    assert_int_equal(n_in(&bed, 0), 1);
    assert_int_equal(n_in(&bed, 1), 1);
    assert_true(cell_run(bed.cell, 2000));
    told = take_events(&bed);
    assert_int_equal(told.n_added, 2);
    assert_int_equal(told.n_removed, 0);
    assert_true(dmk_id128_equal(told.events[0].hash, told.events[1].hash));
    /* A prompt as long as a pool lets nothing else stay in its group's cache. */
    ask(&bed, 40 * 64 - 2, 0, 9, 1);
    assert_true(cell_run(bed.cell, 2000));
    told = take_events(&bed);
    for (uint32_t i = 0; i < told.n; i++) {
        assert_true(
            told.events[i].added); /* of the long one; the other group still has the old one */
    }
    dmk_decode_flush_cache(bed.cell->decode);
    told = take_events(&bed);
    assert_true(told.n_removed >= 2);
    assert_int_equal(told.n_added, 0);
    close_bed(&bed);
}

/* Several groups lose their pages at once: n choices, a cancel of one request and the end of a router. */
static void cancels_return_the_right_groups_pages(void **state)
{
    struct bed bed = open_bed(60, 40, 12, 4);
    const struct dmk_sample_params sampling = {
        .temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 4};
    uint32_t prompt[100] = {1, 2, 3};
    const struct dmk_decode_request four = {.prompt = prompt,
                                            .n_prompt = 100,
                                            .sampling = &sampling,
                                            .max_tokens = 40,
                                            .n = 4,
                                            .ignore_eos = true};

    (void)state;
    cell_ask(bed.cell, &four); /* choices share a prompt, so all live in one group */
    assert_int_equal(n_in(&bed, 0), 4);
    for (uint32_t i = 0; i < 6; i++) {
        ask(&bed, 30 + i, 0, i, 40);
    }
    for (uint32_t t = 0; t < 5; t++) {
        cell_turn(bed.cell);
        assert_equations(&bed);
    }
    assert_int_equal(n_in(&bed, 0), 4);
    cell_cancel(bed.cell, 0);
    assert_int_equal(n_in(&bed, 0), 0);
    assert_int_equal(dmk_decode_group(bed.cell->decode, 0).full.leased, 0);
    assert_int_equal(n_in(&bed, 1), 2);
    assert_equations(&bed);
    assert_true(cell_run(bed.cell, 2000));
    close_bed(&bed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sequences_spread),
        cmocka_unit_test(room_decides_among_equals),
        cmocka_unit_test(a_shared_beginning_does_not_crowd_a_group),
        cmocka_unit_test(a_full_group_is_passed_over),
        cmocka_unit_test(a_starved_group_takes_nobody),
        cmocka_unit_test(a_prefix_is_gone_with_its_last_group),
        cmocka_unit_test(cancels_return_the_right_groups_pages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
