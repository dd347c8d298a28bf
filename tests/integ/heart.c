/* The heart of the matter; see heart.h. */
#include "tests/integ/heart.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/rng.h"

static const struct dmk_sample_params kinds[] = {
    {.temperature = 0, .top_p = 1, .repetition_penalty = 1, .logprobs = true},
    {.temperature = 1, .top_p = 0.95f, .repetition_penalty = 1, .seed = 77, .logprobs = true},
};
enum { N_KINDS = sizeof(kinds) / sizeof(kinds[0]) };

static struct cell *open_alone(const struct heart_ports *ports)
{
    const struct cell_conf conf = {.decode = ports->alone,
                                   .d_full_pages = ports->n_pages,
                                   .d_window_pages = ports->n_window_pages,
                                   .max_sequences = 4,
                                   .max_context = ports->max_context,
                                   .chunk_tokens = ports->chunk_tokens,
                                   .no_reuse = true};

    return cell_new(&conf);
}

static struct cell *open_split(const struct heart_ports *ports, uint32_t threshold,
                               struct dmk_loopback_conf fabric)
{
    const struct cell_conf conf = {.decode = ports->decode,
                                   .prefill = ports->prefill,
                                   .d_full_pages = ports->n_pages,
                                   .d_window_pages = ports->n_window_pages,
                                   .p_full_pages = ports->n_pages,
                                   .p_window_pages = ports->n_window_pages,
                                   .max_sequences = 4,
                                   .max_context = ports->max_context,
                                   .chunk_tokens = ports->chunk_tokens,
                                   .local_prefill_below = threshold,
                                   .fabric = fabric};

    return cell_new(&conf);
}

void heart_prompt(const struct heart_ports *ports, uint32_t *ids, uint32_t n, uint64_t seed,
                  uint32_t shared)
{
    for (uint32_t i = 0; i < n; i++) {
        ids[i] =
            (uint32_t)(dmk_rng_u64(i < shared ? 1 : seed, 3, i) % (ports->alone.shape->vocab - 1));
    }
}

static const struct cell_answer *ask(struct cell *c, const uint32_t *ids, uint32_t n,
                                     const struct dmk_sample_params *kind, uint32_t n_new)
{
    const struct dmk_decode_request r = {
        .prompt = ids, .n_prompt = n, .sampling = kind, .max_tokens = n_new, .ignore_eos = true};

    return &c->answers[cell_ask(c, &r)];
}

/* Runs one request to its end and leaves only its answer's choice. */
static struct cell_choice run_one(struct cell *c, const uint32_t *ids, uint32_t n,
                                  const struct dmk_sample_params *kind, uint32_t n_new,
                                  struct cell_answer *ret_answer)
{
    const struct cell_answer *a = ask(c, ids, n, kind, n_new);
    struct cell_choice choice;

    assert_true(cell_run(c, 20000));
    assert_true(cell_settle(c, 20000));
    assert_true(cell_check(c, true));
    choice = a->choices[0];
    if (ret_answer) {
        *ret_answer = *a;
    }
    cell_forget(c);
    return choice;
}

static bool equal(const struct cell_choice *a, const struct cell_choice *b)
{
    return a->finished && b->finished && a->n == b->n &&
           memcmp(a->ids, b->ids, a->n * sizeof(a->ids[0])) == 0 &&
           memcmp(a->logprobs, b->logprobs, a->n * sizeof(a->logprobs[0])) == 0;
}

static void assert_split(const struct cell_answer *a, const struct cell_choice *got,
                         const struct cell_choice *want, uint32_t n)
{
    if (a->failed) {
        fail_msg("prompt of %u: %s", n, a->text);
    }
    if (!equal(got, want)) {
        fail_msg("prompt of %u: the answer differs (transferred %d, have %u)", n, a->transferred,
                 a->have);
    }
}

