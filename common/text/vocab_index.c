/* The tables of a vocabulary, made from its tokens; vocab.h says what they hold and why that is enough.
 * Cold code, run once at open, but for dmk_vocab_find. */
#include "common/text/vocab.h"
#include "common/base/hash.h"
#include <stdlib.h>

/* Tokens by their bytes. */

static bool is_short(const uint8_t *data, size_t len)
{
    return len <= DMK_SHORT_TOKEN_MAX && data[0] < 0x80;
}

static uint64_t short_key(const uint8_t *data, size_t len)
{
    uint64_t key = 0;

    memcpy(&key, data, len);
    return key;
}

uint32_t dmk_vocab_find(const struct dmk_vocab *vocab, const uint8_t *data, size_t len)
{
    const size_t mask = ((size_t)1 << DMK_TOKEN_SLOT_BITS) - 1;
    uint64_t hash;
    size_t slot;

    if (len == 0 || len > DMK_RANK_BYTES_MAX) {
        return DMK_NO_TOKEN;
    }
    if (is_short(data, len)) {
        return dmk_vocab_find_short(vocab, short_key(data, len), len);
    }
    hash = dmk_hash64(data, len, 0);
    for (slot = hash & mask; vocab->tables->tokens[slot].id != DMK_NO_TOKEN;
         slot = (slot + 1) & mask) {
        const uint32_t id = vocab->tables->tokens[slot].id;
        const uint32_t start = vocab->offset[id];

        if (vocab->tables->tokens[slot].tag == (uint32_t)(hash >> 32) &&
            vocab->offset[id + 1] - start == len && memcmp(vocab->blob + start, data, len) == 0) {
            return id;
        }
    }
    return DMK_NO_TOKEN;
}

static void index_short(struct dmk_tables *tables, struct dmk_bytes token, uint32_t id)
{
    const uint64_t key = short_key(token.data, token.len);
    size_t slot = dmk_short_hash(key, token.len) >> (64 - DMK_SHORT_SLOT_BITS);

    while (tables->short_tokens[slot].len != 0) {
        slot = (slot + 1) & (((size_t)1 << DMK_SHORT_SLOT_BITS) - 1);
    }
    tables->short_tokens[slot] = (struct dmk_short_token){key, (uint32_t)token.len, id};
}

static void index_tokens(struct dmk_vocab *vocab)
{
    const size_t n_slots = (size_t)1 << DMK_TOKEN_SLOT_BITS;
    struct dmk_token_slot *tokens = vocab->tables->tokens;

    memset(tokens, 0xff, n_slots * sizeof(*tokens));
    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        const struct dmk_bytes token = dmk_token_bytes(vocab, id);

        if (is_short(token.data, token.len)) {
            index_short(vocab->tables, token, id);
        } else {
            const uint64_t hash = dmk_hash64(token.data, token.len, 0);
            size_t slot = hash & (n_slots - 1);

            while (tokens[slot].id != DMK_NO_TOKEN) {
                slot = (slot + 1) & (n_slots - 1);
            }
            tokens[slot] = (struct dmk_token_slot){(uint32_t)(hash >> 32), id};
        }
    }
}

/* Pairs. */

static void index_pair(struct dmk_tables *tables, uint32_t left, uint32_t right, uint32_t id)
{
    const uint64_t key = dmk_pair_key(left, right), hash = dmk_pair_hash(key);
    const uint64_t bit = hash >> (64 - DMK_PAIR_FILTER_BITS);
    size_t slot = hash >> (64 - DMK_PAIR_SLOT_BITS);

    while (tables->pairs[slot] != 0) {
        slot = (slot + 1) & (((size_t)1 << DMK_PAIR_SLOT_BITS) - 1);
    }
    tables->pairs[slot] = key << DMK_PART_BITS | (uint64_t)id << 8;
    tables->filter[bit / 64] |= 1ull << (bit % 64);
}

static uint32_t find_pair(const struct dmk_tables *tables, uint32_t left, uint32_t right)
{
    const uint64_t key = dmk_pair_key(left, right), hash = dmk_pair_hash(key);

    return dmk_pair_likely(tables, hash) ? dmk_pair_find(tables, key, hash) : DMK_NO_PART;
}

