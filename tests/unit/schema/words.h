/* Does a text fit a constraint? Walks an automaton with a vocabulary of the 256 single bytes and a few
 * tokens more, each id behind them being a trigger id. For tests. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>
#include <stdlib.h>
#include "common/grammar/walk.h"
#include "common/json/json.h"
#include "common/schema/ebnf.h"
#include "common/schema/schema.h"

#define N_BYTES    256u
#define N_TEST_IDS 320u

static const char *const more_tokens[] = {"\":", "\",\"",    "{\"",  "\"}",  "true",  "null",
                                          "12",  "0.",       "ab",   "a\":", "\\u00", "]}",
                                          "}]",  "\xc3\xa9", "\xc3", ", \"", ": \"",  ":\""};
#define N_MORE (sizeof(more_tokens) / sizeof(more_tokens[0]))

static struct dmk_bytes bytes_of(void *ud, uint32_t id)
{
    static uint8_t bytes[256];

    (void)ud;
    if (id < N_BYTES) {
        bytes[id] = (uint8_t)id;
        return (struct dmk_bytes){&bytes[id], 1};
    }
    if (id - N_BYTES < N_MORE && strlen(more_tokens[id - N_BYTES]) > 1) {
        const char *t = more_tokens[id - N_BYTES];

        return (struct dmk_bytes){(const uint8_t *)t, strlen(t)};
    }
    return (struct dmk_bytes){0};
}

static inline struct dmk_trie *open_words(void)
{
    struct dmk_buf blob;
    struct dmk_trie *trie = NULL;
    struct dmk_error error = {0};

    dmk_buf_init(&blob, 0);
    assert_int_equal(dmk_trie_write(N_TEST_IDS, bytes_of, NULL, &blob), 0);
    if (dmk_trie_read(dmk_buf_bytes(&blob), &trie, &error) < 0) {
        fail_msg("%s", error.text);
    }
    dmk_buf_fini(&blob);
    return trie;
}

/* The automaton of one rule, built so far; root was declared first, r is what building the rule gave. */
static inline struct dmk_automaton *load_rule(struct dmk_build *build, uint32_t root, uint32_t rule,
                                              int r, struct dmk_error *reterr)
{
    struct dmk_automaton *automaton = NULL;
    struct dmk_buf blob;

    dmk_buf_init(&blob, 0);
    if (r == 0) {
        dmk_build_begin(build, root);
        dmk_build_end(build, dmk_piece_call(build, rule), 0, DMK_BUILD_NO_MAX);
        r = dmk_build_finish(build, &blob, reterr);
    }
    if (r == 0) {
        r = dmk_automaton_load(dmk_buf_bytes(&blob), &automaton, reterr);
    }
    dmk_buf_fini(&blob);
    return r == 0 ? automaton : NULL;
}

/* Compiles; NULL and the sentence when it is refused. */
static inline struct dmk_automaton *compile(const char *schema_text, struct dmk_error *reterr)
{
    struct dmk_build *build = dmk_build_new();
    struct dmk_schemas *schemas = dmk_schemas_new(build);
    struct dmk_automaton *automaton;
    json_t *schema = json_loads(schema_text, JSON_REJECT_DUPLICATES, NULL);
    uint32_t root, rule = 0;
    int r;

    assert_non_null(schema);
    root = dmk_build_declare(build);
    r = dmk_schemas_add(schemas, schema, "schema", &rule, reterr);
    automaton = load_rule(build, root, rule, r, reterr);
    dmk_schemas_free(&schemas);
    dmk_build_free(&build);
    json_decref(schema);
    return automaton;
}

/* The same of a grammar in EBNF. */
static inline struct dmk_automaton *compile_grammar(const char *text, size_t len,
                                                    struct dmk_error *reterr)
{
    struct dmk_build *build = dmk_build_new();
    struct dmk_automaton *automaton;
    uint32_t root, rule = 0;
    int r;

    root = dmk_build_declare(build);
    r = dmk_ebnf_add(build, (struct dmk_str){text, len}, &rule, reterr);
    automaton = load_rule(build, root, rule, r, reterr);
    dmk_build_free(&build);
    return automaton;
}

enum fit { FITS, DOES_NOT_FIT, IS_CUT };

/* Walks the text byte by byte, checking each step against the mask. */
static inline enum fit fit(struct dmk_walker *walker, const struct dmk_automaton *a,
                           const char *text)
{
    uint64_t mask[N_TEST_IDS / 64];
    struct dmk_walk walk;

    dmk_walk_begin(&walk, a);
    for (const char *at = text; *at; at++) {
        const uint8_t byte = (uint8_t)*at;
        bool allowed;

        (void)dmk_walk_mask(walker, &walk, mask);
        allowed = mask[byte / 64] >> (byte % 64) & 1;
        assert_int_equal(allowed, dmk_walk_advance(walker, &walk, byte) == 0);
        if (!allowed) {
            return DOES_NOT_FIT;
        }
    }
    return dmk_walk_mask(walker, &walk, mask) == DMK_WALK_OPEN ? IS_CUT : FITS;
}