void heart_lengths(const struct heart_ports *ports, const uint32_t *lengths, uint32_t n,
                   uint32_t n_new)
{
    struct cell *alone = open_alone(ports);
    struct cell *split = open_split(ports, 0, (struct dmk_loopback_conf){0});
    uint32_t *ids = malloc(ports->max_context * sizeof(*ids));
    struct cell_answer *a = malloc(sizeof(*a));

    assert_true(ids && a);
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t k = 0; k < N_KINDS; k++) {
            struct cell_choice want, got;

            heart_prompt(ports, ids, lengths[i], 10 * lengths[i] + k, 0);
            want = run_one(alone, ids, lengths[i], &kinds[k], n_new, NULL);
            got = run_one(split, ids, lengths[i], &kinds[k], n_new, a);
            assert_split(a, &got, &want, lengths[i]);
            assert_int_equal(a->transferred, lengths[i] > 1);
            assert_int_equal(a->have, 0);
            /* Again, with both sides' caches; then with the prefill worker's alone. */
            got = run_one(split, ids, lengths[i], &kinds[k], n_new, a);
            assert_split(a, &got, &want, lengths[i]);
            assert_int_equal(a->have, (lengths[i] - 1) / 64 * 64);
            dmk_decode_flush_cache(split->decode);
            got = run_one(split, ids, lengths[i], &kinds[k], n_new, a);
            assert_split(a, &got, &want, lengths[i]);
            assert_int_equal(a->have, 0);
            assert_int_equal(a->p_cached, (lengths[i] - 1) / 64 * 64);
        }
    }
    assert_int_equal(dmk_prefill_load(split->prefill).n_staged > 0,
                     ports->prefill.stage[0] != NULL);
    free(ids);
    free(a);
    cell_free(&alone);
    cell_free(&split);
}

void heart_shared_beginnings(const struct heart_ports *ports, uint32_t n_new)
{
    static const uint32_t shared[] = {64, 128, 192, 500}, tails[] = {1, 70, 130, 300};
    struct cell *alone = open_alone(ports);
    struct cell *split = open_split(ports, 100, (struct dmk_loopback_conf){0});
    uint32_t ids[900], n_local = 0, n_remote = 0, n_reused = 0;
    struct cell_answer *a = malloc(sizeof(*a));

    assert_non_null(a);
    for (uint32_t s = 0; s < (ports->light ? 2 : 4); s++) {
        for (uint32_t t = 0; t < 8; t++) {
            const uint32_t n = shared[s] + tails[t % 4];
            struct cell_choice want, got;

            heart_prompt(ports, ids, n, 100 * s + t % 4, shared[s]);
            want = run_one(alone, ids, n, &kinds[t % 2], n_new, NULL);
            got = run_one(split, ids, n, &kinds[t % 2], n_new, a);
            assert_split(a, &got, &want, n);
            assert_int_equal(a->needs_prefill, n - 1 - a->have >= 100);
            n_local += !a->needs_prefill;
            n_remote += a->needs_prefill;
            n_reused += a->have > 0;
        }
    }
    assert_true(n_local > 0 && n_remote > 0 && n_reused > 0);
    free(a);
    cell_free(&alone);
    cell_free(&split);
}

void heart_every_remainder(const struct heart_ports *ports)
{
    enum { WHOLE = 192, TAIL = 8, BELOW = 64 };
    struct cell *alone = open_alone(ports);
    struct cell *split = open_split(ports, BELOW, (struct dmk_loopback_conf){0});
    uint32_t ids[WHOLE + DMK_PAGE_TOKENS], n_reused = 0;
    struct cell_answer *a = malloc(sizeof(*a));

    assert_non_null(a);
    for (uint32_t n = WHOLE + 1; n <= WHOLE + DMK_PAGE_TOKENS; n++) {
        for (uint32_t turn = 0; turn < 2; turn++) {
            const uint32_t length = turn == 0 ? n : WHOLE + TAIL;
            struct cell_choice want, got;

            /* One that is as long as the whole pages has its own ids after them. */
            heart_prompt(ports, ids, length, 1000 * n + turn, 0);
            heart_prompt(ports, ids, WHOLE, 1000 * n, 0);
            want = run_one(alone, ids, length, &kinds[0], 1, NULL);
            got = run_one(split, ids, length, &kinds[0], 1, a);
            assert_split(a, &got, &want, length);
            n_reused += turn == 1 && a->have >= 128;
        }
    }
    assert_true(n_reused > 0);
    free(a);
    cell_free(&alone);
    cell_free(&split);
}

