/* Special tokens: ids 199998 to 201087 and their spellings. Pure functions, any thread.
 *
 * Most of them are reserved and spelled with their id. tiktoken knows 200018 by two spellings; it is
 * written as reserved and read as either. */
#include "common/text/vocab.h"
#include <stdio.h>

static const struct {
    uint32_t id;
    const char *text;
} names[] = {
    {DMK_TOKEN_START_OF_TEXT, "<|startoftext|>"},
    {DMK_TOKEN_END_OF_TEXT, "<|endoftext|>"},
    {DMK_TOKEN_RETURN, "<|return|>"},
    {DMK_TOKEN_CONSTRAIN, "<|constrain|>"},
    {DMK_TOKEN_CHANNEL, "<|channel|>"},
    {DMK_TOKEN_START, "<|start|>"},
    {DMK_TOKEN_END, "<|end|>"},
    {DMK_TOKEN_MESSAGE, "<|message|>"},
    {DMK_TOKEN_CALL, "<|call|>"},
};
#define N_NAMES (sizeof(names) / sizeof(names[0]))

static const char end_of_prompt[] = "<|endofprompt|>";
#define TOKEN_END_OF_PROMPT 200018u

void dmk_special_fill(struct dmk_special special[DMK_SPECIALS])
{
    for (uint32_t i = 0; i < DMK_SPECIALS; i++) {
        const int n = snprintf(special[i].text, sizeof(special[i].text), "<|reserved_%u|>",
                               DMK_TOKEN_FIRST_SPECIAL + i);

        special[i].len = (uint8_t)n;
    }
    for (size_t i = 0; i < N_NAMES; i++) {
        struct dmk_special *s = &special[names[i].id - DMK_TOKEN_FIRST_SPECIAL];

        s->len = (uint8_t)snprintf(s->text, sizeof(s->text), "%s", names[i].text);
    }
}

static bool starts_with(struct dmk_str text, const char *word, size_t len)
{
    return text.len >= len && memcmp(text.data, word, len) == 0;
}

uint32_t dmk_special_match(const struct dmk_vocab *vocab, struct dmk_str text, size_t *ret_len)
{
    static const char reserved[] = "<|reserved_";
    const size_t n_reserved = sizeof(reserved) - 1;

    for (size_t i = 0; i < N_NAMES; i++) {
        const struct dmk_special *s = &vocab->special[names[i].id - DMK_TOKEN_FIRST_SPECIAL];

        if (starts_with(text, s->text, s->len)) {
            *ret_len = s->len;
            return names[i].id;
        }
    }
    if (starts_with(text, end_of_prompt, sizeof(end_of_prompt) - 1)) {
        *ret_len = sizeof(end_of_prompt) - 1;
        return TOKEN_END_OF_PROMPT;
    }
    if (starts_with(text, reserved, n_reserved) && text.len >= n_reserved + 6) {
        uint32_t id = 0;

        for (size_t i = n_reserved; i < n_reserved + 6; i++) {
            if (text.data[i] < '0' || text.data[i] > '9') {
                return DMK_NO_TOKEN;
            }
            id = id * 10 + (uint32_t)(text.data[i] - '0');
        }
        if (id >= DMK_TOKEN_FIRST_SPECIAL && id < DMK_VOCAB_SIZE) {
            const struct dmk_special *s = &vocab->special[id - DMK_TOKEN_FIRST_SPECIAL];

            /* A token with a name of its own is not also spelled as reserved. */
            if (starts_with(text, s->text, s->len)) {
                *ret_len = s->len;
                return id;
            }
        }
    }
    return DMK_NO_TOKEN;
}
