/* o200k_harmony: text to token ids and back.
 *
 * A byte-level BPE over the o200k_base ranks with Harmony's special tokens; equal to tiktoken's
 * o200k_harmony. A vocabulary is immutable after open and may be used by any number of threads; each
 * thread brings its own scratch. */
#pragma once

#include "common/base/buf.h"
#include "common/base/error.h"
#include "common/base/span.h"

#define DMK_TOKEN_START_OF_TEXT 199998u
#define DMK_TOKEN_END_OF_TEXT   199999u
#define DMK_TOKEN_RETURN        200002u
#define DMK_TOKEN_CONSTRAIN     200003u
#define DMK_TOKEN_CHANNEL       200005u
#define DMK_TOKEN_START         200006u
#define DMK_TOKEN_END           200007u
#define DMK_TOKEN_MESSAGE       200008u
#define DMK_TOKEN_CALL          200012u
#define DMK_TOKEN_FIRST_SPECIAL 199998u
#define DMK_VOCAB_SIZE          201088u

struct dmk_vocab;

/* A growable list of ids with a hard cap; appends past the cap set failed. */
struct dmk_ids {
    uint32_t *data;
    size_t len, cap;
    size_t max_len; /* bound; 0 = 2^24 */
    bool failed;
};

void dmk_ids_init(struct dmk_ids *ids, size_t max_len);
void dmk_ids_fini(struct dmk_ids *ids);
void dmk_ids_push(struct dmk_ids *ids, uint32_t id);
void dmk_ids_append(struct dmk_ids *ids, const uint32_t *data, size_t n);

/* Reads o200k_base.tiktoken, or the tokenizer.json of a checkpoint. path may be a file, or a folder that
 * holds either (the former is taken first). The tokens must be o200k_base's, by SHA-256: damask knows no
 * other vocabulary. Blocks for about 0.2 s, with a tokenizer.json about 1 s. */
int dmk_vocab_open(const char *path, struct dmk_vocab **ret, struct dmk_error *reterr);
void dmk_vocab_close(struct dmk_vocab **vocab);
/* Writes the vocabulary as a tokenizer.json (28 MB, about 0.5 s); the bound of out decides. */
void dmk_vocab_write_hf(const struct dmk_vocab *vocab, struct dmk_buf *out);

/* Working memory of one thread: caches of pieces and pairs met before (640 KiB) and room for merging, which grows
 * with the longest piece of a call (32 bytes a byte) and is given back afterwards. NULL: no memory. */
struct dmk_bpe_scratch;
struct dmk_bpe_scratch *dmk_bpe_scratch_new(void);
void dmk_bpe_scratch_free(struct dmk_bpe_scratch **scratch);

/* Ordinary encoding: spellings of special tokens are plain text (the injection barrier). Invalid UTF-8
 * becomes U+FFFD, one for each maximal invalid part. Appends to ids; check ids->failed. */
void dmk_encode(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch, struct dmk_str text,
                struct dmk_ids *ids);

/* The same, but spellings of special tokens become their ids. For tools and tests. */
void dmk_encode_with_specials(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                              struct dmk_str text, struct dmk_ids *ids);

/* The bytes of a token; specials give their spelling. An empty view for ids outside the vocabulary. */
struct dmk_bytes dmk_token_bytes(const struct dmk_vocab *vocab, uint32_t id);

/* Appends the bytes of n tokens to out; they need not be valid UTF-8 (utf8.h repairs and streams).
 * -DMK_EINVAL at an id outside the vocabulary, -DMK_EFULL when out is. */
int dmk_decode(const struct dmk_vocab *vocab, const uint32_t *ids, size_t n, struct dmk_buf *out);

static inline bool dmk_token_is_special(uint32_t id)
{
    return id >= DMK_TOKEN_FIRST_SPECIAL;
}
