/* Speed of the tokenizer, one thread: bench_tokenizer VOCAB ROUNDS FILE...
 *
 * Each file is encoded in chunks of about 16 KiB that end at a line break, as requests would bring it, ROUNDS
 * times after one unmeasured round. Prints a line per file: its name, bytes, tokens, and each round's MB per
 * second of this thread's CPU time (other load on the machine counts little so). bench/tokenizer.py makes the texts, runs tiktoken beside it and prints the table. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "common/base/clock.h"
#include "common/text/tokenizer.h"

#define CHUNK_BYTES 16384

static int read_whole(const char *path, char **ret_data, size_t *ret_len)
{
    FILE *f = fopen(path, "rb");
    char *data = NULL;
    long len = 0;
    bool ok = f && fseek(f, 0, SEEK_END) == 0 && (len = ftell(f)) > 0 && fseek(f, 0, SEEK_SET) == 0;

    if (ok) {
        data = malloc((size_t)len);
        ok = data && fread(data, 1, (size_t)len, f) == (size_t)len;
    }
    if (f) {
        (void)fclose(f); /* only read */
    }
    if (!ok) {
        (void)fprintf(stderr, "bench_tokenizer: can not read %s: %s\n", path, strerror(errno));
        free(data);
        return -1;
    }
    *ret_data = data;
    *ret_len = (size_t)len;
    return 0;
}

/* The length of the chunk at data: to the last line break within the bound, or behind the bound to the
 * next one. */
static size_t chunk_len(const char *data, size_t len)
{
    const char *end;

    if (len <= CHUNK_BYTES) {
        return len;
    }
    end = memrchr(data, '\n', CHUNK_BYTES);
    end = end ? end : memchr(data + CHUNK_BYTES, '\n', len - CHUNK_BYTES);
    return end ? (size_t)(end - data) + 1 : len;
}

static uint64_t thread_ns(void)
{
    struct timespec ts;

    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts); /* can not fail with this clock */
    return (uint64_t)ts.tv_sec * DMK_NS_PER_S + (uint64_t)ts.tv_nsec;
}

static size_t encode_all(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                         struct dmk_ids *ids, const char *data, size_t len)
{
    size_t n = 0;

    for (size_t pos = 0; pos < len;) {
        const size_t chunk = chunk_len(data + pos, len - pos);

        ids->len = 0;
        dmk_encode(vocab, scratch, (struct dmk_str){data + pos, chunk}, ids);
        n += ids->len;
        pos += chunk;
    }
    return n;
}

int main(int argc, char **argv)
{
    struct dmk_vocab *vocab;
    struct dmk_bpe_scratch *scratch;
    struct dmk_error error;
    struct dmk_ids ids;
    uint64_t start;
    long rounds;

    if (argc < 4 || (rounds = strtol(argv[2], NULL, 10)) < 1) {
        (void)fprintf(stderr, "usage: bench_tokenizer VOCAB ROUNDS FILE...\n");
        return 2;
    }
    start = dmk_clock_ns();
    if (dmk_vocab_open(argv[1], &vocab, &error) < 0) {
        (void)fprintf(stderr, "bench_tokenizer: %s\n", error.text);
        return 1;
    }
    (void)printf("open %.3f\n", (double)(dmk_clock_ns() - start) / 1e9);
    scratch = dmk_bpe_scratch_new();
    if (!scratch) {
        return 1;
    }
    dmk_ids_init(&ids, 0);
    for (int i = 3; i < argc; i++) {
        char *data;
        size_t len;

        if (read_whole(argv[i], &data, &len) < 0) {
            return 1;
        }
        (void)printf("%s %zu %zu", argv[i], len, encode_all(vocab, scratch, &ids, data, len));
        for (long k = 0; k < rounds; k++) {
            start = thread_ns();
            (void)encode_all(vocab, scratch, &ids, data, len);
            (void)printf(" %.2f", (double)len * 1e3 / (double)(thread_ns() - start));
        }
        (void)printf("\n");
        free(data);
    }
    if (ids.failed) {
        (void)fprintf(stderr, "bench_tokenizer: no memory for ids\n");
        return 1;
    }
    dmk_ids_fini(&ids);
    dmk_bpe_scratch_free(&scratch);
    dmk_vocab_close(&vocab);
    return 0;
}
