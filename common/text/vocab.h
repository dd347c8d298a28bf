/* The inside of a vocabulary: tables that only common/text reads. Immutable once opened.
 *
 * Token bytes lie in one blob in id order. Two hash tables lead back: bytes to id (whole pieces) and
 * (left id, right id) to the id of the concatenation (merges). A merge's rank is its id, so the second
 * table is all that byte-pair merging needs; smaller ones hold those of its pairs that merging starts with.
 *
 * It holds one pair for each token of two bytes or more: the one that merging the token's own bytes ends
 * with. No other can turn up. When two neighbours make the token T, nothing outside has touched T's bytes
 * yet, and what has been merged among them came in the order in which T alone is merged; that has one state
 * of two parts only. (It takes that every token's bytes merge to the token, which the tests check.) */
#pragma once

#include "common/base/span.h"
#include "common/text/tokenizer.h"

#define DMK_RANKS            199998u /* ordinary tokens, ids 0..199997; specials follow */
#define DMK_RANK_BYTES_MAX   128u    /* of the longest ordinary token */
#define DMK_SPECIALS         (DMK_VOCAB_SIZE - DMK_TOKEN_FIRST_SPECIAL)
#define DMK_NO_TOKEN         UINT32_MAX
#define DMK_CHAR_IDS         65536u
#define DMK_TOKEN_SLOT_BITS  18      /* 75,881 tokens that are not short: load 0.29 */
#define DMK_SHORT_TOKEN_MAX  8       /* bytes */
#define DMK_SHORT_SLOT_BITS  18      /* 124,117 tokens: load 0.47 */
#define DMK_PAIR_SLOT_BITS   19      /* 199,742 pairs: load 0.38 */
#define DMK_PAIR_FILTER_BITS 20      /* a sixth of the pairs that do not merge pass */
#define DMK_WIDE_FIRST       0x2e80u /* CJK, kana, Hangul and what follows: pairs by code point */
#define DMK_WIDE_SLOT_BITS   13      /* 3424 pairs: load 0.42 */
#define DMK_WIDE_FILTER_BITS 17      /* a fortieth passes */
#define DMK_BORDERS          4096u   /* places for borders between two characters */

/* The SHA-256 of o200k_base.tiktoken, in hex. */
extern const char dmk_vocab_sha256[65];

struct dmk_token_slot {
    uint32_t tag; /* high half of the hash */
    uint32_t id;  /* DMK_NO_TOKEN: empty */
};

/* A token of at most 8 bytes that starts with ASCII, as words do: found with one look. */
struct dmk_short_token {
    uint64_t key;     /* its bytes, the first lowest, and 0 behind the last */
    uint32_t len, id; /* no bytes: empty */
};

struct dmk_special {
    uint8_t len;
    char text[31];
};

/* A list of merges, whatever their order: how many, and the sum of dmk_merge_hash. */
struct dmk_merges {
    uint64_t n, sum;
};

/* A token as a part of a piece: id << 8, and the kinds of its partners: in bits 4 to 7 of those that stand on its
 * right in some pair, in bits 0 to 3 of those on its left. The kind of a token is id % 4. Seven of ten tokens have
 * no partner at all, so most neighbours need no look at a table. Parts sort as ids do. */
#define DMK_PART_BITS 26
#define DMK_NO_PART   UINT32_MAX

static inline uint32_t dmk_part_id(uint32_t part)
{
    return part >> 8;
}

/* False where the two surely make nothing. */
static inline bool dmk_part_fits(uint32_t left, uint32_t right)
{
    return (left >> (4 + (dmk_part_id(right) & 3)) & right >> (dmk_part_id(left) & 3) & 1) != 0;
}

/* A token that covers a border between two characters and cuts one of them. */
struct dmk_cut {
    uint32_t id;
    uint32_t near,
        mask; /* its bytes among the two on either side of the border, and which of them it has */
    uint8_t before; /* its bytes in front of the border */
};