uint32_t heart_faults(const struct heart_ports *ports, enum dmk_xfer_lane lane,
                      struct dmk_loopback_faults faults, uint32_t rounds, uint64_t seed,
                      uint32_t *ret_failed)
{
    static const uint32_t lengths[] = {2, 64, 65, 129, 200, 513};
    struct cell *alone = open_alone(ports);
    struct cell *split = open_split(
        ports, 0, (struct dmk_loopback_conf){.seed = seed, .lane = lane, .faults = faults});
    struct cell_answer *a = malloc(sizeof(*a));
    uint32_t ids[600], n_right = 0, n_failed = 0;

    assert_non_null(a);
    for (uint32_t r = 0; r < rounds; r++) {
        const uint32_t n = lengths[dmk_rng_u64(seed, 1, r) % 6];
        struct cell_choice want, got;

        heart_prompt(ports, ids, n, dmk_rng_u64(seed, 2, r) % 5, 100);
        want = run_one(alone, ids, n, &kinds[r % 2], 6, NULL);
        got = run_one(split, ids, n, &kinds[r % 2], 6, a);
        if (a->failed) {
            assert_true(a->text[0] != 0);
            n_failed++;
        } else {
            assert_split(a, &got, &want, n);
            n_right++;
        }
        if (r % 3 == 0) {
            dmk_decode_flush_cache(split->decode);
        }
    }
    free(a);
    cell_free(&alone);
    cell_free(&split);
    *ret_failed = n_failed;
    return n_right;
}

void heart_crowd(const struct heart_ports *ports, uint64_t seed, uint32_t n_new)
{
    enum { MAX = 24 };
    const uint32_t n_asked = ports->light ? 8 : MAX;
    struct cell *alone = open_alone(ports);
    struct cell *split = open_split(ports, 80, (struct dmk_loopback_conf){.seed = seed});
    uint32_t ids[MAX][700], n[MAX], answer[MAX], n_right = 0;

    for (uint32_t i = 0; i < n_asked; i++) {
        n[i] = 1 + (uint32_t)(dmk_rng_u64(seed, 5, i) % 690);
        heart_prompt(ports, ids[i], n[i], i, (uint32_t)(dmk_rng_u64(seed, 6, i) % 400));
        answer[i] = (uint32_t)(ask(split, ids[i], n[i], &kinds[i % 2], n_new) - split->answers);
        for (uint32_t t = 0; t < dmk_rng_u64(seed, 7, i) % 12; t++) {
            cell_turn(split);
        }
        if (dmk_rng_u64(seed, 8, i) % 4 == 0) {
            cell_cancel(split, answer[dmk_rng_u64(seed, 9, i) % (i + 1)]);
        }
        assert_true(cell_check(split, false));
    }
    assert_true(cell_run(split, 20000));
    for (uint32_t i = 0; i < n_asked; i++) {
        const struct cell_answer *a = &split->answers[answer[i]];
        struct cell_choice want;

        if (a->cancelled || a->failed) {
            if (!a->cancelled && a->code != DMK_FAILURE_FULL) {
                fail_msg("request %u: %s", i, a->text);
            }
            continue;
        }
        want = run_one(alone, ids[i], n[i], &kinds[i % 2], n_new, NULL);
        assert_split(a, &a->choices[0], &want, n[i]);
        n_right++;
    }
    assert_true(n_right > 2);
    assert_true(cell_settle(split, 20000));
    assert_true(cell_check(split, true));
    cell_free(&alone);
    cell_free(&split);
}

static void strike(struct cell *c, enum heart_loss loss, uint64_t chance)
{
    switch (loss) {
    case HEART_CUT:
        dmk_loopback_cut(c->fabric, c->d_node, c->p_node);
        break;
    case HEART_PARTITION:
        dmk_loopback_partition(c->fabric, c->d_node, c->p_node, true);
        break;
    default:
        cell_kill_prefill(c, (uint32_t)(chance % 300));
    }
}

