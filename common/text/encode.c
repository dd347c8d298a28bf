/* Text to ids, ids to text; see tokenizer.h. Any thread, each with its own scratch. */
#include "common/text/bpe.h"
#include "common/text/utf8.h"
#include "common/base/assert.h"
#include <stdlib.h>

#define IDS_MAX ((size_t)1 << 24)

void dmk_ids_init(struct dmk_ids *ids, size_t max_len)
{
    *ids = (struct dmk_ids){.max_len = max_len};
}

void dmk_ids_fini(struct dmk_ids *ids)
{
    free(ids->data);
    *ids = (struct dmk_ids){.max_len = ids->max_len};
}

uint32_t *dmk_ids_room(struct dmk_ids *ids, size_t n)
{
    const size_t max = ids->max_len ? ids->max_len : IDS_MAX;
    size_t cap = ids->cap ? ids->cap : 64;
    uint32_t *grown;

    if (ids->failed || n > max || ids->len > max - n) {
        ids->failed = true;
        return NULL;
    }
    if (ids->len + n <= ids->cap) {
        return ids->data + ids->len;
    }
    while (cap < ids->len + n) {
        cap *= 2;
    }
    cap = cap < max ? cap : max;
    grown = realloc(ids->data, cap * sizeof(*grown));
    if (!grown) {
        ids->failed = true;
        return NULL;
    }
    ids->data = grown;
    ids->cap = cap;
    return ids->data + ids->len;
}

void dmk_ids_append(struct dmk_ids *ids, const uint32_t *data, size_t n)
{
    uint32_t *room = n > 0 ? dmk_ids_room(ids, n) : NULL;

    if (room) {
        memcpy(room, data, n * sizeof(*data));
        ids->len += n;
    }
}

void dmk_ids_push(struct dmk_ids *ids, uint32_t id)
{
    dmk_ids_append(ids, &id, 1);
}

void dmk_encode(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch, struct dmk_str text,
                struct dmk_ids *ids)
{
    struct dmk_bytes bytes = {(const uint8_t *)text.data, text.len};

    if (dmk_utf8_valid_prefix(bytes.data, bytes.len) < bytes.len) {
        struct dmk_buf *repaired = dmk_bpe_scratch_text(scratch);

        dmk_buf_reset(repaired);
        dmk_utf8_append_lossy(repaired, bytes);
        if (repaired->failed) {
            ids->failed = true;
            return;
        }
        bytes = dmk_buf_bytes(repaired);
    }
    dmk_bpe_scratch_begin(scratch, vocab);
    dmk_words_encode(vocab, scratch, bytes, ids);
    dmk_bpe_scratch_trim(scratch);
}

void dmk_encode_with_specials(const struct dmk_vocab *vocab, struct dmk_bpe_scratch *scratch,
                              struct dmk_str text, struct dmk_ids *ids)
{
    size_t done = 0, pos = 0;

    while (pos < text.len && !ids->failed) {
        const char *at = memmem(text.data + pos, text.len - pos, "<|", 2);
        size_t len;
        uint32_t id;

        if (!at) {
            break;
        }
        pos = (size_t)(at - text.data);
        id = dmk_special_match(vocab, (struct dmk_str){at, text.len - pos}, &len);
        if (id == DMK_NO_TOKEN) {
            pos++;
            continue;
        }
        dmk_encode(vocab, scratch, (struct dmk_str){text.data + done, pos - done}, ids);
        dmk_ids_push(ids, id);
        pos += len;
        done = pos;
    }
    dmk_encode(vocab, scratch, (struct dmk_str){text.data + done, text.len - done}, ids);
}

int dmk_decode(const struct dmk_vocab *vocab, const uint32_t *ids, size_t n, struct dmk_buf *out)
{
    for (size_t i = 0; i < n; i++) {
        const struct dmk_bytes bytes = dmk_token_bytes(vocab, ids[i]);

        if (bytes.len == 0) {
            return -DMK_EINVAL;
        }
        dmk_buf_append(out, bytes.data, bytes.len);
    }
    return out->failed ? -DMK_EFULL : 0;
}
