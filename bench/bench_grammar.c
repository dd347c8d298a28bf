/* What a constraint costs for each token: masks and steps along documents that fit their schemas.
 *
 *   bench_grammar VOCABULARY
 *
 * Each document is tokenised as the tokenizer would and walked token by token. "cold": with a new walker, so that
 * every kept mask is computed once; "warm": with the masks that the same walk has left. The limit is the time
 * that it takes to copy one mask (the least that anything which hands out a mask does), measured in the
 * same run. One thread. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/utsname.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/grammar/walk.h"
#include "common/schema/schema.h"
#include "common/text/tokenizer.h"

#define MAX_TOKENS 4096
#define N_WARM     40

static const struct {
    const char *name, *schema, *text;
} cases[] = {
    {"record: strings, numbers, enum, array",
     "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"email\":{\"type\":"
     "\"string\"},\"age\":"
     "{\"type\":\"integer\"},\"plan\":{\"enum\":[\"free\",\"pro\",\"enterprise\"]},\"tags\":{"
     "\"type\":\"array\","
     "\"items\":{\"type\":\"string\"}},\"active\":{\"type\":\"boolean\"},\"score\":{\"type\":"
     "\"number\"}},\"required\":"
     "[\"name\",\"email\",\"age\",\"plan\",\"tags\",\"active\",\"score\"],\"additionalProperties\":"
     "false}",
     "{\"name\": \"Ada Lovelace\", \"email\": \"ada@example.org\", \"age\": 36, \"plan\": "
     "\"enterprise\", \"tags\": "
     "[\"mathematics\", \"analytical engine\", \"poetry\"], \"active\": true, \"score\": 97.25}"},
    {"steps of reasoning: nested objects, long text",
     "{\"type\":\"object\",\"properties\":{\"steps\":{\"type\":\"array\",\"items\":{\"type\":"
     "\"object\",\"properties\":"
     "{\"explanation\":{\"type\":\"string\"},\"output\":{\"type\":\"string\"}},\"required\":["
     "\"explanation\",\"output\"],"
     "\"additionalProperties\":false}},\"final_answer\":{\"type\":\"string\"}},\"required\":["
     "\"steps\",\"final_answer\"],"
     "\"additionalProperties\":false}",
     "{\"steps\":[{\"explanation\":\"We start with the equation 8x + 7 = -23 and want to isolate x "
     "on one side.\","
     "\"output\":\"8x + 7 = -23\"},{\"explanation\":\"Subtract 7 from both sides, so that only the "
     "term with x is "
     "left there.\",\"output\":\"8x = -30\"},{\"explanation\":\"Divide both sides by 8 \\u2013 the "
     "fraction can be "
     "shortened by \\\"2\\\".\",\"output\":\"x = -30/8\"}],\"final_answer\":\"x = -15/4 "
     "\xe2\x89\x88 -3.75\"}"},
    {"tool call: anyOf, bounds, formats",
     "{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\",\"minLength\":1,"
     "\"maxLength\":80},\"date\":"
     "{\"type\":\"string\",\"format\":\"date-time\"},\"unit\":{\"anyOf\":[{\"enum\":[\"celsius\","
     "\"fahrenheit\"]},"
     "{\"type\":\"null\"}]},\"days\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":14},\"id\":{"
     "\"type\":\"string\","
     "\"pattern\":\"^[A-Z]{3}-[0-9]{6}$\"}},\"required\":[\"city\",\"date\",\"unit\",\"days\","
     "\"id\"],"
     "\"additionalProperties\":false}",
     "{\"city\":\"San "
     "Francisco\",\"date\":\"2025-06-28T12:30:00Z\",\"unit\":\"celsius\",\"days\":7,\"id\":\"WEA-"
     "204816\"}"},
    {"union of six shapes by a tag",
     "{\"type\":\"array\",\"items\":{\"anyOf\":["
     "{\"type\":\"object\",\"properties\":{\"type\":{\"const\":\"heading\"},\"text\":{\"type\":"
     "\"string\"}},\"required\":[\"type\",\"text\"],\"additionalProperties\":false},"
     "{\"type\":\"object\",\"properties\":{\"type\":{\"const\":\"paragraph\"},\"text\":{\"type\":"
     "\"string\"}},\"required\":[\"type\",\"text\"],\"additionalProperties\":false},"
     "{\"type\":\"object\",\"properties\":{\"type\":{\"const\":\"image\"},\"url\":{\"type\":"
     "\"string\"},\"alt\":{\"type\":\"string\"}},\"required\":[\"type\",\"url\"],"
     "\"additionalProperties\":false},"
     "{\"type\":\"object\",\"properties\":{\"type\":{\"const\":\"list\"},\"items\":{\"type\":"
     "\"array\",\"items\":{\"type\":\"string\"}}},\"required\":[\"type\",\"items\"],"
     "\"additionalProperties\":false},"
     "{\"type\":\"object\",\"properties\":{\"type\":{\"const\":\"quote\"},\"text\":{\"type\":"
     "\"string\"},\"by\":{\"type\":\"string\"}},\"required\":[\"type\",\"text\"],"
     "\"additionalProperties\":false},"
     "{\"type\":\"object\",\"properties\":{\"type\":{\"const\":\"rule\"}},\"required\":[\"type\"],"
     "\"additionalProperties\":false}]}}",
     "[{\"type\":\"heading\",\"text\":\"Release notes\"},{\"type\":\"paragraph\",\"text\":\"This "
     "version brings faster start-up and "
     "three fixes.\"},{\"type\":\"list\",\"items\":[\"start-up halved\",\"a leak "
     "closed\",\"docs\"]},{\"type\":\"rule\"},"
     "{\"type\":\"quote\",\"text\":\"Simple things should be simple.\",\"by\":\"Alan Kay\"}]"},
    {"any JSON object", "{\"type\":\"object\"}",
     "{\"orders\": [{\"id\": 1042, \"lines\": [{\"sku\": \"A-77\", \"n\": 2, \"price\": 19.9}, "
     "{\"sku\": \"B-3\", \"n\": 1, \"price\": 5}], "
     "\"note\": \"leave at the door, please\", \"paid\": true}, {\"id\": 1043, \"lines\": [], "
     "\"note\": null}], \"next\": \"/orders?page=2\"}"},
    {"open object: further keys",
     "{\"type\":\"object\",\"properties\":{\"title\":{\"type\":\"string\"},\"version\":{\"type\":"
     "\"integer\"}},\"required\":[\"title\"]}",
     "{\"title\":\"Config\",\"version\":3,\"timeout\":\"30s\",\"retries\":5,\"labels\":{\"team\":"
     "\"search\",\"tier\":\"gold\"}}"},
    {"Chinese text",
     "{\"type\":\"object\",\"properties\":{\"t\":{\"type\":\"string\"}},\"required\":[\"t\"],"
     "\"additionalProperties\":false}",
     "{\"t\":"
     "\"\xe4\xbb\x8a\xe5\xa4\xa9\xe5\xa4\xa9\xe6\xb0\x94\xe5\xbe\x88\xe5\xa5\xbd\xef\xbc\x8c\xe6"
     "\x88\x91\xe4\xbb\xac\xe5\x8e\xbb\xe5\x85\xac\xe5\x9b\xad\xe6\x95\xa3\xe6\xad\xa5\xe5\x90\xa7"
     "\xe3\x80\x82\"}"},
};
#define N_CASES (sizeof(cases) / sizeof(cases[0]))

static struct dmk_bytes token_bytes(void *ud, uint32_t id)
{
    return dmk_token_is_special(id) ? (struct dmk_bytes){0} : dmk_token_bytes(ud, id);
}

static int compare(const void *x, const void *y)
{
    const double a = *(const double *)x, b = *(const double *)y;

    return (a > b) - (a < b);
}

static double at(const double *sorted, size_t n, double share)
{
    const size_t i = (size_t)(share * (double)(n - 1) + 0.5);

    return sorted[i];
}

static struct dmk_automaton *compile(const char *text, double *ret_ms, size_t *ret_bytes)
{
    const uint64_t start = dmk_clock_ns();
    struct dmk_build *build = dmk_build_new();
    struct dmk_schemas *schemas = dmk_schemas_new(build);
    json_t *schema = json_loads(text, 0, NULL);
    struct dmk_automaton *a = NULL;
    struct dmk_error error = {0};
    struct dmk_buf blob;
    uint32_t root, rule = 0;

    dmk_assert(schema);
    dmk_buf_init(&blob, 0);
    root = dmk_build_declare(build);
    dmk_assert(dmk_schemas_add(schemas, schema, "schema", &rule, &error) == 0);
    dmk_build_begin(build, root);
    dmk_build_end(build, dmk_piece_call(build, rule), 0, DMK_BUILD_NO_MAX);
    dmk_assert(dmk_build_finish(build, &blob, &error) == 0);
    *ret_ms = (double)(dmk_clock_ns() - start) / 1e6;
    *ret_bytes = blob.len;
    dmk_assert(dmk_automaton_load(dmk_buf_bytes(&blob), &a, &error) == 0);
    dmk_buf_fini(&blob);
    dmk_schemas_free(&schemas);
    dmk_build_free(&build);
    json_decref(schema);
    return a;
}

/* Times of each token, in microseconds; returns how many. */
static size_t walk(struct dmk_walker *walker, const struct dmk_automaton *a,
                   const struct dmk_ids *ids, uint64_t *mask, double *us)
{
    struct dmk_walk w;

    dmk_walk_begin(&w, a);
    for (size_t i = 0; i < ids->len; i++) {
        const uint64_t start = dmk_clock_ns();

        (void)dmk_walk_mask(walker, &w, mask);
        dmk_assert(mask[ids->data[i] / 64] >> (ids->data[i] % 64) & 1);
        dmk_assert(dmk_walk_advance(walker, &w, ids->data[i]) == 0);
        us[i] = (double)(dmk_clock_ns() - start) / 1e3;
    }
    dmk_assert(dmk_walk_mask(walker, &w, mask) != DMK_WALK_OPEN);
    return ids->len;
}

