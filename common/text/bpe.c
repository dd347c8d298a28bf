/* Byte-pair merging; see bpe.h. Each thread has its own scratch; the vocabulary is only read. */
#include "common/text/bpe.h"
#include "common/base/assert.h"
#include <stdlib.h>

#define KEEP_NODES ((size_t)16 << 10) /* a heap of this size is kept between calls */
#define KEEP_TEXT  ((size_t)1 << 20)
#define LIST_END   UINT32_MAX

/* One part of a long piece. */
struct node {
    uint32_t part;
    uint32_t merged; /* with the next part, or DMK_NO_PART */
    uint32_t prev, next;
};

struct dmk_bpe_scratch *dmk_bpe_scratch_new(void)
{
    struct dmk_bpe_scratch *s = calloc(1, sizeof(*s));

    if (!s) {
        return NULL;
    }
    s->words = aligned_alloc(64, sizeof(*s->words));
    s->pairs = aligned_alloc(64, sizeof(*s->pairs) << DMK_PAIR_CACHE_BITS);
    if (!s->words || !s->pairs) {
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
    free(s->words);
    free(s->pairs);
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
        memset(s->words, 0, sizeof(*s->words));
        memset(s->pairs, 0, sizeof(*s->pairs) << DMK_PAIR_CACHE_BITS);
        s->vocab = vocab;
    }
}

/* The part that two neighbours make, or DMK_NO_PART. Most are no side of any pair, or the filter tells that they
 * make none; the pairs that are frequent in this thread's texts come out of its cache. */
static uint32_t merge(const struct dmk_tables *tables, struct dmk_bpe_scratch *s, uint32_t left,
                      uint32_t right)
{
    const uint64_t key = dmk_pair_key(left, right), hash = dmk_pair_hash(key);
    uint64_t *entry;
    uint32_t part;

    if (!dmk_part_fits(left, right) || !dmk_pair_likely(tables, hash)) {
        return DMK_NO_PART;
    }
    entry = &s->pairs[hash >> (64 - DMK_PAIR_CACHE_BITS)];
    if (*entry >> DMK_PART_BITS == key && *entry) {
        part = (uint32_t)*entry & ((1u << DMK_PART_BITS) - 1);
        return part == DMK_CACHED_NONE ? DMK_NO_PART : part;
    }
    part = dmk_pair_find(tables, key, hash);
    *entry = key << DMK_PART_BITS | (part == DMK_NO_PART ? DMK_CACHED_NONE : part);
    return part;
}

/* A part to start from. */
struct start {
    uint32_t part;
    uint32_t code; /* ASCII, or from DMK_WIDE_FIRST on; else OTHER */
};

#define OTHER 0x80u

#define INLINE static inline __attribute__((always_inline))

/* Whether a token made earlier takes bytes of the character at pos, which has n bytes and the id. */
static inline bool is_cut(const struct dmk_vocab *vocab, struct dmk_bytes piece, size_t pos,
                          size_t n, uint32_t id)
{
    const uint8_t *p = piece.data + pos;
    const struct dmk_tables *t = vocab->tables;

    return (pos > 0 && dmk_border_any(&t->ends, p[-1], p[0]) &&
            dmk_vocab_cut(vocab, &t->ends, piece, pos, id)) ||
           (pos + n < piece.len && dmk_border_any(&t->starts, p[n - 1], p[n]) &&
            dmk_vocab_cut(vocab, &t->starts, piece, pos + n, id));
}

/* The part of the character at pos, if merging may start from it; else of the byte. Returns the number of bytes it
 * stands for. */
INLINE size_t start_at(const struct dmk_vocab *vocab, struct dmk_bytes piece, size_t pos,
                       enum dmk_bpe_start start, struct start *ret)
{
    const uint8_t *p = piece.data + pos;

    if (start == DMK_BPE_CHARS && p[0] >= 0xc2 && p[0] < 0xf0) {
        const size_t n = p[0] < 0xe0 ? 2 : 3;
        const uint32_t code =
            n == 2 ? (uint32_t)(p[0] & 0x1f) << 6 | (p[1] & 0x3f)
                   : (uint32_t)(p[0] & 0x0f) << 12 | (uint32_t)(p[1] & 0x3f) << 6 | (p[2] & 0x3f);
        const uint32_t part = dmk_vocab_char(vocab, code);

        if (part != DMK_NO_PART && !is_cut(vocab, piece, pos, n, dmk_part_id(part))) {
            *ret = (struct start){part, code >= DMK_WIDE_FIRST ? code : OTHER};
            return n;
        }
    }
    *ret = (struct start){vocab->tables->byte_part[p[0]], p[0] < 0x80 ? p[0] : OTHER};
    return 1;
}

/* What two neighbours make that merging starts from. */
static inline uint32_t merge_start(const struct dmk_tables *tables, struct dmk_bpe_scratch *s,
                                   const struct start *left, const struct start *right)
{
    if (left->code >= DMK_WIDE_FIRST && right->code >= DMK_WIDE_FIRST) {
        return dmk_wide_find(tables, left->code, right->code);
    }
    if ((left->code | right->code) < 0x80) {
        return tables->ascii[left->code << 7 | right->code];
    }
    return merge(tables, s, left->part, right->part);
}

/* Short pieces: parts stay where they begin and name their neighbours. What a part and the next one make
 * stands as id << 8 | place, so that the smallest one is the next merge and says where. */

