/* Fuzz target of the vocabulary's files: tokenizer.json and o200k_base.tiktoken.
 *
 * Input: one byte, then the file; the byte's lowest bit chooses the reader. A whole file has 200 thousand
 * tokens, so the .tiktoken reader begins a few lines before the end: the byte's other bits say how many.
 * Checked: it is refused with a sentence, or the table of tokens is whole and bounded. */
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/text/vocab.h"
#include "tests/fuzz/fuzz.h"

static void check(const struct dmk_vocab *v, uint32_t first)
{
    dmk_assert(v->n_added == DMK_RANKS);
    for (uint32_t id = first; id < DMK_RANKS; id++) {
        dmk_assert(v->offset[id + 1] > v->offset[id]);
        dmk_assert(v->offset[id + 1] - v->offset[id] <= DMK_RANK_BYTES_MAX);
        dmk_assert(v->offset[id + 1] <= v->blob_cap);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint32_t offset[DMK_RANKS + 1];
    struct dmk_vocab *v;
    struct dmk_error err = {0};
    struct dmk_bytes file;
    uint32_t first = 0;
    int r;

    if (size < 1) {
        return 0;
    }
    v = calloc(1, sizeof(*v));
    dmk_assert(v);
    v->offset = offset;
    dmk_special_fill(v->special);
    file = (struct dmk_bytes){data + 1, size - 1};
    if (data[0] & 1) {
        r = dmk_vocab_read_hf(v, "fuzz.json", file, &err);
    } else {
        first = DMK_RANKS - (data[0] >> 1);
        v->n_added = first;
        r = dmk_vocab_read_tiktoken(v, "fuzz.tiktoken", file, &err);
    }
    if (r < 0) {
        dmk_assert(strncmp(err.text, "fuzz.", 5) == 0 || r == -DMK_ENOMEM);
    } else {
        check(v, first);
    }
    memset(offset + first, 0, (v->n_added - first + 1) * sizeof(*offset));
    free(v->blob);
    free(v);
    return 0;
}
