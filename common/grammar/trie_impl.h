/* The inside of the token tree: read by the walker. Private to common/grammar. */
#pragma once

#include "common/grammar/trie.h"

#define DMK_NO_TOKEN_ID 0xffffffu
#define DMK_NODE_PLAIN  0x80000000u
#define DMK_NODE_END    0x7fffffffu

/* A node is the byte on the way to it. Nodes stand in preorder: the children of node i are i + 1 and then
 * each one's end, up to i's own end. */
struct dmk_node {
    uint32_t end;   /* behind its subtree; DMK_NODE_PLAIN: it and its subtree are plain bytes */
    uint32_t token; /* id or DMK_NO_TOKEN_ID in the low 24 bits, byte in the high 8 */
};

struct dmk_trie {
    struct dmk_id128 hash;
    uint32_t n_ids, n_words; /* words of a mask */
    uint32_t n_nodes;        /* with the root, which is node 0 and has no byte */
    struct dmk_node *nodes;
    uint32_t child[256]; /* of the root; 0 = none (never: every byte is a token) */
    uint64_t *all;       /* mask of all tokens */
    uint64_t *plain;     /* of those of plain bytes */
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
