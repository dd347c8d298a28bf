/* The inside of a vocabulary: tables that only common/text reads. Immutable once opened.
 *
 * Token bytes lie in one blob in id order. Two hash tables lead back: bytes to id (whole pieces) and
 * (left id, right id) to the id of the concatenation (merges). A merge's rank is its id, so the second
 * table is all that byte-pair merging needs. */
#pragma once

#include "common/base/span.h"
#include "common/text/tokenizer.h"

#define DMK_RANKS           199998u /* ordinary tokens, ids 0..199997; specials follow */
#define DMK_RANK_BYTES_MAX  128u    /* of the longest ordinary token */
#define DMK_SPECIALS        (DMK_VOCAB_SIZE - DMK_TOKEN_FIRST_SPECIAL)
#define DMK_NO_TOKEN        UINT32_MAX
#define DMK_TOKEN_SLOT_BITS 19 /* load 0.38 */
#define DMK_PAIR_SLOT_BITS  20 /* 446,189 pairs: load 0.43 */

/* The SHA-256 of o200k_base.tiktoken, in hex. */
extern const char dmk_vocab_sha256[65];

struct dmk_token_slot {
    uint32_t tag; /* high half of the hash */
    uint32_t id;  /* DMK_NO_TOKEN: empty */
};

struct dmk_special {
    uint8_t len;
    char text[31];
};

struct dmk_vocab {
    uint8_t *blob;
    uint32_t *offset; /* [DMK_RANKS + 1] into blob */
    struct dmk_token_slot *tokens;
    uint64_t *pairs;  /* left id << 36 | right id << 18 | merged id, plus 1; 0: empty */
    uint32_t n_added; /* ordinary tokens added so far, while loading */
    size_t blob_cap;
    uint32_t byte_id[256];
    struct dmk_special special[DMK_SPECIALS];
};

/* The id of a byte string that is an ordinary token, or DMK_NO_TOKEN. */
uint32_t dmk_vocab_find(const struct dmk_vocab *vocab, const uint8_t *data, size_t len);

static inline size_t dmk_pair_slot(uint64_t key)
{
    return (size_t)(key * 0x9e3779b97f4a7c15ull >> (64 - DMK_PAIR_SLOT_BITS));
}

/* The token that left and right, both ordinary, make together; or DMK_NO_TOKEN. */
static inline uint32_t dmk_vocab_merge(const struct dmk_vocab *vocab, uint32_t left, uint32_t right)
{
    const uint64_t key = (uint64_t)left << 18 | right;
    size_t slot = dmk_pair_slot(key);
    uint64_t entry;

    while ((entry = vocab->pairs[slot]) != 0) {
        if ((entry - 1) >> 18 == key) {
            return (uint32_t)((entry - 1) & 0x3ffff);
        }
        slot = (slot + 1) & (((size_t)1 << DMK_PAIR_SLOT_BITS) - 1);
    }
    return DMK_NO_TOKEN;
}

/* For the loaders: tokens are added in the order of their ids. -DMK_EFORMAT when the token is empty, too
 * long or one too many; -DMK_ENOMEM. */
int dmk_vocab_add(struct dmk_vocab *vocab, const uint8_t *data, size_t len);

/* Whether the added tokens, written in the .tiktoken format, have o200k_base's hash. */
int dmk_vocab_check_hash(const struct dmk_vocab *vocab, const char *path, struct dmk_error *reterr);

/* The loaders. data is the whole file; path is for the sentence only. */
int dmk_vocab_read_tiktoken(struct dmk_vocab *vocab, const char *path, struct dmk_bytes data,
                            struct dmk_error *reterr);
int dmk_vocab_read_hf(struct dmk_vocab *vocab, const char *path, struct dmk_bytes data,
                      struct dmk_error *reterr);

/* special.c: the spellings. */
void dmk_special_fill(struct dmk_special special[DMK_SPECIALS]);
/* The special token whose spelling starts at text (which starts with "<|"); its length goes to
 * *ret_len. DMK_NO_TOKEN when there is none. */
uint32_t dmk_special_match(const struct dmk_vocab *vocab, struct dmk_str text, size_t *ret_len);
