/* Text to the ids of its pieces, by the short cuts: pieces met lately come out of the thread's cache, some are
 * tokens, the others are merged. Each thread has its own scratch; the vocabulary is only read. */
#include "common/text/bpe.h"
#include "common/text/split.h"

#define ID_BITS   18
#define ID_MASK   ((1u << ID_BITS) - 1)
#define N_SHIFT   (DMK_WORD_IDS * ID_BITS)
#define LEN_SHIFT (N_SHIFT + 3)

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "keys hold a piece's first byte lowest");

/* The n bytes at p as a number, 1 <= n <= 8; readable bytes are there. */
static inline uint64_t load_bytes(const uint8_t *p, size_t n, size_t readable)
{
    uint64_t word = 0;

    if (readable >= 8) {
        memcpy(&word, p, 8);
        return word & UINT64_MAX >> (64 - 8 * n);
    }
    memcpy(&word, p, n);
    return word;
}

static inline uint64_t pack_ids(const uint32_t *ids, size_t n)
{
    uint64_t word = 0;

    for (size_t i = 0; i < n; i++) {
        word |= (uint64_t)ids[i] << (i * ID_BITS);
    }
    return word;
}

/* All three ids, used or not. */
static inline void unpack_ids(uint64_t word, uint32_t *ret_ids)
{
    ret_ids[0] = (uint32_t)word & ID_MASK;
    ret_ids[1] = (uint32_t)(word >> ID_BITS) & ID_MASK;
    ret_ids[2] = (uint32_t)(word >> 2 * ID_BITS) & ID_MASK;
}

static inline size_t n_ids(uint64_t word)
{
    return word >> N_SHIFT & 7;
}

/* Merges what no cache has. Where a character has several bytes pieces are hardly ever tokens; words, runs of
 * blanks and signs are. key is of short pieces only. */
static void encode_new(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                       struct dmk_bytes piece, uint64_t key, struct dmk_ids *ids)
{
    if (piece.data[0] < 0x80 && (piece.len == 1 || piece.data[1] < 0xe3)) {
        const uint32_t id = piece.len <= DMK_SHORT_TOKEN_MAX
                                ? dmk_vocab_find_short(vocab, key, piece.len)
                                : dmk_vocab_find(vocab, piece.data, piece.len);

        if (id != DMK_NO_TOKEN) {
            dmk_ids_push(ids, id);
            return;
        }
    }
    if (piece.len <= DMK_BPE_LINEAR_MAX) {
        dmk_bpe_linear(vocab, s, piece, DMK_BPE_CHARS, ids);
    } else {
        dmk_bpe_heap(vocab, s, piece, DMK_BPE_CHARS, ids);
    }
}

/* A piece of at most DMK_SHORT_TOKEN_MAX bytes; from its first byte on so many are readable. */
static inline void encode_short(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                                struct dmk_bytes piece, size_t readable, struct dmk_ids *ids)
{
    const uint64_t key = load_bytes(piece.data, piece.len, readable);
    const uint64_t hash = dmk_short_hash(key, piece.len);
    struct dmk_short_word *set = s->words->shorts[hash >> (64 - DMK_SHORT_BITS)];
    const size_t before = ids->len;
    unsigned hits = 0;

    for (unsigned way = 0; way < DMK_SHORT_WAYS; way++) {
        hits |= (unsigned)((set[way].key == key) & (set[way].ids >> LEN_SHIFT == piece.len)) << way;
    }
    if (hits && ids->cap - ids->len >= DMK_WORD_IDS) {
        const uint64_t word = set[__builtin_ctz(hits)].ids;

        unpack_ids(word, ids->data + ids->len);
        ids->len += n_ids(word);
        return;
    }
    encode_new(vocab, s, piece, key, ids);
    if (!hits && !ids->failed && ids->len - before <= DMK_WORD_IDS) {
        const size_t n = ids->len - before;

        memmove(set + 1, set, (DMK_SHORT_WAYS - 1) * sizeof(*set));
        set[0].key = key;
        set[0].ids = pack_ids(ids->data + before, n) | (uint64_t)n << N_SHIFT |
                     (uint64_t)piece.len << LEN_SHIFT;
    }
}

/* The same for more bytes, at most DMK_LONG_MAX. */
static inline void encode_long(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                               struct dmk_bytes piece, size_t readable, struct dmk_ids *ids)
{
    const uint64_t key[2] = {load_bytes(piece.data, 8, readable),
                             load_bytes(piece.data + 8, piece.len - 8, readable - 8)};
    const uint64_t hash =
        (key[0] ^ (key[1] + piece.len) * 0xbf58476d1ce4e5b9ull) * 0x9e3779b97f4a7c15ull;
    struct dmk_long_word *set = s->words->longs[hash >> (64 - DMK_LONG_BITS)];
    const size_t before = ids->len;
    size_t n;

    for (unsigned way = 0; way < DMK_LONG_WAYS; way++) {
        if (set[way].key[0] == key[0] && set[way].key[1] == key[1] &&
            set[way].ids[0] >> LEN_SHIFT == piece.len && ids->cap - ids->len >= 2 * DMK_WORD_IDS) {
            unpack_ids(set[way].ids[0], ids->data + ids->len);
            unpack_ids(set[way].ids[1], ids->data + ids->len + DMK_WORD_IDS);
            ids->len += n_ids(set[way].ids[0]);
            return;
        }
    }
    encode_new(vocab, s, piece, 0, ids);
    n = ids->len - before;
    if (!ids->failed && n <= 2 * DMK_WORD_IDS) {
        const size_t n_first = n < DMK_WORD_IDS ? n : DMK_WORD_IDS;

        memmove(set + 1, set, (DMK_LONG_WAYS - 1) * sizeof(*set));
        set[0] =
            (struct dmk_long_word){{key[0], key[1]},
                                   {pack_ids(ids->data + before, n_first) | (uint64_t)n << N_SHIFT |
                                        (uint64_t)piece.len << LEN_SHIFT,
                                    pack_ids(ids->data + before + n_first, n - n_first)}};
    }
}

void dmk_words_encode(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                      struct dmk_bytes text, struct dmk_ids *ids)
{
    size_t pos = 0;

    while (pos < text.len && !ids->failed) {
        const size_t end = dmk_split_next(text.data, text.len, pos), n = end - pos;
        const struct dmk_bytes piece = {text.data + pos, n};

        if (n <= DMK_SHORT_TOKEN_MAX) {
            encode_short(vocab, s, piece, text.len - pos, ids);
        } else if (n <= DMK_LONG_MAX && piece.data[0] < 0xe3) {
            encode_long(vocab, s, piece, text.len - pos, ids);
        } else {
            encode_new(vocab, s, piece, 0, ids); /* phrases of CJK hardly ever come again */
        }
        pos = end;
    }
}
