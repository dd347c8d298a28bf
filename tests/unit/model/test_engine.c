/* The engine's promise: a sequence's logits depend on its own tokens only, bit for bit. Not on the cut
 * into chunks, the company in the step, the pages, the ring, the number of ranks and groups or the kernels. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/rng.h"
#include "common/model/engine_internal.h"
#include "kernels/dtype.h"
#include "tests/unit/model/memory.h"

#define MAX_TOKENS 256
#define N_FULL     160
#define N_WINDOW   24
#define MAX_PAGES  128
#define MAX_SEQS   4
#define VOCAB      512

static uint64_t seed;

static struct dmk_engine *open_layout(struct dmk_weights *weights, const char *backend, uint32_t tp,
                                      uint32_t dp)
{
    struct dmk_engine_conf conf = {.backend = backend,
                                   .layout = {tp, dp},
                                   .n_threads = 2,
                                   .n_full_pages = N_FULL,
                                   .n_window_pages = N_WINDOW,
                                   .max_step_tokens = MAX_TOKENS,
                                   .max_step_seqs = MAX_SEQS,
                                   .max_logit_rows = MAX_TOKENS};
    struct dmk_engine *engine = NULL;
    struct dmk_error error = {0};
    if (dmk_engine_open_weights(&conf, weights, &engine, &error) != 0) {
        fail_msg("open: %s", error.text);
    }
    return engine;
}

static struct dmk_engine *open_engine(struct dmk_weights *weights, const char *backend, uint32_t tp)
{
    return open_layout(weights, backend, tp, 1);
}

/* A sequence with pages of its own, in an order drawn from the salt. */
struct seq {
    uint32_t ids[8192], n_ids, pos, group;
    uint32_t pages[MAX_PAGES], ring[4], n_ring;
};

static void seq_init(struct seq *seq, uint32_t n_ids, uint64_t text, uint32_t first_page,
                     uint32_t first_ring, bool backwards)
{
    memset(seq, 0, sizeof(*seq));
    seq->n_ids = n_ids;
    for (uint32_t i = 0; i < n_ids; i++) {
        seq->ids[i] = (uint32_t)(dmk_rng_u64(seed, text, i) % VOCAB);
    }
    uint32_t n_pages = dmk_kv_pages_for(n_ids);
    for (uint32_t i = 0; i < n_pages; i++) {
        seq->pages[i] = first_page + (backwards ? n_pages - 1 - i : i);
    }
    seq->n_ring = backwards ? 4 : 3;
    for (uint32_t i = 0; i < seq->n_ring; i++) {
        seq->ring[i] = first_ring + (backwards ? seq->n_ring - 1 - i : i);
    }
}

static struct dmk_step_seq take_chunk(struct seq *seq, uint32_t n_tokens, enum dmk_logits logits)
{
    struct dmk_step_seq chunk = {.ids = seq->ids + seq->pos,
                                 .n_tokens = n_tokens,
                                 .pos = seq->pos,
                                 .full_pages = seq->pages,
                                 .n_ring = seq->n_ring,
                                 .logits = logits,
                                 .dp = seq->group};
    memcpy(chunk.ring, seq->ring, sizeof(chunk.ring));
    seq->pos += n_tokens;
    return chunk;
}

/* Runs the sequence in chunks of the given length; every position's logits go to out [n_ids][VOCAB]. */
static void run_chunks(struct dmk_engine *engine, struct seq *seq, uint32_t chunk, float *out)
{
    while (seq->pos < seq->n_ids) {
        uint32_t at = seq->pos, left = seq->n_ids - at;
        struct dmk_step_seq part = take_chunk(seq, left < chunk ? left : chunk, DMK_LOGITS_ALL);
        struct dmk_step step = {.seqs = &part, .n_seqs = 1, .logits = out + (size_t)at * VOCAB};
        assert_int_equal(dmk_engine_step(engine, &step), 0);
    }
}

static float *new_logits(uint32_t n_rows)
{
    float *logits = malloc((size_t)n_rows * VOCAB * sizeof(float));
    assert_non_null(logits);
    memset(logits, 0xff, (size_t)n_rows * VOCAB * sizeof(float)); /* NaN */
    return logits;
}

