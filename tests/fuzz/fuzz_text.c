/* Fuzz target of the tokenizer: any bytes.
 *
 * Checked: pieces tile the text on character borders; ids are ordinary ones; they decode to the text, with
 * each invalid part as U+FFFD; both merging algorithms agree on every piece; with special tokens the text
 * comes back too; the text in two pieces through the streaming decoder is the same. */
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/text/bpe.h"
#include "common/text/split.h"
#include "common/text/utf8.h"
#include "tests/fuzz/fuzz.h"

static struct dmk_vocab *vocab;
static struct dmk_bpe_scratch *scratch;

static void start(void)
{
    struct dmk_error error;

    if (dmk_vocab_open(DMK_TEST_VOCAB, &vocab, &error) < 0) {
        (void)fprintf(stderr, "%s (./dev deps brings it)\n", error.text);
        abort();
    }
    scratch = dmk_bpe_scratch_new();
    dmk_assert(scratch);
}

static void check_decodes(const struct dmk_ids *ids, const struct dmk_buf *want)
{
    struct dmk_buf out;

    dmk_assert(!ids->failed);
    dmk_buf_init(&out, 0);
    dmk_assert(dmk_decode(vocab, ids->data, ids->len, &out) == 0);
    dmk_assert(out.len == want->len &&
               (out.len == 0 || memcmp(out.data, want->data, out.len) == 0));
    dmk_buf_fini(&out);
}

/* Merges every piece in every way, and appends what they agree on to ids. */
static void merge_pieces(const struct dmk_buf *text, struct dmk_ids *ids)
{
    const uint8_t *data = (const uint8_t *)text->data;
    size_t pos = 0;

    dmk_bpe_scratch_begin(scratch, vocab);
    while (pos < text->len) {
        const size_t end = dmk_split_next(data, text->len, pos);
        const struct dmk_bytes piece = {data + pos, end - pos};
        struct dmk_ids other;

        dmk_assert(end > pos && end <= text->len);
        dmk_assert(end == text->len || (data[end] & 0xc0) != 0x80);
        for (int start_at = DMK_BPE_BYTES; start_at <= DMK_BPE_CHARS; start_at++) {
            const size_t before = ids->len;

            dmk_ids_init(&other, 0);
            dmk_bpe_heap(vocab, scratch, piece, (enum dmk_bpe_start)start_at, &other);
            if (piece.len <= DMK_BPE_LINEAR_MAX) {
                dmk_bpe_linear(vocab, scratch, piece, (enum dmk_bpe_start)start_at, ids);
                dmk_assert(ids->len - before == other.len);
                dmk_assert(memcmp(ids->data + before, other.data, other.len * 4) == 0);
                ids->len = before;
            }
            if (start_at == DMK_BPE_CHARS) {
                dmk_ids_append(ids, other.data, other.len);
            }
            dmk_ids_fini(&other);
        }
        pos = end;
    }
}

static void check_stream(struct dmk_str text, size_t cut, const struct dmk_buf *want)
{
    const uint8_t *data = (const uint8_t *)text.data;
    struct dmk_utf8_stream stream = {0};
    struct dmk_buf out;

    dmk_buf_init(&out, 0);
    dmk_utf8_stream_push(&stream, (struct dmk_bytes){data, cut}, &out);
    dmk_assert(out.len == 0 ||
               dmk_utf8_valid_prefix((const uint8_t *)out.data, out.len) == out.len);
    dmk_utf8_stream_push(&stream, (struct dmk_bytes){data + cut, text.len - cut}, &out);
    dmk_utf8_stream_end(&stream, &out);
    dmk_assert(out.len == want->len &&
               (out.len == 0 || memcmp(out.data, want->data, out.len) == 0));
    dmk_buf_fini(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct dmk_str text = {(const char *)data, size};
    struct dmk_ids ids, pieces;
    struct dmk_buf want;

    if (!vocab) {
        start();
    }
    if (size == 0) {
        return 0;
    }
    dmk_buf_init(&want, 0);
    dmk_utf8_append_lossy(&want, (struct dmk_bytes){data, size});
    dmk_ids_init(&ids, 0);
    dmk_ids_init(&pieces, 0);
    dmk_encode(vocab, scratch, text, &ids);
    for (size_t i = 0; i < ids.len; i++) {
        dmk_assert(ids.data[i] < DMK_TOKEN_FIRST_SPECIAL);
    }
    check_decodes(&ids, &want);
    merge_pieces(&want, &pieces);
    dmk_assert(pieces.len == ids.len && memcmp(pieces.data, ids.data, ids.len * 4) == 0);
    ids.len = 0;
    dmk_encode_with_specials(vocab, scratch, text, &ids);
    if (!memmem(data, size, "<|endofprompt|>", 15)) { /* a second spelling of 200018 */
        check_decodes(&ids, &want);
    }
    check_stream(text, data[size - 1] % size, &want);
    dmk_ids_fini(&ids);
    dmk_ids_fini(&pieces);
    dmk_buf_fini(&want);
    return 0;
}