/* Merges the token's bytes by the pairs of the tokens before it down to two parts, which are its pair. */
static int split_token(struct dmk_vocab *vocab, uint32_t id)
{
    struct dmk_tables *tables = vocab->tables;
    uint32_t part[DMK_RANK_BYTES_MAX], merged[DMK_RANK_BYTES_MAX];
    const uint8_t *data = vocab->blob + vocab->offset[id];
    size_t n = vocab->offset[id + 1] - vocab->offset[id];

    for (size_t i = 0; i < n; i++) {
        part[i] = tables->byte_part[data[i]];
        merged[i] = i == 0 ? DMK_NO_PART : find_pair(tables, part[i - 1], part[i]);
    }
    /* merged[i] is of the parts i - 1 and i. */
    while (n > 2) {
        size_t at = 0;

        for (size_t i = 1; i < n; i++) {
            at = merged[i] < merged[at] ? i : at;
        }
        if (at == 0) {
            return -DMK_EFORMAT;
        }
        part[at - 1] = merged[at];
        n--;
        memmove(part + at, part + at + 1, (n - at) * sizeof(*part));
        memmove(merged + at, merged + at + 1, (n - at) * sizeof(*merged));
        if (at < n) {
            merged[at] = find_pair(tables, part[at - 1], part[at]);
        }
        if (at > 1) {
            merged[at - 1] = find_pair(tables, part[at - 2], part[at - 1]);
        }
    }
    if (n == 2) {
        index_pair(tables, part[0], part[1], id);
    }
    return 0;
}

/* Tells every part the kinds of its partners, once all pairs and characters are there. */
static int mark_partners(struct dmk_tables *tables)
{
    const size_t n_slots = (size_t)1 << DMK_PAIR_SLOT_BITS;
    uint8_t *kinds = calloc(DMK_RANKS, 1);

    if (!kinds) {
        return -DMK_ENOMEM;
    }
    for (size_t i = 0; i < n_slots; i++) {
        const uint64_t key = tables->pairs[i] >> DMK_PART_BITS;

        if (tables->pairs[i] != 0) {
            kinds[key >> 18] |= (uint8_t)(0x10 << (key & 3));
            kinds[key & 0x3ffff] |= (uint8_t)(1 << (key >> 18 & 3));
        }
    }
    for (size_t i = 0; i < n_slots; i++) {
        if (tables->pairs[i] != 0) {
            tables->pairs[i] |= kinds[tables->pairs[i] >> 8 & 0x3ffff];
        }
    }
    for (unsigned i = 0; i < 256; i++) {
        tables->byte_part[i] |= kinds[dmk_part_id(tables->byte_part[i])];
    }
    for (uint32_t code = 0; code < DMK_CHAR_IDS; code++) {
        if (tables->char_part[code] != DMK_NO_PART) {
            tables->char_part[code] |= kinds[dmk_part_id(tables->char_part[code])];
        }
    }
    free(kinds);
    return 0;
}

/* In the order of ranks: what a token is made of stands before it. */
static int index_pairs(struct dmk_vocab *vocab)
{
    for (unsigned i = 0; i < 256; i++) {
        const uint8_t byte = (uint8_t)i;
        const uint32_t id = dmk_vocab_find(vocab, &byte, 1);

        if (id == DMK_NO_TOKEN) {
            return -DMK_EFORMAT;
        }
        vocab->tables->byte_part[i] = id << 8;
    }
    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        const int r = split_token(vocab, id);

        if (r < 0) {
            return r;
        }
    }
    return 0;
}

static void index_ascii(struct dmk_tables *tables)
{
    for (unsigned i = 0; i < 128 * 128; i++) {
        tables->ascii[i] =
            find_pair(tables, tables->byte_part[i / 128], tables->byte_part[i % 128]);
    }
}

int dmk_vocab_index(struct dmk_vocab *vocab)
{
    int r;

    index_tokens(vocab);
    r = index_pairs(vocab);
    if (r == 0) {
        r = dmk_vocab_index_chars(vocab);
    }
    if (r == 0) {
        r = mark_partners(vocab->tables);
    }
    if (r == 0) {
        index_ascii(vocab->tables);
        dmk_vocab_index_wide(vocab);
    }
    return r;
}