static void check_rows(const float *got, const float *want, uint32_t n_rows, const char *what)
{
    for (uint32_t r = 0; r < n_rows; r++) {
        for (uint32_t i = 0; i < VOCAB; i++) {
            size_t at = (size_t)r * VOCAB + i;
            if (memcmp(&got[at], &want[at], sizeof(float)) != 0) {
                fail_msg("%s: row %u, token %u: %a instead of %a", what, r, i, (double)got[at],
                         (double)want[at]);
            }
            if (!(want[at] > -100.0f && want[at] < 100.0f)) {
                fail_msg("%s: row %u, token %u: %g is no sane logit", what, r, i, (double)want[at]);
            }
        }
    }
}

/* What one token at a time through the plain kernels on one rank gives. */
static float *plain_logits(struct dmk_weights *weights, uint32_t n_ids, uint64_t text)
{
    struct dmk_engine *engine = open_engine(weights, "ref", 1);
    static struct seq seq;
    seq_init(&seq, n_ids, text, 0, 0, false);
    float *logits = new_logits(n_ids);
    run_chunks(engine, &seq, 1, logits);
    dmk_engine_close(&engine);
    return logits;
}

static void test_chunks(void **state)
{
    (void)state;
    struct dmk_shape shape = small_shape(3);
    const uint32_t n = 260, chunks[] = {1, 7, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256};
    for (int format = 0; format < 2; format++) {
        struct dmk_weights *weights = memory_weights(&shape, format, seed);
        float *want = plain_logits(weights, n, 1), *got = new_logits(n);
        struct dmk_engine *engine = open_engine(weights, "cpu", 1);
        for (size_t i = 0; i < sizeof(chunks) / sizeof(chunks[0]); i++) {
            static struct seq seq;
            char what[64];
            seq_init(&seq, n, 1, 3 + (uint32_t)i, 2, i % 2);
            run_chunks(engine, &seq, chunks[i], got);
            snprintf(what, sizeof(what), "format %d, chunks of %u", format, chunks[i]);
            check_rows(got, want, n, what);
        }
        dmk_engine_close(&engine);
        free(want);
        free(got);
        memory_weights_free(weights);
    }
}

/* All sequences together, each in its own chunks, some with all logits and every third with the last row's
 * only; seqs are by group. What each gives must be want. */
static void run_together(struct dmk_engine *engine, struct seq *seqs, uint32_t n_seqs,
                         const uint32_t *chunk, float *const *want, const char *what)
{
    float *out = new_logits(MAX_TOKENS);

    for (;;) {
        struct dmk_step_seq parts[MAX_SEQS];
        uint32_t who[MAX_SEQS], at[MAX_SEQS], n_parts = 0;
        for (uint32_t i = 0; i < n_seqs; i++) {
            uint32_t left = seqs[i].n_ids - seqs[i].pos;
            if (left > 0) {
                who[n_parts] = i;
                at[n_parts] = seqs[i].pos;
                parts[n_parts++] = take_chunk(&seqs[i], left < chunk[i] ? left : chunk[i],
                                              i % 3 == 0 ? DMK_LOGITS_LAST : DMK_LOGITS_ALL);
            }
        }
        if (n_parts == 0) {
            break;
        }
        struct dmk_step step = {.seqs = parts, .n_seqs = n_parts, .logits = out};
        assert_int_equal(dmk_engine_step(engine, &step), 0);
        const float *row = out;
        for (uint32_t i = 0; i < n_parts; i++) {
            uint32_t rows = parts[i].logits == DMK_LOGITS_LAST ? 1 : parts[i].n_tokens;
            uint32_t first = at[i] + parts[i].n_tokens - rows;
            check_rows(row, want[who[i]] + (size_t)first * VOCAB, rows, what);
            row += (size_t)rows * VOCAB;
        }
    }
    free(out);
}

/* Three sequences at different places, each in its own chunks, in one step. */
static void test_company(void **state)
{
    (void)state;
    struct dmk_shape shape = small_shape(2);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    const uint32_t n[3] = {200, 140, 70}, chunk[3] = {50, 13, 1};
    static struct seq seqs[3];
    float *want[3];
    for (uint32_t i = 0; i < 3; i++) {
        want[i] = plain_logits(weights, n[i], 10 + i);
        seq_init(&seqs[i], n[i], 10 + i, 5 + 30 * i, 6 * i, i == 1);
    }
    struct dmk_engine *engine = open_engine(weights, "cpu", 2);
    run_together(engine, seqs, 3, chunk, want, "in company");
    dmk_engine_close(&engine);
    for (uint32_t i = 0; i < 3; i++) {
        free(want[i]);
    }
    memory_weights_free(weights);
}

