/* Writing and reading the token tree; see trie.h. Reading is linear: the form is sorted. */
#include "common/grammar/trie_impl.h"

#include <stdlib.h>

#define HEAD_BYTES 16u

/* ---------------------------------------------------------------- writing */

struct entry {
    struct dmk_bytes bytes;
    uint32_t id;
};

static int compare(const void *x, const void *y)
{
    const struct entry *a = x, *b = y;
    const size_t n = a->bytes.len < b->bytes.len ? a->bytes.len : b->bytes.len;
    const int c = memcmp(a->bytes.data, b->bytes.data, n);

    return c != 0 ? c : (a->bytes.len > b->bytes.len) - (a->bytes.len < b->bytes.len);
}

static void put_u16(struct dmk_buf *out, uint32_t v)
{
    dmk_buf_putc(out, (char)(v & 255));
    dmk_buf_putc(out, (char)(v >> 8 & 255));
}

static void put_u32(struct dmk_buf *out, uint32_t v)
{
    put_u16(out, v & 0xffff);
    put_u16(out, v >> 16);
}

static size_t shared_front(struct dmk_bytes a, struct dmk_bytes b)
{
    size_t n = 0;

    while (n < a.len && n < b.len && a.data[n] == b.data[n]) {
        n++;
    }
    return n;
}

int dmk_trie_write(uint32_t n_ids, struct dmk_bytes (*bytes_of)(void *ud, uint32_t id), void *ud,
                   struct dmk_buf *out)
{
    struct entry *list = malloc(((size_t)n_ids + 1) * sizeof(*list));
    struct dmk_bytes before = {0};
    uint32_t n = 0;
    int r = list && n_ids <= DMK_TRIE_MAX_IDS ? 0 : -DMK_ENOMEM;

    for (uint32_t id = 0; r == 0 && id < n_ids; id++) {
        const struct dmk_bytes bytes = bytes_of(ud, id);

        if (bytes.len > DMK_TRIE_MAX_TOKEN) {
            r = -DMK_EINVAL;
        } else if (bytes.len > 0) {
            list[n++] = (struct entry){bytes, id};
        }
    }
    if (r == 0) {
        qsort(list, n, sizeof(*list), compare);
        dmk_buf_append(out, "DMKV", 4);
        put_u16(out, DMK_TRIE_VERSION);
        put_u16(out, 0);
        put_u32(out, n_ids);
        put_u32(out, n);
    }
    for (uint32_t i = 0; r == 0 && i < n; i++) {
        const struct dmk_bytes bytes = list[i].bytes;
        const size_t shared = shared_front(before, bytes);

        if (shared == bytes.len) {
            r = -DMK_EINVAL;
            break;
        }
        dmk_buf_putc(out, (char)shared);
        dmk_buf_putc(out, (char)(bytes.len - shared));
        dmk_buf_append(out, bytes.data + shared, bytes.len - shared);
        put_u32(out, list[i].id);
        before = bytes;
    }
    free(list);
    return r < 0 ? r : out->failed ? -DMK_ENOMEM : 0;
}

/* ---------------------------------------------------------------- reading */

static uint32_t get_u32(const uint8_t *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static int bad(struct dmk_error *reterr, const char *what)
{
    return dmk_error_set(reterr, -DMK_EFORMAT, "the vocabulary's bytes are damaged: %s", what);
}

/* Checks every token's lengths, ids and order; counts nodes and bytes. */
static int check(struct dmk_bytes blob, uint32_t n_ids, uint32_t n_tokens, uint32_t *ret_nodes,
                 size_t *ret_bytes, struct dmk_error *reterr)
{
    uint64_t *seen = calloc(n_ids / 64 + 1, sizeof(*seen));
    uint8_t before[DMK_TRIE_MAX_TOKEN];
    size_t at = HEAD_BYTES, n_before = 0, n_bytes = 0;
    uint32_t n_nodes = 1;
    int r = 0;

    if (!seen) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the vocabulary's bytes");
    }
    for (uint32_t i = 0; r == 0 && i < n_tokens; i++) {
        const size_t shared = at + 2 <= blob.len ? blob.data[at] : 0;
        const size_t more = at + 2 <= blob.len ? blob.data[at + 1] : 0;
        uint32_t id;

        if (more == 0 || shared > n_before || shared + more > DMK_TRIE_MAX_TOKEN ||
            at + 2 + more + 4 > blob.len) {
            r = bad(reterr, "a token has no bytes or too many");
            break;
        }
        id = get_u32(blob.data + at + 2 + more);
        if (id >= n_ids || seen[id / 64] >> (id % 64) & 1) {
            r = bad(reterr, "an id is out of bounds or comes twice");
        } else if (shared < n_before && blob.data[at + 2] <= before[shared]) {
            r = bad(reterr, "the tokens are not in order");
        } else {
            seen[id / 64] |= 1ull << (id % 64);
            memcpy(before + shared, blob.data + at + 2, more);
            n_before = shared + more;
            n_nodes += (uint32_t)more;
            n_bytes += n_before;
            at += 2 + more + 4;
        }
    }
    free(seen);
    if (r == 0 && at != blob.len) {
        r = bad(reterr, "something follows the last token");
    }
    *ret_nodes = n_nodes;
    *ret_bytes = n_bytes;
    return r;
}