/* The cuts by the two bytes beside the border, which name a place; several borders may share one. */
struct dmk_borders {
    uint64_t any[DMK_BORDERS / 64]; /* a bit for each place that has cuts */
    uint16_t first[DMK_BORDERS + 1];
    struct dmk_cut *cuts; /* by place, then id; those of place p are first[p] to first[p + 1] */
};

/* What is looked up at random: one mapping of few large pages, which spares most misses of the TLB. What is
 * hot in a text is small: start and filters. */
struct dmk_tables {
    uint64_t pairs[1u << DMK_PAIR_SLOT_BITS]; /* key << 26 | merged part; 0: empty */
    struct dmk_token_slot tokens[1u << DMK_TOKEN_SLOT_BITS];
    struct dmk_short_token short_tokens[1u << DMK_SHORT_SLOT_BITS];
    uint64_t filter[1u << DMK_PAIR_FILTER_BITS >> 6]; /* a bit of dmk_pair_hash for each pair */
    uint32_t char_part[DMK_CHAR_IDS]; /* by code point, or DMK_NO_PART; see dmk_vocab_char */
    uint32_t ascii[128 * 128];        /* what two ASCII bytes merge to, or DMK_NO_PART */
    /* The pairs of two characters from DMK_WIDE_FIRST on: left code << 42 | right code << 26 | merged part. */
    uint64_t wide[1u << DMK_WIDE_SLOT_BITS];
    uint64_t wide_filter[1u << DMK_WIDE_FILTER_BITS >> 6];
    uint32_t byte_part[256];
    struct dmk_borders starts, ends; /* of tokens that begin, or end, inside of a character */
};

struct dmk_vocab {
    uint8_t *blob;
    uint32_t *offset; /* [DMK_RANKS + 1] into blob */
    struct dmk_tables *tables;
    uint32_t n_added;         /* ordinary tokens added so far, while loading */
    struct dmk_merges merges; /* that the file lists, while loading */
    size_t blob_cap;
    struct dmk_special special[DMK_SPECIALS];
};

/* Whether the first `cut` bytes of the token and the rest are tokens: a merge, in the lists of files. */
bool dmk_vocab_is_cut(const struct dmk_vocab *vocab, struct dmk_bytes token, size_t cut);

/* Of the bytes of the two sides. */
uint64_t dmk_merge_hash(struct dmk_bytes left, struct dmk_bytes right);

/* The id of a byte string that is an ordinary token, or DMK_NO_TOKEN. */
uint32_t dmk_vocab_find(const struct dmk_vocab *vocab, const uint8_t *data, size_t len);

/* Of at most 8 bytes as a number, the first lowest, and their count. The highest bits are the place in a table. */
static inline uint64_t dmk_short_hash(uint64_t key, size_t len)
{
    return (key + len) * 0x9e3779b97f4a7c15ull;
}

/* The same for 1 to 8 bytes of which the first is ASCII; key is as in struct dmk_short_token. */
static inline uint32_t dmk_vocab_find_short(const struct dmk_vocab *vocab, uint64_t key, size_t len)
{
    const struct dmk_short_token *tokens = vocab->tables->short_tokens;
    size_t slot = dmk_short_hash(key, len) >> (64 - DMK_SHORT_SLOT_BITS);

    while (tokens[slot].len != 0) {
        if (tokens[slot].key == key && tokens[slot].len == len) {
            return tokens[slot].id;
        }
        slot = (slot + 1) & (((size_t)1 << DMK_SHORT_SLOT_BITS) - 1);
    }
    return DMK_NO_TOKEN;
}

/* Its highest bits are the place in each of the tables of pairs. */
static inline uint64_t dmk_pair_hash(uint64_t key)
{
    return key * 0x9e3779b97f4a7c15ull;
}

/* Of two parts. */
static inline uint64_t dmk_pair_key(uint32_t left, uint32_t right)
{
    return (uint64_t)dmk_part_id(left) << 18 | dmk_part_id(right);
}

/* False for most pairs that do not merge. */
static inline bool dmk_pair_likely(const struct dmk_tables *tables, uint64_t hash)
{
    const uint64_t bit = hash >> (64 - DMK_PAIR_FILTER_BITS);

    return tables->filter[bit / 64] >> (bit % 64) & 1;
}