/* Four sequences over groups in every legal layout with more than one group: even, crowded into one group,
 * groups that get idle and groups that never have a token. In each group page ids count from 0 again. */
static void test_groups(void **state)
{
    (void)state;
    struct dmk_shape shape = small_shape(3);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    static const uint32_t n[MAX_SEQS] = {30, 75, 140, 66}, chunk[MAX_SEQS] = {9, 3, 70, 33};
    static const uint32_t places[][MAX_SEQS] = {
        {0, 1, 2, 3}, {1, 1, 1, 1}, {0, 7, 7, 7}, {0, 0, 0, 5}};
    static struct seq seqs[MAX_SEQS];
    float *want[MAX_SEQS];
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        want[i] = plain_logits(weights, n[i], 20 + i);
    }
    for (uint32_t dp = 2; dp <= 8; dp *= 2) {
        for (uint32_t tp = 1; tp * dp <= 8; tp *= 2) {
            for (uint32_t place = 0; place < sizeof(places) / sizeof(places[0]); place++) {
                const bool plain = tp * dp == 2 && place == 2;
                struct dmk_engine *engine = open_layout(weights, plain ? "ref" : "cpu", tp, dp);
                char what[64];
                uint32_t in_group = 0;
                assert_int_equal(dmk_engine_n_ranks(engine), tp * dp);
                for (uint32_t i = 0; i < MAX_SEQS; i++) {
                    uint32_t group = places[place][i] < dp ? places[place][i] : dp - 1;
                    in_group = i > 0 && group == seqs[i - 1].group ? in_group + 1 : 0;
                    seq_init(&seqs[i], n[i], 20 + i, 7 * in_group, 4 * in_group, i % 2 == 1);
                    seqs[i].group = group;
                }
                snprintf(what, sizeof(what), "tp %u, dp %u, placement %u", tp, dp, place);
                run_together(engine, seqs, MAX_SEQS, chunk, want, what);
                dmk_engine_close(&engine);
            }
        }
    }
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        free(want[i]);
    }
    memory_weights_free(weights);
}

static void test_ranks(void **state)
{
    (void)state;
    struct dmk_shape shape = small_shape(3);
    const uint32_t n = 100;
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    float *want = plain_logits(weights, n, 2), *got = new_logits(n);
    static struct seq seq;
    for (uint32_t tp = 1; tp <= 8; tp *= 2) {
        const char *backends[] = {"ref", "cpu"};
        for (int b = 0; b < 2; b++) {
            struct dmk_engine *engine = open_engine(weights, backends[b], tp);
            char what[64];
            snprintf(what, sizeof(what), "%u ranks, %s", tp, backends[b]);
            assert_int_equal(dmk_engine_n_ranks(engine), tp);
            seq_init(&seq, n, 2, 0, 0, true);
            run_chunks(engine, &seq, 40, got);
            check_rows(got, want, n, what);
            dmk_engine_close(&engine);
        }
    }
    free(want);
    free(got);
    memory_weights_free(weights);
}

