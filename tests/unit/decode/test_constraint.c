/* Constrained answers of the decode core, on an engine of hashes: they fit whatever the sampler draws, are the same
 * after a preemption and among others, and end when nothing may follow. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "common/grammar/write.h"
#include "tests/support/cell.h"
#include "tests/support/shadow_engine.h"

enum { VOCAB = 300, N_PAGES = 70 };

static const struct dmk_sample_params seeded = {
    .temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 7, .logprobs = true};

struct bed {
    struct shadow_engine *engine;
    struct cell *cell;
};

static struct dmk_bytes bytes_of(void *ud, uint32_t id)
{
    static uint8_t bytes[256];

    (void)ud;
    if (id >= 256) {
        return (struct dmk_bytes){0};
    }
    bytes[id] = (uint8_t)id;
    return (struct dmk_bytes){&bytes[id], 1};
}

static struct bed open_bed(bool with_vocabulary)
{
    const struct shadow_conf shadow = {.n_layers = 4,
                                       .n_kv_heads = 2,
                                       .vocab = VOCAB,
                                       .tp = 1,
                                       .dp = 1,
                                       .n_full_pages = N_PAGES,
                                       .n_window_pages = 40,
                                       .seed = 5};
    struct bed bed = {.engine = shadow_engine_new(&shadow)};
    const struct cell_conf conf = {.decode = shadow_engine_port(bed.engine),
                                   .d_full_pages = N_PAGES,
                                   .d_window_pages = shadow.n_window_pages,
                                   .max_sequences = 6,
                                   .max_context = 4096,
                                   .chunk_tokens = 64};
    struct dmk_buf blob;
    struct dmk_error error;

    bed.cell = cell_new(&conf);
    dmk_buf_init(&blob, 0);
    assert_int_equal(dmk_trie_write(VOCAB, bytes_of, NULL, &blob), 0);
    if (with_vocabulary) {
        assert_int_equal(dmk_decode_vocabulary(bed.cell->decode, dmk_buf_bytes(&blob), &error), 0);
        assert_int_equal(dmk_decode_vocabulary(bed.cell->decode, dmk_buf_bytes(&blob), &error), 0);
        blob.data[8]--; /* of another size: another vocabulary */
        assert_int_equal(dmk_decode_vocabulary(bed.cell->decode, dmk_buf_bytes(&blob), &error),
                         -DMK_EMISMATCH);
    }
    dmk_buf_fini(&blob);
    return bed;
}

static void close_bed(struct bed *bed)
{
    assert_true(cell_settle(bed->cell, 10));
    assert_true(cell_check(bed->cell, true));
    cell_free(&bed->cell);
    shadow_engine_free(&bed->engine);
}

/* [a-c][0-9] again and again with commas between; a full stop behind n of them. */
static void write_list(uint32_t n, struct dmk_buf *out)
{
    static const struct dmk_grammar_edge letter[] = {{'a', 'c', 1}}, digit[] = {{'0', '9', 2}},
                                         mark[] = {{',', ',', 3}, {'.', '.', 4}};
    static const struct dmk_grammar_state states[] = {
        {.edges = letter, .n_edges = 1},
        {.edges = digit, .n_edges = 1},
        {.edges = mark, .n_edges = 2},
        {.flags = DMK_GRAMMAR_TICK, .edges = letter, .n_edges = 1},
        {.flags = DMK_GRAMMAR_GATE | DMK_GRAMMAR_ACCEPT}};
    const struct dmk_grammar_rule rule = {states, 5, n, n};
    struct dmk_buf words;

    assert_int_equal(dmk_grammar_write(&rule, 1, out), 0);
    dmk_buf_init(&words, 0);
    assert_int_equal(dmk_trie_write(VOCAB, bytes_of, NULL, &words), 0);
    dmk_grammar_stamp(out, dmk_hash128((struct dmk_id128){0}, words.data, words.len));
    dmk_buf_fini(&words);
}

static uint32_t ask(struct bed *bed, uint32_t n_prompt, uint32_t max_tokens, uint32_t n,
                    const struct dmk_buf *constraint, const struct dmk_sample_params *sampling)
{
    uint32_t ids[256];
    const struct dmk_decode_request r = {.prompt = ids,
                                         .n_prompt = n_prompt,
                                         .max_tokens = max_tokens,
                                         .n = n,
                                         .sampling = sampling,
                                         .constraint = dmk_buf_bytes(constraint),
                                         .ignore_eos = true};

    for (uint32_t i = 0; i < n_prompt; i++) {
        ids[i] = (n_prompt * 31 + i * 7) % 256;
    }
    return cell_ask(bed->cell, &r);
}