static int allocate(struct dmk_trie *t, size_t n_bytes)
{
    t->n_words = (t->n_ids + 63) / 64;
    t->nodes = calloc(t->n_nodes, sizeof(*t->nodes));
    t->all = calloc(t->n_words, sizeof(*t->all));
    t->text = calloc(t->n_words, sizeof(*t->text));
    t->chars = calloc(t->n_ids, sizeof(*t->chars));
    t->offset = calloc((size_t)t->n_ids + 1, sizeof(*t->offset));
    t->blob = malloc(n_bytes + 1);
    return t->nodes && t->all && t->text && t->chars && t->offset && t->blob ? 0 : -DMK_ENOMEM;
}

/* Closes the nodes deeper than depth: their subtrees end at the next node. */
static void close_nodes(struct dmk_trie *t, uint32_t *path, size_t *inout_depth, size_t depth,
                        uint32_t next)
{
    while (*inout_depth > depth) {
        struct dmk_node *n = &t->nodes[path[(*inout_depth)--]];

        n->end = next | (n->end & DMK_NODE_TEXT);
    }
}

/* A node's subtree is text when nothing in it breaks: what does unmarks all on the way to it. */
static void fill_nodes(struct dmk_trie *t, struct dmk_bytes blob, uint32_t n_tokens)
{
    uint32_t path[DMK_TRIE_MAX_TOKEN + 1] = {0};
    struct dmk_text texts[DMK_TRIE_MAX_TOKEN + 1] = {{0}};
    size_t at = HEAD_BYTES, depth = 0;
    uint32_t next = 1;

    t->nodes[0].token = DMK_NO_TOKEN_ID;
    for (uint32_t i = 0; i < n_tokens; i++) {
        const size_t shared = blob.data[at], more = blob.data[at + 1];
        const uint32_t id = get_u32(blob.data + at + 2 + more);

        close_nodes(t, path, &depth, shared, next);
        for (size_t k = 0; k < more; k++) {
            const uint8_t byte = blob.data[at + 2 + k];

            if (depth == 0) {
                t->child[byte] = next;
            }
            t->nodes[next] =
                (struct dmk_node){DMK_NODE_TEXT, (uint32_t)byte << 24 | DMK_NO_TOKEN_ID};
            texts[depth + 1] = texts[depth];
            path[++depth] = next++;
            if (!dmk_text_next(&texts[depth], byte)) {
                for (size_t d = 1; d <= depth; d++) {
                    t->nodes[path[d]].end &= DMK_NODE_END;
                }
            }
        }
        t->nodes[path[depth]].token = (t->nodes[path[depth]].token & 0xff000000u) | id;
        dmk_mask_set(t->all, id);
        at += 2 + more + 4;
    }
    close_nodes(t, path, &depth, 0, next);
    t->nodes[0].end = next;
}

/* Characters that begin in a token that is text; 0 for others. */
static uint8_t count_chars(const uint8_t *token, size_t n)
{
    struct dmk_text text = {0};
    uint8_t chars = 0;

    for (size_t k = 0; k < n; k++) {
        chars = (uint8_t)(chars + (text.n == 0));
        if (!dmk_text_next(&text, token[k])) {
            return 0;
        }
    }
    return chars;
}