/* Pages hold the same bytes at the same place, whoever computed them: what a transfer relies on. */
static void test_pages_of_ranks(void **state)
{
    (void)state;
    struct dmk_shape shape = small_shape(2);
    const uint32_t n = 150;
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    struct dmk_engine *one = open_engine(weights, "cpu", 1), *four = open_engine(weights, "cpu", 4);
    float *logits = new_logits(n);
    static struct seq seq;
    seq_init(&seq, n, 3, 7, 4, false);
    run_chunks(one, &seq, 150, logits);
    seq.pos = 0;
    run_chunks(four, &seq, 31, logits);
    const struct dmk_kv_mem *a = dmk_engine_kv(one, 0);
    for (uint32_t head = 0; head < 8; head++) {
        const struct dmk_kv_mem *b = dmk_engine_kv(four, head / 2);
        assert_int_equal(b->layout.kv_head_first, head / 2 * 2);
        for (uint32_t block = 0; block < 3; block++) {
            uint64_t used = block == 2 ? (150 - 128) * 128 : 64 * 128;
            for (uint32_t kv = 0; kv < 2; kv++) {
                const char *full_a = (char *)a->full + kv * 8192 +
                                     dmk_kv_full_offset(&a->layout, 0, head, seq.pages[block]);
                const char *full_b = (char *)b->full + kv * 8192 +
                                     dmk_kv_full_offset(&b->layout, 0, head % 2, seq.pages[block]);
                assert_memory_equal(full_a, full_b, used);
                const char *ring_a = (char *)a->window + kv * 8192 +
                                     dmk_kv_window_offset(&a->layout, 0, head, seq.ring[block]);
                const char *ring_b = (char *)b->window + kv * 8192 +
                                     dmk_kv_window_offset(&b->layout, 0, head % 2, seq.ring[block]);
                assert_memory_equal(ring_a, ring_b, used);
            }
        }
    }
    dmk_engine_close(&one);
    dmk_engine_close(&four);
    free(logits);
    memory_weights_free(weights);
}

/* A fork: the half-filled page and the ring are copied, then both go on. */
static void fork_in_group(struct dmk_weights *weights, const float *want, uint32_t dp,
                          uint32_t group)
{
    const uint32_t n = 100, fork_at = 80;
    float *got = new_logits(n);
    struct dmk_engine *engine = open_layout(weights, "cpu", 2, dp);
    static struct seq seq;
    seq_init(&seq, n, 4, 0, 0, false);
    seq.group = group;
    struct dmk_step_seq part = take_chunk(&seq, fork_at, DMK_LOGITS_NONE);
    struct dmk_step step = {.seqs = &part, .n_seqs = 1};
    assert_int_equal(dmk_engine_step(engine, &step), 0);
    /* The last one is another group's, and would spoil this one's page. */
    struct dmk_page_copy copies[] = {{.src = 1, .dst = 60, .dp = group},
                                     {.window = true, .src = 0, .dst = 10, .dp = group},
                                     {.window = true, .src = 1, .dst = 9, .dp = group},
                                     {.src = 70, .dst = 60, .dp = (group + 1) % dp}};
    seq.pages[1] = 60;
    seq.ring[0] = 10;
    seq.ring[1] = 9;
    seq.ring[2] = 8;
    part = take_chunk(&seq, n - fork_at, DMK_LOGITS_ALL);
    step = (struct dmk_step){
        .seqs = &part, .n_seqs = 1, .copies = copies, .n_copies = dp > 1 ? 4 : 3, .logits = got};
    assert_int_equal(dmk_engine_step(engine, &step), 0);
    check_rows(got, want + (size_t)fork_at * VOCAB, n - fork_at, "after a fork");
    dmk_engine_close(&engine);
    free(got);
}

static void test_copies(void **state)
{
    (void)state;
    struct dmk_shape shape = small_shape(2);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    float *want = plain_logits(weights, 100, 4);
    fork_in_group(weights, want, 1, 0);
    fork_in_group(weights, want, 2, 0);
    fork_in_group(weights, want, 4, 2);
    free(want);
    memory_weights_free(weights);
}

/* Beyond the original context of 4096 positions, in big chunks and in odd ones. */
static void test_long(void **state)
{
    (void)state;
    struct dmk_shape shape = small_shape(2);
    const uint32_t n = 4360;
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    struct dmk_engine *engine = open_engine(weights, "cpu", 1);
    static struct seq seq;
    float *want = new_logits(n), *got = new_logits(n);
    seq_init(&seq, n, 5, 0, 0, false);
    run_chunks(engine, &seq, 256, want);
    seq_init(&seq, n, 5, 71, 7, true);
    run_chunks(engine, &seq, 101, got);
    check_rows(got, want, n, "4360 positions");
    dmk_engine_close(&engine);
    free(want);
    free(got);
    memory_weights_free(weights);
}

/* An even layer sees 128 keys: with one sliding layer first and its output fed to a full one, a change
 * of token 0 must reach every later row through the full layer, so the window is looked at in the pages:
 * layer 2's keys at position p depend on tokens beyond the window only by way of layer 1. Here both
 * layers slide (the second is layer 0 again), so what lies 128 back is out of sight. */
