/* A sequence's logits bit for bit, whoever shares its steps: in large companies, in chunks on both sides of
 * 256, run after run, on any number of ranks. test_engine.c has the small cases. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "common/base/hash.h"
#include "common/base/rng.h"
#include "common/model/engine_internal.h"
#include "tests/unit/model/memory.h"

enum {
    VOCAB = 512,
    N_PROMPT = 400,
    N_DECODED = 4,
    MAX_SEQS = 257,
    N_RING = 3,
    N_PAGES = N_PROMPT / 64 + 1 + MAX_SEQS,
    MAX_ROWS = 512,
};

static uint64_t seed;

/* Sequence 0 has the long text; the others have a page each. */
struct seq {
    uint32_t ids[N_PROMPT + N_DECODED], pages[N_PROMPT / 64 + 1], ring[N_RING];
};

static struct seq seqs[MAX_SEQS];

static void fill_seqs(void)
{
    uint32_t page = 0;

    for (uint32_t s = 0; s < MAX_SEQS; s++) {
        for (uint32_t i = 0; i < N_PROMPT + N_DECODED; i++) {
            seqs[s].ids[i] = (uint32_t)(dmk_rng_u64(seed, s, i) % VOCAB);
        }
        for (uint32_t i = 0; i < (s == 0 ? N_PROMPT / 64 + 1 : 1); i++) {
            seqs[s].pages[i] = page++;
        }
        for (uint32_t i = 0; i < N_RING; i++) {
            seqs[s].ring[i] = s * N_RING + i;
        }
    }
}

static struct dmk_engine *open_engine(struct dmk_weights *weights, uint32_t tp)
{
    const struct dmk_engine_conf conf = {.backend = "cpu",
                                         .layout = {tp, 1},
                                         .n_threads = 2,
                                         .n_full_pages = N_PAGES,
                                         .n_window_pages = MAX_SEQS * N_RING,
                                         .max_step_tokens = 600,
                                         .max_step_seqs = MAX_SEQS,
                                         .max_logit_rows = MAX_ROWS};
    struct dmk_engine *engine = NULL;
    struct dmk_error error = {0};

    if (dmk_engine_open_weights(&conf, weights, &engine, &error) != 0) {
        fail_msg("open: %s", error.text);
    }
    return engine;
}

static struct dmk_step_seq part(uint32_t s, uint32_t pos, uint32_t n, enum dmk_logits logits)
{
    struct dmk_step_seq p = {.ids = seqs[s].ids + pos,
                             .n_tokens = n,
                             .pos = pos,
                             .full_pages = seqs[s].pages,
                             .n_ring = N_RING,
                             .logits = logits};

    memcpy(p.ring, seqs[s].ring, sizeof(seqs[s].ring));
    return p;
}

static void run(struct dmk_engine *engine, struct dmk_step_seq *parts, uint32_t n, float *logits)
{
    const struct dmk_step step = {.seqs = parts, .n_seqs = n, .logits = logits};

    assert_int_equal(dmk_engine_step(engine, &step), 0);
}

static float *rows_new(uint32_t n)
{
    float *rows = malloc((size_t)n * VOCAB * sizeof(float));

    assert_non_null(rows);
    memset(rows, 0xff, (size_t)n * VOCAB * sizeof(float));
    return rows;
}

static void check_rows(const float *got, const float *want, uint32_t n, const char *what,
                       uint32_t k)
{
    for (uint32_t r = 0; r < n; r++) {
        if (memcmp(got + (size_t)r * VOCAB, want + (size_t)r * VOCAB, VOCAB * sizeof(float)) != 0) {
            fail_msg("%s %u: row %u differs", what, k, r);
        }
        assert_true(want[(size_t)r * VOCAB] > -100.0f && want[(size_t)r * VOCAB] < 100.0f);
    }
}

/* Logits at each position of the prompt, computed in chunks of any length. */
static void chunks_on_both_sides_of_256(void **state)
{
    static const uint32_t chunks[] = {1, 100, 255, 256, 257, N_PROMPT};
    struct dmk_weights *weights = *state;
    struct dmk_engine *engine = open_engine(weights, 1);
    float *want = rows_new(N_PROMPT), *got = rows_new(N_PROMPT);

    for (uint32_t c = 0; c < sizeof(chunks) / sizeof(chunks[0]); c++) {
        float *out = c == 0 ? want : got;

        for (uint32_t pos = 0; pos < N_PROMPT; pos += chunks[c]) {
            const uint32_t left = N_PROMPT - pos;
            struct dmk_step_seq p =
                part(0, pos, left < chunks[c] ? left : chunks[c], DMK_LOGITS_ALL);

            run(engine, &p, 1, out + (size_t)pos * VOCAB);
        }
        if (c > 0) {
            check_rows(got, want, N_PROMPT, "chunks of", chunks[c]);
        }
    }
    dmk_engine_close(&engine);
    free(want);
    free(got);
}