static void heal(struct cell *c, enum heart_loss loss)
{
    if (loss == HEART_PARTITION) {
        dmk_loopback_partition(c->fabric, c->d_node, c->p_node, false);
    } else if (loss == HEART_KILL) {
        cell_restart_prefill(c);
    }
}

static const uint32_t together_lengths[HEART_TOGETHER] = {200, 2, 65, 300, 1, 129, 64};
enum { TOGETHER_NEW = 6, TOGETHER_LOCAL = 66 };

static void together_prompt(const struct heart_ports *ports, uint32_t i, uint32_t *ids)
{
    heart_prompt(ports, ids, together_lengths[i], 70 + i, 0);
}

void heart_alone(const struct heart_ports *ports, struct cell_choice want[HEART_TOGETHER])
{
    struct cell *alone = open_alone(ports);
    uint32_t ids[300];

    for (uint32_t i = 0; i < HEART_TOGETHER; i++) {
        together_prompt(ports, i, ids);
        want[i] = run_one(alone, ids, together_lengths[i], &kinds[i % 2], TOGETHER_NEW, NULL);
    }
    cell_free(&alone);
}

/* Notes which groups hold a sequence. */
static void see_groups(const struct cell *c, uint32_t *seen)
{
    for (uint32_t g = 0; g < dmk_decode_n_groups(c->decode); g++) {
        const struct dmk_decode_group group = dmk_decode_group(c->decode, g);

        *seen |= (group.n_sequences > 0) << g;
    }
}

/* All requests, a few turns apart; the one at `cancelled` leaves while the others go on. */
static void round_together(const struct heart_ports *ports, struct cell *c,
                           const struct cell_choice *want, uint32_t cancelled, uint32_t *seen)
{
    const struct cell_answer *answers[HEART_TOGETHER];
    uint32_t ids[300];

    for (uint32_t i = 0; i < HEART_TOGETHER; i++) {
        together_prompt(ports, i, ids);
        answers[i] = ask(c, ids, together_lengths[i], &kinds[i % 2], TOGETHER_NEW);
        for (uint32_t t = 0; t < i % 3; t++) {
            cell_turn(c);
        }
        see_groups(c, seen);
    }
    if (cancelled < HEART_TOGETHER) {
        cell_turn(c);
        cell_cancel(c, (uint32_t)(answers[cancelled] - c->answers));
    }
    assert_true(cell_run(c, 20000));
    assert_true(cell_settle(c, 20000));
    assert_true(cell_check(c, true));
    for (uint32_t i = 0; i < HEART_TOGETHER; i++) {
        if (i != cancelled || !answers[i]->cancelled) {
            assert_split(answers[i], &answers[i]->choices[0], &want[i], together_lengths[i]);
        }
    }
    cell_forget(c);
}

void heart_together(const struct heart_ports *ports, const struct cell_choice want[HEART_TOGETHER])
{
    const struct cell_conf conf = {.decode = ports->decode,
                                   .prefill = ports->prefill,
                                   .d_full_pages = ports->n_pages,
                                   .d_window_pages = ports->n_window_pages,
                                   .p_full_pages = ports->n_pages,
                                   .p_window_pages = ports->n_window_pages,
                                   .max_sequences = HEART_TOGETHER,
                                   .max_context = ports->max_context,
                                   .chunk_tokens = 48,
                                   .local_prefill_below = TOGETHER_LOCAL};
    const uint32_t dp = ports->decode.layout.dp;
    struct cell *c = cell_new(&conf);
    struct cell_choice got;
    uint32_t ids[300], seen = 0;

    round_together(ports, c, want, 3, &seen);
    assert_true((uint32_t)__builtin_popcount(seen) >= (dp < 4 ? dp : 4));
    round_together(ports, c, want, HEART_TOGETHER, &seen);
    dmk_decode_flush_cache(c->decode);
    together_prompt(ports, 0, ids);
    got = run_one(c, ids, together_lengths[0], &kinds[0], TOGETHER_NEW, NULL);
    assert_true(equal(&got, &want[0]));
    cell_free(&c);
}

