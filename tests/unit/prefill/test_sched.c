/* Scheduling of prompts: the earliest and the shortest in turn, claims ahead of time and not too early, chunk
 * borders. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "prefill/sched.h"

#define NONE UINT32_MAX

static void test_first_come_first_served(void **state)
{
    const struct dmk_prefill_turn turns[] = {
        {DMK_PREFILL_RUNNING, 7, 100, 0},
        {DMK_PREFILL_RUNNING, 3, 100, 0},
        {DMK_PREFILL_FREE, 1, 100, 0},
        {DMK_PREFILL_CLAIMING, 2, 100, 0},
    };

    (void)state;
    assert_int_equal(dmk_prefill_pick_run(turns, 4, false), 1); /* the claiming one is passed */
    assert_int_equal(dmk_prefill_pick_run(turns, 1, false), 0);
    assert_int_equal(dmk_prefill_pick_run(turns + 2, 2, false), NONE);
}

static void test_a_job_with_its_last_chunk_in_flight_has_no_turn(void **state)
{
    const struct dmk_prefill_turn turns[] = {
        {DMK_PREFILL_RUNNING, 1, 64, 64},
        {DMK_PREFILL_RUNNING, 2, 10, 0},
    };

    (void)state;
    assert_int_equal(dmk_prefill_pick_run(turns, 2, false), 1);
    assert_int_equal(dmk_prefill_pick_run(turns, 1, false), NONE);
}

static void test_the_next_claims_when_the_engine_runs_dry(void **state)
{
    struct dmk_prefill_turn turns[] = {
        {DMK_PREFILL_RUNNING, 1, 200, 64},
        {DMK_PREFILL_QUEUED, 9, 300, 0},
        {DMK_PREFILL_QUEUED, 5, 300, 0},
    };

    (void)state;
    assert_int_equal(dmk_prefill_pick_claim(turns, 3), NONE); /* more chunks of job 1 to come */
    turns[0].n_left = 64;
    assert_int_equal(dmk_prefill_pick_claim(turns, 3), 2); /* its last one is under way */
    turns[0].state = DMK_PREFILL_PUSHED;
    assert_int_equal(dmk_prefill_pick_claim(turns, 3), 2);
}

static void test_a_short_job_passes_a_long_one(void **state)
{
    struct dmk_prefill_turn turns[] = {
        {DMK_PREFILL_RUNNING, 1, 60000, 2048},
        {DMK_PREFILL_QUEUED, 2, 40, 0},
        {DMK_PREFILL_QUEUED, 3, 9, 0},
        {DMK_PREFILL_QUEUED, 4, 70000, 0},
    };

    (void)state;
    assert_int_equal(dmk_prefill_pick_claim(turns, 4), 2);
    turns[2].state = DMK_PREFILL_CLAIMING;
    assert_int_equal(dmk_prefill_pick_claim(turns, 4), NONE); /* its turn comes after that one's */
    turns[2].state = DMK_PREFILL_RUNNING;
    assert_int_equal(dmk_prefill_pick_run(turns, 4, true), 2);
    assert_int_equal(dmk_prefill_pick_run(turns, 4, false), 0);
    turns[2].n_flight = turns[2].n_left;
    assert_int_equal(dmk_prefill_pick_claim(turns, 4), 1);
    /* However many short ones come: who has waited longest claims when all that runs came later. */
    turns[0].order = 5;
    turns[1].state = DMK_PREFILL_RUNNING;
    turns[1].order = 6;
    assert_int_equal(dmk_prefill_pick_claim(turns, 4), 3);
}

static void test_priority_moves_the_turn(void **state)
{
    struct dmk_prefill_turn turns[] = {
        {.state = DMK_PREFILL_RUNNING, .order = 1, .n_left = 6000, .due_ns = 100},
        {.state = DMK_PREFILL_QUEUED, .order = 2, .n_left = 7000, .due_ns = 200},
        {.state = DMK_PREFILL_QUEUED, .order = 3, .n_left = 8000, .due_ns = -300},
        {.state = DMK_PREFILL_QUEUED, .order = 4, .n_left = 9000, .due_ns = 150},
    };

    (void)state;
    assert_int_equal(dmk_prefill_pick_claim(turns, 4), 2);
    turns[2].state = DMK_PREFILL_RUNNING;
    assert_int_equal(dmk_prefill_pick_run(turns, 4, false), 2);
    assert_int_equal(dmk_prefill_pick_run(turns, 4, true), 0);
    assert_int_equal(dmk_prefill_pick_claim(turns, 4), NONE);
    turns[0].state = turns[2].state = DMK_PREFILL_PUSHED;
    assert_int_equal(dmk_prefill_pick_claim(turns, 4), 3);
    turns[3].due_ns = 200; /* two that are due at a time: the one that came first */
    assert_int_equal(dmk_prefill_pick_claim(turns, 4), 1);
}

static void test_a_silent_decode_worker_holds_up_nobody(void **state)
{
    struct dmk_prefill_turn turns[DMK_PREFILL_MAX_CLAIMING + 1];

    (void)state;
    turns[0] = (struct dmk_prefill_turn){DMK_PREFILL_QUEUED, 99, 10, 0};
    for (uint32_t i = 1; i <= DMK_PREFILL_MAX_CLAIMING; i++) {
        assert_int_equal(dmk_prefill_pick_claim(turns, i), 0);
        turns[i] = (struct dmk_prefill_turn){DMK_PREFILL_CLAIMING, i, 10, 0};
    }
    assert_int_equal(dmk_prefill_pick_claim(turns, DMK_PREFILL_MAX_CLAIMING + 1), NONE);
}

static void test_chunks_tile_the_prompt_and_stop_at_boundaries(void **state)
{
    (void)state;
    for (uint32_t chunk = 1; chunk <= 700; chunk += 37) {
        for (uint32_t start = 0; start <= 2048; start += 64) {
            const uint32_t n = start + 4500;
            uint32_t pos = start;

            while (pos < n) {
                const uint32_t len = dmk_prefill_chunk(pos, n, chunk, 2048);

                assert_true(len > 0 && len <= chunk && pos + len <= n);
                assert_int_equal(pos / 2048, (pos + len - 1) / 2048); /* none crosses a boundary */
                pos += len;
            }
        }
    }
    assert_int_equal(dmk_prefill_chunk(0, 10, 512, 2048), 10);
    assert_int_equal(dmk_prefill_chunk(2000, 9000, 512, 2048), 48);
    assert_int_equal(dmk_prefill_chunk(2048, 9000, 512, 2048), 512);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_come_first_served),
        cmocka_unit_test(test_a_job_with_its_last_chunk_in_flight_has_no_turn),
        cmocka_unit_test(test_the_next_claims_when_the_engine_runs_dry),
        cmocka_unit_test(test_a_short_job_passes_a_long_one),
        cmocka_unit_test(test_priority_moves_the_turn),
        cmocka_unit_test(test_a_silent_decode_worker_holds_up_nobody),
        cmocka_unit_test(test_chunks_tile_the_prompt_and_stop_at_boundaries),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
