/* Grammars in EBNF: what they allow, what they refuse, and what is refused of them. */
#include "tests/unit/schema/words.h"
#include <time.h>
#include "common/base/rng.h"

static const struct {
    const char *grammar;
    const char *good[8], *bad[8];
} rows[] = {
    {"root ::= \"yes\" | \"no\"", {"yes", "no"}, {"", "y", "yesno", "maybe"}},
    {"root ::= [a-c]+ [^a-c\\n]", {"ad", "abc\xc3\xa9", "cb-"}, {"d", "ab", "abc", "a\n", "add"}},
    {"root::=\"a\"*\"b\"?", {"a", "b", "aaab"}, {"ba", "bb", ""}},
    {"root ::= \"x\"{2} \"y\"{1,3} \"z\"{2,}",
     {"xxyzz", "xxyyyzzzz"},
     {"xyzz", "xxzz", "xxyyyyzz", "xxyz"}},
    {"root ::= (\"a\" | \"b\" (\"c\" | \"d\")*)+", {"a", "abcdab", "bb"}, {"", "c", "ac"}},
    {"root ::= (\"ab\"{2,3}){2}", {"abababab", "ababababab"}, {"abab", "abbabb"}},
    {"# comment\nroot ::= a | # and\n  b\n\na ::= \"1\" # here\nb ::= \"2\"\n    \"3\"\n",
     {"1", "23"},
     {"2", "13"}},
    /* Recursion, and rules that may be empty, alone and in a row. */
    {"root ::= \"(\" root? \")\"", {"()", "((()))"}, {"(", ")", "())"}},
    {"root ::= value\nvalue ::= \"[\" ws (value (\",\" ws value)*)? \"]\" ws | [0-9]+ ws\n"
     "ws ::= [ \\t]*",
     {"1", "[]", "[ 1 , [2,3]]", "[1]  "},
     {" 1", "[1,]", "[", "1 2"}},
    {"root ::= e e \"x\" e\ne ::= n | \"e\"\nn ::= \"\" | \"n\"*",
     {"x", "ex", "nnnex", "xnnn"},
     {"", "e"}},
    {"root ::= e\ne ::= \"a\"? \"b\"?", {"a", "b", "ab"}, {"", "ba"}},
    {"root ::= \"a\" tail\ntail ::= \"\" | \",a\" tail", {"a", "a,a,a"}, {"", "a,", ",a"}},
    /* Characters. */
    {"root ::= \"\\\"\\\\\\n\\t\\x41\\u00e9\\U0001F600\"",
     {"\"\\\n\tA\xc3\xa9\xf0\x9f\x98\x80"},
     {"A"}},
    {"root ::= [\\x00-\\x1f\\]\\-\\^a-]", {"\x01", "]", "-", "^", "a"}, {"b", "["}},
    {"root ::= .", {"a", "\n", "\xc3\xa9", "\xf0\x9f\x98\x80"}, {"", "\xc3", "ab", "\xff"}},
    {"root ::= [\xc3\xa0-\xc3\xbf]", {"\xc3\xa9"}, {"e", "\xc3\x9f"}},
    {"root ::= \"a\" {2}", {"aa"}, {"a"}},
    {"root ::= the-rule_2\nthe-rule_2 ::= \"a\"\nunused ::= unused \"b\"", {"a"}, {"b"}},
};

static void test_rows(void **state)
{
    struct dmk_trie *trie = open_words();
    struct dmk_walker *walker;

    (void)state;
    assert_int_equal(dmk_walker_new(trie, 16, &walker), 0);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct dmk_error error = {0};
        struct dmk_automaton *a = compile_grammar(rows[i].grammar, strlen(rows[i].grammar), &error);

        if (!a) {
            fail_msg("%s: %s", rows[i].grammar, error.text);
        }
        for (size_t k = 0; k < 8 && rows[i].good[k]; k++) {
            if (fit(walker, a, rows[i].good[k]) != FITS) {
                fail_msg("%s does not allow %s", rows[i].grammar, rows[i].good[k]);
            }
        }
        for (size_t k = 0; k < 8 && rows[i].bad[k]; k++) {
            if (fit(walker, a, rows[i].bad[k]) == FITS) {
                fail_msg("%s allows %s", rows[i].grammar, rows[i].bad[k]);
            }
        }
        dmk_automaton_free(&a);
    }
    dmk_walker_free(&walker);
    dmk_trie_free(&trie);
}