/* A sequence decodes beside n - 1 others, which are at their beginnings, in the middle of the step's rows. */
static void decode_beside(struct dmk_engine *engine, uint32_t n, float *ret_rows)
{
    static struct dmk_step_seq parts[MAX_SEQS];
    static float out[MAX_SEQS * VOCAB];
    struct dmk_step_seq prompt = part(0, 0, N_PROMPT, DMK_LOGITS_NONE);

    run(engine, &prompt, 1, NULL);
    for (uint32_t i = 0; i < N_DECODED; i++) {
        const uint32_t at = n / 2;

        for (uint32_t s = 1, slot = 0; s < n; s++, slot++) {
            slot += slot == at;
            parts[slot] = part(s, i, 1, DMK_LOGITS_LAST);
        }
        parts[at] = part(0, N_PROMPT + i, 1, DMK_LOGITS_LAST);
        run(engine, parts, n, out);
        memcpy(ret_rows + i * VOCAB, out + at * VOCAB, VOCAB * sizeof(float));
    }
}

static void decoding_beside_many(void **state)
{
    static const uint32_t companies[] = {8, 256, 257};
    struct dmk_weights *weights = *state;
    struct dmk_engine *engine = open_engine(weights, 1);
    float *want = rows_new(N_DECODED), *got = rows_new(N_DECODED);

    decode_beside(engine, 1, want);
    for (uint32_t c = 0; c < sizeof(companies) / sizeof(companies[0]); c++) {
        decode_beside(engine, companies[c], got);
        check_rows(got, want, N_DECODED, "in a company of", companies[c]);
    }
    /* And what decoding said is what computing it as a prompt says. */
    struct dmk_step_seq all = part(0, 0, N_PROMPT + N_DECODED, DMK_LOGITS_ALL);
    float *rows = rows_new(N_PROMPT + N_DECODED);

    run(engine, &all, 1, rows);
    check_rows(rows + (size_t)N_PROMPT * VOCAB, want, N_DECODED, "as a prompt", 0);
    dmk_engine_close(&engine);
    free(want);
    free(got);
    free(rows);
}

/* Thirty-two requests of 1 to 8 tokens in one step. */
static void run_requests(struct dmk_engine *engine, uint32_t n, float *ret_rows)
{
    struct dmk_step_seq parts[32];

    for (uint32_t s = 0; s < n; s++) {
        parts[s] = part(s + 1, 0, 1 + s % 8, DMK_LOGITS_LAST);
    }
    run(engine, parts, n, ret_rows);
}

static void same_in_every_run_on_any_ranks(void **state)
{
    enum { N = 32, N_RUNS = 50 };
    struct dmk_weights *weights = *state;
    float *want = rows_new(N), *got = rows_new(N);

    for (uint32_t tp = 1; tp <= 8; tp *= 2) {
        struct dmk_engine *engine = open_engine(weights, tp);

        for (uint32_t i = 0; i < N_RUNS; i++) {
            run_requests(engine, N, tp == 1 && i == 0 ? want : got);
            check_rows(tp == 1 && i == 0 ? want : got, want, N, "ranks", tp);
        }
        if (tp == 1) { /* each alone */
            for (uint32_t s = 0; s < N; s++) {
                struct dmk_step_seq p = part(s + 1, 0, 1 + s % 8, DMK_LOGITS_LAST);

                run(engine, &p, 1, got);
                check_rows(got, want + (size_t)s * VOCAB, 1, "alone, request", s);
            }
        }
        dmk_engine_close(&engine);
    }
    free(want);
    free(got);
}

static int make_weights(void **state)
{
    const struct dmk_shape shape = small_shape(2);

    fill_seqs();
    *state = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    return 0;
}

static int free_weights(void **state)
{
    memory_weights_free(*state);
    return 0;
}

int main(void)
{
    const char *given = getenv("DMK_TEST_SEED");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_on_both_sides_of_256),
        cmocka_unit_test(decoding_beside_many),
        cmocka_unit_test(same_in_every_run_on_any_ranks),
    };

    seed = given ? strtoull(given, NULL, 0) : dmk_random_u64();
    printf("DMK_TEST_SEED=%#llx\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, make_weights, free_weights);
}
