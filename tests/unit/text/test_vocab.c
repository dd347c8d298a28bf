/* Opening vocabularies: counts, faults with their sentences, use by several threads at once. */
#include "tests/unit/text/text_test.h"
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static void test_counts(void **state)
{
    const struct fixture *f = *state;
    size_t total = 0, longest = 0, single = 0, blanks = 0, pairs = 0;

    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        const struct dmk_bytes b = dmk_token_bytes(f->vocab, id);

        total += b.len;
        longest = b.len > longest ? b.len : longest;
        single += b.len == 1;
        blanks += b.data[0] == ' ';
    }
    assert_int_equal(total, 1397670);
    assert_int_equal(longest, DMK_RANK_BYTES_MAX);
    assert_int_equal(single, 256);
    assert_int_equal(blanks, 106529);
    for (size_t i = 0; i < (size_t)1 << DMK_PAIR_SLOT_BITS; i++) {
        pairs += f->vocab->tables->pairs[i] != 0;
    }
    assert_int_equal(pairs, DMK_RANKS - 256);
    assert_int_equal(f->vocab->tables->byte_part['!'] >> 8, 0);
    assert_int_equal(f->vocab->tables->byte_part[' '] >> 8, 220);
    assert_int_equal(f->vocab->tables->byte_part[0xad] >> 8, 255);
    assert_true(dmk_token_bytes(f->vocab, DMK_TOKEN_START).len == 9);
    assert_memory_equal(dmk_token_bytes(f->vocab, DMK_TOKEN_START).data, "<|start|>", 9);
    assert_memory_equal(dmk_token_bytes(f->vocab, 200018).data, "<|reserved_200018|>", 19);
}

struct folder {
    char path[64], file[80];
};

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "wb");

    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    assert_int_equal(fclose(file), 0);
}

static void check_refused(const char *path, int status, const char *sentence)
{
    struct dmk_vocab *vocab = (struct dmk_vocab *)(void *)&status;
    struct dmk_error error = {0};
    struct dmk_vocab *const before = vocab;

    assert_int_equal(dmk_vocab_open(path, &vocab, &error), status);
    assert_ptr_equal(vocab, before); /* untouched on failure */
    if (!strstr(error.text, sentence) || !strstr(error.text, path)) {
        print_error("sentence: %s\n", error.text);
        fail();
    }
}

static void test_faults(void **state)
{
    static const struct {
        const char *text, *sentence;
    } cases[] = {
        {"", "has 0 bytes"},
        {"IQ== 0\nIg== 1\n", "holds 2 tokens, o200k_base has 199998"},
        {"IQ== 0\nIg== 2\n", "line 2: 'Ig== 2' is not base64, a space and the rank 1"},
        {"IQ== 1\n", "line 1"},
        {"IQ==0\n", "line 1: 'IQ==0'"},
        {"I*== 0\n", "line 1"},
        {"I=== 0\n", "line 1"},
        {"IQ= 0\n", "line 1"},
        {" 0\n", "line 1"},
        {"IQ== 00000000\n", "line 1"},
        {"IQ== -1\n", "line 1"},
        {"\n\nIQ== 0\n\nIQ== x\n", "line 5"},
        {"{", "line 1"},
        {"{} {}", "line 1"},
        {"\n  {}", "model.type is 'missing' and model.vocab is missing"},
        {"{\"model\":{\"type\":\"BPE\"}}", "model.vocab is missing"},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}", "model.type is 'Unigram'"},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1}}}", "'a' has the id -1"},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":\"0\"}}}", "'a' has the id -1"},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":0}}}",
         "has the id 0, which is not a free one"},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0}}}", "no token has the id 1"},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"\\u4e2d\":0}}}",
         "is not 1 to 128 bytes in the byte alphabet"},
    };
    struct folder f = {.path = "/tmp/damask-test-vocab-XXXXXX"};

    (void)state;
    assert_non_null(mkdtemp(f.path));
    check_refused(f.path, -DMK_ENOENT, "holds neither o200k_base.tiktoken nor tokenizer.json");
    (void)snprintf(f.file, sizeof(f.file), "%s/tokenizer.json", f.path);
    check_refused(f.file, -DMK_ENOENT, "No such file");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        write_file(f.file, cases[i].text);
        check_refused(f.file, -DMK_EFORMAT, cases[i].sentence);
        check_refused(f.path, -DMK_EFORMAT, cases[i].sentence);
    }
    assert_int_equal(truncate(f.file, ((off_t)64 << 20) + 1), 0);
    check_refused(f.file, -DMK_EFORMAT, "has 67108865 bytes, 1 to 67108864 are allowed");
    assert_int_equal(unlink(f.file), 0);
    assert_int_equal(mkfifo(f.file, 0600), 0); /* must not wait for a writer */
    check_refused(f.file, -DMK_EINVAL, "is not a plain file");
    assert_int_equal(unlink(f.file), 0);
    assert_int_equal(rmdir(f.path), 0);
}

#define N_THREADS 4

struct worker {
    const struct dmk_vocab *vocab;
    const struct dmk_ids *want;
    struct dmk_str text;
    bool same;
};

static void *encode_often(void *ud)
{
    struct worker *w = ud;
    struct dmk_bpe_scratch *scratch = dmk_bpe_scratch_new();

    w->same = scratch != NULL;
    for (int i = 0; i < 30 && w->same; i++) {
        struct dmk_ids ids;

        dmk_ids_init(&ids, 0);
        dmk_encode(w->vocab, scratch, w->text, &ids);
        w->same = ids.len == w->want->len &&
                  memcmp(ids.data, w->want->data, ids.len * sizeof(*ids.data)) == 0;
        dmk_ids_fini(&ids);
    }
    dmk_bpe_scratch_free(&scratch);
    return NULL;
}

static void test_threads(void **state)
{
    const struct fixture *f = *state;
    struct worker workers[N_THREADS];
    pthread_t threads[N_THREADS];
    struct dmk_buf text;
    struct dmk_ids want;

    dmk_buf_init(&text, 0);
    for (int i = 0; i < 200; i++) {
        dmk_buf_printf(&text, "Sentence %d of a text, 第%d句话。 %*s|\n", i * 77, i, i, "x");
    }
    dmk_ids_init(&want, 0);
    dmk_encode(f->vocab, f->scratch, dmk_buf_str(&text), &want);
    for (int i = 0; i < N_THREADS; i++) {
        workers[i] = (struct worker){f->vocab, &want, dmk_buf_str(&text), false};
        assert_int_equal(pthread_create(&threads[i], NULL, encode_often, &workers[i]), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_true(workers[i].same);
    }
    dmk_ids_fini(&want);
    dmk_buf_fini(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_threads),
    };

    return cmocka_run_group_tests(tests, fixture_open, fixture_close);
}