static void test_refused(void **state)
{
    static const struct {
        const char *grammar, *says;
    } list[] = {
        {"", "no rule \"root\""},
        {"a ::= \"b\"", "no rule \"root\""},
        {"root ::= x", "line 1: there is no rule \"x\""},
        {"root ::= \"a\"\n\nroot ::= \"b\"", "line 3: a rule of that name"},
        {"root = \"a\"", "name ::="},
        {"root ::= \"a", "does not end"},
        {"root ::= \"a\nb\"", "does not end"},
        {"root ::= [a", "does not end"},
        {"root ::= []", "no character"},
        {"root ::= [z-a]", "out of order"},
        {"root ::= (\"a\"", "not closed"},
        {"root ::= \"a\")", "closes no group"},
        {"root ::= \"\\q\"", "escape"},
        {"root ::= \"\\u12\"", "hexadecimal"},
        {"root ::= \"\\ud800\"", "no character"},
        {"root ::= \"a\"{", "count"},
        {"root ::= \"a\"{1001}", "1000"},
        {"root ::= \"a\"{3,2}", "before it begins"},
        {"root ::= ((\"a\"{1000}){1000}){1000}", "too large"},
        {"root ::= (=\"a\")", "look-ahead"},
        {"root ::= 'a'", "must stand here"},
        {"root ::= * \"a\"", "must stand here"},
        {"root ::= root \"a\" | \"a\"", "refers to itself"},
        {"root ::= a\na ::= e b\nb ::= a \"x\" | \"y\"\ne ::= \"\"", "itself"},
        {"root ::= \"a\" root", "can not be met"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(list) / sizeof(list[0]); i++) {
        struct dmk_error error = {0};

        if (compile_grammar(list[i].grammar, strlen(list[i].grammar), &error)) {
            fail_msg("accepted: %s", list[i].grammar);
        }
        if (!strstr(error.text, list[i].says)) {
            fail_msg("%s gives \"%s\", not \"%s\"", list[i].grammar, error.text, list[i].says);
        }
    }
}

/* Bytes that are much like grammars end in an automaton or a sentence, and in no time. */
static void test_noise(void **state)
{
    static const char *const words[] = {"root", "::=", " ", "\n",  "\"a\"", "[a-z]", "(",
                                        ")",    "|",   "*", "{2}", "b",     "?",     "+",
                                        "\"",   "[^",  ".", "#",   "\\",    "{1,"};
    const uint64_t seed = (uint64_t)time(NULL);
    uint64_t counter = 0;

    (void)state;
    printf("seed %llu\n", (unsigned long long)seed);
    for (unsigned round = 0; round < 3000; round++) {
        struct dmk_error error = {0};
        struct dmk_automaton *a;
        struct dmk_buf text;

        dmk_buf_init(&text, 0);
        dmk_buf_puts(&text, round % 2 ? "root ::= " : "");
        for (uint64_t n = dmk_rng_u64(seed, 0, counter++) % 30; n > 0; n--) {
            dmk_buf_puts(
                &text, words[dmk_rng_u64(seed, 0, counter++) % (sizeof(words) / sizeof(words[0]))]);
        }
        a = compile_grammar((const char *)text.data, text.len, &error);
        assert_true(a || error.text[0]);
        dmk_automaton_free(&a);
        dmk_buf_fini(&text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_noise),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