static void test_window(void **state)
{
    (void)state;
    struct dmk_shape shape = small_shape(2);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    struct dmk_engine *engine = open_engine(weights, "cpu", 1);
    const struct dmk_kv_mem *kv = dmk_engine_kv(engine, 0);
    const uint32_t n = 140;
    float *logits = new_logits(n);
    static struct seq seq;
    static uint16_t keys[2][140][64];
    for (int run = 0; run < 2; run++) {
        seq_init(&seq, n, 6, 0, 0, false);
        seq.ids[0] = run ? (seq.ids[0] + 1) % VOCAB : seq.ids[0];
        run_chunks(engine, &seq, 33, logits);
        for (uint32_t p = 0; p < n; p++) {
            const char *page =
                (char *)kv->full + dmk_kv_full_offset(&kv->layout, 0, 3, seq.pages[p / 64]);
            memcpy(keys[run][p], page + p % 64 * 128, 128);
        }
    }
    /* Layer 1's keys of position p come from layer 0, which sees p-127 .. p. */
    assert_memory_not_equal(keys[0][127], keys[1][127], 128);
    assert_memory_equal(keys[0][128], keys[1][128], 128);
    assert_memory_equal(keys[0][139], keys[1][139], 128);
    dmk_engine_close(&engine);
    free(logits);
    memory_weights_free(weights);
}

struct layers_seen {
    uint32_t n;
    atomic_bool cancel;
    uint32_t cancel_at;
};

static void see_layer(void *ud, uint32_t layer)
{
    struct layers_seen *seen = ud;
    assert_int_equal(layer, seen->n);
    seen->n++;
    if (layer == seen->cancel_at) {
        atomic_store(&seen->cancel, true);
    }
}

static void test_cancel(void **state)
{
    (void)state;
    struct dmk_shape shape = small_shape(4);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, seed);
    static const struct dmk_layout layouts[] = {{1, 1}, {4, 1}, {1, 2}, {2, 4}};
    for (uint32_t i = 0; i < sizeof(layouts) / sizeof(layouts[0]); i++) {
        struct dmk_engine *engine = open_layout(weights, "cpu", layouts[i].tp, layouts[i].dp);
        static struct seq seq;
        seq_init(&seq, 20, 7, 0, 0, false);
        seq.group = layouts[i].dp - 1; /* rank 0, which looks at the flag, has no token */
        struct dmk_step_seq part = take_chunk(&seq, 20, DMK_LOGITS_NONE);
        struct layers_seen seen = {.cancel_at = 1};
        struct dmk_step step = {
            .seqs = &part, .n_seqs = 1, .on_layer = see_layer, .ud = &seen, .cancel = &seen.cancel};
        assert_int_equal(dmk_engine_step(engine, &step), -DMK_ECANCELLED);
        assert_int_equal(seen.n, 2);
        seen = (struct layers_seen){.cancel_at = 99};
        assert_int_equal(dmk_engine_step(engine, &step), 0);
        assert_int_equal(seen.n, 4);
        dmk_engine_close(&engine);
    }
    memory_weights_free(weights);
}

static void test_identity(void **state)
{
    (void)state;
    struct dmk_shape shape = small_shape(2);
    struct dmk_weights *a = memory_weights(&shape, DMK_EXPERTS_MXFP4, 1);
    struct dmk_weights *b = memory_weights(&shape, DMK_EXPERTS_MXFP4, 2);
    struct dmk_engine *one = open_engine(a, "cpu", 1), *two = open_engine(a, "ref", 2);
    struct dmk_engine *other = open_engine(b, "cpu", 1);
    struct dmk_id128 ids[3];
    dmk_engine_model_id(one, &ids[0]);
    dmk_engine_model_id(two, &ids[1]);
    dmk_engine_model_id(other, &ids[2]);
    assert_true(dmk_id128_equal(ids[0], ids[1]));
    assert_false(dmk_id128_equal(ids[0], ids[2]));
    assert_string_equal(dmk_engine_numerics(one), "mxfp4-bf16-k1-cpu");
    assert_string_equal(dmk_engine_numerics(two), dmk_engine_numerics(one));
    dmk_engine_close(&one);
    dmk_engine_close(&two);
    dmk_engine_close(&other);
    memory_weights_free(a);
    memory_weights_free(b);
}

