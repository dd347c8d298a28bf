/* The tables of a vocabulary, made from its tokens; vocab.h says what they hold and why that is enough.
 * Cold code, run once at open, but for dmk_vocab_find. */
#include "common/text/vocab.h"
#include "common/text/utf8.h"
#include "common/base/hash.h"
#include <stdlib.h>

/* Tokens by their bytes. */

uint32_t dmk_vocab_find(const struct dmk_vocab *vocab, const uint8_t *data, size_t len)
{
    const size_t mask = ((size_t)1 << DMK_TOKEN_SLOT_BITS) - 1;
    uint64_t hash;
    size_t slot;

    if (len > DMK_RANK_BYTES_MAX) {
        return DMK_NO_TOKEN;
    }
    hash = dmk_hash64(data, len, 0);
    for (slot = hash & mask; vocab->tokens[slot].id != DMK_NO_TOKEN; slot = (slot + 1) & mask) {
        const uint32_t id = vocab->tokens[slot].id;
        const uint32_t start = vocab->offset[id];

        if (vocab->tokens[slot].tag == (uint32_t)(hash >> 32) &&
            vocab->offset[id + 1] - start == len && memcmp(vocab->blob + start, data, len) == 0) {
            return id;
        }
    }
    return DMK_NO_TOKEN;
}

static void index_tokens(struct dmk_vocab *vocab)
{
    const size_t n_slots = (size_t)1 << DMK_TOKEN_SLOT_BITS;

    memset(vocab->tokens, 0xff, n_slots * sizeof(*vocab->tokens));
    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        const uint32_t start = vocab->offset[id];
        const uint64_t hash = dmk_hash64(vocab->blob + start, vocab->offset[id + 1] - start, 0);
        size_t slot = hash & (n_slots - 1);

        while (vocab->tokens[slot].id != DMK_NO_TOKEN) {
            slot = (slot + 1) & (n_slots - 1);
        }
        vocab->tokens[slot] = (struct dmk_token_slot){(uint32_t)(hash >> 32), id};
    }
}

/* Pairs. */

static void index_pair(struct dmk_vocab *vocab, uint32_t left, uint32_t right, uint32_t id)
{
    const uint64_t key = dmk_pair_key(left, right), hash = dmk_pair_hash(key);
    const uint64_t bit = hash >> (64 - DMK_PAIR_BLOOM_BITS);
    size_t slot = hash >> (64 - DMK_PAIR_SLOT_BITS);

    while (vocab->pairs[slot] != 0) {
        slot = (slot + 1) & (((size_t)1 << DMK_PAIR_SLOT_BITS) - 1);
    }
    vocab->pairs[slot] = (key << 18 | id) + 1;
    vocab->bloom[bit / 64] |= 1ull << (bit % 64);
}

static uint32_t find_pair(const struct dmk_vocab *vocab, uint32_t left, uint32_t right)
{
    const uint64_t key = dmk_pair_key(left, right), hash = dmk_pair_hash(key);

    return dmk_pair_likely(vocab, hash) ? dmk_pair_find(vocab, key, hash) : DMK_NO_TOKEN;
}

/* Merges the token's bytes by the pairs of the tokens before it down to two parts, which are its pair. */
static int split_token(struct dmk_vocab *vocab, uint32_t id)
{
    uint32_t part[DMK_RANK_BYTES_MAX], merged[DMK_RANK_BYTES_MAX];
    const uint8_t *data = vocab->blob + vocab->offset[id];
    size_t n = vocab->offset[id + 1] - vocab->offset[id];

    for (size_t i = 0; i < n; i++) {
        part[i] = vocab->byte_id[data[i]];
        merged[i] = i == 0 ? DMK_NO_TOKEN : find_pair(vocab, part[i - 1], part[i]);
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
            merged[at] = find_pair(vocab, part[at - 1], part[at]);
        }
        if (at > 1) {
            merged[at - 1] = find_pair(vocab, part[at - 2], part[at - 1]);
        }
    }
    if (n == 2) {
        index_pair(vocab, part[0], part[1], id);
    }
    return 0;
}

