/* Fuzz target of serialised automata. Input: one, whose checksum is put right first so that what lies behind it is
 * reached. Checked: it is refused with a sentence, or can be walked; masks and steps agree on every byte. */
#include "common/base/assert.h"
#include "common/grammar/walk.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/words.h"

#define MIN_BYTES 52

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dmk_automaton *a = NULL;
    struct dmk_error err = {0};
    struct dmk_buf blob;

    dmk_buf_init(&blob, DMK_GRAMMAR_MAX_BYTES + 1);
    dmk_buf_append(&blob, data, size);
    if (!blob.failed && size >= MIN_BYTES) {
        dmk_grammar_stamp(&blob, (struct dmk_id128){1, 2});
    }
    if (dmk_automaton_load(dmk_buf_bytes(&blob), &a, &err) < 0) {
        dmk_assert(err.status < 0 && err.text[0]);
    } else {
        (void)fuzz_walk(a, data, size);
    }
    dmk_automaton_free(&a);
    dmk_buf_fini(&blob);
    return 0;
}
