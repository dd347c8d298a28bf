/* Opening a vocabulary and its tables; see tokenizer.h and vocab.h.
 *
 * damask serves one vocabulary, so a file is accepted only when its tokens are o200k_base, byte for byte;
 * a changed or cut file is refused instead of giving other tokens. Cold code, any thread. */
#include "common/text/vocab.h"
#include "common/base/hash.h"
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_BYTES_MAX ((off_t)64 << 20) /* a tokenizer.json with its merges has 28 MB */
#define HUGE_PAGE      ((size_t)2 << 20)
#define TABLES_BYTES   ((sizeof(struct dmk_tables) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE)
#define PATH_BYTES     4096

const char dmk_vocab_sha256[65] =
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d";

int dmk_vocab_add(struct dmk_vocab *vocab, const uint8_t *data, size_t len)
{
    const uint32_t start = vocab->offset[vocab->n_added];

    if (len == 0 || len > DMK_RANK_BYTES_MAX || vocab->n_added == DMK_RANKS) {
        return -DMK_EFORMAT;
    }
    if (start + len > vocab->blob_cap) {
        const size_t cap = vocab->blob_cap ? vocab->blob_cap * 2 : (size_t)1 << 20;
        uint8_t *blob = realloc(vocab->blob, cap);

        if (!blob) {
            return -DMK_ENOMEM;
        }
        vocab->blob = blob;
        vocab->blob_cap = cap;
    }
    memcpy(vocab->blob + start, data, len);
    vocab->n_added++;
    vocab->offset[vocab->n_added] = start + (uint32_t)len;
    return 0;
}

/* Hash. */

static void format_hex(const uint8_t digest[32], char ret_hex[65])
{
    for (int i = 0; i < 32; i++) {
        (void)snprintf(ret_hex + 2 * i, 3, "%02x", digest[i]);
    }
}

/* The file's lines are made again from the tokens, a chunk at a time. */
int dmk_vocab_check_hash(const struct dmk_vocab *vocab, const char *path, struct dmk_error *reterr)
{
    unsigned char line[4 * ((DMK_RANK_BYTES_MAX + 2) / 3) + 16], digest[32];
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    bool ok = ctx && EVP_DigestInit_ex(ctx, EVP_sha256(), NULL) == 1;
    char hex[65];

    for (uint32_t id = 0; ok && id < DMK_RANKS; id++) {
        const uint32_t start = vocab->offset[id];
        const int n =
            EVP_EncodeBlock(line, vocab->blob + start, (int)(vocab->offset[id + 1] - start));
        const int m = snprintf((char *)line + n, sizeof(line) - (size_t)n, " %u\n", id);

        ok = EVP_DigestUpdate(ctx, line, (size_t)n + (size_t)m) == 1;
    }
    ok = ok && EVP_DigestFinal_ex(ctx, digest, NULL) == 1;
    EVP_MD_CTX_free(ctx);
    if (!ok) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: SHA-256 is not to be had from libcrypto",
                             path);
    }
    format_hex(digest, hex);
    if (strcmp(hex, dmk_vocab_sha256) != 0) {
        return dmk_error_set(
            reterr, -DMK_EMISMATCH,
            "%s is not the o200k_base vocabulary: the SHA-256 of its tokens is %s, "
            "%s is expected",
            path, hex, dmk_vocab_sha256);
    }
    return 0;
}

/* Files. */

static int read_file(const char *path, uint8_t **ret_data, size_t *ret_len,
                     struct dmk_error *reterr)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe would wait */
    uint8_t *data = NULL;
    size_t len = 0, want;
    struct stat st;
    int r;

    if (fd < 0) {
        return dmk_error_set(reterr, errno == ENOENT ? -DMK_ENOENT : -DMK_EIO,
                             "can not open the vocabulary %s: %s", path, strerror(errno));
    }
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        r = dmk_error_set(reterr, -DMK_EINVAL, "the vocabulary %s is not a plain file", path);
        goto out;
    }
    if (st.st_size == 0 || st.st_size > FILE_BYTES_MAX) {
        r = dmk_error_set(reterr, -DMK_EFORMAT,
                          "the vocabulary %s has %lld bytes, 1 to %lld are allowed", path,
                          (long long)st.st_size, (long long)FILE_BYTES_MAX);
        goto out;
    }
    want = (size_t)st.st_size;
    data = malloc(want);
    if (!data) {
        r = dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the %zu bytes of %s", want, path);
        goto out;
    }
    while (len < want) {
        const ssize_t n = read(fd, data + len, want - len);

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            r = dmk_error_set(reterr, -DMK_EIO, "can not read the vocabulary %s: %s", path,
                              n < 0 ? strerror(errno) : "it became shorter meanwhile");
            goto out;
        }
        len += (size_t)n;
    }
    *ret_data = data;
    *ret_len = len;
    data = NULL;
    r = 0;
out:
    free(data);
    (void)close(fd); /* nothing was written */
    return r;
}

/* The file that path names: itself, or the one of a folder. buf gets a folder's file name. */
static int find_file(const char *path, char buf[PATH_BYTES], const char **ret_path,
                     struct dmk_error *reterr)
{
    static const char *const names[] = {"o200k_base.tiktoken", "tokenizer.json"};
    struct stat st;

    if (stat(path, &st) != 0) {
        return dmk_error_set(reterr, errno == ENOENT ? -DMK_ENOENT : -DMK_EIO,
                             "can not open the vocabulary %s: %s", path, strerror(errno));
    }
    if (!S_ISDIR(st.st_mode)) {
        *ret_path = path;
        return 0;
    }
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const int n = snprintf(buf, PATH_BYTES, "%s/%s", path, names[i]);