static void check_list(const struct cell_choice *c)
{
    for (uint32_t i = 0; i < c->n; i++) {
        const uint32_t id = c->ids[i];

        assert_true(i % 3 == 0   ? id >= 'a' && id <= 'c'
                    : i % 3 == 1 ? id >= '0' && id <= '9'
                                 : id == ',' || (id == '.' && i + 1 == c->n));
    }
}

static void preemption_changes_nothing(void **state)
{
    struct bed bed = open_bed(true);
    struct dmk_buf list;
    uint32_t n_preempted = 0;

    (void)state;
    dmk_buf_init(&list, 0);
    write_list(1000, &list);
    for (uint32_t i = 0; i < 4; i++) {
        ask(&bed, 10 + 13 * i, 1200, 1, &list, i % 2 ? &seeded : NULL);
    }
    assert_true(cell_run(bed.cell, 8000));
    for (uint32_t i = 0; i < 4; i++) {
        const struct cell_choice *got = &bed.cell->answers[i].choices[0];
        struct bed alone = open_bed(true);
        const struct cell_choice *want = &alone.cell->answers[0].choices[0];

        ask(&alone, 10 + 13 * i, 1200, 1, &list, i % 2 ? &seeded : NULL);
        assert_true(cell_run(alone.cell, 4000));
        check_list(want);
        assert_int_equal(got->n, 1200);
        assert_int_equal(got->n, want->n);
        assert_memory_equal(got->ids, want->ids, got->n * sizeof(got->ids[0]));
        assert_memory_equal(got->logprobs, want->logprobs, got->n * sizeof(got->logprobs[0]));
        n_preempted += got->n_preemptions;
        close_bed(&alone);
    }
    assert_true(n_preempted > 0);
    close_bed(&bed);
    dmk_buf_fini(&list);
}

/* Each choice walks for itself, and ends where nothing may follow although end ids do not end it. */
static void choices_end_when_complete(void **state)
{
    struct bed bed = open_bed(true);
    const struct cell_answer *a = &bed.cell->answers[0];
    struct dmk_buf list;

    (void)state;
    dmk_buf_init(&list, 0);
    write_list(5, &list);
    ask(&bed, 40, 100, 3, &list, &seeded);
    assert_true(cell_run(bed.cell, 500));
    assert_false(a->failed);
    for (uint32_t c = 0; c < 3; c++) {
        check_list(&a->choices[c]);
        assert_true(a->choices[c].finished && a->choices[c].stopped);
        assert_int_equal(a->choices[c].n, 18);
        assert_int_equal(a->choices[c].ids[17], '.');
    }
    assert_memory_not_equal(a->choices[0].ids, a->choices[1].ids, 18 * sizeof(uint32_t));
    /* Cut by length it is not complete. */
    ask(&bed, 41, 7, 1, &list, &seeded);
    assert_true(cell_run(bed.cell, 500));
    assert_int_equal(bed.cell->answers[1].choices[0].n, 7);
    assert_false(bed.cell->answers[1].choices[0].stopped);
    close_bed(&bed);
    dmk_buf_fini(&list);
}

static void refusals(void **state)
{
    struct bed bed = open_bed(false), other = open_bed(true);
    struct dmk_buf list;

    (void)state;
    dmk_buf_init(&list, 0);
    write_list(5, &list);
    ask(&bed, 10, 10, 1, &list, NULL);
    assert_true(bed.cell->answers[0].failed);
    assert_int_equal(bed.cell->answers[0].code, DMK_FAILURE_MISMATCH);
    dmk_grammar_stamp(&list, (struct dmk_id128){1, 1});
    ask(&other, 10, 10, 1, &list, NULL);
    assert_int_equal(other.cell->answers[0].code, DMK_FAILURE_MISMATCH);
    list.data[60] ^= 1;
    ask(&other, 10, 10, 1, &list, NULL);
    assert_true(other.cell->answers[1].failed);
    assert_int_equal(other.cell->answers[1].code, DMK_FAILURE_INVALID);
    close_bed(&bed);
    close_bed(&other);
    dmk_buf_fini(&list);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(preemption_changes_nothing),
        cmocka_unit_test(choices_end_when_complete),
        cmocka_unit_test(refusals),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
