/* The inside of the token tree: read by the walker. Private to common/grammar. */
#pragma once

#include "common/grammar/trie.h"

#define DMK_NO_TOKEN_ID 0xffffffu
#define DMK_NODE_TEXT   0x80000000u
#define DMK_NODE_END    0x7fffffffu

/* A node is the byte on the way to it. Nodes stand in preorder: the children of node i are i + 1 and then
 * each one's end, up to i's own end. */
struct dmk_node {
    uint32_t end;   /* behind its subtree; DMK_NODE_TEXT: it and its subtree are text */
    uint32_t token; /* id or DMK_NO_TOKEN_ID in the low 24 bits, byte in the high 8 */
};

/* Text is what stands for itself nearly everywhere: printable ASCII without '"' and '\', and well-formed UTF-8;
 * a character may be cut at the end of a token. Most tokens are text. A state that goes through any text and
 * comes back takes all of them at once. */
struct dmk_text {
    uint8_t n, first,
        last; /* bytes that the character at hand still wants, and the bounds of the next */
};

/* Takes a byte. False when the text is broken there; then it begins anew. */
static inline bool dmk_text_next(struct dmk_text *t, uint8_t byte)
{
    const struct dmk_text at = *t;

    *t = (struct dmk_text){0};
    if (at.n > 0) {
        t->n = (uint8_t)(at.n - 1);
        t->first = 0x80;
        t->last = 0xbf;
        if (byte >= at.first && byte <= at.last) {
            return true;
        }
        t->n = 0;
        return false;
    }
    if (byte < 0x80) {
        return byte >= 0x20 && byte <= 0x7e && byte != '"' && byte != '\\';
    }
    if (byte < 0xc2 || byte > 0xf4) {
        return false;
    }
    t->n = byte < 0xe0 ? 1 : byte < 0xf0 ? 2 : 3;
    t->first = byte == 0xe0 ? 0xa0 : byte == 0xf0 ? 0x90 : 0x80;
    t->last = byte == 0xed ? 0x9f : byte == 0xf4 ? 0x8f : 0xbf;
    return true;
}

struct dmk_trie {
    struct dmk_id128 hash;
    uint32_t n_ids, n_words; /* words of a mask */
    uint32_t n_nodes;        /* with the root, which is node 0 and has no byte */
    struct dmk_node *nodes;
    uint32_t child[256]; /* of the root; 0 = none (never: every byte is a token) */
    uint64_t *all;       /* mask of all tokens */
    uint64_t *text;      /* of those that are text */
    uint8_t *chars;      /* [n_ids] characters that begin in the token if it is text, else 0 */
    uint32_t *offset;    /* [n_ids + 1] into blob */
    uint8_t *blob;
};

static inline uint32_t dmk_node_end(const struct dmk_node *n)
{
    return n->end & DMK_NODE_END;
}

static inline uint8_t dmk_node_byte(const struct dmk_node *n)
{
    return (uint8_t)(n->token >> 24);
}

static inline uint32_t dmk_node_token(const struct dmk_node *n)
{
    return n->token & DMK_NO_TOKEN_ID;
}

static inline void dmk_mask_set(uint64_t *mask, uint32_t id)
{
    mask[id / 64] |= 1ull << (id % 64);
}