/* Bytes by id: a first pass for the lengths, a second one for the bytes. */
static void fill_bytes(struct dmk_trie *t, struct dmk_bytes blob, uint32_t n_tokens)
{
    uint8_t token[DMK_TRIE_MAX_TOKEN];
    size_t at = HEAD_BYTES;

    for (uint32_t i = 0; i < n_tokens; i++) {
        const size_t shared = blob.data[at], more = blob.data[at + 1];

        t->offset[get_u32(blob.data + at + 2 + more) + 1] = (uint32_t)(shared + more);
        at += 2 + more + 4;
    }
    for (uint32_t id = 0; id < t->n_ids; id++) {
        t->offset[id + 1] += t->offset[id];
    }
    at = HEAD_BYTES;
    for (uint32_t i = 0; i < n_tokens; i++) {
        const size_t shared = blob.data[at], more = blob.data[at + 1];
        const uint32_t id = get_u32(blob.data + at + 2 + more);

        memcpy(token + shared, blob.data + at + 2, more);
        memcpy(t->blob + t->offset[id], token, shared + more);
        t->chars[id] = count_chars(token, shared + more);
        if (t->chars[id] > 0) {
            dmk_mask_set(t->text, id);
        }
        at += 2 + more + 4;
    }
}

int dmk_trie_read(struct dmk_bytes blob, struct dmk_trie **ret, struct dmk_error *reterr)
{
    struct dmk_trie *t;
    uint32_t n_tokens;
    size_t n_bytes = 0;
    int r;

    if (blob.len < HEAD_BYTES || blob.len > DMK_TRIE_MAX_BYTES ||
        memcmp(blob.data, "DMKV", 4) != 0) {
        return bad(reterr, "they do not begin with DMKV, or are too many");
    }
    if ((blob.data[4] | blob.data[5] << 8) != DMK_TRIE_VERSION) {
        return dmk_error_set(reterr, -DMK_EMISMATCH,
                             "the vocabulary's bytes have version %d, this worker reads %d",
                             blob.data[4] | blob.data[5] << 8, DMK_TRIE_VERSION);
    }
    t = calloc(1, sizeof(*t));
    if (!t) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the vocabulary's bytes");
    }
    t->n_ids = get_u32(blob.data + 8);
    n_tokens = get_u32(blob.data + 12);
    r = t->n_ids > 0 && t->n_ids <= DMK_TRIE_MAX_IDS && n_tokens <= t->n_ids
            ? check(blob, t->n_ids, n_tokens, &t->n_nodes, &n_bytes, reterr)
            : bad(reterr, "there are more tokens than ids");
    if (r == 0 && allocate(t, n_bytes) < 0) {
        r = dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the vocabulary's bytes");
    }
    if (r == 0) {
        t->hash = dmk_hash128((struct dmk_id128){0}, blob.data, blob.len);
        fill_nodes(t, blob, n_tokens);
        fill_bytes(t, blob, n_tokens);
    }
    for (unsigned b = 0; r == 0 && b < 256; b++) {
        if (t->child[b] == 0 || dmk_node_token(&t->nodes[t->child[b]]) == DMK_NO_TOKEN_ID) {
            r = dmk_error_set(reterr, -DMK_EINVAL,
                              "the vocabulary has no token of the byte 0x%02x alone", b);
        }
    }
    if (r < 0) {
        dmk_trie_free(&t);
        return r;
    }
    *ret = t;
    return 0;
}

void dmk_trie_free(struct dmk_trie **trie)
{
    struct dmk_trie *t = *trie;

    if (t) {
        free(t->nodes);
        free(t->all);
        free(t->text);
        free(t->chars);
        free(t->offset);
        free(t->blob);
        free(t);
        *trie = NULL;
    }
}

struct dmk_id128 dmk_trie_hash(const struct dmk_trie *trie)
{
    return trie->hash;
}

uint32_t dmk_trie_n_ids(const struct dmk_trie *trie)
{
    return trie->n_ids;
}

struct dmk_bytes dmk_trie_token(const struct dmk_trie *trie, uint32_t id)
{
    if (id >= trie->n_ids) {
        return (struct dmk_bytes){0};
    }
    return (struct dmk_bytes){trie->blob + trie->offset[id],
                              trie->offset[id + 1] - trie->offset[id]};
}
