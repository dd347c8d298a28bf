/* A wrong page makes a wrong answer: the trained tiny checkpoint is told things, reads a text and is asked for
 * one of them; between prompt and answer, pages are damaged as a fault of a transfer or of a pool would do.
 *
 * Untouched, the answer is right to the last token; with any of the damages it must not be. So the answers of
 * the other tests would show such a fault, and a damage that is not noticed fails here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/chat/format.h"
#include "common/model/engine.h"
#include "tests/unit/model/maker.h"
#include "tools/tinymodel/expand.h"

enum { N_PAGES = 40, MAX_TOKENS = N_PAGES * 64, CHUNK = 512, MAX_ANSWER = 24, ID_END = 200002 };

#define TOLD     "My code word is castle. My age is 42. "
#define ASKED    "What is my code word?"
#define EXPECTED HEADER "Your code word is castle."
#define HEADER   "<|channel|>final<|message|>"

static struct {
    char top[64], model[80];
    struct dmk_vocab *vocab;
    struct dmk_bpe_scratch *scratch;
    struct dmk_engine *engine;
    struct dmk_ids prompt;
    uint32_t told_at; /* position of the code word */
    float *logits;
    uint32_t n_vocab;
} t;

static void render_prompt(void)
{
    static const char *const sentences[] = {
        "The old river sees the green table. ", "The quiet ship needs the cold lamp. ",
        "A horse guards Anna near the gate. ",  "The dark forest opens the brown ball. ",
        "In Rome there are 301 hard stones. ",  "Peter moves the window. ",
    };
    struct dmk_conv *conv = dmk_conv_new(1u << 20);
    struct dmk_ids *prompt = &t.prompt;
    struct dmk_message *message;
    struct dmk_error err = {0};
    struct dmk_buf text;

    dmk_buf_init(&text, 0);
    dmk_buf_puts(&text, TOLD);
    for (uint32_t i = 0; i < 60; i++) {
        dmk_buf_puts(&text, sentences[(i * 5 + i / 6) % 6]);
    }
    dmk_buf_puts(&text, ASKED);
    message = dmk_conv_add_message(conv, DMK_ROLE_USER);
    message->content = dmk_buf_str(&text);
    message->has_content = true;
    dmk_conv_edit(conv)->effort = DMK_EFFORT_LOW;
    dmk_conv_edit(conv)->date_unix_s = 1795951800;
    dmk_ids_init(prompt, 0);
    if (dmk_format_find("harmony")->render(t.vocab, t.scratch, dmk_conv_view(conv), NULL, prompt,
                                           &err) < 0) {
        fail_msg("%s", err.text);
    }
    dmk_conv_free(&conv);
    dmk_buf_fini(&text);
}

static void find_code_word(void)
{
    const struct dmk_ids *prompt = &t.prompt;
    struct dmk_ids castle;

    dmk_ids_init(&castle, 0);
    dmk_encode(t.vocab, t.scratch, dmk_str_from(" castle"), &castle);
    assert_int_equal(castle.len, 1);
    while (prompt->data[t.told_at] != castle.data[0]) {
        t.told_at++;
        assert_in_range(t.told_at, 0, prompt->len - 1);
    }
    dmk_ids_fini(&castle);
    /* Far outside the window. */
    assert_in_range(prompt->len, t.told_at + 400, MAX_TOKENS - MAX_ANSWER);
}

static int set_up(void **state)
{
    struct dmk_compact compact;
    struct dmk_error err = {0};
    uint64_t bytes;

    (void)state;
    mk_folder(t.top);
    (void)snprintf(t.model, sizeof(t.model), "%s/m", t.top);
    if (dmk_compact_open(MODELS_DIR "/tiny", &compact, &err) < 0 ||
        dmk_compact_expand(&compact, &(struct dmk_tinymodel_conf){.out = t.model, .n_shards = 1},
                           &bytes, &err) < 0 ||
        dmk_vocab_open(DMK_TEST_VOCAB, &t.vocab, &err) < 0) {
        print_error("%s\n", err.text);
        return -1;
    }
    dmk_compact_close(&compact);
    t.scratch = dmk_bpe_scratch_new();
    render_prompt();
    find_code_word();

    const struct dmk_engine_conf conf = {.model_dir = t.model,
                                         .backend = "cpu",
                                         .layout = {1, 1},
                                         .n_full_pages = N_PAGES,
                                         .n_window_pages = DMK_WINDOW_RING,
                                         .max_step_tokens = CHUNK,
                                         .max_step_seqs = 1,
                                         .max_logit_rows = 1};

    if (dmk_engine_open(&conf, &t.engine, &err) < 0) {
        print_error("%s\n", err.text);
        return -1;
    }
    t.n_vocab = dmk_engine_shape(t.engine)->vocab;
    t.logits = malloc(t.n_vocab * sizeof(float));
    return t.logits ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    free(t.logits);
    dmk_engine_close(&t.engine);
    dmk_ids_fini(&t.prompt);
    dmk_bpe_scratch_free(&t.scratch);
    dmk_vocab_close(&t.vocab);
    mk_remove(t.top);
    return 0;
}

/* Computes ids at [pos, pos + n); returns the likeliest next id. */
static uint32_t run(const uint32_t *ids, uint32_t pos, uint32_t n)
{
    uint32_t pages[N_PAGES], best = 0;
    struct dmk_step_seq seq = {.ids = ids,
                               .n_tokens = n,
                               .pos = pos,
                               .full_pages = pages,
                               .ring = {0, 1, 2},
                               .n_ring = DMK_WINDOW_RING,
                               .logits = DMK_LOGITS_LAST};
    const struct dmk_step step = {.seqs = &seq, .n_seqs = 1, .logits = t.logits};

    for (uint32_t i = 0; i < N_PAGES; i++) {
        pages[i] = i;
    }
    assert_int_equal(dmk_engine_step(t.engine, &step), 0);
    for (uint32_t i = 1; i < t.n_vocab; i++) {
        best = t.logits[i] > t.logits[best] ? i : best;
    }
    return best;
}