/* What pages of prompts are, in an engine of these options; NULL: such options are refused. */
static void names(const struct dmk_engine_conf *conf, enum dmk_expert_format checkpoint,
                  uint32_t n_heads, const char *own, const char *prompts)
{
    struct dmk_weights weights = {.expert_format = checkpoint};
    struct dmk_engine *engine = calloc(1, sizeof(*engine));
    struct dmk_error error = {0};
    assert_non_null(engine);
    engine->conf = *conf;
    engine->weights = &weights;
    engine->shape = (struct dmk_shape){.n_heads = n_heads, .n_kv_heads = 8};
    if (own) {
        assert_int_equal(dmk_engine_name_numerics(engine, &error), 0);
        assert_string_equal(dmk_engine_numerics(engine), own);
        assert_string_equal(dmk_engine_prompt_numerics(engine), prompts);
    } else {
        assert_true(dmk_engine_name_numerics(engine, &error) < 0);
        if (!strstr(error.text, prompts)) {
            fail_msg("\"%s\" is not in: %s", prompts, error.text);
        }
    }
    free(engine);
}

static void test_numerics(void **state)
{
    (void)state;
    struct dmk_engine_conf c = {.backend = "cpu"};
    names(&c, DMK_EXPERTS_MXFP4, 64, "mxfp4-bf16-k1-cpu", "mxfp4-bf16-k1-cpu");
    names(&c, DMK_EXPERTS_FP8, 64, "fp8-bf16-k1-cpu", "fp8-bf16-k1-cpu");
    names(&c, DMK_EXPERTS_BF16, 64, "bf16-bf16-k1-cpu", "bf16-bf16-k1-cpu");
    c.prompt_experts = DMK_PROMPT_EXPERTS_FP8;
    names(&c, DMK_EXPERTS_MXFP4, 64, "mxfp4-bf16-k1-cpu", "fp8-bf16-k1-cpu");
    names(&c, DMK_EXPERTS_FP8, 64, "fp8-bf16-k1-cpu", "fp8-bf16-k1-cpu");
    names(&c, DMK_EXPERTS_BF16, 64, NULL, "prompt-experts is fp8, but this checkpoint's");

    c = (struct dmk_engine_conf){.backend = "cuda", .prompt_experts = DMK_PROMPT_EXPERTS_FP8};
    names(&c, DMK_EXPERTS_MXFP4, 64, "mxfp4-bf16-k1-cuda", "fp8-fp8-k1-cuda");
    c.fp8_experts = true; /* said twice: nothing differs */
    names(&c, DMK_EXPERTS_MXFP4, 64, "fp8-fp8-k1-cuda", "fp8-fp8-k1-cuda");
    c.prompt_experts = DMK_PROMPT_EXPERTS_SAME;
    names(&c, DMK_EXPERTS_MXFP4, 64, "fp8-fp8-k1-cuda", "fp8-fp8-k1-cuda");
    names(&c, DMK_EXPERTS_BF16, 64, "bf16-bf16-k1-cuda", "bf16-bf16-k1-cuda");
    c.prompt_experts = DMK_PROMPT_EXPERTS_MXFP4;
    names(&c, DMK_EXPERTS_FP8, 64, "fp8-fp8-k1-cuda", "mxfp4-bf16-k1-cuda");
    names(&c, DMK_EXPERTS_BF16, 64, NULL, "prompt-experts is mxfp4, but this checkpoint's");
    c.prompt_experts = DMK_PROMPT_EXPERTS_BF16;
    names(&c, DMK_EXPERTS_MXFP4, 64, NULL, "prompt-experts is bf16, but this checkpoint's");
    names(&c, DMK_EXPERTS_BF16, 64, "bf16-bf16-k1-cuda", "bf16-bf16-k1-cuda");

    c = (struct dmk_engine_conf){.backend = "cuda", .prompt_dense = DMK_PROMPT_DENSE_FP8};
    names(&c, DMK_EXPERTS_MXFP4, 64, "mxfp4-bf16-k1-cuda", "mxfp4-bf16-dense8-k1-cuda");
    names(&c, DMK_EXPERTS_MXFP4, 24, NULL, "even number of query heads for a KV head, not 3");
    c.backend = "ref";
    names(&c, DMK_EXPERTS_MXFP4, 24, "mxfp4-bf16-k1-cpu", "mxfp4-bf16-dense8-k1-cpu");
    c.fp8_dense = true;
    c.prompt_dense = DMK_PROMPT_DENSE_BF16;
    c.prompt_experts = DMK_PROMPT_EXPERTS_FP8;
    names(&c, DMK_EXPERTS_MXFP4, 64, "mxfp4-bf16-dense8-k1-cpu", "fp8-bf16-k1-cpu");
    c.prompt_dense = DMK_PROMPT_DENSE_SAME;
    names(&c, DMK_EXPERTS_MXFP4, 64, "mxfp4-bf16-dense8-k1-cpu", "fp8-bf16-dense8-k1-cpu");
}