        if (n > 0 && n < PATH_BYTES && stat(buf, &st) == 0) {
            *ret_path = buf;
            return 0;
        }
    }
    return dmk_error_set(reterr, -DMK_ENOENT, "the folder %s holds neither %s nor %s", path,
                         names[0], names[1]);
}

/* Base64 never starts with a brace. */
static bool starts_json(struct dmk_bytes data)
{
    size_t i = 0;

    while (i < data.len && (data.data[i] == ' ' || data.data[i] == '\t' || data.data[i] == '\r' ||
                            data.data[i] == '\n')) {
        i++;
    }
    return i < data.len && data.data[i] == '{';
}

static struct dmk_vocab *vocab_new(void)
{
    struct dmk_vocab *v = calloc(1, sizeof(*v));

    if (!v) {
        return NULL;
    }
    v->offset = calloc(DMK_RANKS + 1, sizeof(*v->offset));
    v->tables = aligned_alloc(HUGE_PAGE, TABLES_BYTES);
    if (!v->offset || !v->tables) {
        dmk_vocab_close(&v);
        return NULL;
    }
    (void)madvise(v->tables, TABLES_BYTES, MADV_HUGEPAGE); /* advice only */
    memset(v->tables, 0, sizeof(*v->tables));
    return v;
}

uint64_t dmk_merge_hash(struct dmk_bytes left, struct dmk_bytes right)
{
    return dmk_hash64(right.data, right.len, dmk_hash64(left.data, left.len, left.len));
}

bool dmk_vocab_is_cut(const struct dmk_vocab *vocab, struct dmk_bytes token, size_t cut)
{
    return dmk_vocab_find(vocab, token.data, cut) != DMK_NO_TOKEN &&
           dmk_vocab_find(vocab, token.data + cut, token.len - cut) != DMK_NO_TOKEN;
}

/* A file that lists merges lists those of o200k_base: every way to cut a token into two. */
static int check_merges(const struct dmk_vocab *vocab, const char *path, struct dmk_error *reterr)
{
    struct dmk_merges all = {0};

    if (vocab->merges.n == 0) {
        return 0;
    }
    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        const struct dmk_bytes b = dmk_token_bytes(vocab, id);

        for (size_t cut = 1; cut < b.len; cut++) {
            if (dmk_vocab_is_cut(vocab, b, cut)) {
                all.n++;
                all.sum += dmk_merge_hash((struct dmk_bytes){b.data, cut},
                                          (struct dmk_bytes){b.data + cut, b.len - cut});
            }
        }
    }
    if (vocab->merges.n != all.n || vocab->merges.sum != all.sum) {
        return dmk_error_set(reterr, -DMK_EMISMATCH,
                             "%s is damaged or of another model: model.merges has %llu entries of "
                             "check sum %016llx, o200k_base has %llu of %016llx",
                             path, (unsigned long long)vocab->merges.n,
                             (unsigned long long)vocab->merges.sum, (unsigned long long)all.n,
                             (unsigned long long)all.sum);
    }
    return 0;
}

int dmk_vocab_open(const char *path, struct dmk_vocab **ret, struct dmk_error *reterr)
{
    char buf[PATH_BYTES];
    struct dmk_vocab *v = NULL;
    uint8_t *data = NULL;
    struct dmk_bytes bytes;
    size_t len = 0;
    int r = find_file(path, buf, &path, reterr);

    if (r < 0) {
        return r;
    }
    r = read_file(path, &data, &len, reterr);
    if (!data) {
        return r;
    }
    v = vocab_new();
    if (!v) {
        r = dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the tables of the vocabulary %s",
                          path);
        goto out;
    }
    dmk_special_fill(v->special);
    bytes = (struct dmk_bytes){data, len};
    r = starts_json(bytes) ? dmk_vocab_read_hf(v, path, bytes, reterr)
                           : dmk_vocab_read_tiktoken(v, path, bytes, reterr);
    if (r < 0) {
        goto out;
    }
    r = dmk_vocab_check_hash(v, path, reterr);
    if (r < 0) {
        goto out;
    }
    r = dmk_vocab_index(v);
    if (r < 0) {
        r = dmk_error_set(reterr, r, "can not make the tables of the vocabulary %s: %s", path,
                          dmk_status_message(r));
        goto out;
    }
    r = check_merges(v, path, reterr);
    if (r < 0) {
        goto out;
    }
    *ret = v;
    v = NULL;
out:
    dmk_vocab_close(&v);
    free(data);
    return r < 0 ? r : 0;
}

void dmk_vocab_close(struct dmk_vocab **vocab)
{
    struct dmk_vocab *v = vocab ? *vocab : NULL;

    if (!v) {
        return;
    }
    free(v->blob);
    free(v->offset);
    if (v->tables) {
        free(v->tables->starts.cuts);
        free(v->tables->ends.cuts);
    }
    free(v->tables);
    free(v);
    *vocab = NULL;
}

struct dmk_bytes dmk_token_bytes(const struct dmk_vocab *vocab, uint32_t id)
{
    if (id < DMK_RANKS) {
        return (struct dmk_bytes){vocab->blob + vocab->offset[id],
                                  vocab->offset[id + 1] - vocab->offset[id]};
    }
    if (id < DMK_VOCAB_SIZE) {
        const struct dmk_special *s = &vocab->special[id - DMK_RANKS];

        return (struct dmk_bytes){(const uint8_t *)s->text, s->len};
    }
    return (struct dmk_bytes){NULL, 0};
}