/* The part that the pair of this key makes, or DMK_NO_PART. */
static inline uint32_t dmk_pair_find(const struct dmk_tables *tables, uint64_t key, uint64_t hash)
{
    size_t slot = hash >> (64 - DMK_PAIR_SLOT_BITS);
    uint64_t entry;

    while ((entry = tables->pairs[slot]) != 0) {
        if (entry >> DMK_PART_BITS == key) {
            return (uint32_t)entry & ((1u << DMK_PART_BITS) - 1);
        }
        slot = (slot + 1) & (((size_t)1 << DMK_PAIR_SLOT_BITS) - 1);
    }
    return DMK_NO_PART;
}

static inline uint64_t dmk_wide_key(uint32_t left, uint32_t right)
{
    return (uint64_t)left << 16 | right;
}

/* The same for two characters, both from DMK_WIDE_FIRST on and both parts to start from. All pairs of such are
 * in these tables, which are small enough for the nearest caches. */
static inline uint32_t dmk_wide_find(const struct dmk_tables *tables, uint32_t left, uint32_t right)
{
    const uint64_t key = dmk_wide_key(left, right), hash = dmk_pair_hash(key);
    const uint64_t bit = hash >> (64 - DMK_WIDE_FILTER_BITS);
    size_t slot = hash >> (64 - DMK_WIDE_SLOT_BITS);
    uint64_t entry;

    if (!(tables->wide_filter[bit / 64] >> (bit % 64) & 1)) {
        return DMK_NO_PART;
    }
    while ((entry = tables->wide[slot]) != 0) {
        if (entry >> DMK_PART_BITS == key) {
            return (uint32_t)entry & ((1u << DMK_PART_BITS) - 1);
        }
        slot = (slot + 1) & (((size_t)1 << DMK_WIDE_SLOT_BITS) - 1);
    }
    return DMK_NO_PART;
}

/* The part that the character code (below U+10000) surely becomes before anything else happens to its
 * bytes, or DMK_NO_PART; provided that no cut reaches into it.
 *
 * Why: the character's own merges all rank below every other token that holds it (checked when the table is
 * made), and none above its own id. Until they are done, the next of them waits to be made. So only a token of
 * a lower id can take away some of its bytes; such a token begins or ends inside of the character and covers one of
 * its borders. */
static inline uint32_t dmk_vocab_char(const struct dmk_vocab *vocab, uint32_t code)
{
    return vocab->tables->char_part[code];
}

/* The place of the border between the bytes left and right. */
static inline uint32_t dmk_border_place(uint8_t left, uint8_t right)
{
    return (left & 63u) << 6 | (right & 63u);
}

static inline bool dmk_border_any(const struct dmk_borders *borders, uint8_t left, uint8_t right)
{
    return borders->any[left & 63] >> (right & 63) & 1;
}

/* Whether some token of an id below `id` stands in the piece across the border at pos, 0 < pos < piece.len. */
bool dmk_vocab_cut(const struct dmk_vocab *vocab, const struct dmk_borders *borders,
                   struct dmk_bytes piece, size_t pos, uint32_t id);

/* For the loaders: tokens are added in the order of their ids. -DMK_EFORMAT when the token is empty, too
 * long or one too many; -DMK_ENOMEM. */
int dmk_vocab_add(struct dmk_vocab *vocab, const uint8_t *data, size_t len);

/* Fills the tables from the tokens; their memory is there. -DMK_ENOMEM, or -DMK_EFORMAT when some token's
 * bytes do not merge to it, which o200k_base rules out. */
int dmk_vocab_index(struct dmk_vocab *vocab);
/* Parts of it: the characters and cuts, from the tokens alone (-DMK_ENOMEM); the wide pairs, once all pairs are
 * there and know their sides. */
int dmk_vocab_index_chars(struct dmk_vocab *vocab);
void dmk_vocab_index_wide(struct dmk_vocab *vocab);

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
