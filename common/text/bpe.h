/* Byte-pair merging of one piece, and the scratch of a thread. Internal to common/text.
 *
 * Rule: among adjacent pairs whose concatenation is a token, merge the one of the lowest rank, the
 * leftmost among equals; until there is none. Two algorithms with identical output follow it: an array
 * scan for short pieces and a heap for long ones. */
#pragma once

#include "common/text/vocab.h"

#define DMK_BPE_LINEAR_MAX  128 /* bytes; longer pieces take the heap */
#define DMK_PAIR_CACHE_BITS 14
#define DMK_CACHED_NONE     ((1u << DMK_PART_BITS) - 1) /* in the cache of pairs: makes no token */

/* Pieces met before and their tokens, in sets of one cache line; a new one displaces the oldest of its set. */
#define DMK_SHORT_BITS 12 /* sets */
#define DMK_SHORT_WAYS 4
#define DMK_LONG_BITS  12
#define DMK_LONG_WAYS  2
#define DMK_LONG_MAX   16 /* bytes; short ones have DMK_SHORT_TOKEN_MAX */
#define DMK_WORD_IDS                                                                               \
    3 /* ids of 18 bits in a word of 64; their number stands from bit 54 on, the bytes' from 57 on */

struct dmk_short_word {
    uint64_t key; /* the bytes, and 0 behind the last */
    uint64_t ids; /* no bytes: empty */
};

struct dmk_long_word {
    uint64_t key[2];
    uint64_t ids[2]; /* the numbers stand in the first */
};

struct dmk_words {
    struct dmk_short_word shorts[1u << DMK_SHORT_BITS][DMK_SHORT_WAYS];
    struct dmk_long_word longs[1u << DMK_LONG_BITS][DMK_LONG_WAYS];
};

struct dmk_bpe_scratch {
    const struct dmk_vocab *vocab; /* whose tokens are cached */
    struct dmk_words *words;
    uint64_t *pairs; /* as struct dmk_tables' pairs, and pairs that do not merge; direct-mapped */
    struct node *nodes;
    uint64_t *heap;     /* [2 * cap], rank << 32 | node */
    size_t cap, n_heap; /* cap of nodes */
    struct dmk_buf text;
};

/* What merging starts from. The result is the same; characters are fewer, but the piece must be valid
 * UTF-8. */
enum dmk_bpe_start { DMK_BPE_BYTES, DMK_BPE_CHARS };

void dmk_bpe_linear(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                    struct dmk_bytes piece, enum dmk_bpe_start start, struct dmk_ids *ids);
void dmk_bpe_heap(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                  struct dmk_bytes piece, enum dmk_bpe_start start, struct dmk_ids *ids);

/* Cuts text, which is valid UTF-8, into pieces and encodes them; pieces that are a token, or were met lately,
 * take a short cut. */
void dmk_words_encode(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                      struct dmk_bytes text, struct dmk_ids *ids);

/* Readies the scratch for this vocabulary: what is cached of another one is dropped. Comes first. */
void dmk_bpe_scratch_begin(struct dmk_bpe_scratch *scratch, const struct dmk_vocab *vocab);

/* Where encode.c repairs invalid text. */
struct dmk_buf *dmk_bpe_scratch_text(struct dmk_bpe_scratch *scratch);
/* Gives back what a giant piece or text made grow. */
void dmk_bpe_scratch_trim(struct dmk_bpe_scratch *scratch);

/* Room for n more ids behind the last, or NULL (ids->failed is set). */
uint32_t *dmk_ids_room(struct dmk_ids *ids, size_t n);
