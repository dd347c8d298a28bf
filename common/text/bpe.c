/* Byte-pair merging; see bpe.h. Each thread has its own scratch; the vocabulary is only read. */
#include "common/text/bpe.h"
#include "common/base/assert.h"
#include "common/base/buf.h"
#include <stdlib.h>

#define PAIR_CACHE_BITS 15
#define CACHE_BITS      14
#define CACHE_KEY_MAX   16 /* bytes */
#define CACHE_IDS       3
#define KEEP_NODES      ((size_t)16 << 10) /* a heap of this size is kept between calls */
#define KEEP_TEXT       ((size_t)1 << 20)
#define NO_MERGE        0x3ffffu /* in the cache of pairs */
#define LIST_END        UINT32_MAX

/* A piece met before and its tokens. Direct-mapped: a newer piece displaces an older one. */
struct cached {
    uint64_t key[2];
    uint8_t len; /* of the piece; 0: empty */
    uint8_t n_ids;
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
    uint64_t
        *pair_cache; /* as struct dmk_vocab's pairs, and pairs that do not merge; direct-mapped */
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
    s->pair_cache = aligned_alloc(64, sizeof(*s->pair_cache) << PAIR_CACHE_BITS);
    if (!s->cache || !s->pair_cache) {
        dmk_bpe_scratch_free(&s);
        return NULL;
    }
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
    free(s->pair_cache);
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

void dmk_bpe_scratch_begin(struct dmk_bpe_scratch *s, const struct dmk_vocab *vocab)
{
    if (s->vocab != vocab) {
        memset(s->cache, 0, sizeof(*s->cache) << CACHE_BITS);
        memset(s->pair_cache, 0, sizeof(*s->pair_cache) << PAIR_CACHE_BITS);
        s->vocab = vocab;
    }
}

/* The token that two neighbours make, or DMK_NO_TOKEN. Most neighbours make none, which one bit tells; the
 * pairs that are frequent in this thread's texts come out of its cache. */
static inline uint32_t merge(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                             uint32_t left, uint32_t right)
{
    const uint64_t key = dmk_pair_key(left, right), hash = dmk_pair_hash(key);
    uint64_t *entry;
    uint32_t id;

    __builtin_prefetch(&s->pair_cache[hash >> (64 - PAIR_CACHE_BITS)]);
    if (!dmk_pair_likely(vocab, hash)) {
        return DMK_NO_TOKEN;
    }
    entry = &s->pair_cache[hash >> (64 - PAIR_CACHE_BITS)];
    if (*entry && (*entry - 1) >> 18 == key) {
        id = (uint32_t)((*entry - 1) & NO_MERGE);
        return id == NO_MERGE ? DMK_NO_TOKEN : id;
    }
    id = dmk_pair_find(vocab, key, hash);
    *entry = (key << 18 | (id == DMK_NO_TOKEN ? NO_MERGE : id)) + 1;
    return id;
}

/* Most of the time of a lookup is waiting for these two places. */
static inline void fetch_pair(const struct dmk_vocab *vocab, const struct dmk_bpe_scratch *s,
                              uint32_t left, uint32_t right)
{
    const uint64_t hash = dmk_pair_hash(dmk_pair_key(left, right));

    __builtin_prefetch(&vocab->bloom[hash >> (64 - DMK_PAIR_BLOOM_BITS) >> 6]);
    __builtin_prefetch(&s->pair_cache[hash >> (64 - PAIR_CACHE_BITS)]);
}

/* One step of the start: the token of the character at pos, if merging may start from it; else of the
 * byte. Returns the number of bytes it stands for. */
static inline size_t first_part(const struct dmk_vocab *vocab, struct dmk_bytes piece, size_t pos,
                                enum dmk_bpe_start start, uint32_t *ret_id)
{
    const uint8_t *p = piece.data + pos;
    const size_t n = p[0] < 0xe0 ? 2 : 3;

