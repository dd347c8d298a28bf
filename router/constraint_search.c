/* Letters, and the search for many texts; see constraint_search.h. */
#include "router/constraint_search.h"

#include <string.h>
#include "common/text/tokenizer.h"

#define LETTER_ID 256u /* letters from here on are token ids */

static const struct {
    const char *text;
    uint32_t id;
} controls[] = {
    {"<|channel|>", DMK_TOKEN_CHANNEL},     {"<|message|>", DMK_TOKEN_MESSAGE},
    {"<|start|>", DMK_TOKEN_START},         {"<|end|>", DMK_TOKEN_END},
    {"<|constrain|>", DMK_TOKEN_CONSTRAIN}, {"<|call|>", DMK_TOKEN_CALL},
    {"<|return|>", DMK_TOKEN_RETURN},
};
#define N_CONTROLS (sizeof(controls) / sizeof(controls[0]))
#define N_INNER    5u /* those that do not end the turn */

/* ---------------------------------------------------------------- letters */

/* The letter at text; how many bytes it takes goes to *ret_n. */
static uint32_t read_letter(const char *text, size_t *ret_n)
{
    for (size_t i = 0; i < N_CONTROLS; i++) {
        const size_t n = strlen(controls[i].text);

        if (strncmp(text, controls[i].text, n) == 0) {
            *ret_n = n;
            return LETTER_ID + controls[i].id;
        }
    }
    *ret_n = 1;
    return (uint8_t)text[0];
}

static void join_letter(struct dmk_build *b, uint32_t from, uint32_t letter, uint32_t to)
{
    if (letter < LETTER_ID) {
        dmk_build_bytes(b, from, (uint8_t)letter, (uint8_t)letter, to);
    } else {
        dmk_build_id(b, from, letter - LETTER_ID, to);
    }
}

uint32_t dmk_letters_behind(struct dmk_build *b, uint32_t from, const char *text)
{
    for (size_t n = 0; text && *text; text += n) {
        const uint32_t letter = read_letter(text, &n), next = dmk_build_node(b);

        join_letter(b, from, letter, next);
        from = next;
    }
    return from;
}

/* ---------------------------------------------------------------- free text up to one of several texts */

static uint32_t child_of(const struct dmk_search *s, uint32_t at, uint32_t letter)
{
    uint32_t c = s->at[at].child;

    while (c && s->at[c].letter != letter) {
        c = s->at[c].sibling;
    }
    return c;
}

bool dmk_search_add(struct dmk_search *s, const char *text, uint32_t hit)
{
    uint32_t at = 0;

    for (size_t n = 0; *text; text += n) {
        const uint32_t letter = read_letter(text, &n);
        uint32_t next = child_of(s, at, letter);

        if (!next) {
            if (s->n == DMK_SEARCH_MAX_LETTERS) {
                return false;
            }
            next = s->n++;
            s->at[next].letter = letter;
            s->at[next].sibling = s->at[at].child;
            s->at[at].child = next;
        }
        at = next;
    }
    s->at[at].hit = s->at[at].hit ? s->at[at].hit : hit + 1;
    return at > 0;
}

/* Where a letter leads: to the longest beginning of a text that what was read ends with. */
static uint32_t follow(const struct dmk_search *s, uint32_t at, uint32_t letter)
{
    for (;;) {
        const uint32_t next = child_of(s, at, letter);

        if (next || at == 0) {
            return next;
        }
        at = s->at[at].fail;
    }
}

/* In the order of length: a node's fail is shorter than it. */
static void find_fails(struct dmk_search *s)
{
    static _Thread_local uint32_t queue[DMK_SEARCH_MAX_LETTERS];
    uint32_t n = 0;

    for (uint32_t c = s->at[0].child; c; c = s->at[c].sibling) {
        queue[n++] = c;
    }
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t at = queue[i];

        for (uint32_t c = s->at[at].child; c; c = s->at[c].sibling) {
            s->at[c].fail = follow(s, s->at[at].fail, s->at[c].letter);
            if (!s->at[c].hit) {
                s->at[c].hit = s->at[s->at[c].fail].hit;
            }
            queue[n++] = c;
        }
    }
}

void dmk_search_join(struct dmk_build *b, struct dmk_search *s, uint32_t from, const uint32_t *hits,
                     uint32_t end)
{
    find_fails(s);
    for (uint32_t i = 0; i < s->n; i++) {
        s->at[i].node = dmk_build_node(b);
    }
    dmk_build_skip(b, from, s->at[0].node);
    for (uint32_t i = 0; i < s->n && !dmk_build_failed(b); i++) {
        if (s->at[i].hit) {
            continue;
        }
        if (end != DMK_BUILD_NO_MAX) {
            dmk_build_skip(b, s->at[i].node, end);
        }
        for (uint32_t letter = 0; letter < LETTER_ID + N_INNER; letter++) {
            const uint32_t l =
                letter < LETTER_ID ? letter : LETTER_ID + controls[letter - LETTER_ID].id;
            const uint32_t to = follow(s, i, l);

            join_letter(b, s->at[i].node, l,
                        s->at[to].hit ? hits[s->at[to].hit - 1] : s->at[to].node);
        }
    }
}