/* Opening names both, and refuses before it computes anything. */
static void test_prompt_formats_are_checked(void **state)
{
    (void)state;
    struct dmk_shape shape = small_shape(2);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, 1);
    struct dmk_engine_conf conf = {.backend = "cpu",
                                   .layout = {1, 1},
                                   .n_threads = 1,
                                   .n_full_pages = N_FULL,
                                   .n_window_pages = N_WINDOW,
                                   .max_step_tokens = MAX_TOKENS,
                                   .max_step_seqs = MAX_SEQS,
                                   .max_logit_rows = MAX_TOKENS,
                                   .prompt_experts = DMK_PROMPT_EXPERTS_FP8};
    struct dmk_engine *engine = NULL;
    struct dmk_error error = {0};
    assert_int_equal(dmk_engine_open_weights(&conf, weights, &engine, &error), 0);
    assert_string_equal(dmk_engine_numerics(engine), "mxfp4-bf16-k1-cpu");
    assert_string_equal(dmk_engine_prompt_numerics(engine), "fp8-bf16-k1-cpu");
    dmk_engine_close(&engine);
    conf.prompt_experts = DMK_PROMPT_EXPERTS_BF16;
    assert_int_equal(dmk_engine_open_weights(&conf, weights, &engine, &error), -DMK_EINVAL);
    assert_non_null(strstr(error.text, "experts are mxfp4"));
    memory_weights_free(weights);
}

static struct dmk_id128 id_of(const struct dmk_weights *w)
{
    struct dmk_id128 id = {0};
    assert_int_equal(dmk_weights_model_id(w, NULL, NULL, &id), 0);
    return id;
}

/* No tensor can change as a whole without the id. */
static void test_identity_of_all(void **state)
{
    (void)state;
    static const size_t places[] = {
#define AT(f) offsetof(struct dmk_layer_weights, f)
        AT(attn_norm),
        AT(q_w),
        AT(q_b),
        AT(k_w),
        AT(k_b),
        AT(v_w),
        AT(v_b),
        AT(o_w),
        AT(o_b),
        AT(sinks),
        AT(mlp_norm),
        AT(router_w),
        AT(router_b),
        AT(gate_up.blocks),
        AT(gate_up.scales),
        AT(gate_up.bias),
        AT(down.blocks),
        AT(down.scales),
        AT(down.bias)
#undef AT
    };
    struct dmk_shape shape = small_shape(2);
    struct dmk_weights *w = memory_weights(&shape, DMK_EXPERTS_MXFP4, 1);
    const struct dmk_id128 before = id_of(w);
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        uint8_t *first;
        memcpy(&first, (const char *)&w->layers[1] + places[i], sizeof(first));
        *first ^= 1;
        if (dmk_id128_equal(id_of(w), before)) {
            fail_msg("the tensor at %zu does not count", places[i]);
        }
        *first ^= 1;
    }
    assert_true(dmk_id128_equal(id_of(w), before));
    memory_weights_free(w);
}

