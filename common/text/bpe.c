/* Byte-pair merging; see bpe.h. Each thread has its own scratch; the vocabulary is only read. */
#include "common/text/bpe.h"
#include "common/base/assert.h"
#include "common/base/buf.h"
#include <stdlib.h>

#define CACHE_BITS    14
#define CACHE_KEY_MAX 15 /* bytes; the 16th holds the length */
#define CACHE_IDS     3
#define KEEP_NODES    ((size_t)16 << 10) /* a heap of this size is kept between calls */
#define KEEP_TEXT     ((size_t)1 << 20)
#define LIST_END      UINT32_MAX

/* A piece met before and its tokens. Direct-mapped: a newer piece displaces an older one. */
struct cached {
    uint64_t key[2];
    uint32_t n_ids; /* 0: empty */
    uint32_t ids[CACHE_IDS];
};

/* One part of a long piece. */
struct node {
    uint32_t id;
    uint32_t merged; /* with the next part, or DMK_NO_TOKEN */
    uint32_t prev, next;
};

struct dmk_bpe_scratch {
    const struct dmk_vocab *vocab; /* whose tokens are cached */
    struct cached *cache;
    struct node *nodes; /* [cap] */
    uint64_t *heap;     /* [2 * cap], rank << 32 | node */
    size_t cap, n_heap;
    struct dmk_buf text;
};

struct dmk_bpe_scratch *dmk_bpe_scratch_new(void)
{
    struct dmk_bpe_scratch *s = calloc(1, sizeof(*s));

    if (!s) {
        return NULL;
    }
    s->cache = aligned_alloc(64, sizeof(*s->cache) << CACHE_BITS);
    if (!s->cache) {
        free(s);
        return NULL;
    }
    memset(s->cache, 0, sizeof(*s->cache) << CACHE_BITS);
    dmk_buf_init(&s->text, SIZE_MAX / 4);
    return s;
}

void dmk_bpe_scratch_free(struct dmk_bpe_scratch **scratch)
{
    struct dmk_bpe_scratch *s = scratch ? *scratch : NULL;

    if (!s) {
        return;
    }
    free(s->cache);
    free(s->nodes);
    free(s->heap);
    dmk_buf_fini(&s->text);
    free(s);
    *scratch = NULL;
}

struct dmk_buf *dmk_bpe_scratch_text(struct dmk_bpe_scratch *scratch)
{
    return &scratch->text;
}

void dmk_bpe_scratch_trim(struct dmk_bpe_scratch *scratch)
{
    if (scratch->cap > KEEP_NODES) {
        free(scratch->nodes);
        free(scratch->heap);
        scratch->nodes = NULL;
        scratch->heap = NULL;
        scratch->cap = 0;
    }
    if (scratch->text.cap > KEEP_TEXT) {
        dmk_buf_fini(&scratch->text);
    }
}

/* Short pieces: parts in an array. */

void dmk_bpe_linear(const struct dmk_vocab *vocab, struct dmk_bytes piece, struct dmk_ids *ids)
{
    uint32_t id[DMK_BPE_LINEAR_MAX], merged[DMK_BPE_LINEAR_MAX];
    size_t n = piece.len;

    dmk_assert(n > 0 && n <= DMK_BPE_LINEAR_MAX);
    for (size_t i = 0; i < n; i++) {
        id[i] = vocab->byte_id[piece.data[i]];
    }
    for (size_t i = 0; i + 1 < n; i++) {
        merged[i] = dmk_vocab_merge(vocab, id[i], id[i + 1]);
    }
    while (n > 1) {
        uint32_t best = DMK_NO_TOKEN;
        size_t at = 0;

        for (size_t i = 0; i + 1 < n; i++) {
            if (merged[i] < best) {
                best = merged[i];
                at = i;
            }
        }
        if (best == DMK_NO_TOKEN) {
            break;
        }
        id[at] = best;
        n--;
        memmove(id + at + 1, id + at + 2, (n - at - 1) * sizeof(*id));
        if (at + 1 < n) {
            /* merged[at + 1] spoke of the part that is gone; what follows it moves up. */
            memmove(merged + at, merged + at + 1, (n - at - 1) * sizeof(*merged));
            merged[at] = dmk_vocab_merge(vocab, id[at], id[at + 1]);
        }
        if (at > 0) {
            merged[at - 1] = dmk_vocab_merge(vocab, id[at - 1], id[at]);
        }
    }
    dmk_ids_append(ids, id, n);
}

/* Long pieces: parts in a linked list, mergeable pairs in a binary heap. Entries are not removed when a
 * pair changes; a popped entry counts only if it is still what its node says. */

static bool reserve(struct dmk_bpe_scratch *s, size_t n)
{
    struct node *nodes;
    uint64_t *heap;

    if (n <= s->cap) {
        return true;
    }
    if (n >= LIST_END) {
        return false;
    }
    nodes = realloc(s->nodes, n * sizeof(*nodes));
    if (nodes) {
        s->nodes = nodes;
    }
    heap = realloc(s->heap, 2 * n * sizeof(*heap));
    if (heap) {
        s->heap = heap;
    }
    if (!nodes || !heap) {
        return false; /* cap stays: both arrays have at least that much */
    }
    s->cap = n;
    return true;
}

