/* The inside of a vocabulary: tables that only common/text reads. Immutable once opened.
 *
 * Token bytes lie in one blob in id order. Two hash tables lead back: bytes to id (whole pieces) and
 * (left id, right id) to the id of the concatenation (merges). A merge's rank is its id, so the second
 * table is all that byte-pair merging needs.
 *
 * It holds one pair for each token of two bytes or more: the one that merging the token's own bytes ends
 * with. No other can turn up. When two neighbours make the token T, nothing outside has touched T's bytes
 * yet, and what has been merged among them came in the order in which T alone is merged; that has one state
 * of two parts only. (It takes that every token's bytes merge to the token, which the tests check.) */
#pragma once

#include "common/base/span.h"
#include "common/text/tokenizer.h"

#define DMK_RANKS           199998u /* ordinary tokens, ids 0..199997; specials follow */
#define DMK_RANK_BYTES_MAX  128u    /* of the longest ordinary token */
#define DMK_SPECIALS        (DMK_VOCAB_SIZE - DMK_TOKEN_FIRST_SPECIAL)
#define DMK_NO_TOKEN        UINT32_MAX
#define DMK_CHAR_IDS        65536u
#define DMK_TOKEN_SLOT_BITS 19 /* load 0.38 */
#define DMK_PAIR_SLOT_BITS  19 /* 199,742 pairs: load 0.38 */
#define DMK_PAIR_BLOOM_BITS 22 /* a twentieth of the pairs that do not merge pass */

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

/* A list of merges, whatever their order: how many, and the sum of dmk_merge_hash. */
struct dmk_merges {
    uint64_t n, sum;
};

struct dmk_vocab {
    uint8_t *blob;
    uint32_t *offset; /* [DMK_RANKS + 1] into blob */
    struct dmk_token_slot *tokens;
    uint64_t *pairs;          /* left id << 36 | right id << 18 | merged id, plus 1; 0: empty */
    uint64_t *bloom;          /* a bit of dmk_pair_hash for each pair */
    uint32_t n_added;         /* ordinary tokens added so far, while loading */
    struct dmk_merges merges; /* that the file lists, while loading */
    size_t blob_cap;
    uint32_t byte_id[256];
    /* Whole characters as a start for merging instead of their bytes; see dmk_vocab_char. */
    uint32_t *char_id;         /* [DMK_CHAR_IDS] by code point, or DMK_NO_TOKEN */
    uint64_t crossed[256 * 4]; /* bit (last byte of the left, first byte of the right character) */
    struct dmk_special special[DMK_SPECIALS];
};

/* Whether the first `cut` bytes of the token and the rest are tokens: a merge, in the lists of files. */
bool dmk_vocab_is_cut(const struct dmk_vocab *vocab, struct dmk_bytes token, size_t cut);

/* Of the bytes of the two sides. */
uint64_t dmk_merge_hash(struct dmk_bytes left, struct dmk_bytes right);

/* The id of a byte string that is an ordinary token, or DMK_NO_TOKEN. */
uint32_t dmk_vocab_find(const struct dmk_vocab *vocab, const uint8_t *data, size_t len);

/* Its highest bits are the place in each of the tables of pairs. */
static inline uint64_t dmk_pair_hash(uint64_t key)
{
    return key * 0x9e3779b97f4a7c15ull;
}

/* left and right, both ordinary. */
static inline uint64_t dmk_pair_key(uint32_t left, uint32_t right)
{
    return (uint64_t)left << 18 | right;
}

/* False for most pairs that do not merge: one bit of a table that stays in the CPU's cache. */
static inline bool dmk_pair_likely(const struct dmk_vocab *vocab, uint64_t hash)
{
    const uint64_t bit = hash >> (64 - DMK_PAIR_BLOOM_BITS);

    return vocab->bloom[bit / 64] >> (bit % 64) & 1;
}

/* The token that the pair of this key makes, or DMK_NO_TOKEN. */
static inline uint32_t dmk_pair_find(const struct dmk_vocab *vocab, uint64_t key, uint64_t hash)
{
    size_t slot = hash >> (64 - DMK_PAIR_SLOT_BITS);
    uint64_t entry;

    while ((entry = vocab->pairs[slot]) != 0) {
        if ((entry - 1) >> 18 == key) {
            return (uint32_t)((entry - 1) & 0x3ffff);
        }
        slot = (slot + 1) & (((size_t)1 << DMK_PAIR_SLOT_BITS) - 1);
    }
    return DMK_NO_TOKEN;
}

/* The token that the character code (below U+10000) surely becomes before anything else happens to its
 * bytes, or DMK_NO_TOKEN; provided that neither of its borders is crossed.
 *
 * Why: the character's own merges all rank below every other token that holds it (checked when the table is
 * made), and no token reaches from outside into it where its borders are not crossed. So its bytes merge
 * among themselves alone, and are done before the first merge that the whole character takes part in. */
static inline uint32_t dmk_vocab_char(const struct dmk_vocab *vocab, uint32_t code)
{
    return vocab->char_id[code];
}

/* Whether some token covers the border between two characters and ends inside one of them; left is the
 * last byte before the border, right the first one behind it. */
static inline bool dmk_vocab_crossed(const struct dmk_vocab *vocab, uint8_t left, uint8_t right)
{
    return vocab->crossed[(size_t)left * 4 + right / 64] >> (right % 64) & 1;
}

/* For the loaders: tokens are added in the order of their ids. -DMK_EFORMAT when the token is empty, too
 * long or one too many; -DMK_ENOMEM. */
int dmk_vocab_add(struct dmk_vocab *vocab, const uint8_t *data, size_t len);

/* Fills the tables from the tokens; their memory is there. -DMK_ENOMEM, or -DMK_EFORMAT when some token's
 * bytes do not merge to it, which o200k_base rules out. */
int dmk_vocab_index(struct dmk_vocab *vocab);

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
