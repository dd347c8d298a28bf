/* Each rule of the decode scheduler. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <string.h>
#include "decode/sched.h"

static const struct dmk_sched_limits wide = {
    .step_tokens = 1000, .step_seqs = 100, .logit_rows = 100, .chunk_tokens = 512};

static void every_decode_takes_part(void **state)
{
    const struct dmk_sched_seq seqs[] = {
        {1, 1, 2048, false}, {2, 300, 2048, false}, {3, 1, 2048, false}, {4, 1, 2048, false}};
    struct dmk_sched_pick picks[4];

    (void)state;
    assert_int_equal(dmk_sched_pick(seqs, 4, wide, picks), 4);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(picks[i].index, i); /* order of age */
        assert_int_equal(picks[i].n_tokens, i == 1 ? 299 : 1);
        assert_int_equal(picks[i].n_rows, i == 1 ? 0 : 1);
    }
}

static void the_oldest_and_the_shortest_prompts_share(void **state)
{
    const struct dmk_sched_seq seqs[] = {
        {1, 901, 2048, false}, {2, 301, 2048, false}, {3, 101, 2048, false}, {4, 1, 1, false}};
    struct dmk_sched_limits limits = wide;
    struct dmk_sched_pick picks[4];

    (void)state;
    assert_int_equal(dmk_sched_pick(seqs, 4, limits, picks), 4);
    assert_int_equal(picks[0].n_tokens, 256);
    assert_int_equal(picks[1].n_tokens, 156);
    assert_int_equal(picks[2].n_tokens, 100);
    assert_int_equal(picks[3].index, 3);
    limits.step_tokens = 101; /* the decode comes first, prompts get the rest */
    assert_int_equal(dmk_sched_pick(seqs, 4, limits, picks), 3);
    assert_int_equal(picks[0].n_tokens, 50);
    assert_int_equal(picks[1].index, 2);
    assert_int_equal(picks[1].n_tokens, 50);
    assert_int_equal(picks[2].index, 3);
    limits = wide; /* what short ones leave is the oldest's again */
    limits.chunk_tokens = 1000;
    limits.step_tokens = 1001;
    assert_int_equal(dmk_sched_pick(seqs, 4, limits, picks), 4);
    assert_int_equal(picks[0].n_tokens, 600);
    assert_int_equal(dmk_sched_pick(seqs, 1, limits, picks), 1);
    assert_int_equal(picks[0].n_tokens, 900);
}

/* One prompt of 60000 tokens and 512 a step; five of 10 come later, and ever more behind them. */
static void a_long_prompt_delays_no_short_one_and_still_ends(void **state)
{
    enum { N_SHORT = 5, SHORT = 10, EVERY = 2 };
    const struct dmk_sched_limits limits = {
        .step_tokens = 512, .step_seqs = 100, .logit_rows = 100, .chunk_tokens = 512};
    struct dmk_sched_seq seqs[1 + N_SHORT] = {{1, 60000, 2048, false}};
    struct dmk_sched_pick picks[1 + N_SHORT];
    uint32_t n = 1, step = 0, arrived[1 + N_SHORT] = {0};
    uint64_t order = 2;

    (void)state;
    for (; seqs[0].todo > 1; step++) {
        uint32_t n_picks, computed = 0;

        assert_true(step < 60000 / 256 + 2); /* half of each step at least */
        while (step % EVERY == 0 && n < 1 + N_SHORT) {
            arrived[n] = step;
            seqs[n++] = (struct dmk_sched_seq){order++, SHORT, 2048, false};
        }
        n_picks = dmk_sched_pick(seqs, n, limits, picks);
        for (uint32_t i = 0; i < n_picks; i++) {
            struct dmk_sched_seq *seq = &seqs[picks[i].index];

            computed += picks[i].n_tokens;
            seq->todo -= picks[i].n_rows ? 0 : picks[i].n_tokens;
            if (picks[i].index == 0) {
                seq->to_boundary = 2048 - (60000 - seq->todo) % 2048;
            }
            if (picks[i].n_rows) { /* its first token: it leaves */
                assert_true(step - arrived[picks[i].index] <= 20);
                seq->todo = 0;
            }
        }
        assert_true(computed <= 512);
        for (uint32_t i = 1; i < n; i++) {
            if (seqs[i].todo == 0) {
                memmove(&seqs[i], &seqs[i + 1], (n - i - 1) * sizeof(seqs[0]));
                memmove(&arrived[i], &arrived[i + 1], (n - i - 1) * sizeof(arrived[0]));
                n--;
                i--;
            }
        }
    }
    assert_true(order > 100);
}

static void a_chunk_stops_before_the_last_token_and_at_boundaries(void **state)
{
    struct dmk_sched_seq seq = {1, 2, 2048, false};
    struct dmk_sched_pick pick;

    (void)state;
    assert_int_equal(dmk_sched_pick(&seq, 1, wide, &pick), 1);
    assert_int_equal(pick.n_tokens, 1);
    assert_int_equal(pick.n_rows, 0);
    seq = (struct dmk_sched_seq){1, 400, 7, false};
    assert_int_equal(dmk_sched_pick(&seq, 1, wide, &pick), 1);
    assert_int_equal(pick.n_tokens, 7);
}

static void rows_bound_scored_prompts(void **state)
{
    const struct dmk_sched_seq seqs[] = {
        {1, 400, 2048, true}, {2, 1, 1, false}, {3, 400, 2048, true}};
    struct dmk_sched_pick picks[3];

    (void)state;
    assert_int_equal(dmk_sched_pick(seqs, 3, wide, picks), 2);
    assert_int_equal(picks[0].n_tokens, 99); /* a row is kept for the decode step */
    assert_int_equal(picks[0].n_rows, 99);
    assert_int_equal(picks[1].index, 1);
}

static void sequences_bound_a_step(void **state)
{
    const struct dmk_sched_seq seqs[] = {{1, 9, 99, false}, {2, 1, 1, false}, {3, 9, 99, false}};
    struct dmk_sched_limits limits = wide;
    struct dmk_sched_pick picks[3];

    (void)state;
    limits.step_seqs = 2;
    assert_int_equal(dmk_sched_pick(seqs, 3, limits, picks), 2);
    assert_int_equal(picks[0].index, 0);
    assert_int_equal(picks[1].index, 1);
    assert_int_equal(dmk_sched_pick(seqs, 0, limits, picks), 0);
}

static void resuming_and_waiting(void **state)
{
    (void)state;
    assert_true(dmk_sched_may_resume(0, 10, 10));
    assert_false(dmk_sched_may_resume(0, 10, 9));
    assert_false(dmk_sched_may_resume(3, 10, 12));
    assert_true(dmk_sched_may_resume(3, 10, 13));
    assert_int_equal(dmk_sched_wait_hint_ms(2.0, 100), 200);
    assert_int_equal(dmk_sched_wait_hint_ms(2.0, 0), 50);
    assert_int_equal(dmk_sched_wait_hint_ms(1000.0, 1000), 10000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_decode_takes_part),
        cmocka_unit_test(the_oldest_and_the_shortest_prompts_share),
        cmocka_unit_test(a_long_prompt_delays_no_short_one_and_still_ends),
        cmocka_unit_test(a_chunk_stops_before_the_last_token_and_at_boundaries),
        cmocka_unit_test(rows_bound_scored_prompts),
        cmocka_unit_test(sequences_bound_a_step),
        cmocka_unit_test(resuming_and_waiting),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
