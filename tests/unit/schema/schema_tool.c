/* For tests in Python: compiles schemas, samples texts that they allow, and tells which texts they accept.
 *
 * A line of input is {"schema": ..., (or "grammar": "EBNF") "samples": N, "seed": S, "texts": [...]}; the answer is a line
 * {"error": "..."} or {"samples": [...], "fits": [...]}. A sample is drawn token by token from the masks; those that
 * are not complete after a bound of tokens are left out. */
#include "tests/unit/schema/words.h"
#include "common/base/rng.h"

#define MAX_SAMPLE_TOKENS 400u

/* Closing bytes are drawn more often, so that values end. */
static uint32_t draw(const uint64_t *mask, uint64_t seed, uint64_t stream, uint64_t at)
{
    uint32_t allowed[N_TEST_IDS], n = 0, closing[8], n_closing = 0;

    for (uint32_t id = 0; id < N_TEST_IDS; id++) {
        if (mask[id / 64] >> (id % 64) & 1) {
            allowed[n++] = id;
            if (id < N_BYTES && strchr("\"}]", (int)id) && id != 0) {
                closing[n_closing++] = id;
            }
        }
    }
    if (n_closing > 0 && dmk_rng_unit(seed, stream, 2 * at) < 0.3) {
        return closing[dmk_rng_u64(seed, stream, 2 * at + 1) % n_closing];
    }
    return n > 0 ? allowed[dmk_rng_u64(seed, stream, 2 * at + 1) % n] : UINT32_MAX;
}

static void sample(struct dmk_walker *walker, const struct dmk_trie *trie,
                   const struct dmk_automaton *a, uint64_t seed, uint64_t stream, json_t *list)
{
    struct dmk_buf text;
    struct dmk_walk walk;

    dmk_buf_init(&text, 0);
    dmk_walk_begin(&walk, a);
    for (uint32_t i = 0; i < MAX_SAMPLE_TOKENS; i++) {
        uint64_t mask[N_TEST_IDS / 64];
        const enum dmk_walk_end end = dmk_walk_mask(walker, &walk, mask);
        const uint32_t id = draw(mask, seed, stream, i);
        struct dmk_bytes bytes;

        if (id == UINT32_MAX && end != DMK_WALK_ENDED) {
            (void)json_array_append_new(list, json_string("dead end"));
            break;
        }
        if (end != DMK_WALK_OPEN && (id == UINT32_MAX || dmk_rng_unit(seed, ~stream, i) < 0.5)) {
            (void)json_array_append_new(list, json_stringn(text.data ? text.data : "", text.len));
            break;
        }
        bytes = dmk_trie_token(trie, id);
        dmk_buf_append(&text, bytes.data, bytes.len);
        if (dmk_walk_advance(walker, &walk, id) < 0) {
            (void)json_array_append_new(list, json_string("mask and step differ"));
            break;
        }
    }
    dmk_buf_fini(&text);
}

static json_t *answer(struct dmk_walker *walker, const struct dmk_trie *trie, const json_t *ask)
{
    const char *grammar = json_string_value(json_object_get(ask, "grammar"));
    char *schema = json_dumps(json_object_get(ask, "schema"), JSON_ENCODE_ANY);
    const uint64_t seed = (uint64_t)json_integer_value(json_object_get(ask, "seed"));
    struct dmk_error error = {0};
    struct dmk_automaton *a =
        grammar ? compile_grammar(grammar, strlen(grammar), &error) : compile(schema, &error);
    json_t *samples = json_array(), *fits = json_array(), *text;
    size_t i;

    free(schema);
    if (!a) {
        json_decref(samples);
        json_decref(fits);
        return json_pack("{s:s}", "error", error.text);
    }
    for (json_int_t k = 0; k < json_integer_value(json_object_get(ask, "samples")); k++) {
        sample(walker, trie, a, seed, (uint64_t)k, samples);
    }
    json_array_foreach(json_object_get(ask, "texts"), i, text)
    {
        (void)json_array_append_new(fits,
                                    json_boolean(fit(walker, a, json_string_value(text)) == FITS));
    }
    dmk_automaton_free(&a);
    return json_pack("{s:o,s:o}", "samples", samples, "fits", fits);
}

int main(void)
{
    static char line[1 << 20];
    struct dmk_trie *trie = open_words();
    struct dmk_walker *walker;

    assert_int_equal(dmk_walker_new(trie, 16, &walker), 0);
    while (fgets(line, sizeof(line), stdin)) {
        json_t *ask = json_loads(line, 0, NULL);
        json_t *told = answer(walker, trie, ask);
        char *text = json_dumps(told, JSON_COMPACT);

        (void)puts(text);
        (void)fflush(stdout);
        free(text);
        json_decref(told);
        json_decref(ask);
    }
    dmk_walker_free(&walker);
    dmk_trie_free(&trie);
    return 0;
}
