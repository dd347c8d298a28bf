/* Fuzz target of what clients send as the form of an answer. Input: a byte that says what it is (a schema, a regular
 * expression, a grammar, a structural tag), then its text. Checked: it is refused with a sentence and nothing is written, or
 * compiled to an automaton that workers accept and that never leads into a dead end. */
#include "common/base/assert.h"
#include "router/constraint.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/words.h"

/* What the compiler may never hand to a worker. A sentence may well quote the words out of the schema. */
static bool is_damaged(const char *text)
{
    static const char says[] = "the constraint is damaged";

    return strncmp(text, says, sizeof(says) - 1) == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct dmk_str text = {(const char *)data + 1, size ? size - 1 : 0};
    struct dmk_automaton *a = NULL;
    struct dmk_api_error err = {0};
    struct dmk_buf blob;
    int r;

    if (size == 0 || text.len > 16384) {
        return 0;
    }
    dmk_buf_init(&blob, 0);
    if (data[0] == 'r' || data[0] == 'e') {
        /* The router's texts are UTF-8. */
        for (size_t i = 0; i < text.len; i++) {
            if ((uint8_t)text.data[i] >= 0x80) {
                return 0;
            }
        }
        r = data[0] == 'r'
                ? dmk_constraint_from_regex(text, "pattern", DMK_CONSTRAIN_ALL, &blob, &err)
                : dmk_constraint_from_grammar(text, "grammar", DMK_CONSTRAIN_ALL, &blob, &err);
    } else if (data[0] == 't') {
        r = dmk_constraint_from_structural_tag(text, "structural_tag", &blob, &err);
    } else {
        r = dmk_constraint_from_json_schema(text, "schema", DMK_CONSTRAIN_ALL, &blob, &err);
    }
    if (r < 0) {
        dmk_assert(err.status == 400 && err.text[0] && blob.len == 0 && !is_damaged(err.text));
    } else {
        dmk_assert(dmk_automaton_load(dmk_buf_bytes(&blob), &a, NULL) == 0);
        dmk_assert(fuzz_walk(a, data, size));
    }
    dmk_automaton_free(&a);
    dmk_buf_fini(&blob);
    return 0;
}