static void test_refusals(void **state)
{
    (void)state;
    struct dmk_shape shape = small_shape(2);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, 1);
    struct dmk_engine_conf good = {.backend = "cpu",
                                   .layout = {1, 1},
                                   .n_full_pages = 4,
                                   .n_window_pages = 4,
                                   .max_step_tokens = 8,
                                   .max_step_seqs = 1,
                                   .max_logit_rows = 1};
    struct dmk_engine *engine = NULL;
    struct dmk_error error;
    struct dmk_engine_conf bad = good;
    bad.layout.dp = 3;
    assert_int_equal(dmk_engine_open_weights(&bad, weights, &engine, &error), -DMK_ENOTSUP);
    assert_non_null(strstr(error.text, "dp is 3"));
    bad = good;
    bad.prefill = true;
    bad.layout.dp = 2;
    assert_int_equal(dmk_engine_open_weights(&bad, weights, &engine, &error), -DMK_ENOTSUP);
    assert_non_null(strstr(error.text, "dp is 2 but a prefill worker has dp 1"));
    bad = good;
    bad.backend = "tpu";
    assert_int_equal(dmk_engine_open_weights(&bad, weights, &engine, &error), -DMK_ENOENT);
    assert_non_null(strstr(error.text, "'tpu'"));
    bad = good;
    bad.max_step_tokens = 0;
    assert_int_equal(dmk_engine_open_weights(&bad, weights, &engine, &error), -DMK_EINVAL);
    assert_non_null(strstr(error.text, "max_step_tokens is 0"));
    assert_null(engine);
    memory_weights_free(weights);
    /* More than addresses there are. */
    shape = small_shape(8);
    weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, 1);
    bad = good;
    bad.n_full_pages = 1u << 28;
    assert_int_equal(dmk_engine_open_weights(&bad, weights, &engine, &error), -DMK_ENOMEM);
    assert_non_null(strstr(error.text, "no memory for the full page pool of rank 0: 131072.00 GiB "
                                       "are wanted, "));
    assert_non_null(strstr(error.text, " GiB are free and 0.00 are this rank's; give it fewer "));
    assert_null(engine);
    memory_weights_free(weights);
}

/* A share of the host's memory: pools fill what weights and steps leave of it, for all ranks together. */
static void test_share(void **state)
{
    (void)state;
    struct dmk_shape shape = small_shape(2);
    struct dmk_weights *weights = memory_weights(&shape, DMK_EXPERTS_MXFP4, 1);
    struct dmk_engine_conf conf = {.backend = "cpu",
                                   .layout = {2, 1},
                                   .n_threads = 2,
                                   .n_full_pages = 4,
                                   .n_window_pages = 4,
                                   .memory_percent = 2,
                                   .n_pool_seqs = 5,
                                   .max_step_tokens = 8,
                                   .max_step_seqs = 1,
                                   .max_logit_rows = 1};
    struct dmk_engine *engine = NULL;
    struct dmk_backend_memory m;
    struct dmk_error error = {0};
    if (dmk_engine_open_weights(&conf, weights, &engine, &error) != 0) {
        fail_msg("%s", error.text);
    }
    struct dmk_backend *be = engine->ranks[0].backend;
    assert_int_equal(be->ops->memory(be, &m), 0);
    assert_true(m.free > 0 && m.free <= m.total);
    const struct dmk_kv_layout *l = &dmk_engine_kv(engine, 0)->layout;
    uint64_t bytes = dmk_weights_bytes(weights);
    for (uint32_t i = 0; i < engine->n_allocs; i++) {
        bytes += engine->allocs[i].bytes;
    }
    assert_true((double)bytes <= (double)m.total * 0.02);
    assert_true((double)(bytes + 2 * dmk_kv_full_bytes(l) / l->n_full_pages) + 2 >
                (double)m.total * 0.02);
    assert_true(l->n_window_pages >= 15);
    dmk_engine_close(&engine);
    conf.memory_percent = 0.0001;
    assert_int_equal(dmk_engine_open_weights(&conf, weights, &engine, &error), -DMK_ENOMEM);
    assert_non_null(strstr(error.text, "% or more"));
    memory_weights_free(weights);
}

/* An argument chooses tests by a pattern ("test_copies"). */
int main(int argc, char **argv)
{
    const char *given = getenv("DMK_TEST_SEED");
    seed = given ? strtoull(given, NULL, 0) : dmk_random_u64();
    printf("DMK_TEST_SEED=%#llx\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_company),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_pages_of_ranks),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_long),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_identity),
        cmocka_unit_test(test_identity_of_all),
        cmocka_unit_test(test_numerics),
        cmocka_unit_test(test_prompt_formats_are_checked),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_share),
    };
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