void heart_preemption(const struct heart_ports *ports)
{
    /* Each answer reserves 17 pages and grows to 19; a pool has 35. */
    enum { N = 3, POOL = 35, LENGTH = 10, N_NEW = 1200 };
    struct heart_ports small = *ports;
    const struct cell_answer *a[N];
    struct cell *alone, *split;
    uint32_t ids[N][LENGTH + N];

    assert_int_equal(ports->decode.layout.dp, 2);
    small.n_pages = POOL;
    small.max_context = LENGTH + N + N_NEW;
    alone = open_alone(&small);
    split = open_split(&small, 4096, (struct dmk_loopback_conf){0});
    for (uint32_t i = 0; i < N; i++) {
        heart_prompt(&small, ids[i], LENGTH + i, 90 + i, 0);
        a[i] = ask(split, ids[i], LENGTH + i, &kinds[i % 2], N_NEW);
    }
    assert_int_equal(dmk_decode_group(split->decode, 0).n_sequences, 2);
    assert_int_equal(dmk_decode_group(split->decode, 1).n_sequences, 1);
    assert_true(cell_run(split, 20000));
    assert_true(cell_settle(split, 20000));
    assert_true(cell_check(split, true));
    for (uint32_t i = 0; i < N; i++) {
        const struct cell_choice want =
            run_one(alone, ids[i], LENGTH + i, &kinds[i % 2], N_NEW, NULL);

        assert_split(a[i], &a[i]->choices[0], &want, LENGTH + i);
    }
    assert_int_equal(a[0]->choices[0].n_preemptions, 0);
    assert_int_equal(a[1]->choices[0].n_preemptions, 0);
    assert_true(a[2]->choices[0].n_preemptions > 0);
    cell_free(&alone);
    cell_free(&split);
}

uint32_t heart_losses(const struct heart_ports *ports, enum dmk_xfer_lane lane,
                      enum heart_loss loss, uint32_t rounds, uint64_t seed)
{
    enum { N = 3 };
    const struct dmk_loopback_faults slow = {.max_delay = 8, .late = 200, .late_steps = 60};
    struct cell *alone = open_alone(ports);
    struct cell *split = open_split(
        ports, 0, (struct dmk_loopback_conf){.seed = seed, .lane = lane, .faults = slow});
    uint32_t ids[N][600], n[N], n_failed = 0;

    for (uint32_t r = 0; r < rounds; r++) {
        const struct cell_answer *a[N];

        for (uint32_t i = 0; i < N; i++) {
            n[i] = 2 + (uint32_t)(dmk_rng_u64(seed, 10 + i, r) % 590);
            heart_prompt(ports, ids[i], n[i], 3 * r + i,
                         (uint32_t)(dmk_rng_u64(seed, 20, r) % 300));
            a[i] = ask(split, ids[i], n[i], &kinds[i % 2], 4);
        }
        for (uint32_t t = 0; t < 1 + dmk_rng_u64(seed, 30, r) % 60; t++) {
            cell_turn(split);
        }
        strike(split, loss, dmk_rng_u64(seed, 40, r));
        assert_true(cell_run(split, 20000));
        if (r % 2 == 0) {
            heal(split, loss); /* before the pages have come back */
        }
        assert_true(cell_settle(split, 20000));
        assert_true(cell_check(split, true));
        if (r % 2 != 0) {
            heal(split, loss);
        }
        for (uint32_t i = 0; i < N; i++) {
            struct cell_choice want;

            if (a[i]->failed) {
                assert_true(a[i]->text[0] != 0);
                n_failed++;
                continue;
            }
            want = run_one(alone, ids[i], n[i], &kinds[i % 2], 4, NULL);
            assert_split(a[i], &a[i]->choices[0], &want, n[i]);
        }
        cell_forget(split);
    }
    cell_free(&alone);
    cell_free(&split);
    return n_failed;
}
