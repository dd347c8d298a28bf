/* The tables of a vocabulary that let merging start from whole characters: their parts, the tokens that cut
 * characters, and the pairs of two characters. vocab.h says what they hold and why that is enough.
 * Cold code, run once at open, but for dmk_vocab_cut. */
#include "common/text/vocab.h"
#include "common/text/utf8.h"
#include <stdlib.h>

/* The length that the lead byte announces; 1 for ASCII and for bytes that lead nothing. */
static size_t announced(uint8_t lead)
{
    return lead < 0xc2 || lead > 0xf4 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

static bool is_continuation(uint8_t byte)
{
    return (byte & 0xc0) == 0x80;
}

/* Cuts. */

bool dmk_vocab_cut(const struct dmk_vocab *vocab, const struct dmk_borders *borders,
                   struct dmk_bytes piece, size_t pos, uint32_t id)
{
    const uint32_t place = dmk_border_place(piece.data[pos - 1], piece.data[pos]);
    const bool inside = pos >= 2 && piece.len - pos >= 2;
    uint32_t near = 0;

    if (inside) {
        memcpy(&near, piece.data + pos - 2, 4);
    }
    for (uint32_t i = borders->first[place]; i < borders->first[place + 1]; i++) {
        const struct dmk_cut *cut = &borders->cuts[i];
        struct dmk_bytes token;

        if (cut->id >= id) {
            break;
        }
        if (inside && ((near ^ cut->near) & cut->mask) != 0) {
            continue; /* most of them, without a look at the token */
        }
        token = dmk_token_bytes(vocab, cut->id);
        if (cut->before <= pos && token.len - cut->before <= piece.len - pos &&
            memcmp(piece.data + pos - cut->before, token.data, token.len) == 0) {
            return true;
        }
    }
    return false;
}

/* How many bytes stand in front of the first border of a token that begins inside of a character; 0: it does not, or
 * covers no border. */
static size_t start_cut(struct dmk_bytes token)
{
    size_t n = 0;

    while (n < token.len && is_continuation(token.data[n])) {
        n++;
    }
    return n < token.len ? n : 0;
}

/* The same of the last border, for a token that ends inside of a character. */
static size_t end_cut(struct dmk_bytes token)
{
    size_t lead = token.len;

    while (lead > 0 && is_continuation(token.data[lead - 1])) {
        lead--;
    }
    return lead > 0 && announced(token.data[lead - 1]) > token.len - (lead - 1) ? lead - 1 : 0;
}

static struct dmk_cut make_cut(uint32_t id, struct dmk_bytes token, size_t before)
{
    struct dmk_cut cut = {.id = id, .before = (uint8_t)before};
    uint8_t near[4] = {0}, mask[4] = {0};

    for (size_t i = 0; i < 4; i++) {
        if (before + i >= 2 && before + i - 2 < token.len) {
            near[i] = token.data[before + i - 2];
            mask[i] = 0xff;
        }
    }
    memcpy(&cut.near, near, 4);
    memcpy(&cut.mask, mask, 4);
    return cut;
}

static int index_cuts(struct dmk_vocab *vocab, struct dmk_borders *borders,
                      size_t (*cut_of)(struct dmk_bytes token))
{
    uint16_t next[DMK_BORDERS];
    uint32_t n = 0;

    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        const struct dmk_bytes token = dmk_token_bytes(vocab, id);
        const size_t cut = cut_of(token);

        if (cut > 0) {
            const uint32_t place = dmk_border_place(token.data[cut - 1], token.data[cut]);

            borders->any[place / 64] |= 1ull << (place % 64);
            borders->first[place + 1]++;
            n++;
        }
    }
    borders->cuts = n > 0 && n <= UINT16_MAX ? calloc(n, sizeof(*borders->cuts)) : NULL;
    if (!borders->cuts) {
        return n > UINT16_MAX ? -DMK_EFORMAT : -DMK_ENOMEM;
    }
    for (uint32_t place = 0; place < DMK_BORDERS; place++) {
        next[place] = borders->first[place];
        borders->first[place + 1] = (uint16_t)(borders->first[place + 1] + borders->first[place]);
    }
    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        const struct dmk_bytes token = dmk_token_bytes(vocab, id);
        const size_t cut = cut_of(token);

        if (cut > 0) {
            const uint32_t place = dmk_border_place(token.data[cut - 1], token.data[cut]);

            borders->cuts[next[place]++] = make_cut(id, token, cut);
        }
    }
    return 0;
}

/* Characters. */

/* The first token that holds a character must be the character, or its part does not count. */
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
                vocab->tables->char_part[code] = id << 8;
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
    uint32_t *part = vocab->tables->char_part;
    uint8_t *seen = calloc(DMK_CHAR_IDS, 1);

    if (!seen) {
        return -DMK_ENOMEM;
    }
    memset(part, 0xff, DMK_CHAR_IDS * sizeof(*part));
    for (uint32_t id = 0; id < DMK_RANKS; id++) {
        mark_chars(vocab, seen, id);
    }
    for (uint32_t code = 0; code < DMK_CHAR_IDS; code++) {
        if (part[code] != DMK_NO_PART && starts_late(vocab, dmk_part_id(part[code]))) {
            part[code] = DMK_NO_PART;
        }
    }
    free(seen);
    return 0;
}

/* Pairs of characters. */

/* The code of a token that is one character from DMK_WIDE_FIRST on; 0: it is not. */
static uint32_t wide_code(const struct dmk_vocab *vocab, uint32_t id)
{
    const struct dmk_bytes token = dmk_token_bytes(vocab, id);
    uint32_t code = 0;

    if (token.len == 3 && announced(token.data[0]) == 3 &&
        dmk_utf8_valid_prefix(token.data, 3) == 3) {
        (void)dmk_utf8_decode(token.data, 3, &code);
    }
    return code >= DMK_WIDE_FIRST ? code : 0;
}

void dmk_vocab_index_wide(struct dmk_vocab *vocab)
{
    const size_t mask = ((size_t)1 << DMK_WIDE_SLOT_BITS) - 1;
    struct dmk_tables *tables = vocab->tables;

    for (size_t i = 0; i < (size_t)1 << DMK_PAIR_SLOT_BITS; i++) {
        const uint64_t pair = tables->pairs[i], key = pair >> DMK_PART_BITS;
        const uint32_t left = pair ? wide_code(vocab, (uint32_t)(key >> 18)) : 0;
        const uint32_t right = left ? wide_code(vocab, (uint32_t)key & 0x3ffff) : 0;

        if (right) {
            const uint64_t wide_key = dmk_wide_key(left, right);
            const uint64_t hash = dmk_pair_hash(wide_key);
            const uint64_t bit = hash >> (64 - DMK_WIDE_FILTER_BITS);
            size_t slot = hash >> (64 - DMK_WIDE_SLOT_BITS);

            while (tables->wide[slot] != 0) {
                slot = (slot + 1) & mask;
            }
            tables->wide[slot] = wide_key << DMK_PART_BITS | (pair & ((1u << DMK_PART_BITS) - 1));
            tables->wide_filter[bit / 64] |= 1ull << (bit % 64);
        }
    }
}

int dmk_vocab_index_chars(struct dmk_vocab *vocab)
{
    int r = index_cuts(vocab, &vocab->tables->starts, start_cut);

    if (r == 0) {
        r = index_cuts(vocab, &vocab->tables->ends, end_cut);
    }
    return r < 0 ? r : index_chars(vocab);
}