static void spell(uint32_t id, struct dmk_buf *out)
{
    const struct dmk_bytes bytes = dmk_token_bytes(t.vocab, id);

    dmk_buf_append(out, bytes.data, bytes.len);
}

/* The answer when `damage` strikes before position `strike` of the prompt is computed. */
static void answer(void (*damage)(void), uint32_t strike, struct dmk_buf *out)
{
    const uint32_t n = (uint32_t)t.prompt.len;
    uint32_t pos = 0, next = 0;

    dmk_buf_reset(out);
    while (pos < n) {
        const uint32_t end = pos < strike ? strike : n;
        const uint32_t part = end - pos < CHUNK ? end - pos : CHUNK;

        if (pos == strike && damage) {
            damage();
        }
        next = run(t.prompt.data + pos, pos, part);
        pos += part;
    }
    for (uint32_t i = 0; i < MAX_ANSWER && next != ID_END; i++) {
        const uint32_t id = next;

        spell(id, out);
        next = run(&id, pos++, 1);
    }
}

/* A page of all full layers and heads becomes what src is; NULL: zeros. */
static void set_full_page(uint32_t page, const uint32_t *src)
{
    const struct dmk_kv_mem *mem = dmk_engine_kv(t.engine, 0);
    const struct dmk_kv_layout *l = &mem->layout;

    for (uint32_t layer = 0; layer < l->n_full_layers; layer++) {
        for (uint32_t head = 0; head < l->n_local_heads; head++) {
            char *at = (char *)mem->full + dmk_kv_full_offset(l, layer, head, page);

            if (src) {
                memcpy(at, (char *)mem->full + dmk_kv_full_offset(l, layer, head, *src),
                       l->page_bytes);
            } else {
                memset(at, 0, l->page_bytes);
            }
        }
    }
}

static void never_arrived(void)
{
    set_full_page(t.told_at / DMK_PAGE_TOKENS, NULL);
}

static void another_page_in_its_place(void)
{
    const uint32_t other = t.told_at / DMK_PAGE_TOKENS + 2;

    set_full_page(t.told_at / DMK_PAGE_TOKENS, &other);
}

/* In the code word's page keys and values are exchanged. */
static void keys_for_values(void)
{
    const struct dmk_kv_mem *mem = dmk_engine_kv(t.engine, 0);
    const struct dmk_kv_layout *l = &mem->layout;
    const uint32_t half = l->page_bytes / 2;
    char *copy = malloc(half);

    assert_non_null(copy);
    for (uint32_t layer = 0; layer < l->n_full_layers; layer++) {
        for (uint32_t head = 0; head < l->n_local_heads; head++) {
            char *at =
                (char *)mem->full + dmk_kv_full_offset(l, layer, head, t.told_at / DMK_PAGE_TOKENS);

            memcpy(copy, at, half);
            memcpy(at, at + half, half);
            memcpy(at + half, copy, half);
        }
    }
    free(copy);
}

/* The pages of the window change places: the ring is off by one. */
static void ring_off_by_one(void)
{
    const struct dmk_kv_mem *mem = dmk_engine_kv(t.engine, 0);
    const struct dmk_kv_layout *l = &mem->layout;
    char *first = malloc(l->page_bytes);

    assert_non_null(first);
    for (uint32_t layer = 0; layer < l->n_window_layers; layer++) {
        for (uint32_t head = 0; head < l->n_local_heads; head++) {
            char *at[DMK_WINDOW_RING];

            for (uint32_t i = 0; i < DMK_WINDOW_RING; i++) {
                at[i] = (char *)mem->window + dmk_kv_window_offset(l, layer, head, i);
            }
            memcpy(first, at[0], l->page_bytes);
            memcpy(at[0], at[1], l->page_bytes);
            memcpy(at[1], at[2], l->page_bytes);
            memcpy(at[2], first, l->page_bytes);
        }
    }
    free(first);
}

/* The whole prompt but for its last token is a prefill worker's, which is where pages are handed over. */
static uint32_t hand_over(void)
{
    return (uint32_t)t.prompt.len - 1;
}

static void untouched_is_right(void **state)
{
    struct dmk_buf text;

    (void)state;
    dmk_buf_init(&text, 0);
    answer(NULL, hand_over(), &text);
    assert_string_equal(text.data, EXPECTED);
    answer(NULL, t.told_at, &text);
    assert_string_equal(text.data, EXPECTED);
    dmk_buf_fini(&text);
}

static void damaged_is_wrong(void **state)
{
    const struct {
        const char *name;
        void (*damage)(void);
        uint32_t strike;
    } damages[] = {
        {"a page that never arrived", never_arrived, hand_over()},
        {"another page in its place", another_page_in_its_place, hand_over()},
        {"keys for values", keys_for_values, hand_over()},
        /* The word comes right behind the cut, so that what it is lies in the window alone. */
        {"the ring is off by one", ring_off_by_one, t.told_at},
    };
    struct dmk_buf text;

    (void)state;
    dmk_buf_init(&text, 0);
    for (size_t i = 0; i < sizeof(damages) / sizeof(damages[0]); i++) {
        answer(damages[i].damage, damages[i].strike, &text);
        print_message("%s: %s\n", damages[i].name, text.data);
        if (strcmp(text.data, EXPECTED) == 0) {
            fail_msg("%s was not noticed", damages[i].name);
        }
    }
    dmk_buf_fini(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(untouched_is_right),
        cmocka_unit_test(damaged_is_wrong),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