static void run_case(size_t i, const struct dmk_vocab *vocab, const struct dmk_trie *trie,
                     struct dmk_walker *shared, double *all, size_t *n_all)
{
    static double us[N_WARM * MAX_TOKENS];
    uint64_t *mask = calloc(dmk_trie_n_ids(trie) / 64 + 1, sizeof(*mask));
    struct dmk_bpe_scratch *scratch = dmk_bpe_scratch_new();
    struct dmk_walker *walker;
    struct dmk_automaton *a;
    struct dmk_ids ids;
    double ms, cold_sum = 0;
    size_t bytes, n = 0;

    a = compile(cases[i].schema, &ms, &bytes);
    dmk_ids_init(&ids, MAX_TOKENS);
    dmk_encode(vocab, scratch, dmk_str_from(cases[i].text), &ids);
    dmk_assert(dmk_walker_new(trie, 128, &walker) == 0);
    n = walk(walker, a, &ids, mask, us);
    qsort(us, n, sizeof(*us), compare);
    for (size_t k = 0; k < n; k++) {
        cold_sum += us[k];
    }
    printf("%-48s %4zu tokens  compile %.2f ms, %zu bytes\n", cases[i].name, n, ms, bytes);
    printf(
        "  cold  mean %8.1f  p50 %6.1f  p90 %6.1f  p99 %7.1f  max %8.1f us, %llu masks computed\n",
        cold_sum / (double)n, at(us, n, 0.5), at(us, n, 0.9), at(us, n, 0.99), us[n - 1],
        (unsigned long long)dmk_walker_stats(walker).n_computed);
    dmk_walker_free(&walker);
    (void)walk(shared, a, &ids, mask, us);
    n = 0;
    for (unsigned k = 0; k < N_WARM; k++) {
        n += walk(shared, a, &ids, mask, us + n);
    }
    for (size_t k = 0; k < n; k++) {
        all[(*n_all)++] = us[k];
    }
    qsort(us, n, sizeof(*us), compare);
    printf("  warm  p50 %6.1f  p90 %6.1f  p99 %7.1f  max %8.1f us\n", at(us, n, 0.5),
           at(us, n, 0.9), at(us, n, 0.99), us[n - 1]);
    dmk_automaton_free(&a);
    dmk_ids_fini(&ids);
    dmk_bpe_scratch_free(&scratch);
    free(mask);
}