#define NO_PAIR UINT32_MAX

struct line {
    uint32_t n, n_open;
    uint32_t pair[DMK_BPE_LINEAR_MAX];   /* or NO_PAIR */
    uint32_t merged[DMK_BPE_LINEAR_MAX]; /* the part that the pair makes */
    uint32_t open
        [2 *
         DMK_BPE_LINEAR_MAX]; /* pairs to merge, in any order; those that changed stay, and are skipped */
    struct start at[DMK_BPE_LINEAR_MAX];
    uint8_t prev[DMK_BPE_LINEAR_MAX + 1], next[DMK_BPE_LINEAR_MAX];
};

static inline void set_pair(struct line *l, uint32_t i, uint32_t merged)
{
    l->merged[i] = merged;
    l->pair[i] = merged == DMK_NO_PART ? NO_PAIR : dmk_part_id(merged) << 8 | i;
    l->open[l->n_open] = l->pair[i];
    l->n_open += merged != DMK_NO_PART;
}

/* Takes the smallest out of the open pairs. */
static inline uint32_t take_best(struct line *l)
{
    uint32_t best = l->open[0], at = 0;

    for (uint32_t i = 1; i < l->n_open; i++) {
        at = l->open[i] < best ? i : at;
        best = l->open[i] < best ? l->open[i] : best;
    }
    l->open[at] = l->open[--l->n_open];
    return best;
}

static void merge_line(const struct dmk_tables *tables, struct dmk_bpe_scratch *s, struct line *l)
{
    for (uint32_t i = 0; i < l->n; i++) {
        l->prev[i] = (uint8_t)(i - 1);
        l->next[i] = (uint8_t)(i + 1);
    }
    while (l->n_open > 0) {
        const uint32_t best = take_best(l), at = best & 0xff;
        uint32_t gone, next, part;

        if (l->pair[at] != best) {
            continue;
        }
        gone = l->next[at];
        next = l->next[gone];
        part = l->merged[at];
        l->at[at].part = part;
        l->next[at] = (uint8_t)next;
        l->prev[next] = (uint8_t)at;
        l->pair[gone] = NO_PAIR;
        set_pair(l, at, next < l->n ? merge(tables, s, part, l->at[next].part) : DMK_NO_PART);
        if (at > 0) {
            set_pair(l, l->prev[at], merge(tables, s, l->at[l->prev[at]].part, part));
        }
    }
}

void dmk_bpe_linear(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                    struct dmk_bytes piece, enum dmk_bpe_start start, struct dmk_ids *ids)
{
    struct line l;
    uint32_t *out;

    dmk_assert(piece.len > 0 && piece.len <= DMK_BPE_LINEAR_MAX);
    l.n = 0;
    l.n_open = 0;
    for (size_t pos = 0; pos < piece.len; l.n++) {
        pos += start_at(vocab, piece, pos, start, &l.at[l.n]);
    }
    for (uint32_t i = 0; i + 1 < l.n; i++) {
        set_pair(&l, i, merge_start(vocab->tables, s, &l.at[i], &l.at[i + 1]));
    }
    l.pair[l.n - 1] = NO_PAIR;
    out = dmk_ids_room(ids, l.n);
    if (!out) {
        return;
    }
    if (l.n_open == 0) {
        for (uint32_t i = 0; i < l.n; i++) {
            out[i] = dmk_part_id(l.at[i].part);
        }
        ids->len += l.n;
        return;
    }
    merge_line(vocab->tables, s, &l);
    for (uint32_t i = 0; i < l.n; i = l.next[i]) {
        *out++ = dmk_part_id(l.at[i].part);
    }
    ids->len = (size_t)(out - ids->data);
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
static void update_pair(const struct dmk_tables *tables, struct dmk_bpe_scratch *s, uint32_t i)
{
    struct node *node = &s->nodes[i];

    node->merged = node->next == LIST_END ? DMK_NO_PART
                                          : merge(tables, s, node->part, s->nodes[node->next].part);
    if (node->merged != DMK_NO_PART) {
        heap_push(s, (uint64_t)node->merged << 32 | i);
    }
}

static void init_parts(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *s,
                       struct dmk_bytes piece, enum dmk_bpe_start start)
{
    uint32_t n = 0;

    for (size_t pos = 0; pos < piece.len; n++) {
        struct start first;

        pos += start_at(vocab, piece, pos, start, &first);
        s->nodes[n] = (struct node){first.part, DMK_NO_PART, n ? n - 1 : LIST_END, n + 1};
    }
    s->nodes[n - 1].next = LIST_END;
    s->n_heap = 0;
    for (uint32_t i = 0; i + 1 < n; i++) {
        s->nodes[i].merged = merge(vocab->tables, s, s->nodes[i].part, s->nodes[i + 1].part);
        if (s->nodes[i].merged != DMK_NO_PART) {
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
        node->part = node->merged;
        node->next = s->nodes[gone].next;
        s->nodes[gone].merged = DMK_NO_PART;
        if (node->next != LIST_END) {
            s->nodes[node->next].prev = i;
        }
        update_pair(vocab->tables, s, i);
        if (node->prev != LIST_END) {
            update_pair(vocab->tables, s, node->prev);
        }
    }
    for (uint32_t i = 0; i != LIST_END; i = s->nodes[i].next) {
        dmk_ids_push(ids, dmk_part_id(s->nodes[i].part));
    }
}