    if (start == DMK_BPE_CHARS && p[0] >= 0xc2 && p[0] < 0xf0 &&
        (pos == 0 || !dmk_vocab_crossed(vocab, p[-1], p[0])) &&
        (pos + n == piece.len || !dmk_vocab_crossed(vocab, p[n - 1], p[n]))) {
        const uint32_t code =
            n == 2 ? (uint32_t)(p[0] & 0x1f) << 6 | (p[1] & 0x3f)
                   : (uint32_t)(p[0] & 0x0f) << 12 | (uint32_t)(p[1] & 0x3f) << 6 | (p[2] & 0x3f);

        *ret_id = dmk_vocab_char(vocab, code);
        if (*ret_id != DMK_NO_TOKEN) {
            return n;
        }
    }
    *ret_id = vocab->byte_id[p[0]];
    return 1;
}

/* Short pieces: parts stay where they begin and name their neighbours. What a part and the next one make
 * stands as rank << 8 | part, so that the smallest one is the next merge and says where. */

#define NO_PAIR UINT32_MAX

static inline uint32_t pair_at(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                               const uint32_t *id, uint32_t left, uint32_t right)
{
    const uint32_t merged = merge(vocab, s, id[left], id[right]);

    return merged == DMK_NO_TOKEN ? NO_PAIR : merged << 8 | left;
}

void dmk_bpe_linear(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                    struct dmk_bytes piece, enum dmk_bpe_start start, struct dmk_ids *ids)
{
    uint32_t id[DMK_BPE_LINEAR_MAX], pair[DMK_BPE_LINEAR_MAX];
    uint8_t prev[DMK_BPE_LINEAR_MAX + 1], next[DMK_BPE_LINEAR_MAX];
    uint32_t n = 0, n_left = 0;

    dmk_assert(piece.len > 0 && piece.len <= DMK_BPE_LINEAR_MAX);
    for (size_t pos = 0; pos < piece.len; n++) {
        pos += first_part(vocab, piece, pos, start, &id[n]);
    }
    for (uint32_t i = 0; i < n; i++) {
        pair[i] = NO_PAIR;
        prev[i] = (uint8_t)(i - 1);
        next[i] = (uint8_t)(i + 1);
    }
    for (uint32_t i = 0; i + 1 < n; i++) {
        fetch_pair(vocab, s, id[i], id[i + 1]);
    }
    for (uint32_t i = 0; i + 1 < n; i++) {
        pair[i] = pair_at(vocab, s, id, i, i + 1);
    }
    for (;;) {
        uint32_t best = NO_PAIR, at, gone;

        for (uint32_t i = 0; i < n; i++) {
            best = pair[i] < best ? pair[i] : best;
        }
        if (best == NO_PAIR) {
            break;
        }
        at = best & 0xff;
        gone = next[at];
        id[at] = best >> 8;
        next[at] = next[gone];
        prev[next[gone]] = (uint8_t)at;
        pair[gone] = NO_PAIR;
        pair[at] = next[at] < n ? pair_at(vocab, s, id, at, next[at]) : NO_PAIR;
        if (at > 0) {
            pair[prev[at]] = pair_at(vocab, s, id, prev[at], at);
        }
    }
    for (uint32_t i = 0; i < n; i = next[i]) {
        id[n_left++] = id[i];
    }
    dmk_ids_append(ids, id, n_left);
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

    node->merged =
        node->next == LIST_END ? DMK_NO_TOKEN : merge(vocab, s, node->id, s->nodes[node->next].id);
    if (node->merged != DMK_NO_TOKEN) {
        heap_push(s, (uint64_t)node->merged << 32 | i);
    }
}

static void init_parts(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                       struct dmk_bytes piece, enum dmk_bpe_start start)
{
    uint32_t n = 0;

    for (size_t pos = 0; pos < piece.len; n++) {
        uint32_t id;

        pos += first_part(vocab, piece, pos, start, &id);
        s->nodes[n] = (struct node){id, DMK_NO_TOKEN, n ? n - 1 : LIST_END, n + 1};
    }
    s->nodes[n - 1].next = LIST_END;
    s->n_heap = 0;
    for (uint32_t i = 0; i + 1 < n; i++) {
        s->nodes[i].merged = merge(vocab, s, s->nodes[i].id, s->nodes[i + 1].id);
        if (s->nodes[i].merged != DMK_NO_TOKEN) {
            s->heap[s->n_heap++] = (uint64_t)s->nodes[i].merged << 32 | i;
        }
    }
    for (size_t i = s->n_heap / 2; i-- > 0;) {
        sift_down(s->heap, s->n_heap, i);
    }
}

void dmk_bpe_heap(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s, struct dmk_bytes piece,
                  enum dmk_bpe_start start, struct dmk_ids *ids)
{
    dmk_assert(piece.len > 0);
    if (!reserve(s, piece.len)) {
        ids->failed = true;
        return;
    }
    init_parts(vocab, s, piece, start);
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

/* Words longer than the cache takes are hardly ever tokens where a character has several bytes, but runs of
 * blanks and signs are. */
static void encode_uncached(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                            struct dmk_bytes piece, struct dmk_ids *ids)
{
    if (piece.data[0] < 0x80) {
        const uint32_t id = dmk_vocab_find(vocab, piece.data, piece.len);

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

/* The piece as two words: with the length they determine its bytes. Loads overlap instead of reading past
 * the end. */
static inline void load_key(struct dmk_bytes piece, uint64_t ret_word[2])
{
    const uint8_t *p = piece.data;
    const size_t n = piece.len;

    ret_word[1] = 0;
    if (n >= 8) {
        memcpy(&ret_word[0], p, 8);
        memcpy(&ret_word[1], p + n - 8, 8);
    } else if (n >= 4) {
        uint32_t first, last;

        memcpy(&first, p, 4);
        memcpy(&last, p + n - 4, 4);
        ret_word[0] = (uint64_t)last << 32 | first;
    } else {
        ret_word[0] = (uint64_t)p[0] | (uint64_t)p[n / 2] << 8 | (uint64_t)p[n - 1] << 16;
    }
}

void dmk_bpe_encode(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                    struct dmk_bytes piece, struct dmk_ids *ids)
{
    uint64_t word[2], hash;
    struct cached *c;
    size_t before;

    if (piece.len > CACHE_KEY_MAX) {
        encode_uncached(vocab, s, piece, ids);
        return;
    }
    load_key(piece, word);
    hash = (word[0] ^ (word[1] + piece.len) * 0xbf58476d1ce4e5b9ull) * 0x9e3779b97f4a7c15ull;
    c = &s->cache[hash >> (64 - CACHE_BITS)];
    if (c->len == piece.len && c->key[0] == word[0] && c->key[1] == word[1]) {
        dmk_ids_append(ids, c->ids, c->n_ids);
        return;
    }
    before = ids->len;
    encode_uncached(vocab, s, piece, ids);
    if (!ids->failed && ids->len - before <= CACHE_IDS) {
        c->key[0] = word[0];
        c->key[1] = word[1];
        c->len = (uint8_t)piece.len;
        c->n_ids = (uint8_t)(ids->len - before);
        memcpy(c->ids, ids->data + before, c->n_ids * sizeof(*c->ids));
    }
}