static void print_limit(const struct dmk_trie *trie)
{
    const size_t bytes = (dmk_trie_n_ids(trie) + 63) / 64 * 8;
    char *x = malloc(bytes), *y = malloc(bytes);
    uint64_t best = UINT64_MAX;

    memset(x, 1, bytes);
    for (unsigned i = 0; i < 1000; i++) {
        const uint64_t start = dmk_clock_ns();

        memcpy(y, x, bytes);
        __asm__ volatile("" : : "r"(y) : "memory");
        best = dmk_clock_ns() - start < best ? dmk_clock_ns() - start : best;
    }
    printf("copying one mask of %zu bytes: %.1f us\n", bytes, (double)best / 1e3);
    free(x);
    free(y);
}

int main(int argc, char **argv)
{
    static double all[N_CASES * N_WARM * MAX_TOKENS / 8];
    struct dmk_vocab *vocab = NULL;
    struct dmk_trie *trie = NULL;
    struct dmk_walker *shared;
    struct dmk_error error = {0};
    struct utsname name;
    struct dmk_buf blob;
    size_t n_all = 0;
    uint64_t start;

    if (argc != 2 || dmk_vocab_open(argv[1], &vocab, &error) < 0) {
        (void)fprintf(stderr, "usage: bench_grammar VOCABULARY\n%s\n", error.text);
        return 2;
    }
    (void)uname(&name);
    dmk_buf_init(&blob, 0);
    start = dmk_clock_ns();
    dmk_assert(dmk_trie_write(DMK_VOCAB_SIZE, token_bytes, vocab, &blob) == 0);
    printf("%s %s, one thread\nvocabulary: %zu bytes written in %.0f ms", name.machine,
           name.release, blob.len, (double)(dmk_clock_ns() - start) / 1e6);
    start = dmk_clock_ns();
    dmk_assert(dmk_trie_read(dmk_buf_bytes(&blob), &trie, &error) == 0);
    printf(", read in %.0f ms\n", (double)(dmk_clock_ns() - start) / 1e6);
    print_limit(trie);
    dmk_assert(dmk_walker_new(trie, 128, &shared) == 0);
    for (size_t i = 0; i < N_CASES; i++) {
        run_case(i, vocab, trie, shared, all, &n_all);
    }
    qsort(all, n_all, sizeof(*all), compare);
    printf("all warm: %zu tokens  p50 %.1f  p90 %.1f  p99 %.1f  max %.1f us\n", n_all,
           at(all, n_all, 0.5), at(all, n_all, 0.9), at(all, n_all, 0.99), all[n_all - 1]);
    dmk_walker_free(&shared);
    dmk_trie_free(&trie);
    dmk_buf_fini(&blob);
    dmk_vocab_close(&vocab);
    return 0;
}