static void sift_down(uint64_t *heap, size_t n, size_t i)
{
    const uint64_t key = heap[i];

    for (;;) {
        size_t child = 2 * i + 1;

        if (child >= n) {
            break;
        }
        if (child + 1 < n && heap[child + 1] < heap[child]) {
            child++;
        }
        if (heap[child] >= key) {
            break;
        }
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = key;
}

static void heap_push(struct dmk_bpe_scratch *s, uint64_t key)
{
    size_t i = s->n_heap++;

    while (i > 0 && s->heap[(i - 1) / 2] > key) {
        s->heap[i] = s->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    s->heap[i] = key;
}

static uint64_t heap_pop(struct dmk_bpe_scratch *s)
{
    const uint64_t key = s->heap[0];

    s->n_heap--;
    if (s->n_heap > 0) {
        s->heap[0] = s->heap[s->n_heap];
        sift_down(s->heap, s->n_heap, 0);
    }
    return key;
}

/* Looks anew at the pair that starts at node i. */
static void update_pair(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s, uint32_t i)
{
    struct node *node = &s->nodes[i];

    node->merged = node->next == LIST_END
                       ? DMK_NO_TOKEN
                       : dmk_vocab_merge(vocab, node->id, s->nodes[node->next].id);
    if (node->merged != DMK_NO_TOKEN) {
        heap_push(s, (uint64_t)node->merged << 32 | i);
    }
}

static void init_parts(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                       struct dmk_bytes piece)
{
    const uint32_t n = (uint32_t)piece.len;

    for (uint32_t i = 0; i < n; i++) {
        s->nodes[i] = (struct node){vocab->byte_id[piece.data[i]], DMK_NO_TOKEN,
                                    i ? i - 1 : LIST_END, i + 1 < n ? i + 1 : LIST_END};
    }
    s->n_heap = 0;
    for (uint32_t i = 0; i + 1 < n; i++) {
        s->nodes[i].merged = dmk_vocab_merge(vocab, s->nodes[i].id, s->nodes[i + 1].id);
        if (s->nodes[i].merged != DMK_NO_TOKEN) {
            s->heap[s->n_heap++] = (uint64_t)s->nodes[i].merged << 32 | i;
        }
    }
    for (size_t i = s->n_heap / 2; i-- > 0;) {
        sift_down(s->heap, s->n_heap, i);
    }
}

void dmk_bpe_heap(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s, struct dmk_bytes piece,
                  struct dmk_ids *ids)
{
    dmk_assert(piece.len > 0);
    if (!reserve(s, piece.len)) {
        ids->failed = true;
        return;
    }
    init_parts(vocab, s, piece);
    /* At most one entry per initial pair and two per merge, one of which was just popped: 2 * cap. */
    while (s->n_heap > 0) {
        const uint64_t key = heap_pop(s);
        const uint32_t i = (uint32_t)key;
        struct node *node = &s->nodes[i];
        uint32_t gone;

        if (node->merged != (uint32_t)(key >> 32)) {
            continue;
        }
        gone = node->next;
        node->id = node->merged;
        node->next = s->nodes[gone].next;
        s->nodes[gone].merged = DMK_NO_TOKEN;
        if (node->next != LIST_END) {
            s->nodes[node->next].prev = i;
        }
        update_pair(vocab, s, i);
        if (node->prev != LIST_END) {
            update_pair(vocab, s, node->prev);
        }
    }
    for (uint32_t i = 0; i != LIST_END; i = s->nodes[i].next) {
        dmk_ids_push(ids, s->nodes[i].id);
    }
}

/* The short cuts. */

static void encode_uncached(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                            struct dmk_bytes piece, struct dmk_ids *ids)
{
    const uint32_t id = dmk_vocab_find(vocab, piece.data, piece.len);

    if (id != DMK_NO_TOKEN) {
        dmk_ids_push(ids, id);
    } else if (piece.len <= DMK_BPE_LINEAR_MAX) {
        dmk_bpe_linear(vocab, piece, ids);
    } else {
        dmk_bpe_heap(vocab, s, piece, ids);
    }
}

void dmk_bpe_encode(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                    struct dmk_bytes piece, struct dmk_ids *ids)
{
    uint8_t key[16] = {0};
    uint64_t word[2];
    struct cached *c;
    size_t before;

    if (piece.len > CACHE_KEY_MAX) {
        encode_uncached(vocab, s, piece, ids);
        return;
    }
    if (s->vocab != vocab) {
        memset(s->cache, 0, sizeof(*s->cache) << CACHE_BITS);
        s->vocab = vocab;
    }
    memcpy(key, piece.data, piece.len);
    key[15] = (uint8_t)piece.len;
    memcpy(word, key, 16);
    c = &s->cache[(word[0] * 0x9e3779b97f4a7c15ull ^ word[1] * 0xbf58476d1ce4e5b9ull) >>
                  (64 - CACHE_BITS)];
    if (c->n_ids && c->key[0] == word[0] && c->key[1] == word[1]) {
        dmk_ids_append(ids, c->ids, c->n_ids);
        return;
    }
    before = ids->len;
    encode_uncached(vocab, s, piece, ids);
    if (!ids->failed && ids->len - before <= CACHE_IDS) {
        c->key[0] = word[0];
        c->key[1] = word[1];
        c->n_ids = (uint32_t)(ids->len - before);
        memcpy(c->ids, ids->data + before, c->n_ids * sizeof(*c->ids));
    }
}