/* In the order of ranks: what a token is made of stands before it. */
static int index_pairs(struct dmk_vocab *vocab)
{
    for (unsigned i = 0; i < 256; i++) {
        const uint8_t byte = (uint8_t)i;

        vocab->byte_id[i] = dmk_vocab_find(vocab, &byte, 1);
        if (vocab->byte_id[i] == DMK_NO_TOKEN) {
            return -DMK_EFORMAT;
        }
    }
    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        const int r = split_token(vocab, id);

        if (r < 0) {
            return r;
        }
    }
    return 0;
}

/* Characters. */

/* The length that the lead byte announces; 1 for ASCII and for bytes that lead nothing. */
static size_t announced(uint8_t lead)
{
    return lead < 0xc2 || lead > 0xf4 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

static bool is_continuation(uint8_t byte)
{
    return (byte & 0xc0) == 0x80;
}

static void mark_crossed(struct dmk_vocab *vocab, uint8_t left, uint8_t right)
{
    vocab->crossed[(size_t)left * 4 + right / 64] |= 1ull << (right % 64);
}

/* A token's part of a character at its start or end, if there is more to it, crosses that border. */
static void mark_borders(struct dmk_vocab *vocab, const uint8_t *data, size_t len)
{
    size_t start = 0, end = len;

    while (start < len && is_continuation(data[start])) {
        start++;
    }
    if (start > 0 && start < len) {
        mark_crossed(vocab, data[start - 1], data[start]);
    }
    while (end > start && is_continuation(data[end - 1])) {
        end--;
    }
    /* data[end - 1] leads the last character; is that cut, with something in front of it? */
    if (end > start && end >= 2 && announced(data[end - 1]) > len - (end - 1)) {
        mark_crossed(vocab, data[end - 2], data[end - 1]);
    }
}

/* The first token that holds a character must be the character, or its id does not count. */
static void mark_chars(struct dmk_vocab *vocab, uint8_t *seen, uint32_t id)
{
    const uint8_t *data = vocab->blob + vocab->offset[id];
    const size_t len = vocab->offset[id + 1] - vocab->offset[id];

    for (size_t i = 0; i < len;) {
        const size_t n = announced(data[i]);
        uint32_t code;

        if ((n == 2 || n == 3) && n <= len - i && dmk_utf8_valid_prefix(data + i, n) == n) {
            (void)dmk_utf8_decode(data + i, n, &code);
            if (!seen[code] && n == len) {
                vocab->char_id[code] = id;
            }
            seen[code] = 1;
            i += n;
        } else {
            i++;
        }
    }
}

/* The rank of the merge that a character of three bytes starts with must be lower than its own, else it
 * could come late. */
static bool starts_late(const struct dmk_vocab *vocab, uint32_t id)
{
    const uint8_t *data = vocab->blob + vocab->offset[id];
    uint32_t left, right;

    if (vocab->offset[id + 1] - vocab->offset[id] < 3) {
        return false;
    }
    left = dmk_vocab_find(vocab, data, 2);
    right = dmk_vocab_find(vocab, data + 1, 2);
    return (left < right ? left : right) > id;
}

static int index_chars(struct dmk_vocab *vocab)
{
    uint8_t *seen = calloc(DMK_CHAR_IDS, 1);

    if (!seen) {
        return -DMK_ENOMEM;
    }
    memset(vocab->char_id, 0xff, DMK_CHAR_IDS * sizeof(*vocab->char_id));
    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        mark_borders(vocab, vocab->blob + vocab->offset[id],
                     vocab->offset[id + 1] - vocab->offset[id]);
        mark_chars(vocab, seen, id);
    }
    for (uint32_t code = 0; code < DMK_CHAR_IDS; code++) {
        const uint32_t id = vocab->char_id[code];

        if (id != DMK_NO_TOKEN && starts_late(vocab, id)) {
            vocab->char_id[code] = DMK_NO_TOKEN;
        }
    }
    free(seen);
    return 0;
}

int dmk_vocab_index(struct dmk_vocab *vocab)
{
    int r;

    index_tokens(vocab);
    r = index_pairs(vocab);
    return r < 0 ? r : index_chars(vocab);
}
